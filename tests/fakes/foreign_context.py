# SPDX-License-Identifier: Apache-2.0
"""A request context in plain Python: an engine's own class, and the reference's class."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import numpy.typing as npt


class Refused(Exception):  # noqa: N818
    """A wrong call; `kind` names the error class that kvcore must raise."""

    def __init__(self, kind: str) -> None:
        super().__init__(kind)
        self.kind = kind


class Context:
    """A request's tokens and indices in plain Python; implements the protocol of the managers."""

    remembers = False  # for the reference: like a context that stores its earlier claims

    def __init__(
        self,
        request_id: Any,
        tokens: Iterable[int],
        *,
        active_idx: int | None = None,
        extra_key: str | None = None,
        cache_salt: str | None = None,
    ) -> None:
        self.request_id = request_id
        self.ids = [int(token) for token in tokens]
        self.start_idx = 0
        self.active_idx = len(self.ids) if active_idx is None else active_idx
        self.extra_key = extra_key
        self.cache_salt = cache_salt
        self.past = (-1, 0)  # for the reference: prompt tokens, and counted tokens
        self.ran = 0  # for the reference: tokens that ran in the last claim

    @property
    def tokens(self) -> npt.NDArray[np.int32]:
        return np.array(self.ids, np.int32)

    @property
    def end_idx(self) -> int:
        return len(self.ids)

    @property
    def active_length(self) -> int:
        return self.active_idx - self.start_idx

    @property
    def current_length(self) -> int:
        return self.end_idx

    def update(self, token: int) -> None:
        self.start_idx = self.active_idx
        if self.active_idx == self.end_idx:
            self.ids.append(token)
        self.active_idx = self.end_idx

    def extend(self, tokens: Iterable[int]) -> None:
        self.ids.extend(tokens)
        self.active_idx = self.end_idx

    def rewind(self, n: int) -> None:
        if not 1 <= n <= self.end_idx:
            raise Refused("ValueError")
        del self.ids[n:]
        self.active_idx = n
        self.start_idx = min(self.start_idx, n - 1)


class FrozenContext(Context):
    """A context whose indices cannot be set after its construction."""

    is_armed = False

    def __init__(self, *args: Any, **rest: Any) -> None:
        super().__init__(*args, **rest)
        self.is_armed = True

    def __setattr__(self, name: str, value: Any) -> None:
        if self.is_armed and name in ("start_idx", "active_idx"):
            raise AttributeError(f"{name} cannot be set")
        super().__setattr__(name, value)


class Calling(Context):
    """A context that calls a function once while the manager reads its tokens."""

    call: Callable[[], object] | None = None

    @property
    def tokens(self) -> npt.NDArray[np.int32]:
        if self.call is not None:
            call, self.call = self.call, None
            call()
        return super().tokens
