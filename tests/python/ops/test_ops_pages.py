# SPDX-License-Identifier: Apache-2.0
"""copy_pages, zero_pages and checksum over whole pools."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.lib.stride_tricks import as_strided

from kvcore import ops
from kvcore.support.dtypes import numpy_dtype

SHAPE = (9, 2, 3, 4, 1, 5)


def pool_of(dtype: str = "float16") -> Any:
    raw = np.random.default_rng(2).integers(0, 256, (*SHAPE[:-1], 5 * 2), dtype=np.uint8)
    return raw[..., : 5 * numpy_dtype(dtype).itemsize].copy().view(numpy_dtype(dtype))


def digest(page: np.ndarray[Any, Any]) -> int:
    """Compute the definition in page_bytes.hpp, word by word."""
    data = page.tobytes()
    data += bytes(-len(data) % 8)
    total, ones = 0, 2**64 - 1
    for i in range(0, len(data), 8):
        word = int.from_bytes(data[i : i + 8], "little")
        counter = (i // 8 + 1) * 0x9E3779B97F4A7C15 & ones
        product = (word ^ counter) * 0xD6E8FEB86659FD93
        total += (product >> 64) ^ (product & ones)
    return total & ones


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "int8"])
@pytest.mark.parametrize("threads", [1, 3])
def test_pages_are_copied_and_zeroed_and_others_left_alone(dtype: str, threads: int) -> None:
    pool = pool_of(dtype)
    expected = pool.copy()
    expected[[4, 7]] = expected[[0, 0]]
    ops.copy_pages(pool, [(0, 4), (0, 7)], threads=threads)
    assert np.array_equal(pool.view(np.uint8), expected.view(np.uint8))
    expected.view(np.uint8)[[1, 8]] = 0
    ops.zero_pages(pool, np.array([8, 1], np.uint32), threads=threads)
    assert np.array_equal(pool.view(np.uint8), expected.view(np.uint8))


def test_pools_of_two_arrays() -> None:
    keys, values = pool_of(), pool_of("int8")
    before = values.copy()
    ops.copy_pages((keys, values), [(3, 5)])
    assert np.array_equal(keys[5].view(np.uint16), keys[3].view(np.uint16))
    assert np.array_equal(values[5], before[3])
    both = ops.checksum((keys, values), [3, 5, 6])
    assert both[0] == both[1] != both[2]


@pytest.mark.parametrize("dtype", ["float16", "int8"])
def test_checksum_is_what_the_header_says(dtype: str) -> None:
    pool = pool_of(dtype)[:, :, :, :, :, :3].copy()  # a page's size is no multiple of 8 bytes
    ids = [7, 0, 7]
    assert ops.checksum(pool, ids).tolist() == [digest(pool[i]) for i in ids]
    assert ops.checksum(pool, ids, threads=2).tolist() == ops.checksum(pool, ids).tolist()


def test_a_flipped_bit_and_swapped_words_are_noticed() -> None:
    pool = np.zeros((2, 64), np.uint64)
    pool[0] = np.arange(64)
    seen = {int(ops.checksum(pool, [0])[0])}
    for word in range(64):
        pool[0, word] ^= np.uint64(1 << word)
        seen.add(int(ops.checksum(pool, [0])[0]))
        pool[0, word] ^= np.uint64(1 << word)
    pool[0, [3, 4]] = pool[0, [4, 3]]
    seen.add(int(ops.checksum(pool, [0])[0]))
    assert len(seen) == 66


def short(keys: Any) -> Any:
    """Return a V with fewer pages than K."""
    return keys[:5].copy()


def read_only(keys: Any) -> Any:
    values = keys.copy()
    values.flags.writeable = False
    return values


@pytest.mark.parametrize(
    ("make_values", "error", "match"),
    [
        (short, IndexError, "page 7 is outside the pool of 5"),
        (read_only, ValueError, "read-only"),
        (lambda keys: keys.copy()[:, :, ::2], ValueError, "axis 2 is strided"),
        (lambda keys: np.broadcast_to(keys[:1], keys.shape), ValueError, "read-only"),
        (lambda keys: as_strided(keys.copy(), strides=(0, *keys.strides[1:])), ValueError, "share"),
        (lambda keys: keys, ValueError, "share memory"),
        (lambda keys: keys.view(np.uint8), ValueError, "share memory"),
    ],
)
@pytest.mark.parametrize(
    "call",
    [
        lambda pair: ops.copy_pages(pair, [(0, 7)]),
        lambda pair: ops.fill_pages(pair, [7], 255),
        lambda pair: ops.zero_pages(pair, [7]),
    ],
)
def test_pair_of_which_v_is_refused_keeps_k(
    call: Callable[[Any], object],
    make_values: Callable[[Any], Any],
    error: type[Exception],
    match: str,
) -> None:
    keys = pool_of()
    before = keys.copy()
    values = make_values(keys)
    kept = values.copy()
    with pytest.raises(error, match=match):
        call((keys, values))
    assert np.array_equal(keys.view(np.uint16), before.view(np.uint16))
    assert values.tobytes() == kept.tobytes()


def test_interleaved_pair_is_no_shared_memory() -> None:
    whole = pool_of().reshape(9, 2, -1)
    keys, values = whole[:, 0], whole[:, 1]
    ops.zero_pages((keys, values), [3])
    assert not whole[3].view(np.uint16).any()
    assert whole[4].view(np.uint16).any()


@pytest.mark.parametrize(
    ("ids", "error", "match"),
    [
        ([2**63], ValueError, "ids holds 9223372036854775808"),
        ([2**70], ValueError, "ids holds"),
        (np.array([2**64 - 1], np.uint64), ValueError, "ids holds 18446744073709551615"),
        ([True], TypeError, "bool"),
        ([None], TypeError, "object"),
        ("0", TypeError, "dtype"),
    ],
)
def test_ids_are_not_wrapped(ids: Any, error: type[Exception], match: str) -> None:
    pool = pool_of()
    with pytest.raises(error, match=match):
        ops.zero_pages(pool, ids)
    assert np.array_equal(pool.view(np.uint16), pool_of().view(np.uint16))


def test_nothing_to_do() -> None:
    pool = pool_of()
    ops.copy_pages(pool, [])
    ops.zero_pages(pool, [])
    assert ops.checksum(pool, []).shape == (0,)


@pytest.mark.parametrize(
    ("call", "error", "match"),
    [
        (lambda p: ops.copy_pages(p, [(0, 9)]), IndexError, "page 9 is outside the pool of 9"),
        (lambda p: ops.copy_pages(p, [(-1, 2)]), IndexError, "page -1"),
        (lambda p: ops.copy_pages(p, [(0, 1), (1, 2)]), ValueError, "page 1 is a source and"),
        (lambda p: ops.copy_pages(p, [(3, 3)]), ValueError, "page 3 is a source and"),
        (lambda p: ops.copy_pages(p, [(0, 2), (1, 2)]), ValueError, "page 2 twice"),
        (lambda p: ops.copy_pages(p, [0, 1]), ValueError, r"pairs has shape \(2,\)"),
        (lambda p: ops.copy_pages(p, [(0, 1, 2)]), ValueError, "two columns"),
        (lambda p: ops.copy_pages(p, [(0.0, 1.0)]), TypeError, "pairs has dtype float64"),
        (lambda p: ops.zero_pages(p, [9]), IndexError, "page 9"),
        (lambda p: ops.zero_pages(p[:, :, ::2], [1]), ValueError, "axis 2 is strided"),
        (lambda p: ops.zero_pages(p, [0], threads=0), ValueError, "threads is 0"),
        (lambda p: ops.checksum(p, [[1]]), ValueError, "ids has shape"),
        (lambda _: ops.checksum(7, [1]), TypeError, "blocks is a int"),
    ],
)
def test_refused_calls_change_nothing(
    call: Callable[[Any], object], error: type[Exception], match: str
) -> None:
    pool = pool_of()
    before = pool.copy()
    with pytest.raises(error, match=match):
        call(pool)
    assert np.array_equal(pool.view(np.uint16), before.view(np.uint16))


def test_read_only_pools_are_refused() -> None:
    pool = pool_of()
    pool.flags.writeable = False
    with pytest.raises(ValueError, match="read-only"):
        ops.zero_pages(pool, [0])
    assert len(ops.checksum(pool, [0])) == 1
