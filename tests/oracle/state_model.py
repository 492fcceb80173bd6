# SPDX-License-Identifier: Apache-2.0
"""A model of recurrent layers whose states are digests, cheap to compute again."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from builders import in_groups
from kvcore import KVCacheParams, PagedKVCacheManager, TextGenerationContext
from kvcore.groups import FullAttention, State

ARRAYS = {"conv": ((3,), "float32"), "ssm": ((2, 2), "int8")}
_MOST = 97  # digests fit into int8


def prompt(*parts: tuple[int, int]) -> list[int]:
    """Return runs of consecutive tokens; each part is its first token and its length."""
    return [first + i for first, n in parts for i in range(n)]


def state_params(*groups: Any, interval: int | None = None, **options: Any) -> KVCacheParams:
    """Return parameters of page size 4: a full layer and two recurrent layers, or `groups`."""
    groups = groups or (FullAttention([0]), State([1, 2], ARRAYS, interval))
    layers = 1 + max(layer for group in groups for layer in group.layers)
    fields: dict[str, Any] = {"n_kv_heads": 1, "head_dim": 2, "page_size": 4}
    fields |= {"enable_prefix_caching": True, "groups": groups, "num_layers": layers}
    return KVCacheParams("float32", **(fields | options))


def state_manager(params: KVCacheParams, **options: Any) -> PagedKVCacheManager:
    """Return a manager of 4 requests which checks every law after every call."""
    fields: dict[str, Any] = {"max_batch_size": 4, "max_seq_len": 400, "num_pages": 64}
    return PagedKVCacheManager(
        params, **in_groups(fields | {"enable_runtime_checks": True} | options)
    )


def digest(tokens: Any, seed: int = 0) -> int:
    """Return the state after these tokens."""
    found = seed
    for token in tokens:
        found = (found * 5 + int(token) + 1) % _MOST
    return found


def fields_of(states: tuple[dict[str, list[Any]], ...], device: int) -> list[Any]:
    """Return the arrays of all groups on a device."""
    return [arrays[device] for group in states for arrays in group.values()]


def run_states(
    states: tuple[dict[str, list[Any]], ...],
    slots: tuple[NDArray[np.int32], ...],
    batch: list[TextGenerationContext],
    device: int = 0,
) -> None:
    """Run the chunk of each row; raise if a state is not the state of exactly its tokens."""
    for field in fields_of(states, device):
        for row, context in enumerate(batch):
            state = field[slots[0][row]]
            start, active = context.start_idx, context.active_idx
            if start > 0:
                assert set(np.unique(state)) == {digest(context.tokens[:start])}
            state[...] = digest(context.tokens[:active])


def step_states(
    manager: PagedKVCacheManager, *batch: TextGenerationContext, token: int = 9
) -> None:
    """Fetch, run and commit a batch of one replica."""
    (inputs,) = manager.fetch(batch)
    run_states(manager.states, inputs.states, list(batch))
    for context in batch:
        context.update(token)
    manager.step(batch)


def prefill(
    manager: PagedKVCacheManager, name: str, tokens: list[int], **options: Any
) -> TextGenerationContext:
    """Claim a request and run its prompt in the chunks that the manager cuts."""
    manager.claim(name)
    context = TextGenerationContext(name, tokens, **options)
    while context.end_idx == len(tokens):
        step_states(manager, context)
    return context
