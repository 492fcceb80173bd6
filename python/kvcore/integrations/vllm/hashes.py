# SPDX-License-Identifier: Apache-2.0
"""The hashes of a request's blocks, computed at the first read.

vLLM hashes every block of every request, because its manager finds blocks by hash. kvcore compares
tokens, so only events and connectors read hashes. kvcore converts a prompt's tokens when vLLM would
hash them: at the creation of the request, which takes no time of the scheduler.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, MutableSequence
from typing import Any

from kvcore import TextGenerationContext


class BlockHashes(MutableSequence[bytes]):
    """The list of hashes that vLLM reads; `prompt` int32 [n] has the request's first tokens."""

    def __init__(self, request: Any, hasher: Callable[[Any], list[bytes]]) -> None:
        self._request = weakref.ref(request)
        self._hasher = hasher
        self._made: list[bytes] = []
        self._is_hashing = False  # the hasher reads this list to find its next block
        # A context converts a list five times as fast as numpy or array.
        self.prompt = TextGenerationContext(None, request.all_token_ids[:]).tokens

    def _all(self) -> list[bytes]:
        if not self._is_hashing:
            self._is_hashing = True
            try:
                self._made += self._hasher(self._request())
            finally:
                self._is_hashing = False
        return self._made

    def __getitem__(self, index: Any) -> Any:
        return self._all()[index]

    def __len__(self) -> int:
        return len(self._all())

    def __reduce__(self) -> tuple[Any, ...]:
        """Make a copy a plain list of all hashes, without the request."""
        return list, (list(self._all()),)

    def __delitem__(self, index: Any) -> None:
        del self._made[index]

    def clear(self) -> None:
        """Forget all hashes, because tokens have changed."""
        self._made.clear()
        self.prompt = self.prompt[:0]

    def __setitem__(self, index: Any, value: Any) -> None:
        raise TypeError("hashes are computed from tokens and cannot be set; clear() removes them")

    insert = __setitem__


def lazy(make_hasher: Callable[..., Callable[[Any], list[bytes]]]) -> Callable[..., Any]:
    """Make vLLM's hashers put `BlockHashes` into requests instead of computing hashes."""

    def make(*args: Any, **kwargs: Any) -> Any:
        hasher = make_hasher(*args, **kwargs)

        def begin(request: Any) -> tuple[()]:
            request.block_hashes = BlockHashes(request, hasher)
            request._block_hasher = None  # noqa: SLF001 - else vLLM calls it at every token
            return ()

        return begin

    return make
