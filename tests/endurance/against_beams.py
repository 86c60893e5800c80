"""Compares texts that a search with beams finds with those of `transformers.generate`, and counts the blocks it uses.

    python -m tests.endurance.against_beams [--rows 20] [--max-tokens 16] [--beams 2 --beams 4]

on the example's reviews, with the embedded model. *Shared* are the blocks in use at most, over all steps; *unshared*
those that the same beams would use if each had all of its blocks for itself. Rows share nothing with each other
meanwhile. A row that differs is printed with the distance between the scores of the two texts. Exit status 1: one
differs by more than a float tie, or nothing is shared.
"""

import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import numpy as np
import pyarrow.parquet as pq
import torch

from batchrun.checkpoint import cache_folder, load_tokenizer, resolve
from batchrun.engine.engine import Engine
from batchrun.executors import local
from batchrun.job import Job
from batchrun.quiet import quiet_transformers
from batchrun.tasks.generate import PlannedRow
from batchrun.tasks.task import make_task
from batchrun.tokenizer import Tokenizer

TIE = 1e-3  # between the scores of two texts
_REVIEWS = Path(__file__).parents[2] / "examples" / "reviews.parquet"
_QUESTION = "Here is a customer's review of a product. In one word, is the customer happy?\n\nReview: "
Ids = list[int]


@dataclass(frozen=True, slots=True)
class Found:
    """The rows' texts in tokens, and blocks in use at most."""

    texts: tuple[Ids, ...]
    shared: int
    unshared: int


@dataclass(frozen=True, slots=True)
class Plain:
    """transformers' own model."""

    model: Any

    @classmethod
    def load(cls) -> "Plain":
        from transformers import AutoModelForCausalLM

        folder = resolve(None, revision=None, cache=cache_folder(), trust_remote_code=False).folder
        with quiet_transformers():
            return cls(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval())

    def search(self, prompt: Ids, max_tokens: int, **options: Any) -> Ids:
        """The tokens that its search finds."""
        with torch.inference_mode():
            out = self.model.generate(
                torch.tensor([prompt]),
                attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
                max_new_tokens=max_tokens,
                do_sample=False,
                pad_token_id=0,
                **options,
            )
        tokens: Ids = out[0, len(prompt) :].tolist()
        return tokens

    def score(self, prompt: Ids, text: Ids, length_penalty: float = 1.0) -> float:
        """Of a text, as a search compares them."""
        with torch.inference_mode():
            logprobs = self.model(torch.tensor([prompt + text])).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        total = logprobs.gather(1, torch.tensor(text)[:, None]).sum()
        return float(total) / len(text) ** length_penalty


def prompts(tokenizer: Tokenizer, num_rows: int) -> list[Ids]:
    """Reviews behind a shared instruction; sorted, as a plan is."""
    reviews = [text for text in pq.read_table(_REVIEWS).column("review").to_pylist() if text][:num_rows]
    texts = [_QUESTION + text + "\nAnswer:" for text in reviews]
    return sorted(ids.tolist() for ids in tokenizer.encode(texts, add_special_tokens=True))


def search(rows: list[Ids], max_tokens: int, *, shares_prefixes: bool = True, **options: Any) -> Found:
    """What a job's engine and task find for these prompts."""
    with tempfile.TemporaryDirectory() as folder:
        given = {"inputs": (str(_REVIEWS),), "output": f"{folder}/out", "chat": "off", "max_tokens": max_tokens}
        job = Job.load({**given, **options})
    checkpoint = resolve(None, revision=None, cache=cache_folder(), trust_remote_code=False)
    tokenizer = load_tokenizer(checkpoint, tokenizer=None, chat_template=None, trust_remote_code=False)
    task = make_task(job, tokenizer, checkpoint.spec, shares_prefixes=shares_prefixes)
    runner = local.build_runner(job, checkpoint)
    config = local.configure(job, runner, checkpoint.spec.eos_token_ids, shares_prefixes=shares_prefixes)
    engine = Engine(config, runner, tokenizer.decode)
    for at, ids in enumerate(rows):
        row = PlannedRow(at, np.array(ids, np.int32), 0, len(ids), None, (), None)
        for request in task.requests(row):
            engine.add(request)
    texts: dict[int, Ids] = {}
    shared = unshared = 0
    while engine.has_work:
        texts |= {completion.row_idx: list(completion.token_ids) for completion in engine.step()}
        shared = max(shared, engine.scheduler.blocks.num_in_use)
        unshared = max(unshared, sum(len(sequence.block_table) for sequence in engine.scheduler.running))
    return Found(tuple(texts[at] for at in range(len(rows))), shared, unshared)


def without_padding(theirs: Ids, eos_token_ids: tuple[int, ...]) -> Ids:
    """Up to the token that ends the text; transformers fills up to the longest one of the search."""
    end = next((at + 1 for at, token in enumerate(theirs) if token in eos_token_ids), len(theirs))
    return theirs[:end]


@click.command()
@click.option("--rows", default=20, show_default=True)
@click.option("--max-tokens", default=16, show_default=True)
@click.option("--beams", multiple=True, type=int, default=(2, 4), show_default=True)
def main(rows: int, max_tokens: int, beams: tuple[int, ...]) -> None:
    """Print a line for each number of beams, and every row that differs."""
    checkpoint = resolve(None, revision=None, cache=cache_folder(), trust_remote_code=False)
    tokenizer = load_tokenizer(checkpoint, tokenizer=None, chat_template=None, trust_remote_code=False)
    asked, plain = prompts(tokenizer, rows), Plain.load()
    is_right = True
    click.echo("| beams | rows with transformers' text | blocks, shared | unshared |\n|---|---|---|---|")
    for num_beams in beams:
        found = search(asked, max_tokens, shares_prefixes=False, num_beams=num_beams)
        margins = []
        for at, (prompt, ours) in enumerate(zip(asked, found.texts, strict=True)):
            theirs = plain.search(prompt, max_tokens, num_beams=num_beams)
            theirs = without_padding(theirs, checkpoint.spec.eos_token_ids)
            if ours != theirs:
                margins.append(abs(plain.score(prompt, ours) - plain.score(prompt, theirs)))
                said, other = tokenizer.decode(ours), tokenizer.decode(theirs)
                click.echo(f"row {at}: {said!r}, not {other!r}: {margins[-1]:.5f}", err=True)
        num_equal = len(asked) - len(margins)
        click.echo(f"| {num_beams} | {num_equal} of {len(asked)} | {found.shared:,} | {found.unshared:,} |")
        is_right &= found.shared < found.unshared and all(margin <= TIE for margin in margins)
    sys.exit(0 if is_right else 1)


if __name__ == "__main__":
    main()
