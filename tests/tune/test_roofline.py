"""What is said of a device that is not here follows from its peaks and the model's files."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from batchrun.checkpoint import Checkpoint
from batchrun.engine.step_time import TOKEN_KNEES, StepSize
from batchrun.errors import UsageError
from batchrun.job import Job
from batchrun.model_spec import ModelSpec
from batchrun.tune import roofline as subject
from batchrun.tune.roofline import Peaks, roofline

VOCAB, HIDDEN, LAYERS = 100, 8, 2
SPEC = ModelSpec("tiny", "Tiny", LAYERS, 1, 4, VOCAB, 512, (2,), "digest", hidden_size=HIDDEN)
NUM_WEIGHTS = LAYERS * 1000


@pytest.fixture
def checkpoint(tmp_path: Path) -> Checkpoint:
    """A model of so many weights beside its table of tokens, in two files."""
    for layer in range(LAYERS):
        tensors = {f"layer.{layer}": np.zeros((10, 100), dtype=np.float16)}
        if not layer:
            tensors["embed"] = np.zeros((VOCAB, HIDDEN), dtype=np.float16)
        save_file(tensors, tmp_path / f"model-{layer}.safetensors")
    (tmp_path / "config.json").write_text("{}")
    return Checkpoint(SPEC, tmp_path)


@pytest.fixture(autouse=True)
def device(monkeypatch: pytest.MonkeyPatch) -> None:
    """So slow that its host never is."""
    monkeypatch.setitem(subject.DEVICES, "slow", Peaks(4e6, 1e5, 8e9))


def job(**options: object) -> Job:
    return Job.load({"inputs": ("a",), "output": "out", **options})


def seconds(checkpoint: Checkpoint, num_tokens: int, *, sampled: int = 0, kv_tokens: int = 0, pairs: int = 0) -> float:
    return roofline("slow", job(), checkpoint).times.seconds(StepSize(num_tokens, 1, sampled, kv_tokens, pairs))


def test_a_small_step_reads_the_weights_and_a_large_one_computes(checkpoint: Checkpoint) -> None:
    read_s = 2 * (NUM_WEIGHTS + VOCAB * HIDDEN) / (1e5 * subject.READ_SHARE)
    token_s = 2 * NUM_WEIGHTS / (4e6 * subject.COMPUTED_SHARE)
    assert 32 * token_s < read_s < 64 * token_s
    for num_tokens in (1, *TOKEN_KNEES):
        assert seconds(checkpoint, num_tokens) == pytest.approx(max(read_s, num_tokens * token_s)), num_tokens


def test_attention_and_sampled_tokens_come_on_top(checkpoint: Checkpoint) -> None:
    flops_per_s, bytes_per_s = 4e6 * subject.COMPUTED_SHARE, 1e5 * subject.READ_SHARE
    one = seconds(checkpoint, 1)
    assert seconds(checkpoint, 1, kv_tokens=50) - one == pytest.approx(50 * 2 * LAYERS * 4 * 2 / bytes_per_s)
    assert seconds(checkpoint, 1, pairs=50) - one == pytest.approx(50 * 4 * HIDDEN * LAYERS / flops_per_s)
    assert seconds(checkpoint, 1, sampled=5) - one == pytest.approx(5 * 2 * VOCAB * HIDDEN / flops_per_s)


def test_a_quick_device_waits_for_its_host(checkpoint: Checkpoint) -> None:
    times = roofline("h100-80gb", job(), checkpoint).times
    assert times.seconds(StepSize(1, 1, 0, 0, 0)) == subject.HOST_S


def test_the_pool_is_what_the_weights_leave(checkpoint: Checkpoint) -> None:
    pool = roofline("slow", job(gpu_memory_utilization=0.5), checkpoint).pool
    assert pool.pool_bytes == 4e9 - (2 << 30) - 2 * (NUM_WEIGHTS + VOCAB * HIDDEN)
    assert (pool.kv_bytes_per_token, pool.is_gpu) == (2 * LAYERS * 4 * 2, True)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": "float32"}, "--dtype float32 is not of 16 bits; batchrun tune measures it there$"),
        ({"quantization": "int8"}, "--quantization int8 is for a CPU.*; leave it out$"),
        ({"gpu_memory_utilization": 0.1}, "tiny does not fit the memory of slow"),
    ],
)
def test_what_nothing_is_known_of_is_refused(checkpoint: Checkpoint, options: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        roofline("slow", job(**options), checkpoint)


def test_models_that_do_something_else_are_refused(checkpoint: Checkpoint) -> None:
    with pytest.raises(UsageError, match="the model keeps states; leave out --simulate"):
        roofline("slow", job(), replace(checkpoint, spec=replace(SPEC, has_states=True)))
    with pytest.raises(UsageError, match="has no weights"):
        roofline("slow", job(), Checkpoint(SPEC, None))
    assert checkpoint.folder is not None
    (checkpoint.folder / "config.json").write_text(json.dumps({"num_local_experts": 8}))
    with pytest.raises(UsageError, match="a mixture of experts"):
        roofline("slow", job(), checkpoint)
