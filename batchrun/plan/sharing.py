"""Whether rows share the keys and values of equal prefixes: as the job says, or by what the plan knows of them."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from batchrun.option_types import PrefixCaching
    from batchrun.plan.plan import PlanSummary

# Of the prompt tokens. Keeping prefixes takes some 0.3 microseconds a prompt token, computing one some 50 on a GPU with
# 7 billion parameters: where fewer are shared, keeping them takes longer than it saves.
_WORTH_IT = 0.005


@dataclass(frozen=True, slots=True)
class Sharing:
    """Whether rows share prefixes. `reason` says why they do not, unless the job has said so itself."""

    is_on: bool
    reason: str = ""


def decide(mode: "PrefixCaching", summary: "PlanSummary") -> Sharing:
    """The same for every process of a job: it depends on nothing but the job and its plan."""
    prompt_tokens, saved_tokens = summary.prompt_tokens, summary.saved_tokens
    if summary.has_states:
        return Sharing(False, "the model keeps states, which belong to whole prefixes and not to blocks of them")
    if mode != "auto":
        return Sharing(mode == "on")
    if summary.task == "choose":  # the chains of a row's choices stand behind one prompt
        return Sharing(True)
    if saved_tokens >= _WORTH_IT * prompt_tokens:
        return Sharing(True)
    return Sharing(
        False,
        f"only {saved_tokens:,} of {prompt_tokens:,} prompt tokens are shared, less than {_WORTH_IT:.1%}; "
        "--prefix-caching on shares them all the same",
    )
