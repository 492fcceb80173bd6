# SPDX-License-Identifier: Apache-2.0
# The kernels on GPUs. Arrays are cupy's; numbers may be a pair of a numpy array and its copy.
from typing import Any, SupportsIndex, TypeAlias

import numpy as np
from numpy.typing import NDArray

_Device: TypeAlias = Any
_Numbers: TypeAlias = Any
_Cache: TypeAlias = list[list[Any]]

is_emulated: bool

class DeviceMemory:
    def __init__(self, device: int, bytes: int) -> None: ...  # noqa: A002
    @property
    def device(self) -> int: ...
    @property
    def bytes(self) -> int: ...
    @property
    def ptr(self) -> int: ...

class PinnedMemory:
    def __init__(self, device: int, bytes: int) -> None: ...  # noqa: A002
    @property
    def bytes(self) -> int: ...
    @property
    def ptr(self) -> int: ...

class Stream:
    def __init__(self, device: int) -> None: ...
    @property
    def device(self) -> int: ...
    @property
    def ptr(self) -> int: ...

class Event:
    def __init__(self, device: int) -> None: ...
    @property
    def device(self) -> int: ...
    @property
    def ptr(self) -> int: ...

class DeviceScope:
    def __init__(self, device: int) -> None: ...
    def __enter__(self) -> None: ...
    def __exit__(self, *args: object) -> None: ...

def count_devices() -> tuple[int, str]: ...
def memory_info(device: int) -> tuple[int, int]: ...
def device_of(address: int) -> int: ...
def record(event: int, device: int, stream: int) -> None: ...
def wait(event: int, device: int, stream: int) -> None: ...
def query(event: int, device: int) -> bool: ...
def is_capturing(device: int, stream: int) -> bool: ...
def synchronize(device: int, stream: int) -> None: ...
def synchronize_event(event: int, device: int) -> None: ...
def synchronize_device(device: int) -> None: ...
def fill(
    destination: int,
    value: int,
    bytes: int,  # noqa: A002
    device: int,
    stream: int,
) -> None: ...
def copy(
    destination: int,
    source: int,
    bytes: int,  # noqa: A002
    device: int,
    stream: int,
) -> None: ...
def copy_batch(
    destinations: NDArray[np.uint64],
    sources: NDArray[np.uint64],
    bytes: NDArray[np.int64],  # noqa: A002
    device: int,
    stream: int,
) -> None: ...
def copy_strided(source: _Device, destination: _Device, device: int, stream: int) -> None: ...
def row_offsets(lengths: _Device, out: _Device, device: int, stream: int) -> None: ...
def copy_pages(pools: list[_Device], pairs: _Numbers, device: int, stream: int) -> None: ...
def fill_pages(
    pools: list[_Device], ids: _Numbers, value: int, device: int, stream: int
) -> None: ...
def digest_pages(
    pool: _Device, ids: _Numbers, out: _Device, weight: int, device: int, stream: int
) -> None: ...
def append_tokens(
    transfers: list[tuple[str, _Device, _Device | None, _Device | None, _Device]],
    table: _Device,
    lengths: _Device | None,
    offsets: _Numbers,
    device: int,
    stream: int,
) -> None: ...
def gather_tokens(
    transfers: list[tuple[str, _Device, _Device | None, _Device | None, _Device]],
    table: _Device,
    offsets: _Numbers,
    device: int,
    stream: int,
) -> None: ...
def build_slots(
    pool: _Device,
    table: _Device,
    lengths: _Device,
    offsets: _Numbers,
    out: _Device,
    device: int,
    stream: int,
) -> None: ...
def append_slots(
    pools: list[_Device],
    slots: _Numbers,
    tokens: list[_Device],
    bad: _Device,
    device: int,
    stream: int,
) -> None: ...
def advance_lengths(
    lengths: _Device,
    offsets: _Numbers,
    active: _Device | None,
    out: _Device,
    device: int,
    stream: int,
) -> None: ...
def compact_table(
    table: _Device,
    lengths: _Device | None,
    offsets: _Device | None,
    kept: _Numbers,
    device: int,
    stream: int,
) -> None: ...
def allocate_blocks(
    key_pool: _Device,
    value_pool: _Device,
    block_table: NDArray[np.int32],
    seq_lengths: NDArray[np.int32],
    sequence_idx: int,
    num_new_tokens: int,
    free_block_ids: Any,
) -> int: ...
def check_append(
    key_pool: _Device,
    value_pool: _Device,
    block_table: NDArray[np.int32],
    seq_lengths: NDArray[np.int32],
    sequence_idx: int,
    keys_new: _Device,
    values_new: _Device,
) -> int: ...
def check_gather(
    key_pool: _Device,
    value_pool: _Device,
    block_table: NDArray[np.int32],
    seq_lengths: NDArray[np.int32],
    sequence_idx: int,
) -> int: ...
def quantize(
    shape: tuple[int, ...],
    source: _Device,
    codes: _Device,
    scales: _Device,
    device: int,
    stream: int,
) -> None: ...
def dequantize(
    shape: tuple[int, ...],
    codes: _Device,
    scales: _Device,
    destination: _Device,
    device: int,
    stream: int,
) -> None: ...
def quantize_nvfp4(
    source: _Device,
    codes: _Device,
    scales: _Device,
    global_scale: float | _Device,
    device: int,
    stream: int,
) -> None: ...
def dequantize_nvfp4(
    codes: _Device,
    scales: _Device,
    destination: _Device,
    global_scale: float | _Device,
    device: int,
    stream: int,
) -> None: ...
def append_nvfp4(
    transfers: list[tuple[str, _Device, _Device, float | _Device, _Device]],
    table: _Device,
    lengths: _Device | None,
    offsets: _Numbers,
    device: int,
    stream: int,
) -> None: ...
def gather_nvfp4(
    transfers: list[tuple[str, _Device, _Device, float | _Device, _Device]],
    table: _Device,
    offsets: _Numbers,
    device: int,
    stream: int,
) -> None: ...
def append_slots_nvfp4(
    transfers: list[tuple[str, _Device, _Device, float | _Device, _Device]],
    slots: _Numbers,
    bad: _Device,
    device: int,
    stream: int,
) -> None: ...
def merge_states(
    o_a: _Device,
    lse_a: _Device,
    o_b: _Device,
    lse_b: _Device,
    out: _Device,
    out_lse: _Device,
    device: int,
    stream: int,
) -> None: ...
def transfer(
    source: _Cache,
    source_is_packed: bool,
    destination: _Cache,
    destination_is_packed: bool,
    pairs: _Numbers,
    first_layer: SupportsIndex,
    num_layers: SupportsIndex,
    max_blocks: SupportsIndex,
    device: int,
    stream: int,
) -> None: ...
def copy_partial(pool: _Cache, copies: _Numbers, device: int, stream: int) -> None: ...
