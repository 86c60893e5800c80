"""What the engine counted: totals since its start, and how full it is now."""

from dataclasses import dataclass, fields


@dataclass(slots=True)
class Counters:
    """Totals. Tokens unless the name says otherwise.

    `computed_tokens` went through the model, `computed_prompt_tokens` of them being prompt; `cached_tokens` were
    found in the tree when their row was first admitted. `recomputed_tokens` had been computed before a preemption.
    `drafted_tokens` were guessed, and are counted as computed only where they were `accepted_tokens`.
    `slot_steps` counts the places of the batch summed over steps, `busy_slot_steps` those that held a running row:
    their difference is what a static batch pads. `allocated_token_steps` and `used_token_steps` do the same for
    the KV slots of running rows.
    """

    steps: int = 0
    rows_finished: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    computed_tokens: int = 0
    computed_prompt_tokens: int = 0
    output_tokens: int = 0
    recomputed_tokens: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    recompute_preemptions: int = 0
    swap_preemptions: int = 0
    swapped_bytes: int = 0
    slot_steps: int = 0
    busy_slot_steps: int = 0
    allocated_token_steps: int = 0
    used_token_steps: int = 0

    @property
    def preemptions(self) -> int:
        return self.recompute_preemptions + self.swap_preemptions

    @property
    def occupancy(self) -> float:
        """Share of the batch's places that held a running row, over all steps; 0 to 1."""
        return self.busy_slot_steps / self.slot_steps if self.slot_steps else 0.0

    @property
    def hit_rate(self) -> float:
        """Share of the admitted rows' prompt tokens that came from the tree; 0 to 1."""
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else 0.0

    def __add__(self, other: "Counters") -> "Counters":
        return Counters(**{each.name: getattr(self, each.name) + getattr(other, each.name) for each in fields(self)})

    def __sub__(self, earlier: "Counters") -> "Counters":
        """What was counted since `earlier`, a copy of this one."""
        return Counters(**{each.name: getattr(self, each.name) - getattr(earlier, each.name) for each in fields(self)})


@dataclass(frozen=True, slots=True)
class Statistics:
    """A snapshot: `counters` is a copy; the rest are gauges. `kv_usage` is the referenced share of the pool, 0 to 1,
    and `kv_peak` the most that it was in any step so far.
    """

    counters: Counters
    num_running: int
    num_waiting: int
    num_preempted: int
    num_nodes: int
    kv_usage: float
    kv_peak: float
