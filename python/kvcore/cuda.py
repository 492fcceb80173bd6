# SPDX-License-Identifier: Apache-2.0
"""Provide arrays and streams on NVIDIA GPUs, and batches for CUDA graphs.

This module is imported by modules that use a GPU, never by ``import kvcore``.
"""

from __future__ import annotations

from typing import Any, SupportsIndex

import numpy as np
from numpy.typing import NDArray

from kvcore import ops
from kvcore.backends.arrays import is_on_gpu
from kvcore.backends.cuda.arrays import device_array, over_memory, read_only
from kvcore.backends.cuda.availability import require_devices, why_unavailable
from kvcore.backends.cuda.streams import stream_handle
from kvcore.backends.selection import any_array, place_of
from kvcore.native.contexts import RaggedKVCacheInputs
from kvcore.support.arguments import MOST_UINT32, integer, integers

__all__ = [
    "GraphBatch",
    "device_array",
    "over_memory",
    "read_only",
    "require_devices",
    "stream_handle",
    "why_unavailable",
]


_UINT32 = np.dtype(np.uint32)
_NOTHING = 0xFF  # in all bytes of an entry: no page, no slot of a state


class GraphBatch:
    """Hold the batch of a CUDA graph at fixed addresses.

    A graph reads the addresses with which it was captured, but each fetch returns new arrays. This
    object holds tables, lengths, row offsets and slots for the largest batch at fixed addresses.
    ``load`` copies the fetched arrays to these addresses, outside the graph; the captured calls
    read them.

    Parameters
    ----------
    inputs : RaggedKVCacheInputs
        Inputs that ``fetch`` returned for one GPU, for any batch: the graph works on their pools.
    max_rows : int
        Number of requests of the largest batch.
    max_tokens : int
        Number of tokens of the longest request, including the tokens that a step adds.
    tokens_per_row : int
        The most tokens that a step adds to a request: more than 1 to verify drafts.

    Attributes
    ----------
    inputs : RaggedKVCacheInputs
        The batch of `max_rows` rows for the capture: ``load`` writes its ``tables`` uint32
        [max_rows, pages], ``cache_lengths`` uint32 [max_rows] and ``states`` int32 [max_rows]. Rows
        after a smaller batch are padding: length 0, no pages, no tokens.
    row_offsets : uint32 [max_rows + 1], on the GPU
        Row b's new tokens are ``row_offsets[b] .. row_offsets[b + 1]``; tokens after the last row
        are padding, which ``append``, ``append_slots`` and ``attention`` skip.

    Raises
    ------
    ValueError
        Inputs in host memory or without a pool; numbers below 1.
    TypeError
        Inputs of another type.

    Notes
    -----
    Holds 4 bytes for each row and page of a request, and 8 for each row and new token, once for
    each bundle of layers. A captured call also needs preallocated results (``out=``, ``scratch=``).
    Call the methods from one thread at a time.

    Examples
    --------
    A decode step of a model with cupy, captured once::

        batch = GraphBatch(inputs, max_rows=64, max_tokens=4096)
        stream.begin_capture()
        batch.build_slots()
        for layer in range(num_layers):
            ...  # q, k, v of the layer, in memory that stays where it is
            ops.append_slots(batch.inputs, layer, k, v, batch.slots(layer), out=bad)
            ops.attention(batch.inputs, layer, q, batch.row_offsets, out=out, scratch=scratch)
        batch.advance()
        graph = stream.end_capture()

        for _ in range(num_steps):
            (inputs,) = manager.fetch(contexts)
            batch.load(inputs)
            graph.launch(stream)
    """

    def __init__(
        self,
        inputs: RaggedKVCacheInputs,
        max_rows: SupportsIndex,
        max_tokens: SupportsIndex,
        *,
        tokens_per_row: SupportsIndex = 1,
    ) -> None:
        _require_inputs(inputs)
        if inputs.blocks is None:
            raise ValueError("the inputs have no pool (blocks=None); pass inputs.with_pool(...)")
        self._rows = integer("max_rows", max_rows, 1)
        self._max_tokens = integer("max_tokens", max_tokens, 1)
        self._per_row = integer("tokens_per_row", tokens_per_row, 1)
        if self._rows * self._per_row > MOST_UINT32:
            raise ValueError(
                f"max_rows x tokens_per_row is {self._rows * self._per_row}, "
                f"must be at most {MOST_UINT32}"
            )
        # For each bundle: the tokens of a page, and the index of a layer.
        self._bundles = _bundles_of(inputs)
        place = _place_of(None, inputs)
        lengths = place.empty((self._rows,), _UINT32)
        tables = tuple(
            place.empty((self._rows, -(-self._max_tokens // page_size)), _UINT32)
            for page_size, _ in self._bundles.values()
        )
        states = tuple(place.empty((self._rows,), np.dtype(np.int32)) for _ in inputs.states)
        self.row_offsets: Any = place.empty((self._rows + 1,), _UINT32)
        tokens = self._rows * self._per_row
        self._slots = [place.empty((tokens,), np.dtype(np.int64)) for _ in tables]
        self.inputs = RaggedKVCacheInputs(
            inputs.blocks,
            lengths,
            tables[0],
            np.array([[self._per_row, self._max_tokens]], np.uint32),
            inputs.kv_scales,
            tables=tables if len(tables) > 1 else None,
            layers=inputs._layers,  # noqa: SLF001
            states=states or None,
        )
        self._write(place, np.zeros(self._rows + 1, np.uint32), inputs, 0)

    def load(
        self, inputs: RaggedKVCacheInputs, row_offsets: Any = None, *, stream: Any = None
    ) -> None:
        """Copy a fetched batch to the fixed arrays; the next replays work on this batch.

        Parameters
        ----------
        inputs : RaggedKVCacheInputs
            Inputs of the same manager and GPU.
        row_offsets : integers [B + 1], optional
            In host memory; ``inputs.row_offsets`` by default.
        stream : stream, optional
            The stream on which graphs are launched; the current stream of the arrays' library by
            default. It waits for the `fetch` of the inputs, on any stream.

        Raises
        ------
        ValueError
            More rows, tokens or pages than the fixed arrays can hold; offsets that do not match the
            rows. Nothing has changed.
        TypeError
            Arguments that are not inputs or integers.

        Notes
        -----
        Enqueues a few small copies and does not wait. Do not call it during the capture of a graph.
        """
        _require_inputs(inputs)
        rows = len(inputs.cache_lengths)
        if rows > self._rows:
            raise ValueError(f"the batch has {rows} rows, there is room for max_rows={self._rows}")
        if len(inputs.tables) != len(self._bundles):
            raise ValueError(
                f"the inputs have {len(inputs.tables)} tables, must have {len(self._bundles)} as "
                f"those that this was made with; make another GraphBatch"
            )
        for table, fixed in zip(inputs.tables, self.inputs.tables, strict=True):
            if table.shape[1] > fixed.shape[1]:
                raise ValueError(
                    f"a request has {table.shape[1]} pages, there is room for {fixed.shape[1]}, "
                    f"which hold max_tokens={self._max_tokens}"
                )
        given = inputs.row_offsets if row_offsets is None else row_offsets
        if is_on_gpu(given):
            raise ValueError("row_offsets are on a GPU, must be in host memory to be checked")
        offsets = self._padded(integers("row_offsets", given, 0, MOST_UINT32), rows)
        place = _place_of(stream, inputs)
        place.wait_for(inputs._fetched)  # noqa: SLF001
        if inputs._loads is not None:  # noqa: SLF001 - a graph cannot wait for its layers
            inputs._loads.wait_for_all(place.stream)  # noqa: SLF001
        self._write(place, offsets, inputs, rows)

    def build_slots(self, *, stream: Any = None) -> None:
        """Write the slots of the batch's tokens for each bundle of layers; to be captured."""
        for slots, (_, layer) in zip(self._slots, self._bundles.values(), strict=True):
            ops.build_slots(self.inputs, self.row_offsets, layer=layer, out=slots, stream=stream)

    def slots(self, layer: SupportsIndex = 0) -> Any:
        """Return the slots of a layer's tokens, int64 [max_rows * tokens_per_row].

        Slots of padding are -1. ``build_slots`` writes them.

        Raises
        ------
        IndexError
            A layer that does not exist.
        """
        index = integer("layer", layer)
        places = self.inputs._layers  # noqa: SLF001
        if places is None:
            return self._slots[0]
        return self._slots[[*self._bundles].index(places[index].bundle)]

    def advance(self, *, stream: Any = None) -> None:
        """Add the step's tokens to the lengths; capture this call after all calls that read them.

        With this call, a graph may be launched several times after one ``fetch``: ``num_steps``
        times.
        """
        lengths = self.inputs.cache_lengths
        ops.advance_lengths(lengths, self.row_offsets, out=lengths, stream=stream)

    def compact(self, kept: Any, *, stream: Any = None) -> None:
        """Move the remaining rows to the front, in place; rows of ended requests leave no holes.

        Launches then continue on the remaining rows without a ``load``. A graph may also capture
        this call, together with the kernels that compute `kept`.

        Parameters
        ----------
        kept : integers [at most max_rows]
            The remaining rows, ascending; the first -1 ends the list. From the host, or int32 or
            uint32 on the GPU, as a captured call needs; see ``ops.compact_table``.
        stream : stream, optional
            As for ``load``.

        Raises
        ------
        IndexError
            A row beyond `max_rows`.
        ValueError
            Rows that do not ascend. Nothing has changed.
        TypeError
            Values that are not integers.

        Notes
        -----
        One launch for the table of each bundle and for the slots of each State group. The rows
        after the remaining rows become padding. The caller moves K and V, q and its other arrays
        with an entry per row. ``slots`` keep their old values until ``build_slots``.
        """
        lengths: Any = self.inputs.cache_lengths
        offsets: Any = self.row_offsets
        for table in self.inputs.tables:
            ops.compact_table(table, lengths, kept, row_offsets=offsets, stream=stream)
            lengths = offsets = None  # move once
        for states in self.inputs.states:
            ops.compact_table(states.reshape(-1, 1), None, kept, stream=stream)

    def _padded(self, offsets: NDArray[Any], rows: int) -> NDArray[np.uint32]:
        """Return row offsets of all rows; padding rows have no tokens."""
        if offsets.shape != (rows + 1,) or offsets[0] != 0:
            raise ValueError(
                f"row_offsets have shape {offsets.shape} and begin with {offsets[:1].tolist()}, "
                f"must be [{rows + 1}] and begin with 0"
            )
        added = np.diff(offsets.astype(np.int64))
        if rows and not 0 <= added.min() <= added.max() <= self._per_row:
            raise ValueError(
                f"row_offsets give rows {added.min()} to {added.max()} tokens, "
                f"must be 0 to tokens_per_row={self._per_row}"
            )
        padded: NDArray[np.uint32] = np.full(self._rows + 1, offsets[-1], np.uint32)
        padded[: rows + 1] = offsets
        return padded

    def _write(
        self, place: Any, offsets: NDArray[np.uint32], inputs: RaggedKVCacheInputs, rows: int
    ) -> None:
        """Copy the rows of inputs to the first fixed rows; the remaining rows are padding."""

        def put(source: Any, fixed: Any, padding: int) -> None:
            place.kernels.fill(fixed.data.ptr, padding, fixed.nbytes, place.device, place.stream)
            part = any_array(source, "inputs")[:rows]
            if part.size:
                target = fixed[tuple(slice(0, n) for n in part.shape)]
                place.kernels.copy_strided(part, target, place.device, place.stream)

        place.copy_into(self.row_offsets, offsets)
        put(inputs.cache_lengths, self.inputs.cache_lengths, 0)
        given: tuple[Any, ...] = (*inputs.tables, *inputs.states)
        kept: tuple[Any, ...] = (*self.inputs.tables, *self.inputs.states)
        for source, fixed in zip(given, kept, strict=True):
            put(source, fixed, _NOTHING)


def _require_inputs(inputs: Any) -> None:
    if not isinstance(inputs, RaggedKVCacheInputs):
        raise TypeError(f"inputs are a {type(inputs).__name__}, must be RaggedKVCacheInputs")
    if not is_on_gpu(inputs.lookup_table):
        raise ValueError(
            "the inputs are in host memory, must be on a GPU: graphs are captured there"
        )


def _place_of(stream: Any, inputs: RaggedKVCacheInputs) -> Any:
    arrays = {"lookup_table": any_array(inputs.lookup_table, "lookup_table")}
    return place_of(stream, arrays)


def _bundles_of(inputs: RaggedKVCacheInputs) -> dict[int, tuple[int, int]]:
    """Return the page size of each bundle in tokens, and the first of its layers."""
    places = inputs._layers  # noqa: SLF001
    if places is None:
        pool = inputs.blocks[0] if isinstance(inputs.blocks, tuple) else inputs.blocks
        return {0: (int(pool.shape[3]), 0)}
    found: dict[int, tuple[int, int]] = {}
    for layer in places.with_pages:
        place = places[layer]
        found.setdefault(place.bundle, (place.page_size, layer))
    return dict(sorted(found.items()))
