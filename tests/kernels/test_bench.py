"""The benchmark checks before it times, and says what it refused. Nothing here depends on how long anything takes."""

import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from batchrun_kernels import native
from batchrun_kernels.bench import __main__ as command
from batchrun_kernels.bench.case import Case, Prepared, Way, num_cold
from batchrun_kernels.bench.cases import cpu_cases
from batchrun_kernels.bench.ceiling import Ceiling
from batchrun_kernels.bench.measure import CheckFailedError, check, time_ways

pytestmark = pytest.mark.skipif(native.find() is None, reason="needs the C kernels: a C compiler at installation")


def doubled(value: float, calls: list[int] | None = None) -> Callable[[int], Tensor]:
    def call(copy: int) -> Tensor:
        if calls is not None:
            calls.append(copy)
        return torch.full((3,), value) * 2

    return call


def prepared(*ways: Way) -> Prepared:
    return Prepared(ways, lambda: torch.full((3,), 2.0), tolerance=1e-6, num_copies=4)


def case(ready: Prepared) -> Case:
    return Case("double", "3 numbers", num_bytes=24, num_flops=3, prepare=lambda: ready)


def test_the_largest_error_of_all_ways_is_found() -> None:
    ready = prepared(Way("exact", doubled(1.0)), Way("close", doubled(1.0 + 2**-22)))
    assert check(ready) == 2**-21


@pytest.mark.parametrize("wrong", [1.1, math.nan])
def test_what_fails_its_check_is_never_timed(wrong: float, capsys: pytest.CaptureFixture[str]) -> None:
    calls: list[int] = []
    ready = prepared(Way("right", doubled(1.0, calls)), Way("wrong", doubled(wrong)))
    with pytest.raises(CheckFailedError, match="wrong differs from the reference"):
        check(ready)
    calls.clear()
    (found,) = command.show(command.measure([case(ready)], Ceiling(1e9, 1e9), seconds=0.001))
    assert (calls, found.timings) == ([0], ())
    assert "not timed: wrong differs" in capsys.readouterr().out


def test_ways_take_turns_and_every_call_takes_the_next_copy() -> None:
    ours: list[int] = []
    theirs: list[int] = []
    ready = prepared(Way("ours", doubled(1.0, ours)), Way("theirs", doubled(1.0, theirs)))
    timings = time_ways(ready, seconds=0.001)
    assert [timing.way for timing in timings] == ["ours", "theirs"]
    for calls, timing in zip((ours, theirs), timings, strict=True):
        assert calls == [copy % 4 for copy in range(1, len(calls) + 1)]
        assert timing.num_calls == len(calls) - 1 >= 5
        assert 0 < timing.best_s <= timing.median_s


def test_the_floor_is_the_slower_of_memory_and_arithmetic() -> None:
    ceiling = Ceiling(bytes_per_s=100.0, flops_per_s=10.0)
    small, large = (Case("any", "", num_bytes=200, num_flops=flops, prepare=prepared) for flops in (10, 50))
    assert (ceiling.floor_s(small), ceiling.is_memory_bound(small)) == (2.0, True)
    assert (ceiling.floor_s(large), ceiling.is_memory_bound(large)) == (5.0, False)


def test_memory_is_cold_when_its_turn_comes_again() -> None:
    assert num_cold(1 << 20) == 128
    assert num_cold(1 << 40) == 2


def test_a_small_case_of_every_operation_passes_its_check() -> None:
    smallest: dict[str, Case] = {}
    for one in cpu_cases():
        smallest.setdefault(one.operation, one)
    assert sorted(smallest) == ["chunk", "decode", "gemm", "gemm_int8", "glu", "largest", "rms_norm", "rope", "write"]
    for one in smallest.values():
        check(one.prepare())


def test_the_command_writes_what_it_prints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def cases() -> Iterator[Case]:
        yield case(prepared(Way("ours", doubled(1.0)), Way("theirs", doubled(1.0))))
        yield case(prepared(Way("ours", doubled(2.0))))

    monkeypatch.setattr(command, "cpu_cases", cases)
    monkeypatch.setattr(command, "measure_cpu", lambda: Ceiling(1e9, 1e9))
    file = tmp_path / "found.json"
    assert command.main(["double", "--seconds", "0.001", "--json", str(file)]) == 1
    written = json.loads(file.read_text())
    assert [one["refusal"] is None for one in written["cases"]] == [True, False]
    assert [timing["way"] for timing in written["cases"][0]["timings"]] == ["ours", "theirs"]
    printed = capsys.readouterr().out
    assert "ours ms (best)" in printed
    assert "not timed" in printed
    monkeypatch.setattr(command, "cpu_cases", lambda: iter([next(cases())]))
    assert command.main(["double", "--seconds", "0.001"]) == 0


def test_without_the_library_the_reason_is_said(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(native, "FOLDER", tmp_path)
    assert command.main([]) == 1
    assert "were not built" in capsys.readouterr().err
