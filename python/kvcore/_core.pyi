# SPDX-License-Identifier: Apache-2.0
from collections.abc import Sequence
from typing import Any, SupportsIndex, TypeAlias

import numpy as np
from numpy.typing import NDArray

_Ints: TypeAlias = Sequence[int] | NDArray[np.int32] | NDArray[np.int64]
_Ids: TypeAlias = NDArray[np.int32]
_Array: TypeAlias = NDArray[Any]

__version__: str
build_info: dict[str, str | int | bool]

class BlockPool:
    def __init__(self, num_blocks: int) -> None: ...
    @property
    def num_blocks(self) -> int: ...
    @property
    def num_free(self) -> int: ...
    def allocate(self, n: int) -> _Ids: ...
    def share(self, ids: _Ints) -> None: ...
    def free(self, ids: _Ints) -> None: ...
    def ref_count(self, block_id: int) -> int: ...
    def check_integrity(self) -> None: ...

class SequenceHandle:
    def __eq__(self, other: object, /) -> bool: ...
    def __hash__(self) -> int: ...

class PinHandle:
    @property
    def num_tokens(self) -> int: ...

class Metrics:
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
    @property
    def stored_pages(self) -> int: ...
    @property
    def loaded_pages(self) -> int: ...

class PoolStats:
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

class ReservePlan:
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
    ) -> None: ...
    def claim(self, replica: int = 0) -> SequenceHandle: ...
    def contains(self, sequence: SequenceHandle) -> bool: ...
    def replica_of(self, sequence: SequenceHandle) -> int: ...
    def pages_of(self, sequence: SequenceHandle) -> _Ids: ...
    def release(self, sequence: SequenceHandle) -> None: ...
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
    ) -> tuple[bool, int, int]: ...
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
    ) -> ReservePlan: ...
    def commit(self, sequence: SequenceHandle, tokens: _Ints, written: int) -> _Ids: ...
    def match(
        self,
        tokens: _Ints,
        replica: int = 0,
        extra_key: str | None = None,
        cache_salt: str | None = None,
    ) -> tuple[int, _Ids]: ...
    def pin(
        self,
        tokens: _Ints,
        replica: int = 0,
        extra_key: str | None = None,
        cache_salt: str | None = None,
    ) -> PinHandle: ...
    def unpin(self, pin: PinHandle) -> None: ...
    def take_copies(self) -> _Ids: ...
    def reset_prefix_cache(self) -> None: ...
    def stats(self, replica: int = 0) -> PoolStats: ...
    @property
    def metrics(self) -> Metrics: ...
    def reset_metrics(self) -> None: ...
    def check_integrity(self) -> None: ...
    def _capsule(self) -> object: ...

class PageCopier:
    def __init__(self, pools: list[list[list[list[_Array]]]]) -> None: ...
    def run(self, copies: _Array) -> None: ...
    def _capsule(self) -> object: ...

class HostStore:
    def __init__(self, num_pages: int, caches: list[list[list[_Array]]]) -> None: ...
    @property
    def num_pages(self) -> int: ...
    @property
    def page_bytes(self) -> int: ...
    def store(self, pairs: _Array, threads: int = 1) -> None: ...
    def load(self, pairs: _Array, threads: int = 1) -> None: ...

def allocate_blocks(
    key_pool: _Array,
    value_pool: _Array,
    block_table: _Array,
    seq_lengths: _Array,
    sequence_idx: int,
    num_new_tokens: int,
    free_block_ids: _Ints,
    donate: bool,
) -> tuple[tuple[_Array, _Array, _Array, _Array], int]: ...
def append_rows(
    key_pool: _Array,
    value_pool: _Array,
    block_table: _Array,
    seq_lengths: _Array,
    sequence_idx: int,
    keys_new: _Array,
    values_new: _Array,
    donate: bool,
) -> tuple[_Array, _Array, _Array, _Array]: ...
def gather_rows(
    key_pool: _Array,
    value_pool: _Array,
    block_table: _Array,
    seq_lengths: _Array,
    sequence_idx: int,
) -> tuple[_Array, _Array, int]: ...
def kernel_isa() -> str: ...
def quantize(
    shape: Sequence[int],
    source: _Array,
    codes: _Array,
    scales: NDArray[np.float32],
    threads: int,
) -> None: ...
def dequantize(
    shape: Sequence[int],
    codes: _Array,
    scales: NDArray[np.float32],
    destination: _Array,
    threads: int,
) -> None: ...
def append_tokens(
    transfers: list[tuple[str, _Array, _Array | None, _Array | None, _Array]],
    table: NDArray[np.uint32],
    lengths: NDArray[np.uint32] | None,
    offsets: NDArray[np.uint32],
    threads: int,
) -> None: ...
def gather_tokens(
    transfers: list[tuple[str, _Array, _Array | None, _Array | None, _Array]],
    table: NDArray[np.uint32],
    offsets: NDArray[np.uint32],
    threads: int,
) -> None: ...
def attention(
    pools: tuple[_Array | None, ...],
    v_head_dim: SupportsIndex | None,
    step: tuple[NDArray[np.uint32], NDArray[np.uint32], NDArray[np.uint32]],
    q: _Array,
    rule: tuple[Any, ...],
    shared: object,
    replica: SupportsIndex,
    out: _Array | None,
    return_lse: bool,
    threads: int,
) -> tuple[_Array, NDArray[np.float32] | None]: ...
def merge_states(
    o_a: _Array,
    lse_a: NDArray[np.float32],
    o_b: _Array,
    lse_b: NDArray[np.float32],
    out: _Array,
    out_lse: NDArray[np.float32],
    threads: int,
) -> None: ...
def build_slots(
    pool: _Array,
    table: NDArray[np.uint32],
    lengths: NDArray[np.uint32],
    offsets: NDArray[np.uint32],
    out: _Array | None,
) -> _Array: ...
def append_slots(pools: list[_Array], slots: _Array, tokens: list[_Array], threads: int) -> int: ...
def advance_lengths(
    lengths: NDArray[np.uint32],
    offsets: NDArray[np.uint32],
    active: NDArray[np.bool_] | None,
    out: NDArray[np.uint32],
) -> None: ...
def layout_axes() -> dict[str, tuple[str, ...]]: ...
def transfer(
    source: list[list[_Array]],
    source_is_packed: bool,
    destination: list[list[_Array]],
    destination_is_packed: bool,
    pairs: NDArray[np.int64],
    first_layer: int,
    num_layers: int,
    threads: int,
) -> None: ...
def copy_partial(pool: list[list[_Array]], copies: NDArray[np.int64], threads: int) -> None: ...
def copy_pages(pools: list[_Array], pairs: NDArray[np.int64], threads: int) -> None: ...
def fill_pages(pools: list[_Array], ids: NDArray[np.int64], value: int, threads: int) -> None: ...
def has_shared_elements(shape: Sequence[int], strides: Sequence[int], item_size: int) -> bool: ...
def digest_pages(pool: _Array, ids: NDArray[np.int64], threads: int) -> NDArray[np.uint64]: ...
