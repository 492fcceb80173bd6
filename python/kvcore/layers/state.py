# SPDX-License-Identifier: Apache-2.0
"""Layers that keep a state instead of tokens."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from kvcore.layers.checks import MOST, count, layer_indices, pages_present
from kvcore.layers.frozen_map import FrozenMap
from kvcore.support.arguments import integer
from kvcore.support.dtypes import itemsize

__all__ = ["State"]

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
        What one layer keeps of one request, by name: the shape on one device, the name of a dtype
        as in KVCacheParams. Held by name, as a mapping that can be hashed: the bytes of a slot lie
        in that order wherever they are stored.
    interval : int, optional
        Tokens between checkpoints, a multiple of the page size; none by default, then there are
        only those at ends of prompts and at branches.

    Raises
    ------
    ValueError
        No layer, a negative one, one twice; no array, a dimension below 1, an unknown dtype; an
        interval below 1.
    TypeError
        Another type than these.

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
        """Find the longest prefix at whose end there is a checkpoint.

        Parameters
        ----------
        present : str or sequence of bool
            For each whole page of a prompt whether there is a checkpoint at its end.
        page_size : int
            Tokens per page.

        Returns
        -------
        hit_pages, holes : int
            Pages of the prefix, and those before the one with the checkpoint.
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
        raise ValueError("arrays is empty, must name what a layer keeps; leave the group out")
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
        raise ValueError(f"the {error}; it is that of the array {name!r}") from None
    sizes = tuple(
        integer(f"a dimension of {name!r}", each, 1, MOST) for each in islice(shape, _MOST_DIMS + 1)
    )
    if len(sizes) > _MOST_DIMS:
        raise ValueError(f"the shape of {name!r} has too many dimensions, at most {_MOST_DIMS}")
    return sizes, dtype
