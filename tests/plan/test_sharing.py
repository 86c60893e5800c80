"""When rows share prefixes, and what is said when they do not."""

from dataclasses import replace

import pytest

from batchrun.job import PrefixCaching
from batchrun.plan.plan import PlanSummary
from batchrun.plan.sharing import Sharing, decide


def summary(prompt_tokens: int, saved_tokens: int) -> PlanSummary:
    return PlanSummary(
        num_rows=7, num_unique=7, num_duplicates=0, errors={}, error_examples={}, prompt_tokens=prompt_tokens,
        unique_prompt_tokens=prompt_tokens - saved_tokens, duplicate_tokens=0, max_tokens_total=63, longest_prompt=63,
        longest_prompt_row=0, longest_len=111, kv_bytes_per_token=8, peak_kv_bytes=888, prompt_source="", sample="",
        sample_row=0,
    )  # fmt: skip


@pytest.mark.parametrize("saved_tokens", [0, 1, 499, 500, 100_000])
def test_the_job_may_say_so_itself(saved_tokens: int) -> None:
    assert decide("on", summary(100_000, saved_tokens)) == Sharing(True)
    assert decide("off", summary(100_000, saved_tokens)) == Sharing(False)


def test_auto_shares_what_is_half_a_percent_of_the_prompts() -> None:
    assert decide("auto", summary(100_000, 500)) == Sharing(True)
    assert decide("auto", summary(100_000, 499)) == Sharing(
        False,
        "only 499 of 100,000 prompt tokens are shared, less than 0.5%; --prefix-caching on shares them all the same",
    )


@pytest.mark.parametrize("mode", ["auto", "on", "off"])
def test_states_are_not_shared_whatever_the_job_says(mode: PrefixCaching) -> None:
    sharing = decide(mode, replace(summary(100_000, 90_000), has_states=True))
    assert sharing == Sharing(False, "the model keeps states, which belong to whole prefixes and not to blocks of them")


def test_choices_of_a_row_share_its_prompt_whatever_the_rows_share() -> None:
    assert decide("auto", replace(summary(100_000, 0), task="choose")) == Sharing(True)
    assert decide("off", replace(summary(100_000, 0), task="choose")) == Sharing(False)


def test_no_prompts_need_no_reason() -> None:
    assert decide("auto", summary(0, 0)) == Sharing(True)
