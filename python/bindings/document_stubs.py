# SPDX-License-Identifier: Apache-2.0
"""Write stubs with the docstrings of the extension modules, where editors look for them.

The build calls this program for the stubs that it installs:
``python document_stubs.py SOURCES BUILT OUT MODULE ...``. The stubs in ``SOURCES/kvcore`` have no
docstrings; BUILT is the folder with the extension modules of kvcore; OUT receives the stubs with
docstrings. A MODULE is a name such as ``kvcore.native.engine``.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import sys
import types
from importlib.machinery import BuiltinImporter, FrozenImporter, PathFinder
from pathlib import Path
from textwrap import indent
from typing import Any

Node = ast.ClassDef | ast.FunctionDef


def docstring(node: Node, owner: Any) -> str:
    """Return the docstring that an object has at run time; "" for special methods."""
    if node.name.startswith("_"):
        return ""
    return inspect.getdoc(inspect.getattr_static(owner, node.name)) or ""


def is_setter_or_overload(node: Node) -> bool:
    """Return true if another definition of the same name has the docstring."""
    names = [ast.unparse(each) for each in node.decorator_list]
    return any(name == "overload" or name.endswith(".setter") for name in names)


def quoted(text: str, column: int) -> list[str]:
    """Return the lines of a docstring."""
    mark = 'r"""' if "\\" in text else '"""'
    ending = '"""' if "\n" not in text else '\n"""'
    return indent(f"{mark}{text}{ending}", " " * column).split("\n")


class Stub:
    """A stub without docstrings, and the lines that add the docstrings."""

    def __init__(self, module: str, stub: Path) -> None:
        self.module = importlib.import_module(module)
        self.lines = stub.read_text(encoding="utf-8").split("\n")
        self.changes: list[tuple[int, int, list[str]]] = []  # (from, to, new lines)

    def documented(self) -> str:
        """Return the text of the stub with docstrings."""
        self._visit(ast.parse("\n".join(self.lines)), self.module)
        for begin, end, lines in sorted(self.changes, reverse=True):
            self.lines[begin:end] = lines
        return "\n".join(self.lines)

    def _visit(self, owner_node: ast.Module | ast.ClassDef, owner: Any) -> None:
        for node in owner_node.body:
            if isinstance(node, ast.ClassDef | ast.FunctionDef):
                if not is_setter_or_overload(node):
                    self._put(node, docstring(node, owner))
                if isinstance(node, ast.ClassDef):
                    self._visit(node, getattr(owner, node.name))

    def _put(self, node: Node, text: str) -> None:
        if not text:
            return
        first = node.body[0]
        written = quoted(text, node.col_offset + 4)
        if isinstance(first, ast.Expr):  # the dots of an empty body
            head = self.lines[first.lineno - 1].rstrip().removesuffix("...").rstrip()
            self.changes.append(
                (first.lineno - 1, first.lineno, [head, *written] if head else written)
            )
            return
        line = first.lineno - 1
        if isinstance(first, ast.FunctionDef | ast.ClassDef) and first.decorator_list:
            line = first.decorator_list[0].lineno - 1
        self.changes.append((line, line, [*written, ""]))


def find_modules_in(*folders: Path) -> None:
    """Let ``import kvcore.x`` find modules in the folders, without running the package itself.

    Keep only the interpreter's own finders: the finder of an editable install would import the
    modules of an earlier build.
    """
    sys.meta_path[:] = [BuiltinImporter, FrozenImporter, PathFinder]
    for name in ("kvcore", "kvcore.native"):
        package = types.ModuleType(name)
        inner = name.split(".")[1:]
        package.__path__ = [str(folder.joinpath(*inner)) for folder in folders]
        sys.modules[name] = package


def main(sources: str, built: str, out: str, *modules: str) -> None:
    """Write the stubs of the named modules."""
    find_modules_in(Path(sources, "kvcore"), Path(built))
    for module in modules:
        name = Path(*module.split(".")[1:]).with_suffix(".pyi")
        target = Path(out) / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(Stub(module, Path(sources, "kvcore", name)).documented())


if __name__ == "__main__":
    main(*sys.argv[1:])
