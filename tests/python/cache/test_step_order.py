# SPDX-License-Identifier: Apache-2.0
"""Runtime checks: a forgotten ``update`` or ``step`` is an error; legal orders are accepted."""

from __future__ import annotations

from typing import Any

import pytest

from foreign_context import Context
from kvcore import KVCacheParams, PagedKVCacheManager, TextGenerationContext
from toy_engine import make_manager

KINDS = pytest.mark.parametrize("kind", [TextGenerationContext, Context])


def scene(kind: Any, count: int = 10, **options: Any) -> tuple[Any, Any]:
    manager = make_manager(64, **options)
    manager.claim("a")
    return manager, kind("a", list(range(count)))


def run(manager: Any, context: Any, token: int = 7) -> None:
    manager.fetch([context])
    context.update(token)
    manager.step([context])


# -- forgotten calls -----------------------------------------------------------------------------
@KINDS
@pytest.mark.parametrize("runs_before", [0, 1, 3])
def test_step_without_update_is_an_error_that_changes_nothing(kind: Any, runs_before: int) -> None:
    manager, context = scene(kind)
    for _ in range(runs_before):
        run(manager, context)
    start = context.start_idx
    manager.fetch([context])
    with pytest.raises(ValueError, match=rf"'a' has start_idx {start}, as when it was fetched"):
        manager.step([context])
    assert manager.match_prefix(list(range(10))) == (8 if runs_before else 0)
    context.update(7)
    manager.step([context])
    assert context.start_idx > start
    manager.check_integrity()


@KINDS
def test_update_without_step_is_an_error_of_the_third_fetch(kind: Any) -> None:
    manager, context = scene(kind)
    for _ in range(2):
        manager.fetch([context])
        context.update(7)
    with pytest.raises(ValueError, match="'a' has start_idx 11 and was fetched 2 times without a"):
        manager.fetch([context])
    manager.step([context])
    run(manager, context)


def test_only_the_row_in_question_is_named() -> None:
    manager, first = scene(TextGenerationContext)
    second = TextGenerationContext("b", [1, 2])
    manager.claim("b")
    manager.fetch([first, second])
    first.update(7)
    with pytest.raises(ValueError, match="'b' has start_idx 0"):
        manager.step([first, second])
    manager.step([first])


# -- legal orders --------------------------------------------------------------------------------
@KINDS
def test_a_run_that_failed_is_fetched_again(kind: Any) -> None:
    manager, context = scene(kind)
    for _ in range(4):
        manager.fetch([context])
    run(manager, context)
    for _ in range(4):
        manager.fetch([context])
    run(manager, context)


@KINDS
def test_chunks_and_several_steps_of_one_fetch(kind: Any) -> None:
    manager, context = scene(kind, 12)
    context.active_idx = 4
    run(manager, context)
    context.active_idx = 8
    run(manager, context)
    manager.fetch([context], num_steps=4)
    for token in range(4):
        context.update(token)
    manager.step([context])
    run(manager, context)


@KINDS
def test_steps_may_come_one_fetch_late(kind: Any) -> None:
    manager, context = scene(kind)
    manager.fetch([context])
    for token in range(5):
        context.update(token)
        manager.fetch([context])
        manager.step([context])


@KINDS
def test_a_second_step_and_one_without_a_fetch(kind: Any) -> None:
    manager, context = scene(kind)
    manager.step([context])
    run(manager, context)
    manager.step([context])
    manager.step([context])


def test_drafts_that_are_all_refused() -> None:
    manager, context = scene(TextGenerationContext)
    run(manager, context)
    for _ in range(3):
        context.extend([1, 2, 3])
        end = context.start_idx + 1
        manager.fetch([context])
        context.rewind(end)
        context.update(9)
        manager.step([context])


def test_the_last_token_runs_again() -> None:
    manager, context = scene(TextGenerationContext)
    run(manager, context)
    for token in range(4):
        context.rewind(context.end_idx - token % 2)
        run(manager, context, token)


def test_forks_and_claims_of_the_same_name_begin_afresh() -> None:
    manager, context = scene(TextGenerationContext)
    run(manager, context)
    child = TextGenerationContext("c", context.tokens)
    manager.fork("a", child)
    manager.step([context, child])
    run(manager, child)
    manager.fetch([context])
    manager.release("a")
    manager.claim("a")
    again = TextGenerationContext("a", list(range(10)))
    manager.step([again])
    run(manager, again)


def test_runs_of_an_earlier_request_do_not_count() -> None:
    """The second request has the slot of the first, and the position of its run."""
    manager, context = scene(TextGenerationContext)
    manager.fetch([context])
    manager.release("a")
    manager.claim("b")
    manager.step([TextGenerationContext("b", context.tokens)])


def test_without_a_cache_a_step_may_be_left_out() -> None:
    manager, context = scene(TextGenerationContext, caching=False)
    for token in range(5):
        manager.fetch([context])
        context.update(token)


def test_without_checks_nothing_is_looked_at() -> None:
    params = KVCacheParams("float32", 1, 8, 1, page_size=4, enable_prefix_caching=True)
    manager = PagedKVCacheManager(params, max_batch_size=2, max_seq_len=64, num_pages=8)
    manager.claim("a")
    context = TextGenerationContext("a", [1, 2, 3])
    manager.fetch([context])
    manager.step([context])
    for token in range(5):
        manager.fetch([context])
        context.update(token)
