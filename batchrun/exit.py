"""The end of the program: as Python's own, but nobody looks through all that libraries made for what could be freed.

That takes over a second once models are loaded, and the system frees the same at once.
"""

import atexit
import os
import sys


class Exit:
    """To be made before libraries are loaded: what they have to do at the end is done before `code` is returned."""

    def __init__(self) -> None:
        self.code = 1  # that of a traceback
        # The first to be registered is called last, when threads have ended.
        atexit.register(self._leave)

    def _leave(self) -> None:
        try:
            for stream in (sys.stdout, sys.stderr):
                if stream is not None:  # as where it was closed before the program began
                    stream.flush()
        except (OSError, ValueError):  # closed at the other end: Python has words and a code of its own for it
            return
        os._exit(self.code)
