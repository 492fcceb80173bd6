# SPDX-License-Identifier: Apache-2.0
"""Lanes that part, merge, exchange and wait, in every order that the simulation draws."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pytest

from ptx_text import Array, Runner, kernel, require_simulation, runner

require_simulation()

SEEDS = range(24)


@pytest.fixture
def on() -> Iterator[Runner]:
    with runner() as found:
        yield found


STORE = """
add.s64 %to, %out, %at;
st.global.u64 [%to], %d;
"""

# A loop with a round for each set bit in the lane's number, and a branch in each round.
DIVERGENT = """
cvt.u64.u32 %left, %i;
mov.u64 %d, 0;
loop:
setp.eq.u64 %done, %left, 0;
@%done bra met;
sub.s64 %less, %left, 1;
and.b64 %left, %left, %less;
and.b64 %odd, %left, 1;
setp.ne.u64 %is_odd, %odd, 0;
@!%is_odd bra even;
add.s64 %d, %d, 100;
bra.uni next;
even:
add.s64 %d, %d, 1;
next:
bra.uni loop;
met:
"""


def rounds(lane: int) -> int:
    total = 0
    while lane:
        lane &= lane - 1
        total += 100 if lane & 1 else 1
    return total


def run(on: Runner, body: str, seed: int, blocks: int = 1, threads: int = 32) -> Array:
    out = on.machine.memory((blocks * threads,), np.uint64)
    on.run(kernel(body + STORE, ["out"]), out, blocks=blocks, threads=threads, seed=seed)
    return on.machine.host(out)


@pytest.mark.parametrize("seed", SEEDS)
def test_lanes_that_part_do_their_own_work(on: Runner, seed: int) -> None:
    found = run(on, DIVERGENT, seed, blocks=3, threads=96)
    assert found.tolist() == [rounds(i) for i in range(288)]


@pytest.mark.parametrize("seed", SEEDS)
def test_exchanges_wait_for_all_lanes_that_they_name(on: Runner, seed: int) -> None:
    body = DIVERGENT + "cvt.u32.u64 %v, %d;\nshfl.sync.bfly.b32 %w|%p, %v, 5, 31, -1;\n"
    found = run(on, body + "cvt.u64.u32 %d, %w;\n", seed)
    assert found.tolist() == [rounds(i ^ 5) for i in range(32)]


SHUFFLES: dict[str, tuple[int, int, Callable[[int], int]]] = {
    "bfly": (3, 31, lambda i: i ^ 3),
    "up": (2, 0, lambda i: i - 2 if i >= 2 else i),
    "down": (4, 31, lambda i: i + 4 if i < 28 else i),
    "idx": (7, 31, lambda i: 7),
}


@pytest.mark.parametrize("mode", SHUFFLES)
def test_shuffles(on: Runner, mode: str) -> None:
    by, limits, source = SHUFFLES[mode]
    body = f"shfl.sync.{mode}.b32 %v|%p, %i, {by}, {limits}, -1;\ncvt.u64.u32 %d, %v;\n"
    assert run(on, body, 0).tolist() == [source(i) for i in range(32)]
    flag = body + "selp.u64 %d, 1, 0, %p;\n"
    is_own = mode in ("up", "down")
    inside = [int(source(i) != i or not is_own) for i in range(32)]
    assert run(on, flag, 0).tolist() == inside


def test_shuffles_stay_in_segments_of_a_warp(on: Runner) -> None:
    # __shfl_down_sync(mask, v, 1, 8): 8 lanes to a segment
    body = f"shfl.sync.down.b32 %v, %i, 1, {(32 - 8) << 8 | 31}, -1;\ncvt.u64.u32 %d, %v;\n"
    assert run(on, body, 0).tolist() == [i + 1 if i % 8 < 7 else i for i in range(32)]


def test_votes(on: Runner) -> None:
    odd = "and.b32 %o, %i, 1;\nsetp.ne.u32 %p, %o, 0;\n"
    ballot = odd + "vote.sync.ballot.b32 %v, %p, -1;\ncvt.u64.u32 %d, %v;\n"
    assert set(run(on, ballot, 0).tolist()) == {0xAAAAAAAA}
    for mode, expected in (("all", 0), ("any", 1)):
        body = odd + f"vote.sync.{mode}.pred %q, %p, -1;\nselp.u64 %d, 1, 0, %q;\n"
        assert set(run(on, body, 0).tolist()) == {expected}


@pytest.mark.parametrize("seed", SEEDS)
def test_shared_memory_is_whole_after_a_barrier(on: Runner, seed: int) -> None:
    body = """
    mov.u64 %base, here;
    mul.wide.u32 %in, %tid, 4;
    add.s64 %mine, %base, %in;
    st.shared.u32 [%mine], %i;
    bar.sync 0;
    sub.s32 %other, 95, %tid;
    mul.wide.u32 %in, %other, 4;
    add.s64 %theirs, %base, %in;
    ld.shared.u32 %v, [%theirs];
    cvt.u64.u32 %d, %v;
    """
    out = on.machine.memory((192,), np.uint64)
    text = kernel(body + STORE, ["out"], declarations=".shared .align 4 .b8 here[384];")
    on.run(text, out, blocks=2, threads=96, seed=seed)
    assert on.machine.host(out).tolist() == [*range(95, -1, -1), *range(191, 95, -1)]


def test_what_no_barrier_orders_is_seen(on: Runner) -> None:
    """Another warp sets a flag: a read sees it in some orders only."""
    body = """
    mov.u64 %base, here;
    setp.lt.u32 %is_first, %tid, 32;
    @!%is_first bra reads;
    mov.u32 %one, 1;
    st.shared.u32 [%base], %one;
    reads:
    ld.shared.u32 %v, [%base];
    cvt.u64.u32 %d, %v;
    """
    text = kernel(body + STORE, ["out"], declarations=".shared .align 4 .b8 here[4];")
    seen = set()
    for seed in SEEDS:
        out = on.machine.memory((64,), np.uint64)
        on.run(text, out, threads=64, seed=seed)
        seen.add(int(on.machine.host(out)[63]))
    assert seen == {0, 1}


@pytest.mark.parametrize("barrier", ["", "bar.warp.sync -1;"])
def test_lanes_of_a_warp_stay_together_only_where_they_say_so(on: Runner, barrier: str) -> None:
    """A lane reads its neighbour's write; without a barrier the read may come before the write."""
    body = f"""
    add.s64 %mine, %out, %at;
    cvt.u64.u32 %d, %i;
    st.global.u64 [%mine], %d;
    {barrier}
    xor.b32 %other, %i, 1;
    mul.wide.u32 %far, %other, 8;
    add.s64 %theirs, %out, %far;
    ld.global.u64 %d, [%theirs];
    {barrier}
    """
    right = [i ^ 1 for i in range(32)]
    results = [run(on, body, seed).tolist() for seed in range(200)]
    assert all(found == right for found in results) == (barrier != "")


def test_blocks_run_in_any_order(on: Runner) -> None:
    """The last block that writes wins."""
    text = kernel("cvt.u64.u32 %d, %ctaid;\nst.global.u64 [%out], %d;", ["out"])
    last = set()
    for seed in SEEDS:
        out = on.machine.memory((1,), np.uint64)
        on.run(text, out, blocks=5, seed=seed)
        last.add(int(on.machine.host(out)[0]))
    assert len(last) > 2


ATOMICS: dict[str, Callable[[int, int], int]] = {
    "add": lambda old, new: old + new,
    "min": min,
    "max": max,
    "and": lambda old, new: old & new,
    "or": lambda old, new: old | new,
    "xor": lambda old, new: old ^ new,
}


@pytest.mark.parametrize("action", ATOMICS)
@pytest.mark.parametrize("bits", [32, 64])
def test_atomics(on: Runner, action: str, bits: int) -> None:
    kind = "u" if action in ("add", "min", "max") else "b"
    text = kernel(
        f"cvt.u64.u32 %d, %i;\natom.global.{action}.{kind}{bits} %old, [%out], %d;", ["out"]
    )
    for start in (0, 37, 2**bits - 5):
        word = on.machine.array(np.array([start], f"u{bits // 8}"))
        on.run(text, word, blocks=2, threads=64, seed=3)
        expected = start
        for i in range(128):
            expected = ATOMICS[action](expected, i) & 2**bits - 1
        assert int(on.machine.host(word)[0]) == expected


def test_signed_extremes_of_atomics(on: Runner) -> None:
    text = kernel("sub.s32 %d, %i, 16;\natom.global.min.s32 %old, [%out], %d;", ["out"])
    word = on.machine.array(np.array([5], np.int32))
    on.run(text, word)
    assert on.machine.host(word).tolist() == [-16]


def test_exchange_and_compare(on: Runner) -> None:
    text = kernel(
        "add.s64 %next, %at, 8;\nshr.u64 %a, %at, 3;\nshr.u64 %b, %next, 3;\n"
        "atom.global.cas.b64 %old, [%out], %a, %b;",
        ["out"],
    )
    word = on.machine.array(np.array([0], np.uint64))
    on.run(text, word)  # each lane reads the value of the lane before it
    assert on.machine.host(word).tolist() == [32]
    last = kernel("atom.global.exch.b32 %old, [%out], 9;", ["out"])
    on.run(last, word)
    assert on.machine.host(word).tolist() == [9]
