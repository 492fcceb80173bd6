# SPDX-License-Identifier: Apache-2.0
"""Kinds of layers: which tokens the layers of a group read, and which state they keep."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice, pairwise
from typing import Any, TypeVar

from kvcore.support.arguments import integer
from kvcore.support.dtypes import itemsize

__all__ = [
    "MAX_CHUNK_TOKENS",
    "MOST",
    "MOST_LAYERS",
    "AttentionGroup",
    "ChunkedLocal",
    "FrozenMap",
    "FullAttention",
    "SlidingWindow",
    "State",
    "count",
    "described",
    "kept_tokens",
    "layer_indices",
    "pages_present",
]

MOST = 2**31 - 1  # page ids and shapes are int32
MOST_LAYERS = 2**16  # maximum number of listed layers; an iterable may be endless


def count(name: str, value: Any, remedy: str) -> int:
    """Return an int of at least 1; the ValueError for another int ends with the remedy."""
    found = integer(name, value)
    if not 1 <= found <= MOST:
        raise ValueError(f"{name} is {found}, must be 1 .. {MOST}; {remedy}")
    return found


def layer_indices(layers: Any) -> tuple[int, ...]:
    """Return the layers of a group in ascending order.

    Raises
    ------
    TypeError
        `layers` is not an iterable of ints.
    ValueError
        `layers` is empty or too long, or holds a negative index or an index twice.
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
    """Convert a str of 0 and 1, or a sequence of bools, to a list: true for each cached page.

    Raises
    ------
    TypeError
        `present` is neither.
    ValueError
        `present` holds a character or number other than 0 and 1.
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
            raise ValueError(f"present holds {page!r}, must hold 1 for a cached page, else 0")
        found.append(known[page])
    return found


Key = TypeVar("Key")
Value = TypeVar("Value", covariant=True)


class FrozenMap(Mapping[Key, Value]):
    """A hashable mapping of hashable values that keeps its order and equals a dict."""

    __slots__ = ("_items",)

    def __init__(self, items: Iterable[tuple[Key, Value]]) -> None:
        self._items = dict(items)

    def __getitem__(self, key: Key) -> Value:
        return self._items[key]

    def __iter__(self) -> Iterator[Key]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)

    def __hash__(self) -> int:
        return hash(frozenset(self._items.items()))

    def __repr__(self) -> str:
        return repr(self._items)


# ---- kinds of attention --------------------------------------------------------------------------


#: Default of the maximum number of tokens that a request runs in one step.
MAX_CHUNK_TOKENS = 2048

_LIKE_PARAMS = "leave it out to use the value of the params"


@dataclass(frozen=True)
class AttentionGroup(ABC):
    """Layers that keep K and V of the same tokens.

    Parameters
    ----------
    layers : sequence of int
        Indices of the model's layers; held as an ascending tuple.
    n_kv_heads, head_dim, v_head_dim : int, optional
        Values that differ from the params. A `head_dim` without `v_head_dim` is also that of V.

    Raises
    ------
    ValueError
        `layers` is empty, or holds a negative index or an index twice; a size is below 1.
    TypeError
        A value is not an int.
    """

    layers: Sequence[int]
    n_kv_heads: int | None = field(default=None, kw_only=True)
    head_dim: int | None = field(default=None, kw_only=True)
    v_head_dim: int | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        object.__setattr__(self, "layers", layer_indices(self.layers))
        for name in ("n_kv_heads", "head_dim", "v_head_dim"):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, count(name, getattr(self, name), _LIKE_PARAMS))

    @abstractmethod
    def skipped_tokens(self, n: int) -> int:
        """Return the first token that is still read after `n` tokens are computed."""

    @abstractmethod
    def max_pages(
        self, tokens: int, page_size: int, max_chunk_tokens: int = MAX_CHUNK_TOKENS
    ) -> int:
        """Return the maximum number of pages of a sequence in each bundle of the group.

        Parameters
        ----------
        tokens : int
            Tokens of the whole sequence.
        page_size : int
            Tokens per page of the bundle.
        max_chunk_tokens : int
            Maximum number of tokens that run in one step.
        """

    def longest_hit(self, present: str | Sequence[bool], page_size: int) -> tuple[int, int]:
        """Find the longest prefix that a group can serve from its cached pages.

        Parameters
        ----------
        present : str or sequence of bool
            True or "1" for each whole page of a prompt that is cached, for example "1101".
        page_size : int
            Tokens per page.

        Returns
        -------
        hit_pages : int
            Pages of the prefix.
        holes : int
            Number of pages at the start of the prefix that no token after the prefix reads.

        Examples
        --------
        >>> from kvcore.groups import ChunkedLocal, FullAttention, SlidingWindow
        >>> FullAttention([0]).longest_hit("1101", 2)
        (2, 0)
        >>> SlidingWindow([0], 4).longest_hit("110100110111", 2)
        (12, 10)
        >>> ChunkedLocal([0], 4).longest_hit("1110", 2)
        (4, 4)
        """
        size = count("page_size", page_size, "give the tokens of a page")
        best, run = (0, 0), 0
        for hit, is_cached in enumerate(pages_present(present), 1):
            run = run + 1 if is_cached else 0
            holes = self.skipped_tokens(hit * size) // size
            if run >= hit - holes:
                best = (hit, holes)
        return best


def _tokens(n: int) -> int:
    return integer("n", n, 0)


def _pages(tokens: int, page_size: int) -> int:
    return -(-integer("tokens", tokens, 0) // count("page_size", page_size, "tokens of a page"))


def _chunk_tokens(value: int) -> int:
    return count("max_chunk_tokens", value, "give the most tokens that run in one step")


@dataclass(frozen=True)
class FullAttention(AttentionGroup):
    """Layers in which a token reads itself and all tokens before it.

    Parameters
    ----------
    layers, n_kv_heads, head_dim, v_head_dim
        As in AttentionGroup.

    Examples
    --------
    >>> from kvcore.groups import FullAttention
    >>> FullAttention(range(3)).layers
    (0, 1, 2)
    """

    def skipped_tokens(self, n: int) -> int:
        """Return 0: later tokens read every token."""
        _tokens(n)
        return 0

    def max_pages(
        self, tokens: int, page_size: int, max_chunk_tokens: int = MAX_CHUNK_TOKENS
    ) -> int:
        """Return the pages of all `tokens`, for any size of a chunk."""
        _chunk_tokens(max_chunk_tokens)
        return _pages(tokens, page_size)


@dataclass(frozen=True)
class SlidingWindow(AttentionGroup):
    """Layers in which a token reads itself and the `window` - 1 tokens before it.

    Parameters
    ----------
    layers, n_kv_heads, head_dim, v_head_dim
        As in AttentionGroup.
    window : int
        Number of tokens that a token reads, including itself.

    Examples
    --------
    >>> from kvcore.groups import SlidingWindow
    >>> group = SlidingWindow([1, 3, 5], window=4)
    >>> [group.skipped_tokens(n) for n in (0, 4, 5, 6, 7, 11)]
    [0, 1, 2, 3, 4, 8]
    >>> group.max_pages(tokens=100_000, page_size=16, max_chunk_tokens=2048)
    130
    """

    window: int

    def __post_init__(self) -> None:
        super().__post_init__()
        remedy = "a token reads itself; layers without a window are FullAttention"
        object.__setattr__(self, "window", count("window", self.window, remedy))

    def skipped_tokens(self, n: int) -> int:
        """Return ``max(0, n - window + 1)``, the first token that token `n` reads."""
        return max(0, _tokens(n) - self.window + 1)

    def max_pages(
        self, tokens: int, page_size: int, max_chunk_tokens: int = MAX_CHUNK_TOKENS
    ) -> int:
        """Return ``ceil((window - 1 + max_chunk_tokens) / page_size) + 1``.

        At most the pages of `tokens`. A window can begin anywhere in a page, which costs one more
        page.
        """
        live = self.window - 1 + _chunk_tokens(max_chunk_tokens)
        return min(_pages(tokens, page_size), _pages(live, page_size) + 1)


@dataclass(frozen=True)
class ChunkedLocal(AttentionGroup):
    """Layers in which a token reads itself and the tokens before it in its own chunk.

    Parameters
    ----------
    layers, n_kv_heads, head_dim, v_head_dim
        As in AttentionGroup.
    chunk : int
        Tokens of a chunk; the first chunk begins at token 0.

    Examples
    --------
    >>> from kvcore.groups import ChunkedLocal
    >>> [ChunkedLocal([0], chunk=8).skipped_tokens(n) for n in (7, 8, 13, 16)]
    [0, 8, 8, 16]
    """

    chunk: int

    def __post_init__(self) -> None:
        super().__post_init__()
        remedy = "a token reads itself; layers without chunks are FullAttention"
        object.__setattr__(self, "chunk", count("chunk", self.chunk, remedy))

    def skipped_tokens(self, n: int) -> int:
        """Return ``floor(n / chunk) * chunk``, the first token of the chunk of token `n`."""
        return _tokens(n) // self.chunk * self.chunk

    def max_pages(
        self, tokens: int, page_size: int, max_chunk_tokens: int = MAX_CHUNK_TOKENS
    ) -> int:
        """Return the pages of ``chunk - 1 + max_chunk_tokens`` tokens.

        At most the pages of `tokens`. If the chunk is not a multiple of the page size, chunks begin
        inside a page, and the tokens of that page before the chunk also count.
        """
        most = _pages(tokens, page_size)
        in_front = page_size - math.gcd(page_size, self.chunk)
        live = in_front + self.chunk - 1 + _chunk_tokens(max_chunk_tokens)
        return min(most, _pages(live, page_size))


# ---- recurrent layers ----------------------------------------------------------------------------


_MOST_DIMS = 32

Array = tuple[Sequence[int], str]


@dataclass(frozen=True)
class State:
    """Layers that keep arrays of a fixed size per request: convolutions, recurrences.

    Parameters
    ----------
    layers : sequence of int
        Indices of the model's layers; held as an ascending tuple.
    arrays : mapping of str to (shape, dtype)
        The arrays that one layer keeps for one request, by name: the shape on one device, and the
        name of a dtype as in KVCacheParams. Stored as a hashable mapping, sorted by name: the bytes
        of a slot have this order in every store.
    interval : int, optional
        Tokens between checkpoints, a multiple of the page size. By default there are only
        checkpoints at the ends of prompts and at branches.

    Raises
    ------
    ValueError
        `layers` is empty, or holds a negative index or an index twice; `arrays` is empty, or has a
        dimension below 1 or an unknown dtype; `interval` is below 1.
    TypeError
        An argument has another type.

    Examples
    --------
    >>> from kvcore.groups import State
    >>> arrays = {"conv": ((8192, 4), "bfloat16"), "recurrent": ((32, 128, 128), "float32")}
    >>> state = State([0, 1, 2], arrays)
    >>> state.arrays["conv"], state.bytes_per_slot
    (((8192, 4), 'bfloat16'), 6488064)
    """

    layers: Sequence[int]
    arrays: Mapping[str, Array]
    interval: int | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "layers", layer_indices(self.layers))
        object.__setattr__(self, "arrays", _arrays(self.arrays))
        if self.interval is not None:
            remedy = "give the tokens between checkpoints, or None"
            object.__setattr__(self, "interval", count("interval", self.interval, remedy))

    @property
    def bytes_per_slot(self) -> int:
        """Bytes of one request's state in all of the layers, on one device."""
        return len(self.layers) * sum(
            math.prod(shape) * itemsize(dtype) for shape, dtype in self.arrays.values()
        )

    def longest_hit(self, present: str | Sequence[bool], page_size: int) -> tuple[int, int]:
        """Find the longest prefix that ends at a checkpoint.

        Parameters
        ----------
        present : str or sequence of bool
            True or "1" for each whole page of a prompt that has a checkpoint at its end.
        page_size : int
            Tokens per page.

        Returns
        -------
        hit_pages, holes : int
            Pages of the prefix, and pages before the page with the checkpoint.
        """
        count("page_size", page_size, "give the tokens of a page")
        pages = pages_present(present)
        hit = max((i for i, is_there in enumerate(pages, 1) if is_there), default=0)
        return hit, max(0, hit - 1)


def _arrays(arrays: Any) -> FrozenMap[str, tuple[tuple[int, ...], str]]:
    if not isinstance(arrays, Mapping):
        raise TypeError(
            f"arrays is a {type(arrays).__name__}, must be a dict of name to (shape, dtype)"
        )
    if not arrays:
        raise ValueError("arrays is empty, must name the arrays of a layer; leave the group out")
    return FrozenMap(sorted((_name(name), _array(name, array)) for name, array in arrays.items()))


def _name(name: Any) -> str:
    if not isinstance(name, str):
        raise TypeError(f"arrays has a {type(name).__name__} for a name, must be a str")
    return name


def _array(name: str, array: Any) -> tuple[tuple[int, ...], str]:
    if not isinstance(array, (tuple, list)) or len(array) != 2:
        raise TypeError(f"arrays[{name!r}] is {array!r}, must be (shape, dtype)")
    shape, dtype = array
    if isinstance(shape, str) or not isinstance(shape, Sequence):
        raise TypeError(f"the shape of {name!r} is {shape!r}, must be a tuple of ints")
    if not isinstance(dtype, str):
        raise TypeError(f"the dtype of {name!r} is a {type(dtype).__name__}, must be a str")
    try:
        itemsize(dtype)
    except ValueError as error:
        raise ValueError(f"the {error}; it is the dtype of the array {name!r}") from None
    sizes = tuple(
        integer(f"a dimension of {name!r}", each, 1, MOST) for each in islice(shape, _MOST_DIMS + 1)
    )
    if len(sizes) > _MOST_DIMS:
        raise ValueError(f"the shape of {name!r} has too many dimensions, at most {_MOST_DIMS}")
    return sizes, dtype


# ---- names of kinds ------------------------------------------------------------------------------


def described(group: AttentionGroup | State) -> dict[str, Any]:
    """Describe a group for JSON: its kind, the number of its layers, and the tokens they keep.

    Notes
    -----
    ``kind`` is "full", "window", "chunk" or "state". ``keeps`` is the number of tokens of the
    window or chunk, None for other kinds.
    """
    return {"kind": _kind(group), "layers": len(group.layers), "keeps": kept_tokens(group)}


def kept_tokens(group: AttentionGroup | State) -> int | None:
    """Return the tokens of the window or chunk of a group; None for other kinds."""
    if isinstance(group, SlidingWindow):
        return group.window
    return group.chunk if isinstance(group, ChunkedLocal) else None


def _kind(group: AttentionGroup | State) -> str:
    if isinstance(group, State):
        return "state"
    if isinstance(group, SlidingWindow):
        return "window"
    return "chunk" if isinstance(group, ChunkedLocal) else "full"
