# SPDX-License-Identifier: Apache-2.0
"""The contexts of requests: their tokens and the progress of the computation."""


cdef object USUAL_PRIORITY = 50  # CPython has a single object for this number
cdef uint64_t contexts_epoch = 1

# Growing buffers get 64 to 127 tokens of extra room, in turn. With equal room, requests of the same
# age would all outgrow their buffers in the same step, and this step would copy all buffers.
cdef unsigned int num_buffers = 0


cdef inline int64_t growth_room() noexcept:
    global num_buffers
    num_buffers += 1
    return 64 + num_buffers % 64


# The managers that explain misses.
explaining = WeakSet()


# Attributes that a manager reads from the C fields, so that a subclass cannot override them.
cdef tuple ATTRIBUTES = (
    "request_id", "tokens", "start_idx", "active_idx", "end_idx", "extra_key", "cache_salt",
    "extra_keys", "priority", "ttl", "retention", "tenant", "returns_in", "pending",
    "_set_pending",
)


cdef int require_attributes(object subclass) except -1:
    """Raise TypeError if a subclass overrides an attribute that managers read from C fields."""
    for name in ATTRIBUTES:
        if getattr(subclass, name) is not getattr(TextGenerationContext, name):
            raise TypeError(
                f"{subclass.__name__} overrides {name}, which managers read directly from "
                f"TextGenerationContext; give it another name, or write a class that has the "
                f"attributes of kvcore.context.ContextLike"
            )
    return 0


cdef class TextGenerationContext:
    """The tokens of one request, and the number of tokens whose KV is written.

    Parameters
    ----------
    request_id
        Any hashable object that identifies the request.
    tokens : list of int, or array int32 or int64 [n]
        The prompt, at least one token; copied. An array of numpy, torch, or any library with
        DLPack, in host memory.
    active_idx : int, optional
        End of the first chunk to run; the whole prompt by default.
    extra_key, cache_salt : str, optional
        Prefix-cache namespace (LoRA id; tenant). Requests of different namespaces never share
        pages. None means no key; "" is a key.
    priority : int
        0 .. 100: pages with a higher priority stay cached longer. Only the eviction policy
        "priority" uses `priority`, `ttl` and `retention`. A page has the highest priority of all
        requests that use it.
    ttl : float, optional
        The pages have this priority for this many seconds after their last use; later they have
        priority 0.
    retention : list of (start, end, priority, seconds), optional
        Priority and time for ranges of prompt tokens, in order. The first token of a page decides
        its range. `end` may be None for the end of the prompt, `seconds` None for ever.
    extra_keys : list of (int, int, bytes), optional
        Start, length and content of inputs other than token ids, for example images. The bytes
        identify the content, for example as a digest. Pages before the start of a key are shared
        whatever the key is. Pages at or after its start are shared only between requests that have
        equal keys at equal positions. In any order; ranges may overlap, with at most 64 keys over
        one token.
    tenant : str, optional
        The owner of the pages, for the quotas of the manager. A tenant without a quota counts as no
        tenant. A fork without a tenant gets the tenant of its parent.
    returns_in : float or {"soon", "later", "never"}, optional
        When the session of the request sends its next request, in seconds after the release of this
        request: "soon" means within a minute, "later" within ten minutes, "never" that the session
        is closed. Only the eviction policy "hinted" uses it. It may be set at any time before the
        release. None: no hint.

    Raises
    ------
    ValueError
        No tokens, tokens outside int32, more than one dimension, ``active_idx`` outside ``1 .. n``,
        a priority or a time out of range, ranges that overlap or are not in order, an extra key
        that is empty or outside the tokens, an unknown word for `returns_in`.
    TypeError
        Tokens of another dtype, a namespace or tenant that is not a string, a priority or time that
        is not a number, an extra key that is not (int, int, bytes), a subclass that overrides an
        attribute that managers read.

    Notes
    -----
    ``0 <= start_idx < active_idx <= end_idx`` always. One thread at a time uses a context.

    A subclass may add attributes and methods, and override ``update``, ``extend`` and ``rewind``:
    ``update_batch`` calls ``update`` of each context. A manager reads ``tokens``, ``start_idx``,
    ``priority`` and so on directly from the fields of this class, so subclasses add no cost. The
    constructor refuses a subclass that overrides any of these attributes. ``__new__`` takes the
    arguments of the constructor: a subclass with other arguments must override ``__new__``.

    Examples
    --------
    >>> from kvcore import TextGenerationContext
    >>> ctx = TextGenerationContext("r1", [10, 11, 12])
    >>> ctx.update(13)
    >>> ctx.start_idx, ctx.active_idx, ctx.tokens.tolist()
    (3, 4, [10, 11, 12, 13])
    """

    # Not __init__, which may not run or may run twice: a second run would move the tokens to which
    # a batch points.
    def __cinit__(self, object request_id, object tokens, *, object active_idx=None,
                  object extra_key=None, object cache_salt=None, object priority=50,
                  object ttl=None, object retention=None, object extra_keys=None,
                  object tenant=None, object returns_in=None):
        if type(self) is not TextGenerationContext:
            require_attributes(type(self))
        cdef cnp.ndarray source = as_tokens(tokens)
        cdef int64_t n = cnp.PyArray_DIM(source, 0)
        if n < 1:
            raise ValueError("a context has 0 tokens, must have at least 1")
        hash(request_id)
        cdef tuple keys = None
        if extra_keys is not None:
            keys = as_extra_keys(extra_keys, n, True)
        if (priority is not USUAL_PRIORITY or ttl is not None or retention is not None
                or tenant is not None or returns_in is not None):
            self._terms = make_terms(priority, ttl, retention, tenant, returns_in)
        self._name = namespace_of(extra_key, cache_salt)
        self._request.name_space = name_view(self._name)
        self.request_id = request_id
        self.extra_key = extra_key
        self.cache_salt = cache_salt
        self._make_buffer(n + n // 8 + 64)
        memcpy(<int32_t*>self._request.tokens, cnp.PyArray_DATA(source), n * sizeof(int32_t))
        self._request.start = 0
        self._request.active = self._request.end = n
        if keys is not None:
            self._show(show_tokens(keys, self._request.tokens, n, self._capacity))
        if active_idx is not None:
            self.active_idx = active_idx

    def __dealloc__(self):
        change_contexts_epoch()

    cdef int _make_buffer(self, int64_t capacity) except -1:
        cdef cnp.npy_intp size = capacity
        self._buffer = cnp.PyArray_SimpleNew(1, &size, cnp.NPY_INT32)
        self._request.tokens = <const int32_t*>cnp.PyArray_DATA(self._buffer)
        self._capacity = <int32_t>min(capacity, INT32_MAX)
        return 0

    cdef int _move_buffer(self, int64_t capacity) except -1:
        """Move the tokens to a new buffer; arrays over the old buffer keep it unchanged."""
        cdef cnp.ndarray old = self._buffer
        self._make_buffer(capacity)
        memcpy(
            <int32_t*>self._request.tokens, cnp.PyArray_DATA(old),
            self._request.end * sizeof(int32_t),
        )
        if self._keys is not None:
            self._show(self._keys)
        return 0

    cdef void _show(self, ExtraKeys keys) noexcept:
        """Point the request to the ids in `keys` for the prefix tree; with None to the tokens."""
        self._keys = keys
        if keys is None:
            self._request.tokens = <const int32_t*>cnp.PyArray_DATA(self._buffer)
            self._capacity = <int32_t>min(cnp.PyArray_DIM(self._buffer, 0), INT32_MAX)
        else:
            self._request.tokens = keys.tokens()
            self._capacity = 0

    cdef int _append_shown(self, const int32_t* tokens, int64_t n) except -1:
        """Append to the tokens and to the ids for the prefix tree."""
        cdef int64_t end = self._request.end
        if end + n > cnp.PyArray_DIM(self._buffer, 0):
            self._move_buffer((end + n) * 3 // 2 + growth_room())
        self._keys.append(tokens, n, end)
        self._show(self._keys)
        memcpy(<int32_t*>cnp.PyArray_DATA(self._buffer) + end, tokens, n * sizeof(int32_t))
        self._request.end += n
        return 0

    cdef int _append(self, const int32_t* tokens, int64_t n) except -1:
        if self._request.end + n > self._capacity:
            if self._keys is not None:
                return self._append_shown(tokens, n)
            self._move_buffer((self._request.end + n) * 3 // 2 + growth_room())
        memcpy(<int32_t*>self._request.tokens + self._request.end, tokens, n * sizeof(int32_t))
        self._request.end += n
        return 0

    cdef int _update(self, int32_t token) except -1:
        if self._request.active == self._request.end:
            self._append(&token, 1)
        self._request.start = self._request.active
        self._request.active = self._request.end
        return 0

    @property
    def tokens(self):
        """All tokens, int32 [end_idx], read-only: a snapshot that stays valid and unchanged."""
        cdef cnp.npy_intp size = self._request.end
        cdef cnp.ndarray view = cnp.PyArray_SimpleNewFromData(
            1, &size, cnp.NPY_INT32, cnp.PyArray_DATA(self._buffer)
        )
        Py_INCREF(self._buffer)
        cnp.PyArray_SetBaseObject(view, self._buffer)
        cnp.PyArray_CLEARFLAGS(view, cnp.NPY_ARRAY_WRITEABLE)
        return view

    @property
    def priority(self):
        """Priority of its cached pages, 0 .. 100."""
        return 50 if self._terms is None else self._terms.priority

    @property
    def ttl(self):
        """Seconds after the last use for which pages keep the priority; None for ever."""
        return None if self._terms is None else self._terms.ttl

    @property
    def retention(self):
        """Ranges of the prompt with their own priority, a tuple."""
        return () if self._terms is None else self._terms.retention

    @property
    def tenant(self):
        """The tenant that owns the pages; None without a tenant."""
        return None if self._terms is None else self._terms.tenant

    @property
    def returns_in(self):
        """When its session returns after the release: seconds, a word, or None without a hint."""
        return None if self._terms is None else self._terms.returns_in

    @returns_in.setter
    def returns_in(self, object returns_in):
        self._terms = make_terms(
            self.priority, self.ttl, self.retention, self.tenant, returns_in
        )

    @property
    def pending(self):
        """True while loads of its pages from stores are in flight; see ``manager.poll()``."""
        return self._pending != 0

    @property
    def misses(self):
        """Why tokens were not cached at the last admission, a ``kvcore.metrics.Misses``, or None.

        None before the first ``maybe_reserve`` or ``fetch``, for a fork, and with managers that
        were made without ``CacheOptions(explain=...)``. Stays after the request is released.
        """
        for manager in list(explaining):
            found = manager._misses_with(self)
            if found is not None:
                return found
        return None if self._past is None else self._past.misses

    def _set_pending(self, bint is_pending):
        self._pending = is_pending
        if is_pending:
            change_contexts_epoch()  # so that calls with a known batch check `pending`

    @property
    def extra_keys(self):
        """Extra keys as (start, length, bytes), sorted, without duplicates; None without keys."""
        return None if self._keys is None else tuple(self._keys.keys) or None

    @property
    def start_idx(self):
        """Number of tokens whose KV is written; may be lowered to run written tokens again."""
        return self._request.start

    @start_idx.setter
    def start_idx(self, object start_idx):
        cdef int64_t value = as_int(start_idx, "start_idx")
        if not 0 <= value <= self._request.start:
            raise ValueError(
                f"start_idx {value} of request {self.request_id!r} is outside 0 .. start_idx = "
                f"0 .. {self._request.start}; tokens that are not written cannot be skipped"
            )
        self._request.start = value

    @property
    def active_idx(self):
        """End of the chunk to run now; may be set to ``start_idx + 1 .. end_idx``."""
        return self._request.active

    @active_idx.setter
    def active_idx(self, object active_idx):
        cdef int64_t value = as_int(active_idx, "active_idx")
        if not self._request.start < value <= self._request.end:
            raise ValueError(
                f"active_idx {value} of request {self.request_id!r} is outside "
                f"start_idx + 1 .. end_idx = {self._request.start + 1} .. {self._request.end}"
            )
        self._request.active = value

    @property
    def end_idx(self):
        """Number of all tokens."""
        return self._request.end

    @property
    def active_length(self):
        """Number of tokens to run now: ``active_idx - start_idx``."""
        return self._request.active - self._request.start

    @property
    def current_length(self):
        """Number of all tokens, the same as ``end_idx``."""
        return self._request.end

    def update(self, token):
        """Advance past the chunk that ran.

        After the last chunk, the method appends the sampled `token`, which runs next. After an
        earlier chunk, the rest of the prompt runs next, and `token` is discarded.

        Raises
        ------
        ValueError
            A token outside int32.
        """
        cdef int32_t narrow = narrow_token(token, self._request.end)
        if keys_in_use:
            look_at_ids(self, &narrow, 1)
        self._update(narrow)

    def extend(self, tokens):
        """Append tokens to run, e.g. draft tokens: ``active_idx = end_idx =`` the new length.

        Parameters
        ----------
        tokens : list of int, or array int32 or int64 [n]
        """
        cdef cnp.ndarray source = as_tokens(tokens)
        cdef const int32_t* data = <const int32_t*>cnp.PyArray_DATA(source)
        if keys_in_use:
            look_at_ids(self, data, cnp.PyArray_DIM(source, 0))
        self._append(data, cnp.PyArray_DIM(source, 0))
        self._request.active = self._request.end

    def rewind(self, object n):
        """Cut the tokens to the first `n`; at least the last of these runs again.

        Removes extra keys that start after them.

        Raises
        ------
        ValueError
            `n` outside ``1 .. end_idx``.
        """
        cdef int64_t end = as_int(n, "n")
        if not 1 <= end <= self._request.end:
            raise ValueError(
                f"request {self.request_id!r} cannot be cut to {n} tokens, "
                f"must be 1 .. {self._request.end}"
            )
        if self._keys is not None:
            self._keys.cut(end)
        self._request.active = self._request.end = end
        self._request.start = min(self._request.start, end - 1)
        if Py_REFCNT(<PyObject*>self._buffer) > 1:
            # later tokens must not appear in an array that ``tokens`` returned
            self._move_buffer(cnp.PyArray_DIM(self._buffer, 0))

    def __deepcopy__(self, memo):
        return copy(self)  # by kvcore.snapshots.pickling; the request id is the same object

    def __repr__(self):
        return (
            f"TextGenerationContext({self.request_id!r}, start_idx={self._request.start}, "
            f"active_idx={self._request.active}, end_idx={self._request.end})"
        )


# Called before an append, once extra keys are in use. For an id that may be a stand-in, a context
# with keys raises here. A context without keys forgets its claim, so that the next call of a
# manager checks all tokens again, and raises if the manager has extra keys.
cdef int look_at_ids(TextGenerationContext own, const int32_t* tokens, int64_t n) except -1:
    if is_plain(tokens, 0, n):
        return 0
    if own._keys is not None:
        require_plain(tokens, 0, n)
    own._manager_uid = 0
    change_contexts_epoch()
    return 0
