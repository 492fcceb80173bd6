# SPDX-License-Identifier: Apache-2.0
"""Serves tiny random models with a real vLLM on this CPU: on its own manager, and on kvcore's.

    python tests/integrations/run_vllm_engine.py             # the quick runs
    python tests/integrations/run_vllm_engine.py --slow      # all of them
    python tests/integrations/run_vllm_engine.py -k mistral  # runs whose names contain a text
    python tests/integrations/run_vllm_engine.py --list

Both engines of a run have the same weights and get the same requests. A check passes if their
tokens are equal, each engine has the expected manager, and no block is in use at the end. vLLM is
installed once into ``--folder``, in a separate environment.
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

import captured_events  # noqa: E402
import vllm_engine_clients as clients  # noqa: E402
import vllm_engine_install as installing  # noqa: E402
import vllm_engine_scenes as scenes  # noqa: E402
from engine_pairs import EnginePair, served  # noqa: E402

ALL = ("shared", "turns", "several", "salts", "logprobs", "aborts", "reset")
MANAGERS = {"0": "KVCacheManager", "1": "KVCoreManager"}
SECONDS = 600  # of one engine


@dataclass(frozen=True)
class Run:
    """A model, its settings, and the scenes."""

    name: str
    model: str
    blocks: int
    quick: bool = False
    version: str = installing.VERSIONS[0]
    scenes: tuple[str, ...] = ALL  # empty: clients of a server
    prompts: int = 64
    processes: bool = False  # the engine in a separate process, with workers
    preempts: bool = True  # True: blocks are few, so requests are preempted
    has_whole_events: bool = True  # a trace of the server's events has each prompt
    engine: dict[str, Any] = field(default_factory=dict)

    def arguments(self) -> dict[str, Any]:
        """Return the arguments of its engine."""
        return {
            "dtype": "float32",
            "enforce_eager": True,
            "max_model_len": 1024,
            "block_size": 32,
            "num_gpu_blocks_override": self.blocks,
            "max_num_seqs": 32,
            "max_num_batched_tokens": 256,
        } | self.engine


WORKERS = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
OLD = installing.VERSIONS[1]
RUNS = [
    Run("llama", "llama", 80, quick=True),
    Run("gemma3", "gemma3", 200, quick=True),
    Run("gemma3 server", "gemma3", 200, scenes=(), quick=True, preempts=False),
    Run("gemma3 of 0.32", "gemma3", 200, version=OLD),
    Run("qwen3", "qwen3", 80),
    Run("mistral", "mistral", 48),
    Run("deepseek", "deepseek", 80),
    Run("llama processes", "llama", 80, processes=True, engine=WORKERS),
    Run("mistral processes", "mistral", 48, processes=True),
    # All layers have a window, so vLLM's events lack the first blocks of its prompts.
    Run("mistral server", "mistral", 60, scenes=(), preempts=False, has_whole_events=False),
    Run("llama server", "llama", 80, scenes=(), preempts=False),
]


class Bench(EnginePair):
    """The state that all runs share: the installed vLLM, the models, the results."""

    def __init__(self, folder: Path, sources: Path, chosen: list[Run]) -> None:
        super().__init__()
        self.folder = folder
        self.python = installing.environment(folder)
        installing.link_kvcore(self.python)
        self.sites = {
            version: installing.site_of(folder, sources, version, self.python)
            for version in {run.version for run in chosen}
        }
        self.make_models({run.model for run in chosen})

    def environment(self, run: Run, on_kvcore: str, probe: Path) -> dict[str, str]:
        """Return the environment of an engine."""
        path = os.pathsep.join([str(self.sites[run.version]), str(ENGINES)])
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("VLLM", "KVCORE"))}
        return kept | {
            "HF_HUB_OFFLINE": "1",
            "KVCORE_PROBE": str(probe),
            "KVCORE_VLLM": on_kvcore,
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": path,
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "1" if run.processes or not run.scenes else "0",
            "VLLM_LOGGING_LEVEL": "INFO",
            "VLLM_NO_USAGE_STATS": "1",
        }

    def make_models(self, names: set[str]) -> None:
        """Make the missing models."""
        folder = self.folder / "models"
        missing = sorted(name for name in names if not (folder / name / "config.json").exists())
        if missing:
            script = ENGINES / "vllm_engine_models.py"
            subprocess.run([self.python, script, folder, *missing], check=True,
                           stderr=subprocess.DEVNULL)  # fmt: skip

    def serve(self, run: Run, on_kvcore: str) -> dict[str, Any]:
        """Serve the requests of a run; return the answers, and the engine's state after it."""
        probe = self.folder / f"{run.name.replace(' ', '-')}-{on_kvcore}.probe"
        probe.unlink(missing_ok=True)
        log = probe.with_suffix(".log")
        environment = self.environment(run, on_kvcore, probe)
        model = self.folder / "models" / run.model
        start = time.monotonic()
        if run.scenes:
            result = self.offline(run, model, environment, log)
        else:
            result = self.online(run, model, environment, log, probe)
        seen = json.loads(probe.read_text().splitlines()[-1])
        return {**result, **seen, "seconds": time.monotonic() - start}

    def offline(
        self, run: Run, model: Path, environment: dict[str, str], log: Path
    ) -> dict[str, Any]:
        """Serve scenes with vLLM's LLM class."""
        settings = {"model": str(model), "engine": run.arguments(), "scenes": run.scenes,
                    "prompts": run.prompts}  # fmt: skip
        script = ENGINES / "vllm_engine_scenes.py"
        return served([self.python, script, json.dumps(settings)], environment, log, SECONDS)

    def online(
        self, run: Run, model: Path, environment: dict[str, str], log: Path, probe: Path
    ) -> dict[str, Any]:
        """Serve clients that stream; some hang up. Capture a trace of their prompts."""
        wanted = scenes.shared_prompts(6, run.prompts)
        wanted = [(tokens, count + 4) for tokens, count in wanted]
        gone = set(range(0, len(wanted), 7))
        with (
            captured_events.events_of_server() as events,
            clients.server(
                self.python,
                model,
                run.arguments() | {"kv_events_config": events.config()},
                environment,
                log,
            ) as port,
        ):
            answers = clients.serve_all(port, wanted, gone)
            # The requests of the last clients are aborted a moment after their connections end.
            end = time.monotonic() + 20
            while time.monotonic() < end:
                lines = probe.read_text().splitlines() if probe.exists() else []
                if lines and json.loads(lines[-1])["in_use"] == 0:
                    break
                time.sleep(0.2)
            problems = events.problems(
                [prompt for prompt, _ in wanted], run.arguments()["block_size"]
            )
        return {"answers": {"clients": answers}, "cached": None, "problems": problems}

    def compare(self, run: Run) -> None:
        """Serve a run on both managers at the same time, and check all conditions."""
        results = self.serve_both(run.name, [*MANAGERS], partial(self.serve, run))
        if not results:
            return
        own, ours = results
        for on, result in zip(MANAGERS, results, strict=True):
            side = f"KVCORE_VLLM={on}"
            self.check(run.name, f"manager, {side}", result["manager"] == MANAGERS[on],
                       result["manager"])  # fmt: skip
            self.check(run.name, f"no block is in use at the end, {side}", result["in_use"] == 0,
                       f"{result['in_use']} are")  # fmt: skip
            self.check(run.name, f"the scenes, {side}", not result["problems"],
                       "; ".join(result["problems"]))  # fmt: skip
            if run.preempts:
                self.check(
                    run.name, f"requests are preempted, {side}", result["preempted"] > 0, "none"
                )
        self.check_tokens(run.name, own, ours)
        hits = "" if own["cached"] is None else (
            f", cached tokens {own['cached']:,} on vLLM's manager and {ours['cached']:,}"
        )  # fmt: skip
        print(f"{run.name}: {own['seconds']:.0f} and {ours['seconds']:.0f} s, preempted "
              f"{own['preempted']} and {ours['preempted']} times{hits}", flush=True)  # fmt: skip


def main() -> int:
    """Run, compare and print; return the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--folder", type=Path, default=Path("build/vllm-engine"))
    parser.add_argument("--sources", type=Path, default=Path("build/vllm"), help="of vLLM 0.33")
    parser.add_argument("--slow", action="store_true", help="all runs")
    parser.add_argument("-k", dest="select", help="runs whose names contain this text")
    parser.add_argument("--list", action="store_true", help="print the names of the runs")
    options = parser.parse_args()
    chosen = [run for run in RUNS if run.quick or options.slow or options.select]
    chosen = [run for run in chosen if (options.select or "") in run.name]
    if options.list:
        print("\n".join(f"{run.name}{' (quick)' if run.quick else ''}" for run in RUNS))
        return 0
    if not chosen:
        sys.exit(f"no run has {options.select!r} in its name; --list prints the names")
    start = time.monotonic()
    bench = Bench(options.folder.resolve(), options.sources.resolve(), chosen)
    print(f"vLLM is installed after {time.monotonic() - start:.0f} s", flush=True)
    for run in chosen:
        bench.compare(run)
    print(f"{time.monotonic() - start:.0f} s")
    print(f"{bench.passed} passed, {bench.failed} failed")
    return 1 if bench.failed or not bench.passed else 0


if __name__ == "__main__":
    sys.exit(main())
