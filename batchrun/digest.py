"""Identifies a model's files without reading all of their bytes."""

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

_SAMPLES = 16
_SAMPLE_BYTES = 65536
# Written by whichever tool saved the folder last; no influence on a single token.
_VOLATILE = ("transformers_version", "_name_or_path", "_commit_hash")


def sampled_digest(files: Iterable[Path], *, salt: str = "") -> str:
    """SHA-256 (hex) over names, sizes and evenly spaced samples of the files, first and last bytes included.

    JSON files are hashed whole, without the version of the library that saved them. Two fine-tunes of one model
    differ; a file altered only between the samples (16 x 64 KiB) does not show.
    """
    total = hashlib.sha256(salt.encode())
    for file in sorted(files, key=lambda file: file.name):
        total.update(file.name.encode())
        total.update(_json_bytes(file) if file.suffix == ".json" else _samples(file))
    return total.hexdigest()


def _json_bytes(file: Path) -> bytes:
    raw = file.read_bytes()
    if file.name not in ("config.json", "generation_config.json"):
        return hashlib.sha256(raw).digest()
    facts: dict[str, Any] = json.loads(raw)
    lasting = {key: value for key, value in facts.items() if key not in _VOLATILE}
    return hashlib.sha256(json.dumps(lasting, sort_keys=True).encode()).digest()


def _samples(file: Path) -> bytes:
    size = file.stat().st_size
    found = hashlib.sha256(str(size).encode())
    last = max(size - _SAMPLE_BYTES, 0)
    with file.open("rb") as stream:
        for sample in range(_SAMPLES):
            stream.seek(last * sample // (_SAMPLES - 1))
            found.update(stream.read(_SAMPLE_BYTES))
    return found.digest()
