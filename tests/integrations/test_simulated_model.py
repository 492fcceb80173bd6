# SPDX-License-Identifier: Apache-2.0
"""A model that writes a digest of the prefix into each token's slot, and checks it at reads.

If the manager makes a mistake about ownership (a page in two requests, a missing copy, an outdated
table, a prefix of another tenant), some slot does not hold its reader's value.
"""

from __future__ import annotations

import dataclasses
import random
import zlib
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import kvcore
from builders import make_manager, make_params
from foreign_context import Context

Words = npt.NDArray[np.uint32]


@dataclasses.dataclass(frozen=True)
class Setup:
    """One kind of manager."""

    name: str
    page_size: int
    num_pages: int
    replicas: int = 1
    shards: int = 1
    pool: str = "manager"  # or "caller", or "none": only ids, the engine owns the tensors
    caching: bool = True
    dedup: bool = True
    partial: bool = True
    is_mla: bool = False
    foreign: bool = False


SETUPS = [
    Setup("page of one token", 1, 40),
    Setup("small pages", 2, 24),
    Setup("odd pages, two replicas", 3, 14, replicas=2),
    Setup("two shards", 4, 16, shards=2),
    Setup("data and tensor parallel", 4, 10, replicas=2, shards=2, foreign=True),
    Setup("large pages", 16, 8),
    Setup("pages longer than prompts", 128, 6),
    Setup("without deduplication", 3, 16, dedup=False),
    Setup("without partial reuse", 4, 12, partial=False),
    Setup("without caching", 4, 12, caching=False),
    Setup("latent attention", 4, 12, is_mla=True),
    Setup("pool of the caller", 4, 12, pool="caller", shards=2),
    Setup("pool of the engine", 4, 12, pool="none"),
    Setup("pool of the engine, large pages", 16, 6, pool="none", replicas=2, foreign=True),
]


def digests(context: Any) -> Words:
    """Return one word per token that depends on the namespace and on every token up to it."""
    state = zlib.crc32(repr((context.extra_key, context.cache_salt)).encode())
    words = []
    for token in context.tokens.tolist():
        state = (state * 1_000_003 + token * 7919 + 12345) & 0xFFFFFFFF
        words.append(state)
    return np.array(words, np.uint32)


class Model:
    """A model without computation that writes and checks K and V slots."""

    def __init__(self, manager: kvcore.PagedKVCacheManager, setup: Setup) -> None:
        self.manager, self.setup = manager, setup

    def codes(self, words: Words, pool: Words, shard: int) -> Words:
        """Return the values of the slots of `words`: distinct per kv, layer, head, element."""
        kv, layers, _, heads, dim = pool.shape[1:]
        slots = np.arange(kv * layers * heads * dim, dtype=np.uint32).reshape(
            kv, layers, heads, dim
        )
        slots += np.uint32(0 if self.setup.is_mla else shard * 1000)
        return words[:, None, None, None, None] * np.uint32(2654435761) + slots

    def locate(self, table: Words, positions: npt.NDArray[np.int64]) -> tuple[Any, Any]:
        size = self.setup.page_size
        pages = table[positions // size].astype(np.int64)
        assert (pages < self.manager.total_num_pages).all(), "a token in an unassigned page"
        return pages, positions % size

    def forward(
        self, pool: Words, shard: int, table: Words, words: Words, cached: int, length: int
    ) -> None:
        """Read the cached prefix of one row, and write its new tokens."""
        pages, offsets = self.locate(table, np.arange(cached))
        found = pool[pages, :, :, offsets]
        np.testing.assert_array_equal(found, self.codes(words[:cached], pool, shard))
        pages, offsets = self.locate(table, np.arange(cached, length))
        pool[pages, :, :, offsets] = self.codes(words[cached:length], pool, shard)


class Engine:
    """A scheduler with random decisions, over a family of prompts with common prefixes."""

    def __init__(self, setup: Setup, seed: int) -> None:
        self.setup, self.random = setup, random.Random(seed)
        self.pools = self.make_pools()
        given: Any = {"manager": "allocate", "caller": self.pools, "none": None}[setup.pool]
        self.manager = make_manager(
            setup.page_size,
            setup.num_pages,
            replicas=setup.replicas,
            shards=setup.shards,
            caching=setup.caching,
            params={"is_mla": setup.is_mla, "n_kv_heads": 2 * setup.shards},
            dedup=setup.dedup,
            partial_page_reuse=setup.partial,
            blocks=given,
        )
        self.model = Model(self.manager, setup)
        self.waiting: list[Any] = []
        self.running: list[Any] = []
        self.ran: set[Any] = set()  # since their claim
        self.arrived = self.served = self.preempted = self.forked = self.truncated = 0

    def make_pools(self) -> list[npt.NDArray[np.float32]]:
        setup = self.setup
        heads, kv = (1, 1) if setup.is_mla else (2, 2)
        shape = (setup.num_pages, kv, 2, setup.page_size, heads, 2)
        return [np.zeros(shape, np.float32) for _ in range(setup.replicas * setup.shards)]

    # -- requests --------------------------------------------------------------------------------
    def arrive(self) -> None:
        draw, longest = self.random, self.setup.page_size * self.setup.num_pages // 2
        base = [draw.randrange(3)] * draw.randint(1, max(1, longest // 2))
        tail = [draw.randrange(3) for _ in range(draw.randint(1, max(1, longest // 3)))]
        self.arrived += 1
        salt = draw.choice([None, None, "", "tenant"])
        kind = Context if self.setup.foreign else kvcore.TextGenerationContext
        self.waiting.append(kind(("request", self.arrived), base + tail, cache_salt=salt))

    def admit(self) -> None:
        context = self.waiting.pop(self.random.randrange(len(self.waiting)))
        advised = self.manager.get_or_recommend_replica(context)
        replica = self.random.choice([advised, self.random.randrange(self.setup.replicas)])
        self.manager.external_claim(context.request_id, replica_idx=replica)
        self.running.append(context)

    def fork(self, parent: Any, written: int) -> None:
        """Fork some requests that continue from the written tokens of the parent's last step."""
        if len(self.running) > 6:
            return
        salt, children = parent.cache_salt, []
        for _ in range(self.random.randint(1, 2)):
            self.arrived += 1
            tail = [self.random.randrange(3) for _ in range(self.random.randint(1, 4))]
            ids = [*parent.tokens[:written].tolist(), *tail]
            children.append(type(parent)(("fork", self.arrived), ids, cache_salt=salt))
        self.manager.fork(parent.request_id, *children)
        self.running += children
        self.forked += 1

    def truncate(self, context: Any, n: int) -> None:
        """Truncate a request in the manager and in its context, or only in the context."""
        if context.request_id in self.ran and self.random.random() < 0.7:
            self.manager.truncate(context.request_id, n)
            self.truncated += 1
        context.rewind(n)

    def leave(self, context: Any) -> None:
        self.manager.release(context.request_id)
        self.ran.discard(context.request_id)
        self.running.remove(context)

    def preempt(self, context: Any) -> None:
        self.leave(context)
        self.waiting.append(context)
        self.preempted += 1

    def finish(self, context: Any) -> None:
        self.leave(context)
        self.served += 1

    # -- one iteration ---------------------------------------------------------------------------
    def iterate(self) -> None:
        draw = self.random
        if draw.random() < 0.5:
            self.arrive()
        while self.waiting and len(self.running) < 5 and draw.random() < 0.7:
            self.admit()
        if self.running and draw.random() < 0.15:
            parent = draw.choice(self.running)
            self.fork(parent, parent.start_idx)
        batch = draw.sample(self.running, draw.randint(0, len(self.running)))
        num_steps = draw.choice([1, 1, 1, 3])
        for context in batch:
            self.change(context)
        batch = self.reserve(batch, num_steps)
        batch.sort(key=self.manager.get_replica)
        for context in batch:
            if draw.random() < 0.3:
                context.active_idx = draw.randint(context.start_idx + 1, context.end_idx)
        if any(context.active_idx < context.end_idx for context in batch):
            num_steps = 1
        self.run(batch, num_steps)
        for context in list(self.running):
            too_long = context.end_idx > self.setup.page_size * self.setup.num_pages * 2 // 3
            if too_long or draw.random() < 0.08:
                self.finish(context)
        if draw.random() < 0.03:
            self.manager.reset_prefix_cache()

    def change(self, context: Any) -> None:
        """Append draft tokens, or take tokens back."""
        draw = self.random
        if context.active_idx == context.end_idx and draw.random() < 0.2 and context.start_idx:
            context.extend([draw.randrange(3) for _ in range(draw.randint(1, 3))])
        if draw.random() < 0.1:
            n = draw.randint(1, context.end_idx)
            self.truncate(context, n) if n <= context.start_idx else context.rewind(n)

    def reserve(self, batch: list[Any], num_steps: int) -> list[Any]:
        """Return the rows that fit; reserve all rows again if one was forked meanwhile."""
        for fork_rate in (0.05, 0.0):
            batch = [context for context in batch if self.make_room(context, num_steps)]
            batch = [context for context in batch if context in self.running]
            for context in batch:
                if self.random.random() < fork_rate:
                    self.fork(context, context.start_idx)
        return batch

    def make_room(self, context: Any, num_steps: int) -> bool:
        """Reserve, sometimes after preempting others; release the request if all attempts fail."""
        while context in self.running and not self.manager.maybe_reserve(context, num_steps):
            replica = self.manager.get_replica(context)
            others = [c for c in self.running if c is not context]
            others = [c for c in others if self.manager.get_replica(c) == replica]
            if not others:
                self.finish(context)
            else:
                self.preempt(others[-1])
        return context in self.running

    def run(self, batch: list[Any], num_steps: int) -> None:
        self.ran.update(context.request_id for context in batch)
        written = [context.start_idx for context in batch]
        inputs = self.manager.fetch(batch, num_steps)
        self.copy_pages()
        self.check_shared(batch, inputs)
        fed = [context.active_length for context in batch]
        grown = [digests(context)[: context.active_idx] for context in batch]
        for step in range(num_steps):
            self.forward(batch, inputs, grown)
            if step + 1 < num_steps:
                offsets = np.cumsum([0, *fed]).astype(np.uint32)
                splits = self.manager.get_data_parallel_splits(batch)
                previous = SimpleNamespace(input_row_offsets=offsets, data_parallel_splits=splits)
                inputs = self.manager.increment_cache_lengths(inputs, previous)
                grown = [self.with_sampled(words) for words in grown]
                fed = [1] * len(batch)
        if self.setup.pool != "none" and self.random.random() < 0.3:
            self.look(batch, grown, num_steps)
        when = self.random.choice(["before", "after", "not", "not"])
        for context, start in zip(batch, written, strict=True):
            if when == "before":
                self.fork(context, start)
            self.accept(context, num_steps)
            if when == "after":
                self.fork(context, min(start, context.start_idx))
        self.manager.step(batch)
        self.copy_pages()

    def sampled(self, words: Words) -> int:
        """Return equal tokens after equal prefixes, so requests also share pages of answers."""
        return int(words[-1]) % 3

    def with_sampled(self, words: Words) -> Words:
        state = (int(words[-1]) * 1_000_003 + self.sampled(words) * 7919 + 12345) & 0xFFFFFFFF
        return np.append(words, np.uint32(state))

    def accept(self, context: Any, num_steps: int) -> None:
        drafted = context.start_idx > 0 and context.active_idx == context.end_idx
        if drafted and num_steps == 1 and context.active_length > 1:
            rejected = self.random.randint(0, min(2, context.active_length - 1))
            self.truncate(context, context.end_idx - rejected)
        for _ in range(num_steps):
            context.update(self.sampled(digests(context)[: context.active_idx]))

    def forward(self, batch: Sequence[Any], inputs: Sequence[Any], grown: Sequence[Words]) -> None:
        for device, entry in enumerate(inputs):
            replica, shard = divmod(device, self.setup.shards)
            pool = self.pools[device] if self.setup.pool == "none" else entry.blocks
            rows = self.rows_of(batch, replica)
            assert entry.cache_lengths.shape == (len(rows),)
            for row, index in enumerate(rows):
                table, cached = entry.lookup_table[row], int(entry.cache_lengths[row])
                words = grown[index]
                self.model.forward(pool.view(np.uint32), shard, table, words, cached, len(words))

    def rows_of(self, batch: Sequence[Any], replica: int) -> list[int]:
        return [i for i, c in enumerate(batch) if self.manager.get_replica(c) == replica]

    def look(self, batch: Sequence[Any], grown: Sequence[Words], num_steps: int) -> None:
        """Load random written elements through the views of the batch."""
        for device, view in enumerate(self.manager.fetch_collection(batch, num_steps)):
            replica, shard = divmod(device, self.setup.shards)
            pool = self.pools[device].view(np.uint32)
            for row, index in enumerate(self.rows_of(batch, replica)):
                tok = self.random.randrange(len(grown[index]))
                kv, layers, _, heads, width = self.pools[device].shape[1:]
                kv, layer, head, dim = map(self.random.randrange, (kv, layers, heads, width))
                cache = view.get_value_cache(layer) if kv else view.get_key_cache(layer)
                expected = self.model.codes(grown[index][tok : tok + 1], pool, shard)
                number = expected[0, kv, layer, head, dim].view(np.float32)
                np.testing.assert_array_equal(cache.load(row, head, tok, dim), number)

    def check_shared(self, batch: Sequence[Any], inputs: Sequence[Any]) -> None:
        """Check that rows with shared pages have the same prefix, and the same pages."""
        for group in self.manager.shared_prefixes(batch):
            rows, n = self.rows_of(batch, group.replica), group.num_tokens
            prefixes = {digests(batch[rows[row]])[n - 1] for row in group.rows}
            table = inputs[group.replica * self.setup.shards].lookup_table
            pages = {tuple(table[row, : -(-n // self.setup.page_size)]) for row in group.rows}
            assert len(prefixes) == 1
            assert len(pages) == 1 or not self.setup.dedup

    def copy_pages(self) -> None:
        """Run the copies that are due in a manager without a pool."""
        copies = self.manager.take_copies().tolist()
        assert self.setup.pool == "none" or not copies
        for replica, source, target, tokens in copies:
            for shard in range(self.setup.shards):
                pool = self.pools[replica * self.setup.shards + shard]
                pool[target, :, :, :tokens] = pool[source, :, :, :tokens]


CASES = [
    pytest.param(setup, seed, id=f"{setup.name}, seed {seed}")
    for setup in SETUPS
    for seed in range(8)
]


@pytest.mark.parametrize(("setup", "seed"), CASES)
def test_every_request_reads_its_own_prefix_back(setup: Setup, seed: int) -> None:
    engine = Engine(setup, seed)
    for _ in range(120):
        engine.iterate()
    for context in list(engine.running):
        engine.finish(context)
    manager = engine.manager
    assert manager.num_free_blocks == manager.total_num_pages * manager.num_replicas
    assert engine.served > 5, "the scene is too small for a useful test"


def test_scenes_reuse_evict_copy_and_preempt() -> None:
    """Check that the scenes above cover reuse, eviction, copies and preemption."""
    seen = {"cache_tokens": 0, "evicted_pages": 0, "copied_tokens": 0}
    done = {"preempted": 0, "forked": 0, "truncated": 0}
    for setup in SETUPS[:4]:
        engine = Engine(setup, 0)
        for _ in range(120):
            engine.iterate()
        for name in done:
            done[name] += getattr(engine, name)
        for name in seen:
            seen[name] += getattr(engine.manager.metrics, name)
    assert min(*seen.values(), *done.values()) > 0, (seen, done)


def test_manager_pool_is_zeroed_and_shared_by_every_fetch() -> None:
    params = make_params(4)
    manager = make_manager(4, 8, blocks="allocate")
    (first,) = manager.fetch([])
    (second,) = manager.fetch([])
    assert first.blocks is second.blocks or np.shares_memory(first.blocks, second.blocks)
    assert first.blocks.shape == (8, 2, 2, 4, 1, 2)
    assert first.blocks.nbytes == 8 * params.bytes_per_page
    assert not first.blocks.any()
