# SPDX-License-Identifier: Apache-2.0
"""Recompute what was generated without any cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from kvcore.apps.demo.attention import plain_attention
from kvcore.apps.demo.conversation import Conversation
from kvcore.apps.demo.protocol import LanguageModel


@dataclass(frozen=True, kw_only=True)
class Check:
    """Return how generated tokens compare with their recomputation.

    Attributes
    ----------
    tokens, differing : int
        Tokens compared, and of them those that are not the most likely ones of the recomputation.
    first_difference : str
        Where the first of them is and by how much; empty when there is none.
    smallest_margin : float
        Least distance of the two largest logits of a place in the recomputation.
    largest_difference : float
        Most that the logit of a generated token differs.
    """

    tokens: int
    differing: int
    first_difference: str
    smallest_margin: float
    largest_difference: float


def check(
    model: LanguageModel,
    conversations: Sequence[Conversation],
    on_done: Callable[[int], None] | None = None,
) -> Check:
    """Run each conversation once as a whole, with plain attention, and compare.

    What precedes a generated token there is what preceded it when it was generated, so if each is
    the most likely one, then generating without a cache gives the same conversations.

    Parameters
    ----------
    model : LanguageModel
    conversations : sequence of Conversation
    on_done : callable, optional
        Called with the number of conversations done.

    Notes
    -----
    Costs a forward pass of every token once.
    """
    found = []
    for number, conversation in enumerate(conversations):
        found.append(_compare(model, number, conversation))
        if on_done is not None:
            on_done(number + 1)
    return Check(
        tokens=sum(each.tokens for each in found),
        differing=sum(each.differing for each in found),
        first_difference=next((e.first_difference for e in found if e.differing), ""),
        smallest_margin=min(each.smallest_margin for each in found),
        largest_difference=max(each.largest_difference for each in found),
    )


def _compare(model: LanguageModel, number: int, conversation: Conversation) -> Check:
    places = np.array(conversation.places)
    positions = np.arange(len(conversation.tokens) - 1)
    logits = model.forward(conversation.tokens[:-1], positions, plain_attention, places - 1)
    chosen = conversation.tokens[places]
    likeliest = logits.argmax(axis=1)
    second, first = np.partition(logits, -2, axis=1)[:, -2:].T
    given = logits[np.arange(len(chosen)), chosen]
    wrong = np.flatnonzero(likeliest != chosen).tolist()
    return Check(
        tokens=len(chosen),
        differing=len(wrong),
        first_difference="".join(
            f"token {places[row]} of chat {number} is {chosen[row]}, recomputed {likeliest[row]} "
            f"by a margin of {first[row] - given[row]:.1e}"
            for row in wrong[:1]
        ),
        smallest_margin=float((first - second).min()),
        largest_difference=float(np.abs(given - conversation.logits).max()),
    )
