# SPDX-License-Identifier: Apache-2.0
"""Run a small Llama-like transformer in numpy with random weights from a seed.

The model is not trained. It has the parts that use a KV cache: grouped query heads, rotary
positions, and attention so sharp that a single wrong row of K or V changes the generated tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvcore.apps.demo.protocol import Attend, Floats, Tokens

# Standard deviation of the attention scores: a head attends to a few of hundreds of tokens.
_SHARPNESS = 2.0
_ROPE_BASE = 10_000.0
_EPSILON = np.float32(1e-6)


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The shape of a transformer.

    Attributes
    ----------
    num_layers, hidden, ffn, vocabulary : int
        Number of layers, widths of the residual stream and of the feed-forward part, number of
        token ids.
    n_q_heads, n_kv_heads, head_dim : int
        Heads of q, heads of K and V, elements of a head.
    """

    num_layers: int = 4
    hidden: int = 128
    ffn: int = 320
    vocabulary: int = 512
    n_q_heads: int = 4
    n_kv_heads: int = 2
    head_dim: int = 32


@dataclass(frozen=True, eq=False, repr=False)
class LayerWeights:
    """The weights of one layer, float32 ``[inputs, outputs]``; the gains are ``[hidden]``."""

    attention_gain: Floats
    qkv: Floats
    out: Floats
    ffn_gain: Floats
    gate_up: Floats
    down: Floats


class Transformer:
    """A transformer with RMSNorm, RoPE, GQA, SwiGLU and tied embeddings.

    Parameters
    ----------
    shape : Shape, optional
    seed : int
        Seed of the weights; the same seed gives the same weights.

    Notes
    -----
    The logits are deterministic, but their last bits depend on the batch: the order of BLAS sums
    depends on the number of rows.

    Examples
    --------
    >>> import numpy as np
    >>> from kvcore.apps.demo import Transformer
    >>> model, places = Transformer(seed=1), np.arange(3)
    >>> attend = lambda layer, q, k, v: q  # a stub: returns q
    >>> model.forward(np.array([1, 2, 3], np.int32), places, attend, places[-1:]).shape
    (1, 512)
    """

    def __init__(self, shape: Shape | None = None, *, seed: int = 0) -> None:
        self.shape = shape or Shape()
        self.num_layers = self.shape.num_layers
        self.n_kv_heads, self.head_dim = self.shape.n_kv_heads, self.shape.head_dim
        rng = np.random.default_rng(seed)
        size = (self.shape.vocabulary, self.shape.hidden)
        # Rows of length 1: logits have variance 1, and the layers soon outweigh the input token in
        # the residual stream. Otherwise a tied head would repeat every token.
        self.embedding = _normal(rng, *size) / np.float32(self.shape.hidden**0.5)
        self.layers = [_layer(rng, self.shape) for _ in range(self.shape.num_layers)]
        self.gain = _gain(rng, self.shape.hidden)
        half = np.arange(self.shape.head_dim // 2)
        self._frequencies = _ROPE_BASE ** (-2.0 * half / self.shape.head_dim)

    def forward(
        self,
        tokens: Tokens,
        positions: NDArray[np.int64],
        attend: Attend,
        wanted: NDArray[np.int64],
    ) -> Floats:
        """Run the new tokens of a batch, as in ``LanguageModel.forward``."""
        angles = positions[:, None, None] * self._frequencies
        turn = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
        x = self.embedding[tokens]
        for index, layer in enumerate(self.layers):
            q, k, v = self._heads(rms_norm(x, layer.attention_gain) @ layer.qkv, *turn)
            x += attend(index, q, k, v).reshape(len(x), -1) @ layer.out
            x += swiglu(rms_norm(x, layer.ffn_gain) @ layer.gate_up) @ layer.down
        logits: Floats = rms_norm(x[wanted], self.gain) @ self.embedding.T
        return logits

    def _heads(self, qkv: Floats, cos: Floats, sin: Floats) -> tuple[Floats, Floats, Floats]:
        """Split the fused projection into heads; rotate q and k, and leave V unchanged."""
        heads = qkv.reshape(len(qkv), -1, self.shape.head_dim)
        q_heads, behind_k = self.shape.n_q_heads, self.shape.n_q_heads + self.shape.n_kv_heads
        turned = rotate(heads[:, :behind_k], cos, sin)
        return turned[:, :q_heads], turned[:, q_heads:], heads[:, behind_k:]


def rms_norm(x: Floats, gain: Floats) -> Floats:
    """Scale rows ``[tokens, hidden]`` to a mean square of 1, times `gain`."""
    squares = np.einsum("ij,ij->i", x, x)[:, None] / np.float32(x.shape[1])
    scaled: Floats = x / np.sqrt(squares + _EPSILON) * gain
    return scaled


def rotate(x: Floats, cos: Floats, sin: Floats) -> Floats:
    """Rotate the halves of each head by the angles of its token ``[tokens, 1, head_dim / 2]``."""
    half = x.shape[2] // 2
    first, second = x[..., :half], x[..., half:]
    turned = np.empty(x.shape, np.float32)
    turned[..., :half] = first * cos - second * sin
    turned[..., half:] = second * cos + first * sin
    return turned


def swiglu(gate_up: Floats) -> Floats:
    """Return ``gate * sigmoid(gate) * up`` of ``[tokens, 2 * ffn]``, with the gates first."""
    gate, up = np.hsplit(gate_up, 2)
    # exp overflows to inf for large negative gates; their sigmoid is 0.
    with np.errstate(over="ignore"):
        weights = np.exp(-gate)
    weights += 1
    np.divide(gate, weights, out=weights)
    weights *= up
    return weights


def _layer(rng: np.random.Generator, shape: Shape) -> LayerWeights:
    hidden, dim, q_heads = shape.hidden, shape.head_dim, shape.n_q_heads
    qkv = _matrix(rng, hidden, (q_heads + 2 * shape.n_kv_heads) * dim)
    qkv[:, : q_heads * dim] *= np.float32(_SHARPNESS)
    return LayerWeights(
        attention_gain=_gain(rng, hidden),
        qkv=qkv,
        out=_matrix(rng, q_heads * dim, hidden),
        ffn_gain=_gain(rng, hidden),
        gate_up=_matrix(rng, hidden, 2 * shape.ffn),
        down=_matrix(rng, shape.ffn, hidden),
    )


def _normal(rng: np.random.Generator, *size: int) -> Floats:
    return rng.standard_normal(size, np.float32)


def _matrix(rng: np.random.Generator, inputs: int, outputs: int) -> Floats:
    """Draw random weights that keep the variance of their inputs."""
    return _normal(rng, inputs, outputs) / np.float32(inputs**0.5)


def _gain(rng: np.random.Generator, hidden: int) -> Floats:
    return 1 + _normal(rng, hidden) / np.float32(8)
