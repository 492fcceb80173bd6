# SPDX-License-Identifier: Apache-2.0
"""Events about pages that enter or leave the caches of a manager."""


#: The media by their numbers in C++.
MEDIA = ("GPU", "CPU", "STORAGE")


cdef uint64_t hash_of(const PageKey& key) noexcept:
    """Return the low 64 bits of a key; a key is a big-endian number."""
    cdef uint64_t value = 0
    cdef size_t i
    for i in range(key.size() - 8, key.size()):
        value = value << 8 | key.data()[i]
    return value


cdef str text_of(string_view text):
    # The encoding of names: a str may contain lone surrogates.
    return PyBytes_FromStringAndSize(text.data(), text.size()).decode("utf-8", "surrogatepass")


cdef NamespaceParts parts_of(PageEvent event) noexcept:
    return read_namespace_name(
        string_view(event.made.name_space.data(), event.made.name_space.size())
    )


@cython.internal
cdef class PageEvent:
    """Base class of events about pages."""

    cdef CacheEvent made

    def __init__(self, *args, **kwargs):
        raise TypeError("events have no public constructor; call take_events")

    @property
    def replica(self):
        """Data parallel replica."""
        return self.made.replica

    @property
    def medium(self):
        """Medium of the pages: "GPU", "CPU" (the host tier) or "STORAGE" (stores below it)."""
        return MEDIA[<int>self.made.medium]

    @property
    def group_idx(self):
        """Index of the group of the pages; None without groups, or for all groups."""
        return None if self.made.group < 0 else self.made.group

    @property
    def keys(self):
        """Keys of the pages, bytes [32] each: ``page_keys`` with the manager's fingerprint."""
        cdef size_t i
        return [bytes_of(self.made.keys[i]) for i in range(self.made.keys.size())]

    @property
    def hashes(self):
        """The low 64 bits of each key, as int."""
        cdef size_t i
        return [hash_of(self.made.keys[i]) for i in range(self.made.keys.size())]

    def __len__(self):
        return self.made.keys.size()

    def __repr__(self):
        cdef str group = "" if self.made.group < 0 else f", group {self.made.group}"
        return (
            f"{type(self).__name__}({len(self)} pages, {self.medium}{group}, "
            f"replica {self.replica})"
        )


@cython.final
cdef class PagesStored(PageEvent):
    """Consecutive pages that searches find from now on.

    Events of "STORAGE" have only keys: no parent and no tokens.
    """

    cdef int32_t size  # tokens per page

    @property
    def parent_key(self):
        """The key of the page before the first page, bytes [32]; None at the start of a prompt."""
        return bytes_of(self.made.parent.value()) if self.made.parent.has_value() else None

    @property
    def parent_hash(self):
        """The low 64 bits of ``parent_key``, as int; None if it is None."""
        return hash_of(self.made.parent.value()) if self.made.parent.has_value() else None

    @property
    def tokens(self):
        """Tokens of the pages, int32 [pages * page_size], on the host; a new array."""
        cdef cnp.npy_intp n = <cnp.npy_intp>self.made.tokens.size()
        cdef cnp.ndarray out = cnp.PyArray_SimpleNew(1, &n, cnp.NPY_INT32)
        if not self.made.tokens.empty():
            memcpy(
                cnp.PyArray_DATA(out), self.made.tokens.data(),
                self.made.tokens.size() * sizeof(TokenId),
            )
        return out

    @property
    def page_size(self):
        """Tokens per page; with groups, of the largest page."""
        return self.size

    @property
    def extra_key(self):
        """``extra_key`` of the requests, for example the name of a LoRA; None without one."""
        cdef NamespaceParts parts = parts_of(self)
        return text_of(parts.extra_key.value()) if parts.extra_key.has_value() else None

    @property
    def cache_salt(self):
        """``cache_salt`` of the requests; None without one."""
        cdef NamespaceParts parts = parts_of(self)
        return text_of(parts.cache_salt.value()) if parts.cache_salt.has_value() else None

    @property
    def extra_keys(self):
        """For each page None, or [(bytes, start, length), ...] as from ``keys_of_pages``.

        None if no page has extra keys.
        """
        cdef size_t i
        if self.made.extras.empty():
            return None
        cdef list pages = [None] * self.made.keys.size()
        for i in range(self.made.extras.size()):
            page = self.made.extras[i].page
            if pages[page] is None:
                pages[page] = []
            pages[page].append((
                <bytes>self.made.extras[i].bytes, self.made.extras[i].start,
                self.made.extras[i].length,
            ))
        return pages


@cython.final
cdef class PagesRemoved(PageEvent):
    """Pages that searches no longer find on the medium, in any order."""


@cython.final
cdef class CacheCleared:
    """A replica has no page on any medium, except pages of later events.

    Attributes
    ----------
    replica : int
        Data parallel replica.
    """

    cdef readonly int32_t replica

    def __init__(self, *args, **kwargs):
        raise TypeError("events have no public constructor; call take_events")

    def __repr__(self):
        return f"CacheCleared(replica {self.replica})"


cdef object event_of(CacheEvent& event, int32_t page_size):
    cdef PageEvent made
    cdef PagesStored stored
    cdef CacheCleared cleared
    if event.kind == CacheEventKind.kCleared:
        cleared = CacheCleared.__new__(CacheCleared)
        cleared.replica = event.replica
        return cleared
    if event.kind == CacheEventKind.kStored:
        stored = PagesStored.__new__(PagesStored)
        stored.size = page_size
        made = stored
    else:
        made = PagesRemoved.__new__(PagesRemoved)
    made.made = move(event)
    return made


def take_events(StepEngine engine not None):
    """Return the events of a manager since the last call."""
    require_made(engine)
    cdef vector[CacheEvent] events
    cdef size_t i
    cdef list out = []
    with nogil:
        events = engine._native.take_events()
    cdef int32_t page_size = engine._native.config().page_size
    for i in range(events.size()):
        out.append(event_of(events[i], page_size))
    return out
