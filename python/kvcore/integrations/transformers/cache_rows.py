# SPDX-License-Identifier: Apache-2.0
"""The rows of a KVCoreCache: one request of a PagedKVCacheManager for each sequence of a batch."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from kvcore import ops
from kvcore.backends.selection import backend_of
from kvcore.context import TextGenerationContext, update_batch
from kvcore.device import Device
from kvcore.errors import KVCacheError
from kvcore.groups import bundles
from kvcore.integrations.transformers import devices
from kvcore.layers.layer_map import LayerMap, has_windows
from kvcore.native.contexts import RaggedKVCacheInputs
from kvcore.params import KVCacheParams

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import torch

    from kvcore.integrations.transformers.cache_pool import PoolPlan
    from kvcore.paged import PagedKVCacheManager

__all__ = ["CacheRows"]


class CacheRows:
    """Own the pages of a batch of sequences of equal length.

    Parameters
    ----------
    plan : PoolPlan
        The plan of the pool; the first tokens make the pool.
    threads : int
        Threads that copy K and V in host memory.

    Attributes
    ----------
    manager : PagedKVCacheManager, or None
        None before the first tokens. Copies of the rows share it.
    length : int
        The number of tokens of each row, including the forward pass in flight.

    Notes
    -----
    A cache never gets token ids, so all tokens are 0 and the manager caches no prefixes: it only
    owns, shares and copies pages. Between two forward passes, each context has one token to run
    after its written tokens, as `fork` and `truncate` require. A call that raises changes nothing.
    One thread at a time.
    """

    def __init__(self, plan: PoolPlan, threads: int) -> None:
        self._plan = plan
        self._threads = threads
        self._names: Iterator[int] = itertools.count()
        self._contexts: list[TextGenerationContext] = []
        self._inputs: RaggedKVCacheInputs | None = None  # of the forward pass in flight
        self._offsets: Any = None
        self._blocks: Any = None
        self._tensors = devices.tensors_on(Device("cpu"))
        self.manager: PagedKVCacheManager | None = None
        self.length = 0

    def __len__(self) -> int:
        return len(self._contexts)

    # ---- forward passes ------------------------------------------------------------------

    def begin(
        self,
        batch: int,
        tokens: int,
        dtype: str,
        heads: int,
        widths: tuple[int, int],
        device: Device,
    ) -> None:
        """Reserve the pages of a forward pass.

        Parameters
        ----------
        batch, tokens : int
            Rows, and new tokens of each.
        dtype : str
        heads : int
        widths : (int, int)
            The heads of the new K and V, and the elements of a head of K and of V.
        device : Device
            The device of the K and V; the first K and V decide the pool's device.

        Raises
        ------
        InsufficientBlocksError, CapacityError
            The pool has too few free pages.
        ValueError
            Another number of rows, or K and V of another shape or device than before.
        """
        self._settle()
        self._open(batch, self._plan.params(dtype, heads, *widths), device)
        assert self.manager is not None
        more = _placeholders(tokens - 1)
        try:
            for context in self._contexts:
                context.extend(more)
            (self._inputs,) = self.manager.fetch(self._contexts)
            self._blocks = self._inputs.blocks
        except KVCacheError:
            self._rewind(self.length)
            if self.length == 0:
                self.release()
            raise
        offsets = np.arange(batch + 1, dtype=np.uint32) * np.uint32(tokens)
        self._offsets = self._tensors.offsets(offsets)
        self.length += tokens

    def _open(self, batch: int, shape: KVCacheParams, device: Device) -> None:
        """Claim the rows of an empty cache, or check that the rows fit the cache."""
        if self.manager is None:
            self.manager = self._plan.manager(shape, device)
            self._tensors = devices.tensors_on(device)
        self.require_device(device)
        self._tensors.require_order()
        if shape != self.manager.params:
            raise ValueError(
                f"K and V are {_told(shape)}, the pool is {_told(self.manager.params)}"
            )
        if not self._contexts:
            self._contexts = [self._context(1) for _ in range(batch)]
            for context in self._contexts:
                self.manager.claim(context.request_id)
        elif batch != len(self._contexts):
            raise ValueError(
                f"K and V have {batch} rows, the cache holds {len(self._contexts)}; "
                f"reset() it, or call batch_repeat_interleave or batch_select_indices first"
            )

    def require_device(self, device: Device) -> None:
        """Raise ValueError for K and V on another device than the pool."""
        if device != self._tensors.device:
            raise ValueError(
                f"K and V are on {device}, the pool is on {self._tensors.device}: all layers must "
                f"be on one device; load the model on one device, or make another cache"
            )

    def _context(self, tokens: int) -> TextGenerationContext:
        return TextGenerationContext(f"row {next(self._names)}", _placeholders(tokens))

    def _settle(self) -> None:
        """End the forward pass in flight: its tokens count as written."""
        if self._inputs is None:
            return
        assert self.manager is not None
        self._inputs = None
        update_batch(self._contexts, _placeholders(len(self._contexts)))
        self.manager.step(self._contexts)

    def _rewind(self, length: int) -> None:
        for context in self._contexts:
            context.rewind(length + 1)

    # ---- elements ------------------------------------------------------------------------

    def append(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> None:
        """Write the K and V, [rows * new tokens, heads, dim] each, of the forward pass."""
        assert self._inputs is not None
        tensors = self._tensors
        ops.append(
            self._inputs,
            layer,
            tensors.array(k),
            tensors.array(v),
            self._offsets,
            **tensors.options(self._threads),
        )

    def gather(
        self, layer: int, page: int, length: int, out: tuple[torch.Tensor, torch.Tensor]
    ) -> None:
        """Read K and V of each row into `out`, [rows * length, heads, dim] each.

        Parameters
        ----------
        layer : int
        page : int
            The first page to read, for layers that have left the pages before it.
        length : int
            The number of tokens from that page on.
        out : (tensor, tensor)
        """
        tensors = self._tensors
        inputs = self._settled_inputs() if self._inputs is None else self._inputs
        if page:
            tables = tuple(table[:, page:] for table in inputs.tables)
            inputs = self._inputs_of(tables, inputs.cache_lengths)
        lengths = np.full(len(self), length, np.uint32)
        targets = tensors.array(out[0]), tensors.array(out[1])
        ops.gather(inputs, layer, lengths=lengths, out=targets, **tensors.options(self._threads))

    def _settled_inputs(self) -> RaggedKVCacheInputs:
        """Return the inputs between two forward passes; a fetch would reserve the next pages."""
        tables = [np.array(self.pages(bundle), np.uint32) for bundle in range(self._num_bundles)]
        lengths, device = np.full(len(self), self.length, np.uint32), self._tensors.device
        place = backend_of(device.kind).current_place(device.index)
        there = tuple(place.from_host(table) for table in tables)
        return self._inputs_of(there, place.from_host(lengths))

    def _inputs_of(self, tables: tuple[Any, ...], lengths: Any) -> RaggedKVCacheInputs:
        assert self.manager is not None
        limits = np.zeros((1, 2), np.uint32)
        layers = LayerMap.of(self.manager.params)
        return RaggedKVCacheInputs(
            self._blocks, lengths, tables[0], limits, None, tables=tables, layers=layers
        )

    # ---- rows ----------------------------------------------------------------------------

    def pages(self, bundle: int = 0) -> list[list[int]]:
        """Return the page ids of each row, in the order of its tokens.

        If layers have left a page, or have no page yet, its id is the number of pages.
        """
        if self.manager is None:
            return []
        names = [context.request_id for context in self._contexts]
        return [self.manager.get_req_blocks(name, bundle) for name in names]

    def held(self) -> set[int]:
        """Return the ids of the pages that rows hold, in all bundles."""
        if self.manager is None:
            return set()
        tables = [self.pages(bundle) for bundle in range(self._num_bundles)]
        found = {page for rows in tables for row in rows for page in row}
        return found - {self.manager.total_num_pages}

    @property
    def _has_windows(self) -> bool:
        return self.manager is not None and has_windows(self.manager.params)

    @property
    def _num_bundles(self) -> int:
        assert self.manager is not None
        return len(bundles(self.manager.params))

    def select(self, rows: Sequence[int]) -> None:
        """Make row i a copy of row ``rows[i]``; copies share a page until a row writes to it.

        Raises
        ------
        IndexError
            A row that does not exist.
        """
        self._settle()
        count = len(self._contexts)
        wrong = [row for row in rows if not -count <= row < count]
        if wrong:
            raise IndexError(f"row is {wrong[0]}, must be {-count} .. {count - 1}")
        kept: set[int] = set()
        chosen = []
        for row in (row % count for row in rows):
            parent = self._contexts[row]
            chosen.append(self._forked(parent) if row in kept else parent)
            kept.add(row)
        dropped = [c for row, c in enumerate(self._contexts) if row not in kept]
        self._contexts = chosen
        self._drop(dropped)
        if not chosen:
            self.length = 0

    def _forked(self, parent: TextGenerationContext) -> TextGenerationContext:
        assert self.manager is not None
        child = self._context(self.length + 1)
        self.manager.fork(parent.request_id, child)
        return child

    def crop(self, length: int) -> None:
        """Remove the tokens of each row after the first `length`, and the pages they filled."""
        if self._has_windows:
            self._crop_pass(length)
        self._settle()
        if length >= self.length:
            return
        assert self.manager is not None
        for context in self._contexts:
            self.manager.truncate(context.request_id, length)
        self._rewind(length)
        self.length = length

    def _crop_pass(self, length: int) -> None:
        """Remove tokens of the pass in flight, before windows leave pages that are still read."""
        assert self.manager is not None
        begin = self.length
        if self._inputs is not None:
            begin = self._contexts[0].start_idx
        if length < begin:
            raise ValueError(
                f"crop to {length} tokens, layers with windows have left the pages that tokens "
                f"before the last forward pass read: must be at least {begin}; make the cache with "
                f"groups=False to go further back"
            )
        if length >= self.length:
            return
        for context in self._contexts:
            context.rewind(max(length, 1))
            if length == 0:
                self.manager.release(context.request_id)
                self.manager.claim(context.request_id)
        if length == 0:
            self._inputs = None

    def release(self) -> None:
        """Release all pages."""
        dropped, self._contexts = self._contexts, []
        self._inputs = None
        self.length = 0
        self._drop(dropped)

    def _drop(self, contexts: list[TextGenerationContext]) -> None:
        for context in contexts:
            assert self.manager is not None
            self.manager.release(context.request_id)

    def __deepcopy__(self, memo: dict[int, Any]) -> CacheRows:
        """Return rows with the same tokens; copies share a page until a row writes to it."""
        self._settle()
        copy = CacheRows(self._plan, self._threads)
        copy.manager, copy._blocks, copy._names = self.manager, self._blocks, self._names
        copy.length, copy._tensors = self.length, self._tensors
        copy._contexts = [self._forked(context) for context in self._contexts]
        memo[id(self)] = copy
        return copy

    def __del__(self) -> None:
        self.release()


def _placeholders(tokens: int) -> NDArray[np.int32]:
    return np.zeros(tokens, np.int32)


def _told(params: KVCacheParams) -> str:
    widths = " and ".join(str(width) for width in params.row_widths)
    return f"{params.dtype} with {params.n_kv_heads} heads of {widths}"
