"""What has been packed does not stay in memory a second time, as pages of the file that it came from."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from batchrun.engine.mapped_weights import MappedWeights
from batchrun.engine.model import Model
from batchrun_kernels import native
from batchrun_kernels.layers import Quantization
from tests.device.tiny_families import make_model

SMAPS = Path("/proc/self/smaps")
pytestmark = pytest.mark.skipif(not SMAPS.exists(), reason="needs /proc: what a process has mapped")


def resident_bytes(file: Path) -> int:
    """How much of the file this process has in memory."""
    total, is_of_file = 0, False
    for line in SMAPS.read_text().splitlines():
        if "-" in line.split()[0]:
            is_of_file = line.endswith(str(file))
        elif is_of_file and line.startswith("Rss:"):
            total += int(line.split()[1]) << 10
    return total


def test_a_forgotten_weight_leaves_memory_and_can_still_be_read(tmp_path: Path) -> None:
    """Its neighbours, which share its first and its last page, do so too."""
    file = tmp_path / "model.safetensors"
    saved = {"a": torch.rand(111), "b": torch.rand(1 << 18), "c": torch.rand(111)}
    save_file(saved, file)
    loaded = load_file(file)
    assert all(torch.equal(loaded[name], weight) for name, weight in saved.items())
    assert resident_bytes(file) > 1 << 20
    MappedWeights.find().forget(loaded["b"])
    assert resident_bytes(file) <= 1 << 17
    assert all(torch.equal(loaded[name], weight) for name, weight in saved.items())


def test_a_weight_of_no_file_is_left_alone(tmp_path: Path) -> None:
    """Its memory would be zeros."""
    save_file({"a": torch.rand(111)}, tmp_path / "model.safetensors")
    loaded = load_file(tmp_path / "model.safetensors")
    mapped = MappedWeights.find()
    assert any(loaded["a"].data_ptr() in one for one in mapped.ranges)
    weight = torch.rand(1 << 18)
    kept = weight.clone()
    mapped.forget(weight)
    assert torch.equal(weight, kept)


@pytest.mark.skipif(native.find() is None, reason="needs the C kernels: a C compiler at installation")
@pytest.mark.parametrize("quantization", ["none", "int8"])
def test_a_loaded_model_has_let_go_of_its_file(tmp_path: Path, quantization: Quantization) -> None:
    make_model("llama", vocab_size=50_000, tie_word_embeddings=True).save_pretrained(tmp_path)
    (file,) = tmp_path.glob("*.safetensors")
    model = Model.load(
        tmp_path,
        dtype=torch.float32,
        device=torch.device("cpu"),
        trust_remote_code=False,
        quantization=quantization,
    )
    assert model.place.dtype == torch.float32
    assert file.stat().st_size > 4 << 20
    assert resident_bytes(file) <= 1 << 20
