# SPDX-License-Identifier: Apache-2.0
"""The terms of a request for its pages: priorities, durations, its return and the tenant."""


# About 270 years.
cdef double MOST_SECONDS = 8.5e9


cdef int64_t nanoseconds(object seconds, str name) except? -1:
    """Return a time in seconds as whole nanoseconds."""
    cdef double value
    try:
        value = seconds
    except TypeError:
        raise TypeError(f"{name} is {seconds!r}, must be a number of seconds") from None
    if not -MOST_SECONDS <= value <= MOST_SECONDS:
        raise ValueError(
            f"{name} is {seconds!r}, must be {-MOST_SECONDS:g} .. {MOST_SECONDS:g} seconds"
        )
    return <int64_t>floor(value * 1e9)


cdef int64_t duration(object seconds, str name) except? -1:
    """Return a duration above 0 in nanoseconds; INT64_MAX for None, which means for ever."""
    if seconds is None:
        return INT64_MAX
    cdef int64_t length = nanoseconds(seconds, name)
    if length < 1:
        raise ValueError(f"{name} is {seconds!r}, must be more than 0 seconds, or None for ever")
    return length


# Seconds until a session returns, by the words for them.
cdef dict RETURNS = {"soon": 60.0, "later": 600.0, "never": None}


cdef int64_t return_time(object given, str name) except? -1:
    """Return a hint as nanoseconds from the release on; UNKNOWN for None, NEVER for "never"."""
    cdef double seconds
    if given is None:
        return UNKNOWN
    if isinstance(given, str):
        if given not in RETURNS:
            raise ValueError(
                f'{name} is {given!r}, must be "soon" (within a minute), "later" (within ten '
                f'minutes), "never", or a number of seconds'
            )
        if RETURNS[given] is None:
            return NEVER
        given = RETURNS[given]
    try:
        seconds = given
    except TypeError:
        raise TypeError(
            f'{name} is {given!r}, must be a number of seconds, "soon", "later", "never" or None'
        ) from None
    if not 0 <= seconds <= MOST_SECONDS:
        raise ValueError(
            f'{name} is {given!r}, must be 0 .. {MOST_SECONDS:g} seconds; pass "never" for a '
            f"session that is closed"
        )
    return <int64_t>floor(seconds * 1e9)


cdef int32_t checked_priority(object priority, str name) except? -1:
    cdef int64_t value = as_int(priority, name)
    if not 0 <= value <= 100:
        raise ValueError(f"{name} is {value}, must be 0 .. 100")
    return <int32_t>value


cdef RetainedTokens retained(object given, Py_ssize_t i, int64_t last) except *:
    """Return range `i` of a retention, checked; it must not start before `last`."""
    cdef RetainedTokens tokens
    try:
        start, end, priority, seconds = given
    except (TypeError, ValueError):
        raise ValueError(
            f"retention[{i}] is {given!r}, must be (start, end, priority, seconds)"
        ) from None
    tokens.start = as_int(start, f"the start of retention[{i}]")
    tokens.end = INT64_MAX if end is None else as_int(end, f"the end of retention[{i}]")
    tokens.priority = checked_priority(priority, f"the priority of retention[{i}]")
    tokens.duration = duration(seconds, f"the time of retention[{i}]")
    if tokens.start < last or tokens.end <= tokens.start:
        raise ValueError(
            f"retention[{i}] has the tokens {start} .. {end}, must not be empty and must start at "
            f"{last} or later, the end of the ranges before it"
        )
    return tokens


@cython.final
cdef class Terms:
    """Priorities, durations, return and tenant of a context's pages, in the form of C++."""


cdef Terms make_terms(
    object priority, object ttl, object retention, object tenant, object returns_in
):
    cdef int64_t last = 0
    cdef int32_t wanted = checked_priority(priority, "priority")
    cdef Terms terms = Terms.__new__(Terms)
    terms.native.priority = wanted
    terms.native.duration = duration(ttl, "ttl")
    terms.priority = terms.native.priority
    terms.ttl = ttl
    terms.returns = return_time(returns_in, "returns_in")
    terms.returns_in = returns_in
    if tenant is not None:
        if not isinstance(tenant, str):
            raise TypeError(f"tenant is {tenant!r}, must be a string or None")
        terms.tenant = str.__str__(tenant)  # a plain str: its lookup runs no Python code
    terms.retention = () if retention is None else tuple(retention)
    for i, given in enumerate(terms.retention):
        terms.native.ranges.push_back(retained(given, i, last))
        last = terms.native.ranges.back().end
    if (terms.native.priority == 50 and ttl is None and not terms.retention and tenant is None
            and returns_in is None):
        return None
    return terms
