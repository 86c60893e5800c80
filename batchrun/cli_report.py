"""A plan, and the end of a job, as text: aligned blocks, nothing in them that a terminal would obey."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from batchrun.cli_text import aligned, failed, joined, latency_lines, size
from batchrun.observe.duration import duration
from batchrun.observe.printable import one_line, printable
from batchrun.observe.quantity import short_duration
from batchrun.outcome import Outcome

if TYPE_CHECKING:
    from batchrun.plan.plan import Plan, PlanSummary
    from batchrun.plan.sharing import Sharing
    from batchrun.tune.fleet import Fleet
    from batchrun.tune.simulation import Estimate

_SAMPLE_LINES = 12
_SAMPLE_WIDTH = 100


def plan_text(
    plan: "Plan",
    estimate: "Estimate | None",
    sharing: "Sharing",
    fleet: "Fleet | None" = None,
    how_to_estimate: str | None = None,
    num_done: int = 0,
) -> str:
    """What will run, what it costs and what one prompt looks like; `estimate` is None where nothing was measured,
    `how_to_estimate` where nothing measures it, `fleet` where nobody asked for it.

    `num_done` of the rows have their result already.
    """
    summary = plan.summary
    row = "" if summary.longest_prompt_row is None else f" (row {summary.longest_prompt_row})"
    lines = [
        ("rows", joined(_to_run(summary, num_done), failed(summary.errors), _folded(summary.num_duplicates))),
        *_examples(summary.error_examples),
        ("prompts", one_line(f"{summary.prompt_tokens:,} tokens · {summary.prompt_source}")),
        ("longest", f"{summary.longest_prompt:,} tokens{row} · {summary.longest_len:,} with its output"),
        ("prefixes", _prefixes(summary, sharing)),
        _wanted(summary),
        ("KV", _kv(summary)),
        *_time(estimate, how_to_estimate),
        *([("workers", _crews(fleet))] if fleet is not None else []),
        ("units", one_line(f"{len(plan.units):,} in {plan.folder}")),
        ("sample", _sample(summary)),
    ]
    return aligned(lines)


def plan_as_dict(
    plan: "Plan",
    estimate: "Estimate | None",
    sharing: "Sharing",
    fleet: "Fleet | None" = None,
    num_done: int = 0,
) -> dict[str, Any]:
    """The same for JSON."""
    derived = {
        "num_errors": plan.summary.num_errors,
        "num_done": num_done,
        "saved_tokens": plan.summary.saved_tokens,
        "units": len(plan.units),
        "folder": str(plan.folder),
        "prefix_caching": asdict(sharing),
        "estimate": None if estimate is None else asdict(estimate),
        "fleet": None if fleet is None else asdict(fleet),
    }
    return asdict(plan.summary) | derived


def summary_text(outcome: Outcome) -> str:
    """How the job ended: rows, errors, tokens, speed."""
    rows = joined(f"{outcome.rows:,}", failed(outcome.errors), _folded(outcome.duplicates))
    head = [("rows", rows), *_examples(outcome.error_examples), *_answered(outcome)]
    if outcome.already_complete:
        return aligned([*head, ("complete", "already, nothing was run")])
    rate = outcome.output_tokens / outcome.run_s if outcome.run_s else 0.0
    preempted = f"{outcome.preemptions:,}"
    if outcome.preemptions:
        preempted += f" · {size(outcome.swapped_bytes)} swapped · {outcome.recomputed_tokens:,} tokens recomputed"
    hit = f"prefix hit {outcome.hit_rate:.1%}" if outcome.shares_prefixes else "prefix caching off"
    output = f"{outcome.output_tokens:,} tokens · {rate:,.1f} tok/s in the engine"
    guessed = f"{outcome.accepted_tokens:,} of {outcome.drafted_tokens:,} tokens guessed ahead were right"
    return aligned(
        [
            *head,
            ("prompts", f"{outcome.prompt_tokens:,} tokens · {hit} · {outcome.computed_tokens:,} computed"),
            *([("output", output)] if outcome.output_tokens else []),
            *([("guessed", guessed)] if outcome.drafted_tokens else []),
            ("preempted", preempted),
            ("time", f"{duration(outcome.elapsed_s)} · {duration(outcome.run_s)} in the engine · "
                     f"{outcome.steps:,} steps"),
            *latency_lines(outcome.latencies.summary()),
        ]
    )  # fmt: skip


def _to_run(summary: "PlanSummary", num_done: int) -> str:
    if num_done and num_done >= summary.num_rows:
        return f"nothing to run, all {summary.num_rows:,} are done"
    if num_done:
        return f"{summary.num_rows - num_done:,} of {summary.num_rows:,} to run, the others are done"
    return f"{summary.num_unique:,} to run"


def _wanted(summary: "PlanSummary") -> tuple[str, str]:
    """What is to come of the rows."""
    match summary.task:
        case "score":
            return "scores", f"{summary.asked_tokens:,} target tokens"
        case "choose":
            tokens = f"{summary.asked_tokens:,} tokens of choices"
            return "chooses", joined(tokens, f"{summary.max_tokens_total:,} to compute behind the prompts")
        case "embed":
            return "embeds", f"{summary.num_unique:,} rows"
    return "output", f"at most {summary.max_tokens_total:,} tokens"


def _prefixes(summary: "PlanSummary", sharing: "Sharing") -> str:
    if not sharing.is_on:
        return joined("not shared", sharing.reason)
    saved = f"save {summary.saved_tokens:,} ({_share(summary.saved_tokens, summary.prompt_tokens)})"
    return joined(saved, f"{summary.unique_prompt_tokens:,} to compute")


def _examples(errors: Mapping[str, str]) -> list[tuple[str, str]]:
    """A line for each type of error with the message of one such row."""
    return [("", one_line(f"{name}: {message}")) for name, message in sorted(errors.items())]


def _answered(outcome: Outcome) -> list[tuple[str, str]]:
    lines = [("retried", f"{outcome.retried:,} rows")] if outcome.retried else []
    if not outcome.reused + outcome.vanished:
        return lines
    vanished = f"{outcome.vanished:,} of the earlier job's are not in the input any more" if outcome.vanished else ""
    return [*lines, ("reused", joined(f"{outcome.reused:,} rows", vanished))]


def _folded(num_duplicates: int) -> str:
    if num_duplicates == 1:
        return "1 duplicate shares an answer"
    return f"{num_duplicates:,} duplicates share an answer" if num_duplicates else ""


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.1%}" if whole else "0%"


def _kv(summary: "PlanSummary") -> str:
    return joined(
        f"{size(summary.kv_bytes_per_token)} a token",
        f"longest row {size(summary.longest_kv_bytes)}",
        f"peak {size(summary.peak_kv_bytes)}",
    )


def _time(estimate: "Estimate | None", how_to_estimate: str | None) -> list[tuple[str, str]]:
    """A line, unless the time is not known and nothing helps."""
    if estimate is None:
        told = f"unknown: {how_to_estimate} measures the model on this machine, once, in about a minute and a half"
        return [] if how_to_estimate is None else [("time", one_line(told))]
    about = f"about {duration(estimate.run_s)}"
    if not estimate.are_lengths_known:
        about += f" with outputs half as long as allowed, {duration(estimate.at_most_s)} at most"
    told = joined(
        about,
        f"{estimate.steps:,} steps",
        f"{duration(estimate.start_s)} to start and publish",
        one_line(f"by what was measured {estimate.label}"),
    )
    return [("time", told)]


def _crews(fleet: "Fleet") -> str:
    """A line for each number of workers under the names of its columns, and what they rest on."""
    has_cost = fleet.crews[0].cost is not None
    lines = [
        f"{'':>6} {'time':>8} {'cost':>10} {'prefix hit':>10} {'computed':>15} {'imbalance':>9}",
        *(
            f"{crew.workers:>6,} {short_duration(crew.time_s):>8} {crew.cost or 0:>10,.2f} {crew.hit_rate:>10.1%} "
            f"{crew.computed_tokens:>15,} {crew.imbalance:>9.2f}"
            for crew in fleet.crews
        ),
    ]
    if not has_cost:
        lines = [line[:15] + line[26:] for line in lines]
    outputs = "" if fleet.are_lengths_known else "outputs half as long as allowed"
    starts = [short_duration(seconds) for seconds in sorted({crew.start_s for crew in fleet.crews})]
    starting = f"{_range(starts)} of it to start and publish" if fleet.crews[0].start_s else "without starting"
    off = _range([f"{error:.0%}" for error in sorted({round(crew.error, 2) for crew in fleet.crews})])
    sampled = f"by {fleet.num_simulated:,} rows, within {off}" if fleet.is_sampled else ""
    return "\n".join([*lines, joined(one_line(fleet.label), starting, outputs, sampled)])


def _range(ascending: Sequence[str]) -> str:
    """4.2s, or 4.2s to 7s."""
    return " to ".join(dict.fromkeys([ascending[0], ascending[-1]]))


def _sample(summary: "PlanSummary") -> str:
    """The beginning and the end of one prompt, each line cut to the width of a terminal."""
    if summary.sample_row is None:
        return "no row can run"
    lines = printable(summary.sample).expandtabs(4).split("\n")
    half = _SAMPLE_LINES // 2
    if len(lines) > _SAMPLE_LINES:
        lines = [*lines[:half], f"… {len(lines) - 2 * half} lines …", *lines[-half:]]
    cut = (line if len(line) <= _SAMPLE_WIDTH else line[: _SAMPLE_WIDTH - 1] + "…" for line in lines)
    return "\n".join([f"row {summary.sample_row}", *(f"│ {line}" for line in cut)])
