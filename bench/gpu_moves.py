# SPDX-License-Identifier: Apache-2.0
"""Compare moving and converting K and V on a GPU with a copy of the same number of bytes.

Pages are scattered in pools much larger than the caches, and every round uses other pages. The
limit of an operation that reads r bytes and writes w bytes is the driver's copy of (r + w) / 2
bytes.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from gpu_limits import random_bytes
from gpu_timing import Call, against, captured, copy_call, gpu_us, library
from harness import Row, make_row
from kvcore import PagedBatch, ops
from kvcore.ops import PoolLayout
from kvcore.support.dtypes import numpy_dtype

_HEADS, _DIM = 8, 128
_ROWS, _LENGTH = 8, 2048
_POOL_BYTES = 2 << 30  # of K, and of V
_COPY_BYTES = 1 << 30  # of the source, and of the destination, of copies
_MOVED_BYTES = 64 << 20  # of whole pages, in a round
_TOKENS = 1 << 15  # quantised in a round
_STATES = 1 << 17  # merged in a round
_GRAPH_NODES = 64


class Copies:
    """Copies of any size between two pieces of memory, at another place in each round."""

    def __init__(self) -> None:
        self.bytes = [random_bytes(_COPY_BYTES) for _ in range(2)]

    def of(self, size: int, i: int) -> Call:
        begin = i * size % (len(self.bytes[0]) - size + 1) // 256 * 256
        target, source = (each[begin : begin + size] for each in self.bytes)
        return copy_call(target, source)


def numbers(shape: tuple[int, ...], dtype: str) -> Any:
    """Return normal random numbers in float32, or their upper halves as bfloat16."""
    cp = library()
    kind = numpy_dtype(dtype)
    bits = cp.random.standard_normal(shape, cp.float32).view(cp.uint32)
    return (bits >> (32 - 8 * kind.itemsize)).astype(f"u{kind.itemsize}").view(kind)


class Stored(NamedTuple):
    """The format in which a pool stores the elements of a head of 128."""

    dtype: np.dtype[Any]
    length: int  # of an array's last axis
    scales: int  # of a head
    scale_bytes: int  # of one scale

    @classmethod
    def of(cls, dtype: str) -> Stored:
        if dtype == "nvfp4":
            return cls(np.dtype("uint8"), _DIM // 2, _DIM // 16, 1)
        kind = numpy_dtype(dtype)
        return cls(kind, _DIM, int(kind.itemsize == 1), 4)

    @property
    def head_bytes(self) -> int:
        return self.length * self.dtype.itemsize + self.scales * self.scale_bytes

    def ones(self, *shape: int) -> Any:
        """Return scales of 1 for heads."""
        cp = library()
        if self.scale_bytes == 4:
            return cp.ones((*shape, self.scales), cp.float32)
        one = cp.full((*shape, self.scales), 0x38, cp.uint8)
        return one.view(numpy_dtype("float8_e4m3fn"))


class _Scene:
    """Pools with scattered pages of batches, and the tokens of a batch."""

    def __init__(self, page: int, dtype: str, layout: str = "NHD", narrow: str = "") -> None:
        kind, stored = numpy_dtype(dtype), Stored.of(narrow or dtype)
        inner = (page, _HEADS) if layout == "NHD" else (_HEADS, page)
        page_bytes = page * _HEADS * stored.length * stored.dtype.itemsize
        pages = _POOL_BYTES // page_bytes
        shape = (pages, *inner, stored.length)
        cp = library()
        finite = cp.uint8(0xF7 if narrow else 0xFF)  # no code of FP8 is NaN
        self.pools = [
            (random_bytes(pages * page_bytes) & finite).view(stored.dtype).reshape(shape)
            for _ in range(2)
        ]
        self.scales = [stored.ones(pages, page, _HEADS) for _ in range(2 * bool(narrow))]
        columns = _LENGTH // page
        order = np.random.default_rng(5).permutation(pages).astype(np.uint32)
        count = pages // (_ROWS * columns)
        self.tables = cp.asarray(order[: count * _ROWS * columns].reshape(count, _ROWS, columns))
        self.lengths = {n: cp.full(_ROWS, n, cp.uint32) for n in (0, _LENGTH)}
        self.offsets = cp.arange(_ROWS + 1, dtype=cp.uint32) * cp.uint32(_LENGTH)
        fused = numbers((_ROWS * _LENGTH, 3 * _HEADS, _DIM), dtype)
        self.tokens = [fused[:, _HEADS : 2 * _HEADS], fused[:, 2 * _HEADS :]]
        self.out = [cp.empty((_ROWS * _LENGTH, _HEADS, _DIM), self.tokens[0].dtype) for _ in "kv"]
        self.layout = layout
        self.token_bytes = 2 * _HEADS * _DIM * kind.itemsize
        self.stored_bytes = 2 * _HEADS * stored.head_bytes

    def batch(self, i: int, length: int) -> PagedBatch:
        scales = dict(zip(("key_scales", "value_scales"), self.scales, strict=False))
        return PagedBatch(
            self.pools[0],
            self.pools[1],
            self.tables[i % len(self.tables)],
            self.lengths[length],
            layout=self.layout,
            **scales,
        )

    @property
    def half(self) -> int:
        """Half of the bytes that a round reads and writes."""
        return _ROWS * _LENGTH * (self.token_bytes + self.stored_bytes) // 2


def _moves(copies: Copies, page: int, layout: str, rounds: int) -> list[Row]:
    scene = _Scene(page, "bfloat16", layout)
    k, v = scene.tokens
    lengths = np.full(_ROWS, _LENGTH, np.uint32)
    out = scene.out[0], scene.out[1]
    calls: dict[str, list[Call]] = {
        "append": [
            partial(ops.append, scene.batch(i, 0), 0, k, v, scene.offsets) for i in range(rounds)
        ],
        "scatter": [
            partial(ops.scatter, scene.batch(i, _LENGTH), 0, k, v, scene.offsets)
            for i in range(rounds)
        ],
        "gather": [
            partial(ops.gather, scene.batch(i, _LENGTH), 0, lengths=lengths, out=out)
            for i in range(rounds)
        ],
    }
    label = f"{scene.half >> 20} MiB, {_HEADS} heads of {_DIM} bf16, {layout}, page {page}"
    limits = [copies.of(scene.half, i) for i in range(rounds)]
    return [
        against(f"gpu.{name}.{layout}.{page}", f"{name}, {label}", each, limits, "copy")
        for name, each in calls.items()
    ]


def _slots(copies: Copies, rounds: int) -> Row:
    scene = _Scene(16, "bfloat16")
    k, v = scene.tokens
    cp = library()
    within = cp.arange(16, dtype=cp.int64)
    slots = [
        (scene.tables[i % len(scene.tables)].astype(cp.int64)[..., None] * 16 + within).ravel()
        for i in range(rounds)
    ]
    calls = [partial(ops.append_slots, scene.batch(i, 0), 0, k, v, slots[i]) for i in range(rounds)]
    limits = [copies.of(scene.half, i) for i in range(rounds)]
    work = f"append_slots, {scene.half >> 20} MiB, page 16"
    return against("gpu.append_slots.NHD.16", work, calls, limits, "copy")


def _pages(copies: Copies, rounds: int) -> list[Row]:
    """Copy, fill and digest scattered pages."""
    rows = []
    cp = library()
    for page_bytes in (2 << 10, 128 << 10):
        count = _MOVED_BYTES // page_bytes
        pool = random_bytes(_POOL_BYTES).reshape(-1, page_bytes)
        order = np.random.default_rng(6).permutation(len(pool))
        ids = [np.roll(order, -2 * count * i)[: 2 * count] for i in range(rounds)]
        pairs = [cp.asarray(each.reshape(count, 2)) for each in ids]
        lists = [cp.asarray(each[:count]) for each in ids]
        size = f"{page_bytes >> 10} KiB"
        jobs: list[tuple[str, Sequence[Call], int]] = [
            ("copy_pages", [partial(ops.copy_pages, pool, each) for each in pairs], 2),
            ("zero_pages", [partial(ops.zero_pages, pool, each) for each in lists], 1),
            ("checksum", [partial(ops.checksum, pool, each) for each in lists], 1),
        ]
        for name, calls, ways in jobs:
            limits = [copies.of(count * page_bytes * ways // 2, i) for i in range(rounds)]
            work = f"{name}, {_MOVED_BYTES >> 20} MiB of pages of {size}"
            rows.append(against(f"gpu.{name}.{page_bytes}", work, calls, limits, "copy"))
    return rows


def _turned(copies: Copies, rounds: int) -> list[Row]:
    """Move whole pages from and to vLLM's layout, where the tokens of a head are columns."""
    kind, page = numpy_dtype("bfloat16"), 16
    page_bytes = page * _HEADS * _DIM * kind.itemsize  # of K, and of V
    pages = _POOL_BYTES // page_bytes
    shapes = (1, pages, page, _HEADS, _DIM), (1, pages, _HEADS, _DIM // 8, page, 8)
    rows, packed = (
        [random_bytes(pages * page_bytes).view(kind).reshape(shape) for _ in "kv"]
        for shape in shapes
    )
    packed[1] = packed[1].reshape(1, pages, _HEADS, _DIM, page)
    plain = PoolLayout((rows[0], rows[1]), "layer_first_nhd")
    turned = PoolLayout((packed[0], packed[1]), "vllm")
    count = _MOVED_BYTES // (2 * page_bytes)
    order = np.random.default_rng(8).permutation(pages).astype(np.int64)
    ids = [library().asarray(np.roll(order, -count * i)[:count]) for i in range(rounds)]
    limits = [copies.of(_MOVED_BYTES, i) for i in range(rounds)]
    jobs = {"to": (plain, turned), "from": (turned, plain)}
    return [
        against(
            f"gpu.transfer.{way}_vllm",
            f"transfer, {_MOVED_BYTES >> 20} MiB of pages of 16 tokens, {way} layout vllm",
            [partial(ops.transfer, *pools, each, each) for each in ids],
            limits,
            "copy",
        )
        for way, pools in jobs.items()
    ]


def _single_tokens(rounds: int) -> list[Row]:
    """Measure appending a token to each row of a batch, as a node of a CUDA graph."""
    rows = []
    cp = library()
    for batch in (1, 64, 256):
        shape = (4096, 16, _HEADS, _DIM)
        kind = numpy_dtype("bfloat16")
        pools = [cp.zeros(shape, cp.uint16).view(kind) for _ in range(2)]
        table = cp.arange(batch * 8, dtype=cp.uint32).reshape(batch, 8)
        lengths = cp.full(batch, 77, cp.uint32)
        offsets = cp.arange(batch + 1, dtype=cp.uint32)
        k = cp.zeros((batch, _HEADS, _DIM), cp.uint16).view(kind)
        view = PagedBatch(pools[0], pools[1], table, lengths)
        graph = captured([partial(ops.append, view, 0, k, k, offsets)] * _GRAPH_NODES)
        stream = cp.cuda.get_current_stream()
        spent = gpu_us([partial(graph.launch, stream)] * rounds)
        each = [us / _GRAPH_NODES for us in spent]
        work = f"append, a token of each of {batch} rows, per node of a graph of {_GRAPH_NODES}"
        rows.append(make_row(f"gpu.graph.append.{batch}", work, each))
    return rows


def _quantised(copies: Copies, narrow: str, rounds: int) -> list[Row]:
    scene = _Scene(16, "bfloat16", narrow=narrow)
    k, v = scene.tokens
    cp = library()
    lengths = np.full(_ROWS, _LENGTH, np.uint32)
    out = scene.out[0], scene.out[1]
    appends = [
        partial(ops.append, scene.batch(i, 0), 0, k, v, scene.offsets) for i in range(rounds)
    ]
    gathers = [
        partial(ops.gather, scene.batch(i, _LENGTH), 0, lengths=lengths, out=out)
        for i in range(rounds)
    ]
    limits = [copies.of(scene.half, i) for i in range(rounds)]
    label = f"{scene.half >> 20} MiB, bf16 and {narrow}, page 16"
    rows = [
        against(f"gpu.append.{narrow}", f"append, {label}", appends, limits, "copy"),
        against(f"gpu.gather.{narrow}", f"gather, {label}", gathers, limits, "copy"),
    ]
    tokens = _TOKENS
    x = [numbers((tokens, _HEADS, _DIM), "bfloat16") for _ in range(4)]
    stored = Stored.of(narrow)
    codes = cp.empty((tokens, _HEADS, stored.length), cp.uint8).view(stored.dtype)
    scales = stored.ones(tokens, _HEADS)
    back = cp.empty((tokens, _HEADS, _DIM), cp.uint16).view(numpy_dtype("bfloat16"))
    forth = [
        partial(ops.quantize, x[i % 4], narrow, _DIM // stored.scales, out=(codes, scales))
        for i in range(rounds)
    ]
    again = [partial(ops.dequantize, codes, scales, "bfloat16", out=back) for _ in range(rounds)]
    half = tokens * _HEADS * (2 * _DIM + stored.head_bytes) // 2
    limits = [copies.of(half, i) for i in range(rounds)]
    label = f"{half >> 20} MiB, bf16 and {narrow}"
    return [
        *rows,
        against(f"gpu.quantize.{narrow}", f"quantize, {label}", forth, limits, "copy"),
        against(f"gpu.dequantize.{narrow}", f"dequantize, {label}", again, limits, "copy"),
    ]


def _merges(copies: Copies, rounds: int) -> Row:
    cp = library()
    n = _STATES
    kind = numpy_dtype("bfloat16")
    a, b, o = (cp.zeros((n, _DIM), cp.uint16).view(kind) for _ in range(3))
    sums = [cp.random.standard_normal(n, cp.float32) for _ in range(3)]
    call = partial(ops.merge_states, a, sums[0], b, sums[1], out=(o, sums[2]))
    limits = [copies.of(n * (6 * _DIM + 12) // 2, i) for i in range(rounds)]
    work = f"merge_states, {n} states of {_DIM} bf16"
    return against("gpu.merge_states", work, [call] * rounds, limits, "copy")


def measure(options: Namespace) -> list[Row]:
    """Measure moves, conversions, and nodes of CUDA graphs."""
    rounds = 4 if options.quick else 24
    copies = Copies()
    rows = []
    for page, layout in ((16, "NHD"), (1, "NHD"), (16, "HND"), (128, "NHD")):
        rows += _moves(copies, page, layout, rounds)
    rows += [_slots(copies, rounds), *_pages(copies, rounds), *_turned(copies, rounds)]
    for narrow in ("float8_e4m3fn", "int8", "nvfp4"):
        rows += _quantised(copies, narrow, rounds)
    rows += [_merges(copies, rounds), *_single_tokens(rounds)]
    return rows
