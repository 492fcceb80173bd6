# SPDX-License-Identifier: Apache-2.0
"""Compare the control path of two commits.

``python bench/against_commit.py [BASE] [--commit HEAD] [--rounds 4] [--only ROW ...] [--json OUT]``
builds both commits without CUDA in ``build/against/``, which takes minutes the first time. The base
is 80127b6 unless you name one. Each round then runs the rows in three fresh processes: on the
commit, on the base, and on the commit again. A row's figure is its best over all rounds. The column
"A/A" divides the second run of the commit by the first: it shows how far apart two runs of the same
code are.

The rows use only names that kvcore has had since commit 80127b6.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from time import perf_counter_ns
from typing import Any

import numpy as np

from harness import PACE, best_pace, sample_calls, sample_parts, time_loop, undisturbed

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
FOLDER = ROOT / "build" / "against"
PAGE = 16
ROWS = 256
_NEXT_TOKEN = 7


# ---- the rows: each returns us per call ----------------------------------------------------------
def _manager(pages: int) -> Any:
    import kvcore

    params = kvcore.KVCacheParams(
        dtype="bfloat16",
        n_kv_heads=8,
        head_dim=128,
        num_layers=32,
        page_size=PAGE,
        enable_prefix_caching=True,
    )
    return kvcore.PagedKVCacheManager(
        params, max_batch_size=ROWS, max_seq_len=1 << 20, num_pages=pages, blocks=None
    )


def _prompts(count: int, length: int, seed: int) -> Any:
    """Return int32 [count, length]; no two prompts begin with the same token."""
    rng = np.random.default_rng(seed)
    rows = rng.integers(0, 128_256, (count, length), dtype=np.int32)
    rows[:, 0] = rng.permutation(1 << 22)[:count] + seed * (1 << 22)
    return rows


def _requests(rows: Any, tag: str) -> list[tuple[str, Any, list[Any]]]:
    import kvcore

    contexts = [
        (f"{tag}-{i}", kvcore.TextGenerationContext(f"{tag}-{i}", row))
        for i, row in enumerate(rows)
    ]
    return [(name, context, [context]) for name, context in contexts]


def _admit(mgr: Any, items: Any) -> None:
    claim, reserve, fetch, step, release = (
        mgr.claim,
        mgr.reserve,
        mgr.fetch,
        mgr.step,
        mgr.release,
    )
    for name, context, batch in items:
        claim(name)
        reserve(context)
        fetch(batch)
        context.update(_NEXT_TOKEN)
        step(batch)
        release(name)


def _fill(mgr: Any, length: int, seed: int) -> None:
    """Fill the pool with cached prompts, and a tenth more, so that later requests evict."""
    total = mgr.total_num_pages * 11 // 10 // (length // PAGE) + 1
    share = max(1, (1 << 20) // length)
    for start in range(0, total, share):
        rows = _prompts(min(share, total - start), length, seed)
        rows[:, 0] = np.arange(start, start + len(rows)) + seed * (1 << 22)
        _admit(mgr, _requests(rows, f"fill-{start}"))


def _in_parts(rows: Any, tag: str) -> Iterator[list[tuple[str, Any, list[Any]]]]:
    size = max(1, min(200, (1 << 16) // rows.shape[1]))
    for start in range(0, len(rows), size):
        yield _requests(rows[start : start + size], f"{tag}-{start}")


def match_hot(tokens: int) -> list[float]:
    """Match one cached prompt again and again."""
    mgr = _manager(4 * tokens // PAGE + 1024)
    rows = _prompts(4, tokens, 3)
    _admit(mgr, _requests(rows, "cached"))
    query = rows[2].copy()
    assert mgr.match_prefix(query) == tokens
    size = max(20, min(2000, (1 << 21) // tokens))
    return sample_calls(mgr.match_prefix, [query] * (41 * size), size)


def match_distinct(count: int) -> list[float]:
    """Match each of many cached prompts of 64 tokens once, in random order."""
    mgr = _manager(count * 4 + 1024)
    rows = _prompts(count, 64, 5)
    for part in _in_parts(rows, "cached"):
        _admit(mgr, part)
    order = np.random.default_rng(1).permutation(count)
    return sample_calls(mgr.match_prefix, [rows[i] for i in order], 500)


def take_and_return() -> list[float]:
    """Claim, reserve and release 256 pages in a pool that has them free."""
    mgr = _manager(1 << 19)
    claim, reserve, release = mgr.claim, mgr.reserve, mgr.release

    def body(items: Any) -> None:
        for name, context, _ in items:
            claim(name)
            reserve(context)
            release(name)

    return sample_parts(body, _in_parts(_prompts(3000, 256 * PAGE, 3), "fresh"))


def admit(tokens: int, count: int) -> list[float]:
    """Run an unseen prompt from claim to release in a full pool."""
    mgr = _manager(65_536)
    _fill(mgr, tokens, 7)
    return sample_parts(
        lambda items: _admit(mgr, items), _in_parts(_prompts(count, tokens, 11), "new")
    )


def evict(leaves: int) -> list[float]:
    """Claim, reserve 128 tokens, which evicts 8 pages, step and release."""
    mgr = _manager(leaves * 8)
    _fill(mgr, 128, 13)
    claim, reserve, step, release = mgr.claim, mgr.reserve, mgr.step, mgr.release

    def body(items: Any) -> None:
        for name, context, batch in items:
            claim(name)
            reserve(context)
            context.update(_NEXT_TOKEN)
            step(batch)
            release(name)

    return sample_parts(body, _in_parts(_prompts(10_000, 128, 17), "new"))


def _time_once(body: Callable[[Any], None], items: Any) -> list[float]:
    return [time_loop(body, items)]


def reserve_4096() -> list[float]:
    """Reserve 4,096 unseen tokens in a pool full of cached pages."""
    mgr = _manager(65_536)
    _fill(mgr, 4096, 19)
    samples: list[float] = []
    rows = _prompts(20 * 32, 4096, 23)
    for i in range(20):
        items = _requests(rows[32 * i : 32 * i + 32], f"r{i}")
        for name, _, _ in items:
            mgr.claim(name)
        contexts = [context for _, context, _ in items]

        def body(batch: Any) -> None:
            for context in batch:
                mgr.reserve(context)

        samples += undisturbed([partial(_time_once, body, contexts)])
        for name, context, batch in items:
            context.update(_NEXT_TOKEN)
            mgr.step(batch)
            mgr.release(name)
    return samples


def decode(context: int, *, replaces: bool) -> list[float]:
    """Decode a batch of 256 requests; optionally replace one request per step."""
    import kvcore

    steps = 256
    held = ROWS * (context // PAGE + steps // PAGE + 4)
    mgr = _manager(held + held // 4)
    _fill(mgr, 128, 29)
    rows = _prompts(ROWS, context + PAGE, 31)
    names = [f"start-{i}" for i in range(ROWS)]
    batch = [
        kvcore.TextGenerationContext(name, row[: context + i % PAGE])
        for i, (name, row) in enumerate(zip(names, rows, strict=True))
    ]
    for name, item in zip(names, batch, strict=True):
        mgr.claim(name)
        mgr.reserve(item)
    mgr.fetch(batch)
    kvcore.update_batch(batch, rows[:, 0].copy())
    mgr.step(batch)
    fresh = iter(_requests(_prompts(steps, 512, 37), "fresh")) if replaces else None
    tokens = list(np.random.default_rng(2).integers(0, 128_256, (steps, ROWS), dtype=np.int32))
    spent: list[float] = []
    inputs = mgr.fetch(batch)

    def timed(part: list[Any]) -> list[float]:
        nonlocal inputs
        found: list[float] = []
        for row in part:
            new = next(fresh) if fresh else None
            hole = 37 * len(spent + found) % ROWS
            start = perf_counter_ns()
            if new:
                mgr.release(names[hole])
                mgr.claim(new[0])
                batch[hole] = new[1]
            inputs = mgr.fetch(batch)
            kvcore.update_batch(batch, row)
            mgr.step(batch)
            found.append((perf_counter_ns() - start) / 1e3)
            if new:
                names[hole] = new[0]
        return found[1:]

    for i in range(0, steps, 32):
        spent += undisturbed([partial(timed, tokens[i : i + 32])])
    return spent


MEASURES: dict[str, Callable[[], list[float]]] = {
    "match, hot, 64 tokens": lambda: match_hot(64),
    "match, hot, 256 tokens": lambda: match_hot(256),
    "match, hot, 8,192 tokens": lambda: match_hot(8192),
    "match 64 in 10,000 prompts": lambda: match_distinct(10_000),
    "claim + reserve + release, 256 pages": take_and_return,
    "admit 64 tokens": lambda: admit(64, 10_000),
    "admit 2,048 tokens": lambda: admit(2048, 2_000),
    "reserve 4,096 tokens": reserve_4096,
    "evict 8 pages, 1,000 leaves": lambda: evict(1_000),
    "evict 8 pages, 20,000 leaves": lambda: evict(20_000),
    "decode 256 x 512": lambda: decode(512, replaces=False),
    "decode 256 x 8,192": lambda: decode(8192, replaces=False),
    "decode 256 x 8,192, one replaced": lambda: decode(8192, replaces=True),
}


# ---- the two builds ------------------------------------------------------------------------------
def build(commit: str) -> Path:
    """Return the folder with the package of a commit; build the package if it is missing."""
    name = subprocess.run(
        ["git", "rev-parse", "--verify", f"{commit}^{{commit}}"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    ).stdout.strip()
    site = FOLDER / name / "site"
    if (site / "kvcore").is_dir():
        return site
    with tempfile.TemporaryDirectory() as folder:
        archive = subprocess.Popen(["git", "archive", name], cwd=ROOT, stdout=subprocess.PIPE)
        subprocess.run(["tar", "-x", "-C", folder], stdin=archive.stdout, check=True)
        if archive.wait() != 0:
            raise SystemExit(f"git archive {name} failed")
        made = FOLDER / name / "made"
        install = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(made)]
        subprocess.run([*install, "-C", "cmake.define.KVCORE_CUDA=OFF", folder], check=True)
        made.rename(site)
    return site


def run(row: str, site: Path) -> float:
    """Measure a row in a fresh process on the package in ``site``, us.

    -S disables Python's own search for installed packages, which would find an editable kvcore
    before the package in ``site``.
    """
    environment = dict(os.environ, PYTHONPATH=os.pathsep.join([str(site), *sys.path]))
    command = [sys.executable, "-S", str(Path(__file__).resolve()), "--measure", row]
    found = subprocess.run(
        command, env=environment, check=True, stdout=subprocess.PIPE, text=True
    ).stdout
    return float(found)


def compare(base: str, commit: str, rows: list[str], rounds: int) -> list[dict[str, Any]]:
    """Return for each row the best us of the base and of both runs of the commit."""
    os.environ[PACE] = str(best_pace())
    old, new = build(base), build(commit)
    found: dict[str, list[list[float]]] = {row: [[], [], []] for row in rows}
    for _ in range(rounds):
        for row in rows:
            for samples, site in zip(found[row], (new, old, new), strict=True):
                samples.append(run(row, site))
    table = []
    for row in rows:
        first, other, second = map(min, found[row])
        best = min(first, second)
        table.append(
            {
                "row": row,
                "commit": best,
                "base": other,
                "ratio": best / other,
                "same": second / first,
            }
        )
    return table


def main() -> int:
    """Measure one row for a parent process, or compare two commits."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("base", nargs="?", default="80127b6")
    parser.add_argument("--commit", default="HEAD")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--only", nargs="+", metavar="ROW", choices=MEASURES, default=[*MEASURES])
    parser.add_argument("--json", type=Path, help="write the table to this file")
    parser.add_argument("--measure", choices=MEASURES, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        print(min(MEASURES[options.measure]()))
        return 0
    table = compare(options.base, options.commit, options.only, options.rounds)
    print(f"{'row':<36} {options.commit:>10} {options.base:>10} {'ratio':>7} {'A/A':>7}   us, best")
    for each in table:
        print(
            f"{each['row']:<36} {each['commit']:>10.3f} {each['base']:>10.3f} "
            f"{each['ratio']:>7.2f} {each['same']:>7.2f}"
        )
    if options.json:
        stored = {"base": options.base, "commit": options.commit, "rows": table}
        options.json.write_text(json.dumps(stored, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
