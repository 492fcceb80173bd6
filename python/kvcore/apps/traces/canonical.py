# SPDX-License-Identifier: Apache-2.0
"""Write and read the one form of a trace in a file: a header and JSON lines; see docs/traces.md."""

from __future__ import annotations

import gzip
import json
import math
import os
import sys
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from typing import IO, Any

from kvcore.apps.traces.blocks import BlockContent, BlockIds
from kvcore.apps.traces.clock import Clock
from kvcore.apps.traces.errors import shown_value
from kvcore.apps.traces.json_values import parsed_row
from kvcore.apps.traces.lengths import LengthContent
from kvcore.apps.traces.read_options import ReadOptions
from kvcore.apps.traces.rows import row_errors
from kvcore.apps.traces.signatures import check_name
from kvcore.apps.traces.source import Source
from kvcore.apps.traces.tokens import TokenContent, TokenText, token_ids
from kvcore.apps.traces.trace import Requests, Trace, token_count

__all__ = ["STDOUT", "VERSION", "TraceFile", "read_canonical", "standard_output", "write_trace"]

VERSION = 1
#: Name of stdout in place of a file to write, and of stdin in place of a file to read.
STDOUT = Path("-")
_NONE = -1
#: For each content the options that a reader may use.
_CONTENTS = {
    "blocks": ("block_size", "time_unit"),
    "tokens": ("time_unit",),
    "lengths": ("prefix_share", "time_unit"),
}
_HEADER = frozenset({"kvcore_trace", "content", "block_size", "prefix_share", "time_unit", "notes"})
_ROW = frozenset({"time", "input", "output", "session", "parent", "after", "delay"})
_MOST_NOTES = 64
_MOST_AFTER = 1 << 16
_MOST_SESSIONS = 1 << 62
_MOST_KEY = (1 << 31) - 1


def standard_output() -> IO[bytes]:
    """Return stdout for bytes; OSError if it is closed."""
    if sys.stdout is None:
        raise OSError("standard output is closed")
    sys.stdout.flush()
    return sys.stdout.buffer


class TraceFile:
    """Write a file row by row; the file has its name only after all rows are written.

    Parameters
    ----------
    path : str or os.PathLike
        The file; it is compressed if its name ends in ``.gz``. "-" is stdout. Rows go directly to
        stdout, a device, a pipe or a link.

    Raises
    ------
    ValueError
        The name has the suffix of another format, such as ``.zst``.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = Path(path)
        check_name(self._path)
        is_direct = self._path == STDOUT or self._path.is_symlink()
        is_replaced = not is_direct and (self._path.is_file() or not self._path.exists())
        part = self._path.with_name(f"{self._path.name}.{os.getpid()}.part")
        self._part = part if is_replaced else self._path
        self._streams = ExitStack()
        self._file: Any = None

    def __enter__(self) -> Any:
        """Open the file."""
        if self._path == STDOUT:
            self._file = standard_output()
            return self
        self._file = self._streams.enter_context(self._part.open("wb"))
        if self._path.suffix == ".gz":
            packed = gzip.GzipFile("", "wb", 6, self._file, mtime=0)
            self._file = self._streams.enter_context(packed)
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        """Give the file its name; remove it after an error."""
        try:
            self._streams.close()
            if kind is None and self._part != self._path:
                self._part.replace(self._path)
        finally:
            if self._part != self._path:
                self._part.unlink(missing_ok=True)

    def header(self, content: str, notes: Sequence[str], **more: Any) -> None:
        """Write the first line."""
        first = {"kvcore_trace": VERSION, "time_unit": "s", "content": content}
        self.row(first | more | {"notes": list(notes)})

    def row(self, row: dict[str, Any]) -> None:
        """Write a line."""
        self._file.write(json.dumps(row, separators=(",", ":")).encode() + b"\n")


def write_trace(
    trace: Trace, path: str | os.PathLike[str], on_progress: Callable[[int], None] | None = None
) -> None:
    """Write a trace; a name that ends in ``.gz`` is compressed.

    Parameters
    ----------
    trace : Trace
        The trace.
    path : str or os.PathLike
        The file; an existing file is replaced only after all rows are written. "-" is stdout.
    on_progress : callable, optional
        Called from time to time with the number of written requests.
    """
    content = trace.content
    after: defaultdict[int, list[int]] = defaultdict(list)
    for index, other in trace.waits.tolist():
        after[index].append(other)
    with TraceFile(path) as file:
        if isinstance(content, BlockContent):
            file.header("blocks", trace.notes, block_size=content.size)
        elif isinstance(content, TokenContent):
            file.header("tokens", trace.notes)
        else:
            assert isinstance(content, LengthContent)
            file.header("lengths", trace.notes, prefix_share=content.prefix_share)
        for index in range(len(trace)):
            row: dict[str, Any] = {
                "time": float(trace.arrivals[index]),
                "input": int(trace.input_lengths[index]),
                "output": int(trace.output_lengths[index]),
            }
            if trace.sessions[index] != _NONE:
                row["session"] = int(trace.sessions[index])
            if trace.parents[index] != _NONE:
                row["parent"] = int(trace.parents[index])
            if index in after:
                row["after"] = after[index]
            if not math.isnan(trace.delays[index]):
                row["delay"] = float(trace.delays[index])
            file.row(row | _prompt(content, index, row))
            if on_progress is not None and index % 64 == 0:
                on_progress(index)


def _prompt(content: Any, index: int, row: dict[str, Any]) -> dict[str, Any]:
    if isinstance(content, BlockContent):
        first = int(content.firsts[index])
        return {"blocks": content.ids[first : first + int(content.counts[index])].tolist()}
    if isinstance(content, TokenContent):
        first, output = int(content.prompts[index]), int(content.outputs[index])
        end = first + row["input"]
        found = {"tokens": content.tokens[first:end].tolist()}
        if keys := content.keys_of(first, end):
            found["keys"] = keys
        if output != _NONE:
            found["output_tokens"] = content.tokens[output : output + row["output"]].tolist()
        return found
    return {}


def read_canonical(source: Source, name: str, options: ReadOptions) -> Trace:
    """Read a file that `write_trace` wrote."""
    lines = source.lines()
    number, text = next(lines, (1, ""))
    with row_errors(number):
        header = _header(parsed_row(text))
    reader = _Rows(header, options)
    for number, text in lines:
        if options.limit is not None and len(reader.requests) >= options.limit:
            break
        with row_errors(number):
            reader.add(parsed_row(text))
    with row_errors(number):
        return reader.finish(name)


def _header(row: dict[str, Any]) -> dict[str, Any]:
    if row.get("kvcore_trace") != VERSION:
        raise ValueError(
            f"kvcore_trace: expected version {VERSION}, got {shown_value(row.get('kvcore_trace'))}"
        )
    if row.get("content") not in [*_CONTENTS]:
        raise ValueError(
            f"content: expected one of {', '.join(_CONTENTS)}, got "
            f"{shown_value(row.get('content'))}"
        )
    _known(row, _HEADER)
    if row.get("time_unit") != "s":
        raise ValueError(f'time_unit: expected "s", got {shown_value(row.get("time_unit"))}')
    if row["content"] == "blocks":
        token_count("block_size", row.get("block_size"))
    share = row.get("prefix_share")
    if share is not None and not (type(share) in (int, float) and 0 <= share < 1):
        raise ValueError(f"prefix_share: expected 0 to 1, got {shown_value(share)}")
    notes = row.get("notes", [])
    is_list = isinstance(notes, list) and len(notes) <= _MOST_NOTES
    if not is_list or not all(isinstance(note, str) and note.isprintable() for note in notes):
        raise ValueError(f"notes: expected at most {_MOST_NOTES} lines of text")
    return row


def _after(numbers: Any, index: int) -> list[int]:
    """Check the other requests that row `index` follows; ValueError if they are not before it."""
    is_list = isinstance(numbers, list) and len(numbers) <= _MOST_AFTER
    if not is_list or not all(type(each) is int and 0 <= each < index for each in numbers):
        raise ValueError(
            f"after: expected at most {_MOST_AFTER} numbers of rows before row {index}, got "
            f"{shown_value(numbers)}"
        )
    found: list[int] = numbers
    return found


def _keys(keys: Any, inputs: int) -> list[list[int]]:
    """Check the keys of a prompt; ValueError if they have no rising places in the prompt."""
    is_list = isinstance(keys, list) and len(keys) <= inputs
    if not is_list or not all(_is_key(each) for each in keys):
        raise ValueError(
            f"keys: expected pairs of a place and a number from 0 to {_MOST_KEY}, got "
            f"{shown_value(keys)}"
        )
    places = [-1, *(at for at, _ in keys), inputs]
    if not all(before < after for before, after in pairwise(places)):
        raise ValueError(
            f"keys: expected rising places from 0 to {inputs - 1}, got {shown_value(keys)}"
        )
    found: list[list[int]] = keys
    return found


def _is_key(pair: Any) -> bool:
    is_pair = isinstance(pair, list) and len(pair) == 2 and set(map(type, pair)) == {int}
    return is_pair and 0 <= pair[1] <= _MOST_KEY


def _known(row: dict[str, Any], names: frozenset[str]) -> None:
    if not row.keys() <= names:
        name = min(row.keys() - names)
        raise ValueError(
            f"expected only the fields {', '.join(sorted(names))}, got {shown_value(name)}"
        )


def _replaced(notes: list[str], old: list[str], new: list[str]) -> list[str]:
    """Return the notes with the new lines in place of the old lines, or at the end."""
    if not notes or old == new:
        return notes
    first = min((notes.index(each) for each in old if each in notes), default=len(notes))
    kept = [each for each in notes[first:] if each not in old]
    return [*notes[:first], *new, *kept]


class _Rows:
    """Collect the rows below a header."""

    def __init__(self, header: dict[str, Any], options: ReadOptions) -> None:
        self._kind: str = header["content"]
        self._size: int = header.get("block_size", 0)
        share = header.get("prefix_share")
        self._lengths = LengthContent(
            prefix_share=share if options.prefix_share is None else options.prefix_share
        )
        self._notes: list[str] = header.get("notes", [])
        if self._kind == "lengths":
            self._notes = _replaced(
                self._notes, LengthContent(prefix_share=share).notes(), self._lengths.notes()
            )
        self.requests = Requests(Clock("s"))
        self._ids = BlockIds()
        self._text = TokenText()
        self._followed: set[int] = set()
        names = {"blocks": ["blocks"], "tokens": ["tokens", "output_tokens", "keys"], "lengths": []}
        self._fields = _ROW | frozenset(names[self._kind])
        options.require_used(_CONTENTS[self._kind], f"a file of {self._kind}")
        if options.block_size not in (None, self._size):
            raise ValueError(f"block_size: the file has {self._size}, which no option changes")
        if options.time_unit not in (None, "s"):
            raise ValueError("time_unit: the file has seconds, which no option changes")

    def add(self, row: dict[str, Any]) -> None:
        """Append a row; ValueError for a bad row."""
        _known(row, self._fields)
        index = len(self.requests)
        inputs = token_count("input", row.get("input"))
        outputs = token_count("output", row.get("output"))
        session, parent = row.get("session", _NONE), row.get("parent", _NONE)
        if "session" in row and not (type(session) is int and 0 <= session < _MOST_SESSIONS):
            raise ValueError(
                f"session: expected 0 to {_MOST_SESSIONS - 1}, got {shown_value(session)}"
            )
        if "parent" in row and not (type(parent) is int and 0 <= parent < index):
            raise ValueError(
                f"parent: expected the number of a row before row {index}, got "
                f"{shown_value(parent)}"
            )
        after = _after(row.get("after", []), index)
        delay = math.nan
        if "delay" in row:
            delay = self.requests.clock.duration("delay", row["delay"])
            if (parent == _NONE and not after) or parent in self._followed:
                raise ValueError("delay: expected a parent that no other request follows")
            if parent != _NONE:
                self._followed.add(parent)
        elif after:
            raise ValueError("delay: expected a delay after the answers of `after`, got none")
        if row.get("time") is None:
            raise ValueError("time: expected a number of seconds >= 0, got no such field")
        self.requests.clock.add("time", row["time"])
        self._add_prompt(row, inputs, outputs)
        links: dict[str, Any] = {"parent": parent, "delay": delay, "waits": after}
        self.requests.add(inputs, outputs, session=session, **links)

    def _add_prompt(self, row: dict[str, Any], inputs: int, outputs: int) -> None:
        if self._kind == "blocks":
            ids = self._ids.check("blocks", row.get("blocks"))
            most = -(-inputs // self._size)
            if len(ids) > most:
                raise ValueError(f"blocks: expected at most {most} ids, got {len(ids)}")
            self._ids.add(ids)
        elif self._kind == "tokens":
            prompt = token_ids("tokens", row.get("tokens"))
            output = row.get("output_tokens")
            if len(prompt) != inputs:
                raise ValueError(f"tokens: expected {inputs} token ids, got {len(prompt)}")
            start, place = len(self._text), _NONE
            self._text.extend(prompt)
            for at, key in _keys(row.get("keys", []), inputs):
                self._text.add_key(start + at, key)
            if output is not None:
                place = len(self._text)
                output = token_ids("output_tokens", output)
                if len(output) != outputs:
                    raise ValueError(f"output_tokens: expected {outputs} ids, got {len(output)}")
                self._text.extend(output)
            self._text.add(start, place)

    def finish(self, name: str) -> Trace:
        """Return the trace, with the notes of the file that was converted."""
        content: Any = self._lengths
        if self._kind == "blocks":
            content = self._ids.finish(self._size, "as the file says")
        elif self._kind == "tokens":
            content = self._text.finish("token ids of the file")
        trace = self.requests.finish(name, "kvcore", content, [])
        notes = self._notes or list(trace.notes)
        return Trace(**(vars(trace) | {"notes": tuple(notes)}))
