# SPDX-License-Identifier: Apache-2.0
"""Runs vLLM 0.33's own tests of its scheduler and KV cache manager on kvcore.

    python tests/integrations/run_vllm.py                    # on vLLM's manager, then on kvcore
    python tests/integrations/run_vllm.py --part connectors  # the tests of its KV connectors
    python tests/integrations/run_vllm.py --part ours        # kvcore's own tests of the adapter
    python tests/integrations/run_vllm.py --recheck          # on kvcore; failed tests also on
                                                             # vLLM's; fewer checks of laws

vLLM's sources come from the package index (or ``--source``). ``--libraries FOLDER`` installs the
imports of its scheduler (torch and transformers must be installed); stubs replace the packages that
the scheduler never calls. A failed test is accepted if it also fails on vLLM's own manager, or if
``tests/engines/vllm_internals.json`` lists it with its line that reads an internal which kvcore
lacks. Any other failure is an error of the adapter: the exit code is 1.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ENGINES = Path(__file__).resolve().parents[1] / "engines"
sys.path.insert(0, str(ENGINES))

import vllm_models  # noqa: E402
import vllm_sources  # noqa: E402

#: Test files that make a manager, or a scheduler with a manager.
PARTS = {
    "core": [
        "test_prefix_caching.py",
        "test_scheduler.py",
        "test_async_scheduler.py",
        "test_deferred_block_free.py",
        "test_kv_sharing.py",
        "test_mamba_align_chunk_split.py",
        "test_prefix_replay.py",
        "test_priority_preemption_bug.py",
        "test_priority_scheduler_random.py",
        "test_single_type_kv_cache_manager.py",
        "test_swa_inflight_window_free.py",
        "test_worker_slot_overflow.py",
    ],
    "connectors": [
        "kv_connector/unit/offloading_connector/test_scheduler.py",
        "kv_connector/unit/test_bidirectional_kv_transfer.py",
        "kv_connector/unit/test_cache_pollution_prevention.py",
        "kv_connector/unit/test_config.py",
        "kv_connector/unit/test_decode_bench_connector.py",
        "kv_connector/unit/test_error_propagation.py",
        "kv_connector/unit/test_hisparse_connector.py",
        "kv_connector/unit/test_invalid_blocks_correctness.py",
        "kv_connector/unit/test_kv_connector_lifecycle.py",
        "kv_connector/unit/test_kv_load_failure_recovery.py",
        "kv_connector/unit/test_lmcache_connector.py",
        "kv_connector/unit/test_mooncake_store_connector.py",
        "kv_connector/unit/test_mooncake_store_scheduler.py",
        "kv_connector/unit/test_moriio_hma_scheduler.py",
        "kv_connector/unit/test_multi_connector.py",
        "kv_connector/unit/test_nixl_connector.py",
        "kv_connector/unit/test_nixl_connector_hma.py",
        "kv_connector/unit/test_nixl_simple_cpu_offload.py",
        "kv_connector/unit/test_remote_decode_lifecycle.py",
        "kv_connector/unit/test_remote_prefill_lifecycle.py",
        "kv_connector/unit/test_scheduler_kv_connector_override.py",
        "simple_kv_offload/test_scheduler.py",
    ],
    "ours": [
        "vllm_checks_connectors.py",
        "vllm_checks_core.py",
        "vllm_checks_engine.py",
        "vllm_checks_faults.py",
        "vllm_checks_offload_slots.py",
        "vllm_checks_offloading.py",
        "vllm_checks_pool.py",
        "vllm_checks_source.py",
    ],
}
FOLDERS = {
    "core": "tests/v1/core",
    "connectors": "tests/v1",
    "ours": str(ENGINES),
}
#: vLLM's fixtures for its connector tests; the fixtures in parent folders need a GPU.
CONFTESTS = (
    "tests.v1.kv_connector.unit.conftest",
    "tests.v1.kv_connector.unit.offloading_connector.conftest",
)
#: The imports of vLLM's scheduler, except torch, transformers and packages for kvcore's own tests.
LIBRARIES = [
    "blake3", "cachetools", "cloudpickle", "einops", "fastapi", "ijson", "jsonschema", "lark",
    "openai", "opentelemetry-api", "opentelemetry-sdk", "partial-json-parser", "pillow", "psutil",
    "py-cpuinfo", "pybase64", "python-json-logger", "sentencepiece", "setproctitle", "tiktoken",
    "watchfiles",
]  # fmt: skip
Result = dict[str, Any]


def run(source: Path, part: str, tests: list[str], *, on_kvcore: bool, jobs: int) -> list[Result]:
    """Run vLLM's tests in a separate process; return a result for each."""
    with tempfile.TemporaryDirectory() as folder:
        vllm_models.write_hub(Path(folder) / "hub")
        results = Path(folder) / "results"
        results.touch()
        environment = os.environ | {
            "HF_HUB_CACHE": f"{folder}/hub",
            "HF_HUB_OFFLINE": "1",
            "KVCORE_RESULTS": str(results),
            "KVCORE_VLLM": "1" if on_kvcore else "0",
            "PYTHONPATH": os.pathsep.join(
                [str(source), str(ENGINES), os.environ.get("PYTHONPATH", "")]
            ),
            "VLLM_LOGGING_LEVEL": "WARNING",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_TARGET_DEVICE": "cpu",
        }
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "vllm_plugin",
            "-p",
            "no:cacheprovider",
        ]
        for name in CONFTESTS if part == "connectors" else ():
            command += ["-p", name]
        command += ["--noconftest", "-c", os.devnull, "--rootdir", str(source), "-W", "ignore"]
        command += ["--tb=native", "--no-header", *(["-n", str(jobs)] if jobs > 1 else [])]
        done = subprocess.run(
            [*command, *tests], cwd=source, env=environment, capture_output=True, text=True
        )
        lines = [json.loads(line) for line in results.read_text().splitlines()]
    if done.returncode not in (0, 1) or not lines:
        sys.exit(f"vLLM's tests do not run:\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}")
    return merged(lines)


def merged(lines: list[Result]) -> list[Result]:
    """Merge the records of a test: its worst outcome, and the managers it made."""
    tests: dict[str, Result] = {}
    for line in lines:
        known = tests.setdefault(line["test"], line)
        if line["outcome"] == "failed":
            known.update(line | {"managers": known["managers"]})
        known["managers"] = line["managers"] or known["managers"]
    return list(tests.values())


def cause(result: Result) -> str:
    """Return the cause of a failure, without numbers, so equal causes can be counted."""
    return re.sub(r"\d+", "N", result["message"])[:100] or "no message"


def summary(title: str, results: list[Result]) -> None:
    """Print the numbers of passed and failed tests, by cause, and the managers that they used."""
    counts = collections.Counter(each["outcome"] for each in results)
    made = [each["managers"] or {} for each in results]
    on_kvcore = sum(bool(each.get("kvcore")) for each in made)
    fallback = sum(bool(each.get("own")) and not each.get("kvcore") for each in made)
    print(f"{title}: {counts['passed']} passed, {counts['failed']} failed, "
          f"{counts['skipped']} skipped")  # fmt: skip
    if on_kvcore or fallback:
        print(f"  {on_kvcore} made a manager of kvcore's, {fallback} fell back to vLLM's only")
    causes = collections.Counter(cause(each) for each in results if each["outcome"] == "failed")
    for text, count in causes.most_common():
        print(f"  {count:4} x {text}")


def internals(source: Path) -> dict[str, Result]:
    """Return the tests that read vLLM's internals; check that their sources still have the line."""
    listed = json.loads((ENGINES / "vllm_internals.json").read_text())
    for each in listed:
        text = (source / each["test"].partition("::")[0]).read_text()
        if each["line"] not in text:
            sys.exit(f"{each['test']} has no line {each['line']!r}: update vllm_internals.json")
    return {each["test"]: each for each in listed}


def judge(results: list[Result], own: dict[str, Result], known: dict[str, Result]) -> int:
    """Print each failure without an explanation; return their number."""
    failed = {each["test"]: each for each in results if each["outcome"] == "failed"}
    unexplained = 0
    for test, each in failed.items():
        if test in known:
            print(f"internals  {test}: {known[test]['reason']}")
        elif own.get(test, {}).get("outcome") == "failed":
            print(f"also on vLLM's manager  {test}")
        else:
            unexplained += 1
            print(f"UNEXPECTED {test}\n    {each['where']}: {each['message']}")
    ran = {each["test"] for each in results}
    for test in sorted(ran & known.keys() - failed.keys()):
        unexplained += 1
        print(f"UNEXPECTED {test} passes: remove it from vllm_internals.json")
    return unexplained


def arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--source", type=Path, help="unpacked sources of vLLM 0.33.0")
    parser.add_argument(
        "--folder", type=Path, default=Path("build/vllm"), help="folder for downloaded sources"
    )
    parser.add_argument(
        "--libraries", type=Path, help="install the imports of vLLM there, and use them"
    )
    parser.add_argument("--part", choices=PARTS, default="core")
    parser.add_argument("--jobs", type=int, default=1, help="processes, with pytest-xdist")
    parser.add_argument(
        "--recheck", action="store_true", help="on vLLM's manager run only failed tests"
    )
    parser.add_argument("-k", dest="select", help="as of pytest")
    return parser.parse_args()


def install(folder: Path) -> None:
    """Install `LIBRARIES` to a folder if it is missing, and make tests import from it."""
    pip = [sys.executable, "-m", "pip", "install", "-q", "--upgrade", "--target", str(folder)]
    if not folder.exists():
        subprocess.run([*pip, *LIBRARIES], check=True)
    os.environ["PYTHONPATH"] = f"{os.environ.get('PYTHONPATH', '')}{os.pathsep}{folder}"


def main() -> int:
    """Run, compare and print; return the exit code."""
    options = arguments()
    source = (options.source or vllm_sources.unpacked(options.folder)).resolve()
    if options.recheck:
        os.environ.setdefault("KVCORE_CHECK_EVERY", "100")
    if options.libraries:
        install(options.libraries.resolve())
    tests = [f"{FOLDERS[options.part]}/{name}" for name in PARTS[options.part]]
    tests += ["-k", options.select] if options.select else []
    own: list[Result] = []
    compares = options.part != "ours"  # kvcore's own tests must pass
    if compares and not options.recheck:
        own = run(source, options.part, tests, on_kvcore=False, jobs=options.jobs)
        summary("vLLM's own manager", own)
    results = run(source, options.part, tests, on_kvcore=True, jobs=options.jobs)
    summary("kvcore", results)
    failed = [each["test"] for each in results if each["outcome"] == "failed"]
    if compares and options.recheck and failed:
        own = run(source, options.part, failed, on_kvcore=False, jobs=1)
    unexpected = judge(results, {each["test"]: each for each in own}, internals(source))
    print(f"{unexpected} unexpected")
    return 1 if unexpected else 0


if __name__ == "__main__":
    sys.exit(main())
