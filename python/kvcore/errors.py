# SPDX-License-Identifier: Apache-2.0
"""The errors of kvcore.

Every text says what was asked, the value, the bound and the remedy. A call that raises has changed
nothing.
"""

from __future__ import annotations

__all__ = [
    "AlreadyClaimedError",
    "CapacityError",
    "InsufficientBlocksError",
    "InvalidHandleError",
    "KVCacheError",
    "PendingTransfersError",
    "RequestNotFoundError",
]


class KVCacheError(RuntimeError):
    """Base of every error that is kvcore's own."""


class InsufficientBlocksError(KVCacheError, MemoryError):
    """More pages are needed than are free, where the call cannot answer with a value."""


class RequestNotFoundError(KVCacheError, KeyError, ValueError):
    """The request is not claimed."""

    # KeyError would print the repr of its text.
    __str__ = RuntimeError.__str__


class AlreadyClaimedError(KVCacheError, ValueError):
    """The request is claimed already."""


class CapacityError(KVCacheError, ValueError):
    """The replica is full, or the request can never fit."""


class InvalidHandleError(KVCacheError, ValueError):
    """A double free, a double unpin or a stale handle."""


class PendingTransfersError(KVCacheError):
    """Bytes are on their way into the request's pages: finish those transfers first.

    From Python only to the code that moves them, should it use the request itself: every other call
    waits for them.
    """
