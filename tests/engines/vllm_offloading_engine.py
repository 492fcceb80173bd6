# SPDX-License-Identifier: Apache-2.0
"""vLLM's scheduler and the two halves of its OffloadingConnector over kvcore's tiers, on a CPU.

For each token and layer the model writes bytes that depend on all tokens up to it. So the correct
contents of a block are known, whichever tier it came from.
"""

from __future__ import annotations

import copy
import time
import zlib
from collections.abc import Sequence
from typing import Any

import torch
from tests.v1.kv_connector.unit.utils import (  # type: ignore[import-not-found]
    create_model_runner_output,
    create_vllm_config,
)
from vllm import SamplingParams
from vllm.config import KVEventsConfig, KVTransferConfig, set_current_vllm_config
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.forward_context import ForwardContext
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import (
    get_request_block_hasher,
    init_none_hash,
    resolve_kv_cache_block_sizes,
)
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
    SlidingWindowSpec,
)
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

PAGE = 4


def full(*layers: str, heads: int = 1, width: int = 3) -> KVCacheGroupSpec:
    """Return a group of layers that keep all tokens."""
    spec = FullAttentionSpec(
        block_size=PAGE, num_kv_heads=heads, head_size=width, dtype=torch.float16
    )
    return KVCacheGroupSpec(list(layers), spec)


def window(*layers: str, tokens: int = 8) -> KVCacheGroupSpec:
    """Return a group of layers with a window."""
    spec = SlidingWindowSpec(
        block_size=PAGE, num_kv_heads=1, head_size=3, dtype=torch.float16, sliding_window=tokens
    )
    return KVCacheGroupSpec(list(layers), spec)


def marks(tokens: Sequence[int]) -> list[int]:
    """Return for each token a number that depends on all tokens up to it."""
    found, mark = [], 0
    for token in tokens:
        mark = zlib.crc32(int(token).to_bytes(4, "big"), mark)
        found.append(mark)
    return found


class Worker:
    """A rank: its memory, and the worker half of the connector."""

    def __init__(self, config: Any, cache_config: KVCacheConfig, rank: int) -> None:
        self.rank = rank
        config = copy.copy(config)
        config.parallel_config = copy.copy(config.parallel_config)
        config.parallel_config.rank = rank
        self.connector = OffloadingConnector(config, KVConnectorRole.WORKER, cache_config)
        self.layers: list[dict[str, torch.Tensor]] = []
        memory = torch.zeros(cache_config.kv_cache_tensors[0].size, dtype=torch.int8)
        for group in cache_config.kv_cache_groups:  # groups share memory
            spec = group.kv_cache_spec
            shape = cache_config.num_blocks, 2, PAGE, spec.num_kv_heads, spec.head_size
            parts = torch.split(memory, spec.page_size_bytes * cache_config.num_blocks)
            self.layers.append(
                {
                    name: part.view(spec.dtype).view(shape)
                    for name, part in zip(group.layer_names, parts, strict=False)
                }
            )
        with set_current_vllm_config(config):
            self.connector.register_kv_caches(
                {k: v for each in self.layers for k, v in each.items()}
            )

    def bytes_at(self, layer: str, tensor: torch.Tensor, mark: int) -> torch.Tensor:
        """Return the bytes of a token in a layer: int8 [2, bytes]."""
        size = tensor[0, 0, 0].numel() * tensor.element_size()
        seed = zlib.crc32(f"{layer} {self.rank} {mark}".encode())
        text = b"".join(
            zlib.crc32(bytes([i % 256]), seed).to_bytes(4, "big") for i in range(size // 2 + 1)
        )
        return torch.frombuffer(bytearray(text[: 2 * size]), dtype=torch.int8).view(2, size)

    def place(self, tensor: torch.Tensor, block: int, at: int) -> torch.Tensor:
        """Return the memory of a token: int8 [2, bytes]."""
        return tensor.view(torch.int8)[block, :, at].flatten(1)


class Engine:
    """A scheduler, its workers and requests."""

    def __init__(
        self,
        groups: list[KVCacheGroupSpec],
        *,
        blocks: int = 40,
        chunk_blocks: int = 1,
        ranks: int = 1,
        max_tokens: int = 64,
        **extra: Any,
    ) -> None:
        config = create_vllm_config(
            block_size=PAGE,
            max_num_batched_tokens=max_tokens,
            disable_hybrid_kv_cache_manager=False,
        )
        config.parallel_config.world_size = ranks
        given = {
            "spec_name": "KVCoreOffloadingSpec",
            "spec_module_path": "kvcore.integrations.vllm.offloading",
            "offload_prompt_only": False,
            "self_describing_kv_events": True,
            **extra,
        }
        if chunk_blocks > 1:
            given["block_size"] = PAGE * chunk_blocks
        config.kv_transfer_config = KVTransferConfig(
            kv_connector="OffloadingConnector", kv_role="kv_both", kv_connector_extra_config=given
        )
        config.kv_events_config = KVEventsConfig(enable_kv_cache_events=True, publisher="null")
        config.cache_config.num_gpu_blocks = blocks
        size = blocks * max(
            group.kv_cache_spec.page_size_bytes * len(group.layer_names) for group in groups
        )
        tensors = [
            KVCacheTensor(
                size=size,
                layers=list(group.layer_names),
                layer_stride=group.kv_cache_spec.page_size_bytes * blocks,
                block_stride=group.kv_cache_spec.page_size_bytes,
            )
            for group in groups
        ]
        cache_config = KVCacheConfig(
            num_blocks=blocks, kv_cache_tensors=tensors, kv_cache_groups=groups
        )
        page, hashed = resolve_kv_cache_block_sizes(cache_config, config)
        init_none_hash(sha256)
        self.hasher = get_request_block_hasher(hashed, sha256)
        self.scheduler = Scheduler(
            vllm_config=config,
            kv_cache_config=cache_config,
            log_stats=True,
            structured_output_manager=StructuredOutputManager(config),
            block_size=page,
            hash_block_size=hashed,
        )
        self.workers = [Worker(config, cache_config, rank) for rank in range(ranks)]
        self.half = self.scheduler.connector.connector_scheduler
        self.manager = self.half.manager
        self.loaded = self.checked = 0
        prepare_load = self.manager.prepare_load

        def counted(keys: Any, context: Any) -> Any:
            self.loaded += len(keys)
            return prepare_load(keys, context)

        self.manager.prepare_load = counted

    def add(self, name: str, tokens: list[int], answers: int = 4) -> Request:
        """Add a waiting request."""
        params = SamplingParams(max_tokens=answers, ignore_eos=True)
        params.update_from_generation_config({}, 50256)
        request = Request(
            request_id=name, prompt_token_ids=tokens, sampling_params=params, pooling_params=None,
            block_hasher=self.hasher,
        )  # fmt: skip
        self.scheduler.add_request(request)
        return request

    def step(self) -> None:
        """Schedule, load, check, compute, store."""
        output = self.scheduler.schedule()
        for worker in self.workers:
            metadata = copy.deepcopy(output.kv_connector_metadata)  # a worker changes its copy
            worker.connector.handle_preemptions(metadata)
            worker.connector.bind_connector_metadata(metadata)
            worker.connector.start_load_kv(ForwardContext({}, {}, {}))
        for name, count in output.num_scheduled_tokens.items():
            self.compute(self.scheduler.requests[name], count)
        metas, arrived = [], []
        for worker in self.workers:
            worker.connector.wait_for_save()
            arrived.append(worker.connector.get_finished(output.finished_req_ids)[1])
            metas.append(worker.connector.build_connector_worker_meta())
            worker.connector.clear_connector_metadata()
        self.report(output, metas, arrived)

    def report(self, output: Any, metas: list[Any], arrived: list[set[str]]) -> None:
        """Report the model's answers and the completed transfers to the scheduler."""
        meta = None
        for each in metas:
            meta = each if meta is None else meta if each is None else meta.aggregate(each)
        self.arrivals = getattr(self, "arrivals", {})
        for name in (name for names in arrived for name in names):
            self.arrivals[name] = self.arrivals.get(name, 0) + 1
        ready = {n for n, count in self.arrivals.items() if count == len(self.workers)}
        self.arrivals = {n: c for n, c in self.arrivals.items() if n not in ready}
        running = [self.scheduler.requests[name] for name in output.num_scheduled_tokens]
        answer = create_model_runner_output(
            running, finished_sending=set(), finished_recving=ready, token_id=7,
            kv_connector_worker_meta=meta,
        )  # fmt: skip
        answer.sampled_token_ids = [
            [7] if request.num_computed_tokens >= request.num_tokens else [] for request in running
        ]
        self.scheduler.update_from_output(output, answer)
        if not output.num_scheduled_tokens:
            time.sleep(0.0005)

    def compute(self, request: Request, count: int) -> None:
        """Check the bytes of a request's present tokens, and write the scheduled tokens."""
        end = request.num_computed_tokens  # of this step
        known, blocks = marks(request.all_token_ids), self.blocks_of(request)
        for worker in self.workers:
            for ids, layers in zip(blocks, worker.layers, strict=True):
                for at in range(end):
                    if ids[at // PAGE] == 0:
                        continue
                    for layer, tensor in layers.items():
                        right = worker.bytes_at(layer, tensor, known[at])
                        place = worker.place(tensor, ids[at // PAGE], at % PAGE)
                        if at >= end - count:
                            tensor.view(torch.int8)[ids[at // PAGE], :, at % PAGE] = right.view(
                                2, *tensor.view(torch.int8).shape[3:]
                            )
                        else:
                            assert place.equal(right), (request.request_id, layer, at, end, count)
                            self.checked += 1

    def blocks_of(self, request: Request) -> tuple[list[int], ...]:
        """Return the blocks of a request; 0 stands for a block that a window has passed."""
        found: tuple[list[int], ...] = self.scheduler.kv_cache_manager.get_block_ids(
            request.request_id
        )
        return found

    def serve(self, name: str, tokens: list[int], answers: int = 4) -> int:
        """Run a request to its end; return the number of chunks that were loaded for it."""
        before, request = self.loaded, self.add(name, tokens, answers)
        self.run_until(lambda: request.is_finished())
        self.settle()
        return self.loaded - before

    def run_until(self, is_over: Any, most: int = 20_000) -> None:
        """Step until a condition holds."""
        for _ in range(most):
            if is_over():
                return
            self.step()
        raise AssertionError("the requests do not end")

    def settle(self) -> None:
        """Step until nothing is in flight."""
        self.run_until(
            lambda: not self.half._jobs and not self.half._reset_fence
            and not self.scheduler.finished_req_ids and not self.manager._fenced
        )  # fmt: skip
        below = self.manager._below
        deadline = time.monotonic() + 30
        while below is not None and self.manager._below_slots:
            assert time.monotonic() < deadline, "a store still has slots"
            self.manager._settle(below)
            time.sleep(0.0005)

    def forget_gpu(self) -> None:
        """Empty the prefix cache of the GPU, not the tier."""
        self.settle()
        assert self.scheduler.kv_cache_manager.reset_prefix_cache()

    def abort(self, name: str) -> None:
        """End a request early."""
        self.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)

    def check(self, *, at_rest: bool = False) -> None:
        """Raise AssertionError if a slot is lost, or has two uses."""
        manager = self.manager
        check_slots(manager, at_rest=at_rest)
        if at_rest:
            pool = self.scheduler.kv_cache_manager.block_pool
            assert pool.get_num_free_blocks() == self.scheduler.kv_cache_config.num_blocks - 1

    def close(self) -> None:
        """Release everything."""
        for worker in self.workers:
            worker.connector.shutdown()
        self.scheduler.connector.shutdown()


def check_slots(manager: Any, *, at_rest: bool = False) -> None:
    """Raise AssertionError if a slot is lost, or has two uses."""
    used = [chunk.slot for chunk in manager._chunks.values()]
    rest = (manager._fenced | manager._below_slots) - {*used}
    free = manager._free
    assert sorted([*used, *free, *rest]) == list(range(manager._num_chunks))
    ready = [key for key, chunk in manager._chunks.items() if chunk.handle is not None]
    assert manager._tree.num_cached == len(ready)
    assert all(manager._keys[manager._chunks[key].slot] == key for key in ready)
    manager._tree.check_integrity()
    if at_rest:
        assert not rest
        assert not manager._arriving
        assert not manager._wanted
        assert manager._tree.num_evictable == len(ready) == len(manager._chunks)
