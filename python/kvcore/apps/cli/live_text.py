# SPDX-License-Identifier: Apache-2.0
"""Print texts on a terminal while a model generates their tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence

__all__ = ["LiveText", "TextOfTokens"]

_UNFINISHED = "\ufffd"  # decoders return it for an incomplete character


class TextOfTokens:
    """Turn tokens into text one by one.

    Parameters
    ----------
    decode : callable(list of int) -> str

    Notes
    -----
    A token is decoded together with the tokens before it, because its text may depend on them. It
    is held back while it ends inside a character. Costs O(1) per token.

    Examples
    --------
    >>> from kvcore.apps.cli.live_text import TextOfTokens
    >>> text = TextOfTokens(lambda ids: bytes(ids).decode(errors="replace"))
    >>> [text.add(byte) for byte in "añ".encode()], text.rest()
    (['a', '', 'ñ'], '')
    """

    def __init__(self, decode: Callable[[list[int]], str]) -> None:
        self._decode = decode
        self._context: list[int] = []  # tokens whose text is returned already
        self._pending: list[int] = []

    def add(self, token: int) -> str:
        """Return the text that the token completes."""
        self._pending.append(token)
        text = self._decode([*self._context, *self._pending])
        return "" if text.endswith(_UNFINISHED) else self._tell(text)

    def rest(self) -> str:
        """Return the text of the tokens that were held back."""
        return self._tell(self._decode([*self._context, *self._pending])) if self._pending else ""

    def _tell(self, text: str) -> str:
        told = self._decode(self._context) if self._context else ""
        new = text[len(told) :]
        # A token without a text, such as a special token, is no context for the next token.
        self._context = self._pending if new else [*self._context, *self._pending]
        self._pending = []
        return new


class LiveText:
    """Write several texts one after another while their tokens arrive together.

    Parameters
    ----------
    titles : sequence of str
        Title of each text, written before it; "" for no title.
    decode : callable(list of int) -> str
    has_ended : callable(int count, int token) -> bool
        Return true if a text ends after `count` tokens, the last of which is `token`.
    write : callable(str)
    """

    def __init__(
        self,
        titles: Sequence[str],
        decode: Callable[[list[int]], str],
        has_ended: Callable[[int, int], bool],
        write: Callable[[str], object],
    ) -> None:
        self._titles = titles
        self._texts = [TextOfTokens(decode) for _ in titles]
        self._waiting = [""] * len(titles)
        self._counts = [0] * len(titles)
        self._ended = [False] * len(titles)
        self._has_ended = has_ended
        self._write = write
        self._current = -1
        self._open_next()

    def add(self, index: int, token: int) -> None:
        """Add a token to a text; pass this method as ``stream=`` of ``generate``."""
        self._counts[index] += 1
        self._waiting[index] += self._texts[index].add(token)
        self._ended[index] = self._has_ended(self._counts[index], token)
        if index == self._current:
            self._show()

    def _show(self) -> None:
        """Write the new part of the current text; after its end, go on with the next texts."""
        while self._current < len(self._titles):
            current = self._current
            if self._ended[current]:
                self._waiting[current] += self._texts[current].rest()
            self._write(self._waiting[current])
            self._waiting[current] = ""
            if not self._ended[current]:
                return
            self._write("\n")
            self._open_next()

    def _open_next(self) -> None:
        self._current += 1
        if self._current < len(self._titles) and self._titles[self._current]:
            self._write(f"{self._titles[self._current]}\n")
