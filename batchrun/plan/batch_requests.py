"""Input of the OpenAI Batch API: JSON Lines of requests, each with a name of its own and a body with messages.

Owns how such files are told from other JSON Lines and read, and what of a body is the prompt and what are parameters.
Knows nothing of tokens. A body stays JSON text: two of them need not have the same keys or types.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from batchrun.errors import RowError
from batchrun.plan.cells import column_values, row_numbers
from batchrun.plan.conversation import checked
from batchrun.plan.readers import pieces
from batchrun.plan.remote import RemoteFile, stream

if TYPE_CHECKING:
    from batchrun.tokenizer import Conversation

CUSTOM_ID = "custom_id"
SCHEMA = pa.schema([(name, pa.string()) for name in (CUSTOM_ID, "method", "url", "body")])
_LOOKED_AT_BYTES = 1 << 20
_ENDPOINT = "/chat/completions"
_RENAMED = {"max_completion_tokens": "max_tokens"}
# What changes no answer, or nothing here: the job says which model runs.
_PASSED_OVER = {
    "messages", "model", "stream", "stream_options", "user", "metadata", "store", "service_tier", "safety_identifier",
    "prompt_cache_key",
}  # fmt: skip
# Values that ask for what is done anyway.
_USUAL = {"n": 1, "logprobs": False, "tools": [], "logit_bias": {}, "response_format": {"type": "text"}}


def is_batch_file(path: Path | RemoteFile) -> bool:
    """Whether the first line is a request of the Batch API. Raises OSError."""
    with stream(path) as opened:
        line = opened.read(_LOOKED_AT_BYTES).lstrip().partition(b"\n")[0]
    try:
        request = json.loads(line)
    except (ValueError, RecursionError):
        # Also a first line that is longer than what was read: it starts with the names all the same.
        return line.startswith(b'{"custom_id"') and b'"url"' in line
    return isinstance(request, dict) and {CUSTOM_ID, "url", "body"} <= request.keys()


class BatchRequestReader:
    """The requests of one file as rows of `SCHEMA`."""

    def schema(self, path: Path | RemoteFile) -> pa.Schema:
        return SCHEMA

    def batches(
        self, path: Path | RemoteFile, columns: list[str], schema: pa.Schema, batch_rows: int
    ) -> Iterator[pa.RecordBatch]:
        for piece, before in pieces(path):
            lines = [(number, line) for number, line in enumerate(piece.split(b"\n"), before + 1) if line.strip()]
            for start in range(0, len(lines), batch_rows):
                rows = [_request(number, line) for number, line in lines[start : start + batch_rows]]
                yield pa.RecordBatch.from_pylist(rows, schema=SCHEMA).select(columns)


class BatchRequests:
    """The conversations of the bodies, and their parameters."""

    columns = ("url", "body")
    label = "messages of batch requests"

    def read(self, batch: pa.RecordBatch) -> "list[Conversation | RowError]":
        """The conversation of each row, or the reason why it has none."""
        urls, bodies = column_values(batch, "url"), column_values(batch, "body")
        rows = row_numbers(batch).tolist()
        return [_conversation(*each) for each in zip(rows, urls, bodies, strict=True)]

    def params(self, batch: pa.RecordBatch) -> list[Mapping[str, Any] | None]:
        """The sampling parameters of each row by their names here; others keep theirs, and are nobody's.

        None for a request to what is not served: that is what is wrong with it.
        """
        urls, bodies = column_values(batch, "url"), column_values(batch, "body")
        return [_params(_body(text)) if _is_served(url) else None for url, text in zip(urls, bodies, strict=True)]


def is_batch_schema(schema: pa.Schema) -> bool:
    """Whether the columns are those of requests as `BatchRequestReader` gives them."""
    return bool(schema.remove_metadata() == SCHEMA)


def _request(number: int, line: bytes) -> dict[str, str | None]:
    """The row of a line; pyarrow's error, with its number, for one that is no request."""
    try:
        request = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise pa.ArrowInvalid(f"line {number}: not JSON ({error})") from None
    if not isinstance(request, dict):
        raise pa.ArrowInvalid(f"line {number}: a request should be an object, not {type(request).__name__}")
    body = request.get("body")
    texts = {name: request.get(name) for name in (CUSTOM_ID, "method", "url")}
    row = {name: value if value is None else str(value) for name, value in texts.items()}
    return row | {"body": None if body is None else json.dumps(body)}


def _body(text: str | RowError | None) -> Any:
    return json.loads(text) if isinstance(text, str) else None


def _conversation(row: int, url: Any, text: Any) -> "Conversation | RowError":
    body = _body(text)
    try:
        if not _is_served(url):
            raise ValueError(f"url {url!r} is not served, only /v1{_ENDPOINT}")
        if not isinstance(body, dict) or not body.get("messages"):
            return RowError("empty_prompt", f"row {row}: the body has no messages; give it some or leave the row out")
        return checked(_with_plain_content(body["messages"]))
    except ValueError as error:
        return RowError("template_error", f"row {row}: {error}; correct the request")


def _is_served(url: Any) -> bool:
    return not isinstance(url, str) or url.rstrip("/").endswith(_ENDPOINT)


def _with_plain_content(messages: Any) -> Any:
    """The messages with content in parts of text joined; parts of another kind are a ValueError."""
    if not isinstance(messages, list):
        return messages
    return [
        {**message, "content": _joined(message["content"])}
        if isinstance(message, dict) and isinstance(message.get("content"), list)
        else message
        for message in messages
    ]


def _joined(parts: list[Any]) -> str:
    texts = [part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None for part in parts]
    if not all(isinstance(text, str) for text in texts):
        raise ValueError("a message has content that is not text")
    return "".join(map(str, texts))


def _params(body: Any) -> Mapping[str, Any] | None:
    if not isinstance(body, dict):
        return None
    given = {_RENAMED.get(str(key), str(key)): value for key, value in body.items() if key not in _PASSED_OVER}
    if (schema := _response_schema(given.get("response_format"))) is not None:
        del given["response_format"]
        given["json_schema"] = schema
    return {key: value for key, value in given.items() if key not in _USUAL or value != _USUAL[key]}


def _response_schema(response_format: Any) -> Any:
    """The schema that a response is to have; None where nothing, or something else, is asked for."""
    match response_format:
        case {"type": "json_schema", "json_schema": {"schema": schema}}:
            return schema
        case {"type": "json_object"}:
            return {"type": "object"}
    return None
