# SPDX-License-Identifier: Apache-2.0
"""Stores below the host tier: Python objects as arguments of the C++ StoreReader and StoreWriter.

A column is a whole page of a prompt; with groups of layers, as many tokens as the largest page.
"""

cdef extern from "store_callbacks.hpp" namespace "kvcore::python" nogil:
    void translate_load_error()


cdef extern from "kvcore/lower_store.hpp" namespace "kvcore" nogil:
    cdef cppclass CppLowerStore "kvcore::LowerStore":
        pass
    cdef cppclass StoreHooks:
        pass
    cdef cppclass ColumnRange:
        const StoreMoves& moves
        size_t first
        size_t n
        const PageKey& key(size_t i)


cdef extern from "kvcore/store_reader.hpp" namespace "kvcore" nogil:
    cdef cppclass NextColumn:
        vector[PageKey] keys
    cdef cppclass CppLowerSearch "kvcore::LowerSearch":
        CppLowerSearch(
            CacheManager& manager, const StoreSearch& found, string_view name_space,
            const TokenId* tokens, NextColumn next
        ) except +translate_exception
    cdef cppclass CppReaderOptions "kvcore::StoreReader::Options":
        int64_t page_bytes
        int64_t state_bytes
        int64_t batch_bytes
        double seconds
    cdef cppclass CppStoreReader "kvcore::StoreReader":
        CppStoreReader(
            CacheManager& manager, vector[CppLowerStore*] stores, StoreHooks& hooks,
            const CppReaderOptions& options
        ) except +translate_exception
        bint has(NextColumn& next) except +translate_load_error
        int32_t reach(CppLowerSearch& search) except +translate_load_error
        void load(CppLowerSearch& search) except +translate_load_error
        void forget()
        void switch_off()
        bint is_off()
        bint close(double seconds) except +translate_load_error


cdef extern from "kvcore/store_writer.hpp" namespace "kvcore" nogil:
    cdef cppclass CppWriteBatch "kvcore::StoreWriter::Batch":
        StoreMoves moves
    cdef cppclass CppStoreWriter "kvcore::StoreWriter":
        CppStoreWriter(
            CacheManager& manager, vector[CppLowerStore*] stores
        ) except +translate_exception
        bint take(int64_t most, CppWriteBatch& out) except +translate_exception
        int64_t write(const CppWriteBatch& batch) except +translate_load_error
        void finish(CppWriteBatch& batch)
        void forget()


# Functions that C++ calls. They take the GIL; -1 reports that a Python error is set.
ctypedef int (*PrepareFunction)(void*, const StoreMoves&) except -1
ctypedef int (*HookFunction)(void*) except -1
ctypedef int (*PartsFunction)(void*, const PageKey*, size_t, uint64_t*) except -1
ctypedef int64_t (*ReadFunction)(void*, const ColumnRange&, uint64_t*) except -1
ctypedef int64_t (*WriteFunction)(void*, const StoreMoves&, const vector[size_t]&) except -1
ctypedef int (*RemoveFunction)(void*, const vector[PageKey]&) except -1


cdef extern from "store_callbacks.hpp" namespace "kvcore::python" nogil:
    cdef cppclass HookFunctions:
        PrepareFunction prepare
        HookFunction make_room
        HookFunction check_interrupt
    cdef cppclass CallbackHooks(StoreHooks):
        CallbackHooks(void* self, HookFunctions functions)
    cdef cppclass StoreFunctions:
        PartsFunction parts_of
        ReadFunction read
        WriteFunction write
        RemoveFunction remove
    cdef cppclass CallbackStore(CppLowerStore):
        CallbackStore(void* self, StoreFunctions functions)


# ---- stores and hooks of Python ------------------------------------------------------------------


@cython.final
@cython.no_gc_clear  # C++ calls it until the reader and the writer are destroyed
cdef class PythonStore:
    """A store of Python as a lower store of C++.

    Parameters
    ----------
    adapter : kvcore.stores.tiers.adapters.RecordAdapter
    memory : kvcore.stores.tiers.memory.HostMemory
    """

    cdef object adapter
    cdef object memory
    cdef CallbackStore* native

    def __cinit__(self, adapter, memory):
        cdef StoreFunctions functions
        functions.parts_of = parts_of_store
        functions.read = read_store
        functions.write = write_store
        functions.remove = remove_from_store
        self.adapter = adapter
        self.memory = memory
        self.native = new CallbackStore(<void*>self, functions)

    def __dealloc__(self):
        del self.native


cdef int parts_of_store(
    void* self, const PageKey* keys, size_t n, uint64_t* parts
) except -1 with gil:
    cdef PythonStore store = <PythonStore>self
    cdef size_t i
    cdef list found = store.adapter.parts_of([bytes_of(keys[i]) for i in range(n)])
    for i in range(n):
        parts[i] = found[i]
    return 0


cdef int64_t read_store(
    void* self, const ColumnRange& columns, uint64_t* parts
) except -1 with gil:
    cdef PythonStore store = <PythonStore>self
    cdef size_t i
    cdef list keys = [bytes_of(columns.key(i)) for i in range(columns.n)]
    cdef list places = listed_parts(columns.moves)[columns.first:columns.first + columns.n]
    cdef list found = store.adapter.read(keys, store.memory.places(columns.moves.replica, places))
    for i in range(<size_t>len(found)):
        parts[i] = found[i]
    return len(found)


cdef int64_t write_store(
    void* self, const StoreMoves& moves, const vector[size_t]& columns
) except -1 with gil:
    cdef PythonStore store = <PythonStore>self
    cdef size_t i
    cdef list keys = [bytes_of(moves.keys[columns[i]]) for i in range(columns.size())]
    cdef list all_parts = listed_parts(moves)
    cdef list places = [all_parts[columns[i]] for i in range(columns.size())]
    return store.adapter.write(keys, store.memory.places(moves.replica, places))()


cdef int remove_from_store(void* self, const vector[PageKey]& keys) except -1 with gil:
    cdef size_t i
    (<PythonStore>self).adapter.remove([bytes_of(keys[i]) for i in range(keys.size())])
    return 0


@cython.final
@cython.no_gc_clear  # C++ calls the stores until the reader and the writer are destroyed
cdef class LowerStores:
    """The stores below a host tier.

    Parameters
    ----------
    stores : list
        In the order in which they are searched: ``kvcore._core.DiskLowerStore``, and adapters of
        other stores.
    memory : kvcore.stores.tiers.memory.HostMemory
    """

    cdef object memory
    cdef list stores  # keeps the C++ stores alive
    cdef vector[CppLowerStore*] native

    def __cinit__(self, list stores not None, memory):
        self.memory = memory
        self.stores = []
        for store in stores:
            if isinstance(store, DiskLowerStore):
                self.native.push_back(
                    <CppLowerStore*>PyCapsule_GetPointer(store._capsule(), "kvcore.LowerStore")
                )
            else:
                store = PythonStore(store, memory)
                self.native.push_back((<PythonStore>store).native)
            self.stores.append(store)


# ---- loads ---------------------------------------------------------------------------------------


cdef int prepare_fill(void* self, const StoreMoves& fill) except -1 with gil:
    cdef BlockId last = -1
    cdef size_t i
    for i in range(fill.parts.size()):
        if fill.parts[i].part != STATE_PART:
            last = max(last, fill.parts[i].page)
    (<StoreReader>self).stores.memory.prepare(fill.replica, last)
    return 0


cdef int make_room(void* self) except -1 with gil:
    return 1 if (<StoreReader>self).drain() else 0


cdef int check_interrupt(void* self) except -1 with gil:
    PyErr_CheckSignals()
    return 0


@cython.final
@cython.no_gc_clear  # C++ calls the stores until `__dealloc__`
cdef class StoreReader:
    """Load the columns of prompts from lower stores into the host tier, without the GIL.

    Parameters
    ----------
    side : StoreSide
    stores : LowerStores
    drain : callable
        Waits a limited time until queued pages, which take room in the host tier, are written;
        returns whether pages were queued.
    batch_bytes : int
        Approximate number of bytes of a read.
    seconds : float
        Time limit for waiting until another thread has read pages.

    Notes
    -----
    Any number of threads may use it. A failure does not raise: it shortens the hit.
    """

    cdef StoreSide side
    cdef LowerStores stores
    cdef object drain
    cdef CallbackHooks* hooks
    cdef CppStoreReader* native
    cdef bint is_left  # to the parent of this process

    def __cinit__(
        self, StoreSide side not None, LowerStores stores not None, drain, *, int64_t batch_bytes,
        double seconds
    ):
        cdef HookFunctions functions
        cdef CppReaderOptions options
        self.side = side
        self.stores = stores
        self.drain = drain
        functions.prepare = prepare_fill
        functions.make_room = make_room
        functions.check_interrupt = check_interrupt
        self.hooks = new CallbackHooks(<void*>self, functions)
        options.page_bytes = stores.memory.bytes_of(0)
        options.state_bytes = stores.memory.bytes_of(STATE_PART)
        options.batch_bytes = batch_bytes
        options.seconds = seconds
        self.native = new CppStoreReader(
            side.native[0], stores.native, self.hooks[0], options
        )

    def __dealloc__(self):
        if self.is_left:  # a thread of the parent may have had a lock of the reader
            return
        if self.native != NULL and not self.native.close(0):
            Py_INCREF(self.stores)  # a store that hangs may use the memory forever
            Py_INCREF(self.side)
            return
        del self.native
        del self.hooks

    def reach(self, LowerSearch search not None):
        """Return the number of columns of a prompt that the tiers report, without reading them."""
        cdef int32_t end
        with nogil:
            end = self.native.reach(search.native[0])
        return end

    def load(self, LowerSearch search not None):
        """Load the pages that extend the hit of a prompt into the host tier."""
        try:
            with nogil:
                self.native.load(search.native[0])
        except Exception:  # every failure only shortens the hit
            if not self.native.is_off():
                log.exception("pages could not be loaded from the stores below the host tier")

    def forget(self):
        """Discard the pages that are in flight now: no search finds them."""
        with nogil:
            self.native.forget()

    def switch_off(self):
        """From now on, `load` does nothing, and requests do not search the stores."""
        self.native.switch_off()

    def leave_to_parent(self):
        """Switch the reader off for ever, in a child of fork, which has no threads."""
        self.is_left = True
        self.native.switch_off()

    def close(self, timeout):
        """Switch the reader off, and wait for reads that exceeded the time limit.

        Parameters
        ----------
        timeout : float or None
            Seconds; None without limit.
        """
        cdef double seconds = -1 if timeout is None else timeout
        cdef bint is_over
        with nogil:
            is_over = self.native.close(seconds)
        if is_over:  # otherwise the stores use the memory until this object is destroyed
            self.stores = None


# ---- writes --------------------------------------------------------------------------------------


@cython.final
@cython.no_gc_clear  # StoreWrites call it until their `__dealloc__`
cdef class StoreWriter:
    """Write the columns that arrived in the host tier to the stores, without the GIL.

    Parameters
    ----------
    side : StoreSide
    stores : LowerStores

    Notes
    -----
    Any number of threads may use it, each for its own writes.
    """

    cdef StoreSide side
    cdef LowerStores stores
    cdef CppStoreWriter* native

    def __cinit__(self, StoreSide side not None, LowerStores stores not None):
        self.side = side
        self.stores = stores
        self.native = new CppStoreWriter(side.native[0], stores.native)

    def __dealloc__(self):
        del self.native

    def take(self, most):
        """Take up to `most` waiting columns to write; return None if no column waits."""
        cdef int64_t n = as_int(most, "most")
        cdef StoreWrites made = StoreWrites.__new__(StoreWrites)
        made.writer = self
        with nogil:
            self.native.take(n, made.batch)
        return made if made.batch.moves.ticket != 0 else None

    def forget(self):
        """Remove pages in flight from the stores after they are written."""
        self.native.forget()


@cython.final
@cython.no_gc_clear  # `__dealloc__` calls the writer
cdef class StoreWrites:
    """Pages of the host tier that are being written to stores; kept unchanged until ``finish``.

    Attributes
    ----------
    replica : int
    """

    cdef StoreWriter writer
    cdef CppWriteBatch batch

    def __dealloc__(self):
        if self.writer is not None:
            self.writer.native.finish(self.batch)

    def __len__(self):
        return self.batch.moves.keys.size()

    @property
    def replica(self):
        return self.batch.moves.replica

    def write(self):
        """Write the columns to all stores; return the number that some store does not have."""
        cdef int64_t lost
        with nogil:
            lost = self.writer.native.write(self.batch)
        return lost

    def finish(self):
        """Let the host tier evict these pages again, whether they were written or not."""
        with nogil:
            self.writer.native.finish(self.batch)


# ---- searches ------------------------------------------------------------------------------------


# Called before a request is reserved, if there are stores: search the stores for the request's
# columns, for a hit of at most `max_hit` tokens, and load these columns, unless the request waits
# for them (`now` is false).
cdef int bring(
    Settler settler, RequestView* request, object context, bint now, int64_t max_hit
) except -1:
    cdef StoreReader reader = settler.store_reader
    cdef StoreSearch found
    cdef NextColumn following
    cdef LowerSearch search
    cdef bint has_more
    if request.active - request.start <= 1 or reader.native.is_off():
        return 0
    found = settler.native.search_below(request[0], max_hit)
    if found.most == 0:
        return 0
    if found.legal == found.have and not found.has_gaps:
        following.keys.resize(found.have + 1 - found.stored)
        settler.native.keys_below(
            request.name_space, request.tokens, found.stored, found.have + 1, found.parent,
            following.keys.data(),
        )
        with nogil:
            has_more = reader.native.has(following)
        if not has_more:
            return 0
    search = LowerSearch.__new__(LowerSearch)
    search.max_hit = None if max_hit == INT64_MAX else max_hit
    if isinstance(context, TextGenerationContext):
        search.holder = (<TextGenerationContext>context)._keys
    else:
        search.holder = context
    search.begin(reader.side, found, request.name_space, request.tokens, following)
    if settler.onload is None or now:
        reader.load(search)
    else:
        settler.onload.begin(search, context)
    return 0


# The same for the requests of a batch. No other code has a reference to `contexts`.
cdef int bring_all(
    Settler settler, vector[RequestView*]& rows, list contexts, bint now
) except -1:
    cdef size_t i
    for i in range(rows.size()):
        bring(settler, rows[i], contexts[i], now, INT64_MAX)
    return 0


@cython.final
cdef class LowerSearch:
    """A search of the lower stores for the columns of a prompt.

    Attributes
    ----------
    have : int
        Number of columns of the prompt in the device or the host tier, whichever has more.
    legal : int
        Number of columns that a hit could use from both tiers together.
    max_hit : int or None
        The longest hit that the request accepts, in tokens; None without a limit.

    Notes
    -----
    One thread at a time.
    """

    cdef StoreSide side
    cdef object holder  # keeps the stand-ins of the tokens with extra keys alive
    cdef StoreSearch found
    cdef CppLowerSearch* native
    cdef readonly object max_hit

    def __dealloc__(self):
        del self.native

    @property
    def have(self):
        return self.found.have

    @property
    def legal(self):
        return self.found.legal

    cdef int begin(
        self, StoreSide side, const StoreSearch& found, string_view name_space,
        const TokenId* tokens, NextColumn& following
    ) except -1:
        self.side = side
        self.found = found
        self.native = new CppLowerSearch(
            side.native[0], found, name_space, tokens, move(following)
        )
        return 0


def search_prefix(
    StoreSide side not None, tokens, extra_key=None, cache_salt=None, replica_idx=0, *,
    extra_keys=None
):
    """Search for a prefix as ``reserve`` does; return None if stores cannot extend the hit.

    Parameters
    ----------
    side : StoreSide
    tokens : list of int, or array int32 or int64 [n]
    extra_key, cache_salt : str, optional
    replica_idx : int
    extra_keys : list of (int, int, bytes), optional
        The extra keys of a context that start before token `n`.

    Returns
    -------
    LowerSearch or None

    Raises
    ------
    IndexError, ValueError, TypeError
    """
    cdef cnp.ndarray source = as_tokens(tokens)
    cdef int64_t n = cnp.PyArray_DIM(source, 0)
    cdef const int32_t* data = <const int32_t*>cnp.PyArray_DATA(source)
    cdef bytes name = namespace_of(extra_key, cache_salt)
    cdef int64_t replica = as_int(replica_idx, "replica_idx")
    cdef tuple keys = as_extra_keys(extra_keys, n, False)
    cdef ExtraKeys shown = None
    cdef StoreSearch found
    cdef NextColumn following
    cdef LowerSearch search = LowerSearch.__new__(LowerSearch)
    if keys is not None:
        shown = show_tokens(keys, data, n, n)
        data = shown.tokens()
    found = side.native.search_below(<int32_t>replica, name_view(name), data, n)
    if found.most == 0:
        return None
    search.holder = shown
    search.begin(side, found, name_view(name), data, following)
    return search
