# SPDX-License-Identifier: Apache-2.0
"""Two managers with the same calls; the callbacks of the faulty manager sometimes raise."""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import numpy.typing as npt

import kvcore.observe.zmq_reset
import kvcore.paged
from builders import make_manager, with_host
from foreign_context import Context
from meddling_copies import Meddler, MeddlingMover, Pages, copied_by

Refusal = (kvcore.KVCacheError, ValueError, TypeError)


class Fault(NamedTuple):
    """A fault: the kind of code that raises, the number of the call that raises, and the error."""

    kind: str
    at: int
    error: type[BaseException]


NO_FAULT = Fault("", 0, OSError)
#: The weight of each kind of code when a fault is drawn.
WEIGHTS = {"copier": 4, "load": 4, "setter": 3, "token": 1, "hash": 1, "listener": 1}


class Points:
    """The calls to foreign code, and the call that raises."""

    def __init__(self) -> None:
        self.is_on = False
        self.counts: collections.Counter[str] = collections.Counter()
        self.fault = NO_FAULT
        self.failed = ""

    @contextmanager
    def watched(self, fault: Fault) -> Iterator[None]:
        self.is_on, self.failed, self.fault = True, "", fault
        self.counts.clear()
        try:
            yield
        finally:
            self.is_on = False

    def reach(self, what: str) -> None:
        if not self.is_on:
            return
        self.counts[what] += 1
        if what == self.fault.kind and self.counts[what] == self.fault.at:
            self.failed = what
            raise self.fault.error(f"injected into {what}")


class Name:
    """A request id whose hash may raise."""

    def __init__(self, points: Points, text: str) -> None:
        self.points, self.text = points, text

    def __hash__(self) -> int:
        self.points.reach("hash")
        return hash(self.text)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Name) and self.text == other.text

    def __repr__(self) -> str:
        return self.text


class Token:
    """A token whose conversion to int may raise."""

    def __init__(self, points: Points, value: int) -> None:
        self.points, self.value = points, value

    def __index__(self) -> int:
        self.points.reach("token")
        return self.value


class Foreign(Context):
    """A context whose setters and tokens may raise."""

    points: Points

    @property
    def tokens(self) -> Any:
        if not self.points.is_on:
            return super().tokens
        return [Token(self.points, value) for value in self.ids]

    def __setattr__(self, name: str, value: Any) -> None:
        if name in ("start_idx", "active_idx"):
            self.points.reach("setter")
        super().__setattr__(name, value)


class FaultyCopier(Meddler):
    points: Points

    def _call(self, phase: str) -> None:
        self.points.reach("copier")


class FaultyMover(MeddlingMover):
    points: Points
    stores = False

    def run(self, orders: npt.NDArray[np.int32]) -> Any:
        self.stores = bool(orders[0, 1] == 0)
        return super().run(orders)

    def _call(self, phase: str) -> None:
        self.points.reach("store" if self.stores else "load")


class Listener:
    """A socket whose check may raise."""

    def __init__(self, points: Points) -> None:
        self.points, self.asked = points, False

    def is_asked(self) -> bool:
        self.points.reach("listener")
        asked, self.asked = self.asked, False
        return asked


Act = Callable[["World"], Any]


class World:
    """A manager with bytes, and all objects that it calls back."""

    def __init__(self, page_size: int, num_pages: int, host_pages: int, replicas: int) -> None:
        self.points = Points()
        self.listener = Listener(self.points)
        with (
            mock.patch.object(
                kvcore.observe.zmq_reset, "ResetListener", return_value=self.listener
            ),
            copied_by(self._faulty_copier),
        ):
            self.manager: Any = make_manager(
                page_size,
                num_pages,
                replicas=replicas,
                blocks="allocate",
                zmq_endpoint_base="nowhere",
                max_batch_size=8 * replicas,
                params=with_host(page_size, host_pages),
            )
        self.pages = Pages(self.manager)
        moves: Any = self.manager._mover
        if host_pages:
            mover = FaultyMover(moves.run, self._spoil_loads)
            mover.points = self.points
            moves.run = mover.run
        self.contexts: list[Any] = []
        self.pins: list[Any] = []

    def _faulty_copier(self, copies: Any) -> FaultyCopier:
        copier = FaultyCopier(copies.run, self._spoil_copies)
        copier.points = self.points
        return copier

    def _spoil_copies(self, orders: Any) -> None:
        for replica, _, target, tokens in orders.tolist():
            self.pages.spoil(replica, target, tokens)

    def _spoil_loads(self, orders: Any) -> None:
        for replica, direction, page, _ in orders.tolist():
            if direction == 1:
                self.pages.spoil(replica, page, self.manager.params.page_size)

    def new(self, tokens: Sequence[int], *, foreign: bool, active_idx: int | None) -> None:
        name = Name(self.points, f"r{len(self.contexts)}")
        if foreign:
            kind = type("Foreign", (Foreign,), {"points": self.points})
            self.contexts.append(kind(name, tokens, active_idx=active_idx))
        else:
            made = kvcore.TextGenerationContext(name, list(tokens), active_idx=active_idx)
            self.contexts.append(made)

    def rows(self, numbers: Sequence[int]) -> list[Any]:
        return [self.contexts[n] for n in numbers]

    def tokens(self, values: Sequence[int]) -> list[Token]:
        return [Token(self.points, value) for value in values]

    def attempt(self, act: Act, fault: Fault = NO_FAULT) -> Any:
        """Return the answer of a call, or the class of its error."""
        with self.points.watched(fault):
            try:
                return act(self)
            except Refusal as refusal:
                return type(refusal)

    # -- visible state ---------------------------------------------------------------------------
    def requests(self) -> dict[int, tuple[int, ...]]:
        """Return for each context: true if it is claimed, pages, start, active, end."""
        return {n: self.request(context) for n, context in enumerate(self.contexts)}

    def request(self, context: Any) -> tuple[int, ...]:
        indices = context.start_idx, context.active_idx, context.end_idx
        if not self.manager.contains(context.request_id):
            return (-1, *indices)
        return (len(self.manager.get_req_blocks(context.request_id)), *indices)

    def matches(self, prompts: Sequence[tuple[int, ...]]) -> list[int]:
        """Return the cached tokens of the prompts; a requested reset waits for the next call."""
        asked, self.listener.asked = self.listener.asked, False
        found = [
            self.manager.match_prefix(list(tokens), replica_idx=replica)
            for tokens in prompts
            for replica in range(self.manager.num_replicas)
        ]
        self.listener.asked = asked
        return found

    def counts(self) -> tuple[Any, ...]:
        metrics = self.manager.metrics
        return (
            self.manager.num_free_blocks,
            self.manager.host_committed_block_pct,
            metrics.input_tokens,
            metrics.cache_tokens,
            metrics.copied_tokens,
        )
