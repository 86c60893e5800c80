"""A plan and parts in the place of those before: one rename decides it, and whoever comes next finishes it.

Names only; what is in them is the caller's affair. Every function is safe to repeat at any point.
"""

from pathlib import Path

from batchrun.store.durable import new_name, remove, storage_errors, sync_folder
from batchrun.store.layout import Layout


def begin(at: Layout, staged: Path) -> None:
    """From here on the folder `staged`, which is whole and durable, is what the job is to be. Raises StorageFailed."""
    with storage_errors(at.next):
        sync_folder(staged)
        staged.rename(at.next)
        sync_folder(at.folder)


def finish(at: Layout, tmp: Path) -> None:
    """Moves what has begun to its place, and what was there into `tmp`; does nothing when nothing has begun.

    Raises StorageFailed.
    """
    if not at.next.exists():
        return
    with storage_errors(at.next):
        if at.has_result:
            # First: from here on OUT has the answers of before.
            at.overwriting.touch()
            sync_folder(at.folder)
        for old in (at.plan, at.parts, at.retry):
            if (at.next / old.name).exists():
                if old.exists():
                    old.rename(new_name(tmp, old.name))
                (at.next / old.name).rename(old)
        # Of an earlier run of the same rows: its tokens went on to be answers, and its suspects get another try.
        for known in (at.partial, at.suspects):
            remove(known)
        sync_folder(at.folder)
        at.next.rmdir()
