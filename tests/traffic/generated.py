# SPDX-License-Identifier: Apache-2.0
"""The tokens that models generate from the pages of managers that check themselves."""

from __future__ import annotations

from typing import Any

from builders import in_groups
from hf_models import prompts_of
from kvcore import KVCacheParams, PagedKVCacheManager
from kvcore.integrations.transformers import generate

NEW = 14
LONGEST = 53 + NEW


def checked_manager(params: KVCacheParams, num_pages: int, **options: Any) -> PagedKVCacheManager:
    """Return a manager of 8 requests which checks every law after every call."""
    fields: dict[str, Any] = {"max_batch_size": 8, "max_seq_len": 128}
    fields |= {"enable_runtime_checks": True}
    return PagedKVCacheManager(params, num_pages=num_pages, **in_groups(fields | options))


def tokens_of(
    model: Any, manager: PagedKVCacheManager, tokens: int = 11, **options: Any
) -> list[list[int]]:
    """Return the generated tokens of all prompts, in steps of `tokens`; no page stays in use."""
    options = {"max_new_tokens": NEW, "max_batch_tokens": tokens} | options
    results = generate(model, prompts_of(), manager=manager, **options)
    assert manager.num_free_blocks == manager.total_num_pages
    assert manager.state_metrics.used_slots == 0
    manager.check_integrity()
    return [result.token_ids for result in results]


def check_cold_and_cached(
    model: Any, manager: PagedKVCacheManager, expected: list[list[int]], tokens: int = 11
) -> None:
    """Run prompts in chunks, then again with hits; check the metrics of the second run."""
    assert tokens_of(model, manager, tokens) == expected
    manager.reset_metrics()
    assert tokens_of(model, manager, tokens) == expected
