"""The largest error of every attention against float64, feature by feature and dtype by dtype, as a table.

    python -m tests.kernels.equality [RANDOM_STEPS] [OF_THEM_INTERPRETED]

Then random trees, splits and windows: all of them through the attentions in C and torch and through the planner, some
through the Triton kernels. Those run in Triton's interpreter, in a process of their own.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from batchrun_kernels import Attention, KVLayer, Mask, UnsupportedError, check_kv_dtype, native
from batchrun_kernels.cpu import GatherAttention
from batchrun_kernels.native_attention import NativeAttention
from batchrun_kernels.pieces import Rules
from batchrun_kernels.reference import ReferenceAttention
from batchrun_kernels.worklist import Planner
from tests.kernels.executor import execute
from tests.kernels.interpreted.steps import Shape, make_step
from tests.kernels.random_steps import random_step
from tests.kernels.steps import Step, attend, cast
from tests.kernels.worklists import check

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
# Values reach 4 and outputs 3.9. float32: sums of up to 190 terms. Halves: one rounding of the weights and one of the
# result, each half a unit in the last place of a number below 4 (2**-9, 2**-6).
ATOL = {torch.float32: 3e-6, torch.float16: 2**-9, torch.bfloat16: 2**-6}

# A lone row, decode rows over two levels of shared blocks, a later chunk, a whole prompt.
LENS, SHARED = ((1, 1), (1, 63), (1, 50), (1, 41), (7, 38), (19, 19)), (0, 9, 9, 4, 0)
_WHOLE = Rules(group=3, block_size=4, wide_rows=32, shares_prefixes=False)
_SPLIT = replace(_WHOLE, wide_piece=24, narrow_piece=20)
_TREE = replace(_WHOLE, shares_prefixes=True, min_shared_rows=6, min_shared_len=8)


@dataclass(frozen=True, slots=True)
class Case:
    """`stored` is the dtype of keys and values; None: that of the queries. Of one byte, they are quantised.

    `run_blocks` of a sequence are consecutive, which is a tile of the interpreter's.
    """

    window: int | None = None
    softcap: float | None = None
    has_sinks: bool = False
    shape: Shape = Shape()  # noqa: RUF009  (frozen)
    rules: Rules = _WHOLE
    stored: torch.dtype | None = None
    run_blocks: int = 1

    @property
    def step(self) -> Step:
        """float32."""
        shared = SHARED if self.rules.shares_prefixes else ()
        return make_step(LENS, self.shape, shared=shared, run_blocks=self.run_blocks)

    @property
    def mask(self) -> Mask:
        sinks = torch.linspace(-2.0, 3.0, self.shape.heads) if self.has_sinks else None
        return Mask(0.35, self.window, self.softcap, sinks)

    @property
    def own_rules(self) -> Rules:
        group = self.shape.heads // self.shape.kv_heads
        return replace(self.rules, group=group, block_size=self.shape.block_size, window=self.window)


_ALL = Case(window=13, softcap=1.5, has_sinks=True, rules=replace(_TREE, wide_piece=24, narrow_piece=20))
CASES = {
    "plain": Case(),
    "window": Case(window=9),
    "softcap": Case(softcap=1.5),
    "sinks": Case(has_sinks=True),
    "shared prefixes": Case(rules=_TREE),
    "split pieces": Case(rules=_SPLIT),
    "all of these": _ALL,
    "head_dim 5, values of 8": replace(_ALL, shape=Shape(head_dim=5, value_dim=8)),
    "head_dim 80": replace(_ALL, shape=Shape(head_dim=80, value_dim=80)),
    "values of 3": replace(_ALL, shape=Shape(value_dim=3)),
    "group of 1, blocks of 16": replace(_ALL, shape=Shape(heads=2, block_size=16)),
    "group of 7, blocks of 1": replace(_ALL, shape=Shape(heads=7, kv_heads=1, block_size=1)),
    "blocks in runs": replace(_ALL, rules=replace(_ALL.rules, run_len=16), run_blocks=4),
    "float16 keys and values": replace(_ALL, stored=torch.float16),
    "int8 keys and values": replace(_ALL, stored=torch.int8),
    "float8 keys and values": replace(_ALL, stored=torch.float8_e4m3fn),
}


def largest_error(got: Tensor, expected: Tensor) -> float:
    """NaN if anything is NaN."""
    return float((got.double() - expected.double()).abs().max())


def expected_of(step: Step, mask: Mask) -> Tensor:
    """float64, of inputs as they are in their dtype."""
    return attend(ReferenceAttention(), cast(step, torch.float64), mask)


def native_forms(step: Step) -> Iterator[str]:
    """Sets the C library to each of its forms, where there is one and it can attend to the step's keys and values."""
    library = native.find()
    if library is None or native_refusal(step) is not None:
        return
    try:
        for name in native.INSTRUCTIONS:
            if native.limit(library, name) == name:
                yield name
    finally:
        native.limit(library, native.INSTRUCTIONS[-1])


def native_refusal(step: Step) -> str | None:
    """Why the attention in C is not chosen for the step."""
    layer = KVLayer(step.keys.shape[2], step.keys.shape[3], step.values.shape[3])
    return None if NativeAttention().fits(layer, step.keys.dtype) else str(NativeAttention.__doc__)


Row = dict[str, dict[str, float | str]]  # by implementation and dtype: the largest error, or why it is refused


def measure(case: Case) -> Row:
    """Of what runs in this process."""
    row: Row = {"torch": {}, **{f"C {name}": {} for name in native.INSTRUCTIONS}}
    for dtype in DTYPES:
        step = cast(case.step, dtype)
        row["torch"][str(dtype)] = _error(GatherAttention(), step, case)
        forms = {form: _error(NativeAttention(), step, case) for form in native_forms(step)}
        refusal = native_refusal(step) or "not built, or without these instructions"
        for form in native.INSTRUCTIONS:
            row[f"C {form}"][str(dtype)] = forms.get(form, refusal)
    if case.stored is None:
        listed = Planner(case.own_rules).plan(case.step.work)
        check(listed, case.step.work, case.own_rules)
        got = execute(listed, case.step.q, case.step.keys, case.step.values, case.mask)
        row["list"] = {str(torch.float32): largest_error(got, expected_of(case.step, case.mask))}
    return row


def _error(attention: Attention, step: Step, case: Case) -> float | str:
    """The largest error, or why there is none."""
    stored = case.stored or step.keys.dtype
    try:
        check_kv_dtype(attention, step.q.dtype, stored)
    except UnsupportedError as error:
        return str(error)
    rounded = replace(step, keys=step.keys.to(stored).to(step.q.dtype), values=step.values.to(stored).to(step.q.dtype))
    return largest_error(attend(attention, step, case.mask, case.stored), expected_of(rounded, case.mask))


def interpreted(num_random: int) -> tuple[dict[str, Row], list[float]]:
    """The Triton kernels' rows of the table, and their errors over random steps."""
    env = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-m", "tests.kernels.interpreted.equality", str(num_random)]
    run = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr[-4000:]
    found = json.loads(run.stdout)
    return found["table"], found["random"]


def random_errors(num_steps: int) -> dict[str, tuple[int, float]]:
    """By implementation, how many random steps it did, and its largest error in any."""
    found: dict[str, list[float]] = {
        name: [] for name in ("list", "torch", *(f"C {name}" for name in native.INSTRUCTIONS))
    }
    for seed in range(num_steps):
        case = random_step(seed)
        step, expected = case.step, expected_of(case.step, case.mask)
        listed = Planner(case.rules).plan(step.work)
        check(listed, step.work, case.rules)
        found["list"].append(largest_error(execute(listed, step.q, step.keys, step.values, case.mask), expected))
        found["torch"].append(largest_error(attend(GatherAttention(), step, case.mask), expected))
        for form in native_forms(step):
            found[f"C {form}"].append(largest_error(attend(NativeAttention(), step, case.mask), expected))
    return {name: (len(errors), max(errors, default=0.0)) for name, errors in found.items()}


def main(num_random: int = 1000, num_interpreted: int = 60) -> None:
    table = {name: measure(case) for name, case in CASES.items()}
    triton, errors = interpreted(num_interpreted)
    columns = ("list", *(f"C {name}" for name in reversed(native.INSTRUCTIONS)), "torch", "triton")
    names = {torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16"}
    shown = [(column, dtype) for column in columns for dtype in DTYPES if column != "list" or dtype == torch.float32]
    shown = [(column, dtype) for column, dtype in shown if not column.startswith("C ") or dtype == torch.float32]
    print(f"{'largest error against float64':27}" + "".join(f"{f'{c} {names[d]}':>16}" for c, d in shown))
    reasons: dict[str, str] = {}
    for name, row in table.items():
        cells = []
        for column, dtype in shown:
            found = {**row, **triton[name]}.get(column, {}).get(str(dtype), "")
            if isinstance(found, str) and found:
                reasons.setdefault(found, f"({len(reasons) + 1})")
            cells.append(f"refused {reasons[found]}" if isinstance(found, str) and found else _number(found))
        print(f"{name:27}" + "".join(f"{cell:>16}" for cell in cells))
    print("\n".join(f"{number} {reason}" for reason, number in reasons.items()))
    print("C for queries in float16 and bfloat16: refused.", native_refusal(cast(CASES["plain"].step, torch.bfloat16)))
    print(
        "list: the work list carried out in numpy and float64; every list is also counted through, position by position"
    )
    print(f"\nrandom trees, splits and windows, float32{'steps':>10}{'largest error':>16}")
    for name, (num, error) in {**random_errors(num_random), "triton": (len(errors), max(errors))}.items():
        print(f"{name:41}{num:>10}{error:16.1e}")


def _number(found: float | str) -> str:
    return f"{found:.1e}" if isinstance(found, float) else found


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
