# SPDX-License-Identifier: Apache-2.0
"""Managers, contexts and admissions that the control-path benches share."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import cycle

import numpy as np
import numpy.typing as npt

import kvcore
from kvcore.groups import FullAttention, SlidingWindow

PAGE = 16
_VOCABULARY = 128_256
_NEXT_TOKEN = 7

Tokens = npt.NDArray[np.int32]
Context = kvcore.TextGenerationContext
Admission = tuple[str, Context, list[Context]]


def params(bundles: int = 1, window: int = 1024) -> kvcore.KVCacheParams:
    """Return the parameters of an 8B model with GQA, page size 16, prefix caching on.

    With several bundles, the first bundle of 8 layers keeps every token; the others have windows.
    """
    sliding = range(8, 8 * bundles)
    return kvcore.KVCacheParams(
        dtype="bfloat16",
        n_kv_heads=8,
        head_dim=128,
        num_layers=32 if bundles == 1 else 8 * bundles,
        page_size=PAGE,
        enable_prefix_caching=True,
        groups=None if bundles == 1 else [FullAttention(range(8)), SlidingWindow(sliding, window)],
    )


def manager(
    pages: int,
    *,
    requests: int = 256,
    partial_page_reuse: bool = True,
    eviction: str = "lru",
    bundles: int = 1,
    window: int = 1024,
    tenants: Sequence[str] = (),
    explain: bool = False,
    advice: bool = False,
) -> kvcore.PagedKVCacheManager:
    """Build a manager without blocks, with default options; each tenant reserves one page."""
    return kvcore.PagedKVCacheManager(
        params(bundles, window),
        max_batch_size=requests,
        max_seq_len=1 << 20,
        num_pages=pages,
        blocks=None,
        cache=kvcore.CacheOptions(
            partial_page_reuse=partial_page_reuse,
            eviction=eviction,
            quotas=dict.fromkeys(tenants, (1, pages)) or None,
            explain=explain,
            advice=advice,
        ),
    )


def prompts(count: int, length: int, seed: int, *, begin: int | None = None) -> Tokens:
    """Return distinct random prompts, int32 ``[count, length]``.

    The first token of each prompt is ``begin``, or else a random non-negative int32: no two
    prompts share a first token, so no page is reused in part.
    """
    rng = np.random.default_rng(seed)
    rows = rng.integers(0, _VOCABULARY, (count, length), dtype=np.int32)
    rows[:, 0] = rng.integers(0, 1 << 31, count) if begin is None else begin
    return rows


def admissions(
    rows: Iterable[Tokens], tag: str, tenants: Sequence[str | None] = ()
) -> list[Admission]:
    """Build (request id, context, batch of one) for every prompt, of the tenants in turn."""
    found = []
    for (i, row), tenant in zip(enumerate(rows), cycle(tenants or [None])):
        context = Context(f"{tag}-{i}", row, tenant=tenant)
        found.append((f"{tag}-{i}", context, [context]))
    return found


def fresh_parts(rows: Tokens, tag: str, tenants: Sequence[str] = ()) -> Iterator[list[Admission]]:
    """Yield runs of requests that fit the second-level CPU cache, each built just before its use.

    A server also gets a request just after the tokenizer has built it.
    """
    size = max(1, min(200, (1 << 16) // rows.shape[1]))
    for i, part in enumerate(batches(rows, size)):
        yield admissions(part, f"{tag}-{i}", tenants)


def admit(mgr: kvcore.PagedKVCacheManager, items: Sequence[Admission]) -> None:
    """Run claim, reserve, fetch, step and release for each request."""
    claim, reserve, fetch, step, release = (
        mgr.claim,
        mgr.reserve,
        mgr.fetch,
        mgr.step,
        mgr.release,
    )
    for request_id, context, batch in items:
        claim(request_id)
        reserve(context)
        fetch(batch)
        context.update(_NEXT_TOKEN)
        step(batch)
        release(request_id)


def cache(mgr: kvcore.PagedKVCacheManager, rows: Tokens, tag: str) -> None:
    """Put every prompt into the prefix cache; the contexts are built in batches."""
    for part in batches(rows, max(1, (1 << 22) // rows.shape[1])):
        admit(mgr, admissions(part, tag))


def fill(
    mgr: kvcore.PagedKVCacheManager, length: int, *, seed: int, begin: int | None = None
) -> None:
    """Cache prompts of ``length`` tokens: a tenth more than fit, so the pool is recycled."""
    total = mgr.total_num_pages * 11 // 10 // max(1, length // PAGE) + 1
    share = max(1, (1 << 22) // length)
    for i, start in enumerate(range(0, total, share)):
        rows = prompts(min(share, total - start), length, seed + 1 + i, begin=begin)
        admit(mgr, admissions(rows, f"fill-{i}"))
    assert mgr.metrics.evicted_pages > 0, "the pool must be full and recycled"


def batches(rows: Tokens, size: int) -> Iterator[Tokens]:
    """Cut prompts into runs of ``size``."""
    for start in range(0, len(rows), size):
        yield rows[start : start + size]
