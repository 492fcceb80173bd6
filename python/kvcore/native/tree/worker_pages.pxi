# SPDX-License-Identifier: Apache-2.0
"""The index from pages to workers: kvcore::PrefixIndex over arrays of hashes."""


cpdef cnp.ndarray hashes_of(object keys):
    """Return keys as uint64 [n]; `keys` is an array uint64 [n], or a sequence of bytes and ints."""
    cdef cnp.ndarray found
    if type(keys) is cnp.ndarray:
        found = keys
        if (
            cnp.PyArray_NDIM(found) == 1
            and cnp.PyArray_TYPE(found) == cnp.NPY_UINT64
            and cnp.PyArray_ISCARRAY_RO(found)
        ):
            return found
        return converted(keys)
    found = np.empty(len(keys), np.uint64)
    cdef uint64_t* data = <uint64_t*>cnp.PyArray_DATA(found)
    cdef Py_ssize_t i = 0
    for key in keys:
        if i == cnp.PyArray_DIM(found, 0):
            raise ValueError("keys grew while they were read; pass a list that does not change")
        data[i] = hash_of(key)
        i += 1
    return found[:i]


cdef cnp.ndarray converted(object keys):
    if keys.ndim != 1 or keys.dtype.kind not in "iu":
        raise ValueError(
            f"keys are an array of {keys.dtype} {list(keys.shape)}, must be uint64 [n]"
        )
    if keys.dtype.kind == "i" and keys.size and keys.min() < 0:
        raise ValueError(f"keys have {keys.min()}, must be at least 0 (uint64)")
    return np.ascontiguousarray(keys, np.uint64)


cdef uint64_t hash_of(object key) except? 0:
    if isinstance(key, bytes):
        if len(key) < 8:
            raise ValueError(f"a key is {key!r}, must be 8 bytes or more")
        return int.from_bytes(key[len(key) - 8:], "big")
    try:
        return key
    except (OverflowError, TypeError):
        raise ValueError(f"a key is {key!r}, must be bytes or an int of 64 bits") from None


@cython.final
cdef class WorkerPages:
    """An index of the pages that workers 0 .. num_workers - 1 have.

    Parameters
    ----------
    num_workers : int
        1 .. 4,096.

    Notes
    -----
    `keys` is an array uint64 [n] of the low 64 bits of each key, which is not copied, or a sequence
    of bytes and ints. Media are the bits 1, 2 and 4. Any number of threads; the calls release the
    GIL.
    """

    cdef unique_ptr[CppPrefixIndex] index

    def __cinit__(self, int32_t num_workers):
        self.index.reset(new CppPrefixIndex(num_workers))

    def __init__(self, num_workers):
        pass

    @property
    def num_pages(self):
        """Number of pages that at least one worker has."""
        return self.index.get().num_pages()

    @property
    def num_bytes(self):
        """Memory of the index in bytes."""
        return self.index.get().num_bytes()

    def pages_of(self, int32_t worker):
        """Return the number of pages of a worker."""
        return self.index.get().num_pages(worker)

    def store(self, int32_t worker, keys, int medium):
        """Add pages that a worker has on a medium."""
        cdef cnp.ndarray hashes = hashes_of(keys)
        cdef const uint64_t* data = <const uint64_t*>cnp.PyArray_DATA(hashes)
        cdef size_t n = cnp.PyArray_DIM(hashes, 0)
        with nogil:
            self.index.get().store(worker, data, n, <Medium>medium)

    def remove(self, int32_t worker, keys, int medium):
        """Remove pages that a worker no longer has on a medium."""
        cdef cnp.ndarray hashes = hashes_of(keys)
        cdef const uint64_t* data = <const uint64_t*>cnp.PyArray_DATA(hashes)
        cdef size_t n = cnp.PyArray_DIM(hashes, 0)
        with nogil:
            self.index.get().remove(worker, data, n, <Medium>medium)

    def clear(self, int32_t worker):
        """Remove all pages of a worker."""
        with nogil:
            self.index.get().clear(worker)

    def match(self, keys, int media):
        """Return int32 [num_workers]: the number of leading pages of a prompt per worker."""
        cdef cnp.ndarray hashes = hashes_of(keys)
        cdef const uint64_t* data = <const uint64_t*>cnp.PyArray_DATA(hashes)
        cdef size_t n = cnp.PyArray_DIM(hashes, 0)
        cdef cnp.npy_intp workers = self.index.get().num_workers()
        cdef cnp.ndarray held = cnp.PyArray_SimpleNew(1, &workers, cnp.NPY_INT32)
        cdef int32_t* out = <int32_t*>cnp.PyArray_DATA(held)
        with nogil:
            self.index.get().match(data, n, <uint8_t>media, out)
        return held

    def check_integrity(self):
        """Check the consistency of the index.

        Raises
        ------
        AssertionError
            The index is inconsistent; the text names the violated law.
        """
        self.index.get().check_integrity()
