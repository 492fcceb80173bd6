# SPDX-License-Identifier: Apache-2.0
# Whether the rows of a batch still hold the pages that a view of them reads and writes.


@cython.final
cdef class RowClaims:
    """Remember the claims of a batch's rows, to tell later whether a row still holds a page.

    Parameters
    ----------
    table : PagedKVCacheManager
    request_ids : list [B]

    Raises
    ------
    RequestNotFoundError
        One of them is not claimed.
    """

    cdef ClaimTable _table
    cdef list _names
    cdef vector[SequenceHandle] _claims

    def __cinit__(self, ClaimTable table not None, list request_ids not None):
        self._table = table
        self._names = list(request_ids)
        for name in self._names:
            self._claims.push_back(table._find(name))

    def __call__(self, row, column, page):
        """Raise InvalidHandleError unless the claim of `row` lives and has `page` at `column`.

        Notes
        -----
        Costs O(pages of the row), a copy of their ids.
        """
        cdef size_t at = row
        cdef size_t place = column
        cdef vector[BlockId] pages
        try:
            pages = self._table._native.pages_of(self._claims.at(at))
        except RequestNotFoundError:
            raise InvalidHandleError(
                f"request {self._names[row]!r} was released after this view of it was made; "
                f"fetch its present claim"
            ) from None
        if place >= pages.size() or pages[place] != page:
            raise InvalidHandleError(
                f"page {page} is no longer page {column} of request {self._names[row]!r}: it was "
                f"swapped, copied or dropped after this view was made; fetch again"
            )
