"""The main program of every child: `python start.py SCRIPT GIVEN RETURNED`.

Calls `run` of SCRIPT with the JSON in GIVEN and writes what it returns to RETURNED, with this process's peak memory.
Imports the standard library only, and runs under Python 3.10 too.
"""

import importlib.util
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any


def main(script: str, given: str, returned: str) -> None:
    """Leaves no RETURNED behind when the script fails; what it raises ends the process."""
    answered = _run_of(script)(json.loads(Path(given).read_text(encoding="utf-8")))
    found = {**answered, "peak_rss": peak_rss(Path("/proc/self/status"))}
    Path(returned).write_text(json.dumps(found), encoding="utf-8")


def peak_rss(status: Path) -> int | None:
    """Bytes of memory that a process had at most, by its status file; None where the system keeps none.

    `getrusage` would not do: at exec Linux lets a child inherit the peak of its parent.
    """
    if not status.exists():
        return None
    for line in status.read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return None


def _run_of(script: str) -> Callable[[Any], Any]:
    spec = importlib.util.spec_from_file_location("script", script)
    assert spec is not None, script
    assert spec.loader is not None, script
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    run: Callable[[Any], Any] = module.run
    return run


if __name__ == "__main__":
    main(*sys.argv[1:])
