"""Boxes: how the tensor memory accelerator of sm_90 and later fetches a tile whose blocks are consecutive.

A box spans that many blocks, one head of each, all slots of a block and all dimensions; what it has beyond the tensor's
end is zero. It is described on the host, in the launch's own arguments: nothing is allocated, and a captured launch
keeps its copy. Blocks need not lie side by side, only at equal distances, which those of any pool do.
"""

from dataclasses import dataclass

import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from batchrun_kernels.triton.pool import Pool

# The accelerator's own unit, in bytes: of addresses, of distances, and of the least that it fetches of a row.
_UNIT = 16


@dataclass(frozen=True, slots=True)
class Boxes:
    """Of a run of keys, and of the same run of values."""

    keys: TensorDescriptor
    values: TensorDescriptor


def boxes(pool: Pool, run_len: int) -> Boxes | None:
    """For runs of `run_len` keys, a multiple of the block size; None for memory that the accelerator cannot describe.

    Nor for a quantised pool: its keys and values pass through registers in any case.
    """
    block_size = pool.keys.shape[1]
    assert run_len % block_size == 0, (run_len, block_size)
    if pool.is_quantised or not all(_fits(one) for one in (pool.keys, pool.values)):
        return None
    return Boxes(*(_box(one, run_len // block_size) for one in (pool.keys, pool.values)))


def _fits(rows: Tensor) -> bool:
    """Of rows [num_blocks, block_size, kv_heads, dim]."""
    starts = (rows.data_ptr(), *(stride * rows.itemsize for stride in rows.stride()[:3]))
    return all(start % _UNIT == 0 for start in starts)


def _box(rows: Tensor, run_blocks: int) -> TensorDescriptor:
    heads_first = rows.transpose(1, 2)  # [num_blocks, kv_heads, block_size, dim]
    span = [run_blocks, 1, rows.shape[1], max(16, triton.next_power_of_2(rows.shape[3]))]
    return TensorDescriptor(heads_first, list(heads_first.shape), list(heads_first.stride()), span)
