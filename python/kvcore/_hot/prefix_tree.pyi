# SPDX-License-Identifier: Apache-2.0
from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray
from typing_extensions import Self

_Tokens: TypeAlias = Sequence[int] | NDArray[np.int32] | NDArray[np.int64]

class PrefixHandle:
    """A matched prefix; goes stale (InvalidHandleError) when pages of its run are evicted.

    Attributes
    ----------
    num_pages : int
    """

    @property
    def num_pages(self) -> int: ...

class PrefixTree:
    """Remember which pages hold which tokens: a radix tree over runs of whole pages.

    Parameters
    ----------
    page_size : int
        Tokens per page, at least 1.
    """

    def __new__(cls, page_size: int) -> Self: ...
    @property
    def page_size(self) -> int:
        """Tokens per page."""
    @property
    def num_cached(self) -> int:
        """Pages in the tree."""
    @property
    def num_evictable(self) -> int:
        """Pages that no pin protects."""
    @property
    def num_nodes(self) -> int:
        """Runs of pages that the tree is made of."""
    def match(
        self, tokens: _Tokens, extra_key: str | None = None, cache_salt: str | None = None
    ) -> tuple[NDArray[np.int32], PrefixHandle]:
        """Find the longest cached prefix in whole pages; changes nothing.

        Parameters
        ----------
        tokens : list of int, or array int32 or int64 [n]
        extra_key, cache_salt : str, optional
            Namespace.
        """
    def insert(
        self,
        tokens: _Tokens,
        pages: _Tokens,
        extra_key: str | None = None,
        cache_salt: str | None = None,
    ) -> NDArray[np.int32]:
        """Put whole pages in.

        Parameters
        ----------
        tokens : list of int, or array int32 or int64 [n * page_size]
        pages : list of int, or array int32 or int64 [n]
        """
    def pin(self, handle: PrefixHandle) -> None:
        """Keep a prefix from eviction until unpinned as often."""
    def unpin(self, handle: PrefixHandle) -> None:
        """Let a prefix go."""
    def evict(self, n: int) -> NDArray[np.int32]:
        """Forget the `n` least recently used unpinned pages, or as many as there are."""
    def check_integrity(self) -> None:
        """Raise AssertionError naming the law that does not hold. O(pages)."""
