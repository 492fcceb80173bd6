# SPDX-License-Identifier: Apache-2.0
"""Code for all test files: optional modules and Hypothesis profiles.

Environment:

``KVCORE_REQUIRE``
    Comma-separated modules and programs that must be installed: a test fails if one is missing,
    instead of being skipped.
``TRITON_INTERPRET``
    0 compiles Triton's kernels for a GPU (tests/gpu); the default is to interpret them.
``HYPOTHESIS_PROFILE``
    ``random`` (the default), ``ci`` (the same examples at each run), ``long`` (three times the
    examples of ``ci``, with twice the steps in a state machine) or ``deep`` (new examples, ten
    times as many as ``long``).
"""

from __future__ import annotations

import gc
import importlib
import os
import shutil
from collections.abc import Container, Iterable, Iterator
from types import ModuleType
from typing import Any

import hypothesis
import pytest

os.environ.setdefault("TRITON_INTERPRET", "1")  # triton reads it when it is imported
REQUIRED = frozenset(filter(None, os.environ.get("KVCORE_REQUIRE", "").split(",")))

RANDOM = hypothesis.settings(
    max_examples=30, stateful_step_count=25, deadline=None, print_blob=True
)
REPEATED = hypothesis.settings(RANDOM, derandomize=True, database=None)
hypothesis.settings.register_profile("random", RANDOM)
hypothesis.settings.register_profile("ci", REPEATED)
hypothesis.settings.register_profile("long", REPEATED, max_examples=100, stateful_step_count=50)
hypothesis.settings.register_profile("deep", RANDOM, max_examples=1000, stateful_step_count=50)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "random"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the searches of Hypothesis, and put the tests of the wheel first.

    One worker runs the tests of the wheel, and other workers would wait for them at the end.
    """
    for item in items:
        if getattr(getattr(item, "obj", None), "is_hypothesis_test", False):
            item.add_marker("search")

    def is_of_wheel(item: pytest.Item) -> bool:
        group = item.get_closest_marker("xdist_group")
        return group is not None and group.args == ("wheel",)

    items.sort(key=is_of_wheel, reverse=True)


def pytest_collection_finish() -> None:
    """Exclude imported modules from the garbage collections of the tests, to save time."""
    gc.collect()
    gc.freeze()


def pytest_sessionfinish() -> None:
    """Unfreeze the modules: some check for leftover objects when the process ends."""
    gc.unfreeze()


def require(module: str) -> ModuleType:
    """Import an optional module, or skip the calling test or test file.

    Parameters
    ----------
    module : str
        Dotted name, for example ``"zmq"``.

    Returns
    -------
    module : ModuleType
        The imported module.

    Raises
    ------
    ImportError
        The module is missing although ``KVCORE_REQUIRE`` names it.
    """
    try:
        found = importlib.import_module(module)
        if getattr(found, "__file__", None) is None:  # a folder of that name, for example build/
            raise ModuleNotFoundError(f"no module named {module!r}", name=module)
        return found
    except ImportError:
        if module in REQUIRED:
            raise
        pytest.skip(f"the module {module!r} is not installed", allow_module_level=True)


def slow_but(quick: Container[Any], values: Iterable[Any]) -> list[Any]:
    """Return parameters that mark a test as slow unless `quick` contains its value.

    Parameters
    ----------
    quick : container
        The values that run without ``-m slow``.
    values : iterable
        All values of the parameter.

    Returns
    -------
    parameters : list
        For ``pytest.mark.parametrize`` with one argument.
    """
    slow = pytest.mark.slow
    return [each if each in quick else pytest.param(each, marks=slow) for each in values]


def require_program(name: str) -> str:
    """Find an optional program's path, or skip the calling test.

    Raises
    ------
    FileNotFoundError
        The program is missing although ``KVCORE_REQUIRE`` names it.
    """
    path = shutil.which(name)
    if path is not None:
        return path
    if name in REQUIRED:
        raise FileNotFoundError(f"the program {name!r} is not installed")
    pytest.skip(f"the program {name!r} is not installed")


@pytest.fixture
def machine() -> Iterator[Any]:
    """Return two emulated GPUs, a ``cuda_machine.Machine``."""
    with importlib.import_module("cuda_machine").emulated() as emulated:
        yield emulated


@pytest.fixture(autouse=True, scope="module")
def _any_order_of_calls(request: pytest.FixtureRequest) -> Iterator[None]:
    """Disable checks of the step order in modules whose calls come in orders that no engine uses.

    These modules set ``ANY_ORDER_OF_CALLS``: their calls are random, or they test only tables.
    """
    is_any = hasattr(request.module, "ANY_ORDER_OF_CALLS")
    with pytest.MonkeyPatch.context() as patch:
        for name in ("before_fetch", "before_step") if is_any else ():
            order = importlib.import_module("kvcore.support.step_order").StepOrder
            patch.setattr(order, name, lambda *_: None)
        yield
