# SPDX-License-Identifier: Apache-2.0
"""Compares the prefix cache of SGLang 0.5.23 with kvcore's replacement, call by call.

Usage: ``python tests/integrations/run_sglang.py [--wheel PATH] [--cache FOLDER] [--seeds N]
[--steps N] [--json FILE]``. Without ``--wheel`` the wheel comes from the folder, or from the
package index. Both caches get the same fixed and random calls over SGLang's own allocators. After
each call the program compares all answers, sizes, events and locks, and the trees page by page. The
exit code is 1 if `EXPECTED` does not name a difference.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "engines"))

import sglang_sources

#: Allowed differences, with the reason. A check below shows each difference.
EXPECTED = {
    "evict: pages, not leaves": "SGLang evicts whole leaves, so it can evict more than the caller "
    "asks for; kvcore evicts pages from the tail on. In the random calls kvcore evicts the number "
    "of tokens that SGLang evicted",
    "order within a removal": "events list the pages of one eviction tail first, not by leaves",
    "_match_prefix_helper": "in SGLang a match that ends inside a node counts as a use of the "
    "whole node; in kvcore only of the matched pages. Compared without this rule",
    "_split_node": "in SGLang the split-off front part of a node counts as cached just now (fifo); "
    "in kvcore both halves keep their age. Compared without this rule",
    "release without a checkpoint": "in kvcore the release of a prefix counts as a use; the random "
    "calls touch the prefix in both caches",
    "priority beyond 50": "kvcore clamps priorities to -50 .. 50",
    "lock": "the receipt is the handle itself, not a TreeLock",
    "insert without a value": "SGLang uses the tokens as slots, for its own tests",
    "reset": "kvcore refuses a lock from before a reset; SGLang walks off the tree",
    "checkpoint behind the hit": "of fewer tokens than the request has matched (no scheduler does "
    "it): SGLang then frees cached pages, kvcore does nothing",
    "mru, filo, tlru": "policies that kvcore does not have: refused",
    "all_values_flatten": "for an empty tree kvcore returns an empty tensor, SGLang raises",
    "root_node.children": "a node is a handle: `tree.runs()` walks a tree",
}


def scenes(seeds: int) -> Iterator[Any]:
    """Return random runs without evictions, and with evictions but without SGLang's two rules."""
    from sglang_pair import Scene

    for seed in range(seeds):
        for page in (1, 4, 16):
            small: dict[str, Any] = {"page": page, "seed": seed, "slots": 48 * page}
            for eagle in (False, True):
                yield Scene(page=page, eagle=eagle, names=True, slots=4096 * page, seed=seed)
                for policy in ("lru", "lfu", "slru", "fifo", "priority"):
                    yield Scene(**small, policy=policy, eagle=eagle, ruled=False)
                yield Scene(**small, names=True, events=True, eagle=eagle, ruled=False)
                yield Scene(page=page, eagle=eagle, windows=True, slots=4096 * page, seed=seed)
                for policy in ("lru", "slru", "priority"):
                    yield Scene(
                        **small, policy=policy, eagle=eagle, windows=True, names=True, ruled=False
                    )


def random_calls(seeds: int, steps: int) -> Iterator[tuple[str, Callable[[], None]]]:
    """Return one check per scene."""
    from sglang_pair import Pair

    def run(scene: Any) -> None:
        pair = Pair(scene)
        for _ in range(steps):
            pair.step()

    for scene in scenes(seeds):
        yield f"random calls: {replace(scene, seed=0)}", partial(run, scene)


def run_check(check: Callable[[], None]) -> str | None:
    """Return None, or the cause of a failure."""
    try:
        check()
    except Exception as error:  # noqa: BLE001  any of them is a cause
        last = traceback.extract_tb(error.__traceback__)[-1]
        return f"{type(error).__name__} in {Path(last.filename).name}:{last.lineno}: {error}"[:1500]
    return None


def main() -> int:
    """Run all checks and print the numbers of passed and failed checks."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--wheel", type=Path, help="the wheel of SGLang")
    parser.add_argument("--cache", type=Path, default=Path(tempfile.gettempdir()) / "kvcore-sglang")
    parser.add_argument("--seeds", type=int, default=4, help="random runs of each kind")
    parser.add_argument("--steps", type=int, default=150, help="calls of a random run")
    parser.add_argument("--json", type=Path, help="write the checks to this file")
    options = parser.parse_args()
    start = perf_counter()
    options.cache.mkdir(parents=True, exist_ok=True)
    wheel = options.wheel or sglang_sources.fetch(options.cache)
    sglang_sources.open_sources(wheel, options.cache)
    for module in ("sglang_checks", "sglang_failures", "sglang_retries", "sglang_traffic"):
        checks = importlib.import_module(module).CHECKS  # one list for all modules

    results: dict[str, list[str | None]] = {}
    for name, check in (*checks.items(), *random_calls(options.seeds, options.steps)):
        results.setdefault(name, []).append(run_check(check))
    failed = 0
    for name, causes in results.items():
        bad = [cause for cause in causes if cause]
        failed += len(bad)
        print(f"{len(causes) - len(bad):4} passed {len(bad):4} failed  {name}")
        for cause in dict.fromkeys(bad):
            print(f"       {cause}")
    print("expected differences:")
    for name, reason in EXPECTED.items():
        print(f"  {name}: {reason}")
    passed = sum(map(len, results.values())) - failed
    print(f"{passed} passed, {failed} failed, {len(EXPECTED)} differences expected", end=", ")
    print(f"{perf_counter() - start:.0f} s")
    if options.json:
        options.json.write_text(json.dumps(results))
    return int(failed > 0)


if __name__ == "__main__":
    raise SystemExit(main())
