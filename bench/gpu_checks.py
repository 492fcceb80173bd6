# SPDX-License-Identifier: Apache-2.0
"""Check one GPU in short steps: hazards of streams and graphs, host costs, speeds not measured yet.

``python bench/gpu_checks.py`` starts a process for each check. Checks of hazards run side by side.
Checks that measure run twice. The first runs compile Triton's kernels; they run together with the
checks of hazards and print no result. The second runs follow one by one. Each check prints its
result as a line of JSON when it ends. A check never raises: an error is its result. ``--one NAME``
runs one check, ``--list`` prints the names of the checks.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

HAZARDS: dict[str, Callable[[], Any]] = {}
MEASURED: dict[str, Callable[[], Any]] = {}
_PRINTING = threading.Lock()
LIMIT = 45  # seconds for a check


def hazard(call: Callable[[], Any]) -> Callable[[], Any]:
    HAZARDS[call.__name__] = call
    return call


def measured(call: Callable[[], Any]) -> Callable[[], Any]:
    MEASURED[call.__name__] = call
    return call


def cupy() -> Any:
    import cupy as cp

    return cp


def tried(call: Callable[[], Any]) -> str:
    try:
        found = call()
    except BaseException as error:  # noqa: BLE001 - the error is the result
        return f"{type(error).__name__}: {error}"[:300]
    return "ok" if found is None else str(found)


def busy(milliseconds: float) -> None:
    """Keep cupy's current stream busy."""
    cp = cupy()
    a, b = (cp.zeros(1 << 28, cp.uint8) for _ in range(2))  # about 0.18 ms a copy on an H100
    stream = cp.cuda.get_current_stream().ptr
    for _ in range(int(milliseconds / 0.17)):
        cp.cuda.runtime.memcpyAsync(a.data.ptr, b.data.ptr, a.nbytes, 4, stream)


def scene(tokens: int = 64, heads: int = 8, dim: int = 128, pages: int = 64) -> Any:
    from kvcore import PagedBatch

    cp = cupy()
    pools = [cp.zeros((pages, 16, heads, dim), cp.float16) for _ in "kv"]
    table = cp.arange(pages, dtype=cp.uint32).reshape(1, pages)
    lengths = cp.zeros(1, cp.uint32)
    offsets = cp.array([0, tokens], cp.uint32)
    k = cp.ones((tokens, heads, dim), cp.float16)
    return PagedBatch(pools[0], pools[1], table, lengths), k, offsets


def manager(**more: Any) -> Any:
    from kvcore import KVCacheParams, PagedKVCacheManager

    params = KVCacheParams(
        "float16", 8, 128, num_layers=4, page_size=16, enable_prefix_caching=True
    )
    asked: dict[str, Any] = {"max_batch_size": 8, "max_seq_len": 4096, "num_pages": 300}
    return PagedKVCacheManager(params, devices=["cuda:0"], **(asked | more))


# ---- captures ------------------------------------------------------------------------------------
def _beside_capture(actions: dict[str, Callable[[], Any]]) -> dict[str, str]:
    """Run each action while a stream is captured in global mode, the mode of torch."""
    cp = cupy()
    rt = cp.cuda.runtime
    stream = cp.cuda.Stream(non_blocking=True)
    x = cp.zeros(1 << 20, cp.float32)
    with stream:
        x += 1
    stream.synchronize()
    found = {}
    for name, action in actions.items():
        rt.streamBeginCapture(stream.ptr, rt.streamCaptureModeGlobal)
        with ThreadPoolExecutor(1) as pool:
            answer = pool.submit(tried, action).result()
        try:
            with stream:
                x += 1
            rt.graphDestroy(rt.streamEndCapture(stream.ptr))
            found[name] = answer
        except Exception as error:  # noqa: BLE001
            found[name] = f"CAPTURE BROKEN ({error}); the call: {answer}"[:300]
            with suppress(Exception):
                rt.streamEndCapture(stream.ptr)
            stream = cp.cuda.Stream(non_blocking=True)
    return found


@hazard
def beside_a_global_capture() -> Any:
    from kvcore import TextGenerationContext, ops
    from kvcore.backends.cuda import driver
    from kvcore.backends.cuda.availability import kernels

    cp = cupy()
    batch, k, offsets = scene()
    pool = batch.key_pool
    held = manager(tiers=["host:64MiB"])
    context = TextGenerationContext("a", list(range(700)))
    held.claim("a")
    held.fetch([context])
    context.update(1)
    held.step([context])
    ops.append(batch, 0, k, k, offsets)
    made = [kernels().DeviceMemory(0, 1 << 20)]
    side = cp.cuda.Stream(non_blocking=True)

    def on_side(call: Callable[[], Any]) -> Callable[[], Any]:
        def run() -> None:
            with side:
                call()

        return run

    def events() -> None:
        event, stream = kernels().Event(0), kernels().Stream(0)
        kernels().record(event.ptr, 0, stream.ptr)
        kernels().wait(event.ptr, 0, stream.ptr)
        kernels().synchronize(0, stream.ptr)

    big = np.arange(60, dtype=np.int64)
    return _beside_capture(
        {
            "append, all on the GPU": on_side(lambda: ops.append(batch, 0, k, k, offsets)),
            "zero_pages, ids of the host (pageable, short)": on_side(
                lambda: ops.zero_pages(pool, big)
            ),
            "400 KB of the host (pinned staging)": on_side(lambda: _host_array(50_000)),
            "memory out of a cold cupy pool": on_side(
                lambda: driver.empty((1 << 28,), np.dtype(np.uint8), 0, side.ptr) and None
            ),
            "manager.fetch": on_side(lambda: held.fetch([context]) and None),
            "manager.fetch on the legacy stream": lambda: held.fetch([context]) and None,
            "events and streams": events,
            "DeviceMemory comes": lambda: made.append(kernels().DeviceMemory(0, 1 << 20)),
            "DeviceMemory goes": made.clear,
            "PinnedMemory comes and goes": lambda: kernels().PinnedMemory(0, 1 << 20) and None,
            "a kernel that was never loaded": on_side(
                lambda: ops.quantize(k, "int8", 128) and None
            ),
        }
    )


def _host_array(entries: int) -> None:
    from kvcore.backends.cuda.place import DevicePlace

    stream = cupy().cuda.get_current_stream().ptr
    DevicePlace(0, stream).from_host(np.arange(entries, dtype=np.int64))


@hazard
def first_call_is_captured() -> Any:
    """Check the first launch of a kernel, which loads it, in a capture in global mode."""
    from kvcore import ops

    cp = cupy()
    rt = cp.cuda.runtime
    batch, k, offsets = scene()
    stream = cp.cuda.Stream(non_blocking=True)
    cp.cuda.Device(0).synchronize()
    with stream:
        rt.streamBeginCapture(stream.ptr, rt.streamCaptureModeGlobal)
        answer = tried(lambda: ops.append(batch, 0, k, k, offsets))
        try:
            graph = rt.graphInstantiate(rt.streamEndCapture(stream.ptr))
        except Exception as error:  # noqa: BLE001
            return f"CAPTURE BROKEN ({error}); the call: {answer}"
        rt.graphLaunch(graph, stream.ptr)
        stream.synchronize()
    return {"call": answer, "written": bool((batch.key_pool.reshape(-1, 8, 128)[:64] == 1).all())}


@hazard
def fetch_while_its_last_stream_is_captured() -> Any:
    """Check a second fetch, which orders its stream after the stream of the first fetch."""
    from kvcore import TextGenerationContext

    cp = cupy()
    rt = cp.cuda.runtime
    held = manager()
    context = TextGenerationContext("a", [1, 2, 3])
    held.claim("a")
    a, b = (cp.cuda.Stream(non_blocking=True) for _ in "ab")
    with a:
        held.fetch([context])
    a.synchronize()
    rt.streamBeginCapture(a.ptr, rt.streamCaptureModeRelaxed)

    def fetch() -> Any:
        with b:
            held.fetch([context])

    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(tried, fetch).result()
    joined = tried(lambda: bool(rt.streamIsCapturing(b.ptr)))
    ended = tried(lambda: rt.streamEndCapture(a.ptr) and None)
    return {"fetch": answer, "its stream is captured now": joined, "end of the capture": ended}


@hazard
def fetch_after_its_last_stream_is_destroyed() -> Any:
    from kvcore import TextGenerationContext

    cp = cupy()
    rt = cp.cuda.runtime
    held = manager()
    context = TextGenerationContext("a", [1, 2, 3])
    held.claim("a")
    handle = rt.streamCreateWithFlags(1)

    class Foreign:
        def __cuda_stream__(self) -> tuple[int, int]:
            return 0, handle

    with cp.cuda.Stream.from_external(Foreign()):
        held.fetch([context])
    rt.streamSynchronize(handle)
    rt.streamDestroy(handle)
    return [tried(lambda: held.fetch([context]) and None) for _ in range(3)]


# ---- memory of other libraries -------------------------------------------------------------------
@hazard
def dlpack_memory_is_kept_until_it_is_read() -> Any:
    """Check a queued append of jax's tokens: jax reuses memory as soon as no array holds it."""
    import jax
    import jax.numpy as jnp

    from kvcore import PagedBatch, ops

    cp = cupy()
    tokens = 1 << 14
    pool = cp.zeros((tokens // 16, 16, 8, 128), cp.float32)
    table = cp.arange(tokens // 16, dtype=cp.uint32).reshape(1, -1)
    batch = PagedBatch(pool, None, table, cp.zeros(1, cp.uint32))
    offsets = cp.array([0, tokens], cp.uint32)
    k = jax.block_until_ready(jnp.full((tokens, 8, 128), 1.0, jnp.float32))
    side = cp.cuda.Stream(non_blocking=True)
    ops.append(batch, 0, k, None, offsets)
    cp.cuda.Device(0).synchronize()
    pool[...] = 0
    cp.cuda.Device(0).synchronize()
    with side:
        busy(80)
        ops.append(batch, 0, k, None, offsets)
    del k
    gc.collect()
    others = [jax.block_until_ready(jnp.full((tokens, 8, 128), 7.0, jnp.float32)) for _ in range(4)]
    side.synchronize()
    wrong = int((pool != 1).sum())
    return {"elements that are not the tokens": wrong, "of": pool.size, "held": len(others)}


@hazard
def torch_memory_on_a_stream_of_ones_own() -> Any:
    """Check an append on stream=: torch reuses memory in the order of its own stream."""
    import torch

    from kvcore import PagedBatch, ops

    cp = cupy()
    tokens = 1 << 14
    pool = torch.zeros(tokens // 16, 16, 8, 128, device="cuda")
    table = torch.arange(tokens // 16, dtype=torch.int32, device="cuda").view(torch.uint32)[None]
    lengths = torch.zeros(1, dtype=torch.int32, device="cuda").view(torch.uint32)
    offsets = torch.tensor([0, tokens], dtype=torch.int32, device="cuda").view(torch.uint32)
    batch = PagedBatch(pool, None, table, lengths)
    found = {}
    for is_recorded in (False, True):
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        k = torch.ones(tokens, 8, 128, device="cuda")
        pool.zero_()
        torch.cuda.synchronize()
        with cp.cuda.Stream.from_external(side):
            busy(60)
        ops.append(batch, 0, k, None, offsets, stream=side)
        if is_recorded:
            k.record_stream(side)
        del k
        other = torch.full((tokens, 8, 128), 7.0, device="cuda")
        torch.cuda.synchronize()
        found["with record_stream" if is_recorded else "without"] = int((pool != 1).sum())
        del other
    return found


@hazard
def graph_batch_load_on_the_stream_of_launches() -> Any:
    """Check GraphBatch.load on another stream than a fetch whose copies wait for long work."""
    from kvcore import TextGenerationContext
    from kvcore.cuda import GraphBatch

    cp = cupy()
    held = manager()
    context = TextGenerationContext("a", list(range(100)))
    held.claim("a")
    (first,) = held.fetch([context])
    fixed = GraphBatch(first, max_rows=4, max_tokens=512, tokens_per_row=128)
    side = cp.cuda.Stream(non_blocking=True)
    current = cp.cuda.Stream(non_blocking=True)
    cp.cuda.Device(0).synchronize()
    with current:
        busy(40)
        (inputs,) = held.fetch([context])
        fixed.load(inputs, stream=side)
    side.synchronize()
    tables: list[Any] = [fixed.inputs.lookup_table, inputs.lookup_table]
    seen = tables[0][0, :7].get().tolist()
    current.synchronize()
    return {"loaded": seen, "fetched": tables[1][0, :7].get().tolist()}


@hazard
def child_of_a_process_with_pinned_memory() -> Any:
    import ctypes

    from kvcore.backends.cuda.availability import kernels

    libc = ctypes.CDLL(None)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    pinned = kernels().PinnedMemory(0, 64 << 20)
    child = os.fork()
    if child == 0:
        at = libc.mmap(None, 64 << 20, 3, 0x22, -1, 0)
        mine = (ctypes.c_char * (64 << 20)).from_address(at)
        mine[0] = b"x"
        del pinned
        gc.collect()
        os._exit(0 if mine[0] == b"x" else 3)
    _, status = os.waitpid(child, 0)
    return f"signal {os.WTERMSIG(status)}" if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)


# ---- measured ------------------------------------------------------------------------------------
def _host_us(call: Callable[[], Any], rounds: int = 200) -> float:
    for _ in range(10):
        call()
    spent = []
    for i in range(rounds):
        start = time.perf_counter()
        call()
        spent.append((time.perf_counter() - start) * 1e6)
        if i % 50 == 49:
            cupy().cuda.Device(0).synchronize()
    return round(statistics.median(spent), 1)


def _gpu_us(call: Callable[[], Any], rounds: int = 12) -> float:
    """Return the GPU's us of a call. Other work is queued before the calls: there are no gaps."""
    cp = cupy()
    stream = cp.cuda.get_current_stream()
    call()
    stream.synchronize()
    start = time.perf_counter()
    for _ in range(rounds):
        call()
    host = time.perf_counter() - start
    stream.synchronize()
    events = [(cp.cuda.Event(), cp.cuda.Event()) for _ in range(rounds)]
    busy(min(400.0, 3e3 * host))
    for begin, end in events:
        begin.record(stream)
        call()
        end.record(stream)
    stream.synchronize()
    spent = [float(cp.cuda.get_elapsed_time(*pair)) * 1e3 for pair in events]
    return round(statistics.median(spent), 1)


@measured
def host_time_of_calls() -> Any:
    from kvcore import PagedBatch, TextGenerationContext, ops

    cp = cupy()
    rows, heads, dim = 16, 8, 128
    pools = [cp.zeros((256, 16, heads, dim), cp.float16) for _ in "kv"]
    table = cp.arange(rows * 8, dtype=cp.uint32).reshape(rows, 8)
    batch = PagedBatch(pools[0], pools[1], table, cp.full(rows, 77, cp.uint32))
    offsets, on_host = cp.arange(rows + 1, dtype=cp.uint32), np.arange(rows + 1, dtype=np.uint32)
    k = cp.zeros((rows, heads, dim), cp.float16)
    q, out = (cp.zeros((rows, 4 * heads, dim), cp.float16) for _ in "qo")
    slots, bad = cp.arange(rows, dtype=cp.int64), cp.zeros(1, cp.int32)
    scratch = cp.zeros(ops.attention_scratch(batch, q, 4), cp.float32)
    held = manager()
    contexts = [TextGenerationContext(i, list(range(60))) for i in range(8)]
    for each in contexts:
        held.claim(each.request_id)
    held.fetch(contexts)
    asked: dict[str, Any] = {"out": out, "splits": 4, "scratch": scratch}
    calls: dict[str, Callable[[], Any]] = {
        "append": lambda: ops.append(batch, 0, k, k, offsets),
        "append, offsets of the host": lambda: ops.append(batch, 0, k, k, on_host),
        "append_slots": lambda: ops.append_slots(batch, 0, k, k, slots, out=bad),
        "attention, 4 splits": lambda: ops.attention(batch, 0, q, offsets, **asked),
        "attention, 1 split": lambda: ops.attention(batch, 0, q, offsets, out=out, splits=1),
        "fetch of 8": lambda: held.fetch(contexts),
    }
    with cp.cuda.Stream(non_blocking=True):
        return {name: _host_us(call) for name, call in calls.items()}


@measured
def pages_to_and_from_the_host() -> Any:
    """Measure GB/s and host us by page size: copy engines, 16 thread blocks, all blocks."""
    from kvcore.backends.cuda.availability import kernels
    from kvcore.backends.cuda.mover import _rows

    cp = cupy()
    whole = 256 << 20
    pinned = kernels().PinnedMemory(0, whole)
    device = cp.zeros(whole, cp.uint8)
    found: dict[str, Any] = {}
    with cp.cuda.Stream(non_blocking=True) as stream:
        for size in (4 << 10, 32 << 10, 64 << 10, 256 << 10, 2 << 20):
            host = _rows(pinned.ptr, whole // size, size, size, 0, pinned)
            pool = _rows(device.data.ptr, whole // size, size, size, 0, device)
            for way, (source, target) in {"h2d": (host, pool), "d2h": (pool, host)}.items():
                for name, call in _page_copies(source, target, stream).items():
                    found[f"{way} {size >> 10} KiB, {name}"] = _speed(call, min(whole, size << 12))
    return found


def _page_copies(source: Any, target: Any, stream: Any) -> dict[str, Callable[[], Any]]:
    """Return copies of at most 4,096 scattered pages, by copy engines and by kernels."""
    from kvcore.backends.cuda.availability import kernels
    from kvcore.backends.cuda.place import DevicePlace
    from kvcore.backends.shards import tensors_of

    pages, size = len(source), source.shape[-1]
    n = min(pages, 4096)
    order = [np.random.default_rng(i).permutation(pages)[:n] for i in range(2)]
    ends = [
        (each.data.ptr + ids.astype(np.uint64) * np.uint64(size)).astype(np.uint64)
        for each, ids in ((target, order[1]), (source, order[0]))
    ]
    sizes = np.full(n, size, np.int64)
    place = DevicePlace(0, stream.ptr)
    pairs = place.from_host(np.stack(order, axis=1).astype(np.int64))
    stream.synchronize()
    caches = (tensors_of(source), False), (tensors_of(target), False)
    kernel = partial(place.transfer, *caches, pairs, layers=(0, 1), threads=1)
    return {
        "engines": lambda: kernels().copy_batch(*ends, sizes, 0, stream.ptr),
        "16 blocks": partial(kernel, most_blocks=16),
        "all blocks": partial(kernel, most_blocks=0),
    }


def _speed(call: Callable[[], Any], size: int) -> dict[str, float]:
    start = time.perf_counter()
    call()
    host_us = (time.perf_counter() - start) * 1e6
    return {"GB/s": round(size / _gpu_us(call, 4) / 1e3, 1), "host us": round(host_us)}


@measured
def pinning_four_gib() -> Any:
    import ctypes

    from kvcore.backends.cuda.availability import kernels

    cp = cupy()
    cp.zeros(1)
    size, found = 4 << 30, {}
    start = time.perf_counter()
    held = kernels().PinnedMemory(0, size)
    found["PinnedMemory, s"] = round(time.perf_counter() - start, 2)
    del held
    libc = ctypes.CDLL(None)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    start = time.perf_counter()
    at = libc.mmap(None, size, 3, 0x22, -1, 0)
    libc.madvise(at, size, 14)  # huge pages
    cp.cuda.runtime.hostRegister(at, size, 3)
    found["the same in huge pages, s"] = round(time.perf_counter() - start, 2)
    cp.cuda.runtime.hostUnregister(at)
    return found


@measured
def kernels_compiled_as_batches_grow() -> Any:
    """Return the kernels that each batch compiles; a larger batch compiles no kernel again."""
    from triton.runtime.jit import JITFunction

    from kvcore import PagedBatch, ops

    cp = cupy()
    seen: list[str] = []
    before = JITFunction._do_compile  # noqa: SLF001

    def noted(self: Any, *args: Any, **more: Any) -> Any:
        seen.append(self.fn.__name__)
        return before(self, *args, **more)

    JITFunction._do_compile = noted  # noqa: SLF001
    pools = [cp.zeros((64, 16, 8, 128), cp.float16) for _ in "kv"]
    found = {}
    memory = cp.zeros(1 << 16, cp.uint32)
    for rows, columns, at in (
        (1, 8, 0),
        (4, 8, 0),
        (4, 8, 1),
        (4, 64, 0),
        (4, 256, 0),
        (6, 256, 0),
    ):
        table = memory[at : at + rows * columns].reshape(rows, columns)
        q = cp.zeros((rows, 32, 128), cp.float16)
        offsets = cp.arange(rows + 1, dtype=cp.uint32)
        batch = PagedBatch(pools[0], pools[1], table, cp.full(rows, 7, cp.uint32))
        count, start = len(seen), time.perf_counter()
        ops.attention(batch, 0, q, offsets, out=cp.empty_like(q))
        found[f"{rows} rows of {columns} pages, table at {4 * at}"] = {
            "compiled": seen[count:],
            "s": round(time.perf_counter() - start, 2),
        }
    return found


@measured
def tiles_of_decoding() -> Any:
    """Return us of 32 rows of 4096 tokens, by dtype of the pool and (block_n, warps, stages)."""
    from kvcore.backends.cuda.attention import tuning
    from kvcore.backends.cuda.attention.settings import Settings
    from kvcore.backends.cuda.place import DevicePlace

    cp = cupy()
    found = {}
    with cp.cuda.Stream(non_blocking=True) as stream:
        place = DevicePlace(0, stream.ptr)
        for pool in ("bfloat16", "float8_e4m3fn", "int8"):
            call = tuning.decoding(tuning.Model(pool_dtype=pool), place)
            size = 32 * 4096 * 8 * 2 * (256 if pool == "bfloat16" else 132)
            for each in ((64, 32, 4, 3), (64, 64, 4, 2), (64, 128, 4, 2)):
                us = tuning.microseconds(place, call, Settings(*each))
                found[f"{pool} {each[1:]}"] = f"{us:.0f} us, {size / us / 1e3:.0f} GB/s"
            cp.get_default_memory_pool().free_all_blocks()
    return found


@measured
def one_long_row_among_short_ones() -> Any:
    """Return us of 63 rows of 1,024 tokens and a row of 65,536, and of 64 rows of 2,032."""
    from kvcore import PagedBatch, ops
    from kvcore.support.dtypes import numpy_dtype

    cp = cupy()
    kind, rows, columns = numpy_dtype("bfloat16"), 64, 4096
    pools = [cp.zeros((8192, 16, 8, 128), cp.uint16).view(kind) for _ in "kv"]
    for pool in pools:
        pool.view(cp.uint16)[...] = cp.random.randint(0x3C00, 0x3F80, pool.shape, cp.uint16)
    table = cp.random.permutation(8192)[:columns].astype(cp.uint32)
    table = cp.ascontiguousarray(cp.broadcast_to(table, (rows, columns)))
    q = cp.zeros((rows, 32, 128), cp.uint16).view(kind)
    q.view(cp.uint16)[...] = 0x3C00
    out, offsets = cp.empty_like(q), cp.arange(rows + 1, dtype=cp.uint32)
    skewed = cp.full(rows, 1023, cp.uint32)
    skewed[7] = 65535
    found = {}
    with cp.cuda.Stream(non_blocking=True):
        for name, lengths in (("skewed", skewed), ("even", cp.full(rows, 2031, cp.uint32))):
            batch = PagedBatch(pools[0], pools[1], table, lengths)
            for splits in (None, 8, 32):
                scratch = cp.zeros(ops.attention_scratch(batch, q, splits or 64), cp.float32)
                asked: dict[str, Any] = {"out": out, "splits": splits, "scratch": scratch}
                call = partial(ops.attention, batch, 0, q, offsets, **asked)
                found[f"{name}, splits {splits}"] = _gpu_us(call, 6)
    return found


@measured
def latent_rows() -> Any:
    """Decode 64 rows of 4096 latent tokens in bfloat16: us, TFLOP/s, GB/s, relative error."""
    from kvcore import PagedBatch, ops
    from kvcore.support.dtypes import numpy_dtype

    cp = cupy()
    kind, rows, length, page = numpy_dtype("bfloat16"), 64, 4096, 64
    pages = rows * length // page
    found: dict[str, Any] = {}

    def numbers(*shape: int) -> Any:
        bits = cp.random.standard_normal(shape, cp.float32).view(cp.uint32)
        return (bits >> 16).astype("u2").view(kind)

    pool = numbers(pages, page, 576)
    order = cp.random.permutation(pages).astype(cp.uint32).reshape(rows, -1)
    lengths = cp.full(rows, length - 1, cp.uint32)
    offsets = cp.arange(rows + 1, dtype=cp.uint32)
    batch = PagedBatch(pool, None, order, lengths, "MLA")
    with cp.cuda.Stream(non_blocking=True) as stream:
        for heads in (16, 128):
            q = numbers(rows, heads, 576)
            out = numbers(rows, heads, 512)
            asked: dict[str, Any] = {"v_head_dim": 512, "scale": 0.06}
            us = _gpu_us(partial(ops.attention, batch, 0, q, offsets, out=out, **asked), 6)
            flop = rows * length * heads * 2 * (576 + 512)
            keys = pool[order[0]].reshape(-1, 576).view(cp.uint16).astype(cp.uint32) << 16
            keys = keys.view(cp.float32)[:length]
            wide = (q[0].view(cp.uint16).astype(cp.uint32) << 16).view(cp.float32)
            scores = wide @ keys.T * 0.06
            weights = cp.exp(scores - scores.max(axis=1, keepdims=True))
            expected = weights @ keys[:, :512] / weights.sum(axis=1, keepdims=True)
            got = (out[0].view(cp.uint16).astype(cp.uint32) << 16).view(cp.float32)
            stream.synchronize()
            off = float(cp.linalg.norm(got - expected) / cp.linalg.norm(expected))
            found[f"{heads} heads"] = {
                "us": us,
                "TFLOP/s": round(flop / us / 1e6, 1),
                "GB/s of rows once": round(rows * length * 1152 / us / 1e3),
                "relative error": round(off, 5),
            }
    return found


@measured
def prompts_beside_flash() -> Any:
    """Compare two prompts of 4096 tokens, 32 on 8 heads of 128, with torch's flash attention."""
    import torch

    from kvcore.backends.cuda.attention import tuning
    from kvcore.backends.cuda.attention.settings import Settings
    from kvcore.backends.cuda.place import DevicePlace

    cp = cupy()
    flop = 2 * 32 * 4096 * 4096 / 2 * 128 * 4
    found: dict[str, Any] = {}
    with cp.cuda.Stream(non_blocking=True) as stream:
        place = DevicePlace(0, stream.ptr)
        call = tuning.prompts(tuning.Model(), place)
        for each in ((128, 32, 4, 3), (128, 64, 8, 2), (128, 64, 8, 3), (128, 128, 8, 2)):
            us = tuning.microseconds(place, call, Settings(*each))
            found[f"kvcore {each}"] = f"{us:.0f} us, {flop / us / 1e6:.0f} TFLOP/s"
        q = torch.randn(2, 32, 4096, 128, device="cuda", dtype=torch.bfloat16)
        k, v = (torch.randn(2, 8, 4096, 128, device="cuda", dtype=torch.bfloat16) for _ in "kv")
        attend = torch.nn.functional.scaled_dot_product_attention
        theirs = torch.cuda.ExternalStream(stream.ptr)  # type: ignore[no-untyped-call]
        for name in ("FLASH_ATTENTION", "CUDNN_ATTENTION"):
            backend = getattr(torch.nn.attention.SDPBackend, name)

            def run(backend: Any = backend) -> None:
                with torch.cuda.stream(theirs), torch.nn.attention.sdpa_kernel(backend):
                    attend(q, k, v, is_causal=True, enable_gqa=True)

            try:
                us = _gpu_us(run)
                found[f"torch {name}"] = f"{us:.0f} us, {flop / us / 1e6:.0f} TFLOP/s"
            except RuntimeError as error:
                found[f"torch {name}"] = str(error)[:100]
    return found


# ---- running them --------------------------------------------------------------------------------
def _run(name: str, is_heard: bool = True) -> None:
    start = time.perf_counter()
    command = [sys.executable, str(Path(__file__).resolve()), "--one", name]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT, check=False)
        lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
        found = (
            json.loads(lines[-1])
            if lines
            else {"result": f"exit code {done.returncode}", "stderr": done.stderr[-400:]}
        )
    except subprocess.TimeoutExpired:
        found = {"result": f"not finished after {LIMIT} s"}
    line = {"check": name, "s": round(time.perf_counter() - start, 1)} | found
    if is_heard:
        with _PRINTING:
            print(json.dumps(line), flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--one")
    parser.add_argument("--list", action="store_true")
    options = parser.parse_args()
    every = HAZARDS | MEASURED
    if options.list:
        print(*every, sep="\n")
        return 0
    if options.one:
        try:
            print(json.dumps({"result": every[options.one]()}), flush=True)
        except BaseException as error:  # noqa: BLE001
            print(json.dumps({"result": f"{type(error).__name__}: {error}"[:400]}), flush=True)
        return 0
    with ThreadPoolExecutor(8) as pool:
        heard = [pool.submit(_run, name) for name in HAZARDS]
        unheard = [
            pool.submit(_run, name, False) for name in MEASURED if name != "pinning_four_gib"
        ]
        for each in (*heard, *unheard):
            each.result()
    for name in MEASURED:
        _run(name)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
