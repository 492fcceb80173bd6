# SPDX-License-Identifier: Apache-2.0
"""Extra keys: they distinguish equal token ids with different content, for example images.

A request with extra keys has two lists of ids: its tokens, and the ids for the prefix tree. The
second list has a stand-in for each token at which keys start: a negative id that means this token
with these keys in the whole process. So the tree still compares int32 ids, and requests without
keys need no second list.
"""


HIGHEST_STAND_IN = -(1 << 30) - 1

# Page keys and events list every extra key over a page: n keys over n tokens would cost O(n^2).
cdef int64_t MOST_OVER_TOKEN = 64

# One object per process, because a context may be used with any manager. Never destroyed.
stand_ins = new StandIns()

cdef list keyed_trees = []  # weak references to all KeyedTrees with is_keyed
cdef bint is_sweeping = False
cdef bint keys_in_use = False


# ---- arguments -----------------------------------------------------------------------------------


cdef bytes as_key(object key, Py_ssize_t i):
    if not isinstance(key, bytes):
        raise TypeError(
            f"extra_keys[{i}] has a key of type {type(key).__name__}, must be bytes; "
            f"pass a digest of the content, or encode a str"
        )
    if type(key) is bytes:
        return key
    return PyBytes_FromStringAndSize(PyBytes_AS_STRING(key), PyBytes_GET_SIZE(key))


cdef tuple as_extra_key(object item, Py_ssize_t i, int64_t n, bint whole):
    """Return one extra key, checked."""
    if not isinstance(item, (tuple, list)):
        raise TypeError(
            f"extra_keys[{i}] is a {type(item).__name__}, must be (start, length, bytes)"
        )
    cdef tuple parts = tuple(item)
    if len(parts) != 3:
        raise ValueError(
            f"extra_keys[{i}] has {len(parts)} items, must be (start, length, bytes)"
        )
    cdef int64_t start = as_int(parts[0], f"the start of extra_keys[{i}]")
    cdef int64_t length = as_int(parts[1], f"the length of extra_keys[{i}]")
    cdef bytes key = as_key(parts[2], i)
    if not 0 <= start < n:
        raise ValueError(
            f"extra_keys[{i}] starts at {start}, must be 0 .. {n - 1}: there are {n} tokens; "
            f"leave out keys that start past the tokens"
        )
    if length < 1:
        raise ValueError(f"extra_keys[{i}] has length {length}, must be at least 1 token")
    if whole and length > n - start:
        raise ValueError(
            f"extra_keys[{i}] starts at {start} with length {length}, must be at most {n - start}: "
            f"there are {n} tokens; pass (start, length, bytes) with all tokens of the key"
        )
    return start, length, key


cdef tuple checked_keys(object given, int64_t n, bint whole):
    """Return the keys sorted by (start, length, bytes), without duplicates; None without keys."""
    if isinstance(given, (str, bytes)):
        raise TypeError(
            f"extra_keys is a {type(given).__name__}, must be a list of (start, length, bytes)"
        )
    cdef set keys = set()
    cdef Py_ssize_t i
    cdef list items
    try:
        items = list(given)
    except TypeError:
        raise TypeError(
            f"extra_keys is a {type(given).__name__}, must be a list of (start, length, bytes)"
        ) from None
    for i in range(len(items)):
        keys.add(as_extra_key(items[i], i, n, whole))
    if not keys:
        return None
    cdef tuple found = tuple(sorted(keys))
    require_few_over(found)
    return found


cdef int require_few_over(tuple keys) except -1:
    """Raise ValueError for more than MOST_OVER_TOKEN keys over one token. O(n log n)."""
    cdef priority_queue[int64_t] ends  # negated, so that the smallest end is on top
    cdef int64_t start, length
    if len(keys) <= MOST_OVER_TOKEN:
        return 0
    for start, length, _ in keys:
        while not ends.empty() and -ends.top() <= start:
            ends.pop()
        ends.push(-(start + min(length, INT64_MAX - start)))
        if <int64_t>ends.size() > MOST_OVER_TOKEN:
            raise ValueError(
                f"extra_keys has {ends.size()} keys over token {start}, must be at most "
                f"{MOST_OVER_TOKEN}: every page lists all keys over it; combine these keys into "
                f"one digest"
            )
    return 0


def normalized(extra_keys, num_tokens):
    """Check the extra keys of a prefix, and sort them.

    Parameters
    ----------
    extra_keys : list of (int, int, bytes), or None
        Start, length in tokens, and bytes that identify the content; in any order.
    num_tokens : int
        Length of the prefix. Keys start before it ends; they may extend past its end.

    Returns
    -------
    tuple of (int, int, bytes)
        Sorted by start, length and bytes, without duplicates.

    Raises
    ------
    ValueError
        A start outside ``0 .. num_tokens - 1``, a length below 1.
    TypeError
        Not (int, int, bytes).
    """
    return as_extra_keys(extra_keys, as_int(num_tokens, "num_tokens"), False) or ()


cdef int refuse_reserved(const int32_t* tokens, int64_t first, int64_t end) except -1:
    cdef int64_t i
    for i in range(first, end):
        if tokens[i] <= HIGHEST_STAND_IN:
            raise ValueError(
                f"token {i} is {tokens[i]}, must be at least {HIGHEST_STAND_IN + 1} where "
                f"extra_keys are used: lower ids stand for tokens with keys"
            )
    return 0


cdef bint is_plain(const int32_t* tokens, int64_t first, int64_t end) noexcept:
    cdef int32_t lowest = 0
    cdef int64_t i
    for i in range(first, end):
        lowest = min(lowest, tokens[i])
    return lowest > HIGHEST_STAND_IN


cdef int require_plain(const int32_t* tokens, int64_t first, int64_t end) except -1:
    if not is_plain(tokens, first, end):
        refuse_reserved(tokens, first, end)
    return 0


cdef tuple keys_in_front(list keys, int64_t end):
    """Return the extra keys that start before `end`."""
    return tuple([key for key in keys if key[0] < end])


# ---- ids for the prefix tree ---------------------------------------------------------------------


cdef string name_at(tuple keys, Py_ssize_t first, Py_ssize_t end, int32_t token) except *:
    """Return the stand-in name of a token at which these keys start."""
    cdef vector[ExtraKey] named
    cdef ExtraKey each
    cdef Py_ssize_t i
    for i in range(first, end):
        key = <bytes>(<tuple>keys[i])[2]
        each.length = (<tuple>keys[i])[1]
        each.bytes = string_view(PyBytes_AS_STRING(key), PyBytes_GET_SIZE(key))
        named.push_back(each)
    return stand_in_name(token, named.data(), named.size())


cdef Py_ssize_t end_of_start(tuple keys, Py_ssize_t first) noexcept:
    """Return the end of the keys with the same start as key `first`."""
    cdef Py_ssize_t end = first
    cdef int64_t start = (<tuple>keys[first])[0]
    while end < len(keys) and <int64_t>(<tuple>keys[end])[0] == start:
        end += 1
    return end


cdef cnp.ndarray new_tokens(const int32_t* tokens, int64_t n, int64_t capacity):
    cdef cnp.npy_intp size = capacity
    cdef cnp.ndarray out = cnp.PyArray_SimpleNew(1, &size, cnp.NPY_INT32)
    memcpy(cnp.PyArray_DATA(out), tokens, n * sizeof(int32_t))
    return out


@cython.final
cdef class ExtraKeys:
    """The extra keys of a request, and its ids for the prefix tree.

    Keeps its stand-ins alive. After its end, they live as long as a tree has them.
    """

    def __dealloc__(self):
        self.give_up(0)

    cdef int give_up(self, size_t first) noexcept:
        cdef size_t i
        for i in range(first, self.held.size()):
            stand_ins.release(self.held[i].stand_in)
        self.held.resize(first)
        return 0

    cdef const int32_t* tokens(self) noexcept:
        return <const int32_t*>cnp.PyArray_DATA(self.shown)

    cdef int append(self, const int32_t* tokens, int64_t n, int64_t end) except -1:
        """Write further tokens after the first `end` ids."""
        if end + n > cnp.PyArray_DIM(self.shown, 0):
            self.shown = new_tokens(self.tokens(), end, (end + n) * 3 // 2 + 64)
        memcpy(<int32_t*>self.tokens() + end, tokens, n * sizeof(int32_t))
        return 0

    cdef int cut(self, int64_t end) except -1:
        """Remove the keys that start at `end` or later."""
        cdef size_t kept = self.held.size()
        if kept == 0 or self.held[kept - 1].position < end:
            return 0
        while self.keys and <int64_t>(<tuple>self.keys[len(self.keys) - 1])[0] >= end:
            self.keys.pop()
        while kept > 0 and self.held[kept - 1].position >= end:
            kept -= 1
        self.give_up(kept)
        return 0


cdef ExtraKeys show_tokens(tuple keys, const int32_t* tokens, int64_t n, int64_t capacity):
    global keys_in_use
    cdef ExtraKeys made = ExtraKeys.__new__(ExtraKeys)
    cdef ShownToken each
    cdef string name
    cdef Py_ssize_t first = 0
    cdef Py_ssize_t end
    require_plain(tokens, 0, n)
    keys_in_use = True
    made.keys = list(keys)
    made.shown = new_tokens(tokens, n, capacity)
    made.held.reserve(len(keys))
    while first < len(keys):
        end = end_of_start(keys, first)
        each.position = (<tuple>keys[first])[0]
        name = name_at(keys, first, end, tokens[each.position])
        each.stand_in = stand_ins.acquire(string_view(name.data(), name.size()))
        made.held.push_back(each)
        (<int32_t*>made.tokens())[each.position] = each.stand_in
        first = end
    if stand_ins.is_sweep_due():
        sweep()
    return made


cdef cnp.ndarray look_up_keys(KeyedTrees trees, object extra_keys, cnp.ndarray tokens):
    """Return the ids for a query of the tree. No other code may run before the query."""
    cdef const int32_t* data = <const int32_t*>cnp.PyArray_DATA(tokens)
    cdef int64_t n = cnp.PyArray_DIM(tokens, 0)
    cdef tuple keys = as_extra_keys(extra_keys, n, False)
    cdef Py_ssize_t first = 0
    cdef Py_ssize_t end
    cdef int64_t start
    cdef int32_t stand_in = 0
    cdef string name
    cdef cnp.ndarray shown
    require_plain(data, 0, n)
    if keys is None:
        return tokens
    shown = new_tokens(data, n, n)
    while first < len(keys):
        end = end_of_start(keys, first)
        start = (<tuple>keys[first])[0]
        if trees.is_keyed:
            name = name_at(keys, first, end, data[start])
            stand_in = stand_ins.find(string_view(name.data(), name.size()))
        if stand_in == 0:
            return shown[:start]
        (<int32_t*>cnp.PyArray_DATA(shown))[start] = stand_in
        first = end
    return shown


# ---- owners of stand-ins -------------------------------------------------------------------------


@cython.final
cdef class KeyedTrees:
    """The trees that may contain stand-ins: the trees of a manager, or a single PrefixTree."""

    def __dealloc__(self):
        if self.core is None:
            del self.tree

    cdef int find_stand_ins(self, vector[TokenId]& found) except -1:
        """Add all cached ids up to HIGHEST_STAND_IN to `found`. O(cached tokens)."""
        if self.tree != NULL:
            self.tree.find_tokens_up_to(HIGHEST_STAND_IN, found)
            return 0
        cdef vector[TokenId] held = self.manager.tokens_up_to(HIGHEST_STAND_IN)
        found.insert(found.end(), held.begin(), held.end())
        return 0

    cdef int expect_keys(self) except -1:
        """Mark the trees as keyed; ValueError if they hold plain tokens as low as stand-ins.

        The first call costs O(cached tokens).
        """
        global keyed_trees
        cdef vector[TokenId] found
        if self.is_keyed:
            return 0
        self.find_stand_ins(found)
        if not found.empty():
            raise ValueError(
                f"the prefix cache holds token {found[0]}, must be at least "
                f"{HIGHEST_STAND_IN + 1} where extra_keys are used: lower ids stand for tokens "
                f"with keys; reset the prefix cache"
            )
        keyed_trees = [ref for ref in keyed_trees if ref() is not None]
        keyed_trees.append(PyWeakref_NewRef(self, None))
        self.is_keyed = True
        return 0


cdef KeyedTrees trees_of_manager(object core, CacheManager* manager):
    cdef KeyedTrees made = KeyedTrees.__new__(KeyedTrees)
    made.core = core
    made.manager = manager
    return made


cdef KeyedTrees trees_of(CppPrefixTree* tree):
    """Return the KeyedTrees of one tree; it takes ownership of the tree."""
    cdef KeyedTrees made = KeyedTrees.__new__(KeyedTrees)
    made.tree = tree
    return made


cdef int sweep() except -1:
    """Free the stand-ins that no request and no tree has. O(tokens in trees with keys)."""
    global is_sweeping
    cdef vector[TokenId] held
    cdef KeyedTrees trees
    if is_sweeping:
        return 0
    is_sweeping = True
    try:
        stand_ins.begin_sweep()
        for ref in list(keyed_trees):
            trees = ref()
            if trees is not None:
                trees.find_stand_ins(held)
        stand_ins.end_sweep(held.data(), held.size())
    finally:
        is_sweeping = False
    return 0


def stand_ins_capsule():
    """Return a capsule of the process's StandIns, for readers in C++; valid for the process."""
    return PyCapsule_New(stand_ins, "kvcore.StandIns", NULL)


def num_stand_ins():
    """Return the number of stand-ins in the process: of live requests and of caches."""
    return stand_ins.size()


def drop_unused():
    """Free now the stand-ins that no request and no cache holds."""
    sweep()
