"""Whole jobs on an object store: killed, resumed from another machine, raced for, published, looked at, run again."""

import gzip
import json
import signal
import socket
import subprocess
import time
from pathlib import Path

import pyarrow as pa
import pyarrow.csv as pc
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner

from batchrun import lifecycle, planning
from batchrun.cli import batchrun as command
from batchrun.errors import InputMissing, JobMismatch, OutputRefused, StoppedEarly
from batchrun.observe.events import Event, RunBegan
from batchrun.retry import retry
from batchrun.stop import StopRequest
from batchrun.store.object_home import SUCCESS
from batchrun.store.store import PartExists, Store
from tests.run.conftest import EchoJob, ignore
from tests.store.conftest import Bench

URL = "s3://lake/jobs/out"
SLOW = ("--max-num-seqs", "2", "--max-tokens", "60", "--checkpoint-every", "0.3s", "--progress", "none")


def call(*arguments: str) -> str:
    """What a command says on stdout; it must not fail."""
    ended = CliRunner().invoke(command, list(arguments))
    assert ended.exit_code == 0, ended.output
    return ended.stdout.strip()


def parts(s3) -> list[str]:
    return [key for key in s3.keys("lake", "jobs/out.batchrun/") if "/parts/" in key]


def start(job: EchoJob, cache: Path, monkeypatch: pytest.MonkeyPatch) -> subprocess.Popen[str]:
    """The job in a process with a cache of its own, as on a machine of its own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    return job.start("submit", "-o", URL, *SLOW)


def test_a_result_is_that_of_a_job_on_a_disk(echo_job, s3):
    job = echo_job(300)
    job.submit(max_tokens=20)

    outcome = job.submit(output=URL, max_tokens=20)

    assert (outcome.output, outcome.rows) == (URL, 300)
    assert s3.files("lake", "jobs/out") == job.result()
    assert s3.keys("lake", "jobs/out/") == [f"jobs/out/{SUCCESS}", "jobs/out/part-00000.parquet"]
    again = job.submit(output=URL, max_tokens=20)
    assert (again.already_complete, again.rows, again.errors) == (True, outcome.rows, outcome.errors)
    assert not any("unit-" in request for request in s3.requests if request.startswith("GET"))


def test_killed_and_resumed_on_another_machine(echo_job, s3, tmp_path, monkeypatch):
    """Of the first machine there is nothing left but what is on the store."""
    job = echo_job(700)
    process = start(job, tmp_path / "one", monkeypatch)
    while process.poll() is None and not parts(s3):
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    before = {key: s3.read("lake", key) for key in parts(s3)}
    assert before

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "two"))
    seen = json.loads(call("status", URL, "--json"))
    assert (seen["output"], seen["status"], seen["request_counts"]["total"]) == (URL, "interrupted", 700)
    assert 0 < seen["request_counts"]["completed"] < 700
    assert call("resume", URL, "--quiet") == URL

    assert before.items() <= {key: s3.read("lake", key) for key in parts(s3)}.items(), "a part was written twice"
    job.submit(max_tokens=60)
    assert s3.files("lake", "jobs/out") == job.result()


def test_cancelled_from_another_machine(echo_job, s3, tmp_path, monkeypatch):
    # More than is done between two signs of life.
    process = start(echo_job(20_000), tmp_path / "one", monkeypatch)
    while process.poll() is None and not parts(s3):
        time.sleep(0.05)

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "two"))
    assert f"asked process {process.pid} on" in call("cancel", URL)

    _, said = process.communicate()
    assert process.returncode == 75, said
    assert json.loads(call("status", URL, "--json"))["status"] == "cancelled"


@pytest.fixture
def shared(echo_job, s3) -> EchoJob:
    """A job whose plan is on the store, and of which nothing has run."""
    job = echo_job(50)
    planning.plan(job.job(output=URL), ignore, StopRequest())
    return job


def test_of_two_workers_on_one_unit_one_wins(shared, s3, monkeypatch):
    """Also when neither asks who has the job."""
    one, other = (Store.open(URL) for _ in range(2))
    monkeypatch.setattr(Store, "check_lease", lambda store: None)
    with one.lock():
        assert list(one.done(0)) == []
        other._home.take_over()
        other.at.tmp.mkdir()
        assert list(other.done(0)) == []
        one.commit(0, Bench.results([3, 4]))
        with pytest.raises(PartExists):
            other.commit(0, Bench.results([4, 5]))
    assert [key.rpartition("/")[2] for key in parts(s3)] == ["part-00000-0001.parquet"]
    assert len(list(other.at.parts.iterdir())) == 0


def test_a_job_that_is_held_is_left_alone(shared):
    with Store.open(URL).lock(), pytest.raises(StoppedEarly, match=f"{URL} is held by process"):
        shared.submit(output=URL)


def test_a_different_job_is_refused_and_overwrites_when_told(echo_job, s3):
    job = echo_job(60)
    job.submit(output=URL, max_tokens=5)
    before = s3.files("lake", "jobs/out")

    with pytest.raises(JobMismatch, match=r"s3://lake/jobs/out.batchrun belongs .* \(differing: max_tokens\)"):
        job.submit(output=URL, max_tokens=9)
    stopped = StopRequest()

    def stop_what_runs(event: Event) -> None:
        if isinstance(event, RunBegan):
            stopped.request("SIGTERM")

    with pytest.raises(StoppedEarly):
        lifecycle.submit(job.job(output=URL, max_tokens=9, overwrite=True), stop_what_runs, stopped)
    assert s3.files("lake", "jobs/out") == before, "the old answers went before the new ones were there"
    assert json.loads(call("status", URL, "--json"))["status"] != "completed"

    assert call("resume", URL, "--quiet") == URL
    job.submit(max_tokens=9)
    assert s3.files("lake", "jobs/out") == job.result()
    generations = {key.split("/")[2] for key in s3.keys("lake", "jobs/out.batchrun/") if key.count("/") > 2}
    assert len(generations) == 1, "an earlier job was left behind"


def test_rows_run_again(echo_job, s3):
    job = echo_job(40)
    job.submit(output=URL, max_tokens=5)

    outcome = retry(URL, "row_idx < 3", {"max_tokens": 2}, ignore, StopRequest())

    assert (outcome.retried, outcome.rows) == (3, 40)
    (content,) = s3.files("lake", "jobs/out").values()
    lengths = pq.read_table(pa.BufferReader(content)).column("completion_tokens").to_pylist()
    assert lengths[:3] == [2, 2, 2]
    assert max(lengths[3:]) == 5
    call("verify", URL)


def test_answers_of_an_earlier_job_on_a_store_are_copied(echo_job, s3, tmp_path):
    job = echo_job(30)
    job.submit(output=URL, max_tokens=5)

    outcome = job.submit(output="s3://lake/jobs/tuesday", max_tokens=5, reuse=URL)

    assert (outcome.reused, outcome.steps) == (30, 0)
    assert s3.files("lake", "jobs/tuesday") == s3.files("lake", "jobs/out")


def test_what_is_there_is_looked_at(echo_job, s3, tmp_path):
    job = echo_job(40)
    job.submit(output=URL, max_tokens=5)
    job.submit(output="s3://lake/jobs/deeper/other", max_tokens=5)

    listed = json.loads(call("list", "s3://lake", "--json"))["jobs"]
    assert {each["output"]: each["job"]["status"] for each in listed} == {
        URL: "completed",
        "s3://lake/jobs/deeper/other": "completed",
    }
    assert call("report", f"{URL}.batchrun/") == f"{URL}.batchrun/report.html"
    assert URL in s3.read("lake", "jobs/out.batchrun/report.html").decode()
    call("export", URL, "--to", "jsonl", "-o", str(tmp_path / "rows.jsonl"))
    assert len((tmp_path / "rows.jsonl").read_text().splitlines()) == 40
    call("verify", URL, "--rerun", "10%")


def test_a_result_that_was_changed_is_found_out_and_written_again(echo_job, s3):
    job = echo_job(40)
    job.submit(output=URL, max_tokens=5)
    whole = s3.files("lake", "jobs/out")
    s3.write("lake", "jobs/out/part-00000.parquet", b"PAR1")

    ended = CliRunner().invoke(command, ["verify", URL])
    assert ended.exit_code == 65
    assert f"{URL}/part-00000.parquet has been changed since it was written" in ended.stdout

    s3.client.delete_object(Bucket="lake", Key="jobs/out/part-00000.parquet")
    assert json.loads(call("status", URL, "--json"))["status"] == "output_missing"
    outcome = job.submit(output=URL, max_tokens=5)
    assert outcome.steps == 0
    assert s3.files("lake", "jobs/out") == whole


def test_the_copy_that_a_killed_process_left_is_removed(echo_job, s3, tmp_path):
    ended = subprocess.Popen(["true"])
    ended.wait()
    left = tmp_path / "cache" / "batchrun" / "copies" / f"copy-{socket.gethostname()}-{ended.pid}-0a"
    (left / "out.batchrun").mkdir(parents=True)

    echo_job(5).submit(output=URL, max_tokens=3)

    assert not left.exists()


def test_what_is_not_ours_is_never_overwritten(echo_job, s3):
    s3.write("lake", "jobs/out/notes.txt", b"mine")

    with pytest.raises(OutputRefused, match=r"s3://lake/jobs/out holds notes.txt, which is not part of a result"):
        echo_job(5).submit(output=URL, overwrite=True)

    assert s3.keys("lake") == ["jobs/out/notes.txt"]


def test_folders_by_value(echo_job, s3):
    job = echo_job(21)

    job.submit(output=URL, max_tokens=3, partition_by="id", limit=3)

    found = [key for key in s3.keys("lake", "jobs/out/") if key.endswith(".parquet")]
    assert found == [f"jobs/out/id={value}/part-00000.parquet" for value in (0, 10, 20)]
    assert job.submit(output=URL, max_tokens=3, partition_by="id", limit=3).already_complete
    call("verify", URL)


@pytest.mark.parametrize(("form", "by"), [("parquet", "file"), ("jsonl", "folder"), ("csv.gz", "glob")])
def test_inputs_on_a_store(echo_job, s3, form, by):
    """A file, a folder and a glob, in every format, give all rows in their order."""
    job = echo_job(30)
    table = pq.read_table(job.source)
    local = job.folder / "in" / f"rows.{form}"
    local.parent.mkdir()
    if form == "parquet":
        pq.write_table(table, local)
    elif form == "jsonl":
        local.write_text("".join(json.dumps(row) + "\n" for row in table.to_pylist()))
    else:
        with gzip.open(local, "wb") as file:
            pc.write_csv(table, file)
    s3.write("lake", f"in/rows.{form}", local.read_bytes())
    s3.write("lake", "in/_SUCCESS", b"")
    url = {"file": f"s3://lake/in/rows.{form}", "folder": "s3://lake/in/", "glob": f"s3://lake/*/rows.{form[:3]}*"}[by]

    outcome = job.submit(inputs=(url,), max_tokens=3, prompt_col="prompt")

    read = job.rows()
    assert outcome.rows == 30
    assert [row["prompt"] for row in read] == job.prompts


def test_an_input_that_was_changed_on_its_store_is_noticed(echo_job, s3):
    job = echo_job(30)
    s3.write("lake", "in/rows.parquet", job.source.read_bytes())
    options = {"inputs": ("s3://lake/in/rows.parquet",), "max_tokens": 3}
    job.submit(**options)
    assert job.submit(**options).already_complete

    pq.write_table(pq.read_table(job.source).slice(1), job.folder / "changed.parquet")
    s3.write("lake", "in/rows.parquet", (job.folder / "changed.parquet").read_bytes())

    with pytest.raises(JobMismatch, match="differing: inputs"):
        job.submit(**options)


def test_an_input_that_is_not_there_is_named(echo_job, s3):
    with pytest.raises(InputMissing, match=r"no input matches s3://lake/none.parquet"):
        echo_job(1).submit(inputs=("s3://lake/none.parquet",))
    with pytest.raises(InputMissing, match=r"cannot read s3://none/a.parquet: The specified bucket does not exist"):
        echo_job(1).submit(inputs=("s3://none/a.parquet",))
