"""A way of answering the rows, as it is named on the command line: `NAME` or `NAME:KEY=VALUE,…`."""

import sys
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

from batchrun.engine.policies import Schedule
from batchrun.errors import UsageError
from batchrun.job import Job
from batchrun.nearest import nearest
from batchrun_jobs.bench.peers import PEERS, Option, Peer
from batchrun_jobs.bench.process import CHILDREN

# A schedule's name is batchrun with this schedule. Static batching is nothing without a batch size.
_BATCHRUN: dict[str, dict[str, Option]] = {
    "batchrun": {},
    **{schedule: {"schedule": schedule} for schedule in get_args(Schedule)},
    "static": {"schedule": "static", "max_num_seqs": 32},
}


@dataclass(frozen=True, slots=True)
class Kinds:
    """The ways that a benchmark knows: `own` names of batchrun with the options that they stand for, which `script`
    runs, and `peers`."""

    own: Mapping[str, Mapping[str, Option]]
    script: Path
    peers: Mapping[str, Peer]

    @property
    def names(self) -> tuple[str, ...]:
        return (*self.own, *self.peers)


GENERATING = Kinds(_BATCHRUN, CHILDREN / "batchrun_job.py", PEERS)
NAMES = GENERATING.names


@dataclass(frozen=True, slots=True)
class Way:
    """A script and the Python that runs it; `peer` is None when it is batchrun's. `label` is what was typed."""

    label: str
    script: Path
    python: str
    options: Mapping[str, Option]
    peer: Peer | None = None


def parse(text: str, pythons: Mapping[str, str], kinds: Kinds = GENERATING) -> Way:
    """`pythons` has the peers that live in a Python of their own. Raises UsageError: an unknown name or option."""
    name, _, rest = text.partition(":")
    given = [_pair(part, text) for part in rest.split(",")] if rest else []
    if name in kinds.own:
        for key, _ in given:
            _check(key, _settings(), text)
        return Way(text, kinds.script, sys.executable, {**kinds.own[name], **dict(given)})
    _check(name, kinds.names, text)
    peer = kinds.peers[name]
    options = dict(peer.options)
    for key, value in given:
        _check(key, peer.options, text)
        options[key] = _typed(value, peer.options[key], text)
    return Way(text, CHILDREN / peer.script, pythons.get(name, sys.executable), options, peer)


def _settings() -> list[str]:
    """What may be chosen of batchrun: how it computes, not what."""
    extras = {name: field.json_schema_extra for name, field in Job.model_fields.items()}
    engine = [name for name, extra in extras.items() if isinstance(extra, dict) and extra["group"] == "Engine"]
    return ["dtype", "quantization", *engine]


def _pair(part: str, text: str) -> tuple[str, str]:
    key, equals, value = part.partition("=")
    if not equals:
        raise UsageError(f"--way {text}: {part!r} should be KEY=VALUE")
    return key.strip().replace("-", "_"), value.strip()


def _check(name: str, known: Collection[str], text: str) -> None:
    if name not in known:
        close = nearest(name, known)
        remedy = f"did you mean {close!r}?" if close else f"there are {', '.join(known)}"
        raise UsageError(f"--way {text}: no such name {name!r}; {remedy}")


def _typed(value: str, default: Option, text: str) -> Option:
    """The value as the default's type."""
    if isinstance(default, bool):
        answers = {"yes": True, "no": False}
        if value not in answers:
            raise UsageError(f"--way {text}: {value!r} should be yes or no")
        return answers[value]
    if isinstance(default, int):
        if not value.isdecimal():
            raise UsageError(f"--way {text}: {value!r} should be a number")
        return int(value)
    return value
