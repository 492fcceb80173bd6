# SPDX-License-Identifier: Apache-2.0
"""Recompute the generated tokens without a cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from kvcore.apps.demo.attention import plain_attention
from kvcore.apps.demo.conversation import Conversation
from kvcore.apps.demo.protocol import LanguageModel


@dataclass(frozen=True, kw_only=True)
class Check:
    """The comparison of generated tokens with their recomputation.

    Attributes
    ----------
    tokens, differing : int
        Number of compared tokens; number of generated tokens that are not the most likely token of
        the recomputation.
    first_difference : str
        Place and margin of the first differing token; empty without a difference.
    smallest_margin : float
        Minimum difference of the two largest logits of a place in the recomputation.
    largest_difference : float
        Maximum difference between the logit of a generated token and its recomputation.
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

    Before each generated token, the recomputation has the same tokens as the run with the cache. If
    each generated token is the most likely token, generation without a cache gives the same
    conversations.

    Parameters
    ----------
    model : LanguageModel
    conversations : sequence of Conversation
    on_done : callable, optional
        Called with the number of finished conversations.

    Notes
    -----
    Every token runs through one forward pass.
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
