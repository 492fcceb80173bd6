# SPDX-License-Identifier: Apache-2.0
"""attention refuses wrong arguments by name, and writes nothing."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import conftest
import kvcore
from attention_scenes import Scene
from kvcore import ops
from same_arrays import read_only
from tables import table

Q = np.ones((5, 4, 16), np.float32)


def u32(*values: int) -> Any:
    return np.array(values, np.uint32)


BAD: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"layer": 1}, IndexError, "layer is 1, must be at least 0 and below 1"),
    ({"inputs": None}, TypeError, "inputs are a NoneType"),
    # q
    ({"q": Q[0]}, ValueError, r"q has shape \(4, 16\), must be \(tokens, q_heads, head_dim\)"),
    ({"q": Q[:4]}, ValueError, "q has 4 tokens, row_offsets ends at 5"),
    ({"q": Q[:, :3]}, ValueError, "q has 3 heads, must have a multiple of the 2 heads"),
    ({"q": Q[:, :0]}, ValueError, "q has 0 heads"),
    ({"q": Q[..., :15]}, ValueError, "q has a head_dim of 15, keys have 16"),
    ({"q": np.ones((5, 4, 32), np.float32)[..., ::2]}, ValueError, "q is strided along its last"),
    ({"q": Q.astype(float)}, TypeError, "q has dtype float64, must be float32, float16, bfloat16"),
    ({"q": Q.astype(np.int8)}, TypeError, "q has dtype int8, must be float32, float16 or bfloat"),
    ({"q": Q.astype(">f4")}, TypeError, "q has dtype >f4"),
    ({"q": Q.astype(ml_dtypes.float8_e4m3)}, TypeError, "q has dtype float8_e4m3"),
    ({"q": [[[1.0]]]}, TypeError, "q is a list, must be a numpy array, or one with DLPack"),
    # the batch
    ({"row_offsets": u32(0, 5)}, ValueError, "row_offsets has 2 entries for 2 rows"),
    ({"row_offsets": u32(1, 4, 5)}, ValueError, r"row_offsets\[0\] is 1, must be 0"),
    ({"row_offsets": u32(0, 6, 5)}, ValueError, "must not be below the one before"),
    ({"row_offsets": np.array([0.0, 4.0, 5.0])}, TypeError, "row_offsets has dtype float64"),
    ({"row_offsets": u32(0, 5, 5)}, IndexError, "position 48 of row 0 has no page"),
    # the rule
    ({"scale": np.inf}, ValueError, "scale is inf, must be finite"),
    ({"scale": np.nan}, ValueError, "scale is nan"),
    ({"scale": 1e39}, ValueError, r"scale is 1e\+39, must be finite in float32"),
    ({"scale": "1"}, TypeError, "must be real number, not str"),
    ({"window": 0}, ValueError, "window is 0, must be at least 1"),
    ({"window": -3}, ValueError, "window is -3"),
    ({"window": 2.0}, TypeError, "window is a float, must be an int"),
    ({"chunk": 0}, ValueError, "chunk is 0, must be at least 1"),
    ({"chunk": -3}, ValueError, "chunk is -3"),
    ({"chunk": 2.0}, TypeError, "chunk is a float, must be an int"),
    ({"soft_cap": 0.0}, ValueError, "soft_cap is 0.0, must be above 0"),
    ({"soft_cap": -1}, ValueError, "soft_cap is -1"),
    ({"soft_cap": np.inf}, ValueError, "soft_cap is inf"),
    ({"soft_cap": np.nan}, ValueError, "soft_cap is nan"),
    ({"sinks": np.zeros(3, np.float32)}, ValueError, "sinks has 3 entries, must have 4"),
    ({"sinks": np.zeros((4, 1), np.float32)}, ValueError, r"sinks has shape \(4, 1\)"),
    ({"sinks": np.zeros(4)}, TypeError, "sinks has dtype float64"),
    ({"sinks": [0.0] * 4}, TypeError, "sinks is a list"),
    ({"sinks": np.float32([0, np.nan, 0, 0])}, ValueError, r"sinks\[1\] is nan"),  # type: ignore[arg-type]
    ({"sinks": np.float32([0, 0, np.inf, 0])}, ValueError, r"sinks\[2\] is inf"),  # type: ignore[arg-type]
    ({"v_head_dim": 0}, ValueError, "v_head_dim is 0, must be 1 to 16"),
    ({"v_head_dim": 17}, ValueError, "v_head_dim is 17"),
    ({"v_head_dim": 1.5}, TypeError, "v_head_dim is a float"),
    ({"threads": 0}, ValueError, "threads is 0, must be at least 1"),
    # out
    ({"out": np.ones((5, 4, 15), np.float32)}, ValueError, r"out has shape .*, must be \(5, 4, 16"),
    ({"out": Q[0]}, ValueError, r"out has shape \(4, 16\)"),
    ({"out": Q.astype(np.float16)}, TypeError, "out has dtype float16, must be that of q, float32"),
    ({"out": read_only(Q.copy())}, ValueError, "out is read-only"),
    ({"out": Q}, ValueError, "out overlaps what is read"),
    ({"out": np.ones((5, 4, 32), np.float32)[..., ::2]}, ValueError, "out is strided along its"),
    ({"out": [1.0]}, TypeError, "out is a list"),
]


def scene() -> Scene:
    return Scene(cached=[44, 3], new=[4, 1])


@pytest.mark.parametrize("cascades", [False, True])
@table(("change", "error", "match"), BAD)
def test_refused_calls_write_nothing(
    change: dict[str, Any], error: type[Exception], match: str, cascades: bool
) -> None:
    whole = scene()
    arguments: dict[str, Any] = {
        "inputs": whole.batch,
        "layer": 0,
        "q": Q,
        "row_offsets": whole.offsets,
        "out": np.full(Q.shape, 7, np.float32),
    } | change
    call: Callable[..., Any] = ops.attention
    if cascades:
        call, arguments["shared"] = ops.cascade_attention, []
    before = whole.pool_bytes()
    kept = arguments["out"].copy() if isinstance(arguments["out"], np.ndarray) else None
    with pytest.raises(error, match=match):
        call(**arguments)
    assert whole.pool_bytes() == before
    assert kept is None or np.array_equal(arguments["out"], kept)


OUT, LSE = np.full(Q.shape, 7, np.float32), np.full(Q.shape[:2], 7, np.float32)
BAD_PAIRS: list[tuple[Any, bool, type[Exception], str]] = [
    (
        (OUT, LSE),
        False,
        TypeError,
        "out is a tuple, must be an array; a pair of arrays needs return_lse=True",
    ),
    ([OUT, LSE], False, TypeError, "out is a list, must be an array"),
    ((OUT,), True, ValueError, "out holds 1 items, must hold 2"),
    ((OUT, LSE, LSE), True, ValueError, "out holds 3 items, must hold 2"),
    ((OUT, None), True, TypeError, r"out\[1\] is None, must be an array"),
    ((None, LSE), True, TypeError, r"out\[0\] is None, must be an array"),
    ((OUT, 3), True, TypeError, r"out\[1\] is a int"),
    ((OUT, LSE.T), True, ValueError, r"out\[1\] has shape \(4, 5\), must be \(5, 4\)"),
    ((OUT, LSE[:4]), True, ValueError, r"out\[1\] has shape \(4, 4\), must be \(5, 4\): one for"),
    ((OUT, LSE[..., None]), True, ValueError, r"out\[1\] has shape \(5, 4, 1\), must be"),
    (
        (OUT, LSE.astype(np.float64)),
        True,
        TypeError,
        r"out\[1\] has dtype float64, must be fl",
    ),
    ((OUT, LSE.view(np.int32)), True, TypeError, r"out\[1\] has dtype int32, must be float32"),
    (
        (OUT, np.zeros((5, 8), np.float32)[:, ::2]),
        True,
        ValueError,
        r"out\[1\] is strided, must",
    ),
    (
        (OUT, np.broadcast_to(LSE[0], (5, 4))),
        True,
        ValueError,
        r"out\[1\] is strided, must",
    ),
    ((OUT, OUT.reshape(-1)[20:40].reshape(5, 4)), True, ValueError, r"out\[1\] overlaps out\[0\]"),
    ((OUT, Q.reshape(-1)[:20].reshape(5, 4)), True, ValueError, r"out\[1\] overlaps what is read"),
    ((OUT[:4], LSE), True, ValueError, "out has shape"),
]


@pytest.mark.parametrize("cascades", [False, True])
@table(("out", "return_lse", "error", "match"), BAD_PAIRS)
def test_pairs_for_results_that_do_not_fit(
    out: Any, return_lse: bool, error: type[Exception], match: str, cascades: bool
) -> None:
    whole, queries = scene(), Q.copy()
    attend = partial(ops.cascade_attention, shared=[]) if cascades else ops.attention
    with pytest.raises(error, match=match):
        attend(whole.batch, 0, Q, whole.offsets, out=out, return_lse=return_lse)
    assert (OUT == 7).all()
    assert (LSE == 7).all()
    assert np.array_equal(Q, queries)
    frozen = LSE.copy()
    frozen.flags.writeable = False
    with pytest.raises(ValueError, match=r"out\[1\] is read-only"):
        attend(whole.batch, 0, Q, whole.offsets, out=(OUT, frozen), return_lse=True)


def strided(shape: tuple[int, ...], *strides: int) -> Any:
    memory = np.zeros(10_000, np.float32)
    steps = tuple(4 * step for step in strides)
    return np.lib.stride_tricks.as_strided(memory, shape, steps)


@pytest.mark.parametrize(
    "out",
    [
        strided(Q.shape, 64, 0, 1),
        strided(Q.shape, 0, 16, 1),
        strided(Q.shape, 60, 16, 1),
        strided(Q.shape, 64, 15, 1),
        strided(Q.shape, 16, 79, 1),
    ],
)
def test_results_that_would_share_memory_are_refused(out: Any) -> None:
    whole = scene()
    with pytest.raises(ValueError, match="share memory"):
        ops.attention(whole.batch, 0, Q, whole.offsets, out=out)
    assert not out.any()


def test_pools_and_tables_may_not_be_written() -> None:
    whole = scene()
    pool = np.zeros((8, 16, 4, 16), np.float32)
    memory = np.zeros(5 * 4 * 16, np.float32)
    table = memory.view(np.uint32)[:6].reshape(2, 3)
    lengths = memory.view(np.uint32)[6:8]
    cases = [
        (
            kvcore.PagedBatch(pool, pool, u32(0, 1, 2, 3, 4, 5).reshape(2, 3), u32(0, 0)),
            pool[2, :5],
        ),
        (kvcore.PagedBatch(pool, pool, table, u32(0, 0)), memory.reshape(Q.shape)),
        (
            kvcore.PagedBatch(pool, pool, u32(0, 1, 2, 3, 4, 5).reshape(2, 3), lengths),
            memory.reshape(Q.shape),
        ),
    ]
    for batch, out in cases:
        with pytest.raises(ValueError, match="out overlaps what is read"):
            ops.attention(batch, 0, Q, whole.offsets, out=out)
    assert not memory.any()
    assert not pool.any()


def batch_of(**change: Any) -> kvcore.PagedBatch:
    pool = np.zeros((4, 16, 2, 16), np.float32)
    arguments: dict[str, Any] = {
        "key_pool": pool,
        "value_pool": pool,
        "lookup_table": u32(0, 1, 2, 3).reshape(2, 2),
        "cache_lengths": u32(16, 3),
    }
    return kvcore.PagedBatch(**(arguments | change))


CODES = np.zeros((4, 16, 2, 16), np.int8)


@table(
    ("change", "error", "match"),
    [
        ({"cache_lengths": u32(33, 3)}, IndexError, "position 32 of row 0 has no page: column 2"),
        (
            {"lookup_table": u32(0, 1, 4, 3).reshape(2, 2)},
            IndexError,
            "position 0 of row 1 has no page: column 0 of the lookup table is 4, the pool has 4",
        ),
        ({"cache_lengths": u32(2**32 - 1, 3)}, IndexError, "position 32 of row 0 has no page"),
        ({"cache_lengths": u32(16)}, ValueError, "cache_lengths has 1 entries for 2 rows"),
        ({"cache_lengths": np.array([16, 3])}, TypeError, "cache_lengths has dtype int64"),
        ({"lookup_table": u32(0, 1)}, ValueError, "lookup_table has shape"),
        (
            {"value_pool": np.zeros((5, 16, 2, 16), np.float32)},
            ValueError,
            r"the pool of values has shape \(5, 16, 2, 16\), keys have \(4, 16, 2, 16\)",
        ),
        ({"value_pool": np.zeros((4, 16, 1, 16), np.float32)}, ValueError, "the pool of values"),
        ({"key_pool": np.zeros((4, 16, 2, 16))}, TypeError, "the pool of keys has dtype float64"),
        ({"key_pool": np.zeros((4, 16, 2, 0), np.float32)}, ValueError, "must have tokens, heads"),
        (
            {"key_pool": np.zeros((4, 16, 2, 32), np.float32)[..., ::2]},
            ValueError,
            "the pool of keys is strided along its last axis",
        ),
    ],
)
def test_pools_and_batches_that_do_not_fit(
    change: dict[str, Any], error: type[Exception], match: str
) -> None:
    out = np.full((5, 4, 16), 7, np.float32)
    with pytest.raises(error, match=match):
        ops.attention(batch_of(**change), 0, Q, u32(0, 4, 5), out=out)
    assert (out == 7).all()


def test_unaligned_tables_are_refused() -> None:
    memory = np.zeros(17, np.uint8)[1:]
    table = memory.view(np.uint32).reshape(2, 2)
    assert not table.flags.aligned
    with pytest.raises(ValueError, match="lookup_table is not aligned in memory"):
        ops.attention(batch_of(lookup_table=table), 0, Q, u32(0, 4, 5))


@table(
    ("change", "error", "match"),
    [
        ({"key_scales": 0.5}, TypeError, "key_pool has dtype float32, must be one of"),
        ({"value_scales": 0.5}, TypeError, "key_pool has dtype float32"),
        ({"key_pool": CODES, "key_scales": 0.5}, TypeError, "value_pool has dtype float32"),
        ({"key_pool": CODES, "value_pool": CODES, "key_scales": 0.0}, ValueError, "positive"),
        ({"key_pool": CODES, "value_pool": CODES, "key_scales": np.nan}, ValueError, "positive"),
        (
            {"key_pool": CODES, "value_pool": CODES, "key_scales": np.ones(3, np.float32)},
            ValueError,
            "one for each head",
        ),
        (
            {"key_pool": CODES, "value_pool": CODES, "key_scales": np.ones(2)},
            TypeError,
            "key_scales has dtype float64, must be fl",
        ),
        (
            {"key_pool": CODES, "value_pool": CODES, "key_scales": np.ones((4, 16, 2, 3), "f4")},
            ValueError,
            "groups divide its last",
        ),
        (
            {"key_pool": CODES, "value_pool": CODES, "key_scales": np.ones((4, 16, 1, 1), "f4")},
            ValueError,
            "all axes but the last must agree",
        ),
        (
            {"key_pool": CODES, "value_pool": CODES, "key_scales": np.ones((4, 16, 2, 1), "f4")},
            ValueError,
            "differ in kind",
        ),
        ({"key_pool": CODES, "value_pool": None, "value_scales": 1.0}, ValueError, "latent rows"),
        ({"layout": "MLA"}, ValueError, r"key_pool has shape \(4, 16, 2, 16\), must have 3 axes"),
        ({"layout": "NDH"}, ValueError, "layout is 'NDH', must be one of NHD, HND, MLA"),
        ({"value_pool": [1.0]}, TypeError, "value_pool is a list"),
    ],
)
def test_batches_with_wrong_scales_cannot_be_made(
    change: dict[str, Any], error: type[Exception], match: str
) -> None:
    with pytest.raises(error, match=match):
        batch_of(**change)


def test_calls_that_batches_with_scales_refuse() -> None:
    fixed = batch_of(key_pool=CODES, value_pool=CODES, key_scales=0.5)
    kv = np.zeros((5, 2, 16), np.float32)
    with pytest.raises(ValueError, match="scale is given for k, whose pool has scales of its own"):
        ops.append(fixed, 0, kv, kv, u32(0, 4, 5), scale=1.0)
    scales = np.ones((4, 16, 2, 4), np.float32)
    grouped = batch_of(key_pool=CODES, value_pool=CODES, key_scales=scales, value_scales=scales)
    with pytest.raises(ValueError, match=r"v_head_dim is 6, .* of 4, the elements of a scale"):
        ops.attention(grouped, 0, Q, u32(0, 4, 5), v_head_dim=6)
    assert ops.attention(grouped, 0, Q, u32(0, 4, 5), v_head_dim=8).shape == (5, 4, 8)


def test_arrays_on_a_gpu_are_named() -> None:
    torch = conftest.require("torch")
    whole = scene()
    q = torch.ones(5, 4, 16, requires_grad=True)
    with pytest.raises(TypeError, match="q is a Tensor that cannot be seen from numpy"):
        ops.attention(whole.batch, 0, q, whole.offsets)

    class OnGpu:
        def __dlpack__(self) -> None: ...

        def __dlpack_device__(self) -> tuple[int, int]:
            return 2, 1

    with pytest.raises(TypeError, match="q is on cuda:1, must be in host memory"):
        ops.attention(whole.batch, 0, OnGpu(), whole.offsets)
