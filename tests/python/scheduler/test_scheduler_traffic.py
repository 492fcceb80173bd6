# SPDX-License-Identifier: Apache-2.0
"""With any other requests, a request generates the tokens that it generates by itself."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from foreign_context import Context
from toy_engine import ToyEngine, alone, make_manager, make_request, tokens_of

ANY_ORDER_OF_CALLS = True  # no engine makes random calls

requests_of = st.lists(
    st.tuples(
        st.lists(st.integers(0, 2), min_size=1, max_size=9),  # prompt, often shared
        st.integers(1, 6),  # tokens
        st.integers(1, 3),  # sequences
        st.integers(0, 12),  # steps before it arrives
    ),
    min_size=1,
    max_size=8,
)


@given(
    wanted=requests_of,
    page_size=st.integers(1, 4),
    spare=st.integers(0, 6),
    replicas=st.sampled_from([1, 1, 2]),
    caching=st.booleans(),
    has_pool=st.booleans(),
    is_foreign=st.booleans(),
    stop=st.sets(st.integers(0, 22), max_size=2),
    options=st.fixed_dictionaries(
        {
            "max_running": st.integers(1, 6),
            "max_batch_tokens": st.integers(1, 12),
            "max_prompt_tokens": st.integers(1, 12),
            "num_steps": st.integers(1, 3),
        }
    ),
)
def test_random_traffic_generates_what_each_request_does_alone(
    wanted: list[tuple[list[int], int, int, int]],
    page_size: int,
    spare: int,
    replicas: int,
    caching: bool,
    has_pool: bool,
    is_foreign: bool,
    stop: set[int],
    options: dict[str, int],
) -> None:
    least = max(-(-(len(prompt) + limit - 1) // page_size) for prompt, limit, _, _ in wanted)
    blocks = "allocate" if has_pool else None
    manager = make_manager(
        least + spare, page_size, replicas=replicas, caching=caching, blocks=blocks
    )
    engine = ToyEngine(manager, **options)
    coming = sorted(enumerate(wanted), key=lambda each: each[1][3])
    more: dict[str, Any] = {"make_context": Context} if is_foreign else {}
    families = []
    for clock in range(10_000):
        while coming and coming[0][1][3] <= clock:
            name, (prompt, limit, copies, _) = coming.pop(0)
            leader = make_request(name, prompt, limit, copies=copies, stop_tokens=stop, **more)
            families.append((prompt, limit, [leader, *leader.siblings]))
            engine.scheduler.add(leader)
        if engine.step() is None and not coming:
            break
        if engine.batches:
            check_step(engine, options, replicas == 1 and all(c == 1 for _, _, c, _ in wanted))
    assert engine.run_all() == []
    for prompt, limit, family in families:
        for request in family:
            assert tokens_of(request) == alone(prompt, limit, request.owner, stop)
            assert 0 <= request.cached_tokens <= len(prompt)


def check_step(engine: ToyEngine, options: dict[str, int], is_ordered: bool) -> None:
    scheduler, batch = engine.scheduler, engine.batches[-1]
    assert len(batch.contexts) <= options["max_running"]
    counts = sum(len(inputs.cache_lengths) for inputs in batch.inputs)
    assert len(batch.contexts) == counts
    if batch.num_steps == 1:
        assert batch.inputs[0].max_lengths[0, 0] <= options["max_batch_tokens"]
    if is_ordered and scheduler.waiting and scheduler.num_running:
        running = max(r.rank for r in scheduler.prefills + scheduler.decodes)
        assert running < min(r.rank for r in scheduler.waiting)
