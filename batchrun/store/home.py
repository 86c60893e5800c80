"""Where a job's truth is, as its store sees it: on the disk that it works on, or behind it.

The store's own folder is the truth on a disk, so that `Disk` has little to do. `object_home.ObjectHome` is the other.
"""

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from batchrun.errors import OutputRefused
from batchrun.store import target
from batchrun.store.durable import link_if_absent, new_name, remove, storage_errors, sync_folder
from batchrun.store.layout import Layout
from batchrun.store.lease import Lease

_TAKEN = {errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR, errno.EBUSY}


class Hold(Protocol):
    """One process's hold of a job."""

    def acquire(self, wait_s: float) -> None: ...
    def check(self) -> None: ...
    def release(self) -> None: ...
    @property
    def is_held(self) -> bool: ...


class Home(Protocol):
    """One job's truth. What is at hand is what lies in the store's folder. All raise StorageFailed."""

    @property
    def output(self) -> Path | str:
        """OUT as the user calls it."""
        ...

    def called(self, text: str) -> str:
        """The text with the names of files at hand as the user would call them."""
        ...

    def hold(self) -> Hold:
        """A hold of the job, not taken yet."""
        ...

    def take_over(self) -> None:
        """Brings to hand what others have left; called by whoever has just taken the job."""
        ...

    def start_over(self) -> None:
        """What was shared before is not this job's any more, once something new is."""
        ...

    def share(self) -> None:
        """From here on others go on with the job, plan and parts at hand; nothing, when they do already."""
        ...

    def commit(self, temporary: Path, part: Path) -> None:
        """Gives a finished file the name of a part, durable, or raises FileExistsError: somebody else has it."""
        ...

    def keep(self, path: Path) -> None:
        """What was just written to `path` outlives this process's machine."""
        ...

    def reveal(self, tmp: Path) -> None:
        """Moves a finished result from `ready` to OUT; nothing, when there is none. `tmp` is the holder's."""
        ...

    def fetch(self) -> None:
        """Brings the whole plan and all parts to hand, also of a complete job."""
        ...

    def fetch_result(self) -> None:
        """Brings OUT to hand."""
        ...

    def leave(self) -> None:
        """What a holder does last."""
        ...


class Disk:
    """A job whose folder is the truth itself."""

    def __init__(self, at: Layout) -> None:
        self._at = at

    @property
    def output(self) -> Path:
        return self._at.out

    def called(self, text: str) -> str:
        return text

    def hold(self) -> Lease:
        return Lease(self._at)

    def take_over(self) -> None:
        """Everything is at hand."""

    def start_over(self) -> None:
        """The folder is all there is."""

    def share(self) -> None:
        """Who sees the folder sees it."""

    def commit(self, temporary: Path, part: Path) -> None:
        link_if_absent(temporary, part)

    def keep(self, path: Path) -> None:
        """It lies where it belongs."""

    def reveal(self, tmp: Path) -> None:
        """One rename; safe to repeat at any point.

        While an earlier job's answers are being replaced, OUT is missing between two renames; whoever takes the
        lock after a crash there finds `ready` and goes on.

        Raises:
            OutputRefused: something else has appeared at OUT; the result stays in `ready`.
        """
        at = self._at
        with storage_errors(at.out), _refused_when_taken(at.out):
            if at.ready.exists():
                if at.overwriting.exists() and at.out.exists():
                    target.refuse_foreign(at, overwrite=True)
                    self._put_aside(tmp)
                # After the old answers have left OUT, before the new ones enter it: OUT without this mark is ours.
                _throw(at.overwriting, tmp)
                sync_folder(at.folder)
                at.ready.rename(at.out)
                # The new answers' name is durable before the old answers go.
                sync_folder(at.out.parent)
            if at.out.exists() and not at.overwriting.exists():
                _throw(at.replaced, tmp)

    def _put_aside(self, tmp: Path) -> None:
        """The answers at OUT, not deleted: a crash before the new ones are in place must not cost the old ones.

        They go into a folder that comes out of `tmp`. To a process that was paused here it is not there any more, or
        already full; and so it is when they are aside already and this OUT is somebody else's.
        """
        at, empty = self._at, new_name(tmp, self._at.replaced.name)
        empty.mkdir()
        empty.rename(at.replaced)
        at.out.rename(at.replaced / at.out.name)
        # All three folders: were the mark gone and the old answers back, they would seem somebody else's.
        for folder in (at.replaced, at.out.parent, at.folder):
            sync_folder(folder)

    def fetch(self) -> None:
        """Everything is at hand."""

    def fetch_result(self) -> None:
        """Everything is at hand."""

    def leave(self) -> None:
        """Nothing is elsewhere."""


def _throw(path: Path, tmp: Path) -> None:
    """Removes it, if it is there, through `tmp`: a process that was paused here has none any more, and what it would
    remove is its successor's."""
    if path.exists():
        going = new_name(tmp, path.name)
        path.rename(going)
        remove(going)


@contextmanager
def _refused_when_taken(out: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno not in _TAKEN:
            raise
        raise OutputRefused(
            f"{out} has appeared while the job ran; move it away and run the same command again: the answers are kept"
        ) from error
