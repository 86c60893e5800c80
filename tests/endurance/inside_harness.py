"""Evaluates tasks in EleutherAI's harness by its HF backend and by batchrun, and compares (needs `lm-eval`).

    python -m tests.endurance.inside_harness score.parquet --limit 32

The tasks are made of the file's rows and need no network: choosing among the candidates, the perplexity of whole
texts, and short answers, once with and once without the chat template. Exit status 1: an accuracy or an answer
differs, or a log-likelihood by more than 1e-4 for each of its tokens.
"""

import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import click
import pyarrow.parquet as pq

from batchrun.checkpoint import cache_folder, resolve

_TOLERANCE = 1e-4
_TASKS = {
    "own_choices": """
output_type: multiple_choice
doc_to_text: "{{prompt}}"
doc_to_choice: "{{candidates}}"
doc_to_target: "{{gold}}"
target_delimiter: ""
metric_list: [{metric: acc}, {metric: acc_norm}]
""",
    "own_texts": """
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{prompt}}"
metric_list: [{metric: word_perplexity}, {metric: bits_per_byte}]
""",
    "own_answers": """
output_type: generate_until
doc_to_text: "{{prompt}}"
doc_to_target: "{{candidates[gold]}}"
generation_kwargs: {until: ["\\n\\n"], max_gen_toks: 12, do_sample: false}
metric_list: [{metric: exact_match}]
""",
}


def write_tasks(rows: list[dict[str, Any]], folder: Path) -> None:
    """The rows, numbered answers among them, and the tasks over them."""
    data = folder / "rows.jsonl"
    data.write_text("".join(json.dumps({**row, "gold": at % 4}) + "\n" for at, row in enumerate(rows)))
    for name, task in _TASKS.items():
        source = f"dataset_path: json\ndataset_kwargs: {{data_files: {{test: {data}}}}}\ntest_split: test\n"
        (folder / f"{name}.yaml").write_text(f"task: {name}\n{source}{task}")


def evaluated(model: Any, folder: Path, *, chat: bool) -> dict[str, Any]:
    """The harness's results with their samples."""
    import lm_eval
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=str(folder), include_defaults=False)
    how: dict[str, Any] = {"apply_chat_template": chat, "bootstrap_iters": 0, "log_samples": True}
    found: dict[str, Any] = lm_eval.simple_evaluate(model=model, tasks=[*_TASKS], task_manager=manager, **how)
    return found


def responses(found: dict[str, Any], task: str) -> list[Any]:
    """What the model said to each document, in their order."""
    samples = sorted(found["samples"][task], key=lambda sample: sample["doc_id"])
    return [sample["resps"] for sample in samples]


def apart(one: Any, other: Any) -> float:
    """The largest difference between numbers at the same place; infinite where anything else differs."""
    if isinstance(one, list | tuple):
        return max((apart(*pair) for pair in zip(one, other, strict=True)), default=0.0)
    if isinstance(one, float) and isinstance(other, float):
        return abs(one - other)
    return 0.0 if one == other else float("inf")


@click.command()
@click.argument("source", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--limit", default=16, show_default=True, help="Rows, from the first.")
@click.option("--max-length", default=384, show_default=True, help="Tokens that the model may see.")
@click.option("--model", "-m")
def main(source: Path, limit: int, max_length: int, model: str | None) -> None:
    """Print how far apart they are."""
    os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
    from lm_eval.models.huggingface import HFLM

    from batchrun.harness import BatchrunLM

    checkpoint = resolve(model, revision=None, cache=cache_folder(), trust_remote_code=False)
    rows = pq.read_table(source, columns=["prompt", "candidates"]).slice(0, limit).to_pylist()
    is_good = True
    with tempfile.TemporaryDirectory() as folder:
        write_tasks(rows, Path(folder))
        theirs: Any = HFLM(pretrained=str(checkpoint.folder), max_length=max_length, device="cpu", dtype="float32")
        ours: Any = BatchrunLM(pretrained=model, max_length=max_length, device="cpu")
        for chat in (False, True):
            began = time.monotonic()
            expected = evaluated(theirs, Path(folder), chat=chat)
            between = time.monotonic()
            found = evaluated(ours, Path(folder), chat=chat)
            click.echo(f"chat template {chat}: {between - began:.1f} s and {time.monotonic() - between:.1f} s")
            for task in _TASKS:
                metrics = [name for name in expected["results"][task] if "stderr" not in name and "," in name]
                same = [found["results"][task][name] == expected["results"][task][name] for name in metrics]
                worst = apart(responses(expected, task), responses(found, task))
                shown = {name: found["results"][task][name] for name in metrics}
                click.echo(f"{task}: {shown}; responses at most {worst:.1e} apart")
                is_rolling = task == "own_texts"
                shortest = min(len(theirs.tok_encode(row["prompt"])) for row in rows) if is_rolling else 1
                is_good &= worst <= _TOLERANCE * shortest and (is_rolling or all(same))
    sys.exit(0 if is_good else 1)


if __name__ == "__main__":
    main()
