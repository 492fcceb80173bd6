# SPDX-License-Identifier: Apache-2.0
# cython: language_level=3, boundscheck=False, wraparound=False, initializedcheck=False
# cython: cdivision=True, auto_pickle=False, autotestdict=False
"""Tensors of torch in host memory as arrays of numpy, at a tenth of what Python code takes."""

cimport numpy as cnp
from cpython.ref cimport Py_INCREF, PyObject
from libc.stdint cimport int32_t, int64_t, uint8_t, uint64_t

import sys

from kvcore.support.dtypes import numpy_dtype

cnp.import_array()

cdef extern from "tensor_exchange.hpp" namespace "kvcore::python" nogil:
    enum Code "kvcore::python::ExchangedTensor::Code":
        INT "kvcore::python::ExchangedTensor::kInt"
        UINT "kvcore::python::ExchangedTensor::kUInt"
        FLOAT "kvcore::python::ExchangedTensor::kFloat"
        BFLOAT "kvcore::python::ExchangedTensor::kBFloat"
        BOOL "kvcore::python::ExchangedTensor::kBool"
        FLOAT8_E4M3FN "kvcore::python::ExchangedTensor::kFloat8E4M3FN"
        FLOAT8_E5M2 "kvcore::python::ExchangedTensor::kFloat8E5M2"

    cdef struct ExchangedTensor:
        void* data
        int32_t ndim
        uint8_t code
        uint8_t bits
        int64_t* shape
        int64_t* strides
        uint64_t byte_offset

    cdef cppclass TensorExchange:
        pass

    cdef cppclass TensorMethods:
        TensorMethods() except +
        TensorMethods(PyObject* type) except +
        bint is_whole()
        object storage_of(PyObject* tensor)
        bint are_plain_floats(PyObject* tensor)

    const TensorExchange* tensor_exchange(PyObject* type)
    bint view_host_memory(
        const TensorExchange& table, PyObject* tensor, ExchangedTensor& out
    )

cdef extern from "numpy/arrayobject.h":
    # Takes a count of the dtype.
    object PyArray_NewFromDescr(
        type subtype, cnp.dtype dtype, int ndim, cnp.npy_intp* shape, cnp.npy_intp* strides,
        void* data, int flags, PyObject* like
    )

cdef enum:
    MOST_AXES = 16

# torch.Tensor once torch is there, which kvcore does not import, and how it exports.
cdef object tensor_class = None
cdef const TensorExchange* exchange = NULL
cdef object from_numpy = None
cdef TensorMethods methods

# Those of ml_dtypes, imported when one is met first.
cdef dict NAMES = {BFLOAT: "bfloat16", FLOAT8_E4M3FN: "float8_e4m3fn", FLOAT8_E5M2: "float8_e5m2"}
cdef dict narrow_dtypes = {}


cdef inline bint is_tensor(object value):
    """Whether it is of torch's own class: others may have code that says what they mean."""
    return type(value) is tensor_class or (
        tensor_class is None and find_tensors() and type(value) is tensor_class
    )


cdef bint find_tensors():
    """Look for torch, which somebody may import at any time, and how its tensors are exported."""
    global tensor_class, exchange, from_numpy, methods
    torch = sys.modules.get("torch")
    found = getattr(torch, "Tensor", None)
    if found is None:
        return False
    exchange = tensor_exchange(<PyObject*>found)
    methods = TensorMethods(<PyObject*>found)
    if exchange == NULL or not methods.is_whole():  # torch before 2.10, or somebody's methods
        return False
    from_numpy = torch.from_numpy
    tensor_class = found
    return True


cdef inline bint is_plain(object tensor, uint8_t code) noexcept:
    """Whether its memory is what it means: no bit says "negated", and no gradient is expected."""
    if code == INT or code == UINT or code == BOOL:
        return True
    return methods.are_plain_floats(<PyObject*>tensor)


cdef int type_number(uint8_t code, uint8_t bits) noexcept:
    """numpy's number of a type; -1 for those of ml_dtypes, and others."""
    cdef int wanted = code << 8 | bits
    if wanted == (FLOAT << 8 | 32):
        return cnp.NPY_FLOAT32
    if wanted == (FLOAT << 8 | 16):
        return cnp.NPY_FLOAT16
    if wanted == (UINT << 8 | 32):
        return cnp.NPY_UINT32
    if wanted == (INT << 8 | 32):
        return cnp.NPY_INT32
    if wanted == (INT << 8 | 64):
        return cnp.NPY_INT64
    if wanted == (INT << 8 | 8):
        return cnp.NPY_INT8
    if wanted == (UINT << 8 | 8):
        return cnp.NPY_UINT8
    if wanted == (BOOL << 8 | 8):
        return cnp.NPY_BOOL
    return -1


cdef cnp.ndarray array_over(object owner, const ExchangedTensor* seen, cnp.dtype dtype):
    """An array over memory of a tensor, which it keeps by its owner; None for nobody."""
    cdef cnp.npy_intp[MOST_AXES] shape
    cdef cnp.npy_intp[MOST_AXES] strides
    cdef int axis
    for axis in range(seen.ndim):
        shape[axis] = seen.shape[axis]
        strides[axis] = seen.strides[axis] * (seen.bits // 8)
    Py_INCREF(dtype)  # which the array takes
    cdef cnp.ndarray array = PyArray_NewFromDescr(
        cnp.ndarray, dtype, seen.ndim, shape, strides, <char*>seen.data + seen.byte_offset,
        cnp.NPY_ARRAY_WRITEABLE, NULL
    )
    if owner is not None:
        Py_INCREF(owner)
        cnp.PyArray_SetBaseObject(array, owner)
    return array


cdef bint is_over(object given, const ExchangedTensor* seen, cnp.dtype dtype):
    """Whether an array has just the elements of a tensor."""
    if given is None:
        return False
    cdef cnp.ndarray array = given
    cdef int axis
    if (
        cnp.PyArray_DATA(array) != <char*>seen.data + seen.byte_offset
        or cnp.PyArray_NDIM(array) != seen.ndim
        or <PyObject*>cnp.PyArray_DESCR(array) != <PyObject*>dtype
    ):
        return False
    for axis in range(seen.ndim):
        if (
            cnp.PyArray_DIM(array, axis) != seen.shape[axis]
            or cnp.PyArray_STRIDE(array, axis) != seen.strides[axis] * (seen.bits // 8)
        ):
            return False
    return True


cdef cnp.dtype look_at(object value, ExchangedTensor* seen):
    """Find the elements of a tensor, and their dtype; None for what is seen in another way."""
    if not is_tensor(value) or not view_host_memory(exchange[0], <PyObject*>value, seen[0]):
        return None
    if seen.ndim > MOST_AXES:
        return None
    cdef int number = type_number(seen.code, seen.bits)
    if number >= 0:
        return cnp.PyArray_DescrFromType(number)
    if narrow_dtypes:
        return narrow_dtypes.get(seen.code)
    for code, name in NAMES.items():
        narrow_dtypes[code] = numpy_dtype(name)
    return look_at(value, seen)  # anew: an import lets other code run


cdef cnp.ndarray view_of(object value, object last):
    """See a tensor, as an array that was returned for it before where that is still right."""
    cdef ExchangedTensor seen
    cdef cnp.dtype dtype = look_at(value, &seen)
    cdef cnp.ndarray array
    if dtype is None:
        return None
    # Not the tensor is kept: code such as `tensor.data = other` may give that another one.
    storage = methods.storage_of(<PyObject*>value)
    if storage is None:
        return None
    if is_over(last, &seen, dtype) and <PyObject*>cnp.PyArray_BASE(last) == <PyObject*>storage:
        array = last
    else:
        array = array_over(storage, &seen, dtype)
    # Last, for it lets other threads run, which may change what was seen.
    return array if is_plain(value, seen.code) else None


cdef cnp.ndarray array_of_tensor(object value):
    return view_of(value, None)


def host_tensor(value):
    """See a tensor of torch in host memory as an array of numpy.

    Parameters
    ----------
    value : object

    Returns
    -------
    ndarray or None
        The same memory, which it keeps. None for what is no tensor, lies elsewhere, is a
        subclass, expects a gradient, has a bit that negates it, or is empty; and where this version
        of torch has no exchange table.

    Notes
    -----
    torch is not imported: a tensor is known by its class. About .2 us; what is None
    here may be seen by Python code.
    """
    return array_of_tensor(value)


def array_viewer(otherwise):
    """Make a function that sees arrays of any library, numpy's and tensors of torch by itself.

    Parameters
    ----------
    otherwise : callable (value, name) -> array
        Sees the others, and raises for what is none.

    Returns
    -------
    callable (value, name, last=None) -> array
        `last`: an array that it returned, which it returns again where `value` has the same
        elements in the same memory.
    """
    def view(value, name, last=None):
        if type(value) is cnp.ndarray:
            return value
        cdef cnp.ndarray seen = view_of(value, last)
        return otherwise(value, name) if seen is None else seen

    return view


def call_array_viewer(otherwise):
    """Make a function that sees arrays as those of ``array_viewer`` do, but only for a call.

    Parameters
    ----------
    otherwise : callable (value, name) -> array

    Returns
    -------
    callable (value, name) -> array
        Nothing keeps the memory but `value`, which the caller holds for as long as the array is
        used. A tensor that is where the last one of its name was is seen as the same array.
    """
    cdef dict lasts = {}

    def view(value, name):
        if type(value) is cnp.ndarray:
            return value
        cdef ExchangedTensor seen
        cdef cnp.dtype dtype = look_at(value, &seen)
        if dtype is None:
            return otherwise(value, name)
        # Its memory may be gone or another's by now: only where it was is compared.
        array = lasts.get(name)
        if not is_over(array, &seen, dtype):
            array = lasts[name] = array_over(None, &seen, dtype)
        return array if is_plain(value, seen.code) else otherwise(value, name)

    return view


def tensor_like(given, cnp.ndarray result not None):
    """Return an array of numpy as a tensor of torch, where another array of the call is one.

    Parameters
    ----------
    given : object
    result : ndarray

    Returns
    -------
    torch.Tensor or None
        The same memory. None where `given` is no tensor as ``host_tensor`` sees them, and for the
        dtypes of ml_dtypes, which torch does not take from numpy.
    """
    if cnp.PyArray_Check(given) or not is_tensor(given):
        return None
    return None if cnp.PyArray_ISUSERDEF(result) else from_numpy(result)


cdef bint is_numpy(object given) noexcept:
    """Whether it is no array of another library: those of a list or tuple likewise."""
    cdef Py_ssize_t i
    if given is None or cnp.PyArray_Check(given) or given is True or given is False:
        return True
    if isinstance(given, tuple):
        for i in range(len(<tuple>given)):
            if not is_numpy((<tuple>given)[i]):
                return False
        return True
    if isinstance(given, list):
        for i in range(len(<list>given)):
            if not is_numpy((<list>given)[i]):
                return False
        return True
    return type(given) is str or type(given) is int


def are_numpy(tuple given not None):
    """Tell whether all arrays of a call are numpy's: then they are in host memory.

    Parameters
    ----------
    given : tuple of array, list or tuple of them, str, bool, int or None
        Arrays as ``kvcore.backends.selection.any_array`` returns them.
    """
    return is_numpy(given)
