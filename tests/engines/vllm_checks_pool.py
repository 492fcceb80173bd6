# SPDX-License-Identifier: Apache-2.0
"""vLLM and kvcore agree on free blocks: which requests are admitted, and blocks without a request.

Run by ``tests/integrations/run_vllm.py --part ours``.
"""

from __future__ import annotations

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

from kvcore import KVCacheError
from kvcore.integrations.vllm.manager import KVCoreManager

SHAPE: dict[str, Any] = {
    "block_size": 16,
    "num_kv_heads": 1,
    "head_size": 1,
    "dtype": torch.float32,
}
OWN: Any = KVCoreManager.__base__  # vLLM's class, whose name may refer to kvcore's factory
FULL = FullAttentionSpec(**SHAPE)
WINDOW = SlidingWindowSpec(**SHAPE, sliding_window=20)
CHUNKS = ChunkedLocalAttentionSpec(**SHAPE, attention_chunk_size=32)


def make_manager(make: Any, num_blocks: int, *specs: Any) -> Any:
    groups = [KVCacheGroupSpec([f"layer {i}"], spec) for i, spec in enumerate(specs)]
    config = KVCacheConfig(num_blocks=num_blocks, kv_cache_tensors=[], kv_cache_groups=groups)
    return make(
        config, max_model_len=512, max_in_flight_tokens=64, scheduler_block_size=16,
        hash_block_size=16,
    )  # fmt: skip


@pytest.mark.parametrize("specs", [(FULL,), (WINDOW,), (FULL, WINDOW, CHUNKS)])
@pytest.mark.parametrize("reserved", [0, 4])
@pytest.mark.parametrize("chunk", [1, 30, 64])
def test_a_request_is_let_in_where_vllm_does(
    specs: tuple[Any, ...], reserved: int, chunk: int
) -> None:
    """A request needs room for its longest chunks, even if its first chunk is short."""
    answers = set()
    for num_blocks in range(2, 40):
        for tokens in (64, 150, 300):
            told = []
            for make in (OWN, KVCoreManager):
                (request,) = create_requests(num_requests=1, num_tokens=tokens)
                manager = make_manager(make, num_blocks, *specs)
                taken = manager.allocate_slots(
                    request, chunk, full_sequence_must_fit=True, reserved_blocks=reserved
                )
                told.append((taken is not None, manager.block_pool.get_num_free_blocks()))
            assert told[0] == told[1], (num_blocks, tokens)
            answers.add(told[0][0])
    assert answers == {False, True}


@pytest.mark.parametrize("specs", [(FULL,), (FULL, WINDOW)])
def test_blocks_for_no_request_are_its_who_took_them(specs: tuple[Any, ...]) -> None:
    manager = make_manager(KVCoreManager, 13, *specs)
    pool = manager.block_pool
    (cached,) = create_requests(num_requests=1, num_tokens=64)
    manager.allocate_slots(cached, 64)
    manager.free(cached)
    with pytest.raises(ValueError, match=r"0 \.\. 12 and a multiple"):
        pool.get_new_blocks(14)
    taken = pool.get_new_blocks(12)
    assert sorted(block.block_id for block in taken) == [*range(1, 13)]
    assert [block.ref_cnt for block in taken] == [1] * 12
    assert pool.get_num_free_blocks() == 0
    assert not manager.get_computed_blocks(cached)[1]
    pool.touch(taken[:1])
    pool.free_blocks(taken)
    assert taken[0].ref_cnt == 1
    pool.free_blocks(taken[:1])
    assert pool.get_num_free_blocks() == 12
    manager.core.check_integrity()


def test_blocks_are_taken_of_each_group_at_a_time() -> None:
    pool = make_manager(KVCoreManager, 13, FULL, WINDOW).block_pool
    with pytest.raises(ValueError, match="a multiple of 2"):
        pool.get_new_blocks(3)
    assert pool.get_num_free_blocks() == 12


def test_what_fails_takes_no_block(monkeypatch: pytest.MonkeyPatch) -> None:
    manager = make_manager(KVCoreManager, 13, FULL)
    core, left = manager.core, [3]
    hold = core.hold

    def failing(pages: list[int]) -> Any:
        left[0] -= 1
        if left[0] < 0:
            raise KVCacheError("injected")
        return hold(pages)

    monkeypatch.setattr(type(core), "hold", lambda _, pages: failing(pages))
    with pytest.raises(KVCacheError, match="injected"):
        manager.block_pool.get_new_blocks(5)
    monkeypatch.undo()
    assert manager.block_pool.get_num_free_blocks() == 12
    core.check_integrity()


def test_nobody_but_kvcore_takes_from_its_queue() -> None:
    queue = make_manager(KVCoreManager, 13, FULL).block_pool.free_block_queue
    assert [block.block_id for block in queue.get_all_free_blocks()] == [*range(1, 13)]
    assert queue.fake_free_list_head.next_free_block.block_id == 1
    assert queue.fake_free_list_tail.prev_free_block.block_id == 12
    for verb in ("popleft", "popleft_n", "append", "remove"):
        assert not hasattr(queue, verb)
