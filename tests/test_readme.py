"""What the READMEs show in code blocks runs as it stands there, from top to bottom, as a reader would type it.

`batchrun …` and `python -m …` lines run in this process; `cat > FILE <<'END'` writes the file. `/data` is a folder of
the test's own, `s3://` a store on loopback, and the model is `echo` except where a conversation needs a chat template.
"""

import re
import shlex
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import click
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner

from batchrun.checkpoint import cache_folder
from batchrun.cli import batchrun as command
from tests.s3 import S3

ROOT = Path(__file__).parents[1]
FILES = ("README.md", "batchrun/README.md", "jobs/README.md", "kernels/README.md")
# Lines that are not run, by how they begin, and why.
RUN_ELSEWHERE = {"python3 -m venv .venv": "sets up a whole environment; .ci/run does it word for word"}
# Their arguments are parsed, so that what they name exists.
ONLY_PARSED = {
    "batchrun tune HuggingFaceTB/": "downloads a model",
    "batchrun plan tickets.parquet --simulate": "a device that was measured",
    "batchrun lm-eval run": "downloads a model and tasks",
    "python -m batchrun_jobs.bench": "minutes, and peers that need not be installed",
    "python -m tests.endurance.": "minutes to hours",
}
HERE_DOCUMENT = re.compile(r"^cat > (\S+) <<'END'\n(.*?)^END$", flags=re.MULTILINE | re.DOTALL)
NEEDS_A_CHAT_TEMPLATE = {"chats.jsonl", "requests.jsonl", "-s"}


@dataclass(frozen=True)
class Block:
    """A fenced code block; `line` is where its text begins."""

    file: str
    line: int
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


def blocks_of(file: str) -> list[Block]:
    text = (ROOT / file).read_text(encoding="utf-8")
    found = re.finditer(r"^```(\w*)\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)
    return [Block(file, text.count("\n", 0, match.start(2)) + 1, match[1], match[2]) for match in found]


def lines_of(block: Block) -> list[str]:
    """The commands of a bash block, behind its here-documents."""
    return HERE_DOCUMENT.sub("", block.text).replace("\\\n", " ").split("\n")


class Reader:
    """Types what the blocks say, in a folder with the files that they take for granted."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        self.monkeypatch = monkeypatch

    def follow(self, block: Block) -> None:
        if block.language == "python":
            self.run_python(block)
            return
        for name, content in HERE_DOCUMENT.findall(block.text):
            (self.folder / name).write_text(content, encoding="utf-8")
        for line in filter(None, map(str.strip, lines_of(block))):
            self.type(line, block)

    def run_python(self, block: Block) -> None:
        """`frame` is the reader's own; `model="echo"` is put into the calls, which read no variables."""
        frame = pd.DataFrame({"question": ["Is it so?", "Or so?"], "answer": [" yes", " no"]})
        text = re.sub(r"(br\.\w+\([^,()]+,)", r'\1 model="echo",', block.text)
        exec(compile("\n" * (block.line - 1) + text, str(ROOT / block.file), "exec"), {"frame": frame})

    def type(self, line: str, block: Block) -> None:
        if line.startswith(tuple(RUN_ELSEWHERE)):
            return
        words = shlex.split(line.replace("/data/", f"{self.folder}/data/"))
        with self.monkeypatch.context() as variables:
            if not NEEDS_A_CHAT_TEMPLATE & set(words):
                variables.setenv("BATCHRUN_MODEL", "echo")
            while "=" in words[0]:
                variables.setenv(*words.pop(0).split("=", 1))
            program, arguments = program_of(words)
            if line.startswith(tuple(ONLY_PARSED)):
                parse(program, arguments)
                return
            done = CliRunner().invoke(program, arguments, prog_name=words[0])
        assert done.exit_code == 0, f"{block}: {line}\n{done.output}"


def program_of(words: list[str]) -> tuple[click.Command, list[str]]:
    """The command that a line calls, and its arguments."""
    if words[0] == "batchrun":
        return command, words[1:]
    assert words[:2] == ["python", "-m"], f"no test knows how to run {shlex.join(words)}"
    name = words[2]
    found = find_spec(name)
    assert found is not None, name
    main = import_module(f"{name}.__main__" if found.submodule_search_locations else name).main
    assert isinstance(main, click.Command), name
    return main, words[3:]


def parse(program: click.Command, arguments: list[str]) -> None:
    """Raises click.UsageError for what the command would refuse before it does anything."""
    if isinstance(program, click.Group):
        found = program.get_command(click.Context(program), arguments[0])
        assert found is not None, arguments[0]
        program, arguments = found, arguments[1:]
    program.make_context(program.name, list(arguments))


@pytest.fixture
def models() -> Path:
    """Where converted models lie, before a store gives its test an empty cache."""
    return cache_folder() / "models"


@pytest.fixture
def reader(tmp_path: Path, models: Path, monkeypatch: pytest.MonkeyPatch, s3: S3) -> Reader:
    """In a folder with what the text takes for granted: inputs, a template, last night's job, a bucket with files."""
    monkeypatch.chdir(tmp_path)
    models.mkdir(parents=True, exist_ok=True)
    cache_folder().mkdir(parents=True)
    (cache_folder() / "models").symlink_to(models)
    tickets = pa.table({"body": ["My invoice is wrong.", "You have won!", "My invoice is late."]})
    files = {
        "tickets.parquet": tickets,
        "mixed.parquet": pa.table({"prompt": ["A"], "max_new_tokens": [1]}),
        "reviews.parquet": pa.table({"review": ["Good.", "Not so good."]}),
        "pairs.parquet": pa.table({"question": ["Is it so?"], "answer": [" yes"]}),
        "texts.parquet": pa.table({"text": ["Bees make honey.", "Cows make milk."]}),
        "quiz.parquet": pa.table({"question": ["Who makes honey?"], "options": [[" bees", " cows"]]}),
        "data/tickets.parquet": tickets,
        "data/tickets/monday.parquet": tickets,
    }
    for name, table in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(table, tmp_path / name)
    s3.write("lake", "tickets/2026-11.parquet", (tmp_path / "tickets.parquet").read_bytes())
    (tmp_path / "triage.j2").write_text("Triage: {{ body }}", encoding="utf-8")
    reader = Reader(tmp_path, monkeypatch)
    before = "batchrun submit /data/tickets -t triage.j2 -o /data/out/triage-monday"
    reader.type(before, Block("last night", 0, "bash", before))
    return reader


@pytest.mark.parametrize("file", FILES)
def test_code_blocks_run_from_top_to_bottom(file: str, reader: Reader) -> None:
    for block in blocks_of(file):
        if block.language:
            reader.follow(block)


def test_code_blocks_are_commands_python_or_pictures() -> None:
    """A block in another language would be run by nobody."""
    blocks = [block for file in FILES for block in blocks_of(file)]
    assert {block.language for block in blocks} == {"bash", "python", ""}
    pictures = [block for block in blocks if not block.language]
    assert [str(block) for block in pictures if re.search(r"^(batchrun|python|pip) ", block.text, re.MULTILINE)] == []


def test_what_is_not_run_is_still_there() -> None:
    lines = [line for file in FILES for block in blocks_of(file) for line in lines_of(block)]
    assert [start for start in RUN_ELSEWHERE | ONLY_PARSED if not any(line.startswith(start) for line in lines)] == []


@pytest.mark.parametrize("file", FILES)
def test_modules_named_in_the_text_exist(file: str) -> None:
    text = (ROOT / file).read_text(encoding="utf-8")
    for words in re.findall(r"python (?:-m )?((?:tests|batchrun)[\w./]*)", text):
        path = Path(words if "/" in words else words.replace(".", "/"))
        places = [ROOT / path, ROOT / "kernels" / path, ROOT / "jobs" / path]
        assert any(place.is_file() or place.with_suffix(".py").is_file() or place.is_dir() for place in places), words
