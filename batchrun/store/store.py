"""The job folder OUT.batchrun: who works in it, for which job, and which rows are done.

The parts are the checkpoint: a row is done when its index is in a part, and nothing else says so. A part appears by
one link under the next sequence number of its unit, so of two workers on one unit only one can go on. Knows neither
models nor prompts; what a row's columns mean is the task's affair.
"""

import hashlib
import json
import os
import socket
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from batchrun.errors import JobMismatch, OutputRefused, StoppedEarly, StorageFailed
from batchrun.filesystem import Unreachable, is_url, tidy
from batchrun.job import Job
from batchrun.store import partial, succession, suspects, target
from batchrun.store.at_hand import as_called
from batchrun.store.counts import Counts, total
from batchrun.store.durable import new_name, remove, storage_errors, sync_folder, write_file
from batchrun.store.home import Disk, Hold, Home
from batchrun.store.layout import Layout, read_json
from batchrun.store.parts import read_row_idx, write_part

_ATTEMPTS = 5


class PartExists(StoppedEarly):
    """Another worker committed under the number that was due: this one is too late and must stop."""

    def __init__(self, path: Path) -> None:
        super().__init__(
            f"{path} was written by another worker on the same unit; this one stops and nothing is lost: "
            "run the same command again"
        )


class Store:
    """One job's folder. `open` only looks; everything that writes happens inside `lock`."""

    def __init__(self, at: Layout, home: Home, *, overwrite: bool) -> None:
        self.at = at
        self.overwrite = overwrite
        self._home = home
        self._next_seq: dict[int, int] = {}
        self._lease: Hold | None = None
        self._tmp: Path | None = None

    @classmethod
    def open(cls, out: Path | str, *, overwrite: bool = False) -> "Store":
        """The store of OUT, a path or URL, whether or not it exists yet; changes nothing there.

        Raises:
            OutputRefused: OUT cannot be created there, or it holds something that batchrun did not write.
        """
        if is_url(str(out)):
            return cls._open_url(tidy(str(out)), overwrite=overwrite)
        out = Path(out)
        if out.name in ("", ".."):
            raise OutputRefused(f"{out} has no name of its own; give -o the name of a new folder")
        at = Layout(out)
        target.refuse(at, overwrite=overwrite)
        return cls(at, Disk(at), overwrite=overwrite)

    @classmethod
    def _open_url(cls, url: str, *, overwrite: bool) -> "Store":
        # Its client is an extra.
        from batchrun.store.object_home import ObjectHome

        try:
            home = ObjectHome.open(url)
        except Unreachable as error:
            raise OutputRefused(f"cannot write {url}: {error}") from error
        home.refuse(overwrite=overwrite)
        return cls(home.at, home, overwrite=overwrite)

    @property
    def output(self) -> Path | str:
        """OUT as the user calls it."""
        return self._home.output

    def called(self, text: str) -> str:
        """The text with the names of files in the job folder as the user would call them."""
        return self._home.called(text)

    @property
    def is_complete(self) -> bool:
        """Whether OUT holds this job's answers."""
        return self.at.is_complete

    @property
    def job_id(self) -> str:
        """The same for the same inputs, prompts, model and sampling, wherever and whenever they run."""
        return job_id(self._stored("fingerprint"))

    @property
    def job(self) -> dict[str, Any]:
        """The stored job's options, as given to `check`. Raises StorageFailed when there is none."""
        return self._stored("job")

    @contextmanager
    def lock(self, wait_s: float = 0.0) -> Iterator[None]:
        """Holds the job folder, created if need be, for this process; free for others when the process dies.

        A process that was paused for so long that another has taken the folder over gets no further than its next
        write: that raises Overtaken, a StoppedEarly.

        Temporary files of dead processes are swept and a publication that one of them had begun is finished. When
        the job comes to nothing (no plan, no part), the folder is removed again.

        Raises:
            StoppedEarly: another process has it for longer than `wait_s`; the message names it.
            OutputRefused: the folder cannot be created, or its disk has no hard links.
        """
        with as_called(self._home):
            lease = self._home.hold()
            created = self._acquire(lease, wait_s)
            try:
                self._lease = lease
                self._take_over()
                yield
            except (StorageFailed, OutputRefused):
                # Whoever takes the folder over sweeps what the one before was writing.
                lease.check()
                raise
            finally:
                self._lease = None
                with suppress(OSError, StorageFailed):
                    if lease.is_held:
                        self._leave(created)
                self._tmp = None
                with suppress(OSError):
                    lease.release()

    @property
    def is_held(self) -> bool:
        """Whether the folder is this process's still."""
        return self._lease is not None and self._lease.is_held

    @property
    def tmp(self) -> Path:
        """Where this holder of the lock keeps what is unfinished, and throws what is to go.

        The next holder takes this folder away before it does anything else. A rename out of it or into it is
        therefore one with the look whether the lock is still ours: it fails when it is not. Outside `lock` nobody asks.
        """
        return self._tmp or self.at.tmp

    def check_lease(self) -> None:
        """Raises Overtaken, a StoppedEarly, when another process has the folder by now. Outside `lock` nobody asks."""
        if self._lease:
            self._lease.check()

    def check(self, job: Mapping[str, Any], fingerprint: Mapping[str, str]) -> None:
        """Makes the folder this job's, or finds that it already is.

        An unfinished job of the same fingerprint goes on. A job that has answers is started over only with
        `overwrite`, when it is complete or a different one; one that was only planned is simply replaced.

        Raises:
            JobMismatch: the folder has answers of a job with another fingerprint.
        """
        assert self._lease, "check() belongs inside lock()"
        is_other = self.holds_other(fingerprint)
        stored = read_json(self.at.job)
        with storage_errors(self.at.folder):
            if not stored or is_other:
                self._start_over()
            self.at.parts.mkdir(exist_ok=True)
            content = {"job": dict(job), "fingerprint": dict(fingerprint)}
            if content != stored or not self.at.job.exists():
                write_file(self.at.job, json.dumps(content, indent=1).encode(), self.tmp)
                self._home.keep(self.at.job)

    def holds_other(self, fingerprint: Mapping[str, str]) -> bool:
        """Whether the folder has a job that `check` would remove in favour of this one; changes nothing.

        Raises:
            JobMismatch: as `check`.
        """
        stored = read_json(self.at.job)
        if not stored:
            return False
        differing = Job.differing(stored.get("fingerprint", {}), fingerprint)
        if differing and not self.overwrite and self._has_answers():
            raise JobMismatch(self.called(str(self.at.folder)), differing)
        return bool(differing) or (self.overwrite and self.is_complete)

    def adopt_plan(self, staged: Path) -> None:
        """Moves a plan that was made elsewhere in the folder to its place, where none is. Raises StorageFailed."""
        with storage_errors(self.at.plan):
            staged.rename(self.at.plan)
            sync_folder(self.at.folder)

    def share(self) -> None:
        """From here on others can go on with the plan and the parts; needed before a commit. Raises StorageFailed."""
        assert self._lease, "share() belongs inside lock()"
        self.check_lease()
        self._home.share()

    def fetch(self) -> None:
        """Brings the plan and the parts, also of a complete job, to where `at` says. Raises StorageFailed."""
        self._home.fetch()

    def fetch_result(self) -> None:
        """Brings OUT to where `at` says. Raises StorageFailed."""
        self._home.fetch_result()

    def keep(self, path: Path) -> None:
        """Has what was just written to `path`, a file of the job folder, outlive this process. Raises StorageFailed."""
        self._home.keep(path)

    def take_back(self, staged: Path) -> None:
        """Puts the plan, parts and `retry.json` in the folder `staged` in the place of those that are there.

        `staged` is on the same disk, whole and durable. Rows that are in none of its parts are to be done again; OUT
        keeps the answers of before until the new ones are published. A crash leaves all of the old or all of the new.
        Raises StorageFailed.
        """
        assert self._lease, "take_back() belongs inside lock()"
        self.check_lease()
        succession.begin(self.at, staged)
        succession.finish(self.at, self.tmp)
        self._home.start_over()
        self._home.share()
        self._next_seq.clear()

    def done(self, unit: int) -> NDArray[np.int64]:
        """The rows of `unit` that are in a part; int64 [num_done]. From here on this store commits after them.

        Raises:
            PartDamaged: a part cannot be read; the message says what to do.
        """
        parts = [part for part in self.at.list_parts() if part.unit == unit]
        rows = [read_row_idx(part, self.job_id) for part in parts]
        # Decided now and only advanced by our own commits: a part that somebody else adds meanwhile takes this
        # number, and we find out before we write a row twice.
        self._next_seq[unit] = max((part.seq for part in parts), default=0) + 1
        return np.concatenate([*rows, np.empty(0, np.int64)])

    def counts(self) -> Counts:
        """Rows that are in a part, over all units, and the failed ones among them by type of error."""
        return total(self.at.list_parts())

    def num_done(self) -> int:
        """Rows that are in a part, over all units."""
        return self.counts().rows

    def commit(self, unit: int, table: pa.Table) -> Path:
        """Makes the rows of `table` done: when this returns they survive a power cut. The first column is `row_idx`.

        Raises:
            PartExists: another worker committed to this unit since `done(unit)`; nothing was written.
            StorageFailed: the disk failed; the rows are not done.
        """
        assert unit in self._next_seq, f"commit() to unit {unit} before done({unit})"
        part = self.at.part(unit, self._next_seq[unit])
        temporary = new_name(self.tmp, part.path.name)
        self.check_lease()
        with storage_errors(part.path):
            try:
                # A crash in here leaves a temporary name, which the next holder of the lock sweeps.
                write_part(table, temporary, self.job_id)
                self._home.commit(temporary, part.path)
            except FileExistsError:
                raise PartExists(part.path) from None
            finally:
                # Last: a crash before this line leaves two names for one file, and the sweep takes this one.
                temporary.unlink(missing_ok=True)
        self._next_seq[unit] = part.seq + 1
        return part.path

    def save_partial(self, rows: Mapping[int, tuple[int, ...]]) -> None:
        """Replaces the saved tokens of unfinished rows: row_idx → token ids generated so far.

        Commit finished rows first: then a crash between the two leaves a row in both places, which is simply done,
        and never one in neither. Raises StorageFailed.
        """
        self.check_lease()
        partial.save(self.at, rows, self.tmp)
        self._home.keep(self.at.partial)

    def load_partial(self) -> dict[int, tuple[int, ...]]:
        """What `save_partial` saved last; empty when nothing was. Raises StorageFailed when it is damaged."""
        return partial.load(self.at)

    def suspect(self, rows: Iterable[int]) -> None:
        """This process is given up while these rows run. Raises StorageFailed."""
        self.check_lease()
        suspects.add(self.at, rows, self.tmp)
        self._home.keep(self.at.suspects)

    def load_suspects(self) -> dict[int, int]:
        """Rows that ran when processes of the job were given up, and how many were. Raises StorageFailed."""
        return suspects.load(self.at)

    def num_unfinished(self) -> int:
        """Rows that are in no part and have saved tokens. Raises StorageFailed when either cannot be read."""
        saved = self.load_partial()
        done = (
            (row for part in self.at.list_parts() for row in read_row_idx(part, self.job_id).tolist()) if saved else ()
        )
        return len(saved.keys() - done)

    def write_progress(self, progress: Mapping[str, Any]) -> None:
        """Replaces what `status` shows of the running process; its "status" is one of `status.StatusWord`."""
        self.check_lease()
        temporary = new_name(self.tmp, self.at.progress.name)
        with storage_errors(self.at.progress):
            # Not synced: nothing is decided from it, and losing it to a power cut costs nothing.
            temporary.write_text(json.dumps(dict(progress)))
            temporary.replace(self.at.progress)

    def read_progress(self) -> dict[str, Any]:
        """What was written last; empty when nothing readable was."""
        return self.at.read_progress()

    def reveal(self) -> None:
        """Moves a finished result from `ready` to OUT; does nothing when there is none. Safe to repeat at any point.

        Raises:
            OutputRefused: something else has appeared at OUT; the answers are kept.
        """
        assert self._lease, "reveal() belongs inside lock()"
        self.check_lease()
        self._home.reveal(self.tmp)

    def _stored(self, key: str) -> dict[str, Any]:
        content = read_json(self.at.job)
        if content is None:
            raise StorageFailed(f"{self.at.folder} holds no job; submit it first")
        return dict(content[key])

    def _acquire(self, lease: Hold, wait_s: float) -> list[Path]:
        """Takes the lock; returns the folders that had to be created for it, the innermost first."""
        created: list[Path] = []
        for attempt in range(_ATTEMPTS):
            created += target.create_folder(self.at)
            try:
                lease.acquire(wait_s)
                break
            except OSError as error:
                # Missing: the holder before us came to nothing and took the folder away while we waited.
                if not isinstance(error, FileNotFoundError) or attempt == _ATTEMPTS - 1:
                    raise target.uncreatable(self.at.folder, error) from error
        return created

    def _take_over(self) -> None:
        """What a new holder does first: say who it is, sweep, and finish what a dead one had begun."""
        at = self.at
        self._home.take_over()
        with storage_errors(at.folder):
            at.tmp.mkdir(exist_ok=True)
            for leftover in list(at.tmp.iterdir()):
                # By another name first: its owner, if it was only paused, cannot put anything more into it.
                swept = new_name(at.tmp, "swept")
                leftover.rename(swept)
                remove(swept)
            self._tmp = new_name(at.tmp, "holder")
            self._tmp.mkdir()
            # It was meant for the holder before.
            remove(at.cancel)
            target.refuse_without_links(at, self.tmp)
            holder = {"pid": os.getpid(), "host": socket.gethostname()}
            write_file(at.holder, json.dumps(holder).encode(), self.tmp)
        self.reveal()
        succession.finish(at, self.tmp)

    def _leave(self, created: list[Path]) -> None:
        """What a holder does last; the lock itself it still has."""
        # The holder's name before the lock: afterwards it could be the next holder's.
        self.at.holder.unlink(missing_ok=True)
        remove(self.tmp)
        self._home.leave()
        if not (self.at.plan.exists() or self.at.overwriting.exists() or self._has_answers()):
            target.remove_folder(self.at, created)

    def _has_answers(self) -> bool:
        at = self.at
        kept = at.ready, at.partial, at.retry
        return self.is_complete or any(path.exists() for path in kept) or bool(at.list_parts())

    def _start_over(self) -> None:
        """Empties the folder for a new job, each step so that a crash after it leaves a refusal or a fresh start."""
        at = self.at
        self._home.start_over()
        if at.has_result:
            # First: from here on OUT is an earlier job's, whatever else is or is not in the folder.
            at.overwriting.touch()
            sync_folder(at.folder)
        # The job before what belongs to it: a plan without a job is swept here, a job with half a plan would fail.
        belongings = (
            at.ready,
            at.plan,
            at.parts,
            at.partial,
            at.suspects,
            at.manifest,
            at.reused,
            at.vanished,
            at.retry,
        )
        told = (at.progress, at.stuck, at.series, at.metrics, at.summary, at.report)
        for path in (at.job, *belongings, *told):
            self._discard(path)
            if path == at.job:
                sync_folder(at.folder)
        self._next_seq.clear()

    def _discard(self, path: Path) -> None:
        """Removes what is at `path`; never what a process that has taken the folder over has put there."""
        aside = new_name(self.tmp, path.name)
        try:
            path.rename(aside)
        except FileNotFoundError:
            # Nothing was there, or `tmp` is gone.
            self.check_lease()
            return
        remove(aside)


def job_id(fingerprint: Mapping[str, str]) -> str:
    """A short name for everything that the answers depend on."""
    return hashlib.sha256(json.dumps(dict(fingerprint), sort_keys=True).encode()).hexdigest()[:12]
