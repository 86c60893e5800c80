"""The Triton attention behind the engine's contract: a work list for each window, three launches a layer."""

from collections.abc import Hashable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from batchrun_kernels.contract import Feature, KVLayer, KVPool, Layout, Mask, UnsupportedError, Work
from batchrun_kernels.pieces import Rules
from batchrun_kernels.triton.attend import attend_launch, empty_partials
from batchrun_kernels.triton.configs import KINDS, Tiles, architecture, tiles
from batchrun_kernels.triton.head_major import HeadMajor, as_slots
from batchrun_kernels.triton.lists import DeviceLists, to_device
from batchrun_kernels.triton.merge import merge_launch
from batchrun_kernels.triton.pool import Pool
from batchrun_kernels.worklist import Planner

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@dataclass(slots=True)
class TritonPlan:
    """A step's lists, one for all layers that are cut alike."""

    work: Work
    num_tokens: int
    lists: dict[Rules, DeviceLists]

    @property
    def shape(self) -> Hashable:
        """The buckets of every list, by the rules they were cut by."""
        return frozenset((rules, lists.shape) for rules, lists in self.lists.items())

    def refill(self, other: "TritonPlan") -> None:
        """Becomes `other`, of equal shape: one copy on the current stream for each of the lists."""
        assert self.shape == other.shape, (self.shape, other.shape)
        for rules, lists in self.lists.items():
            lists.refill(other.lists[rules])
        self.work, self.num_tokens = other.work, other.num_tokens


class TritonAttention:
    """Paged attention on a GPU, or on the CPU under Triton's interpreter.

    With `shares_prefixes` off, a row's result does not depend on the rows beside it, except that a chunk's length
    decides its tiles. How each layer wants a step to be cut is learned when it first attends, and remembered: from
    the second step on `plan` makes all lists. Raises UnsupportedError for a GPU that the table of tiles has not.
    """

    name = "triton"
    features: frozenset[Feature] = frozenset({"window", "softcap", "sinks"})
    layout: Layout = HeadMajor()
    supports_graphs = True
    runs_layers = False

    def __init__(self, device: torch.device, *, shares_prefixes: bool = True) -> None:
        self._device = device
        self._architecture = architecture(device)
        self._shares_prefixes = shares_prefixes
        self._planners: dict[Rules, Planner] = {}

    def fits(self, layer: KVLayer, dtype: torch.dtype) -> bool:
        if dtype not in _DTYPES:
            return False
        try:
            tiles(self._architecture, max(layer.key_dim, layer.value_dim), dtype)
        except UnsupportedError:
            return False
        return True

    def plan(self, work: Work) -> TritonPlan:
        # Learned in blocks of one size, the layers are known for blocks of any.
        known = dict.fromkeys(replace(rules, block_size=work.block_size) for rules in self._planners)
        return TritonPlan(work, sum(work.q_lens), {rules: self._listed(rules, work) for rules in known})

    def attend(
        self,
        q: Tensor,  # [num_rows, num_heads, head_dim]
        keys: Tensor,  # [num_blocks, kv_heads, block_size, head_dim]
        values: Tensor,  # [num_blocks, kv_heads, block_size, value_dim]
        plan: TritonPlan,
        mask: Mask,
    ) -> Tensor:
        """[num_rows, num_heads, value_dim], contiguous, in q's dtype."""
        return self.attend_pool(q, as_slots(KVPool(keys, values)), plan, mask)

    def attend_pool(self, q: Tensor, pool: Pool, plan: TritonPlan, mask: Mask) -> Tensor:
        """As `attend`, from a pool that may be quantised."""
        assert len(q) >= plan.num_tokens, f"{len(q)} rows of {plan.num_tokens} tokens"
        cut = tiles(self._architecture, max(q.shape[2], pool.values.shape[3]), pool.keys.dtype)
        rules = self._rules(cut, q.shape[1] // pool.keys.shape[2], plan.work.block_size, mask.window)
        if rules not in plan.lists:
            assert not _is_captured(q), f"a graph is captured of a layer that has not attended before: {rules}"
            plan.lists[rules] = self._listed(rules, plan.work)
        if q.stride(2) != 1:
            q = q.contiguous()
        # Rows without an item are written by nobody; in a graph, the step that is replayed may have more of them.
        is_full = len(q) == plan.num_tokens and not _is_captured(q)
        make = torch.empty if is_full else torch.zeros
        out = make(*q.shape[:2], pool.values.shape[3], dtype=q.dtype, device=q.device)
        attend_lists(q, pool, plan.lists[rules], mask, out, cut)
        return out

    def _listed(self, rules: Rules, work: Work) -> DeviceLists:
        planner = self._planners.setdefault(rules, Planner(rules))
        return to_device(planner.plan(work), self._device)

    def _rules(self, cut: Tiles, group: int, block_size: int, window: int | None) -> Rules:
        return Rules(
            group=cut.heads_together(group),
            block_size=block_size,
            wide_rows=cut.wide.rows,
            narrow_rows=cut.narrow.rows,
            window=window,
            run_len=cut.run_len,
            shares_prefixes=self._shares_prefixes,
        )


def attend_lists(q: Tensor, pool: Pool, lists: DeviceLists, mask: Mask, out: Tensor, cut: Tiles) -> None:
    """Fills the rows of `out` that the lists, made for tiles of `cut`, have items for."""
    partials = empty_partials(lists, q, pool.values.shape[3])
    for kind in KINDS:
        attend_launch(q, pool, lists, mask, out, partials, kind, cut).run()
    merge_launch(partials, lists, mask.sinks, out).run()


def _is_captured(q: Tensor) -> bool:
    return q.is_cuda and torch.cuda.is_current_stream_capturing()
