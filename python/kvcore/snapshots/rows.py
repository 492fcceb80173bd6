# SPDX-License-Identifier: Apache-2.0
"""Rows of layers in the pools of a manager, as tensors that no page size and no sharding shows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvcore._hot.engine import StepEngine
from kvcore._hot.inputs import RaggedKVCacheInputs
from kvcore.backends.protocol import DevicePools, Shard
from kvcore.backends.selection import place_of
from kvcore.groups import bundles
from kvcore.layers.layer_map import LayerMap, LayerPlace, column_tokens
from kvcore.ops.batch import PagedBatch, layer_pools
from kvcore.ops.paging import append, gather
from kvcore.params import KVCacheParams
from kvcore.snapshots.sequences import SavedLayer, SavedState, parts_of_layer

__all__ = ["LayerRows", "Pools"]


@dataclass(frozen=True)
class LayerRows:
    """Tell where a layer's rows lie, and which of them are read once `n` tokens are written.

    Attributes
    ----------
    place : LayerPlace
    skipped : int
        The first token that is read again.
    first : int
        Where the pages begin that are held for it.
    """

    place: LayerPlace
    skipped: int
    first: int


@dataclass(frozen=True)
class Pools:
    """The memory of a manager, replica by replica, and what its layers have there.

    Parameters
    ----------
    engine : StepEngine
    params : KVCacheParams
    shards : list of list of Shard
        The pools by replica and device in it.
    states : tuple of dict of str to list of array
        As of ``PagedKVCacheManager.states``.
    gpus : DevicePools or None
        What orders streams; None in host memory.
    """

    engine: StepEngine
    params: KVCacheParams
    shards: list[list[Shard]]
    states: tuple[dict[str, list[Any]], ...]
    gpus: DevicePools | None

    def require(self, verb: str) -> None:
        """Raise ValueError where there is no pool whose bytes could be moved."""
        if self.shards[0][0][0] is None:
            raise ValueError(
                f"this manager has no pool (blocks=None), so that it has no bytes to {verb}; call "
                f"it where the pool is, or move pages by get_req_blocks yourself"
            )

    def enter(self, replica: int) -> None:
        """Order what the current streams do next behind whatever uses a replica's pools."""
        if self.gpus is not None:
            self.gpus.enter(replica)

    # ---- what there is -----------------------------------------------------------------------

    def layers(self, n: int) -> dict[int, LayerRows]:
        """Return the rows of every layer that has K and V of its own."""
        params = self.params
        found = LayerMap.of(params)
        if found is None:
            page, heads = params.page_size, params.n_kv_heads_per_device
            widths = params.row_widths
            return {
                i: LayerRows(LayerPlace(0, i, page, heads, widths, None, None), 0, 0)
                for i in range(params.num_layers)
            }
        column = column_tokens(params)
        rows = {}
        for bundle in bundles(params):
            skipped = bundle.group.skipped_tokens(n)
            for layer in bundle.layers:
                rows[layer] = LayerRows(found[layer], skipped, skipped // column * column)
        return rows

    def saved_layer(self, rows: LayerRows) -> SavedLayer:
        """Describe a layer as files do: with the heads of all devices."""
        tp = 1 if self.params.is_mla else self.params.tensor_parallel_degree
        return SavedLayer(rows.first, rows.place.heads * tp, rows.place.widths)

    def saved_states(self) -> tuple[SavedState, ...]:
        """Describe the groups of layers with a state."""
        return tuple(
            SavedState(
                tuple(group.layers),
                {name: (tuple(shape), dtype) for name, (shape, dtype) in group.arrays.items()},
            )
            for group in self.params.state_groups
        )

    # ---- rows --------------------------------------------------------------------------------

    def parts(self, rows: LayerRows) -> Iterator[tuple[str, int, bool]]:
        """Return suffix, width and whether it is scales of the tensors of a layer."""
        granularity = self.params.kv_scale_granularity
        yield from parts_of_layer(self.saved_layer(rows), granularity)

    def read(
        self, replica: int, layer: int, rows: LayerRows, pages: Sequence[int], n: int
    ) -> dict[str, NDArray[Any]]:
        """Read the rows `first` .. `n` - 1 of a layer, by suffix, with the heads of all devices."""
        table, _ = _table(rows, pages, rows.first, n)
        found: dict[str, list[NDArray[Any]]] = {}
        for pools in self._pools(replica, layer):
            for name, pool in pools.items():
                found.setdefault(name, []).append(_gather(pool, table, n - rows.first))
        return {name: np.concatenate(parts, axis=1) for name, parts in found.items()}

    def write(
        self,
        replica: int,
        layer: int,
        rows: LayerRows,
        pages: Sequence[int],
        first: int,
        tensors: dict[str, NDArray[Any]],
    ) -> None:
        """Write rows from token `first` on into the pages of a layer."""
        n = first + len(next(iter(tensors.values())))
        table, offset = _table(rows, pages, first, n)
        for shard, pools in enumerate(self._pools(replica, layer, all_shards=True)):
            begin = 0 if self.params.is_mla else shard * rows.place.heads
            for name, pool in pools.items():
                part = tensors[name][:, begin : begin + rows.place.heads]
                _append(pool, table, offset, part)

    def _pools(
        self, replica: int, layer: int, *, all_shards: bool = False
    ) -> Iterator[dict[str, Any]]:
        """See a layer in the pools of each device: [pages, page_size, heads, width] by suffix.

        Of latent rows, which every device has, the first device's unless all are asked for.
        """
        layers = LayerMap.of(self.params)
        none = np.zeros((0, 1), np.uint32)
        tables = None if layers is None else (none,) * len(bundles(self.params))
        shards = self.shards[replica]
        for blocks, scales in shards if all_shards or not self.params.is_mla else shards[:1]:
            inputs = RaggedKVCacheInputs(
                blocks, none[:, 0], none, none, scales, tables=tables, layers=layers
            )
            seen = layer_pools(inputs, layer)
            names = ("k", "v") if len(seen.pools) == 2 else ("latent",)
            found = dict(zip(names, seen.pools, strict=True))
            if seen.scales is not None:
                found |= {f"{n}_scale": s for n, s in zip(names, seen.scales, strict=True)}
            yield found

    # ---- states ------------------------------------------------------------------------------

    def state_rows(self, replica: int, slot: int) -> Iterator[tuple[str, list[Any]]]:
        """Return name and arrays [layers, ...], one per device, of all that a slot holds."""
        tp = self.params.tensor_parallel_degree
        for i, group in enumerate(self.states):
            for name, arrays in group.items():
                own = arrays[replica * tp : (replica + 1) * tp]
                yield f"states.{i}.{name}", [array[slot] for array in own]


def _table(
    rows: LayerRows, pages: Sequence[int], first: int, n: int
) -> tuple[NDArray[np.uint32], int]:
    """Return the table of the pages of tokens `first` .. `n` - 1, and where in them these begin."""
    page = rows.place.page_size
    own = pages[first // page : -(-n // page)]
    return np.array([own], np.uint32), first % page


def _gather(pool: Any, table: NDArray[np.uint32], n: int) -> NDArray[Any]:
    place = place_of(None, {"pool": pool})
    lengths = np.array([n], np.uint32)
    batch = PagedBatch(pool, None, place.from_host(table), place.from_host(lengths))
    rows, _, _ = gather(batch, 0, lengths=lengths)
    return place.to_host(rows)


def _append(pool: Any, table: NDArray[np.uint32], offset: int, rows: NDArray[Any]) -> None:
    place = place_of(None, {"pool": pool})
    begin = place.from_host(np.array([offset], np.uint32))
    batch = PagedBatch(pool, None, place.from_host(table), begin)
    source = place.from_host(np.ascontiguousarray(rows))
    append(batch, 0, source, None, np.array([0, len(rows)], np.uint32))
    place.wait()
