# SPDX-License-Identifier: Apache-2.0
"""Build the manager of a replay: without a pool, or with a pool of tiny pages for tiers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from kvcore import (
    CacheOptions,
    KVCacheError,
    KVCacheParams,
    LayerOptions,
    PagedKVCacheManager,
    TierOptions,
)
from kvcore.apps.replay.groups import GroupSamples
from kvcore.apps.replay.hints import HINTED, HINTS, Hint, VirtualClock, return_hints
from kvcore.apps.replay.tiers import PATIENCE, GroupTierHits, TierHits, temporary_disk
from kvcore.apps.replay.tiny_model import tiny_model
from kvcore.groups import FullAttention, bundles
from kvcore.layers.layer_map import column_tokens, has_windows, pages_per_column
from kvcore.policies import BY_NAME
from kvcore.sizing import STATES_PER_REQUEST, pages_per_sequence

if TYPE_CHECKING:
    from kvcore.apps.replay.workload import Workload

DEFAULT_POOL_TOKENS = 524_288
POLICIES = tuple(BY_NAME)
MOST_PAGES = 2**31 - 1  # this bound and the next are the manager's bounds
MOST_REPLICAS = 2**15 - 1
_EXPLAINED_PAGES = 2**23  # four bytes each, and 48 bytes for each run of pages
FEWEST_TOKENS = 2  # of a step: a request with one token searches no hit


class PoolError(ValueError):
    """Raised for pool settings that are too large or invalid."""


def flat_page_bytes(model: KVCacheParams) -> int:
    """Return the bytes of a page that has all layers of a model."""
    return model.page_size * model.flat_bytes_per_token


def require_windows(model: KVCacheParams) -> None:
    """Check that a model has groups, and that a flat cache can also serve the model.

    Raises
    ------
    PoolError
        A layer keeps a state, which a flat cache does not have, or all layers keep every token.
    """
    if model.state_groups:
        layers = sum(len(group.layers) for group in model.state_groups)
        raise PoolError(
            f"{layers} of {model.num_layers} layers keep a state, which has no flat cache to "
            f"compare with; expected a model with only attention layers, or --model, which replays "
            f"states"
        )
    if not has_windows(model):
        raise PoolError(
            f"all {model.num_layers} layers keep every token; expected a model with a window or "
            f"chunks in some layers"
        )


@dataclass(frozen=True, kw_only=True)
class PoolSettings:
    """Size the simulated pool.

    Attributes
    ----------
    page_size : int
        Tokens per page.
    pages : int, optional
        Pages per replica; None for the pages of `DEFAULT_POOL_TOKENS` tokens.
    replicas : int
        Data-parallel replicas.
    policy : str
        Name of the eviction policy, from `POLICIES`.
    model : KVCacheParams, optional
        Model whose groups of layers the manager serves. In this case `pages` counts pages of the
        model's bundles. None: a page has all layers.
    host_pages : int
        Pages of each replica's host tier; 0 for no tier. With a tier, the pool has real, tiny
        pages: one layer with one int8 head of one element, or the bundles of the model in rows of
        few int8 elements.
    disk_pages : int
        Pages of a disk below the host tiers, for all replicas; 0 for no disk.
    page_bytes : int
        Bytes of a page of the served model, for reports in GiB; 0 if unknown.
    state_slots : int
        State slots of each replica, for requests and checkpoints; 0 for the manager's default, and
        for a model without states.
    host_state_slots : int
        State slots of each replica's host tier, for checkpoints; 0 without states or a host tier.
    hints : str
        Hints of the requests for the policy "hinted", from `HINTS`.
    explain : bool
        Find out why prompts miss the cache. The manager remembers the last evicted pages: 2^23
        pages, or four times the pages of the pool. Tokens of pages that were evicted earlier count
        as never seen.
    advice : int
        One page in this many is sampled for advice on other sizes; 0 for no advice.
    """

    page_size: int = 16
    pages: int | None = None
    replicas: int = 1
    policy: str = POLICIES[0]
    model: KVCacheParams | None = None
    host_pages: int = 0
    disk_pages: int = 0
    page_bytes: int = 0
    state_slots: int = 0
    host_state_slots: int = 0
    hints: str = HINTS[0]
    explain: bool = False
    advice: int = 0

    @property
    def pages_per_replica(self) -> int:
        """Pages of one replica."""
        return self.pages or -(-DEFAULT_POOL_TOKENS // self.page_size)

    @property
    def total_pages(self) -> int:
        """Pages of all replicas."""
        return self.pages_per_replica * self.replicas

    @property
    def memory(self) -> int:
        """Bytes of the pages and the state slots of one replica; 0 if unknown."""
        slot = 0 if self.model is None else self.model.bytes_per_state_slot
        return self.pages_per_replica * self.page_bytes + self.state_slots * slot

    @property
    def host_memory(self) -> int:
        """Bytes of the pages and the state slots of a replica's host tier; 0 if unknown."""
        slot = 0 if self.model is None else self.model.bytes_per_state_slot
        return self.host_pages * self.page_bytes + self.host_state_slots * slot

    @property
    def most_running(self) -> float:
        """Requests that run at a time, over all replicas, each with a slot and a checkpoint."""
        if not self.state_slots:
            return math.inf
        return max(1, self.state_slots * self.replicas // STATES_PER_REQUEST)

    def with_policy(self, policy: str) -> PoolSettings:
        """Return the same pool with another eviction policy."""
        return replace(self, policy=policy)

    def with_groups(self, model: KVCacheParams) -> PoolSettings:
        """Return a pool in the same memory whose manager serves the groups of a model.

        Parameters
        ----------
        model : KVCacheParams
            Model with groups and the `page_size` of this pool. A page of this pool has all layers.

        Raises
        ------
        PoolError
            The model has no windows or chunks, has a state, or has another page size; the pages
            are more than a manager can number; this pool has tiers.
        """
        require_windows(model)
        if self.host_pages:
            raise PoolError(_TIERS_OF_GROUPS)
        if model.page_size != self.page_size:
            raise PoolError(
                f"the model has pages of {model.page_size} tokens, the pool has pages of "
                f"{self.page_size} tokens; expected equal page sizes"
            )
        memory = self.pages_per_replica * flat_page_bytes(model)
        pages = memory // model.bytes_per_page
        if pages > MOST_PAGES:
            raise PoolError(
                f"{self.pages_per_replica} pages of all layers are {pages} pages of the groups; "
                f"expected at most {MOST_PAGES} pages of the groups"
            )
        return replace(self, pages=pages, model=model, page_bytes=model.bytes_per_page)

    def most_pages(self, tokens: int, chunk: int) -> int:
        """Return the maximum pages of a request whose steps have at most `chunk` tokens.

        A step has at least `FEWEST_TOKENS` tokens.
        """
        if self.model is None:
            return -(-tokens // self.page_size)
        return pages_per_sequence(self.model, tokens, max(chunk, FEWEST_TOKENS))

    @property
    def hit_tokens(self) -> int:
        """Tokens of the largest page; the length of a whole-page hit is a multiple of it."""
        return self.page_size if self.model is None else column_tokens(self.model)

    @property
    def full_columns(self) -> int:
        """Runs of `hit_tokens` tokens for which the layers that keep every token have pages.

        `MOST_PAGES` if no layer keeps every token.
        """
        if self.model is None:
            return self.pages_per_replica
        pages = zip(pages_per_column(self.model), bundles(self.model), strict=True)
        full = sum(n for n, bundle in pages if isinstance(bundle.group, FullAttention))
        return self.pages_per_replica // full if full else MOST_PAGES

    def samples(self, manager: PagedKVCacheManager, requests: int) -> GroupSamples | None:
        """Return an object that samples a manager's groups in a replay; None without groups."""
        return None if self.model is None else GroupSamples(manager, self.model, requests)

    def state_copies(self, manager: PagedKVCacheManager) -> Callable[[], object]:
        """Return a function that drops the copies of state slots, which an engine would do."""
        has_states = self.model is not None and self.model.state_groups
        # With tiers, the manager has small arrays, and copies their slots itself.
        return manager.take_state_copies if has_states and not self.host_pages else _no_copies

    def tier_hits(self, manager: PagedKVCacheManager) -> TierHits | None:
        """Return an object that counts the manager's hits by tier; None without tiers."""
        if not self.host_pages:
            return None
        count = TierHits if self.model is None else GroupTierHits
        return count(manager, self.host_pages, self.disk_pages, self.host_state_slots)

    def returns(self, workload: Workload) -> list[Hint]:
        """Return the hint of each request; no hints for other policies."""
        return return_hints(workload, self.hints if self.policy == HINTED else "none")

    @contextmanager
    def manager(
        self,
        *,
        max_batch_size: int,
        max_seq_len: int,
        clock: VirtualClock | None = None,
        events: bool = False,
    ) -> Iterator[PagedKVCacheManager]:
        """Make a manager and close it at the end; `max_batch_size` is per replica.

        `clock` has the time of the replay. With `events`, the manager emits cache events. It has no
        pool, or a pool of tiny pages if it has tiers. The directory of the disk is removed
        at the end.

        Raises
        ------
        PoolError
            The manager refuses the settings, the memory is too small for its tables or pages, or
            the disk store cannot be opened.
        """
        with ExitStack() as opened:
            try:
                found = self._open(
                    opened, max_batch_size, max_seq_len, clock or VirtualClock(), events=events
                )
            except (ValueError, OverflowError, KVCacheError, OSError) as error:
                raise PoolError(f"the manager refuses {self}: {error}") from error
            except MemoryError as error:
                kept = "K and V" if not self.host_pages else "the pages of a model"
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
        self,
        opened: ExitStack,
        max_batch_size: int,
        max_seq_len: int,
        clock: VirtualClock,
        *,
        events: bool,
    ) -> PagedKVCacheManager:
        params = replace(
            self._params(),
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
            layers=LayerOptions(num_states=self.state_slots or None),
            cache=CacheOptions(
                eviction=self.policy,
                events=events,
                clock=clock,
                explain=self._explained_pages() if self.explain else False,
                advice=self.advice or False,
            ),
            **self._tiers(opened, params),
        )
        opened.callback(made.close)
        return made

    def _explained_pages(self) -> int:
        """Return the number of evicted pages to remember: many pools, if the pool is small."""
        return min(max(_EXPLAINED_PAGES, 4 * self.total_pages), MOST_PAGES)

    def _params(self) -> KVCacheParams:
        """Return the params of the manager; with tiers they have tiny pages."""
        if self.model is None:
            return KVCacheParams("int8", 1, 1, 1, page_size=self.page_size)
        return tiny_model(self.model) if self.host_pages else self.model

    def _tiers(self, opened: ExitStack, params: KVCacheParams) -> dict[str, Any]:
        """Return the manager's arguments for its pool and its tiers."""
        if not (self.host_pages or self.disk_pages):
            return {"blocks": None}
        if self.model is not None and self.disk_pages:
            raise ValueError(
                "a replay with the groups of a model has no disk; expected only a host tier"
            )
        if self.host_pages < 1 or self.disk_pages < 0:
            raise ValueError(
                f"host_pages is {self.host_pages} and disk_pages is {self.disk_pages}; expected at "
                f"least one page of a host tier, through which pages reach the disk, or no disk"
            )
        slots = self.host_state_slots * params.bytes_per_state_slot
        tiers: list[Any] = [f"host:{self.host_pages * params.bytes_per_page + slots}"]
        if self.disk_pages:
            disk = temporary_disk(self.disk_pages, params.bytes_per_page)
            tiers.append(opened.enter_context(disk))
        patient = TierOptions(
            tiers,
            store_timeout=PATIENCE,
            max_write_wait=PATIENCE,
            num_host_states=self.host_state_slots or None,
        )
        return {"tiers": patient}


def _no_copies() -> None:
    """Do nothing: no layer keeps a state."""


_TIERS_OF_GROUPS = (
    "a replay with tiers has pages of all layers; expected the groups of a model or a host tier, "
    "and not both"
)
