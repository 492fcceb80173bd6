# SPDX-License-Identifier: Apache-2.0
"""Build the manager that a replay drives: page ids only, no memory behind them."""

from __future__ import annotations

from dataclasses import dataclass, replace

from kvcore import KVCacheParams, PagedKVCacheManager
from kvcore.policies import ARC, FIFO, LFU, LRU, SLRU, Cost, Priority

DEFAULT_POOL_TOKENS = 524_288
POLICIES = tuple(each.name for each in (LRU, LFU, SLRU, FIFO, Priority, Cost, ARC))
MOST_REPLICAS = 2**15 - 1  # the manager's own bound


class PoolError(ValueError):
    """Say what of a simulated pool is too large."""


@dataclass(frozen=True, kw_only=True)
class PoolSettings:
    """Size the simulated pool.

    Attributes
    ----------
    page_size : int
        Tokens per page.
    pages : int, optional
        Pages per replica; None for `DEFAULT_POOL_TOKENS` tokens' worth.
    replicas : int
        Data-parallel replicas.
    policy : str
        Name of the eviction policy, one of `POLICIES`.
    """

    page_size: int = 16
    pages: int | None = None
    replicas: int = 1
    policy: str = POLICIES[0]

    @property
    def pages_per_replica(self) -> int:
        """Pages of one replica."""
        return self.pages or -(-DEFAULT_POOL_TOKENS // self.page_size)

    @property
    def total_pages(self) -> int:
        """Pages of all replicas."""
        return self.pages_per_replica * self.replicas

    def with_policy(self, policy: str) -> PoolSettings:
        """Return the same pool with another eviction policy."""
        return replace(self, policy=policy)

    def build_manager(self, *, max_batch_size: int, max_seq_len: int) -> PagedKVCacheManager:
        """Build a manager without a pool; `max_batch_size` is per replica.

        Raises
        ------
        PoolError
            The manager takes no such numbers, or there is no memory for its tables.
        """
        try:
            return self._build(max_batch_size, max_seq_len)
        except (ValueError, OverflowError) as error:
            raise PoolError(f"the manager refuses {self}: {error}") from error
        except MemoryError as error:
            raise PoolError(
                f"{self} needs more memory than there is, even without K and V; "
                f"expected fewer pages or replicas"
            ) from error

    def __str__(self) -> str:
        pages = f"{self.pages_per_replica:,} pages of {self.page_size:,} tokens"
        return f"a pool of {pages} on each of {self.replicas:,} replicas"

    def _build(self, max_batch_size: int, max_seq_len: int) -> PagedKVCacheManager:
        params = KVCacheParams(
            dtype="float16",
            n_kv_heads=1,
            head_dim=1,
            num_layers=1,
            page_size=self.page_size,
            enable_prefix_caching=True,
            n_devices=self.replicas,
            data_parallel_degree=self.replicas,
        )
        return PagedKVCacheManager(
            params,
            max_batch_size * self.replicas,
            max_seq_len,
            devices=("cpu",) * self.replicas,
            num_pages=self.pages_per_replica,
            blocks=None,
            eviction=self.policy,
        )
