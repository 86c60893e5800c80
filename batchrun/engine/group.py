"""The ranks that a model is divided among, as a group of torch.distributed: gloo on CPUs, nccl on GPUs.

transformers divides the weights by its own plan, and its modules sum up or collect what the ranks computed. Here is
what it leaves open: who is in the group.
"""

from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, distributed

from batchrun.errors import ModelUnavailable

_HOST = "127.0.0.1"
# For a rank that reads its weights later than the others.
_PATIENCE = timedelta(minutes=30)


@dataclass(frozen=True, slots=True)
class Group:
    """Of `size` processes this one is number `rank`. What it computes with, all of them must compute with."""

    rank: int
    size: int
    device: torch.device

    @staticmethod
    def meeting_place(size: int, port: int | None = None) -> Any:
        """A store for `join`: that at `port`, or a new one, which has a `port` that was free."""
        stores: Any = distributed
        return stores.TCPStore(_HOST, port or 0, size, is_master=port is None, wait_for_workers=False)

    @classmethod
    def join(cls, store: Any, rank: int, size: int, device_type: str) -> "Group":
        """Returns when all have joined. On a GPU a process has the device of its rank's number."""
        if device_type == "cpu":
            distributed.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=_PATIENCE)
            return cls(rank, size, torch.device("cpu"))
        device = torch.device(device_type, rank)
        torch.cuda.set_device(device)
        distributed.init_process_group(
            "nccl", store=store, rank=rank, world_size=size, timeout=_PATIENCE, device_id=device
        )
        return cls(rank, size, device)

    def least(self, number: int) -> int:
        """The least that any rank has called this with."""
        numbers = torch.tensor([number], device=self.device)
        distributed.all_reduce(numbers, distributed.ReduceOp.MIN)
        return int(numbers)

    def share(self, values: Tensor) -> None:
        """Afterwards `values` are those of rank 0."""
        distributed.broadcast(values, src=0)


def own_share(module: Any) -> float:
    """Of all weights of a divided model, by their number."""
    parameters = list(module.parameters())
    divided = [parameter for parameter in parameters if hasattr(parameter, "to_local")]
    elsewhere = sum(parameter.numel() - parameter.to_local().numel() for parameter in divided)
    share: float = 1 - elsewhere / sum(parameter.numel() for parameter in parameters)
    return share


def require_devices(device: torch.device, num_ranks: int) -> None:
    """Raises ModelUnavailable when there are not so many devices like this one, or this process is in a group. A CPU is
    as many as wanted."""
    if distributed.is_initialized():
        raise ModelUnavailable("--tensor-parallel needs a process that has no process group of torch.distributed yet")
    num_gpus = torch.cuda.device_count()
    if device.type == "cpu" and num_gpus:
        # The devices of a group are chosen by transformers.
        raise ModelUnavailable("--tensor-parallel uses the GPUs where there are any; leave out --device cpu")
    if device.type != "cpu" and num_gpus < num_ranks:
        raise ModelUnavailable(f"--tensor-parallel {num_ranks} needs as many GPUs; there are {num_gpus}")
