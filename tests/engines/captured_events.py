# SPDX-License-Identifier: Apache-2.0
"""Captures a trace from the cache events of a server, and looks for the prompts that were sent."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

SECONDS = 3.0  # the server repeats its old events at once


class EventsOfServer:
    """The endpoints of a server's events; their sockets are files in `folder`."""

    def __init__(self, folder: Path) -> None:
        self.endpoint = f"ipc://{folder / 'events'}"
        self.replay_endpoint = f"ipc://{folder / 'replay'}"
        self._target = folder / "trace.jsonl"

    def config(self) -> str:
        """Return the value of vLLM's option ``--kv-events-config``."""
        return json.dumps(
            {
                "enable_kv_cache_events": True,
                "publisher": "zmq",
                "endpoint": self.endpoint,
                "replay_endpoint": self.replay_endpoint,
            }
        )

    def problems(self, prompts: Sequence[Sequence[int]], block_size: int) -> list[str]:
        """Capture all events of the server; return a text for each prompt that is not found.

        The full blocks of a prompt must be the beginning of a request in the trace.
        """
        command = [sys.executable, "-m", "kvcore", "trace", "capture", self.endpoint]
        command += [str(self._target), "--replay-endpoint", self.replay_endpoint]
        command += ["--seconds", str(SECONDS), "--token-ids"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            return [f"kvcore trace capture ends with {done.returncode}: {done.stderr[-500:]}"]
        _, *rows = map(json.loads, self._target.read_text().splitlines())
        found = [tuple(row["tokens"]) for row in rows]
        missing = []
        for index, prompt in enumerate(prompts):
            full = tuple(prompt[: len(prompt) // block_size * block_size])
            if not any(tokens[: len(full)] == full for tokens in found):
                missing.append(f"prompt {index} is not in the captured trace")
        return missing


@contextmanager
def events_of_server() -> Iterator[EventsOfServer]:
    """Make a folder for the sockets of a server, until the end of the block."""
    with tempfile.TemporaryDirectory(prefix="kvcore-events-") as folder:
        yield EventsOfServer(Path(folder))
