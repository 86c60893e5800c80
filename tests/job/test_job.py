"""What becomes of strings from outside, and what a job's identity depends on."""

from dataclasses import fields
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from batchrun.engine.request import SamplingParams
from batchrun.errors import InputMissing, UsageError
from batchrun.job import Job

NEEDED = {"inputs": "rows.parquet", "output": "out"}


def load(**options: object) -> Job:
    return Job.load(NEEDED | options)


def test_sampling_fields_of_the_job_are_those_of_sampling_params_with_the_same_defaults() -> None:
    job = load()
    assert job.sampling == SamplingParams()
    assert {field.name for field in fields(SamplingParams)} <= set(Job.model_fields)


def test_flag_wins_over_variable_wins_over_file_wins_over_default(tmp_path: Path) -> None:
    file = tmp_path / "job.toml"
    file.write_text('max-tokens = 1\nmin_p = 0.1\ntop_k = 1\nstop = ["a,b", "c"]\n')
    env = {"BATCHRUN_MAX_TOKENS": "2", "BATCHRUN_TOP_K": "2", "PATH": "/bin"}
    job = Job.load(NEEDED | {"max_tokens": "3"}, env, file)
    assert (job.max_tokens, job.top_k, job.min_p, job.top_p, job.stop) == (3, 2, 0.1, 1.0, ("a,b", "c"))


def test_empty_variable_and_none_count_as_not_given() -> None:
    job = Job.load(NEEDED | {"max_tokens": None}, {"BATCHRUN_MAX_TOKENS": ""})
    assert job.max_tokens == 256


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("kv_cache_memory", "4GiB", 4 * 1024**3),
        ("kv_cache_memory", "512 MiB", 512 * 1024**2),
        ("swap_space", "0", 0),
        ("swap_space", 1234, 1234),
        ("checkpoint_every", "90s", 90.0),
        ("checkpoint_every", "15m", 900.0),
        ("checkpoint_every", "2h", 7200.0),
        ("checkpoint_every", "1h30m", 5400.0),
        ("checkpoint_every", "0.5s", 0.5),
        ("drain_timeout", "7", 7.0),
        ("wait_lock", 2.5, 2.5),
        ("max_error_rate", "1%", 0.01),
        ("max_error_rate", "0.25", 0.25),
        ("keep_cols", "id,body", ("id", "body")),
        ("keep_cols", ("id", "body"), ("id", "body")),
        ("stop", "a,b", ("a,b",)),
        ("stop_token_ids", "3,5", (3, 5)),
        ("stop_token_ids", ("3", "5,7"), (3, 5, 7)),
        ("stop_token_ids", 3, (3,)),
        ("ignore_eos", "true", True),
    ],
)
def test_text_becomes_a_typed_value(name: str, text: object, value: object) -> None:
    assert getattr(load(**{name: text}), name) == value


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_token": 1}, "unknown option 'max_token'; did you mean 'max_tokens'?"),
        ({"zzz": 1}, "unknown option 'zzz'; `batchrun submit --help` lists the options"),
        ({"max_tokens": "x"}, "--max-tokens should be a whole number, not 'x'"),
        ({"max_tokens": 1.5}, "--max-tokens should be a whole number, not 1.5"),
        ({"temperature": "hot"}, "--temperature should be a number, not 'hot'"),
        ({"ignore_eos": "perhaps"}, "--ignore-eos should be true or false, not 'perhaps'"),
        ({"max_tokens": "0"}, "--max-tokens should be greater than or equal to 1, not '0'"),
        ({"dtype": "fp16"}, "--dtype should be 'auto', 'float32', 'bfloat16' or 'float16', not 'fp16'"),
        ({"checkpoint_every": "soon"}, "--checkpoint-every should be a duration such as 90s, 15m or 2h, not 'soon'"),
        ({"checkpoint_every": "-5s"}, "--checkpoint-every should be a duration such as 90s, 15m or 2h, not '-5s'"),
        ({"max_error_rate": "x%"}, "--max-error-rate should be a rate such as 1% or 0.01, not 'x%'"),
        ({"max_error_rate": "200%"}, "--max-error-rate should be less than or equal to 1, not '200%'"),
        ({"swap_space": "4XB"}, "--swap-space should be a size such as 4GiB or 512MiB, not '4XB'"),
        ({"kv_cache_memory": "0"}, "--kv-cache-memory should be greater than 0, not '0'"),
        ({"temperature": "nan"}, "--temperature should be a finite number, not 'nan'"),
        (
            {"template": "no_such.j2"},
            "--template: 'no_such.j2' is neither a readable file nor a template (it has no {{ … }})",
        ),
        (
            {"prompt_col": "a", "messages_col": "m"},
            "--messages-col and --prompt-col exclude each other: a prompt has one source",
        ),
        (
            {"template": "{{ a }}", "messages_col": "m"},
            "--messages-col and --template exclude each other: a prompt has one source",
        ),
        (
            {"messages_col": "m", "chat": "off"},
            "--messages-col needs a chat template, so it cannot go with --chat off",
        ),
        ({"chat_template": "{{ messages }}", "chat": "off"}, "--chat-template cannot go with --chat off"),
        ({"min_tokens": 9, "max_tokens": 8}, "--min-tokens 9 is more than --max-tokens 8"),
        (
            {"preemption": "swap", "swap_space": "0"},
            "--preemption swap needs room to swap to: raise --swap-space above 0",
        ),
        ({"inputs": ()}, "no inputs: give INPUT…"),
        ({"output": None}, "no output: give -o OUT"),
    ],
)
def test_what_cannot_be_used_is_refused_in_one_line(options: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError) as caught:
        load(**options)
    assert str(caught.value) == message


def test_misspelt_variable_is_refused_but_a_strangers_is_not() -> None:
    """Kubernetes sets BATCHRUN_SERVICE_HOST in pods beside a service of our name."""
    with pytest.raises(UsageError, match=r"did you mean BATCHRUN_MAX_TOKENS\?$"):
        Job.load(NEEDED, {"BATCHRUN_MAX_TOKEN": "3"})
    strangers = {"BATCHRUN_SERVICE_HOST": "::1", "BATCHRUN_SERVICE_PORT": "80", "BATCHRUN_PORT_80_TCP_ADDR": "::1"}
    assert Job.load(NEEDED, strangers) == load()


def test_message_names_the_variable_or_the_file_that_gave_the_value(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"^BATCHRUN_TOP_P should be less than or equal to 1, not '2'$"):
        Job.load(NEEDED, {"BATCHRUN_TOP_P": "2"})
    file = tmp_path / "job.toml"
    file.write_text("top_p = 2")
    with pytest.raises(UsageError, match=f"^top_p in {file} should be less than or equal to 1, not 2$"):
        Job.load(NEEDED, file=file)
    file.write_text("top_q = 2")
    with pytest.raises(UsageError, match=f"^unknown option 'top_q' in {file}; did you mean 'top_[pk]'"):
        Job.load(NEEDED, file=file)
    file.write_text("top_p = ")
    with pytest.raises(UsageError, match=f"^{file} is not TOML: "):
        Job.load(NEEDED, file=file)
    with pytest.raises(InputMissing, match="No such file or directory; check the path given to -C"):
        Job.load(NEEDED, file=tmp_path / "none.toml")


def test_paths_are_absolute_so_that_resume_works_from_anywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny").mkdir()
    inputs = ("a.parquet", "b/*.parquet", "/abs/c.csv", "s3://bucket/d.parquet", Path("e"))
    job = load(inputs=inputs, model="tiny", tokenizer="org/name")
    here = str(tmp_path)
    assert job.inputs == (
        f"{here}/a.parquet",
        f"{here}/b/*.parquet",
        "/abs/c.csv",
        "s3://bucket/d.parquet",
        f"{here}/e",
    )
    assert (job.output, job.model, job.tokenizer) == (f"{here}/out", f"{here}/tiny", "org/name")
    assert load(model="none.gguf").model == f"{here}/none.gguf"
    assert load(model="echo").model == "echo"


def test_paths_in_the_file_start_from_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "jobs"
    folder.mkdir()
    (folder / "job.toml").write_text('inputs = ["rows.csv"]\noutput = "../out"\ntemplate = "ask.j2"\n')
    (folder / "ask.j2").write_text("Is {{ x }} big?\n")
    monkeypatch.chdir(tmp_path)
    job = Job.load({}, {}, Path("jobs/job.toml"))
    assert (job.inputs, job.output) == ((f"{folder}/rows.csv",), f"{tmp_path}/out")
    assert job.template == "Is {{ x }} big?\n"


def test_template_is_kept_as_text_so_that_a_later_edit_changes_nothing(tmp_path: Path) -> None:
    file = tmp_path / "ask.j2"
    file.write_text("{{ a }}")
    job = load(template=str(file))
    file.write_text("{{ b }}")
    assert job.template == "{{ a }}"
    assert load(template="{% if a %}x{% endif %}").template == "{% if a %}x{% endif %}"


def test_job_survives_json() -> None:
    job = load(stop=("x", "y"), stop_token_ids="1,2", kv_cache_memory="4GiB", checkpoint_every="1m", keep_cols="a,b")
    assert Job.model_validate_json(job.model_dump_json()) == job


def test_job_cannot_be_changed() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        load().__setattr__("max_tokens", 3)


CHANGES_ANSWERS = {
    "prompt_col": "a", "system": "Be brief.", "chat": "on", "limit": 7, "max_model_len": 63, "dtype": "float32",
    "max_tokens": 9, "temperature": 0.7, "stop": ("x",), "seed": 1, "keep_cols": ("a",), "output_prefix": "br_",
    "on_overlong": "truncate-left", "params_col": "p", "id_col": "i", "tokenizer": "t", "template": "{{ a }}",
    "kv_cache_dtype": "float16", "quantization": "int8",
}  # fmt: skip
CHANGES_NONE = {
    "max_num_seqs": 3, "max_num_batched_tokens": 111, "block_size": 4, "kv_cache_memory": 7, "swap_space": 7,
    "preemption": "swap", "schedule": "static", "prefix_caching": "off", "checkpoint_every": 1, "drain_timeout": 1,
    "wait_lock": 1, "max_error_rate": 0.5, "overwrite": True, "gpu_memory_utilization": 0.5, "device": "cpu",
    "push_gateway": "http://gateway:9091", "track": "wandb",
    "enforce_eager": True, "speculation": "off", "chunk_alignment_tokens": 7, "long_row_tokens": 9,
    "tensor_parallel": 2, "disaggregate": True,
}  # fmt: skip


def fingerprint(job: Job) -> dict[str, str]:
    return job.fingerprint(inputs={"rows.parquet": {"size": 63}}, model_digest="d" * 64)


@pytest.mark.parametrize("name", CHANGES_ANSWERS)
def test_fingerprint_differs_in_exactly_the_option_that_changes_the_answers(name: str) -> None:
    before, after = fingerprint(load()), fingerprint(load(**{name: CHANGES_ANSWERS[name]}))
    assert [key for key in before if before[key] != after[key]] == [name]


@pytest.mark.parametrize("name", CHANGES_NONE)
def test_fingerprint_ignores_how_the_job_is_run(name: str) -> None:
    assert fingerprint(load()) == fingerprint(load(**{name: CHANGES_NONE[name]}))


@pytest.mark.parametrize("name", CHANGES_ANSWERS)
def test_an_option_that_an_older_version_did_not_have_is_at_its_default_there(name: str) -> None:
    now = fingerprint(load())
    older = {key: value for key, value in now.items() if key != name}
    assert Job.differing(older, now) == Job.differing(now, older) == ()
    assert Job.differing(older, fingerprint(load(**{name: CHANGES_ANSWERS[name]}))) == (name,)


def test_fingerprint_depends_on_inputs_and_model() -> None:
    job = load()
    before = fingerprint(job)
    assert before["inputs"] != job.fingerprint(inputs={"rows.parquet": {"size": 64}}, model_digest="d" * 64)["inputs"]
    assert before["model"] != job.fingerprint(inputs={}, model_digest="e" * 64)["model"]


@given(st.text(max_size=200))
def test_fingerprint_values_are_short_single_lines_and_tell_texts_apart(text: str) -> None:
    value = fingerprint(load(system=text))["system"]
    assert len(value) <= 40
    assert "\n" not in value
    assert value != fingerprint(load(system=text + "!"))["system"]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_deterministic_is_for_float32(dtype: str) -> None:
    """It was found when the weights were loaded."""
    with pytest.raises(UsageError, match=f"--deterministic needs --dtype float32, not {dtype}"):
        load(deterministic=True, dtype=dtype)


@pytest.mark.parametrize("options", [{"quantization": "int8"}, {"deterministic": True}])
def test_what_is_not_proven_of_several_ranks_is_refused(options: dict[str, object]) -> None:
    assert load(tensor_parallel=1, **options).tensor_parallel == 1
    with pytest.raises(UsageError, match="cannot go with --tensor-parallel"):
        load(tensor_parallel=2, **options)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"task": "embed"}, "--task embed"),
        ({"num_beams": 2}, "--num-beams"),
        ({"tensor_parallel": 2}, "--tensor-parallel"),
        ({"workers": 2}, "--workers"),
        ({"executor": "ray"}, "--executor ray"),
        ({"swap_space": 0}, "--swap-space"),
    ],
)
def test_what_two_engines_cannot_do_is_refused_by_name(options: dict[str, object], named: str) -> None:
    assert load(disaggregate=True).disaggregate
    with pytest.raises(UsageError, match=f"--disaggregate.*{named}"):
        load(disaggregate=True, **options)


def test_a_lane_needs_the_schedule_that_mixes() -> None:
    assert load(long_row_tokens="4000", schedule="chunked").long_row_tokens == 4000
    with pytest.raises(UsageError, match="--long-row-tokens needs --schedule chunked; under fcfs"):
        load(long_row_tokens=4000, schedule="fcfs")
