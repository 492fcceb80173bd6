# SPDX-License-Identifier: Apache-2.0
"""Parse JSON rows strictly, and walk through large JSON documents value by value."""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterable, Iterator
from typing import Any

from kvcore.apps.traces.errors import LineError, shown

__all__ = ["JsonDocument", "parsed_row", "top_keys"]

#: Maximum characters of one value of a document, for example of one conversation.
MOST_VALUE_CHARACTERS = 1 << 26
_SPACE = " \t\r\n"
#: A syntax error this far from the end of the text is not caused by the end of the text.
_NEAR_END = 64


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for i, name in enumerate(names) if name in names[:i])
        raise ValueError(f"the field {shown(json.dumps(twice))} is there twice")
    return found


_DECODER = json.JSONDecoder(object_pairs_hook=_unique)


def parsed_row(text: str) -> dict[str, Any]:
    """Parse one row; ValueError if it is no JSON object or has a field twice."""
    try:
        row = _DECODER.decode(text)
    except json.JSONDecodeError as error:
        where = f"{error.msg} at column {error.colno}"
        raise ValueError(f"expected a JSON object, got {shown(text)} ({where})") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(
            f"expected a JSON object, got {shown(text)} ({shown(str(error))})"
        ) from None
    if not isinstance(row, dict):
        raise ValueError(f"expected a JSON object, got {shown(text)}")
    return row


def top_keys(text: str) -> list[str]:
    """List the fields of the JSON object at the beginning of a text, which may be cut.

    A field counts if its name is complete. The list is empty if the text begins with no object.
    """
    names: list[str] = []
    at = _skip(text, 0)
    if text[at : at + 1] != "{":
        return names
    at = _skip(text, at + 1)
    try:
        while text[at : at + 1] == '"':
            name, at = _DECODER.raw_decode(text, at)
            at = _skip(text, at)
            if text[at : at + 1] != ":":
                break
            names.append(name)
            _, at = _DECODER.raw_decode(text, _skip(text, at + 1))
            at = _skip(text, at)
            if text[at : at + 1] != ",":
                break
            at = _skip(text, at + 1)
    except (ValueError, RecursionError):
        pass
    return names


def _skip(text: str, at: int) -> int:
    while text[at : at + 1] in _SPACE and at < len(text):
        at += 1
    return at


class JsonDocument:
    """A JSON document that is read piece by piece, with one value in memory at a time.

    Parameters
    ----------
    chunks : iterable of bytes
        The text, in UTF-8.

    Raises
    ------
    LineError
        From every method: the text is not UTF-8 or not JSON, or a value is too long. The line is
        the number of the value, from 1, in the array that is read.
    """

    def __init__(self, chunks: Iterable[bytes]) -> None:
        self._chunks = iter(chunks)
        self._decode = codecs.getincrementaldecoder("utf-8-sig")()
        self._text = ""
        self._at = 0
        self._is_whole = False
        self.number = 1

    def first(self) -> str:
        """Return the next character that is no space, without consuming it; "" at the end."""
        while True:
            self._at = _skip(self._text, self._at)
            if self._at < len(self._text) or not self._more():
                return self._text[self._at : self._at + 1]

    def take(self, wanted: str) -> str:
        """Consume the next character; LineError if `wanted` does not have it."""
        found = self.first()
        if not found or found not in wanted:
            expected = " or ".join(wanted)
            got = shown(self._text[self._at :]) if found else "the end of the file"
            raise LineError(self.number, f"expected JSON with {expected} here, got {got}")
        self._at += 1
        return found

    def value(self) -> Any:
        """Consume one value."""
        self.first()
        if self._at > len(self._text) // 2:
            self._text, self._at = self._text[self._at :], 0
        while True:
            try:
                value, end = _DECODER.raw_decode(self._text, self._at)
                # A number at the end of the text may go on, also after "1." and "1e".
                if self._text[end : end + 1] not in ("", ".", "e", "E") or not self._more():
                    self._at = end
                    return value
            except json.JSONDecodeError as error:
                is_cut = error.msg.startswith("Unterminated") or (
                    error.pos + _NEAR_END >= len(self._text)
                )
                if not is_cut or not self._more():
                    text = self._text[self._at :] or "the end of the file"
                    raise LineError(
                        self.number, f"expected JSON, got {shown(text)} ({error.msg})"
                    ) from None
            except (ValueError, RecursionError) as error:
                what = f"{shown(self._text[self._at :])} ({shown(str(error))})"
                raise LineError(self.number, f"expected JSON, got {what}") from None
            if len(self._text) - self._at > MOST_VALUE_CHARACTERS:
                raise LineError(
                    self.number, f"expected at most {MOST_VALUE_CHARACTERS} characters in a value"
                )

    def names(self) -> Iterator[str]:
        """Consume an object: yield each name; the caller consumes the value after it."""
        self.take("{")
        seen = set()
        if self.first() == "}":
            self.take("}")
            return
        while True:
            if self.first() != '"':
                self.take('"')
            name = self.value()
            if name in seen:
                raise LineError(self.number, f"the field {shown(json.dumps(name))} is there twice")
            seen.add(name)
            self.take(":")
            yield name
            if self.take(",}") == "}":
                return

    def items(self) -> Iterator[Any]:
        """Consume an array: yield each value, and count them in `number`."""
        self.take("[")
        self.number = 1
        if self.first() == "]":
            self.take("]")
            return
        while True:
            yield self.value()
            if self.take(",]") == "]":
                return
            self.number += 1

    def end(self) -> None:
        """Raise LineError if anything follows."""
        if self.first():
            raise LineError(
                self.number, f"expected the end of the file, got {shown(self._text[self._at :])}"
            )

    def _more(self) -> bool:
        """Read at least the number of characters in memory, so that parsing again costs O(n)."""
        if self._is_whole:
            return False
        parts = [self._text[self._at :]]
        self._at = 0
        wanted = max(1, len(parts[0]))
        got = 0
        while got < wanted and not self._is_whole:
            data = next(self._chunks, b"")
            self._is_whole = not data
            try:
                parts.append(self._decode.decode(data, final=self._is_whole))
            except UnicodeDecodeError:
                raise LineError(self.number, "expected text in UTF-8") from None
            got += len(parts[-1])
        self._text = "".join(parts)
        return got > 0
