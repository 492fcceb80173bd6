# SPDX-License-Identifier: Apache-2.0
"""The native side of stores below the host tier: the search for columns that they may load.

A column is a whole page of a prompt; with groups of layers, as many tokens as the largest page.
"""


# ---- searches of requests ------------------------------------------------------------------------


# Called before a request is reserved, if there are stores: search the stores for the request's
# columns, for a hit of at most `max_hit` tokens, and load these. Python code of the stores runs.
cdef int bring(
    Settler settler, RequestView* request, object context, bint now, int64_t max_hit
) except -1:
    cdef StoreSearch found
    cdef BelowSearch search
    cdef vector[PageKey] key
    if request.active - request.start <= 1:
        return 0
    found = settler.native.search_below(request[0], max_hit)
    if found.most == 0:
        return 0
    if found.legal == found.have and not found.has_gaps:
        key.resize(found.have + 1 - found.stored)
        settler.native.keys_below(
            request.name_space, request.tokens, found.stored, found.have + 1, found.parent,
            key.data(),
        )
        if not settler.below.may_have(bytes_of(key[key.size() - 1])):
            return 0
    search = BelowSearch.__new__(BelowSearch)
    search.side = settler.store_side
    search.found = found
    search.max_hit = None if max_hit == INT64_MAX else max_hit
    search.made.swap(key)
    search.name = PyBytes_FromStringAndSize(request.name_space.data(), request.name_space.size())
    search.tokens.assign(
        request.tokens, request.tokens + <int64_t>found.most * settler.native.config().page_size
    )
    if isinstance(context, TextGenerationContext):
        search.holder = (<TextGenerationContext>context)._keys
    else:
        search.holder = context
    settler.below.bring(search, context, now)
    return 0


# The same for the requests of a batch. No other code has a reference to `contexts`.
cdef int bring_all(
    Settler settler, vector[RequestView*]& rows, list contexts, bint now
) except -1:
    cdef size_t i
    for i in range(rows.size()):
        bring(settler, rows[i], contexts[i], now, INT64_MAX)
    return 0


@cython.final
cdef class BelowSearch:
    """The columns of a prompt in the device and the host tier, and the load of further columns.

    Attributes
    ----------
    replica : int
    have : int
        Number of columns of the prompt in the device or the host tier, whichever has more.
    legal : int
        Number of columns that a hit could use from both tiers together.
    most : int
        Number of columns of the longest hit if every page were cached.
    has_gaps : bool
        True if no group keeps every token: stores need not have every column of a hit.
    max_hit : int or None
        The longest hit that the request accepts, in tokens; None without a limit.

    Notes
    -----
    One thread at a time.
    """

    cdef StoreSide side
    cdef object holder  # keeps the stand-ins of the tokens with extra keys alive
    cdef StoreSearch found
    cdef readonly object max_hit
    cdef bytes name
    cdef vector[TokenId] tokens
    cdef vector[PageKey] made  # keys from column `found.stored` on
    cdef vector[PageKey] front  # keys of the columns before `found.stored`; computed on demand
    cdef int32_t asked  # columns of the hit in the last call of `needed`

    @property
    def replica(self):
        return self.found.replica

    @property
    def have(self):
        return self.found.have

    @property
    def legal(self):
        return self.found.legal

    @property
    def most(self):
        return self.found.most

    @property
    def has_gaps(self):
        return self.found.has_gaps

    cdef int make_keys(self, int32_t last) except -1:
        cdef int32_t end = self.found.stored + <int32_t>self.made.size()
        cdef PageKey before
        if last <= end:
            return 0
        before = self.found.parent if self.made.empty() else self.made[self.made.size() - 1]
        cdef vector[PageKey] more
        more.resize(last - end)
        self.side.native.keys_below(
            name_view(self.name), self.tokens.data(), end, last, before, more.data()
        )
        self.made.insert(self.made.end(), more.begin(), more.end())
        return 0

    cdef int make_front(self) except -1:
        cdef vector[PageKey] front
        if not self.front.empty():
            return 0
        front.resize(self.found.stored)
        self.side.native.keys_below(
            name_view(self.name), self.tokens.data(), 0, self.found.stored,
            self.side.native.root_key_below(name_view(self.name)), front.data(),
        )
        self.front.swap(front)
        return 0

    cdef const PageKey* key_of(self, int64_t column) noexcept:
        """Return the key of a column; the key must have been computed."""
        if column < self.found.stored:
            return &self.front[column]
        return &self.made[column - self.found.stored]

    def keys(self, first, last):
        """Return the keys of columns ``first .. last - 1``, bytes [32] each.

        Raises
        ------
        ValueError
            Columns outside ``0 .. most``.

        Notes
        -----
        Each key is computed once. The keys of all columns in the host tier are computed together.
        """
        cdef int64_t begin = as_int(first, "first")
        cdef int64_t end = as_int(last, "last")
        cdef int64_t i
        if not 0 <= begin <= end <= self.found.most:
            raise ValueError(f"columns {begin} .. {end}, must be in 0 .. {self.found.most}")
        if begin < self.found.stored:
            self.make_front()
        self.make_keys(<int32_t>end)
        return [bytes_of(self.key_of(i)[0]) for i in range(begin, end)]

    def needed(self, end):
        """List the parts that stores have to load for a hit of `end` columns.

        Returns
        -------
        list of (int, int)
            Columns in ascending order, each with its parts as bits: the parts that neither the
            device nor the host tier has.
        """
        cdef int64_t last = as_int(end, "end")
        cdef vector[ColumnParts] found
        cdef size_t i
        if not 1 <= last <= self.found.most:
            raise ValueError(f"end is {last}, must be 1 .. {self.found.most}")
        found = self.side.native.needed_below(
            self.found.replica, name_view(self.name), self.tokens.data(), <int32_t>last
        )
        self.asked = <int32_t>last
        return [(found[i].column, found[i].parts) for i in range(found.size())]

    def begin_fill(self, columns):
        """Take pages of the host tier for columns that stores have.

        Parameters
        ----------
        columns : list of (int, int)
            Items of the last ``needed``, without columns and parts that the stores lack. Columns
            past the end of the host tier's columns must continue them without a gap, each with all
            parts of the groups that keep every token.

        Returns
        -------
        Fill or None
            The leading columns for which the host tier has room; None without room.

        Raises
        ------
        ValueError
            Columns that are not in ascending order, or outside ``0 .. most - 1``.
        """
        cdef vector[ColumnParts] items
        cdef vector[PageKey] keys
        cdef ColumnParts item
        cdef StoreMoves moves
        cdef int64_t before = -1
        for column, parts in columns:
            item.column = column
            item.parts = parts
            if not before < item.column < self.found.most:
                raise ValueError(
                    f"column {item.column} follows column {before}, must be in ascending order and "
                    f"at most {self.found.most - 1}"
                )
            before = item.column
            items.push_back(item)
        if items.empty():
            return None
        self.keys_of(items, keys)
        self.side.native.begin_fill(
            self.found.replica, name_view(self.name), self.tokens.data(),
            max(self.asked, <int32_t>before + 1), items.data(), keys.data(),
            <int64_t>items.size(), moves,
        )
        if moves.ticket == 0:
            return None
        cdef Fill fill = Fill.__new__(Fill)
        fill.ticket = moves.ticket
        fill.side = self.side
        fill.search = self
        fill.replica = moves.replica
        fill.keys = listed_keys(moves)
        fill.parts = listed_parts(moves)
        return fill

    cdef int keys_of(self, const vector[ColumnParts]& items, vector[PageKey]& keys) except -1:
        cdef size_t i
        if items[0].column < self.found.stored:
            self.make_front()
        self.make_keys(items[items.size() - 1].column + 1)
        keys.reserve(items.size())
        for i in range(items.size()):
            keys.push_back(self.key_of(items[i].column)[0])
        return 0


@cython.final
cdef class Fill:
    """Pages of the host tier that a store reads into; no search finds them before ``finish``.

    If a Fill is destroyed before ``finish``, all its pages are freed.

    Attributes
    ----------
    replica : int
    keys : list of bytes
        The key of each column.
    parts : list of list of (int, int)
        Per column: part, and the page of the host tier to read it into; for STATE_PART the slot.
    """

    cdef StoreSide side
    cdef object search  # keeps its `holder` alive
    cdef uint64_t ticket
    cdef readonly int32_t replica
    cdef readonly list keys
    cdef readonly list parts

    def __dealloc__(self):
        if self.ticket != 0:
            self.side.native.finish_fill(self.ticket, 0, False)

    def finish(self, arrived, forward=False):
        """Add the first `arrived` columns to the host tier, and free the others.

        Parameters
        ----------
        arrived : int
        forward : bool
            Also queue the arrived columns for writing to stores.

        Raises
        ------
        RuntimeError
            ``finish`` was called before.
        """
        cdef int64_t n = as_int(arrived, "arrived")
        cdef uint64_t ticket = self.ticket
        if ticket == 0:
            raise RuntimeError("this fill is finished; begin a new fill")
        if not 0 <= n <= len(self.keys):
            raise ValueError(f"arrived is {n}, must be 0 .. {len(self.keys)}")
        self.ticket = 0
        self.side.native.finish_fill(ticket, n, forward)
        self.search = None


# ---- searches of prefetches ----------------------------------------------------------------------


def search_prefix(
    StoreSide side not None, tokens, extra_key=None, cache_salt=None, replica_idx=0, *,
    extra_keys=None
):
    """Search for a prefix as ``reserve`` does; return None if stores cannot extend the hit.

    Parameters
    ----------
    side : StoreSide
    tokens : list of int, or array int32 or int64 [n]
    extra_key, cache_salt : str, optional
    replica_idx : int
    extra_keys : list of (int, int, bytes), optional
        The extra keys of a context that start before token `n`.

    Returns
    -------
    BelowSearch or None

    Raises
    ------
    IndexError, ValueError, TypeError
    """
    cdef cnp.ndarray source = as_tokens(tokens)
    cdef int64_t n = cnp.PyArray_DIM(source, 0)
    cdef const int32_t* data = <const int32_t*>cnp.PyArray_DATA(source)
    cdef bytes name = namespace_of(extra_key, cache_salt)
    cdef int64_t replica = as_int(replica_idx, "replica_idx")
    cdef tuple keys = as_extra_keys(extra_keys, n, False)
    cdef ExtraKeys shown = None
    cdef BelowSearch search = BelowSearch.__new__(BelowSearch)
    if keys is not None:
        shown = show_tokens(keys, data, n, n)
        data = shown.tokens()
    search.found = side.native.search_below(<int32_t>replica, name_view(name), data, n)
    if search.found.most == 0:
        return None
    search.side = side
    search.holder = shown
    search.name = name
    search.tokens.assign(
        data, data + <int64_t>search.found.most * side.native.config().page_size
    )
    return search
