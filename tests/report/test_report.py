"""The report of whole jobs: what it says is what happened, and nothing in the data gets out of its place."""

import json
import re
import signal
import time
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path
from typing import NoReturn

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchrun import lifecycle, planning
from batchrun.errors import DataError, ModelUnavailable, StoppedEarly
from batchrun.executors import local
from batchrun.observe.events import Event, Message, RunBegan
from batchrun.plan.prefixes import read_prefixes
from batchrun.report.compared import compared
from batchrun.report.facts import gather
from batchrun.report.report import write_report
from batchrun.report.series import read
from batchrun.stop import StopRequest
from batchrun.store.layout import Layout
from batchrun.store.status import status
from tests.report.samples import sample, series
from tests.run.conftest import EchoJob
from tests.run.conftest import echo_job as echo_job

NASTY = "</title><script>alert('p')</script>\x1b]0;title\x07\x1b[31m{{ 7 * 7 }}"
NASTY_NAME = "<img src=x onerror=alert(1)>"


class Tags(HTMLParser):
    """Which elements and attributes a page has."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: Counter[str] = Counter()
        self.attributes: set[str] = set()
        self.links: set[str | None] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] += 1
        self.attributes |= {name for name, _ in attrs}
        self.links |= {value for name, value in attrs if name in ("href", "src", "data", "xlink:href")}


@pytest.fixture
def nasty(tmp_path: Path) -> EchoJob:
    """Rows whose prompts, parameters and column names are HTML, scripts and terminal escapes; some fail."""
    folder = tmp_path / "<b>job"
    folder.mkdir()
    prompts = [f"{NASTY} {number % 3} {'z' * 40} {number}" for number in range(63)]
    params = ['{"temperature": "<i>hot</i>\\u001b[2J"}' if number % 9 == 0 else None for number in range(63)]
    pq.write_table(pa.table({"prompt": [*prompts, None], NASTY_NAME: [*params, None]}), folder / "input.parquet")
    return EchoJob(folder, prompts)


def test_a_job_leaves_a_report_and_says_where(echo_job) -> None:
    job, events = echo_job(300), list[Event]()
    lifecycle.submit(job.job(max_tokens=30), events.append, StopRequest())
    at = Layout(job.out)
    said = [event.text for event in events if isinstance(event, Message)]
    assert said[-1] == f"report: {at.report}"
    summary = json.loads(at.summary.read_text())
    rows = job.rows()
    assert summary["status"] == "completed"
    assert summary["request_counts"] == {"total": 300, "completed": 300, "failed": 0}
    assert summary["finish_reasons"] == dict(Counter(row["finish_reason"] for row in rows))
    answered = {row["prompt"]: row["completion_tokens"] for row in rows}  # equal prompts are computed once
    assert summary["counters"]["rows_finished"] == len(answered)
    prompts = next(each for each in summary["compared"] if each["name"] == "prompt tokens computed")
    assert prompts["predicted"] == prompts["actual"]
    assert summary["runs"][0]["ended"] == "completed"
    slowest = summary["slowest_rows"]
    assert len(slowest) == 10
    assert [row["run_s"] for row in slowest] == sorted((row["run_s"] for row in slowest), reverse=True)
    assert {row["row_idx"]: row["output_tokens"] for row in slowest} == {
        row["row_idx"]: rows[row["row_idx"]]["completion_tokens"] for row in slowest
    }
    assert "all 300 rows done" in at.report.read_text()
    assert list(at.folder.glob("*-report.html")) == []


def test_a_complete_job_is_not_reported_again(echo_job) -> None:
    job = echo_job(20)
    job.submit()
    before = Layout(job.out).report.stat().st_mtime_ns
    assert job.submit().already_complete
    assert Layout(job.out).report.stat().st_mtime_ns == before


def test_the_map_of_prefixes_names_what_rows_share(echo_job) -> None:
    job = echo_job(50)
    job.submit()
    prefixes = read_prefixes(Layout(job.out).plan)
    assert prefixes[0].text.startswith("You answer questions about numbers.")
    facts = gather(job.out, str(job.out))
    saved = facts.plan["prompt_tokens"] - facts.plan["unique_prompt_tokens"]
    assert sum(prefix.saved_tokens for prefix in prefixes) == saved


def test_what_is_foretold_of_one_engine_is_not_held_against_several() -> None:
    """Two workers were said to need too many steps and too much time."""
    plan = {"prompt_tokens": 400, "unique_prompt_tokens": 100, "peak_kv_bytes": 63}
    estimate = {"output_tokens": 80, "computed_tokens": 180, "steps": 10, "peak_kv_bytes": 50, "run_s": 2.0}

    def foretold(num_workers: int) -> dict[str, float | None]:
        found = compared(plan, estimate, series(sample(), num_workers=num_workers), is_copied=False)
        return {each.name: each.predicted for each in found}

    tokens = {"prompt tokens computed": 100, "output tokens": 80}
    one = {"tokens computed": 180, "steps": 10, "peak KV": 50, "time in the engine": 2.0}
    assert foretold(1) == tokens | one
    assert foretold(2) == tokens | dict.fromkeys(one)


def test_nothing_from_the_data_is_markup(nasty: EchoJob) -> None:
    nasty.submit(prompt_col="prompt", params_col=NASTY_NAME, max_tokens=8)
    page = Layout(nasty.out).report.read_text()
    found = Tags(page)
    assert {"script", "img", "i"} & set(found.tags) <= {"i"}
    assert not {name for name in found.attributes if name.startswith("on")}
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f]", page)
    assert "&lt;script&gt;alert(&#39;p&#39;)&lt;/script&gt;" in page
    assert "{{ 7 * 7 }}" in page
    assert "\\x1b" in page
    assert page.count("<title>") == page.count("</title>")
    assert found.links == {"data:,"}
    assert not re.search(r"url\(|@import", page)
    json.loads(Layout(nasty.out).summary.read_text())


def test_errors_are_shown_by_type_with_rows(nasty: EchoJob) -> None:
    nasty.submit(prompt_col="prompt", params_col=NASTY_NAME, max_tokens=8)
    errors = gather(nasty.out, str(nasty.out)).results.errors
    assert [(row.type, row.row_idx) for row in errors] == [
        ("invalid_params", 0), ("invalid_params", 9), ("invalid_params", 18), ("empty_prompt", 63),
    ]  # fmt: skip


def test_a_killed_and_resumed_job_shows_both_runs_and_the_gap(echo_job) -> None:
    job = echo_job(3000)
    arguments = ("--max-num-seqs", "4", "--max-tokens", "60", "--checkpoint-every", "0.1s", "--progress", "none")
    process = job.start("submit", *arguments)
    at = Layout(job.out)
    while process.poll() is None and not read(at.series).samples:
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    page = write_report(job.out).page.read_text()
    assert "Interrupted" in page
    assert job.call("submit", *arguments).returncode == 0
    series = read(at.series)
    assert [run.ended for run in series.runs] == [None, "completed"]
    page = at.report.read_text()
    assert page.count('class="gap"') >= 6
    assert re.findall(r"interrupted|completed</td>", page) == ["interrupted", "completed</td>"]
    total = series.total
    assert total is not None
    assert total.rows_done == 3000


def test_a_job_that_ends_between_two_looks_has_its_peak_and_no_more_hits_than_there_are(echo_job) -> None:
    """The pool was empty whenever somebody looked, and each choice is a request with the whole prompt."""
    job = echo_job(30)
    job.submit(task="choose", choice=("praise", "blame", "prose"), block_size=4)
    facts = gather(job.out, str(job.out))
    assert facts.series.peak_kv_bytes > 0
    assert json.loads(Layout(job.out).summary.read_text())["peak_kv_bytes"] == facts.series.peak_kv_bytes
    rate, best = re.findall(r"[\d.]+(?=%)", next(one.measured for one in facts.verdicts if "hit rate" in one.rule))
    assert float(rate) <= float(best)


@pytest.mark.parametrize("options", [{}, {"task": "score", "target_col": "prompt"}, {"task": "embed"}])
def test_of_a_job_that_ran_whole_all_hits_are_known(echo_job, options) -> None:
    """The engine was given fewer tokens than planned of targets, and a job of these counted as half recorded."""
    job = echo_job(30)
    job.submit(block_size=4, **options)
    found = next(one for one in gather(job.out, str(job.out)).verdicts if "hit rate" in one.rule)
    assert found.state != "unknown"
    assert "by the plan" in found.measured


def test_the_report_of_a_job_that_stopped_or_failed_says_so_and_why(echo_job) -> None:
    """It said that the job runs: whoever wrote it still held the job."""
    job, stop = echo_job(300), StopRequest()

    def late(event: Event) -> None:
        if isinstance(event, RunBegan):
            stop.request("SIGTERM")
            stop.request("SIGTERM")

    with pytest.raises(StoppedEarly):
        lifecycle.submit(job.job(), late, stop)
    at = Layout(job.out)
    assert "<h1>Cancelled; resume goes on from there</h1>" in at.report.read_text()
    assert json.loads(at.summary.read_text())["status"] == status(job.out).status == "cancelled"
    with pytest.raises(DataError, match="raise --kv-cache-memory"):
        job.submit(kv_cache_memory="1KiB")
    page = at.report.read_text()
    assert "<h1>Failed</h1>" in page
    assert "raise --kv-cache-memory" in page
    look = status(job.out)
    assert (look.status, look.progress["error"]["exit_code"]) == ("failed", 65)


def test_a_job_whose_model_does_not_load_has_a_report_too(echo_job, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> NoReturn:
        raise ModelUnavailable("no such device")

    monkeypatch.setattr(local, "build_runner", refuse)
    job = echo_job(30)
    with pytest.raises(ModelUnavailable):
        job.submit()
    page = Layout(job.out).report.read_text()
    assert "<h1>Failed</h1>" in page
    assert "no such device" in page


def test_a_planned_job_has_a_report_too(echo_job) -> None:
    job = echo_job(30)
    planning.plan(job.job(), lambda event: None, StopRequest())
    page = write_report(job.out).page.read_text()
    assert "Planned, not run yet" in page


def test_another_job_in_the_folder_starts_without_the_history(echo_job) -> None:
    job = echo_job(30)
    job.submit()
    job.submit(max_tokens=5, overwrite=True)
    assert len(read(Layout(job.out).series).runs) == 1


def test_report_command_prints_the_path_or_the_summary(echo_job) -> None:
    job = echo_job(30)
    job.submit()
    shown = job.call("report", str(job.out))
    assert (shown.returncode, shown.stdout) == (0, f"{job.out}.batchrun/report.html\n")
    assert json.loads(job.call("report", str(job.out), "--json").stdout)["status"] == "completed"
    missing = job.call("report", str(job.folder / "none"))
    assert (missing.returncode, missing.stdout) == (66, "")
