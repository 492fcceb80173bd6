# SPDX-License-Identifier: Apache-2.0
"""The protocol of a backend: memory, kernels, stream order and page copies on one device kind."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from kvcore.device import Device

__all__ = [
    "STORE",
    "AttentionRequest",
    "Backend",
    "Copier",
    "DevicePools",
    "IndexRequest",
    "Mover",
    "Place",
    "Shard",
    "Tensor",
]

#: One device's part of a replica: ``(blocks, kv_scales)`` as RaggedKVCacheInputs holds them.
Shard = tuple[Any, Any]

#: K or V of a cache: one array [pages, layers, page_size, heads, dim], or an array for each layer.
Tensor = list[NDArray[Any]]

#: Direction of an order: from the device to the host tier.
STORE = 0


class AttentionRequest(NamedTuple):
    """Hold the arguments of an attention call, with arrays as its ``Place`` takes them.

    Attributes
    ----------
    pools : tuple of array or None
        Keys, values, ends of keys, scales of keys and of values.
    global_scales : (float or array, float or array) or None
        Global scales of nvfp4 keys and values, as kernels take them.
    v_head_dim : int or None
    step : (array, array, array)
        Table, lengths and row offsets.
    q : array
    rule : tuple
        Scale, causal, window, chunk, soft cap and sinks.
    shared : (sequence of SharedPrefix, int)
        Groups of rows, and the replica of these rows.
    out, lse : array or None
        The caller's memory for the result and for the logarithms.
    return_lse, threads, splits, scratch
        See ``ops.attention``.
    """

    pools: tuple[Any, ...]
    global_scales: Any
    v_head_dim: Any
    step: tuple[Any, Any, Any]
    q: Any
    rule: tuple[Any, ...]
    shared: tuple[Any, Any]
    out: Any
    lse: Any
    return_lse: Any
    threads: int
    splits: Any
    scratch: Any


class IndexRequest(NamedTuple):
    """Hold the arguments of ``ops.page_indices``: a batch, and the sizes of its pool."""

    table: Any
    lengths: Any
    page_size: int
    num_pages: int


class Copier(Protocol):
    """Copy the starts of pages within the pools of a manager."""

    def run(self, copies: NDArray[np.int32]) -> None:
        """Copy pages, or enqueue the copies before all later uses of the pages.

        Parameters
        ----------
        copies : int32 [n, 4]
            Replica, source page, destination page, tokens; in any order. No page is both a source
            and a destination, and no destination occurs twice.
        """


class Mover(Protocol):
    """Move pages between the pools of a manager and its host tier."""

    def run(self, orders: NDArray[np.int32]) -> int:
        """Copy pages, or enqueue the copies before all later uses of the pages.

        Parameters
        ----------
        orders : int32 [n, 4]
            Replica, direction (0: device to host, 1: back), page of the pool, page of the host
            tier. All orders of a call have the same direction, and no destination occurs twice.

        Returns
        -------
        int
            The mark of the stores, if they may read their pages after the call returns. The caller
            stores the mark with the pages before it releases them: a later write to a reallocated
            page waits for the mark of the page. 0: all reads are done.
        """

    def memory(self, replica: int) -> NDArray[np.uint8]:
        """Return the host pages of a replica, [num_pages, page_bytes], writable."""

    def wait(self, replica: int) -> None:
        """Block until all copies of a replica's pages so far are done.

        Call it before the host reads pages that were stored, or writes pages that were loaded.
        """

    def expect(self, replica: int, last: int) -> None:
        """Make the memory of pages up to `last` resident: the host is about to write them."""


class DevicePools(Protocol):
    """Stage the tables of a fetch, and order the streams that use the pools of a manager."""

    def pinned(self, entries: int) -> NDArray[np.uint32]:
        """Allocate host memory that the devices read, uint32 [entries]; views reference it."""

    def enter(self, replica: int) -> None:
        """Order the current streams of a replica's devices after all work on its pools."""

    def stage(
        self, shard: int, lengths: NDArray[np.uint32], table: NDArray[np.uint32]
    ) -> tuple[Any, Any, Any]:
        """Copy lengths and table to a device; return the device arrays and the event.

        In ``pinned`` memory, the table follows the lengths. The event is None if nothing is copied.
        """

    def mark(self, shard: int) -> Any:
        """Return an event that is recorded on the current stream of a shard's device."""

    def arriving(self, shard: int) -> Any:
        """Return the pending loads that the layers of a shard wait for; None if all are done."""

    def reuse_after(self, after: Any) -> None:
        """Delay all later writes to pages until a stream's current work, or an event, is done."""


class Backend(Protocol):
    """Implement everything that depends on the kind of device; each kind has one object."""

    @property
    def kind(self) -> str:
        """The ``Device.kind`` that this backend serves."""

    # ---- arrays --------------------------------------------------------------------------

    def array(self, value: Any, name: str) -> Any:
        """View an array of any library, on such a device, as a numpy or cupy array."""

    def own(self, array: Any) -> Any:
        """View a result of ``array`` as a manager's array, bound to no library's stream."""

    def device_of(self, array: Any) -> Device:
        """Return the device of an array that ``array`` returned."""

    # ---- memory --------------------------------------------------------------------------

    def zeros(self, shape: tuple[int, ...], dtype: np.dtype[Any], index: int) -> Any:
        """Allocate zeros for a pool, at exactly their size, in memory that is resident at once."""

    def pinned_zeros(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
        """Allocate zeros in host memory that such devices read and write."""

    # ---- order ---------------------------------------------------------------------------

    def place(
        self, stream: Any, named: list[tuple[str, Any]], beside: tuple[Any, ...] = ()
    ) -> Place:
        """Return the place of a call's arrays; at least one array is on such a device.

        `beside` has further arrays of the call, as the caller passed them, on any device.
        """

    def current_place(self, index: int) -> Place:
        """Return the place of a manager's work: a device and its current stream."""

    # ---- pools of a manager --------------------------------------------------------------

    def pools(
        self, devices: tuple[Device, ...], shards_per_replica: int, places: int
    ) -> DevicePools | None:
        """Check the devices; return the pools of a manager, None if a fetch needs no staging.

        `places` is the number of layer places in a page if loads arrive layer by layer, else 0.
        """

    def copier(self, shards: list[list[Shard]], pools: Any) -> Copier:
        """Return the copier of `shards`, by replica and device; `pools` comes from ``pools``."""

    def mover(
        self,
        shards: list[list[Shard]],
        devices: tuple[Device, ...],
        num_pages: int,
        pools: Any,
        *,
        is_whole: bool = False,
        late_reads: Callable[[int], int] | None = None,
    ) -> Mover:
        """Return the mover of pages to and from a host tier of `num_pages` pages per replica.

        Loads arrive layer by layer if `pools` has layer places and `is_whole` is false.
        `late_reads` takes a replica and returns the highest mark of stores whose pages were
        reallocated since. Without it, every later write waits for all stores.
        """


class Place(Protocol):
    """Run kernels on the arrays of a call, and allocate arrays in the same memory.

    A place on a device is bound to a stream, and enqueues its work on this stream in order.
    """

    @property
    def kernels(self) -> ModuleType:
        """The module with the kernels of this place: ``_core`` or ``_cuda``."""

    def launch_args(self, threads: int) -> tuple[int, ...]:
        """Return the last arguments of its functions: threads, or device and stream."""

    def wait(self) -> None:
        """Block until all work of this place so far is done."""

    # ---- arrays --------------------------------------------------------------------------

    def checked(self, array: Any, name: str) -> Any:
        """Return an array of this place; raise ValueError if it is elsewhere."""

    def index_array(self, array: Any, name: str) -> Any:
        """Return ids, offsets or lengths as kernels take them; `array` may be in host memory."""

    def reaches(self, array: Any) -> bool:
        """Return true if the kernels can access an array; devices also access pinned memory."""

    def from_host(self, array: NDArray[Any], name: str = "an array") -> Any:
        """Return a host array, or a copy of it on the device.

        Raises ValueError, with `name`, while the stream is captured into a graph.
        """

    def factors(self, values: NDArray[np.float32], heads: int, name: str) -> Any:
        """Return host scales, a single scale or a scale per head, as kernels take them."""

    def to_host(self, array: Any, name: str = "an array") -> NDArray[Any]:
        """Return an array as a numpy array: itself, or a copy that the host waits for."""

    def copy_into(self, target: Any, array: NDArray[Any]) -> None:
        """Copy a host array into `target`; the host array may change right after the call."""

    def copy_over(self, target: Any, array: Any) -> None:
        """Copy an array into `target` of the same size, unless both are the same array."""

    def copy_of(self, array: Any) -> Any:
        """Return a copy of an array of this place."""

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any], name: str = "a result") -> Any:
        """Return a new, uninitialised array; error texts call it `name`."""

    def contiguous(self, array: Any, name: str = "an array") -> Any:
        """Return an array in C order: itself, or a copy."""

    def in_library_of(self, given: Any, result: Any) -> Any:
        """Return a new array as an array of the library of `given`."""

    # ---- operations that differ between host and device --------------------------------------

    def digest_pages(self, pools: list[Any], ids: Any, threads: int) -> Any:
        """Return the digests of pages, uint64 [n].

        Digests of a second pool are multiplied by 3, so that swapped arrays change the result.
        """

    def row_offsets(self, lengths: Any, *, has_room: bool, out: Any) -> tuple[Any, int]:
        """Return the row offsets, and the number of tokens, which is their last entry.

        The offsets may be in `out`. ``copy_over`` copies them to `out` at the end of the call.
        """

    def page_pairs(self, sources: Any, destinations: Any) -> Any:
        """Return source and destination ids, int64 [n] each, as kernels take them."""

    def build_slots(self, pool: Any, table: Any, lengths: Any, offsets: Any, out: Any) -> Any:
        """Build the slots of a step."""

    def append_slots(self, pools: Any, slots: Any, tokens: Any, out: Any, threads: int) -> Any:
        """Append by slots; return the number of slots beyond the pool, in `out` if given."""

    def append_slots_nvfp4(self, transfers: Any, slots: Any, out: Any, threads: int) -> Any:
        """Append to nvfp4 pools; `transfers` has the form that kernels take."""

    def advance_lengths(self, lengths: Any, offsets: Any, active: Any, out: Any) -> None:
        """Write the lengths after a step to `out`."""

    def attention(self, request: AttentionRequest) -> tuple[Any, Any]:
        """Attend over pages; return the result, and its logarithms or None."""

    def page_indices(self, request: IndexRequest, offsets: Any, out: list[Any]) -> None:
        """Write the pages of a batch, row after row; see ``ops.page_indices``."""

    def copy_partial(self, cache: list[Tensor], copies: Any, threads: int) -> None:
        """Copy the first tokens of pages: source, destination and tokens of each."""

    def transfer(
        self,
        source: tuple[list[Tensor], bool],
        destination: tuple[list[Tensor], bool],
        pairs: Any,
        layers: tuple[int, int],
        most_blocks: int,
        threads: int,
    ) -> None:
        """Copy pages between caches, each with a flag: true if K has vLLM's packed layout.

        `layers` has the first layer and the number of layers. `most_blocks` is the maximum of
        thread blocks on a GPU.
        """
