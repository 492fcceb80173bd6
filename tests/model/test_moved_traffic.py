# SPDX-License-Identifier: Apache-2.0
"""Random traffic on two managers between which requests move: both read what was written."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

from grouped_traffic import SHAPES, Traffic, params_of
from kvcore import CapacityError, KVCacheParams, TextGenerationContext
from kvcore.groups import ChunkedLocal, FullAttention, SlidingWindow
from kvcore.moving import read_sequence

FLAT = params_of(FullAttention([0, 1]), n_kv_heads=2)


def sized(params: KVCacheParams, page_size: int) -> KVCacheParams:
    return replace(params, page_size=page_size)


#: Where requests come from, and where they go to; both ways.
PAIRS = {
    **{f"{name}, page 2 and 3": (SHAPES[name], sized(SHAPES[name], 3)) for name in SHAPES},
    **{
        f"{name}, page 1 and 4": (sized(SHAPES[name], 1), sized(SHAPES[name], 4))
        for name in ("one width", "chunks", "no full group", "other heads")
    },
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


class MovingTraffic(Traffic):
    """Requests of one side; names tell the sides apart."""

    side = ""
    moved = 0

    def send(self, other: MovingTraffic) -> None:
        """Move a request, or copy it: then both sides go on with it."""
        for long in [name for name, c in self.live.items() if c.end_idx > 30]:  # for these pools
            self.manager.release(long)
            del self.live[long]
        found = [c for c in self.live.values() if c.start_idx > 0]
        if not found or len(other.live) == 5:
            return
        context = self.random.choice(found)
        written = context.start_idx
        data = self.manager.export_sequence(context.request_id)
        saved = read_sequence(data)
        assert saved.written == written
        name = f"{other.side}{next(other.names)}"
        copied = (
            saved.context(name)
            if self.random.random() < 0.5
            else TextGenerationContext(name, context.tokens)
        )
        other.take(copied, data, written)
        if self.random.random() < 0.5:
            self.manager.release(context.request_id)
            del self.live[str(context.request_id)]

    def take(self, context: TextGenerationContext, data: bytes, written: int) -> None:
        before = self.manager.num_free_blocks
        replica: Any = self.random.randrange(self.params.data_parallel_degree)
        try:
            has_room = self.manager.import_sequence(context, data, replica_idx=replica)
        except CapacityError:
            has_room = False
        if not has_room:
            assert not self.manager.contains(context.request_id)
            assert (context.start_idx, self.manager.num_free_blocks) == (0, before)
            return
        assert context.start_idx == written
        self.moved += 1
        self.live[str(context.request_id)] = context
        self.chunk(context)


def play(pair: str, seed: int, n: int) -> int:
    sides = [MovingTraffic(params, seed + i, 60) for i, params in enumerate(PAIRS[pair])]
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
