"""Imports of the large libraries, which make some 400,000 objects: the collector would look through them all again and
again, for a sixth of the time. They stay as long as the process, so it need not know them at all.
"""

import atexit
import ctypes
import gc
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from threading import Thread

# What torch imports that is written in Python alone.
_BESIDE_TORCH = ("cmath", "sympy")
# What transformers imports of its own accord, but only when it loads one.
_FOR_TOKENIZERS = ("transformers", "transformers.models.auto.tokenization_auto", "transformers.activations")
_FOR_MODELS = ("transformers.models.auto.modeling_auto", "transformers.modeling_utils", "transformers.generation.utils")


def import_for_tokenizers() -> None:
    """What a tokenizer of transformers needs, torch included. Raises ImportError: there is no transformers."""
    with _collector_asleep():
        with _linking_torch():
            _import(_BESIDE_TORCH)
        import_module("transformers")
        _import(_FOR_TOKENIZERS)


def import_for_models() -> None:
    """What any of its models needs. Raises ImportError: there is no transformers."""
    with _collector_asleep():
        import_module("transformers")
        _import(_FOR_MODELS)


def _import(names: tuple[str, ...]) -> None:
    for name in names:
        with suppress(ImportError):  # another version has its parts elsewhere
            import_module(name)


@contextmanager
def _linking_torch() -> Iterator[None]:
    """Meanwhile torch's largest library is linked, which takes as long as the import of sympy, and needs no Python.

    The linker does one library at a time: who imports one that is not pure Python in the block waits.
    """
    thread = Thread(target=_link_torch, name="batchrun-link")
    thread.start()
    try:
        yield
    finally:
        thread.join()


def _link_torch() -> None:
    """As torch does it. Where that fails, torch's own import says why."""
    if "torch" in sys.modules or sys.platform != "linux":
        return
    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        return
    folder = Path(spec.origin).parent / "lib"
    # A function that is called by ctypes gives up the interpreter's lock, ctypes.CDLL(name) does not.
    link = ctypes.CDLL(None).dlopen
    link.argtypes, link.restype = (ctypes.c_char_p, ctypes.c_int), ctypes.c_void_p
    if link(os.fsencode(folder / "libtorch_global_deps.so"), os.RTLD_NOW | os.RTLD_GLOBAL):
        link(os.fsencode(folder / "libtorch_cpu.so"), os.RTLD_NOW)


@contextmanager
def _collector_asleep() -> Iterator[None]:
    """Within the block nothing is looked through; what there is behind it never is again, but for today's garbage."""
    was_awake = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        atexit.unregister(gc.unfreeze)
        atexit.register(gc.unfreeze)  # libraries count at the end what was not let go
        if was_awake:
            gc.enable()
