"""The ranks above 0 of a model that several processes compute together, as rank 0 has them: started, led and ended.

Orders and reports go through a connection to each process, tensors through the group. When a rank fails or dies the
others cannot go on: then the job ends, and the same command goes on.
"""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, distributed

from batchrun.child import same_modules
from batchrun.divisible import require_divisible
from batchrun.engine.batch import ForwardBatch
from batchrun.engine.group import Group, require_devices
from batchrun.engine.memory import is_out_of_memory
from batchrun.engine.orders import Failed, Head, Hidden, Logits, Order, Start
from batchrun.engine.runner_options import RunnerOptions, choose_device
from batchrun.engine.shard import Shard
from batchrun.engine.step import SwapIn, SwapOut
from batchrun.errors import EngineFailed, ModelUnavailable

if TYPE_CHECKING:
    from batchrun.checkpoint import Checkpoint

# How long the first rank that has failed may take to say so, each other one after that, and a process to end.
_REPORT_S, _NEXT_REPORT_S, _END_S = 5.0, 1.0, 10.0


@dataclass(frozen=True, slots=True)
class _Follower:
    rank: int
    process: "subprocess.Popen[bytes]"
    connection: "Connection[Any, Any]"

    @classmethod
    def start(cls, rank: int) -> "_Follower":
        ours, theirs = Pipe()
        with theirs:
            process = subprocess.Popen(
                # -P: modules are not looked for in the current folder.
                [sys.executable, "-P", "-m", "batchrun.engine.follower", str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                # By its rank transformers chooses its GPU.
                env=os.environ | same_modules() | {"LOCAL_RANK": str(rank)},
                start_new_session=True,
            )
        return cls(rank, process, ours)

    def end(self) -> None:
        self.connection.close()
        try:
            self.process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def last_words(self) -> Failed:
        """Of a rank that has ended, or is about to."""
        with suppress(EOFError, OSError):
            while not isinstance(said := self.connection.recv(), Failed):
                pass
            return said
        with suppress(subprocess.TimeoutExpired):
            code = self.process.wait(_END_S)
            # Nothing that others say can have come before a death that came without words.
            return Failed(f"killed by signal {-code}" if code < 0 else f"ended with code {code}", at=0.0)
        return Failed("closed its connection", at=0.0)


class Ranks:
    """The processes of all ranks but 0, which is this one, and the group of all; `close` ends them.

    On a CPU the ranks share this process's threads.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._num_threads = torch.get_num_threads()
        self._followers = [_Follower.start(rank) for rank in range(1, size)]

    def start(self, checkpoint: "Checkpoint", options: RunnerOptions) -> Group:
        """All load their shards from now on; this process has to do so, too, with the group that is returned."""
        device_type = choose_device(options.device).type
        num_threads = max(1, self._num_threads // self._size) if device_type == "cpu" else None
        if num_threads is not None:
            torch.set_num_threads(num_threads)
        store = Group.meeting_place(self._size)
        for follower in self._followers:
            follower.connection.recv()  # that it is ready: one that is not would be waited for in vain
        for follower in self._followers:
            follower.connection.send(Start(follower.rank, store.port, device_type, num_threads, checkpoint, options))
        return Group.join(store, 0, self._size, device_type)

    @contextmanager
    def loading(self) -> Iterator[None]:
        """Within the block all ranks load. Raises ModelUnavailable when another one cannot."""
        try:
            yield
        except Exception as error:
            failed = self._first_failure()
            if failed is None or failed[1] == str(error):
                raise
            raise ModelUnavailable(self._told(*failed)) from error

    @contextmanager
    def doing(self, order: Order) -> Iterator[None]:
        """The block is this rank's share. Raises EngineFailed when it fails, or another rank: no step can follow."""
        try:
            for follower in self._followers:
                follower.connection.send(order)
            yield
        except Exception as error:
            failed = self._first_failure()
            if failed is not None:
                raise EngineFailed(self._told(*failed)) from error
            if is_out_of_memory(error):
                remedy = "lower --kv-cache-memory or --max-num-batched-tokens"
                raise EngineFailed(f"rank 0 has not the memory for a step; {remedy}") from error
            raise EngineFailed(f"rank 0 of {self._size} has failed: {type(error).__name__}: {error}") from error

    def close(self) -> None:
        for follower in self._followers:
            follower.end()
        if distributed.is_initialized():
            distributed.destroy_process_group()
        torch.set_num_threads(self._num_threads)

    def _first_failure(self) -> tuple[int, str] | None:
        """The rank that failed first, and why; None: within the time none said so, nor died."""
        failures, silent, patience = [], self._followers, _REPORT_S
        # A rank that was killed may be noticed after those that it left alone.
        while silent and (heard := wait([follower.connection for follower in silent], patience)):
            failures += [(one.rank, one.last_words()) for one in silent if one.connection in heard]
            silent, patience = [one for one in silent if one.connection not in heard], _NEXT_REPORT_S
        if not failures:
            return None
        rank, failed = min(failures, key=lambda failure: failure[1].at)
        return rank, failed.message

    def _told(self, rank: int, message: str) -> str:
        return f"rank {rank} of {self._size} has failed: {message}"


class LedShards:
    """`Shards` of all ranks: what is called here, every rank does. `shard` is rank 0's."""

    def __init__(self, shard: Shard, ranks: Ranks, group: Group) -> None:
        self.shard = shard
        self._ranks = ranks
        self._group = group

    @classmethod
    def load(cls, checkpoint: "Checkpoint", options: RunnerOptions) -> "LedShards":
        """Starts the other ranks; all load their shards of the model and lay out their pools.

        Raises what `Shard.load` does, and ModelUnavailable where there are not so many devices, or the model cannot be
        divided among them.
        """
        assert checkpoint.folder is not None, "a checkpoint without files has no tensors"
        require_devices(choose_device(options.device), options.num_ranks)
        require_divisible(checkpoint.folder, options.num_ranks, trust_remote_code=options.trust_remote_code)
        ranks = Ranks(options.num_ranks)
        try:
            with ranks.loading():
                group = ranks.start(checkpoint, options)
                shard = Shard.load(checkpoint, options, group)
        except BaseException:
            ranks.close()
            raise
        return cls(shard, ranks, group)

    def copy_out(self, out: SwapOut) -> None:
        with self._ranks.doing(out):
            self.shard.copy_out(out)

    def copy_in(self, back: SwapIn) -> None:
        with self._ranks.doing(back):
            self.shard.copy_in(back)

    def logits(self, step: ForwardBatch) -> Tensor:
        with self._ranks.doing(Logits(step.integers)):
            return self.shard.logits(step)

    def hidden(self, step: ForwardBatch) -> Tensor:
        with self._ranks.doing(Hidden(step.integers)):
            return self.shard.hidden(step)

    def head(
        self,
        hidden: Tensor,  # [num, hidden_size]
    ) -> Tensor:
        with self._ranks.doing(Head(tuple(hidden.shape))):
            self._group.share(hidden)
            return self.shard.head(hidden)

    def close(self) -> None:
        self._ranks.close()
