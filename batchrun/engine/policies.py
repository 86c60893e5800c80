"""How a step's token budget is split: four ways, each a few facts that the scheduler follows.

`chunked` mixes prompt chunks with decodes (Sarathi-Serve, Agrawal et al., 2024); `prefill-first` spends the budget
on prompts before decodes; `fcfs` serves strictly by arrival; `static` fills a batch and runs it to its longest
row before the next one, as a baseline to compare with.
"""

from dataclasses import dataclass
from typing import Literal

Pass = Literal["decode", "prefill", "all", "admit"]
Schedule = Literal["chunked", "prefill-first", "fcfs", "static"]


@dataclass(frozen=True, slots=True)
class Policy:
    """`passes` spend the budget in this order. `look_ahead` rows past one that does not fit may be admitted.

    `shares_with_long` keeps a part of the budget from a long prompt's chunks while other rows wait;
    `admits_while_running` lets rows enter as others leave.
    """

    passes: tuple[Pass, ...]
    look_ahead: int
    shares_with_long: bool
    admits_while_running: bool


_LOOK_AHEAD = 32  # rows

POLICIES: dict[Schedule, Policy] = {
    "chunked": Policy(("decode", "prefill", "admit"), _LOOK_AHEAD, shares_with_long=True, admits_while_running=True),
    "prefill-first": Policy(
        ("prefill", "admit", "decode"), _LOOK_AHEAD, shares_with_long=False, admits_while_running=True
    ),
    "fcfs": Policy(("all", "admit"), 0, shares_with_long=False, admits_while_running=True),
    "static": Policy(("all", "admit"), 0, shares_with_long=False, admits_while_running=False),
}
