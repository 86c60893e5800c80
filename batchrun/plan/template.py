"""A prompt written as a Jinja2 template over a row's columns.

Sandboxed and strict: a name that the row lacks is an error, and so is printing a null. Knows nothing of models.
"""

import json
from collections.abc import Mapping
from typing import Any

import pyarrow as pa
from jinja2 import StrictUndefined, TemplateSyntaxError, meta, nodes
from jinja2.sandbox import ImmutableSandboxedEnvironment

from batchrun.errors import DataError, RowError
from batchrun.plan.cells import column_values, row_numbers
from batchrun.plan.source import require_column

# In a template the column of --prompt-col.
_PROMPT = "prompt"
# In a template the whole row by name, for columns that are no identifiers: {{ row["unit price"] }}.
_WHOLE_ROW = "row"


class TemplatePrompt:
    """The template's text for each row."""

    def __init__(
        self,
        text: str,
        schema: pa.Schema,
        *,
        prompt_col: str | None = None,
        options: Mapping[str, object] | None = None,
    ) -> None:
        """`prompt_col` is the column that the template calls `prompt`. Of `options` it may use those that are not
        empty by their name, unless a column has it.

        Raises:
            DataError: the template is no Jinja2, or uses a name that is no column; there is no column `prompt_col`, or
                the template does not use it.
        """
        environment = _environment()
        try:
            tree = environment.parse(text)
            self._template = environment.from_string(text)
        except TemplateSyntaxError as error:
            raise DataError(f"--template, line {error.lineno}: {error.message}") from error
        names = meta.find_undeclared_variables(tree) - environment.globals.keys()
        self._prompt_col = prompt_col
        if prompt_col is not None:
            _check_prompt(prompt_col, names, schema)
            names = names - {_PROMPT} | {prompt_col}
        self._uses_row = _WHOLE_ROW in names and _WHOLE_ROW not in schema.names
        if self._uses_row:
            names.discard(_WHOLE_ROW)
        self._options = {
            name: value for name, value in (options or {}).items() if value and name in names - {*schema.names}
        }
        for name in sorted(names - self._options.keys() - _optional_names(tree)):
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
        given = values | self._options
        if self._uses_row:
            given[_WHOLE_ROW] = values
        if self._prompt_col is not None:
            given[_PROMPT] = values[self._prompt_col]
        try:
            if text := self._template.render(given):
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


def _check_prompt(prompt_col: str, names: set[str], schema: pa.Schema) -> None:
    """Raises DataError: no such column, or a template of these `names` that has no use for it."""
    require_column(schema, prompt_col, "--prompt-col")
    if _PROMPT not in names:
        raise DataError(
            f"--prompt-col: the template does not use column {prompt_col!r}, which it would call prompt; "
            "write {{ prompt }} in it, or leave --prompt-col out"
        )


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
