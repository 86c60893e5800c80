"""The process that computes prompts for the engine of this one, as this one has it. Its program is `prefilling`.

The swap space of both engines is one piece of memory, of which each has a descriptor until it has mapped it.
"""

import os
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import Pipe
from typing import Any

from batchrun.checkpoint import Checkpoint
from batchrun.child import same_modules
from batchrun.engine.handover import Prefill, Prefilled, PrefillerLost
from batchrun.engine.host_memory import anonymous
from batchrun.errors import BatchrunError, EngineFailed, UsageError
from batchrun.job import Job

_END_S = 10.0  # for a process to end by itself


@dataclass(frozen=True, slots=True)
class Brief:
    """Compute prompts for this job, whose swap space is in the memory of this descriptor."""

    job: Job
    checkpoint: Checkpoint
    shares_prefixes: bool
    swap_descriptor: int


@dataclass(frozen=True, slots=True)
class Ready:
    """The model is loaded; there is room for rows of `capacity` tokens, in blocks of this format."""

    capacity: int
    block_format: str


class PrefillProcess:
    """A `Prefiller`. It loads its model while this process does so, too; on a CPU it has half of this one's threads."""

    def __init__(self, job: Job, checkpoint: Checkpoint, *, shares_prefixes: bool) -> None:
        """The job says how large the swap space is."""
        assert job.swap_space, "keys and values are handed over in swap space"
        self.capacity = 0
        self._memory = os.fdopen(anonymous(job.swap_space), "r+b", buffering=0)
        self._num_threads_before, num_threads = _divided_threads(job, checkpoint)
        ours, theirs = Pipe()
        with theirs:
            self._process = subprocess.Popen(
                # -P: modules are not looked for in the current folder.
                [sys.executable, "-P", "-m", "batchrun.executors.prefilling", str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[theirs.fileno(), self.swap_descriptor],
                env=os.environ | same_modules() | num_threads,
                start_new_session=True,
            )
        self._connection = ours
        self._send(Brief(job, checkpoint, shares_prefixes, self.swap_descriptor))

    @property
    def swap_descriptor(self) -> int:
        """Of the memory, until `wait_until_ready`."""
        return self._memory.fileno()

    def wait_until_ready(self, block_format: str) -> None:
        """To be called when this process has mapped the memory, with the format of its blocks. Raises what the other
        one cannot load for, UsageError when its blocks have another one, and EngineFailed when it ends without a word.
        """
        self._memory.close()
        try:
            said: Any = self._connection.recv()
        except (EOFError, OSError):
            raise EngineFailed(f"the process that computes prompts {self._ending()} while it loaded") from None
        if isinstance(said, BatchrunError):
            raise said
        if said.block_format != block_format:
            raise UsageError(
                f"--disaggregate cannot hand over blocks of {said.block_format} where others are of {block_format}; "
                "leave it out"
            )
        self.capacity = said.capacity

    def order(self, prefills: Sequence[Prefill]) -> None:
        self._send(tuple(prefills))

    def hear(self, *, waits: bool) -> list[Prefilled]:
        said: list[Prefilled] = []
        try:
            while (waits and not said) or self._connection.poll():
                message: Any = self._connection.recv()
                if isinstance(message, BatchrunError):
                    raise PrefillerLost(f"has failed: {str(message).partition(chr(10))[0]}")
                said.append(message)
        except (EOFError, OSError):
            if not said:
                raise PrefillerLost(self._ending()) from None
        return said

    def close(self) -> None:
        """Ends the process, and gives this one its threads back."""
        self._memory.close()
        self._connection.close()
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._num_threads_before is not None:
            import torch

            torch.set_num_threads(self._num_threads_before)

    def _send(self, message: object) -> None:
        # Of one that is gone `hear` tells, after what it said last.
        with suppress(BrokenPipeError, ConnectionResetError):
            self._connection.send(message)

    def _ending(self) -> str:
        with suppress(subprocess.TimeoutExpired):
            code = self._process.wait(_END_S)
            return f"was killed by signal {-code}" if code < 0 else f"ended with code {code}"
        return "has closed its connection"


def _divided_threads(job: Job, checkpoint: Checkpoint) -> tuple[int | None, dict[str, str]]:
    """Leaves this process half of its threads where it computes with them; how many it had, and the environment that
    gives another process the rest."""
    if checkpoint.folder is None:
        return None, {}
    # Imported here: a job that is complete needs no torch.
    import torch

    from batchrun.engine.runner_options import choose_device

    if choose_device(job.device).type != "cpu":
        return None, {}
    before = torch.get_num_threads()
    others = max(1, before // 2)
    torch.set_num_threads(max(1, before - others))
    return before, {"OMP_NUM_THREADS": str(others)}
