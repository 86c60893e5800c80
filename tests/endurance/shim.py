"""The fault shim as seen from Python: building it, arming it in a child, and reading what the child did on the disk."""

import ctypes
import errno
import shutil
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

SOURCE = Path(__file__).with_name("fault_shim.c")
_REFUSE, _FILL, _KILL, _KILL_HALFWAY, _PAUSE = range(1, 6)
_TAKE_SPACE = {"create", "write", "link", "mkdir"}
_CHANGE_NOTHING = {"open", "read", "list", "mmap", "close"}

Fault = Literal["refused", "disk full", "killed", "cut in half", "power cut", "paused"]
_ACTIONS: dict[Fault, int] = {
    "refused": _REFUSE, "disk full": _FILL, "killed": _KILL, "cut in half": _KILL_HALFWAY, "power cut": _KILL,
    "paused": _PAUSE,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Call:
    """One call that touched a file below the folder."""

    name: str
    inode: int
    path: Path
    other: Path
    is_spoiled: bool

    @property
    def faults(self) -> list[Fault]:
        """What can befall it. Beside a close the disk is as the call before left it."""
        found: list[Fault] = ["refused"]
        if self.name in _TAKE_SPACE:
            found.append("disk full")
        if self.name not in _CHANGE_NOTHING:
            found += ["killed", "power cut", "paused"]
        if self.name == "write":
            found.append("cut in half")
        return found


def build(folder: Path) -> Path:
    """Compiles the shim into `folder`; for LD_PRELOAD. Raises CalledProcessError, or FileNotFoundError without a cc."""
    library = folder / "fault_shim.so"
    subprocess.run(["cc", "-O1", "-shared", "-fPIC", "-o", str(library), str(SOURCE), "-ldl"], check=True)
    return library


def arm(library: Path, folder: Path, log: Path, number: int, fault: Fault) -> None:
    """From here on this process's calls below `folder` are logged, and call `number` (from 1; 0: none) is spoiled."""
    shim = ctypes.CDLL(str(library))
    shim.fault_arm(str(folder).encode(), str(log).encode(), ctypes.c_long(number), _ACTIONS[fault], errno.EIO)


def calls(log: Path) -> list[Call]:
    """What the process did, in order."""
    found = []
    for line in log.read_text().splitlines():
        name, inode, path, other = line.split("\t")
        found.append(Call(name.removeprefix("!"), int(inode), Path(path), Path(other), name.startswith("!")))
    return found


def cut_power(done: Iterable[Call], folder: Path) -> None:
    """Takes from `folder` what a power cut may take: contents and names that were not synced.

    Contents lose their second half. Names that were given are gone, newest first; a folder's own with all in it.
    """
    contents: set[int] = set()
    names: list[Call] = []
    for call in done:
        if call.name == "write":
            contents.add(call.inode)
        elif call.name == "fsync":
            contents.discard(call.inode)
            names = [name for name in names if _given(name).parent != call.path]
        elif call.name in ("create", "link", "mkdir", "rename"):
            names.append(call)
    for path in [path for path in folder.rglob("*") if path.is_file() and path.stat().st_ino in contents]:
        with path.open("r+b") as file:
            file.truncate(path.stat().st_size // 2)
    for call in reversed(names):
        _take_back(call)


def _given(call: Call) -> Path:
    return call.path if call.name in ("create", "mkdir") else call.other


def _take_back(call: Call) -> None:
    name = _given(call)
    if call.name == "rename" and name.exists() and call.path.exists():
        # Another has its old name by now, which is durable: it is lost.
        shutil.rmtree(name) if name.is_dir() else name.unlink()
    elif call.name == "rename" and name.exists() and call.path.parent.exists():
        name.rename(call.path)
    elif call.name == "mkdir" and name.is_dir():
        shutil.rmtree(name)
    elif call.name in ("create", "link"):
        name.unlink(missing_ok=True)
