# SPDX-License-Identifier: Apache-2.0
"""What a manager offers where there are stores below its host tier, and to close it."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from types import MappingProxyType, TracebackType
from typing import TYPE_CHECKING, Any
from weakref import finalize

import numpy as np
from numpy.typing import NDArray

from kvcore._hot.below import search_prefix
from kvcore._hot.engine import StepEngine
from kvcore._hot.store_side import StoreSide
from kvcore.context import ContextLike
from kvcore.errors import KVCacheError
from kvcore.layers.layer_map import column_tokens
from kvcore.metrics import TierMetrics
from kvcore.params import KVCacheParams

if TYPE_CHECKING:
    from kvcore.stores.tiers.memory import TierStates
    from kvcore.stores.tiers.onload import Arrival, Onload
    from kvcore.stores.tiers.options import TierOptions
    from kvcore.stores.tiers.stack import TierStack

__all__ = ["TieredCache"]


class TieredCache(StepEngine):
    """Wait for stores, count what they do, and end what works in the background."""

    params: KVCacheParams
    _states: tuple[dict[str, list[Any]], ...]
    _tiers: TierStack | None = None
    _side: StoreSide | None = None
    _requests: Onload | None = None
    _end: finalize[Any, TieredCache] | None = None

    def _begin_tiers(self, options: TierOptions, states: TierStates | None) -> None:
        """Open stores, and have them asked and written to; last of all in a constructor."""
        try:
            tiers = options.opened(self.params, self._mover, states)
        except BaseException:
            self.close()
            raise
        if tiers is None:
            return
        self._tiers = tiers
        self._requests = tiers.onload if options.async_onload else None
        self._side = self._set_below(tiers, self._requests)
        tiers.begin(self._side)
        self._end = finalize(self, tiers.stop)

    # ---- pages on their way down -------------------------------------------------------------

    def flush(self, timeout: float | None = None) -> bool:
        """Wait until every page committed so far has reached all stores.

        Parameters
        ----------
        timeout : float, optional
            Seconds to wait at most.

        Returns
        -------
        bool
            True if they all have it: every page committed since the last time. False after
            `timeout`, or where a store did not take a page, or the host tier lost one before it
            could be written. Pages for which the host tier has no room are in no tier at all. True
            without stores.

        Raises
        ------
        KVCacheError
            The manager is closed, or this is a child of ``os.fork``.
        """
        self._require_open()
        return self._tiers is None or self._tiers.flush(timeout)

    def close(self) -> None:
        """Flush, end all threads, close the stores and give back the memory.

        Stores that are objects of the caller's stay open. Every later call raises KVCacheError; a
        second ``close`` does nothing. Arrays of earlier fetches stay valid.

        Notes
        -----
        ``with manager:`` does it at the end. A manager that is dropped without it ends its threads
        too, and does not wait for pages that are to be written. Calls of other threads that are
        under way end as if they had come before.
        """
        mine = object()
        if self.__dict__.setdefault("_shut", mine) is not mine:
            return
        listener = self._listener
        self._let_go()
        self._states = ()
        if listener is not None:
            listener.close()
        if self._tiers is None:
            return
        try:
            self._tiers.flush_here()
        finally:
            self._tiers.close(None)
            if self._end is not None:
                self._end.detach()

    def __enter__(self) -> Any:
        """Return the manager."""
        self._require_open()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Close it."""
        self.close()

    @property
    def tier_metrics(self) -> Mapping[str, TierMetrics]:
        """Counters of each tier by its name; read-only, a copy.

        "host"; then the stores in their order: "disk", "redis" and "mooncake" for kvcore's own, for
        others the name of their class in lower case. Of several disks each is "disk:" and its first
        path, of several other stores of a class each has its number behind the name, from 1 on.
        Empty without tiers.
        """
        self._require_open()
        found: dict[str, TierMetrics] = {}
        if self._mover is not None:
            found["host"] = self._host_metrics()
        if self._tiers is not None:
            column = column_tokens(self.params)
            missed = self._core.metrics.missed_pages
            for name, each in self._tiers.metrics(missed).items():
                found[name] = replace(each, tokens=each.hits * column)
        return MappingProxyType(found)

    def reset_metrics(self) -> None:
        """Set every counter to zero, those of tiers too, the peak to what is in use."""
        self._core.reset_metrics()
        self._reset_times()
        if self._tiers is not None:
            self._tiers.reset_metrics()

    def _host_metrics(self) -> TierMetrics:
        counts, size = self._core.metrics, self.params.bytes_per_page
        return TierMetrics(
            hits=counts.loaded_tokens // column_tokens(self.params),
            misses=counts.missed_pages,
            bytes_in=counts.stored_pages * size,
            bytes_out=counts.loaded_pages * size,
            pages_waiting=0 if self._side is None else self._side.waiting,
            tokens=counts.loaded_tokens,
        )

    # ---- pages on their way up ---------------------------------------------------------------

    def prefetch(
        self,
        tokens: Sequence[int] | NDArray[np.int32] | NDArray[np.int64],
        extra_key: str | None = None,
        cache_salt: str | None = None,
        replica_idx: int = 0,
        *,
        extra_keys: Iterable[tuple[int, int, bytes]] | None = None,
    ) -> int:
        """Begin to bring a prefix from stores into the host tier.

        Parameters
        ----------
        tokens : list of int, or array int32 or int64 [n]
        extra_key, cache_salt : str, optional
        replica_idx : int
        extra_keys : list of (int, int, bytes), optional
            Those of a context that start in front of `n`.

        Returns
        -------
        int
            Tokens that are on the device, in the host tier, or on their way there: whole pages.
            Without stores those on the device.

        Raises
        ------
        KVCacheError
            The manager is closed, or this is a child of ``os.fork``.
        IndexError, ValueError, TypeError
            As of ``match_prefix``.

        Notes
        -----
        Asks the stores which pages they have, and returns; threads read them.
        """
        self._require_open()
        if self._side is None or self._tiers is None:
            return self.match_prefix(
                tokens, extra_key, cache_salt, replica_idx, extra_keys=extra_keys
            )
        self._tiers.require_here()
        keys = None if extra_keys is None else list(extra_keys)
        search = search_prefix(
            self._side, tokens, extra_key, cache_salt, replica_idx, extra_keys=keys
        )
        column = column_tokens(self.params)
        if search is None:
            return len(tokens) // column * column
        return self._tiers.prefetch(search) * column

    def poll(self) -> list[Hashable]:
        """Return the requests whose pages have arrived since the last call.

        Each is reserved again: its context stands behind the longer hit.

        Returns
        -------
        list of request ids
            Empty without ``async_onload``.

        Raises
        ------
        KVCacheError
            The manager is closed.

        Notes
        -----
        Moves contexts: nobody else uses them meanwhile. O(requests that wait).
        """
        self._require_open()
        arrived = [] if self._requests is None else self._requests.take()
        return [name for name, arrival in arrived if self._reserve_again(arrival)]

    def wait(self, ctx: ContextLike, timeout: float | None = None) -> bool:
        """Wait for the pages of a request, and reserve it again.

        Parameters
        ----------
        ctx : context
        timeout : float, optional
            Seconds to wait at most.

        Returns
        -------
        bool
            False where they have not arrived in time. True where none is on its way.

        Raises
        ------
        KVCacheError
            The manager is closed.
        """
        self._require_open()
        if self._requests is None:
            return True
        found = self._requests.take_one(ctx.request_id, timeout)
        if isinstance(found, bool):
            return found
        self._reserve_again(found)
        return True

    @contextmanager
    def _await_pages(self, batch: Iterable[ContextLike]) -> Iterator[None]:
        """Wait for the pages of contexts that are to run now.

        Where the body raises, they wait again and stand where they stood.
        """
        moved: list[tuple[Arrival, int, int]] = []
        try:
            for context in batch:
                # One that `fetch` refuses has no id.
                if getattr(context, "pending", True) and hasattr(context, "request_id"):
                    self._await(context, moved)
            yield
        except BaseException:
            for arrival, start, active in reversed(moved):
                self._wait_again(arrival, start, active)
            raise

    def _await(self, context: ContextLike, moved: list[tuple[Arrival, int, int]]) -> None:
        assert self._requests is not None
        found = self._requests.take_one(context.request_id, None)
        if not isinstance(found, bool):
            moved.append((found, found.context.start_idx, found.context.active_idx))
            self._reserve_again(found)

    def _wait_again(self, arrival: Arrival, start: int, active: int) -> None:
        assert self._requests is not None
        with suppress(KVCacheError):  # released meanwhile, or the manager is closed
            if arrival.context.start_idx != start:
                self._stand_back(arrival.context, start, active)
            self._requests.put_back(arrival)

    def _reserve_again(self, arrival: Arrival) -> bool:
        """Let a request that has pages have its longer hit; return whether it is still claimed."""
        try:
            if len(self.get_req_blocks(arrival.context.request_id)):
                self.maybe_reserve(arrival.context, max_hit=arrival.max_hit)
        except KVCacheError:  # released meanwhile
            return False
        return True
