# SPDX-License-Identifier: Apache-2.0
"""Streamed text of generated tokens: whole characters, one answer after the other."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from conftest import require
from kvcore.apps.cli.live_text import LiveText, TextOfTokens

require("transformers")

from tiny_model_dir import byte_tokenizer, word_tokenizer  # noqa: E402

BYTES = byte_tokenizer()


def decode(ids: list[int]) -> str:
    return str(BYTES.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))


@given(st.text(max_size=30))
def test_characters_come_when_they_are_whole(text: str) -> None:
    ids = BYTES(text)["input_ids"]
    pieces = TextOfTokens(decode)
    told = [pieces.add(token) for token in ids]
    assert "".join(told) + pieces.rest() == text
    if "\ufffd" not in text:
        assert not any("\ufffd" in piece for piece in told)


@given(st.lists(st.integers(5, 260), max_size=30))
def test_bytes_that_are_no_text_come_as_their_decoder_has_them(ids: list[int]) -> None:
    pieces = TextOfTokens(decode)
    told = [pieces.add(token) for token in ids]
    assert ("".join(told) + pieces.rest()).replace("\ufffd", "") == decode(ids).replace(
        "\ufffd", ""
    )


@given(
    st.lists(st.text(alphabet="aé€\n", min_size=1, max_size=4), min_size=1, max_size=3),
    st.randoms(use_true_random=False),
)
def test_texts_that_come_together_are_written_one_by_one(texts: list[str], random: Any) -> None:
    ids = [BYTES(text)["input_ids"] for text in texts]
    end = BYTES.eos_token_id
    waiting = [[*tokens, end] for tokens in ids]
    written: list[str] = []
    titles = [f"> {i}" for i in range(len(texts))]
    live = LiveText(titles, decode, lambda _count, token: token == end, written.append)
    while any(waiting):
        index = random.choice([i for i, tokens in enumerate(waiting) if tokens])
        live.add(index, waiting[index].pop(0))
    assert "".join(written) == "".join(f"> {i}\n{t}\n" for i, t in enumerate(texts))


def test_a_text_of_words_keeps_its_spaces() -> None:
    tokenizer = word_tokenizer()
    pieces = TextOfTokens(lambda ids: str(tokenizer.decode(ids, skip_special_tokens=True)))
    ids = [*tokenizer("w1 w2")["input_ids"], tokenizer.eos_token_id, *tokenizer("w3")["input_ids"]]
    assert [pieces.add(token) for token in ids] == ["w1", " w2", "", " w3"]
