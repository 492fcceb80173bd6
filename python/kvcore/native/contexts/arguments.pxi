# SPDX-License-Identifier: Apache-2.0
"""Arguments as C values: integers, contiguous int32 tokens, names of namespaces, request ids."""


cdef extern from "Python.h":
    PyObject** PySequence_Fast_ITEMS(object o)
    bint PyLong_CheckExact(PyObject* o)

cdef extern from *:
    """
    #include "kvcore/extra_keys.hpp"

    static std::string join_namespace(bool has_extra, const std::string& extra, bool has_salt,
                                      const std::string& salt) {
        using Key = std::optional<std::string_view>;
        return kvcore::namespace_name(has_extra ? Key(extra) : Key(),
                                      has_salt ? Key(salt) : Key());
    }
    """
    string join_namespace(bint has_extra, const string& extra, bint has_salt, const string& salt)


cdef tuple HOST = (1, 3)  # device types of DLPack for host memory, plain and pinned


cdef int64_t INT32_LOW = -2147483648
cdef int64_t INT32_HIGH = 2147483647


cdef int64_t as_int(object value, str name) except? -1:
    """Return an integer argument; TypeError for another type, ValueError outside int64."""
    cdef int overflow = 0
    if type(value) is not int:
        if not PyIndex_Check(value):
            raise TypeError(f"{name} is a {type(value).__name__}, must be an int")
        value = PyNumber_Index(value)
    cdef long long number = PyLong_AsLongLongAndOverflow(value, &overflow)
    if overflow:
        raise ValueError(f"{name} is {value}, must fit in 64 bits")
    return number


cdef int32_t narrow_token(object token, Py_ssize_t position) except? -1:
    """Return a token as int32; ValueError outside int32, TypeError if it is no integer."""
    cdef int overflow = 0
    if not PyIndex_Check(token):
        raise TypeError(f"token {position} is a {type(token).__name__}, must be an int")
    cdef long long value = PyLong_AsLongLongAndOverflow(PyNumber_Index(token), &overflow)
    if overflow or value < INT32_LOW or value > INT32_HIGH:
        raise ValueError(
            f"token {position} is {token}, must be {INT32_LOW} .. {INT32_HIGH} (int32)"
        )
    return <int32_t>value


cdef cnp.ndarray tokens_from_tuple(tuple tokens):
    cdef Py_ssize_t n = len(tokens)
    cdef cnp.npy_intp size = n
    cdef cnp.ndarray out = cnp.PyArray_SimpleNew(1, &size, cnp.NPY_INT32)
    cdef int32_t* data = <int32_t*>cnp.PyArray_DATA(out)
    cdef Py_ssize_t i
    for i in range(n):
        data[i] = narrow_token(tokens[i], i)
    return out


cdef cnp.ndarray tokens_from_list(object tokens):
    """Return tokens from a list or tuple.

    Reads a list of plain ints directly. Copies a list with other items first, because these may run
    Python code that changes the list.
    """
    if type(tokens) is not list and type(tokens) is not tuple:
        return tokens_from_tuple(tuple(tokens))
    cdef Py_ssize_t n = len(tokens)
    cdef cnp.npy_intp size = n
    cdef cnp.ndarray out = cnp.PyArray_SimpleNew(1, &size, cnp.NPY_INT32)
    cdef int32_t* data = <int32_t*>cnp.PyArray_DATA(out)
    cdef PyObject** items = PySequence_Fast_ITEMS(tokens)
    cdef long long value
    cdef int overflow = 0
    cdef Py_ssize_t i
    for i in range(n):
        if not PyLong_CheckExact(items[i]):
            return tokens_from_tuple(tuple(tokens))
        value = PyLong_AsLongLongAndOverflow(<object>items[i], &overflow)
        if overflow or value < INT32_LOW or value > INT32_HIGH:
            return tokens_from_tuple(tuple(tokens))  # raises the error for this token
        data[i] = <int32_t>value
    return out


cdef cnp.ndarray tokens_from_int64(cnp.ndarray tokens):
    cdef cnp.ndarray wide = cnp.PyArray_GETCONTIGUOUS(tokens)
    cdef cnp.npy_intp size = cnp.PyArray_DIM(wide, 0)
    cdef cnp.ndarray out = cnp.PyArray_SimpleNew(1, &size, cnp.NPY_INT32)
    cdef const int64_t* source = <const int64_t*>cnp.PyArray_DATA(wide)
    cdef int32_t* data = <int32_t*>cnp.PyArray_DATA(out)
    cdef Py_ssize_t i
    for i in range(size):
        if source[i] < INT32_LOW or source[i] > INT32_HIGH:
            raise ValueError(
                f"token {i} is {source[i]}, must be {INT32_LOW} .. {INT32_HIGH} (int32)"
            )
        data[i] = <int32_t>source[i]
    return out


cdef cnp.ndarray exported_tokens(object tokens):
    """Return tokens from an array of another library. Python code of the array runs."""
    if not hasattr(tokens, "__dlpack_device__"):
        raise TypeError(
            f"tokens are a {type(tokens).__name__}, must be a list or an int32 or int64 array"
        )
    try:
        if tokens.__dlpack_device__()[0] not in HOST:
            raise BufferError("they are on a device; copy them to host memory")
        return np.from_dlpack(tokens)
    except (BufferError, RuntimeError, TypeError, ValueError) as error:
        raise TypeError(
            f"tokens are a {type(tokens).__name__} that numpy cannot read: {error}"
        ) from error


cdef cnp.ndarray as_tokens(object tokens):
    """Return contiguous int32 tokens [n]; without a copy if the argument already has this form."""
    cdef cnp.ndarray array
    if isinstance(tokens, (list, tuple)):
        return tokens_from_list(tokens)
    array = tokens if cnp.PyArray_Check(tokens) else array_of_tensor(tokens)
    if array is None:
        array = exported_tokens(tokens)
    if cnp.PyArray_NDIM(array) != 1:
        raise ValueError(
            f"tokens have shape {(<object>array).shape}, must have one dimension; pass one request "
            f"at a time"
        )
    if not cnp.PyArray_ISNOTSWAPPED(array):
        raise TypeError("tokens are not in native byte order; convert them with astype(np.int32)")
    if cnp.PyArray_ISSIGNED(array):
        if cnp.PyArray_ITEMSIZE(array) == 4:
            return cnp.PyArray_GETCONTIGUOUS(array)
        if cnp.PyArray_ITEMSIZE(array) == 8:
            return tokens_from_int64(array)
    raise TypeError(
        f"tokens have dtype {array.dtype}, must be int32 or int64; convert with astype(np.int32)"
    )


cdef bytes make_namespace(object extra_key, object cache_salt):
    """Return the C++ name of a namespace with an extra key, a cache salt or both."""
    cdef bytes extra = None
    cdef bytes salt = None
    for name, key in (("extra_key", extra_key), ("cache_salt", cache_salt)):
        if key is not None and not isinstance(key, str):
            raise TypeError(f"{name} is a {type(key).__name__}, must be a str or None")
    # A str may contain lone surrogates; different strings must have different names.
    if extra_key is not None:
        extra = (<str>extra_key).encode("utf-8", "surrogatepass")
    if cache_salt is not None:
        salt = (<str>cache_salt).encode("utf-8", "surrogatepass")
    return join_namespace(
        extra is not None, b"" if extra is None else extra, salt is not None,
        b"" if salt is None else salt,
    )


cdef object no_context(object item):
    return TypeError(
        f"a {type(item).__name__} ({item!r}) is no context: request_id, tokens, start_idx, "
        f"active_idx, end_idx and update are needed"
    )


cdef object id_of(object context):
    try:
        return context.request_id
    except AttributeError:
        raise no_context(context) from None


cdef int64_t tokens_ahead(object lookahead) except -1:
    """Return `lookahead` as an integer; ValueError if it is negative."""
    cdef int64_t ahead = as_int(lookahead, "lookahead")
    if ahead < 0:
        raise ValueError(f"lookahead is {ahead}, must be at least 0 tokens")
    return ahead


cdef int32_t* room_in(cnp.ndarray out) except NULL:
    """Return the address of an output array's data; runs no code of a subclass."""
    if cnp.PyArray_TYPE(out) != cnp.NPY_INT32 or cnp.PyArray_NDIM(out) != 1:
        raise TypeError("out must be an int32 array of one dimension")
    if not cnp.PyArray_ISCARRAY(out):
        raise ValueError("out must be contiguous, writable and in native byte order")
    return <int32_t*>cnp.PyArray_DATA(out)
