# SPDX-License-Identifier: Apache-2.0
"""What is forgotten first when memory is full: the eviction policies, as values.

Give an instance, or its name, to ``PagedKVCacheManager``, ``CacheManager`` or ``PrefixTree`` as
`eviction`. A use is a reservation or an insertion that walks a run of pages, the first included.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

__all__ = ["ARC", "FIFO", "LFU", "LRU", "SLRU", "Cost", "EvictionPolicy", "Priority"]

_INT32_HIGH = 2**31 - 1


@dataclass(frozen=True)
class EvictionPolicy:
    """Name an order of eviction: the base of the policies, none itself.

    Attributes
    ----------
    name : str
        What may stand for an instance with its defaults.
    """

    name: ClassVar[str] = ""


@dataclass(frozen=True)
class LRU(EvictionPolicy):
    """Forget what was let go of longest ago.

    Examples
    --------
    >>> from kvcore import PrefixTree
    >>> from kvcore.policies import LRU
    >>> tree = PrefixTree(page_size=1, eviction=LRU())
    >>> for token in (5, 5, 6, 7):
    ...     _ = tree.insert([token], [token])
    >>> [tree.evict(1).item() for _ in range(3)]
    [5, 6, 7]
    """

    name = "lru"


@dataclass(frozen=True)
class LFU(EvictionPolicy):
    """Forget what was used least often; of those, what was used longest ago.

    Examples
    --------
    >>> from kvcore import PrefixTree
    >>> tree = PrefixTree(page_size=1, eviction="lfu")
    >>> for token in (5, 5, 6, 7):
    ...     _ = tree.insert([token], [token])
    >>> [tree.evict(1).item() for _ in range(3)]
    [6, 7, 5]
    """

    name = "lfu"


@dataclass(frozen=True)
class SLRU(EvictionPolicy):
    """Forget what was used once before what was used again, each by recency."""

    name = "slru"


@dataclass(frozen=True)
class FIFO(EvictionPolicy):
    """Forget what was cached first, however often it was used."""

    name = "fifo"


@dataclass(frozen=True)
class Priority(EvictionPolicy):
    """Forget what has the lowest priority; of those, what was used longest ago.

    The only policy that looks at priorities.

    Examples
    --------
    >>> from kvcore import PrefixTree
    >>> tree = PrefixTree(page_size=1, eviction="priority")
    >>> for token, priority in ((5, 2), (6, 0), (7, 1)):
    ...     _ = tree.insert([token], [token], priority=priority)
    >>> [tree.evict(1).item() for _ in range(3)]
    [6, 7, 5]
    """

    name = "priority"


@dataclass(frozen=True)
class Cost(EvictionPolicy):
    """Forget what saves the least prefill time per byte.

    Uses times the time to compute a page, where attention takes the longer the deeper it lies;
    counted from what went last, so that nothing stays for what it was worth once (GDSF).

    Parameters
    ----------
    attention_tokens : int
        Tokens in front of one for which attention takes as long as all else that is computed for
        it: about six times the width of a model with as many K/V heads as query heads.

    Raises
    ------
    TypeError
        `attention_tokens` is no int.
    ValueError
        It is not 1 .. 2**31 - 1.
    """

    name = "cost"
    attention_tokens: int = 24_576

    def __post_init__(self) -> None:
        """Check the number."""
        given = self.attention_tokens
        if isinstance(given, bool) or not isinstance(given, int):
            raise TypeError(f"attention_tokens is {given!r}, must be an int")
        if not 1 <= given <= _INT32_HIGH:
            raise ValueError(f"attention_tokens is {given}, must be 1 .. {_INT32_HIGH}")


@dataclass(frozen=True)
class ARC(EvictionPolicy):
    """Go by recency or by repeated use, whichever served better lately.

    Adaptive replacement: runs used once and runs used again, each by recency. What comes back after
    its eviction tells which of the two had too small a share of the pages.
    """

    name = "arc"


_BY_NAME = {each.name: each for each in (LRU, LFU, SLRU, FIFO, Priority, Cost, ARC)}


def resolved(eviction: EvictionPolicy | str, name: str = "eviction") -> tuple[str, int]:
    """Return the name of a policy and its `attention_tokens`, as the core takes them.

    Errors call the argument `name`.

    Raises
    ------
    TypeError
        Neither a policy nor a name.
    ValueError
        No policy has that name.
    """
    if isinstance(eviction, str):
        if eviction not in _BY_NAME:
            names = ", ".join(map(repr, _BY_NAME))
            raise ValueError(f"{name} is {eviction!r}, must be one of {names}")
        eviction = _BY_NAME[eviction]()
    if type(eviction) not in _BY_NAME.values():
        raise TypeError(
            f"{name} is {eviction!r}, must be a policy of kvcore.policies or its name; a policy "
            "of your own is a C++ class"
        )
    return eviction.name, getattr(eviction, "attention_tokens", Cost.attention_tokens)
