# SPDX-License-Identifier: Apache-2.0
"""Hold the options that every verb takes: a stream, threads, and arrays for results."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np

from kvcore.backends.host import HOST
from kvcore.backends.protocol import Place
from kvcore.backends.selection import any_array, call_array, place_of
from kvcore.native.contexts import offsets_viewer
from kvcore.support.arguments import MOST_UINT32, integers

__all__ = ["Options", "array_at", "documents_options", "offsets_at"]

_Verb = TypeVar("_Verb", bound=Callable[..., Any])

_PARAGRAPHS = {
    "stream": """\
stream : stream, optional
    Of the GPU that the arrays are on, of any library, or CUDA's handle; by default the current
    one of the library that the arrays are of. None for arrays in host memory.
""",
    "threads": """\
threads : int
    Threads to use, the caller's included.
""",
}
_NEXT_SECTION = re.compile(r"\n\n(?=\w+\n-{3,}\n)")


class Options:
    """Hold how a verb runs.

    Parameters
    ----------
    stream : stream, optional
        See ``kvcore.cuda.stream_handle``.
    threads : int
        Number of threads for the host's kernels, which check it.
    out : array or tuple of arrays, optional
        Arrays for results; new arrays by default.
    """

    __slots__ = ("out", "stream", "threads")

    def __init__(self, stream: Any = None, threads: int = 1, out: Any = None) -> None:
        self.stream = stream
        self.threads = threads
        self.out = out

    def place(self, arrays: dict[str, Any], *beside: Any) -> Place:
        """Return the device of all arrays of the call; see ``place_of``."""
        return place_of(self.stream, arrays, beside)

    def result(self, place: Place, given: Any, *fresh: Any) -> Any:
        """Return the caller's `out`, or the new arrays in the library of `given`."""
        if self.out is not None:
            return self.out
        made = tuple(place.in_library_of(given, array) for array in fresh)
        return made if len(made) > 1 else made[0]


def array_at(place: Place, given: Any, name: str) -> Any:
    """View a caller's array; raise ValueError if it is not on the call's device."""
    return place.checked(any_array(given, name), name)


def _other_offsets(place: Place, given: Any) -> Any:
    """Return a list, offsets of another dtype, or offsets of a GPU, as uint32.

    Raises
    ------
    TypeError
        Values that are not integers; int64 on a GPU, where the values are not checked.
    ValueError
        A number outside 0 .. 2^32 - 1.
    """
    array = given
    if isinstance(given, list | tuple | np.ndarray):
        if getattr(given, "dtype", None) != np.uint32:
            array = integers("row_offsets", given, 0, MOST_UINT32).astype(np.uint32)
    elif given.dtype == np.int32:  # an array on a GPU
        array = given.view(np.uint32)
    return place.index_array(array, "row_offsets")


#: Returns row offsets (place, value), an array of any integer dtype or a list, as uint32 on the
#: call's device.
offsets_at = offsets_viewer(HOST, call_array, _other_offsets)


def documents_options(verb: _Verb) -> _Verb:
    """Add the paragraphs of `stream` and `threads` to the parameters in a verb's docstring."""
    if verb.__doc__ is None:  # python -OO
        return verb
    text = inspect.cleandoc(verb.__doc__)
    taken = getattr(verb, "__kwdefaults__", None) or {}
    more = "".join(paragraph for name, paragraph in _PARAGRAPHS.items() if name in taken)
    before, title, after = text.partition("\nParameters\n----------\n")
    described, *others = _NEXT_SECTION.split(after, maxsplit=1)
    verb.__doc__ = "\n\n".join([f"{before}{title}{described}\n{more.rstrip()}", *others])
    return verb
