# SPDX-License-Identifier: Apache-2.0
"""An engine whose model reads every token of a sequence from its pages, to expose wrong pages."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from builders import in_groups
from kvcore import KVCacheParams, PagedKVCacheManager, TextGenerationContext
from kvcore.scheduler import Batch, Request, Scheduler

VOCABULARY = 23


def next_token(salt: int, tokens: Sequence[int]) -> int:
    """Return the next token of a text; sequences of one prompt differ by their salt."""
    weighed = sum((place + 1) * token for place, token in enumerate(tokens))
    return (weighed + 7 * salt + len(tokens)) % VOCABULARY


def alone(
    prompt: Sequence[int], limit: int, salt: int = 0, stop_tokens: Collection[int] = ()
) -> list[int]:
    """Return the text of a request that runs without any cache."""
    text = list(prompt)
    while len(text) < len(prompt) + limit:
        text.append(next_token(salt, text))
        if text[-1] in stop_tokens:
            break
    return text


def make_manager(
    num_pages: int,
    page_size: int = 4,
    *,
    replicas: int = 1,
    caching: bool = True,
    host: bool = False,
    max_batch_size: int = 8,
    **options: Any,
) -> PagedKVCacheManager:
    params = KVCacheParams(
        "float32",
        n_kv_heads=1,
        head_dim=1,
        num_layers=1,
        page_size=page_size,
        enable_prefix_caching=caching,
        enable_kvcache_swapping_to_host=host,
        host_kvcache_swap_space_gb=0.001 if host else None,
        n_devices=replicas,
        data_parallel_degree=replicas,
    )
    return PagedKVCacheManager(
        params,
        max_batch_size * replicas,
        256,
        devices=("cpu",) * replicas,
        num_pages=num_pages,
        enable_runtime_checks=True,
        **in_groups(options),
    )


def make_request(
    name: Any,
    prompt: Sequence[int],
    limit: int,
    *,
    copies: int = 1,
    make_context: Any = TextGenerationContext,
    **options: Any,
) -> Request:
    """Return a request with siblings; the number of a sibling is its owner and salt."""
    leader, *rest = (
        Request(make_context((name, n), list(prompt)), limit, owner=n, **options)
        for n in range(copies)
    )
    leader.siblings = rest
    return leader


class ToyEngine:
    """An engine that runs a scheduler's batches over the pages of its manager."""

    def __init__(self, manager: PagedKVCacheManager, **options: Any) -> None:
        self.manager = manager
        self.scheduler = Scheduler(manager, **options)
        shape = manager.total_num_pages, manager.params.page_size
        self._pools = [np.full(shape, -1) for _ in range(manager.num_replicas)]
        self.batches: list[Batch] = []

    def step(self, **options: Any) -> list[Request] | None:
        """Run one step; return None if there is nothing to run."""
        batch = self.scheduler.next_batch(**options)
        if batch is None:
            return None
        self.batches.append(batch)
        return self.scheduler.update(batch, self.run(batch))

    def run_all(self) -> list[Request]:
        """Run until no request is left; return the requests in the order of their ends."""
        ended: list[Request] = []
        while (now := self.step()) is not None:
            ended += now
        assert len(self.scheduler) == self.scheduler.num_running == 0
        assert self.manager.num_free_blocks == self.manager.total_num_pages * len(self._pools)
        return ended

    def run(self, batch: Batch) -> npt.NDArray[np.int32]:
        """Run the model; return int32 [num_steps, S]."""
        for replica, source, target, count in batch.copies.tolist():
            pool = self._pools[replica]
            pool[target, :count] = pool[source, :count]
        rows = [self._row(batch, row) for row in range(len(batch.contexts))]
        told = np.zeros((batch.num_steps, len(batch.requests)), np.int32)
        texts = [list(context.tokens[: context.active_idx]) for context in batch.contexts]
        starts = [context.start_idx for context in batch.contexts]
        for step in range(batch.num_steps):
            for (pool, pages, places), text, start in zip(rows, texts, starts, strict=True):
                new = slice(start, len(text))
                pool[pages[new], places[new]] = text[new]
            for i, (request, row) in enumerate(zip(batch.requests, batch.rows, strict=True)):
                pool, pages, places = rows[row]
                count = len(texts[row])
                seen = pool[pages[:count], places[:count]].astype(int).tolist()
                told[step, i] = next_token(request.owner, seen)
            if batch.num_steps > 1:
                starts = [len(text) for text in texts]
                for row, token in zip(batch.rows, told[step].tolist(), strict=True):
                    texts[row].append(token)
        return told

    def _row(self, batch: Batch, row: int) -> tuple[Any, Any, Any]:
        """Return a row's pool [pages, page_size], and the page and offset of each token."""
        ends = np.cumsum([len(each.cache_lengths) for each in batch.inputs])
        replica = int(np.searchsorted(ends, row, side="right"))
        inputs = batch.inputs[replica]
        row -= int(ends[replica]) - len(inputs.cache_lengths)
        page_size = self.manager.params.page_size
        pages = np.repeat(inputs.lookup_table[row].astype(int), page_size)
        places = np.arange(len(pages)) % page_size
        has_pool = inputs.blocks is not None
        pool = inputs.blocks[:, 0, 0, :, 0, 0] if has_pool else self._pools[replica]
        return pool, pages, places


def tokens_of(request: Request) -> list[int]:
    """Return all tokens of a request, prompt and generated."""
    return [int(token) for token in request.context.tokens]
