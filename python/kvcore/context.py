# SPDX-License-Identifier: Apache-2.0
"""The context of a request, and the protocol for other objects that replace the context."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, Protocol

from kvcore.native.contexts import TextGenerationContext, update_batch

__all__ = ["ContextLike", "TextGenerationContext", "update_batch"]


class Exported(Protocol):
    """A tensor of torch, or of another library with DLPack; stubs use this type."""

    def __dlpack_device__(self) -> tuple[int, int]: ...


class ContextLike(Protocol):
    """Define the attributes of a request that a manager reads and moves.

    ``0 <= start_idx < active_idx <= end_idx`` always holds. Optional attributes: ``extra_key`` and
    ``cache_salt``, str or None, are the prefix-cache namespace; ``extra_keys`` is a list of (start,
    length, bytes) or None; ``returns_in`` is the hint for the policy "hinted", which ``release``
    reads. Every call reads ``extra_keys``. If the list is not empty, the call
    copies the tokens.

    If `tokens` is a contiguous int32 array, the manager reads it in place: the first part of an
    engine's own growing buffer costs no copy. The manager keeps a reference to the array during the
    call, and other threads must not write to these tokens before the call returns.
    """

    request_id: Hashable
    start_idx: int
    active_idx: int

    @property
    def tokens(self) -> Any:
        """All tokens, [end_idx]: list of int, or int32 or int64 array of any library."""

    @property
    def end_idx(self) -> int:
        """Number of all tokens."""

    def update(self, token: int) -> None:
        """Advance past the chunk that ran."""
