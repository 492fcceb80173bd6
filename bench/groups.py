# SPDX-License-Identifier: Apache-2.0
"""Compare the cost of sliding-window layers with one group of full attention.

Each bundle has 8 layers. The first bundle keeps every page, the other bundles keep a window of
1,024 tokens. The compared managers run in turn, part by part, so that other work of the machine
slows all managers. The pages that the windows of one long request hold are counted, not timed.
"""

from __future__ import annotations

from argparse import Namespace
from functools import partial
from time import perf_counter_ns

import numpy as np

import kvcore
from decode import ROWS, decode_steps, start_batch, step_tokens
from evict import cycle
from harness import (
    Row,
    main,
    make_row,
    percentile,
    plain_row,
    sample_calls,
    sample_parts,
    undisturbed,
)
from workload import PAGE, Context, Tokens, cache, fill, fresh_parts, manager, prompts

_WINDOW = 1024
_CHUNK = 2048
_BUNDLES = (1, 2, 4, 6)


def decode(steps: int) -> list[Row]:
    """Measure a decode step of 256 requests at 2k tokens, by the number of bundles."""
    context = 2048
    columns = context // PAGE + steps // PAGE + 4
    windows = _WINDOW // PAGE + 2
    found = []
    for n in _BUNDLES:
        held = ROWS * (columns + (n - 1) * columns)  # prompts are prefilled in one chunk
        mgr = manager(held + ROWS * windows, bundles=n)
        fill(mgr, 128, seed=context)
        batch, _ = start_batch(mgr, context, "start")
        decode_steps(mgr, batch, step_tokens(32, 1))
        found.append((mgr, batch))
    samples: list[list[float]] = [[] for _ in found]
    for i in range(0, steps, 32):
        for (mgr, batch), spent in zip(found, samples, strict=True):
            spent += decode_steps(mgr, batch, step_tokens(32, i))
    rows: list[Row] = []
    for n, spent in zip(_BUNDLES, samples, strict=True):
        one = {"limit": rows[0].mean, "limit_name": "one bundle"} if rows else {}
        work = f"decode step, {ROWS} requests, 2k context, {n} bundle{'s' if n > 1 else ''}"
        rows.append(make_row(f"groups.decode.{n}", work, spent, p99=percentile(spent, 0.99), **one))
    return rows


def match() -> list[Row]:
    """Measure the match of a fully cached prompt of 32k tokens."""
    tokens = 32_768
    query = prompts(1, tokens, 9)
    calls = []
    for n in (1, 2):
        mgr = manager(n * (tokens // PAGE + 1024), bundles=n)
        cache(mgr, query, "cached")
        assert mgr.match_prefix(query[0]) == tokens
        calls.append(mgr.match_prefix)
    samples: list[list[float]] = [[], []]
    for _ in range(41):
        for call, spent in zip(calls, samples, strict=True):
            spent += sample_calls(call, [query[0]] * 50, 50)
    flat = make_row("", "", samples[0]).median
    work = "match, full hit, 32,768 tokens, full and sliding layers"
    one = {"limit": flat, "limit_name": "one bundle"}
    return [make_row("groups.match.32768", work, samples[1], **one)]


def _ratio(key: str, work: str, samples: dict[str, list[float]]) -> list[Row]:
    """Return a row for each case, then the ratio of the last case to the first."""
    names = {case: case.replace("_", " ") for case in samples}
    rows = [
        make_row(f"groups.{key}.{case}", f"{work}; {names[case]}", spent)
        for case, spent in samples.items()
    ]
    first, *_, last = names.values()
    ratio = rows[-1].median / rows[0].median
    return [*rows, plain_row(f"groups.{key}.flat", f"{work}; {last} / {first}", ratio, "x")]


def evict(quick: bool) -> list[Row]:
    """Measure admissions with evictions, by the number of cached leaves."""
    tokens = 128
    sizes = (1_000, 10_000) if quick else (1_000, 10_000, 100_000)
    managers = {}
    for leaves in sizes:
        mgr = manager(leaves * 2 * tokens // PAGE, bundles=2)
        fill(mgr, tokens, seed=leaves)
        managers[f"{leaves:,}_leaves"] = mgr
    samples: dict[str, list[float]] = {case: [] for case in managers}
    for i in range(10):
        rows = prompts(200 if quick else 2_000, tokens, i)
        for case, mgr in managers.items():
            parts = fresh_parts(rows, f"{case}-{i}")
            samples[case] += sample_parts(partial(cycle, mgr), parts)
    return _ratio("evict", "claim, reserve 128, evicting 16 pages, step, release", samples)


def _take(mgr: kvcore.PagedKVCacheManager, items: list[Context]) -> None:
    """Claim, reserve with a hit, and release, for each context."""
    claim, reserve, release = mgr.claim, mgr.reserve, mgr.release
    for context in items:
        claim(context.request_id)
        reserve(context)
        release(context.request_id)


def _hits(mgr: kvcore.PagedKVCacheManager, rows: Tokens, tag: str) -> list[float]:
    """Sample prefix hits of all prompts without their last page, in random order."""
    order = np.random.default_rng(5).permutation(len(rows))
    parts = ([Context(f"{tag}-{i}", rows[i]) for i in some] for some in np.array_split(order, 8))
    return sample_parts(partial(_take, mgr), parts)


def holes(count: int) -> list[Row]:
    """Measure hits of 8k tokens: with all window pages cached, or only the last windows."""
    tokens = 8192
    samples: dict[str, list[float]] = {}
    rows = prompts(count, tokens, 21)
    for case in ("all_windows_kept", "windows_passed_evicted"):
        mgr = manager(count * 2 * tokens // PAGE + 64, bundles=2)
        cache(mgr, rows, "cached")
        if case != "all_windows_kept":
            passed = count * (tokens - 2 * _WINDOW) // PAGE
            hog = Context("hog", prompts(1, passed // 2 * PAGE, 22)[0])
            mgr.claim("hog")
            assert mgr.reserve(hog)
            mgr.release("hog")
            assert mgr.group_metrics[1].holes > passed * 9 // 10
        assert all(mgr.match_prefix(row) == tokens for row in rows)
        samples[case] = [t for i in range(5) for t in _hits(mgr, rows, f"{case}-{i}")]
    return _ratio("holes", "claim, reserve with a hit of 8k, release", samples)


def windows(count: int) -> list[Row]:
    """Measure hits of 8k tokens by the length of the window."""
    tokens = 8192
    samples: dict[str, list[float]] = {}
    rows = prompts(count, tokens, 31)
    managers = {}
    for window in (256, 1024, 4096):
        mgr = manager(count * 2 * tokens // PAGE + 1024, bundles=2, window=window)
        cache(mgr, rows, "cached")
        managers[f"window_{window}"] = mgr
    for case, mgr in managers.items():
        samples[case] = [t for i in range(5) for t in _hits(mgr, rows, f"{case}-{i}")]
    return _ratio("window_length", "claim, reserve with a hit of 8k, release", samples)


def _prefill(tokens: int, chunk: int) -> tuple[list[float], list[int]]:
    """Prefill a request in chunks; return each step's us per page, and window pages held."""
    mgr = manager(tokens // PAGE * 2 + 1024, requests=1, bundles=2)
    context = Context("long", prompts(1, tokens, 41)[0], active_idx=chunk)
    mgr.claim("long")
    held: list[int] = []

    def run() -> list[float]:
        context.active_idx = min(tokens, context.start_idx + chunk)
        assert mgr.reserve(context)
        mgr.fetch([context])
        held.append(mgr.group_metrics[1].held_pages)
        context.update(7)
        start = perf_counter_ns()
        mgr.step([context])
        return [(perf_counter_ns() - start) / 1e3 / (chunk // PAGE)]

    run()  # no page has left the window yet
    return undisturbed(run for _ in range(tokens // chunk - 1)), held


def give_back() -> list[Row]:
    """Measure steps that give back pages outside the window, by the number of pages."""
    samples = {f"{n // PAGE}_pages": _prefill(64 * n, n)[0] for n in (512, 2048, 8192)}
    return _ratio("give_back", "step of a chunk, its windows released, per page", samples)


def window_pages(quick: bool) -> list[Row]:
    """Count the maximum number of window pages held while one request is prefilled."""
    bound = -(-(_WINDOW - 1 + _CHUNK) // PAGE) + 1
    rows = []
    for tokens in (8_192, 32_768 if quick else 131_072):
        held = _prefill(tokens, _CHUNK)[1]
        rows.append(
            plain_row(
                f"groups.window.{tokens}",
                f"window pages held of {tokens:,} tokens in chunks of {_CHUNK:,}, at most",
                max(held),
                "pages",
                limit=bound,
                limit_name="one window and chunk",
                note=f"last chunk {held[-1]}",
            )
        )
    return rows


def measure(options: Namespace) -> list[Row]:
    """Run all measurements."""
    quick = options.quick
    return [
        *decode(64 if quick else 1_024),
        *match(),
        *evict(quick),
        *holes(16 if quick else 64),
        *windows(16 if quick else 64),
        *give_back(),
        *window_pages(quick),
    ]


if __name__ == "__main__":
    raise SystemExit(main(measure, __doc__))
