# SPDX-License-Identifier: Apache-2.0
"""Compare attention over pages on a GPU with copying K and V, with torch, and with FlashInfer.

The limit of decoding is the driver's copy of half the bytes of K and V: it reads and writes
together the number of bytes that attention reads. torch uses K and V that were gathered before.
FlashInfer reads the same pages. A library that is not installed for GPUs is left out.
"""

from __future__ import annotations

from argparse import Namespace
from functools import partial
from importlib.util import find_spec
from statistics import median
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np

from gpu_moves import Copies, Stored, numbers
from gpu_timing import Call, against, gpu_us, library
from harness import Row, make_row
from kvcore import PagedBatch, ops

_HEADS, _GROUP, _DIM = 8, 4, 128
_POOL_BYTES = 1 << 30  # of K, and of V
_BATCHES = ((1, 32_768, 1), (16, 8192, 1), (64, 2048, 1), (1, 8192, 2048))  # rows, cached, new
_NARROW = ("float8_e4m3fn", "int8", "nvfp4")
_NARROW_BATCH = (16, 8192)  # rows, cached
_HOST_BATCH = (16, 256)


class _Scene(NamedTuple):
    """Batches of one shape, with pages scattered over pools."""

    batches: list[PagedBatch]
    q: Any
    offsets: Any
    out: Any
    tokens: int  # tokens of K in a round
    token_bytes: int  # bytes of a token in K, or in V, with scales

    @classmethod
    def make(
        cls, rows: int, cached: int, new: int, page: int, rounds: int, narrow: str = ""
    ) -> _Scene:
        cp = library()
        shape = _POOL_BYTES // (page * _HEADS * _DIM * 2), page, _HEADS, _DIM
        pages, scales, stored = shape[0], {}, Stored.of(narrow or "bfloat16")
        if narrow:
            k, v = (_codes((*shape[:3], stored.length), stored) for _ in "kv")
            scales = {f"{name}_scales": stored.ones(*shape[:3]) for name in ("key", "value")}
        else:
            k, v = (numbers(shape, "bfloat16") for _ in "kv")
        columns = -(-(cached + new) // page)
        order = np.random.default_rng(7).permutation(pages).astype(np.uint32)
        count = min(rounds, pages // (rows * columns))
        tables = cp.asarray(order[: count * rows * columns].reshape(count, rows, columns))
        lengths = cp.full(rows, cached, cp.uint32)
        q = numbers((rows * new, _HEADS * _GROUP, _DIM), "bfloat16")
        offsets = cp.arange(rows + 1, dtype=cp.uint32) * cp.uint32(new)
        batches = [PagedBatch(k, v, tables[i % count], lengths, **scales) for i in range(rounds)]
        out = cp.empty(q.shape, q.dtype)
        return cls(batches, q, offsets, out, rows * (cached + new), _HEADS * stored.head_bytes)

    def calls(self) -> list[Call]:
        return [
            partial(ops.attention, batch, 0, self.q, self.offsets, out=self.out)
            for batch in self.batches
        ]


def _codes(shape: tuple[int, ...], stored: Stored) -> Any:
    """Return random codes of numbers of moderate size."""
    cp = library()
    return cp.random.randint(0, 0x50, shape, cp.uint8).view(stored.dtype)


def _torch_stream() -> Any:
    """Return cupy's current stream as a stream of torch."""
    import torch

    external: Any = torch.cuda.ExternalStream
    return external(library().cuda.get_current_stream().ptr)


def _torch(scene: _Scene, new: int) -> Call | None:
    """Return torch's attention over K and V of the first batch, gathered before."""
    if find_spec("torch") is None:
        return None
    import torch

    if not torch.cuda.is_available():
        return None
    batch, cp = scene.batches[0], library()
    rows = len(batch.cache_lengths)
    length = scene.tokens // rows
    shape = scene.tokens, _HEADS, _DIM
    gathered = tuple(cp.empty(shape, scene.q.dtype) for _ in "kv")
    ops.gather(batch, 0, lengths=np.full(rows, length, np.uint32), out=gathered)

    def tensor(array: Any, tokens: int) -> Any:
        bits = torch.as_tensor(array.view(cp.int16), device="cuda").view(torch.bfloat16)
        return bits.view(rows, tokens, -1, _DIM).transpose(1, 2)

    q, (k, v) = tensor(scene.q, new), [tensor(each, length) for each in gathered]
    mask = None
    if new > 1:
        behind = torch.arange(length - new, length, device="cuda")[:, None]
        mask = torch.arange(length, device="cuda")[None] <= behind
    stream = _torch_stream()
    attend = partial(
        torch.nn.functional.scaled_dot_product_attention, q, k, v, attn_mask=mask, enable_gqa=True
    )

    def call() -> None:
        with torch.cuda.stream(stream):
            attend()

    return call


def _flashinfer(scene: _Scene, page: int) -> Call | None:
    """Return FlashInfer's decoding of the first batch from the same pages, planned before."""
    if find_spec("flashinfer") is None or find_spec("torch") is None:
        return None
    import flashinfer
    import torch

    batch, cp = scene.batches[0], library()

    def tensor(array: Any) -> Any:
        bits = array.view(cp.int16) if array.dtype.itemsize == 2 else array
        seen = torch.as_tensor(bits, device="cuda")
        return seen.view(torch.bfloat16) if array.dtype.itemsize == 2 else seen

    workspace = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD")
    indices = [tensor(each) for each in ops.page_indices(batch, scene.offsets)[:3]]
    kinds = {"q_data_type": torch.bfloat16, "kv_data_type": torch.bfloat16}
    wrapper.plan(*indices, _HEADS * _GROUP, _HEADS, _DIM, page, **kinds)
    q, pools = tensor(scene.q), (tensor(batch.key_pool), tensor(batch.value_pool))
    stream = _torch_stream()

    def call() -> None:
        with torch.cuda.stream(stream):
            wrapper.run(q, pools)

    return call


def _rows_of(shape: tuple[int, int, int], page: int, copies: Copies, rounds: int) -> list[Row]:
    rows, cached, new = shape
    scene = _Scene.make(*shape, page, rounds)
    kind = "decode" if new == 1 else "prefill"
    key = f"gpu.attention.{kind}.{rows}x{cached}.{page}"
    work = f"{kind}, {rows} x {cached:,} tokens before {new:,} new, bf16, page {page}"
    others = {"torch SDPA": _torch(scene, new)}
    if new == 1:
        others = {
            "copy": copies.of(scene.tokens * scene.token_bytes, 0),
            "flashinfer": _flashinfer(scene, page),
        } | others
    there = {name: call for name, call in others.items() if call is not None}
    calls = [each for own in scene.calls() for each in (own, *there.values())]
    spent = gpu_us(calls)
    own, turns = spent[:: 1 + len(there)], 1 + len(there)
    return [
        make_row(
            f"{key}.{name.split()[0]}",
            f"{work}, beside {name}",
            own,
            limit=median(spent[1 + i :: turns]),
            limit_name=name,
        )
        for i, name in enumerate(there)
    ] or [make_row(key, work, own)]


def _narrow_row(narrow: str, copies: Copies, rounds: int) -> Row:
    """Measure decoding from quantised pages, with a scale for each token and head."""
    (rows, cached), page = _NARROW_BATCH, 16
    scene = _Scene.make(rows, cached, 1, page, rounds, narrow)
    limits = [copies.of(scene.tokens * scene.token_bytes, i) for i in range(rounds)]
    work = f"decode, {rows} x {cached:,} tokens before 1 new, {narrow}, page {page}"
    return against(f"gpu.attention.decode.{narrow}.copy", work, scene.calls(), limits, "copy")


def _host_row(rounds: int) -> Row:
    """Measure the host's time of a call; a CUDA graph avoids this time."""
    rows, cached = _HOST_BATCH
    scene = _Scene.make(rows, cached, 1, 16, 1)
    (call,) = scene.calls()
    spent = []
    for _ in range(20 * rounds):
        start = perf_counter()
        call()
        spent.append((perf_counter() - start) * 1e6)
    library().cuda.get_current_stream().synchronize()
    work = f"decode, {rows} x {cached} tokens: the host's time"
    return make_row("gpu.attention.host", work, spent)


def measure(options: Namespace) -> list[Row]:
    """Measure decoding and a chunk of a prompt."""
    rounds = 3 if options.quick else 12
    copies = Copies()
    rows = [
        row
        for page in (16, 64)
        for shape in _BATCHES
        for row in _rows_of(shape, page, copies, rounds)
    ]
    narrow = [_narrow_row(name, copies, rounds) for name in _NARROW]
    return [*rows, *narrow, _host_row(rounds)]
