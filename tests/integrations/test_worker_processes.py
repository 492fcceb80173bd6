# SPDX-License-Identifier: Apache-2.0
"""A scheduler without a pool and a worker with a pool give the answers of a single process."""

from __future__ import annotations

import importlib.util
import queue
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from conftest import require

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "scheduler_and_worker.py"


@pytest.fixture(scope="module")
def example() -> Any:
    """Return the example as a module that a started process can import by name."""
    sys.path.insert(0, str(EXAMPLE.parent))
    try:
        spec = importlib.util.find_spec(EXAMPLE.stem)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[EXAMPLE.stem] = module
        spec.loader.exec_module(module)
        yield module
    finally:
        sys.path.remove(str(EXAMPLE.parent))
        sys.modules.pop(EXAMPLE.stem, None)


class InProcess:
    """Both ends of a link in one process, where messages travel as they are."""

    def __init__(self) -> None:
        self.queues: list[queue.Queue[Any]] = [queue.Queue(), queue.Queue()]

    def send(self, message: Any) -> None:
        self.queues[0].put(message)

    def recv(self) -> Any:
        return self.queues[1].get(timeout=30)

    def other(self) -> InProcess:
        end = InProcess()
        end.queues = self.queues[::-1]
        return end


def prompts() -> list[list[int]]:
    """Return more prompts than the pool holds; several share prefixes, some end inside a page."""
    return [[*range(10), *[20 + n] * (n % 3), 40 + n] for n in range(12)]


def alone(example: Any) -> Any:
    link = InProcess()
    thread = threading.Thread(target=example.work, args=(link.other(),))
    thread.start()
    answers = example.serve(link, prompts(), 9)
    thread.join()
    return answers


@pytest.mark.parametrize("zmq", [False, True])
def test_two_processes_answer_what_one_does(example: Any, zmq: bool) -> None:
    if zmq:
        require("zmq")
    with example.worker(zmq=zmq) as link:
        answers = example.serve(link, prompts(), 9)
    assert all(len(answer) == 9 for answer in answers)
    assert len({tuple(answer) for answer in answers}) > 3
    assert answers == alone(example)
