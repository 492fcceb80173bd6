# SPDX-License-Identifier: Apache-2.0
"""No page is lost, whatever fails inside a call of the adapter.

Run by ``tests/integrations/run_vllm.py --part ours``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.v1.core.utils import create_requests  # type: ignore[import-not-found]
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    SlidingWindowSpec,
)
from vllm.v1.request import RequestStatus

from kvcore.integrations.vllm.manager import KVCoreManager

BLOCKS = {False: 24, True: 42}  # without and with windows: too few for all requests
VERBS = ("claim", "reserve", "match_prefix", "get_req_blocks", "step", "leave_windows")
CALLS = {False: 60, True: 116}  # calls of `VERBS` in `serve`
NEVER = 1 << 30


class Faulty:
    """A core whose n-th call of `VERBS` fails, before or after its work."""

    def __init__(self, core: Any, fails_at: int, *, late: bool) -> None:
        self._core = core
        self.left = fails_at
        self.called: set[str] = set()
        self._late = late

    def __getattr__(self, name: str) -> Any:
        verb = getattr(self._core, name)
        return self._counted(name, verb) if name in VERBS and self.left >= 0 else verb

    def _counted(self, name: str, verb: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            self.left -= 1
            self.called.add(name)
            if self.left == 0 and not self._late:
                raise MemoryError("injected")
            answer = verb(*args, **kwargs)
            if self.left == 0:
                raise MemoryError("injected")
            return answer

        return call


def make_manager(*, windows: bool = False) -> KVCoreManager:
    shape: dict[str, Any] = {
        "block_size": 16,
        "num_kv_heads": 1,
        "head_size": 1,
        "dtype": torch.float32,
    }
    specs: list[Any] = [FullAttentionSpec(**shape)]
    if windows:
        specs.append(SlidingWindowSpec(**shape, sliding_window=20))
        specs.append(ChunkedLocalAttentionSpec(**shape, attention_chunk_size=32))
    groups = [KVCacheGroupSpec([f"layer {i}"], spec) for i, spec in enumerate(specs)]
    config = KVCacheConfig(num_blocks=BLOCKS[windows], kv_cache_tensors=[], kv_cache_groups=groups)
    return KVCoreManager(
        config, max_model_len=512, scheduler_block_size=16, hash_block_size=16, log_stats=True,
        enable_kv_cache_events=True,
    )  # fmt: skip


def serve(manager: KVCoreManager, requests: list[Any]) -> None:
    """Prefill in two chunks, decode, load external blocks, run out of pages."""
    for index, request in enumerate(requests):
        found, hit, _ = manager.get_computed_blocks(request, 32 if index % 2 else None)
        loads = 16 if index % 2 and hit + 16 < request.num_tokens else 0
        new = min(20, request.num_tokens - hit - loads)
        taken = manager.allocate_slots(
            request, new, hit, found, num_lookahead_tokens=3, full_sequence_must_fit=index > 1,
            num_external_computed_tokens=loads, delay_cache_blocks=bool(loads),
            reserved_blocks=index % 2,
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
        manager.remove_skipped_blocks(request.request_id, request.num_computed_tokens)


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize(
    ("windows", "fails_at"), [(w, n) for w in (False, True) for n in range(1, CALLS[w] + 1)]
)
def test_a_call_that_fails_leaks_no_page(windows: bool, fails_at: int, late: bool) -> None:
    manager = make_manager(windows=windows)
    core = manager.core
    requests = create_requests(num_requests=6, num_tokens=70, same_prompt=True)
    manager.core = Faulty(core, fails_at, late=late)
    with pytest.raises(MemoryError, match="injected"):
        serve(manager, requests)
    manager.core = core
    core.check_integrity()
    for request in requests:
        manager.free(request)
    core.check_integrity()
    assert manager.block_pool.get_num_free_blocks() == BLOCKS[windows] - 1
    assert manager.reset_prefix_cache()


@pytest.mark.parametrize("windows", [False, True])
def test_every_call_of_the_core_is_made_to_fail(windows: bool) -> None:
    manager = make_manager(windows=windows)
    manager.core = counting = Faulty(manager.core, NEVER, late=False)
    serve(manager, create_requests(num_requests=6, num_tokens=70, same_prompt=True))
    assert NEVER - counting.left == CALLS[windows]
    assert counting.called >= {*VERBS} - (set() if windows else {"leave_windows"})


def test_a_new_request_whose_allocation_fails_holds_nothing() -> None:
    manager = make_manager()
    core = manager.core
    for fails_at in range(1, 5):
        (request,) = create_requests(num_requests=1, num_tokens=70)
        manager.core = Faulty(core, fails_at, late=True)
        with pytest.raises(MemoryError, match="injected"):
            manager.allocate_slots(request, 70)
        manager.core = core
        if fails_at > 2:  # after the reservation the request owns the pages, until the call fails
            assert not manager.get_block_ids(request.request_id)[0]
        manager.free(request)
        assert manager.block_pool.get_num_free_blocks() == BLOCKS[False] - 1
