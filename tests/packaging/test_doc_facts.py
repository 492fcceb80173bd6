# SPDX-License-Identifier: Apache-2.0
"""The statements of the documentation are true: its calls, commands, error texts and figures."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer

import kvcore
from foreign_context import Context
from kvcore import ops
from kvcore.apps.cli.main import app, main
from kvcore.groups import FullAttention, State

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.glob("*.md"))

# -- the page of methods -------------------------------------------------------------------------
METHODS = (
    kvcore.PagedKVCacheManager,
    kvcore.ContinuousBatchingKVCacheManager,
    kvcore.TextGenerationContext,
    kvcore.PrefixTree,
    kvcore.BlockPool,
)


def named_calls(heading: str) -> set[str]:
    """Return the names in the first cells of the tables below a heading of the page of methods."""
    page = (DOCS / "methods.md").read_text()
    section = page.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    cells = re.findall(r"^\| (`.+?) \| ", section, re.M)
    return {name for cell in cells for name in re.findall(r"`(\w+)[^`]*`", cell)}


@pytest.mark.parametrize("cls", METHODS, ids=lambda c: c.__name__)
def test_page_of_methods_names_every_public_member(cls: type) -> None:
    members = {name for name in dir(cls) if not name.startswith("_")}
    named = named_calls(cls.__name__)
    assert members <= named
    assert named - members <= {"params", "devices", "max_batch_size", "max_seq_len"}


def test_page_of_methods_names_every_function_of_ops() -> None:
    assert named_calls("kvcore.ops") == set(ops.__all__)


# -- commands ------------------------------------------------------------------------------------
def commands_shown() -> list[list[str]]:
    """Return every line of a shell block that calls kvcore."""
    found = []
    for page in [*PAGES, ROOT / "README.md"]:
        for block in re.findall(r"^```sh\n(.*?)^```$", page.read_text(), re.M | re.S):
            lines = (shlex.split(line, comments=True) for line in block.splitlines())
            found += [line[1:] for line in lines if line[:1] == ["kvcore"]]
    return found


@pytest.mark.parametrize("arguments", commands_shown(), ids=" ".join)
def test_commands_of_shell_blocks_are_right(arguments: list[str]) -> None:
    """Run the commands that need neither files nor time; check the options of the others."""
    program: Any = typer.main.get_command(app)
    command = program.commands[arguments[0]]
    for name in arguments[1:2]:  # if it has subcommands
        command = getattr(command, "commands", {}).get(name, command)
    known = {name for parameter in command.params for name in parameter.opts}
    assert {word for word in arguments if word.startswith("--")} <= known
    if arguments[0] in ("plan", "info"):
        assert main(arguments) == 0


# -- error texts ---------------------------------------------------------------------------------
def checked_manager() -> tuple[kvcore.PagedKVCacheManager, kvcore.TextGenerationContext]:
    params = kvcore.KVCacheParams("float32", 1, 8, 1, page_size=4, enable_prefix_caching=True)
    manager = kvcore.PagedKVCacheManager(params, 1, 64, num_pages=4, enable_runtime_checks=True)
    manager.claim("a")
    return manager, kvcore.TextGenerationContext("a", [1, 2, 3])


def step_without_update() -> None:
    manager, context = checked_manager()
    manager.fetch([context])
    manager.step([context])


def fetch_without_step() -> None:
    manager, context = checked_manager()
    for token in range(3):
        manager.fetch([context])
        context.update(token)


def reject_a_draft(*, moves: bool) -> None:
    """Fetch again after rejected drafts of a model with states."""
    groups: list[Any] = [FullAttention([0]), State([1], {"ssm": ((2,), "float32")})]
    params = kvcore.KVCacheParams("float32", 1, 8, 2, page_size=4, groups=groups)
    manager = kvcore.PagedKVCacheManager(params, 1, 64, num_pages=4)
    context = kvcore.TextGenerationContext("a", [1, 2, 3])
    manager.claim("a")
    for drafts in ([], [7, 8]):
        context.extend(drafts)
        manager.fetch([context])
        if drafts:
            context.rewind(context.start_idx + 2)
        if moves or not drafts:
            context.update(4)
            manager.step([context])
    manager.fetch([context])


def provoked_errors() -> Iterator[str]:
    params = kvcore.KVCacheParams("float32", 1, 8, 1, page_size=4)
    manager = kvcore.PagedKVCacheManager(params, 1, 64, num_pages=4)
    context = kvcore.TextGenerationContext("a", [1, 2, 3])
    manager.claim("a")
    inputs = manager.fetch([context])
    rows, offsets = np.zeros((9, 1, 8), np.float32), np.array([0, 9], np.uint32)
    late = Context("a", [1, 2, 3])
    late.start_idx = 3
    early = kvcore.TextGenerationContext("a", list(range(9)))
    early.update(1)
    strange = {"num_hidden_layers": 1, "num_attention_heads": 1, "hidden_size": 8, "kv_map": 1}
    for call in (
        lambda: kvcore.KVCacheParams.from_hf_config(strange, "float32"),
        lambda: manager.claim("b"),
        lambda: manager.reserve(kvcore.TextGenerationContext("a", list(range(30)))),
        lambda: manager.fetch([context, context]),
        lambda: manager.reserve(late),
        lambda: manager.step([early]),
        lambda: kvcore.TextGenerationContext("a", [-(2**31)], extra_keys=[(0, 1, b"")]),
        lambda: manager.increment_cache_lengths(
            manager.increment_cache_lengths(inputs, offsets), offsets
        ),
        lambda: ops.append(inputs[0], 0, rows, rows, offsets),
        step_without_update,
        fetch_without_step,
        lambda: reject_a_draft(moves=True),
        lambda: reject_a_draft(moves=False),
    ):
        with pytest.raises((ValueError, IndexError, TypeError)) as error:
            call()
        yield str(error.value)


def test_errors_quoted_on_the_troubleshooting_page_are_the_real_ones() -> None:
    """Without the errors of machines and processes that a test does not have."""
    page = (DOCS / "troubleshooting.md").read_text().partition("## Find a leak")[0]
    quoted = [text.split(" ... ") for text in re.findall(r'"([^"]+)"', page)]
    texts = [*provoked_errors()]
    missing = [q for q in quoted if not any(all(part in t for part in q) for t in texts)]
    elsewhere = (
        *("CUDA unavailable", "cannot listen", "zmq_endpoint_base", "kvcore.events needs"),
        *("a Mooncake tier needs", "cannot be seen from numpy", "attention on GPUs"),
    )
    assert len(quoted) - len(missing) == len(texts)
    assert [q for q in missing if not q[0].startswith(elsewhere)] == []


# -- figures -------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("suite", "page", "mark"),
    [
        ("control-path", "README.md", "headlines"),
        ("control-path", "docs/benchmarks.md", "control-path"),
        ("data-path", "docs/benchmarks.md", "data-path"),
        ("generate", "docs/benchmarks.md", "generate"),
        ("control-path", "docs/groups.md", "groups-cost"),
        ("control-path", "docs/tenants.md", "quotas-cost"),
        ("generate", "docs/groups.md", "groups-model"),
    ],
)
def test_figures_of_a_page_are_those_of_the_stored_run(suite: str, page: str, mark: str) -> None:
    command = [sys.executable, str(ROOT / "bench" / "run.py"), suite, "--stored"]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    _, _, rest = (ROOT / page).read_text().partition(f"<!-- {mark}:begin -->\n")
    figures, end, _ = rest.partition(f"<!-- {mark}:end -->")
    assert figures
    assert end
    assert set(figures.splitlines()) <= set(printed.splitlines())
