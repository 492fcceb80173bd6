# SPDX-License-Identifier: Apache-2.0
"""Read rows of block ids: Mooncake's traces, also with Dynamo's sessions, and Bailian's traces."""

from __future__ import annotations

from typing import Any

from kvcore.apps.traces.blocks import BlockIds, BlockSize
from kvcore.apps.traces.clock import Clock
from kvcore.apps.traces.errors import counted, shown_value
from kvcore.apps.traces.read_options import ReadOptions
from kvcore.apps.traces.rows import UnusedFields, json_rows, row_errors
from kvcore.apps.traces.source import Source
from kvcore.apps.traces.trace import Requests, Trace, output_count, token_count
from kvcore.apps.traces.turns import SessionTurns

__all__ = ["read_bailian", "read_mooncake"]

#: Tokens per block that the formats document.
MOONCAKE_BLOCK = 512
BAILIAN_BLOCK = 16
_ROOT = -1
#: Other names of a field in traces of NVIDIA Dynamo.
_ALIASES = {
    "timestamp": "created_time",
    "input_length": "input_tokens",
    "output_length": "output_tokens",
    "delay": "delay_ms",
}
_MOONCAKE_FIELDS = frozenset({*_ALIASES, *_ALIASES.values(), "hash_ids", "session_id"})
_BAILIAN_FIELDS = frozenset(
    {"chat_id", "parent_chat_id", "timestamp", "input_length", "output_length", "type", "turn"}
    | {"hash_ids"}
)


class _BlockRows:
    """Collect rows with `timestamp`, `input_length`, `output_length` and `hash_ids`."""

    def __init__(self, unit: str, block: int, fields: frozenset[str], options: ReadOptions) -> None:
        forced = options.time_unit is not None
        self.requests = Requests(Clock(options.time_unit or unit, is_forced=forced))
        self._ids = BlockIds()
        self._size = BlockSize(block, options.block_size)
        self._unused = UnusedFields(fields)

    def read(self, row: dict[str, Any]) -> tuple[int, int]:
        """Check and append the time and the ids of a row; return its input and output tokens."""
        self._unused.look(row.keys())
        time = _field(row, "timestamp")
        inputs = token_count("input_length", _required(row, "input_length"))
        outputs = output_count("output_length", _field(row, "output_length"))
        ids = self._ids.check("hash_ids", _required(row, "hash_ids"))
        self._size.add("hash_ids", inputs, len(ids))
        self.requests.clock.add("timestamp", time)
        self._ids.add(ids)
        return inputs, outputs

    def finish(self, name: str, format_name: str, notes: list[str]) -> Trace:
        """Find the size of the blocks and return the trace."""
        size, line = self._size.finish()
        content = self._ids.finish(size, line)
        return self.requests.finish(name, format_name, content, [*notes, *self._unused.notes()])


def _field(row: dict[str, Any], name: str) -> Any:
    return row[name] if name in row else row.get(_ALIASES.get(name, name))


def _required(row: dict[str, Any], name: str) -> Any:
    if name not in row and _ALIASES.get(name, name) not in row:
        expected = "a list of integers or texts" if name == "hash_ids" else "a positive integer"
        remedy = "; --format lengths replays only the lengths" if name == "hash_ids" else ""
        raise ValueError(f"{name}: expected {expected}, got no such field{remedy}")
    return _field(row, name)


def read_mooncake(source: Source, name: str, options: ReadOptions) -> Trace:
    """Read JSON lines with block ids; rows of one session follow each other by their delays."""
    rows = _BlockRows("ms", MOONCAKE_BLOCK, _MOONCAKE_FIELDS, options)
    requests = rows.requests
    turns = SessionTurns()
    for number, row in json_rows(source, options.limit):
        with row_errors(number):
            inputs, outputs = rows.read(row)
            turn = turns.add(
                requests.clock, len(requests), row.get("session_id"), _field(row, "delay")
            )
            requests.add(inputs, outputs, **turn)
    return rows.finish(name, "mooncake", turns.notes())


def read_bailian(source: Source, name: str, options: ReadOptions) -> Trace:
    """Read JSON lines with chats: a row continues the chat `parent_chat_id`."""
    rows = _BlockRows("s", BAILIAN_BLOCK, _BAILIAN_FIELDS, options)
    requests = rows.requests
    chats: dict[int, tuple[int, int]] = {}  # number of the session, index of the request
    sessions = unknown = 0
    for number, row in json_rows(source, options.limit):
        with row_errors(number):
            chat, before = row.get("chat_id"), row.get("parent_chat_id", _ROOT)
            if type(chat) is not int or type(before) is not int:
                raise ValueError("chat_id, parent_chat_id: expected integers, -1 for no parent")
            if chat in chats:
                raise ValueError(f"chat_id: expected a new number, got {shown_value(chat)} again")
            inputs, outputs = rows.read(row)
            session, parent = chats.get(before, (sessions, _ROOT))
            unknown += before != _ROOT and parent == _ROOT
            sessions += session == sessions
            chats[chat] = (session, len(requests))
            requests.add(inputs, outputs, session=session, parent=parent)
    notes = [f"{counted(sessions, 'session')}; each request arrives at its own time"]
    if unknown:
        notes.append(f"chats that are not in the rows before: {counted(unknown, 'request')}")
    return rows.finish(name, "bailian", notes)
