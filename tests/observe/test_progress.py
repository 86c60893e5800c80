"""What a person sees of a running job: lines at the right times, a bar that ends, nothing when quiet."""

import fcntl
import io
import json
import logging
import os
import struct
import termios
from collections.abc import Iterator

import pytest

from batchrun.engine.statistics import Counters, Statistics
from batchrun.observe.duration import duration
from batchrun.observe.events import Committed, Event, Finished, Message, PlanProgress, RunProgress, TuneProgress
from batchrun.observe.log import LOGGER, LogFormat, logging_to
from batchrun.observe.progress import BarProgress, LogProgress, SilentProgress, eta_s, make_observer


class Clock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Records(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[tuple[str, dict[str, object]]] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append((record.getMessage(), getattr(record, "fields", {})))


@pytest.fixture
def records() -> Iterator[Records]:
    handler = Records()
    LOGGER.addHandler(handler)
    before = LOGGER.level
    LOGGER.setLevel(logging.INFO)
    yield handler
    LOGGER.removeHandler(handler)
    LOGGER.setLevel(before)


def run_at(elapsed_s: float, tokens_done: int, rows_done: int = 0) -> RunProgress:
    return RunProgress(
        rows_done=rows_done,
        rows_total=63,
        rows_failed=2,
        tokens_done=tokens_done,
        tokens_total=1000,
        elapsed_s=elapsed_s,
        statistics=Statistics(
            counters=Counters(
                prompt_tokens=1000, cached_tokens=711, output_tokens=int(10 * elapsed_s), swap_preemptions=1
            ),
            num_running=7,
            num_waiting=20,
            num_preempted=0,
            num_nodes=3,
            kv_usage=0.83,
            kv_peak=0.9,
        ),
    )


FINISHED = Finished(how="completed", rows_done=63, rows_total=63, rows_failed=2, output_tokens=630, elapsed_s=63.0)


def test_log_has_a_line_at_once_one_a_minute_and_one_at_the_end(records: Records) -> None:
    clock = Clock()
    observer = LogProgress(LOGGER, clock)
    events: list[tuple[float, Event]] = [
        (0, PlanProgress(10)),
        (59, PlanProgress(20)),
        (60, PlanProgress(30)),
        (60.1, PlanProgress(40)),
        (60.2, PlanProgress(40, is_last=True)),
        (60.5, PlanProgress(7, "order")),
        (60.6, PlanProgress(7, "order", is_last=True)),
        (61, run_at(0, 200)),
        (120, run_at(59, 290)),
        (121, run_at(60, 300, rows_done=9)),
        (122, FINISHED),
    ]
    for at_s, event in events:
        clock.now_s = 1000.0 + at_s
        observer(event)
    same = {"failed": 2, "hit": "0.71", "kv": "0.83", "running": 7, "preemptions": 1}
    assert records.lines == [
        ("progress", {"stage": "render", "rows": 10}),
        ("progress", {"stage": "render", "rows": 30}),
        ("progress", {"stage": "render", "rows": 40}),
        ("progress", {"stage": "order", "rows": 7}),
        ("progress", {"stage": "run", "rows": "0/63", "tokens": "20.0%", "tok_s": 0, "eta": "unknown"} | same),
        ("progress", {"stage": "run", "rows": "9/63", "tokens": "30.0%", "tok_s": 10, "eta": "7m00s"} | same),
        ("completed", {"rows": "63/63", "failed": 2, "output_tokens": 630, "elapsed": "1m03s"}),
    ]


def test_log_lines_hold_no_carriage_return_nor_escape(records: Records) -> None:
    stream = io.StringIO()
    with logging_to(stream, "text", logging.INFO):
        observer = make_observer("auto", stream, LOGGER, Clock())
        for event in (PlanProgress(1), run_at(1, 1), Message("warning", "bad\r\x1b[31m row"), FINISHED):
            observer(event)
        observer.close()
    lines = stream.getvalue().split("\n")
    assert [line.split(" ", 1)[1] for line in lines[:-1]] == [
        "INFO progress stage=render rows=1",
        "INFO progress stage=run rows=0/63 tokens=0.1% failed=2 tok_s=10 hit=0.71 kv=0.83 "
        "running=7 preemptions=1 eta=unknown",
        "WARNING bad \\x1b[31m row",
        "INFO completed rows=63/63 failed=2 output_tokens=630 elapsed=1m03s",
    ]
    assert lines[-1] == ""
    assert not {"\r", "\x1b"} & set(stream.getvalue())


def test_json_lines_hold_the_same_keys() -> None:
    stream = io.StringIO()
    with logging_to(stream, "json", logging.INFO):
        LogProgress(LOGGER, Clock())(FINISHED)
    line = json.loads(stream.getvalue())
    assert line.pop("time").endswith("Z")
    assert line == {
        "level": "INFO",
        "message": "completed",
        "rows": "63/63",
        "failed": 2,
        "output_tokens": 630,
        "elapsed": "1m03s",
    }


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_logging_is_as_before_afterwards(log_format: LogFormat) -> None:
    before = (LOGGER.level, list(logging.getLogger().handlers))
    with logging_to(io.StringIO(), log_format, logging.DEBUG):
        pass
    assert (LOGGER.level, list(logging.getLogger().handlers)) == before


def test_bar_shows_rows_rate_hits_and_kv_and_ends_its_line(records: Records) -> None:
    stream = Terminal()
    observer = make_observer("auto", stream, LOGGER, Clock())
    assert isinstance(observer, BarProgress)
    observer(PlanProgress(63))
    observer(run_at(0, 200))
    observer(run_at(60, 300, rows_done=9))
    observer(FINISHED)
    observer.close()
    last = stream.getvalue().split("\r")[-1]
    assert "run  30%|" in last
    assert "| ETA " in last
    assert "9/63 rows  10 tok/s  hit 71%  KV 83%  preempted 1  failed 2" in last
    assert last.endswith("\n")
    assert records.lines == []


def test_measuring_shows_how_many_steps_are_timed(records: Records) -> None:
    stream = Terminal()
    for observer in (BarProgress(stream, LOGGER), LogProgress(LOGGER, Clock())):
        for steps in range(1, 8):
            observer(TuneProgress(steps, 7))
        observer.close()
    assert records.lines == [
        ("progress", {"stage": "measure", "steps": "1/7"}),
        ("progress", {"stage": "measure", "steps": "7/7"}),
    ]
    assert "7/7" in stream.getvalue()


def test_quiet_shows_messages_only(records: Records) -> None:
    observer = SilentProgress(LOGGER)
    for event in (
        PlanProgress(1),
        run_at(1, 1),
        Committed(3, "part-00003-0001.parquet", 7),
        Message("warning", "pool is small"),
        FINISHED,
    ):
        observer(event)
    observer.close()
    assert records.lines == [("pool is small", {})]


def test_commits_are_logged_for_the_curious(records: Records) -> None:
    LOGGER.setLevel(logging.DEBUG)
    LogProgress(LOGGER, Clock())(Committed(unit=3, part="part-00003-0001.parquet", rows=7))
    assert records.lines == [("committed", {"unit": 3, "part": "part-00003-0001.parquet", "rows": 7})]


@pytest.mark.parametrize(
    ("mode", "stream", "kind"),
    [
        ("auto", io.StringIO(), LogProgress),
        ("auto", Terminal(), BarProgress),
        ("bar", io.StringIO(), BarProgress),
        ("log", Terminal(), LogProgress),
        ("none", Terminal(), SilentProgress),
    ],
)
def test_mode_chooses_the_observer(mode: str, stream: io.StringIO, kind: type) -> None:
    assert type(make_observer(mode, stream, LOGGER, Clock())) is kind  # type: ignore[arg-type]


def test_terminal_without_width_gets_lines() -> None:
    main, other = os.openpty()
    fcntl.ioctl(other, termios.TIOCSWINSZ, struct.pack("HHHH", 0, 0, 0, 0))
    with os.fdopen(other, "w") as stream:
        assert type(make_observer("auto", stream, LOGGER, Clock())) is LogProgress
        fcntl.ioctl(other, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 111, 0, 0))
        assert type(make_observer("auto", stream, LOGGER, Clock())) is BarProgress
    os.close(main)


def test_eta_ignores_what_an_earlier_process_did() -> None:
    assert eta_s(run_at(5, 400), run_at(15, 500)) == 50.0
    assert eta_s(run_at(5, 400), run_at(15, 400)) is None


def test_nothing_is_left_of_a_job_whose_rows_are_done() -> None:
    end = run_at(5, 1000, rows_done=63)
    assert eta_s(end, end) == 0.0


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0s"), (59.4, "59s"), (59.6, "1m00s"), (725, "12m05s"), (12000, "3h20m")]
)
def test_duration_reads_like_an_option(seconds: float, text: str) -> None:
    assert duration(seconds) == text
