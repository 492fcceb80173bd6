# SPDX-License-Identifier: Apache-2.0
"""The inputs of kernels that fetch returns."""


cdef object copied(object array):
    """Return a copy of an array of a fetch; the copy of a PageTable is a plain array."""
    return np.array(array) if isinstance(array, np.ndarray) else array.copy()


cdef class RaggedKVCacheInputs:
    """The inputs of the kernels of one device for one batch of B requests.

    Attributes
    ----------
    blocks : array [pages, kv_dim, layers, page_size, heads_per_device, head_dim], or pair, or None
        The pool; (K pool, V pool) if V has another width than K; None if the manager has no pool.
    cache_lengths : uint32 [B]
        Number of tokens of each request whose KV is written.
    lookup_table : uint32 [B, most pages of a request]
        Page ids in logical order, padded with the number of pages as "unassigned". Rows may be
        strided. On the host the array is read-only, because later fetches reuse its memory. Only a
        DLPack export of it may be written; written values last as long as the export is held.
    max_lengths : uint32 [num_steps, 2], on the host
        Row 0: longest ``active_length``, longest ``active_idx``; row k: 1, ``row0[1] + k``.
    kv_scales : float32 [pages, kv_dim, layers, page_size, heads_per_device, groups], or None
        Scales of a quantised pool.

    Notes
    -----
    The arrays never change while there is a reference to them, or to an array over them.
    """

    def __init__(self, blocks, cache_lengths, lookup_table, max_lengths, kv_scales=None, *,
                 tables=None, layers=None, states=None, row_offsets=None):
        self._tables = tables
        self._states = states
        self._layers = layers
        self.blocks = blocks
        self.cache_lengths = cache_lengths
        self.lookup_table = lookup_table
        self.max_lengths = max_lengths
        self.kv_scales = kv_scales
        self._row_offsets = row_offsets

    @property
    def row_offsets(self):
        """uint32 [B + 1]: the new tokens of row b in this step are ``row_offsets[b] .. [b + 1]``.

        In host memory. Computed at the first access; AttributeError for inputs made by hand whose
        rows may have more than one new token each.
        """
        cdef Py_ssize_t rows
        if self._row_offsets is None:
            rows = len(self.cache_lengths)
            offsets = np.arange(rows + 1, dtype=np.uint32)
            if self._new_lengths is not None:
                np.cumsum(self._new_lengths[:rows], out=offsets[1:])
            elif len(self.max_lengths) == 0 or self.max_lengths[0, 0] > 1:
                raise AttributeError(
                    "inputs made by hand have no row_offsets; use the inputs that fetch returns"
                )
            self._row_offsets = offsets
        return self._row_offsets

    @property
    def tables(self):
        """The page table of each bundle of layers, uint32 [B, pages], a tuple.

        In the order of ``kvcore.groups.bundles``; a single bundle has ``lookup_table``. Pages that
        no layer of the bundle reads any more, or that are not reserved yet, are "unassigned".
        """
        return (self.lookup_table,) if self._tables is None else self._tables

    @property
    def states(self):
        """The slot of each request's state, int32 [B] for each State group, a tuple.

        Rows of ``PagedKVCacheManager.states``; () without State groups. A slot contains the last
        state that the model wrote. If ``cache_lengths`` is 0, the request has no state yet, and the
        slot may contain anything.
        """
        return () if self._states is None else self._states

    def _at(self, cache_lengths, max_lengths):
        """Return the inputs of a later step of the same fetch."""
        cdef RaggedKVCacheInputs inputs = RaggedKVCacheInputs(
            self.blocks, cache_lengths, self.lookup_table, max_lengths, self.kv_scales,
            tables=self._tables, layers=self._layers, states=self._states,
        )
        inputs._loads, inputs._fetched = self._loads, self._fetched
        return inputs

    def with_pool(self, blocks, kv_scales=None):
        """Return the same inputs with another pool, for example the pool of a worker process.

        Parameters
        ----------
        blocks : array, or pair of arrays
            In the form of the manager's pool, on the device of these inputs.
        kv_scales : array, or pair of arrays, optional
            Scales of a quantised pool.

        Notes
        -----
        Copies nothing and checks nothing: kernels check their arguments.
        """
        cdef RaggedKVCacheInputs inputs = self.__copy__()
        inputs.blocks, inputs.kv_scales = blocks, kv_scales
        return inputs

    def __copy__(self):
        cdef RaggedKVCacheInputs inputs = new_inputs(
            self.blocks, self.cache_lengths, self.lookup_table, self.max_lengths, self.kv_scales
        )
        inputs._tables, inputs._states, inputs._layers = self._tables, self._states, self._layers
        inputs._loads, inputs._fetched = self._loads, self._fetched
        inputs._new_lengths, inputs._row_offsets = self._new_lengths, self._row_offsets
        return inputs

    def __deepcopy__(self, memo):
        cdef RaggedKVCacheInputs inputs = self.__copy__()  # shares the pool of the manager
        inputs.cache_lengths = copied(self.cache_lengths)
        inputs.lookup_table = copied(self.lookup_table)
        inputs.max_lengths = copied(self.max_lengths)
        if self._tables is not None:
            inputs._tables = (inputs.lookup_table, *[copied(table) for table in self._tables[1:]])
        if self._states is not None:
            inputs._states = tuple([copied(slots) for slots in self._states])
        return inputs

    def __repr__(self):
        shapes = ", ".join(
            f"{name}={getattr(getattr(self, name), 'shape', None)}"
            for name in ("blocks", "cache_lengths", "lookup_table", "max_lengths", "kv_scales")
        )
        return f"RaggedKVCacheInputs({shapes})"
