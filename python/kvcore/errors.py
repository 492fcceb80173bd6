# SPDX-License-Identifier: Apache-2.0
"""The errors of kvcore.

Every message names the argument, its value, the bound and the remedy. A call that raises an error
changes nothing.
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
    """Base class of kvcore's own errors."""


class InsufficientBlocksError(KVCacheError, MemoryError):
    """The call needs more pages than are free, and cannot return a value for that case."""


class RequestNotFoundError(KVCacheError, KeyError, ValueError):
    """The request is not claimed."""

    # KeyError prints the repr of its message.
    __str__ = RuntimeError.__str__


class AlreadyClaimedError(KVCacheError, ValueError):
    """The request is claimed already."""


class CapacityError(KVCacheError, ValueError):
    """The replica is full, or the request can never fit."""


class InvalidHandleError(KVCacheError, ValueError):
    """The call is a double free or a double unpin, or its handle is stale."""


class PendingTransfersError(KVCacheError):
    """The request's pages have transfers in flight: finish the transfers first.

    From Python, only the code that moves the bytes gets this error, if it uses the request itself.
    Every other call waits for the transfers.
    """
