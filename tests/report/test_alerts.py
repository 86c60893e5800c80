"""Every rule fires when it should, keeps still when it should, and says what to do."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from batchrun.engine.statistics import Counters
from batchrun.latency import Histogram, Latencies
from batchrun.report.alerts import State, Verdict, judge
from batchrun.report.facts import best_hit_rate
from batchrun.report.series import Sample, Series
from tests.report.samples import sample, series

CALM = sample()


def counted(**counters: int) -> Sample:
    return replace(CALM, counters=Counters(rows_finished=1000, computed_tokens=10_000, **counters))


def waited(*seconds: float) -> Sample:
    histogram = Histogram()
    for duration in seconds:
        histogram.add(duration)
    return replace(CALM, latencies=Latencies(first_token=histogram))


def verdict(rule: str, found: Series, best_hit_rate: float | None = 0.8) -> Verdict:
    return next(each for each in judge(found, best_hit_rate) if each.rule == rule)


@pytest.mark.parametrize(
    ("rule", "samples", "facts", "state"),
    [
        ("preemptions", [counted()], {}, "ok"),
        ("preemptions", [counted(swap_preemptions=10)], {}, "hint"),
        ("preemptions", [counted(swap_preemptions=6, recompute_preemptions=5)], {}, "alert"),
        ("KV pool full", [replace(CALM, seconds=94.0), replace(CALM, seconds=4.0, kv_usage=0.86)], {}, "ok"),
        ("KV pool full", [replace(CALM, seconds=94.0), replace(CALM, seconds=6.0, kv_usage=0.86)], {}, "alert"),
        ("KV pool full", [replace(CALM, kv_usage=0.85)], {}, "ok"),
        ("room for more rows", [replace(CALM, kv_usage=0.8, num_running=8.0)], {}, "hint"),
        ("room for more rows", [replace(CALM, kv_usage=0.6, num_running=8.0)], {}, "ok"),
        ("room for more rows", [replace(CALM, kv_usage=0.8, num_running=4.0)], {}, "ok"),
        ("room for more rows", [replace(CALM, kv_usage=0.8, num_running=8.0, num_waiting=0.0)], {}, "ok"),
        ("room for more rows", [replace(counted(swap_preemptions=1), kv_usage=0.8, num_running=8.0)], {}, "ok"),
        ("batch filled", [replace(CALM, num_running=4.0)], {}, "ok"),
        ("batch filled", [replace(CALM, num_running=3.9)], {}, "hint"),
        ("batch filled", [replace(CALM, num_running=3.9, num_waiting=0.5)], {}, "ok"),
        ("prefix hit rate", [counted(prompt_tokens=100, cached_tokens=30)], {}, "ok"),
        ("prefix hit rate", [counted(prompt_tokens=100, cached_tokens=29)], {}, "hint"),
        ("prefix hit rate", [counted(prompt_tokens=100)], {"shares_prefixes": False}, "ok"),
        ("prefix tree worth its upkeep", [replace(CALM, num_nodes=60_000)], {}, "ok"),
        ("prefix tree worth its upkeep", [replace(counted(prompt_tokens=9), num_nodes=50_001)], {}, "alert"),
        ("prefix tree worth its upkeep", [replace(counted(prompt_tokens=9), num_nodes=50_000)], {}, "ok"),
        ("first tokens in turn", [CALM], {}, "unknown"),
        ("first tokens in turn", [waited(1.0, 1.0, 2.8)], {}, "ok"),
        ("first tokens in turn", [waited(1.0, 1.0, 3.3)], {}, "hint"),
        ("arithmetic and bandwidth in balance", [CALM], {}, "unknown"),
        ("processor time", [replace(CALM, seconds=10.0, busy_s=7.1)], {}, "ok"),
        ("processor time", [replace(CALM, seconds=10.0, busy_s=6.9)], {}, "hint"),
        ("processor time", [replace(CALM, seconds=10.0, busy_s=6.9)], {"is_gpu": True}, "ok"),
    ],
)  # fmt: skip
def test_rule(rule: str, samples: list[Sample], facts: dict[str, object], state: State) -> None:
    found = verdict(rule, series(*samples, **facts))
    assert found.state == state, found
    assert bool(found.advice) == (state in ("hint", "alert") or "balance" in rule)
    assert found.fires == (state in ("hint", "alert"))


def test_few_hits_are_the_pools_fault_when_the_plan_finds_more() -> None:
    few = series(counted(prompt_tokens=100, cached_tokens=10))
    assert "--kv-cache-memory" in verdict("prefix hit rate", few, best_hit_rate=0.9).advice
    assert "template" in verdict("prefix hit rate", few, best_hit_rate=0.11).advice


def test_few_hits_say_nothing_before_all_of_the_plan_has_run() -> None:
    found = verdict("prefix hit rate", series(counted(prompt_tokens=100, cached_tokens=10)), best_hit_rate=None)
    assert (found.state, found.measured) == ("unknown", "10.0% of the rows on record, not all that are planned")


def test_hits_are_never_more_than_the_most_there_are() -> None:
    found = verdict("prefix hit rate", series(counted(prompt_tokens=1000, cached_tokens=170)), best_hit_rate=0.168)
    assert found.measured == "17.0%, of at most 17.0% by the plan"


@pytest.mark.parametrize(
    ("task", "num_given", "best"),
    [("choose", 0, 0.25), ("choose", 400, 0.25), ("choose", 900, 2 / 3), ("generate", 900, 0.25)],
)
def test_the_most_hits_of_choices_are_of_what_the_engine_was_given(task: str, num_given: int, best: float) -> None:
    """Requests of one row share its prompt, which the plan has once; a row that runs again does not."""
    plan = {"task": task, "prompt_tokens": 400, "unique_prompt_tokens": 300}
    assert best_hit_rate(plan, num_given) == pytest.approx(best)


def test_a_small_batch_is_the_pools_fault_or_the_steps() -> None:
    assert "--kv-cache-memory" in verdict("batch filled", series(replace(CALM, num_running=1.0, kv_usage=0.5))).advice
    by_step = series(replace(CALM, num_running=1.0, kv_usage=0.1))
    assert "--max-num-batched-tokens" in verdict("batch filled", by_step).advice


def test_the_worst_comes_first_and_nothing_is_said_before_a_run() -> None:
    order: Callable[[Verdict], int] = lambda each: ["alert", "hint", "unknown", "ok"].index(each.state)  # noqa: E731
    found = judge(series(counted(swap_preemptions=90, prompt_tokens=100)), 0.5)
    assert list(found) == sorted(found, key=order)
    assert found[0].rule == "preemptions"
    assert judge(Series(), 0.5) == ()
