"""Several workers as they would share a plan: by the real policy, through as many real schedulers."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchrun import planning
from batchrun.engine.step_time import TERMS, StepTimes
from batchrun.leases import Leases
from batchrun.plan.plan import Plan
from batchrun.stop import StopRequest
from batchrun.tune import fleet as subject
from batchrun.tune.fleet import Crew, Fleet, simulate
from batchrun.tune.hands import EngineHand, work
from batchrun.tune.imagined import ExpectedRows
from batchrun.tune.simulation import estimate
from tests.run.conftest import EchoJob, ignore
from tests.tune.profiles import make_profile

MakeJob = Callable[..., EchoJob]
PROFILE = make_profile()
# Every token takes as long as any other, whoever computes it beside what.
BY_TOKENS = make_profile(times=StepTimes.named(dict.fromkeys(TERMS, 0.0) | {"token": 0.01}))


def planned(job: EchoJob, **options: Any) -> Plan:
    return planning.plan(job.job(**options), ignore, StopRequest())


def simulated(job: EchoJob, *workers: int, profile: Any = PROFILE, cost: float | None = None, **options: Any) -> Fleet:
    options = {"ignore_eos": True, **options}
    return simulate(job.job(**options), planned(job, **options), profile, workers, cost)


def of_tokens(job: EchoJob, rows: list[list[int]]) -> EchoJob:
    """The same folder with prompts of these tokens."""
    pq.write_table(pa.table({"prompt": pa.array(rows, pa.list_(pa.int32()))}), job.source)
    return job


def run_s(fleet: Fleet) -> list[float]:
    return [crew.time_s - crew.start_s for crew in fleet.crews]


def test_one_worker_takes_what_the_plan_is_estimated_to_take(echo_job: MakeJob) -> None:
    job, options = echo_job(300), {"ignore_eos": True, "max_tokens": 40}
    expected = estimate(job.job(**options), planned(job, **options), PROFILE)
    (one,) = simulated(job, 1, **options).crews
    assert one.time_s == pytest.approx(expected.start_s + expected.run_s, rel=0.02)
    assert (one.computed_tokens, one.imbalance, one.error) == (expected.computed_tokens, 1.0, 0.0)


def test_workers_on_independent_rows_take_their_share_of_the_time(echo_job: MakeJob) -> None:
    """Within what a worker is leased at a time, which is what the last of them may have and the others not."""
    job = of_tokens(echo_job(1), [[3 + row % 250, 3 + row // 250, *range(3, 53)] for row in range(800)])
    fleet = simulated(job, 1, 2, 3, 5, profile=BY_TOKENS, max_tokens=9, prefix_caching="off")
    (alone, *shared), (one, *_) = run_s(fleet), fleet.crews
    leased_s = 0.01 * (64 + 32) * (52 + 8)
    assert alone == pytest.approx(0.01 * 800 * (52 + 8))
    assert [num * time_s for num, time_s in zip((2, 3, 5), shared, strict=True)] == pytest.approx(
        [alone] * 3, abs=leased_s
    )
    assert {crew.computed_tokens for crew in fleet.crews} == {one.computed_tokens}
    assert {crew.hit_rate for crew in fleet.crews} == {0.0}


@pytest.mark.parametrize("most_work", [10**6, 0], ids=["row by row", "by samples"])
def test_a_prefix_that_all_rows_share_is_computed_once_by_each_worker(
    echo_job: MakeJob, monkeypatch: pytest.MonkeyPatch, most_work: int
) -> None:
    monkeypatch.setattr(subject, "_MOST_WORK", most_work)
    prefix = [7] * 320  # whole blocks
    job = of_tokens(echo_job(1), [[*prefix, 20 + row, 3] for row in range(200)])
    fleet = simulated(job, 1, 2, 4, 7, max_tokens=5)
    one = 320 + 200 * (2 + 4)
    assert [crew.computed_tokens for crew in fleet.crews] == [one + (num - 1) * 320 for num in (1, 2, 4, 7)]
    assert [crew.hit_rate for crew in fleet.crews] == pytest.approx(
        [(200 - num) * 320 / (200 * 322) for num in (1, 2, 4, 7)]
    )


@pytest.mark.parametrize("most_work", [10**6, 0], ids=["row by row", "by samples"])
def test_one_huge_row_is_seen_in_the_imbalance(
    echo_job: MakeJob, monkeypatch: pytest.MonkeyPatch, most_work: int
) -> None:
    monkeypatch.setattr(subject, "_MOST_WORK", most_work)
    job = echo_job(1)
    params = [None] * 60 + ['{"max_tokens": 3000}']
    pq.write_table(pa.table({"prompt": [f"{n} is a number" for n in range(61)], "params": params}), job.source)
    one, four = simulated(job, 1, 4, max_tokens=4, params_col="params").crews
    alone_s = 3000 * PROFILE.times.costs[0]
    assert four.time_s > alone_s
    assert four.imbalance > 3
    assert (one.imbalance, four.time_s) == (1.0, pytest.approx(one.time_s, rel=0.1))


@pytest.mark.parametrize("options", [{"max_tokens": 16}, {"max_tokens": 5, "prefix_caching": "off"}])
def test_samples_are_within_the_error_that_is_stated(
    echo_job: MakeJob, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    job, workers = echo_job(1200), (1, 3, 16)
    monkeypatch.setattr(subject, "_MOST_WORK", 10**9)
    whole = simulated(job, *workers, **options)
    monkeypatch.setattr(subject, "_MOST_WORK", 0)
    sampled = simulated(job, *workers, **options)
    assert (whole.is_sampled, sampled.is_sampled) == (False, True)
    for exact, expected in zip(whole.crews, sampled.crews, strict=True):
        assert 0.05 <= expected.error <= 0.4
        assert expected.time_s == pytest.approx(exact.time_s, rel=expected.error)
        assert expected.hit_rate == pytest.approx(exact.hit_rate, abs=0.01)
        assert expected.computed_tokens == pytest.approx(exact.computed_tokens, rel=0.01)


def test_a_worker_that_comes_late_finds_rows_that_nobody_hoards(echo_job: MakeJob) -> None:
    """What two workers have not begun with goes to the one that has room: neither ends long after the other."""
    job = of_tokens(echo_job(1), [[3 + row, *range(3, 53)] for row in range(96)])
    options = {"max_tokens": 40, "ignore_eos": True, "prefix_caching": "off", "max_num_seqs": 8}
    plan = planned(job, **options)
    rows = ExpectedRows(job.job(**options).sampling, plan.summary.longest_len)
    requests = list(rows.requests(plan, np.arange(96)))
    crew = [EngineHand(job.job(**options), plan.summary, BY_TOKENS, requests) for _ in range(2)]
    crew[0]._runner.now_s = late_s = 20.0
    work(crew, Leases(np.zeros(96, dtype=np.int32), np.full(96, 90), 2))
    alone_s = 96 * 0.01 * (51 + 39)
    assert crew[0].now_s == pytest.approx(crew[1].now_s, abs=8 * 0.01 * (51 + 39))
    assert crew[0].now_s == pytest.approx((alone_s + late_s) / 2, abs=8 * 0.01 * (51 + 39))


def test_every_worker_is_paid_from_the_jobs_start_to_its_end(echo_job: MakeJob) -> None:
    fleet = simulated(echo_job(300), 2, 8, cost=3.5, max_tokens=9)
    for crew in fleet.crews:
        assert crew.cost == pytest.approx(crew.workers * crew.time_s / 3600 * 3.5)


def test_one_engine_starts_in_the_jobs_process_and_several_in_their_own(echo_job: MakeJob) -> None:
    fleet = simulated(echo_job(300), 1, 2, 8)
    assert [crew.start_s for crew in fleet.crews] == [1.0 + 4.0, 1.0 + 6.0, 1.0 + 6.0]


def test_a_profile_from_before_foretells_the_loading_and_says_so(echo_job: MakeJob) -> None:
    old = PROFILE.model_copy(update={"start": None})
    fleet = simulated(echo_job(300), 1, 2, profile=old)
    assert [crew.start_s for crew in fleet.crews] == [4.0, 4.0]
    assert fleet.label == f"{PROFILE.label}, but not what starts a job: tune again"


def test_more_workers_than_rows_do_no_harm(echo_job: MakeJob) -> None:
    three, many = simulated(echo_job(3), 3, 64, max_tokens=9).crews
    assert many.time_s == three.time_s
    assert many.computed_tokens == three.computed_tokens


@pytest.mark.parametrize("most_work", [10**6, 0], ids=["row by row", "by samples"])
def test_a_plan_without_rows_takes_no_time(echo_job: MakeJob, monkeypatch: pytest.MonkeyPatch, most_work: int) -> None:
    monkeypatch.setattr(subject, "_MOST_WORK", most_work)
    fleet = simulated(echo_job(3), 2, max_model_len=2, cost=1.0)
    assert fleet.crews == (Crew(2, 7.0, 7.0, pytest.approx(14 / 3600), 0.0, 0, 1.0, 0.0),)


def test_the_same_plan_gives_the_same_fleet(echo_job: MakeJob) -> None:
    assert simulated(echo_job(200), 1, 5, max_tokens=9) == simulated(echo_job(200), 1, 5, max_tokens=9)


def test_outputs_that_may_end_are_expected_to_be_half_as_long(echo_job: MakeJob) -> None:
    free = simulated(echo_job(100), 2, max_tokens=64, ignore_eos=False)
    half = simulated(echo_job(100), 2, max_tokens=32, overwrite=True)
    assert (free.are_lengths_known, half.are_lengths_known) == (False, True)
    assert free.crews == half.crews


def test_workers_have_equal_work_rather_than_equally_many_rows(echo_job: MakeJob) -> None:
    """Most of it is in a few rows at the plan's end."""
    lengths = np.full(1000, 4)
    lengths[-200:] = 50
    job = echo_job(1)
    params = [f'{{"max_tokens": {length}}}' for length in lengths]
    pq.write_table(pa.table({"prompt": [f"{n:04} is a number" for n in range(1000)], "params": params}), job.source)
    (two,) = simulated(job, 2, profile=BY_TOKENS, params_col="params").crews
    assert two.imbalance < 1.15
