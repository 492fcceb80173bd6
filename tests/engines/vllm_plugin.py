# SPDX-License-Identifier: Apache-2.0
"""The pytest plugin for vLLM's own tests, on vLLM's manager or on kvcore."""

from __future__ import annotations

import itertools
import json
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import vllm_models
import vllm_stubs  # noqa: F401 - replaces missing packages

#: The number of kvcore's and vLLM's own managers that the running test has made.
MADE = {"kvcore": 0, "own": 0}


def pytest_configure(config: pytest.Config) -> None:
    """Prepare vLLM before its tests import from it."""
    config.addinivalue_line("markers", "cpu_test: vLLM's")
    config.addinivalue_line("markers", "skip_global_cleanup: vLLM's")
    vllm_models.describe_models()
    vllm_models.describe_images()
    if os.environ.get("KVCORE_VLLM") == "1":
        _rebind()


def _rebind() -> None:
    """Do the work of the entry point, also for tests that import the class themselves."""
    from vllm.plugins import load_general_plugins
    from vllm.v1.core import kv_cache_manager

    load_general_plugins()
    from vllm.v1.core.sched import scheduler

    from kvcore.integrations.vllm import choice, manager, pool

    class Either(kv_cache_manager.KVCacheManager):  # type: ignore[misc]
        """A class for tests that need a class; an instance is kvcore's or vLLM's manager."""

        def __new__(cls, *args: Any, **kwargs: Any) -> Any:
            made = choice.make_manager(*args, **kwargs)
            MADE["kvcore" if isinstance(made, manager.KVCoreManager) else "own"] += 1
            return made

    scheduler.KVCacheManager = kv_cache_manager.KVCacheManager = Either
    counted = property(lambda queue: queue._pool.get_num_free_blocks(), _count_free_blocks)
    setattr(pool.FreeBlocks, "num_free_blocks", counted)  # noqa: B010 - a property, to type checkers


def _count_free_blocks(queue: Any, count: int) -> None:
    """Refuse reservations while a test sets the free blocks of vLLM's queue to 0, to preempt."""
    manager = queue._pool.manager
    if count == 0:
        manager._reserve = lambda *_: False
    else:
        vars(manager).pop("_reserve", None)


@pytest.fixture(autouse=True)
def _check_laws(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """In random tests check all laws of kvcore at every step, or at every n-th step."""
    if os.environ.get("KVCORE_VLLM") != "1" or "random" not in request.node.nodeid:
        return
    from kvcore.integrations.vllm.manager import KVCoreManager

    steps = itertools.count()
    every = int(os.environ.get("KVCORE_CHECK_EVERY", "1"))

    def new_step_starts(self: KVCoreManager) -> None:
        if next(steps) % every == 0:
            self.core.check_integrity()

    monkeypatch.setattr(KVCoreManager, "new_step_starts", new_step_starts)


@pytest.fixture(autouse=True)
def _count_managers(request: pytest.FixtureRequest) -> Iterator[None]:
    MADE.update(kvcore=0, own=0)
    yield
    request.node.user_properties.append(("managers", dict(MADE)))


@pytest.fixture
def caplog_vllm(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> Iterator[pytest.LogCaptureFixture]:
    """vLLM's log: the fixture of vLLM's own conftest, which needs its kernels."""
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    with caplog.at_level(logging.INFO):
        yield caplog


@pytest.fixture
def default_vllm_config() -> Iterator[Any]:
    """A current config for callers that need it: the fixture of vLLM's own conftest."""
    from vllm.config import VllmConfig, set_current_vllm_config

    config = VllmConfig()
    with set_current_vllm_config(config):
        yield config


@pytest.fixture
def dist_init(tmp_path: Path, default_vllm_config: Any) -> Iterator[None]:
    """A group of one process: the fixture of vLLM's own conftest."""
    from vllm import distributed

    distributed.init_distributed_environment(
        1, 0, f"file://{tmp_path}/store", local_rank=0, backend="gloo"
    )
    distributed.initialize_model_parallel(1, 1)
    yield
    distributed.cleanup_dist_env_and_memory()


class Results:
    """A writer of a line of JSON for each test."""

    def __init__(self, path: str, root: Path) -> None:
        self._path = Path(path)
        self._root = root
        self._managers: dict[str, Any] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Record the outcome of a test's call, or of a failed setup."""
        self._managers.update({report.nodeid: dict(report.user_properties).get("managers")})
        if report.when == "call" or report.outcome != "passed":
            self._write(report.nodeid, report.outcome, report)
        elif report.when == "teardown":
            self._write(report.nodeid, "managers", report)

    def _write(self, test: str, outcome: str, report: Any) -> None:
        crash = getattr(report.longrepr, "reprcrash", None)
        if test.startswith("::"):  # pytest omits the file if it is outside the root
            test = f"{(self._root / report.location[0]).resolve()}{test}"
        line = {
            "test": test,
            "outcome": outcome,
            "managers": self._managers.get(report.nodeid),
            "where": f"{crash.path}:{crash.lineno}" if crash else "",
            "message": crash.message.partition("\n")[0] if crash else "",
        }
        with self._path.open("a") as file:
            file.write(json.dumps(line) + "\n")


def pytest_sessionstart(session: pytest.Session) -> None:
    """Write results from the process that receives the reports of all tests."""
    path = os.environ.get("KVCORE_RESULTS")
    if path and not hasattr(session.config, "workerinput"):
        session.config.pluginmanager.register(
            Results(path, session.config.rootpath), "kvcore-results"
        )
