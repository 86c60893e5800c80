"""The words that the engine and the attention kernels share; see `Attention`."""

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any, Literal, Protocol, Self

import torch
from torch import Tensor

Feature = Literal["window", "softcap", "sinks"]


class UnsupportedError(Exception):
    """No implementation for this device has what is asked; the message names what is lacking."""


@dataclass(frozen=True, slots=True)
class Work:
    """One step's queries, item by item, and where each item's keys and values lie.

    The rows of q are the items one after another. Item i has `q_lens[i]` queries; they are the last of its
    `kv_lens[i]` positions, so that its first query stands at position `kv_lens[i] - q_lens[i]`. Position p lies
    in pool block `block_table[i, p // block_size]` at offset `p % block_size`. Entries behind the item's last
    block are never read.
    """

    q_lens: tuple[int, ...]
    kv_lens: tuple[int, ...]
    block_table: Tensor  # int32 [num_items, max_blocks], on the host
    block_size: int


@dataclass(frozen=True, slots=True)
class Mask:
    """What a layer does to the scores `scale * q.k`; every query sees itself and the positions before it.

    `window` w: only the w last positions, its own included. `softcap` c: scores become c * tanh(score / c).
    `sinks`: one more score a head, which takes part in the softmax and has no value.
    """

    scale: float
    window: int | None = None
    softcap: float | None = None
    sinks: Tensor | None = None  # [num_heads]

    @property
    def features(self) -> frozenset[Feature]:
        found: dict[Feature, object] = {"window": self.window, "softcap": self.softcap, "sinks": self.sinks}
        return frozenset(name for name, value in found.items() if value is not None)


@dataclass(frozen=True, slots=True)
class KVLayer:
    """The shape of one layer's keys and values."""

    num_kv_heads: int
    key_dim: int
    value_dim: int

    def block_bytes(self, block_size: int, dtype: torch.dtype) -> int:
        return block_size * self.num_kv_heads * (self.key_dim + self.value_dim) * dtype.itemsize


@dataclass(frozen=True, slots=True)
class KVPool:
    """One layer's keys and values, block by block: the first dimension of both counts blocks.

    What the other dimensions mean is the layout's business; whole blocks may be copied by anybody.
    """

    keys: Tensor  # [num_blocks, ...]
    values: Tensor  # [num_blocks, ...]


class Layout(Protocol):
    """How an attention wants keys and values to lie in a pool; slot s is offset s % block_size of its block."""

    def allocate(self, num_blocks: int, block_size: int, layer: KVLayer, place: Tensor) -> KVPool:
        """Memory that is not initialised, in the dtype and on the device of `place`."""
        ...

    def write(
        self,
        pool: KVPool,
        key: Tensor,  # [num_tokens, kv_heads, key_dim]
        value: Tensor,  # [num_tokens, kv_heads, value_dim]
        slots: Tensor,  # int64 [num_tokens]
    ) -> None:
        """Puts every token's key and value into its slot; tokens that pad a batch may share one nobody reads."""
        ...

    def copy_slots(
        self,
        pool: KVPool,
        sources: Tensor,  # int64 [num_copies]
        targets: Tensor,  # int64 [num_copies]
    ) -> None:
        """Every source is read before a target is written."""
        ...


class GraphPlan(Protocol):
    """A step's plan on a device. A graph captured with it reads its memory: keep it as long as the graph."""

    @property
    def shape(self) -> Hashable:
        """Equal for two plans that one captured graph can serve, with `refill`."""
        ...

    def refill(self, other: Self) -> None:
        """Becomes `other`, of equal shape, in place: queues copies on the current stream, allocates nothing."""
        ...


class WholeLayer(Protocol):
    """A decoder layer that a device computes in one call."""

    @property
    def mask(self) -> Mask: ...

    def __call__(
        self,
        x: Tensor,  # [1, num_tokens, width]
        cos: Tensor,  # [1, num_tokens, turned]
        sin: Tensor,  # [1, num_tokens, turned]
        pool: KVPool,
        slots: Tensor,  # int64 [num_tokens]
        copies: tuple[Tensor, Tensor],  # int64 [num_copies], source and target slots, no slot being both
        plan: Any,
        wanted: Tensor | None,  # int64 [num_wanted], tokens; None: all
    ) -> Tensor:
        """[1, num_tokens, width]; keys and values are in their slots, and slots are copied before it attends.

        What is not wanted may be zero.
        """
        ...


class Attention(Protocol):
    """Attention over the block table: what depends on the step is planned once and shared by all layers.

    Slots that no item's positions cover may hold anything, NaN included. q may have more rows than the work has
    tokens: the rows behind pad the batch, are not read, and their results are zero.

    Where `supports_graphs`, plans are `GraphPlan`s, and `attend` and the layout only queue work on the current
    stream, as long as every layer has attended once, outside of a graph, before the plan is made: in the first step
    kernels are compiled and it becomes known which layers there are.

    Where `runs_layers`, a `WholeLayer` of its device's kernels may be called with its pools and plans.
    """

    name: str
    features: frozenset[Feature]
    layout: Layout
    supports_graphs: bool
    runs_layers: bool

    def fits(self, layer: KVLayer, dtype: torch.dtype) -> bool:
        """Whether it can attend to such keys and values."""
        ...

    def plan(self, work: Work) -> Any:
        """Prepares a step; the result is for `attend` of the same implementation only."""
        ...

    def attend(
        self,
        q: Tensor,  # [num_rows, num_heads, head_dim], num_rows >= num_tokens
        keys: Tensor,  # as the layout made them
        values: Tensor,
        plan: Any,
        mask: Mask,
    ) -> Tensor:
        """[num_rows, num_heads, value_dim], contiguous, in q's dtype; query head h reads kv head h // group."""
        ...
