# SPDX-License-Identifier: Apache-2.0
"""Worker processes, which add up their parts in shared memory.

Pipes and memory have no names: they disappear when the processes that use them end.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
from contextlib import suppress
from itertools import combinations
from typing import Any

import numpy as np

from mini_engine.model import Floats
from mini_engine.worker import Choice, Served, Step, Worker


class WorkerError(RuntimeError):
    """A worker process has ended unexpectedly."""


class Peers:
    """The other ranks: shared memory, and a socket to each rank for its signals."""

    def __init__(self, rank: int, memory: Any, width: int, sockets: list[socket.socket]) -> None:
        # Two turns: a fast rank writes its next part while other ranks still read the parts of this
        # turn. It is never two turns ahead, because a sum waits for all ranks.
        self._turns = np.frombuffer(memory, np.float32).reshape(2, len(sockets) + 1, width)
        self._rank, self._sockets, self._turn = rank, sockets, 0

    def sum_up(self, part: Floats) -> Floats:
        """Return the sum of all parts, in the order of ranks: all ranks get the same bits."""
        parts = self._turns[self._turn, :, : part.size]
        self._turn ^= 1
        parts[self._rank] = part.ravel()
        for peer in self._sockets:
            peer.send(b".")
        for peer in self._sockets:
            if not peer.recv(1):
                raise EOFError("another worker has ended")
        total: Floats = parts.sum(axis=0).reshape(part.shape)
        return total


def work(link: Any, peers: tuple[Any, ...], model: Served) -> None:
    """Run the steps that a worker process receives, until the scheduler or a worker has ended."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the scheduler handles Ctrl-C and ends us
    with suppress(EOFError, ConnectionError):
        worker = Worker(model, peers[0], Peers(*peers).sum_up)
        link.send("ready")
        while True:
            link.send(worker.run(link.recv()))


class WorkerProcesses:
    """Start a process for each rank; send steps to all ranks and gather their choices."""

    def __init__(self, model: Served, max_elements: int) -> None:
        start, ranks = multiprocessing.get_context("spawn"), range(model.params.n_devices)
        memory = start.RawArray("f", 2 * len(ranks) * max_elements)
        sockets: list[list[socket.socket]] = [[] for _ in ranks]
        for pair in combinations(ranks, 2):
            for rank, end in zip(pair, socket.socketpair(), strict=True):
                sockets[rank].append(end)
        self._links, theirs = zip(*(start.Pipe() for _ in ranks), strict=True)
        threads = max(1, (os.cpu_count() or 1) // len(ranks))
        os.environ.setdefault("OPENBLAS_NUM_THREADS", str(threads))  # for the new processes
        given = [(theirs[n], (n, memory, max_elements, sockets[n]), model) for n in ranks]
        self._processes = [start.Process(target=work, args=args, daemon=True) for args in given]
        for process in self._processes:
            process.start()
        for end in (*theirs, *(end for ends in sockets for end in ends)):
            end.close()  # only workers keep their ends, which close when they end
        self.run([])  # waits until all workers are ready

    def run(self, steps: list[Step]) -> list[Choice]:
        """Run a step in all processes; if a process has ended, end all and raise WorkerError."""
        try:
            for link, step in zip(self._links, steps, strict=False):
                link.send(step)
            return [link.recv() for link in self._links]
        except (EOFError, OSError):
            self.close()
            codes = [process.exitcode for process in self._processes]
            raise WorkerError(
                f"a worker has ended: exit codes {codes}, 0 if another failed; see stderr above"
            ) from None
        except BaseException:  # an unread answer would be taken for the next step's answer
            self.close()
            raise

    def close(self) -> None:
        """End the processes, also in the middle of a step."""
        for link in self._links:
            link.close()
        for process in self._processes:
            process.join(1)
            process.terminate()
            process.join()
