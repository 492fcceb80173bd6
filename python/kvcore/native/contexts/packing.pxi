# SPDX-License-Identifier: Apache-2.0
"""Pack the active tokens of a batch into one array."""


cdef cnp.ndarray new_vector(cnp.npy_intp n, int dtype):
    return cnp.PyArray_SimpleNew(1, &n, dtype)


cdef int view_active(list contexts, vector[RequestView]& views, list keep) except -1:
    """Fill the view of each context.

    Reads foreign contexts first, because their Python code may change the other contexts.
    """
    cdef TextGenerationContext own
    cdef Py_ssize_t i
    views.resize(len(contexts))
    for i in range(len(contexts)):
        if not isinstance(contexts[i], TextGenerationContext):
            read_plain(contexts[i], &views[i], keep)
            if not 0 <= views[i].start < views[i].active <= views[i].end:
                raise ValueError(
                    f"request {contexts[i].request_id!r} has start_idx {views[i].start}, "
                    f"active_idx {views[i].active} and end_idx {views[i].end}; "
                    f"expected 0 <= start < active <= end"
                )
    for i in range(len(contexts)):
        if isinstance(contexts[i], TextGenerationContext):
            own = <TextGenerationContext>contexts[i]
            views[i] = own._request
            views[i].tokens = <const int32_t*>cnp.PyArray_DATA(own._buffer)
    return 0


def pack_active(contexts not None):
    """Pack the active tokens of contexts into one array.

    Parameters
    ----------
    contexts : sequence of contexts [B]

    Returns
    -------
    int32 [T], int64 [T], uint32 [B + 1], int64 [B], int
        Tokens, positions, row offsets, index of the last token of each row, tokens of the longest
        row.
    """
    cdef list batch = list(contexts)  # a copy, because Python code may change the list
    cdef list keep = []
    cdef vector[RequestView] views
    view_active(batch, views, keep)
    cdef int64_t total = 0
    cdef int64_t longest = 0
    cdef size_t i
    cdef int64_t k
    for i in range(views.size()):
        total += views[i].active - views[i].start
        longest = max(longest, views[i].active - views[i].start)
    if total > 0xFFFFFFFF:
        raise ValueError(f"the batch has {total} active tokens, row offsets are uint32; run fewer")
    cdef cnp.ndarray tokens = new_vector(total, cnp.NPY_INT32)
    cdef cnp.ndarray positions = new_vector(total, cnp.NPY_INT64)
    cdef cnp.ndarray offsets = new_vector(<cnp.npy_intp>views.size() + 1, cnp.NPY_UINT32)
    cdef cnp.ndarray last = new_vector(<cnp.npy_intp>views.size(), cnp.NPY_INT64)
    cdef int32_t* to_tokens = <int32_t*>cnp.PyArray_DATA(tokens)
    cdef int64_t* to_positions = <int64_t*>cnp.PyArray_DATA(positions)
    cdef uint32_t* to_offsets = <uint32_t*>cnp.PyArray_DATA(offsets)
    cdef int64_t* to_last = <int64_t*>cnp.PyArray_DATA(last)
    cdef int64_t at = 0
    to_offsets[0] = 0
    for i in range(views.size()):
        for k in range(views[i].start, views[i].active):
            to_tokens[at] = views[i].tokens[k]
            to_positions[at] = k
            at += 1
        to_offsets[i + 1] = <uint32_t>at
        to_last[i] = at - 1
    return tokens, positions, offsets, last, longest
