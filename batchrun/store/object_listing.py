"""The jobs below a URL, found by their heads."""

from collections.abc import Iterator
from dataclasses import replace

from batchrun.errors import InputMissing
from batchrun.filesystem import Unreachable, explain, failures, locate, tidy
from batchrun.store.at_hand import at_hand
from batchrun.store.layout import FOLDER_SUFFIX
from batchrun.store.listing import Listed, look_at

_FIRST_NAME = "head-"


def list_urls(url: str) -> tuple[Listed, ...]:
    """Every job whose folder is below `url`, the latest first. Raises InputMissing: the store cannot be reached."""
    found = [_look(out) for out in sorted(set(_outputs(tidy(url))))]
    return tuple(sorted(found, key=lambda job: (-job.at, job.output)))


def _outputs(url: str) -> Iterator[str]:
    try:
        at = locate(url)
        paths = at.filesystem.find(at.path)
    except Unreachable as error:
        raise InputMissing(f"cannot read {url}: {error}") from error
    except failures() as error:
        raise InputMissing(f"cannot read {url}: {explain(error)}") from error
    for path in paths:
        folder, _, name = path.rpartition("/")
        if name.startswith(_FIRST_NAME) and folder.endswith(FOLDER_SUFFIX):
            yield at.url(folder.removesuffix(FOLDER_SUFFIX))


def _look(out: str) -> Listed:
    with at_hand(out) as job:
        listed = look_at(job.at.out)
        now = None if listed.status is None else replace(listed.status, output=out)
        return replace(listed, output=out, status=now, problem=job.called(listed.problem))
