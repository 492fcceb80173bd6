# SPDX-License-Identifier: Apache-2.0
"""kvcore's tiers below the GPU for vLLM 0.33's OffloadingConnector. See ``docs/vllm.md``."""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import sha256
from typing import Any

from vllm.platforms import current_platform
from vllm.v1.kv_offload.base import OffloadingManager, OffloadingWorker
from vllm.v1.kv_offload.config import OffloadingConfig
from vllm.v1.kv_offload.cpu.gpu_worker import CPUOffloadingWorker
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec

from kvcore.integrations.vllm.offload_below import Below
from kvcore.integrations.vllm.offload_manager import KVCoreOffloadingManager
from kvcore.integrations.vllm.offload_worker import CopyWorker
from kvcore.stores import (
    BlockStore,
    DiskStore,
    DiskTier,
    HostTier,
    MooncakeStore,
    MooncakeTier,
    RedisStore,
    parse_tier,
)
from kvcore.stores.tiers.calls import StoreLimits
from kvcore.stores.tiers.records import RecordLayout
from kvcore.stores.tiers.stack import adapters_of

__all__ = ["KVCoreOffloadingSpec"]

#: Policies that depend only on uses: chunks have neither priorities nor places in a prompt.
POLICIES = ("arc", "fifo", "lfu", "lru", "slru")


class KVCoreOffloadingSpec(CPUOffloadingSpec):
    """Keep vLLM's chunks of KV cache in host memory, on disks and in shared stores.

    vLLM makes an instance if ``kv_connector_extra_config`` names this class as ``spec_name`` and
    this module as ``spec_module_path``. The other entries:

    Parameters
    ----------
    cpu_bytes_to_use : int
        Host memory of all workers of an engine together.
    eviction_policy : {"lru", "slru", "lfu", "fifo", "arc"}
        The eviction policy of the host memory.
    tiers : list of str
        Lower stores in lookup order, in the syntax of `kvcore.stores.parse_tier`:
        ``["disk:/var/cache/kv:200GiB", "redis://cache:6379"]``.
    fingerprint : str
        Change it with each change of the weights: pages with another fingerprint are not found.

    Raises
    ------
    ValueError
        An entry has another value; the host memory holds no chunk; or ``canonical_layout`` is set,
        which kvcore does not serve.
    """

    @classmethod
    def build_metric_definitions(cls, extra_config: dict[str, Any]) -> dict[str, Any]:  # noqa: ARG003
        """Return no definitions: the connector's own metrics count bytes, times and hits."""
        return {}

    def __init__(self, config: OffloadingConfig) -> None:
        self._stores = _checked(config)
        super().__init__(config)
        self._manager: OffloadingManager | None = None
        self._worker: OffloadingWorker | None = None
        if not self.num_chunks:
            raise ValueError(
                f"cpu_bytes_to_use is {self.extra_config['cpu_bytes_to_use']}, holds no chunk of "
                f"{self.kv_bytes_per_chunk} bytes; give it more"
            )

    def _uses_shared_region(self) -> bool:
        """Return true: the scheduler's process reads the workers' writes."""
        return True

    def get_manager(self) -> OffloadingManager:
        """Return the manager, which runs in the scheduler's process."""
        if self._manager is None:
            region = self._region(None)
            try:
                self._manager = KVCoreOffloadingManager(
                    self.num_chunks,
                    self.eviction_policy,
                    region=region,
                    below=self._below(region),
                    enable_events=self.kv_events_config.enable_kv_cache_events,
                    info=self.cpu_info.as_config_info(),
                )
            except BaseException:
                region.cleanup()
                raise
        return self._manager

    def get_worker(self, kv_caches: Any) -> OffloadingWorker:
        """Return vLLM's own worker on GPUs, or kvcore's worker for a cache in host memory."""
        if self._worker is None:
            region = self._region(0 if self.replicated_layout else self.config.parallel.rank)
            kind = CPUOffloadingWorker if _has_gpu() else CopyWorker
            try:
                self._worker = kind(kv_caches, self.blocks_per_chunk, self.num_chunks, region)
            except BaseException:
                region.cleanup()
                raise
        return self._worker

    def _region(self, rank: int | None) -> SharedOffloadRegion:
        return SharedOffloadRegion(
            engine_id=self.config.engine_id,
            num_chunks=self.num_chunks,
            rank=rank,
            kv_bytes_per_chunk=self.kv_bytes_per_chunk,
            cpu_page_size=self.cpu_page_size_per_worker,
        )

    def _below(self, region: SharedOffloadRegion) -> Below | None:
        if not self._stores:
            return None
        fingerprint = _fingerprint(self.config, self.extra_config)
        layout = RecordLayout({0: self.kv_bytes_per_chunk}, fingerprint)
        opened: list[tuple[BlockStore, bool]] = []
        try:
            for tier in self._stores:
                opened.append((self._opened(tier, fingerprint), True))
        except BaseException:
            for store, _ in opened:
                store.close()
            raise
        return Below(adapters_of(opened, layout, StoreLimits()), region, fingerprint)

    def _opened(self, tier: Any, fingerprint: bytes) -> BlockStore:
        if not isinstance(tier, DiskTier):
            return MooncakeStore(tier) if isinstance(tier, MooncakeTier) else RedisStore(tier)
        parallel = self.config.parallel
        if parallel.data_parallel_size > 1:  # a directory has one owner
            replica = f"dp{parallel.data_parallel_index}"
            tier = DiskTier(tuple((f"{path}/{replica}", size) for path, size in tier.directories))
        return DiskStore(tier, page_bytes=self.kv_bytes_per_chunk, fingerprint=fingerprint)


def _has_gpu() -> bool:
    return bool(current_platform.is_cuda_alike() or current_platform.is_xpu())


def _checked(config: OffloadingConfig) -> list[Any]:
    """Return the tiers below host memory; raise ValueError for an unsupported option."""
    given = config.extra_config
    policy, tiers = given.get("eviction_policy", "lru"), given.get("tiers", [])
    if policy not in POLICIES:
        raise ValueError(f"eviction_policy is {policy!r}, must be one of {', '.join(POLICIES)}")
    if config.canonical_layout:
        raise ValueError("canonical_layout is not served by kvcore's tiers; leave it out")
    if not isinstance(tiers, list):
        raise ValueError(f"tiers is {tiers!r}, must be a list such as ['disk:/var/cache/kv:1TB']")
    parsed = [parse_tier(tier) for tier in tiers]
    if any(isinstance(tier, HostTier) for tier in parsed):
        raise ValueError(
            "tiers has an entry for host memory, whose size is cpu_bytes_to_use; leave it out"
        )
    return parsed


def _fingerprint(config: OffloadingConfig, given: Mapping[str, Any]) -> bytes:
    """Return 32 bytes that differ if the bytes of a chunk with the same key may differ."""
    parallel = config.parallel
    sizes = parallel.world_size, parallel.tp_size, parallel.pp_size, parallel.pcp_size
    groups = [(group.tokens_per_block, group.layer_names) for group in config.groups]
    of = (
        "kvcore vllm chunks 1", config.model.name, config.model.dtype, given.get("fingerprint"),
        sizes, parallel.dcp_size, groups, config.worker_kv_bytes_per_block, config.cache,
        config.replicated_layout, config.kv_cache_layout,
    )  # fmt: skip
    return sha256(repr(of).encode()).digest()
