"""What quantized weights and KV change: the perplexity of real text, and the tokens that a model finds likeliest.

    python -m batchrun_jobs.quality reviews.parquet --text-col review

Every text is read once by the model as it is and once with fewer bits, both through the engine's own kernels. Both are
asked for the next token at every position of the same text, so that one difference does not lead to others.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

import click
import numpy as np
import pyarrow.parquet as pq
import torch
from torch import Tensor

from batchrun.checkpoint import cache_folder, load_tokenizer, resolve
from batchrun.engine.batch import pack
from batchrun.engine.model import Model
from batchrun.engine.request import Request, SamplingParams, TokenIds
from batchrun.engine.sequence import Sequence
from batchrun.engine.step import Item, ScheduledBatch
from batchrun.errors import BatchrunError, DataError
from batchrun_kernels.layers import Quantization

_BLOCK_SIZE = 16


@dataclass(frozen=True, slots=True)
class Reading:
    """What a model made of texts, at every position but their last: nats of surprise, and the likeliest next token."""

    surprise: Tensor  # float64 [num_positions]
    likeliest: Tensor  # int64 [num_positions]

    @property
    def perplexity(self) -> float:
        return math.exp(float(self.surprise.mean()))


@click.command()
@click.argument("source", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--text-col", default="prompt", show_default=True, help="Column with the texts.")
@click.option("--model", "-m", help="As for batchrun submit.")
@click.option("--quantization", type=click.Choice(["none", "int8"]), default="int8", show_default=True)
@click.option("--kv-cache-dtype", type=click.Choice(["auto", "float16"]), default="auto", show_default=True)
@click.option("--limit", default=64, show_default=True, help="Texts to read, from the first.")
@click.option("--max-tokens", default=512, show_default=True, help="Tokens of a text to read, from the first.")
def main(
    source: Path,
    text_col: str,
    model: str | None,
    quantization: Quantization,
    kv_cache_dtype: str,
    limit: int,
    max_tokens: int,
) -> None:
    """Read the texts of SOURCE with quantized weights or KV and without, and print what differs."""
    try:
        table = pq.read_table(source)
        if text_col not in table.column_names:
            raise DataError(f"{source} has no column {text_col!r}; it has: {', '.join(table.column_names)}")
        checkpoint = resolve(model, revision=None, cache=cache_folder(), trust_remote_code=False)
        assert checkpoint.folder is not None, "echo has no weights"
        tokenizer = load_tokenizer(checkpoint, tokenizer=None, chat_template=None, trust_remote_code=False)
        texts = [text for text in table.column(text_col).to_pylist()[:limit] if text]
        ids = [one[:max_tokens] for one in tokenizer.encode(texts, add_special_tokens=True)]
        plain = read(load(checkpoint.folder, "none"), ids)
        kv_dtype = torch.float16 if kv_cache_dtype == "float16" else None
        rounded = read(load(checkpoint.folder, quantization, kv_dtype), ids)
    except BatchrunError as error:
        raise click.ClickException(str(error)) from error
    name = quantization if kv_dtype is None else f"{quantization}, KV {kv_cache_dtype}"
    click.echo(report(plain, rounded, name))


def load(folder: Path, quantization: Quantization, kv_dtype: torch.dtype | None = None) -> Model:
    return Model.load(
        folder,
        dtype=torch.float32,
        device=torch.device("cpu"),
        trust_remote_code=False,
        kv_dtype=kv_dtype,
        quantization=quantization,
    )


def read(model: Model, texts: Iterable[TokenIds]) -> Reading:
    """Texts of fewer than two tokens say nothing."""
    surprises, likeliest = [], []
    for ids in texts:
        if len(ids) < 2:
            continue
        logits = _logits(model, ids)[:-1].double()
        following = torch.from_numpy(np.asarray(ids, np.int64))[1:]
        surprises.append(-logits.log_softmax(-1).gather(1, following[:, None])[:, 0])
        likeliest.append(logits.argmax(-1))
    if not surprises:
        raise DataError("no text has two tokens")
    return Reading(torch.cat(surprises), torch.cat(likeliest))


def report(plain: Reading, rounded: Reading, name: str) -> str:
    """`name` says how the second one was read."""
    same = float((plain.likeliest == rounded.likeliest).double().mean())
    change = rounded.perplexity / plain.perplexity - 1
    return "\n".join(
        [
            f"{len(plain.surprise):,} positions",
            f"perplexity  none {plain.perplexity:.4f}  {name} {rounded.perplexity:.4f}  ({change:+.2%})",
            f"same likeliest token  {same:.2%}",
        ]
    )


@torch.inference_mode()
def _logits(model: Model, ids: TokenIds) -> Tensor:
    """float32 [len(ids), vocab]."""
    sequence = Sequence(Request(0, np.asarray(ids, np.int32), SamplingParams(max_tokens=1)), arrival=0)
    sequence.block_table = list(range(-(-len(ids) // _BLOCK_SIZE)))
    sequence.state_slot = 0
    cache = model.make_cache(len(sequence.block_table), _BLOCK_SIZE, num_state_slots=1)
    batch = pack(ScheduledBatch((Item(sequence, 0, len(ids), samples=True),)), _BLOCK_SIZE, model.place.device)
    return model.forward(replace(batch, sampled=torch.arange(len(ids))), cache)


if __name__ == "__main__":
    main()
