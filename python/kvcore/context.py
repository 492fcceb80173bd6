# SPDX-License-Identifier: Apache-2.0
"""The context of a request, and the protocol that any other object may fulfil in its place."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, Protocol

from kvcore.native.contexts import TextGenerationContext, update_batch

__all__ = ["ContextLike", "TextGenerationContext", "update_batch"]


class Exported(Protocol):
    """A tensor of torch, or of another library with DLPack; of stubs."""

    def __dlpack_device__(self) -> tuple[int, int]: ...


class ContextLike(Protocol):
    """What a manager reads and moves of a request.

    ``0 <= start_idx < active_idx <= end_idx`` always. Optional: ``extra_key`` and ``cache_salt``,
    str or None, the prefix-cache namespace; ``extra_keys``, a list of (start, length, bytes) or
    None, read in every call, which costs a copy of the tokens where there are some.

    Tokens that are an int32 array without gaps are read where they lie: the front of an engine's
    own buffer, which grows, costs no copy. The array is held during the call, and nobody may write
    to the tokens that it shows meanwhile.
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
