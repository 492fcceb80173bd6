# SPDX-License-Identifier: Apache-2.0
from collections.abc import Iterable
from typing import final

@final
class ExtraKeys:
    """The extra keys of a request, and its tokens as the prefix tree is shown them.

    Holds the stand-ins in it: as long as it lives, and afterwards as long as a tree has them.
    """

@final
class KeyedTrees:
    """Know where tokens with extra keys are kept: the trees of a manager, or one by itself."""

def normalized(
    extra_keys: Iterable[tuple[int, int, bytes]] | None, num_tokens: int
) -> tuple[tuple[int, int, bytes], ...]:
    """Check the extra keys of a prefix, and sort them.

    Parameters
    ----------
    extra_keys : list of (int, int, bytes), or None
        Start, length in tokens, and what tells the content from others; in any order.
    num_tokens : int
        Keys start in front of this; they may reach behind it.

    Returns
    -------
    tuple of (int, int, bytes)
        By start, length and bytes, each once.

    Raises
    ------
    ValueError
        A start outside ``0 .. num_tokens - 1``, a length below 1.
    TypeError
        Not (int, int, bytes).
    """

def _capsule() -> object: ...
def num_stand_ins() -> int:
    """Count the tokens with keys that the process knows: of living requests, and of caches."""

def drop_unused() -> None:
    """Forget at once the tokens with keys that no request and no cache holds."""
