# SPDX-License-Identifier: Apache-2.0
"""Eviction policies as values: each policy orders the runs that a full cache evicts.

Pass an instance, or its name, to ``PagedKVCacheManager`` or ``PrefixTree`` as
`eviction`. A reservation or an insertion that walks a run of pages is a use of the run. The
insertion that adds the run is its first use.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

__all__ = ["ARC", "FIFO", "LFU", "LRU", "SLRU", "Cost", "EvictionPolicy", "Hinted", "Priority"]

_INT32_HIGH = 2**31 - 1


@dataclass(frozen=True)
class EvictionPolicy:
    """Name an order of eviction: the base class of the policies, not a policy itself.

    Attributes
    ----------
    name : str
        Name of the policy; it selects an instance with default parameters.
    """

    name: ClassVar[str] = ""


@dataclass(frozen=True)
class LRU(EvictionPolicy):
    """Evict the run that was released longest ago.

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
    """Evict the run with the fewest uses; among equals, the run used longest ago.

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
    """Evict runs with one use before runs with more uses; each kind by recency."""

    name = "slru"


@dataclass(frozen=True)
class FIFO(EvictionPolicy):
    """Evict the run that was cached first, regardless of its number of uses."""

    name = "fifo"


@dataclass(frozen=True)
class Priority(EvictionPolicy):
    """Evict the run with the lowest priority; among equals, the run used longest ago.

    Only this policy uses priorities.

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
    """Evict the run that saves the least prefill time per byte.

    The value of a run is its number of uses times the time to compute a page. Attention for a page
    takes longer the deeper the page is in its prefix. Each eviction raises the base value of runs
    that are used later, so old uses lose their weight (GDSF).

    Parameters
    ----------
    attention_tokens : int
        Number of tokens before a token at which attention takes as long as all other computation
        for the token: about six times the width of a model with equal numbers of K/V and query
        heads.

    Raises
    ------
    TypeError
        `attention_tokens` is not an int.
    ValueError
        `attention_tokens` is not in 1 .. 2**31 - 1.
    """

    name = "cost"
    attention_tokens: int = 24_576

    def __post_init__(self) -> None:
        """Check `attention_tokens`."""
        given = self.attention_tokens
        if isinstance(given, bool) or not isinstance(given, int):
            raise TypeError(f"attention_tokens is {given!r}, must be an int")
        if not 1 <= given <= _INT32_HIGH:
            raise ValueError(f"attention_tokens is {given}, must be 1 .. {_INT32_HIGH}")


@dataclass(frozen=True)
class ARC(EvictionPolicy):
    """Evict by recency or by repeated use, and adapt the balance to the traffic.

    Adaptive replacement: runs with one use and runs with more uses are two lists, each ordered by
    recency. If a run comes back after its eviction, the list of that run gets a larger share of
    the pages.
    """

    name = "arc"


@dataclass(frozen=True)
class Hinted(EvictionPolicy):
    """Evict by recency, and by the hints of requests when their sessions return.

    Only this policy uses ``returns_in``. It evicts the pages of closed sessions first, next pages
    without a hint by recency, and last the pages whose sessions return, the farthest return first.
    Without hints it is LRU.

    Examples
    --------
    >>> from kvcore import KVCacheParams, PagedKVCacheManager, TextGenerationContext
    >>> params = KVCacheParams("int8", 1, 1, 1, page_size=1, enable_prefix_caching=True)
    >>> manager = PagedKVCacheManager(
    ...     params, max_batch_size=1, max_seq_len=9, num_pages=4, eviction="hinted"
    ... )
    >>> for token, returns_in in ((5, "soon"), (6, "never"), (7, None), (8, "later")):
    ...     context = TextGenerationContext(token, [token, 1], returns_in=returns_in)
    ...     manager.claim(token)
    ...     _ = manager.reserve(context)
    ...     context.update(1)
    ...     _ = manager.step([context])
    ...     manager.release(token)
    >>> [token for token in (5, 6, 7, 8) if manager.match_prefix([token])]
    [5, 8]
    """

    name = "hinted"


#: The policies by name, in the order of ``EvictionOrder`` in C++.
BY_NAME: dict[str, type[EvictionPolicy]] = {
    each.name: each for each in (LRU, LFU, SLRU, FIFO, Priority, Cost, ARC, Hinted)
}


def resolved(eviction: EvictionPolicy | str, name: str = "eviction") -> tuple[str, int]:
    """Return the name of a policy and its `attention_tokens`, in the form that the core takes.

    Error messages use `name` for the argument.

    Raises
    ------
    TypeError
        `eviction` is neither a policy nor a name.
    ValueError
        No policy has that name.
    """
    if isinstance(eviction, str):
        if eviction not in BY_NAME:
            names = ", ".join(map(repr, BY_NAME))
            raise ValueError(f"{name} is {eviction!r}, must be one of {names}")
        eviction = BY_NAME[eviction]()
    if type(eviction) not in BY_NAME.values():
        raise TypeError(
            f"{name} is {eviction!r}, must be a policy of kvcore.policies or its name; a policy "
            "of your own is a C++ class"
        )
    return eviction.name, getattr(eviction, "attention_tokens", Cost.attention_tokens)
