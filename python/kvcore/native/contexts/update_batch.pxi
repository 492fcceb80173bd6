# SPDX-License-Identifier: Apache-2.0
"""Append the next tokens of a batch of contexts."""


# True if the context has the ``update`` of this module, not that of a subclass.
cdef inline bint is_exact(PyObject* item) noexcept:
    return Py_TYPE(item) == <PyTypeObject*>TextGenerationContext


cdef inline bint all_exact(list contexts) noexcept:
    cdef Py_ssize_t i
    for i in range(len(contexts)):
        if not is_exact(PyList_GET_ITEM(contexts, i)):
            return False
    return True


# Prefetch the place of the context's next token.
cdef inline void prefetch_tail(PyObject* item) noexcept:
    cdef RequestView* request = &(<TextGenerationContext>item)._request
    KVCORE_PREFETCH(request.tokens + request.end)


cdef inline bint take_token(PyObject* item, int32_t token) noexcept:
    """Do ``_update`` if the buffer has room; otherwise change nothing and return False."""
    cdef RequestView* request = &(<TextGenerationContext>item)._request
    if request.active == request.end:
        if request.end >= (<TextGenerationContext>item)._capacity:
            return False
        (<int32_t*>request.tokens)[request.end] = token
        request.end += 1
    request.start = request.active
    request.active = request.end
    return True


def update_batch(object batch, object tokens):
    """Call ``ctx.update(token)`` for each context of a batch.

    Parameters
    ----------
    batch : sequence of contexts [B]
    tokens : list of int, or array int32 or int64 [B]
        The sampled tokens. The token of a context with further prompt chunks is discarded.

    Raises
    ------
    ValueError
        The lengths differ, or a token is outside int32; no context has changed.
    """
    cdef list contexts = batch if type(batch) is list else list(batch)
    cdef cnp.ndarray source = as_tokens(tokens)
    cdef const int32_t* data = <const int32_t*>cnp.PyArray_DATA(source)
    cdef Py_ssize_t n = len(contexts)
    cdef Py_ssize_t i
    cdef PyObject* item
    if cnp.PyArray_DIM(source, 0) != n:
        raise ValueError(
            f"{cnp.PyArray_DIM(source, 0)} tokens for {n} contexts; pass one token per context"
        )
    if all_exact(contexts):
        if keys_in_use:
            for i in range(n):
                look_at_ids(<TextGenerationContext>PyList_GET_ITEM(contexts, i), &data[i], 1)
        for i in range(n):
            if i + AHEAD < n:
                prefetch_context(PyList_GET_ITEM(contexts, i + AHEAD))
            if i + AHEAD // 2 < n:
                prefetch_tail(PyList_GET_ITEM(contexts, i + AHEAD // 2))
            item = PyList_GET_ITEM(contexts, i)
            if not take_token(item, data[i]):
                (<TextGenerationContext>item)._update(data[i])
        return
    contexts = list(contexts)  # a copy, because Python code runs that may change the list
    for context in contexts:
        if not hasattr(context, "update"):
            raise no_context(context)
    for i in range(n):
        contexts[i].update(data[i])
