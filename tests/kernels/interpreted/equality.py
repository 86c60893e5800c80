"""The Triton kernels' part of `tests.kernels.equality`, as JSON; to be run with TRITON_INTERPRET=1."""

import json
import sys
from dataclasses import replace

import torch

from batchrun_kernels import UnsupportedError, check_kv_dtype
from batchrun_kernels.triton.attention import TritonAttention
from batchrun_kernels.triton.configs import architecture, tiles
from batchrun_kernels.triton.pool import Pool
from tests.kernels.equality import CASES, DTYPES, Case, expected_of, largest_error
from tests.kernels.interpreted.rounding import repair
from tests.kernels.interpreted.test_attend import run
from tests.kernels.random_steps import random_step
from tests.kernels.steps import Step, cast


def measure(case: Case, dtype: torch.dtype, device: torch.device) -> float | str:
    """The largest error with queries of `dtype`, or why there is none."""
    step = cast(case.step, dtype)
    pool = Pool(step.keys, step.values)
    if case.stored is not None and case.stored.itemsize > 1:
        try:
            check_kv_dtype(TritonAttention(device), dtype, case.stored)
        except UnsupportedError as error:
            return str(error)
    elif case.stored is not None:
        pool, step = quantised(case.step, case.stored)
        step = replace(step, q=step.q.to(dtype))
    got = run(step, pool, case.mask, case.own_rules, device)
    return largest_error(got, expected_of(step, case.mask))


def quantised(step: Step, dtype: torch.dtype) -> tuple[Pool, Step]:
    """A scale for each token and head of the keys, one for all of the values; unread scales are NaN as well.

    With the step whose keys and values are exactly those of the pool.
    """
    most = 127 if dtype == torch.int8 else 448
    key_scales = step.keys.abs().amax(-1) / most
    value_scale = step.values.nan_to_num().abs().max() / most
    keys = (step.keys / key_scales[..., None]).nan_to_num()
    values = (step.values / value_scale).nan_to_num()
    keys, values = ((one.round() if dtype == torch.int8 else one).to(dtype) for one in (keys, values))
    pool = Pool(keys, values, key_scales, value_scale.expand(key_scales.shape))
    return pool, replace(step, keys=keys.float() * key_scales[..., None], values=values.float() * value_scale)


def random_error(seed: int, device: torch.device) -> float:
    """Of a random step, in the table's tiles."""
    case = random_step(seed, most_sequences=4)
    cut = tiles(architecture(device), case.step.q.shape[2], torch.float32)
    rules = replace(case.rules, wide_rows=cut.wide.rows, run_len=cut.run_len)
    got = run(case.step, Pool(case.step.keys, case.step.values), case.mask, rules, device)
    return largest_error(got, expected_of(case.step, case.mask))


def main(num_random: int) -> None:
    repair()
    cpu = torch.device("cpu")
    table = {
        name: {"triton": {str(dtype): measure(case, dtype, cpu) for dtype in DTYPES}} for name, case in CASES.items()
    }
    print(json.dumps({"table": table, "random": [random_error(seed, cpu) for seed in range(num_random)]}))


if __name__ == "__main__":
    main(int(sys.argv[1]))
