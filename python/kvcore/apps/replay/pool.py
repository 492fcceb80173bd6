# SPDX-License-Identifier: Apache-2.0
"""Build the manager of a replay: without a pool, or with a pool of tiny pages for tiers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from kvcore import CacheOptions, KVCacheError, KVCacheParams, PagedKVCacheManager, TierOptions
from kvcore.apps.replay.groups import GroupSamples
from kvcore.apps.replay.hints import HINTS, Hint, VirtualClock, return_hints
from kvcore.apps.replay.tiers import PATIENCE, TierHits, temporary_disk
from kvcore.layers.layer_map import column_tokens, has_windows
from kvcore.policies import BY_NAME, Hinted
from kvcore.sizing import pages_per_sequence

if TYPE_CHECKING:
    from kvcore.apps.replay.workload import Workload

DEFAULT_POOL_TOKENS = 524_288
POLICIES = tuple(BY_NAME)
_HINTED = Hinted.name
_MOST_PAGES = 2**31 - 1  # this bound and the next are the manager's bounds
MOST_REPLICAS = 2**15 - 1


class PoolError(ValueError):
    """Raised for pool settings that are too large or invalid."""


def flat_page_bytes(model: KVCacheParams) -> int:
    """Return the bytes of a page that has all layers of a model."""
    return model.page_size * model.flat_bytes_per_token


def require_windows(model: KVCacheParams) -> None:
    """Check that a replay with the groups of a model is possible and differs from a flat replay.

    Raises
    ------
    PoolError
        A layer keeps a state, which replays do not support, or all layers keep every token.
    """
    if model.state_groups:
        layers = sum(len(group.layers) for group in model.state_groups)
        raise PoolError(
            f"{layers} of {model.num_layers} layers keep a state, which a replay does not support; "
            f"expected a model with only attention layers"
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
        pages: one layer with one int8 head of one element.
    disk_pages : int
        Pages of a disk below the host tiers, for all replicas; 0 for no disk.
    page_bytes : int
        Bytes of a page of the served model, so that reports have GiB beside pages; 0 if unknown.
    hints : str
        Hints of the requests for the policy "hinted", from `HINTS`.
    explain : bool
        Find out why prompts miss the cache. Remembers four times the pages of the pool.
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
        if pages > _MOST_PAGES:
            raise PoolError(
                f"{self.pages_per_replica} pages of all layers are {pages} pages of the groups; "
                f"expected at most {_MOST_PAGES} pages of the groups"
            )
        return replace(self, pages=pages, model=model, page_bytes=model.bytes_per_page)

    def most_pages(self, tokens: int, chunk: int) -> int:
        """Return the maximum pages of a request whose steps have at most `chunk` tokens."""
        if self.model is None:
            return -(-tokens // self.page_size)
        return pages_per_sequence(self.model, tokens, chunk)

    @property
    def hit_tokens(self) -> int:
        """Tokens of the largest page; the length of a whole-page hit is a multiple of it."""
        return self.page_size if self.model is None else column_tokens(self.model)

    def samples(self, manager: PagedKVCacheManager, requests: int) -> GroupSamples | None:
        """Return an object that samples a manager's groups in a replay; None without groups."""
        return None if self.model is None else GroupSamples(manager, self.model, requests)

    def tier_hits(self, manager: PagedKVCacheManager) -> TierHits | None:
        """Return an object that counts the manager's hits by tier; None without tiers."""
        if not self.host_pages:
            return None
        return TierHits(manager, self.host_pages, self.disk_pages)

    def returns(self, workload: Workload) -> list[Hint]:
        """Return the hint of each request; no hints for other policies."""
        return return_hints(workload, self.hints if self.policy == _HINTED else "none")

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
            cache=CacheOptions(
                eviction=self.policy,
                events=events,
                clock=clock,
                explain=min(4 * self.total_pages, _MOST_PAGES) if self.explain else False,
                advice=self.advice or False,
            ),
            **self._tiers(opened, params),
        )
        opened.callback(made.close)
        return made

    def _tiers(self, opened: ExitStack, params: KVCacheParams) -> dict[str, Any]:
        """Return the manager's arguments for its pool and its tiers."""
        if not (self.host_pages or self.disk_pages):
            return {"blocks": None}
        if self.model is not None:
            raise ValueError(_TIERS_OF_GROUPS)
        if self.host_pages < 1 or self.disk_pages < 0:
            raise ValueError(
                f"host_pages is {self.host_pages} and disk_pages is {self.disk_pages}; expected at "
                f"least one page of a host tier, through which pages reach the disk, or no disk"
            )
        tiers: list[Any] = [f"host:{self.host_pages * params.bytes_per_page}"]
        if self.disk_pages:
            disk = temporary_disk(self.disk_pages, params.bytes_per_page)
            tiers.append(opened.enter_context(disk))
        patient = TierOptions(tiers, store_timeout=PATIENCE, max_write_wait=PATIENCE)
        return {"tiers": patient}


_TIERS_OF_GROUPS = (
    "a replay with tiers has pages of all layers; expected the groups of a model or a host tier, "
    "and not both"
)
