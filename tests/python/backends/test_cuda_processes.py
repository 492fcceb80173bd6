# SPDX-License-Identifier: Apache-2.0
"""A forked child frees no object of its parent's GPUs; calls of the driver release the GIL."""

from __future__ import annotations

import subprocess
import sys

import pytest

from cuda_machine import require_emulation
from kvcore.backends.cuda.last_wait import LastWait

KERNELS = require_emulation()

_FORK = """
import ctypes, gc, os
import kvcore._cuda as cuda

cuda.emulation.reset(1)
SIZE = 64 << 20
libc = ctypes.CDLL(None)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
pinned = cuda.PinnedMemory(0, SIZE)
held = [cuda.DeviceMemory(0, 64), cuda.Stream(0), cuda.Event(0)]
address, before = pinned.ptr, cuda.emulation.alive()
child = os.fork()
if child == 0:
    # The child has no memory there: it makes its own, as malloc does sooner or later.
    fixed = 0x100000
    mine = libc.mmap(address, SIZE, 3, 0x22 | fixed, -1, 0)
    assert mine == address, mine
    ctypes.memset(mine, 7, 1)
    del pinned, held
    gc.collect()
    assert ctypes.string_at(mine, 1) == bytes([7])
    assert cuda.emulation.alive() == before
    os._exit(0)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
del pinned, held
assert not any(cuda.emulation.alive().values())
"""


def run(program: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_forked_child_frees_nothing_of_its_parent() -> None:
    run(_FORK)


def test_a_forked_child_waits_for_nothing_of_its_parent(monkeypatch: pytest.MonkeyPatch) -> None:
    KERNELS.emulation.reset(1)
    KERNELS.emulation.set_order(is_any=True, seed=1)
    memory, stream, event = KERNELS.DeviceMemory(0, 8), KERNELS.Stream(0), KERNELS.Event(0)
    KERNELS.fill(memory.ptr, 0, 8, 0, stream.ptr)
    KERNELS.record(event.ptr, 0, stream.ptr)
    waits = LastWait()
    with monkeypatch.context() as patch:
        patch.setattr(waits, "_getpid", lambda: -1)
        waits.for_streams([stream])
        waits.for_events([event])
        assert KERNELS.emulation.num_waiting() == 2
    waits.for_events([event])
    assert KERNELS.emulation.num_waiting() == 0
    del memory, stream, event
    KERNELS.emulation.reset(0)


# A thread keeps the GIL until its call releases the GIL: the main thread goes on only after that.
# While the driver is suspended, a call that keeps the GIL stops the program for good.
_CALLS = """
import sys, threading
import numpy as np
import kvcore._cuda as cuda

sys.setswitchinterval(1000.0)
cuda.emulation.reset(1)
memory, pinned = cuda.DeviceMemory(0, 4096), cuda.PinnedMemory(0, 4096)
stream, event = cuda.Stream(0), cuda.Event(0)
s, e, at = stream.ptr, event.ptr, memory.ptr
cuda.record(e, 0, s)
space = np.frombuffer(cuda.PinnedMemory(0, 1 << 16), np.uint8)  # which kernels reach
taken = 0

def zeros(shape, kind):
    global taken
    begin, size = taken, int(np.prod(shape)) * np.dtype(kind).itemsize
    taken += (size + 63) // 64 * 64
    return space[begin : begin + size].view(kind).reshape(shape)

u32 = lambda *shape: zeros(shape, np.uint32)
pool, tokens = zeros((4, 2, 1, 4), np.float32), zeros((1, 1, 4), np.float32)
slots, counter, digest = zeros(1, np.int64), zeros(1, np.int32), zeros(1, np.uint64)
ids, pairs, wide = zeros(1, np.int64), zeros((1, 2), np.int64), zeros(1, np.int64)
pairs[0, 1] = 1
CALLS = {
    "record": lambda: cuda.record(e, 0, s),
    "wait": lambda: cuda.wait(e, 0, s),
    "query": lambda: cuda.query(e, 0),
    "is_capturing": lambda: cuda.is_capturing(0, s),
    "synchronize": lambda: cuda.synchronize(0, s),
    "synchronize_event": lambda: cuda.synchronize_event(e, 0),
    "synchronize_device": lambda: cuda.synchronize_device(0),
    "fill": lambda: cuda.fill(at, 0, 8, 0, s),
    "copy": lambda: cuda.copy(at, pinned.ptr, 8, 0, s),
    "copy_batch": lambda: cuda.copy_batch(
        np.array([at], np.uint64), np.array([pinned.ptr], np.uint64), np.array([8]), 0, s
    ),
    "memory_info": lambda: cuda.memory_info(0),
    "count_devices": lambda: cuda.count_devices(),
    "device_of": lambda: cuda.device_of(at),
    "DeviceScope": lambda: cuda.DeviceScope(0).__enter__(),
    "Stream": lambda: cuda.Stream(0),
    "Event": lambda: cuda.Event(0),
    "DeviceMemory": lambda: cuda.DeviceMemory(0, 64),
    "PinnedMemory": lambda: cuda.PinnedMemory(0, 64),
    "build_slots": lambda: cuda.build_slots(
        pool, u32(1, 2), u32(1), u32(2), wide, 0, s
    ),
    "append_slots": lambda: cuda.append_slots([pool], slots, [tokens], counter, 0, s),
    "advance_lengths": lambda: cuda.advance_lengths(u32(1), u32(2), None, u32(1), 0, s),
    "compact_table": lambda: cuda.compact_table(u32(1, 2), None, None, u32(1), 0, s),
    "copy_strided": lambda: cuda.copy_strided(u32(2, 2).T, u32(2, 2), 0, s),
    "row_offsets": lambda: cuda.row_offsets(u32(1), u32(2), 0, s),
    "zero_pages": lambda: cuda.fill_pages([pool], ids, 0, 0, s),
    "copy_pages": lambda: cuda.copy_pages([pool], pairs, 0, s),
    "digest_pages": lambda: cuda.digest_pages(pool, ids, digest, 0, 0, s),
}
for name, call in CALLS.items():
    print(name, flush=True)
    begun, errors = threading.Event(), []

    def run():
        begun.set()
        try:
            call()
        except BaseException as error:
            errors.append(error)

    cuda.emulation.suspend()
    thread = threading.Thread(target=run)
    thread.start()
    begun.wait()
    cuda.emulation.resume()
    thread.join()
    assert not errors, (name, errors)
"""


def test_no_call_of_the_driver_keeps_the_gil() -> None:
    try:
        names = run(_CALLS).split()
    except subprocess.TimeoutExpired as error:
        last = (error.stdout or b"").split()[-1:]
        pytest.fail(f"a call keeps the GIL: {last}")
    assert len(names) == 27
