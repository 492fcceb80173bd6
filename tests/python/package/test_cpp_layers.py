# SPDX-License-Identifier: Apache-2.0
"""Includes of the C++ sources go only down, and every header can be included by itself."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from conftest import require_program

ROOT = Path(__file__).resolve().parents[3]
CPP = ROOT / "cpp"

# The rooms of the control path, lowest first: each room may include the rooms before it.
CONTROL = (
    *("support", "keys", "pages", "tree", "layers", "level", "request", "observe", "store"),
    *("transfer", "cache"),
)
# The rooms that each room may include, in addition to its own headers and the words that all rooms
# have in common. A room is a folder of cpp/src with the public headers that belong to it.
MAY_INCLUDE = {
    "words": set(),
    "simd": {"support"},
    "data": {"simd", "support"},
    "store/disk": {"data", "support"},
    "routing": {"support"},
    "cuda": {"data", "simd", "support"},
    **{room: set(CONTROL[:i]) for i, room in enumerate(CONTROL)},
    "tiers": {*CONTROL, "store/disk"},
}
# A page has no key, and a tree no extra key: these rooms may include less than the order allows.
MAY_INCLUDE["pages"] = {"support"}
MAY_INCLUDE["tree"] = {"pages", "support"}
PUBLIC = {
    "words": {"errors", "page_moves", "types"},
    "data": {
        *("attention", "dtype", "host_store", "layout", "page_bytes", "paged_batch"),
        "quantize",
    },
    "keys": {"extra_keys", "page_keys"},
    "pages": {"block_pool"},
    "tree": {"eviction", "prefix_tree"},
    "layers": {"cache_config", "metrics"},
    "request": {"request"},
    "observe": {"advice", "cache_events", "cached_columns", "misses"},
    "store": {"store_moves"},
    "store/disk": {"disk_store"},
    "cache": {"cache_manager"},
    "tiers": {"disk_lower_store", "lower_store", "store_reader", "store_writer"},
    "routing": {"prefix_index"},
    "cuda": {"cuda"},
}
# The rooms that a room must not include, not even indirectly.
NEVER_SEES = {room: {"data", "store/disk"} for room in CONTROL}

FIRST = re.compile(r'\A(?://.*\n|\s)*#include "([^"]+)"')
INCLUDE = re.compile(r'^\s*#\s*include\s+"([^"]+)"', re.M)
# These files are no headers: they are included in an unnamed namespace, once for each instruction
# set, and include no file. data/kernels/isa_table.hpp includes their headers before them.
PARTS = {
    "data/attention/attend.hpp",
    "data/attention/blocks.hpp",
    "data/attention/item.hpp",
    "data/attention/merge.hpp",
    "data/attention/rows.hpp",
    "data/attention/stage.hpp",
    "data/attention/weights.hpp",
    "data/kernels/isa_table.hpp",
    "data/kernels/nvfp4.hpp",
    "data/kernels/quantize.hpp",
    "data/kernels/wide_kernels.hpp",
    "simd/elements.hpp",
    "simd/four.hpp",
    "simd/lanes.hpp",
    "simd/math.hpp",
}


def sources(cpp: Path) -> Iterator[Path]:
    """Yield the sources and headers of the rooms."""
    for folder in (cpp / "include" / "kvcore", cpp / "src"):
        yield from sorted(p for p in folder.rglob("*") if p.suffix in {".hpp", ".cpp"})


def room_of(name: str) -> str:
    """Return the room of a file; `name` is its path in includes."""
    first, _, rest = name.partition("/")
    if name.startswith("store/disk/"):
        return "store/disk"
    if first != "kvcore":
        return first
    rooms = [room for room, headers in PUBLIC.items() if rest.removesuffix(".hpp") in headers]
    assert len(rooms) == 1, f"{name} is in the rooms {rooms}: add it to one of PUBLIC"
    return rooms[0]


def name_of(path: Path, cpp: Path) -> str:
    """Return a file's path in includes."""
    for folder in (cpp / "include", cpp / "src"):
        if path.is_relative_to(folder):
            return path.relative_to(folder).as_posix()
    raise ValueError(path)


def includes_of(path: Path) -> list[str]:
    """Return the project's own headers that a file includes."""
    return INCLUDE.findall(path.read_text())


def violations(cpp: Path) -> list[str]:
    """Return a line for each include that does not go down."""
    graph = {name_of(path, cpp): includes_of(path) for path in sources(cpp)}
    found = []
    for name, includes in graph.items():
        room = room_of(name)
        allowed = MAY_INCLUDE[room] | {room, "words"}
        found += [
            f"{name} ({room}) includes {other} ({room_of(other)})"
            for other in includes
            if room_of(other) not in allowed
        ]
        hidden = NEVER_SEES.get(room, set())
        seen = set(includes)
        waiting = list(includes)
        while waiting:
            more = set(graph.get(waiting.pop(), [])) - seen
            seen |= more
            waiting += more
        found += [f"{name} ({room}) sees {o}" for o in sorted(seen) if room_of(o) in hidden]
    return found


def test_includes_only_go_down() -> None:
    assert violations(CPP) == []


def test_every_room_is_known() -> None:
    assert {p.name for p in (CPP / "src").iterdir() if p.is_dir()} <= set(MAY_INCLUDE)


@pytest.mark.parametrize(
    ("path", "include"),
    [
        ("src/pages/block_pool.cpp", "cache/cache_data.hpp"),
        ("src/pages/page_owners.hpp", "tree/tree_node.hpp"),
        ("src/tree/prefix_tree.cpp", "kvcore/page_keys.hpp"),
        ("src/level/level.cpp", "kvcore/request.hpp"),
        ("src/level/quotas.hpp", "cache/reserve.hpp"),
        ("src/transfer/tier_flights.cpp", "cache/queries.hpp"),
        ("src/store/store_queue.hpp", "store/disk/slot_index.hpp"),
        ("src/support/memory.hpp", "kvcore/prefix_tree.hpp"),
        ("src/request/sequence.hpp", "kvcore/host_store.hpp"),
        ("include/kvcore/types.hpp", "kvcore/metrics.hpp"),
        ("include/kvcore/page_bytes.hpp", "kvcore/block_pool.hpp"),
    ],
)
def test_an_include_that_goes_up_is_found(tmp_path: Path, path: str, include: str) -> None:
    copy = tmp_path / "cpp"
    shutil.copytree(CPP, copy)
    planted = copy / path
    planted.write_text(f'#include "{include}"\n' + planted.read_text())
    assert violations(copy) != []


def test_files_that_start_threads_run_under_thread_sanitizer() -> None:
    """CMakeLists.txt names the test files that start threads, or whose calls may start threads."""
    listed = re.search(
        r"set\(kvcore_threaded_tests\s([^)]*)\)", (ROOT / "CMakeLists.txt").read_text()
    )
    assert listed is not None
    headers = "attention|disk_store|host_store|page_bytes|paged_batch|quantize"
    starts = re.compile(
        rf'#include (<thread>|"traffic/(store_)?workers\.hpp"|"kvcore/({headers})\.hpp")'
    )
    files = (ROOT / "tests" / "cpp").glob("*/*.cpp")
    found = {f"{p.parent.name}/{p.stem}" for p in files if starts.search(p.read_text())}
    found.remove("cuda/fill")  # takes a checksum from page_bytes.hpp, and copies nothing
    assert "stress/threads" in found
    assert found <= set(listed[1].split())


def headers() -> list[str]:
    """Return the headers that no source includes first.

    The linter covers all other headers, because it reads each source by itself.
    """
    first = {found[1] for p in sources(CPP) if (found := FIRST.search(p.read_text()))}
    names = [name_of(p, CPP) for p in sources(CPP) if p.suffix == ".hpp"]
    return [name for name in names if name not in PARTS | first]


@pytest.mark.slow
@pytest.mark.parametrize("name", headers())
def test_a_header_can_be_read_by_itself(name: str) -> None:
    compiler = require_program("c++")
    folders = [f"-I{CPP / 'include'}", f"-I{CPP / 'src'}"]
    flags = ["-std=c++17", "-fsyntax-only", "-Wall", "-Wextra", "-x", "c++"]
    done = subprocess.run(
        [compiler, *flags, *folders, "-"],
        input=f'#include "{name}"\n#include "{name}"\n',
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
