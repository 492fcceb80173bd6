# SPDX-License-Identifier: Apache-2.0
"""Run processes for hours with one server, and disturb them as real machines do.

    python tests/soak/run.py [--minutes M] [--seed N] [--processes N] [--folder F]

Processes are killed and restarted; the server is killed, hangs and is restarted; values and files
change; the time of day jumps. Each process checks every position that it reads, and at the end that
no page is lost. The exit status is 1 if a check failed, a process ended by itself, or a call took
longer than its time-outs allow. Needs redis-server, redis-py and a C compiler.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "oracle"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "traffic"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "fakes"))

from redis_server import RedisServer

_NUM_SHAPES: Final = 3  # of worker.py
_LONGEST_CALL = 5.0  # seconds: the time-outs of a disk and a server, on a busy machine
_PAUSE = (0.3, 2.0)  # seconds between two disturbances
_JUMPS: Final = (-86_400, -3_600, -1, 0, 1, 3_600, 86_400)  # seconds that the clock is ahead


class TimeOfDay:
    """The clock of all processes that are started with `environment`; `jump` sets it."""

    def __init__(self, folder: Path) -> None:
        library, self._file = folder / "jumping_clock.so", folder / "clock"
        source = Path(__file__).with_name("jumping_clock.c")
        subprocess.run(
            ["cc", "-shared", "-fPIC", "-O1", str(source), "-o", str(library), "-ldl"], check=True
        )
        self._file.write_bytes(bytes(8))
        self.environment = {
            **os.environ,
            "LD_PRELOAD": str(library),
            "KVCORE_SOAK_CLOCK": str(self._file),
        }

    def jump(self, seconds: int) -> None:
        """Set the clock ahead by `seconds`."""
        with self._file.open("r+b") as file:  # the same file, which others have mapped
            file.write(seconds.to_bytes(8, sys.byteorder, signed=True))


class Process:
    """A worker, restarted with the same folder after each kill."""

    def __init__(self, soak: Soak, number: int) -> None:
        self._soak, self._number = soak, number
        self.folder = soak.folder / f"disk{number}"
        self.begun = 0

    def begin(self) -> None:
        """Start the worker; neighbours use the same server with other weights."""
        self.begun += 1
        self.log = self._soak.folder / f"worker{self._number}.{self.begun}.log"
        shape = self._number // 2 % _NUM_SHAPES
        seed = self._soak.draw.randrange(1 << 30)
        words = (shape, 1 + self._number % 2, seed, self.folder, self._soak.server.url)
        program = Path(__file__).with_name("worker.py")
        with self.log.open("w") as out:
            self.process = subprocess.Popen(
                [sys.executable, str(program), *map(str, words)],
                stdout=out,
                stderr=out,
                env=self._soak.clock.environment,
            )

    def kill(self) -> int:
        """Kill the process if it still runs; return its exit status."""
        self.process.kill()
        return self.process.wait()

    def await_first_line(self) -> None:
        """Wait until the worker serves: before its first line it does not handle SIGTERM."""
        ends = time.monotonic() + 30
        while not self.last_line() and self.process.poll() is None and time.monotonic() < ends:
            time.sleep(0.05)

    def silent_seconds(self) -> float:
        """Return the seconds since its last line; a serving worker prints one each second."""
        return time.time() - self.log.stat().st_mtime if self.last_line() else 0.0

    def last_line(self) -> dict[str, Any]:
        """Return the counters of its last whole line; an empty dict without a line."""
        found: dict[str, Any] = {}
        for line in self.log.read_text(errors="replace").splitlines():
            with contextlib.suppress(ValueError):
                read = json.loads(line)
                found = read if isinstance(read, dict) else found
        return found


class Soak:
    """The server, the processes and their disturbances; ``with`` ends all processes."""

    def __init__(self, folder: Path, seed: int, num_processes: int) -> None:
        self.folder, self.draw = folder, random.Random(seed)
        # With this little memory the server evicts all the time.
        options = ("--maxmemory", "6mb", "--maxmemory-policy", "allkeys-lru")
        self.clock = TimeOfDay(folder)
        with contextlib.ExitStack() as begun:
            environment = self.clock.environment
            self.server = begun.enter_context(RedisServer(folder, *options, env=environment))
            self.processes = [Process(self, i) for i in range(num_processes)]
            for process in self.processes:
                process.begin()
                begun.callback(process.kill)
            self._begun = begun.pop_all()
        self.blows: Counter[str] = Counter()
        self.totals: Counter[str] = Counter()
        self.faults: list[str] = []

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *error: object) -> None:
        self._begun.close()

    # ---- disturbances --------------------------------------------------------------------------
    def kill_process(self) -> None:
        """Kill a process, change its files or not, and restart it."""
        process = self.draw.choice(self.processes)
        if process.kill() != -signal.SIGKILL:
            self._fault(process, "ended by itself")
        self._count(process)
        if self.draw.random() < 0.5:
            self._spoil_files(process.folder)
        process.begin()

    def kill_server(self) -> None:
        """Kill the server, which loses its values, and restart it after some time."""
        self.server.kill()
        time.sleep(self.draw.uniform(0, 1.5))
        self.server.start()

    def hang_server(self) -> None:
        """Stop the server for less or more time than a call waits."""
        self.server.hang()
        time.sleep(self.draw.uniform(0.05, 1.5))
        self.server.go_on()

    def empty_server(self) -> None:
        """Remove all values of the server."""
        self.server.client().flushall()

    def jump_clock(self) -> None:
        """Set the time of day."""
        self.clock.jump(self.draw.choice(_JUMPS))

    def spoil_values(self) -> None:
        """Change, cut and swap some values of the server."""
        client = self.server.client()
        for _ in range(20):
            name, other = client.randomkey(), client.randomkey()
            value = client.get(name) if name else None
            if not value:
                continue
            at = self.draw.randrange(len(value))
            changed = bytes([value[at] ^ (1 << self.draw.randrange(8))])
            spoilt = (
                value[:at] + changed + value[at + 1 :],
                value[:at],
                client.get(other) or b"",
            )
            client.set(name, self.draw.choice(spoilt))

    def _spoil_files(self, folder: Path) -> None:
        files = [path for path in folder.rglob("*") if path.is_file() and path.stat().st_size]
        for path in self.draw.sample(files, min(3, len(files))):
            with path.open("r+b") as file:
                file.seek(self.draw.randrange(path.stat().st_size))
                file.write(self.draw.randbytes(self.draw.choice([1, 16, 5000])))

    # ---- the whole -----------------------------------------------------------------------------
    def run(self, seconds: float) -> bool:
        """Disturb the processes for `seconds`, then end them; return whether no fault was found."""
        blows: list[Callable[[], None]] = [self.kill_process, self.spoil_values] * 3
        blows += [self.kill_server, self.hang_server, self.hang_server]
        blows += [self.empty_server, self.jump_clock]
        ends = time.monotonic() + seconds
        told = time.monotonic()
        while time.monotonic() < ends and not self.faults:
            time.sleep(self.draw.uniform(*_PAUSE))
            blow = self.draw.choice(blows)
            self.blows[blow.__name__] += 1
            blow()
            for process in self.processes:
                if process.process.poll() is not None:
                    self._fault(process, "ended by itself")
                elif process.silent_seconds() > 1 + _LONGEST_CALL:
                    self._fault(process, "hangs")
            if time.monotonic() > told + 30:
                told = time.monotonic()
                print(f"{round(ends - told)} s to go; {dict(self.blows)}", flush=True)
        for process in self.processes:
            process.await_first_line()
            process.process.terminate()
        for process in self.processes:
            self._end(process)
        return not self.faults

    def _end(self, process: Process) -> None:
        try:
            code = process.process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            return self._fault(process, "does not end")
        self._count(process)
        if code != 0 or not process.last_line().get("is_last"):
            self._fault(process, f"ended with {code}")
        return None

    def _count(self, process: Process) -> None:
        line = process.last_line()
        longest = line.pop("longest", 0.0)
        self.totals.update({name: n for name, n in line.items() if name != "is_last"})
        if longest > _LONGEST_CALL:
            self._fault(process, f"waited {longest} s in a call")

    def _fault(self, process: Process, what: str) -> None:
        end = process.log.read_text(errors="replace")[-3000:]
        self.faults.append(f"{process.log.name} {what}:\n{end}")


def main() -> int:
    """Run the soak and print its counters."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--processes", type=int, default=6)
    parser.add_argument(
        "--folder", type=Path, help="folder for files and logs; default: a temporary folder"
    )
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="kvcore-soak-") as temporary:
        folder = options.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        with Soak(folder, options.seed, options.processes) as soak:
            is_right = soak.run(options.minutes * 60)
    print("\n".join(soak.faults))
    for name, n in (*soak.blows.items(), *soak.totals.items()):
        print(f"{name:24} {n:>14,}")
    print(f"{options.minutes:g} minutes, seed {options.seed}: {len(soak.faults)} faults")
    return 0 if is_right else 1


if __name__ == "__main__":
    sys.exit(main())
