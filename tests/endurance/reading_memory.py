"""Peak memory of scoring long texts beside that of generating behind them.

    python -m tests.endurance.reading_memory
    python -m tests.endurance.reading_memory --model smollm2

Each is a job in a process of its own, over the same token ids with the same pool for keys and values. Scoring wants the
logits behind every token, whose vocabulary by default is large: all of them at once would be gigabytes. Exit status 1:
scoring takes more than 1.2 times the memory of generating.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import click
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from batchrun.checkpoint import cache_folder, resolve

_AT_MOST = 1.2
_CONTEXT = 8192
_VOCABULARY = 131_072
_CHILD = """
import json, sys
import batchrun
outcome = batchrun.submit(**json.loads(sys.argv[1]))
assert not outcome.errors, outcome.errors
peak = next(line for line in open("/proc/self/status") if line.startswith("VmHWM:"))
print(outcome.computed_tokens, int(peak.split()[1]) * 1024)
"""


def tiny_model(folder: Path) -> str:
    """A random Llama with a large vocabulary, of which the embedded model's tokenizer knows a part."""
    torch.manual_seed(0)
    shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlamaConfig(
        vocab_size=_VOCABULARY, num_key_value_heads=2, max_position_embeddings=_CONTEXT, head_dim=16, **shape
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    embedded = resolve(None, revision=None, cache=cache_folder(), trust_remote_code=False)
    AutoTokenizer.from_pretrained(embedded.folder).save_pretrained(folder)
    return str(folder)


def peak(options: dict[str, Any]) -> tuple[int, int]:
    """Tokens that a job computed, and the bytes that its process had at most."""
    command = [sys.executable, "-c", _CHILD, json.dumps(options)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    computed, num_bytes = map(int, done.stdout.split())
    return computed, num_bytes


@click.command()
@click.option("--model", "-m", help="smollm2 is the embedded one. Default: a tiny one with a large vocabulary.")
@click.option("--rows", default=3, show_default=True)
def main(model: str | None, rows: int) -> None:
    """Print both peaks."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        checked = None if model == "smollm2" else model or tiny_model(folder / "model")
        spec = resolve(checked, revision=None, cache=cache_folder(), trust_remote_code=False).spec
        length = min(_CONTEXT, spec.max_model_len) - 16
        ids = np.random.default_rng(0).integers(100, spec.vocab_size, (rows, length))
        pq.write_table(pa.table({"ids": list(ids)}), folder / "texts.parquet")
        same = {"inputs": str(folder / "texts.parquet"), "device": "cpu", "kv_cache_memory": "3GiB", "keep_cols": []}
        same |= {} if checked is None else {"model": checked}
        found = {}
        for task, own in {
            "generate": {"prompt_col": "ids", "max_tokens": 8, "ignore_eos": True},
            "score": {"task": "score", "target_col": "ids"},
        }.items():
            computed, found[task] = peak({**same, **own, "output": str(folder / task)})
            what = f"{rows} texts of {length:,} tokens, vocabulary {spec.vocab_size:,}"
            click.echo(f"{task}: {found[task] / (1 << 20):,.0f} MiB; {what}; {computed:,} computed")
    ratio = found["score"] / found["generate"]
    click.echo(f"scoring takes {ratio:.2f} times as much")
    sys.exit(1 if ratio > _AT_MOST else 0)


if __name__ == "__main__":
    main()
