# SPDX-License-Identifier: Apache-2.0
"""Build the manager that a replay drives: page ids alone, or tiny pages where it has tiers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

from kvcore import KVCacheError, KVCacheParams, PagedKVCacheManager
from kvcore.apps.replay.groups import GroupSamples
from kvcore.apps.replay.tiers import PATIENCE, TierHits, temporary_disk
from kvcore.layers.layer_map import column_tokens, has_windows
from kvcore.policies import ARC, FIFO, LFU, LRU, SLRU, Cost, Priority
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
    host_pages : int
        Pages of each replica's host tier; 0 for none. With one, pages are real and tiny: a layer of
        one int8 head, one wide.
    disk_pages : int
        Pages of a disk below it, for all replicas; 0 for none.
    """

    page_size: int = 16
    pages: int | None = None
    replicas: int = 1
    policy: str = POLICIES[0]
    model: KVCacheParams | None = None
    host_pages: int = 0
    disk_pages: int = 0

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
            be numbered; this pool has tiers.
        """
        require_windows(model)
        if self.host_pages:
            raise PoolError(_TIERS_OF_GROUPS)
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

    def tier_hits(self, manager: PagedKVCacheManager) -> TierHits | None:
        """Return what tells where a manager's hits come from; None without tiers."""
        if not self.host_pages:
            return None
        return TierHits(manager, self.host_pages, self.disk_pages)

    @contextmanager
    def manager(
        self, *, max_batch_size: int, max_seq_len: int, events: bool = False
    ) -> Iterator[PagedKVCacheManager]:
        """Make a manager and close it at the end; `max_batch_size` is per replica.

        With `events` it tells what enters and leaves its caches. It has no pool, or one of tiny
        pages where it has tiers. The directory of the disk is removed at the end.

        Raises
        ------
        PoolError
            The manager takes no such numbers, there is no memory for its tables or its pages, or
            no disk.
        """
        with ExitStack() as opened:
            try:
                found = self._open(opened, max_batch_size, max_seq_len, events=events)
            except (ValueError, OverflowError, KVCacheError, OSError) as error:
                raise PoolError(f"the manager refuses {self}: {error}") from error
            except MemoryError as error:
                kept = "K and V" if not self.host_pages else "those of a model"
                raise PoolError(
                    f"{self} needs more memory than there is, even without {kept}; "
                    f"expected fewer pages or replicas"
                ) from error
            yield found

    def __str__(self) -> str:
        pages = f"{self.pages_per_replica:,} pages of {self.page_size:,} tokens"
        host = f" and {self.host_pages:,} of a host tier" if self.host_pages else ""
        disk = f", {self.disk_pages:,} on disk" if self.disk_pages else ""
        return f"a pool of {pages}{host} on each of {self.replicas:,} replicas{disk}"

    def _open(
        self, opened: ExitStack, max_batch_size: int, max_seq_len: int, *, events: bool
    ) -> PagedKVCacheManager:
        one_layer = KVCacheParams("int8", 1, 1, 1, page_size=self.page_size)
        params = replace(
            self.model or one_layer,
            enable_prefix_caching=True,
            n_devices=self.replicas,
            data_parallel_degree=self.replicas,
        )
        made = PagedKVCacheManager(
            params,
            max_batch_size * self.replicas,
            max_seq_len,
            devices=("cpu",) * self.replicas,
            num_pages=self.pages_per_replica,
            eviction=self.policy,
            events=events,
            **self._tiers(opened, params),
        )
        opened.callback(made.close)
        return made

    def _tiers(self, opened: ExitStack, params: KVCacheParams) -> dict[str, Any]:
        """Return what a manager is told of its pool and its tiers."""
        if not (self.host_pages or self.disk_pages):
            return {"blocks": None}
        if self.model is not None:
            raise ValueError(_TIERS_OF_GROUPS)
        if self.host_pages < 1 or self.disk_pages < 0:
            raise ValueError(
                f"host_pages is {self.host_pages} and disk_pages {self.disk_pages}; expected at "
                f"least one page of a host tier, through which pages go to a disk, or no disk"
            )
        tiers: list[Any] = [f"host:{self.host_pages * params.bytes_per_page}"]
        if self.disk_pages:
            disk = temporary_disk(self.disk_pages, params.bytes_per_page)
            tiers.append(opened.enter_context(disk))
        return {"tiers": tiers, "store_timeout": PATIENCE, "max_write_wait": PATIENCE}


_TIERS_OF_GROUPS = (
    "a replay with tiers has pages of all layers; expected a model whose groups are replayed, or a "
    "host tier, and not both"
)
