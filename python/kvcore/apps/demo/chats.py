# SPDX-License-Identifier: Apache-2.0
"""Generate multi-turn chats that share a few system prompts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvcore.apps.demo.protocol import Tokens


@dataclass(frozen=True, kw_only=True)
class ChatSettings:
    """The shape of the chats; a pair is the minimum and maximum of a uniform distribution.

    Attributes
    ----------
    chats, turns : int
        Number of chats, and number of messages in each chat.
    system_prompts : int
        Number of distinct system prompts; chat n has prompt ``n % system_prompts``.
    system_tokens, message_tokens, answer_tokens : (int, int)
        Tokens of a system prompt, of a user's message, of an answer.
    gap_steps, pause_steps : (int, int)
        Steps of the engine between the openings of two chats, and between an answer and the
        user's next message. The unit is steps, not seconds, so every run has the same order.
    vocabulary : int
        Token ids are 0 to ``vocabulary - 1``.
    """

    chats: int = 32
    turns: int = 3
    system_prompts: int = 4
    system_tokens: tuple[int, int] = (320, 480)
    message_tokens: tuple[int, int] = (20, 60)
    answer_tokens: tuple[int, int] = (16, 48)
    gap_steps: tuple[int, int] = (0, 4)
    pause_steps: tuple[int, int] = (2, 12)
    vocabulary: int = 512


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Chat:
    """The messages of one user, and their times.

    Attributes
    ----------
    system : int32 [system_tokens]
    messages : list of int32 arrays
        One message per turn; the first message follows the system prompt.
    answer_lengths : list of int
        Number of tokens to generate in each turn.
    opens : int
        The step of the engine at which the first message arrives.
    pauses : list of int
        Steps between the answer of a turn and the next message.
    """

    system: Tokens
    messages: list[Tokens]
    answer_lengths: list[int]
    opens: int
    pauses: list[int]

    @property
    def num_tokens(self) -> int:
        """Tokens of the whole conversation."""
        return len(self.system) + sum(map(len, self.messages)) + sum(self.answer_lengths)


def make_chats(settings: ChatSettings | None = None, *, seed: int = 0) -> list[Chat]:
    """Generate chats; the same seed gives the same chats.

    Examples
    --------
    >>> from kvcore.apps.demo import ChatSettings, make_chats
    >>> chats = make_chats(ChatSettings(chats=5, turns=2, system_prompts=2))
    >>> [len(chat.messages) for chat in chats], chats[0].system is chats[4].system
    ([2, 2, 2, 2, 2], True)
    """
    settings = settings or ChatSettings()
    rng = np.random.default_rng(seed)
    systems = [_text(rng, settings.system_tokens, settings) for _ in range(settings.system_prompts)]
    opens = np.cumsum([_draw(rng, settings.gap_steps) for _ in range(settings.chats)]).tolist()
    return [
        _chat(rng, settings, systems[number % len(systems)], step)
        for number, step in enumerate(opens)
    ]


def longest_chat(chats: Sequence[Chat]) -> int:
    """Return the tokens of the longest chat."""
    return max(chat.num_tokens for chat in chats)


def _chat(rng: np.random.Generator, settings: ChatSettings, system: Tokens, opens: int) -> Chat:
    turns = range(settings.turns)
    return Chat(
        system=system,
        messages=[_text(rng, settings.message_tokens, settings) for _ in turns],
        answer_lengths=[_draw(rng, settings.answer_tokens) for _ in turns],
        opens=opens,
        pauses=[_draw(rng, settings.pause_steps) for _ in turns],
    )


def _draw(rng: np.random.Generator, bounds: tuple[int, int]) -> int:
    return int(rng.integers(bounds[0], bounds[1] + 1))


def _text(rng: np.random.Generator, bounds: tuple[int, int], settings: ChatSettings) -> Tokens:
    return rng.integers(0, settings.vocabulary, _draw(rng, bounds), np.int32)
