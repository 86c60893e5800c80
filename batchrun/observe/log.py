"""How a log line looks: `time LEVEL message key=value …`, or the same as one JSON object.

Knows nothing of what is logged. Lines never contain a carriage return or another control character.
"""

import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Literal, TextIO

from tqdm import tqdm

from batchrun.observe.printable import one_line

LogFormat = Literal["text", "json"]
LOGGER = logging.getLogger("batchrun")


@contextmanager
def logging_to(stream: TextIO, log_format: LogFormat, level: int) -> Iterator[None]:
    """While it lasts, log records go to `stream`: ours from `level` on, other libraries' from WARNING on."""
    root = logging.getLogger()
    handler = _LineHandler(stream)
    handler.setFormatter(JsonFormatter() if log_format == "json" else TextFormatter())
    before = LOGGER.level
    root.addHandler(handler)
    LOGGER.setLevel(level)
    try:
        yield
    finally:
        LOGGER.setLevel(before)
        root.removeHandler(handler)


class TextFormatter(logging.Formatter):
    """`2026-11-29T03:12:00Z INFO progress rows=412/2000 hit=0.71`; a value with a blank is quoted."""

    def format(self, record: logging.LogRecord) -> str:
        pairs = (f"{key}={_quoted(value)}" for key, value in _fields(record).items())
        return " ".join((_when(record), record.levelname, one_line(_text(record, self)), *pairs))


class JsonFormatter(logging.Formatter):
    """`{"time": …, "level": …, "message": …, …}` with the record's own keys behind."""

    def format(self, record: logging.LogRecord) -> str:
        head = {"time": _when(record), "level": record.levelname, "message": _text(record, self)}
        return json.dumps(head | _fields(record), default=str)


class _LineHandler(logging.StreamHandler[TextIO]):
    """Writes above a progress bar, not through it."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            tqdm.write(self.format(record), file=self.stream)
        except Exception:
            self.handleError(record)


def _fields(record: logging.LogRecord) -> dict[str, object]:
    return getattr(record, "fields", {})


def _text(record: logging.LogRecord, formatter: logging.Formatter) -> str:
    message = record.getMessage()
    return f"{message}: {formatter.formatException(record.exc_info)}" if record.exc_info else message


def _when(record: logging.LogRecord) -> str:
    return datetime.fromtimestamp(record.created, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _quoted(value: object) -> str:
    text = one_line(str(value))
    return json.dumps(text, ensure_ascii=False) if not text or set(text) & set(' ="') else text
