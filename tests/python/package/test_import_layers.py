# SPDX-License-Identifier: Apache-2.0
"""Imports go only down the layers of the package; the test reads the sources, and runs no code."""

from __future__ import annotations

import ast
import graphlib
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

#: The checkout's sources: wheels do not contain the Cython sources.
ROOT = Path(__file__).resolve().parents[3] / "python" / "kvcore"

#: Layers of rooms (folders) and top-level modules, lowest first. A module imports its own layer and
#: the layers before it. "" is the package itself: later layers import the public names from it. A
#: room inside a room has its own layer if it is named here.
LAYERS = (
    ("_core",),
    ("support", "errors", "device", "policies", "results", "metrics"),
    ("layers", "groups", "params", "sizing"),
    ("_cuda", "_jax", "cpp", "native", "context", "extra_keys", "keys"),
    ("backends",),
    ("ops", "options", "pools", "stores"),
    ("snapshots", "observe", "cache_events", "integrations.max", "functional", "cuda"),
    ("paged",),
    ("scheduler", "events", "moving", "routing"),
    ("",),
    ("integrations", "apps.replay", "apps.traces", "apps.demo", "replay"),
    ("apps.cli", "__main__"),
)

#: Modules that are imported by a name computed at run time.
BY_NAME = {
    "kvcore": {
        *("kvcore.functional", "kvcore.keys", "kvcore.moving", "kvcore.routing"),
        "kvcore.scheduler",
        *("kvcore.integrations.max.continuous", "kvcore.integrations.max.views"),
    },
    "kvcore.moving": {"kvcore.snapshots.cache", "kvcore.snapshots.request"},
    "kvcore.stores": {
        *("kvcore.metrics", "kvcore.stores.disk", "kvcore.stores.memory"),
        *("kvcore.stores.mooncake_store", "kvcore.stores.protocol", "kvcore.stores.redis_store"),
        "kvcore.stores.specs",
    },
    "kvcore.ops.jax_calls": {"kvcore._jax"},
    "kvcore.backends.selection": {"kvcore.backends.cuda"},
    "kvcore.backends.cuda.availability": {"kvcore._cuda"},
}

_CYTHON = re.compile(
    r"^\s*(?:from (kvcore[\w.]*) c?import ([\w, ]*)|c?import (kvcore[\w.]*))", re.M
)

Graph = dict[str, set[str]]


def name_of(path: Path) -> str:
    parts = ("kvcore", *path.relative_to(ROOT).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def sources() -> dict[str, Path]:
    """Return the path of every module's source, by the module's name."""
    found = [path for kind in ("py", "pyx", "pxi") for path in ROOT.rglob(f"*.{kind}")]
    return {name_of(path): path for path in found}


def resolved(module: str, name: str | None, known: set[str]) -> str:
    """Return the module that ``from module import name`` loads: ``module.name`` if it exists."""
    return f"{module}.{name}" if name and f"{module}.{name}" in known else module


def imports_of_python(path: Path, known: set[str]) -> Iterator[str]:
    """Yield the imports at the top, in functions, and for type checkers only."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: a relative import"
            yield from (resolved(node.module or "", alias.name, known) for alias in node.names)


def imports_of_cython(path: Path, known: set[str]) -> Iterator[str]:
    for part in filter(Path.exists, (path, path.with_suffix(".pxd"))):
        text = part.read_text(encoding="utf-8")
        code = re.sub(r'""".*?"""', "", text, flags=re.S)  # docstring examples import kvcore
        for module, names, whole in _CYTHON.findall(code):
            for name in names.split(", "):
                yield whole or resolved(module, name.split(" ")[0], known)


def import_graph() -> Graph:
    """Return each module of the package with the modules that it imports."""
    paths = sources()
    known = paths.keys() | {f"kvcore.{name}" for layer in LAYERS for name in layer if name}
    graph: Graph = {}
    for module, path in paths.items():
        read = imports_of_cython if path.suffix in (".pyx", ".pxi") else imports_of_python
        found = set(read(path, set(known))) | BY_NAME.get(module, set())
        graph[module] = {each for each in found if each.split(".")[0] == "kvcore"} - {module}
    return graph


def layer_of(module: str) -> int:
    """Return the layer of the innermost room that holds a module."""
    name = module.partition(".")[2]
    while True:
        for i, layer in enumerate(LAYERS):
            if name in layer:
                return i
        if "." not in name:
            break
        name = name.rpartition(".")[0]
    raise AssertionError(
        f"{module} is in no layer; enter it in LAYERS, as low as its imports let it"
    )


def circle_in(graph: Graph) -> list[str]:
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        return list(error.args[1])
    return []


def upward_in(graph: Graph) -> list[str]:
    edges = ((module, each) for module, imported in graph.items() for each in sorted(imported))
    return [f"{low} imports {high}" for low, high in edges if layer_of(low) < layer_of(high)]


def test_no_modules_import_each_other() -> None:
    assert circle_in(import_graph()) == []


def test_imports_go_down() -> None:
    assert upward_in(import_graph()) == []


def test_modules_are_imported_by_name_in_known_places_alone() -> None:
    calls = re.compile(r"\bimport_module\(|\b__import__\(")
    found = {module for module, path in sources().items() if calls.search(path.read_text("utf-8"))}
    assert found == set(BY_NAME)


def test_one_module_loads_the_backends_of_devices() -> None:
    """``import kvcore`` loads no backend, and another kind of device is one module more."""
    above = {
        module
        for module, imported in import_graph().items()
        if any(each.startswith("kvcore.backends.cuda") for each in imported)
        and not module.startswith("kvcore.backends.cuda")
    }
    of_gpus = {"kvcore.cuda", "kvcore.apps.cli.info", "kvcore.apps.cli.devices"}
    of_gpus |= {"kvcore.apps.cli.tune_attention", "kvcore.integrations.transformers.devices"}
    assert above == {"kvcore.backends.selection", *of_gpus}


@pytest.mark.parametrize(
    ("graph", "circle", "upward"),
    [
        ({"kvcore.ops.a": {"kvcore.ops.b"}, "kvcore.ops.b": {"kvcore.ops.a"}}, True, False),
        ({"kvcore.ops.a": {"kvcore.paged"}, "kvcore.paged": set()}, False, True),
        ({"kvcore.backends.arrays": {"kvcore"}, "kvcore": {"kvcore.backends.arrays"}}, True, True),
        ({"kvcore.paged": {"kvcore.ops.a"}, "kvcore.ops.a": set()}, False, False),
    ],
)
def test_circles_and_upward_imports_are_noticed(graph: Graph, circle: bool, upward: bool) -> None:
    assert bool(circle_in(graph)) == circle
    assert bool(upward_in(graph)) == upward
