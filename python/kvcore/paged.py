# SPDX-License-Identifier: Apache-2.0
"""PagedKVCacheManager: pages of K and V for the requests of an engine."""

from __future__ import annotations

import time
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np

from kvcore import sizing
from kvcore._core import CacheManager
from kvcore._hot.inputs import RaggedKVCacheInputs
from kvcore.cache_events import TellsEvents, event_pages
from kvcore.cache_metrics import CacheMetrics
from kvcore.cache_sizing import CacheSizing
from kvcore.device import Device, checked_devices
from kvcore.layers.layer_map import LayerMap, column_tokens, core_groups, pages_per_column
from kvcore.moving.methods import MovesSequences
from kvcore.ops import increment
from kvcore.params import KVCacheParams, require_count
from kvcore.policies import EvictionPolicy, Priority, resolved
from kvcore.pools import make_copier, make_mover, make_shards, pools_on_gpus, whole_pages
from kvcore.splits import by_replica, data_parallel_splits
from kvcore.states import StateArrays, chosen_states, intervals
from kvcore.stores.tiers.methods import TieredCache
from kvcore.support.arguments import flag, integer
from kvcore.symbols import InputSymbols, input_symbols
from kvcore.tenants import checked_quotas
from kvcore.tier_rules import checked_tier

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from kvcore.integrations.max.views import PagedKVCacheCollection
    from kvcore.stores import BlockStore

__all__ = ["PagedKVCacheManager"]


class PagedKVCacheManager(CacheSizing, CacheMetrics, MovesSequences, TellsEvents, TieredCache):
    """Own the KV cache of an engine: pages, prefix reuse, what the kernels of a step need.

    Parameters
    ----------
    params : KVCacheParams
    max_batch_size : int
        Requests claimed at a time over all replicas; a replica takes
        ``ceil(max_batch_size / data_parallel_degree)``.
    max_seq_len : int
        Tokens of the longest request.
    num_layers, page_size : int, optional
        Re-derive `params` where given.
    devices : sequence of str or Device
        "cpu", "cuda:0", ...: as many as ``params.n_devices``, replica-major. On GPUs pools, tables
        and lengths are cupy arrays; what a call does there it does on the current stream.
    session
        Accepted for call compatibility, not used.
    available_cache_memory : int, optional
        Bytes over all devices. Exactly one of this and `num_pages` is given.
    zmq_endpoint_base : str, optional
        With prefix caching, a message to a PULL socket at ``<base>-reset_prefix_cache`` resets the
        cache of every replica. Needs pyzmq. An endpoint has one manager, none in a forked child.
    enable_runtime_checks : bool
        Check every conservation law after every call, and that runs are followed by ``update`` and
        ``step``: slow, for tests and for finding bugs.
    num_pages : int, optional
        Pages per replica.
    blocks : "allocate", None, or list of one array per device
        The pool: allocated, none (page ids only), or the caller's own.
    first_page : int
        Where page ids begin: all pools have so many pages more, the caller's.
    dedup : bool
        ``step`` swaps a page for an equal cached one.
    partial_page_reuse : bool or int
        A prefix hit may end inside a page, of which so many tokens at least are then copied; True
        is 1, False (or 0) never.
    eviction : str or kvcore.policies.EvictionPolicy
        Which cached pages go first when memory is full.
    clock : callable, optional
        Returns seconds, by which priorities of contexts end; asked with "priority" alone.
    reserve_chunks : bool
        Reserve what runs next alone. Else layers that keep every token get pages for all of a
        request at once, which so is not short of them later.
    max_draft_tokens : int
        Where layers have windows, chunks or a state: so many of the tokens written last may be
        truncated. Pages of windows are given back that much later; with two `num_states` for each
        request, the state in front of its drafts is kept in the second one.
    keep_windows : bool
        ``step`` gives back no page that a window has passed; ``leave_windows`` does.
    quotas : dict of str to (reserved_pages, max_pages), optional
        Of a ``tenant=`` and each replica: pages that all others leave it, and the most that it may
        hold, None for no ceiling.
    num_states : int, optional
        Where layers keep a state: its slots in each replica, one for each request at least, two
        for drafts; those beyond are checkpoints, where others begin. By default that many, one
        checkpoint for each request, and up to 16 where an eighth of the memory holds them.
    num_host_states : int, optional
        With a host tier too: its slots in each replica for checkpoints, by default in half of
        ``host_kvcache_swap_space_gb``; with 0 checkpoints stay on the device.
    write_policy : {"write_through", "write_through_selective", "write_back"}
        With a host tier, a cached page is copied there when it enters the cache, when it was used
        `write_threshold` times, or when it is about to be evicted.
    write_threshold : int
        1 .. 255. Uses are the ``step`` that brings the page, and each request that takes it over
        from the cache or brings it again.
    host_eviction : str or kvcore.policies.EvictionPolicy
        With a host tier: which of its pages go first when it is full. "priority" only where
        `eviction` is "priority" too.
    host_min_priority : int
        With a host tier and ``eviction="priority"``: pages of a lower priority are not copied
        there, nor what follows them in a prompt.
    tiers : list of str or kvcore.stores.BlockStore, optional
        Where pages go below the device, in this order: "host:64MiB" (of each replica; first, and
        the same as ``enable_kvcache_swapping_to_host``), "disk:/var/cache/kv:200GiB", or stores.
        These get a host tier if there is none, of at most 1 GiB or what two requests need.
    fingerprint : bytes or str, optional
        Names the weights, which stores tell apart by layers, heads and dtype alone without it.
    async_onload : bool
        ``maybe_reserve`` does not wait for pages from stores: see ``poll``.
    store_timeout : float
        Seconds that a call of a store may take before it is a miss.
    max_write_wait : float
        Seconds that a ``step`` waits where half of the host tier is not in stores yet.
    layerwise_loads : bool
        On GPUs, pages come from the host tier layer by layer: ``kvcore.ops`` wait for the layer
        that they work on alone, kernels of your own by ``ops.wait_layer``.
    events : bool or int
        Keep what enters and leaves the caches for ``take_events``, of so many pages; True: 65,536.

    Raises
    ------
    CapacityError
        The memory does not hold one page.
    ValueError, TypeError, ImportError

    Notes
    -----
    Thread-safe: any number of threads may call any method. A call that raises or returns "no"
    leaves everything as it was.

    Examples
    --------
    >>> from kvcore import KVCacheParams, PagedKVCacheManager, TextGenerationContext
    >>> params = KVCacheParams("float32", 1, 16, 1, page_size=1, enable_prefix_caching=True)
    >>> mgr = PagedKVCacheManager(params, max_batch_size=4, max_seq_len=64, num_pages=128)
    >>> ctx = TextGenerationContext("r1", [10, 11, 12, 13, 14])
    >>> mgr.external_claim(ctx.request_id)
    >>> mgr.maybe_reserve(ctx), mgr.num_free_blocks
    (True, 123)
    """

    def __init__(
        self,
        params: KVCacheParams,
        max_batch_size: int,
        max_seq_len: int,
        num_layers: int | None = None,
        devices: Sequence[Device | str] = ("cpu",),
        session: object = None,  # noqa: ARG002 - call compatibility
        available_cache_memory: int | None = None,
        zmq_endpoint_base: str | None = None,
        page_size: int | None = None,
        enable_runtime_checks: bool = False,  # noqa: FBT001, FBT002 - the seed's position
        *,
        num_pages: int | None = None,
        blocks: Any = "allocate",
        dedup: bool = True,
        partial_page_reuse: bool | int = True,
        eviction: EvictionPolicy | str = "lru",
        clock: Callable[[], float] = time.monotonic,
        reserve_chunks: bool = False,
        max_draft_tokens: int = 0,
        quotas: Mapping[str, tuple[int, int | None]] | None = None,
        num_states: int | None = None,
        num_host_states: int | None = None,
        write_policy: str = "write_through",
        write_threshold: int = 2,
        host_eviction: EvictionPolicy | str = "lru",
        host_min_priority: int = 0,
        tiers: Sequence[str | BlockStore] | None = None,
        fingerprint: bytes | str | None = None,
        async_onload: bool = False,
        store_timeout: float = 5.0,
        max_write_wait: float = 1.0,
        layerwise_loads: bool = False,
        events: bool | int = False,
        first_page: int = 0,
        keep_windows: bool = False,
    ) -> None:
        # With sockets and stores, for which `import kvcore` need not wait.
        from kvcore.observe.zmq_reset import ResetListener
        from kvcore.stores.tiers.options import TierOptions

        if getattr(self, "_core", None) is not None:
            raise RuntimeError("this PagedKVCacheManager is initialised already; make another one")
        params = sizing.rederived(params, num_layers=num_layers, page_size=page_size)
        require_count(max_batch_size=max_batch_size, max_seq_len=max_seq_len)
        slots = chosen_states(
            params,
            max_batch_size,
            num_states,
            max_seq_len=max_seq_len,
            max_draft_tokens=integer("max_draft_tokens", max_draft_tokens),
            available_cache_memory=available_cache_memory,
            num_pages=num_pages,
        )
        options = TierOptions.of(
            tiers,
            params,
            fingerprint,
            async_onload=async_onload,
            store_timeout=store_timeout,
            max_write_wait=max_write_wait,
            has_pool=blocks is not None,
        )
        pages = sizing.chosen_pages(params, available_cache_memory, num_pages, slots, first_page)
        params = options.with_host_tier(params, pages, max_seq_len, num_host_states)
        host_states = sizing.host_states_per_replica(params, num_host_states)
        rules = checked_tier(
            params, write_policy, write_threshold, host_eviction, host_min_priority
        )
        places = checked_devices(devices, params.n_devices)
        limits = checked_quotas(quotas, pages)
        most_event_pages = event_pages(events)
        gpus = pools_on_gpus(places, params, layerwise_loads) if blocks is not None else None
        shards = make_shards(params, places, pages + first_page, blocks)
        host_pages = 0 if blocks is None else sizing.host_pages_per_replica(params, host_states)
        host_slots = host_states if host_pages else 0
        has_arrays = slots > 0 and blocks is not None
        states = StateArrays(params, places, slots, gpus, host_slots) if has_arrays else None
        core = CacheManager(
            num_blocks=pages,
            page_size=column_tokens(params),
            max_sequences=sizing.batch_per_replica(params, max_batch_size),
            max_seq_len=max_seq_len,
            num_replicas=params.data_parallel_degree,
            prefix_caching=params.enable_prefix_caching,
            dedup=dedup,
            partial_page_reuse=int(partial_page_reuse),
            host_pages=host_pages,
            eviction=eviction,
            groups=core_groups(params),
            reserve_chunks=flag("reserve_chunks", reserve_chunks),
            max_draft_tokens=max_draft_tokens,
            quotas=list(limits.values()),
            states=intervals(params),
            num_states=slots,
            num_host_states=host_slots,
            **rules,
            event_pages=most_event_pages,
            first_page=first_page,
            keep_windows=flag("keep_windows", keep_windows),
            **options.core_arguments(has_keys=most_event_pages > 0),
        )
        super().__init__(
            core,
            shards=shards,
            copier=whole_pages(make_copier(shards, gpus), params, shards),
            mover=make_mover(shards, places, host_pages, gpus, core._late_reads),  # noqa: SLF001
            gpus=gpus,
            # Made last: what failed before would hold the endpoint as long as its traceback.
            listener=(
                ResetListener(zmq_endpoint_base)
                if zmq_endpoint_base is not None and params.enable_prefix_caching
                else None
            ),
            clock=clock if resolved(eviction)[0] == Priority.name else None,
            layers=LayerMap.of(params),
            pages_per_column=pages_per_column(params),
            runtime_checks=enable_runtime_checks,
            tenants=tuple(limits),
            state_groups=len(params.state_groups),
            states=states,
        )
        self._quotas = MappingProxyType(limits)
        self._fingerprint = options.fingerprint
        self._states = () if states is None else states.arrays
        self._host_states = host_states
        self.params, self.devices = params, places
        self.max_batch_size, self.max_seq_len = max_batch_size, max_seq_len
        self._begin_tiers(options, states if host_slots else None)

    # ---- pages ---------------------------------------------------------------------------
    @property
    def quotas(self) -> Mapping[str, tuple[int, int | None]]:
        """Reserved and most pages of each tenant, of each replica; read-only."""
        return self._quotas

    @property
    def states(self) -> tuple[dict[str, list[Any]], ...]:
        """The arrays of each State group by name, [num_states, layers, ...] on each device.

        () without such groups, and with ``blocks=None``. What is in a slot is the model's: the
        manager copies slots, and clears none.
        """
        return self._states

    # ---- batches -------------------------------------------------------------------------
    def get_data_parallel_splits(
        self, context_batch: Sequence[Any]
    ) -> np.ndarray[Any, np.dtype[np.int64]]:
        """Count the requests of each replica in a batch grouped by replica.

        Returns
        -------
        int64 [replicas + 1]
            ``[0, n0, n0 + n1, ...]``

        Raises
        ------
        ValueError
            The batch is not in order of replicas.
        """
        homes = [self.get_replica(context) for context in context_batch]
        return data_parallel_splits(homes, self.num_replicas)

    def fetch_collection(
        self, batch: Iterable[Any], num_steps: int = 1
    ) -> list[PagedKVCacheCollection]:
        """Hand out what ``fetch`` does as one view per device.

        Parameters
        ----------
        batch : sequence of contexts
        num_steps : int
            Steps that run before the next fetch.

        Raises
        ------
        ValueError
            The manager has no pool.
        InsufficientBlocksError, CapacityError, RequestNotFoundError
            As for ``fetch``.

        Notes
        -----
        Costs a fetch plus O(batch). Loads and stores of a view raise InvalidHandleError once their
        request was released or has lost the page.
        """
        from kvcore.integrations.max.views import PagedKVCacheCollection

        self._require_open()
        if self._shards[0][0][0] is None:
            raise ValueError("blocks is None: this manager has no pool to see, use fetch")
        contexts = list(batch)
        inputs = self.fetch(contexts, num_steps)
        homes = [self.get_replica(context) for context in contexts]
        names = by_replica([each.request_id for each in contexts], homes, self.num_replicas)
        each_bundle = range(len(pages_per_column(self.params)))
        claims = [tuple(self._row_claims(rows, bundle) for bundle in each_bundle) for rows in names]
        shards = self.params.tensor_parallel_degree
        return [
            PagedKVCacheCollection(each, kv_params=self.params, guard=claims[i // shards])
            for i, each in enumerate(inputs)
        ]

    def increment_cache_lengths(
        self, kv_cache_inputs: Sequence[RaggedKVCacheInputs], prev_model_inputs: Any
    ) -> list[RaggedKVCacheInputs]:
        """Advance the inputs of a multi-step run by one step.

        Parameters
        ----------
        kv_cache_inputs : sequence of RaggedKVCacheInputs
            One per device, as fetched or as returned by the previous call; not changed.
        prev_model_inputs
            An object with ``input_row_offsets`` uint32 [B + 1] and, with several replicas,
            ``data_parallel_splits`` [replicas + 1]; or a tuple ``(x, row_offsets)``; or the row
            offsets themselves.

        Returns
        -------
        list of RaggedKVCacheInputs
            The same pool and table; ``cache_lengths[i] += row_offsets[i + 1] - row_offsets[i]``,
            ``max_lengths`` without its first row. The manager's own state moves only in ``step``.

        Raises
        ------
        ValueError
            Row offsets that do not belong to these inputs, or no row of ``max_lengths`` left.
        """
        return increment.increment_cache_lengths(
            kv_cache_inputs, prev_model_inputs, self.num_replicas
        )

    def input_symbols(
        self, devices: Sequence[Device | str] | None = None, num_layers: int | None = None
    ) -> list[InputSymbols]:
        """Name each field of the fetched inputs with dtype and symbolic shape, per device.

        Returns
        -------
        list of InputSymbols
            One per device; its fields are those of RaggedKVCacheInputs, or a pair or None as there.
        """
        params = sizing.rederived(self.params, num_layers=num_layers)
        places = self.devices if devices is None else tuple(Device.parse(d) for d in devices)
        return [input_symbols(params, device) for device in places]

    def __repr__(self) -> str:
        stats = [self._core.stats(r) for r in range(self.num_replicas)]
        total = sum(s.total_pages for s in stats)
        available = sum(s.available_pages for s in stats)
        evictable = sum(s.evictable_pages for s in stats)
        return (
            f"PagedKVCacheManager({total} pages of {self.params.page_size} tokens: "
            f"{available - evictable} free, {total - available} used, {evictable} evictable; "
            f"{sum(s.num_sequences for s in stats)} requests)"
        )
