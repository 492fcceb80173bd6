# SPDX-License-Identifier: Apache-2.0
"""Rows of different lengths in one forward pass: the tokens, the positions and the pages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from kvcore import ops
from kvcore.context import ContextLike, TextGenerationContext
from kvcore.integrations.transformers import devices
from kvcore.integrations.transformers.latents import LatentLayer, keeps_latents
from kvcore.integrations.transformers.names import CACHE
from kvcore.integrations.transformers.rules import AttentionRule, query_scales
from kvcore.integrations.transformers.slots import BatchStates
from kvcore.integrations.transformers.tray import LayerTray, RunMixer
from kvcore.native.contexts import RaggedKVCacheInputs
from kvcore.paged import PagedKVCacheManager

__all__ = ["PackedBatch"]


class PackedBatch:
    """Run the active tokens of a batch through a model in one forward pass, over paged K and V.

    Parameters
    ----------
    inputs : RaggedKVCacheInputs
        The result of ``fetch`` for `contexts`.
    contexts : sequence of contexts
        The batch, in the same order, not updated after the fetch.
    threads : int, optional
        Threads that attention on the CPU may use; by default, torch's number of threads.
    manager : PagedKVCacheManager, optional
        The manager of `inputs`. Models with recurrent layers need it, because it holds their
        states. Such a batch can run only once, because a forward pass advances the states.

    Raises
    ------
    ValueError
        No contexts, or not as many as fetched; states on several devices. On a GPU, different
        current streams of cupy and torch.

    Attributes
    ----------
    row_offsets : uint32 array [B + 1]
        The first token of each row in the forward pass.
    last_rows : int64 array [B]
        The last token of each row; its logits give the row's next token.

    Notes
    -----
    Runs on the pool's device. On a GPU all work runs on torch's current stream, and the host does
    not wait for it.

    Examples
    --------
    >>> import numpy as np
    >>> from kvcore import KVCacheParams, PagedKVCacheManager, TextGenerationContext
    >>> from kvcore.integrations.transformers import PackedBatch
    >>> params = KVCacheParams("float32", 1, 8, 1, page_size=4)
    >>> mgr = PagedKVCacheManager(params, max_batch_size=2, max_seq_len=16, num_pages=4)
    >>> batch = [TextGenerationContext("a", [5, 6, 7]), TextGenerationContext("b", [8])]
    >>> for ctx in batch:
    ...     mgr.claim(ctx.request_id)
    >>> packed = PackedBatch(mgr.fetch(batch)[0], batch)
    >>> packed.model_inputs()["position_ids"].tolist()
    [[0, 1, 2, 0]]
    """

    __slots__ = (
        "_inputs",
        "_offsets",
        "_positions",
        "_states",
        "_tensors",
        "_threads",
        "_tokens",
        "_tray",
        "last_rows",
        "row_offsets",
    )

    def __init__(
        self,
        inputs: RaggedKVCacheInputs,
        contexts: Sequence[TextGenerationContext | ContextLike],
        *,
        threads: int | None = None,
        manager: PagedKVCacheManager | None = None,
    ) -> None:
        packed = ops.pack(inputs, contexts)
        if not len(packed.last_rows):
            raise ValueError("the batch has no contexts; pass the fetched contexts, at least one")
        self._inputs = inputs
        self._threads = torch.get_num_threads() if threads is None else threads
        self._tensors = devices.tensors_on(devices.pool_device(inputs.blocks))
        self._tensors.require_order()
        self._tokens = self._tensors.put(packed.tokens.astype(np.int64))
        self._positions = self._tensors.put(packed.positions)
        self._offsets = self._tensors.offsets(packed.row_offsets)
        self.last_rows = packed.last_rows
        self.row_offsets = packed.row_offsets
        self._tray = LayerTray(self._mix)
        self._states = None
        if manager is not None and manager.params.state_groups:
            begun = packed.positions[packed.row_offsets[:-1]] > 0
            self._states = BatchStates(manager, inputs, self.row_offsets, begun, self._tensors)

    def model_inputs(self, rows: Any = None) -> dict[str, Any]:
        """Return the arguments for ``model(**packed.model_inputs())``.

        Parameters
        ----------
        rows : int array, optional
            The tokens whose logits the model returns; ``last_rows`` by default.

        Returns
        -------
        dict
            ``input_ids`` and ``position_ids`` int64 [1, T] and ``logits_to_keep`` int64 [n] on the
            pool's device, and the arguments that carry the pages to the layers.
        """
        return {
            "input_ids": self._tokens[None],
            "position_ids": self._positions[None],
            "logits_to_keep": self._tensors.put(self.last_rows if rows is None else rows),
            CACHE: self._tray,
            "use_cache": False,
            "kvcore_batch": self,
        }

    def attend(
        self,
        module: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        rule: AttentionRule,
    ) -> torch.Tensor:
        """Write a layer's new K and V into their pages and attend over all pages of the rows.

        Parameters
        ----------
        module : Module
            Its ``layer_idx`` names the layer, if it has one.
        query, key, value : tensor [1, heads, T, head_dim]
        rule : AttentionRule

        Returns
        -------
        tensor [1, T, q_heads, v_head_dim]

        Raises
        ------
        ValueError, TypeError, IndexError
            A tensor or a layer that does not fit the pool.
        """
        layer = self._tray.layer_of(module)
        if keeps_latents(module):
            return self._attend_latents(module, query[0], rule)
        q = query[0].transpose(0, 1)
        scales = query_scales(module, self._positions)
        if scales is not None:
            q = (q * scales).to(q.dtype)
        if self._writes(layer):
            self._append(layer, key[0].transpose(0, 1), value[0].transpose(0, 1))
        return self._over_pages(layer, q, value.shape[-1], rule)[None]

    def _mix(self, module: Any, hidden: torch.Tensor, run: RunMixer) -> torch.Tensor:
        if self._states is None:
            raise ValueError(
                f"layer {module.layer_idx} keeps a state, but the batch has no manager; "
                f"make it with PackedBatch(..., manager=)"
            )
        return self._states.mix(module, hidden, run)

    def _attend_latents(
        self, module: Any, query: torch.Tensor, rule: AttentionRule
    ) -> torch.Tensor:
        layer = LatentLayer.of(module)
        self._append(module.layer_idx, self._tray.take(), None)
        out = self._over_pages(module.layer_idx, layer.query(query), module.kv_lora_rank, rule)
        return layer.values(out)[None]

    def _writes(self, layer: int) -> bool:
        """Return true if a layer has its own K and V, false if it reads another layer's."""
        layers = self._inputs._layers  # noqa: SLF001 - None if a page has all layers
        return layers is None or layers[layer].owner is None

    def _append(self, layer: int, k: torch.Tensor, v: torch.Tensor | None) -> None:
        tensors = self._tensors
        ops.append(
            self._inputs,
            layer,
            tensors.array(k),
            None if v is None else tensors.array(v),
            self._offsets,
            **tensors.options(self._threads),
        )

    def _over_pages(
        self, layer: int, q: torch.Tensor, v_head_dim: int, rule: AttentionRule
    ) -> torch.Tensor:
        tensors = self._tensors
        out = q.new_empty((*q.shape[:2], v_head_dim))  # in torch's memory, also on a GPU
        ops.attention(
            self._inputs,
            layer,
            tensors.array(q),
            self._offsets,
            scale=rule.scale,
            window=rule.window,
            chunk=rule.chunk,
            soft_cap=rule.soft_cap,
            sinks=None if rule.sinks is None else tensors.array(rule.sinks),
            out=tensors.array(out),
            v_head_dim=v_head_dim,
            **tensors.options(self._threads),
        )
        return out
