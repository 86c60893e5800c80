"""What a process that is started for a job has in common with the one that starts it."""

import os
import sys


def same_modules() -> dict[str, str]:
    """Variables by which it finds its modules where this one does, and not in whatever folder it is started in."""
    return {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
