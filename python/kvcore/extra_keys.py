# SPDX-License-Identifier: Apache-2.0
"""What tells equal token ids apart, such as the image behind them: per page, for chained keys."""

from __future__ import annotations

from collections.abc import Iterable

from kvcore.native.contexts import normalized

__all__ = ["keys_of_pages"]

#: Start, length in tokens, and bytes that tell the content from others, a digest for example.
ExtraKey = tuple[int, int, bytes]


def keys_of_pages(
    extra_keys: Iterable[ExtraKey] | None, num_tokens: int, page_size: int
) -> list[list[tuple[bytes, int, int]] | None]:
    """List the extra keys that overlap each whole page of a prefix.

    Parameters
    ----------
    extra_keys : list of (int, int, bytes), or None
        As of a context; they start in front of `num_tokens`, in any order.
    num_tokens : int
        Tokens of the prefix; a last page that they do not fill is left out.
    page_size : int
        Tokens per page.

    Returns
    -------
    list of list of (bytes, int, int), or None [num_tokens // page_size]
        Each key's bytes, its start counted from the page's, negative where it began on an earlier
        page, and the tokens of the whole key; by start, length and bytes. None for a page without
        keys.

    Raises
    ------
    ValueError, TypeError
        As of a context; a `page_size` below 1.

    Notes
    -----
    Pure. Costs O(pages + pages that each key overlaps). A key of a page behind a chain of page keys
    is made of these, its tokens and the key before it.

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
