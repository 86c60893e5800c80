"""The forms that a result can be exported in. The standard library only: the command line names them."""

from typing import Literal, get_args

ExportFormat = Literal["jsonl", "openai-batch", "datasets"]
EXPORT_FORMATS: tuple[ExportFormat, ...] = get_args(ExportFormat)
