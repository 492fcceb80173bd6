# SPDX-License-Identifier: Apache-2.0
"""Kernels when the system has no free thread: slower, the same bytes, and the process survives."""

from __future__ import annotations

import os
import resource
import subprocess
import sys

import pytest

# Call every function with `threads`, with and without memory for one more thread's stack.
_PROGRAM = """
import hashlib, resource, threading
import numpy as np
from kvcore import PagedBatch, ops

rng = np.random.default_rng(3)
pages, page, heads, dim = 256, 16, 4, 128
keys, values = rng.normal(size=(2, pages, page, heads, dim)).astype(np.float32)
table = rng.permutation(pages).astype(np.uint32).reshape(2, -1)
lengths, offsets = np.array([2000, 1000], np.uint32), np.array([0, 1000, 2000], np.uint32)
batch = PagedBatch(keys, values, table, np.array([1000, 990], np.uint32))
new = rng.normal(size=(2000, heads, dim)).astype(np.float32)
blocks, slots = keys[:, None, None], np.arange(2000)
other = np.zeros_like(blocks)
layouts = ops.PoolLayout(blocks, "max"), ops.PoolLayout(other, "max")
gathered = tuple(np.empty((3000, heads, dim), np.float32) for _ in range(2))
codes, scales = np.empty(keys.shape, np.int8), np.empty((*keys.shape[:-1], 1), np.float32)
wide, o, lse = np.empty_like(keys), np.empty_like(new), np.zeros(keys.shape[:-1], np.float32)
merged = np.empty_like(keys), np.empty_like(lse)
written = keys, values, other, codes, scales, wide, o, *gathered, *merged


def every_verb():
    ops.append(batch, 0, new, new, offsets, threads=8)
    ops.append_slots(batch, 0, new, new, slots, threads=8)
    ops.gather(batch, 0, lengths=lengths, out=gathered, threads=8)
    ops.quantize(keys, "int8", dim, out=(codes, scales), threads=8)
    ops.dequantize(codes, scales, "float32", out=wide, threads=8)
    ops.attention(batch, 0, new, offsets, window=99, out=o, threads=8)
    ops.merge_states(keys, lse, values, lse, out=merged, threads=8)
    ops.copy_pages(other, [(i, i + 128) for i in range(128)], threads=8)
    ops.fill_pages(other, range(100), 7, threads=8)
    digests = [ops.checksum(other, range(pages), threads=8).tolist()]
    ops.transfer(*layouts, range(pages), range(pages), threads=8)
    ops.copy_partial(other, [(i, i + 128, 9) for i in range(128)], threads=8)
    return digests + [hashlib.sha256(array).hexdigest() for array in written]


every_verb()
before = every_verb()
with open("/proc/self/statm") as file:
    taken = int(file.read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (taken + (16 << 20), resource.RLIM_INFINITY))
try:
    threading.Thread(target=print).start()
    print("a thread starts all the same")
except RuntimeError:
    print("the same" if every_verb() == before else "other bytes")
"""

_STACK = 64 << 20  # so large that no stack is kept for the next thread


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc, limits the address space")
def test_threads_that_cannot_start_leave_their_work_to_the_caller() -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_STACK)
    if hard not in (resource.RLIM_INFINITY,) and hard < _STACK:
        pytest.skip(f"stacks are at most {hard} bytes here")
    done = subprocess.run(
        ["sh", "-c", f'ulimit -s {_STACK >> 10} && exec "$0" -c "$1"', sys.executable, _PROGRAM],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"OPENBLAS_NUM_THREADS": "1"},
    )
    assert (done.returncode, done.stdout.strip()) == (0, "the same"), done.stderr
