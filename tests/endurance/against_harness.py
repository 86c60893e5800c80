"""Compares scores and choices of jobs with the HF backend of EleutherAI's harness, row by row (needs `lm-eval`).

    python -m tests.endurance.against_harness score.parquet --prompt-col prompt --choices-col candidates --limit 8

Every choice behind every prompt is scored by a job with `--task score`, by one with `--task choose`, and by the
harness; whole texts, in windows, too (`--text-col`). Exit status 1: a log-likelihood differs by more than 1e-4 for each
of its tokens, or a label, or whether a text is the likeliest one.
"""

import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import click
import pyarrow as pa
import pyarrow.parquet as pq

from batchrun import api
from batchrun.checkpoint import cache_folder, resolve

_TOLERANCE = 1e-4


class Harness:
    """Its HF backend over the same files."""

    def __init__(self, model: str | None, max_length: int) -> None:
        os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
        from lm_eval.models.huggingface import HFLM

        folder = resolve(model, revision=None, cache=cache_folder(), trust_remote_code=False).folder
        place = {"device": "cpu", "dtype": "float32", "batch_size": 1}
        self._model: Any = HFLM(pretrained=str(folder), max_length=max_length, **place)

    def pairs(self, pairs: list[tuple[str, str]]) -> list[tuple[float, bool]]:
        """Log-likelihood of the second text behind the first, and whether each of its tokens is the likeliest."""
        instances = self._instances("loglikelihood", pairs)
        answers: list[tuple[float, bool]] = self._model.loglikelihood(instances, disable_tqdm=True)
        return answers

    def texts(self, texts: list[str]) -> list[float]:
        """Log-likelihood of whole texts."""
        instances = self._instances("loglikelihood_rolling", [(text,) for text in texts])
        answers: list[float] = self._model.loglikelihood_rolling(instances, disable_tqdm=True)
        return answers

    def _instances(self, kind: str, arguments: list[Any]) -> list[Any]:
        from lm_eval.api.instance import Instance

        return [Instance(kind, doc={}, arguments=each, idx=at) for at, each in enumerate(arguments)]


def worst(ours: list[dict[str, Any]], theirs: list[float], what: str) -> float:
    """The largest difference for each token; says it."""
    pairs = zip(ours, theirs, strict=True)
    differences = [abs(row["target_logprob"] - other) / row["target_tokens"] for row, other in pairs]
    click.echo(f"{what}: {len(differences)} log-likelihoods, at most {max(differences):.1e} apart for each token")
    return max(differences)


@click.command()
@click.argument("source", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--prompt-col", default="prompt", show_default=True)
@click.option("--choices-col", default="candidates", show_default=True)
@click.option("--text-col", help="Column with whole texts; default: the prompts.")
@click.option("--limit", default=8, show_default=True, help="Rows, from the first.")
@click.option("--max-len", default=256, show_default=True, help="Tokens of a window of whole texts.")
@click.option("--model", "-m")
def main(
    source: Path, prompt_col: str, choices_col: str, text_col: str | None, limit: int, max_len: int, model: str | None
) -> None:
    """Print how far apart they are."""
    rows = pq.read_table(source, columns=[prompt_col, choices_col, *([text_col] if text_col else [])]).slice(0, limit)
    given = rows.to_pylist()
    pairs = [(row[prompt_col], text) for row in given for text in row[choices_col]]
    table = pa.table({"prompt": [prompt for prompt, _ in pairs], "target": [text for _, text in pairs]})
    texts = pa.table({"whole": [row[text_col or prompt_col] for row in given]})
    options: dict[str, Any] = {"chat": "off", "model": model, "device": "cpu"}
    scored = api.score(table, target_col="target", **options).to_pylist()
    whole = api.score(texts, target_col="whole", max_model_len=max_len, **options).to_pylist()
    with tempfile.TemporaryDirectory() as folder:
        pq.write_table(rows, Path(folder) / "rows.parquet")
        done = api.submit(
            Path(folder) / "rows.parquet", output=Path(folder) / "out", task="choose", prompt_col=prompt_col,
            choices_col=choices_col, **options,
        )  # fmt: skip
        chosen = pq.read_table(done.output).to_pylist()
    harness = Harness(model, 8192)
    theirs = harness.pairs(pairs)
    found = worst(scored, [logprob for logprob, _ in theirs], "score")
    choices = [logprob for row in chosen for logprob in row["choice_logprobs"]]
    by_choice = [row | {"target_logprob": own} for row, own in zip(scored, choices, strict=True)]
    found = max(found, worst(by_choice, [logprob for logprob, _ in theirs], "choose"))
    found = max(found, worst(whole, Harness(model, max_len).texts(texts.column("whole").to_pylist()), "whole texts"))
    greedy = sum(row["target_is_greedy"] != other for row, (_, other) in zip(scored, theirs, strict=True))
    at, labels = 0, 0
    for row in chosen:
        own = [logprob for logprob, _ in theirs[at : at + len(row["choice_logprobs"])]]
        labels += row["label"] == row[choices_col][own.index(max(own))]
        at += len(own)
    click.echo(f"{labels} of {len(chosen)} labels are the same; {greedy} of {len(pairs)} texts differ in being greedy")
    sys.exit(1 if found > _TOLERANCE or greedy or labels < len(chosen) else 0)


if __name__ == "__main__":
    main()
