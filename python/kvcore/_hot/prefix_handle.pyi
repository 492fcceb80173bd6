# SPDX-License-Identifier: Apache-2.0
class PrefixHandle:
    """A matched prefix; goes stale (InvalidHandleError) when pages of its run are evicted.

    Attributes
    ----------
    num_pages : int
    partial_tokens : int
        Tokens behind these pages that a cached page has too, as many as `match` looked ahead.

    Notes
    -----
    A handle that is dropped lets go of what it pinned.
    """

    @property
    def num_pages(self) -> int: ...
    @property
    def partial_tokens(self) -> int: ...
