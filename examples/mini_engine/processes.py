# SPDX-License-Identifier: Apache-2.0
"""Workers in processes of their own, which add up their parts in shared memory.

Pipes and memory have no names: they are gone with the processes that were given them.
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
    """A worker process has ended before it was told to."""


class Peers:
    """The other ranks: memory that all see, and a socket to each to say that something is there."""

    def __init__(self, rank: int, memory: Any, width: int, sockets: list[socket.socket]) -> None:
        # Two turns: a rank that is ahead writes the next parts while others still read these; it is
        # never two ahead, because a sum waits for all.
        self._turns = np.frombuffer(memory, np.float32).reshape(2, len(sockets) + 1, width)
        self._rank, self._sockets, self._turn = rank, sockets, 0

    def sum_up(self, part: Floats) -> Floats:
        """Add what all ranks call this with, in the order of ranks: all get the same bits."""
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
    """Be a worker process: run what comes, until the scheduler or another worker is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the scheduler, which ends us
    with suppress(EOFError, ConnectionError):
        worker = Worker(model, peers[0], Peers(*peers).sum_up)
        link.send("ready")
        while True:
            link.send(worker.run(link.recv()))


class WorkerProcesses:
    """Start a process for each rank; send steps to all of them and gather what they choose."""

    def __init__(self, model: Served, max_elements: int) -> None:
        start, ranks = multiprocessing.get_context("spawn"), range(model.params.n_devices)
        memory = start.RawArray("f", 2 * len(ranks) * max_elements)
        sockets: list[list[socket.socket]] = [[] for _ in ranks]
        for pair in combinations(ranks, 2):
            for rank, end in zip(pair, socket.socketpair(), strict=True):
                sockets[rank].append(end)
        self._links, theirs = zip(*(start.Pipe() for _ in ranks), strict=True)
        threads = max(1, (os.cpu_count() or 1) // len(ranks))
        os.environ.setdefault("OPENBLAS_NUM_THREADS", str(threads))  # of those that start now
        given = [(theirs[n], (n, memory, max_elements, sockets[n]), model) for n in ranks]
        self._processes = [start.Process(target=work, args=args, daemon=True) for args in given]
        for process in self._processes:
            process.start()
        for end in (*theirs, *(end for ends in sockets for end in ends)):
            end.close()  # a process alone has its ends, so that they end with it
        self.run([])  # nothing but wait until all are ready

    def run(self, steps: list[Step]) -> list[Choice]:
        """Run a step in all processes; WorkerError, and no process left, if one has ended."""
        try:
            for link, step in zip(self._links, steps, strict=False):
                link.send(step)
            return [link.recv() for link in self._links]
        except (EOFError, OSError):
            self.close()
            codes = [process.exitcode for process in self._processes]
            raise WorkerError(
                f"a worker has ended: exit codes {codes}, 0 because of another; see stderr above"
            ) from None
        except BaseException:  # an answer that nobody took would be that of the next step
            self.close()
            raise

    def close(self) -> None:
        """End the processes, however far they are."""
        for link in self._links:
            link.close()
        for process in self._processes:
            process.join(1)
            process.terminate()
            process.join()
