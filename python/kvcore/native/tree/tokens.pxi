# SPDX-License-Identifier: Apache-2.0
"""Tokens in the form of a prefix tree: int32 words.

A token of 64 bits is two words. The first n of the pairs (t0, t1), (t1, t2), ... of two prompts are
equal if and only if t0 and the next n tokens are equal. So a tree of pairs stores t1, t2, ... in a
namespace whose name contains t0. It stores one token per pair and compares tokens as usual.
"""


# Words to compare or copy; valid while their array lives.
cdef struct Words:
    const int32_t* data
    int64_t n


# The tree stores the second token of each pair. The first token is in the pair before, or in the
# name of the namespace.
cdef inline int64_t num_skipped(TokenShape shape, cnp.ndarray tokens) noexcept:
    return 1 if shape.paired and cnp.PyArray_DIM(tokens, 0) > 0 else 0


cdef inline int64_t num_words(TokenShape shape, cnp.ndarray tokens) noexcept:
    return (cnp.PyArray_DIM(tokens, 0) - num_skipped(shape, tokens)) * shape.words


cdef inline Words words_of(TokenShape shape, cnp.ndarray tokens) noexcept:
    cdef Words words
    words.data = <const int32_t*>cnp.PyArray_DATA(tokens)
    words.data += num_skipped(shape, tokens) * shape.words
    words.n = num_words(shape, tokens)
    return words


cdef extern from "Python.h":
    bytes PyBytes_FromStringAndSize(const char* text, Py_ssize_t size)


cdef TokenShape shape_of(object token_dtype, bint paired) except *:
    cdef TokenShape shape
    dtype = np.dtype(token_dtype)
    if dtype != np.int32 and dtype != np.int64:
        raise ValueError(f"token_dtype is {dtype}, must be int32 or int64")
    shape.words = dtype.itemsize // 4
    shape.paired = paired
    return shape


cdef cnp.ndarray tokens_of(TokenShape shape, object tokens):
    """Return contiguous tokens [n] of the tree's dtype; no copy if `tokens` has this form."""
    if shape.words == 1:
        return as_tokens(tokens)
    if not cnp.PyArray_Check(tokens):
        tokens = wide_from_list(tokens)
    elif tokens.dtype != np.int64:
        tokens = as_tokens(tokens).astype(np.int64)  # as_tokens raises for other dtypes
    if tokens.ndim != 1:
        raise ValueError(
            f"tokens have shape {tokens.shape}, must have one dimension; pass one request at a time"
        )
    return cnp.PyArray_GETCONTIGUOUS(tokens)


cdef object wide_from_list(object tokens):
    if not isinstance(tokens, (list, tuple)):
        raise TypeError(
            f"tokens are a {type(tokens).__name__}, must be a list or an int32 or int64 array"
        )
    found = np.array(tokens) if tokens else np.empty(0, np.int64)
    if found.dtype != np.int64:
        raise TypeError(f"tokens are a list of {found.dtype}, must be of int that fit in 64 bits")
    return found


cdef bytes name_in(TokenShape shape, bytes name, cnp.ndarray tokens):
    """Return the namespace name of these tokens; for pairs it contains the first token."""
    if not shape.paired:
        return name
    cdef int64_t first = 0
    if cnp.PyArray_DIM(tokens, 0) > 0:
        if shape.words == 1:
            first = (<const int32_t*>cnp.PyArray_DATA(tokens))[0]
        else:
            first = (<const int64_t*>cnp.PyArray_DATA(tokens))[0]
    return (b"" if name is None else name) + PyBytes_FromStringAndSize(<const char*>&first, 8)


cdef int require_none(object extra_keys) except -1:
    if extra_keys is not None:
        raise ValueError(
            "extra_keys need a tree of int32 tokens that are not paired; "
            "pass a digest of the content as extra_key"
        )
    return 0


cdef cnp.ndarray looked_up(TokenShape shape, KeyedTrees trees, object extra_keys,
                           cnp.ndarray tokens):
    """Return the ids for a query of a tree. No other code may run before the query."""
    if shape.words == 1 and not shape.paired:
        return shown_of(trees, extra_keys, tokens)
    require_none(extra_keys)
    return tokens


cdef ExtraKeys put_in(TokenShape shape, KeyedTrees trees, object extra_keys, cnp.ndarray tokens):
    """Return the ids to insert into a tree; None to insert the tokens themselves."""
    if shape.words > 1 or shape.paired:
        require_none(extra_keys)
        return None
    cdef int64_t n = cnp.PyArray_DIM(tokens, 0)
    cdef const int32_t* data = <const int32_t*>cnp.PyArray_DATA(tokens)
    cdef tuple keys = as_extra_keys(extra_keys, n, False)
    if keys is not None:
        trees.expect_keys()
        return show_tokens(keys, data, n, n)
    if trees.is_keyed:
        require_plain(data, 0, n)
    return None
