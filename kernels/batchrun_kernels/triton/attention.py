"""The Triton attention behind the engine's contract: a work list for each window, three launches a layer."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from batchrun_kernels.contract import Feature, Mask, Work
from batchrun_kernels.pieces import Rules
from batchrun_kernels.triton.attend import attend_launch, empty_partials
from batchrun_kernels.triton.configs import architecture, tile
from batchrun_kernels.triton.lists import DeviceLists, to_device
from batchrun_kernels.triton.merge import merge_launch
from batchrun_kernels.triton.pool import Pool
from batchrun_kernels.worklist import Planner


@dataclass(frozen=True, slots=True)
class TritonPlan:
    """A step; its lists are made by the first layer of each shape and window, for all that are alike."""

    work: Work
    lists: dict[Rules, DeviceLists] = field(default_factory=dict)


class TritonAttention:
    """Paged attention on a GPU, or on the CPU under Triton's interpreter.

    With `shares_prefixes` off, a row's result does not depend on the rows beside it, except that a chunk's length
    decides its tiles.
    """

    name = "triton"
    features: frozenset[Feature] = frozenset({"window", "softcap", "sinks"})

    def __init__(self, device: torch.device, *, shares_prefixes: bool = True) -> None:
        self._device = device
        self._architecture = architecture(device)
        self._shares_prefixes = shares_prefixes
        self._planners: dict[Rules, Planner] = {}

    def plan(self, work: Work) -> TritonPlan:
        return TritonPlan(work)

    def attend(
        self,
        q: Tensor,  # [num_tokens, num_heads, head_dim]
        keys: Tensor,  # [num_blocks, block_size, kv_heads, head_dim]
        values: Tensor,  # [num_blocks, block_size, kv_heads, value_dim]
        plan: TritonPlan,
        mask: Mask,
    ) -> Tensor:
        """[num_tokens, num_heads, value_dim], contiguous, in q's dtype."""
        return self.attend_pool(q, Pool(keys, values), plan, mask)

    def attend_pool(self, q: Tensor, pool: Pool, plan: TritonPlan, mask: Mask) -> Tensor:
        """As `attend`, from a pool that may be quantised."""
        rules = self._rules(q, pool, plan.work.block_size, mask.window)
        if rules not in plan.lists:
            planner = self._planners.setdefault(rules, Planner(rules))
            plan.lists[rules] = to_device(planner.plan(plan.work), self._device)
        lists = plan.lists[rules]
        if q.stride(2) != 1:
            q = q.contiguous()
        out = torch.empty(*q.shape[:2], pool.values.shape[3], dtype=q.dtype, device=q.device)
        partials = empty_partials(lists, q, pool.values.shape[3])
        attend_launch(q, pool, lists, mask, out, partials, "wide", self._architecture).run()
        attend_launch(q, pool, lists, mask, out, partials, "narrow", self._architecture).run()
        merge_launch(partials, lists, mask.sinks, out).run()
        return out

    def _rules(self, q: Tensor, pool: Pool, block_size: int, window: int | None) -> Rules:
        head_dim = max(q.shape[2], pool.values.shape[3])
        wide, narrow = (tile(self._architecture, head_dim, pool.keys.dtype, kind) for kind in ("wide", "narrow"))
        return Rules(
            group=q.shape[1] // pool.keys.shape[2],
            block_size=block_size,
            wide_rows=wide.rows,
            narrow_rows=narrow.rows,
            window=window,
            shares_prefixes=self._shares_prefixes,
        )
