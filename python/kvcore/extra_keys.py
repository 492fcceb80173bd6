# SPDX-License-Identifier: Apache-2.0
"""Extra keys by page, for chained keys. An extra key marks content, such as an image, of tokens."""

from __future__ import annotations

from collections.abc import Iterable

from kvcore.native.contexts import normalized

__all__ = ["keys_of_pages"]

#: Start, length in tokens, and bytes that identify the content, for example a digest.
ExtraKey = tuple[int, int, bytes]


def keys_of_pages(
    extra_keys: Iterable[ExtraKey] | None, num_tokens: int, page_size: int
) -> list[list[tuple[bytes, int, int]] | None]:
    """List the extra keys that overlap each whole page of a prefix.

    Parameters
    ----------
    extra_keys : list of (int, int, bytes), or None
        The extra keys of a context, in any order. Each key starts before `num_tokens`.
    num_tokens : int
        Tokens of the prefix. A partial last page is left out.
    page_size : int
        Tokens per page.

    Returns
    -------
    list of list of (bytes, int, int), or None [num_tokens // page_size]
        For each key of a page: its bytes, its start relative to the page's start (negative if the
        key starts on an earlier page), and the tokens of the whole key. Ordered by start, length
        and bytes. None for a page without keys.

    Raises
    ------
    ValueError, TypeError
        An extra key that a context refuses; a `page_size` below 1.

    Notes
    -----
    Pure. Cost: O(pages + pages that each key overlaps). The page key of a page is computed from
    these keys, the tokens of the page and the page key before it.

    Examples
    --------
    >>> from kvcore.extra_keys import keys_of_pages
    >>> keys_of_pages([(11, 10, b"a")], 48, 16)
    [[(b'a', 11, 10)], [(b'a', -5, 10)], None]
    """
    if page_size < 1:
        raise ValueError(f"page_size is {page_size}, must be at least 1 token")
    if num_tokens < 0:
        raise ValueError(f"num_tokens is {num_tokens}, must be at least 0")
    pages: list[list[tuple[bytes, int, int]] | None] = [None] * (num_tokens // page_size)
    for start, length, key in normalized(extra_keys, num_tokens):
        end = min((start + length - 1) // page_size + 1, len(pages))
        for page in range(start // page_size, end):
            found = pages[page] or []
            found.append((key, start - page * page_size, length))
            pages[page] = found
    return pages
