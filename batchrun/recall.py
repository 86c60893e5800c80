"""What calls a running job back besides signals: its deadline, and `batchrun cancel` on any host that sees the folder.

Looks at the clock and at the folder whenever the job reports progress, and raises the wish to stop. Has no thread.
"""

import time
from collections.abc import Callable
from datetime import datetime, timedelta
from datetime import time as time_of_day

from batchrun.job import Job
from batchrun.observe.events import Event, Observe, PlanProgress, RunProgress
from batchrun.stop import AT_ONCE, StopRequest
from batchrun.store.layout import Layout

_LOOK_EVERY_S = 1.0
# Left at the end for the last commit; less where the whole time is short.
_SAVING_S = 2.0
_SAVING_SHARE = 0.1


class Recall:
    """Stops a job in time: it drains for `drain_timeout` before its deadline, and saves what is unfinished just before.

    A drain takes at most half of the time that there was. `clock` is in seconds and does not jump as wall clocks do.
    """

    def __init__(self, job: Job, at: Layout, stop: StopRequest, clock: Callable[[], float] = time.monotonic) -> None:
        self._at = at
        self._stop = stop
        self._clock = clock
        self._looked_at = began = clock()
        self._drains_at = self._saves_at = float("inf")
        if job.deadline is not None:
            left = seconds_until(job.deadline, datetime.now())
            self._saves_at = began + left - min(_SAVING_S, left * _SAVING_SHARE)
            self._drains_at = max(self._saves_at - job.drain_timeout, began + left / 2)

    def heeded_by(self, observe: Observe) -> Observe:
        """`observe`, and a look at every sign of progress."""

        def observe_and_look(event: Event) -> None:
            if isinstance(event, PlanProgress | RunProgress):
                self._look()
            observe(event)

        return observe_and_look

    def _look(self) -> None:
        now = self._clock()
        if now >= self._drains_at and not self._stop.level:
            self._stop.request("--deadline")
        if now >= self._saves_at and self._stop.level < AT_ONCE:
            self._stop.request("--deadline")
        if now - self._looked_at >= _LOOK_EVERY_S:
            self._looked_at = now
            if self._at.cancel.exists() and not self._stop.level:
                self._stop.request("batchrun cancel")


def giving_way(observe: Observe, stop: StopRequest) -> Observe:
    """`observe`, but planning ends at its next event once `stop` is raised: that raises StoppedEarly or StoppedByUser.

    The run itself reads `stop`.
    """

    def observe_or_stop(event: Event) -> None:
        if stop.level and isinstance(event, PlanProgress):
            raise stop.error("the plan was not finished and nothing is kept of it")
        observe(event)

    return observe_or_stop


def seconds_until(deadline: float | time_of_day, now: datetime) -> float:
    """Seconds from `now`, a local time, to the deadline: a duration, or the next such time of day."""
    if not isinstance(deadline, time_of_day):
        return deadline
    then = datetime.combine(now, deadline)
    if then <= now:
        then += timedelta(days=1)
    # Through UTC: a night in which the clocks are put forward is shorter.
    return then.timestamp() - now.timestamp()
