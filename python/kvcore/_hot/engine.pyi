# SPDX-License-Identifier: Apache-2.0
from collections.abc import Hashable, Iterable, Sequence
from typing import Any, Literal, TypeAlias, overload

import numpy as np
from numpy.typing import NDArray

from kvcore._hot.contexts import TextGenerationContext
from kvcore._hot.inputs import RaggedKVCacheInputs
from kvcore._hot.prefixes import PinnedPrefix
from kvcore._hot.reservations import ReservingEngine
from kvcore.context import ContextLike
from kvcore.results import SharedPrefix

_Context: TypeAlias = TextGenerationContext | ContextLike
_Tokens: TypeAlias = Sequence[int] | NDArray[np.int32] | NDArray[np.int64]

class StepEngine(ReservingEngine):
    """Run what an engine asks per request and per step; the base of PagedKVCacheManager."""

    def external_claim(
        self, request_id: Hashable, replica_idx: int | Literal["auto"] | None = None
    ) -> None:
        """Register a request on a replica; takes no pages.

        Parameters
        ----------
        request_id
            Any hashable object.
        replica_idx : int or "auto", optional
            Needed with several replicas; "auto" takes the one with the most free pages.

        Raises
        ------
        AlreadyClaimedError, CapacityError, IndexError, ValueError
        """
    def claim(self, request_id: Hashable, replica_idx: int | Literal["auto"] | None = None) -> None:
        """Register a request on a replica; takes no pages.

        Parameters
        ----------
        request_id
            Any hashable object.
        replica_idx : int or "auto", optional
            Needed with several replicas; "auto" takes the one with the most free pages.

        Raises
        ------
        AlreadyClaimedError, CapacityError, IndexError, ValueError
        """
    def contains(self, request_id: Hashable) -> bool:
        """Tell whether a request is claimed now."""
    def release(self, request_id: Hashable, *, after: Any = None) -> None:
        """Drop a request; its committed pages stay cached and evictable.

        Parameters
        ----------
        request_id : hashable
        after : stream or event, optional
            Of cupy or torch, or a stream's handle: on GPU pools nothing writes the request's pages
            before the work that it stands for is done. Not needed for work on the streams that
            were current when the batch was fetched.

        Raises
        ------
        RequestNotFoundError
        ValueError
            `after` is given, but no pool is on a GPU.
        """
    def get_replica(self, context: _Context) -> int:
        """Return the index of the replica that a context's request is claimed on."""
    def get_or_recommend_replica(self, context: _Context) -> int:
        """Return the replica of a claimed request, or the best one for one not claimed yet.

        Longest prefix hit first, then most free pages, then fewest requests, then lowest index.
        Changes nothing.
        """
    def get_req_blocks(self, request_id: Hashable, bundle: int = 0, *, first: int = 0) -> list[int]:
        """Return a request's page ids in logical order, a list of int.

        Parameters
        ----------
        request_id
        bundle : int
            Of ``kvcore.groups.bundles``, where layers have groups. The id behind the last page
            stands for a page that no layer of it reads any more, or that is not reserved yet.
        first : int
            Those from this one on, such as what a reservation has added. Empty behind the last.

        Raises
        ------
        RequestNotFoundError, IndexError
        ValueError
            A negative `first`.

        Notes
        -----
        O(pages returned).
        """
    def fork(self, parent_id: Hashable, *child_ctxs: _Context) -> None:
        """Claim requests that go on from what another one has written; copies nothing yet.

        Parameters
        ----------
        parent_id
            A claimed request. Its tokens written as of its last ``step`` are shared.
        *child_ctxs : context
            Not claimed yet; each holds the parent's written tokens and at least one more, in the
            same namespace. Its ``start_idx`` moves behind them, an ``active_idx`` not behind that
            to ``end_idx``.

        Raises
        ------
        RequestNotFoundError, AlreadyClaimedError, CapacityError
        ValueError
            Other tokens or another namespace than the parent's; nothing has been claimed.

        Notes
        -----
        Pages are shared; the one that is written next is copied when parent or child reserves it,
        whichever comes first. Costs O(pages) and one comparison of the tokens per child.
        """
    def truncate(self, request_id: Hashable, n_tokens: int) -> None:
        """Forget written tokens of a request beyond the first `n_tokens`.

        For draft tokens that were rejected: pages that hold none of the rest are free, those
        reserved ahead as well. Committed pages are never rewritten; the next write into one copies
        it first. Set the context back with ``ctx.rewind(n_tokens)``; ``accept`` does both. With
        states and `max_draft_tokens` the next ``fetch`` sets ``start_idx`` further back, to the
        token whose state was kept.

        Raises
        ------
        RequestNotFoundError
        ValueError
            `n_tokens` outside 0 .. the ``active_idx`` that was fetched last.
        """
    def accept(self, ctx: _Context, n: int) -> None:
        """Take back the draft tokens of a request behind its first `n`, and rewind its context.

        In one call what ``truncate(ctx.request_id, n)`` and ``ctx.rewind(n)`` do:
        where either would be refused, nothing has changed. Then ``update`` the context with the
        token that the model sampled, and ``step``.

        Raises
        ------
        RequestNotFoundError
        ValueError
            `n` outside 1 .. ``end_idx``, or as of ``truncate``.
        """
    def leave_windows(self, request_id: Hashable, n_tokens: int, *, after: object = None) -> int:
        """Give back the pages of windows that no token behind the first `n_tokens` reads.

        For ``keep_windows=True``, where ``step`` gives back none: tells how many of the tokens that
        were stepped are computed by now. `after` as for ``release``. Costs O(pages given back).

        Returns
        -------
        int
            With how many tokens there is more to give back; ``2**63 - 1`` without windows.

        Raises
        ------
        RequestNotFoundError
        ValueError
            More tokens than its pages hold, or fewer than 0; a manager without ``keep_windows``.
        """
    def shared_prefixes(self, batch: Iterable[_Context]) -> list[SharedPrefix]:
        """Find the rows of a batch that hold the same leading pages.

        Returns
        -------
        list of SharedPrefix
            Longest first; nested groups are listed each.

        Notes
        -----
        Read off the prefix tree and the pages that forks share: O(batch x runs), no token is
        compared.
        """
    def fetch(self, batch: Iterable[_Context], num_steps: int = 1) -> list[RaggedKVCacheInputs]:
        """Hand out what the kernels need for a batch, reserving pages that are missing.

        Parameters
        ----------
        batch : sequence of contexts
        num_steps : int
            Steps that run before the next fetch.

        Returns
        -------
        list of RaggedKVCacheInputs
            One per device, replica-major; batch order is kept inside a replica.

        Raises
        ------
        InsufficientBlocksError
            Pages are missing; no context of the batch has changed, one that waited for pages from
            stores still waits.
        CapacityError, RequestNotFoundError, ValueError

        Notes
        -----
        One native call. Costs O(batch) plus O(pages changed since the buffer was last used); after
        a True ``maybe_reserve`` with the same or more steps it cannot fail for memory.

        On a GPU the arrays are copied to it on the current stream, which from then on is
        ordered behind the streams of earlier fetches; the host waits for nothing.
        """
    def step(self, batch: Iterable[_Context], *, after: Any = None) -> NDArray[np.int32]:
        """Commit every page whose tokens are all written to the prefix cache.

        Parameters
        ----------
        batch : sequence of contexts
            After ``update``: ``start_idx`` tokens are written.
        after : stream or event, optional
            As for ``release``: nothing writes the pages that windows have left before the work that
            it stands for is done.

        Returns
        -------
        int32 [n, 3], or [n, 4] where layers have several page tables
            Pages that were swapped for equal cached ones: batch row, column, page, and the bundle.
            Usually empty.

        Raises
        ------
        ValueError
            A context claims more written tokens than its pages hold; nothing has been committed.
            `after` is given, but no pool is on a GPU.

        Notes
        -----
        Costs O(new tokens), whatever the context length; with a host tier also the bytes of the
        pages that are stored there, while other threads may run. Pages that the host tier could not
        take are not there, which the log says ("kvcore"): what is committed stays so.
        """
    def take_copies(self) -> NDArray[np.int32]:
        """Hand out the page copies that a manager without a pool of its own owes.

        Returns
        -------
        int32 [n, 4]
            Replica, source page, destination page, tokens; to be done in this order, before the
            next fetch's kernels run.
        """
    def take_state_copies(self) -> NDArray[np.int32]:
        """Hand out the copies of state slots that a manager without arrays of its own owes.

        Returns
        -------
        int32 [n, 4]
            Replica, State group, source slot, destination slot; to be done in this order, before
            the next fetch's kernels run.
        """
    @overload
    def match_prefix(  # type: ignore[overload-overlap]
        self,
        tokens: _Tokens,
        extra_key: str | None = None,
        cache_salt: str | None = None,
        replica_idx: int = 0,
        *,
        extra_keys: Iterable[tuple[int, int, bytes]] | None = None,
        return_pages: Literal[False] = False,
        touch: bool = False,
        lookahead: Literal[0] = 0,
        out: None = None,
        bundle: int = 0,
    ) -> int:
        """Count the tokens of a prefix that are cached in whole pages; pure unless it is to touch.

        Parameters
        ----------
        tokens : list of int, or array int32 or int64 [n]
        extra_keys : list of (int, int, bytes), optional
            Those of a context that start in front of `n`.
        return_pages : bool
            Also return the page ids, int32.
        touch : bool
            It is a use of these pages, by which they are evicted later.
        lookahead : int
            Also return how many of so many tokens behind the last whole page a cached page has too.
        out : int32 [m], optional
            Where the ids go; contiguous. What is returned is its beginning.
        """
    @overload
    def match_prefix(  # type: ignore[overload-overlap]
        self,
        tokens: _Tokens,
        extra_key: str | None = None,
        cache_salt: str | None = None,
        replica_idx: int = 0,
        *,
        extra_keys: Iterable[tuple[int, int, bytes]] | None = None,
        return_pages: Literal[True],
        touch: bool = False,
        lookahead: Literal[0] = 0,
        out: None = None,
        bundle: int = 0,
    ) -> tuple[int, NDArray[np.int32]]:
        """Count the tokens of a prefix that are cached in whole pages; pure unless it is to touch.

        Parameters
        ----------
        tokens : list of int, or array int32 or int64 [n]
        extra_keys : list of (int, int, bytes), optional
            Those of a context that start in front of `n`.
        return_pages : bool
            Also return the page ids, int32.
        touch : bool
            It is a use of these pages, by which they are evicted later.
        lookahead : int
            Also return how many of so many tokens behind the last whole page a cached page has too.
        out : int32 [m], optional
            Where the ids go; contiguous. What is returned is its beginning.
        """
    @overload
    def match_prefix(  # type: ignore[overload-overlap]
        self,
        tokens: _Tokens,
        extra_key: str | None = None,
        cache_salt: str | None = None,
        replica_idx: int = 0,
        *,
        extra_keys: Iterable[tuple[int, int, bytes]] | None = None,
        return_pages: bool = False,
        touch: bool = False,
        lookahead: Literal[0] = 0,
        out: NDArray[np.int32],
        bundle: int = 0,
    ) -> tuple[int, NDArray[np.int32]]:
        """Count the tokens of a prefix that are cached in whole pages; pure unless it is to touch.

        Parameters
        ----------
        tokens : list of int, or array int32 or int64 [n]
        extra_keys : list of (int, int, bytes), optional
            Those of a context that start in front of `n`.
        return_pages : bool
            Also return the page ids, int32.
        touch : bool
            It is a use of these pages, by which they are evicted later.
        lookahead : int
            Also return how many of so many tokens behind the last whole page a cached page has too.
        out : int32 [m], optional
            Where the ids go; contiguous. What is returned is its beginning.
        """
    @overload
    def match_prefix(
        self,
        tokens: _Tokens,
        extra_key: str | None = None,
        cache_salt: str | None = None,
        replica_idx: int = 0,
        *,
        extra_keys: Iterable[tuple[int, int, bytes]] | None = None,
        return_pages: Literal[False] = False,
        touch: bool = False,
        lookahead: int,
        out: None = None,
        bundle: int = 0,
    ) -> tuple[int, int]:
        """Count the tokens of a prefix that are cached in whole pages; pure unless it is to touch.

        Parameters
        ----------
        tokens : list of int, or array int32 or int64 [n]
        extra_keys : list of (int, int, bytes), optional
            Those of a context that start in front of `n`.
        return_pages : bool
            Also return the page ids, int32.
        touch : bool
            It is a use of these pages, by which they are evicted later.
        lookahead : int
            Also return how many of so many tokens behind the last whole page a cached page has too.
        out : int32 [m], optional
            Where the ids go; contiguous. What is returned is its beginning.
        """
    @overload
    def match_prefix(
        self,
        tokens: _Tokens,
        extra_key: str | None = None,
        cache_salt: str | None = None,
        replica_idx: int = 0,
        *,
        extra_keys: Iterable[tuple[int, int, bytes]] | None = None,
        return_pages: Literal[True],
        touch: bool = False,
        lookahead: int,
        out: None = None,
        bundle: int = 0,
    ) -> tuple[int, NDArray[np.int32], int]:
        """Count the tokens of a prefix that are cached in whole pages; pure unless it is to touch.

        Parameters
        ----------
        tokens : list of int, or array int32 or int64 [n]
        extra_keys : list of (int, int, bytes), optional
            Those of a context that start in front of `n`.
        return_pages : bool
            Also return the page ids, int32.
        touch : bool
            It is a use of these pages, by which they are evicted later.
        lookahead : int
            Also return how many of so many tokens behind the last whole page a cached page has too.
        out : int32 [m], optional
            Where the ids go; contiguous. What is returned is its beginning.
        """
    @overload
    def match_prefix(
        self,
        tokens: _Tokens,
        extra_key: str | None = None,
        cache_salt: str | None = None,
        replica_idx: int = 0,
        *,
        extra_keys: Iterable[tuple[int, int, bytes]] | None = None,
        return_pages: bool = False,
        touch: bool = False,
        lookahead: int,
        out: NDArray[np.int32],
        bundle: int = 0,
    ) -> tuple[int, NDArray[np.int32], int]:
        """Count the tokens of a prefix that are cached in whole pages; pure unless it is to touch.

        Parameters
        ----------
        tokens : list of int, or array int32 or int64 [n]
        extra_keys : list of (int, int, bytes), optional
            Those of a context that start in front of `n`.
        return_pages : bool
            Also return the page ids, int32.
        touch : bool
            It is a use of these pages, by which they are evicted later.
        lookahead : int
            Also return how many of so many tokens behind the last whole page a cached page has too.
        out : int32 [m], optional
            Where the ids go; contiguous. What is returned is its beginning.
        """
    def pin(
        self,
        tokens: _Tokens,
        extra_key: str | None = None,
        cache_salt: str | None = None,
        replica_idx: int = 0,
        *,
        extra_keys: Iterable[tuple[int, int, bytes]] | None = None,
    ) -> PinnedPrefix:
        """Keep the cached whole pages of a prefix from eviction.

        Returns
        -------
        PinnedPrefix
            A context manager; ``num_tokens`` tells how many tokens are kept.

        Notes
        -----
        Costs the match plus O(1). Pinned pages do not count as free.
        """
    def reset_prefix_cache(self) -> bool:
        """Forget every cached page, on every replica and in every tier but shared servers.

        Returns
        -------
        bool
            True where no page is left that was cached. False while requests, pins or holds keep
            some.

        Notes
        -----
        Who holds a page keeps it, and no later request hits it. Nor does one hit what a request
        that ran before computes from then on, until the request was released or truncated to 0.
        Stores are emptied as well, but for those on servers (Redis, Mooncake), whose pages are
        others' too: give another ``fingerprint`` for other weights, or clear them. O(cached pages +
        requests).
        """
