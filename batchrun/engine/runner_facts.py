"""What a runner is laid out on: its device, its numbers' types, and what its memory beside the weights is for."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RunnerFacts:
    """Sizes in bytes."""

    device: str
    dtype: str
    kv_dtype: str
    kernel: str
    num_blocks: int
    block_size: int
    pool_bytes: int
    num_state_slots: int
    state_bytes: int
    host_bytes: int

    @property
    def memory(self) -> str:
        """What the memory beside the weights is used for, in a line."""
        blocks = (
            f"{self.num_blocks} blocks of {self.block_size} tokens for keys and values in {self.kv_dtype} "
            f"({self.pool_bytes / (1 << 30):.2f} GiB)"
        )
        if not self.num_state_slots:
            return blocks
        return f"{blocks}, states of {self.num_state_slots} rows ({self.state_bytes / (1 << 30):.2f} GiB)"
