# SPDX-License-Identifier: Apache-2.0
"""Serves a tiny random Llama with a real SGLang on this CPU: on its own cache and on kvcore's.

    python tests/integrations/run_sglang_engine.py               # all runs
    python tests/integrations/run_sglang_engine.py -k overlap    # runs whose names contain a text
    python tests/integrations/run_sglang_engine.py --list

Both engines of a run have the same weights and get the same requests: 48 prompts with shared
prefixes in chunks, second turns, long answers, n = 3, salts, clients that disconnect, a flush, and
the prompts again. The slots are few, so requests are retracted and pages evicted. A check passes if
the tokens are equal, each engine has the expected cache, no slot is in use at the end, and kvcore
finds .95 or more of the tokens that SGLang finds cached. SGLang is installed once into
``--folder``, in a separate environment.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

ENGINES = Path(__file__).resolve().parents[1] / "engines"
sys.path.insert(0, str(ENGINES))

import sglang_engine_install as installing  # noqa: E402
from engine_pairs import EnginePair, served  # noqa: E402

#: The caches of a run, each with the options of SGLang that select it.
CACHES: dict[str, dict[str, Any]] = {
    "UnifiedRadixCache": {},
    "KVCoreRadixCache": {"radix_cache_backend": "kvcore"},
}
LEAST_HITS = 0.95  # of the tokens that SGLang finds cached
SECONDS = 900  # of one engine


@dataclass(frozen=True)
class Run:
    """Options of SGLang."""

    name: str
    prompts: int = 48
    options: dict[str, Any] = field(default_factory=dict)

    def arguments(self, model: Path) -> dict[str, Any]:
        """Return the arguments of its engine."""
        return {
            "model_path": str(model),
            "attention_backend": "torch_native",
            "chunked_prefill_size": 256,
            "context_length": 1024,
            "device": "cpu",
            "disable_overlap_schedule": True,
            "dtype": "float32",
            "grammar_backend": "none",
            "log_level": "info",
            "max_running_requests": 16,
            "max_total_tokens": 2048,
            "mem_fraction_static": 0.1,
            "page_size": 16,
            "sampling_backend": "pytorch",
            "schedule_conservativeness": 0.05,  # admits more requests than fit
            "skip_server_warmup": True,
        } | self.options


RUNS = [
    Run("llama"),
    Run("overlap", options={"disable_overlap_schedule": False, "page_size": 32}),
    Run("slots", options={"page_size": 1, "schedule_policy": "lpm"}),
    Run("lfu", options={"radix_eviction_policy": "lfu", "schedule_policy": "dfs-weight"}),
]


class Bench(EnginePair):
    """The state that all runs share: the installed SGLang, the model, the results."""

    def __init__(self, folder: Path, wheels: Path) -> None:
        super().__init__()
        self.folder = folder
        self.python, self.site = installing.install(folder, wheels)
        self.model = folder / "models" / "llama"
        if not (self.model / "config.json").exists():
            script = ENGINES / "vllm_engine_models.py"
            subprocess.run([self.python, script, self.model.parent, "llama"], check=True,
                           stderr=subprocess.DEVNULL)  # fmt: skip

    def serve(self, run: Run, cache: str) -> dict[str, Any]:
        """Serve the requests of a run; return the answers, and the state of the cache after it."""
        probe = self.folder / f"{run.name}-{cache}.probe"
        probe.unlink(missing_ok=True)
        log = probe.with_suffix(".log")
        settings = {"engine": run.arguments(self.model) | CACHES[cache], "prompts": run.prompts}
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("SGLANG", "KVCORE"))}
        environment = kept | {
            "HF_HUB_OFFLINE": "1",
            "KVCORE_PROBE": str(probe),
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join([str(self.site), str(ENGINES)]),
            "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1",
            "SGLANG_USE_CPU_ENGINE": "1",
            "TORCH_COMPILE_DISABLE": "1",
        }
        start = time.monotonic()
        script = ENGINES / "sglang_engine_scenes.py"
        result = served([self.python, script, json.dumps(settings)], environment, log, SECONDS)
        seen = json.loads(probe.read_text().splitlines()[-1])
        return {**result, **seen, "seconds": time.monotonic() - start}

    def compare(self, run: Run) -> None:
        """Serve a run on both caches at the same time, and check all conditions."""
        results = self.serve_both(run.name, [*CACHES], partial(self.serve, run))
        if not results:
            return
        for cache, result in zip(CACHES, results, strict=True):
            self.check_one(run, cache, result)
        own, ours = results
        self.check_tokens(run.name, own, ours)
        hits, found = sum(own["cached"].values()), sum(ours["cached"].values())
        self.check(run.name, f"kvcore finds {LEAST_HITS} of the cached tokens",
                   found >= LEAST_HITS * hits, f"{ours['cached']} of {own['cached']}")  # fmt: skip
        tokens = sum(len(each) for told in own["answers"].values() for each in told.values())
        print(f"{run.name}: {own['seconds']:.0f} and {ours['seconds']:.0f} s, {tokens:,} tokens, "
              f"cached tokens {hits:,} on SGLang's cache and {found:,} on kvcore's, "
              f"retracted {own['retracted']} and {ours['retracted']} requests, "
              f"evicted {own['evicted']:,} and {ours['evicted']:,} tokens", flush=True)  # fmt: skip

    def check_one(self, run: Run, cache: str, result: dict[str, Any]) -> None:
        """Check a single engine: its cache, its slots, the problems of its scenes."""
        self.check(run.name, f"cache, {cache}", result["cache"] == cache, result["cache"])
        left = result["available"] + result["evictable"]
        locked = result["protected"]
        self.check(run.name, f"no slot is in use at the end, {cache}",
                   left == result["total"] and locked == 0,
                   f"{left} of {result['total']} may go, {locked} are locked")  # fmt: skip
        self.check(run.name, f"the scenes, {cache}", not result["problems"],
                   "; ".join(result["problems"]))  # fmt: skip
        for what in ("retracted", "evicted"):
            self.check(run.name, f"something is {what}, {cache}", result[what] > 0, "nothing")


def main() -> int:
    """Run, compare and print; return the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--folder", type=Path, default=Path("build/sglang-engine"))
    parser.add_argument("--cache", type=Path, help="folder of SGLang's wheel; default: --folder")
    parser.add_argument("-k", dest="select", default="", help="runs whose names contain this text")
    parser.add_argument("--list", action="store_true", help="print the names of the runs")
    options = parser.parse_args()
    chosen = [run for run in RUNS if options.select in run.name]
    if options.list:
        print("\n".join(run.name for run in RUNS))
        return 0
    if not chosen:
        sys.exit(f"no run has {options.select!r} in its name; --list prints the names")
    start = time.monotonic()
    bench = Bench(options.folder.resolve(), (options.cache or options.folder).resolve())
    print(f"SGLang is installed after {time.monotonic() - start:.0f} s", flush=True)
    for run in chosen:
        bench.compare(run)
    print(f"{time.monotonic() - start:.0f} s")
    print(f"{bench.passed} passed, {bench.failed} failed")
    return 1 if bench.failed or not bench.passed else 0


if __name__ == "__main__":
    sys.exit(main())
