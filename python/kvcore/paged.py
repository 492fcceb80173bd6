# SPDX-License-Identifier: Apache-2.0
"""PagedKVCacheManager: pages of K and V for the requests of an engine."""

from __future__ import annotations

import io
import logging
import os
import time
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import fields, replace
from types import MappingProxyType, TracebackType
from typing import TYPE_CHECKING, Any, BinaryIO, Literal, TypeVar, overload
from weakref import finalize

import numpy as np
from numpy.typing import NDArray

from kvcore import sizing
from kvcore._core import CacheManager
from kvcore.context import ContextLike, TextGenerationContext
from kvcore.device import Device, checked_devices
from kvcore.errors import KVCacheError
from kvcore.layers.kinds import MAX_CHUNK_TOKENS
from kvcore.layers.layer_map import LayerMap, column_tokens, core_groups, pages_per_column
from kvcore.metrics import (
    EvictionMetrics,
    GroupMetrics,
    KVCacheMetrics,
    ReplicaMetrics,
    StateMetrics,
    TenantMetrics,
    TierMetrics,
)
from kvcore.native.contexts import RaggedKVCacheInputs
from kvcore.native.engine import (
    CacheCleared,
    PagesRemoved,
    PagesStored,
    StepEngine,
    StoreSide,
    search_prefix,
    take_events,
)
from kvcore.ops import increment
from kvcore.params import KVCacheParams, require_count
from kvcore.policies import LRU, EvictionPolicy, Priority, resolved
from kvcore.pools import (
    InputSymbols,
    StateArrays,
    chosen_states,
    input_symbols,
    intervals,
    make_copier,
    make_mover,
    make_shards,
    pools_on_gpus,
    whole_pages,
)
from kvcore.stores.tiers.options import TierOptions
from kvcore.support.arguments import MOST_INT64, flag, integer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from kvcore.integrations.max.views import PagedKVCacheCollection
    from kvcore.observe.zmq_reset import ResetListener
    from kvcore.snapshots.cache import RestoredCache, SavedCache
    from kvcore.snapshots.request import Pools, SavedSequence
    from kvcore.stores import BlockStore
    from kvcore.stores.tiers.memory import TierStates
    from kvcore.stores.tiers.onload import Arrival, Onload
    from kvcore.stores.tiers.stack import TierStack

__all__ = ["PagedKVCacheManager"]


def _listener(zmq_endpoint_base: str | None) -> ResetListener | None:
    if zmq_endpoint_base is None:
        return None
    from kvcore.observe.zmq_reset import ResetListener  # with sockets, which others do without

    return ResetListener(zmq_endpoint_base)


class PagedKVCacheManager(StepEngine):
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

    params: KVCacheParams
    _quotas: Mapping[str, tuple[int, int | None]]
    _host_states: int
    _has_warned = False  # of slots that are too few for checkpoints
    _states: tuple[dict[str, list[Any]], ...]
    _fingerprint: bytes
    _tiers: TierStack | None = None
    _side: StoreSide | None = None
    _requests: Onload | None = None
    _end: finalize[Any, PagedKVCacheManager] | None = None

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
            listener=_listener(zmq_endpoint_base if params.enable_prefix_caching else None),
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

    # ---- counts ----------------------------------------------------------------------------------
    @property
    def num_replicas(self) -> int:
        """Data parallel replicas."""
        return self.params.data_parallel_degree

    @property
    def total_num_pages(self) -> int:
        """Pages of each replica."""
        return self._core.stats(0).total_pages

    @property
    def num_free_blocks(self) -> int:
        """Pages that a request could get, over all replicas; evictable cached ones count."""
        return sum(self._core.stats(r).available_pages for r in range(self.num_replicas))

    @property
    def num_cached_blocks(self) -> int:
        """Pages in the prefix cache, over all replicas; those that requests share count too."""
        return sum(self._core.stats(r).cached_pages for r in range(self.num_replicas))

    @property
    def free_blocks_pct(self) -> float:
        """Share of pages that a request could get, 0..1, mean over replicas."""
        return self.num_free_blocks / (self.total_num_pages * self.num_replicas)

    @property
    def used_blocks_pct(self) -> float:
        """Share of pages that requests and pins hold, 0..1, mean over replicas."""
        return 1.0 - self.free_blocks_pct

    @property
    def total_num_host_pages(self) -> int:
        """Pages that the host tier's space holds, over all replicas; 0 without a host tier."""
        return sizing.host_pages(self.params, self._host_states)

    @property
    def host_committed_block_pct(self) -> float:
        """Share of host pages that hold cached pages, 0..1; 0.0 without a host tier."""
        stats = [self._core.stats(r) for r in range(self.num_replicas)]
        cached = sum(each.host_cached_pages for each in stats)
        return cached / max(1, sum(each.host_pages for each in stats))

    @property
    def metrics(self) -> KVCacheMetrics:
        """Counters summed over replicas; a copy. O(replicas + requests)."""
        return self._counters()

    @property
    def replica_metrics(self) -> tuple[ReplicaMetrics, ...]:
        """Pages of each replica, in their order. O(replicas)."""
        names = [field.name for field in fields(ReplicaMetrics)]
        each = [self._core.stats(r) for r in range(self.num_replicas)]
        return tuple(
            ReplicaMetrics(**{name: getattr(stats, name) for name in names}) for stats in each
        )

    @property
    def eviction_metrics(self) -> dict[str, EvictionMetrics]:
        """Cached pages that went, "device" and "host" for a host tier, by reason. O(replicas)."""
        found = self._core.metrics
        kept = {"device": found.evicted}
        if self.total_num_host_pages:
            kept["host"] = found.host_evicted
        return {tier: _summed(EvictionMetrics, [counts]) for tier, counts in kept.items()}

    @property
    def group_metrics(self) -> tuple[GroupMetrics, ...]:
        """Pages of each attention group, in their order; empty without groups. O(pages).

        Of models where every page is one of all layers, ``metrics`` counts what went to the host
        tier and back.
        """
        each = [self._core.group_stats(r) for r in range(self.num_replicas)]
        return tuple(_summed(GroupMetrics, of_group) for of_group in zip(*each, strict=True))

    @property
    def tenant_metrics(self) -> dict[str, TenantMetrics]:
        """Pages of each tenant that has a quota; empty without quotas. O(tenants + requests)."""
        each = [self._core.tenant_stats(r) for r in range(self.num_replicas)]
        summed = [TenantMetrics.summed(of_tenant) for of_tenant in zip(*each, strict=True)]
        return dict(zip(self._quotas, summed, strict=True))

    @property
    def state_metrics(self) -> StateMetrics:
        """Slots of states here and in the host tier, and what was done with checkpoints. O(1).

        Zeros without State groups. The log of "kvcore" warns once where most checkpoints are
        evicted before a request begins with one.
        """
        stats = [self._core.state_stats(r) for r in range(self.num_replicas)]
        found = _summed(StateMetrics, stats)
        if not self._has_warned:
            self._warn_of_evictions(found)
        return found

    def _warn_of_evictions(self, found: StateMetrics) -> None:
        evicted, hits = found.evicted_checkpoints, found.checkpoint_hits
        if evicted < _MANY_EVICTIONS * max(hits, found.total_slots, 1):
            return
        self._has_warned = True
        _log.warning(
            "%d checkpoints of states were evicted for others, and %d requests began with one: "
            "%d slots are too few for the prompts that come again; give more num_states",
            evicted,
            hits,
            found.total_slots,
        )

    def check_integrity(self) -> None:
        """Check every conservation law: O(everything).

        Raises
        ------
        AssertionError
            Names the law that does not hold.
        """
        self._core.check_integrity()

    # ---- sizes before there is a cache -----------------------------------------------------------
    @classmethod
    def estimated_memory_size(
        cls,
        params: KVCacheParams,
        max_batch_size: int,
        max_seq_len: int,
        num_layers: int,
        available_cache_memory: int,
        devices: Sequence[Device | str],  # noqa: ARG003 - params.n_devices counts them
        *,
        max_chunk_tokens: int = MAX_CHUNK_TOKENS,
        **kwargs: object,  # noqa: ARG003 - call compatibility
    ) -> int:
        """Estimate the bytes of the cache over all replicas.

        Per replica the smaller of its share of the memory and what the largest batch of longest
        sequences needs.

        Parameters
        ----------
        params : KVCacheParams
        max_batch_size, max_seq_len : int
            Requests over all replicas, tokens of the longest.
        num_layers : int
            Re-derives `params`.
        available_cache_memory : int
            Bytes over all devices.
        max_chunk_tokens : int
            Tokens of a request that run in one step at most, for layers with a window.
        devices, **kwargs
            Not used: ``params.n_devices`` counts the devices.
        """
        params = sizing.rederived(params, num_layers=num_layers)
        return sizing.estimated_memory_size(
            params, max_batch_size, max_seq_len, available_cache_memory, max_chunk_tokens
        )

    @classmethod
    def max_supported_sequence_length(
        cls,
        params: KVCacheParams,
        num_layers: int,
        memory_available: int,
        *,
        max_chunk_tokens: int = MAX_CHUNK_TOKENS,
    ) -> int:
        """Return the longest sequence in tokens, a multiple of the page; 0 when no page fits.

        `memory_available` counts bytes over all devices; a sequence has those of one replica.
        """
        params = sizing.rederived(params, num_layers=num_layers)
        return sizing.max_supported_sequence_length(params, memory_available, max_chunk_tokens)

    @classmethod
    def infer_optimal_batch_size(
        cls,
        params: KVCacheParams,
        max_seq_len: int,
        num_layers: int,
        available_cache_memory: int,
        devices: Sequence[Device | str],  # noqa: ARG003 - params.n_devices counts them
        *,
        max_chunk_tokens: int = MAX_CHUNK_TOKENS,
        **kwargs: object,  # noqa: ARG003 - call compatibility
    ) -> int:
        """Return the largest batch of longest sequences that fits; 0 when not one does.

        Over all replicas; the arguments are those of ``estimated_memory_size``.
        """
        params = sizing.rederived(params, num_layers=num_layers)
        return sizing.infer_optimal_batch_size(
            params, max_seq_len, available_cache_memory, max_chunk_tokens
        )

    # ---- requests and caches that move -----------------------------------------------------------
    def _pools(self) -> Pools:
        from kvcore.snapshots.request import Pools

        self._require_open()
        return Pools(self, self.params, self._shards, self._states, self._gpus)

    @overload
    def export_sequence(
        self, request_id: Hashable, file: None = None, *, model: str | None = None
    ) -> bytes: ...
    @overload
    def export_sequence(
        self,
        request_id: Hashable,
        file: str | os.PathLike[str] | BinaryIO,
        *,
        model: str | None = None,
    ) -> None: ...
    def export_sequence(
        self,
        request_id: Hashable,
        file: str | os.PathLike[str] | BinaryIO | None = None,
        *,
        model: str | None = None,
    ) -> bytes | None:
        """Save what a request has written as of its last ``step``: K, V and state.

        Parameters
        ----------
        request_id
            A claimed request; it is not changed and goes on.
        file : path or binary file, optional
            Where to write it. A path has the whole file or what was there before; a device or a
            pipe is written as it is.
        model : str, optional
            Name of the model or adapter, for ``import_sequence`` to compare.

        Returns
        -------
        bytes, or None where `file` is given
            In the layout of safetensors: see "Move a request, or a cache" in the documentation.

        Raises
        ------
        RequestNotFoundError
            Also where another thread releases it meanwhile.
        ValueError
            Nothing is written; its state has run further; its extra keys take megabytes; the
            manager has no pool.
        KVCacheError
            Other threads went on with it all the time.
        TypeError
            `file` or `model` is something else.
        OSError
            The file cannot be written.

        Notes
        -----
        Costs copying the tokens that the request still reads, with their checksums. Takes no page
        and no place in the batch.
        """
        from kvcore.snapshots.format import write_parts
        from kvcore.snapshots.request import export_sequence

        require_target(file)
        require_model(model)
        parts = export_sequence(self._pools(), request_id, model).packed()
        if file is None:
            return b"".join(parts)
        write_parts(file, parts)
        return None

    def import_sequence(
        self,
        ctx: TextGenerationContext | ContextLike,
        data: bytes | bytearray | memoryview | str | os.PathLike[str] | BinaryIO | SavedSequence,
        *,
        replica_idx: int | Literal["auto"] = "auto",
        model: str | None = None,
    ) -> bool:
        """Claim a request and have it go on where ``export_sequence`` saved it.

        Parameters
        ----------
        ctx : context
            Not claimed, with the saved tokens that are written and at least one more, in the same
            namespace. Its ``start_idx`` is 0, and moves behind them.
        data : bytes-like, path, binary file, or SavedSequence
            What ``export_sequence`` wrote.
        replica_idx : int or "auto"
            As for ``external_claim``.
        model : str, optional
            What the saved request must have been given as its model.

        Returns
        -------
        bool
            False when its pages do not fit now; then nothing has changed, it is not claimed.

        Raises
        ------
        ValueError
            Data that was changed or cut, of other layers, heads or windows than the manager's, or
            of a dtype that the pool's does not hold exactly; other tokens or another namespace than
            the context's, or one whose ``start_idx`` is not 0; a manager without a pool.
        TypeError
            An argument of another type.
        AlreadyClaimedError, CapacityError, IndexError
            As for ``external_claim``; it can never fit.
        OSError
            The file cannot be read.

        Notes
        -----
        Page size, replicas and, without states, the tensor parallel degree may be others than where
        it comes from. The tokens count as cached ones. Its whole pages enter the prefix cache, once
        all of them are written. Nobody else uses the request until this returns.
        """
        from kvcore.snapshots.request import SavedSequence, import_sequence, read_sequence

        require_context(ctx)
        require_model(model)
        saved = data if isinstance(data, SavedSequence) else read_sequence(data)
        return import_sequence(self._pools(), ctx, saved, replica_idx, model)

    def snapshot(self, path: str | os.PathLike[str], *, model: str | None = None) -> SavedCache:
        """Save what is cached, of all replicas: pages, tokens, checkpoints of states.

        Parameters
        ----------
        path : str or path
            It has the whole file, or what was there before, also where the process is killed. What
            is no regular file is refused.
        model : str, optional
            Name of the weights and the revision of them, for ``restore`` to compare.

        Returns
        -------
        SavedCache
            What the file has.

        Raises
        ------
        ValueError
            The manager has no pool, or no prefix cache; `path` names a folder or a device.
        KVCacheError
            Other threads reset the caches all the time.
        TypeError
            `model` is something else.
        OSError
            The file cannot be written.

        Notes
        -----
        Other threads go on: a page that is evicted before its turn is not in the file. The call
        holds a few pages at a time, with the pages in front of them, so a reservation may find
        less room by these pages. Pages that quotas leave no room to hold are not in the file. A
        reset of the caches begins the file again: a file never has pages from before and after a
        reset. Costs copying the cached pages, with their checksums; memory for the tokens and one
        portion of pages, 8 MiB. Tiers below the device are not part of the file.
        """
        from kvcore.snapshots.cache import save_cache

        require_model(model)
        return save_cache(self._pools(), path, model)

    def restore(self, path: str | os.PathLike[str], *, model: str | None = None) -> RestoredCache:
        """Bring cached pages back that ``snapshot`` saved, to what is cached now.

        Parameters
        ----------
        path : str or path
        model : str, optional
            What the snapshot must have been given as its model.

        Returns
        -------
        RestoredCache

        Raises
        ------
        ValueError
            A file that is damaged where it says what it has, of another version, or from a manager
            of another model, dtype, page size, layout or tensor parallel degree; then nothing has
            changed. A manager without a pool or a prefix cache.
        TypeError
            `model` is something else.
        OSError
            The file cannot be read.

        Notes
        -----
        Pages are found once they are filled and their checksums were compared. A page that is
        damaged is left out, with what continues it. Takes free pages, and evicts none: where there
        are fewer than the file has, what would have been evicted last comes back. Replica `r` of
        the file goes to replica ``r % num_replicas``. Other threads go on; where they reset the
        caches meanwhile, the rest is left out. Costs reading what is not cached.
        """
        from kvcore.snapshots.cache import restore_cache

        require_model(model)
        return restore_cache(self._pools(), path, model)

    # ---- events ----------------------------------------------------------------------------------
    @property
    def fingerprint(self) -> bytes:
        """What tells pages of this model apart from those of others, bytes [32].

        The seed of its page keys: ``kvcore.keys.page_keys(tokens, page_size,
        seed=manager.fingerprint)`` are those of events and stores.
        """
        return self._fingerprint

    def take_events(self) -> list[PagesStored | PagesRemoved | CacheCleared]:
        """Return what entered and left the caches since the last call, in that order.

        Returns
        -------
        list
            A PagesStored for the pages that a ``step`` caches of a request, with groups one for
            each group; PagesRemoved for pages that go one after the other; CacheCleared of a
            replica after ``reset_prefix_cache``. Where more pages waited than the manager's
            `events` says, or memory ran out, the list begins with CacheCleared of every replica,
            and all that is cached now.

        Raises
        ------
        ValueError
            The manager was made without ``events=True``.
        KVCacheError
            The manager is closed.
        MemoryError
            The next call begins with CacheCleared.

        Notes
        -----
        O(events), and hashing the tokens of stored pages: keys are made here, without the GIL, and
        not by the calls that cache pages. Others wait for it O(1). Any number of threads may call
        it; each event is one caller's.

        Examples
        --------
        >>> from kvcore import KVCacheParams, PagedKVCacheManager, TextGenerationContext
        >>> params = KVCacheParams("float32", 1, 8, 1, page_size=2, enable_prefix_caching=True)
        >>> mgr = PagedKVCacheManager(params, 1, 8, num_pages=8, events=True)
        >>> ctx = TextGenerationContext("r1", [1, 2, 3, 4, 5])
        >>> mgr.external_claim("r1")
        >>> inputs = mgr.fetch([ctx])
        >>> ctx.update(6)
        >>> swaps = mgr.step([ctx])
        >>> mgr.take_events()
        [PagesStored(2 pages, GPU, replica 0)]
        """
        return take_events(self)

    # ---- tiers -----------------------------------------------------------------------------------
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

    # ---- pages from stores ----------------------------------------------------------------------

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


# ---- counts --------------------------------------------------------------------------------------


_log = logging.getLogger("kvcore")

#: Checkpoints evicted for each slot and each hit, from which on slots are too few.
_MANY_EVICTIONS = 4

_Counts = TypeVar("_Counts", EvictionMetrics, GroupMetrics, StateMetrics)


def _summed(kind: type[_Counts], stats: Sequence[Any]) -> _Counts:
    """Sum the core's counts, which have the fields of a kind, over replicas."""
    names = [field.name for field in fields(kind)]
    return kind(**{name: sum(getattr(each, name) for each in stats) for name in names})


# ---- arguments -----------------------------------------------------------------------------------


#: Pages of which events wait, where the caller does not say how many.
DEFAULT_PAGES = 1 << 16


def event_pages(events: bool | int) -> int:  # noqa: FBT001 - a manager's argument
    """Return of how many pages events may wait; 0 for none.

    Raises
    ------
    ValueError, TypeError
    """
    if isinstance(events, bool):
        return DEFAULT_PAGES if events else 0
    require_count(events=events)
    return events


def _pages(tenant: str, quota: Any) -> tuple[int, int | None]:
    try:
        reserved, most = quota
    except (TypeError, ValueError):
        raise ValueError(
            f"quotas[{tenant!r}] is {quota!r}, must be (reserved_pages, max_pages)"
        ) from None
    reserved = integer(f"reserved_pages of quotas[{tenant!r}]", reserved, 0)
    if most is None:
        return reserved, None
    least = max(1, reserved)  # what is reserved, and never nothing at all
    return reserved, integer(f"max_pages of quotas[{tenant!r}]", most, least, MOST_INT64)


def checked_quotas(
    quotas: Mapping[str, tuple[int, int | None]] | None, num_pages: int
) -> dict[str, tuple[int, int | None]]:
    """Return quotas by tenant, a copy, checked against the pages of a replica.

    Raises
    ------
    ValueError
        Less than 0 pages, more reserved than ``max_pages``, more in all than there are.
    TypeError
        A tenant that is not a string, pages that are no integers.
    """
    given: dict[str, tuple[int, int | None]] = {}
    for tenant, quota in dict(quotas or {}).items():
        if not isinstance(tenant, str):
            raise TypeError(f"tenant {tenant!r} of quotas is not a string")
        given[str.__str__(tenant)] = _pages(tenant, quota)
    reserved = sum(quota[0] for quota in given.values())
    if reserved > num_pages:
        raise ValueError(
            f"quotas reserve {reserved} pages in all, must be at most the {num_pages} of a replica"
        )
    return given


_DEFAULTS = {
    "write_policy": "write_through",
    "write_threshold": 2,
    "host_eviction": "lru",
    "host_min_priority": 0,
}


def checked_tier(
    params: KVCacheParams,
    write_policy: str,
    write_threshold: int,
    host_eviction: EvictionPolicy | str,
    host_min_priority: int,
) -> dict[str, Any]:
    """Return the arguments of ``CacheManager`` for them, which checks their values.

    Raises
    ------
    ValueError
        One of them is given without a host tier, or names no policy.
    TypeError
    """
    if not isinstance(write_policy, str):
        raise TypeError(f"write_policy is {write_policy!r}, must be the name of one")
    resolved(host_eviction, "host_eviction")
    given = {
        "write_policy": write_policy,
        "write_threshold": write_threshold,
        "host_eviction": "lru" if host_eviction == LRU() else host_eviction,
        "host_min_priority": host_min_priority,
    }
    if params.enable_kvcache_swapping_to_host:
        return given
    for name, value in given.items():
        if value != _DEFAULTS[name]:
            raise ValueError(
                f"{name} is {value!r}, must be left out: enable_kvcache_swapping_to_host is off"
            )
    return given


_NEEDED = ("request_id", "tokens", "start_idx", "active_idx", "end_idx", "update")


def require_context(context: Any) -> None:
    """Raise TypeError for what is no context."""
    if isinstance(context, TextGenerationContext):
        return
    missing = [name for name in _NEEDED if not hasattr(context, name)]
    if missing:
        raise TypeError(f"ctx is a {type(context).__name__}, no context: it has no {missing[0]}")


def require_model(model: Any) -> None:
    """Raise TypeError for a model that is no name."""
    if model is not None and not isinstance(model, str):
        raise TypeError(f"model is a {type(model).__name__}, must be a str or None")


def require_target(file: Any) -> None:
    """Raise TypeError for what cannot be written to."""
    is_binary = hasattr(file, "write") and not isinstance(file, io.TextIOBase)
    if file is not None and not isinstance(file, str | os.PathLike) and not is_binary:
        raise TypeError(
            f"file is a {type(file).__name__}, must be a path, or a file opened in binary mode"
        )


# ---- batches of replicas -------------------------------------------------------------------------


Item = TypeVar("Item")


def data_parallel_splits(homes: Sequence[int], num_replicas: int) -> NDArray[np.int64]:
    """See ``PagedKVCacheManager.get_data_parallel_splits``; `homes`: the replica of each row."""
    rows = np.asarray(homes, dtype=np.int64)
    if np.any(rows[1:] < rows[:-1]):
        row = int(np.argmax(rows[1:] < rows[:-1])) + 1
        raise ValueError(
            f"row {row} of the batch is on replica {rows[row]}, behind one of replica "
            f"{rows[row - 1]}; sort the batch by get_replica"
        )
    return np.searchsorted(rows, np.arange(num_replicas + 1)).astype(np.int64)


def by_replica(items: Sequence[Item], homes: Sequence[int], num_replicas: int) -> list[list[Item]]:
    """Return the items of each replica, in their order."""
    parts: list[list[Item]] = [[] for _ in range(num_replicas)]
    for item, home in zip(items, homes, strict=True):
        parts[home].append(item)
    return parts
