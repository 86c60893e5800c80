"""What every tiny family gives when two ranks compute it, against the undivided model's eager attention; as a table.

python -m tests.device.divided_families [FAMILY ...]
"""

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from batchrun.divisible import require_divisible
from batchrun.engine.group import Group
from batchrun.engine.model import Model
from batchrun.errors import ModelUnavailable
from batchrun.quiet import quiet_transformers
from tests.device.family_matrix import logits_alone, logits_over_blocks, make_prompts
from tests.device.tiny_families import FAMILIES, WIDE, make_model

NUM_RANKS = 2
# torch's product over experts takes rows of multiples of 16 bytes, in a rank's half too.
EVEN: dict[str, Any] = {**WIDE, "intermediate_size": 32, "moe_intermediate_size": 32}
ODD = {"gemma3n_text": WIDE}  # which wants a list


@dataclass(frozen=True, slots=True)
class Divided:
    """`error` is the largest difference of a logit, `largest` the largest logit; `kv_share` what a rank keeps of a
    token's keys and values."""

    error: float
    largest: float
    kv_share: float


def measure(family: str, folder: Path) -> Divided:
    """Rank 0's part; the others `follow`. Raises ModelUnavailable where the family is refused."""
    whole, prompts = Model.adopt(make_divisible(family)), make_prompts()
    expected = logits_alone(make_divisible(family), prompts)
    model = load(folder)
    expected[1] = expected[1][len(expected[1]) - len(logits_over_blocks(whole, prompts)[1]) :]
    got = logits_over_blocks(model, prompts)
    return Divided(
        error=max(float((ours - theirs).abs().max()) for ours, theirs in zip(got, expected, strict=True)),
        largest=max(float(theirs.abs().max()) for theirs in expected),
        kv_share=_kv_bytes(model) / _kv_bytes(whole),
    )


def make_divisible(family: str) -> Any:
    return make_model(family, **ODD.get(family, EVEN))


def load(folder: Path) -> Model:
    require_divisible(folder, NUM_RANKS, trust_remote_code=False)
    cpu = torch.device("cpu")
    return Model.load(folder, dtype=torch.float32, device=cpu, trust_remote_code=False, num_ranks=NUM_RANKS)


def _kv_bytes(model: Model) -> int:
    return sum(layer.block_bytes(1, model.kv_place.dtype) for layer in model.kv_layers.values())


def follow(families: list[str], parent: Path, rank: int, port: int) -> None:
    """A rank above 0."""
    Group.join(Group.meeting_place(NUM_RANKS, port), rank, NUM_RANKS, "cpu")
    for family in families:
        try:
            logits_over_blocks(load(parent / family), make_prompts())
        except ModelUnavailable:
            continue


def lead(families: list[str], parent: Path) -> None:
    for family in families:
        make_divisible(family).save_pretrained(parent / family)
    store = Group.meeting_place(NUM_RANKS)
    command = [sys.executable, "-m", "tests.device.divided_families", "--rank", "1", str(store.port), str(parent)]
    with subprocess.Popen([*command, *families]) as follower:
        Group.join(store, 0, NUM_RANKS, "cpu")
        print(f"{'family':20}{'logit error':>12}{'largest':>9}{'KV':>6}")
        for family in families:
            try:
                divided = measure(family, parent / family)
                print(f"{family:20}{divided.error:12.1e}{divided.largest:9.1f}{divided.kv_share:6.0%}", flush=True)
            except ModelUnavailable as error:
                print(f"{family:20}refused: {error}", flush=True)
    sys.exit(follower.returncode)


def main() -> None:
    torch.set_num_threads(1)
    match sys.argv[1:]:
        case "--rank", rank, port, parent, *families:
            follow(families, Path(parent), int(rank), int(port))
        case families:
            with TemporaryDirectory() as parent:
                lead(families or list(FAMILIES), Path(parent))


if __name__ == "__main__":
    with quiet_transformers():
        main()
