"""The command that measures: tune. Load, one library call, report."""

import json
from typing import TYPE_CHECKING, Any

import click

from batchrun.cli_options import JobCommand, load_console, load_job, load_tuning, tune_options
from batchrun.cli_run import talking
from batchrun.cli_text import aligned, joined
from batchrun.errors import UsageError
from batchrun.observe.duration import duration
from batchrun.observe.printable import one_line

if TYPE_CHECKING:
    from batchrun.executors.local import Limits
    from batchrun.tune.choice import Prospect
    from batchrun.tune.profile import Profile
    from batchrun.tune.tune import Tuned

# The job that is measured for has no rows.
_NO_ROWS = {"inputs": ("none",), "output": "none"}
_ELEMENT_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@click.command(cls=JobCommand, params=tune_options())
def tune(**given: Any) -> None:
    """Measure how long a model's steps take on this machine, once.

    Takes about a minute and a half; the machine should do nothing else. From then on plan says how long a job will
    run, and jobs that do not say how large steps may be take the size that was found best.

    \b
    Example:
      batchrun tune HuggingFaceTB/SmolLM2-360M-Instruct --dtype float32
    """
    console, job, tuning = load_console(given), load_job({**given, **_NO_ROWS}), load_tuning(given)
    if not tuning.alpha + tuning.beta:
        raise UsageError("--alpha and --beta are both 0: nothing would be better than anything else")

    from batchrun import planning
    from batchrun.tune.choice import Weights

    with talking(console) as observe:
        tuned = planning.tune(job, Weights(tuning.alpha, tuning.beta), tuning.quick, observe)
    click.echo(json.dumps(tuned_as_dict(tuned)) if console.json else tuned_text(tuned))


def tuned_text(tuned: "Tuned") -> str:
    """What was measured and chosen, and why."""
    profile, choice = tuned.profile, tuned.choice
    what = joined(profile.device, profile.dtype, f"KV {profile.kv_dtype}", f"{profile.kernel} attention")
    threads = "" if profile.pool.is_gpu else f"{profile.machine.threads} threads"
    compared = [choice.best, *_telling(tuned)]
    return aligned(
        [
            ("model", one_line(joined(profile.model, what, threads))),
            ("peak", f"F {_rate(profile.flops_per_s, 'FLOP/s')} · B {_rate(profile.bytes_per_s, 'B/s')} · "
                     f"reading weights bounds steps below {_knee(profile):,.0f} tokens"),
            ("steps", f"{profile.num_steps} sizes measured · times fit to {profile.median_error:.1%} in the median, "
                      f"{profile.worst_error:.0%} at worst"),
            ("chosen", _flags(choice.best.limits)),
            ("because", f"alpha {profile.alpha:g}, beta {profile.beta:g}; for rows of {tuned.row.prompt_len} and "
                        f"{tuned.row.output_len} tokens:"),
            *(("", _prospect(one, choice.usual)) for one in compared),
            ("profile", one_line(str(tuned.file))),
        ]
    )  # fmt: skip


def tuned_as_dict(tuned: "Tuned") -> dict[str, Any]:
    """The profile for JSON, with its file."""
    return tuned.profile.model_dump(mode="json") | {"file": str(tuned.file)}


def _telling(tuned: "Tuned") -> list["Prospect"]:
    """The usual limits, and what is best for either weight alone, where these are others than those chosen."""
    choice = tuned.choice
    everything = [choice.usual, *choice.others]
    telling = [
        choice.usual,
        min(everything, key=lambda one: one.first_token_s),
        min(everything, key=lambda one: one.step_s),
    ]
    return [one for one in dict.fromkeys(telling) if one != choice.best]


def _prospect(one: "Prospect", usual: "Prospect") -> str:
    return joined(
        f"{one.limits.max_num_batched_tokens:>6,} x {one.limits.max_num_seqs:<4,}",
        f"{one.tokens_per_s:,.0f} tok/s",
        f"a token every {one.step_s:.3g}s",
        f"mean first token of 1,000 rows after {duration(one.first_token_s)}",
        "usual" if one == usual else "",
    )


def _flags(limits: "Limits") -> str:
    return f"--max-num-batched-tokens {limits.max_num_batched_tokens} --max-num-seqs {limits.max_num_seqs}"


def _knee(profile: "Profile") -> float:
    """Tokens of a step that take as long to compute as the weights to read: two operations a weight and token."""
    return profile.flops_per_s * _ELEMENT_BYTES.get(profile.dtype, 4) / (2 * profile.bytes_per_s)


def _rate(per_s: float, unit: str) -> str:
    """183 GFLOP/s."""
    prefixes = ["", "k", "M", "G", "T", "P"]
    while per_s >= 1000 and len(prefixes) > 1:
        per_s /= 1000
        prefixes.pop(0)
    return f"{per_s:.3g} {prefixes[0]}{unit}"
