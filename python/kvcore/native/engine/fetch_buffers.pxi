# SPDX-License-Identifier: Apache-2.0
"""The buffers behind the arrays that a fetch hands out."""


@cython.final
cdef class TableMemory:
    """Own the memory of tables handed out, which nobody but this module may make writable."""

    cdef cnp.ndarray array
    cdef bint is_exported


class PageTable(np.ndarray):
    """A table of a fetch: read-only, for its memory is updated only where pages change.

    Consumers that ask for memory they may write, as DLPack's do, get it all the same: then the next
    fetch that uses the memory writes all of it.
    """

    __slots__ = ()

    def __dlpack__(self, **options):
        owner = self
        while isinstance(owner, np.ndarray):
            owner = owner.base
        if self.flags.writeable or type(owner) is not TableMemory:
            return super().__dlpack__(**options)  # a copy, the caller's own
        (<TableMemory>owner).is_exported = True
        cdef cnp.ndarray view = self.view(np.ndarray)
        cnp.PyArray_ENABLEFLAGS(view, cnp.NPY_ARRAY_WRITEABLE)
        return view.__dlpack__(**options)


cdef object page_table = PageTable
cdef object UINT32 = np.dtype(np.uint32)
cdef int HANDED_OUT = cnp.NPY_ARRAY_ALIGNED | cnp.NPY_ARRAY_WRITEABLE  # flags that matter


@cython.final
cdef class FetchBuffer:
    """Hold one page table and its lengths, used again for batch after batch.

    `allocate` returns uint32 [n] of pinned memory; None for memory that no device reads.
    """

    cdef cnp.ndarray memory  # of both where it is pinned, else None
    cdef cnp.ndarray table
    cdef cnp.ndarray lengths
    cdef cnp.ndarray new_lengths  # held by the inputs handed out
    cdef cnp.ndarray states  # of the last fetch, theirs too
    cdef TableMemory held  # by the tables handed out
    cdef LookupTable* rows
    cdef bint busy  # a fetch that is not over writes it
    # Arrays handed out last, to be handed out again when nobody holds them any more.
    cdef cnp.ndarray last_table
    cdef cnp.ndarray last_lengths

    def __cinit__(self, int64_t max_rows, int64_t width, uint32_t unassigned, object allocate):
        cdef cnp.npy_intp shape[2]
        # An odd number of cache lines apart, so that the rows' ends do not share cache sets.
        cdef int64_t stride = (width + 15) // 16
        stride = 16 * (stride + 1 - stride % 2)
        shape[0] = max_rows
        shape[1] = stride
        if allocate is None:
            self.table = cnp.PyArray_SimpleNew(2, shape, cnp.NPY_UINT32)
            self.lengths = cnp.PyArray_SimpleNew(1, shape, cnp.NPY_UINT32)
            self.held = TableMemory.__new__(TableMemory)
            self.held.array = self.table
        else:  # in one piece, so that one copy takes both to a device
            self.memory = allocate(max_rows * (stride + 1))
            self.lengths = self.memory[:max_rows]
            self.table = self.memory[max_rows:].reshape(max_rows, stride)
        self.rows = new LookupTable(
            <uint32_t*>cnp.PyArray_DATA(self.table), max_rows, stride, unassigned
        )

    def __dealloc__(self):
        del self.rows

    cdef bint is_free(self):
        """True when no array handed out earlier is still held."""
        if self.busy:
            return False
        if self.memory is not None:  # which every array over it holds, these two among them
            return Py_REFCNT(<PyObject*>self.memory) == 3
        return (
            is_left(<PyObject*>self.last_table, <PyObject*>self.held)
            and is_left(<PyObject*>self.last_lengths, <PyObject*>self.lengths)
        )

    cdef cnp.ndarray unread_new_lengths(self):
        """Memory for a count per row that no inputs handed out earlier refer to."""
        cdef cnp.npy_intp rows = self.rows.max_rows()
        if self.new_lengths is None or Py_REFCNT(<PyObject*>self.new_lengths) > 1:
            self.new_lengths = cnp.PyArray_SimpleNew(1, &rows, cnp.NPY_UINT32)
        return self.new_lengths

    cdef cnp.ndarray new_states(self):
        """Memory for a slot per row of a fetch, which nothing writes later."""
        cdef cnp.npy_intp rows = self.rows.max_rows()
        self.states = cnp.PyArray_SimpleNew(1, &rows, cnp.NPY_INT32)
        return self.states

    cdef int take(self) except -1:
        """Make it one fetch's, which writes all of it where somebody else may have written."""
        self.busy = True
        if self.held is not None and self.held.is_exported:
            self.rows.forget()
            self.held.is_exported = False
        return 0


@cython.final
cdef class FetchBuffers:
    """Hold the buffers of a manager's fetches: per replica the last few, used again when free."""

    cdef list by_replica
    cdef uint32_t unassigned  # what pads the tables
    cdef object allocate  # uint32 [n] of pinned memory; None for memory that no device reads

    def __cinit__(self, int32_t num_replicas, uint32_t unassigned, object allocate):
        self.by_replica = [[] for _ in range(num_replicas)]
        self.unassigned = unassigned
        self.allocate = allocate

    cdef FetchBuffer take(self, int32_t replica, int64_t rows, int64_t width):
        """Take a buffer of at least this size that nobody reads."""
        cdef list buffers = self.by_replica[replica]
        cdef FetchBuffer buffer
        cdef Py_ssize_t i
        for i in range(len(buffers)):
            buffer = <FetchBuffer>buffers[i]
            fits = buffer.rows.max_rows() >= rows and buffer.rows.stride() >= width
            if fits and buffer.is_free():
                buffer.take()
                return buffer
        # Room to grow, so that a growing batch does not make a buffer per step.
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
    """Array over the start of `base`, which it keeps alive."""
    cdef cnp.ndarray view = cnp.PyArray_New(
        cnp.ndarray, ndim, shape, cnp.NPY_UINT32, strides, cnp.PyArray_DATA(base), 0,
        cnp.NPY_ARRAY_WRITEABLE | cnp.NPY_ARRAY_ALIGNED, None
    )
    Py_INCREF(base)
    cnp.PyArray_SetBaseObject(view, base)
    return view


# Borrowed: an object argument would count the argument itself.
cdef inline bint is_left(PyObject* last, PyObject* base) noexcept:
    """True when nobody but a buffer holds the array over `base` that it handed out last, or any."""
    if last == <PyObject*>None:
        return Py_REFCNT(base) == 1
    return Py_REFCNT(base) == 2 and Py_REFCNT(last) == 1


cdef inline bint is_same(
    cnp.ndarray last, int ndim, cnp.npy_intp* shape, cnp.npy_intp* strides, int flags
) noexcept:
    """True when an array is still what it was made as, and what is wanted now."""
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
    """The table of a fetch over the start of a buffer's."""
    if buffer.held is None:  # pinned: read by copies to devices alone
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
    """The lengths of a fetch over the start of a buffer's."""
    if buffer.held is None:
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
