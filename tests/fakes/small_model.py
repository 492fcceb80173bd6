# SPDX-License-Identifier: Apache-2.0
"""A model of three layers whose next token depends on every row of K and V, and on a state."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from builders import in_groups
from kvcore import KVCacheParams, PagedKVCacheManager, TextGenerationContext, ops
from kvcore.groups import FullAttention, SlidingWindow, State
from kvcore.moving import SavedSequence

PROMPT = [(7 * i + 3) % 29 for i in range(42)]
PAGE_SIZE = 4
#: The tokens of PROMPT that a complete cache returns as a hit.
HIT = (len(PROMPT) - 1) // PAGE_SIZE * PAGE_SIZE
_LAYERS, _HIDDEN, _HEADS, _HEAD_DIM, _TOKENS, _PLACES = 3, 16, 2, 8, 31, 128
_SHARPNESS = 3.0

GROUPS: dict[str, Any] = {
    "flat": None,
    "windows": (FullAttention([0, 2]), SlidingWindow([1], window=8)),
    "states": (FullAttention([0, 2]), State([1], {"sum": ((_HEAD_DIM,), "float32")})),
}


def small_manager(kind: str, *tiers: Any, **options: Any) -> PagedKVCacheManager:
    """Return a manager for the model with the layers of `GROUPS`; it checks every law."""
    params = KVCacheParams(
        "float32",
        n_kv_heads=1,
        head_dim=_HEAD_DIM,
        num_layers=_LAYERS,
        page_size=PAGE_SIZE,
        enable_prefix_caching=True,
        groups=GROUPS[kind],
    )
    fields: dict[str, Any] = {"num_pages": 64, "enable_runtime_checks": True}
    fields |= {"tiers": list(tiers) or None, "fingerprint": "small model"}
    return PagedKVCacheManager(params, 4, _PLACES, **in_groups(fields | options))


class SmallModel:
    """A model that runs a request's next tokens over its pages, independent of the other rows."""

    def __init__(self) -> None:
        rng = np.random.default_rng(3)

        def weights(*shape: int) -> NDArray[np.float32]:
            return rng.normal(scale=shape[-1] ** -0.5, size=shape).astype(np.float32)

        self._tokens, self._places = weights(_TOKENS, _HIDDEN), weights(_PLACES, _HIDDEN)
        self._qkv = weights(_LAYERS, (_HEADS + 2) * _HEAD_DIM, _HIDDEN) * np.float32(_SHARPNESS)
        self._out = weights(_LAYERS, _HIDDEN, _HEADS * _HEAD_DIM) * np.float32(_SHARPNESS)
        self._answer = weights(_TOKENS, _HIDDEN)

    def step(self, manager: PagedKVCacheManager, context: TextGenerationContext) -> int:
        """Fetch, write, attend, and commit; return the next token."""
        (inputs,) = manager.fetch([context])
        new = np.arange(context.start_idx, context.active_idx)
        x = self._tokens[context.tokens[new]] + self._places[new]
        offsets = np.array([0, len(new)], np.uint32)
        has_state = bool(manager.params.state_groups)
        for layer in range(_LAYERS):
            qkv = _each(self._qkv[layer], x).reshape(len(new), -1, _HEAD_DIM)
            q, k, v = (
                np.ascontiguousarray(qkv[:, part])
                for part in (slice(_HEADS), slice(_HEADS, _HEADS + 1), slice(_HEADS + 1, None))
            )
            if has_state and layer == 1:
                seen = self._remember(manager, inputs.states[0][0], k * v, context.start_idx)
                rows = np.concatenate([seen, seen], axis=1)
            else:
                ops.append(inputs, layer, k, v, offsets)
                rows = ops.attention(inputs, layer, q, offsets).reshape(len(new), -1)
            x = np.tanh(x + _each(self._out[layer], rows))
        token = int(np.argmax(self._answer @ x[-1]))
        context.update(token)
        manager.step([context])
        return token

    def _remember(
        self, manager: PagedKVCacheManager, slot: int, news: NDArray[np.float32], start: int
    ) -> NDArray[np.float32]:
        """Add rows to the state of a request one by one; return the state after each row."""
        state = manager.states[0]["sum"][0][slot, 0]
        if start == 0:
            state[...] = 0
        seen = np.empty((len(news), _HEAD_DIM), np.float32)
        for i, row in enumerate(news):
            state[...] = np.float32(0.9) * state + row[0]
            seen[i] = state
        return seen

    def prefill(
        self, manager: PagedKVCacheManager, name: str, tokens: list[int], **options: Any
    ) -> tuple[TextGenerationContext, int]:
        """Claim a request and run its prompt; return it, and the number of cached tokens."""
        context = TextGenerationContext(name, tokens, **options)
        manager.claim(name)
        assert manager.maybe_reserve(context)
        cached = context.start_idx
        while context.end_idx == len(tokens):
            self.step(manager, context)
        return context, cached

    def decode(
        self, manager: PagedKVCacheManager, context: TextGenerationContext, n: int
    ) -> list[int]:
        """Generate `n` more tokens."""
        return [self.step(manager, context) for _ in range(n)]


def _each(weights: NDArray[np.float32], rows: NDArray[np.float32]) -> NDArray[np.float32]:
    """Multiply row by row: with BLAS the result of a row could depend on the number of rows."""
    return np.stack([weights @ row for row in rows])


def rows_of(saved: SavedSequence, end: int) -> dict[str, bytes]:
    """Return the bytes that a request reads of its first tokens, by name, and of its states."""
    found = {}
    for name, rows in saved.tensors.items():
        if name.startswith("layers."):
            rows = rows[: end - saved.layers[int(name.split(".")[1])].first]
        assert rows.size
        found[name] = rows.tobytes()
    return found
