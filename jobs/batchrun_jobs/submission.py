"""`batchrun submit` as a child process: its command line, its log as it comes, its end by a drain, its summary.

Needs the standard library only, so that a scheduler's Python needs nothing of batchrun's. Knows no scheduler.
"""

import json
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

# Exit codes after which the same command again is in vain: options, data, place of the output or job are wrong.
IN_VAIN = (2, 65, 73, 78)
# Beyond the time to drain: what saving and leaving may take.
_LEAVING_S = 15.0
_POLL_S = 0.1
# What the line begins with that says why a job was refused or stopped.
_ERROR = "error: "


def submit_command(
    python: str, inputs: Iterable[str], output: str, *, config: str | None = None, **options: object
) -> list[str]:
    """The words of `batchrun submit` with its summary as JSON.

    Options are those of the command, with underscores or dashes: True is the bare flag, False and None leave it out,
    a list repeats it, and a mapping is given as JSON.
    """
    words = [python, "-m", "batchrun", "submit", *inputs, f"--output={output}", "--json"]
    if config is not None:
        words.append(f"--config={config}")
    for name, value in options.items():
        words += _flags("--" + name.replace("_", "-"), value)
    return words


def _flags(flag: str, value: object) -> list[str]:
    if value is None or value is False:
        return []
    if value is True:
        return [flag]
    if isinstance(value, Mapping):
        return [f"{flag}={json.dumps(value)}"]
    if isinstance(value, list | tuple):
        return [word for each in value for word in _flags(flag, each)]
    return [f"{flag}={value}"]


class Submission:
    """A running `batchrun submit`; every line that it prints goes to `say` as it comes, from a thread of its own.

    It has a session of its own, so that a signal to the group of this process does not reach it a second time.
    """

    def __init__(
        self, command: Sequence[str], say: Callable[[str], None], env: Mapping[str, str] | None = None
    ) -> None:
        """`env`: all of its variables; None: those of this process."""
        self._say = say
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            env=env,
            start_new_session=True,
        )
        self.exit_code: int | None = None
        self.error = "it says no more"
        self._last_line = ""
        threading.Thread(target=self._listen, daemon=True).start()

    def wait(self, seconds: float | None = None) -> int | None:
        """Its exit code, negative where a signal ended it; None when it still runs after so many seconds.

        Holds no lock meanwhile, so that a signal's handler may call `stop` where this process waits.
        """
        until = float("inf") if seconds is None else time.monotonic() + seconds
        while self.exit_code is None and time.monotonic() < until:
            time.sleep(_POLL_S)
        return self.exit_code

    def stop(self, drain_timeout: float) -> None:
        """Lets it drain and save, and kills it when it has not left some seconds after its `drain_timeout`."""
        if self.exit_code is not None:
            return
        self._say(f"asking process {self._process.pid} to stop; it may drain for {drain_timeout:g} s")
        self._process.send_signal(signal.SIGTERM)
        if self.wait(drain_timeout + _LEAVING_S) is None:
            self._say(f"process {self._process.pid} does not leave; killing it")
            self._process.kill()
            self.wait()

    def summary(self) -> dict[str, Any]:
        """Of a submission that exited 0: what it printed last."""
        summary: dict[str, Any] = json.loads(self._last_line)
        return summary

    def _listen(self) -> None:
        assert self._process.stdout is not None
        with self._process:
            for line in self._process.stdout:
                self._last_line = line.rstrip("\n")
                if self._last_line.startswith(_ERROR):
                    self.error = self._last_line
                self._say(self._last_line)
        self.exit_code = self._process.returncode
