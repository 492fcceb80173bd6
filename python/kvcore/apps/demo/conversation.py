# SPDX-License-Identifier: Apache-2.0
"""The state of chats while they are served."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from kvcore.apps.demo.chats import Chat
from kvcore.apps.demo.protocol import Tokens
from kvcore.apps.replay.arrivals import ArrivalQueue


@dataclass(slots=True, eq=False)
class Conversation:
    """The tokens of one chat until now.

    Attributes
    ----------
    tokens : int32 array
        Tokens of all finished turns.
    places : list of int
        Indices of the generated tokens in `tokens`, in order.
    logits : list of float
        Logit of each generated token when it was chosen.
    """

    tokens: Tokens
    places: list[int] = field(default_factory=list)
    logits: list[float] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class Turn:
    """The state of one message of a user until it is answered.

    Attributes
    ----------
    index, chat : int
        Index among all turns, and index of the chat.
    arrived : float
        Arrival time in seconds of ``time.perf_counter``.
    was_admitted : bool
        True after the first admission.
    logits : list of float
        Logits of the tokens generated until now.
    """

    index: int
    chat: int
    arrived: float
    was_admitted: bool = False
    logits: list[float] = field(default_factory=list)


def prompt_of(chat: Chat, conversation: Conversation, number: int) -> Tokens:
    """Return the conversation until now and the user's next message, int32."""
    said = conversation.tokens if number else chat.system
    return np.concatenate((said, chat.messages[number]))


def turns_of(chats: Sequence[Chat]) -> list[tuple[int, int]]:
    """List the turns of all chats as pairs: index of the chat, index of the turn in it."""
    return [(n, place) for n, chat in enumerate(chats) for place in range(len(chat.messages))]


def arrivals_of(chats: Sequence[Chat]) -> ArrivalQueue:
    """Queue the turns of all chats by their index in ``turns_of``; times are engine steps."""
    turns = turns_of(chats)
    pairs = [(chats[number], place) for number, place in turns]
    opens = [chat.opens for chat, _ in pairs]
    pauses = [chat.pauses[place - 1] if place else 0 for chat, place in pairs]
    follows = [place + 1 < len(chat.messages) for chat, place in pairs]
    following = np.where(follows, np.arange(1, len(turns) + 1), -1)
    return ArrivalQueue(np.array(opens, float), following, np.array(pauses, float))
