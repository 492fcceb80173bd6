# SPDX-License-Identifier: Apache-2.0
"""The buffers of the arrays that a fetch returns."""


@cython.final
cdef class TableMemory:
    """Owns the memory of returned tables; only this module may make it writable."""

    cdef cnp.ndarray array
    cdef bint is_exported


class PageTable(np.ndarray):
    """A table of a fetch; read-only, because later fetches write only the changed entries.

    DLPack exports it as writable memory. After an export, the next fetch that uses the memory
    writes all entries.
    """

    __slots__ = ()

    def __dlpack__(self, **options):
        owner = self
        while isinstance(owner, np.ndarray):
            owner = owner.base
        if self.flags.writeable or type(owner) is not TableMemory:
            return super().__dlpack__(**options)  # a copy that the caller owns
        (<TableMemory>owner).is_exported = True
        cdef cnp.ndarray view = self.view(np.ndarray)
        cnp.PyArray_ENABLEFLAGS(view, cnp.NPY_ARRAY_WRITEABLE)
        return view.__dlpack__(**options)


cdef object page_table = PageTable
cdef object UINT32 = np.dtype(np.uint32)
cdef int HANDED_OUT = cnp.NPY_ARRAY_ALIGNED | cnp.NPY_ARRAY_WRITEABLE  # flags to compare


@cython.final
cdef class FetchBuffer:
    """A page table and its lengths, reused for later batches.

    `allocate` returns uint32 [n] of pinned memory; None for memory that no device reads.
    """

    cdef cnp.ndarray memory  # pinned memory of table and lengths; None if it is not pinned
    cdef cnp.ndarray table
    cdef cnp.ndarray lengths
    cdef cnp.ndarray new_lengths  # the returned inputs hold a reference
    cdef cnp.ndarray states  # slots of the last fetch; the returned inputs hold a reference
    cdef TableMemory held  # the returned tables hold a reference
    cdef LookupTable* rows
    cdef bint busy  # a fetch in progress writes the buffer
    # The arrays returned last; returned again if the caller has dropped them.
    cdef cnp.ndarray last_table
    cdef cnp.ndarray last_lengths

    def __cinit__(self, int64_t max_rows, int64_t width, uint32_t unassigned, object allocate):
        cdef cnp.npy_intp shape[2]
        # Rows are an odd number of cache lines apart, so that their ends do not share cache sets.
        cdef int64_t stride = (width + 15) // 16
        stride = 16 * (stride + 1 - stride % 2)
        shape[0] = max_rows
        shape[1] = stride
        if allocate is None:
            self.table = cnp.PyArray_SimpleNew(2, shape, cnp.NPY_UINT32)
            self.lengths = cnp.PyArray_SimpleNew(1, shape, cnp.NPY_UINT32)
            self.held = TableMemory.__new__(TableMemory)
            self.held.array = self.table
        else:  # one block, so that a single copy moves both to a device
            self.memory = allocate(max_rows * (stride + 1))
            self.lengths = self.memory[:max_rows]
            self.table = self.memory[max_rows:].reshape(max_rows, stride)
        self.rows = new LookupTable(
            <uint32_t*>cnp.PyArray_DATA(self.table), max_rows, stride, unassigned
        )

    def __dealloc__(self):
        del self.rows

    cdef bint is_free(self):
        """Return True if the caller has dropped all arrays returned earlier."""
        if self.busy:
            return False
        if unlikely(self.memory is not None):
            # 3 references: `memory`, and the bases of table and lengths
            return Py_REFCNT(<PyObject*>self.memory) == 3
        return (
            is_left(<PyObject*>self.last_table, <PyObject*>self.held)
            and is_left(<PyObject*>self.last_lengths, <PyObject*>self.lengths)
        )

    cdef cnp.ndarray unread_new_lengths(self):
        """Return memory for a count per row to which no returned inputs refer."""
        cdef cnp.npy_intp rows = self.rows.max_rows()
        if self.new_lengths is None or Py_REFCNT(<PyObject*>self.new_lengths) > 1:
            self.new_lengths = cnp.PyArray_SimpleNew(1, &rows, cnp.NPY_UINT32)
        return self.new_lengths

    cdef cnp.ndarray new_states(self):
        """Return new memory for a slot per row of a fetch; later fetches do not write to it."""
        cdef cnp.npy_intp rows = self.rows.max_rows()
        self.states = cnp.PyArray_SimpleNew(1, &rows, cnp.NPY_INT32)
        return self.states

    cdef int take(self) except -1:
        """Take the buffer for a fetch; the fetch writes all entries if the table was exported."""
        self.busy = True
        if unlikely(self.held is not None and self.held.is_exported):
            self.rows.forget()
            self.held.is_exported = False
        return 0


@cython.final
cdef class FetchBuffers:
    """The buffers of a manager's fetches: the last few per replica, reused when free."""

    cdef list by_replica
    cdef uint32_t unassigned  # the padding of the tables
    cdef object allocate  # uint32 [n] of pinned memory; None for memory that no device reads

    def __cinit__(self, int32_t num_replicas, uint32_t unassigned, object allocate):
        self.by_replica = [[] for _ in range(num_replicas)]
        self.unassigned = unassigned
        self.allocate = allocate

    cdef FetchBuffer take(self, int32_t replica, int64_t rows, int64_t width):
        """Take a free buffer of at least this size, or make one."""
        cdef list buffers = self.by_replica[replica]
        cdef FetchBuffer buffer
        cdef Py_ssize_t i
        for i in range(len(buffers)):
            buffer = <FetchBuffer>buffers[i]
            fits = buffer.rows.max_rows() >= rows and buffer.rows.stride() >= width
            if fits and buffer.is_free():
                buffer.take()
                return buffer
        # With extra room, so that a growing batch does not make a buffer per step.
        buffer = FetchBuffer(
            max(16, rows + rows // 2), max(64, width + width // 2), self.unassigned, self.allocate
        )
        buffer.take()
        buffers.insert(0, buffer)
        del buffers[4:]
        return buffer


cdef cnp.ndarray uint32_view(
    cnp.ndarray base, int ndim, cnp.npy_intp* shape, cnp.npy_intp* strides
):
    """Return an array over the start of `base`; it keeps `base` alive."""
    cdef cnp.ndarray view = cnp.PyArray_New(
        cnp.ndarray, ndim, shape, cnp.NPY_UINT32, strides, cnp.PyArray_DATA(base), 0,
        cnp.NPY_ARRAY_WRITEABLE | cnp.NPY_ARRAY_ALIGNED, None
    )
    Py_INCREF(base)
    cnp.PyArray_SetBaseObject(view, base)
    return view


# The pointers are borrowed: an object argument would add a reference to the count.
cdef inline bint is_left(PyObject* last, PyObject* base) noexcept:
    """Return True if only the buffer holds arrays over `base`; `last` is the last such array."""
    if last == <PyObject*>None:
        return Py_REFCNT(base) == 1
    return Py_REFCNT(base) == 2 and Py_REFCNT(last) == 1


cdef inline bint is_same(
    cnp.ndarray last, int ndim, cnp.npy_intp* shape, cnp.npy_intp* strides, int flags
) noexcept:
    """Return True if an array still has this shape, these strides and flags, and uint32."""
    cdef int axis
    if (
        last is None
        or cnp.PyArray_NDIM(last) != ndim
        or <PyObject*>cnp.PyArray_DESCR(last) != <PyObject*>UINT32
        or cnp.PyArray_FLAGS(last) & HANDED_OUT != flags
    ):
        return False
    for axis in range(ndim):
        if cnp.PyArray_DIM(last, axis) != shape[axis]:
            return False
        if cnp.PyArray_STRIDE(last, axis) != strides[axis]:
            return False
    return True


cdef cnp.ndarray table_of(FetchBuffer buffer, cnp.npy_intp* shape, cnp.npy_intp* strides):
    """Return the table of a fetch, over the start of a buffer's table."""
    if unlikely(buffer.held is None):  # pinned memory: only copies to devices read it
        return uint32_view(buffer.table, 2, shape, strides)
    if is_same(buffer.last_table, 2, shape, strides, cnp.NPY_ARRAY_ALIGNED):
        return buffer.last_table
    buffer.last_table = cnp.PyArray_New(
        page_table, 2, shape, cnp.NPY_UINT32, strides, cnp.PyArray_DATA(buffer.table), 0,
        cnp.NPY_ARRAY_ALIGNED, None
    )
    Py_INCREF(buffer.held)
    cnp.PyArray_SetBaseObject(buffer.last_table, buffer.held)
    return buffer.last_table


cdef cnp.ndarray lengths_of(FetchBuffer buffer, cnp.npy_intp* shape, cnp.npy_intp* strides):
    """Return the lengths of a fetch, over the start of a buffer's lengths."""
    if unlikely(buffer.held is None):
        return uint32_view(buffer.lengths, 1, shape, strides)
    if not is_same(
        buffer.last_lengths, 1, shape, strides, cnp.NPY_ARRAY_ALIGNED | cnp.NPY_ARRAY_WRITEABLE
    ):
        buffer.last_lengths = uint32_view(buffer.lengths, 1, shape, strides)
    return buffer.last_lengths


cdef cnp.ndarray make_max_lengths(int64_t longest_new, int64_t longest_active, int64_t num_steps):
    cdef cnp.npy_intp shape[2]
    shape[0] = num_steps
    shape[1] = 2
    cdef cnp.ndarray out = cnp.PyArray_SimpleNew(2, shape, cnp.NPY_UINT32)
    cdef uint32_t* data = <uint32_t*>cnp.PyArray_DATA(out)
    cdef int64_t k
    for k in range(num_steps):
        data[2 * k] = 1
        data[2 * k + 1] = <uint32_t>(longest_active + k)
    data[0] = <uint32_t>longest_new
    return out
