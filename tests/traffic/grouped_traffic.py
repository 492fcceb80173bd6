# SPDX-License-Identifier: Apache-2.0
"""Random requests on managers with windows and other groups; all contents are checked."""

from __future__ import annotations

import contextlib
import itertools
import random
from dataclasses import replace
from typing import Any

import numpy as np

from builders import in_groups
from kvcore import CapacityError, KVCacheParams, PagedKVCacheManager, TextGenerationContext, ops
from kvcore.groups import ChunkedLocal, FullAttention, SlidingWindow
from kvcore.sizing import pages_per_sequence


def params_of(*groups: Any, **options: Any) -> KVCacheParams:
    layers = 1 + max(layer for group in groups for layer in group.layers)
    fields: dict[str, Any] = {"n_kv_heads": 1, "head_dim": 4, "page_size": 2}
    fields |= {"enable_prefix_caching": True, "groups": groups, "num_layers": layers}
    return KVCacheParams("float32", **(fields | options))


def manager_of(params: KVCacheParams, num_pages: int = 64, **options: Any) -> PagedKVCacheManager:
    fields = {"max_batch_size": 16, "max_seq_len": 400, "enable_runtime_checks": True}
    return PagedKVCacheManager(params, num_pages=num_pages, **in_groups(fields | options))


WRITE_POLICIES = ("write_through", "write_through_selective", "write_back")

SHAPES = {
    "one width": params_of(FullAttention([0, 3]), SlidingWindow([1, 2], 5)),
    "chunks": params_of(FullAttention([0]), ChunkedLocal([1, 2], 6)),
    "no full group": params_of(SlidingWindow([0, 1], 5)),
    "shared layers": params_of(
        FullAttention([0]), SlidingWindow([1], 4), shared={2: 1, 3: 0}, num_layers=4
    ),
    "wide values": params_of(FullAttention([0]), SlidingWindow([1], 5), v_head_dim=8),
    "latent rows": params_of(FullAttention([0]), SlidingWindow([1], 5), is_mla=True),
    "other heads": params_of(
        FullAttention([0, 1], n_kv_heads=2), SlidingWindow([2, 3], 6, n_kv_heads=1)
    ),
    "devices": params_of(
        FullAttention([0]),
        SlidingWindow([1], 5),
        n_kv_heads=2,
        n_devices=4,
        data_parallel_degree=2,
    ),
}


def value_of(tokens: list[int], layer: int, part: int) -> float:
    """Return the value of a prefix in one layer; it is exact in float32."""
    return float(hash((tuple(tokens), layer, part)) % 1_000_003)


def with_host_tier(params: KVCacheParams, host_pages: int) -> KVCacheParams:
    """Return the same parameters with `host_pages` host pages per replica."""
    space = (host_pages + 0.5) * params.bytes_per_page / 2**30
    return replace(params, enable_kvcache_swapping_to_host=True, host_kvcache_swap_space_gb=space)


class Traffic:
    """Random requests of one manager, whose layers write and read as a model's layers do."""

    def __init__(
        self,
        params: KVCacheParams,
        seed: int,
        num_pages: int = 60,
        devices: Any = None,
        **options: Any,
    ) -> None:
        self.random = random.Random(seed)
        self.params = params
        devices = devices or ["cpu"] * params.n_devices
        self.manager = manager_of(params, num_pages=num_pages, devices=devices, **options)
        self.names = itertools.count()
        self.live: dict[str, TextGenerationContext] = {}
        self.prompts = [self.tokens(20) for _ in range(3)]
        self.owners = {**{i: i for i in range(params.num_layers)}, **(params.shared or {})}
        self.read = 0

    def tokens(self, n: int) -> list[int]:
        return [self.random.randrange(2) for _ in range(n)]

    def claim(self) -> None:
        if len(self.live) == 5:
            self.release()
        name = f"r{next(self.names)}"
        prompt = self.random.choice(self.prompts)[: self.random.randrange(20)]
        self.manager.claim(name, self.random.randrange(self.params.data_parallel_degree))
        context = TextGenerationContext(name, prompt + self.tokens(self.random.randrange(1, 9)))
        self.live[name] = context
        self.chunk(context)

    def chunk(self, context: TextGenerationContext) -> None:
        context.active_idx = self.random.randint(context.start_idx + 1, context.end_idx)

    def release(self) -> None:
        if self.live:
            self.end_request(self.random.choice(list(self.live)))

    def end_request(self, name: str) -> None:
        self.manager.release(name)
        del self.live[name]

    def fork(self) -> None:
        if not self.live or len(self.live) == 5:
            return
        parent = self.random.choice(list(self.live.values()))
        tokens = [int(t) for t in parent.tokens[: parent.start_idx]] + self.tokens(3)
        name = f"f{next(self.names)}"
        child = TextGenerationContext(name, tokens)
        self.manager.fork(parent.request_id, child)
        self.live[name] = child

    def crowd_out(self) -> None:
        """Reserve a new prompt that needs most pages of a replica, so cached pages are evicted."""
        name = f"c{next(self.names)}"
        self.manager.claim(name, self.random.randrange(self.params.data_parallel_degree))
        tokens = list(range(9, 9 + self.random.randrange(8, 2 * self.manager.total_num_pages)))
        with contextlib.suppress(CapacityError):
            self.manager.reserve(TextGenerationContext(name, tokens))
        self.manager.release(name)

    def act(self, verbs: list[str], n: int) -> None:
        for _ in range(n):
            getattr(self, self.random.choice(verbs))()

    def end(self) -> None:
        while self.live:
            self.release()
        total = self.manager.total_num_pages * self.params.data_parallel_degree
        assert self.manager.num_free_blocks == total

    def step(self) -> None:
        batch = [c for c in self.live.values() if self.random.random() < 0.7]
        batch.sort(key=self.manager.get_replica)
        for context in batch:
            if not self.reserve(context):
                return
        if not batch:
            return
        inputs = self.manager.fetch(batch)
        splits = self.manager.get_data_parallel_splits(batch)
        shards = self.params.tensor_parallel_degree
        for i, each in enumerate(inputs):
            rows = batch[splits[i // shards] : splits[i // shards + 1]]
            for layer in range(self.params.num_layers):
                self.run_layer(each, layer, rows)
        for context in batch:
            context.update(self.random.randrange(2))
        self.manager.step(batch)
        for context in batch:
            self.chunk(context)

    def reserve(self, context: TextGenerationContext) -> bool:
        """Reserve, or make room: end the request if it outgrew the pool, else end any request."""
        try:
            if self.manager.reserve(context):
                return True
        except CapacityError:
            needed = pages_per_sequence(self.params, context.end_idx)
            assert needed > self.manager.total_num_pages, context.end_idx
            self.end_request(str(context.request_id))
            return False
        self.release()
        return False

    def run_layer(self, inputs: Any, layer: int, rows: list[TextGenerationContext]) -> None:
        if not rows:
            return
        pools = ops.batch.layer_pools(inputs, layer)
        if layer == self.owners[layer]:
            self.write(inputs, layer, rows, [pool.shape[2:] for pool in pools.pools])
        group = next(g for g in self.params.attention_groups if self.owners[layer] in g.layers)
        firsts = [group.skipped_tokens(context.start_idx) for context in rows]
        self.check(inputs, layer, rows, firsts)

    def values(self, layer: int, context: TextGenerationContext, part: int, first: int) -> Any:
        """Return the values in the pages for positions from `first` on."""
        tokens = [int(t) for t in context.tokens]
        positions = range(first, context.active_idx)
        return np.array([value_of(tokens[: p + 1], layer, part) for p in positions], np.float32)

    def write(self, inputs: Any, layer: int, rows: Any, shapes: Any) -> None:
        arrays: list[Any] = [None, None]
        for part, shape in enumerate(shapes):
            values = np.concatenate([self.values(layer, c, part, c.start_idx) for c in rows])
            arrays[part] = np.empty((len(values), *shape), np.float32)
            arrays[part][...] = values[:, None, None]
        self.append(inputs, layer, arrays)

    def append(self, inputs: Any, layer: int, arrays: list[Any]) -> None:
        ops.append(inputs, layer, arrays[0], arrays[1], inputs.row_offsets)

    def check(self, inputs: Any, layer: int, rows: Any, firsts: list[int]) -> None:
        """Read all tokens that the layer may read of each row, from `firsts` on."""
        pools = ops.batch.layer_pools(inputs, layer)
        for part, pool in enumerate(pools.pools):
            for row, (context, first) in enumerate(zip(rows, firsts, strict=True)):
                wanted = self.values(self.owners[layer], context, part, first)
                positions = np.arange(first, context.active_idx)
                pages, at = divmod(positions, pool.shape[1])
                found = pool[pools.lookup_table[row, pages], at]
                assert np.all(found == wanted[:, None, None]), (layer, row, first)
                self.read += len(positions)
