"""Random JSON schemas and regular expressions, each row with its own, through one job of the real model.

    python -m tests.endurance.constrained --rows 500
    python -m tests.endurance.constrained --rows 500 --model echo --max-tokens 300 --turns 0

Every text is checked by `jsonschema` or `re`, and must follow its constraint unless the row says that it does not. Then
the same rows run with and without constraints, by turns, to the same number of tokens. Exit status 1: a text that is
wrong and does not say so, fewer than four rows in five answered, or less than 85 % of the unconstrained speed.
"""

import json
import random
import statistics
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import click
import pyarrow as pa
import pyarrow.parquet as pq

import batchrun as br
from batchrun.outcome import Outcome
from tests.endurance.random_constraints import follows_regex, follows_schema, random_regex, random_schema

# A small model does not find the end of every expression that may go on for ever.
_LEAST_ANSWERED, _LEAST_SPEED = 0.8, 0.85
_TOPICS = ("a train station", "a cat", "the city of Rome", "a broken lamp", "the weather in May", "a used car")


def constraint_of(seed: int) -> dict[str, str]:
    """Of a row: two in three are schemas."""
    rng = random.Random(seed)
    return {"json_schema": json.dumps(random_schema(rng))} if seed % 3 else {"regex": random_regex(rng)}


def is_followed(params: dict[str, str], text: str) -> bool:
    """Whether the text is what was asked for, by others than our library."""
    if "regex" in params:
        return follows_regex(params["regex"], text)
    return follows_schema(json.loads(params["json_schema"]), text)


def answered(
    folder: Path, name: str, params: list[dict[str, Any]], max_tokens: int, model: str | None
) -> tuple[pa.Table, Outcome]:
    """The rows' results with these parameters, and how the run went."""
    prompts = [f"Describe {_TOPICS[row % len(_TOPICS)]}, number {row}." for row in range(len(params))]
    pq.write_table(pa.table({"prompt": prompts, "params": list(map(json.dumps, params))}), folder / f"{name}.parquet")
    outcome = br.submit(
        folder / f"{name}.parquet",
        output=folder / name,
        model=model,
        params_col="params",
        max_tokens=max_tokens,
        overwrite=True,
    )
    return pq.read_table(folder / name), outcome


@click.command()
@click.option("--rows", default=500, show_default=True)
@click.option("--seed", default=0, show_default=True)
@click.option("--max-tokens", default=160, show_default=True)
@click.option("--turns", default=2, show_default=True, help="Pairs of timed runs.")
@click.option("--temperature", default=0.0, show_default=True)
@click.option("--model", "-m")
def main(rows: int, seed: int, max_tokens: int, turns: int, temperature: float, model: str | None) -> None:
    """Print what became of the rows, and both speeds."""
    constraints = [constraint_of(seed * 1_000_000 + row) for row in range(rows)]
    asked = [{**constraint, "temperature": temperature} for constraint in constraints]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        results, outcome = answered(folder, "constrained", asked, max_tokens, model)
        texts, errors = results.column("text").to_pylist(), results.column("error").to_pylist()
        wrong = [
            (constraint, text)
            for constraint, text, error in zip(constraints, texts, errors, strict=True)
            if error is None and not is_followed(constraint, text)
        ]
        for constraint, text in wrong:
            click.echo(f"wrong: {constraint}: {text!r}")
        kinds = Counter(error["type"] for error in errors if error is not None)
        click.echo(f"{rows} rows: {rows - kinds.total() - len(wrong)} follow, {len(wrong)} wrong, errors {dict(kinds)}")
        # What was not run for want of a grammar has no length either.
        lengths = results.column("completion_tokens").to_pylist()
        free = [{"max_tokens": max(length, 1), "ignore_eos": True, "temperature": temperature} for length in lengths]
        speeds: dict[str, list[float]] = {"constrained": [], "free": []}
        for turn in range(turns):
            order = [("constrained", asked), ("free", free)]
            for kind, params in order if turn % 2 else reversed(order):
                _, outcome = answered(folder, kind, params, max_tokens, model)
                speeds[kind].append(outcome.output_tokens / outcome.run_s)
                click.echo(
                    f"{kind:12} {outcome.output_tokens:,} tokens in {outcome.run_s:.1f} s, {outcome.steps} steps: "
                    f"{speeds[kind][-1]:.1f} a second"
                )
    ratio = statistics.median(speeds["constrained"]) / statistics.median(speeds["free"]) if turns else 1.0
    click.echo(f"constrained at {ratio:.1%} of the unconstrained speed")
    is_enough = kinds.total() <= (1 - _LEAST_ANSWERED) * rows and ratio >= _LEAST_SPEED
    sys.exit(1 if wrong or not is_enough else 0)


if __name__ == "__main__":
    main()
