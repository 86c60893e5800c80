"""The commands that `faults` spoils, each with the folder it begins in and the result that it must come to."""

from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from tests.endurance.shim import Call
from tests.endurance.spoiled import Spoiler, files

_ECHO = (
    "-m", "echo", "-o", "OUT", "--max-num-seqs", "3", "--max-tokens", "6", "--checkpoint-every", "0.000001",
    "--max-num-batched-tokens", "64", "--kv-cache-memory", "16KiB", "--swap-space", "0", "--progress", "none",
    "--wait-lock", "10s",
)  # fmt: skip
_RETRY = ("retry", "OUT", "--where", "n < 2", "--max-tokens", "3", "--progress", "none")


@dataclass(frozen=True, slots=True)
class Scenario:
    """A command to spoil: run as `arguments` on a copy of the folder `before`."""

    name: str
    before: Path
    arguments: tuple[str, ...]
    expected: dict[str, bytes]  # the files of OUT in the end
    is_reading: bool = False

    def command(self, folder: Path) -> list[str]:
        """With OUT in `folder`, which is FOLDER."""
        return [each.replace("OUT", str(folder / "out")).replace("FOLDER", str(folder)) for each in self.arguments]


class Scenarios:
    """Makes them in the folder `scratch`."""

    def __init__(self, scratch: Path, spoiler: Spoiler, rows: int) -> None:
        self._scratch = scratch
        self._spoiler = spoiler
        self._source = scratch / "rows.parquet"
        prompts = [f"Be brief. What of {number * number % 97}?" for number in range(rows)]
        pq.write_table(pa.table({"prompt": [*prompts, ""], "n": range(rows + 1)}), self._source)

    def make(self) -> list[Scenario]:
        """A job from nothing, from every stage, over another's result and from another's answers; what works on a
        complete one; and commands that only look."""
        nothing, submit = self._folder("nothing"), ("submit", str(self._source), *_ECHO)
        nothing.mkdir()
        commits = _commits(self._ended(nothing, submit, "complete"))
        complete, halfway, committed = self._folder("complete"), self._folder("halfway"), self._folder("committed")
        self._killed(nothing, submit, commits[len(commits) // 2], "halfway")
        self._killed(nothing, submit, commits[-1], "committed")
        parted = (*submit, "--partition-by", "n")
        self._killed(nothing, parted, _commits(self._ended(nothing, parted, "parted"))[-1], "parting")
        self._ended(nothing, (*submit, "--max-tokens", "3"), "other")
        self._ended(nothing, (*submit, "--limit", "2"), "earlier")
        (self._folder("earlier") / "out.batchrun").rename(self._folder("earlier") / "old.batchrun")
        (self._folder("earlier") / "out").rename(self._folder("earlier") / "old")
        calls = self._ended(complete, _RETRY, "again")
        self._killed(complete, _RETRY, _commits(calls)[0], "retrying")
        whole, again = files(complete / "out"), files(self._folder("again") / "out")
        return [
            Scenario("fresh", nothing, submit, whole),
            Scenario("resumed", halfway, submit, whole),
            Scenario("published", committed, submit, whole),
            Scenario("partitioned", self._folder("parting"), parted, files(self._folder("parted") / "out")),
            Scenario("overwritten", self._folder("other"), (*submit, "--overwrite"), whole),
            Scenario("reused", self._folder("earlier"), (*submit, "--reuse", "FOLDER/old"), whole),
            Scenario("retried", complete, _RETRY, again),
            Scenario("retry resumed", self._folder("retrying"), ("resume", "OUT", "--progress", "none"), again),
            Scenario("complete", complete, submit, whole),
            Scenario("report", complete, ("report", "OUT"), whole),
            Scenario("verify", complete, ("verify", "OUT"), whole, is_reading=True),
            Scenario("status", halfway, ("status", "OUT"), {}, is_reading=True),
            Scenario("list", halfway, ("list", "FOLDER"), {}, is_reading=True),
        ]

    def _folder(self, name: str) -> Path:
        return self._scratch / name

    def _ended(self, before: Path, arguments: tuple[str, ...], name: str) -> list[Call]:
        """Leaves what the undisturbed command does in the folder `name`."""
        case = self._folder(name)
        return self._spoiler.record(before, Scenario(name, before, arguments, {}).command(case), case)

    def _killed(self, before: Path, arguments: tuple[str, ...], number: int, name: str) -> None:
        """Leaves what the command has done with call `number` in the folder `name`."""
        case = self._folder(name)
        ended, _ = self._spoiler.spoil(
            before, Scenario(name, before, arguments, {}).command(case), case, number, "killed"
        )
        assert ended.is_killed, ended


def _commits(calls: list[Call]) -> list[int]:
    """The numbers of the calls by which rows were committed."""
    links = [(number, call.other.parent) for number, call in enumerate(calls, 1) if call.name == "link"]
    return [number for number, folder in links if folder.name == "parts" and folder.parent.name == "out.batchrun"]
