# SPDX-License-Identifier: Apache-2.0
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

_Ints: TypeAlias = Sequence[int] | NDArray[np.int32] | NDArray[np.int64]
_Ids: TypeAlias = NDArray[np.int32]
_Array: TypeAlias = NDArray[Any]

__version__: str
build_info: dict[str, str | int | bool]

class BlockPool:
    """Count the references of page ids 0 .. num_blocks - 1; O(1) per id.

    Raises ValueError unless ``1 <= num_blocks <= 2**31 - 1``. Not thread-safe by itself.
    """

    def __init__(self, num_blocks: int) -> None: ...
    @property
    def num_blocks(self) -> int: ...
    @property
    def num_free(self) -> int: ...
    def allocate(self, n: int) -> _Ids:
        """Take n pages with one reference each: int32 [n]. Raises InsufficientBlocksError."""
    def share(self, ids: _Ints) -> None:
        """Add one reference to each. Raises InvalidHandleError for a free id; changes nothing."""
    def free(self, ids: _Ints) -> None:
        """Drop one reference of each. Raises InvalidHandleError (double free); changes nothing."""
    def ref_count(self, block_id: int) -> int:
        """Answer the references to a page, 0 when it is free."""
    def check_integrity(self) -> None:
        """Raise AssertionError unless free + referenced == total. O(num_blocks)."""

class SequenceHandle:
    """A claim; stale after release."""

    def __eq__(self, other: object, /) -> bool: ...
    def __hash__(self) -> int: ...

class PinHandle:
    """A pinned prefix."""

    @property
    def num_tokens(self) -> int: ...

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
    def peak_used_pages(self) -> int: ...

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
    def available_pages(self) -> int: ...

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

class CacheManager:
    """The C++ entry point with ids only, one sequence per call. Thread-safe; every call atomic.

    Raises ValueError for sizes below 1.
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
        partial_page_reuse: bool = True,
    ) -> None: ...
    def claim(self, replica: int = 0) -> SequenceHandle:
        """Register a sequence. Raises IndexError, CapacityError."""
    def contains(self, sequence: SequenceHandle) -> bool: ...
    def replica_of(self, sequence: SequenceHandle) -> int: ...
    def pages_of(self, sequence: SequenceHandle) -> _Ids: ...
    def release(self, sequence: SequenceHandle) -> None:
        """Forget a sequence; committed pages stay cached. Raises RequestNotFoundError."""
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
    ) -> tuple[bool, int, int]:
        """Reuse the cached prefix and allocate pages: (fits, start, active) afterwards."""
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
    ) -> ReservePlan:
        """Tell what reserve would do now; changes nothing."""
    def commit(self, sequence: SequenceHandle, tokens: _Ints, written: int) -> _Ids:
        """Put full written pages into the tree; swaps as int32 [n, 2]: column, page."""
    def match(
        self,
        tokens: _Ints,
        replica: int = 0,
        extra_key: str | None = None,
        cache_salt: str | None = None,
    ) -> tuple[int, _Ids]:
        """Cached tokens in whole pages and the page ids; changes nothing."""
    def pin(
        self,
        tokens: _Ints,
        replica: int = 0,
        extra_key: str | None = None,
        cache_salt: str | None = None,
    ) -> PinHandle:
        """Keep the cached pages of a prefix until unpinned."""
    def unpin(self, pin: PinHandle) -> None:
        """Let them go. Raises InvalidHandleError when that was done before."""
    def take_copies(self) -> _Ids:
        """Page copies owed, int32 [n, 4]: replica, source, destination, tokens."""
    def reset_prefix_cache(self) -> None: ...
    def stats(self, replica: int = 0) -> PoolStats: ...
    @property
    def metrics(self) -> Metrics: ...
    def reset_metrics(self) -> None: ...
    def check_integrity(self) -> None:
        """Raise AssertionError naming the law that does not hold."""
    def _capsule(self) -> object: ...

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
    """Enter free blocks into a row: (the cache's arrays, blocks consumed); copies the table."""

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
    """Write tokens behind those of a row: the cache's arrays, copies unless donated."""

def gather_rows(
    key_pool: _Array,
    value_pool: _Array,
    block_table: _Array,
    seq_lengths: _Array,
    sequence_idx: int,
) -> tuple[_Array, _Array, int]:
    """Copy the tokens of a row: (keys, values, tokens)."""
