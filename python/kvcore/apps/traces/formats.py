# SPDX-License-Identifier: Apache-2.0
"""Find the format of a trace from its beginning."""

from __future__ import annotations

import csv
import io

from kvcore.apps.traces.errors import TraceError, shown, shown_value
from kvcore.apps.traces.json_values import top_keys
from kvcore.apps.traces.lengths import AZURE_COLUMNS, BURST_COLUMNS
from kvcore.apps.traces.sessions import is_tar
from kvcore.apps.traces.source import Source

__all__ = ["FORMATS", "found_format"]

#: Names of the formats, each with a phrase for the help.
FORMATS = {
    "kvcore": "the form that kvcore trace convert writes",
    "mooncake": "Mooncake's and Dynamo's rows of block ids",
    "bailian": "Qwen-Bailian's rows of block ids",
    "sessions": "kv-cache-tester's sessions, JSON or tar",
    "tokens": "rows of token ids",
    "openai": "OpenAI requests, also batch files",
    "sharegpt": "ShareGPT's conversations",
    "azure": "Azure's CSV of lengths",
    "burstgpt": "BurstGPT's CSV of lengths",
    "lengths": "JSON rows of lengths",
}

#: For each format the sets of fields that show it, in the order in which they are tried.
_FIELDS: tuple[tuple[str, frozenset[str]], ...] = (
    ("kvcore", frozenset({"kvcore_trace"})),
    ("bailian", frozenset({"chat_id", "hash_ids"})),
    ("mooncake", frozenset({"hash_ids"})),
    ("sessions", frozenset({"requests", "block_size"})),
    ("sessions", frozenset({"requests", "hash_id_scope"})),
    ("tokens", frozenset({"token_ids"})),
    ("tokens", frozenset({"prompt_token_ids"})),
    ("sharegpt", frozenset({"conversations"})),
    ("openai", frozenset({"custom_id", "body"})),
    ("openai", frozenset({"messages"})),
    ("openai", frozenset({"text_input"})),
    ("openai", frozenset({"model", "prompt"})),
    ("openai", frozenset({"model", "input"})),
    ("mooncake", frozenset({"input_length"})),
)
_COLUMNS = (("azure", AZURE_COLUMNS), ("burstgpt", BURST_COLUMNS))
_MOST_NAMES = 12


def found_format(source: Source, name: str) -> str:
    """Return the name of the format, which the fields of the first row or the columns show.

    Raises
    ------
    TraceError
        No format is known by these fields, or the file is empty.
    LineError
        The first line is too long, or it is not text.
    """
    beginning = source.beginning
    if is_tar(beginning):
        return "sessions"
    if not beginning.strip():
        for _ in source.lines():
            break
        raise TraceError(name, None, "expected at least one request, got an empty file")
    try:
        text = beginning.decode("utf-8")
    except UnicodeDecodeError as error:
        if error.reason != "unexpected end of data":  # the beginning may end inside a character
            raise TraceError(
                name, None, f"cannot be read: it is not text in UTF-8 at byte {error.start}"
            ) from None
        text = beginning[: error.start].decode("utf-8")
    return _format_of(source, name, text.lstrip())


def _format_of(source: Source, name: str, text: str) -> str:
    keys = top_keys(text[1:].lstrip() if text.startswith("[") else text)
    for format_name, fields in _FIELDS:
        if fields <= set(keys):
            return format_name
    columns: list[str] = []
    if not text.startswith(("{", "[")):
        columns = _columns(text)
        lower = {column.lower() for column in columns}
        for format_name, wanted in _COLUMNS:
            if {column.lower() for column in wanted} <= lower:
                return format_name
    if "\n" not in text:
        for _ in source.lines():  # raises LineError for a line without an end
            break
    raise TraceError(name, None, _unknown(text, keys, columns))


def _columns(text: str) -> list[str]:
    try:
        return [each.strip() for each in next(csv.reader(io.StringIO(text.split("\n", 1)[0])), [])]
    except csv.Error:
        return []


def _unknown(text: str, keys: list[str], columns: list[str]) -> str:
    if keys:
        names = ", ".join(shown_value(key) for key in keys[:_MOST_NAMES])
        seen = f"JSON with the fields {names}"
    elif len(columns) > 1:
        seen = f"columns {', '.join(shown_value(name) for name in columns[:_MOST_NAMES])}"
    else:
        seen = shown(text)
    return (
        f"expected a trace in one of the formats {', '.join(FORMATS)}, got {seen}; "
        f"--format NAME names the format"
    )
