# SPDX-License-Identifier: Apache-2.0
"""Compare moving pages between a GPU and pinned host memory with one copy; measure a fetch."""

from __future__ import annotations

from argparse import Namespace
from functools import partial
from time import perf_counter
from typing import Any

import numpy as np

from gpu_limits import host_copy, pinned_bytes, random_bytes
from gpu_timing import against, library
from harness import Row, make_row
from kvcore import KVCacheParams, PagedKVCacheManager, TextGenerationContext, ops, update_batch
from kvcore.support.dtypes import numpy_dtype

_MOVED = 256 << 20


def _pool(layout: str, sizes: dict[str, int]) -> ops.PoolLayout:
    pages, layers, *rest = sizes.values()
    shape = [pages, 2, layers, *rest] if layout == "max" else [2, layers, pages, *rest]
    kind = numpy_dtype("bfloat16")
    return ops.PoolLayout(random_bytes(2 * int(np.prod(shape))).view(kind).reshape(shape), layout)


def _transfers(layouts: tuple[str, str], sizes: dict[str, int], rounds: int) -> list[Row]:
    """Move 256 MiB of scattered pages in both directions between the GPU's and host's layout."""
    pool = _pool(layouts[0], sizes)
    host = ops.PoolLayout.allocate(layouts[1], **sizes, dtype="bfloat16", device="pinned")
    rng = np.random.default_rng(3)
    ids = [library().asarray(rng.permutation(sizes["pages"])) for _ in range(2)]
    flat, device = pinned_bytes(_MOVED), random_bytes(_MOVED)
    flat[:] = 1
    page = 2 * sizes["page_size"] * sizes["heads"] * sizes["head_dim"]  # bytes of K in one layer
    piece = page if layouts[0] != "max" else 2 * sizes["layers"] * page
    rows = []
    ways: list[tuple[str, Any, Any, Any, Any]] = [
        ("d2h", pool, host, flat, device),
        ("h2d", host, pool, device, flat),
    ]
    for way, source, target, to, from_ in ways:
        call = partial(ops.transfer, source, target, ids[0], ids[1])
        limit = host_copy(to, from_)
        work = f"{way}, 256 MiB of scattered pages in pieces of {piece >> 10} KiB"
        calls, limits = [call] * rounds, [limit] * rounds
        rows.append(against(f"gpu.{way}.{piece}", work, calls, limits, f"pinned {way}"))
    return rows


def _fetches(rounds: int) -> Row:
    """Measure the host's time of fetch, update and step, for 256 requests of 8k tokens."""
    page, batch, length = 16, 256, 8192
    params = KVCacheParams("bfloat16", 1, 8, 1, page_size=page, enable_prefix_caching=True)
    pages = batch * (length // page + 40)
    manager = PagedKVCacheManager(params, batch, 2 * length, devices=["cuda:0"], num_pages=pages)
    rng = np.random.default_rng(4)
    contexts = []
    for i in range(batch):
        prompt = rng.integers(0, 1 << 20, length + i % page).astype(np.int32)
        contexts.append(TextGenerationContext(i, prompt))
        manager.external_claim(i)
    tokens = np.ones(batch, np.int32)
    spent = []
    for i in range(rounds + 8):
        start = perf_counter()
        manager.fetch(contexts)
        update_batch(contexts, tokens)
        manager.step(contexts)
        if i >= 8:
            spent.append((perf_counter() - start) * 1e6)
        library().cuda.get_current_stream().synchronize()
    return make_row("gpu.fetch.256", "decode step of 256 requests at 8k, the host's time", spent)


def measure(options: Namespace) -> list[Row]:
    """Measure large pieces, small pieces, and fetches."""
    rounds = 3 if options.quick else 12
    order = ("pages", "layers", "page_size", "heads", "head_dim")
    rows = []
    for layouts, page in (
        (("max", "max"), 16),
        (("layer_first_nhd", "page_first_direct"), 4),
        (("layer_first_nhd", "page_first_direct"), 2),
    ):
        sizes = dict(zip(order, (2048 // page, 32, page, 8, 128), strict=True))
        rows += _transfers(layouts, sizes, rounds)
    return [*rows, _fetches(8 * rounds)]
