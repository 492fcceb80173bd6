# SPDX-License-Identifier: Apache-2.0
"""kvcore's tiers below vLLM's GPU blocks: what comes back is what was stored, whatever happens.

Run by ``tests/integrations/run_vllm.py --part ours``.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.kv_cache_interface import KVCacheGroupSpec
from vllm.v1.kv_offload.base import (
    LookupResult,
    OffloadKey,
    ReqContext,
    ScheduleEndContext,
    make_offload_key,
)
from vllm.v1.request import RequestStatus

from kvcore.integrations.vllm.offload_below import Below
from kvcore.integrations.vllm.offload_manager import KVCoreOffloadingManager
from vllm_offloading_engine import PAGE, Engine, check_slots, full, window

LAYOUTS = {
    "one": lambda: [full("a")],
    "odd": lambda: [full("a", "b", "c", heads=3, width=5)],
    "window": lambda: [full("a", "b"), window("c", "d")],
}
PROMPT = list(range(100, 141))


@pytest.fixture
def made() -> Iterator[list[Engine]]:
    engines: list[Engine] = []
    yield engines
    for engine in engines:
        engine.close()


def make(made: list[Engine], groups: list[KVCacheGroupSpec], **more: Any) -> Engine:
    made.append(Engine(groups, **{"cpu_bytes_to_use": 64 * 4096, **more}))
    return made[-1]


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("chunk_blocks", [1, 3])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_left_the_gpu_comes_back(
    made: list[Engine], layout: str, chunk_blocks: int, ranks: int
) -> None:
    engine = make(made, LAYOUTS[layout](), chunk_blocks=chunk_blocks, ranks=ranks)
    assert engine.serve("first", PROMPT) == 0
    engine.forget_gpu()
    assert engine.serve("again", PROMPT) >= len(PROMPT) // PAGE // chunk_blocks
    engine.check(at_rest=True)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_restart_finds_what_is_on_disk(made: list[Engine], tmp_path: Path, layout: str) -> None:
    tiers = [f"disk:{tmp_path}:16MiB"]
    engine = make(made, LAYOUTS[layout](), tiers=tiers)
    engine.serve("first", PROMPT)
    engine.close()
    made.clear()
    engine = make(made, LAYOUTS[layout](), tiers=tiers)
    assert engine.serve("again", PROMPT) >= len(PROMPT) // PAGE
    engine.check(at_rest=True)
    other = [99, *PROMPT]
    assert engine.serve("other", other) == 0


def test_another_fingerprint_finds_nothing(made: list[Engine], tmp_path: Path) -> None:
    tiers = [f"disk:{tmp_path}:16MiB"]
    make(made, [full("a")], tiers=tiers).serve("first", PROMPT)
    made.pop().close()
    engine = make(made, [full("a")], tiers=tiers, fingerprint="new weights")
    assert engine.serve("again", PROMPT) == 0


@pytest.mark.parametrize("is_local", [True, False])
def test_a_disk_serves_what_host_memory_has_no_room_for(
    made: list[Engine], tmp_path: Path, is_local: bool
) -> None:
    engine = make(made, [full("a")], tiers=[f"disk:{tmp_path}:16MiB"], cpu_bytes_to_use=24 * 4096)
    prompts = [[i, *PROMPT[1:]] for i in range(4)]
    for i, prompt in enumerate(prompts):
        engine.serve(f"first {i}", prompt)
    engine.forget_gpu()
    engine.manager._below._is_local = is_local
    for i, prompt in enumerate(prompts):
        assert engine.serve(f"again {i}", prompt) >= len(PROMPT) // PAGE
        engine.check(at_rest=True)
    assert sum(engine.manager._below._stores[0].store.stats()[n] for n in ("misses", "errors")) == 0


def test_another_engine_finds_what_is_in_a_shared_store(
    made: list[Engine], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parents[1]))  # has what this needs
    from redis_server import RedisServer

    server = RedisServer(tmp_path)
    try:
        engines = [make(made, [full("a")], tiers=[server.url]) for _ in range(2)]
        assert engines[0].serve("first", PROMPT) == 0
        assert engines[1].serve("again", PROMPT) >= len(PROMPT) // PAGE
        server.kill()
        assert engines[1].serve("other", [1, *PROMPT]) == 0
        for engine in engines:
            engine.check(at_rest=True)
    finally:
        server.kill()


def test_pages_that_rot_on_disk_are_computed_again(made: list[Engine], tmp_path: Path) -> None:
    tiers = [f"disk:{tmp_path}:16MiB"]
    engine = make(made, [full("a")], tiers=tiers)
    engine.serve("first", PROMPT)
    engine.close()
    made.clear()
    for path in tmp_path.glob("segment-*"):
        data = bytearray(path.read_bytes())
        for at in range(4096 + 7, len(data), 8192):
            data[at] ^= 1
        path.write_bytes(data)
    engine = make(made, [full("a")], tiers=tiers)
    assert engine.serve("again", PROMPT) == 0
    engine.check(at_rest=True)
    assert engine.manager._below._stores[0].store.stats()["corrupt"] > 0


def test_a_reset_forgets_the_disk_too(made: list[Engine], tmp_path: Path) -> None:
    engine = make(made, [full("a")], tiers=[f"disk:{tmp_path}:16MiB"])
    engine.serve("first", PROMPT)
    engine.scheduler.connector.reset_cache()
    engine.forget_gpu()
    assert engine.serve("again", PROMPT) == 0
    engine.check(at_rest=True)


class Flaky:
    """A store whose n-th call raises, of those that a tier makes; or every call from then on."""

    def __init__(self, store: Any, fails_at: int, *, forever: bool) -> None:
        self._store, self._left, self._forever = store, fails_at, forever
        self.name = store.name

    def __getattr__(self, name: str) -> Any:
        if name not in ("parts_of", "read", "write", "clear"):
            return getattr(self._store, name)

        def call(*args: Any) -> Any:
            self._left -= 1
            if self._left == 0 or (self._forever and self._left < 0):
                raise OSError("injected")
            return getattr(self._store, name)(*args)

        return call


@pytest.mark.parametrize("is_local", [True, False])
@pytest.mark.parametrize("forever", [False, True])
@pytest.mark.parametrize("fails_at", [1, 2, 3, 5, 9, 17])
def test_a_store_that_fails_loses_no_slot(
    made: list[Engine], tmp_path: Path, fails_at: int, forever: bool, is_local: bool
) -> None:
    engine = make(made, [full("a")], tiers=[f"disk:{tmp_path}:16MiB"], cpu_bytes_to_use=14 * 4096)
    below = engine.manager._below
    below._stores = [Flaky(below._stores[0], fails_at, forever=forever)]
    below._is_local = is_local
    for i in (0, 1, 0, 1, 2, 0):
        engine.serve(f"{i} {engine.checked}", [i, *PROMPT[1:]])
        engine.forget_gpu()
        engine.check(at_rest=True)
    engine.scheduler.connector.reset_cache()
    engine.serve("last", PROMPT)
    engine.check(at_rest=True)
    below._stores = [below._stores[0]._store]


def can_reset(engine: Engine, layout: str) -> bool:
    """Return whether the tier may be reset now.

    Not twice in a step. Nor while a request with a window runs: vLLM 0.33 then stores all its
    blocks again, also those that the window has passed and others write to, whatever the manager.
    """
    is_twice = bool(engine.half._current_batch_jobs_to_flush)
    return not is_twice and (layout != "window" or not engine.scheduler.requests)


def is_loading(engine: Engine) -> bool:
    """Return whether vLLM refuses to take blocks away: it does not from those that it loads for."""
    waits = RequestStatus.WAITING_FOR_REMOTE_KVS
    return bool(engine.half._jobs or len(engine.scheduler.kv_holding_waiting)) or any(
        request.status == waits for request in engine.scheduler.requests.values()
    )


@pytest.mark.parametrize("disk", [None, "local", "asked"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("seed", range(3))
def test_random_traffic_with_aborts_preemptions_and_resets(
    made: list[Engine], tmp_path: Path, seed: int, layout: str, disk: str | None
) -> None:
    """Every byte that a step reads is compared, in the engine's `compute`."""
    rng = random.Random(f"{seed} {layout} {disk}")
    engine = make(
        made, LAYOUTS[layout](), blocks=rng.choice([26, 40]), max_tokens=rng.choice([16, 64]),
        chunk_blocks=rng.choice([1, 2]), ranks=rng.choice([1, 2]),
        tiers=[f"disk:{tmp_path}:400KiB"] if disk else [],
        cpu_bytes_to_use=rng.choice([9, 30, 90]) * 4096,
        eviction_policy=rng.choice(["lru", "arc", "lfu", "slru", "fifo"]),
    )  # fmt: skip
    if disk == "asked":
        engine.manager._below._is_local = False
    stems = [[rng.randrange(50) for _ in range(rng.randrange(8, 40))] for _ in range(4)]
    alive: list[Any] = []
    for i in range(60):
        stem = rng.choice(stems)
        tail = [rng.randrange(50) for _ in range(rng.randrange(8))]
        tokens = stem[: rng.randrange(4, len(stem) + 1)] + tail
        alive.append(engine.add(str(i), tokens, rng.randrange(1, 12)))
        for _ in range(rng.randrange(6)):
            engine.step()
            engine.check()
        alive = [each for each in alive if not each.is_finished()]
        if alive and rng.random() < 0.15:
            engine.abort(rng.choice(alive).request_id)
        if rng.random() < 0.06 and can_reset(engine, layout):
            engine.scheduler.connector.reset_cache()
            engine.check()
        if rng.random() < 0.1:
            preempts = rng.random() < 0.5 and not is_loading(engine)
            engine.scheduler.reset_prefix_cache(reset_running_requests=preempts)
    engine.run_until(lambda: not engine.scheduler.requests)
    engine.settle()
    engine.check(at_rest=True)
    assert engine.checked


class Offer:
    """Requests of one manager, by hand."""

    def __init__(self, slots: int, **more: Any) -> None:
        self.manager = KVCoreOffloadingManager(slots, enable_events=True, **more)

    def begin(self, name: str, *chunks: int) -> tuple[Any, list[OffloadKey]]:
        """Return a request, and the keys of chunks that it has, in order."""
        context = ReqContext(name)
        keys = [make_offload_key(bytes([chunk]) * 32, 0) for chunk in chunks]
        for i, key in enumerate(keys):
            context.set_offload_key_position(key, 16 * (i + 1))
        self.manager.on_new_request(context)
        return context, keys

    def store(self, name: str, *chunks: int) -> list[OffloadKey] | None:
        """Have a request store chunks and end; return what was evicted."""
        context, keys = self.begin(name, *chunks)
        taken = self.manager.prepare_store(keys, context)
        if taken is not None:
            self.manager.complete_store({*taken.keys_to_store}, context)
        self.manager.on_request_finished(context)
        check_slots(self.manager, at_rest=True)
        return None if taken is None else taken.evicted_keys


def test_the_end_of_a_prompt_goes_before_its_beginning() -> None:
    offer = Offer(4)
    offer.store("a", 1, 2, 3)
    assert [key[0] for key in offer.store("b", 9, 8, 7) or ()] == [3, 2]


def test_what_a_request_uses_stays_until_it_ends() -> None:
    offer = Offer(3)
    offer.store("a", 1, 2, 3)
    context, keys = offer.begin("b", 1, 2, 3)
    offer.manager.prepare_load(keys, context)
    offer.manager.complete_load({*keys}, context)
    assert offer.manager.prepare_store(offer.begin("c", 5)[1], ReqContext("c")) is None
    check_slots(offer.manager)
    offer.manager.on_request_finished(context)
    check_slots(offer.manager, at_rest=True)
    assert [key[0] for key in offer.store("d", 5) or ()] == [3]


def test_a_store_that_failed_leaves_no_key() -> None:
    offer = Offer(2)
    context, keys = offer.begin("a", 1, 2)
    assert offer.manager.prepare_store(keys, context) is not None
    assert {offer.manager.lookup(key, context) for key in keys} == {LookupResult.HIT_PENDING}
    offer.manager.complete_store({*keys}, context, success=False)
    assert {offer.manager.lookup(key, context) for key in keys} == {LookupResult.MISS}
    offer.manager.on_request_finished(context)
    check_slots(offer.manager, at_rest=True)
    (event,) = offer.manager.take_events()
    assert event.removed
    assert event.metadata_only


def test_a_load_of_what_is_not_there_changes_nothing() -> None:
    offer = Offer(2)
    offer.store("a", 1)
    context, keys = offer.begin("b", 1, 2)
    with pytest.raises(KeyError, match="not in host memory"):
        offer.manager.prepare_load(keys, context)
    check_slots(offer.manager, at_rest=True)


def test_slots_of_jobs_wait_for_the_fence_of_a_reset() -> None:
    offer = Offer(3)
    offer.store("a", 1)
    loads, stored = offer.begin("b", 1)
    offer.manager.prepare_load(stored, loads)
    context, keys = offer.begin("c", 2)
    assert offer.manager.prepare_store(keys, context) is not None
    offer.manager.reset_cache()
    check_slots(offer.manager)
    assert len(offer.manager._free) == 1
    offer.manager.on_reset_flushed()
    assert len(offer.manager._free) == 3
    offer.manager.on_request_finished(loads)
    offer.manager.on_request_finished(context)
    check_slots(offer.manager, at_rest=True)


def test_events_tell_of_chunks_in_order() -> None:
    offer = Offer(1)
    offer.store("a", 1)
    offer.store("b", 2)
    told = [(event.keys[0][0], event.removed) for event in offer.manager.take_events()]
    assert told == [(1, False), (1, True), (2, False)]
    assert not [*offer.manager.take_events()]


class Hanging:
    """A store that has every chunk, and whose read goes on after its time is over."""

    name = "hanging"

    def __init__(self) -> None:
        self.is_over = False

    def parts_of(self, keys: list[bytes]) -> list[int]:
        return [1] * len(keys)

    def read(self, keys: list[bytes], to: Any, begun: Any) -> list[int]:
        begun(SimpleNamespace(done=lambda: self.is_over))
        return []

    def write(self, keys: list[bytes], pages: Any) -> Any:
        return lambda: 0

    def clear(self) -> None:
        pass

    def close(self, timeout: float | None) -> None:
        pass


@pytest.mark.parametrize("is_reset", [False, True])
def test_slots_of_a_read_that_hangs_are_nobody_elses(is_reset: bool) -> None:
    store = Hanging()
    region = SimpleNamespace(base_tensor=torch.zeros(3 * 4096, dtype=torch.int8), num_chunks=3)
    offer = Offer(3, below=Below([store], region, bytes(32)))
    manager = offer.manager
    context, keys = offer.begin("a", 1, 2)
    assert {manager.lookup(key, context) for key in keys} == {LookupResult.RETRY}
    step = ScheduleEndContext((), ())
    wait_until(manager, step, lambda: manager.lookup(keys[0], context) != LookupResult.RETRY)
    assert {manager.lookup(key, context) for key in keys} == {LookupResult.HIT_PENDING}
    manager.on_schedule_end(step)
    wait_until(manager, step, lambda: manager.lookup(keys[0], context) == LookupResult.MISS)
    if is_reset:
        manager.reset_cache()
        manager.on_reset_flushed()
    check_slots(manager)
    assert len(manager._free) == 1
    store.is_over = True
    wait_until(manager, step, lambda: not manager._below_slots)
    assert len(manager._free) == 3
    manager.on_request_finished(context)
    check_slots(manager, at_rest=True)
    manager.shutdown()


def wait_until(manager: Any, step: ScheduleEndContext, is_so: Any) -> None:
    """Run steps that do nothing, until something is so."""
    for _ in range(2000):
        manager.on_schedule_end(step)
        if is_so():
            return
        time.sleep(0.001)
    raise AssertionError("nothing happened")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"eviction_policy": "cost"}, "eviction_policy is 'cost', must be one of arc, fifo"),
        ({"tiers": "disk:/a:1GiB"}, "must be a list"),
        ({"tiers": ["host:1GiB"]}, "whose size is cpu_bytes_to_use"),
        ({"tiers": ["tape:/a:1GiB"]}, "must begin with one of"),
        ({"cpu_bytes_to_use": 4095}, "holds no chunk of 4096 bytes"),
    ],
)
def test_what_is_not_served_is_refused(
    made: list[Engine], given: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        make(made, [full("a")], **given)
