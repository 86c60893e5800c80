"""When a job's engine began and ended, told by the job's own events."""

import time

from batchrun.observe.events import Event, RunProgress


class JobClock:
    """When the engine was given its first row and when the last one was committed; seconds of `time.monotonic`."""

    def __init__(self) -> None:
        self.began = self.ended = 0.0

    def observe(self, event: Event) -> None:
        # The last of these comes when everything is committed.
        if isinstance(event, RunProgress):
            self.ended = time.monotonic()
            self.began = self.ended - event.elapsed_s
