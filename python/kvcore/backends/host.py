# SPDX-License-Identifier: Apache-2.0
"""The backend of host memory, for numpy arrays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvcore import _core
from kvcore._core import HostStore, PageCopier
from kvcore.backends.arrays import host_array, in_library_of, kind_of, present_zeros
from kvcore.backends.protocol import (
    STORE,
    AttentionRequest,
    Backend,
    Copier,
    IndexRequest,
    Mover,
    Place,
    Shard,
    Tensor,
)
from kvcore.backends.shards import tensors_of_shards
from kvcore.device import Device

__all__ = ["BACKEND", "HOST"]


def write_page_indices(request: IndexRequest, offsets: NDArray[np.uint32], out: Any) -> None:
    """Write the page lists of a batch in host memory; see ``ops.page_indices``.

    Raises
    ------
    ValueError
        The offsets descend, or do not begin at 0.
    IndexError
        A row has more tokens than its columns hold. Raised before anything is written.
    """
    table, columns = request.table, request.table.shape[1]
    if offsets.size and (offsets[0] != 0 or (offsets[1:] < offsets[:-1]).any()):
        raise ValueError("row_offsets must begin at 0, no entry below the one before")
    lengths = request.lengths.astype(np.int64) + np.diff(offsets.astype(np.int64))
    counts = -(-lengths // request.page_size)
    if (counts > columns).any():
        row = int(np.argmax(counts > columns))
        raise IndexError(
            f"row {row} has {lengths[row]} tokens, its {columns} columns are pages of "
            f"{request.page_size}; fetch it again"
        )
    indptr, indices, last, kv_lengths = out
    indptr[0] = 0
    np.cumsum(counts, out=indptr[1:])
    found = table[np.arange(columns) < counts[:, None]]
    indices[: found.size] = np.where(found < request.num_pages, found, 0)
    kv_lengths[...] = lengths
    last[...] = lengths - np.maximum(counts - 1, 0) * request.page_size


class HostMover:
    """Copy pages between pools in host memory and the host tier, during the call.

    Parameters
    ----------
    shards : list of list of Shard
        The pools, by replica and by device of the replica.
    num_pages : int
        Host pages of each replica, at least 1.
    threads : int
        Threads to use, including the calling thread.

    Raises
    ------
    CapacityError
        The memory of the host pages cannot be mapped.

    Notes
    -----
    The memory is mapped; a thread makes it resident 1 GiB ahead of its use. ``run`` costs O(bytes),
    and other Python threads run during the copies.
    """

    def __init__(self, shards: list[list[Shard]], num_pages: int, threads: int = 1) -> None:
        self.stores = [HostStore(num_pages, tensors_of_shards(replica)) for replica in shards]
        self.threads = threads

    def memory(self, replica: int) -> NDArray[np.uint8]:
        """Return the host pages of a replica, [num_pages, page_bytes]."""
        return self.stores[replica].memory

    def wait(self, replica: int) -> None:
        """Return at once: copies are done when ``run`` returns."""

    def expect(self, replica: int, last: int) -> None:
        """See ``Mover.expect``."""
        self.stores[replica].expect(last)

    def run(self, orders: NDArray[np.int32]) -> int:
        """Copy pages during the call; see ``Mover.run``."""
        is_store = bool(orders[0, 1] == STORE)
        for replica, store in enumerate(self.stores):
            pairs = orders[orders[:, 0] == replica, 2:]
            if len(pairs):
                copy = store.store if is_store else store.load
                copy(pairs, self.threads)
        return 0


_HOST_FIELDS = AttentionRequest._fields.index("splits")  # the others are those of GPUs


class _HostPlace:
    """The place of host memory: all work is done when a call returns. See ``Place``."""

    kernels = _core
    in_library_of = staticmethod(in_library_of)

    def launch_args(self, threads: int) -> tuple[int, ...]:
        return (threads,)

    def wait(self) -> None:
        pass

    # ---- arrays --------------------------------------------------------------------------

    def checked(self, array: Any, name: str) -> Any:
        if isinstance(array, np.ndarray):
            return array
        raise ValueError(
            f"{name} is on {kind_of(array)}:{array.data.device_id}, the other arrays of the call "
            f"are in host memory; copy it there"
        )

    def index_array(self, array: Any, name: str) -> Any:
        return self.checked(array, name)

    def reaches(self, array: Any) -> bool:
        return isinstance(array, np.ndarray)

    def from_host(self, array: NDArray[Any], name: str = "") -> Any:  # noqa: ARG002 - of devices
        return array

    def factors(
        self,
        values: NDArray[np.float32],
        heads: int,
        name: str,  # noqa: ARG002 - of devices
    ) -> Any:
        return np.ascontiguousarray(np.broadcast_to(values, (heads,)))

    def to_host(self, array: Any, name: str = "") -> NDArray[Any]:  # noqa: ARG002 - of devices
        found: NDArray[Any] = self.checked(array, "the array")
        return found

    def copy_into(self, target: Any, array: NDArray[Any]) -> None:
        target[...] = array

    def copy_over(self, target: Any, array: Any) -> None:
        target[...] = array

    def copy_of(self, array: Any) -> Any:
        return array.copy()

    def empty(
        self,
        shape: tuple[int, ...],
        dtype: np.dtype[Any],
        name: str = "",  # noqa: ARG002 - of devices
    ) -> Any:
        return np.empty(shape, dtype)

    def contiguous(self, array: Any, name: str = "") -> Any:  # noqa: ARG002 - of devices
        return np.asarray(array, order="C")

    # ---- verbs ---------------------------------------------------------------------------

    def digest_pages(self, pools: list[Any], ids: Any, threads: int) -> Any:
        first, *more = (_core.digest_pages(pool, ids, threads) for pool in pools)
        return first + np.uint64(3) * more[0] if more else first

    def row_offsets(
        self,
        lengths: Any,
        *,
        has_room: bool,  # noqa: ARG002 - for other places
        out: Any,  # noqa: ARG002
    ) -> tuple[Any, int]:
        offsets = np.zeros(len(lengths) + 1, np.uint32)
        np.cumsum(self.index_array(lengths, "lengths"), out=offsets[1:])
        return offsets, int(offsets[-1])

    def page_pairs(self, sources: Any, destinations: Any) -> Any:
        first = self.checked(sources, "source_ids")
        return np.stack([first, self.checked(destinations, "destination_ids")], axis=1)

    def build_slots(self, pool: Any, table: Any, lengths: Any, offsets: Any, out: Any) -> Any:
        return _core.build_slots(pool, table, lengths, offsets, out)

    def append_slots(self, pools: Any, slots: Any, tokens: Any, out: Any, threads: int) -> Any:
        bad = _core.append_slots(pools, self.index_array(slots, "slots"), tokens, threads)
        return _counted(bad, out)

    def append_slots_nvfp4(self, transfers: Any, slots: Any, out: Any, threads: int) -> Any:
        bad = _core.append_slots_nvfp4(transfers, self.index_array(slots, "slots"), threads)
        return _counted(bad, out)

    def advance_lengths(self, lengths: Any, offsets: Any, active: Any, out: Any) -> None:
        _core.advance_lengths(lengths, offsets, active, out)

    def attention(self, request: AttentionRequest) -> tuple[Any, Any]:
        fields: tuple[Any, ...] = request[:_HOST_FIELDS]
        return _core.attention(*fields)

    def page_indices(self, request: IndexRequest, offsets: Any, out: list[Any]) -> None:
        write_page_indices(request, offsets, out)

    def copy_partial(self, cache: list[Tensor], copies: Any, threads: int) -> None:
        _core.copy_partial(cache, copies, threads)

    def transfer(
        self,
        source: tuple[list[Tensor], bool],
        destination: tuple[list[Tensor], bool],
        pairs: Any,
        layers: tuple[int, int],
        most_blocks: int,  # noqa: ARG002 - of GPUs
        threads: int,
    ) -> None:
        _core.transfer(*source, *destination, pairs, *layers, threads)


def _counted(bad: int, out: Any) -> Any:
    """Return the count; if `out` is given, write the count to `out` and return it."""
    if out is None:
        return bad
    out[0] = bad
    return out


class _HostBackend:
    """Implement ``Backend`` for host memory."""

    kind = "cpu"

    def array(self, value: Any, name: str) -> Any:
        return host_array(value, name)

    def own(self, array: Any) -> Any:
        return array

    def device_of(self, array: Any) -> Device:  # noqa: ARG002 - there is one
        return Device(self.kind)

    def zeros(
        self,
        shape: tuple[int, ...],
        dtype: np.dtype[Any],
        index: int,  # noqa: ARG002 - of other kinds
    ) -> Any:
        return present_zeros(shape, dtype)

    def pinned_zeros(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
        return present_zeros(shape, dtype)

    def place(
        self,
        stream: Any,
        named: list[tuple[str, Any]],
        beside: tuple[Any, ...] = (),  # noqa: ARG002 - of devices
    ) -> Place:
        if stream is not None:
            raise ValueError("stream is given for arrays in host memory; pass stream=None")
        for name, array in named:
            HOST.checked(array, name)
        return HOST

    def current_place(self, index: int) -> Place:  # noqa: ARG002 - there is one
        return HOST

    def pools(
        self,
        devices: tuple[Device, ...],  # noqa: ARG002 - all are the host
        shards_per_replica: int,  # noqa: ARG002
        places: int,  # noqa: ARG002 - a load is done when its call returns
    ) -> None:
        return None

    def copier(self, shards: list[list[Shard]], pools: Any) -> Copier:  # noqa: ARG002 - None
        return PageCopier([tensors_of_shards(replica) for replica in shards])

    def mover(
        self,
        shards: list[list[Shard]],
        devices: tuple[Device, ...],  # noqa: ARG002 - all are the host
        num_pages: int,
        pools: Any,  # noqa: ARG002 - None
        *,
        is_whole: bool = False,  # noqa: ARG002 - loads are always whole
        late_reads: Callable[[int], int] | None = None,  # noqa: ARG002 - copies are done at once
    ) -> Mover:
        return HostMover(shards, num_pages)


#: The place of numpy arrays.
HOST: Place = _HostPlace()

BACKEND: Backend = _HostBackend()
