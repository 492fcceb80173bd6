# SPDX-License-Identifier: Apache-2.0
"""Break the cache manager in known ways and see that its tests notice.

    python tests/cpp/mutants.py [--only NAME] [--jobs N] [--folder F] [--cmake-arg ARG ...]

Works on copies of the tree, which are mended when it ends. Each mutant replaces text that must be
there exactly once. Most are looked for by exploring interleavings: their rows say how deep the
shortest sequence is that shows them, to the laws of the manager and, without asking those, to a
reader of the pages. Those of states and tenants have to fail one of the fast tests.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from queue import Queue

ROOT = Path(__file__).resolve().parents[2]
TARGET = "explore_interleavings"
GROUPS_TARGET = "explore_groups"  # of the scenario "groups"
TESTS = {  # of these scenarios
    "states": ("test_cache_manager_states", "stress_states", "test_state_eviction"),
    "tenants": ("stress_tenants",),
}
SOURCES = ("cpp", "tests/cpp", "CMakeLists.txt", "pyproject.toml")
SEARCHES = (("--depth", "5"), ("--depth", "8"))
LIMIT_S = 240.0


@dataclass(frozen=True)
class Mutant:
    """A way to break the manager: what is replaced, and the scenario that can show it."""

    name: str
    path: str
    old: str
    new: str
    scenario: str


HELD_COPY = "copies_.push_back({copy, std::move(source), std::move(destination), 0, {}});"

MUTANTS = (
    Mutant(
        "destination not held",
        "cpp/src/manager/owed_copies.hpp",
        HELD_COPY,
        HELD_COPY + " copies_.back().destination = PageHold();",
        "plain",
    ),
    Mutant(
        "source not held",
        "cpp/src/manager/owed_copies.hpp",
        HELD_COPY,
        HELD_COPY + " copies_.back().source = PageHold();",
        "plain",
    ),
    Mutant(
        "heirs only right behind what they committed",
        "cpp/src/manager/page_row.hpp",
        "return committed_ <= column && has(column, page);",
        "return committed_ == column && has(column, page);",
        "heirs",
    ),
    Mutant(
        "a failed copy counts as done",
        "cpp/src/manager/owed_copies.cpp",
        "if (sequence != nullptr && !done) {",
        "if (sequence != nullptr && !done && ticket == 0) {",
        "plain",
    ),
    Mutant(
        "a failed load counts as done",
        "cpp/src/manager/tier_flights.hpp",
        "            if (!done) begin_again(*sequence, flight.sequence);\n",
        "            static_cast<void>(begin_again);\n",
        "loads",
    ),
    Mutant(
        "a failed store counts as done",
        "cpp/src/manager/tier_flights.cpp",
        "n > 0 && done && flight.is_wanted) publish(flight)",
        "n > 0 && flight.is_wanted) publish(flight)",
        "host",
    ),
    Mutant(
        "fetch forgets what is owed",
        "cpp/src/manager/fetcher.cpp",
        "        result.status = FetchStatus::kPending;\n        result.row = i;\n",
        "        result.status = FetchStatus::kPending;\n        result.row = i;\n"
        "        state_.copies.drop_owed(request.sequence);\n"
        "        sequence.num_pending = 0;\n",
        "plain",
    ),
    Mutant(
        "a reset leaves what is copied to be found",
        "cpp/src/manager/housekeeping.cpp",
        "    state.copies.loosen();\n    state.copies.fasten();\n",
        "",
        "plain",
    ),
    Mutant(
        "truncate does not wait",
        "cpp/src/manager/claims.cpp",
        "    Sequence& sequence = state_.sequences.at(handle);\n"
        "    if (sequence.num_pending > 0) rules::refuse_pending(-1);\n",
        "    Sequence& sequence = state_.sequences.at(handle);\n",
        "forks",
    ),
    Mutant(
        "a fork writes what another still copies",
        "cpp/src/manager/owed_copies.cpp",
        "if (is_it && copy.copy.num_tokens > kept) row.freeze(c + 1);",
        "static_cast<void>(is_it && kept > 0);",
        "forks",
    ),
    Mutant(
        "a fork behind writes what others of its batch copy",
        "cpp/src/manager/departures.hpp",
        "return holders == 1 && std::max(going.reach, gone.reach) <= "
        "std::max<std::int64_t>(0, kept);",
        "return holders == 1 && kept < 1000;",
        "forks",
    ),
    Mutant(
        "a copy keeps a whole run at a reset",
        "cpp/src/manager/page_hold.hpp",
        "        at_ = PrefixTree::position(at_.node, at_.depth);  "
        "// the run may have been cut behind it\n",
        "",
        "twins",
    ),
    Mutant(
        "a copy does not keep the windows of its pages",
        "cpp/src/manager/page_hold.hpp",
        "        if (home.columns != nullptr) home.columns->enter_all(page);\n",
        "",
        "groups",
    ),
    Mutant(
        "a hit's last page may lose its window before it is copied",
        "cpp/src/manager/reserver.cpp",
        "                made.source = WindowHold(home, hit.match.partial, hit.tokens, source);\n",
        "                static_cast<void>(source);\n",
        "groups",
    ),
    Mutant(
        "windows leave a token early",
        "cpp/src/manager/window_rows.cpp",
        "tokens - kept_tokens_);",
        "tokens + 1 - kept_tokens_);",
        "groups",
    ),
    Mutant(
        "a hit is taken whatever windows have",
        "cpp/src/manager/admitter.cpp",
        "            match = search.longest(match, wants_part && !has_declined ? fewest : 0);\n",
        "",
        "groups",
    ),
    Mutant(
        "a checkpoint is that of the column in front",
        "cpp/src/manager/committer.cpp",
        "Replica::last_column(home.tree, end);",
        "Replica::last_column(home.tree, {end.node, std::max(1, end.depth - 1)});",
        "states",
    ),
    Mutant(
        "a request that ends keeps its slot",
        "cpp/src/manager/claims.cpp",
        "    if (row.slot != ColumnStates::kNone) home.states->give_back(row.slot);\n",
        "    static_cast<void>(home);\n",
        "states",
    ),
    Mutant(
        "the checkpoint of a hit is not copied",
        "cpp/src/manager/reserver.cpp",
        "        if (!takes_over) {\n            states.renew(checkpoint);\n",
        "        if (takes_over) {\n            states.renew(checkpoint);\n",
        "states",
    ),
    Mutant(
        "a chunk runs past a checkpoint that is due",
        "cpp/src/manager/admitter.cpp",
        "    if (admission.is_cut) admission.active = due;\n",
        "",
        "states",
    ),
    Mutant(
        "a checkpoint is found before its copy is done",
        "cpp/src/groups/column_states.hpp",
        "return slot != kNone && at(slot).is_ready;",
        "return slot != kNone;",
        "states",
    ),
    Mutant(
        "a checkpoint goes while somebody reads it",
        "cpp/src/groups/column_states.cpp",
        "        while (victim != kNone && at(victim).holds > 0) victim = at(victim).next;\n",
        "",
        "states",
    ),
    Mutant(
        "what no checkpoint follows waits for its turn",
        "cpp/src/index/prefix_tree_policy.cpp",
        "    if (interest_.exposure) policy_->expose(node->id);\n",
        "",
        "states",
    ),
    Mutant(
        "what useless pages followed is the next to go",
        "cpp/src/groups/window_policy.hpp",
        "if (!interest_.recency) return release(node, time);",
        "static_cast<void>(time);\n        if (!interest_.recency) return;",
        "states",
    ),
    Mutant(
        "a reservation may lack a page",
        "cpp/src/index/page_owners.hpp",
        "return num_over_ == 0 && available >= unfilled_;",
        "return num_over_ == 0 && available + 1 >= unfilled_;",
        "tenants",
    ),
    Mutant(
        "one tenant may be above its ceiling",
        "cpp/src/index/page_owners.hpp",
        "return num_over_ == 0 && available >= unfilled_;",
        "return num_over_ <= 1 && available >= unfilled_;",
        "tenants",
    ),
    Mutant(
        "a page that is taken over keeps its owner",
        "cpp/src/manager/quotas.cpp",
        "    for (const BlockId page : pages) home.owners->share_out(page, taker, available);\n",
        "    static_cast<void>(available + taker + static_cast<std::int64_t>(pages.size()));\n",
        "tenants",
    ),
    Mutant(
        "a page that step swaps keeps its owner",
        "cpp/src/manager/quotas.cpp",
        "        home_->owners->share_out(pages_[i], takers_[i], available);\n",
        "        static_cast<void>(available);\n",
        "tenants",
    ),
    Mutant(
        "what is let go of still counts",
        "cpp/src/index/page_owners.cpp",
        "        counts_.add(state, -1);\n",
        "",
        "tenants",
    ),
    Mutant(
        "a page counts for nobody",
        "cpp/src/index/page_owners.hpp",
        "    void set_taker(Owner taker) noexcept { taker_ = taker; }",
        "    void set_taker(Owner) noexcept { taker_ = 0; }",
        "tenants",
    ),
)


def copy_tree(where: Path) -> None:
    """Copy what the explorer is built from."""
    where.mkdir(parents=True, exist_ok=True)
    for name in SOURCES:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, where / name, dirs_exist_ok=True)
        else:
            shutil.copy2(source, where / name)


def targets_of(mutant: Mutant) -> tuple[str, ...]:
    """Return the programs that have to notice a mutant."""
    if mutant.scenario == "groups":
        return (GROUPS_TARGET,)
    return TESTS.get(mutant.scenario, (TARGET,))


def prepare(where: Path, cmake_args: Iterable[str], targets: Iterable[str]) -> Path:
    """Make a copy of the tree and build some programs there."""
    copy_tree(where)
    configure = ["cmake", "-S", str(where), "-B", str(where / "build"), "-DKVCORE_CUDA=OFF"]
    # A mutant takes more time in the compiler than in its search.
    configure += ["-DCMAKE_BUILD_TYPE=Release", "-DCMAKE_CXX_FLAGS_RELEASE=-O1", *cmake_args]
    subprocess.run(configure, check=True, capture_output=True)
    build(where, targets)
    return where


def build(where: Path, targets: Iterable[str]) -> None:
    """Build some programs; their errors end this one."""
    command = ["cmake", "--build", str(where / "build"), "-j", "1", "--target", *targets]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit(f"it does not build:\n{done.stdout}{done.stderr}")


def run(command: list[str]) -> subprocess.CompletedProcess[str]:
    """Run a program; subprocess.TimeoutExpired where it takes too long."""
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=LIMIT_S)


def search(where: Path, mutant: Mutant, extra: tuple[str, ...]) -> tuple[str, str]:
    """Return the depth of the shortest sequence that shows the mutant, and that sequence."""
    for options in SEARCHES:
        if mutant.scenario == "groups":
            command = [str(where / "build" / GROUPS_TARGET), *options, *extra]
        else:
            command = [str(where / "build" / TARGET), "--scenario", mutant.scenario]
            command += [*options, *extra]
        try:
            done = run(command)
        except subprocess.TimeoutExpired:
            break
        if done.returncode != 0:
            return described(done.stdout)
    return "-", "not found"


def fail_tests(where: Path, mutant: Mutant) -> tuple[str, str]:
    """Return which test fails, and its last words."""
    for name in targets_of(mutant):
        try:
            done = run([str(where / "build" / name)])
        except subprocess.TimeoutExpired:
            return "test", f"{name} does not end"
        if done.returncode != 0:
            words = (done.stderr + done.stdout).strip().splitlines() or ["crashed"]
            return "test", f"{name}: {words[0]}"
    return "-", "not found"


def look_for(where: Path, mutant: Mutant) -> list[tuple[str, str]]:
    """Look for a mutant with the laws of the manager and, where that can be, without them."""
    if mutant.scenario in TESTS:
        return [fail_tests(where, mutant), ("", "")]
    return [search(where, mutant, extra) for extra in ((), ("--contents",))]


def described(output: str) -> tuple[str, str]:
    """Take a violation's depth, text and sequence out of what the explorer printed."""
    found = re.search(r"VIOLATION in \S+ at depth (\d+): (.*)\n\s*(.*)", output)
    if found is None:
        return "?", output.strip()[-200:]
    return found[1], f"{found[2]}: {found[3]}"


def is_noticed(folders: Queue[Path], mutant: Mutant) -> bool:
    """Build a mutant in a folder that nobody uses, look for it, and print its row."""
    begin, where = time.monotonic(), folders.get()
    text = (path := where / mutant.path).read_text()
    if (count := text.count(mutant.old)) != 1:
        raise SystemExit(f"{mutant.name}: {count} times in {mutant.path}:\n{mutant.old}")
    path.write_text(text.replace(mutant.old, mutant.new))
    build(where, targets_of(mutant))
    (laws, why), (contents, read) = look_for(where, mutant)
    path.write_text(text)
    folders.put(where)
    row = f"{mutant.name:52} {laws:>4} {contents:>8} {time.monotonic() - begin:7.0f}"
    print("\n".join([row, *(f"    {each}" for each in (why, read) if each)]), flush=True)
    return laws != "-"


def main() -> int:
    """Print a row for each mutant; 1 when one of them goes unnoticed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", help="mutants whose name contains this")
    parser.add_argument("--jobs", type=int, default=2, help="mutants at a time")
    parser.add_argument("--folder", type=Path, help="where the copies stay, with their builds")
    parser.add_argument("--cmake-arg", action="append", default=[], help="for the first cmake call")
    options = parser.parse_args()
    chosen = [m for m in MUTANTS if options.only is None or options.only in m.name]
    targets = {name for mutant in chosen for name in targets_of(mutant)}
    with (
        tempfile.TemporaryDirectory(prefix="kvcore-mutants-") as temporary,
        ThreadPoolExecutor(options.jobs) as pool,
    ):
        folder = options.folder or Path(temporary)
        folders: Queue[Path] = Queue()
        make = partial(prepare, cmake_args=options.cmake_arg, targets=targets)
        for where in pool.map(make, [folder / str(i) for i in range(options.jobs)]):
            folders.put(where)
        print(f"{'mutant':52} {'laws':>4} {'contents':>8} {'seconds':>7}", flush=True)
        noticed = list(pool.map(partial(is_noticed, folders), chosen))
    return 0 if all(noticed) else 1


if __name__ == "__main__":
    sys.exit(main())
