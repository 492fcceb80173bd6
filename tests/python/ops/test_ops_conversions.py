# SPDX-License-Identifier: Apache-2.0
"""append, scatter and gather between dtypes: the bits of contiguous arrays, and no other change."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import conftest
import kvcore
from kvcore import _core, ops
from kvcore.support.dtypes import NARROW, WIDE, numpy_dtype
from same_arrays import same_bytes
from tables import table

LARGEST = {name: largest for name, _, largest in _core.dtypes()}
KINDS = ("groups", "heads", "none")
Array = np.ndarray[Any, Any]


def poison(shape: tuple[int, ...], dtype: str) -> Array:
    """Return bytes that are NaN if the dtype has NaN."""
    return np.full((*shape[:-1], shape[-1] * numpy_dtype(dtype).itemsize), 0xFF, np.uint8).view(
        numpy_dtype(dtype)
    )


@dataclass
class Scene:
    """One layer's poisoned pools, and a batch of rows in scattered pages."""

    page: int
    heads: int
    dims: list[int]
    cached: list[int]
    new: list[int]
    narrow: str
    layout: str
    kind: str
    group: int
    seed: int

    def __post_init__(self) -> None:
        rng = np.random.default_rng(self.seed)
        counts = [-(-(a + b) // self.page) for a, b in zip(self.cached, self.new, strict=True)]
        pages = sum(counts) + 2
        ids = iter(rng.permutation(pages))
        self.table = np.full((len(counts), max(counts, default=0) + 1), pages, np.uint32)
        for row, count in enumerate(counts):
            self.table[row, :count] = [next(ids) for _ in range(count)]
        self.pools = [poison((pages, self.page, self.heads, dim), self.narrow) for dim in self.dims]
        self.scales = [
            poison((pages, self.page, self.heads, dim // self.group), "float32")
            for dim in self.dims
        ]
        self.factors = [rng.uniform(0.01, 0.1, self.heads).astype(np.float32) for _ in self.dims]
        self.offsets = np.concatenate([[0], np.cumsum(self.new)]).astype(np.uint32)
        self.rng = rng

    def laid_out(self, array: Array) -> Array:
        """Return a copy in the scene's layout, at an odd address if the elements are bytes."""
        shaped = array.transpose(0, 2, 1, 3) if self.layout == "HND" else array
        raw = np.full(array.nbytes + 1, 0xFF, np.uint8)
        start = 1 if array.itemsize == 1 else 0
        copy = raw[start : start + array.nbytes].view(array.dtype).reshape(shaped.shape)
        copy[...] = shaped
        return copy

    def batch(self) -> kvcore.PagedBatch:
        k, v = (self.laid_out(pool) for pool in self.pools)
        scales: list[Any] = [None, None]
        if self.kind == "groups":
            scales = [self.laid_out(each) for each in self.scales]
        if self.kind == "heads":
            scales = list(self.factors)
        lengths = np.array(self.cached, np.uint32)
        return kvcore.PagedBatch(k, v, self.table, lengths, self.layout, scales[0], scales[1])

    def tokens(self, wide: str) -> list[Array]:
        """Return K and V cut out of one fused array, with some infinities, NaN and zeros."""
        total, width = int(self.offsets[-1]), sum(self.dims) + 3
        whole = self.rng.normal(0, 3, (total, self.heads, width))
        special = self.rng.random(whole.shape)
        whole[special < 0.01] = np.nan
        whole[(special >= 0.01) & (special < 0.02)] = -np.inf
        whole[(special >= 0.02) & (special < 0.1)] = 0
        fused = whole.astype(numpy_dtype(wide))
        return [fused[..., 1 : 1 + self.dims[0]], fused[..., -self.dims[1] :]]

    def codes_of(self, x: Array, i: int) -> tuple[Array, Array | None]:
        """Return the pool's expected codes: quantised as contiguous arrays are."""
        if self.kind == "groups":
            return ops.quantize(x, self.narrow, self.group)
        scale = self.factors[i] if self.kind == "heads" else np.ones(self.heads, np.float32)
        with np.errstate(all="ignore"):
            scaled = x.astype(np.float32) * (np.float32(1) / scale[:, None])
        if self.narrow == "int8":
            return np.clip(np.rint(np.nan_to_num(scaled, nan=0.0)), -128, 127).astype(np.int8), None
        largest = LARGEST[self.narrow]
        codes = np.clip(scaled, -largest, largest).astype(numpy_dtype(self.narrow))
        codes[np.isnan(scaled)] = np.array(0x7F, np.uint8).view(codes.dtype)
        return codes, None

    def place(self, row: int, token: int) -> tuple[int, int]:
        return int(self.table[row, token // self.page]), token % self.page

    def expected(self, tokens: list[Array], begin: list[int]) -> tuple[list[Array], list[Array]]:
        """Return all pools and scales after the rows' tokens are written from `begin` on."""
        pools = [pool.copy() for pool in self.pools]
        scales = [each.copy() for each in self.scales]
        for i, x in enumerate(tokens):
            codes, found = self.codes_of(x, i)
            for row, first in enumerate(begin):
                for j, at in enumerate(range(self.offsets[row], self.offsets[row + 1])):
                    pools[i][self.place(row, first + j)] = codes[at]
                    if found is not None:
                        scales[i][self.place(row, first + j)] = found[at]
        return pools, scales


@st.composite
def scenes(draw: st.DrawFn) -> Scene:
    rows = draw(st.integers(0, 3))
    page = draw(st.sampled_from([1, 3, 24]))
    group = draw(st.sampled_from([1, 5, 16, 59]))
    return Scene(
        page,
        draw(st.integers(1, 3)),
        [group * draw(st.integers(1, 3)) for _ in range(2)],
        draw(st.lists(st.integers(0, 2 * page), min_size=rows, max_size=rows)),
        draw(st.lists(st.integers(0, 2 * page), min_size=rows, max_size=rows)),
        draw(st.sampled_from(NARROW)),
        draw(st.sampled_from(["NHD", "HND"])),
        draw(st.sampled_from(KINDS)),
        group,
        draw(st.integers(0, 2**32)),
    )


def same_pools(scene: Scene, batch: kvcore.PagedBatch, pools: Any, scales: Any) -> bool:
    found = [batch.key_pool, batch.value_pool]
    expected = list(pools)
    if scene.kind == "groups":
        found += [batch.key_scales, batch.value_scales]
        expected += scales
    return all(same_bytes(a, scene.laid_out(b)) for a, b in zip(found, expected, strict=True))


@given(scenes(), st.sampled_from(WIDE), st.integers(1, 3))
def test_append_quantises_into_place(scene: Scene, wide: str, threads: int) -> None:
    batch, tokens = scene.batch(), scene.tokens(wide)
    k, v = tokens
    ops.append(batch, 0, k, v, scene.offsets, threads=threads)
    assert same_pools(scene, batch, *scene.expected(tokens, scene.cached))


@given(scenes(), st.sampled_from(WIDE), st.sampled_from(WIDE), st.integers(1, 3))
def test_scatter_and_gather_are_inverse(scene: Scene, wide: str, back: str, threads: int) -> None:
    batch, tokens = scene.batch(), scene.tokens(wide)
    k, v = tokens
    ops.scatter(batch, 0, k, v, scene.offsets, threads=threads)
    assert same_pools(scene, batch, *scene.expected(tokens, [0] * len(scene.new)))
    lengths = np.array(scene.new, np.uint32)
    out = tuple(np.zeros((len(x), scene.heads, x.shape[2] + 2), numpy_dtype(back)) for x in tokens)
    inner = tuple(array[..., 1:-1] for array in out)
    ops.gather(batch, 0, lengths=lengths, out=inner, threads=threads)
    *both, offsets = ops.gather(batch, 0, lengths=lengths, dtype=back, threads=threads)
    assert np.array_equal(offsets, scene.offsets)
    for i, (x, read) in enumerate(zip(tokens, both, strict=True)):
        codes, scales = scene.codes_of(x, i)
        if scales is None:
            scales = scene.factors[i] if scene.kind == "heads" else np.ones(1, np.float32)
        assert same_bytes(read, ops.dequantize(codes, scales, back))
        assert same_bytes(inner[i], read)
        assert not out[i][..., 0].any()
        assert not out[i][..., -1].any()


@pytest.mark.parametrize("stored", WIDE)
@pytest.mark.parametrize("back", WIDE)
def test_wide_pools_are_read_as_any_wide_dtype(stored: str, back: str) -> None:
    rng = np.random.default_rng(3)
    pool = rng.normal(size=(3, 4, 2, 59)).astype(numpy_dtype(stored))
    table, lengths = np.array([[2, 0]], np.uint32), np.array([6], np.uint32)
    k, _, _ = ops.gather(kvcore.PagedBatch(pool, None, table, lengths), 0, dtype=back)
    rows = np.concatenate([pool[2], pool[0, :2]])
    assert same_bytes(k, rows.astype(np.float32).astype(numpy_dtype(back)))


@pytest.mark.parametrize("wide", WIDE)
@pytest.mark.parametrize("threads", [1, 3])
def test_rows_of_656_bytes(wide: str, threads: int) -> None:
    """A row has codes, scales and the rotated part; poison surrounds the written bytes."""
    rng = np.random.default_rng(4)
    rows = np.full((7, 3, 656), 0xFF, np.uint8)
    table = np.array([[5, 1, 7], [0, 6, 2]], np.uint32)
    lengths, offsets = np.array([2, 0], np.uint32), np.array([0, 4, 11], np.uint32)
    batch = kvcore.PagedBatch(rows, None, table, lengths, "MLA_FP8")
    x = rng.normal(size=(11, 1, 600)).astype(numpy_dtype(wide))[..., 12:588]
    ops.append(batch, 0, x, None, offsets, threads=threads)

    values, factors = ops.quantize(x[..., :512], "float8_e4m3fn", 128)
    ends = x[..., 512:].astype(np.float32).astype(numpy_dtype("bfloat16"))
    expected = np.full_like(rows, 0xFF)
    places = [(5, 2), *((1, i) for i in range(3))]
    places += [(page, i) for page in (0, 6, 2) for i in range(3)][:7]
    for at, place in enumerate(places):
        parts = [part[at, 0].view(np.uint8) for part in (values, factors, ends)]
        expected[place] = np.concatenate(parts)
    assert np.array_equal(rows, expected)

    k, v, _ = ops.gather(batch, 0, lengths=np.array([0, 7], np.uint32), threads=threads)
    assert v is None
    latent = ops.dequantize(values, factors, "float32")
    assert np.array_equal(k[..., :512], latent[4:])
    assert np.array_equal(k[..., 512:], ends[4:].astype(np.float32))


def test_latent_rows_in_two_pools() -> None:
    latent, rotated = np.zeros((4, 2, 24), np.float16), np.zeros((4, 2, 8), np.float16)
    table, lengths = np.array([[3, 1]], np.uint32), np.array([1], np.uint32)
    batch = kvcore.PagedBatch(latent, rotated, table, lengths, "MLA")
    x = np.random.default_rng(5).normal(size=(2, 1, 32)).astype(np.float16)
    ops.append(batch, 0, x, None, np.array([0, 2], np.uint32))
    assert np.array_equal(latent[3, 1], x[0, 0, :24])
    assert np.array_equal(rotated[1, 0], x[1, 0, 24:])
    k, _, _ = ops.gather(batch, 0, lengths=np.array([3], np.uint32))
    assert np.array_equal(k[1:], x)
    with pytest.raises(ValueError, match=r"k has shape \(2, 1, 31\), must be \(tokens, 1, 24 \+ 8"):
        ops.append(batch, 0, x[..., 1:], None, np.array([0, 2], np.uint32))


def test_results_are_of_the_pools_library() -> None:
    torch = conftest.require("torch")
    pool, scales = torch.zeros(4, 4, 2, 8, dtype=torch.int8), torch.zeros(4, 4, 2, 1)
    table, lengths = np.array([[2, 0]], np.uint32), np.array([0], np.uint32)
    batch = kvcore.PagedBatch(
        pool, pool.clone(), table, lengths, "NHD", scales, torch.zeros(4, 4, 2, 1)
    )
    x = torch.randn(3, 2, 8)
    ops.scatter(batch, 0, x, x, np.array([0, 3], np.uint32))
    k, v, _ = ops.gather(batch, 0, lengths=np.array([3], np.uint32), dtype="bfloat16")
    assert k.dtype == v.dtype == torch.bfloat16
    assert torch.allclose(k.float(), x, atol=0.05)


def scene(kind: str = "groups") -> dict[str, Any]:
    made = Scene(4, 2, [16, 16], [1, 0], [5, 3], "int8", "NHD", kind, 8, 6)
    k, v = made.tokens("float32")
    return {"inputs": made.batch(), "layer": 0, "k": k, "v": v, "row_offsets": made.offsets}


def replaced(arguments: dict[str, Any], **changes: Any) -> dict[str, Any]:
    batch = arguments["inputs"]
    fields = {name: changes.pop(name) for name in list(changes) if hasattr(batch, name)}
    inputs = batch
    if fields:
        scaled = ["key_scales", "value_scales"]
        names = ["key_pool", "value_pool", "lookup_table", "cache_lengths", "layout", *scaled]
        inputs = kvcore.PagedBatch(**({n: getattr(batch, n) for n in names} | fields))
    return arguments | changes | {"inputs": inputs}


def read_only(shape: tuple[int, ...]) -> Array:
    array = np.zeros(shape, np.float32)
    array.flags.writeable = False
    return array


X = np.ones((8, 2, 16), np.float32)
BAD: list[tuple[str, dict[str, Any], type[Exception], str]] = [
    ("groups", {"scale": 0.5}, ValueError, "scale is given for k, whose pool has scales"),
    ("heads", {"scale": 0.5}, ValueError, "scale is given for k, whose pool has scales"),
    ("none", {"scale": 0.0}, ValueError, "scale is 0.0, must be positive and finite"),
    ("none", {"scale": (1.0, np.ones(3, np.float32))}, ValueError, "one or one per head"),
    ("none", {"scale": (1.0,)}, ValueError, "a tuple of 1 is given for 2 pools"),
    ("groups", {"v": X.astype(np.int8)}, TypeError, "v has dtype int8, the pool has int8 with"),
    ("none", {"v": X.astype(np.float64)}, TypeError, "v has dtype float64"),
    ("none", {"v": X.astype(numpy_dtype("float8_e5m2"))}, TypeError, "v has dtype float8_e5m2"),
    ("groups", {"v": X[:7]}, ValueError, r"v has shape \(7, 2, 16\), must be \(8, 2, 16\)"),
    ("groups", {"v": np.ones((8, 2, 32), np.float32)[..., ::2]}, ValueError, "contiguous"),
    ("groups", {"value_scales": read_only((5, 4, 2, 2))}, ValueError, "scales is read-only"),
    ("groups", {"row_offsets": np.array([0, 0, 8], np.uint32)}, IndexError, "of row 1 has no page"),
    ("groups", {"threads": 0}, ValueError, "threads is 0"),
]


@table("call", [ops.append, ops.scatter])
@table(("kind", "change", "error", "match"), BAD)
def test_refused_calls_write_nothing(
    call: Any, kind: str, change: dict[str, Any], error: type[Exception], match: str
) -> None:
    arguments = replaced(scene(kind), **change)
    batch = arguments["inputs"]
    arrays = [batch.key_pool, batch.value_pool]
    arrays += [batch.key_scales, batch.value_scales] if kind == "groups" else []
    before = [array.tobytes() for array in arrays]
    with pytest.raises(error, match=match):
        call(**arguments)
    assert [array.tobytes() for array in arrays] == before


def test_refused_gathers() -> None:
    batch = scene()["inputs"]
    with pytest.raises(ValueError, match="dtype is 'int8', must be one of"):
        ops.gather(batch, 0, dtype="int8")
    with pytest.raises(ValueError, match="and out is given"):
        ops.gather(batch, 0, dtype="float32", out=(X, X))
    out, lengths = (X.copy(), X.astype(np.int8)), np.array([5, 3], np.uint32)
    with pytest.raises(TypeError, match=r"out\[1\] has dtype int8, the pool has int8 with scales"):
        ops.gather(batch, 0, lengths=lengths, out=out)


def test_refused_rows_of_656_bytes() -> None:
    table, lengths = np.array([[0]], np.uint32), np.array([0], np.uint32)
    unaligned = np.zeros(2 * 656 + 1, np.uint8)[1:].reshape(1, 2, 656)
    for rows, match in (
        (np.zeros((1, 1, 655), np.uint8), r"shape \(1, 1, 655\) and dtype uint8, must be"),
        (np.zeros((1, 1, 656), np.int8), "dtype int8, must be"),
        (np.zeros((1, 656), np.uint8), r"shape \(1, 656\)"),
        (unaligned, "multiples of 4"),
    ):
        with pytest.raises(ValueError, match=match):
            kvcore.PagedBatch(rows, None, table, lengths, "MLA_FP8")
    rows = np.zeros((1, 2, 656), np.uint8)
    with pytest.raises(ValueError, match="value_pool is given with layout 'MLA_FP8'"):
        kvcore.PagedBatch(rows, rows, table, lengths, "MLA_FP8")
