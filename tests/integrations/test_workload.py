# SPDX-License-Identifier: Apache-2.0
"""The built-in chat workload: equal for equal seeds, and shaped as documented."""

from __future__ import annotations

import numpy as np

from kvcore.apps.replay.chat import ChatWorkload
from kvcore.replay import ChatSettings, chat_workload

SMALL = ChatSettings(conversations=200, system_prompts=4, system_tokens=(20, 60))


def small(seed: int = 0, limit: int | None = None) -> ChatWorkload:
    return chat_workload(seed=seed, limit=limit, settings=SMALL)


def first_turns(workload: ChatWorkload) -> np.ndarray:
    follows = np.zeros(len(workload), bool)
    follows[workload.next_turns[workload.next_turns >= 0]] = True
    return np.flatnonzero(~follows)


def test_same_seed_same_requests_and_tokens() -> None:
    one, two = small(3), small(3)
    assert (one.arrivals == two.arrivals).all()
    assert (one.next_turns == two.next_turns).all()
    for index in range(len(one)):
        assert (one.prompt(index) == two.prompt(index)).all()
        assert (one.output(index) == two.output(index)).all()


def test_other_seed_other_requests() -> None:
    one, two = small(3), small(4)
    assert one.prompt(0).tolist() != two.prompt(0).tolist()
    assert one.arrivals[0] != two.arrivals[0]


def test_limit_keeps_the_first_requests() -> None:
    whole, part = small(), small(limit=50)
    assert len(part) == 50
    assert (part.arrivals == whole.arrivals[:50]).all()
    assert (part.prompt(49) == whole.prompt(49)).all()
    kept = np.where(whole.next_turns[:50] < 50, whole.next_turns[:50], -1)
    assert (part.next_turns == kept).all()


def test_next_turn_repeats_prompt_and_answer_and_goes_on() -> None:
    workload = small()
    followed = np.flatnonzero(workload.next_turns >= 0)
    assert len(followed) > 100
    for index in followed.tolist():
        turn = int(workload.next_turns[index])
        said = [*workload.prompt(index).tolist(), *workload.output(index).tolist()]
        prompt = workload.prompt(turn).tolist()
        assert prompt[: len(said)] == said
        assert len(prompt) > len(said)
        assert workload.arrivals[turn] > workload.arrivals[index]
        assert workload.think_times[turn] > 0


def test_conversations_share_only_their_system_prompt() -> None:
    workload = small()
    starts = [workload.prompt(index)[:20].tobytes() for index in first_turns(workload)]
    assert len(set(starts)) == SMALL.system_prompts
    systems = {len(system) for system in workload.systems}
    assert all(20 <= length <= 60 for length in systems)
    seen = set()
    for index in first_turns(workload).tolist():
        system = len(workload.systems[workload.request_systems[index]])
        text = workload.output_tokens[workload.text_starts[index] :][:32]
        assert workload.prompt_lengths[index] > system
        seen.add(text.tobytes())
    assert len(seen) == SMALL.conversations


def test_requests_are_ordered_and_bounded() -> None:
    workload = small()
    assert (np.diff(workload.arrivals) >= 0).all()
    assert workload.output_lengths.min() >= 1
    assert workload.output_lengths.max() <= SMALL.max_output
    assert workload.output_tokens.min() >= 0
    assert workload.output_tokens.max() < SMALL.vocabulary
    assert workload.output_tokens.dtype == np.int32


def test_arrivals_are_poisson_and_popular_prompts_lead() -> None:
    settings = ChatSettings(conversations=5000, conversations_per_second=2.0, system_prompts=3)
    workload = chat_workload(seed=1, settings=settings)
    begins = first_turns(workload)
    gaps = np.diff(np.sort(workload.arrivals[begins]))
    assert abs(gaps.mean() - 0.5) < 0.03
    assert abs(gaps.std() - 0.5) < 0.05
    chosen = np.bincount(np.array(workload.request_systems)[begins]) / len(begins)
    assert np.allclose(chosen, [6 / 11, 3 / 11, 2 / 11], atol=0.03)
    assert abs(len(workload) / 5000 - settings.mean_turns) < 0.3
