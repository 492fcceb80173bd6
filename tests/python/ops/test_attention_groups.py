# SPDX-License-Identifier: Apache-2.0
"""Layers of a manager with groups attend over their group's tokens, with and without holes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import kvcore
from attention_oracle import assert_close, attend_row
from kvcore import ops
from kvcore.groups import ChunkedLocal, FullAttention, SlidingWindow

WINDOW, CHUNK = 10, 12
RULES: list[dict[str, Any]] = [{}, {"window": WINDOW}, {"window": WINDOW}, {"chunk": CHUNK}]
VOCABULARY, LENGTH, Q_HEADS = 60, 256, 4
PROMPT = list(range(50))


class Model:
    """Four layers whose K and V depend on layer, position and token, so each prefix has its own."""

    def __init__(self, page: int, **rest: Any) -> None:
        groups = [
            FullAttention([0]),
            SlidingWindow([1, 2], window=WINDOW),
            ChunkedLocal([3], chunk=CHUNK, n_kv_heads=1, head_dim=16),
        ]
        params = kvcore.KVCacheParams(
            "float32", 2, 8, 4, page_size=page, enable_prefix_caching=True, groups=groups, **rest
        )
        self.manager = kvcore.PagedKVCacheManager(params, 4, LENGTH, num_pages=2000 // page)
        self.rng = np.random.default_rng(page)
        self.heads = [(2, 8)] * 3 + [(1, 16)]
        self.by_token = [self.rng.normal(size=(2, VOCABULARY, *shape)) for shape in self.heads]
        self.by_place = [self.rng.normal(size=(2, LENGTH, *shape)) for shape in self.heads]
        self.tokens: dict[str, list[int]] = {}

    def begin(self, name: str, tokens: list[int], **rest: Any) -> kvcore.TextGenerationContext:
        self.manager.claim(name)
        self.tokens[name] = list(tokens)
        return kvcore.TextGenerationContext(name, tokens, **rest)

    def rows(self, layer: int, tokens: list[int], first: int) -> Any:
        """Return K and V of tokens from position `first` on: [2, tokens, heads, dim], float32."""
        parts = self.by_token[layer][:, tokens] + self.by_place[layer][:, : len(tokens)]
        return parts[:, first:].astype(np.float32)

    def run(self, contexts: list[kvcore.TextGenerationContext], **rule: Any) -> Any:
        """Run one step of all layers against the oracle, and update the contexts by a token."""
        (inputs,) = self.manager.fetch(contexts)
        offsets = ops.pack(inputs, contexts).row_offsets
        shared = self.manager.shared_prefixes(contexts)
        cached = [int(n) for n in inputs.cache_lengths]
        seen = [
            self.tokens[str(context.request_id)][: start + int(new)]
            for context, start, new in zip(contexts, cached, np.diff(offsets), strict=True)
        ]
        for layer in range(4):
            new = [self.rows(layer, row, at) for row, at in zip(seen, cached, strict=True)]
            k, v = np.concatenate(new, axis=1)
            ops.append(inputs, layer, k, v, offsets)
            q = self.rng.normal(size=(int(offsets[-1]), Q_HEADS, self.heads[layer][1]))
            q = q.astype(np.float32)
            expected = [
                attend_row(q[a:b], *self.rows(layer, row, 0), **(RULES[layer] | rule))[0]
                for row, a, b in zip(seen, offsets, offsets[1:], strict=False)
            ]
            given = inputs, layer, q, offsets
            assert_close(ops.attention(*given, **rule), np.concatenate(expected), "float32")
            found = ops.cascade_attention(*given, shared, **rule)
            assert_close(found, np.concatenate(expected), "float32")
        for context in contexts:
            if context.active_idx == len(self.tokens[str(context.request_id)]):
                self.tokens[str(context.request_id)].append(3)
            context.update(3)
        self.manager.step(contexts)
        return inputs, shared


@pytest.mark.parametrize("page", [1, 2, 3, 16])
def test_prompts_in_chunks_then_tokens_one_by_one(page: int) -> None:
    model = Model(page)
    first = model.begin("a", PROMPT, active_idx=20)
    model.run([first])
    other = model.begin("b", [*PROMPT[::-1], 7], active_idx=3)
    for _ in range(30):
        inputs, _ = model.run([first, other])
    missing = model.manager.total_num_pages
    skipped = [max(0, int(inputs.cache_lengths[0]) - WINDOW + 1) // page for _ in RULES]
    assert (inputs.tables[1][0, : skipped[1]] == missing).all()
    assert (inputs.tables[0][0, : skipped[0]] != missing).all()


@pytest.mark.parametrize("page", [1, 2, 3, 16])
def test_rows_that_share_a_prefix_and_stand_at_different_places(page: int) -> None:
    model = Model(page)
    first = model.begin("a", PROMPT)
    for _ in range(8):
        model.run([first])
    later = [model.begin(name, [*PROMPT, n]) for n, name in enumerate("bc", 51)]
    inputs, shared = model.run([first, *later])
    assert shared[0].rows == (0, 1, 2)
    assert inputs.cache_lengths[1] >= 50 - page
    for _ in range(14):
        model.run([first, *later])


def test_a_rule_may_be_narrower_than_the_group() -> None:
    model = Model(2)
    context = model.begin("a", PROMPT)
    model.run([context])
    for rule in {"window": 1}, {"window": WINDOW - 1}, {"window": WINDOW, "chunk": 6}, {"chunk": 1}:
        model.run([context], **rule)


@pytest.mark.parametrize(
    ("layer", "rule", "match"),
    [
        (1, {"window": 11}, "window is 11, layer 1 keeps 10 tokens; pass a window up to that"),
        (3, {"chunk": 24}, "chunk is 24, layer 3 keeps chunks of 12 tokens"),
        (3, {"chunk": 8}, "chunk is 8, layer 3 keeps chunks of 12 tokens"),
        (1, {"window": 0}, "window is 0, must be at least 1"),
        (3, {"chunk": -1}, "chunk is -1, must be at least 1"),
        (3, {"chunk": 0}, "chunk is 0, must be at least 1"),
    ],
)
@pytest.mark.parametrize("cascades", [False, True])
def test_a_rule_wider_than_the_group_is_refused(
    layer: int, rule: dict[str, Any], match: str, cascades: bool
) -> None:
    model = Model(2)
    context = model.begin("a", PROMPT)
    (inputs,) = model.manager.fetch([context])
    q = np.ones((50, Q_HEADS, model.heads[layer][1]), np.float32)
    out = np.full_like(q, 7)
    call: Any = ops.attention
    given: tuple[Any, ...] = inputs, layer, q, np.array([0, 50], np.uint32)
    if cascades:
        call, given = ops.cascade_attention, (*given, [])
    with pytest.raises(ValueError, match=match):
        call(*given, out=out, **rule)
    for kind in ("window", "chunk"):
        with pytest.raises(TypeError, match=f"{kind} is a float, must be an int"):
            call(*given, out=out, **{kind: 2.0})
    assert (out == 7).all()
