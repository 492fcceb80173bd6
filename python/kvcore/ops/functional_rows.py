# SPDX-License-Identifier: Apache-2.0
"""Run the functions of ``kvcore.functional`` on pools that are on a GPU.

The table and the lengths are checked on the host. If they are on the GPU, each call reads them back
and waits for the stream. If they are in host memory, no call waits.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvcore.backends.arrays import is_writable
from kvcore.backends.protocol import Place
from kvcore.backends.selection import any_array, place_of

__all__ = ["Rows", "allocate_blocks", "append_rows", "gather_rows", "rows_of"]


class Rows(NamedTuple):
    """Hold the arrays of a cache and their copies on the host.

    Attributes
    ----------
    place : Place
    pools : tuple of cupy.ndarray
        Keys and values.
    given : tuple of array
        The caller's table and lengths, on the GPU or in host memory.
    table, lengths : int32 array
        Copies of the table and the lengths on the host.
    """

    place: Place
    pools: tuple[Any, Any]
    given: tuple[Any, Any]
    table: NDArray[np.int32]
    lengths: NDArray[np.int32]

    def args(self) -> tuple[Any, ...]:
        """Return the arguments of the checks."""
        return *self.pools, self.table, self.lengths

    def written(self, which: int, host: NDArray[np.int32], *, donate: bool) -> Any:
        """Return the table (0) or the lengths (1) with new values, in place if donated."""
        given = self.given[which]
        if isinstance(given, np.ndarray):
            if not donate:
                return host
            given[...] = host
            return given
        if not donate:
            return self.place.from_host(host)
        self.place.copy_into(given, host)
        return given


def rows_of(cache: Any) -> Rows:
    """Read the arrays of a cache whose pools are on a GPU.

    Raises
    ------
    ValueError
        Arrays on several devices.
    """
    pools = any_array(cache.key_pool, "key_pool"), any_array(cache.value_pool, "value_pool")
    table = any_array(cache.block_table, "block_table")
    lengths = any_array(cache.seq_lengths, "seq_lengths")
    place = place_of(None, {"key_pool": pools[0], "value_pool": pools[1]})
    hosts = [_here(place, *each) for each in ((table, "block_table"), (lengths, "seq_lengths"))]
    return Rows(place, pools, (table, lengths), *hosts)


def _here(place: Place, array: Any, name: str) -> NDArray[Any]:
    if isinstance(array, np.ndarray):
        return array.copy()
    return place.to_host(place.checked(array, name), name)


def allocate_blocks(
    rows: Rows, sequence_idx: Any, num_new_tokens: Any, free_block_ids: Any, *, donate: bool
) -> tuple[Any, Any, int]:
    """Return the table, the lengths and the number of blocks that were added to the table."""
    if donate:
        _require_writable(block_table=rows.given[0])
    asked = sequence_idx, num_new_tokens, free_block_ids
    consumed = rows.place.kernels.allocate_blocks(*rows.args(), *asked)
    table = rows.written(0, rows.table, donate=donate)
    lengths = rows.given[1] if donate else rows.written(1, rows.lengths, donate=False)
    return table, lengths, int(consumed)


def append_rows(
    rows: Rows, sequence_idx: Any, keys_new: Any, values_new: Any, *, donate: bool
) -> tuple[Any, Any, Any, Any]:
    """Write new tokens after the tokens of a row; return the cache's arrays."""
    new = [
        rows.place.checked(any_array(array, name), name)
        for array, name in ((keys_new, "keys_new"), (values_new, "values_new"))
    ]
    if donate:
        _require_own_memory(rows)
    length = rows.place.kernels.check_append(*rows.args(), sequence_idx, *new)
    pools = rows.pools if donate else tuple(map(rows.place.copy_of, rows.pools))
    _write(rows, pools, sequence_idx, length, [_dense(rows.place, array) for array in new])
    rows.lengths[sequence_idx] = length + len(new[0])
    lengths = rows.written(1, rows.lengths, donate=donate)
    table = rows.given[0] if donate else rows.written(0, rows.table, donate=False)
    return *pools, table, lengths


def gather_rows(rows: Rows, sequence_idx: Any) -> tuple[Any, Any, int]:
    """Copy the tokens of a row; return keys, values and the number of tokens."""
    count = rows.place.kernels.check_gather(*rows.args(), sequence_idx)
    shape = (count, *rows.pools[0].shape[2:])
    results = [rows.place.empty(shape, pool.dtype, "the tokens") for pool in rows.pools]
    named = zip(("keys", "values"), rows.pools, results, strict=True)
    parts = [(name, pool, None, None, result) for name, pool, result in named]
    table, _, offsets = _batch(rows, sequence_idx, 0, count)
    rows.place.kernels.gather_tokens(parts, table, offsets, *rows.place.launch_args(1))
    return *results, int(count)


# ---- inside --------------------------------------------------------------------------------------


def _write(rows: Rows, pools: Any, index: Any, length: int, tokens: list[Any]) -> None:
    """Write tokens [n, heads, head_dim] after the `length` tokens of a row."""
    table, begin, offsets = _batch(rows, index, length, len(tokens[0]))
    named = zip(("keys_new", "values_new"), pools, tokens, strict=True)
    parts = [(name, pool, None, None, array) for name, pool, array in named]
    rows.place.kernels.append_tokens(parts, table, begin, offsets, *rows.place.launch_args(1))


def _batch(rows: Rows, index: int, begin: int, count: int) -> tuple[Any, Any, Any]:
    """Return a row as a batch of one on the device: table, start position, row offsets."""
    columns = rows.table.shape[1]
    host = np.array([begin, 0, count], np.uint32)
    row = np.ascontiguousarray(rows.table[index]).view(np.uint32)  # -1 becomes 2^32 - 1: no page
    sent = rows.place.from_host(np.concatenate([row, host]), "block_table")
    offsets = host[1:], sent[columns + 1 :]
    return sent[:columns].reshape(1, columns), sent[columns : columns + 1], offsets


def _dense(place: Place, array: Any) -> Any:
    """Return an array whose last axis is contiguous."""
    is_dense = array.shape[-1] <= 1 or array.strides[-1] == array.itemsize
    return array if is_dense else place.contiguous(array)


def _require_own_memory(rows: Rows) -> None:
    """Raise ValueError for arrays that an append cannot update in place."""
    keys, values = rows.pools
    lengths = rows.given[1]
    _require_writable(key_pool=keys, value_pool=values, seq_lengths=lengths)
    if keys.size and keys.data.ptr == values.data.ptr:
        raise ValueError("key_pool and value_pool are the same memory, must be two arrays")
    if not isinstance(lengths, np.ndarray) and not lengths.flags.c_contiguous:
        raise ValueError("seq_lengths is strided, must be contiguous to be updated in place")


def _require_writable(**arrays: Any) -> None:
    for name, array in arrays.items():
        if not is_writable(array):
            raise ValueError(
                f"{name} is read-only and cannot be updated in place; pass donate=False"
            )
