"""Imports of the large libraries, which make some 400,000 objects: the collector would look through them all again and
again, for a sixth of the time. They stay as long as the process, so it need not know them at all.
"""

import atexit
import gc
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib import import_module

# What transformers imports of its own accord, but only when it loads one.
_FOR_TOKENIZERS = ("transformers", "transformers.models.auto.tokenization_auto", "transformers.activations")
_FOR_MODELS = ("transformers.models.auto.modeling_auto", "transformers.modeling_utils", "transformers.generation.utils")


def import_for_tokenizers() -> None:
    """What a tokenizer of transformers needs, torch included. Raises ImportError: there is no transformers."""
    with _collector_asleep():
        _import(_FOR_TOKENIZERS)


def import_for_models() -> None:
    """What any of its models needs. Raises ImportError: there is no transformers."""
    with _collector_asleep():
        _import(_FOR_MODELS)


def _import(names: tuple[str, ...]) -> None:
    import_module("transformers")
    for name in names:
        with suppress(ImportError):  # another version has its parts elsewhere
            import_module(name)


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
