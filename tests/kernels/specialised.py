"""How Triton would specialise each launch of `cases.py` on a device, beside what the compile gate compiles.

    python -m tests.kernels.specialised sm_90

prints a line for each launch in which the two differ, then how many there are. No GPU is needed: Triton is told that
it has one, and asked for what it does with arguments before it compiles.
"""

import sys
from typing import Any

from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from batchrun_kernels.triton.cases import cases
from batchrun_kernels.triton.configs import Architecture
from batchrun_kernels.triton.launch import Launch


class _Driver:
    """What Triton asks of a driver before a kernel is compiled."""

    def __init__(self, target: GPUTarget) -> None:
        self._target = target

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return 0


def specialised(launch: Launch) -> tuple[dict[str, str], dict[str, Any], set[str]]:
    """The types, the constants and the multiples of 16 among the launch's arguments, as Triton finds them.

    On AMD it also asks whether a tensor is below 2 GiB, which a pool is not; that is left out.
    """
    *_, bind = launch.kernel.device_caches[0]
    options = {"num_warps": launch.num_warps, "num_stages": launch.num_stages, "debug": False}
    bound, found, _ = bind(**launch.arguments, **launch.constants, **options)
    types = {name: kind for name, (kind, _) in zip(bound, found, strict=True)}
    constants = {name: bound[name] for name, kind in types.items() if kind == "constexpr"}
    return types, constants, {name for name, (_, facts) in zip(bound, found, strict=True) if facts in ("D", "DS")}


def main(architecture: Architecture) -> None:
    is_amd = architecture.startswith("gfx")
    target = GPUTarget("hip", architecture, 64) if is_amd else GPUTarget("cuda", int(architecture[3:]), 32)
    driver.set_active(_Driver(target))
    num = 0
    for name, launch in cases(architecture):
        num += 1
        found = specialised(launch)
        if found != (compiled := (launch.signature, launch.folded, set(launch.divisible))):
            print(f"{name}: {found} on a device, {compiled} in the gate")
    print(f"{num} launches")


if __name__ == "__main__":
    main(sys.argv[1])  # type: ignore[arg-type]
