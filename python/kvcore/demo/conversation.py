# SPDX-License-Identifier: Apache-2.0
"""Follow chats while they are served."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from kvcore import TextGenerationContext
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
    rank : int
        Place in the order of arrival.
    context : TextGenerationContext
        Its tokens; survives a preemption.
    prompt_tokens, length : int
        Tokens of the prompt, and with the whole answer.
    arrived : float
        Seconds, of ``time.perf_counter``.
    written : int
        Tokens that were written when it was last preempted; -1 before it was first admitted.
    logits : list of float
        Of the tokens generated so far.
    """

    chat: int
    number: int
    rank: int
    context: TextGenerationContext
    prompt_tokens: int
    length: int
    arrived: float
    written: int = -1
    logits: list[float] = field(default_factory=list)

    @property
    def left_to_write(self) -> int:
        """Tokens that the model has not run yet."""
        return self.context.end_idx - self.context.start_idx


def prompt_of(chat: Chat, conversation: Conversation, number: int) -> Tokens:
    """Answer all that was said and the user's next message, int32."""
    said = conversation.tokens if number else chat.system
    return np.concatenate((said, chat.messages[number]))
