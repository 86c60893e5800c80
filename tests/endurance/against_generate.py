"""Compares a job's greedy answers with `transformers.generate`, row by row and one at a time.

    python -m tests.endurance.against_generate OUT --prompt-col prompt --max-tokens 16

for a job with `--chat off --ignore-eos`. A row that differs is printed with the distance between the logits of the two
tokens at which the answers part. Exit status 1: more than two in a hundred differ, or one by more than a float tie.
"""

import sys
from pathlib import Path
from typing import Any

import click
import pyarrow.dataset as ds
import torch
from tqdm import tqdm

from batchrun.checkpoint import cache_folder, load_tokenizer, resolve

_TIE, _MOST = 1e-3, 0.02


def generated(model: Any, ids: list[int], max_tokens: int) -> list[int]:
    """Greedy, whatever token would end it."""
    tokens = model.generate(
        torch.tensor([ids]), max_new_tokens=max_tokens, min_new_tokens=max_tokens, do_sample=False,
        eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    return tokens[0, len(ids) :].tolist()


def margin(model: Any, ids: list[int], ours: list[int], theirs: list[int]) -> float:
    """How far apart the logits are where two answers part."""
    at = next(at for at, (one, other) in enumerate(zip(ours, theirs, strict=False)) if one != other)
    logits = model(torch.tensor([ids + theirs[:at]])).logits[0, -1]
    return float((logits[theirs[at]] - logits[ours[at]]).abs())


@click.command()
@click.argument("out", type=click.Path(exists=True, path_type=Path))
@click.option("--prompt-col", default="prompt", show_default=True)
@click.option("--max-tokens", required=True, type=int)
@click.option("--model", "-m")
def main(out: Path, prompt_col: str, max_tokens: int, model: str | None) -> None:
    """Print every row that differs, and how many."""
    from transformers import AutoModelForCausalLM

    checkpoint = resolve(model, revision=None, cache=cache_folder(), trust_remote_code=False)
    tokenizer = load_tokenizer(checkpoint, tokenizer=None, chat_template=None, trust_remote_code=False)
    plain = AutoModelForCausalLM.from_pretrained(checkpoint.folder, dtype=torch.float32).eval()
    plain.generation_config.eos_token_id = None
    rows = ds.dataset(out).to_table(columns=["row_idx", prompt_col, "text"]).to_pylist()
    margins = []
    with torch.inference_mode():
        for row in tqdm(rows, disable=None):
            ids = tokenizer.encode([row[prompt_col]], add_special_tokens=True)[0].tolist()
            theirs = generated(plain, ids, max_tokens)
            if row["text"] != tokenizer.decode(theirs):
                ours = tokenizer.encode([row["text"]], add_special_tokens=False)[0].tolist()
                margins.append(margin(plain, ids, ours, theirs))
                click.echo(
                    f"row {row['row_idx']}: {row['text']!r}, not {tokenizer.decode(theirs)!r}: {margins[-1]:.5f}"
                )
    click.echo(f"{len(rows) - len(margins)} of {len(rows)} rows have the text of transformers.generate")
    sys.exit(1 if len(margins) > _MOST * len(rows) or any(one > _TIE for one in margins) else 0)


if __name__ == "__main__":
    main()
