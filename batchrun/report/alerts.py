"""Rules about how a run went: what was measured, whether that is good, and what to do when it is not.

The thresholds are those that operators of inference engines use; each verdict says what it was held against.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

from batchrun.report.series import Sample, Series

State = Literal["ok", "hint", "alert", "unknown"]
_PREEMPTED = 0.01
_POOL_FULL, _POOL_LOW = 0.85, 0.70
_FULL_TIME = 0.05  # a share of the run that is more than a moment
_BATCH_FILLED, _POOL_USED = 0.50, 0.40
_HIT_RATE = 0.30
_MOST_NODES = 50_000
_SPREAD = 3.0
_CORES = 0.7
_OUT_OF_TURN = (
    "where long prompts hold up others, --schedule chunked with a smaller --long-row-tokens helps; "
    "where rows only wait for their turn, nothing is wrong"
)


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a rule found. `advice` is empty where there is nothing to do."""

    rule: str
    state: State
    measured: str
    limit: str
    advice: str = ""

    @property
    def fires(self) -> bool:
        return self.state in ("hint", "alert")


@dataclass(frozen=True, slots=True)
class _Seen:
    """What the rules look at. `best_hit_rate` is the most by the plan, in any order of its rows; None: not all of it
    ran, as far as is known."""

    total: Sample
    samples: tuple[Sample, ...]
    shares_prefixes: bool
    is_gpu: bool
    max_num_seqs: int
    best_hit_rate: float | None

    def time_with(self, holds: Callable[[Sample], bool]) -> float:
        """The share of the time in which `holds`."""
        return sum(sample.seconds for sample in self.samples if holds(sample)) / max(self.total.seconds, 1e-9)


def judge(series: Series, best_hit_rate: float | None) -> tuple[Verdict, ...]:
    """Every rule's verdict on all runs of a job, the worst first; none before anything has run.

    `best_hit_rate` is the most, by the plan, of the prompt tokens that the engine was given; None: not all of its rows
    ran, as far as is known.
    """
    total = series.total
    if total is None:
        return ()
    facts = series.runs[-1].facts
    seen = _Seen(
        total=total,
        samples=series.samples,
        shares_prefixes=bool(facts.get("shares_prefixes")),
        is_gpu=bool(facts.get("is_gpu")),
        max_num_seqs=int(facts.get("max_num_seqs", 0)),
        best_hit_rate=best_hit_rate,
    )
    order: list[State] = ["alert", "hint", "unknown", "ok"]
    return tuple(sorted(_verdicts(seen), key=lambda verdict: order.index(verdict.state)))


def _verdicts(seen: _Seen) -> Iterator[Verdict]:
    yield _preemptions(seen)
    yield _pool(seen)
    yield _room(seen)
    yield _batch(seen)
    yield _hits(seen)
    yield _tree(seen)
    yield _spread(seen)
    yield _balance(seen)
    yield _processor(seen)


def _preemptions(seen: _Seen) -> Verdict:
    counters = seen.total.counters
    rows = max(counters.rows_finished, 1)
    share = counters.preemptions / rows
    state: State = "alert" if share > _PREEMPTED else "hint" if counters.preemptions else "ok"
    wasted = counters.recomputed_tokens / max(counters.computed_tokens, 1)
    advice = (
        f"{wasted:.1%} of all tokens were computed twice; give the pool more (--kv-cache-memory) or run fewer rows "
    )
    return Verdict(
        "preemptions",
        state,
        f"{counters.preemptions:,} of {counters.rows_finished:,} rows ({share:.2%})",
        f"at most {_PREEMPTED:.0%} of the rows",
        advice + "at a time (--max-num-seqs)" if state != "ok" else "",
    )


def _pool(seen: _Seen) -> Verdict:
    over = seen.time_with(lambda sample: sample.kv_usage > _POOL_FULL)
    is_full = over > _FULL_TIME
    return Verdict(
        "KV pool full",
        "alert" if is_full else "ok",
        f"mean {seen.total.kv_usage:.0%}, peak {seen.total.kv_peak:.0%}, above {_POOL_FULL:.0%} for {over:.0%} of "
        "the time",
        f"above {_POOL_FULL:.0%} for at most {_FULL_TIME:.0%} of the time",
        "rows wait for memory: raise --kv-cache-memory, or --kv-cache-dtype float16 on a CPU" if is_full else "",
    )  # fmt: skip


def _room(seen: _Seen) -> Verdict:
    """A pool that is well used and never too small could serve more rows at a time."""
    is_between = _POOL_LOW <= seen.total.kv_usage <= _POOL_FULL
    has_limit = seen.total.num_running > 0.9 * seen.max_num_seqs and seen.total.num_waiting >= 1
    could = is_between and not seen.total.counters.preemptions and has_limit
    return Verdict(
        "room for more rows",
        "hint" if could else "ok",
        f"pool {seen.total.kv_usage:.0%}, {seen.total.num_running:,.0f} of at most {seen.max_num_seqs:,} rows running",
        f"pool {_POOL_LOW:.0%} to {_POOL_FULL:.0%} without a preemption, and the batch full",
        "raise --max-num-seqs: the pool has room for more rows at a time" if could else "",
    )


def _batch(seen: _Seen) -> Verdict:
    """Rows wait although the batch has places: something else than its size holds them back."""
    total = seen.total
    is_small = total.num_waiting >= 1 and total.num_running < _BATCH_FILLED * seen.max_num_seqs
    by_memory = total.kv_usage > _POOL_USED
    advice = "the pool holds no more rows: raise --kv-cache-memory" if by_memory else "raise --max-num-batched-tokens"
    return Verdict(
        "batch filled",
        "hint" if is_small else "ok",
        f"{total.num_running:,.0f} of at most {seen.max_num_seqs:,} rows running, {total.num_waiting:,.0f} waiting, "
        f"pool {total.kv_usage:.0%}",
        f"at least {_BATCH_FILLED:.0%} of the places, while rows wait",
        advice if is_small else "",
    )


def _hits(seen: _Seen) -> Verdict:
    limit = f"at least {_HIT_RATE:.0%} of the prompt tokens"
    if not seen.shares_prefixes:
        return Verdict("prefix hit rate", "ok", "rows share no prefixes in this job", limit)
    rate, best = seen.total.counters.hit_rate, seen.best_hit_rate
    if best is None:
        return Verdict(
            "prefix hit rate", "unknown", f"{rate:.1%} of the rows on record, not all that are planned", limit
        )
    # The rate counts rows that ran twice twice, and not what a killed process had not said yet.
    best, is_low = max(best, rate), rate < _HIT_RATE
    advice = "the rows share little: it may help to put what rows have in common first in the template"
    if is_low and best - rate > 0.05:
        advice = "more is shared than was found: raise --kv-cache-memory, so that prefixes stay until they are used"
    measured = f"{rate:.1%}, of at most {best:.1%} by the plan"
    return Verdict("prefix hit rate", "hint" if is_low else "ok", measured, limit, advice if is_low else "")


def _tree(seen: _Seen) -> Verdict:
    nodes = max(sample.num_nodes for sample in seen.samples)
    is_useless = nodes > _MOST_NODES and seen.total.counters.hit_rate < _HIT_RATE
    return Verdict(
        "prefix tree worth its upkeep",
        "alert" if is_useless else "ok",
        f"{nodes:,} nodes at most, hit rate {seen.total.counters.hit_rate:.1%}",
        f"not more than {_MOST_NODES:,} nodes below a hit rate of {_HIT_RATE:.0%}",
        "the tree costs more than it saves: --prefix-caching off" if is_useless else "",
    )


def _spread(seen: _Seen) -> Verdict:
    waits = seen.total.latencies.first_token
    p50, p99 = waits.percentile(50), waits.percentile(99)
    limit = f"p99 at most {_SPREAD:.0f} times p50"
    if not p50 or not p99:
        return Verdict("first tokens in turn", "unknown", "no row has had its first token", limit)
    is_wide = p99 / p50 > _SPREAD
    advice = _OUT_OF_TURN if is_wide else ""
    measured = f"p99 is {p99 / p50:.1f} times p50"
    return Verdict("first tokens in turn", "hint" if is_wide else "ok", measured, limit, advice)


def _balance(seen: _Seen) -> Verdict:
    """Arithmetic above 90 % and memory below 50 % would say that prompts take too large a share of the steps."""
    counters = seen.total.counters
    prompts = counters.computed_prompt_tokens / max(counters.computed_tokens, 1)
    return Verdict(
        "arithmetic and bandwidth in balance",
        "unknown",
        f"prompts are {prompts:.0%} of the computed tokens",
        "not arithmetic above 90% with memory bandwidth below 50%",
        "neither is counted on this device",
    )


def _processor(seen: _Seen) -> Verdict:
    """On a CPU the engine never waits for anything: with less than a core, somebody else has taken it."""
    cores = seen.total.busy_s / max(seen.total.seconds, 1e-9)
    is_starved = not seen.is_gpu and cores < _CORES
    return Verdict(
        "processor time",
        "hint" if is_starved else "ok",
        f"{cores:.1f} cores busy for the job",
        "where a CPU computes" if seen.is_gpu else f"at least {_CORES:.1f} cores",
        "other programs took the processor: run them at another time, or give the job cores of its own"
        if is_starved
        else "",
    )
