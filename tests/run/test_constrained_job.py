"""Constraints through whole jobs: what comes out, what is said of a text that was cut, and nothing lost by a kill."""

import json
import re
import signal
import subprocess
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchrun.errors import DataError, JobMismatch
from batchrun.planning import plan
from batchrun.retry import retry
from batchrun.stop import StopRequest
from tests.endurance.constrained import constraint_of
from tests.endurance.random_constraints import follows_regex, follows_schema
from tests.run.conftest import EchoJob, ignore

SCHEMA = {
    "type": "object",
    "properties": {
        "label": {"enum": ["good", "bad"]},
        "score": {"type": "integer", "minimum": 0, "maximum": 99},
        "why": {"type": ["string", "null"], "maxLength": 12},
        "tags": {"type": "array", "items": {"type": "string", "pattern": "^[a-c]{1,4}$"}, "maxItems": 3},
    },
    "required": ["label", "score", "tags"],
    "additionalProperties": False,
}
PARSED = pa.struct(
    [("label", pa.string()), ("score", pa.int64()), ("why", pa.string()), ("tags", pa.list_(pa.string()))]
)


def test_every_row_is_json_of_the_schema_and_parsed_has_its_values(echo_job) -> None:
    job = echo_job(60)
    assert job.submit(json_schema=SCHEMA, max_tokens=200).errors == {}
    rows = job.rows()
    assert all(follows_schema(SCHEMA, row["text"]) for row in rows)
    absent = dict.fromkeys(SCHEMA["properties"])
    assert [row["parsed"] for row in rows] == [absent | json.loads(row["text"]) for row in rows]
    assert {row["finish_reason"] for row in rows} == {"stop"}
    assert len({row["text"] for row in rows}) > 30
    assert pq.read_schema(next(job.out.iterdir())).field("parsed").type == PARSED


def test_a_text_that_is_cut_is_an_error_and_not_repaired(echo_job) -> None:
    job = echo_job(20)
    outcome = job.submit(json_schema=SCHEMA, max_tokens=60)
    rows = job.rows()
    cut = [row for row in rows if row["completion_tokens"] == 60 and row["error"]]
    assert outcome.errors == {"schema_violation": len(cut)}
    assert 0 < len(cut) < 20
    assert {(row["text"], row["parsed"], row["finish_reason"]) for row in cut} == {(None, None, "length")}
    assert (
        "cut at 60 tokens before the text was complete by json_schema; raise max_tokens; its end: "
        in cut[0]["error"]["message"]
    )
    assert all(follows_schema(SCHEMA, row["text"]) for row in rows if not row["error"])


def test_a_stop_string_that_breaks_the_form_is_an_error(echo_job) -> None:
    job = echo_job(20)
    job.submit(json_schema=SCHEMA, max_tokens=200, stop=('"tags"',))
    assert {row["error"]["type"] for row in job.rows()} == {"schema_violation"}
    assert "ended by '\"tags\"' before the text was complete" in job.rows()[0]["error"]["message"]


@pytest.mark.parametrize(
    ("options", "pattern"),
    [
        ({"regex": "[A-C]{2}-[0-9]{3}"}, "[A-C]{2}-[0-9]{3}"),
        ({"guided_choice": ("yes", "no", "perhaps")}, "yes|no|perhaps"),
        ({"grammar": 'start: item (", " item)*\nitem: /[a-e]{1,3}/'}, "[a-e]{1,3}(, [a-e]{1,3})*"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_every_kind_of_constraint_is_followed(echo_job, options, pattern, temperature) -> None:
    job = echo_job(40)
    job.submit(**options, temperature=temperature, max_tokens=200)
    rows = job.rows()
    assert all(re.fullmatch(pattern, row["text"]) for row in rows if not row["error"])
    assert sum(row["error"] is not None for row in rows) < 4
    assert "parsed" not in rows[0]


def test_rows_with_constraints_of_their_own_are_valid_by_others_measure(tmp_path: Path) -> None:
    """Random schemas and expressions beside free rows, in one job; checked by jsonschema and re."""
    params = [constraint_of(seed) if seed % 5 else None for seed in range(150)]
    cells = [each and json.dumps(each) for each in params]
    pq.write_table(pa.table({"prompt": [f"row {at}" for at in range(150)], "p": cells}), tmp_path / "input.parquet")
    job = EchoJob(tmp_path, [])
    job.submit(params_col="p", max_tokens=300)
    followed = 0
    for asked, row in zip(params, job.rows(), strict=True):
        if asked is None or row["error"]:
            continue
        text = row["text"]
        schema, regex = asked.get("json_schema"), asked.get("regex")
        assert follows_schema(json.loads(schema), text) if schema else follows_regex(str(regex), text), (asked, text)
        followed += 1
    assert followed > 100


def test_a_rows_own_constraint_leaves_parsed_to_the_jobs(tmp_path: Path) -> None:
    cells = [None, '{"regex": "[a-c]{3}"}', '{"json_schema": {"type": "integer", "maximum": 9}}', '{"json_schema": ""}']
    pq.write_table(pa.table({"prompt": list("abcd"), "p": cells}), tmp_path / "input.parquet")
    job = EchoJob(tmp_path, [])
    job.submit(
        params_col="p", json_schema={"type": "array", "items": {"enum": ["x", "y"]}, "minItems": 2, "maxItems": 2}
    )
    own, regex, other, free = job.rows()
    assert own["parsed"] == json.loads(own["text"])
    assert [row["parsed"] for row in (regex, other, free)] == [None, None, None]
    assert re.fullmatch("[a-c]{3}", regex["text"])
    assert int(other["text"]) <= 9
    assert free["text"]


def test_a_plan_names_what_cannot_be_enforced_and_the_command_exits_65(echo_job) -> None:
    job = echo_job(3)
    with pytest.raises(DataError, match="uniqueItems"):
        plan(job.job(json_schema='{"type":"array","uniqueItems":true}'), ignore, StopRequest())
    done = job.call("submit", "--json-schema", '{"type":"array","uniqueItems":true}')
    assert (done.returncode, done.stdout) == (65, "")
    assert done.stderr.strip().endswith(
        'error: --json-schema cannot be enforced: Unimplemented keys: ["uniqueItems"]; leave it out or say it otherwise'
    )


def test_a_retry_may_constrain_what_was_free(echo_job) -> None:
    job = echo_job(8)
    job.submit()
    done = job.call("retry", str(job.out), "--where", "row_idx < 2", "--regex", "[a-c]{4}")
    assert done.returncode == 0, done.stderr
    assert [bool(re.fullmatch("[a-c]{4}", row["text"])) for row in job.rows()] == [True] * 2 + [False] * 6
    (job.folder / "schema.json").write_text('{"enum": ["a", "b"]}')
    retry(job.out, "row_idx = 7", {"json_schema": str(job.folder / "schema.json")}, ignore, StopRequest())
    assert job.rows()[7]["text"] in ('"a"', '"b"')


def test_another_constraint_is_another_job(echo_job) -> None:
    job = echo_job(3)
    job.submit(regex="a")
    with pytest.raises(JobMismatch, match="regex"):
        job.submit(regex="b")


def test_a_constrained_job_killed_and_resumed_is_the_one_that_never_was(echo_job, tmp_path: Path) -> None:
    slow = (
        "--json-schema", json.dumps(SCHEMA), "--max-tokens", "150", "--max-num-seqs", "4", "--checkpoint-every", "0.1s",
        "--progress", "none", "--kv-cache-memory", "12KiB",
    )  # fmt: skip
    undisturbed, job = echo_job(400, tmp_path / "undisturbed"), echo_job(400, tmp_path / "killed")
    assert undisturbed.call("submit", *slow).returncode == 0
    codes = []
    for number in (signal.SIGKILL, signal.SIGTERM, signal.SIGKILL):
        process = job.start("submit", *slow)
        try:
            process.wait(timeout=2.0)
        except subprocess.TimeoutExpired:
            process.send_signal(number)
        process.communicate()
        codes.append(process.returncode)
    assert {-signal.SIGKILL, 75} & set(codes), "never killed while it ran"
    assert job.call("submit", *slow).returncode == 0
    assert job.result() == undisturbed.result()
