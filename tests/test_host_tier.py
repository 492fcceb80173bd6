# SPDX-License-Identifier: Apache-2.0
"""The host tier by hand: what is stored and loaded, counted exactly, and what a page holds."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import kvcore
from builders import claimed, error_of, make_context, make_manager, with_host
from kvcore import ops
from written_pool import WrittenPool


def tiered(num_pages: int = 8, host_pages: int = 32, *, page_size: int = 4, **rest: Any) -> Any:
    """A manager with a pool, a tier below it, and what runs batches on it."""
    params = with_host(page_size, host_pages, **rest.pop("params", {}))
    settings: dict[str, Any] = {"blocks": "allocate"}
    manager = make_manager(page_size, num_pages, params=params, **(settings | rest))
    return manager, WrittenPool(manager)


def serve(manager: Any, pool: WrittenPool, tokens: Any, **rest: Any) -> int:
    """Run a prompt and let it go; answers the tokens it had not to run."""
    context = claimed(manager, tokens, **rest)
    assert manager.maybe_reserve(context)
    found = context.start_idx
    pool.run([context])
    manager.release(context.request_id)
    return int(found)


def moved(manager: Any) -> tuple[int, int]:
    metrics = manager.metrics
    return metrics.d2h_blocks_copied, metrics.h2d_blocks_copied


A, B, C = range(20), range(100, 130), range(200, 232)


# -- what is stored and loaded -------------------------------------------------------------------
def test_pages_are_stored_as_they_are_committed_and_come_back() -> None:
    manager, pool = tiered()
    assert (manager.total_num_host_pages, manager.host_committed_block_pct) == (32, 0.0)
    assert serve(manager, pool, A) == 0
    assert moved(manager) == (5, 0)
    assert manager.host_committed_block_pct == 5 / 32
    serve(manager, pool, B)  # 8 pages: nothing of A is left on the device
    assert manager.match_prefix(list(A)) == 0
    assert serve(manager, pool, A) == 16
    assert moved(manager) == (5 + 7, 4)
    metrics = manager.metrics
    assert (metrics.cache_tokens, metrics.input_tokens) == (16, 20 + 30 + 4)


def test_what_was_loaded_is_found_on_the_device_and_not_stored_again() -> None:
    manager, pool = tiered()
    serve(manager, pool, A)
    serve(manager, pool, B)
    before = moved(manager)
    context = claimed(manager, A)
    assert manager.maybe_reserve(context)
    assert manager.match_prefix(list(A)) == 0
    assert moved(manager) == (before[0], 4)
    pool.run([context])
    assert manager.match_prefix(list(A)) == 20
    assert moved(manager) == (before[0], 4)
    second = claimed(manager, A)
    assert manager.maybe_reserve(second)
    assert second.start_idx == 16 + 3  # from the device, the last tokens out of a whole page
    assert moved(manager) == (before[0], 4)


def test_the_device_hit_goes_on_in_the_tier() -> None:
    manager, pool = tiered(num_pages=12)
    serve(manager, pool, range(40))  # 10 pages
    serve(manager, pool, B)  # 8 pages: evicts the last 6 of them
    assert manager.match_prefix(list(range(40))) == 16
    context = claimed(manager, range(40))
    plan = manager.plan(context)
    assert (plan.hit_tokens, plan.copied_tokens, plan.fits) == (36, 0, True)
    assert manager.maybe_reserve(context)
    assert (context.start_idx, moved(manager)[1]) == (36, 9 - 4)
    pool.run([context])


def test_a_longer_part_of_a_page_beats_the_tier() -> None:
    manager, pool = tiered()
    serve(manager, pool, A)
    context = claimed(manager, [*range(19), 77])
    plan = manager.plan(context)
    assert (plan.hit_tokens, plan.copied_tokens) == (19, 3)
    assert manager.maybe_reserve(context)
    assert moved(manager) == (5, 0)
    pool.run([context])


def test_one_token_is_left_to_run_and_a_chunk_moves_on() -> None:
    manager, pool = tiered()
    serve(manager, pool, range(16))
    serve(manager, pool, C)
    context = claimed(manager, range(16))
    assert manager.maybe_reserve(context)
    assert context.start_idx == 12
    manager.release(context.request_id)
    chunked = claimed(manager, [*range(16), 1, 2, 3, 4, 5, 6], active_idx=8)
    assert manager.maybe_reserve(chunked)
    assert (chunked.start_idx, chunked.active_idx) == (16, 22)
    pool.run([chunked])


def test_reserving_twice_changes_nothing_and_a_longer_hit_is_taken_later() -> None:
    manager, pool = tiered(num_pages=24)
    serve(manager, pool, range(8))
    serve(manager, pool, range(100, 196))  # crowds it out
    context = claimed(manager, range(20))
    assert manager.maybe_reserve(context)
    assert (context.start_idx, moved(manager)[1]) == (8, 2)
    before = manager.metrics
    assert manager.maybe_reserve(context)
    assert (manager.metrics, context.start_idx) == (before, 8)
    other = claimed(manager, [*range(20), 5])
    pool.run([other])
    assert manager.maybe_reserve(context)
    assert (context.start_idx, moved(manager)[1]) == (19, 4)
    pool.run([context])
    assert manager.metrics.cache_tokens == 8 + 19


def test_a_call_that_says_no_loads_nothing() -> None:
    manager, pool = tiered()
    serve(manager, pool, A)
    serve(manager, pool, C)
    holder = claimed(manager, range(300, 316))
    pool.run([holder])
    context = claimed(manager, range(20))
    before = manager.metrics, manager.num_free_blocks, manager.host_committed_block_pct
    assert not manager.plan(context).fits
    assert not manager.maybe_reserve(context)
    refused = error_of(lambda: manager.fetch([context]))
    assert isinstance(refused, kvcore.InsufficientBlocksError)
    after = manager.metrics, manager.num_free_blocks, manager.host_committed_block_pct
    assert (after, context.start_idx) == (before, 0)
    manager.release(holder.request_id)
    assert manager.maybe_reserve(context)
    assert context.start_idx == 16


def test_fetch_loads_for_a_batch_and_several_steps() -> None:
    manager, pool = tiered(num_pages=16)
    serve(manager, pool, A)
    serve(manager, pool, range(50, 66))
    serve(manager, pool, range(400, 464))
    batch = [claimed(manager, A), claimed(manager, [*range(50, 66), 1])]
    manager.fetch(batch, 3)
    assert [c.start_idx for c in batch] == [16, 16]
    assert moved(manager)[1] == 8
    for context in batch:
        pool.check(context)


def test_a_batch_of_equal_prompts_is_stored_once() -> None:
    manager, pool = tiered(num_pages=64, host_pages=128)
    prompts = [[*range(40), *range(n, n + 8)] for n in (50, 70, 90)]
    batch = [claimed(manager, tokens) for tokens in prompts]
    pool.run(batch)
    assert moved(manager) == (10 + 3 * 2, 0)
    assert manager.host_committed_block_pct == 16 / 128
    for context in batch:
        manager.release(context.request_id)
    serve(manager, pool, range(1000, 1256))
    assert all(serve(manager, pool, tokens) == 44 for tokens in prompts)


def test_batched_reservations_load_too() -> None:
    manager, pool = tiered(num_pages=16)
    serve(manager, pool, A)
    serve(manager, pool, range(400, 462))
    batch = [claimed(manager, [*A, 1]), claimed(manager, [*range(18), 9]), claimed(manager, A)]
    assert manager.maybe_reserve_batch(batch) == 3
    assert [c.start_idx for c in batch] == [20, 16, 16]
    assert moved(manager)[1] == 5 + 4 + 4
    pool.run(batch)


# -- a full tier ---------------------------------------------------------------------------------
def test_a_tier_smaller_than_a_sequence_stores_its_start() -> None:
    manager, pool = tiered(num_pages=8, host_pages=3)
    serve(manager, pool, A)
    assert moved(manager) == (3, 0)
    serve(manager, pool, C)
    assert (moved(manager), manager.host_committed_block_pct) == ((6, 0), 1.0)
    assert serve(manager, pool, C[:13]) == 12
    assert serve(manager, pool, A) == 0


def test_a_tier_full_of_pages_in_use_stores_nothing_more() -> None:
    manager, pool = tiered(num_pages=16, host_pages=4)
    holder = claimed(manager, range(17))
    pool.run([holder])
    assert moved(manager) == (4, 0)
    serve(manager, pool, B)
    assert moved(manager) == (4, 0)
    for token in range(8):
        pool.run([holder], token)
    assert moved(manager) == (4, 0)
    manager.release(holder.request_id)
    serve(manager, pool, C)
    assert (moved(manager), manager.host_committed_block_pct) == ((8, 0), 1.0)


def test_what_found_no_room_is_stored_when_there_is_some() -> None:
    manager, pool = tiered(num_pages=24, host_pages=6)
    first, second = claimed(manager, range(16)), claimed(manager, range(50, 66))
    pool.run([first])
    pool.run([second])
    assert moved(manager) == (4 + 2, 0)
    manager.release(first.request_id)
    for token in range(4):
        pool.run([second], token)
    assert moved(manager) == (6 + 3, 0)


def test_least_recently_used_pages_go_first_and_a_load_is_a_use() -> None:
    manager, pool = tiered(num_pages=4, host_pages=8)
    serve(manager, pool, range(16))
    serve(manager, pool, range(50, 66))
    assert serve(manager, pool, range(16)) == 12
    serve(manager, pool, range(90, 106))  # in place of the second
    assert serve(manager, pool, range(16)) == 12
    assert serve(manager, pool, range(50, 66)) == 0


def test_ten_thousand_loads_leave_no_page_behind() -> None:
    manager, pool = tiered(num_pages=4, host_pages=12, enable_runtime_checks=False)
    prompts = [list(range(n, n + 13)) for n in (0, 50, 100)]
    for tokens in prompts:
        serve(manager, pool, tokens)
    for n in range(3400):
        context = claimed(manager, prompts[n % 3])
        assert manager.maybe_reserve(context)
        manager.fetch([context])
        context.update(1)
        manager.step([context])
        manager.release(context.request_id)
    assert moved(manager) == (9, 3400 * 3)
    assert manager.host_committed_block_pct == 9 / 12
    manager.check_integrity()
    assert [serve(manager, pool, tokens) for tokens in prompts] == [12] * 3
    manager.reset_prefix_cache()
    assert manager.host_committed_block_pct == 0


# -- every other verb ----------------------------------------------------------------------------
def test_reset_forgets_the_tier_but_for_what_is_in_use() -> None:
    manager, pool = tiered(num_pages=16)
    serve(manager, pool, A)
    holder = claimed(manager, B)
    pool.run([holder])
    manager.reset_prefix_cache()
    assert manager.host_committed_block_pct == 7 / 32
    context = claimed(manager, A)
    assert manager.maybe_reserve(context)
    assert context.start_idx == 0
    manager.release(context.request_id)
    manager.release(holder.request_id)
    manager.reset_prefix_cache()
    assert manager.host_committed_block_pct == 0
    assert manager.num_free_blocks == 16


def test_forks_of_a_loaded_sequence_share_what_was_loaded() -> None:
    manager, pool = tiered(num_pages=16)
    serve(manager, pool, A)
    serve(manager, pool, range(400, 462))
    parent = claimed(manager, A)
    assert manager.maybe_reserve(parent)
    children = [make_context([*range(16), n]) for n in (5, 6)]
    manager.fork(parent.request_id, *children)
    assert [c.start_idx for c in children] == [16, 16]
    pool.run([parent, *children])
    for context in (parent, *children):
        pool.check(context)
    assert moved(manager)[1] == 4


def test_a_truncated_sequence_stores_what_it_becomes() -> None:
    manager, pool = tiered(num_pages=16)
    context = claimed(manager, A)
    pool.run([context])
    manager.truncate(context.request_id, 6)
    context.rewind(6)
    context.extend(list(range(60, 72)))
    pool.run([context])
    tokens = context.tokens.tolist()
    manager.release(context.request_id)
    assert moved(manager) == (5 + 3, 0)
    serve(manager, pool, range(400, 462))
    assert serve(manager, pool, tokens) == 16
    serve(manager, pool, range(400, 462))
    assert serve(manager, pool, A) == 16


def test_namespaces_are_apart_below_as_well() -> None:
    manager, pool = tiered()
    serve(manager, pool, A, cache_salt="one")
    serve(manager, pool, C)
    assert serve(manager, pool, A) == 0
    serve(manager, pool, C)
    assert serve(manager, pool, A, extra_key="one") == 0
    serve(manager, pool, C)
    assert serve(manager, pool, A, cache_salt="one") == 16


def test_without_deduplication_pages_are_stored_once() -> None:
    manager, pool = tiered(num_pages=32, host_pages=64, dedup=False)
    batch = [claimed(manager, A), claimed(manager, A)]
    pool.run(batch)
    assert moved(manager) == (5, 0)
    for context in batch:
        manager.release(context.request_id)
    serve(manager, pool, range(400, 528))
    assert serve(manager, pool, A) == 16


def test_pins_and_the_tier() -> None:
    manager, pool = tiered(num_pages=8)
    serve(manager, pool, A)
    with manager.pin(list(range(8))):
        serve(manager, pool, range(400, 424))
        assert manager.match_prefix(list(A)) == 8
        context = claimed(manager, A)
        assert manager.maybe_reserve(context)
        assert (context.start_idx, moved(manager)[1]) == (16, 2)
        pool.run([context])


def test_replicas_have_tiers_of_their_own() -> None:
    manager, pool = tiered(num_pages=8, host_pages=16, replicas=2)
    assert manager.total_num_host_pages == 32
    serve(manager, pool, A, replica_idx=1)
    assert manager.host_committed_block_pct == 5 / 32
    serve(manager, pool, C, replica_idx=1)
    new = make_context(A)
    assert manager.get_or_recommend_replica(new) == 1
    assert serve(manager, pool, A, replica_idx=0) == 0
    serve(manager, pool, C[:12], replica_idx=0)
    assert serve(manager, pool, C[:13], replica_idx=1) == 12


# -- bytes of every kind of pool -----------------------------------------------------------------
def fill(manager: Any, context: Any, seed: int) -> None:
    """Random bytes in every page of a request, on all devices, scales included."""
    rng = np.random.default_rng(seed)
    pages = manager.get_req_blocks(context.request_id)
    for part in parts(manager, manager.get_replica(context)):
        shape = (len(pages), *part.shape[1:-1], part.shape[-1] * part.itemsize)
        part.view(np.uint8)[pages] = rng.integers(0, 255, shape, np.uint8)


def parts(manager: Any, replica: int) -> list[Any]:
    found = []
    for blocks, scales in manager._shards[replica]:
        for each in (blocks, scales):
            if each is not None:
                found += list(each) if isinstance(each, tuple) else [each]
    return found


def content(manager: Any, context: Any, pages: int) -> list[Any]:
    ids = list(manager.get_req_blocks(context.request_id))[:pages]
    return [p.view(np.uint8)[ids] for p in parts(manager, manager.get_replica(context))]


def strided(shape: tuple[int, ...]) -> Any:
    """A page is no run of bytes: rows have a gap, and heads lie outside tokens."""
    pages, kv, layers, size, heads, dim = shape
    memory = np.zeros((layers, kv, pages + 1, heads, size, dim + 3), np.float32)
    return memory[:, :, 1:, :, :, :dim].transpose(2, 1, 0, 4, 3, 5)


KINDS: list[dict[str, Any]] = [
    {},
    {"dtype": "bfloat16", "head_dim": 59, "n_kv_heads": 3},
    {"dtype": "int8", "kv_scale_granularity": 4, "head_dim": 12, "n_kv_heads": 3},
    {"dtype": "float8_e4m3fn", "kv_scale_granularity": 8, "head_dim": 24, "v_head_dim": 16},
    {"is_mla": True, "head_dim": 7, "dtype": "float16"},
    {"is_mla": True, "head_dim": 8, "dtype": "float8_e5m2", "kv_scale_granularity": 8},
    {"v_head_dim": 5},
    {"v_head_dim": 80, "head_dim": 112, "num_layers": 1},
]


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("page_size", [1, 3, 24])
@pytest.mark.parametrize("shape", [(1, 1), (2, 1), (1, 2), (2, 2)])
def test_pages_come_back_with_all_their_bytes(
    kind: dict[str, Any], page_size: int, shape: tuple[int, int]
) -> None:
    replicas, shards = shape
    heads = kind.get("n_kv_heads", 1) * (1 if kind.get("is_mla") else shards)
    params = with_host(
        page_size, 9, **(kind | {"n_kv_heads": heads}), n_devices=replicas * shards,
        data_parallel_degree=replicas,
    )  # fmt: skip
    manager = make_manager(
        page_size, 4, replicas=replicas, shards=shards, params=params, blocks="allocate"
    )
    check_round_trip(manager, page_size, replicas - 1)


def check_round_trip(manager: Any, page_size: int, replica: int) -> None:
    tokens = list(range(3 * page_size + 1))
    context = claimed(manager, tokens, replica_idx=replica)
    assert manager.maybe_reserve(context)
    fill(manager, context, 1)
    expected = content(manager, context, 3)
    manager.fetch([context])
    context.update(0)
    manager.step([context])
    manager.release(context.request_id)
    other = claimed(manager, [t + 1000 for t in tokens], replica_idx=replica)
    manager.fetch([other])
    for part in parts(manager, replica):
        part.view(np.uint8)[...] = 0xFF  # NaNs where a load writes nothing
    other.update(0)
    manager.step([other])
    manager.release(other.request_id)
    again = claimed(manager, tokens, replica_idx=replica)
    assert manager.maybe_reserve(again)
    assert again.start_idx == 3 * page_size
    own = list(manager.get_req_blocks(again.request_id))
    for seen, wanted in zip(content(manager, again, 3), expected, strict=True):
        np.testing.assert_array_equal(seen, wanted)
    for part in parts(manager, replica):  # and nothing else was written
        rest = np.delete(part.view(np.uint8), own[:3], axis=0)
        assert (rest == 0xFF).all()
    manager.check_integrity()


@pytest.mark.parametrize("page_size", [1, 3, 48])
@pytest.mark.parametrize("make", [np.zeros, strided], ids=["dense", "strided"])
def test_pools_of_the_caller_have_a_tier_too(page_size: int, make: Any) -> None:
    pool = make((4, 2, 2, page_size, 1, 2))
    pool = pool if make is strided else pool.astype(np.float32)
    params = with_host(page_size, 9)
    manager = make_manager(page_size, 4, params=params, blocks=[pool])
    check_round_trip(manager, page_size, 0)


def test_rows_of_a_quantised_pool_come_back_with_their_scales() -> None:
    params = with_host(
        4, 16, dtype="int8", kv_scale_granularity=8, head_dim=16, num_layers=1, n_kv_heads=2
    )
    manager = make_manager(4, 4, params=params, blocks="allocate")
    rng = np.random.default_rng(0)
    k, v = rng.normal(0, 1, (2, 13, 2, 16)).astype(np.float32)

    def run(tokens: Any, *rows: Any) -> Any:
        context = claimed(manager, tokens)
        inputs = manager.fetch([context])[0]
        start, offsets = context.start_idx, np.array([0, context.active_length], np.uint32)
        ops.append(inputs, 0, *(row[start:] for row in rows), offsets)
        found = ops.gather(inputs, 0, lengths=np.array([context.active_idx], np.uint32))[:2]
        context.update(0)
        manager.step([context])
        manager.release(context.request_id)
        return start, found

    _, first = run(range(13), k, v)
    run(range(50, 63), 9 * k, 7 * v)
    start, again = run(range(13), k, v)
    assert start == 12
    for seen, wanted in zip(again, first, strict=True):
        np.testing.assert_array_equal(seen, wanted)


# -- where there is none -------------------------------------------------------------------------
def test_a_manager_without_a_pool_has_no_tier() -> None:
    manager = make_manager(4, 8, params=with_host(4, 32), blocks=None)
    assert (manager.total_num_host_pages, manager.host_committed_block_pct) == (32, 0.0)
    for tokens in (A, C, A):
        context = claimed(manager, tokens)
        manager.fetch([context])
        context.update(0)
        manager.step([context])
        manager.release(context.request_id)
    assert moved(manager) == (0, 0)


def test_a_tier_of_less_than_a_page_is_none() -> None:
    params = with_host(4, 1) | {"host_kvcache_swap_space_gb": 1e-9}
    manager = make_manager(4, 8, params=params, blocks="allocate")
    pool = WrittenPool(manager)
    serve(manager, pool, A)
    assert (manager.total_num_host_pages, moved(manager)) == (0, (0, 0))


def test_more_space_than_can_be_mapped_is_refused() -> None:
    params = with_host(4, 1) | {"host_kvcache_swap_space_gb": 2.0**28}
    refused = error_of(lambda: make_manager(4, 8, params=params, blocks="allocate"))
    assert isinstance(refused, ValueError)


def test_the_building_block_leaves_the_bytes_to_the_manager() -> None:
    core = kvcore.CacheManager(
        num_blocks=4, page_size=2, max_sequences=2, max_seq_len=8, host_pages=3
    )
    sequence = core.claim()
    with pytest.raises(ValueError, match="host_copies is missing.*3 host pages"):
        core.reserve(sequence, [1, 2, 3])
    assert core.stats().host_pages == 3
    for wrong in (-1, 1 << 31):
        with pytest.raises(ValueError, match="host_pages"):
            kvcore.CacheManager(
                num_blocks=4, page_size=2, max_sequences=2, max_seq_len=8, host_pages=wrong
            )
    with pytest.raises(ValueError, match="without prefix_caching"):
        kvcore.CacheManager(
            num_blocks=4,
            page_size=2,
            max_sequences=2,
            max_seq_len=8,
            host_pages=1,
            prefix_caching=False,
        )


# -- a mover that fails --------------------------------------------------------------------------
class Failing:
    """Stands in for a device that cannot copy."""

    def __init__(self, manager: Any) -> None:
        self.run, self.fails = manager._mover.run, False
        manager._mover.run = self

    def __call__(self, orders: Any) -> None:
        if self.fails:
            raise OSError("no copy")
        self.run(orders)


def test_pages_that_were_not_copied_are_never_found() -> None:
    manager, pool = tiered()
    mover = Failing(manager)
    mover.fails = True
    context = claimed(manager, A)
    pool.forward([context])
    context.update(0)
    with pytest.raises(OSError, match="no copy"):
        manager.step([context])
    assert (moved(manager), manager.host_committed_block_pct) == ((0, 0), 0.0)
    manager.check_integrity()
    mover.fails = False
    for token in range(4):
        pool.run([context], token)
    assert moved(manager) == (6, 0)
    manager.release(context.request_id)
    serve(manager, pool, C)
    again = claimed(manager, A)
    mover.fails = True
    with pytest.raises(OSError, match="no copy"):
        manager.maybe_reserve(again)
    manager.release(again.request_id)
    manager.check_integrity()
    mover.fails = False
    assert serve(manager, pool, A) == 16
    manager.reset_prefix_cache()
    assert manager.host_committed_block_pct == 0
