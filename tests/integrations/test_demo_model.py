# SPDX-License-Identifier: Apache-2.0
"""The demo's transformer and its plain attention against float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from kvcore.apps.demo import Shape, Transformer
from kvcore.apps.demo.attention import plain_attention

SMALL = Shape(
    num_layers=2, hidden=20, ffn=28, vocabulary=37, n_q_heads=6, n_kv_heads=2, head_dim=10
)


def float64_attention(q: Any, k: Any, v: Any) -> npt.NDArray[np.float64]:
    """Compute head after head; each token attends to itself and to all tokens before it."""
    seen = np.zeros(q.shape)
    for head in range(q.shape[1]):
        kv_head = head * k.shape[1] // q.shape[1]
        for token in range(len(q)):
            keys = k[: token + 1, kv_head].astype(np.float64)
            scores = keys @ q[token, head].astype(np.float64) / q.shape[2] ** 0.5
            weights = np.exp(scores - scores.max())
            seen[token, head] = weights @ v[: token + 1, kv_head] / weights.sum()
    return seen


def float64_logits(model: Transformer, tokens: Any, start: int = 0) -> npt.NDArray[np.float64]:
    """Evaluate the model's formulas for one sequence that begins at position `start`."""
    shape = model.shape
    x = model.embedding.astype(np.float64)[tokens]
    for layer in model.layers:
        qkv = float64_norm(x, layer.attention_gain) @ layer.qkv
        q, k, v = np.split(qkv, np.cumsum([shape.n_q_heads, shape.n_kv_heads]) * shape.head_dim, 1)
        q, k, v = (each.reshape(len(x), -1, shape.head_dim) for each in (q, k, v))
        q, k = (float64_rotation(each, start) for each in (q, k))
        x = x + float64_attention(q, k, v).reshape(len(x), -1) @ layer.out
        gate, up = np.split(float64_norm(x, layer.ffn_gain) @ layer.gate_up, 2, 1)
        x = x + (gate / (1 + np.exp(-gate)) * up) @ layer.down
    logits: npt.NDArray[np.float64] = float64_norm(x, model.gain) @ model.embedding.T
    return logits


def float64_norm(x: Any, gain: Any) -> Any:
    return x / np.sqrt(np.mean(x**2, axis=1, keepdims=True) + 1e-6) * gain


def float64_rotation(x: Any, start: int) -> Any:
    """Rotate elements i and i + half, as a complex number, by the position."""
    half = x.shape[2] // 2
    numbers = x[..., :half] + 1j * x[..., half:]
    angles = np.arange(start, start + len(x))[:, None] / 10_000 ** (np.arange(half) / half)
    turned = numbers * np.exp(1j * angles)[:, None]
    return np.concatenate((turned.real, turned.imag), axis=2)


@pytest.mark.parametrize("start", [0, 700])
def test_model_is_what_its_formulas_say(start: int) -> None:
    model = Transformer(SMALL, seed=3)
    tokens = np.random.default_rng(start).integers(0, 37, 19, np.int32)
    places = np.arange(19)
    found = model.forward(tokens, places + start, plain_attention, places)
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, float64_logits(model, tokens, start), rtol=0, atol=2e-5)


def test_only_the_wanted_logits_are_answered() -> None:
    model = Transformer(SMALL)
    places = np.arange(9)
    every = model.forward(places.astype(np.int32), places, plain_attention, places)
    some = model.forward(places.astype(np.int32), places, plain_attention, np.array([8, 2]))
    np.testing.assert_allclose(some, every[[8, 2]], rtol=0, atol=1e-5)


@pytest.mark.parametrize("tokens", [1, 2, 63, 64, 65, 130])
@pytest.mark.parametrize(("q_heads", "kv_heads", "dim"), [(6, 2, 8), (3, 3, 5), (4, 1, 16)])
def test_plain_attention(tokens: int, q_heads: int, kv_heads: int, dim: int) -> None:
    rng = np.random.default_rng(tokens)
    q = rng.standard_normal((tokens, q_heads, dim), np.float32) * 3
    k, v = rng.standard_normal((2, tokens, kv_heads, dim), np.float32)
    found = plain_attention(0, q, k, v)
    np.testing.assert_allclose(found, float64_attention(q, k, v), rtol=1e-5, atol=1e-5)


def test_attention_gets_the_layers_in_order_and_heads_of_their_shapes() -> None:
    calls = []

    def attend(layer: int, q: Any, k: Any, v: Any) -> Any:
        calls.append((layer, q.shape, k.shape, v.shape))
        return q

    places = np.arange(3)
    Transformer(SMALL).forward(places.astype(np.int32), places, attend, places)
    assert calls == [(layer, (3, 6, 10), (3, 2, 10), (3, 2, 10)) for layer in range(2)]


def test_same_seed_same_weights() -> None:
    tokens, places = np.arange(5, dtype=np.int32), np.arange(5)
    one, same, other = (
        Transformer(SMALL, seed=seed).forward(tokens, places, plain_attention, places)
        for seed in (1, 1, 2)
    )
    np.testing.assert_array_equal(one, same)
    assert not np.allclose(one, other, atol=0.1)


def test_every_token_before_counts() -> None:
    """Otherwise a test would not notice a lost token."""
    model = Transformer(SMALL)
    tokens, places = np.arange(12, dtype=np.int32), np.arange(12)
    usual = model.forward(tokens, places, plain_attention, places[-1:])
    for place in range(11):
        changed = tokens.copy()
        changed[place] += 20
        found = model.forward(changed, places, plain_attention, places[-1:])
        assert np.abs(found - usual).max() > 1e-4


def test_large_gates_overflow_silently() -> None:
    model = Transformer(SMALL)
    model.layers[0].gate_up[:] *= np.float32(1e4)
    places = np.arange(4)
    found = model.forward(places.astype(np.int32), places, plain_attention, places)
    assert np.isfinite(found).all()
