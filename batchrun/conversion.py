"""Turns a `.gguf` file into a float32 safetensors folder, once, and keeps it in the cache.

Owns the cache's layout: `models/<stem>-<digest>/`, which appears by one rename and is never changed afterwards.
"""

import io
import logging
import os
import shutil
import time
from contextlib import redirect_stderr
from pathlib import Path

from batchrun.digest import sampled_digest
from batchrun.errors import ModelUnavailable
from batchrun.quiet import quiet_transformers

# Part of the cache key: raise it when the files written for the same input change.
_LAYOUT = "1"
_log = logging.getLogger(__name__)


def convert_gguf(file: Path, *, cache: Path) -> Path:
    """The folder that holds `file` as float32 safetensors with its config and tokenizer; converts when absent.

    Processes that ask at once wait for one conversion. Raises ModelUnavailable when the file cannot be read.
    """
    from filelock import FileLock

    models = cache / "models"
    folder = models / f"{file.stem}-{sampled_digest([file], salt=_LAYOUT)[:16]}"
    if folder.exists():
        return folder
    models.mkdir(parents=True, exist_ok=True)
    with FileLock(models / f"{folder.name}.lock"):
        if not folder.exists():
            _convert(file, folder)
    return folder


def _convert(file: Path, folder: Path) -> None:
    _log.info("converting %s to float32, once (about half a minute for 135M parameters)", file.name)
    started = time.monotonic()
    unfinished = folder.with_name(f"{folder.name}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir()
    # The GGUF reader draws a bar that transformers' own switch does not reach.
    with quiet_transformers(), redirect_stderr(io.StringIO()):
        _write(file, unfinished)
    for written in unfinished.iterdir():
        _sync(written)
    # Before the rename, so that a crash leaves a whole folder or none.
    unfinished.rename(folder)
    _log.info("converted %s in %.0f s: %s", file.name, time.monotonic() - started, folder)


def _write(file: Path, folder: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    try:
        model = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype="float32")
        tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    except (OSError, ValueError, KeyError, RuntimeError, NotImplementedError) as error:
        raise ModelUnavailable(f"{file} cannot be converted: {_first_line(error)}") from error
    # transformers refuses to save a model that it calls quantized, though its weights are float32 by now.
    facts = model.config.to_dict()
    for key in ("quantization_config", "_name_or_path", "_model_name_or_path"):
        facts.pop(key, None)
    facts["architectures"] = [type(model).__name__]
    plain = type(model)(type(model.config).from_dict(facts))
    plain.load_state_dict(model.state_dict())
    plain.tie_weights()
    plain.generation_config = model.generation_config
    plain.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _sync(file: Path) -> None:
    descriptor = os.open(file, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
