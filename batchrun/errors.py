"""Everything that can go wrong with a job, by name, and the exit code that a script sees for it.

A bad *row* is data, not an exception: it is a `RowError`, and it becomes a row of the output.
"""

from dataclasses import dataclass
from typing import Literal, get_args

RowErrorType = Literal[
    "overlong_prompt",
    "empty_prompt",
    "empty_target",
    "template_error",
    "invalid_params",
    "invalid_utf8",
    "schema_unsupported",
    "schema_violation",
    "engine_error",
    "timeout",
]
ROW_ERROR_TYPES: tuple[str, ...] = get_args(RowErrorType)


@dataclass(frozen=True, slots=True)
class RowError:
    """Why one row has no answer."""

    type: RowErrorType
    message: str


class BatchrunError(Exception):
    """Base of every error a user can meet; the message is one line and says what to do."""

    exit_code = 1


class UsageError(BatchrunError):
    """An option that cannot be used as given."""

    exit_code = 2


class NotMeasured(UsageError):
    """What is asked for rests on a measurement that nobody has made; everything else goes on without."""


class DataError(BatchrunError):
    """The input does not fit the job: a column, a template, ids, or too many failed rows."""

    exit_code = 65


class InputMissing(BatchrunError):
    """An input path matches nothing."""

    exit_code = 66


class ModelUnavailable(BatchrunError):
    """No such model or device, or a model that cannot be served exactly."""

    exit_code = 69


class EngineFailed(BatchrunError):
    """The engine failed in a way that no single row explains; `rows` are the indices of those that ran, where known."""

    exit_code = 70

    def __init__(self, message: str, rows: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.rows = rows


class OutputRefused(BatchrunError):
    """The output cannot be created where it was asked for."""

    exit_code = 73


class StorageFailed(BatchrunError):
    """Reading or writing the job folder failed."""

    exit_code = 74


class StoppedEarly(BatchrunError):
    """Stopped cleanly; the same command goes on from here."""

    exit_code = 75


class JobMismatch(BatchrunError):
    """The job folder belongs to a different job."""

    exit_code = 78

    def __init__(self, folder: str, differing: tuple[str, ...]) -> None:
        super().__init__(
            f"{folder} belongs to a different job (differing: {', '.join(differing)}); "
            "submit with another -o, or with --overwrite to start again"
        )
        self.differing = differing


class AnswersDiffer(BatchrunError):
    """An earlier job's answers are not those that this job would compute."""

    exit_code = 78


class StoppedByUser(BatchrunError):
    """Stopped by Ctrl-C, after a checkpoint; the same command goes on from here."""

    exit_code = 130
