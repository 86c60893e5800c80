"""How the program ends: with its code, after what others have to do at the end, and without a search for garbage."""

import os
import signal
import subprocess
import sys

import pytest

_BEGIN = """
import atexit, sys, threading, time
from batchrun.exit import Exit
leaving = Exit()
"""


def run(program: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", _BEGIN + program], capture_output=True, text=True)


def test_the_code_and_what_was_written() -> None:
    ended = run("leaving.code = 75; sys.stdout.write('half a line'); sys.exit(75)")
    assert (ended.returncode, ended.stdout) == (75, "half a line")


def test_a_traceback_is_an_error() -> None:
    ended = run("raise ValueError('unforeseen')")
    assert ended.returncode == 1
    assert "ValueError: unforeseen" in ended.stderr


@pytest.mark.parametrize(("ending", "code"), [("None", 0), ("''", 1), ("'no such task'", 1), ("3", 3)])
def test_a_command_that_is_a_librarys_ends_as_it_would_by_itself(ending: str, code: int) -> None:
    program = f"from batchrun import cli\ncli.batchrun = lambda **given: sys.exit({ending})\ncli.main()"
    assert run(program).returncode == code


def test_another_pipe_that_is_broken_is_no_reader_of_ours() -> None:
    ended = run(
        "from batchrun import cli\n"
        "def fail(self, ctx): raise BrokenPipeError('a rank has died')\n"
        "cli.click.Group.invoke = fail\n"
        "sys.argv = ['batchrun', 'presets']\n"
        "cli.main()"
    )
    assert ended.returncode == 1
    assert ended.stderr


@pytest.mark.parametrize("arguments", [["presets"], ["presets", "extract"], ["--help"], ["submit", "--help"]])
def test_a_reader_that_has_enough_ends_the_program_quietly(arguments: list[str]) -> None:
    """It ended by 1, which is that of a bug."""
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "batchrun", *arguments]
    ended = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writer)
    assert (ended.returncode, ended.stderr) == (128 + signal.SIGPIPE, "")


def test_an_output_that_is_closed_is_nothing_to_complain_about() -> None:
    command = [sys.executable, "-c", _BEGIN + "leaving.code = 75"]
    ended = subprocess.run(["sh", "-c", '"$@" >&-', "sh", *command], stderr=subprocess.PIPE, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (75, "")


def test_what_libraries_do_at_the_end_is_done_before() -> None:
    ended = run(
        "leaving.code = 0; atexit.register(print, 'written')\n"
        "threading.Thread(target=lambda: (time.sleep(0.2), print('ended'))).start()"
    )
    assert (ended.returncode, ended.stdout) == (0, "ended\nwritten\n")


def test_nothing_is_looked_through() -> None:
    """Else it would be found that these two only have each other."""
    cycle = (
        "class Other:\n    def __del__(self): print('found')\n"
        "a, b = Other(), Other(); a.other, b.other = b, a; del a, b\n"
    )
    assert run(cycle + "leaving.code = 0").stdout == ""
    assert run(cycle + "atexit.unregister(leaving._leave)").stdout == "found\nfound\n"
