# SPDX-License-Identifier: Apache-2.0
"""``kvcore.functional`` in functions that jax compiles, by both ways of calling."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from conftest import require
from kvcore.functional import (
    PagedKVCache,
    allocate_blocks,
    append_kv,
    attend_kv,
    gather_kv,
    init_paged_kv_cache,
)
from kvcore.support.dtypes import numpy_dtype

jax = require("jax")
jnp = jax.numpy

from kvcore.integrations.jax import has_handlers  # noqa: E402
from kvcore.ops import jax_calls  # noqa: E402

BLOCK, HEADS, DIM = 4, 2, 8
DTYPES = ("float32", "bfloat16", "float8_e4m3fn", "float8_e5m2", "int8")
Array = np.ndarray[Any, Any]


@pytest.fixture(params=["handlers", "callbacks"], autouse=True)
def way(request: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Set the way in which XLA calls kvcore; functions compiled another way are not reused."""
    if request.param == "callbacks":
        monkeypatch.setattr(jax_calls, "_HANDLERS", frozenset())
    else:
        require("kvcore._jax")
        assert has_handlers()
    jax.clear_caches()
    yield request.param
    jax.clear_caches()


def tokens(number: int, heads: int = HEADS, dtype: str = "float32", seed: int = 0) -> Array:
    drawn = np.random.default_rng([seed, number]).normal(size=(number, heads, DIM)) * 8
    return drawn.astype(numpy_dtype(dtype))


def cache_of(*lengths: int, dtype: str = "float32", seed: int = 1) -> PagedKVCache:
    """Return rows of `lengths` tokens, in numpy; every row has room for two more blocks."""
    order = np.random.default_rng(seed).permutation(48).tolist()
    cache = init_paged_kv_cache(
        num_blocks=48,
        block_size=BLOCK,
        num_kv_heads=HEADS,
        head_dim=DIM,
        batch_size=len(lengths),
        max_blocks_per_seq=8,
        dtype=dtype,
    )
    for row, length in enumerate(lengths):
        for count in (length, 2 * BLOCK):
            cache, used = allocate_blocks(
                cache, sequence_idx=row, num_new_tokens=count, free_block_ids=order
            )
            order = order[used:]
            if count == length:
                new = [tokens(length, dtype=dtype, seed=10 * row + each) for each in range(2)]
                cache = append_kv(cache, row, *new)
    return cache


def as_jax(cache: PagedKVCache) -> PagedKVCache:
    return jax.tree.map(jnp.array, cache)  # type: ignore[no-any-return]


def equal(one: Any, other: Any) -> bool:
    pairs = zip(one, other, strict=True)
    return all(np.asarray(a).tobytes() == np.asarray(b).tobytes() for a, b in pairs)


def leaves(cache: PagedKVCache) -> tuple[Any, ...]:
    return tuple(jax.tree.leaves(cache))


@pytest.mark.parametrize("dtype", DTYPES)
def test_append_and_gather_are_those_of_numpy(dtype: str) -> None:
    cache = cache_of(0, 5, 11, dtype=dtype)
    append, gather = jax.jit(append_kv), jax.jit(gather_kv)
    for row, count in ((0, 1), (2, 8), (1, 0)):
        k, v = tokens(count, dtype=dtype, seed=90), tokens(count, dtype=dtype, seed=91)
        written = append(as_jax(cache), row, k, v)
        cache = append_kv(cache, row, k, v)
        assert equal(leaves(written), leaves(cache))
        for each in range(3):
            keys, values, length = gather(written, each)
            wanted = gather_kv(cache, each)
            assert length == wanted[2]
            assert equal((keys[:length], values[:length]), wanted[:2])
            assert keys.shape == values.shape == (8 * BLOCK, HEADS, DIM)
            assert not np.asarray(keys[length:], np.float32).any()
            assert not np.asarray(values[length:], np.float32).any()


@pytest.mark.parametrize(("dtype", "heads"), [("float32", 6), ("float16", 2), ("bfloat16", 2)])
def test_attention_is_that_of_numpy(dtype: str, heads: int) -> None:
    cache = cache_of(0, 5, 22, dtype=dtype)
    some: list[dict[str, Any]] = [{}, {"scale": 0.3, "window": 3}, {"soft_cap": 4.0, "threads": 2}]
    for options in some:
        attend = jax.jit(partial(attend_kv, **options))
        for row, count in ((1, 5), (2, 1), (2, 22), (0, 0)):
            q = tokens(count, heads, dtype)
            assert equal([attend(as_jax(cache), row, q)], [attend_kv(cache, row, q, **options)])
        q = tokens(3, heads, dtype)
        out = attend(as_jax(cache), None, q)
        assert equal([out], [attend_kv(cache, None, q, **options)])
        assert not np.asarray(out[0], np.float32).any()


def softmax_attention(cache: PagedKVCache, row: int, q: Array, window: int = 0) -> Array:
    keys, values, length = gather_kv(cache, row)
    group = q.shape[1] // cache.num_kv_heads
    keys, values = (np.repeat(each.astype(np.float64), group, 1) for each in (keys, values))
    scores = np.einsum("qhd,khd->hqk", q.astype(np.float64), keys) * q.shape[2] ** -0.5
    at, of = np.arange(length)[length - len(q) :, None], np.arange(length)
    hidden = (of > at) | (window > 0) & (of <= at - window)
    scores[:, hidden] = -np.inf
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    out: Array = np.einsum("hqk,khd->qhd", weights, values)
    return out


def test_attention_is_that_of_a_softmax() -> None:
    cache = cache_of(7, 22)
    for row, count, window in ((0, 7, 0), (1, 22, 0), (1, 9, 5)):
        q = tokens(count, 4)
        out = jax.jit(partial(attend_kv, window=window or None))(as_jax(cache), row, q)
        np.testing.assert_allclose(out, softmax_attention(cache, row, q, window), 2e-5, 2e-5)


def test_a_cache_that_is_given_away_is_updated_in_place(way: str) -> None:
    append = jax.jit(append_kv, donate_argnums=0)
    cache = as_jax(cache_of(5, 2))
    before = [each.unsafe_buffer_pointer() for each in (cache.key_pool, cache.value_pool)]
    for step in range(8):
        new = tokens(1, seed=step)
        cache = append(cache, 0, new, new)
        if way == "handlers":
            pools = cache.key_pool, cache.value_pool
            assert before == [each.unsafe_buffer_pointer() for each in pools]
    assert cache.seq_lengths.tolist() == [13, 2]


def test_a_cache_that_is_kept_does_not_change() -> None:
    kept = as_jax(cache_of(5, 2))
    before = [np.array(each) for each in leaves(kept)]
    new = tokens(3)
    jax.jit(append_kv)(kept, 0, new, new)
    assert equal(before, leaves(kept))


def test_rows_are_numbers_of_the_running_program() -> None:
    cache = cache_of(3, 6, 9)

    @jax.jit  # type: ignore[untyped-decorator, unused-ignore]
    def attend_in_a_loop(cache: PagedKVCache, q: Any) -> Any:
        def step(cache: PagedKVCache, row: Any) -> Any:
            cache = append_kv(cache, row, q[:1, :HEADS], q[:1, :HEADS])
            return cache, attend_kv(cache, row, q)

        return jax.lax.scan(step, cache, jnp.arange(3))

    q = tokens(2, 4)
    written, out = attend_in_a_loop(as_jax(cache), q)
    for row in range(3):
        cache = append_kv(cache, row, q[:1, :HEADS], q[:1, :HEADS])
        assert equal([out[row]], [attend_kv(cache, row, q)])
    assert equal(leaves(written), leaves(cache))


def test_rows_of_vmap_are_the_same_as_one_by_one() -> None:
    cache = cache_of(3, 6, 9)
    q = np.stack([tokens(2, 4, seed=row) for row in range(3)])
    out = jax.vmap(partial(attend_kv, as_jax(cache)))(jnp.arange(3), q)
    for row in range(3):
        assert equal([out[row]], [attend_kv(cache, row, q[row])])


def broken(field: str, at: Any, value: int) -> PagedKVCache:
    cache = cache_of(5, 2)
    getattr(cache, field)[at] = value
    return cache


Q = tokens(1, 4)
NEW = tokens(3)
NO_ROW: Any = 0.5


@pytest.mark.parametrize(
    ("call", "cache", "words"),
    [
        (lambda c, row: append_kv(c, row, NEW, NEW), cache_of(5, 2), (2, "sequence_idx|row")),
        (lambda c, row: gather_kv(c, row), cache_of(5, 2), (-1, "sequence_idx|row")),
        (lambda c, row: attend_kv(c, row, Q), cache_of(5, 2), (7, "sequence_idx")),
        (lambda c, row: append_kv(c, row, NEW, NEW), broken("block_table", (0, 1), -1), (0, "-1")),
        (lambda c, row: append_kv(c, row, NEW, NEW), broken("block_table", (0, 1), 48), (0, "48")),
        (lambda c, row: append_kv(c, row, NEW, NEW), broken("seq_lengths", 0, 31), (0, "columns")),
        (lambda c, row: gather_kv(c, row), broken("block_table", (0, 0), -1), (0, "-1")),
        (lambda c, row: gather_kv(c, row), broken("seq_lengths", 0, 33), (0, "33")),
        (lambda c, row: gather_kv(c, row), broken("seq_lengths", 0, -1), (0, "-1")),
        (lambda c, row: attend_kv(c, row, NEW), cache_of(5, 2), (1, "last 3")),
        (lambda c, row: attend_kv(c, row, Q), broken("block_table", (0, 1), 50), (0, "50|page")),
        (lambda c, row: attend_kv(c, None, NEW[:2]), broken("block_table", (1, 0), 50), (0, "50")),
    ],
)
def test_what_the_running_program_finds_wrong_ends_it(
    call: Callable[..., Any], cache: PagedKVCache, words: tuple[int, str]
) -> None:
    row, text = words
    with pytest.raises(jax.errors.JaxRuntimeError, match=text):
        jax.block_until_ready(jax.jit(call)(as_jax(cache), jnp.int32(row)))


def test_a_block_that_is_twice_in_a_row_is_not_written() -> None:
    cache = cache_of(5, 2)
    cache.block_table[0, 0] = cache.block_table[0, 1]
    with pytest.raises(jax.errors.JaxRuntimeError, match="twice"):
        jax.block_until_ready(jax.jit(append_kv)(as_jax(cache), 0, NEW, NEW))


@pytest.mark.parametrize(
    ("error", "call", "text"),
    [
        (TypeError, lambda c: append_kv(c, 0, NEW.astype(np.float16), NEW), "float16"),
        (ValueError, lambda c: append_kv(c, 0, NEW[:, :1], NEW), "shape"),
        (ValueError, lambda c: append_kv(c, 0, NEW, NEW[:2]), "must be equal"),
        (ValueError, lambda c: append_kv(c, 0, NEW, NEW, donate=True), "donate_argnums"),
        (IndexError, lambda c: append_kv(c, 2, NEW, NEW), "0 .. 1"),
        (TypeError, lambda c: gather_kv(c, NO_ROW), "integer"),
        (ValueError, lambda c: attend_kv(c, 0, NEW[:, :1]), "multiple"),
        (ValueError, lambda c: attend_kv(c, None, Q), "one for each"),
        (ValueError, lambda c: attend_kv(c, 0, NEW[0]), "queries"),
        (TypeError, lambda c: attend_kv(c, 0, NEW.astype(np.int32)), "int32"),
        (ValueError, lambda c: attend_kv(c, 0, Q, window=0), "window"),
        (ValueError, lambda c: attend_kv(c, 0, Q, soft_cap=-1.0), "soft_cap"),
        (ValueError, lambda c: attend_kv(c, 0, Q, scale=float("nan")), "scale"),
        (ValueError, lambda c: attend_kv(c, 0, Q, threads=0), "threads"),
        (
            TypeError,
            lambda c: allocate_blocks(c, sequence_idx=0, num_new_tokens=1, free_block_ids=[0]),
            "outside",
        ),
    ],
)
def test_what_is_known_while_tracing_raises_then(
    error: type[Exception], call: Callable[..., Any], text: str
) -> None:
    with pytest.raises(error, match=text):
        jax.jit(call)(as_jax(cache_of(5, 2)))


def test_arrays_of_jax_that_nobody_traces_go_the_way_of_others() -> None:
    cache = as_jax(cache_of(5, 2))
    out = attend_kv(cache, 0, jnp.asarray(Q))
    assert isinstance(out, jax.Array)
    assert equal([out], [attend_kv(cache_of(5, 2), 0, Q)])


def test_the_page_about_jax_works() -> None:
    page = Path(__file__).resolve().parents[2] / "docs" / "jax.md"
    (block,) = re.findall(r"^```py\n(.*?)^```$", page.read_text(), re.M | re.S)
    names: dict[str, Any] = {}
    exec(compile(block, str(page), "exec"), names)
    assert names["cache"].seq_lengths.tolist() == [20, 0, 0, 0]
    q, k, v = (np.asarray(names[name]) for name in "qkv")
    cache = names["cache"]
    assert equal(gather_kv(cache, 0)[:2], (k, v))
    np.testing.assert_allclose(names["out"], softmax_attention(cache, 0, q), 2e-5, 2e-5)
