# SPDX-License-Identifier: Apache-2.0
"""kvcore's tiers below vLLM's GPU blocks: each load returns the stored bytes, in all cases.

Run by ``tests/integrations/run_vllm.py --part ours``.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from vllm.v1.kv_cache_interface import KVCacheGroupSpec
from vllm.v1.request import RequestStatus

from vllm_offloading_engine import PAGE, Engine, full, window

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
    tests = Path(__file__).resolve().parents[1]
    for folder in (tests, tests / "fakes"):  # conftest, servers
        monkeypatch.syspath_prepend(str(folder))
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
    """A store that raises at the n-th call of a tier, or at every call from the n-th on."""

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

    A step may contain one reset only. No request with a window may run: with every manager vLLM
    0.33 stores all blocks of the request again after a reset, also blocks that the window has
    passed and that other requests write to.
    """
    is_twice = bool(engine.half._current_batch_jobs_to_flush)
    return not is_twice and (layout != "window" or not engine.scheduler.requests)


def is_loading(engine: Engine) -> bool:
    """Return true if vLLM loads into blocks: it refuses to take such blocks away."""
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
    """The engine's `compute` compares every byte that a step reads."""
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
