"""README and "How batchrun works" name only what exists, and README leaves no option out."""

import re
import shlex
from pathlib import Path

import click
import pytest

from batchrun.cli import batchrun as command

README = Path(__file__).parents[1] / "README.md"
HOW_IT_WORKS = README.parent / "batchrun" / "README.md"
NO_NEED_TO_LIST = {"--help", "-h"}


@pytest.fixture(scope="module")
def text() -> str:
    return README.read_text(encoding="utf-8")


def options_of(name: str) -> set[str]:
    """What may be typed after a command; long and short."""
    context = click.Context(command)
    found = command.get_command(context, name)
    assert found is not None, f"README uses `batchrun {name}`, which is no command"
    return {spelling for parameter in found.get_params(context) for spelling in parameter.opts if spelling[0] == "-"}


def all_options() -> set[str]:
    names = command.list_commands(click.Context(command))
    return set().union(*(options_of(name) for name in names), {"--version"})


def command_lines(text: str) -> list[list[str]]:
    """The `batchrun …` lines of the code blocks, continued lines joined; words."""
    blocks = re.findall(r"^```bash\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)
    lines = "\n".join(blocks).replace("\\\n", " ").splitlines()
    calls = [
        match[1] for line in lines if (match := re.search(r"(?:^|[\s/])(batchrun [a-z-].*)", line.split(" # ")[0]))
    ]
    return [shlex.split(call) for call in calls]


def test_commands_and_options_in_code_blocks_exist(text: str) -> None:
    calls = [words for words in command_lines(text) if not words[1].startswith("-")]
    assert {"submit", "resume", "status"} <= {words[1] for words in calls}
    for words in calls:
        if words[1] == "lm-eval":
            continue  # its options are the harness's
        typed = {word.split("=")[0] for word in words[2:] if re.match(r"--?[A-Za-z]", word)}
        assert typed <= options_of(words[1]), " ".join(words)


@pytest.mark.parametrize("file", [README, HOW_IT_WORKS], ids=["README", "how-it-works"])
def test_options_and_commands_named_in_the_text_exist(file: Path) -> None:
    text = file.read_text(encoding="utf-8")
    options = {match[1].replace("_", "-") for match in re.finditer(r"`(--[a-z][\w-]*)", text)}
    assert options
    assert options <= all_options()
    assert set(re.findall(r"`batchrun ([a-z-]+)", text)) <= set(command.list_commands(click.Context(command)))


@pytest.mark.parametrize("file", [README, HOW_IT_WORKS], ids=["README", "how-it-works"])
def test_links_lead_to_a_file_and_a_heading(file: Path) -> None:
    links = re.findall(r"\]\(([^)#:]+)#?([^)]*)\)", file.read_text(encoding="utf-8"))
    assert links
    for path, heading in links:
        target = (file.parent / path).read_text(encoding="utf-8")
        headings = {line.lstrip("# ").lower().replace(" ", "-") for line in target.splitlines() if line.startswith("#")}
        assert not heading or heading in headings, f"{path}#{heading}"


def test_every_option_is_in_the_options_table(text: str) -> None:
    table = "\n".join(line for line in text.splitlines() if line.startswith("|"))
    listed = set(re.findall(r"(?<![\w-])--[a-z][\w-]*", table))
    needed = {option for option in all_options() if option.startswith("--")} - NO_NEED_TO_LIST
    assert sorted(needed - listed) == []


def test_every_command_is_explained(text: str) -> None:
    for name in command.list_commands(click.Context(command)):
        assert f"`batchrun {name}" in text, f"README does not mention `batchrun {name}`"
