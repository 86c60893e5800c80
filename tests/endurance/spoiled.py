"""One command in a child whose calls on the disk are logged, one of them spoiled."""

import os
import shutil
import signal
from pathlib import Path

from tests.endurance import forked, shim
from tests.endurance.forked import Ended
from tests.endurance.shim import Call, Fault


class Spoiler:
    """Runs commands on copies of folders; `scratch` is a folder that nobody else uses, `library` the shim."""

    def __init__(self, scratch: Path, library: Path) -> None:
        self._scratch = scratch
        self._library = library

    def record(self, before: Path, command: list[str], case: Path) -> list[Call]:
        """The calls of a command that nobody disturbs and that must not fail; see `spoil`."""
        ended, calls = self.spoil(before, command, case, 0, "refused")
        assert ended.exit_code == 0, ended
        return calls

    def spoil(
        self, before: Path, command: list[str], case: Path, number: int, fault: Fault
    ) -> tuple[Ended, list[Call]]:
        """How the command ended, and its calls, the `number`th of which met `fault`; on `case`, a new copy of `before`.

        Where it was paused, another process of the same command has ended before it is woken.
        """
        shutil.copytree(before, case)
        log, said = self._scratch / "log", self._scratch / "said"
        child = forked.start(command, said, lambda: shim.arm(self._library, case, log, number, fault))
        if forked.is_paused(child):
            # Whoever comes next waits until the paused one counts as gone, and ends the job in its place.
            forked.run(command, self._scratch / "winner")
            os.kill(child, signal.SIGCONT)
        return forked.wait(child, said), shim.calls(log)

    def again(self, command: list[str]) -> Ended:
        """The command once more, undisturbed."""
        return forked.run(command, self._scratch / "again")


def files(folder: Path) -> dict[str, bytes]:
    """The content of all files in and below a folder, by their paths in it."""
    paths = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}
