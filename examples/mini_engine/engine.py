# SPDX-License-Identifier: Apache-2.0
"""The engine: it takes requests, and returns tokens step by step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import count
from pathlib import Path
from typing import NamedTuple

import numpy as np

from kvcore import KVCacheParams, PagedKVCacheManager, TextGenerationContext, ops
from kvcore.scheduler import Batch, Request, Scheduler, is_soon_cached
from mini_engine.checkpoint import Config
from mini_engine.processes import WorkerProcesses
from mini_engine.worker import Served, Step, Worker, best_of


class Token(NamedTuple):
    """A new token of a sequence."""

    sequence: tuple[int, int]  # number of the prompt, and of its sample
    token: int
    finish_reason: str | None


class Draw(NamedTuple):
    """The parameters that choose the tokens of a request."""

    temperature: float
    seed: int


class Engine:
    """Serve a LlamaForCausalLM from a folder, in `workers` processes; 0: in this process."""

    def __init__(
        self,
        folder: Path,
        *,
        workers: int = 0,
        page_size: int = 16,
        num_pages: int = 512,
        max_running: int = 32,
        max_batch_tokens: int = 512,  # of a step; longer prompts run in chunks
    ) -> None:
        self.config = Config.read(folder)
        devices = max(1, workers)
        params = KVCacheParams.from_hf_config(
            folder, "float32", page_size=page_size, n_devices=devices, enable_prefix_caching=True
        )
        self.manager = PagedKVCacheManager(
            params,
            max_running,
            max_seq_len=min(self.config.max_positions, num_pages * page_size),
            devices=["cpu"] * devices,
            num_pages=num_pages,
            blocks=None,  # only page ids: the workers own the pages
        )
        self.scheduler = Scheduler(
            self.manager,
            max_batch_tokens=max_batch_tokens,
            hold=lambda request: is_soon_cached(self.manager, request, self.scheduler.prefills),
        )
        self._numbers, model = count(), Served(folder, params, num_pages)
        self._processes: WorkerProcesses | None = None
        if workers > 0:
            self._processes = WorkerProcesses(model, max_batch_tokens * self.config.hidden)
            self._run = self._processes.run
        else:
            worker = Worker(model)
            self._run = lambda steps: [worker.run(step) for step in steps]

    def add(
        self, prompt: Sequence[int], limit: int, n: int = 1, temperature: float = 0, seed: int = 0
    ) -> int:
        """Queue a prompt for `n` sequences of up to `limit` new tokens each; return its number.

        Temperature 0 chooses the likeliest token. At other temperatures, the same seed draws the
        same tokens. They do not depend on other requests or on the number of workers.
        """
        if not 0 <= min(prompt, default=-1) <= max(prompt) < self.config.vocabulary:
            raise ValueError(f"prompt must have tokens from 0 to {self.config.vocabulary - 1}")
        if n < 1 or seed < 0 or not 0 <= temperature < np.inf:
            given = f"n is {n}, temperature {temperature}, seed {seed}"
            raise ValueError(f"{given}; must be at least 1, 0 and 0, and finite")
        number, requests = next(self._numbers), []
        for sample in range(n):
            context = TextGenerationContext((number, sample), list(prompt))
            owner = Draw(temperature, seed)
            requests.append(Request(context, limit, self.config.eos, owner=owner))
        requests[0].siblings = requests[1:]  # forked after the prompt has run
        self.scheduler.add(requests[0])
        return number

    def step(self) -> list[Token]:
        """Run one step and return its tokens; an unfinished prompt has no token."""
        batch = self.scheduler.next_batch()
        if batch is None:
            return []
        tokens = best_of(self._run(self._steps(batch)))
        self.scheduler.update(batch, tokens)
        return [Token(r.context.request_id, r.last_token, r.finish_reason) for r in batch.requests]

    def stream(self) -> Iterator[Token]:
        """Yield the tokens of each step until every request has ended."""
        while len(self.scheduler):
            yield from self.step()

    def close(self) -> None:
        """Drop the requests that have not ended, and end the workers."""
        self.scheduler.close()
        if self._processes is not None:
            self._processes.close()

    def _steps(self, batch: Batch) -> list[Step]:
        """Return the step of each worker for a batch."""
        packed = ops.pack(batch.inputs[0], batch.contexts)
        temperatures = np.array([r.owner.temperature for r in batch.requests], np.float32)
        seeds = [(r.owner.seed, *r.context.request_id, r.context.end_idx) for r in batch.requests]
        same = batch.copies, packed, batch.rows, temperatures, seeds
        return [Step(inputs, *same) for inputs in batch.inputs]
