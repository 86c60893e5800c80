"""A profile is found by the jobs that it was measured for, and by no other."""

import json
import os
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from batchrun.errors import StorageFailed
from batchrun.job import Job
from batchrun.model_spec import ModelSpec
from batchrun.tune import profile as subject
from batchrun.tune.profile import Machine, Options, Profile, as_tuned, find, save, this_machine
from tests.tune.profiles import SPEC, make_profile


def job(**options: Any) -> Job:
    return Job(inputs=("in",), output="out", **options)


def changed(profile: Profile, **fields: Any) -> Profile:
    return profile.model_copy(update=fields)


def test_what_is_saved_is_found(tmp_path: Path) -> None:
    profile = make_profile()
    file = save(tmp_path, profile)
    assert find(tmp_path, job(), SPEC) == profile
    assert [path.name for path in file.parent.iterdir()] == [file.name]


def test_one_from_before_starts_were_measured_is_found(tmp_path: Path) -> None:
    file = save(tmp_path, make_profile())
    stored = json.loads(file.read_text())
    del stored["start"]
    file.write_text(json.dumps(stored))
    found = find(tmp_path, job(), SPEC)
    assert found == changed(make_profile(), start=None)
    assert found.start_s(1) == found.start_s(8) == found.load_s


def test_there_is_none_before(tmp_path: Path) -> None:
    assert find(tmp_path / "none", job(), SPEC) is None


@pytest.mark.parametrize(
    "options",
    [{"device": "cuda"}, {"dtype": "bfloat16"}, {"kv_cache_dtype": "float16"}, {"enforce_eager": True}],
)
def test_other_options_do_not_find_it(tmp_path: Path, options: dict[str, Any]) -> None:
    save(tmp_path, make_profile())
    assert find(tmp_path, job(**options), SPEC) is None


@pytest.mark.parametrize(
    "options", [{"device": "cpu"}, {"dtype": "float32"}, {"kv_cache_dtype": "float32"}, {"max_tokens": 3, "seed": 7}]
)
def test_options_that_mean_the_same_find_it(tmp_path: Path, options: dict[str, Any]) -> None:
    profile = make_profile()
    save(tmp_path, profile)
    assert find(tmp_path, job(**options), SPEC) == profile


@pytest.mark.parametrize("name", ["device", "dtype", "kv_cache_dtype"])
def test_what_auto_does_not_mean_is_not_found_by_auto(tmp_path: Path, name: str) -> None:
    """As after `tune --device cpu` on a machine with a GPU."""
    profile = make_profile()
    options = changed(profile.options, **{name: tuple(set(getattr(profile.options, name)) - {"auto"})})
    assert isinstance(options, Options)
    save(tmp_path, changed(profile, options=options))
    assert find(tmp_path, job(), SPEC) is None


@pytest.mark.parametrize("name", ["processor", "threads", "kernels"])
def test_another_machine_does_not_find_it(tmp_path: Path, name: str) -> None:
    profile = make_profile()
    other = {"processor": "abacus", "threads": profile.machine.threads + 1, "kernels": "0" * 16}[name]
    save(tmp_path, changed(profile, machine=changed(profile.machine, **{name: other})))
    assert find(tmp_path, job(), SPEC) is None


def test_another_model_does_not_find_it(tmp_path: Path) -> None:
    """Not even one whose digest begins alike."""
    save(tmp_path, make_profile(digest="f" * 16 + "0" * 48))
    for digest in ("f" * 16 + "1" * 48, "e" * 64):
        spec = ModelSpec("other", "Llama", 2, 2, 6, 67, 256, (2,), digest)
        assert find(tmp_path, job(), spec) is None


def test_the_number_of_threads_is_a_part_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "63")
    assert this_machine().threads == 63
    for unusable in ("", "many"):
        monkeypatch.setenv("OMP_NUM_THREADS", unusable)
        assert this_machine().threads >= 1


COUNTED = """
from batchrun.executors.processes import LocalProcesses
from batchrun.tune.profile import this_machine
def counted():
    return this_machine().threads, int(LocalProcesses(1)._environment()["OMP_NUM_THREADS"])
before = counted()
import torch
print(before, counted())
"""


def test_cores_are_counted_alike_once_torch_has_bound_a_thread_to_one() -> None:
    """They were counted as one, so that a measured model was not found and workers had a thread each."""
    env = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    counted = subprocess.run(
        [sys.executable, "-c", COUNTED], env=env | {"OMP_PROC_BIND": "true"}, capture_output=True, text=True, check=True
    )
    cores = len(os.sched_getaffinity(0))
    assert counted.stdout.strip() == f"({cores}, {cores}) ({cores}, {cores})"


def test_a_machine_without_the_c_library_is_another(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(subject.importlib.util, "find_spec", lambda name: None)
    assert this_machine().kernels == ""


def test_measuring_again_replaces_and_another_dtype_stands_beside(tmp_path: Path) -> None:
    first = make_profile()
    later = changed(first, measured_at=first.measured_at + timedelta(days=1), load_s=7.0)
    half = changed(first, options=changed(first.options, dtype=("float16",)), dtype="float16")
    files = {save(tmp_path, one) for one in (first, half, later)}
    assert len(files) == len(list((tmp_path / "profiles").iterdir())) == 2
    assert find(tmp_path, job(), SPEC) == later
    assert find(tmp_path, job(dtype="float16"), SPEC) == half


def test_of_several_that_fit_the_newest_is_taken(tmp_path: Path) -> None:
    """One was measured for "auto", the other by name on a machine where that was not the same."""
    old = make_profile()
    new = changed(old, options=changed(old.options, device=("cpu",)), measured_at=old.measured_at + timedelta(hours=1))
    save(tmp_path, new)
    save(tmp_path, old)
    assert find(tmp_path, job(device="cpu"), SPEC) == new
    assert find(tmp_path, job(device="auto"), SPEC) == old


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text[: len(text) // 2],
        lambda text: "[]",
        lambda text: "\0" * 63,
        lambda text: text.replace('"format": 1', '"format": 2'),
        lambda text: text.replace('"token_over_8"', '"token_over_9"'),
        lambda text: json.dumps(json.loads(text) | {"flops_per_s": -1.0}),
        lambda text: json.dumps({key: value for key, value in json.loads(text).items() if key != "pool"}),
    ],
)
def test_a_damaged_file_is_passed_over_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: Any
) -> None:
    file = save(tmp_path, make_profile())
    whole = file.read_text()
    damaged = damage(whole)
    assert damaged != whole
    file.write_text(damaged)
    assert find(tmp_path, job(), SPEC) is None
    (warning,) = caplog.messages
    assert str(file) in warning
    assert "batchrun tune" in warning


def test_a_cache_that_cannot_be_written_to_is_an_error_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "profiles").write_text("a file where a folder should be")
    with pytest.raises(StorageFailed, match="cannot write"):
        save(tmp_path, make_profile())


def test_a_job_that_leaves_steps_open_takes_those_that_were_found_best() -> None:
    profile = make_profile()
    tuned = as_tuned(job(seed=3), profile)
    assert (tuned.max_num_seqs, tuned.max_num_batched_tokens) == (profile.max_num_seqs, profile.max_num_batched_tokens)
    assert tuned.fingerprint(inputs={}, model_digest="") == job(seed=3).fingerprint(inputs={}, model_digest="")


@pytest.mark.parametrize("options", [{"max_num_seqs": 3}, {"max_num_batched_tokens": 7}, {"schedule": "static"}])
def test_a_job_that_says_how_large_steps_are_is_left_as_it_is(options: dict[str, Any]) -> None:
    assert as_tuned(job(**options), make_profile()) == job(**options)


def test_without_a_profile_a_job_stays_as_it_is() -> None:
    assert as_tuned(job(), None) == job()


def test_a_tuned_step_has_room_for_the_beams_of_a_row() -> None:
    profile = make_profile()
    assert profile.max_num_seqs < 64
    assert as_tuned(job(num_beams=64), profile).max_num_seqs == 64


def test_the_machine_is_the_same_twice() -> None:
    assert this_machine() == this_machine()
    assert isinstance(this_machine(), Machine)


def test_the_label_says_when_and_where() -> None:
    profile = changed(make_profile(), measured_at=datetime(2026, 11, 30, 23, 59, tzinfo=UTC))
    assert profile.label == "2026-11-30 on cpu, float32"
