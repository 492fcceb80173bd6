# SPDX-License-Identifier: Apache-2.0
"""Columns that wait to be written to stores below the host tier, and lists of host-tier pages."""


#: The part number of the checkpoint in a stored page; all other parts are lanes.
STATE_PART = 63


cdef bytes bytes_of(const PageKey& key):
    return PyBytes_FromStringAndSize(<const char*>key.data(), key.size())


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

    @property
    def waiting(self):
        """Number of columns that wait to be written or are being written."""
        return self.native.num_waiting_writes()

    @property
    def dropped(self):
        """Number of columns that were forgotten while they waited."""
        return self.native.num_dropped_writes()
