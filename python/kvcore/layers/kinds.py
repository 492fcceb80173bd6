# SPDX-License-Identifier: Apache-2.0
"""Which tokens the attention layers of a group read."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvcore.layers.checks import count, layer_indices, pages_present
from kvcore.support.arguments import integer

__all__ = ["MAX_CHUNK_TOKENS", "AttentionGroup", "ChunkedLocal", "FullAttention", "SlidingWindow"]

#: Tokens that a request runs in one step at most, where nothing else is said.
MAX_CHUNK_TOKENS = 2048

_LIKE_PARAMS = "leave it out where it is that of the params"


@dataclass(frozen=True)
class AttentionGroup(ABC):
    """Layers that keep K and V of the same tokens.

    Parameters
    ----------
    layers : sequence of int
        Indices of the model's layers; held as an ascending tuple.
    n_kv_heads, head_dim, v_head_dim : int, optional
        Where they are not those of the params. A `head_dim` without `v_head_dim` is that of V too.

    Raises
    ------
    ValueError
        No layer, a negative one, one twice; a size below 1.
    TypeError
        What is no int.
    """

    layers: Sequence[int]
    n_kv_heads: int | None = field(default=None, kw_only=True)
    head_dim: int | None = field(default=None, kw_only=True)
    v_head_dim: int | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        object.__setattr__(self, "layers", layer_indices(self.layers))
        for name in ("n_kv_heads", "head_dim", "v_head_dim"):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, count(name, getattr(self, name), _LIKE_PARAMS))

    @abstractmethod
    def skipped_tokens(self, n: int) -> int:
        """Return the first token that is still read once `n` tokens are computed."""

    @abstractmethod
    def max_pages(
        self, tokens: int, page_size: int, max_chunk_tokens: int = MAX_CHUNK_TOKENS
    ) -> int:
        """Return the most pages that a sequence of `tokens` holds in each bundle of the group.

        Parameters
        ----------
        tokens : int
            Of the whole sequence.
        page_size : int
            Of the bundle.
        max_chunk_tokens : int
            Tokens that run in one step at most.
        """

    def longest_hit(self, present: str | Sequence[bool], page_size: int) -> tuple[int, int]:
        """Find the longest prefix that a group can serve from its cached pages.

        Parameters
        ----------
        present : str or sequence of bool
            For each whole page of a prompt whether it is cached; "1101" or a sequence.
        page_size : int
            Tokens per page.

        Returns
        -------
        hit_pages : int
            Pages of the prefix.
        holes : int
            Of those, the ones in front that no token behind the prefix reads.

        Examples
        --------
        >>> from kvcore.groups import ChunkedLocal, FullAttention, SlidingWindow
        >>> FullAttention([0]).longest_hit("1101", 2)
        (2, 0)
        >>> SlidingWindow([0], 4).longest_hit("110100110111", 2)
        (12, 10)
        >>> ChunkedLocal([0], 4).longest_hit("1110", 2)
        (4, 4)
        """
        size = count("page_size", page_size, "give the tokens of a page")
        best, run = (0, 0), 0
        for hit, is_cached in enumerate(pages_present(present), 1):
            run = run + 1 if is_cached else 0
            holes = self.skipped_tokens(hit * size) // size
            if run >= hit - holes:
                best = (hit, holes)
        return best


def _tokens(n: int) -> int:
    return integer("n", n, 0)


def _pages(tokens: int, page_size: int) -> int:
    return -(-integer("tokens", tokens, 0) // count("page_size", page_size, "tokens of a page"))


def _chunk_tokens(value: int) -> int:
    return count("max_chunk_tokens", value, "give the tokens that run in one step at most")


@dataclass(frozen=True)
class FullAttention(AttentionGroup):
    """Layers that read every token before.

    Parameters
    ----------
    layers, n_kv_heads, head_dim, v_head_dim
        As in AttentionGroup.

    Examples
    --------
    >>> from kvcore.groups import FullAttention
    >>> FullAttention(range(3)).layers
    (0, 1, 2)
    """

    def skipped_tokens(self, n: int) -> int:
        """Return 0: every token is read again."""
        _tokens(n)
        return 0

    def max_pages(
        self, tokens: int, page_size: int, max_chunk_tokens: int = MAX_CHUNK_TOKENS
    ) -> int:
        """Return the pages of all `tokens`, however large a chunk is."""
        _chunk_tokens(max_chunk_tokens)
        return _pages(tokens, page_size)


@dataclass(frozen=True)
class SlidingWindow(AttentionGroup):
    """Layers in which a token reads itself and the `window` - 1 tokens before it.

    Parameters
    ----------
    layers, n_kv_heads, head_dim, v_head_dim
        As in AttentionGroup.
    window : int
        Tokens that a token reads, itself included.

    Examples
    --------
    >>> from kvcore.groups import SlidingWindow
    >>> group = SlidingWindow([1, 3, 5], window=4)
    >>> [group.skipped_tokens(n) for n in (0, 4, 5, 6, 7, 11)]
    [0, 1, 2, 3, 4, 8]
    >>> group.max_pages(tokens=100_000, page_size=16, max_chunk_tokens=2048)
    130
    """

    window: int

    def __post_init__(self) -> None:
        super().__post_init__()
        remedy = "a token reads itself; layers without a window are FullAttention"
        object.__setattr__(self, "window", count("window", self.window, remedy))

    def skipped_tokens(self, n: int) -> int:
        """Return ``max(0, n - window + 1)``, the first token that token `n` reads."""
        return max(0, _tokens(n) - self.window + 1)

    def max_pages(
        self, tokens: int, page_size: int, max_chunk_tokens: int = MAX_CHUNK_TOKENS
    ) -> int:
        """Return ``ceil((window - 1 + max_chunk_tokens) / page_size) + 1``, or those of `tokens`.

        The window and a chunk begin anywhere in a page, and cost one page more for it.
        """
        live = self.window - 1 + _chunk_tokens(max_chunk_tokens)
        return min(_pages(tokens, page_size), _pages(live, page_size) + 1)


@dataclass(frozen=True)
class ChunkedLocal(AttentionGroup):
    """Layers in which a token reads itself and the tokens before it in its own chunk.

    Parameters
    ----------
    layers, n_kv_heads, head_dim, v_head_dim
        As in AttentionGroup.
    chunk : int
        Tokens of a chunk; the first one begins at token 0.

    Examples
    --------
    >>> from kvcore.groups import ChunkedLocal
    >>> [ChunkedLocal([0], chunk=8).skipped_tokens(n) for n in (7, 8, 13, 16)]
    [0, 8, 8, 16]
    """

    chunk: int

    def __post_init__(self) -> None:
        super().__post_init__()
        remedy = "a token reads itself; layers without chunks are FullAttention"
        object.__setattr__(self, "chunk", count("chunk", self.chunk, remedy))

    def skipped_tokens(self, n: int) -> int:
        """Return ``floor(n / chunk) * chunk``, where the chunk of token `n` begins."""
        return _tokens(n) // self.chunk * self.chunk

    def max_pages(
        self, tokens: int, page_size: int, max_chunk_tokens: int = MAX_CHUNK_TOKENS
    ) -> int:
        """Return the pages of ``chunk - 1 + max_chunk_tokens`` tokens, or those of `tokens`.

        A chunk that is no multiple of the page begins inside one: its tokens in front count too.
        """
        most = _pages(tokens, page_size)
        in_front = page_size - math.gcd(page_size, self.chunk)
        live = in_front + self.chunk - 1 + _chunk_tokens(max_chunk_tokens)
        return min(most, _pages(live, page_size))
