# SPDX-License-Identifier: Apache-2.0
"""Rows of different lengths as one forward: the tokens, the positions and the pages."""

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
    """Run the active tokens of a batch through a model in one forward, over paged K and V.

    Parameters
    ----------
    inputs : RaggedKVCacheInputs
        What ``fetch`` handed out for `contexts`.
    contexts : sequence of contexts
        The batch, in the same order, not updated since.
    threads : int, optional
        Threads that attention on the CPU may use; as many as torch uses by default.
    manager : PagedKVCacheManager, optional
        Which fetched. Models with recurrent layers need it: their states lie there. Such a batch
        runs once, for a forward moves the states on.

    Raises
    ------
    ValueError
        No contexts, or not as many as were fetched; states on several devices. On a GPU, cupy and
        torch whose current streams are two.

    Attributes
    ----------
    row_offsets : uint32 array [B + 1]
        Where each row's tokens begin in the forward.
    last_rows : int64 array [B]
        The last token of each row, whose logits tell what comes next.

    Notes
    -----
    Runs where the pool is. On a GPU all work is on torch's current stream, and the host waits for
    none of it.

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
            raise ValueError("the batch has no contexts; pass at least one, those fetched")
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
        """Name the arguments for ``model(**packed.model_inputs())``.

        Parameters
        ----------
        rows : int array, optional
            Tokens whose logits are wanted; ``last_rows`` by default.

        Returns
        -------
        dict
            ``input_ids`` and ``position_ids`` int64 [1, T], ``logits_to_keep`` int64 [n], where the
            pool is, and what carries the pages to the layers.
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
        """Write a layer's new K and V into their pages and attend over all of them.

        Parameters
        ----------
        module : Module
            Its ``layer_idx`` names the layer, where it has one.
        query, key, value : tensor [1, heads, T, head_dim]
        rule : AttentionRule

        Returns
        -------
        tensor [1, T, q_heads, v_head_dim]

        Raises
        ------
        ValueError, TypeError, IndexError
            What does not fit the pool.
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
                f"layer {module.layer_idx} keeps a state, whose slots the batch does not know; "
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
        """Tell whether a layer has K and V of its own, or reads those of another one."""
        layers = self._inputs._layers  # noqa: SLF001 - None where a page has all layers
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
        out = q.new_empty((*q.shape[:2], v_head_dim))  # of torch's memory, on a GPU too
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
