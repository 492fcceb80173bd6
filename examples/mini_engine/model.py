# SPDX-License-Identifier: Apache-2.0
"""One tensor-parallel rank of a Llama in numpy, with K and V in kvcore's pages.

Every rank has whole heads and whole columns of the feed-forward part, so a layer needs two sums
over the ranks: after the attention and after the feed-forward part. Each rank returns the logits of
its part of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvcore import RaggedKVCacheInputs, ops
from mini_engine.checkpoint import Config, read_tensors

Floats = NDArray[np.float32]
SumUp = Callable[[Floats], Floats]


class Layer(NamedTuple):
    """The weights of a layer, float32 [inputs, outputs], and the gains of its norms [hidden]."""

    attention_gain: Floats
    qkv: Floats
    out: Floats
    ffn_gain: Floats
    gate_up: Floats
    down: Floats


class Llama:
    """Compute logits of the new tokens of a batch.

    Parameters
    ----------
    folder : Path
        A LlamaForCausalLM: config.json and safetensors, in float32, float16 or bfloat16.
    rank, ranks : int
        The part of the model, and the number of parts.
    sum_up : callable(array) -> array
        Returns the sum of the arrays that all ranks pass.
    """

    def __init__(
        self, folder: Path, rank: int = 0, ranks: int = 1, sum_up: SumUp = lambda x: x
    ) -> None:
        self.config = config = Config.read(folder)
        tensors = read_tensors(folder)
        self.embedding = tensors["model.embed_tokens.weight"]
        self.vocabulary = np.array_split(np.arange(config.vocabulary), ranks)[rank]
        head = tensors.get("lm_head.weight", self.embedding)  # tied if absent
        self.head = _side_by_side([head[self.vocabulary]])
        self.gain = tensors["model.norm.weight"].astype(np.float32)
        self.layers = [_layer(tensors, n, rank, ranks) for n in range(config.layers)]
        self.q_heads, self.kv_heads = config.q_heads // ranks, config.kv_heads // ranks
        self.frequencies, self.sum_up = config.frequencies(), sum_up

    def __call__(
        self, inputs: RaggedKVCacheInputs, packed: ops.Packed, wanted: NDArray[np.int64]
    ) -> Floats:
        """Run the tokens of a step through all layers.

        Parameters
        ----------
        inputs : RaggedKVCacheInputs
            The inputs with this rank's pool: K and V are written to the pool and read from it.
        packed : ops.Packed
            The tokens, row after row, and their positions.
        wanted : int64 [n]
            Indices of the tokens whose logits are returned, to choose a next token.

        Returns
        -------
        float32 [n, this rank's part of the vocabulary]
        """
        eps, rows = np.float32(self.config.epsilon), packed.row_offsets
        angles = packed.positions.astype(np.float32)[:, None, None] * self.frequencies
        turn = np.cos(angles), np.sin(angles)
        x = self.embedding[packed.tokens].astype(np.float32, copy=False)
        for n, layer in enumerate(self.layers):
            q, k, v = self._heads(rms_norm(x, layer.attention_gain, eps) @ layer.qkv, *turn)
            ops.append(inputs, n, k, v, rows)
            seen = ops.attention(inputs, n, q, rows)
            x += self.sum_up(seen.reshape(len(x), -1) @ layer.out)
            gates = rms_norm(x, layer.ffn_gain, eps) @ layer.gate_up
            x += self.sum_up(swiglu(gates) @ layer.down)
        logits: Floats = rms_norm(x[wanted], self.gain, eps) @ self.head
        return logits

    def _heads(self, qkv: Floats, cos: Floats, sin: Floats) -> tuple[Floats, Floats, Floats]:
        """Cut the fused projection into heads; rotate heads of q and k by their positions."""
        heads = qkv.reshape(len(qkv), -1, self.config.head_dim)
        behind_k = self.q_heads + self.kv_heads
        rotate(heads[:, :behind_k], cos, sin)
        return heads[:, : self.q_heads], heads[:, self.q_heads : behind_k], heads[:, behind_k:]


def rms_norm(x: Floats, gain: Floats, eps: np.float32) -> Floats:
    """Scale each row to a mean square of 1, then multiply by `gain`."""
    squares = np.einsum("ij,ij->i", x, x)[:, None] / np.float32(x.shape[1])
    scaled: Floats = x / np.sqrt(squares + eps) * gain
    return scaled


def rotate(x: Floats, cos: Floats, sin: Floats) -> None:
    """Rotate the two halves of each head by its token's angles [tokens, 1, head_dim / 2]."""
    first, second = x[..., : x.shape[2] // 2], x[..., x.shape[2] // 2 :]
    turned = first * cos - second * sin
    second[...] = second * cos + first * sin
    first[...] = turned


def swiglu(gate_up: Floats) -> Floats:
    """Return ``gate * sigmoid(gate) * up``; `gate_up` has gates and ups side by side."""
    gate, up = gate_up[:, : gate_up.shape[1] // 2], gate_up[:, gate_up.shape[1] // 2 :]
    with np.errstate(over="ignore"):  # far below 0, exp is inf and the sigmoid 0
        weights: Floats = gate / (1 + np.exp(-gate)) * up
    return weights


def _layer(tensors: dict[str, NDArray[Any]], n: int, rank: int, ranks: int) -> Layer:
    """Take a rank's part of a layer: outputs of qkv and gate_up, inputs of out and down."""

    def gain(name: str) -> Floats:
        return tensors[f"model.layers.{n}.{name}.weight"].astype(np.float32)

    def part(axis: int, *names: str) -> Floats:
        found = [tensors[f"model.layers.{n}.{name}_proj.weight"] for name in names]
        return _side_by_side([np.array_split(each, ranks, axis)[rank] for each in found])

    return Layer(
        attention_gain=gain("input_layernorm"),
        qkv=part(0, "self_attn.q", "self_attn.k", "self_attn.v"),
        out=part(1, "self_attn.o"),
        ffn_gain=gain("post_attention_layernorm"),
        gate_up=part(0, "mlp.gate", "mlp.up"),
        down=part(1, "mlp.down"),
    )


def _side_by_side(parts: list[NDArray[Any]]) -> Floats:
    """Put weights [outputs, inputs] side by side as [inputs, outputs]."""
    return np.ascontiguousarray(np.concatenate(parts).T, np.float32)
