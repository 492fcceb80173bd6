# SPDX-License-Identifier: Apache-2.0
"""Fingerprints of a format differ exactly if the bytes of pages differ."""

from __future__ import annotations

from typing import Any

import pytest

from kvcore import KVCacheParams
from kvcore.groups import FullAttention, SlidingWindow, State
from kvcore.keys import format_fingerprint


def params(**more: Any) -> KVCacheParams:
    fields: dict[str, Any] = {"dtype": "bfloat16", "n_kv_heads": 8, "head_dim": 64, "num_layers": 4}
    return KVCacheParams(**(fields | {"page_size": 16} | more))


def test_fingerprints_differ_where_bytes_do() -> None:
    window = [FullAttention([0, 1]), SlidingWindow([2, 3], 64)]
    state = {"conv": ((8, 4), "float32")}
    kinds = [
        params(),
        params(dtype="float16"),
        params(n_kv_heads=4),
        params(n_kv_heads=4, head_dim=128),
        params(v_head_dim=32),
        params(num_layers=3),
        params(page_size=32),
        params(is_mla=True, n_kv_heads=1),
        params(n_devices=2),
        params(dtype="int8", kv_scale_granularity=64),
        params(dtype="int8"),
        params(groups=window),
        params(groups=window[::-1]),
        params(groups=[FullAttention([0, 1]), SlidingWindow([2, 3], 128)]),
        params(groups=[FullAttention([0, 2]), SlidingWindow([1, 3], 64)]),
        params(groups=[FullAttention([0, 1]), State([2, 3], state)]),
        params(groups=[FullAttention([0, 1])]),
    ]
    found = {format_fingerprint(each, "m") for each in kinds}
    found |= {format_fingerprint(params(), "n"), format_fingerprint(params(), "m", layout="HND")}
    assert len(found) == len(kinds) + 2
    assert {len(each) for each in found} == {32}


def test_fingerprints_are_equal_where_bytes_are() -> None:
    same = [
        params(enable_prefix_caching=True),
        params(n_devices=3, data_parallel_degree=3),
        params(groups=[FullAttention(range(4))]),
        params(groups=[FullAttention(range(4), n_kv_heads=8, head_dim=64)]),
        params(v_head_dim=64),
    ]
    assert {format_fingerprint(each, "m") for each in same} == {format_fingerprint(params(), "m")}
    one = State([2], {"a": ((1,), "int8"), "b": ((2,), "int8")})
    other = State([2], {"b": ((2,), "int8"), "a": ((1,), "int8")})
    assert format_fingerprint(params(groups=[FullAttention([0]), one]), "m") == format_fingerprint(
        params(groups=[FullAttention([0]), other]), "m"
    )


def test_fingerprints_are_the_same_in_every_release() -> None:
    found = format_fingerprint(params(), "m")
    assert found.hex() == "642439964e033479e53bfcf6934594da549d574759491c17d731c29072699d1f"


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: format_fingerprint(None, "m"), "params is a NoneType"),  # type: ignore[arg-type]
        (lambda: format_fingerprint(params(), None), "model_id is a NoneType"),  # type: ignore[arg-type]
        (lambda: format_fingerprint(params(), "m", layout=3), "layout is a int"),  # type: ignore[arg-type]
    ],
)
def test_what_has_no_fingerprint_is_said(call: Any, text: str) -> None:
    with pytest.raises(TypeError, match=text):
        call()
