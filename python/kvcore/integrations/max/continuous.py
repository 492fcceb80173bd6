# SPDX-License-Identifier: Apache-2.0
"""ContinuousBatchingKVCacheManager: one slot of max_seq_len tokens per sequence."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any, SupportsIndex

import numpy as np

from kvcore.device import Device, checked_devices
from kvcore.integrations.max.elements import host_copy, on_device
from kvcore.integrations.max.slot_inputs import (
    ContinuousBatchingKVCacheInputs,
    SlotSymbols,
    increment_slot_lengths,
    slot_symbols,
)
from kvcore.integrations.max.slots import SlotClaims, SlotTable, as_ids
from kvcore.integrations.max.views import ContinuousBatchingKVCacheCollection, longest_lengths
from kvcore.params import KVCacheParams, require_count, require_one_group, require_params
from kvcore.pools import allocate_shard, shard_shapes
from kvcore.support.arguments import integer

__all__ = ["ContinuousBatchingKVCacheManager"]

_ROW_BYTES = 8  # a length and a table entry, uint32 each


class ContinuousBatchingKVCacheManager:
    """Own a KV cache in which each sequence has one slot of `max_seq_len` tokens.

    Parameters
    ----------
    params : KVCacheParams
        `num_layers` and `page_size` are re-derived from the arguments; prefix caching and the host
        tier do not apply to slots. KV heads are spread over the devices.
    max_cache_batch_size : int
        Slots.
    max_seq_len : int
        Tokens per slot.
    num_layers : int
    devices : sequence of str or Device
        As many as ``params.n_devices``.
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
    it was. Slots are not cleared when they are claimed again: a length says how much is valid.

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
        """Return the shape of a device's pool for so many sequences.

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
        """Return the bytes of the slots, and of lengths and table, over all devices."""
        require_count(max_cache_batch_size=max_cache_batch_size)
        params = _slot_params(params, max_seq_len, num_layers)
        slot = params.bytes_per_page // params.tensor_parallel_degree
        return max_cache_batch_size * (slot + _ROW_BYTES) * len(_parsed(devices))

    @property
    def num_blocks(self) -> int:
        """Slots, the same as ``max_batch_size``."""
        return self.max_batch_size

    @property
    def max_seq_len(self) -> int:
        """Tokens per slot."""
        return self.params.page_size

    @property
    def num_layers(self) -> int:
        """Layers of the model."""
        return self.params.num_layers

    @property
    def blocks(self) -> list[Any]:
        """The pool of each device."""
        return [blocks for blocks, _ in self._shards]

    @property
    def cache_lengths(self) -> dict[int, int]:
        """Tokens that each claimed sequence holds, by id; a copy."""
        return self._slots.lengths()

    @property
    def slots_remaining(self) -> int:
        """Slots that can be claimed."""
        return self._slots.num_free

    # ---- sequences -----------------------------------------------------------------------

    def claim(self, batch_size: SupportsIndex) -> list[int]:
        """Claim slots for new sequences, round robin over the free ones; all or nothing.

        Returns
        -------
        list of int [batch_size]
            The ids of the sequences, which are their slots.

        Raises
        ------
        CapacityError
            Fewer slots are free.
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
            An id outside ``0 .. max_batch_size - 1``, or one named twice.
        """
        self._slots.claim_ids(as_ids(seq_ids, self.num_blocks))

    def contains(self, seq_id: object) -> bool:
        """Tell whether a sequence is claimed now."""
        return self._slots.contains(seq_id)

    def release(self, seq_id: SupportsIndex) -> None:
        """Free a sequence's slot; RequestNotFoundError when it is not claimed."""
        self._slots.release(integer("seq_id", seq_id))

    def fetch(self, seq_ids: Iterable[SupportsIndex]) -> list[ContinuousBatchingKVCacheInputs]:
        """Hand out what the kernels need for a batch.

        Returns
        -------
        list of tuple (blocks, cache_lengths, lookup_table, is_cache_empty)
            One per device; the arrays never change later, the pool does.

        Raises
        ------
        RequestNotFoundError
            A sequence that is not claimed.
        ValueError
            One named twice.
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
        """Hand out the same as one view per device.

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
        Loads and stores of a view raise InvalidHandleError once their sequence was released.
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
        """Note the tokens that a step has written; all or nothing.

        Parameters
        ----------
        valid_lengths : dict of id to count, or list of counts [B]
        seq_ids : list of int [B], or what ``fetch_collection`` returned
            The sequences of a list of counts.

        Raises
        ------
        RequestNotFoundError
            A sequence that is not claimed.
        InvalidHandleError
            A sequence of the collection that was released since.
        CapacityError
            A sequence would be longer than `max_seq_len`.
        ValueError
            Counts below 0, or not one per sequence.
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
        """Return the ids that a step names, and the claims they must still have."""
        if given is None:
            raise ValueError("valid_lengths is a list without seq_ids; pass them, or a dict")
        if isinstance(given, list | tuple) and given and isinstance(given[0], self.CollectionType):
            given = given[0]  # one per device, all of the same rows
        if not isinstance(given, self.CollectionType):
            return as_ids(given, self.num_blocks), None
        claims = given.guard
        if not isinstance(claims, SlotClaims):
            return as_ids(host_copy(given.lookup_table), self.num_blocks), None
        if claims.table is not self._slots:
            raise ValueError("the collection is another manager's; pass one that this one fetched")
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
            Row offsets that do not belong to these inputs, or not one input per device.
        CapacityError
            A sequence would be longer than `max_seq_len`. Not on GPUs, where nothing is read back.

        Notes
        -----
        The manager's own lengths move only in ``step``.
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
        """Check the conservation laws of the slots; AssertionError names a broken one."""
        self._slots.check_integrity()

    def __repr__(self) -> str:
        free = self.slots_remaining
        return (
            f"ContinuousBatchingKVCacheManager({self.num_blocks} slots of {self.max_seq_len} "
            f"tokens: {free} free, {self.num_blocks - free} used)"
        )


def _parsed(devices: Iterable[Device | str]) -> tuple[Device, ...]:
    """Return devices that may be others than a manager's own."""
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
