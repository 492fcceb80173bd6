# SPDX-License-Identifier: Apache-2.0
"""Random traffic on two managers that exchange requests: both read the written values."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from grouped_traffic import SHAPES, params_of, with_host_tier
from kvcore import KVCacheParams
from kvcore.groups import ChunkedLocal, FullAttention, SlidingWindow
from moving_traffic import Moves

ANY_ORDER_OF_CALLS = True  # no engine makes random calls

FLAT = params_of(FullAttention([0, 1]), n_kv_heads=2)


def sized(params: KVCacheParams, page_size: int) -> KVCacheParams:
    return replace(params, page_size=page_size)


#: The formats of the source and of the target; requests move both ways.
PAIRS = {
    **{f"{name}, page 2 and 3": (SHAPES[name], sized(SHAPES[name], 3)) for name in SHAPES},
    **{
        f"{name}, page 1 and 4": (sized(SHAPES[name], 1), sized(SHAPES[name], 4))
        for name in ("one width", "chunks", "no full group", "other heads")
    },
    "a host tier": (SHAPES["one width"], with_host_tier(sized(SHAPES["one width"], 4), 40)),
    "one page size": (SHAPES["one width"], SHAPES["one width"]),
    "a flat cache": (replace(FLAT, groups=None), replace(FLAT, groups=None, page_size=5)),
    "one device and four": (FLAT, replace(FLAT, n_devices=4, data_parallel_degree=2)),
    "no prefix caching": (
        SHAPES["one width"],
        replace(SHAPES["one width"], page_size=4, enable_prefix_caching=False),
    ),
    "latent rows, two devices": (
        SHAPES["latent rows"],
        replace(SHAPES["latent rows"], n_devices=2, page_size=4),
    ),
    "long windows": (
        params_of(FullAttention([0]), SlidingWindow([1], 17), ChunkedLocal([2], 12)),
        params_of(FullAttention([0]), SlidingWindow([1], 17), ChunkedLocal([2], 12), page_size=8),
    ),
}


def play(pair: str, seed: int, n: int) -> int:
    sides = [Moves(params, seed + i, 60) for i, params in enumerate(PAIRS[pair])]
    sides[0].side, sides[1].side = "a", "b"
    draw = random.Random(seed)
    for _ in range(n):
        one, other = draw.sample(sides, 2)
        one.act(["claim", "release", "fork", "crowd_out", *(["step"] * 8)], 3)
        one.send(other)
        other.step()
    for side in sides:
        side.end()
        assert side.read > 0
    return sides[0].moved + sides[1].moved


@pytest.mark.parametrize("pair", PAIRS)
def test_moved_requests_read_what_was_written(pair: str) -> None:
    assert play(pair, 1, 40) > 5


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2, 5))
@pytest.mark.parametrize("pair", PAIRS)
def test_many_moved_requests_read_what_was_written(pair: str, seed: int) -> None:
    play(pair, seed, 120)
