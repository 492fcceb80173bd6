# SPDX-License-Identifier: Apache-2.0
"""What the fields of every group have in common."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from itertools import islice, pairwise
from typing import Any

from kvcore.support.arguments import integer

__all__ = ["MOST", "MOST_LAYERS", "count", "layer_indices", "pages_present"]

MOST = 2**31 - 1  # page ids and shapes are int32
MOST_LAYERS = 2**16  # that are told apart; what comes may have no end


def count(name: str, value: Any, remedy: str) -> int:
    """Return an int of at least 1; the ValueError for another one ends with the remedy."""
    found = integer(name, value)
    if not 1 <= found <= MOST:
        raise ValueError(f"{name} is {found}, must be 1 .. {MOST}; {remedy}")
    return found


def layer_indices(layers: Any) -> tuple[int, ...]:
    """Return the layers of a group in ascending order.

    Raises
    ------
    TypeError
        No iterable of ints.
    ValueError
        None at all or too many, a negative one, one twice.
    """
    if isinstance(layers, (str, bytes)) or not isinstance(layers, Iterable):
        raise TypeError(
            f"layers is a {type(layers).__name__}, must be a sequence of the model's layer indices"
        )
    found = sorted(integer("a layer of layers", layer) for layer in islice(layers, MOST_LAYERS + 1))
    if not 1 <= len(found) <= MOST_LAYERS:
        held = "is empty" if not found else f"names more than {MOST_LAYERS}"
        raise ValueError(f"layers {held}, must name 1 .. {MOST_LAYERS}; leave out empty groups")
    if found[0] < 0 or found[-1] > MOST:
        wrong = found[0] if found[0] < 0 else found[-1]
        raise ValueError(f"layers holds {wrong}, must be 0 .. {MOST}; count from the first layer")
    twice = next((a for a, b in pairwise(found) if a == b), None)
    if twice is not None:
        raise ValueError(f"layers holds {twice} twice; name each layer once")
    return tuple(found)


def pages_present(present: Any) -> list[bool]:
    """Return which pages are cached, out of a str of 0 and 1 or a sequence of bools.

    Raises
    ------
    TypeError
        Neither.
    ValueError
        Another character or number than 0 and 1.
    """
    if isinstance(present, bytes) or not isinstance(present, Iterable):
        raise TypeError(
            f"present is a {type(present).__name__}, must be a sequence of bools or a str of 0 and "
            f"1, one per page"
        )
    known: dict[Any, bool] = (
        {"0": False, "1": True} if isinstance(present, str) else {0: False, 1: True}
    )
    found = []
    for page in present:
        if not isinstance(page, Hashable) or page not in known:
            raise ValueError(f"present holds {page!r}, must hold 1 for a cached page, 0 for none")
        found.append(known[page])
    return found
