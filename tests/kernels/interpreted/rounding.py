"""Repairs of Triton's interpreter, for tests only: products, and what becomes bfloat16 or float8.

The interpreter keeps bfloat16 as its bits in uint16, multiplies these in `tl.dot`, takes integers for such bits,
truncates where a GPU rounds to the nearest even, and loses the carry where rounding to float8 reaches the next
exponent. Its products are a library's, whose order of addition depends on how the factors lie in memory, as a GPU's
does not.
"""

from typing import Any

import numpy as np
import torch
import triton.language as tl
from numpy.typing import NDArray
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

_STORED = {
    tl.bfloat16: (torch.bfloat16, torch.int16, np.uint16),
    tl.float8e4nv: (torch.float8_e4m3fn, torch.uint8, np.uint8),
}


def repair() -> None:
    """Changes the interpreter of this process; to be called once."""
    dot, cast, fp_to_fp = (
        InterpreterBuilder.create_dot,
        InterpreterBuilder.cast_impl,
        InterpreterBuilder.create_fp_to_fp,
    )

    def repaired_dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        return dot(self, _in_order(_widened(a)), _in_order(_widened(b)), *rest)

    def repaired_cast(self: Any, src: Any, dst_type: Any) -> Any:
        # Not `or`: a handle is false where an element is zero.
        rounded = _rounded(src, dst_type)
        return cast(self, src, dst_type) if rounded is None else rounded

    def repaired_fp_to_fp(self: Any, src: Any, dst_type: Any, rounding_mode: Any) -> Any:
        rounded = _rounded(src, dst_type)
        return fp_to_fp(self, src, dst_type, rounding_mode) if rounded is None else rounded

    InterpreterBuilder.create_dot = repaired_dot
    InterpreterBuilder.cast_impl = repaired_cast
    InterpreterBuilder.create_fp_to_fp = repaired_fp_to_fp
    for name in ("create_fp_ext", "create_fp_trunc", "create_si_to_fp", "create_ui_to_fp"):
        setattr(InterpreterBuilder, name, repaired_cast)


def _widened(handle: Any) -> Any:
    if handle.dtype.scalar != tl.bfloat16:
        return handle
    return TensorHandle((handle.data.astype(np.uint32) << 16).view(np.float32), tl.float32)


def _in_order(handle: Any) -> Any:
    return TensorHandle(np.ascontiguousarray(handle.data), handle.dtype)


def _rounded(src: Any, dst_type: Any) -> Any:
    is_exact_in_float32 = src.dtype.scalar in (tl.float32, tl.int8, tl.uint8, tl.int16, tl.uint16)
    if not is_exact_in_float32 or dst_type.scalar not in _STORED:
        return None
    dtype, bits, stored = _STORED[dst_type.scalar]
    rounded = torch.from_numpy(np.array(src.data, np.float32)).to(dtype)
    data: NDArray[Any] = rounded.view(bits).numpy().view(stored)
    return TensorHandle(data, dst_type.scalar)
