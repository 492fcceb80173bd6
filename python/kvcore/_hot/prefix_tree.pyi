# SPDX-License-Identifier: Apache-2.0
from collections.abc import Iterable, Sequence
from typing import Literal, TypeAlias, overload

import numpy as np
from numpy.typing import DTypeLike, NDArray
from typing_extensions import Self

from kvcore._hot.prefix_handle import PrefixHandle
from kvcore._hot.tree_forget import ForgettingTree
from kvcore.policies import EvictionPolicy
from kvcore.results import PrefixRun

_Tokens: TypeAlias = Sequence[int] | NDArray[np.int32] | NDArray[np.int64]

class PrefixTree(ForgettingTree):
    """Remember which pages hold which tokens: a radix tree over runs of whole pages.

    Page ids go in by ``insert`` and come out by ``evict``; the tree owns no page.

    Parameters
    ----------
    page_size : int
        Tokens per page, at least 1.
    eviction : str or kvcore.policies.EvictionPolicy
        Which pages ``evict`` forgets first.
    token_dtype : numpy dtype
        int32, or int64 for ids that need more: 4 more bytes per token, to keep and to compare.
    paired : bool
        A page holds `page_size` pairs of neighbours, (t0, t1), (t1, t2), ...: n of them are n + 1
        tokens. No more bytes; for drafts that read a token and the one behind it (EAGLE).

    Raises
    ------
    ValueError, TypeError
        A page size below 1, or no such policy or dtype.

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

    def __new__(
        cls,
        page_size: int,
        eviction: EvictionPolicy | str = "lru",
        *,
        token_dtype: DTypeLike = "int32",
        paired: bool = False,
    ) -> Self: ...
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
        lookahead: int = 0,
        out: NDArray[np.int32] | None = None,
        extra_keys: Iterable[tuple[int, int, bytes]] | None = None,
    ) -> tuple[NDArray[np.int32], PrefixHandle]:
        """Find the longest cached prefix in whole pages; changes nothing unless it is to touch.

        Parameters
        ----------
        tokens : list of int, or array int32 or int64 [n]
            Of the pairs [n - 1] in a tree of those.
        extra_key, cache_salt : str, optional
            Namespace.
        touch : bool
            It is a use of these pages, by which they are evicted later.
        lookahead : int
            Also count how many of so many tokens behind the last whole page a cached page has too:
            ``handle.partial_tokens``, less than a page. O(log children) more.
        out : int32 [m], optional
            Where the ids go; contiguous. What is returned is its beginning.
        extra_keys : list of (int, int, bytes), optional
            As of a context; those that start in front of `n`.

        Returns
        -------
        (int32 [pages], PrefixHandle)

        Raises
        ------
        ValueError, TypeError
            A negative `lookahead`; an `out` that is none, or too short. Then it is no use either.
        """
    @overload
    def insert(
        self,
        tokens: _Tokens,
        pages: _Tokens,
        extra_key: str | None = None,
        cache_salt: str | None = None,
        *,
        priority: int = 50,
        extra_keys: Iterable[tuple[int, int, bytes]] | None = None,
        return_handle: Literal[False] = False,
        after: PrefixHandle | None = None,
        pin: Literal[False] = False,
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
        return_handle : bool
            Also return how many of the pages, from the first on, the tree had before, and a handle
            of them all. Their ids may be the tree's own.

        Returns
        -------
        int32 [n], or (int32 [n], int, PrefixHandle)
            The ids that the tree has for these tokens now. Where one differs from yours, the tree
            had the page already, and yours stays yours.

        Raises
        ------
        ValueError
            The tokens do not fill the pages, or a priority that is none.
        """
    @overload
    def insert(
        self,
        tokens: _Tokens,
        pages: _Tokens,
        extra_key: str | None = None,
        cache_salt: str | None = None,
        *,
        priority: int = 50,
        extra_keys: Iterable[tuple[int, int, bytes]] | None = None,
        return_handle: Literal[True],
        after: PrefixHandle | None = None,
        pin: bool = False,
    ) -> tuple[NDArray[np.int32], int, PrefixHandle]:
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
        return_handle : bool
            Also return how many of the pages, from the first on, the tree had before, and a handle
            of them all. Their ids may be the tree's own.

        Returns
        -------
        int32 [n], or (int32 [n], int, PrefixHandle)
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
    def pages_of(self, handle: PrefixHandle, first: int = 0) -> NDArray[np.int32]:
        """Return the page ids of a prefix, from page `first` on. Costs copying them.

        Returns
        -------
        int32 [handle.num_pages - first]

        Raises
        ------
        ValueError
            There is no such page.
        InvalidHandleError
            The handle is stale, or another tree's.
        """
    def evict(self, n: int) -> NDArray[np.int32]:
        """Forget the `n` least valuable unpinned pages, or as many as there are.

        Returns
        -------
        int32 [evicted]
            Their ids.
        """
    def reset(self) -> NDArray[np.int32]:
        """Forget all pages.

        Returns
        -------
        int32 [pages]
            Their ids, the least valuable first.

        Raises
        ------
        KVCacheError
            Some are pinned; then nothing has changed.
        """
    def runs(self) -> list[PrefixRun]:
        """Return every run of pages, each behind the one that it continues. O(tokens).

        Returns
        -------
        list of PrefixRun
        """
    def check_integrity(self) -> None:
        """Raise AssertionError naming the law that does not hold. O(pages)."""
