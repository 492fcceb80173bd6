# SPDX-License-Identifier: Apache-2.0
from collections.abc import Sequence
from typing import Any, SupportsIndex, TypeAlias

import numpy as np
from numpy.typing import NDArray
from typing_extensions import Self

from kvcore.policies import EvictionPolicy

_Ints: TypeAlias = Sequence[int] | NDArray[np.int32] | NDArray[np.int64]
_Ids: TypeAlias = NDArray[np.int32]
_Array: TypeAlias = NDArray[Any]

__version__: str
build_info: dict[str, str | int | bool]

class BlockPool:
    """Count the references of page ids ``0 .. num_blocks - 1``.

    Parameters
    ----------
    num_blocks : int
        Pages, ``1 .. 2**31 - 1``.

    Raises
    ------
    ValueError
        Another number of pages.

    Notes
    -----
    One thread at a time. O(1) per id; ids freed last are handed out first.

    Examples
    --------
    >>> from kvcore import BlockPool
    >>> pool = BlockPool(4)
    >>> ids = pool.allocate(3)
    >>> pool.free(ids[:1])
    >>> pool
    BlockPool(4 pages, 2 free, 2 used)
    """

    def __init__(self, num_blocks: int) -> None: ...
    @property
    def num_blocks(self) -> int:
        """Pages of the pool."""
    @property
    def num_free(self) -> int:
        """Pages that nobody references."""
    def allocate(self, n: int) -> _Ids:
        """Take pages, each with one reference.

        Returns
        -------
        int32 [n]
            Their ids.

        Raises
        ------
        InsufficientBlocksError
            Fewer than `n` are free; nothing has been taken.
        ValueError
            `n` below 0.
        """
    def share(self, ids: _Ints) -> None:
        """Add one reference to each page.

        Parameters
        ----------
        ids : list of int, or array int32 or int64 [n]

        Raises
        ------
        InvalidHandleError
            An id that is free or no page; nothing has changed.
        """
    def free(self, ids: _Ints) -> None:
        """Drop one reference of each page; one without references is free again.

        Parameters
        ----------
        ids : list of int, or array int32 or int64 [n]

        Raises
        ------
        InvalidHandleError
            An id that is free already (a double free) or no page; nothing has changed.
        """
    def ref_count(self, block_id: int) -> int:
        """Return the references to a page, 0 when it is free; InvalidHandleError for no page."""
    def check_integrity(self) -> None:
        """Raise AssertionError unless free and referenced pages make up the pool. O(num_blocks)."""

class SequenceHandle:
    """A claimed sequence; stale once it is released."""

    def __eq__(self, other: object, /) -> bool: ...
    def __hash__(self) -> int: ...

class PinHandle:
    """A pinned prefix; its num_tokens are kept."""

    @property
    def num_tokens(self) -> int: ...

class EvictionCounts:
    """Cached pages of a tier that went, by why it was these."""

    @property
    def policy(self) -> int: ...
    @property
    def window(self) -> int: ...
    @property
    def unreachable(self) -> int: ...
    @property
    def reset(self) -> int: ...

class Metrics:
    """Counters since construction or the last reset."""

    @property
    def input_tokens(self) -> int: ...
    @property
    def cache_tokens(self) -> int: ...
    @property
    def copied_tokens(self) -> int: ...
    @property
    def evicted_pages(self) -> int: ...
    @property
    def evicted(self) -> EvictionCounts: ...
    @property
    def host_evicted(self) -> EvictionCounts: ...
    @property
    def peak_used_pages(self) -> int: ...
    @property
    def stored_pages(self) -> int: ...
    @property
    def loaded_pages(self) -> int: ...
    @property
    def loaded_tokens(self) -> int: ...
    @property
    def generated_tokens(self) -> int: ...
    @property
    def resumed_tokens(self) -> int: ...
    @property
    def recomputed_tokens(self) -> int: ...
    @property
    def missed_pages(self) -> int: ...

class TenantStats:
    """Pages of one tenant in one replica at one moment."""

    @property
    def held_pages(self) -> int: ...
    @property
    def reserved_pages(self) -> int: ...
    @property
    def max_pages(self) -> int | None: ...
    @property
    def refused(self) -> int: ...
    @property
    def input_tokens(self) -> int: ...
    @property
    def cache_tokens(self) -> int: ...
    @property
    def generated_tokens(self) -> int: ...

class GroupStats:
    """Pages of one group of layers in one replica at one moment."""

    @property
    def held_pages(self) -> int: ...
    @property
    def cached_pages(self) -> int: ...
    @property
    def holes(self) -> int: ...
    @property
    def given_back(self) -> int: ...
    @property
    def filled(self) -> int: ...
    @property
    def stored_pages(self) -> int: ...
    @property
    def loaded_pages(self) -> int: ...

class PoolStats:
    """Pages of one replica at one moment."""

    @property
    def total_pages(self) -> int: ...
    @property
    def free_pages(self) -> int: ...
    @property
    def cached_pages(self) -> int: ...
    @property
    def evictable_pages(self) -> int: ...
    @property
    def num_sequences(self) -> int: ...
    @property
    def host_pages(self) -> int: ...
    @property
    def host_cached_pages(self) -> int: ...
    @property
    def available_pages(self) -> int: ...

class StateStats:
    """Slots of states of one replica at one moment."""

    @property
    def total_slots(self) -> int: ...
    @property
    def used_slots(self) -> int: ...
    @property
    def checkpoints(self) -> int: ...
    @property
    def available_slots(self) -> int: ...
    @property
    def checkpoint_hits(self) -> int: ...
    @property
    def checkpoints_made(self) -> int: ...
    @property
    def host_slots(self) -> int: ...
    @property
    def host_checkpoints(self) -> int: ...
    @property
    def stored_checkpoints(self) -> int: ...
    @property
    def loaded_checkpoints(self) -> int: ...
    @property
    def evicted_checkpoints(self) -> int: ...

class ReservePlan:
    """What a reservation would do now."""

    @property
    def hit_tokens(self) -> int: ...
    @property
    def new_pages(self) -> int: ...
    @property
    def evicted_pages(self) -> int: ...
    @property
    def copied_tokens(self) -> int: ...
    @property
    def fits(self) -> bool: ...
    @property
    def active(self) -> int: ...
    @property
    def evictable_hit_pages(self) -> int: ...

class HeldPages:
    """Pages that CacheManager.hold keeps as they are.

    Dropping it lets them go.
    """

    @property
    def pages(self) -> _Ids:
        """As they were asked for, int32 [n]; a copy."""
    def let_go(self) -> None:
        """Let the pages go; InvalidHandleError when that was done before."""
    def __enter__(self) -> Self: ...
    def __exit__(self, *args: object) -> None: ...
    def __len__(self) -> int: ...

class CacheManager:
    """Keep the books of pages for sequences: ids only, one sequence per call.

    What ``kvcore.PagedKVCacheManager`` is built on, for engines that bring their own contexts
    and pool.

    Parameters
    ----------
    num_blocks : int
        Pages of each replica.
    page_size : int
        Tokens per page.
    max_sequences : int
        Sequences claimed at a time, in each replica.
    max_seq_len : int
        Tokens of the longest sequence.
    num_replicas : int
    prefix_caching, dedup : bool
    partial_page_reuse : int
        As for PagedKVCacheManager.
    host_pages : int
        Pages of each replica's host tier, 0 for none. Only PagedKVCacheManager moves their bytes:
        with a tier, ``reserve`` and ``commit`` of this class are a ValueError.
    eviction : str or kvcore.policies.EvictionPolicy
        Which cached pages go first when memory is full.
    groups : list of (kind, span, bundles, page_size)
        Layers that do not all keep every token: kind is "full", "sliding" or "chunked", span the tokens
        of the window or chunk, page_size divides that of the manager. None by default.
    reserve_chunks : bool
    max_draft_tokens : int
        As for PagedKVCacheManager.
    quotas : list of (reserved_pages, max_pages)
        Of tenants, which are their numbers here; max_pages is None for no ceiling.
    states : list of int
        For each group of layers with a state the tokens between its checkpoints; 0: none but at ends of
        prompts and at branches.
    num_states : int
        Slots of states of each replica, at least max_sequences where there are such groups.
    num_host_states : int
        Slots of the host tier of each replica for checkpoints of states.
    write_policy : {"write_through", "write_through_selective", "write_back"}
        When a cached page goes to the host tier.
    write_threshold : int
        With "write_through_selective": once it was used so often, 1 .. 255.
    host_eviction : str or kvcore.policies.EvictionPolicy
        Which pages of the host tier go first when it is full.
    host_min_priority : int
        With ``eviction="priority"``: of a prefix no page goes there from the first of a lower priority on.
    has_stores : bool
        What arrives in the host tier has keys and waits to be written to stores below it.
    key_seed : bytes
        Of these keys, one item of canonical CBOR; empty for none.
    stand_ins : capsule, optional
        The names of tokens with extra keys.
    event_pages : int
        Pages of which events wait to be taken, at most; 0 for no events.
    first_page : int
        Where page ids begin.
    keep_windows : bool
        ``step`` gives back no page that a window has passed; ``leave_windows`` does.

    Raises
    ------
    ValueError, TypeError
        A size below 1, or no such policy.

    Notes
    -----
    Thread-safe: any number of threads may call any method. A call that raises or returns "no" has
    changed nothing. Wherever tokens are passed they are a list of int or an int32 or int64 array.

    Examples
    --------
    >>> from kvcore import CacheManager
    >>> manager = CacheManager(num_blocks=8, page_size=2, max_sequences=4, max_seq_len=16)
    >>> sequence = manager.claim()
    >>> manager.reserve(sequence, [5, 6, 7])  # fits, start, active
    (True, 0, 3)
    >>> len(manager.commit(sequence, [5, 6, 7], written=3)), manager.match([5, 6, 7])[0]
    (0, 2)
    """

    def __init__(
        self,
        *,
        num_blocks: int,
        page_size: int,
        max_sequences: int,
        max_seq_len: int,
        num_replicas: int = 1,
        prefix_caching: bool = True,
        dedup: bool = True,
        partial_page_reuse: int = True,
        host_pages: int = 0,
        eviction: EvictionPolicy | str = "lru",
        groups: Sequence[tuple[str, int, int, int]] = ...,
        reserve_chunks: bool = False,
        max_draft_tokens: int = 0,
        quotas: Sequence[tuple[int, int | None]] = ...,
        states: Sequence[int] = ...,
        num_states: int = 0,
        num_host_states: int = 0,
        write_policy: str = "write_through",
        write_threshold: int = 2,
        host_eviction: EvictionPolicy | str = "lru",
        host_min_priority: int = 0,
        has_stores: bool = False,
        key_seed: bytes = b"",
        stand_ins: object = None,
        event_pages: int = 0,
        first_page: int = 0,
        keep_windows: bool = False,
    ) -> None: ...
    def claim(self, replica: int = 0) -> SequenceHandle:
        """Register a sequence; takes no pages.

        Returns
        -------
        SequenceHandle
            Names the sequence until it is released, and nothing afterwards.

        Raises
        ------
        IndexError
            No such replica.
        CapacityError
            The replica has `max_sequences` sequences.
        """
    def contains(self, sequence: SequenceHandle) -> bool:
        """Tell whether a sequence is claimed now."""
    def replica_of(self, sequence: SequenceHandle) -> int:
        """Return the index of a sequence's replica; RequestNotFoundError when it is not claimed."""
    def pages_of(self, sequence: SequenceHandle, bundle: int = 0, first: int = 0) -> _Ids:
        """Return a sequence's page ids in logical order, of a bundle where there are groups.

        Parameters
        ----------
        first : int
            From this page on, as what a reservation has added.

        Returns
        -------
        int32 [pages - first]
            Empty where there are no more. -1 stands for a page that no layer of the bundle reads any more,
            or that is not reserved yet.

        Raises
        ------
        ValueError
            `first` is below 0.
        RequestNotFoundError, IndexError
        """
    def release(self, sequence: SequenceHandle) -> None:
        """Forget a sequence: committed pages stay cached; RequestNotFoundError when it is not claimed."""
    def reserve(
        self,
        sequence: SequenceHandle,
        tokens: _Ints,
        start: int = 0,
        *,
        active: int | None = None,
        num_steps: int = 1,
        extra_key: str | None = None,
        cache_salt: str | None = None,
        max_hit: int | None = None,
        keep_free: int = 0,
        must_fit: int | None = None,
    ) -> tuple[bool, int, int]:
        """Reuse the cached prefix of a sequence and allocate the pages that its next steps need.

        Parameters
        ----------
        sequence : SequenceHandle
        tokens : list of int, or array int32 or int64 [n]
            All tokens of the sequence.
        start, active : int
            ``tokens[start:active]`` run next; `active` is n unless given.
        num_steps : int
            Steps before the next reservation.
        extra_key, cache_salt : str, optional
            Prefix-cache namespace.
        max_hit : int, optional
            The sequence has so many tokens of the cache at most, or what it had before; 0: none.
        keep_free : int
            Pages of the replica that are free or evictable afterwards.
        must_fit : int, optional
            Beside `keep_free` there is room for the sequence with so many tokens, of which it gets no page
            by that.

        Returns
        -------
        fits : bool
            False when there are not enough pages; nothing has changed, and nothing was evicted.
        start, active : int
            Where the sequence stands now: behind the prefix found.

        Raises
        ------
        CapacityError
            The sequence, or what must fit, can never fit.
        ValueError
            An option below 0, and what else is wrong with the arguments.
        RequestNotFoundError
        """
    def plan(
        self,
        sequence: SequenceHandle,
        tokens: _Ints,
        start: int = 0,
        *,
        active: int | None = None,
        num_steps: int = 1,
        extra_key: str | None = None,
        cache_salt: str | None = None,
        max_hit: int | None = None,
        keep_free: int = 0,
        must_fit: int | None = None,
    ) -> ReservePlan:
        """Tell what ``reserve`` would do now; changes nothing.

        Returns
        -------
        ReservePlan
            With the fields of ``kvcore.ReservePlan``.
        """
    def commit(self, sequence: SequenceHandle, tokens: _Ints, written: int) -> _Ids:
        """Put the pages whose tokens are all written into the prefix cache.

        Parameters
        ----------
        sequence : SequenceHandle
        tokens : list of int, or array int32 or int64 [n]
        written : int
            Tokens whose K and V are written, ``0 .. n``.

        Returns
        -------
        int32 [swaps, 2]
            Pages swapped for equal cached ones: column, page.

        Raises
        ------
        ValueError
            More tokens than the sequence's pages hold, or than there are.
        RequestNotFoundError
        """
    def match(
        self,
        tokens: _Ints,
        replica: int = 0,
        extra_key: str | None = None,
        cache_salt: str | None = None,
        *,
        touch: bool = False,
    ) -> tuple[int, _Ids]:
        """Find the cached whole pages of a prefix; changes nothing unless it is to touch.

        Parameters
        ----------
        touch : bool
            It is a use of these pages, by which they are evicted later.

        Returns
        -------
        num_tokens : int
        pages : int32 [num_tokens / page_size]
        """
    def pin(
        self,
        tokens: _Ints,
        replica: int = 0,
        extra_key: str | None = None,
        cache_salt: str | None = None,
    ) -> PinHandle:
        """Keep the cached whole pages of a prefix from eviction until unpinned.

        Returns
        -------
        PinHandle
            Its ``num_tokens`` are kept.
        """
    def unpin(self, pin: PinHandle) -> None:
        """Let pinned pages go; InvalidHandleError when that was done before."""
    def forget(self, pages: _Ints, replica: int = 0) -> int:
        """Take cached pages out of the cache whose contents are wrong, say of a load that failed.

        Parameters
        ----------
        pages : list of int, or array int32 or int64 [n]
            Ids, of any bundle. Those of free pages are passed over.

        Returns
        -------
        int
            Pages that left: these, and what was cached behind them. Sequences, pins and holds keep theirs;
            a sequence commits nothing from the first of them on. Costs O(cached pages + sequences).

        Raises
        ------
        InvalidHandleError
            An id that is no page's; nothing has changed.
        IndexError, TypeError, ValueError
        """
    def hold(self, pages: _Ints, replica: int = 0) -> HeldPages:
        """Keep pages from being evicted, or handed out to anybody else, whoever releases them.

        Parameters
        ----------
        pages : list of int, or array int32 or int64 [n]
            Ids of pages that sequences hold or that are cached, with groups of any bundle: all pages of the
            same tokens are held then.

        Returns
        -------
        HeldPages
            Holds nest. Costs O(pages), and O(cached pages) to find them.

        Raises
        ------
        InvalidHandleError
            An id that is no page's, or a free page's; nothing has changed.
        CapacityError
            The quotas of tenants leave no room for cached pages to be held.
        IndexError, TypeError, ValueError
        """
    def next_pages(self, replica: int = 0) -> _Ids:
        """List the pages that can be had, in the order in which sequences would be given them.

        Returns
        -------
        int32 [n]
            Free pages, then cached ones as they would be evicted now.

        Raises
        ------
        ValueError
            With groups of layers, and with quotas, where it depends on who asks for how many.
        IndexError

        Notes
        -----
        For tests, and for looking at a cache; changes nothing. Exact with ``"lru"``; other policies may
        have a run wait that another one follows now, which is listed right behind that one. Costs O(pages).
        """
    def take_copies(self) -> _Ids:
        """Hand out the page copies owed since the last call, to be done before the next kernels run.

        Returns
        -------
        int32 [n, 4]
            Replica, source page, destination page, tokens.
        """
    def take_state_copies(self) -> _Ids:
        """Hand out the copies of state slots owed since the last call, to be done before the next kernels run.

        Returns
        -------
        int32 [n, 3]
            Replica, source slot, destination slot: in all groups, in this order.
        """
    def state_of(self, sequence: SequenceHandle) -> int:
        """Return the slot of a sequence's state; -1 before it is reserved, and without states."""
    def state_stats(self, replica: int = 0) -> StateStats:
        """Count the slots of states of a replica; zeros without states."""
    def reset_prefix_cache(self) -> bool:
        """Forget every cached page, on every replica; who holds a page keeps it, and no later request hits it.

        Returns
        -------
        bool
            True where no page is left that was cached. False while requests, pins or holds keep some.
        """
    def group_stats(self, replica: int = 0) -> list[GroupStats]:
        """Return the GroupStats of each group of a replica, in their order; none without groups. O(pages)."""
    def set_tenant(self, sequence: SequenceHandle, tenant: int | None) -> None:
        """Have the pages that a sequence takes from now on count for a tenant: one of ``quotas``, or None."""
    def tenant_stats(self, replica: int = 0) -> list[TenantStats]:
        """Return the TenantStats of each quota of a replica, in their order; none without quotas. O(tenants)."""
    def stats(self, replica: int = 0) -> PoolStats:
        """Count the pages of a replica.

        Returns
        -------
        PoolStats
            ``total_pages``, ``free_pages``, ``cached_pages``, ``evictable_pages``, ``num_sequences``,
            ``available_pages``, those that a reservation could have, and of the host tier ``host_pages``
            and ``host_cached_pages``.
        """
    @property
    def metrics(self) -> Metrics:
        """Counters summed over replicas, a copy: input_tokens, cache_tokens, copied_tokens, evicted_pages, peak_used_pages, stored_pages, loaded_pages, loaded_tokens; evicted and host_evicted are EvictionCounts."""
    def reset_metrics(self) -> None:
        """Set every counter to zero, the peak to what is in use."""
    def check_integrity(self) -> None:
        """Raise AssertionError naming the conservation law that does not hold. O(everything)."""
    def _late_reads(self, replica: int) -> int: ...
    def _capsule(self) -> object: ...

class PageCopier:
    """Copies within the pools of a manager; by replica, their arrays."""

    def __init__(self, pools: list[list[list[list[_Array]]]]) -> None: ...
    def run(self, copies: _Array) -> None:
        """run(self: kvcore._core.PageCopier, copies: typing.Annotated[numpy.typing.ArrayLike, numpy.int64]) -> None

        Copy the starts of pages, in any order; rows: replica, source page, destination page, tokens.
        """
    def _capsule(self) -> object: ...

class HostStore:
    """Memory of the host tier's pages for one replica, and copies between it and the arrays of the pool."""

    def __init__(self, num_pages: int, caches: list[list[list[_Array]]]) -> None: ...
    @property
    def num_pages(self) -> int: ...
    @property
    def page_bytes(self) -> int: ...
    @property
    def memory(self) -> NDArray[np.uint8]:
        """The pages as bytes, uint8 [num_pages, page_bytes]; present ahead of their use."""

    def expect(self, last: int) -> None:
        """expect(self: kvcore._core.HostStore, last: typing.SupportsInt | typing.SupportsIndex) -> None

        Have memory up to a page present, and some behind it; nothing where it is.
        """
    def store(self, pairs: _Array, threads: int = 1) -> None:
        """store(self: kvcore._core.HostStore, pairs: typing.Annotated[numpy.typing.ArrayLike, numpy.int64], threads: object = 1) -> None

        Copy pages to the host tier; rows: page of the pool, page of the tier.
        """
    def load(self, pairs: _Array, threads: int = 1) -> None:
        """load(self: kvcore._core.HostStore, pairs: typing.Annotated[numpy.typing.ArrayLike, numpy.int64], threads: object = 1) -> None

        Copy pages of the host tier back; rows as for store.
        """

class StoreTask:
    """A batch of pages on its way to or from a disk; holds their buffers."""

    def done(self) -> bool:
        """done(self: kvcore._core.StoreTask) -> bool

        Return whether it is over, without waiting.
        """
    def wait(self, timeout: float | None = None) -> bool:
        """wait(self: kvcore._core.StoreTask, timeout: typing.SupportsFloat | typing.SupportsIndex | None = None) -> bool

        Wait for so many seconds, or without end; return whether it is over.
        """
    def result(self) -> int:
        """result(self: kvcore._core.StoreTask) -> int

        Wait; return the pages that were read, a prefix, or that are stored now.
        """

class DiskStore:
    """Pages in files of fixed slots, by key: see kvcore.stores.DiskStore."""

    def __init__(
        self,
        directories: Sequence[tuple[str | bytes, int]],
        page_bytes: int,
        fingerprint: bytes,
        *,
        threads: int,
        queue_pages: int,
        segment_bytes: int,
        direct: bool,
        breaker_failures: int,
        breaker_seconds: float,
        slow_seconds: float,
    ) -> None: ...
    def get(self, keys: Sequence[bytes], buffers: Sequence[Any]) -> StoreTask:
        """get(self: kvcore._core.DiskStore, keys: collections.abc.Sequence, buffers: collections.abc.Sequence) -> kvcore._core.StoreTask

        Begin to read pages into buffers.
        """
    def get_placed(
        self,
        keys: Sequence[bytes],
        places: Sequence[Any],
        rows: NDArray[np.uint8],
        slots: NDArray[np.uint8] | None = None,
    ) -> StoreTask:
        """get_placed(self: kvcore._core.DiskStore, keys: collections.abc.Sequence, places: collections.abc.Sequence, rows: object, slots: object = None) -> kvcore._core.StoreTask

        Begin to read pages into rows of arrays: for each key (part, row) of all its parts.
        """
    def put(self, keys: Sequence[bytes], buffers: Sequence[Any]) -> StoreTask:
        """put(self: kvcore._core.DiskStore, keys: collections.abc.Sequence, buffers: collections.abc.Sequence) -> kvcore._core.StoreTask

        Begin to write pages from buffers.
        """
    def parts_of(self, keys: Sequence[bytes]) -> list[int]:
        """parts_of(self: kvcore._core.DiskStore, keys: collections.abc.Sequence) -> list[int]

        Return a bit for each part that each page has.
        """
    def remove(self, keys: Sequence[bytes]) -> int:
        """remove(self: kvcore._core.DiskStore, keys: collections.abc.Sequence) -> int

        Forget pages; return how many there were.
        """
    def clear(self) -> int:
        """clear(self: kvcore._core.DiskStore) -> int

        Forget all pages, those on their way included; return how many were found.
        """
    def stats(self) -> dict[str, Any]:
        """stats(self: kvcore._core.DiskStore) -> dict

        Return the counters since the store was opened.
        """
    @property
    def slot_bytes(self) -> int:
        """Bytes that a page takes in a file."""
    @property
    def page_bytes(self) -> int:
        """Most bytes of a page."""
    @property
    def closed(self) -> bool:
        """Whether it refuses every call: closed, or of a process that was forked."""
    def close(self) -> None:
        """close(self: kvcore._core.DiskStore) -> None

        Carry out what waits, and let the directories go.
        """
    def check_integrity(self) -> None:
        """check_integrity(self: kvcore._core.DiskStore) -> None

        Raise AssertionError unless each slot is free, being written, or found by its key.
        """

def inspect_disk_store(directory: str | bytes, verify: bool) -> dict[str, Any]:
    """inspect_disk_store(directory: str, verify: bool) -> dict

    Return what the files of a store hold, all bytes checked if asked for.
    """

def purge_disk_store(directory: str | bytes) -> int:
    """purge_disk_store(directory: str) -> int

    Remove the files of a store; return their bytes.
    """

def crc32c(data: Any, before: int = 0) -> int:
    """crc32c(data: object, before: typing.SupportsInt | typing.SupportsIndex = 0) -> int

    Return the CRC-32C of bytes, or of those behind bytes whose CRC is `before`.
    """

def allocate_blocks(
    key_pool: _Array,
    value_pool: _Array,
    block_table: _Array,
    seq_lengths: _Array,
    sequence_idx: int,
    num_new_tokens: int,
    free_block_ids: _Ints,
    donate: bool,
) -> tuple[tuple[_Array, _Array, _Array, _Array], int]:
    """allocate_blocks(key_pool: numpy.ndarray, value_pool: numpy.ndarray, block_table: numpy.ndarray, seq_lengths: numpy.ndarray, sequence_idx: object, num_new_tokens: object, free_block_ids: object, donate: object) -> tuple

    Enter free blocks into a row: (the cache's arrays, blocks consumed); copies the table unless donated.
    """

def append_rows(
    key_pool: _Array,
    value_pool: _Array,
    block_table: _Array,
    seq_lengths: _Array,
    sequence_idx: int,
    keys_new: _Array,
    values_new: _Array,
    donate: bool,
) -> tuple[_Array, _Array, _Array, _Array]:
    """append_rows(key_pool: numpy.ndarray, value_pool: numpy.ndarray, block_table: numpy.ndarray, seq_lengths: numpy.ndarray, sequence_idx: object, keys_new: numpy.ndarray, values_new: numpy.ndarray, donate: object) -> tuple

    Write tokens behind those of a row: the cache's arrays, copies unless donated.
    """

def gather_rows(
    key_pool: _Array,
    value_pool: _Array,
    block_table: _Array,
    seq_lengths: _Array,
    sequence_idx: int,
) -> tuple[_Array, _Array, int]:
    """gather_rows(key_pool: numpy.ndarray, value_pool: numpy.ndarray, block_table: numpy.ndarray, seq_lengths: numpy.ndarray, sequence_idx: object) -> tuple

    Copy the tokens of a row: (keys, values, tokens).
    """

def kernel_isa() -> str:
    """kernel_isa() -> str"""

def quantize(
    shape: Sequence[int],
    source: _Array,
    codes: _Array,
    scales: NDArray[np.float32],
    threads: int,
) -> None:
    """quantize(shape: collections.abc.Sequence[typing.SupportsInt | typing.SupportsIndex], source: numpy.ndarray, codes: numpy.ndarray, scales: numpy.ndarray, threads: object) -> None"""

def dequantize(
    shape: Sequence[int],
    codes: _Array,
    scales: NDArray[np.float32],
    destination: _Array,
    threads: int,
) -> None:
    """dequantize(shape: collections.abc.Sequence[typing.SupportsInt | typing.SupportsIndex], codes: numpy.ndarray, scales: numpy.ndarray, destination: numpy.ndarray, threads: object) -> None"""

def quantize_nvfp4(
    source: _Array,
    codes: NDArray[np.uint8],
    scales: _Array,
    global_scale: float | NDArray[np.float32],
    threads: int,
) -> None:
    """quantize_nvfp4(source: numpy.ndarray, codes: numpy.ndarray, scales: numpy.ndarray, global_scale: object, threads: object) -> None"""

def dequantize_nvfp4(
    codes: NDArray[np.uint8],
    scales: _Array,
    destination: _Array,
    global_scale: float | NDArray[np.float32],
    threads: int,
) -> None:
    """dequantize_nvfp4(codes: numpy.ndarray, scales: numpy.ndarray, destination: numpy.ndarray, global_scale: object, threads: object) -> None"""

def append_nvfp4(
    transfers: list[tuple[str, NDArray[np.uint8], _Array, Any, _Array]],
    table: NDArray[np.uint32],
    lengths: NDArray[np.uint32] | None,
    offsets: NDArray[np.uint32],
    threads: int,
) -> None:
    """append_nvfp4(transfers: list, table: numpy.ndarray, lengths: object, offsets: numpy.ndarray, threads: object) -> None"""

def gather_nvfp4(
    transfers: list[tuple[str, NDArray[np.uint8], _Array, Any, _Array]],
    table: NDArray[np.uint32],
    offsets: NDArray[np.uint32],
    threads: int,
) -> None:
    """gather_nvfp4(transfers: list, table: numpy.ndarray, offsets: numpy.ndarray, threads: object) -> None"""

def append_slots_nvfp4(
    transfers: list[tuple[str, NDArray[np.uint8], _Array, Any, _Array]],
    slots: _Array,
    threads: int,
) -> int:
    """append_slots_nvfp4(transfers: list, slots: numpy.ndarray, threads: object) -> int"""

def append_tokens(
    transfers: list[tuple[str, _Array, _Array | None, _Array | None, _Array]],
    table: NDArray[np.uint32],
    lengths: NDArray[np.uint32] | None,
    offsets: NDArray[np.uint32],
    threads: int,
) -> None:
    """append_tokens(transfers: list, table: numpy.ndarray, lengths: object, offsets: numpy.ndarray, threads: object) -> None"""

def gather_tokens(
    transfers: list[tuple[str, _Array, _Array | None, _Array | None, _Array]],
    table: NDArray[np.uint32],
    offsets: NDArray[np.uint32],
    threads: int,
) -> None:
    """gather_tokens(transfers: list, table: numpy.ndarray, offsets: numpy.ndarray, threads: object) -> None"""

def attention(
    pools: tuple[_Array | None, ...],
    global_scales: tuple[Any, Any] | None,
    v_head_dim: SupportsIndex | None,
    step: tuple[NDArray[np.uint32], NDArray[np.uint32], NDArray[np.uint32]],
    q: _Array,
    rule: tuple[Any, ...],
    shared: object,
    replica: SupportsIndex,
    out: _Array | None,
    out_lse: NDArray[np.float32] | None,
    return_lse: bool,
    threads: int,
) -> tuple[_Array, NDArray[np.float32] | None]:
    """attention(pools: tuple, global_scales: object, v_head_dim: object, step: tuple, q: numpy.ndarray, rule: tuple, shared: object, replica: object, out: object, out_lse: object, return_lse: object, threads: object) -> tuple"""

def merge_states(
    o_a: _Array,
    lse_a: NDArray[np.float32],
    o_b: _Array,
    lse_b: NDArray[np.float32],
    out: _Array,
    out_lse: NDArray[np.float32],
    threads: int,
) -> None:
    """merge_states(o_a: numpy.ndarray, lse_a: numpy.ndarray, o_b: numpy.ndarray, lse_b: numpy.ndarray, out: numpy.ndarray, out_lse: numpy.ndarray, threads: object) -> None"""

def build_slots(
    pool: _Array,
    table: NDArray[np.uint32],
    lengths: NDArray[np.uint32],
    offsets: NDArray[np.uint32],
    out: _Array | None,
) -> _Array:
    """build_slots(pool: numpy.ndarray, table: numpy.ndarray, lengths: numpy.ndarray, offsets: numpy.ndarray, out: object) -> numpy.ndarray"""

def append_slots(pools: list[_Array], slots: _Array, tokens: list[_Array], threads: int) -> int:
    """append_slots(pools: list, slots: numpy.ndarray, tokens: list, threads: object) -> int"""

def advance_lengths(
    lengths: NDArray[np.uint32],
    offsets: NDArray[np.uint32],
    active: NDArray[np.bool_] | None,
    out: NDArray[np.uint32],
) -> None:
    """advance_lengths(lengths: numpy.ndarray, offsets: numpy.ndarray, active: object, out: numpy.ndarray) -> None"""

def compact_table(
    table: NDArray[np.uint32],
    lengths: NDArray[np.uint32] | None,
    offsets: NDArray[np.uint32] | None,
    kept: NDArray[np.uint32],
    threads: int,
) -> None:
    """compact_table(table: numpy.ndarray, lengths: object, offsets: object, kept: numpy.ndarray, threads: object) -> None"""

def layout_axes() -> dict[str, tuple[str, ...]]:
    """layout_axes() -> dict"""

def transfer(
    source: list[list[_Array]],
    source_is_packed: bool,
    destination: list[list[_Array]],
    destination_is_packed: bool,
    pairs: NDArray[np.int64],
    first_layer: int,
    num_layers: int,
    threads: int,
) -> None:
    """transfer(source: list, source_is_packed: bool, destination: list, destination_is_packed: bool, pairs: typing.Annotated[numpy.typing.ArrayLike, numpy.int64], first_layer: typing.SupportsInt | typing.SupportsIndex, num_layers: typing.SupportsInt | typing.SupportsIndex, threads: object) -> None"""

def copy_partial(pool: list[list[_Array]], copies: NDArray[np.int64], threads: int) -> None:
    """copy_partial(pool: list, copies: typing.Annotated[numpy.typing.ArrayLike, numpy.int64], threads: object) -> None"""

def copy_pages(pools: list[_Array], pairs: NDArray[np.int64], threads: int) -> None:
    """copy_pages(pools: list, pairs: typing.Annotated[numpy.typing.ArrayLike, numpy.int64], threads: object) -> None"""

def fill_pages(pools: list[_Array], ids: NDArray[np.int64], value: int, threads: int) -> None:
    """fill_pages(pools: list, ids: typing.Annotated[numpy.typing.ArrayLike, numpy.int64], value: typing.SupportsInt | typing.SupportsIndex, threads: object) -> None"""

def has_shared_elements(shape: Sequence[int], strides: Sequence[int], item_size: int) -> bool:
    """has_shared_elements(shape: collections.abc.Sequence[typing.SupportsInt | typing.SupportsIndex], strides: collections.abc.Sequence[typing.SupportsInt | typing.SupportsIndex], item_size: typing.SupportsInt | typing.SupportsIndex) -> bool"""

def digest_pages(pool: _Array, ids: NDArray[np.int64], threads: int) -> NDArray[np.uint64]:
    """digest_pages(pool: numpy.ndarray, ids: typing.Annotated[numpy.typing.ArrayLike, numpy.int64], threads: object) -> numpy.typing.NDArray[numpy.uint64]"""
