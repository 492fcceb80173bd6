# SPDX-License-Identifier: Apache-2.0
"""Tokens are read in place, or copied if that is impossible: both ways give the same pages."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import numpy as np
import pytest

from kvcore import TextGenerationContext
from toy_engine import make_manager

TOKENS = [7, 5, 3, 1, 8, 6, 4, 2, 9]


def unaligned(tokens: list[int]) -> Any:
    memory = np.zeros(4 * len(tokens) + 1, np.uint8)
    memory[1:] = np.array(tokens, np.int32).view(np.uint8)
    return memory[1:].view(np.int32)


def read_only(tokens: list[int]) -> Any:
    array = np.array(tokens, np.int32)
    array.flags.writeable = False
    return array


KINDS: dict[str, Callable[[list[int]], Any]] = {
    "list": list,
    "int32": lambda tokens: np.array(tokens, np.int32),
    "int64": lambda tokens: np.array(tokens, np.int64),
    "front": lambda tokens: np.array([*tokens, 99, 98], np.int32)[: len(tokens)],
    "strided": lambda tokens: np.repeat(np.array(tokens, np.int32), 2)[::2],
    "reversed": lambda tokens: np.array(tokens[::-1], np.int32)[::-1],
    "unaligned": unaligned,
    "read-only": read_only,
}


class Buffered:
    """A context over the start of a buffer; it drops the buffer while a call reads it."""

    def __init__(self) -> None:
        self.request_id: Hashable = "a"
        self.buffer: Any = np.array([*TOKENS, 0, 0], np.int32)
        self.end_idx = len(TOKENS)
        self.active_idx = len(TOKENS)
        self.lets_go = False
        self._start = 0

    @property
    def tokens(self) -> Any:
        return self.buffer[: self.end_idx]

    @property
    def start_idx(self) -> int:
        if self.lets_go:  # after `tokens`, before the call that reads them
            self.buffer = np.full(len(self.buffer), -1, np.int32)
        return self._start

    @start_idx.setter
    def start_idx(self, value: int) -> None:
        self._start = value

    def update(self, token: int) -> None:
        self.buffer[self.end_idx] = token
        self._start = self.active_idx
        self.end_idx += 1
        self.active_idx = self.end_idx


@pytest.mark.parametrize("lets_go", [False, True])
def test_memory_is_held_while_it_is_read(*, lets_go: bool) -> None:
    manager, context = make_manager(16), Buffered()
    manager.claim("a")
    manager.fetch([context])
    context.update(2)
    context.lets_go = lets_go
    manager.step([context])
    assert manager.match_prefix(TOKENS) == 8
    manager.check_integrity()


class Kept(Buffered):
    """A context whose tokens have memory of a given kind."""

    def __init__(self, kind: Callable[[list[int]], Any], request_id: str) -> None:
        super().__init__()
        self.request_id, self.kind = request_id, kind

    @property
    def tokens(self) -> Any:
        return self.kind(self.buffer[: self.end_idx].tolist())


def written_by(manager: Any, context: Any) -> None:
    """Run the tokens of a context, and commit the pages."""
    manager.claim(context.request_id)
    manager.fetch([context])
    context.update(2)
    manager.step([context])


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_of_every_kind_are_the_same_tokens(kind: str) -> None:
    """Arguments, contexts and contexts of the caller's own class."""
    manager, own = make_manager(16), TextGenerationContext("own", KINDS[kind](TOKENS))
    written_by(manager, own)
    assert manager.match_prefix(TOKENS) == 8
    assert manager.match_prefix(KINDS[kind](TOKENS)) == 8
    foreign = Kept(KINDS[kind], "foreign")
    assert manager.plan(foreign).hit_tokens == 8
    written_by(manager, foreign)
    assert foreign.end_idx == 10
    assert manager.get_req_blocks("own")[:2] == manager.get_req_blocks("foreign")[:2]
    manager.check_integrity()


def test_a_single_token_has_no_gaps_whatever_its_stride() -> None:
    manager = make_manager(16)
    token = np.arange(9, dtype=np.int32)[::7][:1]
    manager.claim("a")
    assert manager.reserve(TextGenerationContext("a", token))
    assert manager.match_prefix(token) == 0
