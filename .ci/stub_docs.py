# SPDX-License-Identifier: Apache-2.0
"""Write the docstrings of the extension modules into their stubs, where editors look for them.

Usage: ``python .ci/stub_docs.py [--check] MODULE ...``; a package stands for its modules. They
have to be installed, the stubs are those of the work tree. With ``--check`` nothing is written, and
a stub that is out of date is exit code 1.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import sys
from pathlib import Path
from textwrap import indent
from typing import Any

SOURCES = Path(__file__).resolve().parents[1] / "python"
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
    """Hold a stub and the changes that bring its docstrings up to date."""

    def __init__(self, module: str) -> None:
        self.module = importlib.import_module(module)
        self.path = SOURCES / f"{module.replace('.', '/')}.pyi"
        self.lines = self.path.read_text().split("\n")
        self.changes: list[tuple[int, int, list[str]]] = []  # lines [from, to) become these

    def updated(self) -> str:
        """Return the text of the stub as it should be."""
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
        first = node.body[0]
        column = node.col_offset + 4
        had = ast.get_docstring(node, clean=False) is not None
        if not text and not had:
            return
        written = quoted(text, column) if text else []
        if had:
            rest = [] if written or len(node.body) > 1 else [" " * column + "..."]
            self.changes.append((first.lineno - 1, first.end_lineno or 0, written + rest))
        elif isinstance(first, ast.Expr):  # the dots of an empty body, behind its head
            head = self.lines[first.lineno - 1].rstrip().removesuffix(" ...")
            self.changes.append((first.lineno - 1, first.lineno, [head, *written]))
        else:
            line = first.lineno - 1
            if isinstance(first, ast.FunctionDef | ast.ClassDef) and first.decorator_list:
                line = first.decorator_list[0].lineno - 1
            space = [""] if isinstance(node, ast.ClassDef) else []
            self.changes.append((line, line, written + space))


def with_stubs(name: str) -> list[str]:
    """Return the module, or those of a package that have stubs."""
    folder = SOURCES / name.replace(".", "/")
    return [f"{name}.{each.stem}" for each in sorted(folder.glob("*.pyi"))] or [name]


def main(arguments: list[str]) -> int:
    """Bring the stubs of the named modules up to date, or tell which are not."""
    only_checks = "--check" in arguments
    stale = 0
    given = [name for name in arguments if not name.startswith("-")]
    for module in (module for name in given for module in with_stubs(name)):
        stub = Stub(module)
        before = stub.path.read_text()
        after = stub.updated()
        if before == after:
            continue
        stale += 1
        if only_checks:
            print(f"{stub.path} is out of date; run python .ci/stub_docs.py {module}")
        else:
            stub.path.write_text(after)
    return 1 if only_checks and stale else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
