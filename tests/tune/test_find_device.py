"""What a worker of the simulation runs on, and what is said where nobody knows."""

from pathlib import Path

import pytest

from batchrun import planning
from batchrun.errors import NotMeasured, UsageError
from batchrun.job import MEASURED, Job
from batchrun.tune.profile import Options, save
from tests.device.tiny_families import make_model
from tests.tune.profiles import make_profile


def job(**options: object) -> Job:
    return Job.load({"inputs": ("a",), "output": "out", "model": "echo", **options})


def test_without_a_name_it_is_what_was_measured_here_with_as_many_threads(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    profile = make_profile()
    save(cache, profile)
    assert planning.find_device(job(), None) == profile
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    with pytest.raises(NotMeasured, match=r"; OMP_NUM_THREADS=1 batchrun tune echo measures it$"):
        planning.find_device(job(), None)


def test_only_remedies_that_work_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`echo` was to be run on a named device, and there to be run on none."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    folder = tmp_path / "tiny model"
    make_model("llama").save_pretrained(folder)
    tune, device = f"batchrun tune '{folder}'", "name a device: --simulate 8xh100-80gb"
    for options, remedy in (
        ({}, f"{tune} measures it, or {device}"),
        ({"dtype": "bfloat16"}, f"{tune} --dtype bfloat16 measures it, or {device}"),
        ({"dtype": "float32", "enforce_eager": True}, f"{tune} --dtype float32 --enforce-eager measures it"),
        ({"quantization": "int8"}, "nothing measures it yet, leave out --simulate"),
    ):
        asked = job(model=str(folder), **options)
        with pytest.raises(NotMeasured) as refused:
            planning.find_device(asked, None)
        assert str(refused.value).endswith(f"as the job would run it; {remedy}")
        command = planning.how_to_estimate(asked)
        assert command is None if "nothing" in remedy else remedy.startswith(f"{command} measures it")


def test_a_command_that_measures_measures_what_the_job_runs(cache: Path) -> None:
    """What it takes of the job is all that a profile tells apart, but for what it cannot measure."""
    told = {*MEASURED, "model", "quantization"}
    assert {*Options.model_fields} <= told


def test_a_name_may_be_the_file_of_a_profile(cache: Path) -> None:
    path = save(cache, make_profile())
    assert planning.find_device(job(), str(path)) == make_profile()


def test_a_profile_is_of_one_model(cache: Path) -> None:
    path = save(cache, make_profile(digest="another"))
    with pytest.raises(UsageError, match="was measured for echo, not for echo"):
        planning.find_device(job(), str(path))


def test_an_unknown_name_is_answered_with_those_that_are_known(tmp_path: Path) -> None:
    (tmp_path / "notes.json").write_text("{}")
    for name in ("h100", str(tmp_path / "notes.json")):
        with pytest.raises(UsageError, match=r"is no device that is known \(a100-80gb, h100-80gb"):
            planning.find_device(job(), name)


def test_only_generated_text_is_simulated() -> None:
    for options, what in (({"task": "score", "target_col": "t"}, "--task score"), ({"num_beams": 3}, "--num-beams")):
        with pytest.raises(UsageError, match=what):
            planning.find_device(job(**options), "l4")


def test_what_would_take_other_steps_is_refused(cache: Path) -> None:
    path = save(cache, make_profile())
    with pytest.raises(UsageError, match="--simulate knows no steps of several ranks; leave out --tensor-parallel"):
        planning.find_device(job(tensor_parallel=2), str(path))
    with pytest.raises(UsageError, match="--simulate knows no steps of a prefiller; leave out --disaggregate"):
        planning.find_device(job(disaggregate=True), str(path))
    with pytest.raises(UsageError, match="was measured with other types of numbers"):
        planning.find_device(job(kv_cache_dtype="float16"), str(path))
