# SPDX-License-Identifier: Apache-2.0
"""Chats served through the cache equal chats generated without a cache."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from kvcore import CapacityError, ops
from kvcore.apps.demo import (
    Chat,
    ChatServer,
    ChatSettings,
    EngineSettings,
    LanguageModel,
    Served,
    Shape,
    Transformer,
    check,
    make_chats,
)
from kvcore.apps.demo.attention import plain_attention
from kvcore.apps.demo.blas import one_blas_thread

MODEL = Transformer(
    Shape(num_layers=2, hidden=32, ffn=48, vocabulary=64, n_q_heads=4, n_kv_heads=2, head_dim=8)
)
CHATS = make_chats(
    ChatSettings(
        chats=9,
        turns=3,
        system_prompts=2,
        system_tokens=(20, 45),
        message_tokens=(3, 9),
        answer_tokens=(4, 12),
        gap_steps=(0, 2),
        pause_steps=(0, 3),
        vocabulary=64,
    )
)
ENGINE = EngineSettings(pages=120, page_size=4, max_running=5, step_tokens=40)


def serve(
    engine: EngineSettings = ENGINE, model: LanguageModel = MODEL, chats: Sequence[Chat] = CHATS
) -> Served:
    return ChatServer(model, chats, engine).run()


def said(served: Served) -> list[list[int]]:
    return [each.tokens.tolist() for each in served.conversations]


def without_cache(chat: Chat) -> list[int]:
    """Generate token by token, each time from the whole sequence."""
    tokens = chat.system
    for message, length in zip(chat.messages, chat.answer_lengths, strict=True):
        tokens = np.concatenate((tokens, message))
        for _ in range(length):
            places = np.arange(len(tokens))
            logits = MODEL.forward(tokens, places, plain_attention, places[-1:])
            tokens = np.append(tokens, logits.argmax().astype(np.int32))
    return [int(token) for token in tokens]


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    with one_blas_thread():
        return [without_cache(chat) for chat in CHATS]


# -- the generated tokens ------------------------------------------------------------------------
@pytest.mark.parametrize(
    "change",
    [
        {},
        {"prefix_caching": False},
        {"page_size": 1, "pages": 480},
        {"page_size": 3, "pages": 160},
        {"page_size": 48, "pages": 12},
        {"step_tokens": 5},  # prompts in chunks of a few tokens
        {"step_tokens": 1000},
        {"max_running": 1},
        {"max_running": 9, "step_tokens": 100},
        {"threads": 2},
        {"pages": 40},  # evicts and preempts
        {"pages": 40, "prefix_caching": False},
    ],
    ids=str,
)
def test_tokens_are_those_without_a_cache(
    change: dict[str, Any], expected: list[list[int]]
) -> None:
    served = serve(dataclasses.replace(ENGINE, **change))
    assert said(served) == expected
    assert served.leaked_pages == 0


def test_answers_are_not_degenerate() -> None:
    served = serve()
    answers = [each.tokens[each.places] for each in served.conversations]
    assert len(set(np.concatenate(answers).tolist())) > 20


def test_small_pool_evicts_and_preempts() -> None:
    served = serve(dataclasses.replace(ENGINE, pages=40))
    assert served.preemptions > 0
    assert served.metrics.evicted_pages > 0
    assert served.metrics.peak_used_pages == 40
    assert served.recomputed_tokens > 0


def test_same_settings_do_the_same() -> None:
    engine = dataclasses.replace(ENGINE, pages=40)
    one, two = serve(engine), serve(engine)
    for name in ("steps", "preemptions", "cached_tokens", "metrics", "peak_running"):
        assert getattr(one, name) == getattr(two, name)


# -- counts --------------------------------------------------------------------------------------
def test_hits_are_those_of_the_manager() -> None:
    served = serve()
    assert served.preemptions == 0
    assert served.cached_tokens == served.metrics.cache_tokens > 0
    assert served.prompt_tokens == served.metrics.prompt_tokens
    assert served.generated_tokens == served.metrics.generated_tokens
    assert served.cached_tokens / served.prompt_tokens == served.metrics.cache_hit_rate


def test_whole_past_of_a_chat_is_cached() -> None:
    (chat,) = CHATS[:1]
    served = serve(chats=[chat])
    turns = zip(chat.messages, chat.answer_lengths, strict=True)
    lengths = np.cumsum([len(chat.system), *(len(text) + n for text, n in turns)])
    # In whole pages, and without the last sampled token: its K and V were never written.
    assert served.cached_tokens == sum((lengths[1:-1] - 1) // 4 * 4)


def test_counts_are_those_of_the_chats() -> None:
    served = serve()
    assert served.generated_tokens == sum(sum(chat.answer_lengths) for chat in CHATS)
    assert len(served.first_token_seconds) == sum(len(chat.messages) for chat in CHATS)
    assert [len(c.tokens) for c in served.conversations] == [chat.num_tokens for chat in CHATS]
    assert served.peak_running == ENGINE.max_running
    assert 0 < served.manager_seconds < served.seconds
    assert serve(dataclasses.replace(ENGINE, prefix_caching=False)).cached_tokens == 0


def test_watcher_sees_every_step() -> None:
    seen: list[tuple[int, int]] = []
    server = ChatServer(MODEL, CHATS, ENGINE)
    served = server.run(lambda each: seen.append((each.num_answered, each.num_running)))
    assert len(seen) == served.steps
    assert seen[-1] == (server.num_turns, 0)
    assert max(running for _, running in seen) == served.peak_running
    assert server.hit_rate == served.cached_tokens / served.prompt_tokens
    assert server.tokens_per_second > 0


def test_pool_must_hold_the_longest_chat() -> None:
    longest = max(chat.num_tokens for chat in CHATS)
    pages = -(-longest // 4)
    assert ChatServer(MODEL, CHATS, dataclasses.replace(ENGINE, pages=pages)).run().preemptions
    with pytest.raises(CapacityError, match=f"{pages - 1} pages .* at least {pages} pages"):
        ChatServer(MODEL, CHATS, dataclasses.replace(ENGINE, pages=pages - 1))


# -- other models and pages ----------------------------------------------------------------------
class Counter:
    """A model without attention that counts upwards."""

    num_layers = 1
    n_kv_heads = 1
    head_dim = 4

    def forward(self, tokens: Any, positions: Any, attend: Any, wanted: Any) -> Any:
        ones = np.ones((len(tokens), 1, 4), np.float32)
        np.testing.assert_allclose(attend(0, ones, ones, ones), ones, rtol=1e-6)
        return np.eye(64, dtype=np.float32)[(tokens[wanted] + 1) % 64]


def test_loop_serves_any_model() -> None:
    served = serve(model=Counter())
    for each in served.conversations:
        places = np.array(each.places)
        assert np.array_equal(each.tokens[places], (each.tokens[places - 1] + 1) % 64)


@pytest.mark.parametrize(
    ("dtype", "least"),
    [("float16", 0.97), ("bfloat16", 0.8), ("float8_e4m3fn", 0.5), ("int8", 0.7)],
)
def test_narrow_pages_agree_by_and_large(dtype: str, least: float) -> None:
    served = serve(dataclasses.replace(ENGINE, dtype=dtype))
    found = check(MODEL, served.conversations)
    assert least < 1 - found.differing / found.tokens <= 1
    assert served.cached_tokens == serve().cached_tokens


# -- the check -----------------------------------------------------------------------------------
def test_check_compares_every_generated_token() -> None:
    served = serve()
    found = check(MODEL, served.conversations)
    assert (found.tokens, found.differing) == (served.generated_tokens, 0)
    assert 0 < found.largest_difference < 1e-4
    assert found.smallest_margin > 0


@pytest.mark.parametrize("place", [0, -1])
def test_check_notices_one_wrong_token(place: int) -> None:
    served = serve()
    wrong = served.conversations[3]
    wrong.tokens[wrong.places[place]] ^= 1
    found = check(MODEL, served.conversations)
    assert found.differing >= 1
    if place == 0:
        assert f"token {wrong.places[0]} of chat 3 is " in found.first_difference


@pytest.mark.parametrize("lost", ["k", "v"])
def test_check_notices_a_cache_that_skips_a_token(
    lost: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = ops.append

    def skipping(inputs: Any, layer: Any, k: Any, v: Any, offsets: Any, **rest: Any) -> None:
        """Append each prompt without a token."""
        k, v = k.copy(), v.copy()
        lengths = np.diff(offsets.astype(int))
        for begin in offsets[:-1][lengths > 1].astype(int):
            (k if lost == "k" else v)[begin + 1] = 0
        right(inputs, layer, k, v, offsets, **rest)

    monkeypatch.setattr(ops, "append", skipping)
    assert check(MODEL, serve().conversations).differing > 0


def test_check_notices_a_hit_that_belongs_to_another(monkeypatch: pytest.MonkeyPatch) -> None:
    right = ops.attention

    def crossed(inputs: Any, layer: Any, q: Any, offsets: Any, **rest: Any) -> Any:
        """Attend with the first page of each row replaced by the neighbour's."""
        table = inputs.lookup_table.copy()
        table[:, 0] = np.roll(table[:, 0], 1)
        other = type(inputs)(inputs.blocks, inputs.cache_lengths, table, inputs.max_lengths)
        return right(other, layer, q, offsets, **rest)

    monkeypatch.setattr(ops, "attention", crossed)
    assert check(MODEL, serve().conversations).differing > 0


# -- small things --------------------------------------------------------------------------------
def test_chats_share_system_prompts_and_come_from_the_seed() -> None:
    settings = ChatSettings(chats=10, turns=2, system_prompts=4)
    chats, same, other = (make_chats(settings, seed=seed) for seed in (1, 1, 2))
    assert len({id(chat.system) for chat in chats}) == 4
    text: list[npt.NDArray[np.int32]] = [np.concatenate(c.messages) for c in (*chats, *same)]
    assert all(np.array_equal(a, b) for a, b in zip(text[:10], text[10:], strict=True))
    assert not np.array_equal(other[0].system, chats[0].system)
    assert all(20 <= len(message) <= 60 for chat in chats for message in chat.messages)
    assert all(16 <= length <= 48 for chat in chats for length in chat.answer_lengths)
    assert [chat.opens for chat in chats] == sorted(chat.opens for chat in chats)


def test_blas_gets_its_threads_back() -> None:
    from kvcore.apps.demo import blas

    controls = [blas._controls(path) for path in blas._loaded()]
    found = [each for each in controls if each is not None]
    before = [get() for get, _ in found]
    with one_blas_thread():
        assert [get() for get, _ in found] == [1] * len(found)
    assert [get() for get, _ in found] == before
