# SPDX-License-Identifier: Apache-2.0
"""What a kind of device does for kvcore: memory, kernels, the order of work, copies of pages."""

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

#: One device's part of a replica: ``(blocks, kv_scales)`` as RaggedKVCacheInputs hands them out.
Shard = tuple[Any, Any]

#: K or V of a cache: an array [pages, layers, page_size, heads, dim], or one for each layer.
Tensor = list[NDArray[Any]]

#: Direction of an order: from the device to the host tier.
STORE = 0


class AttentionRequest(NamedTuple):
    """Hold what attention is asked for, arrays as they are where the call runs.

    Attributes
    ----------
    pools : tuple of array or None
        Keys, values, ends of keys, scales of keys and of values.
    global_scales : (float or array, float or array) or None
        Of keys and of values in nvfp4, as kernels take them.
    v_head_dim : int or None
    step : (array, array, array)
        Table, lengths and row offsets.
    q : array
    rule : tuple
        Scale, causal, window, chunk, soft cap and sinks.
    shared : (sequence of SharedPrefix, int)
        Groups of rows, and the replica that the rows are of.
    out, lse : array or None
        The caller's memory for the result and for the logarithms.
    return_lse, threads, splits, scratch
        Of each see ``ops.attention``.
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
    """Hold a batch whose pages are to be listed, and the sizes of its pool."""

    table: Any
    lengths: Any
    page_size: int
    num_pages: int


class Copier(Protocol):
    """Copy the starts of pages within the pools of a manager."""

    def run(self, copies: NDArray[np.int32]) -> None:
        """Copy pages, or put the copies in front of everything that uses the pages later.

        Parameters
        ----------
        copies : int32 [n, 4]
            Replica, source page, destination page, tokens; in any order. No page is a source and a
            destination, and none is a destination twice.
        """


class Mover(Protocol):
    """Move pages between the pools of a manager and its host tier."""

    def run(self, orders: NDArray[np.int32]) -> int:
        """Copy pages, or put the copies in front of everything that uses the pages later.

        Parameters
        ----------
        orders : int32 [n, 4]
            Replica, direction (0: device to host, 1: back), page of the pool, page of the host
            tier. Of one call all have the same direction, and no destination is named twice.

        Returns
        -------
        int
            The mark of stores that read their pages later, to be noted before these are let go:
            what writes to pages goes behind the mark of those that were handed out. 0: none do.
        """

    def memory(self, replica: int) -> NDArray[np.uint8]:
        """Return the host pages of a replica, [num_pages, page_bytes], writable."""

    def wait(self, replica: int) -> None:
        """Block until the copies of a replica's pages given so far are done.

        Before the host reads pages that were stored, or writes pages that were loaded.
        """

    def expect(self, replica: int, last: int) -> None:
        """Have the memory of pages up to `last` present: the host is about to write them."""


class DevicePools(Protocol):
    """Stage the tables of a fetch, and order the streams that use the pools of a manager."""

    def pinned(self, entries: int) -> NDArray[np.uint32]:
        """Allocate host memory that the devices read, uint32 [entries]; all views of it hold it."""

    def enter(self, replica: int) -> None:
        """Order the current streams of a replica's devices behind whatever uses its pools."""

    def stage(
        self, shard: int, lengths: NDArray[np.uint32], table: NDArray[np.uint32]
    ) -> tuple[Any, Any, Any]:
        """Return lengths and table, which lie behind each other in ``pinned``, on a device.

        The third is the event of their copy, None where nothing is copied.
        """

    def mark(self, shard: int) -> Any:
        """Return an event that stands for the work that a device's current stream has now."""

    def arriving(self, shard: int) -> Any:
        """Return what the layers of a shard wait for, None for nothing."""

    def reuse_after(self, after: Any) -> None:
        """Let pages be written again only when a stream's work, or an event, is done."""


class Backend(Protocol):
    """Own what is special to one kind of device; there is one object for each kind."""

    @property
    def kind(self) -> str:
        """The kind of ``Device`` whose memory it is."""

    # ---- arrays --------------------------------------------------------------------------

    def array(self, value: Any, name: str) -> Any:
        """See an array of any library, which lies on such a device, as one of kvcore's library."""

    def own(self, array: Any) -> Any:
        """See an array of ``array`` as one of a manager's, whose calls say where work runs."""

    def device_of(self, array: Any) -> Device:
        """Return where an array, as ``array`` returns it, lies."""

    # ---- memory --------------------------------------------------------------------------

    def zeros(self, shape: tuple[int, ...], dtype: np.dtype[Any], index: int) -> Any:
        """Allocate the zeros of a pool, exactly their size, present from now on."""

    def pinned_zeros(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
        """Allocate zeros in host memory that such devices read and write."""

    # ---- order ---------------------------------------------------------------------------

    def place(
        self, stream: Any, named: list[tuple[str, Any]], beside: tuple[Any, ...] = ()
    ) -> Place:
        """Return the place of a call's arrays, of which one at least lies on such a device.

        `beside` are more of them as the caller has them, which may lie anywhere.
        """

    def current_place(self, index: int) -> Place:
        """Return a device and the stream that a manager's work runs on now."""

    # ---- pools of a manager --------------------------------------------------------------

    def pools(
        self, devices: tuple[Device, ...], shards_per_replica: int, places: int
    ) -> DevicePools | None:
        """Check the devices; return what a fetch needs there, None where it needs nothing.

        `places` of layers in a page, where loads arrive layer by layer, else 0.
        """

    def copier(self, shards: list[list[Shard]], pools: Any) -> Copier:
        """Return what copies pages within pools by replica and device; `pools` as of ``pools``."""

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
        """Return what moves pages to and from a host tier of `num_pages` pages a replica.

        Layer by layer where `pools` does so and pages are not loaded whole. `late_reads` tells the
        highest mark of stores whose pages of a replica were handed out since; without it all that
        is written later goes behind all stores.
        """


class Place(Protocol):
    """Run kernels where the arrays of a call lie, and make arrays there.

    One of a device is bound to a stream: its work is enqueued there, in order.
    """

    @property
    def kernels(self) -> ModuleType:
        """The module whose functions work there: ``_core`` or ``_cuda``."""

    def launch_args(self, threads: int) -> tuple[int, ...]:
        """Return what those functions take last: threads, or device and stream."""

    def wait(self) -> None:
        """Block until the work given so far is done."""

    # ---- arrays --------------------------------------------------------------------------

    def checked(self, array: Any, name: str) -> Any:
        """Return an array that lies there; ValueError for one elsewhere."""

    def index_array(self, array: Any, name: str) -> Any:
        """Return ids, offsets or lengths, which may come from the host, as kernels take them."""

    def reaches(self, array: Any) -> bool:
        """Tell whether kernels there read and write an array, pinned host memory included."""

    def from_host(self, array: NDArray[Any], name: str = "an array") -> Any:
        """Return an array of the host's, or a copy of it on the device.

        Places that are captured into graphs refuse it by its name.
        """

    def factors(self, values: NDArray[np.float32], heads: int, name: str) -> Any:
        """Return scales of the host's, one or one for each head, as kernels take them."""

    def to_host(self, array: Any, name: str = "an array") -> NDArray[Any]:
        """Return an array as numpy's: itself, or a copy for which the host waits."""

    def copy_into(self, target: Any, array: NDArray[Any]) -> None:
        """Copy an array of the host's, which may change right after, over one that lies there."""

    def copy_over(self, target: Any, array: Any) -> None:
        """Copy an array that lies there over another one of its size, if it is not that one."""

    def copy_of(self, array: Any) -> Any:
        """Copy an array that lies there."""

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any], name: str = "a result") -> Any:
        """Return a fresh array; `name` is what it is in texts of errors."""

    def contiguous(self, array: Any, name: str = "an array") -> Any:
        """Return an array in C order, itself where it is."""

    def in_library_of(self, given: Any, result: Any) -> Any:
        """Return a fresh array as one of the library that `given` is of."""

    # ---- verbs that hosts and devices are asked for in different ways ------------------------

    def digest_pages(self, pools: list[Any], ids: Any, threads: int) -> Any:
        """Return the digests of pages, uint64 [n].

        Those of a second pool count three times: arrays that changed places are noticed.
        """

    def row_offsets(self, lengths: Any, *, has_room: bool, out: Any) -> tuple[Any, int]:
        """Return where each row begins and the last one ends, and how many tokens that is.

        `out` is where they may be, and are copied by ``copy_over`` once the call is done.
        """

    def page_pairs(self, sources: Any, destinations: Any) -> Any:
        """Return int64 [n] twice as [n, 2], as kernels take them."""

    def build_slots(self, pool: Any, table: Any, lengths: Any, offsets: Any, out: Any) -> Any:
        """Build the slots of a step."""

    def append_slots(self, pools: Any, slots: Any, tokens: Any, out: Any, threads: int) -> Any:
        """Append by slots; return how many were beyond the pool, as `out` if there is one."""

    def append_slots_nvfp4(self, transfers: Any, slots: Any, out: Any, threads: int) -> Any:
        """Append to pools in nvfp4; `transfers` as kernels take them."""

    def advance_lengths(self, lengths: Any, offsets: Any, active: Any, out: Any) -> None:
        """Write the lengths after a step to `out`."""

    def attention(self, request: AttentionRequest) -> tuple[Any, Any]:
        """Attend over pages; return the result, and its logarithms or None."""

    def page_indices(self, request: IndexRequest, offsets: Any, out: list[Any]) -> None:
        """Write the pages of a batch, row behind row; see ``ops.page_indices``."""

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
        """Copy pages between caches, each with whether K is packed as vLLM's.

        `layers` are the first one and their number, `most_blocks` thread blocks of a GPU.
        """
