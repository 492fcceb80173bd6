# SPDX-License-Identifier: Apache-2.0
"""Follow chats while they are served."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from kvcore.apps.demo.chats import Chat
from kvcore.apps.demo.protocol import Tokens
from kvcore.apps.replay.arrivals import ArrivalQueue


@dataclass(slots=True, eq=False)
class Conversation:
    """Keep what was said in one chat.

    Attributes
    ----------
    tokens : int32 array
        Everything said in the turns that are done.
    places : list of int
        Where in `tokens` generated ones are, in order.
    logits : list of float
        What the model gave each of them when it was chosen.
    """

    tokens: Tokens
    places: list[int] = field(default_factory=list)
    logits: list[float] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class Turn:
    """Follow one message of a user until it is answered.

    Attributes
    ----------
    index, chat : int
        Which of all turns, and of which chat.
    arrived : float
        Seconds, of ``time.perf_counter``.
    was_admitted : bool
        Whether it ever ran.
    logits : list of float
        Of the tokens generated so far.
    """

    index: int
    chat: int
    arrived: float
    was_admitted: bool = False
    logits: list[float] = field(default_factory=list)


def prompt_of(chat: Chat, conversation: Conversation, number: int) -> Tokens:
    """Return all that was said and the user's next message, int32."""
    said = conversation.tokens if number else chat.system
    return np.concatenate((said, chat.messages[number]))


def turns_of(chats: Sequence[Chat]) -> list[tuple[int, int]]:
    """List the turns of all chats: which chat, and which of its turns."""
    return [(n, place) for n, chat in enumerate(chats) for place in range(len(chat.messages))]


def arrivals_of(chats: Sequence[Chat]) -> ArrivalQueue:
    """Queue the turns of all chats, in steps of the engine, by their place in ``turns_of``."""
    turns = turns_of(chats)
    pairs = [(chats[number], place) for number, place in turns]
    opens = [chat.opens for chat, _ in pairs]
    pauses = [chat.pauses[place - 1] if place else 0 for chat, place in pairs]
    follows = [place + 1 < len(chat.messages) for chat, place in pairs]
    following = np.where(follows, np.arange(1, len(turns) + 1), -1)
    return ArrivalQueue(np.array(opens, float), following, np.array(pauses, float))
