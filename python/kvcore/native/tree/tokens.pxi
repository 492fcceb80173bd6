# SPDX-License-Identifier: Apache-2.0
"""Tokens as a prefix tree keeps them: int32 words.

A token of 64 bits is two words. Pairs (t0, t1), (t1, t2), ... are equal from the first on where the
tokens are, so a tree of pairs keeps t1, t2, ... in a namespace that t0 is a part of the name of: as
many words as there are pairs, compared as all words are.
"""


# Words to compare or copy, for as long as the array they are of lives.
cdef struct Words:
    const int32_t* data
    int64_t n


# A pair is told from others by its second token: the first is that of the pair in front, or named.
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
    """Contiguous tokens [n] of the tree's dtype: the argument itself where it is that already."""
    if shape.words == 1:
        return as_tokens(tokens)
    if not cnp.PyArray_Check(tokens):
        tokens = wide_from_list(tokens)
    elif tokens.dtype != np.int64:
        tokens = as_tokens(tokens).astype(np.int64)  # or what is wrong with them
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
    """The namespace that these tokens are kept in: in a tree of pairs it tells the first one."""
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
    """What a tree has in place of these tokens. No other code may run until it is read."""
    if shape.words == 1 and not shape.paired:
        return shown_of(trees, extra_keys, tokens)
    require_none(extra_keys)
    return tokens


cdef ExtraKeys put_in(TokenShape shape, KeyedTrees trees, object extra_keys, cnp.ndarray tokens):
    """What a tree is given in place of these tokens; None where they are that."""
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
