"""What is estimated is what the real scheduler would take: all of it, or a sample that stands for all."""

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchrun import planning
from batchrun.engine.radix import common_len
from batchrun.engine.request import SamplingParams
from batchrun.executors import local
from batchrun.plan.plan import Plan
from batchrun.stop import StopRequest
from batchrun.tune import simulation as subject
from batchrun.tune.imagined import ExpectedRows
from batchrun.tune.profile import save
from batchrun.tune.simulation import Estimate, estimate
from tests.run.conftest import EchoJob, ignore
from tests.tune.devices import TimedEcho
from tests.tune.profiles import make_profile

MakeJob = Callable[..., EchoJob]
POOL_BLOCKS = 4096
PROFILE = make_profile(pool_bytes=POOL_BLOCKS * 16 * 8)


def planned(job: EchoJob, **options: Any) -> Plan:
    return planning.plan(job.job(**options), ignore, StopRequest())


def estimated(job: EchoJob, **options: Any) -> Estimate:
    return estimate(job.job(**options), planned(job, **options), PROFILE)


@pytest.mark.parametrize(
    "options",
    [
        {"max_tokens": 40},
        {"max_tokens": 7, "schedule": "prefill-first"},
        {"max_tokens": 7, "max_num_seqs": 9, "max_num_batched_tokens": 63},
        {"max_tokens": 16, "prefix_caching": "off"},
        {"max_tokens": 100, "kv_cache_memory": 8 * 16 * 40, "swap_space": 0},
    ],
)
def test_the_time_is_that_of_the_steps_that_really_run(
    echo_job: MakeJob, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], cache: Path
) -> None:
    """The whole job through worker, engine and scheduler, on a device with the clock that the estimate imagines."""
    job = echo_job(300)
    options = options | {"ignore_eos": True}
    save(cache, PROFILE)
    expected = estimated(job, **options)
    num_blocks = options.get("kv_cache_memory", POOL_BLOCKS * 16 * 8) // (16 * 8)
    device = TimedEcho(num_blocks)
    monkeypatch.setattr(local, "build_runner", lambda job, checkpoint, place: device)
    outcome = job.submit(**options)
    assert expected.run_s == pytest.approx(device.now_s)
    assert expected.at_most_s == expected.run_s
    assert (expected.steps, expected.computed_tokens, expected.output_tokens) == (
        outcome.steps,
        sum(batch.num_tokens for batch in device.batches) - outcome.recomputed_tokens,
        outcome.output_tokens,
    )
    assert (expected.num_simulated, expected.are_lengths_known) == (len(set(job.prompts)), True)


def test_the_same_plan_gives_the_same_estimate(echo_job: MakeJob) -> None:
    job = echo_job(100)
    assert estimated(job) == estimated(job)


def test_outputs_that_may_end_are_expected_to_be_half_as_long(echo_job: MakeJob) -> None:
    job = echo_job(100)
    free, half, whole = (
        estimated(job, max_tokens=64),
        estimated(job, max_tokens=32, ignore_eos=True, overwrite=True),
        estimated(job, max_tokens=64, ignore_eos=True, overwrite=True),
    )
    assert not free.are_lengths_known
    assert (free.run_s, free.at_most_s) == (half.run_s, whole.run_s)
    assert free.output_tokens == half.output_tokens


def test_a_sample_stands_for_all(echo_job: MakeJob, monkeypatch: pytest.MonkeyPatch) -> None:
    job = echo_job(4000)
    options = {"max_tokens": 16, "ignore_eos": True}
    monkeypatch.setattr(subject, "_MOST_WORK", 1_000_000)
    whole = estimated(job, **options)
    monkeypatch.setattr(subject, "_MOST_WORK", 50_000)
    sampled = estimated(job, **options)
    assert sampled.num_simulated == 5 * 256 < whole.num_simulated == len(set(job.prompts))
    assert sampled.run_s == pytest.approx(whole.run_s, rel=0.05)
    assert sampled.steps == pytest.approx(whole.steps, rel=0.05)
    assert sampled.computed_tokens == pytest.approx(whole.computed_tokens, rel=1e-9)
    assert sampled.output_tokens == whole.output_tokens


def test_long_outputs_are_followed_for_a_while_only(echo_job: MakeJob, monkeypatch: pytest.MonkeyPatch) -> None:
    job = echo_job(72)
    options = {"max_tokens": 2000, "ignore_eos": True}
    monkeypatch.setattr(subject, "_MOST_WORK", 1_000_000)
    whole = estimated(job, **options)
    monkeypatch.setattr(subject, "_MOST_WORK", 20_000)
    cut = estimated(job, **options)
    assert cut.steps == pytest.approx(whole.steps, rel=0.05)
    assert cut.run_s == pytest.approx(whole.run_s, rel=0.1)


def test_stretches_share_what_their_rows_share(echo_job: MakeJob, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a stretch ends and the next begins, far behind it in the plan."""
    monkeypatch.setattr(subject, "_STRETCH", 7)
    monkeypatch.setattr(subject, "_MOST_WORK", 3000)
    plan = planned(echo_job(400), max_tokens=16)
    rows = ExpectedRows(SamplingParams(), plan.summary.longest_len)
    requests = list(rows.requests(plan, subject._stretches(plan.summary)))
    assert 14 < len(requests) < 100
    shared = [common_len(one.token_ids, other.token_ids) for one, other in pairwise(requests)]
    assert [request.keep_len for request in requests[:-1]] == shared


def test_rows_have_lengths_of_their_own(echo_job: MakeJob) -> None:
    job = echo_job(20)
    lengths = np.arange(1, 21)
    params = [f'{{"max_tokens": {length}, "ignore_eos": true}}' for length in lengths]
    pq.write_table(pa.table({"prompt": [f"{n} is a number" for n in range(20)], "params": params}), job.source)
    found = estimated(job, params_col="params")
    assert (found.output_tokens, found.are_lengths_known) == (lengths.sum(), True)


def test_failed_rows_take_no_time(echo_job: MakeJob) -> None:
    job = echo_job(3)
    assert estimated(job, max_model_len=2) == Estimate(0.0, 0.0, 5.0, True, 0, 0, 0, 0, 0, PROFILE.label)


def test_a_row_that_does_not_fit_the_pool_is_estimated_all_the_same(echo_job: MakeJob) -> None:
    assert estimated(echo_job(3), kv_cache_memory=1).run_s > 0


def test_the_most_that_the_pool_holds_between_two_steps_is_told(echo_job: MakeJob) -> None:
    job, options = echo_job(1), {"max_tokens": 33, "ignore_eos": True}
    found = estimated(job, **options)
    # Before the last step, which computes the last but one token.
    num_tokens = planned(job, **options).summary.longest_len - 2
    assert found.peak_kv_bytes == -(-num_tokens // 16) * 16 * 8
