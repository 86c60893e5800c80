"""The wish to stop, as the running job sees it: a level that only rises.

Whoever catches the signals or knows of a deadline raises it; the job reads it between steps. Installs no handler.
"""

from batchrun.errors import StoppedByUser, StoppedEarly

DRAIN = 1
AT_ONCE = 2
# What whoever raised the level by hand is told, straight on stderr: a handler may have interrupted a write to it.
SAID = {
    DRAIN: b"stopping: finishing the rows that run; once more saves them unfinished and leaves\n",
    AT_ONCE: b"stopping at once\n",
}


class StopRequest:
    """Level 0: go on. 1 (`DRAIN`): admit nothing new, finish what runs. 2 (`AT_ONCE`): save and leave.

    Two plain attributes, so that a signal handler may call `request` at any instant.
    """

    __slots__ = ("level", "signal_name")

    def __init__(self) -> None:
        self.level = 0
        self.signal_name: str | None = None

    def request(self, signal_name: str) -> int:
        """One level up; the new level. The name of the first signal, or of what else asked, decides the exit code."""
        self.signal_name = self.signal_name or signal_name
        self.level = min(self.level + 1, AT_ONCE)
        return self.level

    def error(self, saved: str) -> StoppedEarly | StoppedByUser:
        """How the job ends when it gives way: `saved` says in a few words what is kept."""
        message = f"stopped by {self.signal_name}: {saved}; the same command goes on from here"
        return StoppedByUser(message) if self.signal_name == "SIGINT" else StoppedEarly(message)
