# SPDX-License-Identifier: Apache-2.0
"""Keep pages in a Mooncake store."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Sequence
from importlib.util import find_spec
from threading import Lock
from time import monotonic
from typing import Any, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from kvcore.stores.arena_values import batches
from kvcore.stores.mooncake_client import MooncakeClient
from kvcore.stores.page_values import Found, Parts, ValueBytes, pages_of, read_value, value_of
from kvcore.stores.protocol import FinishedHandle, PageBuffers, StoreCapacity, StoreHandle
from kvcore.stores.server_store import ServerStore
from kvcore.stores.shared_arena import SharedArena
from kvcore.stores.specs import MooncakeTier, parse_tier

__all__ = ["MooncakeStore"]

_Result = TypeVar("_Result")

#: Calls a method of ``mooncake_process.Client``, with one deadline for a whole batch.
_Call: TypeAlias = Callable[..., Any]

#: The engine's codes instead of a number of bytes: no value is stored, or it is not complete yet.
_NOTHING = (-704, -703)


class MooncakeStore(ServerStore):
    """Keep pages in the memory of a Mooncake store's machines, for any number of processes.

    A page is one value, so either all its parts are stored or no part is. Its name is `prefix` and
    the page's key, which reveals no token. The first value of a name stays.

    Parameters
    ----------
    tier : str or MooncakeTier
        For example ``"mooncake://127.0.0.1:50051"``, the address of the master; see `parse_tier`.
    breaker_failures : int
        After this number of consecutive failures, or after one time-out, no call starts for
        `breaker_seconds`.
    breaker_seconds : float

    Raises
    ------
    ValueError
        `tier` is not a Mooncake tier.
    ImportError
        The engine's package is not installed.
    OSError
        The system is not Linux, or has no shared memory left.

    Notes
    -----
    The engine's client runs in its own process, which the store starts now, and again after it has
    ended: a call that takes longer than ``tier.seconds`` ends with the process. Opening the store
    waits up to ten seconds for the process. Any number of threads may use the store, four calls at
    a time. A failure of the engine does not raise: it is a miss, and counts in `health`. After
    ``close()``, and in a child of ``os.fork``, every call raises KVCacheError. The store checks
    only the form of a value, and a value that is removed while another process reads it may change
    during the read. A manager therefore adds a label and a CRC to its pages, and checks both.

    Pages pass through ``tier.buffer`` bytes of memory that the two processes share. Pages in memory
    of `new_buffer` are already in the shared memory, and are not copied.

    Examples
    --------
    >>> from kvcore.stores import MooncakeStore
    >>> store = MooncakeStore("mooncake://127.0.0.1:50051")  # doctest: +SKIP
    >>> store.put_from([bytes(32)], [b"a page"]).result()  # doctest: +SKIP
    1
    """

    def __init__(
        self,
        tier: str | MooncakeTier,
        *,
        breaker_failures: int = 5,
        breaker_seconds: float = 10.0,
    ) -> None:
        spec = parse_tier(tier) if isinstance(tier, str) else tier
        if not isinstance(spec, MooncakeTier):
            raise ValueError(
                f"tier is {tier!r}, must be a Mooncake tier such as 'mooncake://127.0.0.1:50051'"
            )
        if find_spec("mooncake") is None:
            raise ImportError("a Mooncake tier needs its client: pip install 'kvcore[mooncake]'")
        self.tier = spec
        server = f"the Mooncake store at {spec.host}:{spec.port}"
        super().__init__(server, spec.prefix, breaker_failures, breaker_seconds)
        self._arena = SharedArena(spec.buffer)
        self._starting = Lock()
        self._client: MooncakeClient | None = None
        self._guard(lambda: self._started().await_start(), None)

    def __repr__(self) -> str:
        return f"MooncakeStore({self.tier})"

    def new_buffer(self, size: int) -> NDArray[np.uint8] | None:
        """Return memory whose pages need no copy, or None if no memory is left.

        Parameters
        ----------
        size : int
            Bytes, at least 1.
        """
        self._require_open()
        return self._arena.new_buffer(size)

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        """Return for each page whether it is stored. One round trip."""
        names = self._texts(keys)

        def ask(call: _Call, _: float) -> list[bool]:
            return [code == 1 for code in _checked(call("exist", names), {0, 1})]

        return self._call(ask, [False] * len(names))

    def get_into(self, keys: Sequence[bytes], buffers: Sequence[PageBuffers]) -> StoreHandle:
        """Read pages into memory, up to the first page that is not stored.

        Parameters
        ----------
        keys : sequence of bytes [n]
            32 bytes each.
        buffers : sequence of buffers [n]
            For each key, writable contiguous memory with the page's size in bytes; or a list of
            memory, part by part, with None for parts to skip.
        """
        names = self._texts(keys)
        pages = pages_of(names, buffers, is_written=True)
        parted = batches(self._arena, pages)

        def read(call: _Call, ends: float) -> int:
            served = 0
            for some, values in parted:
                with self._arena.taken(values.num_bytes, ends) as begin:
                    for i, size in enumerate(call("get", names[some], values.place(begin))):
                        if not values.read(i, size) and not self._has_more(
                            call, ends, names[served], pages[served], size
                        ):
                            return served
                        served += 1
            return served

        served = self._call(read, 0)
        out = sum(len(view) for parts in pages[:served] for view in parts.values())
        self._count(hits=served, misses=len(names) - served, bytes_out=out)
        return FinishedHandle(served)

    def put_from(self, keys: Sequence[bytes], buffers: Sequence[PageBuffers]) -> StoreHandle:
        """Store pages from memory, except pages that are already stored.

        Parameters
        ----------
        keys : sequence of bytes [n]
            32 bytes each.
        buffers : sequence of buffers [n]
            For each key, contiguous memory, or a list of memory, part by part: with a list, a
            stored page, maybe with other parts, is replaced.
        """
        names = self._texts(keys)
        pages = pages_of(names, buffers, is_written=False)
        parted = batches(self._arena, pages)
        replaced = [name for name, parts in zip(names, pages, strict=True) if max(parts) > 0]

        def write(call: _Call, ends: float) -> list[bool]:
            codes: list[int] = []
            if replaced:
                call("remove", replaced)
            for some, values in parted:
                with self._arena.taken(values.num_bytes, ends) as begin:
                    pieces = values.place(begin)
                    values.write()
                    codes += call("put", names[some], pieces)
            refused = [code for code in codes if code != 0]
            if refused:
                self._note(OSError(f"a put returns {refused[0]}"), "pages were not stored")
            return [code == 0 for code in codes]

        stored = self._call(write, [False] * len(names))
        sizes = [sum(map(len, parts.values())) for parts in pages]
        self._count(bytes_in=sum(n for n, is_new in zip(sizes, stored, strict=True) if is_new))
        return FinishedHandle(sum(stored))

    def remove(self, keys: Sequence[bytes]) -> int:
        """Remove pages; return the number of removed pages. One round trip."""
        names = self._texts(keys)
        return self._call(lambda call, _: list(call("remove", names)).count(0), 0)

    def clear(self) -> int:
        """Remove all pages with this prefix, including pages that other processes stored.

        Pages that other processes store meanwhile may stay: after a change of weights use another
        fingerprint.
        """
        self._require_open()
        pattern = f"^{re.escape(self._prefix.decode())}"
        return self._call(lambda call, _: max(0, *_checked([call("clear", pattern)])), 0)

    def capacity(self) -> StoreCapacity:
        """Return an unknown capacity, because the engine reports no sizes to its clients."""
        self._require_open()
        return StoreCapacity(None, 0, 0)

    def close(self) -> None:
        """End the engine's client; calls in flight in other threads become misses."""
        with self._starting:
            self._is_closed = True
            client, self._client = self._client, None
        if client is not None and os.getpid() == self._process:
            client.kill()
            self._arena.close()

    # ---- calls ----------------------------------------
    def _texts(self, keys: Sequence[bytes]) -> list[str]:
        return [name.decode() for name in self._names(keys)]

    def _call(self, work: Callable[[_Call, float], _Result], failed: _Result) -> _Result:
        """Run a function within one time-out; return `failed` if it fails."""
        ends = monotonic() + self.tier.seconds

        def make(verb: str, *arguments: Any) -> Any:
            return self._started().call(verb, *arguments, ends=ends)

        return self._guard(lambda: work(make, ends), failed)

    def _started(self) -> MooncakeClient:
        with self._starting:
            if self._is_closed:
                raise OSError("the store was closed")
            if self._client is None or self._client.is_over:
                if self._client is not None:
                    self._client.kill()
                self._client = MooncakeClient(self.tier, self._arena)
            return self._client

    def _has_more(self, call: _Call, ends: float, name: str, wanted: Parts, size: int) -> bool:
        """Read a page whose value may have more parts; return whether it has all wanted parts."""
        if size in _NOTHING or (there := call("size", name)) in _NOTHING:
            return False
        if there < 0 or (size < 0 and there == value_of(wanted)[0]):
            raise OSError(f"a get returns {size}")
        found = Found.WRONG
        if there <= self._arena.size // 4:
            with self._arena.taken(there, ends) as begin:
                if call("get", [name], [[(begin, there)]]) == [there]:
                    found = read_value(ValueBytes(self._arena.view(begin, there)), wanted)
        if found is Found.WRONG:
            self._count(corrupt=1)
            call("remove", [name])
        return found is Found.ALL


def _checked(codes: Sequence[int], known: Collection[int] | None = None) -> Sequence[int]:
    """Return the engine's codes if no code is an error."""
    wrong = [code for code in codes if (code < 0 if known is None else code not in known)]
    if wrong:
        raise OSError(f"the engine returns {wrong[0]}")
    return codes
