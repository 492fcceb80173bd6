# SPDX-License-Identifier: Apache-2.0
"""The documentation and error texts use the product's names, and deny no existing feature.

The tests compare calls and their arguments, modules, files, exit codes and denied features.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

import kvcore
from kvcore import keys, ops, scheduler, stores
from kvcore.apps.cli import main as program
from kvcore.groups import AttentionGroup

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PACKAGE = Path(kvcore.__file__).resolve().parent
PAGES = sorted([*DOCS.glob("*.md"), ROOT / "README.md", ROOT / "SECURITY.md"])
NAMES = [page.name for page in PAGES]

# -- calls on the page of methods ----------------------------------------------------------------
#: The object or module that has the calls below each heading.
OWNERS: dict[str, Any] = {
    "PagedKVCacheManager": kvcore.PagedKVCacheManager,
    "ContinuousBatchingKVCacheManager": kvcore.ContinuousBatchingKVCacheManager,
    "TextGenerationContext": kvcore.TextGenerationContext,
    "PrefixTree": kvcore.PrefixTree,
    "BlockPool": kvcore.BlockPool,
    "kvcore.ops": ops,
    "kvcore.keys": keys,
    "kvcore.scheduler": scheduler,
    "kvcore.groups": kvcore.groups,
}
#: The class of each variable before a dot on the page.
VARIABLES: dict[str, Any] = {"group": AttentionGroup, "chain": keys.KeyChain}


def calls_of_methods() -> Iterator[tuple[str, str]]:
    """Return the heading and the text of each call in the first cells of the page's tables."""
    for section in (DOCS / "methods.md").read_text().split("\n## ")[1:]:
        heading = section.partition("\n")[0]
        for cell in re.findall(r"^\| (`.+?) \| ", section, re.M):
            yield from ((heading, call) for call in re.findall(r"`(\w[\w.]*\([^`]*\))`", cell))


def named(heading: str, call: str) -> Any:
    """Return the object that a call on the page calls."""
    path = call.partition("(")[0].split(".")
    owner = VARIABLES[path.pop(0)] if len(path) > 1 else OWNERS[heading]
    if heading == "kvcore.scheduler" and not hasattr(owner, path[0]):
        owner = scheduler.Scheduler
    return len if path == ["len"] else getattr(owner, path[0])


def written(call: str) -> tuple[list[tuple[str, str | None]], dict[str, str | None], bool]:
    """Return positional and keyword arguments of a call on a page; true if it omits some."""
    path, _, arguments_text = call.partition("(")
    text = re.sub(r"(, |(?<=\())\.\.\.(?=[,)])", "", f"({arguments_text}")
    tree = ast.parse(f"def {path.rpartition('.')[2]}{text}: 0")
    arguments = tree.body[0].args  # type: ignore[attr-defined]
    defaults = [None] * (len(arguments.args) - len(arguments.defaults)) + arguments.defaults
    places = [
        (each.arg, None if value is None else ast.unparse(value))
        for each, value in zip(arguments.args, defaults, strict=True)
    ]
    if arguments.vararg:
        places.append((f"*{arguments.vararg.arg}", None))
    names = {
        each.arg: None if value is None else ast.unparse(value)
        for each, value in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    }
    return places, names, text != f"({arguments_text}"


def real(function: Any) -> tuple[list[tuple[str, str | None]], dict[str, str | None]]:
    """Return the arguments of a function in the same form, without `**kwargs`."""
    places: list[tuple[str, str | None]] = []
    names: dict[str, str | None] = {}
    for each in inspect.signature(function).parameters.values():
        default = None if each.default is each.empty else repr(each.default)
        if each.kind is each.KEYWORD_ONLY:
            names[each.name] = default
        elif each.name != "self" and each.kind is not each.VAR_KEYWORD:
            star = "*" if each.kind is each.VAR_POSITIONAL else ""
            places.append((star + each.name, default))
    return places, names


def agree(shown: tuple[str, str | None], true: tuple[str, str | None]) -> bool:
    """Return true if a page shows an argument as it is, or with "..." for its default."""
    return shown == true or (shown[0] == true[0] and shown[1] == "..." and true[1] is not None)


def differs(call: str, function: Any) -> str | None:
    """Return the difference of a call on a page; a page may omit keyword-only arguments."""
    places, names, is_open = written(call)
    true_places, true_names = real(function)
    # A context must be given; None means that it is given by an earlier name.
    true_places = [(name, None if name == "ctx" else value) for name, value in true_places]
    is_short = len(places) < len(true_places) and not is_open
    if (
        is_short
        or len(places) > len(true_places)
        or not all(map(agree, places, true_places[: len(places)]))
    ):
        return f"{call}: by place it takes {true_places}"
    missing = ("", "")
    wrong = [
        name
        for name, value in names.items()
        if not agree((name, value), (name, true_names[name]) if name in true_names else missing)
    ]
    return f"{call}: by name it takes {true_names}" if wrong else None


def has_signature(function: Any) -> bool:
    """Return true if Python has a signature: test_docs.py compares extension classes with stubs."""
    try:
        inspect.signature(function)
    except ValueError:
        return False
    return True


CALLS = [*calls_of_methods()]


def test_calls_of_every_class_are_found() -> None:
    assert {heading for heading, _ in CALLS} == set(OWNERS)


@pytest.mark.parametrize(("heading", "call"), CALLS, ids=lambda text: text)
def test_a_call_on_the_page_of_methods_has_the_arguments_of_the_product(
    heading: str, call: str
) -> None:
    function = named(heading, call)
    assert function is len or not has_signature(function) or differs(call, function) is None


def test_a_wrong_call_is_found() -> None:
    reserve = kvcore.PagedKVCacheManager.reserve
    for call in (
        "reserve(data, num_steps=1, *, max_hit=None)",
        "reserve(ctx, num_steps=1, max_hit=None)",
        "reserve(ctx, num_steps=2)",
        "reserve(ctx, num_steps=1, *, most_hit=None)",
    ):
        assert differs(call, reserve)
    assert differs("reserve(ctx, num_steps=1, ...)", reserve) is None


# -- signatures on the pages of the reference, which are written by hand --------------------------
def signatures_of_the_reference() -> Iterator[tuple[str, str, str]]:
    """Return module, class and arguments of each signature on a page of the reference."""
    for page in sorted((DOCS / "api").glob("*.rst")):
        module = "kvcore"
        for kind, value in re.findall(r"^\.\. ([a-z]+):: (\S.*)$", page.read_text(), re.M):
            if kind in ("currentmodule", "automodule"):
                module = value
            found = re.fullmatch(r"([\w.]+)\((.+)\)", value)
            if kind == "autoclass" and found:
                path = found[1] if found[1].startswith("kvcore.") else f"{module}.{found[1]}"
                yield (*path.rsplit(".", 1), found[2])


SIGNATURES = [*signatures_of_the_reference()]


@pytest.mark.parametrize(("module", "name", "arguments"), SIGNATURES, ids=lambda text: text[:40])
def test_a_signature_of_the_reference_is_that_of_the_class(
    module: str, name: str, arguments: str
) -> None:
    cls = getattr(importlib.import_module(module), name)
    assert not has_signature(cls) or differs(f"{name}({arguments})", cls) is None


# -- keyword arguments anywhere ------------------------------------------------------------------
def methods_by_name() -> dict[str, list[Any]]:
    """Return all public callables that a page may name, by the last part of the name."""
    found: dict[str, list[Any]] = {}
    modules = [kvcore, ops, keys, scheduler, stores]
    classes = [
        each for module in modules for each in vars(module).values() if inspect.isclass(each)
    ]
    for owner in [*modules, *classes]:
        for name in dir(owner):
            value = getattr(owner, name, None)
            if not name.startswith("_") and callable(value):
                found.setdefault(name, []).append(value)
    return found


def keywords_shown() -> Iterator[tuple[str, str, str]]:
    """Return page, method and keyword of each call in a code span."""
    for page in PAGES:
        for span in re.findall(r"(?<!`)`([^`\n]+)`(?!`)", page.read_text()):
            for name, arguments in re.findall(r"\b(\w+)\(([^()]*)\)", span):
                yield from ((page.name, name, each) for each in re.findall(r"(\w+)=", arguments))


def test_keywords_of_calls_in_the_text_are_those_of_the_product() -> None:
    known = methods_by_name()
    wrong = set()
    for page, name, keyword in keywords_shown():
        takes: set[str] = set()
        for function in known.get(name, ()):
            parameters = inspect.signature(function).parameters if has_signature(function) else {}
            takes |= parameters.keys()
            if not parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
                takes.add(keyword)
        if name in known and keyword not in takes:
            wrong.add((page, name, keyword))
    assert wrong == set()


# -- the page for users of other caches ----------------------------------------------------------
def rows_of(page: str) -> Iterator[list[str]]:
    """Return the cells of each row of a page's tables."""
    for line in (DOCS / page).read_text().splitlines():
        if line.startswith("| ") and not line.startswith("|---"):
            yield [cell.strip() for cell in line.strip("|").split("|")]


def test_a_call_that_kvcore_has_is_not_said_to_be_missing() -> None:
    """A dash means that kvcore has no such call, so kvcore must not have a call of that name."""
    own = methods_by_name().keys()
    kvcore_column: int | None = None
    denied = []
    for cells in rows_of("migration.md"):
        headings = [cell.strip("`") for cell in cells]
        if "kvcore" in headings or "in kvcore" in headings:
            kvcore_column = next(i for i, cell in enumerate(headings) if cell.endswith("kvcore"))
        elif kvcore_column is not None and cells[kvcore_column] == "-":
            others = {name for cell in cells for name in re.findall(r"`(?:\w+\.)?(\w+)", cell)}
            denied += sorted(others & own)
    assert denied == []


# -- features that a page denies -----------------------------------------------------------------
#: Patterns of sentences that deny a feature, and the part of the product that is the feature.
DENIALS: dict[str, Callable[[], Any]] = {
    r"sends? no event|no events? (?:are|is) sent": lambda: kvcore.PagedKVCacheManager.take_events,
    r"no (?:remote|shared) (?:tier|store)": lambda: stores.RedisStore,
    r"store nothing (?:there )?by themselves": lambda: stores.DiskStore,
    r"no (?:eviction )?polic(?:y|ies) but": lambda: kvcore.policies,
    r"(?:cannot|does not) (?:fork|truncate|pin)\b": lambda: kvcore.PagedKVCacheManager.fork,
    r"no (?:prometheus|metrics) (?:endpoint|exporter)": lambda: kvcore.metrics.export,
}


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_no_page_denies_what_the_product_has(page: Path) -> None:
    text = re.sub(r"\s+", " ", page.read_text())
    found = [
        pattern for pattern, has in DENIALS.items() if has() and re.search(pattern, text, re.I)
    ]
    assert found == []


# -- modules -------------------------------------------------------------------------------------
def public_modules() -> tuple[set[str], set[str]]:
    """Return the public modules, and the public names in other modules."""
    page = (DOCS / "compatibility.md").read_text()
    section = page.partition("\n### Public modules\n")[2].partition("\n\nThe C++ library")[0]
    table, _, names = section.partition("\n\nThese single names")
    return set(re.findall(r"`(kvcore[\w.]*)`", table)), set(re.findall(r"`(kvcore[\w.]*)`", names))


def modules_shown() -> Iterator[tuple[str, str, list[str]]]:
    """Return page, module and names for each import in its code and each name in a setting."""
    for page in PAGES:
        text = page.read_text()
        blocks = re.findall(r"^```(?:python|json|text|sh)\n(.*?)^```$", text, re.M | re.S)
        for block in blocks:
            for module, names in re.findall(
                r"^\s*from (kvcore[\w.]*) import (\([^)]*\)|[^\n#]*)", block, re.M
            ):
                yield page.name, module, re.findall(r"\w+", names)
            for module in re.findall(r"^\s*import (kvcore[\w.]*)", block, re.M):
                yield page.name, module, []
            for module in re.findall(r'"(kvcore\.[\w.]+)"', block):
                if "module" in block:
                    yield page.name, module, []


def test_modules_that_pages_use_are_public() -> None:
    """The modules that users import, and the modules in operators' settings."""
    modules, singles = public_modules()
    used = {(module, name) for _, module, names in modules_shown() for name in names or [""]}
    assert len(used) > 30
    private = set()
    for module, name in used:
        submodule = f"{module}.{name}" if name else module
        if module not in modules and not {module, submodule} & (modules | singles):
            private.add(submodule)
    assert private == set()


def test_public_modules_are_there_and_say_what_is_public() -> None:
    modules, singles = public_modules()
    for name in modules:
        path = PACKAGE.parent.joinpath(*name.split("."))
        source = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
        assert re.search(r"^__all__ = ", source.read_text(), re.M), name
    for name in singles:
        module, _, attribute = name.rpartition(".")
        assert attribute in importlib.import_module(module).__all__


# -- files ---------------------------------------------------------------------------------------
#: Traces in commands: a published file has its published name; others are the reader's own.
PUBLISHED_TRACES = {"conversation_trace.jsonl"}
READERS_TRACES = {
    "trace.jsonl",
    "trace.jsonl.gz",
    "requests.jsonl",
    "azure.csv",
    "sessions.tar.gz",
}


def test_files_of_replays_have_the_names_that_they_are_published_with() -> None:
    shown = {
        argument
        for page in PAGES
        for line in re.findall(r"^kvcore replay (.*)$", page.read_text(), re.M)
        for argument in line.split()
        if re.search(r"\.jsonl|\.csv|\.gz", argument)
    }
    assert shown & PUBLISHED_TRACES
    assert shown - READERS_TRACES == PUBLISHED_TRACES


def test_sources_that_pages_name_are_there() -> None:
    """The folders of a checkout in code spans."""
    folders = r"(?:docs|bench|tests|examples|cpp|python|\.ci)"
    missing = {
        (page.name, path)
        for page in PAGES
        for path in re.findall(rf"`(?:python )?({folders}/[\w./-]+\.\w+)", page.read_text())
        if not (ROOT / path).exists()
    }
    assert missing == set()


# -- exit codes ----------------------------------------------------------------------------------
def test_exit_codes_are_those_of_the_program() -> None:
    page = (DOCS / "cli.md").read_text()
    table = page.partition("| exit code | meaning |\n")[2].partition("\n\n")[0]
    listed = {int(code) for code in re.findall(r"^\| (\d+) \|", table, re.M)}
    source = inspect.getsource(program)
    returned = {int(code) for code in re.findall(r"return (?:finish\()?(\d+)\b", source)}
    for path in (PACKAGE / "cli").glob("*.py"):
        returned |= {int(n) for n in re.findall(r"(?:Exit|sys\.exit)\((\d+)\)", path.read_text())}
    assert listed == returned | {0, program.BAD_INPUT}


def test_an_interrupt_ends_with_the_code_of_the_page(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise typer.Abort

    monkeypatch.setattr(program, "app", interrupted)
    assert program.main(["info"]) == 130
    assert "interrupted" in capsys.readouterr().err


# -- error texts ---------------------------------------------------------------------------------
def error_texts() -> Iterator[tuple[str, str]]:
    """Return the place and the text of each error in Python, Cython and C++ sources."""
    package = ROOT / "python" / "kvcore"  # an installed package has no Cython sources
    for path in [path for kind in ("py", "pyx", "pxi") for path in package.rglob(f"*.{kind}")]:
        for found in re.finditer(r"\w+Error\(((?:\s*f?\"[^\"\n]*\"\s*)+)", path.read_text()):
            yield path.name, "".join(re.findall(r"\"([^\"\n]*)\"", found[1]))
    for folder in (ROOT / "cpp" / "src", ROOT / "python" / "bindings"):
        for path in [*folder.rglob("*.cpp"), *folder.rglob("*.hpp")]:
            for found in re.finditer(r"\"[^\"\n]*; (?:call|use) [^\"\n]*\"", path.read_text()):
                yield path.name, found[0].strip('"')


#: Calls of other libraries in error texts.
OTHERS_CALLS = {"__init__", "batch_repeat_interleave", "batch_select_indices", "eval"}


def test_what_an_error_tells_to_call_is_what_the_pages_call_it() -> None:
    """The name in the first cell of a row: a reader has not seen another name, such as MAX's."""
    first = set()
    for cell in re.findall(r"^\| (`.+?) \| ", (DOCS / "methods.md").read_text(), re.M):
        name = re.match(r"`(?:\w+\.)*(\w+)", cell)
        assert name
        first.add(name[1])
    first |= {"update_batch", "allocate_blocks", "append_slots"}
    told = {
        (source, name)
        for source, text in error_texts()
        for name in re.findall(r"\bcall (?:\w+\.)*(\w+_\w+|[a-z]+(?=\()|claim|step|fetch)\b", text)
    }
    assert {"update_batch", "claim"} <= {name for _, name in told}
    assert {each for each in told if each[1] not in first | OTHERS_CALLS} == set()
