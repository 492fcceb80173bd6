# SPDX-License-Identifier: Apache-2.0
"""The hit rate counts prompt tokens; generated tokens and preempted requests count separately."""

from __future__ import annotations

import weakref
from typing import Any

import pytest

from builders import in_groups
from foreign_context import Context
from kvcore import (
    CapacityError,
    KVCacheParams,
    PagedKVCacheManager,
    TextGenerationContext,
    update_batch,
)
from kvcore.groups import FullAttention, SlidingWindow
from kvcore.scheduler import Request, Scheduler

PROMPT = list(range(100, 116))


def make(num_pages: int = 200, **options: Any) -> PagedKVCacheManager:
    groups = options.pop("groups", None)
    params = KVCacheParams(
        "float32", 1, 8, 2, page_size=4, enable_prefix_caching=True, groups=groups
    )
    return PagedKVCacheManager(
        params,
        8,
        512,
        num_pages=num_pages,
        blocks=None,
        enable_runtime_checks=True,
        **in_groups(options),
    )


def decode(manager: PagedKVCacheManager, context: Any, count: int) -> None:
    for i in range(count):
        manager.fetch([context])
        manager.take_copies()
        context.update(1000 + i)
        manager.step([context])


def tokens_of(manager: PagedKVCacheManager) -> tuple[int, int, int]:
    found = manager.metrics
    assert found.prompt_tokens == found.input_tokens + found.cache_tokens
    return found.input_tokens, found.cache_tokens, found.generated_tokens


@pytest.mark.parametrize("kind", [TextGenerationContext, Context])
def test_generated_tokens_are_no_prompt_tokens(kind: Any) -> None:
    manager = make()
    for name, wanted in (("cold", (16, 0, 100)), ("again", (1, 15, 100))):
        manager.reset_metrics()
        manager.claim(name)
        decode(manager, kind(name, PROMPT), 100)
        manager.release(name)
        assert tokens_of(manager) == wanted
    assert manager.metrics.cache_hit_rate == 15 / 16


@pytest.mark.parametrize("num_steps", [1, 4])
def test_a_token_that_is_generated_counts_once_it_was_stepped(num_steps: int) -> None:
    manager = make()
    context = TextGenerationContext("r", PROMPT)
    manager.claim("r")
    counts = []
    for _ in range(3):
        assert manager.maybe_reserve(context, num_steps)
        manager.fetch([context], num_steps)
        for _ in range(num_steps):
            context.update(7)
        counts.append(tokens_of(manager)[2])
        manager.step([context])
        manager.step([context])  # no more tokens were generated
    assert counts == [0, num_steps, 2 * num_steps]
    assert tokens_of(manager) == (16, 0, 3 * num_steps)


def test_chunks_of_a_prompt_generate_nothing() -> None:
    manager = make()
    context = TextGenerationContext("r", PROMPT, active_idx=6)
    manager.claim("r")
    decode(manager, context, 1)
    assert tokens_of(manager) == (6, 0, 0)
    decode(manager, context, 1)
    assert tokens_of(manager) == (16, 0, 1)


def test_draft_tokens_that_stay_are_generated() -> None:
    manager = make()
    context = TextGenerationContext("r", PROMPT)
    manager.claim("r")
    decode(manager, context, 1)
    context.extend([5, 6, 7])
    manager.fetch([context])
    manager.truncate("r", 18)  # one draft is right
    context.rewind(18)
    context.update(8)
    manager.step([context])
    assert tokens_of(manager) == (16, 0, 3)


def test_forks_of_a_prompt_generate_and_longer_ones_have_prompts() -> None:
    manager = make()
    parent = TextGenerationContext("p", PROMPT)
    manager.claim("p")
    decode(manager, parent, 1)
    before = tokens_of(manager)
    assert before == (16, 0, 1)
    sample = TextGenerationContext("sample", [*PROMPT, 7])
    manager.fork("p", sample)
    assert tokens_of(manager) == before
    decode(manager, sample, 2)
    assert tokens_of(manager) == (16, 0, 4)
    question = TextGenerationContext("question", [*PROMPT, 7, 8, 9])
    manager.fork("p", question)
    decode(manager, question, 1)
    assert tokens_of(manager) == (19, 0, 5)


def test_a_preempted_request_counts_its_prompt_once() -> None:
    manager = make()
    context = TextGenerationContext("r", PROMPT)
    manager.claim("r")
    decode(manager, context, 5)
    manager.release("r")
    assert tokens_of(manager) == (16, 0, 5)
    manager.claim("r")
    decode(manager, context, 3)
    assert tokens_of(manager) == (16, 0, 8)
    found = manager.metrics
    assert (found.resumed_tokens, found.recomputed_tokens) == (20, 0)
    assert found.cache_hit_rate == 0.0
    manager.release("r")
    manager.reset_prefix_cache()
    manager.claim("r")
    decode(manager, context, 1)
    assert tokens_of(manager) == (16, 0, 9)
    assert (manager.metrics.resumed_tokens, manager.metrics.recomputed_tokens) == (20, 23)


@pytest.mark.parametrize("touched", [False, True])
def test_a_request_that_is_cut_while_it_is_preempted_counts_its_prompt_once(touched: bool) -> None:
    manager = make()
    context = TextGenerationContext("r", PROMPT)
    manager.claim("r")
    decode(manager, context, 5)
    manager.release("r")
    manager.claim("r")
    if touched:  # the first call with both the claim and the context counts
        assert manager.maybe_reserve(context)
        manager.release("r")
        manager.claim("r")
    before = tokens_of(manager)
    context.rewind(16)
    decode(manager, context, 1)
    assert tokens_of(manager)[:2] == before[:2] == (16, 0)


def test_a_request_that_is_preempted_in_its_prompt_goes_on_counting_it() -> None:
    manager = make()
    context = TextGenerationContext("r", PROMPT, active_idx=9)
    manager.claim("r")
    decode(manager, context, 1)
    manager.release("r")
    assert tokens_of(manager) == (9, 0, 0)
    other = TextGenerationContext("other", PROMPT)
    manager.claim("other")
    decode(manager, other, 1)
    assert tokens_of(manager) == (9 + 8, 8, 1)
    manager.release("other")
    manager.claim("r")  # the other request has computed more of its tokens
    decode(manager, context, 1)
    assert tokens_of(manager) == (9 + 8 + 1, 8 + 6, 2)
    assert manager.metrics.resumed_tokens == 9
    assert manager.metrics.recomputed_tokens == 0


def test_a_foreign_context_is_known_by_its_start() -> None:
    manager = make()
    context = Context("r", PROMPT)
    manager.claim("r")
    decode(manager, context, 5)
    manager.release("r")
    manager.claim("r")
    decode(manager, context, 1)
    found = manager.metrics
    assert (found.resumed_tokens, found.cache_tokens, found.generated_tokens) == (20, 0, 6)
    assert found.input_tokens - 16 in (0, 1)  # it does not mark its last token as generated


class Name:
    """A request id whose Python code compares it."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __hash__(self) -> int:
        return 7

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Name) and self.name == other.name


def ran(manager: PagedKVCacheManager, name: Any, kind: Any, count: int = 5) -> Any:
    """Run a prompt and `count` tokens, and release the request."""
    context = kind(name, PROMPT)
    manager.claim(name)
    decode(manager, context, count)
    manager.release(name)
    assert tokens_of(manager) == (16, 0, count)
    return context


@pytest.mark.parametrize("name", ["r", 7, ("r", 1), Name("r")])
@pytest.mark.parametrize("kind", [TextGenerationContext, Context])
def test_a_request_goes_on_with_a_new_context(kind: Any, name: Any) -> None:
    manager = make()
    tokens = list(ran(manager, name, kind).tokens)
    assert len(tokens) == 21
    same = Name("r") if isinstance(name, Name) else name
    manager.claim(same)
    decode(manager, kind(same, tokens), 3)
    assert tokens_of(manager) == (16, 0, 8)
    assert manager.metrics.resumed_tokens == 20
    manager.release(same)
    manager.claim(same)  # the same prompt again, without the generated tokens, is a new request
    decode(manager, kind(same, PROMPT), 1)
    assert tokens_of(manager) == (16 + 1, 15, 9)
    assert manager.metrics.resumed_tokens == 20


def test_a_foreign_context_that_is_rewound_goes_on() -> None:
    manager = make()
    context = ran(manager, "r", Context)
    context.start_idx = 0
    manager.claim("r")
    decode(manager, context, 1)
    assert tokens_of(manager) == (16, 0, 6)
    assert manager.metrics.resumed_tokens == 20


def test_pages_that_a_request_lost_are_computed_again_with_a_new_context() -> None:
    manager = make()
    tokens = list(ran(manager, "r", TextGenerationContext).tokens)
    manager.reset_prefix_cache()
    manager.claim("r")
    decode(manager, TextGenerationContext("r", tokens), 1)
    assert tokens_of(manager) == (16, 0, 6)
    assert (manager.metrics.resumed_tokens, manager.metrics.recomputed_tokens) == (0, 20)


@pytest.mark.parametrize("kind", [TextGenerationContext, Context])
def test_the_next_turn_of_a_session_is_a_new_request(kind: Any) -> None:
    manager = make()
    tokens = [*ran(manager, "r", kind).tokens, 50, 51]
    manager.claim("r")
    decode(manager, kind("r", tokens), 1)
    assert tokens_of(manager) == (16 + 3, 20, 6)
    assert manager.metrics.resumed_tokens == 0


@pytest.mark.parametrize("changed", [0, 1, 12, 15])
def test_another_prompt_with_the_same_id_is_a_new_request(changed: int) -> None:
    manager = make()
    ran(manager, "r", TextGenerationContext)
    prompt = [*PROMPT]
    prompt[changed] = 5
    manager.claim("r")
    decode(manager, TextGenerationContext("r", prompt), 1)
    assert sum(tokens_of(manager)[:2]) == 32
    manager.release("r")
    manager.claim("r")  # the manager compares with the last claim
    decode(manager, TextGenerationContext("r", PROMPT), 1)
    assert sum(tokens_of(manager)[:2]) == 48


def test_a_claim_that_is_not_used_passes_the_counts_on() -> None:
    manager = make()
    tokens = list(ran(manager, "r", TextGenerationContext).tokens)
    manager.claim("r")
    manager.release("r")
    for i in range(8):
        manager.claim(i)
    with pytest.raises(CapacityError):
        manager.claim("r")
    manager.release(0)
    manager.claim("r")
    decode(manager, TextGenerationContext("r", tokens), 1)
    assert tokens_of(manager) == (16, 0, 6)


def test_another_id_may_take_the_place_of_an_ended_claim() -> None:
    manager = make()
    tokens = list(ran(manager, 7, TextGenerationContext).tokens)
    for other in (7 + 256, 7 + 128):  # hashes of the same place, and of another place
        manager.claim(other)
        assert manager.maybe_reserve(TextGenerationContext(other, [1, 2, 3]))
        manager.release(other)
    manager.claim(7)
    decode(manager, TextGenerationContext(7, tokens), 1)
    assert tokens_of(manager)[:2] == (16 + 3 + 3 + 1, 20)


def test_the_manager_keeps_no_id_of_an_ended_claim() -> None:
    manager = make()
    name = Name("gone")
    tokens = list(ran(manager, name, TextGenerationContext).tokens)
    freed = weakref.ref(name)
    del name
    assert freed() is None
    manager.claim(Name("gone"))
    decode(manager, TextGenerationContext(Name("gone"), tokens), 1)
    assert tokens_of(manager)[:2] == (16, 0)


@pytest.mark.parametrize("groups", [None, [FullAttention([0]), SlidingWindow([1], 8)]])
def test_a_scheduler_whose_requests_are_preempted_counts_prompts_once(groups: Any) -> None:
    manager = make(24, groups=groups)
    scheduler = Scheduler(manager, max_batch_tokens=16)
    requests = [
        Request(TextGenerationContext(n, [100 * n + i for i in range(12)]), 20) for n in range(4)
    ]
    for request in requests:
        scheduler.add(request)
    while batch := scheduler.next_batch():
        scheduler.update(batch, [7] * len(batch.requests))
    assert scheduler.num_preemptions > 0
    assert tokens_of(manager) == (4 * 12, 0, 4 * 20)
    assert manager.metrics.recomputed_tokens == scheduler.recomputed_tokens


def test_tenants_count_the_same() -> None:
    manager = make(quotas={"a": (0, None), "b": (0, None)})
    contexts = [TextGenerationContext(name, PROMPT, tenant=name) for name in "ab"]
    for context in contexts:
        manager.claim(context.request_id)
        decode(manager, context, 3)
    manager.fetch(contexts)
    update_batch(contexts, [1, 2])
    manager.step(contexts)
    found = {
        name: (each.input_tokens, each.cache_tokens, each.generated_tokens)
        for name, each in manager.tenant_metrics.items()
    }
    assert found == {"a": (16, 0, 4), "b": (1, 15, 4)}
    assert tokens_of(manager) == (17, 15, 8)
