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
    """Return the text that an object has at run time; none for what Python itself calls."""
    if node.name.startswith("_"):
        return ""
    return inspect.getdoc(inspect.getattr_static(owner, node.name, None)) or ""


def is_setter_or_overload(node: Node) -> bool:
    """Tell whether the text stands at another definition of the same name."""
    names = [ast.unparse(each) for each in node.decorator_list]
    return any(name == "overload" or name.endswith(".setter") for name in names)


def quoted(text: str, column: int) -> list[str]:
    """Return the lines of a docstring."""
    mark = 'r"""' if "\\" in text else '"""'
    ending = '"""' if "\n" not in text else '\n"""'
    return indent(f"{mark}{text}{ending}", " " * column).split("\n")


class Stub:
    """Hold a stub without docstrings, and the lines that add them."""

    def __init__(self, module: str, stub: Path) -> None:
        self.module = importlib.import_module(module)
        self.lines = stub.read_text().split("\n")
        self.changes: list[tuple[int, int, list[str]]] = []  # lines [from, to) become these

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
        if isinstance(first, ast.Expr):  # the dots of an empty body, behind its head
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
    """Have ``import kvcore.x`` look into these folders, and run nothing of the package itself.

    The interpreter's own finders do that. A finder of an editable install would import the modules
    of an earlier build.
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
