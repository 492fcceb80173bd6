# SPDX-License-Identifier: Apache-2.0
"""A clock of the stores to the host tier: the stores for which each stream waits, or must."""

from __future__ import annotations

from typing import Any

import pytest

from cuda_machine import Machine
from device_traffic import DeviceTraffic
from kvcore import PagedKVCacheManager, TextGenerationContext
from kvcore.backends.protocol import STORE


class StoreClock:
    """Follow the events of a manager on one GPU: the number of stores each stream waits for."""

    def __init__(
        self, machine: Machine, manager: PagedKVCacheManager, patch: pytest.MonkeyPatch
    ) -> None:
        mover: Any = manager._mover
        kernels = machine.kernels
        self.lane = mover._stores[0].stream.ptr
        self.stores = 0
        self.streams: dict[int, int] = {}
        self.events: dict[int, int] = {}
        self.read_by: dict[int, int] = {}  # page: the last store that reads it
        self.written_by: dict[int, int] = {}  # host page: the last store that writes it
        self.loaded = 0  # the last store whose pages were loaded
        self.real = kernels.record, kernels.wait, mover.run
        patch.setattr(kernels, "record", self.record)
        patch.setattr(kernels, "wait", self.wait)
        patch.setattr(mover, "run", self.run)

    def record(self, event: int, device: int, stream: int) -> None:
        is_lane = stream == self.lane
        self.events[event] = self.stores if is_lane else self.streams.get(stream, 0)
        self.real[0](event, device, stream)

    def wait(self, event: int, device: int, stream: int) -> None:
        behind = max(self.streams.get(stream, 0), self.events.get(event, 0))
        self.streams[stream] = behind
        self.real[1](event, device, stream)

    def run(self, orders: Any) -> Any:
        pages, host = orders[:, 2].tolist(), orders[:, 3].tolist()
        if orders[0, 1] == STORE:
            self.stores += 1
            self.read_by |= dict.fromkeys(pages, self.stores)
            self.written_by |= dict.fromkeys(host, self.stores)
        else:
            self.loaded = max(self.loaded, *map(self.written_by.__getitem__, host))
        return self.real[2](orders)


class ClockedTraffic(DeviceTraffic):
    """Random requests without forks; each fetch waits for exactly the stores that it must.

    This is the last store of a page that was handed out or loaded so far, and no later store.
    """

    def __init__(
        self, machine: Machine, params: Any, seed: int, patch: pytest.MonkeyPatch, **options: Any
    ) -> None:
        super().__init__(machine, params, seed, **options)
        self.by_layer = bool(options.get("layerwise_loads"))
        self.clock = StoreClock(machine, self.manager, patch)
        self.handed_out = 0  # the last store of a page handed out so far
        self.rows: dict[Any, set[int]] = {}
        self.lags = 0  # fetches that did not wait for all stores
        real = {name: getattr(self.manager, name) for name in ("reserve", "fetch", "step")}

        def reserve(context: TextGenerationContext, **more: Any) -> bool:
            fits: bool = real["reserve"](context, **more)
            self.note([context])
            return fits

        def fetch(batch: Any) -> Any:
            inputs = real["fetch"](batch)
            self.note(batch)
            self.compare()
            return inputs

        def step(batch: Any) -> None:
            real["step"](batch)
            for context in batch:  # pages may have been swapped for cached ones
                self.rows[context.request_id] = self.pages_of(context)

        front: Any = _Front(self.manager, {"reserve": reserve, "fetch": fetch, "step": step})
        self.manager = front

    def pages_of(self, context: TextGenerationContext) -> set[int]:
        return set(self.manager.get_req_blocks(context.request_id))

    def note(self, batch: list[TextGenerationContext]) -> None:
        """Record the pages that a call has handed out: new pages of a row that are not cached."""
        for context in batch:
            row = self.pages_of(context)
            new = row - self.rows.get(context.request_id, set())
            self.rows[context.request_id] = row
            _, cached = self.manager.match_prefix(context.tokens, return_pages=True)
            for page in new - set(cached.tolist()):
                self.handed_out = max(self.handed_out, self.clock.read_by.get(page, 0))

    def compare(self) -> None:
        behind = self.clock.streams.get(self.machine.streams.get(0, 0), 0)
        most = max(self.handed_out, self.clock.loaded)
        least = self.handed_out if self.by_layer else most  # a stream waits for layers later
        assert least <= behind <= most
        self.lags += behind < self.clock.stores


class _Front:
    """A manager with some methods replaced."""

    def __init__(self, manager: PagedKVCacheManager, methods: dict[str, Any]) -> None:
        self._manager, self._methods = manager, methods

    def __getattr__(self, name: str) -> Any:
        return self._methods.get(name) or getattr(self._manager, name)
