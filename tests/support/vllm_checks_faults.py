# SPDX-License-Identifier: Apache-2.0
"""Whatever fails inside a call of the adapter, no page is lost.

Run by ``tests/integrations/run_vllm.py --part ours``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.v1.core.utils import create_requests  # type: ignore[import-not-found]
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.request import RequestStatus

from kvcore.integrations.vllm.manager import KVCoreManager

BLOCKS = 24
VERBS = ("claim", "reserve", "plan", "match_prefix", "get_req_blocks", "step")


class Faulty:
    """A core whose n-th call of `VERBS` fails, before it does anything or after it did."""

    def __init__(self, core: Any, fails_at: int, *, late: bool) -> None:
        self._core = core
        self._left = fails_at
        self._late = late

    def __getattr__(self, name: str) -> Any:
        verb = getattr(self._core, name)
        return self._counted(verb) if name in VERBS and self._left >= 0 else verb

    def _counted(self, verb: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            self._left -= 1
            if self._left == 0 and not self._late:
                raise MemoryError("injected")
            answer = verb(*args, **kwargs)
            if self._left == 0:
                raise MemoryError("injected")
            return answer

        return call


def make_manager() -> KVCoreManager:
    spec = FullAttentionSpec(block_size=16, num_kv_heads=1, head_size=1, dtype=torch.float32)
    config = KVCacheConfig(
        num_blocks=BLOCKS, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)]
    )
    return KVCoreManager(
        config, max_model_len=512, scheduler_block_size=16, hash_block_size=16, log_stats=True,
        enable_kv_cache_events=True,
    )  # fmt: skip


def serve(manager: KVCoreManager, requests: list[Any]) -> None:
    """Prefill in two chunks, decode, load from elsewhere, run out of pages."""
    for index, request in enumerate(requests):
        found, hit, _ = manager.get_computed_blocks(request)
        loads = 16 if index % 2 and hit + 16 < request.num_tokens else 0
        new = min(20, request.num_tokens - hit - loads)
        taken = manager.allocate_slots(
            request, new, hit, found, num_lookahead_tokens=3, full_sequence_must_fit=index > 1,
            num_external_computed_tokens=loads, delay_cache_blocks=bool(loads),
            reserved_blocks=loads // 8,
        )  # fmt: skip
        if taken is None:
            continue
        request.status = RequestStatus.RUNNING
        request.num_computed_tokens = hit + loads + new
        manager.cache_blocks(request, request.num_computed_tokens)
        for _ in range(20):
            request.append_output_token_ids(7)
            if manager.allocate_slots(request, 1) is None:
                break
            request.num_computed_tokens += 1


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("fails_at", range(1, 40))
def test_a_call_that_fails_leaks_no_page(fails_at: int, late: bool) -> None:
    manager = make_manager()
    core = manager.core
    requests = create_requests(num_requests=6, num_tokens=70, same_prompt=True)
    manager.core = Faulty(core, fails_at, late=late)
    try:
        serve(manager, requests)
    except MemoryError as error:
        assert str(error) == "injected"
    manager.core = core
    core.check_integrity()
    for request in requests:
        manager.free(request)
    core.check_integrity()
    assert manager.block_pool.get_num_free_blocks() == BLOCKS - 1
    assert manager.reset_prefix_cache()


def test_a_new_request_whose_allocation_fails_holds_nothing() -> None:
    manager = make_manager()
    core = manager.core
    for fails_at in range(1, 5):
        (request,) = create_requests(num_requests=1, num_tokens=70)
        manager.core = Faulty(core, fails_at, late=True)
        with pytest.raises(MemoryError, match="injected"):
            manager.allocate_slots(request, 70)
        manager.core = core
        if fails_at > 2:  # after the reservation the pages are the request's, and go with the call
            assert not manager.get_block_ids(request.request_id)[0]
        manager.free(request)
        assert manager.block_pool.get_num_free_blocks() == BLOCKS - 1
