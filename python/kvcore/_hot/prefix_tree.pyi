# SPDX-License-Identifier: Apache-2.0
from collections.abc import Iterable, Sequence
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray
from typing_extensions import Self

from kvcore.policies import EvictionPolicy

_Tokens: TypeAlias = Sequence[int] | NDArray[np.int32] | NDArray[np.int64]

class PrefixHandle:
    """A matched prefix; goes stale (InvalidHandleError) when pages of its run are evicted.

    Attributes
    ----------
    num_pages : int

    Notes
    -----
    A handle that is dropped lets go of what it pinned.
    """

    @property
    def num_pages(self) -> int: ...

class PrefixTree:
    """Remember which pages hold which tokens: a radix tree over runs of whole pages.

    Page ids go in by ``insert`` and come out by ``evict``; the tree owns no page.

    Parameters
    ----------
    page_size : int
        Tokens per page, at least 1.
    eviction : str or kvcore.policies.EvictionPolicy
        Which pages ``evict`` forgets first.

    Raises
    ------
    ValueError, TypeError
        A page size below 1, or no such policy.

    Notes
    -----
    One thread at a time. ``match`` costs comparing the tokens, ``insert`` copying them, ``pin`` and
    ``unpin`` O(1), ``evict`` O(1) amortised per page, O(log n) per run with most other policies.

    Examples
    --------
    >>> from kvcore import PrefixTree
    >>> tree = PrefixTree(page_size=2)
    >>> tree.insert([1, 2, 3, 4], [7, 8]).tolist()
    [7, 8]
    >>> pages, handle = tree.match([1, 2, 9, 9])
    >>> pages.tolist(), handle.num_pages
    ([7], 1)
    """

    def __new__(cls, page_size: int, eviction: EvictionPolicy | str = "lru") -> Self: ...
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
        self,
        tokens: _Tokens,
        extra_key: str | None = None,
        cache_salt: str | None = None,
        *,
        touch: bool = False,
        extra_keys: Iterable[tuple[int, int, bytes]] | None = None,
    ) -> tuple[NDArray[np.int32], PrefixHandle]:
        """Find the longest cached prefix in whole pages; changes nothing unless it is to touch.

        Parameters
        ----------
        tokens : list of int, or array int32 or int64 [n]
        extra_key, cache_salt : str, optional
            Namespace.
        touch : bool
            It is a use of these pages, by which they are evicted later.
        extra_keys : list of (int, int, bytes), optional
            As of a context; those that start in front of `n`.

        Returns
        -------
        (int32 [pages], PrefixHandle)
        """
    def insert(
        self,
        tokens: _Tokens,
        pages: _Tokens,
        extra_key: str | None = None,
        cache_salt: str | None = None,
        *,
        priority: int = 50,
        extra_keys: Iterable[tuple[int, int, bytes]] | None = None,
    ) -> NDArray[np.int32]:
        """Put whole pages in.

        Parameters
        ----------
        tokens : list of int, or array int32 or int64 [n * page_size]
        pages : list of int, or array int32 or int64 [n]
        priority : int
            0 .. 100, for the priority policy; others ignore it. Pages keep the highest one they
            were given.
        extra_key, cache_salt, extra_keys
            As of ``match``.

        Returns
        -------
        int32 [n]
            The ids that the tree has for these tokens now. Where one differs from yours, the tree
            had the page already, and yours stays yours.

        Raises
        ------
        ValueError
            The tokens do not fill the pages, or a priority that is none.
        """
    def pin(self, handle: PrefixHandle) -> None:
        """Keep a prefix from eviction until unpinned as often.

        Raises
        ------
        InvalidHandleError
            The handle is stale, or another tree's.
        """
    def unpin(self, handle: PrefixHandle) -> None:
        """Let a prefix go.

        Raises
        ------
        InvalidHandleError
            The prefix is not pinned, or the handle is another tree's.
        """
    def evict(self, n: int) -> NDArray[np.int32]:
        """Forget the `n` least valuable unpinned pages, or as many as there are.

        Returns
        -------
        int32 [evicted]
            Their ids.
        """
    def check_integrity(self) -> None:
        """Raise AssertionError naming the law that does not hold. O(pages)."""
