"""The command `batchrun`: finds the subcommand, and is the one place where an error becomes a line and an exit code.

Subcommands are imported when they are called, so that `status` pays for nothing but itself.
"""

import gc
import os
import select
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from typing import Any, TextIO

import click

from batchrun.cli_signals import interrupt_once
from batchrun.errors import BatchrunError, StoppedByUser, UsageError
from batchrun.exit import Exit
from batchrun.nearest import nearest
from batchrun.observe.printable import one_line

_COMMANDS = {
    "plan": "batchrun.cli_run",
    "submit": "batchrun.cli_run",
    "resume": "batchrun.cli_run",
    "cancel": "batchrun.cli_cancel",
    "retry": "batchrun.cli_retry",
    "presets": "batchrun.cli_presets",
    "tune": "batchrun.cli_tune",
    "status": "batchrun.cli_status",
    "list": "batchrun.cli_list",
    "report": "batchrun.cli_status",
    "verify": "batchrun.cli_status",
    "export": "batchrun.cli_export",
    "lm-eval": "batchrun.cli_lm_eval",
    "doctor": "batchrun.cli_status",
}


def dashed(token: str) -> str:
    """Option names may be typed with underscores."""
    return token.replace("_", "-")


class Batchrun(click.Group):
    """A group that knows its commands' homes, and the error boundary of the program."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in _COMMANDS:
            return None
        command = getattr(import_module(_COMMANDS[name]), name.replace("-", "_"))
        assert isinstance(command, click.Command), command
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0] not in _COMMANDS and not args[0].startswith("-"):
            close = nearest(args[0], _COMMANDS)
            remedy = f"did you mean {close!r}?" if close else f"there are {', '.join(_COMMANDS)}"
            raise UsageError(f"no such command {args[0]!r}; {remedy}")
        return super().resolve_command(ctx, args)

    def make_context(self, *given: Any, **extra: Any) -> click.Context:
        with _ending_with_its_reader():
            return super().make_context(*given, **extra)

    def invoke(self, ctx: click.Context) -> Any:
        with _ending_with_its_reader():
            return super().invoke(ctx)

    def main(self, args: Sequence[str] | None = None, prog_name: str | None = None, **extra: Any) -> None:  # type: ignore[override]
        """Runs the program and exits; never returns."""
        sys.exit(self._run(args, prog_name, extra | {"standalone_mode": False}))

    def _run(self, args: Sequence[str] | None, prog_name: str | None, extra: dict[str, Any]) -> int:
        try:
            code = super().main(args, prog_name, **extra)
        except BatchrunError as error:
            return complain(error)
        except click.NoSuchOption as error:
            return complain(UsageError(_no_such_option(error)))
        except click.exceptions.NoArgsIsHelpError as error:
            click.echo(error.ctx.get_help() if error.ctx else "", err=True)
            return UsageError.exit_code
        except click.ClickException as error:
            return complain(UsageError(error.format_message()))
        except (click.Abort, KeyboardInterrupt):
            return complain(StoppedByUser("stopped by SIGINT; the same command goes on from here"))
        return code if isinstance(code, int) else 0


@contextmanager
def _ending_with_its_reader() -> Iterator[None]:
    """Where nobody reads stdout to its end, such as `head`, the program ends without a word, as others do."""
    try:
        yield
    except BrokenPipeError as error:
        if not _is_unread(sys.stdout):
            raise
        # What is left of it would be written at exit, and fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise click.exceptions.Exit(128 + signal.SIGPIPE) from error


def _is_unread(stream: TextIO | None) -> bool:
    """Whether it is a pipe that nobody reads any more."""
    try:
        number = -1 if stream is None else stream.fileno()
    except OSError:  # what stands in its place is no file
        number = -1
    if number < 0 or not hasattr(select, "poll"):
        return False
    poll = select.poll()
    poll.register(number, select.POLLERR)
    return any(events & select.POLLERR for _, events in poll.poll(0))


def _no_such_option(error: click.NoSuchOption) -> str:
    parameters = error.ctx.command.params if error.ctx else []
    is_argument = any(isinstance(parameter, click.Argument) and parameter.name == "model" for parameter in parameters)
    if is_argument and error.option_name in ("-m", "--model"):
        return f"no such option {error.option_name}; MODEL is an argument here, so leave {error.option_name} out"
    if elsewhere := _commands_with(error.option_name, error.ctx):
        return f"no such option {error.option_name}; it is an option of {', '.join(elsewhere)}"
    known = [name for parameter in parameters for name in parameter.opts]
    close = nearest(error.option_name, known)
    remedy = f"did you mean {close}?" if close else "--help lists the options"
    return f"no such option {error.option_name}; {remedy}"


def _commands_with(option: str, ctx: click.Context | None) -> list[str]:
    """The commands that have this option, as they are typed."""
    group = ctx.find_root().command if ctx else None
    if ctx is None or not isinstance(group, Batchrun):
        return []
    commands = {name: group.get_command(ctx, name) for name in group.list_commands(ctx)}
    return [
        f"batchrun {name}"
        for name, command in commands.items()
        if command is not None and any(option in parameter.opts for parameter in command.params)
    ]


def complain(error: BatchrunError) -> int:
    """Says what went wrong in one line on stderr; the exit code for it."""
    click.echo(f"error: {one_line(str(error))}", err=True)
    return error.exit_code


@click.group(cls=Batchrun, context_settings={"token_normalize_func": dashed, "help_option_names": ["-h", "--help"]})
@click.version_option(package_name="batchrun", message="%(package)s %(version)s")
def batchrun() -> None:
    """Run an LLM over every row of a dataset, offline: plan, run, resume, publish.

    The same command again goes on where it stopped.

    \b
    Example:
      batchrun submit reviews.parquet --prompt-col body --max-tokens 64 -o out/reviews
    """


def main() -> None:
    """The entry point of the installed command."""
    # The libraries make a million objects that stay; looking through them again and again takes over half a second.
    gc.set_threshold(100_000)
    signal.signal(signal.SIGINT, interrupt_once)
    leaving = Exit()
    try:
        batchrun(prog_name="batchrun")
    except SystemExit as ending:
        # A library's own command may end with none, which is success, or with a text, which is not.
        leaving.code = ending.code if isinstance(ending.code, int) else int(ending.code is not None)
        raise
