"""Finds the optional C library, built beside this file by the package's own build, and declares its functions.

A machine without a compiler has none: `find` says None and everything runs in torch. Importing torch first makes
the library share torch's OpenMP threads, since its libgomp.so.1 is loaded by then.
"""

import ctypes
from functools import cache
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import Any

import torch  # noqa: F401  (loads the libgomp that the library is to share)

# Where the package's build puts the library.
FOLDER = Path(__file__).parent
# Equal to VERSION in c/native.c.
_VERSION = 8
# What the kernels are compiled for, in the order of c/native.c; the library takes the best that the processor has.
INSTRUCTIONS = ("portable", "avx2", "avx512")
_POINTER, _LONG, _INT, _FLOAT = ctypes.c_void_p, ctypes.c_long, ctypes.c_int, ctypes.c_float
_ARGUMENTS: dict[str, list[Any]] = {
    "batchrun_at_most": [_INT],
    "batchrun_gemm": [_POINTER] * 4 + [_LONG] * 3,
    "batchrun_best_scratch": [_LONG],
    "batchrun_gemm_best": [_POINTER] * 4 + [_LONG] * 3 + [_POINTER],
    "batchrun_rounded_size": [_LONG] * 2,
    "batchrun_gemm_int8": [_POINTER] * 5 + [_LONG] * 3 + [_POINTER],
    "batchrun_rms_norm": [_POINTER, _POINTER, _POINTER, _FLOAT, _POINTER, _LONG, _LONG],
    "batchrun_glu": [_POINTER, _POINTER, _LONG, _LONG, _INT],
    "batchrun_attend": [_POINTER, _INT],
    "batchrun_write": [_POINTER, _INT],
    "batchrun_layer": [_POINTER, _POINTER],
    "batchrun_layer_scratch": [_POINTER, _LONG],
    "batchrun_read": [_POINTER, _LONG],
    "batchrun_multiply_add": [_LONG],
    "batchrun_rope": [_POINTER, _LONG, _LONG, _POINTER, _POINTER, _POINTER, _LONG, _LONG, _LONG, _LONG],
}


class NativeUnavailableError(Exception):
    """There is no C library to use here; the message says why and what to do."""


@cache
def find() -> ctypes.CDLL | None:
    """The library, or None where there is no usable one."""
    try:
        return load(FOLDER)
    except NativeUnavailableError:
        return None


def problem() -> str | None:
    """Why there is no usable library and what to do; None where there is one."""
    try:
        load(FOLDER)
    except NativeUnavailableError as error:
        return f"the CPU computes in plain torch, which is slower: {error}"
    return None


def load(folder: Path) -> ctypes.CDLL:
    """The library that lies in `folder`; raises NativeUnavailableError."""
    files = [folder / f"_native{suffix}" for suffix in EXTENSION_SUFFIXES]
    file = next((file for file in files if file.exists()), None)
    if file is None:
        raise NativeUnavailableError("the C kernels were not built; install a C compiler with OpenMP and reinstall")
    try:
        library = ctypes.CDLL(str(file))
        found = int(library.batchrun_version())
    except (OSError, AttributeError) as error:
        raise NativeUnavailableError(f"{file.name} cannot be loaded ({error}); reinstall") from error
    if found != _VERSION:
        raise NativeUnavailableError(f"{file.name} is of version {found}, {_VERSION} is needed; reinstall")
    for name, arguments in _ARGUMENTS.items():
        function = getattr(library, name)
        function.argtypes, function.restype = arguments, None
    for name in ("batchrun_best_scratch", "batchrun_layer_scratch", "batchrun_rounded_size"):
        getattr(library, name).restype = _LONG
    return library


def needed() -> ctypes.CDLL:
    """The library, where the caller made sure that there is one."""
    library = find()
    assert library is not None, "native kernels used without the library"
    return library


def instructions(library: ctypes.CDLL) -> str:
    """The set of instructions in use."""
    return INSTRUCTIONS[library.batchrun_instructions()]


def limit(library: ctypes.CDLL, name: str) -> str:
    """From now on no better set than this one; which one is in use then."""
    library.batchrun_at_most(INSTRUCTIONS.index(name))
    return instructions(library)
