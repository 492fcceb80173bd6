# SPDX-License-Identifier: Apache-2.0
"""Copy, fill and digest whole pages of a pool."""

from __future__ import annotations

from typing import Any, SupportsIndex

import numpy as np
from numpy.typing import NDArray

from kvcore.backends.arrays import is_on_gpu
from kvcore.backends.protocol import Place
from kvcore.backends.selection import any_array
from kvcore.ops.options import Options, documents_options
from kvcore.support.arguments import integer, integers

__all__ = ["checksum", "copy_pages", "fill_pages", "integer_array", "zero_pages"]


def _parts(blocks: Any) -> list[NDArray[Any]]:
    """Return the arrays of a pool, which is one array or a pair."""
    given = list(blocks) if isinstance(blocks, tuple) else [blocks]
    if not 1 <= len(given) <= 2:
        raise ValueError(f"blocks is a tuple of {len(given)}, must be a pair: K and V")
    return [any_array(part, "blocks") for part in given]


def _located(
    options: Options, blocks: Any, name: str, ids: Any, columns: int = 1
) -> tuple[Place, list[NDArray[Any]], Any]:
    """Return the device of a pool, its arrays, and page ids as kernels take them."""
    parts = _parts(blocks)
    place = options.place({"blocks": parts}, ids)
    return place, parts, place.index_array(integer_array(name, ids, columns), name)


def integer_array(name: str, values: Any, columns: int) -> NDArray[np.int64]:
    """Return integers as int64 [n], or [n, columns] for several columns; GPU arrays stay as given.

    Raises
    ------
    TypeError
        Other dtypes.
    ValueError
        Numbers outside int64.
    """
    if is_on_gpu(values):
        return any_array(values, name)  # type: ignore[no-any-return]
    array = integers(name, values)
    if array.size == 0:
        array = array.reshape((0,) if columns == 1 else (0, columns))
    return array


@documents_options
def copy_pages(blocks: Any, pairs: Any, *, stream: Any = None, threads: int = 1) -> None:
    """Copy pages within a pool, in all layers.

    Parameters
    ----------
    blocks : array [pages, ...], or pair of arrays
        The pool; a page is one contiguous run of bytes.
    pairs : integers [n, 2]
        Source and destination of each copy. For a pool on a GPU they may come from the host, or be
        int64 on the GPU. Pairs on the GPU are not checked, and a pair with a page outside the pool
        is skipped.

    Raises
    ------
    IndexError
        A page outside the pool.
    ValueError
        A page that is a source and a destination, or a destination twice; a strided or read-only
        pool, a pool whose elements share memory, or two arrays that share memory. Nothing has been
        copied, in either array of a pair.
    TypeError
        Pairs that are not integers; `blocks` that is not an array.

    Examples
    --------
    >>> import numpy as np
    >>> from kvcore import ops
    >>> pool = np.arange(6).reshape(3, 2)
    >>> ops.copy_pages(pool, [(0, 2)])
    >>> pool.tolist()
    [[0, 1], [2, 3], [0, 1]]
    """
    options = Options(stream, threads)
    place, parts, wanted = _located(options, blocks, "pairs", pairs, 2)
    place.kernels.copy_pages(parts, wanted, *place.launch_args(options.threads))


@documents_options
def zero_pages(blocks: Any, ids: Any, *, stream: Any = None, threads: int = 1) -> None:
    """Fill pages of a pool with zeros.

    Parameters
    ----------
    blocks : array [pages, ...], or pair of arrays
    ids : integers [n]
        On a GPU as for ``copy_pages``.

    Raises
    ------
    IndexError, ValueError, TypeError
        As for ``copy_pages``.
    """
    fill_pages(blocks, ids, 0, stream=stream, threads=threads)


@documents_options
def fill_pages(
    blocks: Any, ids: Any, byte: SupportsIndex, *, stream: Any = None, threads: int = 1
) -> None:
    """Fill pages of a pool with a byte.

    Parameters
    ----------
    blocks : array [pages, ...], or pair of arrays
    ids : integers [n]
        On a GPU as for ``copy_pages``.
    byte : int
        0 .. 255. 0xff is NaN in every floating dtype of a cache: fill free pages with it, and any
        read after a sequence's end becomes visible.

    Raises
    ------
    IndexError, ValueError, TypeError
        As for ``copy_pages``, or a byte outside 0 .. 255.

    Examples
    --------
    >>> import numpy as np
    >>> from kvcore import ops
    >>> pool = np.zeros((2, 3), np.float16)
    >>> ops.fill_pages(pool, [1], 0xff)
    >>> pool.tolist()
    [[0.0, 0.0, 0.0], [nan, nan, nan]]
    """
    value = integer("byte", byte, 0, 255)
    options = Options(stream, threads)
    place, parts, wanted = _located(options, blocks, "ids", ids)
    place.kernels.fill_pages(parts, wanted, value, *place.launch_args(options.threads))


@documents_options
def checksum(blocks: Any, ids: Any, *, stream: Any = None, threads: int = 1) -> Any:
    """Return a digest of each page's bytes, to compare pages without copying them.

    Parameters
    ----------
    blocks : array [pages, ...], or pair of arrays
        The digests of a pair's two arrays are added.
    ids : integers [n]
        On a GPU as for ``copy_pages``; the digest of a page outside the pool is 0.

    Returns
    -------
    uint64 [n]
        On the pool's GPU, if it has one. The same bytes have the same digest on every machine. The
        digest detects accidental changes, not deliberate ones.

    Raises
    ------
    IndexError, ValueError, TypeError
        As for ``copy_pages``.
    """
    options = Options(stream, threads)
    place, parts, wanted = _located(options, blocks, "ids", ids)
    return place.digest_pages(parts, wanted, options.threads)
