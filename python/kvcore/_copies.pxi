# SPDX-License-Identifier: Apache-2.0
# Page copies that a call owes: within the pool, and between it and the host tier.


cdef class Copies(Forks):
    """What a manager with a pool of its own does before a call returns."""

    def __init__(self, object core, *, bint copies_itself, object mover, bint runtime_checks,
                 object gpus):
        super().__init__(core, runtime_checks=runtime_checks, gpus=gpus)
        self._copies_itself = copies_itself
        self._mover = mover

    cdef int _do(self, Owed* owed) except -1:
        """Do what a call owes, while other threads may run, and say that it is done."""
        try:
            if owed.copies.size() != 0:
                self._copy(owed.copies)
        finally:
            if owed.host_copies.size() != 0:
                self._move(owed.host_copies)
        return 0

    cdef int _copy(self, vector[PageCopy]& copies) except -1:
        try:
            self._copy_pages(copies_array(copies))
        finally:
            self._native.finish_copies(copies)
        return 0

    cdef int _move(self, vector[HostCopy]& copies) except -1:
        cdef bint done = False
        try:
            self._mover.run(host_copies_array(copies))
            done = True
        finally:
            self._native.finish_host_copies(copies, done)
        return 0

    def take_copies(self):
        """Hand out the page copies that a manager without a pool of its own owes.

        Returns
        -------
        int32 [n, 4]
            Replica, source page, destination page, tokens; to be done in this order, before the
            next fetch's kernels run.
        """
        require_made(self)
        return copies_array(self._native.take_copies())
