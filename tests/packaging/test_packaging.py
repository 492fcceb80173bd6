# SPDX-License-Identifier: Apache-2.0
"""The installed package: its contents, and builds against it."""

from __future__ import annotations

import ast
import importlib
import inspect
import os
import re
import subprocess
import sys
import sysconfig
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvcore
from conftest import require, slow_but
from kvcore.native import engine

ROOT = Path(__file__).resolve().parents[2]
EMBED = ROOT / "tests" / "embed"
PACKAGE = Path(kvcore.__file__).parent


def run(*command: str | Path, cwd: Path | None = None) -> str:
    """Return a program's output; the failure text contains its errors."""
    done = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"{command} exited with {done.returncode}:\n{done.stdout}"
    return done.stdout


def python(*arguments: str, cwd: Path) -> str:
    return run(sys.executable, *arguments, cwd=cwd)


def cmake(source: Path, build: Path, **definitions: object) -> None:
    run("cmake", "-S", source, "-B", build, *(f"-D{k}={v}" for k, v in definitions.items()))


def build_and_run_embed(build: Path, **definitions: object) -> str:
    cmake(EMBED, build, CMAKE_BUILD_TYPE="Release", **definitions)
    run("cmake", "--build", build)
    return run(build / "embed")


def blocks_of(page: str, language: str) -> list[str]:
    """Return the blocks of a language on a page."""
    return re.findall(rf"^```{language}\n(.*?)^```$", (ROOT / page).read_text(), re.M | re.S)


def block_of(page: str, language: str) -> str:
    """Return the one block of a language on a page."""
    blocks = blocks_of(page, language)
    assert len(blocks) == 1, f"{page} has {len(blocks)} {language} blocks, expected 1"
    return str(blocks[0])


@pytest.mark.parametrize("name", ["py.typed", "_core.pyi", "cpp.pxd"])
def test_package_ships_typing_and_cython_declarations(name: str) -> None:
    assert (PACKAGE / name).is_file()


def test_every_cython_module_ships_its_declarations_and_types() -> None:
    modules = [path.name.split(".")[0] for path in Path(engine.__file__).parent.glob("*.so")]
    assert "engine" in modules
    for name in modules:
        assert (PACKAGE / "native" / f"{name}.pyi").is_file()
    declared = {path.name for path in (ROOT / "python" / "kvcore" / "native").glob("*.pxd")}
    assert declared
    assert declared <= {path.name for path in (PACKAGE / "native").glob("*.pxd")}


STUBS = ["_core", *(f"native/{name}" for name in ("contexts", "engine", "snapshots", "tree"))]
Documented = ast.ClassDef | ast.FunctionDef


def definitions(body: list[ast.stmt], owner: Any) -> Iterator[tuple[Documented, Any]]:
    """Return the public definitions of a stub that occur once, and their run-time objects."""
    named = [node for node in body if isinstance(node, Documented)]
    names = [node.name for node in named]
    for node in named:
        if node.name.startswith("_") or names.count(node.name) > 1:
            continue
        found = inspect.getattr_static(owner, node.name)
        yield node, found
        if isinstance(node, ast.ClassDef):
            yield from definitions(node.body, found)


@pytest.mark.parametrize("name", STUBS)
def test_installed_stubs_have_the_docstrings_of_the_modules(name: str) -> None:
    module = importlib.import_module(f"kvcore.{name.replace('/', '.')}")
    installed = Path(module.__file__ or "").parent / f"{Path(name).name}.pyi"
    documented = 0
    for node, found in definitions(ast.parse(installed.read_text()).body, module):
        assert ast.get_docstring(node) == (inspect.getdoc(found) or None), node.name
        documented += ast.get_docstring(node) is not None
    assert documented > 5


@pytest.mark.parametrize("stub", sorted((ROOT / "python").rglob("*.pyi")), ids=lambda p: p.stem)
def test_stubs_of_the_sources_have_no_docstrings(stub: Path) -> None:
    nodes = [n for n in ast.walk(ast.parse(stub.read_text())) if isinstance(n, Documented)]
    assert [node.name for node in nodes if ast.get_docstring(node)] == []


def test_package_ships_every_public_header() -> None:
    public = {path.name for path in (ROOT / "cpp" / "include" / "kvcore").glob("*.hpp")}
    shipped = {path.name for path in Path(kvcore.get_include(), "kvcore").glob("*.hpp")}
    assert public
    assert public <= shipped


def test_package_is_a_cmake_prefix() -> None:
    cmake_dir = Path(kvcore.get_cmake_dir())
    prefix = Path(kvcore.get_include()).parent
    assert cmake_dir == prefix / "lib" / "cmake" / "kvcore"
    assert (cmake_dir / "kvcoreConfig.cmake").is_file()
    assert (cmake_dir / "kvcoreConfigVersion.cmake").is_file()
    assert list((prefix / "lib").glob("libkvcore*.a"))


def test_module_prints_its_paths(tmp_path: Path) -> None:
    assert python("-m", "kvcore", "--cmakedir", cwd=tmp_path).strip() == kvcore.get_cmake_dir()
    assert python("-m", "kvcore", "--includes", cwd=tmp_path).strip() == kvcore.get_include()


def test_version_is_that_of_pyproject() -> None:
    stated = re.search(r'^version = "(.+)"$', (ROOT / "pyproject.toml").read_text(), re.M)
    assert stated is not None
    assert kvcore.__version__ == stated[1]


def test_import_loads_no_accelerator_library(tmp_path: Path) -> None:
    heavy = {"cupy", "redis", "torch", "transformers", "zmq"}
    code = f"import sys, kvcore; print(sorted({heavy} & set(sys.modules)))"
    assert python("-c", code, cwd=tmp_path).strip() == "[]"


def test_import_leaves_what_few_programs_use_for_later(tmp_path: Path) -> None:
    code = """
import sys, kvcore
late = kvcore._AT_FIRST_USE
print(sorted({module for module in late.values() if module in sys.modules}))
print([name for name in late if getattr(kvcore, name).__name__ not in (name, f"kvcore.{name}")])
print(kvcore.KVCacheLayer is kvcore.integrations.max.views.KVCacheLayer)
print(kvcore.stores.MemoryStore.__name__, kvcore.moving.read_sequence.__name__)
"""
    assert python("-c", code, cwd=tmp_path).splitlines() == [
        "[]",
        "[]",
        "True",
        "MemoryStore read_sequence",
    ]
    assert not hasattr(kvcore, "cache")
    assert not hasattr(kvcore.moving, "cache")


def test_manager_without_tiers_imports_no_store_and_no_socket(tmp_path: Path) -> None:
    code = """
import sys, kvcore
params = kvcore.KVCacheParams("float32", 1, 16, 1, page_size=4, enable_prefix_caching=True)
kvcore.PagedKVCacheManager(params, 4, 64, num_pages=16)
late = ("kvcore.stores.", "kvcore.observe.zmq_reset", "socket", "subprocess", "urllib")
print(sorted(name for name in sys.modules if name.startswith(late)))
"""
    options = ["kvcore.stores.tiers", "kvcore.stores.tiers.choice", "kvcore.stores.tiers.options"]
    assert python("-c", code, cwd=tmp_path).strip() == str(options)


def test_contexts_can_be_copied_and_pickled_as_soon_as_there_are_some(tmp_path: Path) -> None:
    code = """
import copy, pickle, kvcore
context = kvcore.TextGenerationContext("r", [1, 2, 3])
for again in (copy.copy(context), copy.deepcopy(context), pickle.loads(pickle.dumps(context))):
    print(again.tokens.tolist())
"""
    assert python("-c", code, cwd=tmp_path).splitlines() == ["[1, 2, 3]"] * 3


def test_embedding_against_the_installed_package(tmp_path: Path) -> None:
    output = build_and_run_embed(tmp_path, kvcore_DIR=kvcore.get_cmake_dir())
    assert output == expected_embed_output()
    has_cuda = (Path(kvcore.get_cmake_dir()) / "kvcoreCudaTargets.cmake").is_file()
    assert (tmp_path / "embed_cuda").is_file() == has_cuda
    if has_cuda:
        done = run(tmp_path / "embed_cuda")
        without_driver = r"CUDA unavailable: .+ \(code \d+\)\n"
        assert re.fullmatch(rf"no error \(code 0\); all tokens are there\n|{without_driver}", done)


CUDA_USER = """
cmake_minimum_required(VERSION 3.24)
project(user LANGUAGES CXX)
find_package(kvcore CONFIG REQUIRED COMPONENTS cuda)
"""


@pytest.mark.slow  # compiles the library again
def test_embedding_against_an_install_prefix(tmp_path: Path) -> None:
    """A request for GPU kernels raises an error if the build has no GPU kernels."""
    build, prefix = tmp_path / "build", tmp_path / "prefix"
    without = {"KVCORE_BUILD_TESTS": "OFF", "KVCORE_CUDA": "OFF"}
    cmake(ROOT, build, CMAKE_BUILD_TYPE="Debug", **without)  # a third of the time
    run("cmake", "--build", build, "--parallel", "2")
    run("cmake", "--install", build, "--prefix", prefix)
    output = build_and_run_embed(tmp_path / "embed", CMAKE_PREFIX_PATH=prefix)
    assert output == expected_embed_output()
    user = tmp_path / "user"
    user.mkdir()
    (user / "CMakeLists.txt").write_text(CUDA_USER)
    with pytest.raises(AssertionError) as refused:
        cmake(user, tmp_path / "user-build", CMAKE_PREFIX_PATH=prefix)
    words = " ".join(str(refused.value).split())  # CMake breaks lines anywhere
    assert "this kvcore was built without GPU kernels; build it where nvcc is found" in words


def expected_embed_output() -> str:
    """Return the output that the example's comment `// prints: ...` states."""
    stated = re.search(r"// prints: (.+)$", (EMBED / "main.cpp").read_text(), re.M)
    assert stated is not None
    return stated[1] + "\n"


CYTHON_USER = """
# cython: language_level=3
from libc.stdint cimport int32_t, int64_t, uint32_t
from libcpp.vector cimport vector
from kvcore.native.contexts cimport TextGenerationContext
from kvcore.cpp cimport (
    CacheConfig, CacheManager, FetchStatus, FetchTarget, LookupTable, PageSwap, PrefixTree,
    RequestBatch, RequestView, TokenId,
)

def id_and_page_size(TextGenerationContext context, int page_size):
    cdef PrefixTree* tree = new PrefixTree(page_size)
    try:
        return context.request_id, tree.page_size()
    finally:
        del tree

def fork(int page_size, list prompt, list tail):
    cdef CacheConfig config
    config.num_pages, config.page_size = 16, page_size
    config.max_sequences, config.max_seq_len = 4, 64
    cdef vector[TokenId] tokens = prompt + [0]
    cdef vector[TokenId] other = prompt + tail
    cdef vector[uint32_t] cells = [0] * 64
    cdef uint32_t length = 0
    cdef RequestView parent, child
    cdef FetchTarget target
    cdef vector[PageSwap] swaps
    cdef LookupTable* table = new LookupTable(cells.data(), 1, 64, 16)
    cdef CacheManager* manager = new CacheManager(config)
    try:
        parent.sequence = manager.claim(0)
        parent.tokens = tokens.data()
        parent.active = parent.end = <int64_t>len(prompt)
        target.table, target.cache_lengths = table, &length
        if manager.fetch(RequestBatch(&parent, 1), 1, &target, NULL).status != FetchStatus.kOk:
            return None
        parent.start, parent.active, parent.end = len(prompt), len(prompt) + 1, len(prompt) + 1
        manager.commit(RequestBatch(&parent, 1), swaps)
        child.tokens = other.data()
        child.end = <int64_t>other.size()
        manager.fork(parent, RequestBatch(&child, 1))
        shared = manager.pages_of(child.sequence) == manager.pages_of(parent.sequence)
        manager.truncate(child.sequence, 1)
        return child.start, child.active, shared, manager.pages_of(child.sequence).size()
    finally:
        del manager
        del table
"""
CYTHON_CALLER = """
import kvcore, user
context = kvcore.TextGenerationContext("a", [1, 2])
print(user.id_and_page_size(context, 7))
print(user.fork(2, [1, 2, 3], [4, 5]))
for call in (lambda: user.id_and_page_size(context, 0), lambda: user.fork(2, [1, 2, 3], [])):
    try:
        call()
    except ValueError:
        print("refused")
"""
CYTHON_OUTPUT = "('a', 7)\n(3, 5, True, 1)\nrefused\nrefused\n"


def test_cython_code_can_cimport_the_installed_package(tmp_path: Path) -> None:
    (tmp_path / "user.pyx").write_text(CYTHON_USER)
    python("-m", "cython", "--cplus", "-I", str(PACKAGE.parent), "user.pyx", cwd=tmp_path)
    include = Path(kvcore.get_include())
    headers = (include, np.get_include(), sysconfig.get_path("include"))
    module = "user" + str(sysconfig.get_config_var("EXT_SUFFIX"))
    flags = ("-std=c++17", "-shared", "-fPIC", *(f"-I{folder}" for folder in headers))
    library = (f"-L{include.parent / 'lib'}", "-lkvcore", "-pthread")
    run(os.environ.get("CXX", "c++"), *flags, "user.cpp", "-o", module, *library, cwd=tmp_path)
    assert python("-c", CYTHON_CALLER, cwd=tmp_path) == CYTHON_OUTPUT


def test_program_of_the_cpp_page_is_the_embedding_project() -> None:
    assert blocks_of("docs/cpp.md", "cpp")[-1] == (EMBED / "main.cpp").read_text()


#: The members of growing structs that a caller writes: the first members, or zero members.
PARTS_OF_STRUCTS = """
#include <kvcore/cache_manager.hpp>
#include <kvcore/disk_store.hpp>
#include <kvcore/page_keys.hpp>
void parts() {
    const kvcore::CacheConfig pages{8};
    const kvcore::RequestView view{{}};
    const kvcore::RequestPriority terms{50};
    const kvcore::ReserveOptions reserve{};
    const kvcore::ColumnSpan span{{}};
    const kvcore::KeyOptions keys{{}};
    const kvcore::DiskStoreConfig disks{{{"/tmp", 4096}}};
    const auto used = [](const auto&...) {};
    used(pages, view, terms, reserve, span, keys, disks);
}
"""


@pytest.mark.parametrize(
    "program",
    slow_but([PARTS_OF_STRUCTS], [(EMBED / "main.cpp").read_text(), PARTS_OF_STRUCTS]),
    ids=["the program of the page", "structs that grow"],
)
def test_programs_of_callers_compile_without_a_warning(program: str, tmp_path: Path) -> None:
    (tmp_path / "caller.cpp").write_text(program)
    flags = ("-std=c++17", "-Wall", "-Wextra", "-Werror", f"-I{kvcore.get_include()}")
    run(os.environ.get("CXX", "c++"), *flags, "-fsyntax-only", "caller.cpp", cwd=tmp_path)


def test_readme_example_runs(tmp_path: Path) -> None:
    python("-W", "error", "-c", block_of("README.md", "python"), cwd=tmp_path)


def test_sdist_holds_the_sources_and_no_junk(tmp_path: Path) -> None:
    require("build")
    python("-m", "build", "--sdist", "--no-isolation", "--skip-dependency-check",
           "--outdir", str(tmp_path), str(ROOT), cwd=tmp_path)  # fmt: skip
    archive = tmp_path / f"kvcore-{kvcore.__version__}.tar.gz"
    with tarfile.open(archive) as tar:
        names = [Path(name).relative_to(f"kvcore-{kvcore.__version__}") for name in tar.getnames()]
        # Pythons before 3.10.12 and 3.11.4 have no filters; later versions need a named filter.
        rules: Any = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}
        tar.extractall(tmp_path, **rules)
    junk = re.compile(r"(^|/)(build|dist|__pycache__|\..*_cache|\.hypothesis)/|\.(so|a|o|pyc)$")
    assert [str(name) for name in names if junk.search(str(name))] == []
    for needed in ("LICENSE", "README.md", "pyproject.toml", "cpp/include/kvcore/types.hpp"):
        assert Path(needed) in names
    source = tmp_path / archive.name.removesuffix(".tar.gz")
    cmake(source, tmp_path / "configured", KVCORE_CUDA="OFF")


def test_a_name_that_is_not_there_is_an_error_to_type_checkers_too() -> None:
    """If the name exists, type checkers report an unused `type: ignore` here."""
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = kvcore.no_such_name  # type: ignore[attr-defined]
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = kvcore.moving.no_such_name  # type: ignore[attr-defined]
