"""Keeps transformers and the hub client from writing bars and warnings over our own streams."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Within the block transformers logs errors only and draws no progress bars; afterwards it is as before."""
    from transformers.utils import logging

    voice: Any = logging
    level, has_bars = voice.get_verbosity(), voice.is_progress_bar_enabled()
    voice.set_verbosity_error()
    voice.disable_progress_bar()
    try:
        yield
    finally:
        voice.set_verbosity(level)
        if has_bars:
            voice.enable_progress_bar()
