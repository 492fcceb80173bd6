# SPDX-License-Identifier: Apache-2.0
"""ContinuousBatchingKVCacheManager: one slot of max_seq_len tokens per sequence."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, NamedTuple, SupportsIndex

import numpy as np
from numpy.typing import NDArray

from kvcore._core import BlockPool
from kvcore.backends.arrays import is_on_gpu
from kvcore.backends.selection import any_array, place_of
from kvcore.device import Device, checked_devices
from kvcore.errors import (
    AlreadyClaimedError,
    CapacityError,
    InvalidHandleError,
    RequestNotFoundError,
)
from kvcore.integrations.max.views import (
    ContinuousBatchingKVCacheCollection,
    host_copy,
    longest_lengths,
    on_device,
    require_array,
)
from kvcore.ops.increment import added_tokens, checked_offsets
from kvcore.ops.slots import advance_lengths
from kvcore.params import KVCacheParams, require_count, require_one_group, require_params
from kvcore.pools import ArraySymbol, allocate_shard, pool_symbols, shard_shapes
from kvcore.support.arguments import integer

__all__ = [
    "ContinuousBatchingKVCacheInputs",
    "ContinuousBatchingKVCacheManager",
    "SlotClaims",
    "SlotSymbols",
    "SlotTable",
    "as_ids",
    "increment_slot_lengths",
    "slot_symbols",
]


def as_ids(ids: Iterable[Any], slots: int, name: str = "seq_ids") -> list[int]:
    """Return ids as a list of int; TypeError for another type, ValueError for a duplicate.

    Read at most ``slots + 1`` ids, so an endless source is safe. If there are more ids than slots,
    at least one returned id is not a slot.
    """
    if isinstance(ids, str | bytes) or not isinstance(ids, Iterable):
        raise TypeError(f"{name} is a {type(ids).__name__}, must be a list of int")
    listed = [
        integer(f"{name}[{i}]", each) for i, each in enumerate(itertools.islice(ids, slots + 1))
    ]
    if len(set(listed)) < len(listed):
        twice = next(each for each in listed if listed.count(each) > 1)
        raise ValueError(f"{name} holds {twice} twice; name each sequence once")
    return listed


@dataclass(frozen=True, slots=True)
class SlotClaims:
    """The claims of a batch's rows; a call checks that a row's claim is still valid.

    Attributes
    ----------
    table : SlotTable
    ids : tuple of int [B]
    serials : tuple of int [B]
        The serial numbers of the slots' claims.
    """

    table: SlotTable
    ids: tuple[int, ...]
    serials: tuple[int, ...]

    def __call__(self, row: int, column: int, page: int) -> None:  # noqa: ARG002 - a Guard
        """Raise InvalidHandleError unless the claim of `row` is valid."""
        self.table.require_serials(self.ids[row : row + 1], self.serials[row : row + 1])


class SlotTable:
    """Own the slots 0 .. num_slots - 1; a slot is one page of `max_seq_len` tokens.

    Notes
    -----
    A slot is claimed exactly when its page is referenced and it has a length. One lock; every
    method is atomic. ``claim`` and ``claim_ids`` cost O(slots), the other methods O(ids).
    """

    def __init__(self, num_slots: int, max_seq_len: int) -> None:
        self._lock = threading.Lock()
        self._pages = BlockPool(num_slots)
        self._max_seq_len = max_seq_len
        self._next = 0  # first slot of the next search for a free slot
        self._lengths: dict[int, int] = {}
        self._serials: dict[int, int] = {}
        self._new_serial = itertools.count()

    # ---- claims --------------------------------------------------------------------------

    def claim(self, n: int) -> list[int]:
        """Claim the next `n` free slots, round robin; see the manager."""
        with self._lock:
            if n > self._pages.num_free:
                raise CapacityError(
                    f"batch_size is {n}, {self._pages.num_free} of {self._pages.num_blocks} "
                    f"slots are free; release a sequence first"
                )
            free = self._pages.allocate(self._pages.num_free)
            free = free[np.argsort((free - self._next) % self._pages.num_blocks)]
            taken: list[int] = free[:n].tolist()
            self._keep(taken, free[n:])
            if taken:
                self._next = (taken[-1] + 1) % self._pages.num_blocks
            return taken

    def claim_ids(self, ids: list[int]) -> None:
        """Claim these slots; see the manager."""
        with self._lock:
            for slot in ids:
                if not 0 <= slot < self._pages.num_blocks:
                    raise ValueError(f"slot {slot} must be 0 .. {self._pages.num_blocks - 1}")
                if slot in self._lengths:
                    raise AlreadyClaimedError(f"slot {slot} is claimed already; release it first")
            free = self._pages.allocate(self._pages.num_free)
            self._keep(ids, free[~np.isin(free, ids)])

    def _keep(self, taken: list[int], rest: NDArray[np.int32]) -> None:
        """Record claims of the pages `taken`, and free the pages `rest`."""
        self._pages.free(rest)
        self._lengths.update(dict.fromkeys(taken, 0))
        self._serials.update(zip(taken, self._new_serial, strict=False))

    def release(self, slot: int) -> None:
        """Free a slot."""
        with self._lock:
            self._require([slot])
            self._pages.free([slot])
            del self._lengths[slot], self._serials[slot]

    def _require(self, ids: Iterable[int]) -> None:
        for slot in ids:
            if slot not in self._lengths:
                raise RequestNotFoundError(
                    f"sequence {slot} is not claimed (slots 0 .. {self._pages.num_blocks - 1}); "
                    f"claim it first"
                )

    # ---- lengths -------------------------------------------------------------------------

    def rows(self, ids: list[int]) -> tuple[list[int], SlotClaims]:
        """Return the lengths of claimed slots, and their claims."""
        with self._lock:
            self._require(ids)
            claims = SlotClaims(self, tuple(ids), tuple(self._serials[slot] for slot in ids))
            return [self._lengths[slot] for slot in ids], claims

    def grow(self, ids: Sequence[int], added: list[int], claims: SlotClaims | None = None) -> None:
        """Add to the lengths of slots, all or nothing; `claims`, if given, must still be valid."""
        with self._lock:
            if claims is not None:
                self._require_serials(claims.ids, claims.serials)
            self._require(ids)
            for slot, more in zip(ids, added, strict=True):
                total = self._lengths[slot] + more
                if more < 0:
                    raise ValueError(f"sequence {slot} would grow by {more}, must be at least 0")
                if total > self._max_seq_len:
                    raise CapacityError(
                        f"sequence {slot} would hold {self._lengths[slot]} + {more} = {total} "
                        f"tokens, max_seq_len is {self._max_seq_len}; add fewer tokens"
                    )
            for slot, more in zip(ids, added, strict=True):
                self._lengths[slot] += more

    def require_serials(self, ids: tuple[int, ...], serials: tuple[int, ...]) -> None:
        """Raise InvalidHandleError for a slot released after its claim, even if claimed again."""
        with self._lock:
            self._require_serials(ids, serials)

    def _require_serials(self, ids: tuple[int, ...], serials: tuple[int, ...]) -> None:
        for slot, serial in zip(ids, serials, strict=True):
            if self._serials.get(slot) != serial:
                raise InvalidHandleError(
                    f"sequence {slot} was released after this view of it was made; fetch it again"
                )

    # ---- queries -------------------------------------------------------------------------

    @property
    def num_free(self) -> int:
        """Slots that can be claimed."""
        with self._lock:
            return self._pages.num_free

    def lengths(self) -> dict[int, int]:
        """Copy the lengths of all claimed slots."""
        with self._lock:
            return dict(self._lengths)

    def contains(self, slot: object) -> bool:
        """Return true if a slot is claimed."""
        with self._lock:
            return slot in self._lengths

    def check_integrity(self) -> None:
        """Raise AssertionError unless the claimed slots are the referenced slots with a length."""
        with self._lock:
            self._pages.check_integrity()
            claimed = self._lengths.keys()
            laws = {
                "a slot with a length has a claim": claimed == self._serials.keys(),
                "claimed + free == all": len(claimed) + self._pages.num_free
                == self._pages.num_blocks,
                "a claimed slot's page is referenced": all(map(self._pages.ref_count, claimed)),
                "lengths are 0 .. max_seq_len": all(
                    0 <= length <= self._max_seq_len for length in self._lengths.values()
                ),
            }
        for law, holds in laws.items():
            if not holds:
                raise AssertionError(f"slots: {law}")


# ---- inputs --------------------------------------------------------------------------------------


class ContinuousBatchingKVCacheInputs(NamedTuple):
    """The inputs of one device's kernels for one batch of B sequences.

    Attributes
    ----------
    blocks : array [slots, kv_dim, layers, max_seq_len, heads_per_device, head_dim]
        The whole pool.
    cache_lengths : uint32 [B]
    lookup_table : uint32 [B]
        Slot of each sequence.
    is_cache_empty : bool [1]
        True if all lengths are 0.
    """

    blocks: Any
    cache_lengths: Any
    lookup_table: Any
    is_cache_empty: Any


class SlotSymbols(NamedTuple):
    """Describe the fields of a ContinuousBatchingKVCacheInputs on one device."""

    blocks: ArraySymbol
    cache_lengths: ArraySymbol
    lookup_table: ArraySymbol
    is_cache_empty: ArraySymbol


def slot_symbols(params: KVCacheParams, device: Device) -> SlotSymbols:
    """Describe the inputs of a device's kernels."""
    (blocks,) = pool_symbols(params, device, "num_blocks")
    return SlotSymbols(
        blocks,
        ArraySymbol("cache_lengths", "uint32", ("batch_size",), device),
        ArraySymbol("lookup_table", "uint32", ("batch_size",), device),
        ArraySymbol("is_cache_empty", "bool", (1,), device),
    )


def increment_slot_lengths(
    inputs: Sequence[tuple[Any, Any, Any, Any]], prev_model_inputs: Any, max_seq_len: int
) -> list[ContinuousBatchingKVCacheInputs]:
    """See ``ContinuousBatchingKVCacheManager.increment_cache_lengths``."""
    for i, each in enumerate(inputs):
        if not isinstance(each, tuple | list) or len(each) != 4:
            raise TypeError(
                f"kv_cache_inputs[{i}] is a {type(each).__name__}, must be what fetch returns: "
                f"(blocks, cache_lengths, lookup_table, is_cache_empty)"
            )
        require_array("cache_lengths", each[1], 1, np.uint32)
    if is_on_gpu(inputs[0][1]):
        return _advance_on_gpus(inputs, prev_model_inputs)
    before = any_array(inputs[0][1], "cache_lengths")
    after = before + added_tokens(prev_model_inputs, [len(before)])
    if len(after) and after.max() > max_seq_len:
        raise CapacityError(
            f"row {after.argmax()} would hold {after.max()} tokens, max_seq_len is {max_seq_len}"
        )
    lengths, flag = after.astype(np.uint32), np.array([False])
    return [
        ContinuousBatchingKVCacheInputs(blocks, lengths, table, flag)
        for blocks, _, table, _ in inputs
    ]


def _advance_on_gpus(
    inputs: Sequence[tuple[Any, Any, Any, Any]], prev_model_inputs: Any
) -> list[ContinuousBatchingKVCacheInputs]:
    """Advance the lengths of each device on its current stream, without a copy to the host."""
    offsets, _ = checked_offsets(prev_model_inputs, [len(inputs[0][1])])
    advanced = []
    for blocks, lengths, table, _ in inputs:
        flag = place_of(None, {"cache_lengths": lengths}).from_host(np.array([False]))
        after = advance_lengths(lengths, offsets)
        advanced.append(ContinuousBatchingKVCacheInputs(blocks, after, table, flag))
    return advanced


# ---- manager -------------------------------------------------------------------------------------


_ROW_BYTES = 8  # a length and a table entry, uint32 each


class ContinuousBatchingKVCacheManager:
    """Own a KV cache in which each sequence has one slot of `max_seq_len` tokens.

    Parameters
    ----------
    params : KVCacheParams
        `num_layers` and `page_size` come from the arguments below; prefix caching and the host tier
        do not apply to slots. KV heads are spread over the devices.
    max_cache_batch_size : int
        The number of slots.
    max_seq_len : int
        Tokens per slot.
    num_layers : int
    devices : sequence of str or Device
        ``params.n_devices`` devices.
    session
        Accepted for call compatibility, not used.

    Raises
    ------
    ValueError
        A size below 1, another number of devices, data parallel replicas, a V width of its own.
    TypeError

    Notes
    -----
    Thread-safe: any number of threads may call any method. A call that raises leaves everything as
    it was. A new claim does not clear its slot: the length is the number of valid tokens.

    Examples
    --------
    >>> import kvcore
    >>> params = kvcore.KVCacheParams("float32", n_kv_heads=1, head_dim=4, num_layers=2)
    >>> mgr = kvcore.ContinuousBatchingKVCacheManager(params, 4, 16, 2, ["cpu"])
    >>> ids = mgr.claim(2)
    >>> mgr.step({ids[0]: 5, ids[1]: 3})  # the prompts have been run
    >>> mgr.fetch(ids)[0].cache_lengths.tolist()
    [5, 3]
    """

    CollectionType = ContinuousBatchingKVCacheCollection

    def __init__(
        self,
        params: KVCacheParams,
        max_cache_batch_size: int,
        max_seq_len: int,
        num_layers: int,
        devices: Sequence[Device | str],
        session: object = None,  # noqa: ARG002 - call compatibility
    ) -> None:
        require_count(max_cache_batch_size=max_cache_batch_size)
        self.params = _slot_params(params, max_seq_len, num_layers)
        self.devices = checked_devices(devices, params.n_devices)
        self.max_batch_size = max_cache_batch_size
        self._shards = [
            allocate_shard(self.params, max_cache_batch_size, device) for device in self.devices
        ]
        self._slots = SlotTable(max_cache_batch_size, max_seq_len)

    # ---- sizes ---------------------------------------------------------------------------

    def block_shape(self, n_sequences: int) -> list[int]:
        """Return the shape of a device's pool for `n_sequences` sequences.

        Returns
        -------
        list of int
            ``[n, kv_dim, num_layers, max_seq_len, n_kv_heads_per_device, head_dim]``; kv_dim is 2,
            or 1 with MLA.
        """
        return list(shard_shapes(self.params, integer("n_sequences", n_sequences, 0, 2**31 - 1))[0])

    @classmethod
    def estimated_memory_size(
        cls,
        params: KVCacheParams,
        max_cache_batch_size: int,
        max_seq_len: int,
        num_layers: int,
        devices: Sequence[Device | str],
    ) -> int:
        """Return the bytes of the slots, lengths and tables on all devices together."""
        require_count(max_cache_batch_size=max_cache_batch_size)
        params = _slot_params(params, max_seq_len, num_layers)
        slot = params.bytes_per_page // params.tensor_parallel_degree
        return max_cache_batch_size * (slot + _ROW_BYTES) * len(_parsed(devices))

    @property
    def num_blocks(self) -> int:
        """The number of slots, equal to ``max_batch_size``."""
        return self.max_batch_size

    @property
    def max_seq_len(self) -> int:
        """Tokens per slot."""
        return self.params.page_size

    @property
    def num_layers(self) -> int:
        """The number of layers of the model."""
        return self.params.num_layers

    @property
    def blocks(self) -> list[Any]:
        """The pool of each device."""
        return [blocks for blocks, _ in self._shards]

    @property
    def cache_lengths(self) -> dict[int, int]:
        """The number of tokens of each claimed sequence, by id; a copy."""
        return self._slots.lengths()

    @property
    def slots_remaining(self) -> int:
        """Slots that can be claimed."""
        return self._slots.num_free

    # ---- sequences -----------------------------------------------------------------------

    def claim(self, batch_size: SupportsIndex) -> list[int]:
        """Claim slots for new sequences, round robin over the free slots; all or nothing.

        Returns
        -------
        list of int [batch_size]
            The ids of the sequences, which are their slots.

        Raises
        ------
        CapacityError
            Fewer than `batch_size` slots are free.
        ValueError
            A negative `batch_size`.
        """
        return self._slots.claim(integer("batch_size", batch_size, 0))

    def external_claim(self, seq_ids: Iterable[SupportsIndex]) -> None:
        """Claim the slots that the caller names; all or nothing.

        Raises
        ------
        AlreadyClaimedError
        ValueError
            An id outside ``0 .. max_batch_size - 1``, or an id named twice.
        """
        self._slots.claim_ids(as_ids(seq_ids, self.num_blocks))

    def contains(self, seq_id: object) -> bool:
        """Return true if a sequence is claimed."""
        return self._slots.contains(seq_id)

    def release(self, seq_id: SupportsIndex) -> None:
        """Free a sequence's slot; RequestNotFoundError if the sequence is not claimed."""
        self._slots.release(integer("seq_id", seq_id))

    def fetch(self, seq_ids: Iterable[SupportsIndex]) -> list[ContinuousBatchingKVCacheInputs]:
        """Return the inputs of the kernels for a batch.

        Returns
        -------
        list of tuple (blocks, cache_lengths, lookup_table, is_cache_empty)
            One per device. Later calls change only the pool, not the other arrays.

        Raises
        ------
        RequestNotFoundError
            A sequence that is not claimed.
        ValueError
            A sequence named twice.
        """
        ids = as_ids(seq_ids, self.num_blocks)
        return self._inputs(ids, self._slots.rows(ids)[0])

    def _inputs(self, ids: list[int], lengths: list[int]) -> list[ContinuousBatchingKVCacheInputs]:
        rows = np.array(lengths, np.uint32), np.array(ids, np.uint32), np.array([not any(lengths)])
        return [
            ContinuousBatchingKVCacheInputs(blocks, *on_device(device, rows))
            for blocks, device in zip(self.blocks, self.devices, strict=True)
        ]

    def fetch_collection(
        self, seq_ids: Iterable[SupportsIndex], new_tokens: int | Sequence[int] = 1
    ) -> list[ContinuousBatchingKVCacheCollection]:
        """Return the inputs of a batch as one view per device.

        Parameters
        ----------
        seq_ids : list of int [B]
        new_tokens : int or sequence of int [B]
            Tokens that the step adds to each sequence.

        Raises
        ------
        RequestNotFoundError, ValueError
            As for ``fetch``.
        CapacityError
            A sequence would be longer than `max_seq_len`.

        Notes
        -----
        Loads and stores of a view raise InvalidHandleError after their sequence was released.
        """
        ids = as_ids(seq_ids, self.num_blocks)
        lengths, claims = self._slots.rows(ids)
        limits = longest_lengths(np.array(lengths, np.uint32), new_tokens, self.max_seq_len)
        inputs = self._inputs(ids, lengths)
        return [
            ContinuousBatchingKVCacheCollection(
                *each[:3], *limits, scales, kv_params=self.params, guard=claims
            )
            for each, (_, scales) in zip(inputs, self._shards, strict=True)
        ]

    def step(
        self,
        valid_lengths: Mapping[Any, SupportsIndex] | Iterable[SupportsIndex],
        seq_ids: Iterable[SupportsIndex]
        | ContinuousBatchingKVCacheCollection
        | Sequence[ContinuousBatchingKVCacheCollection]
        | None = None,
    ) -> None:
        """Add the tokens that a step has written to the lengths; all or nothing.

        Parameters
        ----------
        valid_lengths : dict of id to count, or list of counts [B]
        seq_ids : list of int [B], or the result of ``fetch_collection``
            The sequences of a list of counts.

        Raises
        ------
        RequestNotFoundError
            A sequence that is not claimed.
        InvalidHandleError
            A sequence of the collection was released after the fetch.
        CapacityError
            A sequence would be longer than `max_seq_len`.
        ValueError
            A count below 0, or a number of counts other than the number of sequences.
        """
        if isinstance(valid_lengths, Mapping):
            if seq_ids is not None:
                raise ValueError("seq_ids are given with a dict, which names them; leave them out")
            ids, added, claims = (
                as_ids(valid_lengths, self.num_blocks),
                list(valid_lengths.values()),
                None,
            )
        else:
            if not isinstance(valid_lengths, Iterable):
                raise TypeError(
                    f"valid_lengths is a {type(valid_lengths).__name__}, must be a dict or a list"
                )
            ids, claims = self._sequences(seq_ids)
            added = list(islice(valid_lengths, len(ids) + 1))
        if len(added) != len(ids):
            raise ValueError(f"valid_lengths has {len(added)} counts for {len(ids)} sequences")
        counts = [integer(f"valid_lengths[{i}]", more) for i, more in enumerate(added)]
        self._slots.grow(ids, counts, claims)

    def _sequences(self, given: Any) -> tuple[list[int], SlotClaims | None]:
        """Return the ids that a step names, and the claims that must still be valid."""
        if given is None:
            raise ValueError("valid_lengths is a list without seq_ids; pass them, or a dict")
        if isinstance(given, list | tuple) and given and isinstance(given[0], self.CollectionType):
            given = given[0]  # each device's view has the same rows
        if not isinstance(given, self.CollectionType):
            return as_ids(given, self.num_blocks), None
        claims = given.guard
        if not isinstance(claims, SlotClaims):
            return as_ids(host_copy(given.lookup_table), self.num_blocks), None
        if claims.table is not self._slots:
            raise ValueError(
                "the collection is another manager's; pass a collection of this manager's"
            )
        return list(claims.ids), claims

    # ---- multi-step ----------------------------------------------------------------------

    def increment_cache_lengths(
        self,
        kv_cache_inputs: Sequence[tuple[Any, Any, Any, Any]],
        prev_model_inputs: Any,
    ) -> list[ContinuousBatchingKVCacheInputs]:
        """Advance the inputs of a multi-step run by one step.

        Parameters
        ----------
        kv_cache_inputs : sequence of tuple
            One per device, as fetched or as returned by the previous call; not changed.
        prev_model_inputs
            An object with ``input_row_offsets`` uint32 [B + 1], a tuple ``(x, row_offsets)``, or
            the row offsets themselves.

        Returns
        -------
        list of ContinuousBatchingKVCacheInputs
            The same pool and table; ``cache_lengths[i] += row_offsets[i + 1] - row_offsets[i]``,
            ``is_cache_empty`` False.

        Raises
        ------
        ValueError
            Row offsets that do not fit these inputs, or another number of inputs than devices.
        CapacityError
            A sequence would be longer than `max_seq_len`. GPUs do not check this: no readback.

        Notes
        -----
        Only ``step`` changes the manager's own lengths.
        """
        if not isinstance(kv_cache_inputs, list | tuple):
            raise TypeError(f"inputs are a {type(kv_cache_inputs).__name__}, must be a list")
        if len(kv_cache_inputs) != len(self.devices):
            raise ValueError(
                f"{len(kv_cache_inputs)} inputs for {len(self.devices)} devices, must be one each"
            )
        return increment_slot_lengths(kv_cache_inputs, prev_model_inputs, self.max_seq_len)

    def input_symbols(
        self, devices: Sequence[Device | str] | None = None, num_layers: int | None = None
    ) -> list[SlotSymbols]:
        """Name each field of the fetched inputs with dtype and symbolic shape, per device."""
        params = self.params
        if num_layers is not None:
            params = replace(params, num_layers=num_layers)
        places = self.devices if devices is None else _parsed(devices)
        return [slot_symbols(params, device) for device in places]

    def check_integrity(self) -> None:
        """Check the conservation laws of the slots; AssertionError names a broken law."""
        self._slots.check_integrity()

    def __repr__(self) -> str:
        free = self.slots_remaining
        return (
            f"ContinuousBatchingKVCacheManager({self.num_blocks} slots of {self.max_seq_len} "
            f"tokens: {free} free, {self.num_blocks - free} used)"
        )


def _parsed(devices: Iterable[Device | str]) -> tuple[Device, ...]:
    """Return the devices of a list; they may differ from a manager's own."""
    if isinstance(devices, str) or not isinstance(devices, Iterable):
        raise TypeError(f"devices is a {type(devices).__name__}, must be a list of devices")
    return tuple(Device.parse(device) for device in devices)


def _slot_params(params: KVCacheParams, max_seq_len: int, num_layers: int) -> KVCacheParams:
    """Return the params of a pool whose pages are slots."""
    require_params(params)
    require_one_group(params)
    require_count(max_seq_len=max_seq_len, num_layers=num_layers)
    if params.data_parallel_degree != 1:
        raise ValueError(
            f"data_parallel_degree is {params.data_parallel_degree}, slots are not spread over "
            f"replicas; use one manager per replica, or PagedKVCacheManager"
        )
    if params.v_head_dim is not None:
        raise ValueError(
            f"v_head_dim is {params.v_head_dim}, a slot holds K and V of one width; "
            f"use PagedKVCacheManager"
        )
    return replace(
        params,
        num_layers=num_layers,
        page_size=max_seq_len,
        enable_prefix_caching=False,
        enable_kvcache_swapping_to_host=False,
    )
