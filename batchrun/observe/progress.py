"""Progress as a person sees it: a bar on a terminal, a line a minute elsewhere, or nothing.

Turns events into text on stderr and knows nothing of the job behind them. The clock is an argument.
"""

import logging
import os
from collections.abc import Callable
from typing import Any, Literal, Protocol, TextIO

from tqdm import tqdm

from batchrun.observe.duration import duration
from batchrun.observe.events import Committed, Event, Finished, Message, PlanProgress, RunProgress, TuneProgress

ProgressMode = Literal["auto", "bar", "log", "none"]
Clock = Callable[[], float]  # seconds, from any start
_LOG_EVERY_S = 60.0
_BAR_FORMAT = "{desc} {percentage:3.0f}%|{bar:10}| ETA {remaining}  {postfix[0]}"
_LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING}


class Observer(Protocol):
    """Takes events; `close` leaves the terminal in order and may be called at any time, also twice."""

    def __call__(self, event: Event) -> None: ...

    def close(self) -> None: ...


def make_observer(mode: ProgressMode, stream: TextIO, logger: logging.Logger, clock: Clock) -> Observer:
    """The observer for `mode`; `auto` is a bar when `stream` is a terminal and log lines otherwise."""
    if mode == "none":
        return SilentProgress(logger)
    if mode == "bar" or (mode == "auto" and has_room_for_bar(stream)):
        return BarProgress(stream, logger)
    return LogProgress(logger, clock)


class SilentProgress:
    """Shows no progress; messages and commits are logged all the same, at their level."""

    def __init__(self, logger: logging.Logger) -> None:
        self._logger = logger

    def __call__(self, event: Event) -> None:
        _log(self._logger, event)

    def close(self) -> None:
        pass


class LogProgress:
    """One `progress` line at the first event of a stage, one a minute after it, and one with the final count."""

    def __init__(self, logger: logging.Logger, clock: Clock) -> None:
        self._logger = logger
        self._clock = clock
        self._stage: str | None = None
        self._logged_at = 0.0
        self._logged: dict[str, object] = {}
        self._first: RunProgress | None = None

    def __call__(self, event: Event) -> None:
        match event:
            case PlanProgress():
                self._at_times(event, {"rows": event.rows}, is_last=event.is_last)
            case TuneProgress():
                self._at_times(event, {"steps": f"{event.steps}/{event.steps_total}"}, is_last=event.is_last)
            case RunProgress():
                self._first = self._first or event
                # The last of these is followed by `Finished`, which has the final count.
                self._at_times(event, _run_fields(event, eta_s(self._first, event)), is_last=False)
            case Finished():
                self._logger.info(event.how, extra={"fields": _finished_fields(event)})
            case _:
                _log(self._logger, event)

    def close(self) -> None:
        pass

    def _at_times(
        self, event: PlanProgress | TuneProgress | RunProgress, fields: dict[str, object], *, is_last: bool
    ) -> None:
        now, stage = self._clock(), _stage(event)
        is_due = stage != self._stage or now - self._logged_at >= _LOG_EVERY_S
        fields = {"stage": stage} | fields
        if is_due or (is_last and fields != self._logged):
            self._stage, self._logged_at, self._logged = stage, now, fields
            self._logger.info("progress", extra={"fields": fields})


class BarProgress:
    """A tqdm bar for each stage: rows while planning, steps while measuring, weighted tokens while running.

    `kind` is the class of the bar: tqdm's for terminals, or that of `tqdm.auto`, which knows notebooks.
    """

    def __init__(self, stream: TextIO, logger: logging.Logger, kind: Any = tqdm) -> None:
        self._stream = stream
        self._logger = logger
        self._kind = kind
        self._bar: Any = None
        self._stage: str | None = None

    def __call__(self, event: Event) -> None:
        match event:
            case PlanProgress():
                bar = self._bar_of(event, unit=" rows")
                bar.update(event.rows - bar.n)
            case TuneProgress():
                bar = self._bar_of(event, unit=" steps", total=event.steps_total)
                bar.update(event.steps - bar.n)
            case RunProgress():
                self._show_run(event)
            case Finished():
                self.close()
            case _:
                _log(self._logger, event)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()
        self._bar = None

    def _show_run(self, event: RunProgress) -> None:
        # What an earlier process did says nothing about the speed of this one, hence `initial`.
        bar = self._bar_of(event, bar_format=_BAR_FORMAT, initial=event.tokens_done, postfix=[""])
        bar.total = event.tokens_total or None
        bar.postfix[0] = _run_text(event)
        bar.update(event.tokens_done - bar.n)

    def _bar_of(self, event: PlanProgress | TuneProgress | RunProgress, **options: Any) -> Any:
        if self._bar is None or _stage(event) != self._stage:
            self.close()
            self._stage = _stage(event)
            self._bar = self._kind(file=self._stream, desc=self._stage, dynamic_ncols=True, **options)
        return self._bar


def has_room_for_bar(stream: TextIO) -> bool:
    """Whether `stream` is a terminal; one that is 0 columns wide, as containers have them, shows no bar."""
    if not stream.isatty():
        return False
    try:
        return os.get_terminal_size(stream.fileno()).columns > 0
    except OSError:
        return True


def eta_s(first: RunProgress, now: RunProgress) -> float | None:
    """Seconds left at this process's speed so far, by weighted tokens; None before anything is known, 0 at the end."""
    if now.rows_done == now.rows_total:
        return 0.0
    done = now.tokens_done - first.tokens_done
    elapsed = now.elapsed_s - first.elapsed_s
    return (now.tokens_total - now.tokens_done) * elapsed / done if done > 0 else None


def _stage(event: PlanProgress | TuneProgress | RunProgress) -> str:
    match event:
        case PlanProgress():
            return event.stage
        case TuneProgress():
            return "measure"
        case RunProgress():
            return "run"


def _run_fields(event: RunProgress, eta: float | None) -> dict[str, object]:
    statistics = event.statistics
    return {
        "rows": f"{event.rows_done}/{event.rows_total}",
        "tokens": f"{event.tokens_done / event.tokens_total:.1%}" if event.tokens_total else "unknown",
        "failed": event.rows_failed,
        "tok_s": round(_tokens_per_s(event)),
        "hit": f"{statistics.counters.hit_rate:.2f}",
        "kv": f"{statistics.kv_usage:.2f}",
        "running": statistics.num_running,
        "preemptions": statistics.counters.preemptions,
        "eta": "unknown" if eta is None else duration(eta),
    }


def _finished_fields(event: Finished) -> dict[str, object]:
    return {
        "rows": f"{event.rows_done}/{event.rows_total}",
        "failed": event.rows_failed,
        # Not a speed: that of the engine is in the summary, and loading and publishing are in this time.
        "output_tokens": event.output_tokens,
        "elapsed": duration(event.elapsed_s),
    }


def _run_text(event: RunProgress) -> str:
    counters = event.statistics.counters
    text = (
        f"{event.rows_done:,}/{event.rows_total:,} rows  {_tokens_per_s(event):,.0f} tok/s  "
        f"hit {counters.hit_rate:.0%}  KV {event.statistics.kv_usage:.0%}  preempted {counters.preemptions}"
    )
    return f"{text}  failed {event.rows_failed:,}" if event.rows_failed else text


def _tokens_per_s(event: RunProgress) -> float:
    return event.statistics.counters.output_tokens / event.elapsed_s if event.elapsed_s else 0.0


def _log(logger: logging.Logger, event: Event) -> None:
    match event:
        case Message():
            logger.log(_LEVELS[event.level], "%s", event.text)
        case Committed():
            fields = {"unit": event.unit, "part": event.part, "rows": event.rows}
            logger.debug("committed", extra={"fields": fields})
