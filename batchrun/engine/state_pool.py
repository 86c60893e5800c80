"""The states of sequences: what layers that do not attend keep of a sequence so far, of one size however long it is.

Owns the tensors. Which slot is whose is the scheduler's business: a step tells its items' slots.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from batchrun.engine.batch import ForwardBatch
from batchrun.engine.queues import to_device
from batchrun_kernels import Work


@dataclass(frozen=True, slots=True)
class Windows:
    """Where each token's window of the last `width` tokens of its own sequence lies, and what remains of an item.

    Both name rows of a matrix: `width - 1` rows of state for each item, and below them the step's tokens.
    """

    taps: Tensor  # int64 [width, num_tokens], the token itself last
    last: Tensor  # int64 [num_items, width - 1], the next state

    @classmethod
    def of(cls, work: Work, width: int, device: torch.device) -> "Windows":
        q_lens = np.array(work.q_lens, np.int64)
        num_items, state_len = len(q_lens), width - 1
        firsts = np.cumsum(q_lens) - q_lens
        owners = np.repeat(np.arange(num_items), q_lens)
        places = np.arange(q_lens.sum()) - firsts[owners]  # in the item
        taps = np.arange(-state_len, 1)[:, None] + places
        last = q_lens[:, None] + np.arange(-state_len, 0)
        at_taps = np.where(taps < 0, (owners + 1) * state_len + taps, num_items * state_len + firsts[owners] + taps)
        states_end, begin = np.arange(1, num_items + 1)[:, None] * state_len, num_items * state_len + firsts[:, None]
        at_last = np.where(last < 0, states_end + last, begin + last)
        return cls(to_device(at_taps, device), to_device(at_last, device))


@dataclass(frozen=True, slots=True)
class Group:
    """The items of a step that have as many tokens, and where these are."""

    items: Tensor  # int64 [num_items]
    tokens: Tensor  # int64 [num_items, num_tokens of each]

    @classmethod
    def all_of(cls, work: Work, device: torch.device) -> "tuple[Group, ...]":
        q_lens = np.array(work.q_lens, np.int64)
        firsts = np.cumsum(q_lens) - q_lens
        groups = []
        for num in np.unique(q_lens):
            items = np.flatnonzero(q_lens == num)
            groups.append(cls(to_device(items, device), to_device(firsts[items][:, None] + np.arange(num), device)))
        return tuple(groups)


class StatePool:
    """A state for each layer that has one in each of `num_slots` slots, and the states of the step that is computed.

    A slot may hold anything until a sequence's beginning was computed there: that starts from zeros. What a step writes
    counts from `commit` on, so that a step that failed can be computed again.
    """

    def __init__(self, num_slots: int, like: Mapping[int, Tensor]) -> None:
        """`like` has of each layer an empty tensor [0, *shape of its state], of the state's dtype and device."""
        self.num_slots = num_slots
        self.states = {layer: empty.new_full((num_slots, *empty.shape[1:]), torch.nan) for layer, empty in like.items()}
        self._written: dict[int, Tensor] = {}
        self._windows: dict[int, Windows] = {}
        self._groups: tuple[Group, ...] | None = None
        self._step: ForwardBatch | None = None
        self._is_first: Tensor | None = None  # bool [num_items], whether an item begins its sequence

    def begin(self, step: ForwardBatch) -> None:
        """`read`, `write` and `windows` are about this step from now on; the one before is committed."""
        self.commit()
        assert len(step.state_slots) == len(step.work.q_lens), "a sequence has no slot for its state"
        firsts = np.equal(step.work.q_lens, step.work.kv_lens)
        self._step, self._is_first = step, to_device(firsts, step.state_slots.device)

    def commit(self) -> None:
        """The step was computed: the states it left are its sequences' now."""
        if self._step is not None:
            for layer, states in self._written.items():
                self.states[layer].index_copy_(0, self._step.state_slots, states)
        self.discard()

    def discard(self) -> None:
        """The step was not computed: its sequences' states are what they were before it."""
        self._written, self._windows, self._groups = {}, {}, None
        self._step = self._is_first = None

    def read(self, layer: int) -> Tensor:
        """[num_items, *shape]: the states from which the step's items go on."""
        assert self._step is not None, "read before begin"
        assert self._is_first is not None
        states = self.states[layer][self._step.state_slots]
        return states.masked_fill_(self._is_first.view(-1, *(1 for _ in states.shape[1:])), 0)

    def write(
        self,
        layer: int,
        states: Tensor,  # [num_items, *shape]
    ) -> None:
        """The states with which the step leaves its items."""
        self._written[layer] = states

    def windows(self, width: int) -> Windows:
        """Of the step's tokens."""
        assert self._step is not None, "windows before begin"
        if width not in self._windows:
            self._windows[width] = Windows.of(self._step.work, width, self._step.state_slots.device)
        return self._windows[width]

    def groups(self) -> tuple[Group, ...]:
        """The step's items, by their numbers of tokens."""
        assert self._step is not None, "groups before begin"
        if self._groups is None:
            self._groups = Group.all_of(self._step.work, self._step.state_slots.device)
        return self._groups


def state_bytes(like: Mapping[int, Tensor]) -> int:
    """Bytes of one slot in all layers."""
    return sum(empty.shape[1:].numel() * empty.element_size() for empty in like.values())
