# SPDX-License-Identifier: Apache-2.0
"""The host tier by hand: exact counts of stored and loaded pages, and their contents."""

from __future__ import annotations

import kvcore
from builders import claimed, error_of, make_context
from tier_steps import A, B, C, moved, serve, tiered


# -- stored and loaded pages ---------------------------------------------------------------------
def test_pages_are_stored_as_they_are_committed_and_come_back() -> None:
    manager, pool = tiered()
    assert (manager.total_num_host_pages, manager.host_committed_block_pct) == (32, 0.0)
    assert serve(manager, pool, A) == 0
    assert moved(manager) == (5, 0)
    assert manager.host_committed_block_pct == 5 / 32
    serve(manager, pool, B)  # 8 pages: the device keeps no page of A
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
    assert second.start_idx == 16 + 3  # from the device; copies the last tokens from a whole page
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
    serve(manager, pool, range(100, 196))  # evicts the first prompt from the device
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
    serve(manager, pool, range(90, 106))  # replaces the second prompt
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


# -- all other calls -----------------------------------------------------------------------------
def test_reset_forgets_the_tier_and_what_is_in_use() -> None:
    manager, pool = tiered(num_pages=16)
    serve(manager, pool, A)
    holder = claimed(manager, B)
    pool.run([holder])
    assert not manager.reset_prefix_cache()
    assert manager.host_committed_block_pct == 0
    context = claimed(manager, A)
    assert manager.maybe_reserve(context)
    assert context.start_idx == 0
    manager.release(context.request_id)
    manager.release(holder.request_id)
    assert manager.reset_prefix_cache()
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
