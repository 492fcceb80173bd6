# SPDX-License-Identifier: Apache-2.0
"""Context-like objects of other classes (foreign contexts)."""


cdef object read_plain(object context, RequestView* view, list keep):
    """Fill the view of a foreign context, without claim and extra keys; return the request id."""
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
    """As read_plain; with extra keys, the view has the ids for the prefix tree as its tokens.

    Keys may extend past the tokens, for example after a cut within an image.
    """
    request_id = read_plain(context, view, keep)
    cdef tuple keys = as_extra_keys(getattr(context, "extra_keys", None), view.end, False)
    cdef ExtraKeys shown
    if keys is not None:
        shown = show_tokens(keys, view.tokens, view.end, view.end)
        keep.append(shown)
        view.tokens = shown.tokens()
    return request_id


cdef int64_t return_of(object context) except? -1:
    """Return when the session of a context returns, as return_time; UNKNOWN without a context."""
    if isinstance(context, TextGenerationContext):
        terms = (<TextGenerationContext>context)._terms
        return UNKNOWN if terms is None else (<Terms>terms).returns
    return return_time(getattr(context, "returns_in", None), "returns_in")


cdef int move_indices(object context, const RequestView& to, const RequestView& given) except -1:
    """Set the indices of a foreign context that differ.

    Sets `active_idx` first, so that it stays greater than `start_idx`.
    """
    if to.active != given.active:
        context.active_idx = to.active
    if to.start != given.start:
        context.start_idx = to.start
    return 0


cdef int check_settable(object context) except -1:
    """Raise, before anything is reserved, if the indices of a context cannot be set."""
    if not isinstance(context, TextGenerationContext):
        context.start_idx = context.start_idx
        context.active_idx = context.active_idx
    return 0
