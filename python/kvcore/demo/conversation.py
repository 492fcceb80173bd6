# SPDX-License-Identifier: Apache-2.0
"""Follow chats while they are served."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from kvcore.demo.chats import Chat
from kvcore.demo.protocol import Tokens


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
    chat, number : int
        Which chat, and which of its turns.
    arrived : float
        Seconds, of ``time.perf_counter``.
    was_admitted : bool
        Whether it ever ran.
    logits : list of float
        Of the tokens generated so far.
    """

    chat: int
    number: int
    arrived: float
    was_admitted: bool = False
    logits: list[float] = field(default_factory=list)


def prompt_of(chat: Chat, conversation: Conversation, number: int) -> Tokens:
    """Answer all that was said and the user's next message, int32."""
    said = conversation.tokens if number else chat.system
    return np.concatenate((said, chat.messages[number]))
