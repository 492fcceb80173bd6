# SPDX-License-Identifier: Apache-2.0
"""Views of torch tensors in host memory as numpy arrays, in a tenth of the time of Python code."""


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
    object tensor_over(
        const TensorExchange& table, PyObject* owner, const ExchangedTensor& memory
    )

cdef extern from "numpy/arrayobject.h":
    # Steals a reference to the dtype.
    object PyArray_NewFromDescr(
        type subtype, cnp.dtype dtype, int ndim, cnp.npy_intp* shape, cnp.npy_intp* strides,
        void* data, int flags, PyObject* like
    )


cdef enum:
    MOST_AXES = 16


# torch.Tensor and its export functions; None until another module has imported torch.
cdef object tensor_class = None

cdef const TensorExchange* exchange = NULL
cdef TensorMethods methods

# Dtypes of ml_dtypes. The first tensor with such a dtype imports the package.
cdef dict NAMES = {BFLOAT: "bfloat16", FLOAT8_E4M3FN: "float8_e4m3fn", FLOAT8_E5M2: "float8_e5m2"}

cdef dict narrow_dtypes = {}


cdef inline bint is_tensor(object value):
    """Return True if the class is torch.Tensor: a subclass may change the meaning of the memory."""
    return type(value) is tensor_class or (
        tensor_class is None and find_tensors() and type(value) is tensor_class
    )


cdef bint find_tensors():
    """Find torch in sys.modules, and the export functions of its tensors; False without them."""
    global tensor_class, exchange, methods
    torch = sys.modules.get("torch")
    found = getattr(torch, "Tensor", None)
    if found is None:
        return False
    exchange = tensor_exchange(<PyObject*>found)
    methods = TensorMethods(<PyObject*>found)
    if exchange == NULL or not methods.is_whole():  # torch before 2.10, or replaced methods
        return False
    tensor_class = found
    return True


cdef inline bint is_memory_plain(object tensor, uint8_t code) noexcept:
    """Return True if the memory has the tensor's values: no negation bit and no gradient."""
    if code == INT or code == UINT or code == BOOL:
        return True
    return methods.are_plain_floats(<PyObject*>tensor)


cdef int type_number(uint8_t code, uint8_t bits) noexcept:
    """Return the numpy type number of a dtype; -1 for dtypes of ml_dtypes and others."""
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
    """Return an array over a tensor's memory; it keeps `owner` alive unless that is None."""
    cdef cnp.npy_intp[MOST_AXES] shape
    cdef cnp.npy_intp[MOST_AXES] strides
    cdef int axis
    for axis in range(seen.ndim):
        shape[axis] = seen.shape[axis]
        strides[axis] = seen.strides[axis] * (seen.bits // 8)
    Py_INCREF(dtype)  # the array takes this reference
    cdef cnp.ndarray array = PyArray_NewFromDescr(
        cnp.ndarray, dtype, seen.ndim, shape, strides, <char*>seen.data + seen.byte_offset,
        cnp.NPY_ARRAY_WRITEABLE, NULL
    )
    if owner is not None:
        Py_INCREF(owner)
        cnp.PyArray_SetBaseObject(array, owner)
    return array


cdef bint is_over(object given, const ExchangedTensor* seen, cnp.dtype dtype):
    """Return True if an array has the same memory, shape, strides and dtype as a tensor."""
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


cdef dict dtypes_of_codes():
    """Return the dtypes of ml_dtypes by their codes."""
    if not narrow_dtypes:
        for code, name in NAMES.items():
            narrow_dtypes[code] = numpy_dtype(name)
    return narrow_dtypes


cdef cnp.dtype look_at(object value, ExchangedTensor* seen):
    """Fill `seen` with the memory of a tensor and return its dtype; None if that fails."""
    if not is_tensor(value) or not view_host_memory(exchange[0], <PyObject*>value, seen[0]):
        return None
    if seen.ndim > MOST_AXES:
        return None
    cdef int number = type_number(seen.code, seen.bits)
    if number >= 0:
        return cnp.PyArray_DescrFromType(number)
    if narrow_dtypes:
        return narrow_dtypes.get(seen.code)
    dtypes_of_codes()
    return look_at(value, seen)  # again, because the import lets other code run


cdef cnp.ndarray view_of(object value, object last):
    """Return a tensor as an array; return `last` if it is still a view of the tensor."""
    cdef ExchangedTensor seen
    cdef cnp.dtype dtype = look_at(value, &seen)
    cdef cnp.ndarray array
    if dtype is None:
        return None
    # The array keeps the storage alive, because `tensor.data = other` may replace it.
    storage = methods.storage_of(<PyObject*>value)
    if storage is None:
        return None
    if is_over(last, &seen, dtype) and <PyObject*>cnp.PyArray_BASE(last) == <PyObject*>storage:
        array = last
    else:
        array = array_over(storage, &seen, dtype)
    # The last check, because it lets other threads run, which may change the tensor.
    return array if is_memory_plain(value, seen.code) else None


cdef cnp.ndarray array_of_tensor(object value):
    return view_of(value, None)


def host_tensor(value):
    """Return a torch tensor in host memory as a numpy array, without a copy.

    Parameters
    ----------
    value : object

    Returns
    -------
    ndarray or None
        An array over the tensor's memory, which it keeps alive. None if `value` is not a tensor in
        host memory, if it has a subclass of torch.Tensor, a gradient or a negation bit, if it is
        empty, or if this version of torch has no exchange table.

    Notes
    -----
    Does not import torch: checks the class of the value. About .2 us. If the result is None, slower
    Python code may still be able to convert the value.
    """
    return array_of_tensor(value)


def array_viewer(otherwise):
    """Return a function that converts arrays of any library to numpy arrays without a copy.

    Parameters
    ----------
    otherwise : callable (value, name) -> array
        Converts all values except numpy arrays and torch tensors; raises for a value that is no
        array.

    Returns
    -------
    callable (value, name, last=None) -> array
        `last`: an array of an earlier call. The function returns it again if `value` has the same
        elements in the same memory.
    """
    def view(value, name, last=None):
        if cnp.PyArray_Check(value):
            return value if type(value) is cnp.ndarray else np.asarray(value)
        cdef cnp.ndarray seen = view_of(value, last)
        return otherwise(value, name) if seen is None else seen

    return view


def call_array_viewer(otherwise):
    """Return a function as ``array_viewer`` does, for arrays that are used only during a call.

    Parameters
    ----------
    otherwise : callable (value, name) -> array

    Returns
    -------
    callable (value, name) -> array
        The array does not keep the memory alive: the caller holds `value` as long as it uses the
        array. If a tensor has the same memory as the last tensor of the same name, the function
        returns the same array.
    """
    cdef dict lasts = {}

    def view(value, name):
        if type(value) is cnp.ndarray:
            return value
        cdef ExchangedTensor seen
        cdef cnp.dtype dtype = look_at(value, &seen)
        if dtype is None:
            return otherwise(value, name)
        # The memory of the last array may be freed or reused: compare only its address.
        array = lasts.get(name)
        if not is_over(array, &seen, dtype):
            array = lasts[name] = array_over(None, &seen, dtype)
        return array if is_memory_plain(value, seen.code) else otherwise(value, name)

    return view


cdef inline bint is_carray(cnp.ndarray array) noexcept:
    """Return True for a writable array in C order."""
    return cnp.PyArray_ISCARRAY(array) and cnp.PyArray_NDIM(array) <= MOST_AXES


cdef int code_of(cnp.dtype dtype) except? -2:
    """Return the code of a dtype in the exchange; -1 if torch has no such dtype."""
    if cnp.PyTypeNum_ISUSERDEF(dtype.type_num):  # of ml_dtypes
        for code, narrow in dtypes_of_codes().items():
            if dtype is narrow:
                return code
        return -1
    if dtype.itemsize > 8:
        return -1
    if dtype.kind == c"f":
        return FLOAT
    if dtype.kind == c"i":
        return INT
    if dtype.kind == c"u":
        return UINT
    return BOOL if dtype.kind == c"b" else -1


def library_matcher(otherwise):
    """Make a function that returns fresh numpy arrays as arrays of another array's library.

    Parameters
    ----------
    otherwise : callable (given, result) -> array
        Converts to other libraries, and to torch if it has no exchange table.

    Returns
    -------
    callable (given, result) -> array
        `result`, a numpy array, as an array of the library of `given`. A torch tensor shares the
        memory.
    """
    def match(given, cnp.ndarray result not None):
        cdef ExchangedTensor memory
        cdef int64_t[MOST_AXES] shape
        cdef int axis, code
        if cnp.PyArray_Check(given):
            return result
        code = code_of(result.descr) if is_tensor(given) and is_carray(result) else -1
        if code < 0:
            return otherwise(given, result)
        memory.data, memory.ndim = cnp.PyArray_DATA(result), cnp.PyArray_NDIM(result)
        memory.code, memory.bits = code, 8 * cnp.PyArray_ITEMSIZE(result)
        for axis in range(memory.ndim):
            shape[axis] = cnp.PyArray_DIM(result, axis)
        memory.shape = shape
        return tensor_over(exchange[0], <PyObject*>result, memory)

    return match


cdef bint is_numpy(object given) noexcept:
    """Return True if a value, or each item of a list or tuple, is no array of another library."""
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


cdef inline bint is_uint32(cnp.ndarray array) noexcept:
    return cnp.PyArray_TYPE(array) == cnp.NPY_UINT32 and cnp.PyArray_ISNOTSWAPPED(array)


cdef bint is_unchanged(object given, object seen):
    """Return True if an array still has the memory, shape, dtype and write flag of its view."""
    cdef cnp.ndarray now, then
    cdef int axis
    if given is seen:
        return True
    if not cnp.PyArray_Check(given):
        return view_of(given, seen) is seen
    now, then = given, seen
    if (
        cnp.PyArray_DATA(now) != cnp.PyArray_DATA(then)
        or cnp.PyArray_NDIM(now) != cnp.PyArray_NDIM(then)
        or <PyObject*>cnp.PyArray_DESCR(now) != <PyObject*>cnp.PyArray_DESCR(then)
        or cnp.PyArray_ISWRITEABLE(now) != cnp.PyArray_ISWRITEABLE(then)
    ):
        return False
    for axis in range(cnp.PyArray_NDIM(now)):
        if (
            cnp.PyArray_DIM(now, axis) != cnp.PyArray_DIM(then, axis)
            or cnp.PyArray_STRIDE(now, axis) != cnp.PyArray_STRIDE(then, axis)
        ):
            return False
    return True


cdef bint are_unchanged(tuple pairs):
    """Return True if each array of the pairs (array, view) is unchanged since its view was made."""
    cdef tuple pair
    for pair in pairs:
        if not is_unchanged(pair[0], pair[1]):
            return False
    return True


def place_finder(host, otherwise):
    """Make a function that finds the place of the arrays of a layer and of a call.

    Parameters
    ----------
    host : Place
        The result for numpy arrays without a stream.
    otherwise : callable (arrays, stream, named, beside) -> Place
        Finds every other place.

    Returns
    -------
    callable (arrays, stream, named=(), beside=()) -> Place
    """
    def place(arrays, stream, named=(), beside=()):
        if stream is None and is_numpy(arrays) and is_numpy(named):
            return host
        return otherwise(arrays, stream, named, beside)

    return place


def offsets_viewer(host, view, otherwise):
    """Make a function that views row offsets on the device of a call.

    Parameters
    ----------
    host : Place
        The place whose uint32 offsets need no Python code.
    view : callable (value, name) -> array
        A function of ``call_array_viewer``.
    otherwise : callable (place, array) -> array
        Views lists, offsets of another dtype and offsets of other places.

    Returns
    -------
    callable (place, value) -> array
    """
    def view_offsets(place, value):
        array = value
        if type(value) is not list and type(value) is not tuple:
            array = view(value, "row_offsets")
        if place is host and type(array) is cnp.ndarray and is_uint32(array):
            return array
        return otherwise(place, array)

    return view_offsets


def are_numpy(tuple given not None):
    """Return True if all arrays of a call are numpy arrays, which are in host memory.

    Parameters
    ----------
    given : tuple of array, list or tuple of arrays, str, bool, int or None
        Arrays as ``kvcore.backends.selection.any_array`` returns them.
    """
    return is_numpy(given)
