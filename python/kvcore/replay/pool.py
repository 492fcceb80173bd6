# SPDX-License-Identifier: Apache-2.0
"""Build the manager that a replay drives: page ids only, no memory behind them."""

from __future__ import annotations

from dataclasses import dataclass, replace

from kvcore import KVCacheParams, PagedKVCacheManager
from kvcore.groups.layers import column_tokens, has_windows
from kvcore.policies import ARC, FIFO, LFU, LRU, SLRU, Cost, Priority
from kvcore.replay.groups import GroupSamples
from kvcore.sizing import pages_per_sequence

DEFAULT_POOL_TOKENS = 524_288
POLICIES = tuple(each.name for each in (LRU, LFU, SLRU, FIFO, Priority, Cost, ARC))
_MOST_PAGES = 2**31 - 1  # both the manager's own bounds
MOST_REPLICAS = 2**15 - 1


class PoolError(ValueError):
    """Say what of a simulated pool is too large, or no pool at all."""


def flat_page_bytes(model: KVCacheParams) -> int:
    """Return the bytes of a page that has all layers of a model."""
    return model.page_size * model.flat_bytes_per_token


def require_windows(model: KVCacheParams) -> None:
    """Check that a replay with the groups of a model tells something.

    Raises
    ------
    PoolError
        A layer keeps a state, which replays do not serve, or all keep every token.
    """
    if model.state_groups:
        layers = sum(len(group.layers) for group in model.state_groups)
        raise PoolError(
            f"{layers} of {model.num_layers} layers keep a state, which a replay does not serve; "
            f"expected a model of attention layers alone"
        )
    if not has_windows(model):
        raise PoolError(
            f"all {model.num_layers} layers keep every token; expected a model some of whose "
            f"layers have a window or chunks"
        )


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
    model : KVCacheParams, optional
        Whose groups of layers the manager serves; then `pages` are those of its bundles. None: a
        page has all layers.
    """

    page_size: int = 16
    pages: int | None = None
    replicas: int = 1
    policy: str = POLICIES[0]
    model: KVCacheParams | None = None

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

    def with_groups(self, model: KVCacheParams) -> PoolSettings:
        """Return a pool in the same memory whose manager serves the groups of a model.

        Parameters
        ----------
        model : KVCacheParams
            With groups and the `page_size` of this pool, whose own pages have all layers.

        Raises
        ------
        PoolError
            The model has no windows or chunks, a state, or another page size; more pages than can
            be numbered.
        """
        require_windows(model)
        if model.page_size != self.page_size:
            raise PoolError(
                f"the model has pages of {model.page_size} tokens and the pool of "
                f"{self.page_size}; expected the same"
            )
        memory = self.pages_per_replica * flat_page_bytes(model)
        pages = memory // model.bytes_per_page
        if pages > _MOST_PAGES:
            raise PoolError(
                f"{self.pages_per_replica} pages of all layers are {pages} of the groups; "
                f"expected at most {_MOST_PAGES} of those"
            )
        return replace(self, pages=pages, model=model)

    def most_pages(self, tokens: int, chunk: int) -> int:
        """Return the most pages that a request takes, `chunk` of its tokens in a step at most."""
        if self.model is None:
            return -(-tokens // self.page_size)
        return pages_per_sequence(self.model, tokens, chunk)

    @property
    def hit_tokens(self) -> int:
        """Tokens that whole hits are multiples of: those of the largest page."""
        return self.page_size if self.model is None else column_tokens(self.model)

    def samples(self, manager: PagedKVCacheManager, requests: int) -> GroupSamples | None:
        """Return what looks at a manager's groups during a replay; None without groups."""
        return None if self.model is None else GroupSamples(manager, self.model, requests)

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
        one_layer = KVCacheParams("float16", 1, 1, 1, page_size=self.page_size)
        params = replace(
            self.model or one_layer,
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
