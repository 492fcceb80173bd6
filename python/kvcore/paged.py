# SPDX-License-Identifier: Apache-2.0
"""PagedKVCacheManager: the pages of K and V for the requests of an engine."""

from __future__ import annotations

import io
import logging
import os
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import fields, replace
from types import MappingProxyType, TracebackType
from typing import TYPE_CHECKING, Any, BinaryIO, Literal, TypeVar, overload
from weakref import finalize

import numpy as np
from numpy.typing import NDArray

from kvcore import sizing
from kvcore._core import CacheConfig
from kvcore.context import ContextLike, TextGenerationContext
from kvcore.device import Device, checked_devices
from kvcore.errors import KVCacheError
from kvcore.layers.kinds import MAX_CHUNK_TOKENS
from kvcore.layers.layer_map import LayerMap, column_tokens, core_groups, pages_per_column
from kvcore.metrics import (
    Advice,
    EvictionMetrics,
    GroupMetrics,
    KVCacheMetrics,
    MissMetrics,
    ReplicaMetrics,
    StateMetrics,
    TenantMetrics,
    TierMetrics,
)
from kvcore.native.contexts import RaggedKVCacheInputs
from kvcore.native.engine import (
    CacheCleared,
    CacheCore,
    PagesRemoved,
    PagesStored,
    StepEngine,
    StoreSide,
    search_prefix,
    take_events,
)
from kvcore.ops import increment
from kvcore.options import CacheOptions, LayerOptions, TierOptions, grouped, signature_of
from kvcore.params import KVCacheParams, require_count
from kvcore.policies import Hinted, Priority, resolved
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
from kvcore.stores.tiers.options import ChosenTiers

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from kvcore.integrations.max.views import PagedKVCacheCollection
    from kvcore.observe.zmq_reset import ResetListener
    from kvcore.options import Keywords
    from kvcore.snapshots.cache import RestoredCache, SavedCache
    from kvcore.snapshots.request import Pools, SavedSequence
    from kvcore.stores import BlockStore
    from kvcore.stores.tiers.memory import TierStates
    from kvcore.stores.tiers.onload import Arrival
    from kvcore.stores.tiers.stack import TierStack

__all__ = ["PagedKVCacheManager"]


def _listener(zmq_endpoint_base: str | None) -> ResetListener | None:
    if zmq_endpoint_base is None:
        return None
    from kvcore.observe.zmq_reset import ResetListener  # loaded only for an endpoint

    return ResetListener(zmq_endpoint_base)


class PagedKVCacheManager(StepEngine):
    """Own the KV cache of an engine: pages, prefix reuse, and the kernel inputs of a step.

    Parameters
    ----------
    params : KVCacheParams
    max_batch_size : int
        Requests that may be claimed at the same time, over all replicas; a replica takes
        ``ceil(max_batch_size / data_parallel_degree)``.
    max_seq_len : int
        Tokens of the longest request.
    num_layers, page_size : int, optional
        Replace the values of `params` if given.
    devices : sequence of str or Device
        "cpu", "cuda:0", ...: ``params.n_devices`` devices in replica-major order. On GPUs the
        pools, tables and lengths are cupy arrays, and calls enqueue their GPU work on the current
        stream.
    session
        Accepted for call compatibility, not used.
    available_cache_memory : int, optional
        Bytes over all devices. Give either `available_cache_memory` or `num_pages`, not both.
    zmq_endpoint_base : str, optional
        With prefix caching, a message to a PULL socket at ``<base>-reset_prefix_cache`` resets the
        cache of every replica. Needs pyzmq. Only one manager can use an endpoint, and a forked
        child has no listener.
    enable_runtime_checks : bool
        After every call, check every conservation law. Also check that ``update`` and ``step``
        follow each run. The checks are slow; use them in tests and to find bugs.
    num_pages : int, optional
        Pages per replica.
    blocks : "allocate", None, or list of one array per device
        The pool: "allocate" allocates it, None means page ids without a pool, and a list holds the
        caller's own arrays.
    cache : CacheOptions, optional
        Options of the prefix cache: eviction, quotas, events.
    layers : LayerOptions, optional
        Options of layers with windows, chunks or a state, and of chunked prefill.
    tiers : TierOptions, or list of str or kvcore.stores.BlockStore, optional
        The tiers below the device, and their options. A list is the same as
        ``TierOptions(tiers=list)``.
    **keywords
        Options of a group that is not given, by their names: ``eviction="lfu"`` is the same as
        ``cache=CacheOptions(eviction="lfu")``. The next release removes the keywords that emit a
        DeprecationWarning.

    Raises
    ------
    CapacityError
        The memory does not hold one page.
    ValueError
        An argument has a wrong value, or an option is given as a keyword although its group is
        given.
    TypeError
        An argument has a wrong type, or no option has the name of a keyword.
    ImportError
        An optional package is missing, such as pyzmq.

    Notes
    -----
    Thread-safe: any number of threads may call any method. A call that raises an error or returns
    False changes nothing.

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
    _has_warned = False  # whether the log has the warning about too few slots
    _states: tuple[dict[str, list[Any]], ...]
    _fingerprint: bytes
    _tiers: TierStack | None = None
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
        cache: CacheOptions | None = None,
        layers: LayerOptions | None = None,
        tiers: TierOptions | Sequence[str | BlockStore] | None = None,
        **keywords: Unpack[Keywords],
    ) -> None:
        if getattr(self, "_core", None) is not None:
            raise RuntimeError("this PagedKVCacheManager is initialised already; make another one")
        cache, layers, tiers = grouped(cache, layers, tiers, keywords)
        params = sizing.rederived(params, num_layers=num_layers, page_size=page_size)
        require_count(max_batch_size=max_batch_size, max_seq_len=max_seq_len)
        slots = chosen_states(
            params,
            max_batch_size,
            layers.num_states,
            max_seq_len=max_seq_len,
            max_draft_tokens=layers.max_draft_tokens,
            available_cache_memory=available_cache_memory,
            num_pages=num_pages,
        )
        chosen = ChosenTiers.of(tiers, params, has_pool=blocks is not None)
        first_page = cache.first_page
        pages = sizing.chosen_pages(params, available_cache_memory, num_pages, slots, first_page)
        params = chosen.with_host_tier(params, pages, max_seq_len)
        host_states = sizing.host_states_per_replica(params, tiers.num_host_states)
        tiers.require_host(has_host_tier=params.enable_kvcache_swapping_to_host)
        places = checked_devices(devices, params.n_devices)
        limits = cache.quotas_in(pages)
        has_events = cache.event_pages > 0
        gpus = pools_on_gpus(places, params, tiers.layerwise_loads) if blocks is not None else None
        shards = make_shards(params, places, pages + first_page, blocks)
        host_pages = 0 if blocks is None else sizing.host_pages_per_replica(params, host_states)
        host_slots = host_states if host_pages else 0
        has_arrays = slots > 0 and blocks is not None
        states = StateArrays(params, places, slots, gpus, host_slots) if has_arrays else None
        config = CacheConfig(
            num_pages=pages,
            page_size=column_tokens(params),
            max_sequences=sizing.batch_per_replica(params, max_batch_size),
            max_seq_len=max_seq_len,
            num_replicas=params.data_parallel_degree,
            prefix_caching=params.enable_prefix_caching,
            host_pages=host_pages,
            groups=core_groups(params),
            quotas=list(limits.values()),
            states=intervals(params),
            num_state_slots=slots,
            num_host_state_slots=host_slots,
            explain_pages=cache.explain_pages((pages + host_pages) * params.data_parallel_degree),
            **chosen.core_options(has_keys=has_events),
            **cache.core_options(),
            **layers.core_options(),
            **tiers.core_options(),
        )
        core = CacheCore(config)
        super().__init__(
            core,
            shards=shards,
            copier=whole_pages(make_copier(shards, gpus), params, shards),
            mover=make_mover(shards, places, host_pages, gpus, core.late_reads),
            gpus=gpus,
            # The listener comes last: after an earlier error, the traceback would keep the endpoint
            # in use.
            listener=_listener(zmq_endpoint_base if params.enable_prefix_caching else None),
            clock=cache.clock if resolved(cache.eviction)[0] in _TIMED else None,
            layers=LayerMap.of(params),
            pages_per_column=pages_per_column(params),
            runtime_checks=enable_runtime_checks,
            tenants=tuple(limits),
            state_groups=len(params.state_groups),
            states=states,
        )
        self._quotas = MappingProxyType(limits)
        self._explains = bool(cache.explain)
        self._advises = cache.advice_sample > 0
        self._fingerprint = chosen.fingerprint
        self._states = () if states is None else states.arrays
        self._host_states = host_states
        self.params, self.devices = params, places
        self.max_batch_size, self.max_seq_len = max_batch_size, max_seq_len
        self._begin_tiers(chosen, states if host_slots else None)

    # ---- pages ---------------------------------------------------------------------------
    @property
    def quotas(self) -> Mapping[str, tuple[int, int | None]]:
        """Reserved and maximum pages of each tenant in each replica; read-only."""
        return self._quotas

    @property
    def states(self) -> tuple[dict[str, list[Any]], ...]:
        """The arrays of each State group by name, [num_states, layers, ...] on each device.

        The tuple is empty without State groups and with ``blocks=None``. The model writes the
        contents of a slot: the manager copies slots, and never clears a slot.
        """
        return self._states

    # ---- batches -------------------------------------------------------------------------
    def get_data_parallel_splits(
        self, context_batch: Sequence[Any]
    ) -> np.ndarray[Any, np.dtype[np.int64]]:
        """Return the offsets of the replicas in a batch that is grouped by replica.

        Returns
        -------
        int64 [replicas + 1]
            ``[0, n0, n0 + n1, ...]``

        Raises
        ------
        ValueError
            The batch is not sorted by replica.
        """
        replicas = [self.get_replica(context) for context in context_batch]
        return data_parallel_splits(replicas, self.num_replicas)

    def fetch_collection(
        self, batch: Iterable[Any], num_steps: int = 1
    ) -> list[PagedKVCacheCollection]:
        """Fetch a batch, and return the inputs as one view per device.

        Parameters
        ----------
        batch : sequence of contexts
        num_steps : int
            Number of steps that run before the next fetch.

        Raises
        ------
        ValueError
            The manager has no pool.
        InsufficientBlocksError, CapacityError, RequestNotFoundError
            The same errors as in ``fetch``.

        Notes
        -----
        Costs a fetch plus O(batch). Loads and stores of a view raise InvalidHandleError after
        their request was released or has lost the page.
        """
        from kvcore.integrations.max.views import PagedKVCacheCollection

        self._require_open()
        if self._shards[0][0][0] is None:
            raise ValueError("blocks is None: this manager has no pool to see, use fetch")
        contexts = list(batch)
        inputs = self.fetch(contexts, num_steps)
        replicas = [self.get_replica(context) for context in contexts]
        names = by_replica([each.request_id for each in contexts], replicas, self.num_replicas)
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
            One per device, from ``fetch`` or from the previous call; the call does not change them.
        prev_model_inputs
            An object with ``input_row_offsets`` uint32 [B + 1] and, with several replicas,
            ``data_parallel_splits`` [replicas + 1]; or a tuple ``(x, row_offsets)``; or the row
            offsets themselves.

        Returns
        -------
        list of RaggedKVCacheInputs
            The same pool and table, ``cache_lengths[i] += row_offsets[i + 1] - row_offsets[i]``,
            and ``max_lengths`` without its first row. Only ``step`` changes the manager's state.

        Raises
        ------
        ValueError
            The row offsets do not match these inputs, or ``max_lengths`` has no row left.
        """
        return increment.increment_cache_lengths(
            kv_cache_inputs, prev_model_inputs, self.num_replicas
        )

    def input_symbols(
        self, devices: Sequence[Device | str] | None = None, num_layers: int | None = None
    ) -> list[InputSymbols]:
        """Describe each field of the fetched inputs by dtype and symbolic shape, per device.

        Returns
        -------
        list of InputSymbols
            One per device, with the fields of RaggedKVCacheInputs. A field is a pair or None if the
            field of the inputs is a pair or None.
        """
        params = sizing.rederived(self.params, num_layers=num_layers)
        places = self.devices if devices is None else tuple(Device.parse(d) for d in devices)
        return [input_symbols(params, device) for device in places]

    # ---- counts ----------------------------------------------------------------------------------
    @property
    def num_replicas(self) -> int:
        """Number of data parallel replicas."""
        return self.params.data_parallel_degree

    @property
    def total_num_pages(self) -> int:
        """Pages of each replica."""
        return self._core.total_pages()

    @property
    def num_free_blocks(self) -> int:
        """Pages that a request could get, over all replicas, including evictable cached pages."""
        return sum(self._core.available_pages(r) for r in range(self.num_replicas))

    @property
    def num_cached_blocks(self) -> int:
        """Pages in the prefix cache, over all replicas, including pages that requests share."""
        return sum(self._core.cached_pages(r) for r in range(self.num_replicas))

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
        """Pages that fit into the host tier, over all replicas; 0 without a host tier."""
        return sizing.host_pages(self.params, self._host_states)

    @property
    def host_committed_block_pct(self) -> float:
        """Share of host pages that store cached pages, 0..1; 0.0 without a host tier."""
        stats = [self._core.stats(r) for r in range(self.num_replicas)]
        cached = sum(each.host_cached_pages for each in stats)
        return cached / max(1, sum(each.host_pages for each in stats))

    @property
    def metrics(self) -> KVCacheMetrics:
        """Counters summed over replicas; a copy. O(replicas + requests)."""
        return self._counters()

    @property
    def replica_metrics(self) -> tuple[ReplicaMetrics, ...]:
        """Pages of each replica, in the order of the replicas. O(replicas)."""
        return tuple(self._core.stats(r) for r in range(self.num_replicas))

    @property
    def eviction_metrics(self) -> dict[str, EvictionMetrics]:
        """Lost cached pages by reason, of "device" and, with a host tier, "host". O(replicas)."""
        device, host = self._core.eviction_counts()
        return {"device": device} | ({"host": host} if self.total_num_host_pages else {})

    @property
    def group_metrics(self) -> tuple[GroupMetrics, ...]:
        """Pages of each attention group, in the order of `groups`; empty without groups. O(pages).

        For a model without groups, every page has all layers, and ``metrics`` counts the pages
        copied to and from the host tier.
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
    def miss_metrics(self) -> MissMetrics:
        """Tokens that admissions missed, by reason; zeros without ``explain``. O(replicas)."""
        return self._core.miss_counts()

    def advice(self) -> Advice:
        """Compute the hit rates that other numbers of pages would have had in the last hour.

        Returns
        -------
        kvcore.metrics.Advice
            The hit rates of LRU at 0.5, 1, 2 and 4 times the pages, and of the optimum at 1 time
            the pages, for all requests and for each tenant.

        Raises
        ------
        ValueError
            The manager was made without ``CacheOptions(advice=...)``.

        Notes
        -----
        O(sampled uses log sampled uses), without the GIL. Other calls wait only while the records
        are copied, at most 3 MiB for each replica.

        Examples
        --------
        >>> from kvcore import CacheOptions, KVCacheParams, PagedKVCacheManager
        >>> params = KVCacheParams("float32", 1, 16, 1, page_size=1, enable_prefix_caching=True)
        >>> cache = CacheOptions(advice=1)
        >>> mgr = PagedKVCacheManager(params, 4, 64, num_pages=128, cache=cache)
        >>> [row.pages for row in mgr.advice().rows]
        [64, 128, 256, 512]
        """
        if not self._advises:
            raise ValueError("the manager has no advice; make it with CacheOptions(advice=True)")
        tenants, counts = self._core.advice()
        return Advice.of(
            tenants,
            self._quotas,
            pages=self.total_num_pages,
            page_bytes=self.params.bytes_per_page,
            counts=counts,
        )

    @property
    def state_metrics(self) -> StateMetrics:
        """State slots of the device and of the host tier, and counts of checkpoints. O(1).

        All fields are 0 without State groups. The logger "kvcore" warns once if most checkpoints
        are evicted before a request begins with them.
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
            A law does not hold; the message names the law.
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

        For each replica, the estimate is its share of the memory, or the bytes of the largest batch
        of longest sequences if they are fewer.

        Parameters
        ----------
        params : KVCacheParams
        max_batch_size, max_seq_len : int
            Requests over all replicas, and tokens of the longest request.
        num_layers : int
            Replaces the value of `params`.
        available_cache_memory : int
            Bytes over all devices.
        max_chunk_tokens : int
            Largest number of tokens of a request that run in one step, for layers with a window.
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
        """Return the longest sequence in tokens, a multiple of the page; 0 if no page fits.

        `memory_available` counts bytes over all devices; a sequence uses the memory of one replica.
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
        """Return the largest batch of longest sequences that fits; 0 if no sequence fits.

        The batch is spread over all replicas. The arguments mean the same as for
        ``estimated_memory_size``.
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
        """Save the K, V and state that a request has written as of its last ``step``.

        Parameters
        ----------
        request_id
            A claimed request. The call does not change the request, and the request can continue.
        file : path or binary file, optional
            The destination. A regular file at a path is replaced only by the whole new file; a
            device or a pipe is written directly.
        model : str, optional
            Name of the model or adapter, which ``import_sequence`` compares.

        Returns
        -------
        bytes, or None where `file` is given
            The data in the safetensors layout: see "Move a request, or a cache" in the
            documentation.

        Raises
        ------
        RequestNotFoundError
            The request is not claimed, or another thread releases it during the call.
        ValueError
            The request has no written tokens, its state has run past the written tokens, its extra
            keys do not fit into the header of the data, or the manager has no pool.
        KVCacheError
            Other threads changed the request in every attempt.
        TypeError
            `file` or `model` has a wrong type.
        OSError
            The file cannot be written.

        Notes
        -----
        The cost is a copy of the tokens that the request still reads, and their checksums. The call
        takes no page and no place in the batch.
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
        """Claim a request, and restore the tokens that ``export_sequence`` saved.

        Parameters
        ----------
        ctx : context
            A context that is not claimed, in the same namespace. It has the written tokens of the
            saved request, and at least one more token. Its ``start_idx`` must be 0, and moves past
            the written tokens.
        data : bytes-like, path, binary file, or SavedSequence
            The output of ``export_sequence``.
        replica_idx : int or "auto"
            The same as for ``external_claim``.
        model : str, optional
            If given, it must equal the `model` that ``export_sequence`` was called with.

        Returns
        -------
        bool
            False if the pages of the request do not fit now. The request is not claimed in this
            case, and nothing has changed.

        Raises
        ------
        ValueError
            The data was changed or cut, has different layers, heads or windows than the manager, or
            has a dtype whose values the dtype of the pool cannot store exactly. The tokens or the
            namespace differ from the context, the ``start_idx`` of the context is not 0, or the
            manager has no pool.
        TypeError
            An argument has a wrong type.
        AlreadyClaimedError, CapacityError, IndexError
            The same errors as in ``external_claim``, or the request can never fit.
        OSError
            The file cannot be read.

        Notes
        -----
        The page size, the replicas and, without states, the tensor parallel degree may differ from
        the manager that saved the request. The tokens count as cached tokens. The full pages of the
        request enter the prefix cache after all of them are written. Other threads must not use the
        request before this call returns.
        """
        from kvcore.snapshots.request import SavedSequence, import_sequence, read_sequence

        require_context(ctx)
        require_model(model)
        saved = data if isinstance(data, SavedSequence) else read_sequence(data)
        return import_sequence(self._pools(), ctx, saved, replica_idx, model)

    def snapshot(self, path: str | os.PathLike[str], *, model: str | None = None) -> SavedCache:
        """Save the prefix caches of all replicas: pages, tokens, checkpoints of states.

        Parameters
        ----------
        path : str or path
            The destination. A file at this path is replaced only by the whole new file, even if the
            process is killed. An existing path that is not a regular file raises ValueError.
        model : str, optional
            Name and revision of the weights, which ``restore`` compares.

        Returns
        -------
        SavedCache
            The contents of the file.

        Raises
        ------
        ValueError
            The manager has no pool or no prefix cache, or `path` names a folder or a device.
        KVCacheError
            Other threads reset the caches in every attempt.
        TypeError
            `model` has a wrong type.
        OSError
            The file cannot be written.

        Notes
        -----
        Other threads can use the manager during the call: a page that is evicted before the call
        copies it is not in the file. The call holds a few pages at a time, and the earlier pages of
        their prefixes; a reservation cannot evict these pages. If quotas prevent the call from
        holding a page, the page is not in the file. After a reset of the caches, the call starts a
        new file: a file never has pages from before and after a reset. The cost is a copy of the
        cached pages and their checksums. The call uses memory for the tokens and for 8 MiB of
        pages. The file does not include the tiers below the device.
        """
        from kvcore.snapshots.cache import save_cache

        require_model(model)
        return save_cache(self._pools(), path, model)

    def restore(self, path: str | os.PathLike[str], *, model: str | None = None) -> RestoredCache:
        """Add the pages that ``snapshot`` saved to the prefix caches.

        Parameters
        ----------
        path : str or path
        model : str, optional
            If given, it must equal the `model` that ``snapshot`` was called with.

        Returns
        -------
        RestoredCache

        Raises
        ------
        ValueError
            The index of the file is damaged, or the file has another version, or comes from a
            manager with another model, dtype, page size, layout or tensor parallel degree. Or the
            manager has no pool or no prefix cache. The caches are unchanged in all these cases.
        TypeError
            `model` has a wrong type.
        OSError
            The file cannot be read.

        Notes
        -----
        Prefix hits can use a page after the page is filled and its checksum is verified. The call
        skips damaged pages and the pages that continue them. The call takes free pages and evicts
        no page. If fewer pages are free than the file has, the call restores the pages that would
        have been evicted last. Replica `r` of the file goes to replica ``r % num_replicas``. Other
        threads can use the manager during the call; after another thread resets the caches, the
        call skips the remaining pages. The cost is reading the pages that are not cached.
        """
        from kvcore.snapshots.cache import restore_cache

        require_model(model)
        return restore_cache(self._pools(), path, model)

    # ---- events ----------------------------------------------------------------------------------
    @property
    def fingerprint(self) -> bytes:
        """Identifier that distinguishes the pages of this model from other models, bytes [32].

        It is the seed of page keys: ``kvcore.keys.page_keys(tokens, page_size,
        seed=manager.fingerprint)`` returns the keys that events and stores use.
        """
        return self._fingerprint

    def take_events(self) -> list[PagesStored | PagesRemoved | CacheCleared]:
        """Return the events of the caches since the last call, in the order of the events.

        Returns
        -------
        list
            A PagesStored for the pages of a request that a ``step`` caches; with groups, a
            PagesStored for each group. A PagesRemoved for pages that are removed in sequence. A
            CacheCleared of a replica after ``reset_prefix_cache``. If events of more pages waited
            than the `events` argument of the manager allows, or memory ran out, the list begins
            with CacheCleared of every replica, followed by all pages that are cached now.

        Raises
        ------
        ValueError
            The manager was made without ``events=True``.
        KVCacheError
            The manager is closed.
        MemoryError
            Memory ran out. The list of the next call begins with CacheCleared.

        Notes
        -----
        The cost is O(events) plus hashing the tokens of stored pages: this call computes the keys,
        without the GIL, so the calls that cache pages do not. Other calls wait O(1) for this call.
        Any number of threads may call it; each event is returned to only one caller.

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
    def _begin_tiers(self, chosen: ChosenTiers, states: TierStates | None) -> None:
        """Open the stores, and start reading and writing them; the constructor calls this last."""
        try:
            tiers = chosen.opened(self.params, self._mover, states)
        except BaseException:
            self.close()
            raise
        if tiers is None:
            return
        self._tiers = tiers
        onload = tiers.begin(StoreSide(self._core))
        self._set_below(tiers, tiers.reader, onload if chosen.options.async_onload else None)
        self._end = finalize(self, tiers.stop)

    def flush(self, timeout: float | None = None) -> bool:
        """Wait until every page committed so far has reached all stores.

        Parameters
        ----------
        timeout : float, optional
            Longest time to wait, in seconds.

        Returns
        -------
        bool
            True if all stores have every page committed since the last ``flush``, and True without
            stores. False after `timeout`, if a store did not take a page, or if the host tier lost
            a page before it was written. If the host tier has no room for a page, the page reaches
            no tier.

        Raises
        ------
        KVCacheError
            The manager is closed, or this process is a child of ``os.fork``.
        """
        self._require_open()
        return self._tiers is None or self._tiers.flush(timeout)

    def close(self) -> None:
        """Flush the stores, end all threads, close the stores and free the memory.

        Stores that the caller passed as objects stay open. Every later call raises KVCacheError,
        but a second ``close`` does nothing. Arrays of earlier fetches stay valid.

        Notes
        -----
        A ``with manager:`` block closes the manager at its end. If a manager is deleted without
        ``close``, its threads also end, but it does not wait for pages that must still be written.
        Calls in progress on other threads complete as if they were made before ``close``.
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
        """Close the manager."""
        self.close()

    @property
    def tier_metrics(self) -> Mapping[str, TierMetrics]:
        """Counters of each tier by its name; read-only, a copy.

        The first name is "host". The names of the stores follow in the order of the stores: "disk",
        "redis" and "mooncake" for kvcore's own stores, or the name of the class in lower case for
        other stores. With several disks, each name is "disk:" and the first path of the disk. With
        several other stores of a class, each name ends in a number, starting at 1. The mapping is
        empty without tiers.
        """
        self._require_open()
        found: dict[str, TierMetrics] = {}
        if self._mover is not None:
            found["host"] = self._host_metrics()
        if self._tiers is not None:
            column = column_tokens(self.params)
            missed, *_ = self._core.tier_counts()
            for name, each in self._tiers.metrics(missed).items():
                found[name] = replace(each, tokens=each.hits * column)
        return MappingProxyType(found)

    def reset_metrics(self) -> None:
        """Set all counters to 0, also the counters of tiers, and the peak to the pages in use."""
        self._core.reset_metrics()
        self._reset_times()
        if self._tiers is not None:
            self._tiers.reset_metrics()

    def _host_metrics(self) -> TierMetrics:
        missed, stored, loaded, tokens = self._core.tier_counts()
        size = self.params.bytes_per_page
        return TierMetrics(
            hits=tokens // column_tokens(self.params),
            misses=missed,
            bytes_in=stored * size,
            bytes_out=loaded * size,
            pages_waiting=0 if self._tiers is None else self._tiers.queue.waiting,
            tokens=tokens,
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
        """Start to load a prefix from stores into the host tier.

        Parameters
        ----------
        tokens : list of int, or array int32 or int64 [n]
        extra_key, cache_salt : str, optional
        replica_idx : int
        extra_keys : list of (int, int, bytes), optional
            The extra keys of a context whose start is below `n`.

        Returns
        -------
        int
            Tokens of full pages that are on the device, in the host tier, or in flight to the host
            tier. Without stores, the tokens on the device.

        Raises
        ------
        KVCacheError
            The manager is closed, or this process is a child of ``os.fork``.
        IndexError, ValueError, TypeError
            The same errors as in ``match_prefix``.

        Notes
        -----
        The call queries the stores for the pages that they have, and returns. Threads read the
        pages.
        """
        self._require_open()
        if self._tiers is None:
            return self.match_prefix(
                tokens, extra_key, cache_salt, replica_idx, extra_keys=extra_keys
            )
        self._tiers.require_here()
        keys = None if extra_keys is None else list(extra_keys)
        search = search_prefix(
            self._tiers.queue, tokens, extra_key, cache_salt, replica_idx, extra_keys=keys
        )
        column = column_tokens(self.params)
        if search is None:
            return len(tokens) // column * column
        return self._tiers.prefetch(search) * column

    def poll(self) -> list[Hashable]:
        """Return the requests whose pages have arrived since the last call.

        Each request is reserved again, and the ``start_idx`` of its context moves past the longer
        hit.

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
        The call moves contexts, so other threads must not use the contexts during the call.
        O(waiting requests).
        """
        self._require_open()
        arrived = [] if self._onload is None else self._onload.take()
        return [name for name, arrival in arrived if self._reserve_again(arrival)]

    def wait(self, ctx: ContextLike, timeout: float | None = None) -> bool:
        """Wait for the pages of a request, and reserve it again.

        Parameters
        ----------
        ctx : context
        timeout : float, optional
            Longest time to wait, in seconds.

        Returns
        -------
        bool
            False if the pages did not arrive before `timeout`. True if the pages arrived, or the
            request does not wait for pages.

        Raises
        ------
        KVCacheError
            The manager is closed.
        """
        self._require_open()
        if self._onload is None:
            return True
        found = self._onload.take_one(ctx.request_id, timeout)
        if isinstance(found, bool):
            return found
        self._reserve_again(found)
        return True

    @contextmanager
    def _await_pages(self, batch: Iterable[ContextLike]) -> Iterator[None]:
        """Wait for the pages of contexts that run next.

        If the body raises an error, the contexts return to their earlier indices and wait again.
        """
        moved: list[tuple[Arrival, int, int]] = []
        try:
            for context in batch:
                # An object without an id is not a context: `fetch` raises the error.
                if getattr(context, "pending", True) and hasattr(context, "request_id"):
                    self._await(context, moved)
            yield
        except BaseException:
            for arrival, start, active in reversed(moved):
                self._wait_again(arrival, start, active)
            raise

    def _await(self, context: ContextLike, moved: list[tuple[Arrival, int, int]]) -> None:
        assert self._onload is not None
        found = self._onload.take_one(context.request_id, None)
        if not isinstance(found, bool):
            moved.append((found, found.context.start_idx, found.context.active_idx))
            self._reserve_again(found)

    def _wait_again(self, arrival: Arrival, start: int, active: int) -> None:
        assert self._onload is not None
        with suppress(KVCacheError):  # the request was released, or the manager is closed
            if arrival.context.start_idx != start:
                self._stand_back(arrival.context, start, active)
            self._onload.put_back(arrival)

    def _reserve_again(self, arrival: Arrival) -> bool:
        """Reserve a request with pages again for its longer hit; return whether it is claimed."""
        try:
            if len(self.get_req_blocks(arrival.context.request_id)):
                self.maybe_reserve(arrival.context, max_hit=arrival.max_hit)
        except KVCacheError:  # another thread released the request
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


# Readers of signatures see each keyword.
PagedKVCacheManager.__init__.__signature__ = signature_of(  # type: ignore[attr-defined]
    PagedKVCacheManager.__init__
)


# ---- counts --------------------------------------------------------------------------------------


_log = logging.getLogger("kvcore")

#: The policies that need the time.
_TIMED = (Priority.name, Hinted.name)

#: Evicted checkpoints per slot, and per hit, from which the log warns of too few slots.
_MANY_EVICTIONS = 4

_Counts = TypeVar("_Counts", GroupMetrics, StateMetrics)


def _summed(kind: type[_Counts], stats: Sequence[Any]) -> _Counts:
    """Sum counts of the core over replicas, into a `kind` with the same fields."""
    names = [field.name for field in fields(kind)]
    return kind(**{name: sum(getattr(each, name) for each in stats) for name in names})


# ---- arguments -----------------------------------------------------------------------------------


_NEEDED = ("request_id", "tokens", "start_idx", "active_idx", "end_idx", "update")


def require_context(context: Any) -> None:
    """Raise TypeError if `context` is not a context."""
    if isinstance(context, TextGenerationContext):
        return
    missing = [name for name in _NEEDED if not hasattr(context, name)]
    if missing:
        raise TypeError(f"ctx is a {type(context).__name__}, no context: it has no {missing[0]}")


def require_model(model: Any) -> None:
    """Raise TypeError if `model` is neither a str nor None."""
    if model is not None and not isinstance(model, str):
        raise TypeError(f"model is a {type(model).__name__}, must be a str or None")


def require_target(file: Any) -> None:
    """Raise TypeError if `file` is neither a path, a binary file nor None."""
    is_binary = hasattr(file, "write") and not isinstance(file, io.TextIOBase)
    if file is not None and not isinstance(file, str | os.PathLike) and not is_binary:
        raise TypeError(
            f"file is a {type(file).__name__}, must be a path, or a file opened in binary mode"
        )


# ---- batches of replicas -------------------------------------------------------------------------


Item = TypeVar("Item")


def data_parallel_splits(replicas: Sequence[int], num_replicas: int) -> NDArray[np.int64]:
    """Return the offsets of the replicas in a batch; `replicas` has the replica of each row."""
    rows = np.asarray(replicas, dtype=np.int64)
    if np.any(rows[1:] < rows[:-1]):
        row = int(np.argmax(rows[1:] < rows[:-1])) + 1
        raise ValueError(
            f"row {row} of the batch is on replica {rows[row]}, after a row of replica "
            f"{rows[row - 1]}; sort the batch by get_replica"
        )
    return np.searchsorted(rows, np.arange(num_replicas + 1)).astype(np.int64)


def by_replica(items: Sequence[Item], rows: Sequence[int], num_replicas: int) -> list[list[Item]]:
    """Return the items of each replica, in order; `rows` has the replica of each item."""
    parts: list[list[Item]] = [[] for _ in range(num_replicas)]
    for item, replica in zip(items, rows, strict=True):
        parts[replica].append(item)
    return parts
