# SPDX-License-Identifier: Apache-2.0
"""Requests are admitted in order, run in chunks, are preempted, and generate the right tokens."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from foreign_context import Context
from kvcore import CapacityError, InsufficientBlocksError, RequestNotFoundError
from kvcore.scheduler import Batch, Request, Scheduler
from toy_engine import ToyEngine, alone, make_manager, make_request, tokens_of


def prompts_of(count: int, length: int = 6) -> list[list[int]]:
    return [[(7 * n + i) % 19 for i in range(length)] for n in range(count)]


def new_tokens(batch: Batch) -> list[int]:
    lengths = [np.diff(each.row_offsets.astype(int)) for each in batch.inputs]
    return [int(n) for n in np.concatenate(lengths)]


# -- admission and chunks ------------------------------------------------------------------------
def test_requests_are_admitted_in_order_and_none_is_overtaken() -> None:
    engine = ToyEngine(make_manager(8, blocks=None))
    # The second request needs six of the eight pages. The third would fit, but it waits.
    sizes = [(12, 3), (22, 2), (2, 1)]
    requests = [make_request(n, range(n, n + size), k) for n, (size, k) in enumerate(sizes)]
    for request in requests:
        engine.scheduler.add(request)
    ended = engine.run_all()
    assert [r.rank for batch in engine.batches for r in batch.admitted] == [0, 1, 2]
    assert len(engine.batches[0].contexts) == 1
    assert ended[0] is requests[0]
    assert [tokens_of(r) for r in requests] == [
        alone(range(n, n + size), k) for n, (size, k) in enumerate(sizes)
    ]


def test_prompts_run_in_chunks_within_the_budget_of_a_step() -> None:
    engine = ToyEngine(make_manager(32, blocks=None), max_batch_tokens=5)
    for n, prompt in enumerate(prompts_of(3, 12)):
        engine.scheduler.add(make_request(n, prompt, 4))
    engine.run_all()
    sums = [sum(new_tokens(batch)) for batch in engine.batches]
    assert max(sums) == 5
    assert sums[:6] == [5] * 6  # every step is full while prompts are left
    assert [len(batch.requests) for batch in engine.batches[:3]] == [0, 0, 1]


def test_tokens_of_prompts_have_a_budget_of_their_own() -> None:
    engine = ToyEngine(make_manager(32, blocks=None), max_batch_tokens=100, max_prompt_tokens=4)
    for n, prompt in enumerate(prompts_of(2, 8)):
        engine.scheduler.add(make_request(n, prompt, 5))
    engine.run_all()
    assert [sum(new_tokens(b)) for b in engine.batches] == [4, 4, 1 + 4, 1 + 4, 2, 2, 1, 1]


def test_no_more_run_at_a_time_than_asked_for() -> None:
    engine = ToyEngine(make_manager(32, blocks=None), max_running=2)
    for n, prompt in enumerate(prompts_of(5)):
        engine.scheduler.add(make_request(n, prompt, 3))
    engine.run_all()
    assert max(len(batch.contexts) for batch in engine.batches) == 2


def test_whoever_is_held_lets_others_go_first() -> None:
    held = {1}
    engine = ToyEngine(make_manager(32, blocks=None), hold=lambda r: r.rank in held)
    for n, prompt in enumerate(prompts_of(3)):
        engine.scheduler.add(make_request(n, prompt, 4))
    engine.step()
    assert [r.rank for r in engine.batches[0].admitted] == [0, 2]
    held.clear()
    engine.step()
    assert [r.rank for r in engine.batches[1].admitted] == [1]
    engine.run_all()


def test_nobody_is_held_when_nothing_runs() -> None:
    engine = ToyEngine(make_manager(32, blocks=None), hold=lambda _: True)
    for n, prompt in enumerate(prompts_of(3)):
        engine.scheduler.add(make_request(n, prompt, 2))
    assert [r.rank for r in engine.run_all()] == [0, 1, 2]


def test_nobody_is_admitted_unless_wanted() -> None:
    engine = ToyEngine(make_manager(32, blocks=None))
    first, second = (make_request(n, p, 3) for n, p in enumerate(prompts_of(2)))
    engine.scheduler.add(first)
    engine.step()
    engine.scheduler.add(second)
    while engine.step(admit=False) is not None:
        assert engine.scheduler.waiting == [second]
    assert first.finish_reason == "length"
    engine.run_all()
    assert second.finish_reason == "length"


def test_context_is_made_when_its_request_is_tried() -> None:
    made = []

    def make() -> Any:
        made.append(1)
        return Context("late", [1, 2, 3])

    engine = ToyEngine(make_manager(32, blocks=None), max_running=1)
    first = make_request(0, [4, 5], 2)
    late = Request(make, 2, num_prompt=3, owner=0)
    engine.scheduler.add(first)
    engine.scheduler.add(late)
    engine.step()
    assert not made
    engine.run_all()
    assert made == [1]
    assert tokens_of(late) == alone([1, 2, 3], 2)


# -- memory --------------------------------------------------------------------------------------
def test_the_latest_goes_and_comes_back_with_the_same_tokens() -> None:
    engine = ToyEngine(make_manager(5, blocks=None))
    requests = [make_request(n, prompt, 8) for n, prompt in enumerate(prompts_of(2))]
    for request in requests:
        engine.scheduler.add(request)
    engine.run_all()
    assert [[r.rank for r in b.preempted] for b in engine.batches if b.preempted] == [[1]]
    assert [[r.rank for r in b.admitted] for b in engine.batches if b.admitted] == [[0, 1], [1]]
    assert engine.scheduler.num_preemptions == 1
    assert engine.scheduler.recomputed_tokens > 0
    assert [tokens_of(r) for r in requests] == [alone(p, 8) for p in prompts_of(2)]
    assert [r.cached_tokens for r in requests] == [0, 0]


def test_step_that_preempts_admits_nobody() -> None:
    engine = ToyEngine(make_manager(5, blocks=None))
    for n, prompt in enumerate(prompts_of(3)):
        engine.scheduler.add(make_request(n, prompt, 8))
    engine.run_all()
    assert any(batch.preempted for batch in engine.batches)
    assert not any(batch.preempted and batch.admitted for batch in engine.batches)


@pytest.mark.parametrize(("prompt", "limit", "steps"), [(13, 1, 1), (12, 2, 1), (12, 1, 250)])
def test_request_that_can_never_fit_is_refused(prompt: int, limit: int, steps: int) -> None:
    engine = ToyEngine(make_manager(3, blocks=None), num_steps=steps)
    with pytest.raises(CapacityError, match="holds 12 and max_seq_len is 256"):
        engine.scheduler.add(make_request(0, range(prompt), limit))
    assert len(engine.scheduler) == 0
    assert engine.step() is None


def test_request_as_large_as_the_pool_is_served() -> None:
    engine = ToyEngine(make_manager(3, blocks=None))
    engine.scheduler.add(make_request(0, range(8), 5))
    (request,) = engine.run_all()
    assert tokens_of(request) == alone(range(8), 5)


def test_pages_that_others_hold_are_an_error_only_when_nothing_runs() -> None:
    manager = make_manager(4, blocks=None)
    other = Context("other", range(12))
    manager.claim("other")
    manager.reserve(other)
    engine = ToyEngine(manager)
    request = make_request(0, range(6), 3)
    engine.scheduler.add(request)
    with pytest.raises(InsufficientBlocksError, match="6 tokens do not fit into the 1 free pages"):
        engine.step()
    manager.release("other")
    assert engine.run_all() == [request]


def test_prompt_runs_step_by_step_where_all_that_ran_had_to_go() -> None:
    manager = make_manager(6, blocks=None)
    engine = ToyEngine(manager, num_steps=3)
    request = make_request(0, range(6), 9)
    engine.scheduler.add(request)
    for _ in range(3):
        engine.step()
    other = Context("other", range(50, 62))
    manager.claim("other")
    assert manager.reserve(other)
    with pytest.raises(InsufficientBlocksError, match="13 tokens do not fit"):
        engine.step()
    manager.release("other")
    engine.run_all()
    assert tokens_of(request) == alone(range(6), 9)
    assert [batch.num_steps for batch in engine.batches] == [1, 3, 3, 1, 3]


def test_rows_that_others_have_claimed_make_requests_wait() -> None:
    manager = make_manager(32, blocks=None, max_batch_size=2)
    manager.claim("other")
    engine = ToyEngine(manager)
    for n, prompt in enumerate(prompts_of(2)):
        engine.scheduler.add(make_request(n, prompt, 3, copies=2))
    while engine.step() is not None:
        assert engine.scheduler.num_running <= 1
    manager.release("other")
    assert manager.num_free_blocks == 32


def test_pages_move_through_the_host_tier() -> None:
    prompts = prompts_of(6, 9)
    engine = ToyEngine(make_manager(8, host=True, max_batch_size=2))
    for n, prompt in enumerate(prompts + prompts):
        engine.scheduler.add(make_request(n, prompt, 4))
    ended = engine.run_all()
    assert sorted(map(tokens_of, ended)) == sorted(alone(p, 4) for p in prompts * 2)
    assert engine.manager.metrics.h2d_blocks_copied > 0


# -- ends of requests ----------------------------------------------------------------------------
def test_stop_tokens_end_a_sequence_at_once() -> None:
    text = alone([1, 2, 3], 8)
    engine = ToyEngine(make_manager(32, blocks=None))
    request = make_request(0, [1, 2, 3], 8, stop_tokens={text[5]})
    engine.scheduler.add(request)
    engine.run_all()
    assert request.finish_reason == "stop"
    assert tokens_of(request) == text[: text.index(text[5], 3) + 1]


def test_cancelled_requests_hold_nothing() -> None:
    engine = ToyEngine(make_manager(32, blocks=None), max_running=2)
    requests = [make_request(n, p, 5, copies=2) for n, p in enumerate(prompts_of(3))]
    for request in requests:
        engine.scheduler.add(request)
    batch = engine.scheduler.next_batch()
    assert batch is not None
    engine.scheduler.cancel(requests[0])
    with pytest.raises(ValueError, match="handed out last"):
        engine.scheduler.update(batch, engine.run(batch))
    engine.scheduler.cancel(requests[1].siblings[0])
    engine.scheduler.cancel(requests[2])
    engine.scheduler.cancel(requests[2])
    assert len(engine.scheduler) == 1
    assert engine.run_all() == [requests[1]]
    reasons = [r.finish_reason for leader in requests for r in (leader, *leader.siblings)]
    assert reasons.count("cancelled") == 4


def test_close_cancels_all() -> None:
    engine = ToyEngine(make_manager(32, blocks=None), max_running=2)
    for n, prompt in enumerate(prompts_of(4)):
        engine.scheduler.add(make_request(n, prompt, 5, copies=2))
    engine.step()
    engine.scheduler.close()
    assert engine.run_all() == []
    with pytest.raises(RequestNotFoundError):
        engine.manager.release((0, 0))


# -- forks ---------------------------------------------------------------------------------------
@pytest.mark.parametrize("max_running", [1, 2, 5])
@pytest.mark.parametrize("num_pages", [5, 32])
def test_siblings_go_on_from_one_prompt(max_running: int, num_pages: int) -> None:
    engine = ToyEngine(make_manager(num_pages, blocks=None), max_running=max_running)
    prompt = list(range(7))
    leader = make_request(0, prompt, 6, copies=5)
    family = [leader, *leader.siblings]
    engine.scheduler.add(leader)
    engine.scheduler.add(make_request(1, prompt, 6))
    engine.run_all()
    assert [tokens_of(r) for r in family] == [alone(prompt, 6, salt) for salt in range(5)]
    first = next(batch for batch in engine.batches if batch.requests)
    assert first.requests[:5] == family
    assert first.rows[:5].tolist() == [0] * 5
    if max_running == 5 and num_pages == 32:
        assert [r.cached_tokens for r in family] == [0, 7, 7, 7, 7]


def test_siblings_may_end_with_their_first_token() -> None:
    stops = {alone([1, 2, 3], 1, salt)[-1] for salt in (0, 2)}
    engine = ToyEngine(make_manager(32, blocks=None))
    leader = make_request(0, [1, 2, 3], 5, copies=4, stop_tokens=stops)
    family = [leader, *leader.siblings]
    engine.scheduler.add(leader)
    engine.run_all()
    assert [tokens_of(r) for r in family] == [alone([1, 2, 3], 5, n, stops) for n in range(4)]
    assert [r.finish_reason for r in family][::2] == ["stop", "stop"]


# -- arguments -----------------------------------------------------------------------------------
def test_a_step_is_booked_once_with_a_token_per_request() -> None:
    engine = ToyEngine(make_manager(32, blocks=None))
    request = make_request(0, [1, 2, 3], 3)
    engine.scheduler.add(request)
    batch = engine.scheduler.next_batch()
    assert batch is not None
    for wrong in ([], [1, 2], [[1], [2]]):
        with pytest.raises(ValueError, match="1 steps of 1 requests"):
            engine.scheduler.update(batch, wrong)
    assert request.left == 3
    engine.scheduler.update(batch, [1])
    with pytest.raises(ValueError, match="handed out last"):
        engine.scheduler.update(batch, [1])


def test_a_request_is_served_once() -> None:
    engine = ToyEngine(make_manager(32, blocks=None))
    request = make_request(0, [1, 2, 3], 3)
    engine.scheduler.add(request)
    with pytest.raises(ValueError, match="added before"):
        engine.scheduler.add(request)
    engine.run_all()
    with pytest.raises(ValueError, match="added before"):
        engine.scheduler.add(request)


@pytest.mark.parametrize(
    "name", ["max_running", "max_batch_tokens", "max_prompt_tokens", "num_steps"]
)
def test_numbers_are_at_least_one(name: str) -> None:
    with pytest.raises(ValueError, match=name):
        ToyEngine(make_manager(32, blocks=None), **{name: 0})


def test_copies_of_a_batch_that_was_not_booked_come_with_the_next_one() -> None:
    scheduler = Scheduler(make_manager(32, blocks=None))
    first, second = make_request(0, range(6), 5), make_request(1, range(6), 5)
    first.siblings = [second]
    scheduler.add(first)
    batch = scheduler.next_batch()
    assert batch is not None
    scheduler.update(batch, [1, 2])
    failed = scheduler.next_batch()
    again = scheduler.next_batch()
    assert failed is not None
    assert again is not None
    assert len(failed.copies) == 1  # copies the page in which parent and child part
    assert again.copies.tolist() == failed.copies.tolist()
    scheduler.update(again, [1, 2])
    booked = scheduler.next_batch()
    assert booked is not None
    assert len(booked.copies) == 0
