# SPDX-License-Identifier: Apache-2.0
"""The manager of vLLM's chunks in host memory: their slots, lookups and evictions."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from vllm.v1.kv_offload.base import (
    LoadStoreSpec,
    LookupResult,
    Medium,
    OffloadingEvent,
    OffloadingManager,
    OffloadKey,
    PrepareStoreOutput,
    ReqContext,
    RequestOffloadingContext,
    ScheduleEndContext,
)
from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from kvcore import PrefixTree
from kvcore.integrations.vllm.offload_below import Below, Done
from kvcore.native.tree import PrefixHandle
from kvcore.stores import StoreHandle

__all__ = ["KVCoreOffloadingManager"]


@dataclass(slots=True)
class Chunk:
    """A slot in use.

    Parameters
    ----------
    slot : int
    handle : PrefixHandle, optional
        The chunk's node in the tree; None until its bytes have arrived.
    jobs : int
        The number of worker jobs that read or write the slot.
    """

    slot: int
    handle: PrefixHandle | None = None
    jobs: int = 0


@dataclass
class Held:
    """The chunks that a request pins until it ends.

    Parameters
    ----------
    generation : int
        The number of the manager's resets before this object.
    """

    generation: int
    chunks: dict[OffloadKey, PrefixHandle] = field(default_factory=dict)
    is_over: bool = False


class KVCoreOffloadingManager(OffloadingManager):
    """Manage the slots of host memory; each slot holds one chunk.

    A request uses a chunk when it stores, offers or loads it. The request pins the chunk until it
    ends; the manager then unpins the request's chunks from the deepest to the first.

    Parameters
    ----------
    num_chunks : int
        The number of slots.
    eviction : str
        The eviction policy for unpinned chunks: a policy of `kvcore.PrefixTree`.
    region : SharedOffloadRegion, optional
        Released by `shutdown`.
    below : Below, optional
        Lower stores. They also get each stored chunk; their chunks are read into host memory before
        they count as hits.
    enable_events : bool
    info : mapping, optional
        The values of vLLM's metric of facts.
    """

    def __init__(
        self,
        num_chunks: int,
        eviction: str = "lru",
        *,
        region: Any = None,
        below: Below | None = None,
        enable_events: bool = False,
        info: Mapping[str, Any] | None = None,
    ) -> None:
        self._num_chunks, self._eviction = num_chunks, eviction
        self._region, self._below = region, below
        self._info = {} if info is None else info
        self._events: list[OffloadingEvent] | None = [] if enable_events else None
        self._generation = 0
        self._fenced: set[int] = set()  # slots that jobs from before a reset still use
        self._below_slots: set[int] = set()  # slots that stores read or write
        self._late: list[tuple[StoreHandle, list[int]]] = []
        self._start()

    def _start(self) -> None:
        self._tree = PrefixTree(1, self._eviction, token_dtype="int64")
        self._chunks: dict[OffloadKey, Chunk] = {}
        self._keys: list[OffloadKey] = [OffloadKey(b"")] * self._num_chunks
        self._wanted: dict[OffloadKey, ReqContext] = {}
        self._arriving: dict[OffloadKey, ReqContext] = {}
        taken = self._fenced | self._below_slots
        self._free = [slot for slot in reversed(range(self._num_chunks)) if slot not in taken]

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        """Start to track the chunks of a request."""
        self._held(req_context)
        return RequestOffloadingContext()

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        """Return whether a chunk is in host memory, in flight to it, or may be in a store."""
        if self._below is not None:
            self._settle(self._below)
        chunk = self._chunks.get(key)
        if chunk is not None:
            return LookupResult.HIT if chunk.handle is not None else LookupResult.HIT_PENDING
        found = False if self._below is None else self._below.find(key)
        if found:
            self._wanted.setdefault(key, req_context)
            return LookupResult.HIT_PENDING
        return LookupResult.RETRY if found is None else LookupResult.MISS

    def get_load_source(self, key: OffloadKey, req_context: ReqContext) -> CacheHitSource:  # noqa: ARG002
        """Return host memory, from which all loads come."""
        return CacheHitSource.HOST

    def prepare_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> LoadStoreSpec:
        """Pin chunks until they are loaded.

        Raises
        ------
        KeyError
            A chunk is not in host memory. Nothing has changed.
        """
        chunks = [self._ready(key) for key in keys]
        for key, (chunk, handle) in zip(keys, chunks, strict=True):
            self._tree.pin(handle)
            chunk.jobs += 1
            self._use(key, handle, req_context)
        return CPULoadStoreSpec([chunk.slot for chunk, _ in chunks])

    def complete_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:  # noqa: ARG002
        """Unpin loaded chunks."""
        for key in keys:
            chunk, handle = self._ready(key)
            chunk.jobs -= 1
            self._tree.unpin(handle)

    def touch(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:  # noqa: ARG002
        """Count a use of each chunk that is in host memory."""
        for key in keys:
            self._tree.match([_token(key)], touch=True)

    def prepare_store(
        self, keys: Collection[OffloadKey], req_context: ReqContext
    ) -> PrepareStoreOutput | None:
        """Take slots for the chunks that have no slot; return None if they do not all fit."""
        if self._below is not None:
            self._settle(self._below)
        new = [key for key in dict.fromkeys(keys) if key not in self._chunks]
        for key in keys:
            chunk = self._chunks.get(key)
            if chunk is not None and chunk.handle is not None:
                self._use(key, chunk.handle, req_context)
        evicted = self._make_room(len(new))
        if evicted is None:
            return None
        slots = [self._take(key, jobs=1) for key in new]
        return PrepareStoreOutput(new, CPULoadStoreSpec(slots), evicted)

    def complete_store(
        self, keys: Collection[OffloadKey], req_context: ReqContext, success: bool = True
    ) -> None:
        """Publish the written chunks, or forget them if the store failed."""
        written = [key for key in self._deepest_first(keys, req_context) if self._is_written(key)]
        stored = [key for key in written if success and self._publish(key, req_context)]
        self._drop([key for key in written if self._chunks[key].handle is None])
        self._tell(stored, removed=False)
        if self._below is not None and stored:
            self._write_below(self._below, stored[::-1])

    def on_request_finished(self, req_context: ReqContext) -> None:
        """Unpin the chunks that a request used."""
        held = self._held(req_context)
        held.is_over = True
        for key in self._deepest_first(held.chunks, req_context):
            self._tree.unpin(held.chunks[key])
        held.chunks.clear()

    def on_schedule_end(self, context: ScheduleEndContext) -> None:  # noqa: ARG002
        """Start the store lookups and reads that this step's lookups need."""
        if self._below is None:
            return
        self._settle(self._below)
        self._below.ask()
        wanted = [key for key in self._wanted if key not in self._chunks]
        fitting = wanted[: len(self._free) + self._tree.num_evictable]
        self._make_room(len(fitting))
        slots = [self._take(key, jobs=0) for key in fitting]
        self._arriving.update((key, self._wanted[key]) for key in fitting)
        self._below_slots.update(slots)
        self._below.read(fitting, slots)
        for key in wanted[len(fitting) :]:
            self._below.miss(key)
        self._wanted.clear()

    def take_events(self) -> Iterable[OffloadingEvent]:
        """Return the events of stored and evicted chunks since the last call."""
        events, self._events = self._events or [], None if self._events is None else []
        for event in events:
            if event.metadata_only:  # a second try may have stored the keys since
                event = replace(event, keys=[k for k in event.keys if k not in self._chunks])
            if event.keys:
                yield event

    def reset_cache(self) -> None:
        """Forget all chunks; slots that jobs use become free after these jobs end."""
        self._generation += 1
        busy = (chunk.slot for chunk in self._chunks.values() if chunk.jobs)
        self._fenced.update(busy)
        if self._below is not None:
            self._below.forget()
        self._start()

    def on_reset_flushed(self) -> None:
        """Free the slots of jobs from before a reset."""
        self._free += self._fenced - self._below_slots
        self._fenced.clear()

    def config_info(self) -> Sequence[Mapping[str, Any]]:
        """Return the size of the host memory."""
        return [self._info]

    def shutdown(self) -> None:
        """Finish the stores' work, close the stores and release the memory."""
        if self._below is not None:
            self._below.close()
            self._below = None
        if self._region is not None:
            self._region.cleanup()
            self._region = None

    def _held(self, context: ReqContext) -> Held:
        held: Held | None = context.get_state(Held)
        if held is None or held.generation != self._generation:
            held = Held(self._generation, is_over=held is not None and held.is_over)
            context.set_state(held)
        return held

    def _ready(self, key: OffloadKey) -> tuple[Chunk, PrefixHandle]:
        chunk = self._chunks.get(key)
        if chunk is None or chunk.handle is None:
            raise KeyError(f"chunk {key!r} is not in host memory; look it up first")
        return chunk, chunk.handle

    def _use(self, key: OffloadKey, handle: PrefixHandle, context: ReqContext) -> None:
        """Count a use by a request, and pin the chunk for it; once for each request."""
        held = self._held(context)
        if key in held.chunks:
            return
        self._tree.match([_token(key)], touch=True)
        if not held.is_over:
            self._tree.pin(handle)
            held.chunks[key] = handle

    def _make_room(self, n: int) -> list[OffloadKey] | None:
        """Make `n` slots free; return the evicted keys, or None if `n` slots cannot be free."""
        lack = n - len(self._free)
        if lack <= 0:
            return []
        if lack > self._tree.num_evictable:
            return None
        slots = self._tree.evict(lack).tolist()
        evicted = [self._keys[slot] for slot in slots]
        for key in evicted:
            del self._chunks[key]
        self._free += slots
        self._tell(evicted, removed=True)
        return evicted

    def _take(self, key: OffloadKey, jobs: int) -> int:
        slot = self._free.pop()
        self._chunks[key], self._keys[slot] = Chunk(slot, jobs=jobs), key
        return slot

    def _is_written(self, key: OffloadKey) -> bool:
        """Return true if a worker job has written a chunk that is not published yet."""
        chunk = self._chunks.get(key)
        return chunk is not None and chunk.handle is None and chunk.jobs == 1

    def _publish(self, key: OffloadKey, context: ReqContext) -> bool:
        """Make lookups find a chunk; return False if another key has the same token."""
        chunk, held = self._chunks[key], self._held(context)
        found, _, handle = self._tree.insert(
            [_token(key)], [chunk.slot], return_handle=True, pin=True
        )
        if found[0] != chunk.slot or held.is_over:
            self._tree.unpin(handle)
        if found[0] != chunk.slot:
            return False
        chunk.handle, chunk.jobs = handle, 0
        if not held.is_over:
            held.chunks[key] = handle
        return True

    def _drop(self, keys: Collection[OffloadKey], *, is_free: bool = True) -> None:
        """Forget chunks whose bytes did not arrive."""
        for key in keys:
            chunk = self._chunks.pop(key)
            if is_free:
                self._free.append(chunk.slot)
        self._tell(list(keys), removed=True, metadata_only=True)

    def _tell(self, keys: list[OffloadKey], **what: bool) -> None:
        if keys and self._events is not None:
            self._events.append(OffloadingEvent(keys, Medium.CPU, **what))

    def _write_below(self, below: Below, keys: list[OffloadKey]) -> None:
        chunks = [self._ready(key) for key in keys]
        slots = [chunk.slot for chunk, _ in chunks]
        begun = below.write([*keys], slots)
        self._below_slots.update(slots[:begun])
        for _, handle in chunks[:begun]:
            self._tree.pin(handle)

    def _settle(self, below: Below) -> None:
        """Process the batches that stores have finished."""
        if self._late:
            late, self._late = self._late, []
            for handle, slots in late:
                self._release(handle, slots)
        for done in below.settled():
            if done.generation != below.generation:
                self._release(done.handle, done.slots)
            elif done.is_read:
                self._arrived(below, done)
            else:
                self._below_slots.difference_update(done.slots)
                for key in done.keys:
                    self._tree.unpin(self._ready(OffloadKey(key))[1])

    def _arrived(self, below: Below, done: Done) -> None:
        """Publish the chunks that a store has read; count the others as misses for some time."""
        keys = [OffloadKey(key) for key in done.keys]
        brought = keys[: done.served]
        came = [key for key in brought if self._publish(key, self._arriving[key])]
        lost = [key for key in keys if self._chunks[key].handle is None]
        slots = [self._chunks[key].slot for key in lost]
        self._drop(lost, is_free=False)
        for key in keys:
            del self._arriving[key]
        for key in lost:
            below.miss(key)
        self._below_slots.difference_update(self._chunks[key].slot for key in came)
        self._release(done.handle, slots)
        self._tell(came, removed=False)

    def _release(self, handle: StoreHandle | None, slots: list[int]) -> None:
        """Free the slots of a batch once its read no longer writes to them."""
        if handle is not None and not handle.done():
            self._late.append((handle, slots))
            return
        self._below_slots.difference_update(slots)
        self._free += [slot for slot in slots if slot not in self._fenced]

    @staticmethod
    def _deepest_first(keys: Iterable[OffloadKey], context: ReqContext) -> list[OffloadKey]:
        """Order keys by their end in the request, the deepest first; of equal ends, the last."""
        at = {key: (context.get_offload_key_position(key) or 0, i) for i, key in enumerate(keys)}
        return sorted(at, key=at.__getitem__, reverse=True)


def _token(key: OffloadKey) -> int:
    """Return 62 bits of a key. A key is a hash and, in its last four bytes, a group."""
    high: int = int.from_bytes(key[-12:-4], "big") >> 2
    return high ^ int(key[-1]) << 48
