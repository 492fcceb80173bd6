# SPDX-License-Identifier: Apache-2.0
from collections.abc import Sequence
from typing import Any, ClassVar, SupportsIndex, TypeAlias

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

class CacheConfig:
    options: ClassVar[tuple[str, ...]]
    def __init__(self, **options: Any) -> None: ...
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
    @property
    def memory(self) -> NDArray[np.uint8]: ...
    def expect(self, last: int) -> None: ...
    def store(self, pairs: _Array, threads: int = 1) -> None: ...
    def load(self, pairs: _Array, threads: int = 1) -> None: ...

class StoreTask:
    def done(self) -> bool: ...
    def wait(self, timeout: float | None = None) -> bool: ...
    def result(self) -> int: ...

class DiskLowerStore:
    def __init__(
        self,
        store: DiskStore,
        pages: Sequence[NDArray[np.uint8]],
        slots: Sequence[NDArray[np.uint8]],
        has_parts: bool,
        seconds: float,
    ) -> None: ...
    def take_counters(self) -> tuple[int, int, list[float], list[float]]: ...
    def _capsule(self) -> object: ...

class DiskStore:
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
    def get(self, keys: Sequence[bytes], buffers: Sequence[Any]) -> StoreTask: ...
    def get_placed(
        self,
        keys: Sequence[bytes],
        places: Sequence[Any],
        rows: NDArray[np.uint8],
        slots: NDArray[np.uint8] | None = None,
    ) -> StoreTask: ...
    def put(self, keys: Sequence[bytes], buffers: Sequence[Any]) -> StoreTask: ...
    def parts_of(self, keys: Sequence[bytes]) -> list[int]: ...
    def remove(self, keys: Sequence[bytes]) -> int: ...
    def clear(self) -> int: ...
    def stats(self) -> dict[str, Any]: ...
    @property
    def slot_bytes(self) -> int: ...
    @property
    def page_bytes(self) -> int: ...
    @property
    def closed(self) -> bool: ...
    def close(self) -> None: ...
    def check_integrity(self) -> None: ...

def inspect_disk_store(directory: str | bytes, verify: bool) -> dict[str, Any]: ...
def purge_disk_store(directory: str | bytes) -> int: ...
def crc32c(data: Any, before: int = 0) -> int: ...
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
def dtypes() -> list[tuple[str, int, float]]: ...
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
def quantize_nvfp4(
    source: _Array,
    codes: NDArray[np.uint8],
    scales: _Array,
    global_scale: float | NDArray[np.float32],
    threads: int,
) -> None: ...
def dequantize_nvfp4(
    codes: NDArray[np.uint8],
    scales: _Array,
    destination: _Array,
    global_scale: float | NDArray[np.float32],
    threads: int,
) -> None: ...
def append_nvfp4(
    transfers: list[tuple[str, NDArray[np.uint8], _Array, Any, _Array]],
    table: NDArray[np.uint32],
    lengths: NDArray[np.uint32] | None,
    offsets: NDArray[np.uint32],
    threads: int,
) -> None: ...
def gather_nvfp4(
    transfers: list[tuple[str, NDArray[np.uint8], _Array, Any, _Array]],
    table: NDArray[np.uint32],
    offsets: NDArray[np.uint32],
    threads: int,
) -> None: ...
def append_slots_nvfp4(
    transfers: list[tuple[str, NDArray[np.uint8], _Array, Any, _Array]],
    slots: _Array,
    threads: int,
) -> int: ...
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
    global_scales: tuple[Any, Any] | None,
    v_head_dim: SupportsIndex | None,
    step: tuple[NDArray[np.uint32], NDArray[np.uint32], NDArray[np.uint32]],
    q: _Array,
    rule: tuple[Any, ...],
    shared: tuple[object, SupportsIndex],
    out: _Array | None,
    out_lse: NDArray[np.float32] | None,
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
def compact_table(
    table: NDArray[np.uint32],
    lengths: NDArray[np.uint32] | None,
    offsets: NDArray[np.uint32] | None,
    kept: NDArray[np.uint32],
    threads: int,
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
