# SPDX-License-Identifier: Apache-2.0
"""The block hashes that pull connectors read, with requests that an engine makes.

An engine with kvcore computes the hashes of a request's blocks at the first read. Run by
``tests/integrations/run_vllm.py --part ours``.
"""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.request import Request

from kvcore.integrations.vllm import hashes
from kvcore.integrations.vllm.manager import KVCoreManager
from vllm_checks_pool import FULL, OWN, WINDOW, make_manager

PAGE = 16
CACHED, LOADED = 10, 2  # blocks
HASHERS = {OWN: get_request_block_hasher, KVCoreManager: hashes.lazy(get_request_block_hasher)}


def request_of(make: Any, name: str, tokens: list[int]) -> Request:
    init_none_hash(sha256)
    hasher = HASHERS[make](PAGE, sha256)
    return Request(name, tokens, SamplingParams(max_tokens=4), None, block_hasher=hasher)


def unhashed(make: Any, specs: tuple[Any, ...]) -> tuple[list[int], list[int], list[int]]:
    """Serve a prompt; count the unhashed blocks of another prompt with the same prefix.

    For each group: the blocks of the hit, the blocks of the request during a load, and its blocks
    after the load.
    """
    manager = make_manager(make, 80, *specs)
    tokens = list(range(1000, 1000 + (CACHED + LOADED) * PAGE + 5))
    first = request_of(make, "first", tokens[: CACHED * PAGE + 1])
    manager.allocate_slots(first, first.num_tokens)
    manager.free(first)
    second = request_of(make, "second", tokens)
    blocks, hit, *_ = manager.get_computed_blocks(second)
    assert hit == CACHED * PAGE

    def count(found: Any) -> list[int]:
        return [len(ids) for ids in found.get_unhashed_block_ids_all_groups()]

    of_hit = count(blocks)
    manager.allocate_slots(
        second, 0, hit, blocks, num_external_computed_tokens=LOADED * PAGE, delay_cache_blocks=True
    )
    under_way = count(manager.get_blocks("second"))
    second.num_computed_tokens = hit + LOADED * PAGE
    manager.cache_blocks(second, second.num_computed_tokens)
    return of_hit, under_way, count(manager.get_blocks("second"))


@pytest.mark.parametrize("specs", [(FULL,), (WINDOW,), (FULL, WINDOW)])
def test_blocks_of_a_hit_have_hashes(specs: tuple[Any, ...]) -> None:
    groups = len(specs)
    expected = [0] * groups, [LOADED] * groups, [0] * groups
    assert unhashed(KVCoreManager, specs) == expected
    if specs == (FULL,):  # vLLM's manager drops window blocks with their hashes
        assert unhashed(OWN, specs) == expected


def test_hashes_are_those_of_the_tokens() -> None:
    manager = make_manager(KVCoreManager, 80, FULL)
    tokens = list(range(1000, 1000 + CACHED * PAGE + 5))
    for name in ("first", "second"):
        request = request_of(KVCoreManager, name, tokens)
        blocks, hit, *_ = manager.get_computed_blocks(request)
        manager.allocate_slots(request, request.num_tokens - hit, hit, blocks)
    plain = request_of(OWN, "plain", tokens)
    for name in ("first", "second"):
        (row,) = manager.get_blocks(name).blocks
        found = [block.block_hash for block in row[:CACHED]]
        assert [each[:-4] for each in found] == list(plain.block_hashes)
        assert row[CACHED].block_hash is None


def test_a_copy_of_the_hashes_is_a_list() -> None:
    tokens = list(range(1000, 1000 + CACHED * PAGE + 5))
    lazily, plain = (request_of(make, "a", tokens) for make in (KVCoreManager, OWN))
    for copied in (
        copy.deepcopy(lazily.block_hashes),
        pickle.loads(pickle.dumps(lazily.block_hashes)),
    ):
        assert copied == list(plain.block_hashes)
