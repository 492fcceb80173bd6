# SPDX-License-Identifier: Apache-2.0
"""Objects that are like contexts."""


cdef object read_plain(object context, RequestView* view, list keep):
    """Describe an object like a context, all but its claim and its keys; return its request id."""
    cdef cnp.ndarray tokens
    cdef bytes name
    try:
        request_id = context.request_id
        given = context.tokens
        view.start = as_int(context.start_idx, "start_idx")
        view.active = as_int(context.active_idx, "active_idx")
        view.end = as_int(context.end_idx, "end_idx")
    except AttributeError:
        raise no_context(context) from None
    tokens = as_tokens(given)
    name = namespace_of(
        getattr(context, "extra_key", None), getattr(context, "cache_salt", None)
    )
    keep.append((tokens, name))
    view.tokens = <const int32_t*>cnp.PyArray_DATA(tokens)
    view.name_space = name_view(name)
    if view.end > cnp.PyArray_DIM(tokens, 0):
        raise ValueError(
            f"request {request_id!r} has end_idx {view.end} but "
            f"{cnp.PyArray_DIM(tokens, 0)} tokens; end_idx counts all tokens"
        )
    return request_id


cdef object read_foreign(object context, RequestView* view, list keep):
    """Describe it with its tokens as the prefix tree is shown them.

    Its keys may reach behind its tokens, as they do once it was cut within an image.
    """
    request_id = read_plain(context, view, keep)
    cdef tuple keys = as_extra_keys(getattr(context, "extra_keys", None), view.end, False)
    cdef ExtraKeys shown
    if keys is not None:
        shown = show_tokens(keys, view.tokens, view.end, view.end)
        keep.append(shown)
        view.tokens = shown.tokens()
    return request_id


cdef int move_indices(object context, const RequestView& to, const RequestView& given) except -1:
    """Set the indices of a foreign context that differ; `active_idx` first, which stays behind."""
    if to.active != given.active:
        context.active_idx = to.active
    if to.start != given.start:
        context.start_idx = to.start
    return 0


cdef int check_settable(object context) except -1:
    """Raise before anything is reserved for a context whose indices could not be moved."""
    if not isinstance(context, TextGenerationContext):
        context.start_idx = context.start_idx
        context.active_idx = context.active_idx
    return 0
