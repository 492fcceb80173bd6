# SPDX-License-Identifier: Apache-2.0
"""The hashes of a request's blocks, made once somebody reads them.

vLLM hashes every block of every request, since its manager finds blocks by hash. kvcore compares
tokens; hashes are left for events and connectors. What kvcore reads of a prompt is made where vLLM
would hash it: when the request is, which is not the scheduler's time.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, MutableSequence
from typing import Any

from kvcore import TextGenerationContext


class BlockHashes(MutableSequence[bytes]):
    """What vLLM has as a list; `prompt` is int32 [n], the tokens that a request begins with."""

    def __init__(self, request: Any, hasher: Callable[[Any], list[bytes]]) -> None:
        self._request = weakref.ref(request)
        self._hasher = hasher
        self._made: list[bytes] = []
        self._is_hashing = False  # the hasher looks here where it has to go on
        # A context takes a list five times as fast as numpy or array do.
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
        """Return what makes a copy: a list of all hashes, without the request."""
        return list, (list(self._all()),)

    def __delitem__(self, index: Any) -> None:
        del self._made[index]

    def clear(self) -> None:
        """Forget all hashes: tokens have changed."""
        self._made.clear()
        self.prompt = self.prompt[:0]

    def __setitem__(self, index: Any, value: Any) -> None:
        raise TypeError("hashes are made of tokens; they cannot be set")

    insert = __setitem__


def lazy(make_hasher: Callable[..., Callable[[Any], list[bytes]]]) -> Callable[..., Any]:
    """Have hashers of vLLM's put `BlockHashes` into requests in place of making hashes."""

    def make(*args: Any, **kwargs: Any) -> Any:
        hasher = make_hasher(*args, **kwargs)

        def begin(request: Any) -> tuple[()]:
            request.block_hashes = BlockHashes(request, hasher)
            request._block_hasher = None  # noqa: SLF001 - else it is asked at every token
            return ()

        return begin

    return make
