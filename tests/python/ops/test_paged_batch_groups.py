# SPDX-License-Identifier: Apache-2.0
"""PagedBatch over the pools of all layers: a call with a layer uses its table, place and window."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from builders import in_groups
from grouped_traffic import params_of
from kvcore import KVCacheParams, PagedBatch, PagedKVCacheManager, TextGenerationContext, ops
from kvcore.groups import ChunkedLocal, FullAttention, SlidingWindow, State, bundles

PAGES = 40
KINDS: dict[str, KVCacheParams] = {
    "flat": params_of(FullAttention([0, 1, 2]), groups=None, n_kv_heads=2),
    "windows": params_of(
        FullAttention([1, 4]), SlidingWindow([0, 2, 3, 5], 6), n_kv_heads=2, page_size=4
    ),
    "chunks": params_of(FullAttention([0]), ChunkedLocal([1, 2], 6), n_kv_heads=2),
    "shared": params_of(
        FullAttention([0]), SlidingWindow([1], 5), shared={2: 1}, num_layers=3, n_kv_heads=2
    ),
    "other rows": params_of(
        FullAttention([0, 1], n_kv_heads=2), SlidingWindow([2, 3], 6, head_dim=8, n_kv_heads=4)
    ),
}


class Twins:
    """A manager's own pool and the caller's arrays; the same calls write and read both."""

    def __init__(self, params: KVCacheParams, layout: str = "NHD", **scales: Any) -> None:
        options: dict[str, Any] = {"num_pages": PAGES, "enable_runtime_checks": True}
        self.params = params
        self.manager = PagedKVCacheManager(params, 8, 128, **in_groups(options))
        blocks: Any = self.manager.fetch([])[0].blocks
        width = params.layers_per_page
        shape = PAGES, params.page_size, *blocks.shape[4:]
        if blocks.shape[3] == 1:  # rows of several shapes
            shape = PAGES, params.page_size, 4, 8
        if layout == "HND":
            shape = shape[0], shape[2], shape[1], shape[3]
        self.pools = [[np.zeros(shape, np.float32) for _ in range(width)] for _ in range(2)]
        self.batch: PagedBatch | None = None
        self.layout = layout
        self.rng = np.random.default_rng(1)
        self.owners = {**{i: i for i in range(params.num_layers)}, **(params.shared or {})}
        self.contexts: list[TextGenerationContext] = []

    def begin(self, name: str, tokens: list[int], active: int | None = None) -> None:
        self.manager.claim(name)
        self.contexts.append(TextGenerationContext(name, tokens, active_idx=active))

    def own(self, inputs: Any) -> PagedBatch:
        if self.batch is None:
            keys, values = self.pools
            self.batch = PagedBatch(
                keys, values, inputs.tables, inputs.cache_lengths, self.layout, params=self.params
            )
        else:
            self.batch = self.batch.with_tables(inputs.tables, inputs.cache_lengths)
        return self.batch

    def run(self) -> None:
        (inputs,) = self.manager.fetch(self.contexts)
        own, offsets = self.own(inputs), inputs.row_offsets
        for layer in range(self.params.num_layers):
            pools = ops.batch.layer_pools(inputs, layer).pools
            heads, dim = pools[0].shape[2:]
            if self.owners[layer] == layer:
                k, v = self.rng.normal(size=(2, offsets[-1], heads, dim)).astype(np.float32)
                for each in (inputs, own):
                    ops.append(each, layer, k, v, offsets)
            q = self.rng.normal(size=(offsets[-1], 2 * heads, dim)).astype(np.float32)
            expected = ops.attention(inputs, layer, q, offsets)
            np.testing.assert_array_equal(ops.attention(own, layer, q, offsets), expected)
            slots = ops.build_slots(inputs, offsets, layer=layer)
            np.testing.assert_array_equal(ops.build_slots(own, offsets, layer=layer), slots)
        for context in self.contexts:
            context.update(7)
        self.manager.step(self.contexts)


@pytest.mark.parametrize(
    ("kind", "layout"),
    [(k, at) for k in KINDS for at in ("NHD", "HND") if (k, at) != ("other rows", "HND")],
)
def test_a_layer_is_found_by_the_models_number(kind: str, layout: str) -> None:
    twins = Twins(KINDS[kind], layout)
    twins.begin("a", list(range(20)))
    twins.begin("b", [*range(9), 50, 51], active=4)
    for _ in range(9):
        twins.run()


def fetched(kind: str) -> tuple[Twins, Any]:
    twins = Twins(KINDS[kind])
    twins.begin("a", list(range(9)))
    (inputs,) = twins.manager.fetch(twins.contexts)
    return twins, inputs


def test_the_rules_of_groups_hold() -> None:
    twins, inputs = fetched("windows")
    own, offsets = twins.own(inputs), inputs.row_offsets
    q = np.ones((9, 4, 4), np.float32)
    with pytest.raises(ValueError, match="window is 7, layer 2 keeps 6 tokens"):
        ops.attention(own, 2, q, offsets, window=7)
    with pytest.raises(IndexError, match="layer is 6, must be at least 0 and below 6"):
        ops.attention(own, 6, q, offsets)
    twins, inputs = fetched("shared")
    rows = np.ones((9, 2, 4), np.float32)
    with pytest.raises(ValueError, match="layer 2 reads the K and V of layer 1"):
        ops.append(twins.own(inputs), 2, rows, rows, inputs.row_offsets)
    state = params_of(FullAttention([0]), State([1], {"x": ((1,), "float32")}), n_kv_heads=2)
    keys, values = (pools[:1] for pools in twins.pools)
    batch = PagedBatch(keys, values, inputs.tables[0], inputs.cache_lengths, params=state)
    ops.append(batch, 0, rows, rows, inputs.row_offsets)
    with pytest.raises(IndexError, match="layer 1 is in no attention group"):
        ops.append(batch, 1, rows, rows, inputs.row_offsets)


def test_another_step_takes_other_tables_and_the_first_keeps_its_own() -> None:
    twins, inputs = fetched("windows")
    first = twins.own(inputs)
    table, lengths = np.full((2, 3), PAGES, np.uint32), np.array([1, 2], np.uint32)
    second = first.with_tables([table] * len(bundles(twins.params)), lengths)
    assert second.cache_lengths is lengths
    assert first.cache_lengths is inputs.cache_lengths
    assert [ops.batch.layer_pools(each, 3).lookup_table.shape for each in (first, second)] == [
        (1, 3),
        (2, 3),
    ]
    assert second.key_pool is first.key_pool
    one = PagedBatch(twins.pools[0][0], twins.pools[1][0], inputs.lookup_table, lengths[:1])
    other = one.with_tables(table, lengths)
    assert ops.batch.layer_pools(other, 0).lookup_table.shape == (2, 3)
    assert ops.batch.layer_pools(one, 0).lookup_table.shape == (1, 3)


def test_scales_of_all_layers() -> None:
    params = params_of(FullAttention([0, 1]), SlidingWindow([2, 3], 6), n_kv_heads=2)
    twins, width = Twins(params), 2
    twins.begin("a", list(range(9)))
    (inputs,) = twins.manager.fetch(twins.contexts)
    codes = [[np.zeros((PAGES, 2, 2, 4), np.int8) for _ in range(width)] for _ in range(2)]
    scales = [[np.zeros((PAGES, 2, 2, 1), np.float32) for _ in range(width)] for _ in range(2)]
    batch = PagedBatch(
        codes[0], codes[1], inputs.tables, inputs.cache_lengths, "NHD", scales[0], scales[1], params
    )
    rows = np.random.default_rng(0).normal(size=(9, 2, 4)).astype(np.float32)
    lengths = np.array([9], np.uint32)
    for layer in range(4):
        ops.append(batch, layer, rows * (layer + 1), rows, inputs.row_offsets)
    for layer in range(4):
        k, v, _ = ops.gather(batch, layer, lengths=lengths)
        np.testing.assert_allclose(k, rows * (layer + 1), atol=0.02 * (layer + 1))
        np.testing.assert_allclose(v, rows, atol=0.02)


def test_latent_rows_of_all_layers() -> None:
    groups = FullAttention([0]), SlidingWindow([1], 5)
    params = params_of(*groups, is_mla=True, n_kv_heads=1, head_dim=12)
    manager = PagedKVCacheManager(params, 8, 128, num_pages=PAGES)
    context = TextGenerationContext("a", list(range(9)))
    manager.claim("a")
    (inputs,) = manager.fetch([context])
    rows = np.random.default_rng(0).normal(size=(9, 1, 12)).astype(np.float32)
    tables, starts = inputs.tables, inputs.cache_lengths
    whole = [np.zeros((PAGES, 2, 12), np.float32)]
    parts = [np.zeros((PAGES, 2, 8), np.float32)], [np.zeros((PAGES, 2, 4), np.float32)]
    for keys, ends in ((whole, None), parts):
        batch = PagedBatch(keys, ends, tables, starts, "MLA", params=params)
        for layer in range(2):
            ops.append(batch, layer, rows * (layer + 1), None, inputs.row_offsets)
        for layer in range(2):
            k, v, _ = ops.gather(batch, layer, lengths=np.array([9], np.uint32))
            np.testing.assert_array_equal(k, rows * (layer + 1))
            assert v is None
    with pytest.raises(ValueError, match=r"layer 0 have pages \[\(2, 1, 8\)\]"):
        PagedBatch(parts[0], None, tables, starts, "MLA", params=params)


def refusals() -> list[tuple[dict[str, Any], type[Exception], str]]:
    def pool(*shape: int) -> Any:
        return np.zeros(shape, np.float32)

    good = [pool(8, 4, 2, 4), pool(8, 4, 2, 4)]
    table, wide = np.zeros((1, 1), np.uint32), [pool(8, 4, 3, 4)] * 2
    spread = [np.zeros((8, 4, 2, 8), np.float32)[..., :4]] * 2
    return [
        ({"key_pool": good[0]}, TypeError, "key_pool is a ndarray, must be a list with one for"),
        ({"value_pool": good[:1]}, ValueError, "value_pool has 1 entries, must have .* 2 layers"),
        ({"lookup_table": table}, ValueError, "lookup_table has 1 tables, must have .* 3 bundles"),
        ({"lookup_table": [table] * 2}, ValueError, "has 2 tables"),
        (
            {"key_pool": wide},
            ValueError,
            r"layer 1 have .*\(4, 3, 4\).* be .*\(4, 2, 4\)",
        ),
        ({"value_pool": None}, ValueError, "is_mla is False, .* NHD pages without a value_pool"),
        ({"params": 7}, TypeError, "params is a int, must be KVCacheParams"),
        ({"lookup_table": [table, table, None]}, TypeError, "lookup_table is a NoneType"),
        (
            {"key_pool": spread, "value_pool": spread, "params": KINDS["other rows"]},
            ValueError,
            "as many elements in one piece",
        ),
    ]


@pytest.mark.parametrize(("change", "error", "text"), refusals())
def test_arrays_that_are_not_those_of_the_params(
    change: dict[str, Any], error: type[Exception], text: str
) -> None:
    good = [np.zeros((8, 4, 2, 4), np.float32) for _ in range(2)]
    given: dict[str, Any] = {
        "key_pool": good,
        "value_pool": good,
        "lookup_table": [np.zeros((1, 1), np.uint32)] * 3,
        "cache_lengths": np.zeros(1, np.uint32),
        "params": KINDS["windows"],
    }
    with pytest.raises(error, match=text):
        PagedBatch(**(given | change))
