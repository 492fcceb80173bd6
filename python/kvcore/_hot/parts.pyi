# SPDX-License-Identifier: Apache-2.0
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvcore._core import CacheManager
from kvcore._hot.claims import RowClaims
from kvcore._hot.prefixes import HeldPages
from kvcore._hot.store_side import StoreSide
from kvcore.backends.protocol import Copier, DevicePools, Mover, Shard
from kvcore.layers.layer_map import LayerMap
from kvcore.metrics import KVCacheMetrics
from kvcore.observe.zmq_reset import ResetListener
from kvcore.pools import StateArrays

class EngineParts:
    """Hold the parts of an engine: claims, the walk of batches, what settles copies, makes inputs.

    The caller's: `copier`, `mover`, `gpus`, `listener`, `clock`, each None where there is none.
    """

    def __init__(
        self,
        core: CacheManager,
        *,
        shards: list[list[Shard]],
        copier: Copier | None,
        mover: Mover | None,
        gpus: DevicePools | None,
        listener: ResetListener | None,
        layers: LayerMap | None = None,
        pages_per_column: tuple[int, ...] = (1,),
        runtime_checks: bool,
        clock: Callable[[], float] | None = None,
        tenants: tuple[str, ...] = (),
        state_groups: int = 0,
        states: StateArrays | None = None,
    ) -> None: ...
    @property
    def _core(self) -> CacheManager: ...
    @property
    def _shards(self) -> list[list[Shard]]: ...
    @property
    def _copier(self) -> Copier | None: ...
    @property
    def _mover(self) -> Mover | None: ...
    @property
    def _gpus(self) -> DevicePools | None: ...
    @property
    def _listener(self) -> ResetListener | None: ...
    def _row_claims(self, request_ids: list[Hashable], bundle: int = 0) -> RowClaims: ...
    def _counters(self) -> KVCacheMetrics: ...
    def _set_below(self, below: Any, onload: Any = None) -> StoreSide: ...
    def _time_calls(self, on: bool) -> None: ...
    def _call_times(self) -> dict[str, tuple[list[tuple[float, int]], float]]: ...
    def forget(self, pages: Sequence[int] | NDArray[np.integer[Any]], replica_idx: int = 0) -> int:
        """Take cached pages out of the cache whose contents are wrong, say of a load that failed.

        Parameters
        ----------
        pages : sequence of int, or integer array [n]
            Ids, with groups of any bundle. Those of free pages are passed over.
        replica_idx : int
            Whose they are.

        Returns
        -------
        int
            Pages that left the device's cache: these, and what was cached behind them.

        Raises
        ------
        InvalidHandleError
            An id that is no page's; nothing has changed.
        IndexError, TypeError, ValueError

        Notes
        -----
        Nothing finds them any more, on the device or in the host tier. Requests, pins and holds
        that have such pages keep them. A request runs on, but what it writes from the first of them
        on is not cached, until ``truncate`` has cut it there or in front: then it computes them
        anew. Pages that nobody has are free. What was written to stores below the host tier stays
        there, and a page that a request has begun as a copy of a forgotten one, and cached, as well
        (``partial_page_reuse``). Costs O(cached pages + requests).
        """
    def hold(
        self, pages: Sequence[int] | NDArray[np.integer[Any]], replica_idx: int = 0
    ) -> HeldPages:
        """Keep pages from being evicted, or handed out to anybody else, whoever releases them.

        Parameters
        ----------
        pages : sequence of int, or integer array [n]
            Ids of pages that requests hold or that are cached, with groups of any bundle: all pages
            of the same tokens are held then.
        replica_idx : int
            Whose they are.

        Returns
        -------
        HeldPages
            A context manager, with ``let_go()``. Holds nest.

        Raises
        ------
        InvalidHandleError
            An id that is no page's, or a free page's; nothing has changed.
        CapacityError
            The quotas of tenants leave no room for cached pages to be held.
        IndexError, TypeError, ValueError

        Notes
        -----
        For who copies to or from them meanwhile. What is in front of a cached page is kept too. A
        request may go on writing into its own pages. ``reset_prefix_cache`` forgets held pages that
        no request has: they are free once they are let go. Costs O(pages), and O(cached pages) to
        find them.
        """
    def next_pages(self, replica_idx: int = 0) -> NDArray[np.int32]:
        """List the pages that can be had, in the order in which requests would be given them.

        Parameters
        ----------
        replica_idx : int
            Whose they are.

        Returns
        -------
        int32 [n]
            Free pages, then cached ones as they would be evicted now.

        Raises
        ------
        ValueError
            With groups of layers, and with quotas, where it depends on who asks for how many.
        IndexError, TypeError

        Notes
        -----
        For tests, and for looking at a cache; changes nothing. Exact with ``"lru"``; other policies
        may have a run wait that another one follows now, which is listed right behind that one.
        Costs O(pages).
        """
    def _reset_times(self) -> None: ...
    def _require_open(self) -> None: ...
    def _let_go(self) -> None: ...
    def _set_copier(self, copier: Copier | None) -> None: ...
