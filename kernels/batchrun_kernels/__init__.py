"""Attention over a block table: one contract, a slow obvious reference, and what runs fast on a device.

Knows torch only; the engine (`batchrun`) imports this package, never the other way round.
"""

from batchrun_kernels.contract import (
    Attention,
    Feature,
    GraphPlan,
    KVLayer,
    KVPool,
    Layout,
    Mask,
    UnsupportedError,
    WholeLayer,
    Work,
)
from batchrun_kernels.select import check_kv_dtype, select

__all__ = [
    "Attention",
    "Feature",
    "GraphPlan",
    "KVLayer",
    "KVPool",
    "Layout",
    "Mask",
    "UnsupportedError",
    "WholeLayer",
    "Work",
    "check_kv_dtype",
    "select",
]
