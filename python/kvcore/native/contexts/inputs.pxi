# SPDX-License-Identifier: Apache-2.0
"""The inputs of kernels that fetch returns."""


cdef object copied(object array):
    """Return a copy of an array of a fetch; the copy of a PageTable is a plain array."""
    return np.array(array) if isinstance(array, np.ndarray) else array.copy()


@cython.final
cdef class PoolViews:
    """Hold views of the layers of one pool for ``kvcore.ops``. All inputs over the pool share them.

    The views are used as long as the arrays of the pool keep memory, shape, dtype and write flag.
    """

    cdef bint are_current(self):
        """Return True if the arrays of the pool are unchanged since they were viewed."""
        return self.arrays is not None and are_unchanged(self.arrays)


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
        self._views = self._bound = None

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
        inputs._views = self._views
        return inputs

    def _viewed_arrays(self):
        """Return (array, view) for each array of the pool; None before `_keep_rows` or a change."""
        cdef PoolViews views = self._views
        return None if views is None or not views.are_current() else views.arrays

    def _layer_rows(self, layer):
        """Return the view of a layer that inputs over the same pool have made, or None."""
        cdef PoolViews views = self._views
        return None if views is None or not views.are_current() else views.rows.get(layer)

    def _keep_rows(self, layer, rows, tuple arrays not None):
        """Keep the view of a layer over `arrays`, pairs (array, view), until an array changes."""
        if self._views is None:
            self._views = PoolViews()
        if self._views.arrays is not arrays:
            self._views.arrays, self._views.rows = arrays, {}
        self._views.rows[layer] = rows

    def _bound_layer(self, layer):
        """Return the layer as bound to this batch; None if it is not bound or an array changed."""
        cdef dict bound = self._bound
        cdef PoolViews views = self._views
        entry = None if bound is None else bound.get(layer)
        if entry is None or not views.are_current():
            return None
        found, rows, arrays = <tuple>entry
        return found if views.rows.get(layer) is rows and are_unchanged(arrays) else None

    def _bind_layer(self, layer, found, rows, *arrays):
        """Keep a bound layer until its rows or one of the arrays (array, view) change."""
        if self._bound is None:
            self._bound = {}
        self._bound[layer] = found, rows, arrays

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
        inputs.blocks, inputs.kv_scales, inputs._views = blocks, kv_scales, None
        return inputs

    def __copy__(self):
        cdef RaggedKVCacheInputs inputs = new_inputs(
            self.blocks, self.cache_lengths, self.lookup_table, self.max_lengths, self.kv_scales
        )
        inputs._tables, inputs._states, inputs._layers = self._tables, self._states, self._layers
        inputs._loads, inputs._fetched = self._loads, self._fetched
        inputs._new_lengths, inputs._row_offsets = self._new_lengths, self._row_offsets
        inputs._views = self._views
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
