# SPDX-License-Identifier: Apache-2.0
from typing import Any, final

import numpy as np
from numpy.typing import NDArray
from typing_extensions import Self

from kvcore.layers.layer_map import LayerMap

class RaggedKVCacheInputs:
    """Hold what the kernels of one device need for one batch of B requests.

    Attributes
    ----------
    blocks : array [pages, kv_dim, layers, page_size, heads_per_device, head_dim], or pair, or None
        The pool; (K pool, V pool) when V has a width of its own; None when the manager has no pool.
    cache_lengths : uint32 [B]
        Tokens of each request whose KV is written.
    lookup_table : uint32 [B, most pages of a request]
        Page ids in logical order, padded with the number of pages as "unassigned". Rows may be
        strided. On the host read-only, for its memory serves later fetches. Only what DLPack makes
        of it may be written; what is written there lasts as long as it is held.
    max_lengths : uint32 [num_steps, 2], on the host
        Row 0: longest ``active_length``, longest ``active_idx``; row k: 1, ``row0[1] + k``.
    kv_scales : float32 [pages, kv_dim, layers, page_size, heads_per_device, groups], or None
        Scales of a quantised pool.

    Notes
    -----
    The arrays never change while anyone holds them, or an array over them.
    """

    def __init__(
        self,
        blocks: Any,
        cache_lengths: NDArray[np.uint32],
        lookup_table: NDArray[np.uint32],
        max_lengths: NDArray[np.uint32],
        kv_scales: Any = None,
        *,
        tables: tuple[NDArray[np.uint32], ...] | None = None,
        layers: LayerMap | None = None,
        states: tuple[NDArray[np.int32], ...] | None = None,
        row_offsets: NDArray[np.uint32] | None = None,
    ) -> None: ...
    def with_pool(self, blocks: Any, kv_scales: Any = None) -> RaggedKVCacheInputs:
        """Return the same inputs over a pool, such as a worker process has.

        Parameters
        ----------
        blocks : array, or pair of arrays
            As the manager's would be, on the device whose inputs these are.
        kv_scales : array, or pair of arrays, optional
            Of a quantised pool.

        Notes
        -----
        Nothing is copied and nothing checked: kernels check what they are given.
        """
    def __copy__(self) -> Self: ...
    def __deepcopy__(self, memo: Any) -> Self: ...
    @property
    def states(self) -> tuple[NDArray[np.int32], ...]:
        """The slot of each request's state, int32 [B] for each State group, a tuple.

        Rows of ``PagedKVCacheManager.states``; () without such groups. A slot contains what the
        model left there; where ``cache_lengths`` is 0 there is no state yet, whatever it contains.
        """
    @property
    def tables(self) -> tuple[NDArray[np.uint32], ...]:
        """The page table of each bundle of layers, uint32 [B, pages], a tuple.

        In the order of ``kvcore.groups.bundles``; where there is one, it is ``lookup_table``. Pages
        that no layer of the bundle reads any more, or that are not reserved yet, are "unassigned".
        """
    @property
    def _layers(self) -> LayerMap | None: ...
    @property
    def _loads(self) -> Any: ...
    @property
    def _fetched(self) -> Any: ...
    def _at(
        self, cache_lengths: NDArray[np.uint32], max_lengths: NDArray[np.uint32]
    ) -> RaggedKVCacheInputs: ...
    @property
    def blocks(self) -> Any: ...
    @property
    def cache_lengths(self) -> NDArray[np.uint32]: ...
    @property
    def lookup_table(self) -> NDArray[np.uint32]: ...
    @property
    def max_lengths(self) -> NDArray[np.uint32]: ...
    @property
    def kv_scales(self) -> Any: ...
    @property
    def row_offsets(self) -> NDArray[np.uint32]:
        """uint32 [B + 1]: row b's new tokens of this step are ``row_offsets[b] .. [b + 1]``.

        In host memory. Counted when it is asked for the first time; AttributeError for inputs made
        by hand whose rows may have more than one new token each.
        """

class PageTable(np.ndarray[Any, np.dtype[np.uint32]]):
    """A table of a fetch: read-only, for its memory is updated only where pages change.

    Consumers that ask for memory they may write, as DLPack's do, get it all the same: then the next
    fetch that uses the memory writes all of it.
    """

    def __dlpack__(self, **options: Any) -> Any: ...

@final
class TableMemory:
    """Own the memory of tables handed out, which nobody but this module may make writable."""

@final
class FetchBuffer:
    """Hold one page table and its lengths, used again for batch after batch.

    `allocate` returns uint32 [n] of pinned memory; None for memory that no device reads.
    """

@final
class FetchBuffers:
    """Hold the buffers of a manager's fetches: per replica the last few, used again when free."""
