# SPDX-License-Identifier: Apache-2.0
"""Logits of prompts that run in one batch through pages, in parts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from kvcore import PagedKVCacheManager, TextGenerationContext
from kvcore.integrations.transformers import PackedBatch, paged_attention

__all__ = ["paged_logits"]


def paged_logits(
    model: Any, manager: PagedKVCacheManager, prompts: Sequence[list[int]], parts: Sequence[int]
) -> list[Any]:
    """Return the logits [tokens, vocabulary] of each prompt; part i ends at token `parts[i]`."""
    contexts = [TextGenerationContext(i, prompt) for i, prompt in enumerate(prompts)]
    for context in contexts:
        manager.claim(context.request_id)
    found: list[list[Any]] = [[] for _ in prompts]
    for end in (*parts, max(map(len, prompts))):
        ends = [min(end, len(prompt)) for prompt in prompts]
        places = [i for i, each in enumerate(contexts) if each.start_idx < ends[i]]
        for i in places:
            contexts[i].active_idx = ends[i]
        batch = [contexts[i] for i in places]
        packed = PackedBatch(manager.fetch(batch)[0], batch, manager=manager)
        every = np.arange(int(packed.row_offsets[-1]))
        with paged_attention(model), torch.inference_mode():
            logits = model(**packed.model_inputs(every)).logits[0]
        rows = zip(packed.row_offsets[:-1].tolist(), packed.row_offsets[1:].tolist(), strict=True)
        for i, (begin, behind) in zip(places, rows, strict=True):
            found[i].append(logits[begin:behind])
            contexts[i].update(1)
        manager.step(batch)
    for context in contexts:
        manager.release(context.request_id)
    return [torch.cat(each) for each in found]
