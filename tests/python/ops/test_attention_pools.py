# SPDX-License-Identifier: Apache-2.0
"""Attention over latent rows, over a manager's pools, and for arrays of other libraries."""

from __future__ import annotations

import zlib
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import conftest
import kvcore
from attention_oracle import assert_close, assert_lse, attend
from attention_scenes import DTYPES, Scene
from builders import make_context, make_params
from kvcore import ops
from kvcore.support.dtypes import NARROW, WIDE, numpy_dtype
from latent_rows import Latent


# -- latent rows ---------------------------------------------------------------------------------
@pytest.mark.parametrize(("rank", "rope"), [(64, 16), (512, 64), (59, 7)])
@pytest.mark.parametrize(("cached", "new", "heads"), [(100, 1, 16), (20, 30, 3), (0, 1, 1)])
def test_joint_and_split_latent_rows(
    rank: int, rope: int, cached: int, new: int, heads: int
) -> None:
    latent = Latent(cached, new, rank=rank, rope=rope, heads=heads)
    expected, sums = latent.expected(scale=0.07)
    joint = kvcore.PagedBatch(latent.pool, None, latent.table, latent.cached, "MLA")
    split = kvcore.PagedBatch(
        latent.pool[..., :rank], latent.pool[..., rank:].copy(), latent.table, latent.cached, "MLA"
    )
    for batch, v_dim in ((joint, rank), (split, None), (split, rank)):
        o, lse = ops.attention(
            batch, 0, latent.q, latent.offsets, scale=0.07, v_head_dim=v_dim, return_lse=True
        )
        assert_close(o, expected, "float32")
        assert_lse(lse, sums)
    narrow = ops.attention(split, 0, latent.q, latent.offsets, scale=0.07, v_head_dim=5)
    assert_close(narrow, expected[..., :5], "float32")


def test_values_of_joint_rows_are_whole_keys_by_default() -> None:
    latent = Latent(20, 2)
    batch = kvcore.PagedBatch(latent.pool, None, latent.table, latent.cached, "MLA")
    latent.rank += 16
    assert_close(ops.attention(batch, 0, latent.q, latent.offsets), latent.expected()[0], "float32")


@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize("kind", ["tokens", "number"])
def test_quantised_latent_rows(dtype: str, kind: str) -> None:
    """The ends of the keys keep their own dtype, and have no scales."""
    latent = Latent(50, 3)
    dense, ends = np.nan_to_num(latent.pool[..., :64]), latent.pool[..., 64:].astype(np.float16)
    codes, scales = ops.quantize(dense, dtype, 16 if kind == "tokens" else "tensor")
    if kind == "number":
        scales = np.float32(scales[0])
    given = scales if kind == "tokens" else float(scales)
    batch = kvcore.PagedBatch(codes, ends, latent.table, latent.cached, "MLA", key_scales=given)
    spread = scales.repeat(16, axis=-1) if kind == "tokens" else scales
    wide = np.concatenate([codes.astype(float) * spread, ends.astype(float)], axis=-1)
    at = np.arange(53)
    rows = wide[latent.table[0, at // 16], at % 16]
    o = ops.attention(batch, 0, latent.q, latent.offsets)
    assert_close(o, latent.expected(rows)[0], "float32")


@pytest.mark.parametrize("heads", [1, 128])
def test_rows_of_656_bytes(heads: int) -> None:
    """A row has codes, scales and the rotated part; poison surrounds the written bytes."""
    latent = Latent(30, 2, rank=512, rope=64, page=3, heads=heads)
    rows = np.full((*latent.pool.shape[:2], 656), 0xFF, np.uint8)
    batch = kvcore.PagedBatch(rows, None, latent.table, np.zeros(1, np.uint32), "MLA_FP8")
    ops.append(batch, 0, latent.rows[:, None], None, np.array([0, 32], np.uint32))
    stored, _, _ = ops.gather(batch, 0, lengths=np.array([32], np.uint32))
    batch = kvcore.PagedBatch(rows, None, latent.table, latent.cached, "MLA_FP8")
    for threads in (1, 2):
        o = ops.attention(batch, 0, latent.q, latent.offsets, scale=0.06, threads=threads)
        assert_close(o, latent.expected(stored[:, 0], scale=0.06)[0], "float32")


def test_append_and_gather_of_split_latent_rows() -> None:
    latent = Latent(3, 20)
    dense, tail = np.zeros_like(latent.pool[..., :64]), np.zeros_like(latent.pool[..., 64:])
    batch = kvcore.PagedBatch(dense, tail, latent.table, np.zeros(1, np.uint32), "MLA")
    rows = latent.rows[:, None]
    ops.append(batch, 0, rows, None, np.array([0, 23], np.uint32))
    k, v, _ = ops.gather(batch, 0, lengths=np.array([23], np.uint32))
    assert v is None
    assert np.array_equal(k, rows)
    batch = kvcore.PagedBatch(dense, tail, latent.table, latent.cached, "MLA")
    o = ops.attention(batch, 0, latent.q, latent.offsets)
    assert_close(o, latent.expected()[0], "float32")


# -- managers ------------------------------------------------------------------------------------
class Model:
    """Appends K and V that depend on all tokens up to their own, and attends."""

    def __init__(self, **params: Any) -> None:
        settings: dict[str, Any] = {"n_kv_heads": 2, "head_dim": 16, "num_layers": 3}
        self.params = make_params(**(settings | params))
        self.manager = kvcore.PagedKVCacheManager(
            self.params, 8, 4096, num_pages=512, enable_runtime_checks=True
        )
        self.rng = np.random.default_rng(1)

    def kv(self, context: Any, begin: int, end: int) -> list[Any]:
        """Return K and V [tokens, heads, dim] of a context's tokens."""
        tokens = context.tokens
        widths = self.params.row_widths
        heads = self.params.n_kv_heads_per_device
        seeds = [zlib.crc32(tokens[: n + 1].tobytes()) for n in range(begin, end)]
        drawn = [np.random.default_rng(s).normal(size=(heads, sum(widths))) for s in seeds]
        whole = np.array(drawn).reshape(end - begin, heads, sum(widths)).astype(np.float32)
        stored = whole.astype(numpy_dtype(self.params.dtype)) if self.is_wide else whole
        return np.split(stored, np.cumsum(widths)[:-1], axis=2)

    @property
    def is_wide(self) -> bool:
        return self.params.dtype not in NARROW

    def seen(self, part: Any) -> Any:
        """Return the values that a pool stores for some K or V, in float64."""
        group = self.params.kv_scale_granularity
        if group is None:
            return part.astype(numpy_dtype(self.params.dtype)).astype(float)
        codes, scales = ops.quantize(part, self.params.dtype, group)
        return codes.astype(float) * scales.repeat(group, axis=-1)

    def run(self, batch: list[Any], threads: int = 1) -> None:
        """Run one step: two layers' attention, flat and cascaded, against the oracle."""
        (inputs,) = self.manager.fetch(batch)
        new = [self.kv(c, c.start_idx, c.active_idx) for c in batch]
        parts = [np.concatenate(part) for part in zip(*new, strict=True)]
        counts = [c.active_idx - c.start_idx for c in batch]
        offsets = np.concatenate([[0], np.cumsum(counts)]).astype(np.uint32)
        whole = [[self.seen(part) for part in self.kv(c, 0, c.active_idx)] for c in batch]
        keys, values = [rows[0] for rows in whole], [rows[-1] for rows in whole]
        heads = 4 * self.params.n_kv_heads_per_device
        q = self.rng.normal(size=(sum(counts), heads, self.params.head_dim)).astype(np.float32)
        expected, sums = attend(q, keys, values, offsets)
        shared = self.manager.shared_prefixes(batch)
        for layer in (0, self.params.num_layers - 1):
            v = parts[1] if len(parts) == 2 else None
            ops.append(inputs, layer, parts[0], v, offsets)
            for found in (
                ops.attention(inputs, layer, q, offsets, return_lse=True, threads=threads),
                ops.cascade_attention(
                    inputs, layer, q, offsets, shared, return_lse=True, threads=threads
                ),
            ):
                assert_close(found[0], expected, "float32")
                assert_lse(found[1], sums)
        for context in batch:
            context.update(int(self.rng.integers(50)))
        self.manager.step(batch)

    def claim(self, tokens: Any, **rest: Any) -> Any:
        context = make_context(tokens, **rest)
        self.manager.claim(context.request_id)
        return context


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("page", "granularity"), [(1, None), (3, 4), (16, 16)])
def test_steps_of_a_managed_batch(dtype: str, page: int, granularity: int | None) -> None:
    if dtype == "int8" and granularity is None:
        granularity = 8
    narrow = {"kv_scale_granularity": granularity} if dtype in NARROW else {}
    model = Model(page_size=page, dtype=dtype, caching=False, **narrow)
    batch = [model.claim(range(n, 2 * n)) for n in (5, 1, 9)]
    for _ in range(3):
        model.run(batch, threads=2)


@pytest.mark.parametrize("page", [1, 4, 24])
def test_prefix_hits_chunks_and_forks(page: int) -> None:
    model = Model(page_size=page)
    system = list(range(100, 152))
    first = model.claim([*system, 1, 2])
    model.run([first])
    batch = [first, model.claim([*system, 3]), model.claim([*system[:30], 4, 5, 6], active_idx=31)]
    for context in batch[1:]:
        assert model.manager.maybe_reserve(context)
    assert batch[1].start_idx > 0
    model.run(batch)
    model.run(batch)
    children = [make_context([*first.tokens[: first.start_idx].tolist(), 7 + n]) for n in range(2)]
    model.manager.fork(first.request_id, *children)
    for _ in range(3):
        model.run([*batch, *children])
    groups = model.manager.shared_prefixes([*batch, *children])
    assert len(groups) >= 2
    model.manager.check_integrity()


@pytest.mark.parametrize("extra", [{"is_mla": True, "n_kv_heads": 1}, {"v_head_dim": 24}])
def test_latent_and_uneven_pools_of_a_manager(extra: dict[str, Any]) -> None:
    model = Model(page_size=4, **extra)
    batch = [model.claim([*range(20), n]) for n in range(2)]
    for _ in range(3):
        model.run(batch)


def test_groups_of_other_replicas_are_left_out() -> None:
    params = make_params(4, replicas=2, n_kv_heads=1, head_dim=8, num_layers=1)
    manager = kvcore.PagedKVCacheManager(params, 8, 256, num_pages=32, devices=("cpu", "cpu"))
    batch = [make_context([*range(8), n]) for n in range(4)]
    for replica, context in zip((0, 0, 1, 1), batch, strict=True):
        manager.claim(context.request_id, replica)
        manager.fetch([context])
        context.update(1)
        manager.step([context])
    per_replica = manager.fetch(batch)
    shared = manager.shared_prefixes(batch)
    assert sorted(group.replica for group in shared) == [0, 1]
    q, offsets = np.ones((2, 2, 8), np.float32), np.array([0, 1, 2], np.uint32)
    for replica, inputs in enumerate(per_replica):
        flat = ops.attention(inputs, 0, q, offsets)
        for groups in (shared, shared[::-1]):
            o = ops.cascade_attention(inputs, 0, q, offsets, groups, replica=replica)
            assert_close(o, flat.astype(float), "float32")


# -- other libraries -----------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", WIDE)
def test_torch_in_torch_out(dtype: str) -> None:
    torch = conftest.require("torch")
    scene = Scene(cached=[20, 0], new=[1, 7], dtype="float32")
    kind = getattr(torch, dtype)
    pools = [torch.from_numpy(p) for p in (scene.batch.key_pool, scene.batch.value_pool)]
    batch = kvcore.PagedBatch(pools[0], pools[1], scene.table, scene.batch.cache_lengths)
    q = torch.from_numpy(scene.q.copy()).to(kind)
    o, lse = ops.attention(batch, 0, q, torch.from_numpy(scene.offsets), return_lse=True)
    assert isinstance(o, torch.Tensor)
    assert o.dtype == kind
    assert lse.dtype == torch.float32
    expected, sums = scene.expected(q.float().numpy())
    assert_close(o.float().numpy().astype(numpy_dtype(dtype)), expected, dtype)
    assert_lse(lse.numpy(), sums)
    out = torch.empty_like(o)
    assert ops.attention(batch, 0, q, scene.offsets, out=out) is out
    assert torch.equal(out, o)
    sinks = torch.zeros(4, dtype=kind)
    with_sinks = ops.attention(batch, 0, q, scene.offsets, sinks=sinks)
    assert (with_sinks.float().abs() <= o.float().abs() * 1.01).all()
    merged, sums = ops.merge_states(o, lse, o, lse)
    assert isinstance(merged, torch.Tensor)
    assert torch.allclose(merged.float(), o.float(), rtol=1e-2)
    assert torch.allclose(sums, lse + np.log(2))


@pytest.mark.parametrize("dtype", WIDE)
def test_jax_in_jax_out(dtype: str) -> None:
    jax = conftest.require("jax")
    scene = Scene(cached=[20, 0], new=[1, 7])
    jnp = jax.numpy
    pools = [jnp.asarray(p) for p in (scene.batch.key_pool, scene.batch.value_pool)]
    lengths = jnp.asarray([20, 0], jnp.uint32)
    batch = kvcore.PagedBatch(pools[0], pools[1], jnp.asarray(scene.table), lengths)
    q = jnp.asarray(scene.q).astype(dtype)
    o, lse = ops.attention(batch, 0, q, jnp.asarray(scene.offsets), return_lse=True)
    assert isinstance(o, jax.Array)
    assert isinstance(lse, jax.Array)
    expected, sums = scene.expected(np.asarray(q))
    assert_close(np.asarray(o), expected, dtype)
    assert_lse(np.asarray(lse), sums)
    with pytest.raises(ValueError, match="out is read-only"):
        ops.attention(batch, 0, q, scene.offsets, out=jnp.zeros_like(o))


# -- scales --------------------------------------------------------------------------------------
@given(
    st.sampled_from(NARROW),
    st.sampled_from(["NHD", "HND"]),
    st.sampled_from(["number", "heads", "tokens"]),
)
def test_append_and_gather_with_scales_of_ones_own(dtype: str, layout: str, kind: str) -> None:
    """append quantises by a batch's scales; gather and attention read with the same scales."""
    scene = Scene(cached=[5, 0], new=[3, 2], dtype=dtype, layout=layout, scales=kind)
    k, v = scene.rng.normal(size=(2, 5, 2, 16)).astype(np.float32)
    ops.append(scene.batch, 0, k, v, scene.offsets)
    found = ops.gather(scene.batch, 0, lengths=np.array([8, 2], np.uint32))
    per_row = [np.split(part, [8]) for part in found[:2]]
    for part, rows in zip((k, v), per_row, strict=True):
        assert part.dtype == rows[0].dtype == np.float32
        written = np.concatenate([rows[0][5:], rows[1]])
        step = 4 / 127 if dtype == "int8" else 1 / 512
        near = np.abs(part) * (0.13 if dtype == "float8_e5m2" else 0.07) + step
        outside = np.abs(part) > 0.9  # int8 codes saturate at these values
        assert ((np.abs(written - part) <= near) | (outside & (dtype == "int8"))).all()
    o = ops.attention(scene.batch, 0, scene.q, scene.offsets)
    keys, values = ([rows.astype(float) for rows in part] for part in per_row)
    assert_close(o, attend(scene.q, keys, values, scene.offsets)[0], "float32")
