"""Whether a peer can be run here, and what has to be made for it first."""

from collections.abc import Sequence
from dataclasses import replace

from batchrun.checkpoint import Checkpoint, cache_folder
from batchrun_jobs.bench import openvino_ir
from batchrun_jobs.bench.way import Way


class PeerMissingError(Exception):
    """The message says what to install, and where."""


def present(ways: Sequence[Way], checkpoint: Checkpoint) -> tuple[list[Way], list[str]]:
    """The ways that can be run, ready for it, and a line for each one that cannot.

    Raises UsageError when what was given as a peer's Python is none.
    """
    ready, absent = [], []
    for way in ways:
        try:
            ready.append(_prepared(way, checkpoint))
        except PeerMissingError as error:
            absent.append(f"{way.label} is left out: {error}")
    return ready, absent


def _prepared(way: Way, checkpoint: Checkpoint) -> Way:
    peer = way.peer
    if peer is None:
        return way
    if checkpoint.folder is None:
        raise PeerMissingError("it needs a model with weights")
    if missing := peer.missing(way.python):
        raise PeerMissingError(
            f"{way.python} has no {' and no '.join(missing)}; pip install {peer.install}, "
            f"or name the Python that has it: --python {peer.name}=FILE"
        )
    if way.options.get("ir") != "":
        return way
    try:
        exported = openvino_ir.export(checkpoint.folder, checkpoint.spec.digest, way.python, cache_folder())
    except openvino_ir.ExportFailedError as error:
        raise PeerMissingError(str(error)) from error
    return replace(way, options={**way.options, "ir": str(exported)})
