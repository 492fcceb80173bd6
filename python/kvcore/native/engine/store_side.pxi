# SPDX-License-Identifier: Apache-2.0
"""Columns that wait to be written to stores below the host tier, and lists of host-tier pages."""


#: The part number of the checkpoint in a stored page; all other parts are lanes.
STATE_PART = 63


cdef bytes bytes_of(const PageKey& key):
    return PyBytes_FromStringAndSize(<const char*>key.data(), key.size())


cdef list listed_keys(const StoreMoves& moves):
    cdef size_t i
    return [bytes_of(moves.keys[i]) for i in range(moves.keys.size())]


cdef list listed_parts(const StoreMoves& moves):
    """Return, per column, its parts as (number, page of the tier or slot of its states)."""
    cdef list out = []
    cdef size_t i
    cdef int32_t k = 0
    for i in range(moves.ends.size()):
        parts = []
        while k < moves.ends[i]:
            parts.append((moves.parts[k].part, moves.parts[k].page))
            k += 1
        out.append(parts)
    return out


@cython.final
cdef class StoreSide:
    """The calls that stores below the host tier make on a manager.

    Parameters
    ----------
    core : CacheCore
        Made with ``has_stores``.
    """

    cdef CacheCore core  # owns `native`
    cdef CacheManager* native

    def __cinit__(self, CacheCore core not None):
        self.core = core
        self.native = core.manager

    def take_writes(self, most):
        """Take up to `most` waiting columns to write; return None if no column waits."""
        cdef int64_t n = as_int(most, "most")
        cdef StoreMoves moves
        cdef StoreWrites made
        cdef uint64_t resets = self.native.num_resets()
        if not self.native.take_writes(n, moves):
            return None
        made = StoreWrites.__new__(StoreWrites)
        made.ticket = moves.ticket
        made.side = self
        made.replica = moves.replica
        made.resets = resets
        made.written.swap(moves.keys)
        made.parts = listed_parts(moves)
        return made

    @property
    def waiting(self):
        """Number of columns that wait to be written or are being written."""
        return self.native.num_waiting_writes()

    @property
    def dropped(self):
        """Number of columns that were forgotten while they waited."""
        return self.native.num_dropped_writes()


@cython.final
cdef class StoreWrites:
    """Pages of the host tier that are being written to stores; kept unchanged until ``finish``.

    Attributes
    ----------
    replica : int
    keys : list of bytes
    parts : list of list of (int, int)
        As in Fill.
    """

    cdef StoreSide side
    cdef uint64_t ticket
    cdef readonly int32_t replica
    cdef uint64_t resets  # number of cache resets when the columns were taken
    cdef vector[PageKey] written
    cdef readonly list parts

    def __dealloc__(self):
        if self.ticket != 0:
            self.side.native.finish_writes(self.ticket)

    @property
    def keys(self):
        """Keys of the columns, bytes [32] each."""
        cdef size_t i
        return [bytes_of(self.written[i]) for i in range(self.written.size())]

    def note_stored(self):
        """Report in the events that a store has all these columns, unless there was a reset."""
        self.side.native.note_written(
            self.replica, self.written.data(), <int64_t>self.written.size(), self.resets
        )

    def finish(self):
        """Let the host tier evict these pages again.

        Raises
        ------
        RuntimeError
            ``finish`` was called before.
        """
        cdef uint64_t ticket = self.ticket
        if ticket == 0:
            raise RuntimeError("these writes are finished; take new writes")
        self.ticket = 0
        self.side.native.finish_writes(ticket)
