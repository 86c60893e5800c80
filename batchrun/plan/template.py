"""A prompt written as a Jinja2 template over a row's columns.

Sandboxed and strict: a name that the row lacks is an error, and so is printing a null. Knows nothing of models.
"""

import json
from typing import Any

import pyarrow as pa
from jinja2 import StrictUndefined, TemplateSyntaxError, meta, nodes
from jinja2.sandbox import ImmutableSandboxedEnvironment

from batchrun.errors import DataError, RowError
from batchrun.plan.cells import column_values, row_numbers
from batchrun.plan.source import require_column

# In a template the whole row by name, for columns that are no identifiers: {{ row["unit price"] }}.
_WHOLE_ROW = "row"


class TemplatePrompt:
    """The template's text for each row."""

    def __init__(self, text: str, schema: pa.Schema) -> None:
        """Raises DataError: the template is no Jinja2, or uses a name that is no column."""
        environment = _environment()
        try:
            tree = environment.parse(text)
            self._template = environment.from_string(text)
        except TemplateSyntaxError as error:
            raise DataError(f"--template, line {error.lineno}: {error.message}") from error
        names = meta.find_undeclared_variables(tree) - environment.globals.keys()
        self._uses_row = _WHOLE_ROW in names and _WHOLE_ROW not in schema.names
        if self._uses_row:
            names.discard(_WHOLE_ROW)
        for name in sorted(names - _optional_names(tree)):
            require_column(schema, name, "--template")
        self.columns = tuple(name for name in schema.names if self._uses_row or name in names)
        self.label = "template over " + (", ".join(repr(name) for name in self.columns) or "no column")

    def read(self, batch: pa.RecordBatch) -> list[str | RowError]:
        """The prompt of each row, or the reason why it has none."""
        cells = [column_values(batch, name) for name in self.columns]
        rows = row_numbers(batch).tolist()
        return [self._render(row, [column[index] for column in cells]) for index, row in enumerate(rows)]

    def _render(self, row: int, cells: list[Any]) -> str | RowError:
        for cell in cells:
            if isinstance(cell, RowError):
                return cell
        values = dict(zip(self.columns, cells, strict=True))
        if self._uses_row:
            values = values | {_WHOLE_ROW: values}
        try:
            if text := self._template.render(values):
                return text
            return RowError("empty_prompt", f"row {row}: the template renders to nothing; filter the row out")
        except _NullPrintedError:
            nulls = [name for name in self.columns if values[name] is None]
            name = nulls[0] if len(nulls) == 1 else "column"
            which = f"null here: {', '.join(map(repr, nulls))}" if nulls else "inside a column's value"
            message = f"the template prints a null ({which}); write {{{{ {name} or '' }}}}"
        # A template evaluates the user's expressions: whatever they raise is about this row.
        except Exception as error:
            message = f"the template fails on it: {type(error).__name__}: {error}; correct the row or the template"
        return RowError("template_error", f"row {row}: {message}")


class _NullPrintedError(Exception):
    """A template's expression came out as None, which would read as the word None."""


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(undefined=StrictUndefined, finalize=_not_null)
    # Jinja2's own escapes for HTML, which no model expects.
    environment.filters["tojson"] = _to_json
    return environment


def _not_null(value: Any) -> Any:
    if value is None:
        raise _NullPrintedError
    return value


def _to_json(value: Any, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _optional_names(tree: nodes.Template) -> set[str]:
    """Names that the template asks about before it uses them: `x is defined`, `x | default(…)`."""
    tests = [test.node for test in tree.find_all(nodes.Test) if test.name in ("defined", "undefined")]
    filters = [each.node for each in tree.find_all(nodes.Filter) if each.name in ("default", "d")]
    return {node.name for node in [*tests, *filters] if isinstance(node, nodes.Name)}
