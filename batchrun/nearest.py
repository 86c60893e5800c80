"""The name that was probably meant."""

import difflib
from collections.abc import Iterable


def nearest(name: str, known: Iterable[str], similarity: float = 0.6) -> str | None:
    """The known name most like `name`, or None when none is like it; `similarity` is difflib's ratio, 0 to 1."""
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=similarity)
    return close[0] if close else None
