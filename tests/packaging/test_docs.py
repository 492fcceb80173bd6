# SPDX-License-Identifier: Apache-2.0
"""The documentation names all public objects, and its examples work."""

from __future__ import annotations

import ast
import doctest
import inspect
import json
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import typer

import kvcore
from kvcore import (
    _core,
    cuda,
    errors,
    extra_keys,
    functional,
    groups,
    keys,
    moving,
    ops,
    policies,
    scheduler,
    stores,
)
from kvcore.apps.cli.main import app, main
from kvcore.native import contexts, tree

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.glob("*.md"))
HEADERS = sorted((ROOT / "cpp" / "include" / "kvcore").glob("*.hpp"))
CLASSES = [
    value
    for module in (kvcore, functional, groups, keys, moving, ops, policies, scheduler, stores, cuda)
    for name in module.__all__
    if inspect.isclass(value := getattr(module, name))
]


def blocks(page: Path) -> str:
    """Return the python blocks of a page, on their lines in the page."""
    text = page.read_text()
    code, line = "", 0
    for block in re.finditer(r"^```python\n(.*?)^```$", text, re.M | re.S):
        start = text[: block.start()].count("\n") + 1
        code += "\n" * (start - line) + block[1]
        line = start + block[1].count("\n")
    return code


@pytest.mark.parametrize("page", [p for p in PAGES if blocks(p)], ids=lambda p: p.stem)
def test_python_blocks_of_a_page_run_in_order(page: Path) -> None:
    exec(compile(blocks(page), str(page), "exec"), {"__name__": page.stem})


def test_guide_has_examples() -> None:
    assert {"quickstart", "schedulers", "migration"} <= {p.stem for p in PAGES if blocks(p)}


# -- names ---------------------------------------------------------------------------------------
def in_reference(module: ModuleType) -> set[str]:
    """Return the names of the module that the pages of the reference document."""
    names = set()
    for page in (DOCS / "api").glob("*.rst"):
        current = ""
        for kind, value in re.findall(r"^\.\. ([a-z]+):: ([\w.]+)", page.read_text(), re.M):
            if kind in ("currentmodule", "automodule"):
                current = value
            elif current == module.__name__:
                names.add(value)
    return names


@pytest.mark.parametrize(
    "module",
    [kvcore, functional, groups, keys, moving, ops, policies, scheduler, stores, cuda, extra_keys],
    ids=lambda m: m.__name__,
)
def test_reference_documents_every_public_name(module: ModuleType) -> None:
    public = {n for n in module.__all__ if not inspect.ismodule(getattr(module, n))}
    assert in_reference(module) == public


def test_errors_are_names_of_the_package_itself() -> None:
    assert set(errors.__all__) <= set(kvcore.__all__)


def own_members(cls: type) -> Iterator[tuple[str, Any]]:
    for base in cls.__mro__:
        if base.__module__.startswith("kvcore"):
            yield from ((n, m) for n, m in vars(base).items() if not n.startswith("_"))


@pytest.mark.parametrize("cls", CLASSES, ids=lambda c: c.__name__)
def test_every_public_member_says_what_it_is(cls: type) -> None:
    """Members have their own docstring; a field may be described by its class or a base class."""
    assert inspect.getdoc(cls)
    text = "\n".join(base.__doc__ or "" for base in cls.__mro__)
    silent = [
        name
        for name, member in own_members(cls)
        if not inspect.isclass(member)
        and not inspect.getdoc(member)
        and not re.search(rf"\b{name}\b", text)
    ]
    assert silent == []


@pytest.mark.parametrize("header", HEADERS, ids=lambda h: h.name)
def test_cpp_page_names_every_header_and_its_types(header: Path) -> None:
    page = (DOCS / "cpp.md").read_text()
    types = re.findall(
        r"^(?:class|struct|enum class) (?:alignas\(\d+\) )?(\w+)(?: final)?(?: :[^;]*)? \{",
        header.read_text(),
        re.M,
    )
    assert [n for n in (f"kvcore/{header.name}", *types) if f"`{n}`" not in page] == []


def test_command_line_page_names_every_command_and_option() -> None:
    page = (DOCS / "cli.md").read_text()
    program: Any = typer.main.get_command(app)
    sections = re.split(r"^## kvcore ", page, flags=re.M)
    assert {s.split()[0] for s in sections[1:]} == set(program.commands)
    for section, command in [(sections[0], program)] + [
        (s, program.commands[s.split()[0]]) for s in sections[1:]
    ]:
        commands = (
            [command, *getattr(command, "commands", {}).values()]
            if command != program
            else [command]
        )
        options = {o for c in commands for p in c.params for o in p.opts if o.startswith("--")}
        named = set(re.findall(r"(?<=`)--[\w-]+", section))
        assert named - {"--json", "--help"} == options - {"--json", "--help"}


@pytest.mark.parametrize(
    "arguments",
    [
        ["demo", "--chats", "1", "--turns", "1"],
        ["replay", "--limit", "3"],
        ["replay", "--limit", "3", "--pages", "900,1000"],
        ["replay", "--limit", "3", "--pages", "900,1000", "--host-pages", "100"],
        ["plan", "llama-3.1-8b", "--memory", "8GiB", "--max-seq-len", "8k"],
        ["plan", "gemma-3-27b", "--memory", "8GiB", "--max-seq-len", "8k"],
        ["info"],
    ],
    ids=lambda a: str(a[0]),
)
def test_command_line_page_names_every_json_key(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*arguments, "--json"]) == 0
    section = (DOCS / "cli.md").read_text().split(f"\n## kvcore {arguments[0]}")[1]
    section = section.split("\n## ")[0]
    assert [k for k in json.loads(capsys.readouterr().out) if f"`{k}`" not in section] == []


@pytest.mark.parametrize(
    "stub",
    [
        "_core.pyi",
        "native/contexts.pyi",
        "native/tree.pyi",
    ],
)
def test_signatures_written_by_hand_are_those_of_the_stubs(stub: str) -> None:
    """The constructors of extension classes have no signature at run time."""
    pages = "".join(page.read_text() for page in (DOCS / "api").glob("*.rst"))
    written = dict(re.findall(r"^\.\. autoclass:: (\w+)\((.+)\)$", pages, re.M))
    tree = ast.parse((Path(kvcore.__file__).parent / stub).read_text())
    stated = {}
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and node.name in written:
            (maker,) = (
                f
                for f in node.body
                if isinstance(f, ast.FunctionDef) and f.name in ("__init__", "__new__")
            )
            for argument in [*maker.args.args, *maker.args.kwonlyargs]:
                argument.annotation = None
            stated[node.name] = ast.unparse(maker.args).split(", ", 1)[1]
    assert stated
    assert {name: written[name].replace(" = ", "=") for name in stated} == stated


# -- examples of the extension modules, which pytest does not collect ----------------------------
def documented(module: ModuleType) -> dict[str, str]:
    found = {}
    for name, value in vars(module).items():
        if getattr(value, "__module__", None) != module.__name__:
            continue
        found[name] = inspect.getdoc(value) or ""
        if inspect.isclass(value):
            found |= {f"{name}.{n}": inspect.getdoc(m) or "" for n, m in vars(value).items()}
    return {name: text for name, text in found.items() if ">>>" in text}


EXAMPLES = documented(_core) | documented(contexts) | documented(tree)


@pytest.mark.parametrize("name", EXAMPLES)
def test_example_of_an_extension_class_runs(name: str) -> None:
    example = doctest.DocTestParser().get_doctest(EXAMPLES[name], {}, name, None, None)
    assert doctest.DocTestRunner(verbose=False).run(example).failed == 0


def test_extension_classes_have_examples() -> None:
    expected = {"BlockPool", "KeyChain", "PrefixTree", "TextGenerationContext"}
    assert expected <= EXAMPLES.keys()


# -- links ---------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "page",
    [*PAGES, *(ROOT / f"{name}.md" for name in ("README", "CONTRIBUTING", "SECURITY"))],
    ids=lambda p: p.name,
)
def test_relative_links_lead_to_files(page: Path) -> None:
    links = re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text())
    broken = [k for k in links if "://" not in k and not (page.parent / k).exists()]
    assert broken == []
