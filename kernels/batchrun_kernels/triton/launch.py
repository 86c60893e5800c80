"""One launch of a kernel, as data: what a device runs is what the compile gate compiles and the interpreter tests."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

_TYPES = {
    torch.float32: "fp32",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.float8_e4m3fn: "fp8e4nv",
    torch.int8: "i8",
    torch.int32: "i32",
    torch.int64: "i64",
}


@dataclass(frozen=True, slots=True)
class Launch:
    """`constants` are the kernel's constexpr arguments, `arguments` the others, both by name."""

    kernel: Any
    grid: tuple[int, ...]
    arguments: dict[str, Tensor | TensorDescriptor | int | float | None]
    constants: dict[str, int | float | bool]
    num_warps: int = 4
    num_stages: int = 2

    def run(self) -> None:
        """Does nothing for an empty grid."""
        if all(self.grid):
            options = {"num_warps": self.num_warps, "num_stages": self.num_stages}
            # Triton launches on the current device, wherever the tensors are.
            placed = next(one for one in self.arguments.values() if isinstance(one, Tensor))
            with torch.cuda.device_of(placed):  # type: ignore[no-untyped-call]
                self.kernel[self.grid](**self.arguments, **self.constants, **options)

    @property
    def signature(self) -> dict[str, str]:
        """The type of each argument as a launch on a device would specialise it, by name, in the kernel's order."""
        types = {name: _type(value) for name, value in self.arguments.items()}
        return {name: types.get(name, "constexpr") for name in self.kernel.arg_names}

    @property
    def folded(self) -> dict[str, int | float | bool | None]:
        """What is a constant of the compiled kernel: the constexprs, absent pointers, and integers that are 1."""
        return self.constants | {
            name: value
            for name, value in self.arguments.items()
            if not isinstance(value, Tensor) and _type(value) == "constexpr"
        }

    @property
    def divisible(self) -> tuple[str, ...]:
        """The arguments a compiler may take to be multiples of 16 (bytes, for pointers: as allocators give them)."""
        return tuple(
            name
            for name, value in self.arguments.items()
            if isinstance(value, Tensor) or (isinstance(value, int) and value != 1 and value % 16 == 0)
        )


def _type(value: Tensor | TensorDescriptor | int | float | None) -> str:
    if isinstance(value, Tensor):
        return "*" + _TYPES[value.dtype]
    if isinstance(value, TensorDescriptor):
        return f"tensordesc<{_TYPES[value.base.dtype]}{value.block_shape}>"
    if value is None or (isinstance(value, int) and value == 1):
        return "constexpr"
    return "i32" if isinstance(value, int) and abs(value) < 2**31 else "i64" if isinstance(value, int) else "fp32"
