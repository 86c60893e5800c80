"""What a worker of the simulation runs on, and what is said where nobody knows."""

from pathlib import Path

import pytest

from batchrun import planning
from batchrun.errors import UsageError
from batchrun.job import Job
from batchrun.tune.profile import save
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
    with pytest.raises(UsageError, match="OMP_NUM_THREADS=1 batchrun tune echo measures it, or name a device"):
        planning.find_device(job(), None)


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
