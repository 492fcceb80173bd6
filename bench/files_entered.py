# SPDX-License-Identifier: Apache-2.0
"""Count the source files that a call of the C++ cache manager enters.

``python bench/files_entered.py [--build FOLDER] [--names]`` builds the library without optimization
so that no function is inlined, and runs each call under valgrind's callgrind. A file counts if a
function of it runs; files of the standard library do not count. The calls: reserve pages for an
unseen prompt of 7 pages, fetch a batch of one request that misses no page, and commit 6 pages.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

DRIVER = r"""
#include <array>
#include <cstdint>
#include <string_view>
#include <vector>

#include "kvcore/cache_manager.hpp"

namespace {

constexpr std::int32_t kPage = 16;
constexpr std::int64_t kTokens = 7 * kPage;

struct Scene {
    Scene() {
        kvcore::CacheConfig config;
        config.num_pages = 64;
        config.page_size = kPage;
        config.max_sequences = 8;
        config.max_seq_len = 4096;
        manager = new kvcore::CacheManager(config, nullptr);
        for (std::int64_t i = 0; i < kTokens; ++i) tokens.push_back(static_cast<int>(i));
        request.sequence = manager->claim();
        request.tokens = tokens.data();
        request.active = request.end = kTokens;
        target.table = &table;
        target.cache_lengths = lengths.data();
    }
    void reserve() { static_cast<void>(manager->reserve(request, 1, nullptr)); }
    void fetch() { static_cast<void>(manager->fetch(batch(), 1, &target, nullptr)); }
    void commit() { manager->commit(batch(), swaps, nullptr); }
    kvcore::RequestBatch batch() { return {&request, 1}; }

    kvcore::CacheManager* manager;
    std::vector<kvcore::TokenId> tokens;
    kvcore::RequestView request;
    std::array<std::uint32_t, 64> cells{};
    std::array<std::uint32_t, 4> lengths{};
    kvcore::LookupTable table{cells.data(), 4, 16, ~0U};
    kvcore::FetchTarget target;
    std::vector<kvcore::PageSwap> swaps;
};

}  // namespace

extern "C" __attribute__((noinline)) void counted_call(Scene& scene, char verb) {
    if (verb == 'r') scene.reserve();
    if (verb == 'f') scene.fetch();
    if (verb == 'c') scene.commit();
}

int main(int, char** argv) {
    Scene scene;
    const char verb = argv[1][0];
    if (verb != 'r') scene.reserve();
    if (verb != 'r') scene.fetch();
    if (verb == 'c') scene.request.start = 6 * kPage;
    counted_call(scene, verb);
    return 0;
}
"""


def build(folder: Path) -> Path:
    """Build the library and the driver; return the driver's path."""
    launcher = os.environ.get("CMAKE_CXX_COMPILER_LAUNCHER")
    options = [f"-DCMAKE_CXX_COMPILER_LAUNCHER={launcher}"] if launcher else []
    flags = "-O0 -g -fno-inline"
    subprocess.run(
        ["cmake", "-S", ROOT, "-B", folder, "-DCMAKE_BUILD_TYPE=None", f"-DCMAKE_CXX_FLAGS={flags}",
         "-DKVCORE_CUDA=OFF", "-DKVCORE_BUILD_TESTS=OFF", "-DKVCORE_BUILD_PYTHON=OFF", *options],
        check=True, stdout=subprocess.DEVNULL,
    )  # fmt: skip
    subprocess.run(
        ["cmake", "--build", folder, "--target", "kvcore", "-j"],
        check=True,
        stdout=subprocess.DEVNULL,
    )
    source = folder / "driver.cpp"
    source.write_text(DRIVER)
    library = next(folder.glob("**/libkvcore.a"))
    driver = folder / "driver"
    subprocess.run(
        ["c++", "-std=c++17", *flags.split(), f"-I{ROOT / 'cpp/include'}", source, library,
         "-pthread", "-o", driver],
        check=True,
    )  # fmt: skip
    return driver


def files_of(driver: Path, verb: str) -> tuple[set[str], int]:
    """Return the files under cpp/ that a call enters, and the number of calls within it."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out"
        subprocess.run(
            ["valgrind", "--tool=callgrind", "--toggle-collect=counted_call",
             f"--callgrind-out-file={out}", driver, verb],
            check=True, capture_output=True,
        )  # fmt: skip
        text = out.read_text()
    names: dict[str, str] = {}
    # The compiler cache can return names of another checkout's files.
    own = re.compile(r"(?:^|/)cpp/((?:include|src)/.*)")
    entered: set[str] = set()
    calls = 0
    is_own = is_callee = False
    for line in text.splitlines():
        found = re.match(r"(fl|fi|fe|cfi|cfl)=\((\d+)\)(?: (.*))?", line)
        if found:
            kind, number, name = found.groups()
            if name:
                names[number] = name
            name = names[number]
            if kind in {"fl", "fi", "fe"}:
                path = own.search(name)
                is_own = is_callee = path is not None
                if path:
                    entered.add(path[1])
            else:
                is_callee = own.search(name) is not None
        elif line.startswith("calls="):
            calls += int(line[6:].split()[0]) if is_callee else 0
            is_callee = is_own  # callgrind names the file of a callee only where it differs
    return entered, calls


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--build", type=Path, default=ROOT / "build" / "files_entered")
    parser.add_argument("--names", action="store_true", help="print the files")
    args = parser.parse_args()
    if shutil.which("valgrind") is None:
        parser.error("valgrind is not installed; install it, because it counts the calls")
    driver = build(args.build)
    print("| call | calls | files entered |\n|---|---|---|")
    for name, verb in (
        ("reserve, unseen prompt of 7 pages", "r"),
        ("fetch, no page missing", "f"),
        ("commit of 6 pages", "c"),
    ):
        entered, calls = files_of(driver, verb)
        print(f"| {name} | {calls} | {len(entered)} |")
        if args.names:
            print("".join(f"    {each}\n" for each in sorted(entered)), end="")


if __name__ == "__main__":
    main()
