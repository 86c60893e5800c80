"""The words that the engine and the attention kernels share; see `Attention`."""

from dataclasses import dataclass
from typing import Any, Literal, Protocol

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
    block_table: Tensor  # int32 [num_items, max_blocks]
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


class Attention(Protocol):
    """Attention over the block table: what depends on the step is planned once and shared by all layers.

    Slots that no item's positions cover may hold anything, NaN included.
    """

    name: str
    features: frozenset[Feature]

    def plan(self, work: Work) -> Any:
        """Prepares a step; the result is for `attend` of the same implementation only."""
        ...

    def attend(
        self,
        q: Tensor,  # [num_tokens, num_heads, head_dim]
        keys: Tensor,  # [num_blocks, block_size, kv_heads, head_dim]
        values: Tensor,  # [num_blocks, block_size, kv_heads, value_dim]
        plan: Any,
        mask: Mask,
    ) -> Tensor:
        """[num_tokens, num_heads, value_dim], contiguous, in q's dtype; query head h reads kv head h // group."""
        ...
