# SPDX-License-Identifier: Apache-2.0
"""Counters of a manager, and an exporter of the counters to Prometheus."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from math import isinf
from threading import Lock
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

from kvcore.errors import KVCacheError
from kvcore.support.arguments import integer

if TYPE_CHECKING:
    from prometheus_client import Metric

__all__ = [
    "Advice",
    "AdviceRates",
    "AdviceRow",
    "EvictionMetrics",
    "Exporter",
    "GroupMetrics",
    "KVCacheMetrics",
    "MissMetrics",
    "Misses",
    "ReplicaMetrics",
    "StateMetrics",
    "TenantMetrics",
    "TierMetrics",
    "export",
]


@dataclass(frozen=True, slots=True)
class EvictionMetrics:
    """Count the cached pages that a tier lost since the last reset of metrics, by reason.

    On the device, the sum of the first three is ``KVCacheMetrics.evicted_pages``.

    Attributes
    ----------
    policy : int
        Evicted for new pages, in the order of the eviction policy.
    window : int
        Evicted for new pages, after the windows of a group had passed these pages.
    unreachable : int
        Evicted for new pages, because no hit could end at these pages: a checkpoint or the pages
        of another group were missing.
    reset : int
        Removed by ``reset_prefix_cache``.
    """

    policy: int
    window: int
    unreachable: int
    reset: int


@dataclass(frozen=True, slots=True)
class GroupMetrics:
    """Count the pages of one attention group at one moment, summed over replicas.

    Attributes
    ----------
    held_pages : int
        Pages that requests, pins and copies read.
    cached_pages : int
        Pages in the prefix cache, including cached pages that requests hold.
    holes : int
        Pages missing in the prefix cache for tokens that it has: windows passed these pages, and
        the pages were evicted.
    given_back : int
        Pages that requests released after their windows passed the pages, since the last reset of
        metrics.
    filled : int
        Holes that got pages again since the last reset of metrics: a request computed the tokens,
        or the host tier returned the pages.
    stored_pages, loaded_pages : int
        Pages copied to the host tier, and pages copied back, since the last reset of metrics.
    """

    held_pages: int
    cached_pages: int
    holes: int
    given_back: int
    filled: int
    stored_pages: int
    loaded_pages: int


@dataclass(frozen=True, slots=True)
class ReplicaMetrics:
    """Count the pages of one replica at one moment.

    Attributes
    ----------
    total_pages : int
    free_pages : int
        Pages that are neither held nor cached.
    cached_pages : int
        Pages in the prefix cache, including cached pages that requests share.
    evictable_pages : int
        Cached pages without a holder. Requests, pins and copies hold all pages that are neither
        free nor evictable.
    num_sequences : int
        Claimed requests.
    host_pages, host_cached_pages : int
        Pages of the replica's host tier, and host pages that store cached pages; 0 without a host
        tier.
    """

    total_pages: int
    free_pages: int
    cached_pages: int
    evictable_pages: int
    num_sequences: int
    host_pages: int
    host_cached_pages: int

    @property
    def available_pages(self) -> int:
        """Pages that a request could get: free and evictable pages."""
        return self.free_pages + self.evictable_pages


@dataclass(frozen=True, slots=True)
class StateMetrics:
    """Count the state slots at one moment, summed over replicas.

    Attributes
    ----------
    total_slots : int
    used_slots : int
        Slots of requests, and slots held only by a copy in flight.
    checkpoints : int
        Slots that store checkpoints of cached prefixes. All other slots are free.
    available_slots : int
        Slots that a request could get: free slots, and slots of checkpoints without a holder.
    checkpoint_hits : int
        Requests that began with a checkpoint, since the last reset of metrics.
    checkpoints_made : int
        Checkpoints stored since the last reset of metrics.
    host_slots : int
        Slots of the host tier, which store only checkpoints. The counts of slots above exclude
        them.
    host_checkpoints : int
        Checkpoints in the host tier.
    stored_checkpoints : int
        Checkpoints copied to the host tier, since the last reset of metrics.
    loaded_checkpoints : int
        Part of `checkpoint_hits`: hits with a checkpoint from the host tier.
    evicted_checkpoints : int
        Checkpoints on the device that were evicted because their slots were needed, since the last
        reset of metrics. If this count exceeds `checkpoint_hits`, increase `num_states`.
    """

    total_slots: int
    used_slots: int
    checkpoints: int
    available_slots: int
    checkpoint_hits: int
    checkpoints_made: int
    host_slots: int
    host_checkpoints: int
    stored_checkpoints: int
    loaded_checkpoints: int
    evicted_checkpoints: int = 0


@dataclass(frozen=True, slots=True)
class KVCacheMetrics:
    """Hold the counters of a manager at one moment, summed over its replicas.

    Attributes
    ----------
    input_tokens : int
        Prompt tokens that requests compute; each token of a request counts once.
    cache_tokens : int
        Prompt tokens taken from the prefix cache instead.
    generated_tokens : int
        Tokens appended to prompts, as of the last ``step``. Tokens appended by ``extend`` count
        after they were written. The token that a fork has in addition to its parent's tokens also
        counts.
    resumed_tokens, recomputed_tokens : int
        Tokens that ran before a preemption, of requests that resume: tokens still in the cache
        count as resumed, and tokens that run again count as recomputed. Except for `copied_tokens`,
        no other counter includes these tokens.
    h2d_blocks_copied, d2h_blocks_copied : int
        Pages copied from the host tier to the device, and from the device to the host tier.
    evicted_pages : int
        Cached pages evicted for new pages.
    copied_tokens : int
        Part of `cache_tokens` and `resumed_tokens`: tokens copied out of a cached page of which
        only the first tokens matched.
    peak_used_pages : int
        Largest number of pages held or pinned at the same time.
    """

    input_tokens: int = 0
    cache_tokens: int = 0
    h2d_blocks_copied: int = 0
    d2h_blocks_copied: int = 0
    evicted_pages: int = 0
    copied_tokens: int = 0
    peak_used_pages: int = 0
    generated_tokens: int = 0
    resumed_tokens: int = 0
    recomputed_tokens: int = 0

    @property
    def prompt_tokens(self) -> int:
        """Prompt tokens: the sum of `input_tokens` and `cache_tokens`, without generated tokens."""
        return self.input_tokens + self.cache_tokens

    @property
    def cache_hit_rate(self) -> float:
        """Share of `prompt_tokens` taken from the cache, 0..1; 0.0 without prompt tokens."""
        return self.cache_tokens / self.prompt_tokens if self.prompt_tokens else 0.0


#: What happened to the tokens of each reason, for texts.
_REASONS = {
    "never_seen": "never seen, or not remembered any more",
    "evicted": "evicted for new pages",
    "host_full": "evicted because the host tier was full",
    "forgotten": "taken out by forget",
    "reset": "taken out by a reset of the cache",
    "unreachable": "cached, but a window or a checkpoint was missing",
    "other_namespace": "cached in another namespace",
    "partial_page": "of a page that a hit cannot end in",
    "late": "in a store, but not loaded in time",
    "declined": "cached, but not taken",
}


@dataclass(frozen=True, slots=True)
class _MissedTokens:
    """Tokens of prompts by the reason why they were not in the cache."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    never_seen: int = 0
    evicted: int = 0
    host_full: int = 0
    forgotten: int = 0
    reset: int = 0
    unreachable: int = 0
    other_namespace: int = 0
    partial_page: int = 0
    late: int = 0
    declined: int = 0

    @property
    def uncached_tokens(self) -> int:
        """Tokens that were not taken from the cache: the sum over all reasons."""
        return self.prompt_tokens - self.cached_tokens

    @property
    def by_reason(self) -> dict[str, int]:
        """The uncached tokens of each reason."""
        return {reason: getattr(self, reason) for reason in _REASONS}

    def __str__(self) -> str:
        """Return a line for the prompt, and a line for each reason that has tokens."""
        lines = [
            f"{self.uncached_tokens} of {self.prompt_tokens} prompt tokens were not cached",
            *(f"  {n} {_REASONS[reason]}" for reason, n in self.by_reason.items() if n),
        ]
        return "\n".join(lines)


@dataclass(frozen=True, slots=True)
class Misses(_MissedTokens):
    """Hold the tokens of one admission that were not cached, by reason.

    An admission is the first ``fetch`` or ``step`` of a claim. A request that is claimed again has
    another admission, with the tokens that it has then. A fork has no admission.

    Attributes
    ----------
    prompt_tokens, cached_tokens : int
        Tokens of the request, and tokens taken from the cache. Their difference is the sum of all
        reasons.
    never_seen : int
        Tokens that were not cached before, as far as the record of lost pages goes back.
    evicted, host_full : int
        Tokens whose pages were evicted for new pages, last from the device or last from the host
        tier.
    forgotten, reset : int
        Tokens whose pages were removed by ``forget`` or ``reset_prefix_cache``.
    unreachable : int
        Tokens that are cached, but a hit cannot end there: the pages of a window, or a checkpoint
        of a state, are missing.
    other_namespace : int
        Tokens that are cached with another ``extra_key`` or ``cache_salt``. At most 16 other
        namespaces are searched.
    partial_page : int
        Tokens of a page that a hit cannot take: the end of the prompt that fills no page, the page
        of the last token, which always runs, or the equal start of a page with fewer tokens than
        ``partial_page_reuse``.
    late : int
        Tokens whose pages a store had, but that were not in the host tier when the request ran: the
        read failed, took too long, or found no room.
    declined : int
        Tokens that are cached, but the reservation did not take them: ``max_hit`` forbade it, or
        the page to copy from had to be evicted.
    newest_eviction, oldest_eviction : float or None
        Seconds between the loss of the pages that count as evicted, forgotten or reset, and the
        admission; None if no lost page was found. For a run of pages that left in parts, the time
        of the last part.
    """

    newest_eviction: float | None = None
    oldest_eviction: float | None = None

    def __str__(self) -> str:
        """Return the tokens by reason, and the time since the pages were lost."""
        text = _MissedTokens.__str__(self)
        if self.newest_eviction is None or self.oldest_eviction is None:
            return text
        newest, oldest = f"{self.newest_eviction:.3g}", f"{self.oldest_eviction:.3g}"
        times = newest if newest == oldest else f"{newest} to {oldest}"
        return f"{text}\n  pages were lost {times} s before"


@dataclass(frozen=True, slots=True)
class MissMetrics(_MissedTokens):
    """Sum the misses of all admissions since the last reset of metrics.

    The attributes of `Misses` except times, and:

    Attributes
    ----------
    admissions : int
        Admissions whose tokens are counted.
    remembered_pages : int
        Lost pages whose tokens are remembered now.
    lost_pages : int
        Pages that left the cache but are not remembered, because memory was short.
    """

    admissions: int = 0
    remembered_pages: int = 0
    lost_pages: int = 0


class AdviceRow(NamedTuple):
    """The hit rate of a cache of one size.

    Attributes
    ----------
    factor : float
        The size divided by the size of the manager's cache.
    pages : int
        Pages of each replica.
    bytes : int
        Bytes of these pages, over all devices of a replica.
    hit_rate : float
        Share of prompt tokens that the cache would have had, from 0 to 1.
    """

    factor: float
    pages: int
    bytes: int
    hit_rate: float


@dataclass(frozen=True, slots=True)
class AdviceRates:
    """Hold the hit rates of one tenant, or of all requests.

    Attributes
    ----------
    prompt_tokens : int
        Prompt tokens of the admissions, counted as ``input_tokens`` and ``cache_tokens`` of
        `KVCacheMetrics`.
    hit_rate : float
        Share of these tokens that the manager's cache had, with its eviction policy and tiers.
    rows : tuple of AdviceRow
        Estimates for LRU without a host tier, at 0.5, 1, 2 and 4 times the pages.
    optimum : AdviceRow
        Estimate for the optimum at the manager's pages: no eviction policy finds more.
    """

    prompt_tokens: int
    hit_rate: float
    rows: tuple[AdviceRow, ...]
    optimum: AdviceRow


@dataclass(frozen=True, slots=True)
class Advice(AdviceRates):
    """Hold the hit rates of other sizes of a cache, for all requests and by tenant.

    The attributes of `AdviceRates`, and:

    Attributes
    ----------
    tenants : dict of str to AdviceRates
        By tenant, if the manager has quotas. All tenants share the cache; quotas do not change the
        estimates.
    seconds : float
        Length of the window, at most 3,600. With many requests the window is shorter.
    sample : int
        One page in this number is sampled.
    admissions : int
        Admissions in the window.
    sampled_uses : int
        Uses of sampled pages by these admissions. The error of the rates falls with the square root
        of this number.
    lost_uses : int
        Uses that were not recorded, because memory was short.
    """

    tenants: dict[str, AdviceRates]
    seconds: float
    sample: int
    admissions: int
    sampled_uses: int
    lost_uses: int

    @classmethod
    def of(
        cls,
        tokens: Sequence[_AdviceTokens],
        tenants: Iterable[str],
        *,
        pages: int,
        page_bytes: int,
        counts: dict[str, Any],
    ) -> Advice:
        """Compute the rates from the tokens of requests without a tenant, and of each tenant."""

        def row(factor: float, found: float, prompt: int) -> AdviceRow:
            size = round(factor * pages)
            return AdviceRow(factor, size, size * page_bytes, found / prompt if prompt else 0.0)

        def rates(prompt: int, cached: int, found: dict[float, float], best: float) -> AdviceRates:
            rows = tuple(row(factor, n, prompt) for factor, n in found.items())
            rate = cached / prompt if prompt else 0.0
            return AdviceRates(prompt, rate, rows, row(1.0, best, prompt))

        found = {factor: sum(each[2][factor] for each in tokens) for factor in tokens[0][2]}
        every = rates(
            sum(each[0] for each in tokens),
            sum(each[1] for each in tokens),
            found,
            max(found[1.0], sum(each[3] for each in tokens)),
        )
        by_tenant = {name: rates(*each) for name, each in zip(tenants, tokens[1:], strict=True)}
        return cls(
            every.prompt_tokens, every.hit_rate, every.rows, every.optimum, by_tenant, **counts
        )


#: Prompt tokens, cached tokens, tokens that each factor finds, tokens that the optimum finds.
_AdviceTokens: TypeAlias = tuple[int, int, dict[float, float], float]


@dataclass(frozen=True, slots=True)
class TierMetrics:
    """Hold the counters of one tier at one moment; ``metrics["hits"]`` is ``metrics.hits``.

    For a model with groups, the pages of all groups for the same tokens count as one page.

    Attributes
    ----------
    hits : int
        Pages that were read, with the right bytes.
    misses : int
        Pages of prompts that neither the device nor the higher tiers had, and that this tier did
        not have or could not return. The pages are counted when a request first runs. Every page
        of a prompt that a hit could contain counts, so the sum of hits and misses is the number of
        all requested pages.
    bytes_in, bytes_out : int
        Bytes written to the tier, and bytes read from the tier.
    corrupt : int
        Pages whose bytes differed from the stored bytes; the tier removed these pages.
    timeouts : int
        Calls of the store that took longer than the time limit.
    errors : int
        Calls of the store that failed or returned an invalid result.
    breaker : str
        ``"closed"``: the tier is used. ``"open"``: the tier failed and is not called for some time.
        ``"half-open"``: single calls test whether the tier works again.
    pages_waiting : int
        Pages in the host tier that wait to be written to this tier.
    read_p50, read_p99, write_p50, write_p99 : float
        Percentiles of the seconds per batch, over the last 512 reads and the last 512 writes; 0.0
        without batches.
    tokens : int
        For the host tier: tokens that its pages added to hits, including tokens of pages that it
        got from stores. For a store: tokens of the pages that were read from it.
    """

    hits: int = 0
    misses: int = 0
    bytes_in: int = 0
    bytes_out: int = 0
    corrupt: int = 0
    timeouts: int = 0
    errors: int = 0
    breaker: Literal["closed", "open", "half-open"] = "closed"
    pages_waiting: int = 0
    read_p50: float = 0.0
    read_p99: float = 0.0
    write_p50: float = 0.0
    write_p99: float = 0.0
    tokens: int = 0

    def __getitem__(self, name: str) -> Any:
        """Return a field by its name."""
        if name not in self.keys():
            raise KeyError(f"{name!r} is none of {', '.join(self.keys())}")
        return getattr(self, name)

    def keys(self) -> list[str]:
        """Return the names of the fields, so that ``dict(metrics)`` contains all fields."""
        return [field.name for field in fields(self)]


@dataclass(frozen=True, slots=True)
class TenantMetrics:
    """Count the pages of one tenant at one moment, summed over replicas.

    Attributes
    ----------
    held_pages : int
        Pages that requests, pins and copies hold, and that count for the tenant.
    reserved_pages : int
        Pages that other tenants must leave to this tenant.
    max_pages : int or None
        Largest number of pages that the tenant may hold; None without a ceiling.
    refused : int
        Reservations of the tenant's requests that were refused only because of quotas, since the
        last reset of metrics.
    input_tokens, cache_tokens, generated_tokens : int
        Prompt tokens that the tenant's requests compute, prompt tokens taken from the cache, and
        generated tokens, counted as in `KVCacheMetrics`.
    """

    held_pages: int
    reserved_pages: int
    max_pages: int | None
    refused: int
    input_tokens: int
    cache_tokens: int
    generated_tokens: int

    @classmethod
    def summed(cls, stats: Iterable[Any]) -> TenantMetrics:
        """Sum the TenantStats of one tenant over replicas."""
        found = tuple(stats)
        most = found[0].max_pages
        return cls(
            held_pages=sum(each.held_pages for each in found),
            reserved_pages=sum(each.reserved_pages for each in found),
            max_pages=None if most is None else most * len(found),
            refused=sum(each.refused for each in found),
            input_tokens=sum(each.input_tokens for each in found),
            cache_tokens=sum(each.cache_tokens for each in found),
            generated_tokens=sum(each.generated_tokens for each in found),
        )


# ---- families of metrics for Prometheus ----------------------------------------------------------


_BREAKERS = ("closed", "open", "half-open")
_CALLS = (
    ("reserve", "Seconds per call of reserve."),
    ("reserve_batch", "Seconds per call of maybe_reserve_batch."),
    ("fetch", "Seconds per call of fetch."),
    ("step", "Seconds per call of step."),
)

#: A histogram: the calls up to each bound (seconds, as text), and the total seconds of all calls.
Times = tuple[Sequence[tuple[str, float]], float]


class Value(NamedTuple):
    """A value, and its labels after the labels of the manager."""

    labels: tuple[str, ...]
    value: float | Times


class Family(NamedTuple):
    """A metric family of Prometheus: its name ends in the unit, without _total for counters.

    `labels` are the labels after the labels of the manager.
    """

    kind: str  # "counter", "gauge" or "histogram"
    name: str
    help: str
    labels: tuple[str, ...]
    values: Sequence[Value]


def _plain(value: float) -> list[Value]:
    return [Value((), value)]


def _tokens(mgr: Any) -> Iterator[Family]:
    found = mgr.metrics
    for name, text, value in (
        ("computed_tokens", "Prompt tokens that must be computed.", "input_tokens"),
        ("cached_tokens", "Prompt tokens taken from the cache.", "cache_tokens"),
        ("generated_tokens", "Tokens appended after prompts.", "generated_tokens"),
        ("resumed_tokens", "Tokens that resumed requests found in the cache.", "resumed_tokens"),
        ("recomputed_tokens", "Tokens that resumed requests run again.", "recomputed_tokens"),
        ("copied_tokens", "Cached tokens copied from a partly equal page.", "copied_tokens"),
        ("host_loaded_pages", "Pages copied from the host tier.", "h2d_blocks_copied"),
        ("host_stored_pages", "Pages copied to the host tier.", "d2h_blocks_copied"),
    ):
        yield Family("counter", name, text, (), _plain(getattr(found, value)))
    peak = _plain(found.peak_used_pages)
    yield Family("gauge", "peak_used_pages", "Most pages held at the same time.", (), peak)


def _evictions(mgr: Any) -> Iterator[Family]:
    values = [
        Value((tier, reason), n)
        for tier, counts in mgr.eviction_metrics.items()
        for reason, n in asdict(counts).items()
    ]
    text = "Cached pages that were evicted or forgotten, by reason."
    yield Family("counter", "evicted_pages", text, ("tier", "reason"), values)


def _misses(mgr: Any) -> Iterator[Family]:
    found = mgr.miss_metrics
    is_on = mgr._explains  # noqa: SLF001 - otherwise all counters stay 0
    values = [Value((reason,), n) for reason, n in found.by_reason.items() if is_on]
    text = "Prompt tokens that were not cached when their request was admitted, by reason."
    yield Family("counter", "missed_tokens", text, ("reason",), values)
    text = "Requests whose missed tokens are counted."
    yield Family(
        "counter", "explained_admissions", text, (), _plain(found.admissions) if is_on else []
    )


def _advice(mgr: Any) -> Iterator[Family]:
    if not mgr._advises:  # noqa: SLF001 - otherwise there are no estimates
        return
    found = mgr.advice()
    text = "Estimated share of prompt tokens that LRU finds with this multiple of the pages."
    values = [Value((f"{row.factor:g}",), row.hit_rate) for row in found.rows]
    yield Family("gauge", "advice_hit_ratio", text, ("pages_factor",), values)
    values = [
        Value((tenant, f"{row.factor:g}"), row.hit_rate)
        for tenant, rates in found.tenants.items()
        for row in rates.rows
    ]
    yield Family("gauge", "tenant_advice_hit_ratio", text, ("tenant", "pages_factor"), values)
    text = "Estimated share of prompt tokens that no eviction policy exceeds with the same pages."
    best = _plain(found.optimum.hit_rate)
    yield Family("gauge", "advice_optimum_hit_ratio", text, (), best)
    values = [Value((name,), rates.optimum.hit_rate) for name, rates in found.tenants.items()]
    yield Family("gauge", "tenant_advice_optimum_hit_ratio", text, ("tenant",), values)
    text = "Seconds before the scrape that the estimates describe."
    yield Family("gauge", "advice_window_seconds", text, (), _plain(found.seconds))


def _pages(mgr: Any) -> Iterator[Family]:
    pages, sequences, host = list[Value](), list[Value](), list[Value]()
    for replica, stats in enumerate(mgr.replica_metrics):
        free = stats.free_pages
        held = stats.total_pages - free - stats.evictable_pages
        for state, n in (("held", held), ("evictable", stats.evictable_pages), ("free", free)):
            pages.append(Value((str(replica), state), n))
        sequences.append(Value((str(replica),), stats.num_sequences))
        if stats.host_pages:
            cached = stats.host_cached_pages
            host.append(Value((str(replica), "cached"), cached))
            host.append(Value((str(replica), "free"), stats.host_pages - cached))
    text = "Pages of the device: held by requests and pins, cached and evictable, free."
    yield Family("gauge", "pages", text, ("replica", "state"), pages)
    text = "Pages of the host tier; cached pages can be evicted."
    yield Family("gauge", "host_pages", text, ("replica", "state"), host)
    yield Family("gauge", "sequences", "Claimed requests.", ("replica",), sequences)


def _groups(mgr: Any) -> Iterator[Family]:
    groups = list(enumerate(mgr.group_metrics))
    pages = [
        Value((str(i), state), n)
        for i, group in groups
        for state, n in (
            ("held", group.held_pages),
            ("cached", group.cached_pages),
            ("missing", group.holes),
        )
    ]
    text = "Pages of an attention group: held, cached, missing in the cache."
    yield Family("gauge", "group_pages", text, ("group", "state"), pages)
    for name, text, field in (
        ("group_returned_pages", "Pages given back after a window passed them.", "given_back"),
        ("group_refilled_pages", "Missing pages of windows that were filled again.", "filled"),
    ):
        values = [Value((str(i),), getattr(group, field)) for i, group in groups]
        yield Family("counter", name, text, ("group",), values)


def _states(mgr: Any) -> Iterator[Family]:
    found = mgr.state_metrics
    if not found.total_slots:
        return
    free = found.total_slots - found.used_slots - found.checkpoints
    slots = [("used", found.used_slots), ("checkpoint", found.checkpoints), ("free", free)]
    values = [Value((state,), n) for state, n in slots]
    text = "Slots of recurrent states: used by requests, checkpoints, free."
    yield Family("gauge", "state_slots", text, ("state",), values)
    for name, text, field in (
        ("checkpoint_hits", "Requests that began with a checkpoint.", "checkpoint_hits"),
        ("checkpoints_made", "Checkpoints of states that were made.", "checkpoints_made"),
        ("checkpoints_evicted", "Checkpoints evicted for their slots.", "evicted_checkpoints"),
    ):
        yield Family("counter", name, text, (), _plain(getattr(found, field)))


def _tenants(mgr: Any) -> Iterator[Family]:
    tenants = mgr.tenant_metrics
    pages = list[Value]()
    for name, found in tenants.items():
        bounds = [("held", found.held_pages), ("reserved", found.reserved_pages)]
        if found.max_pages is not None:
            bounds.append(("ceiling", found.max_pages))
        pages += [Value((name, state), n) for state, n in bounds]
    text = "Pages of a tenant: held, reserved, and its ceiling."
    yield Family("gauge", "tenant_pages", text, ("tenant", "state"), pages)
    for name, text, field in (
        ("tenant_refusals", "Reservations refused only because of quotas.", "refused"),
        ("tenant_computed_tokens", "Prompt tokens that must be computed.", "input_tokens"),
        ("tenant_cached_tokens", "Prompt tokens taken from the cache.", "cache_tokens"),
        ("tenant_generated_tokens", "Tokens appended after prompts.", "generated_tokens"),
    ):
        values = [Value((tenant,), getattr(found, field)) for tenant, found in tenants.items()]
        yield Family("counter", name, text, ("tenant",), values)


def _tiers(mgr: Any) -> Iterator[Family]:
    tiers = mgr.tier_metrics
    for kind, name, text, field in (
        ("counter", "tier_hits", "Pages read from the tier, with the right bytes.", "hits"),
        ("counter", "tier_misses", "Pages of prompts that the tier did not have.", "misses"),
        ("counter", "tier_read_tokens", "Prompt tokens whose pages came from it.", "tokens"),
        ("counter", "tier_written_bytes", "Bytes written to the tier.", "bytes_in"),
        ("counter", "tier_read_bytes", "Bytes read from the tier.", "bytes_out"),
        ("counter", "tier_corrupt_pages", "Pages whose bytes have changed.", "corrupt"),
        ("counter", "tier_timeouts", "Calls of the store that took too long.", "timeouts"),
        ("counter", "tier_errors", "Calls of the store that failed.", "errors"),
        ("gauge", "tier_waiting_pages", "Pages that wait to be written.", "pages_waiting"),
    ):
        values = [Value((tier,), getattr(found, field)) for tier, found in tiers.items()]
        yield Family(kind, name, text, ("tier",), values)
    for way in ("read", "write"):
        values = [
            Value((tier, quantile), getattr(found, f"{way}_p{percent}"))
            for tier, found in tiers.items()
            for quantile, percent in (("0.5", 50), ("0.99", 99))
        ]
        text = f"Seconds per {way} of a batch, over the last 512 batches."
        yield Family("gauge", f"tier_{way}_seconds", text, ("tier", "quantile"), values)
    breakers = [
        Value((tier, state), found.breaker == state)
        for tier, found in tiers.items()
        for state in _BREAKERS
    ]
    text = "1 for the present state of the tier's circuit breaker, else 0."
    yield Family("gauge", "tier_breaker", text, ("tier", "state"), breakers)


def _latencies(mgr: Any) -> Iterator[Family]:
    found = mgr._call_times()  # noqa: SLF001 - counted in native code, only for exporters
    for call, text in _CALLS:
        upto, seconds = found[call]
        buckets = [("+Inf" if isinf(bound) else repr(bound), n) for bound, n in upto]
        yield Family("histogram", f"{call}_seconds", text, (), [Value((), (buckets, seconds))])


def manager_families(mgr: Any) -> Iterator[Family]:
    """Read the counters of a manager; a family that does not apply has no values.

    Raises
    ------
    KVCacheError
        The manager is closed.
    """
    for read in (
        _tokens,
        _misses,
        _advice,
        _evictions,
        _pages,
        _groups,
        _states,
        _tenants,
        _tiers,
        _latencies,
    ):
        yield from read(mgr)


def scheduler_families(scheduler: Any) -> Iterator[Family]:
    """Read the counters of a scheduler."""
    text = "Requests sent back to the queue because pages were short."
    yield Family("counter", "preemptions", text, (), _plain(scheduler.num_preemptions))
    waiting = _plain(len(scheduler.waiting))
    yield Family("gauge", "waiting_requests", "Requests in the queue.", (), waiting)


# ---- export to Prometheus ------------------------------------------------------------------------


class _Collector:
    """Collect metrics for each scrape of prometheus_client, with weak references to the objects."""

    def __init__(self, manager: Any, scheduler: Any, name: str) -> None:
        self._manager = weakref.ref(manager)
        self._scheduler = None if scheduler is None else weakref.ref(scheduler)
        self._name = name

    def describe(self) -> Iterable[Metric]:
        return ()  # so that registration reads no counters

    def _families(self) -> Iterator[Family]:
        manager = self._manager()
        if manager is not None:
            with contextlib.suppress(KVCacheError):  # the manager is closed
                yield from [*manager_families(manager)]
        scheduler = None if self._scheduler is None else self._scheduler()
        if scheduler is not None:
            yield from scheduler_families(scheduler)

    def collect(self) -> Iterator[Metric]:
        return (self._metric(family) for family in self._families() if family.values)

    def _metric(self, family: Family) -> Any:
        from prometheus_client import core

        kinds: dict[str, Any] = {
            "counter": core.CounterMetricFamily,
            "gauge": core.GaugeMetricFamily,
            "histogram": core.HistogramMetricFamily,
        }
        labels = ("manager", *family.labels)
        made = kinds[family.kind](f"kvcore_{family.name}", family.help, labels=labels)
        for labels_of_one, value in family.values:
            parts = value if isinstance(value, tuple) else (value,)  # buckets and sum, or a number
            made.add_metric((self._name, *labels_of_one), *parts)
        return made


class Exporter:
    """Serve a manager's counters until ``close``, the end of a ``with`` block or program exit.

    Attributes
    ----------
    host : str
    port : int
        Address and port that serve ``/metrics``.
    """

    def __init__(self, manager: Any, scheduler: Any, host: str, port: int, name: str) -> None:
        try:
            from prometheus_client import CollectorRegistry, start_http_server
        except ImportError as error:
            raise ImportError(
                "export needs prometheus-client: pip install 'kvcore[metrics]'"
            ) from error
        registry = CollectorRegistry()
        registry.register(_Collector(manager, scheduler, name))
        try:
            self._server, self._thread = start_http_server(port, addr=host, registry=registry)
        except OSError as error:
            raise OSError(
                error.errno, f"cannot listen at {host}:{port} ({error.strerror}); try port=0"
            ) from None
        self.host = host
        self.port: int = self._server.server_port
        manager._time_calls(True)  # noqa: SLF001 - ``close`` ends the timing
        self._timed: weakref.ref[Any] | None = weakref.ref(manager)
        self._closing = Lock()

    def close(self) -> None:
        """Stop the server, free the port and end the timing of calls; a second call does nothing.

        A scrape that is in progress gets its response.
        """
        with self._closing:
            timed, self._timed = self._timed, None
        manager = None if timed is None else timed()
        if manager is not None:
            manager._time_calls(False)  # noqa: SLF001
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def __enter__(self) -> Any:
        """Return the exporter."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Close the exporter."""
        self.close()


def export(
    manager: Any,
    *,
    port: int,
    host: str = "127.0.0.1",
    scheduler: Any = None,
    name: str = "kvcore",
) -> Exporter:
    """Serve a manager's counters to Prometheus, over HTTP from a thread.

    Parameters
    ----------
    manager : PagedKVCacheManager
        The exporter holds only a weak reference. After the manager is closed or deleted, its
        counters are not served any more.
    port : int
        0 selects a free port, see ``Exporter.port``.
    host : str
        With ``"0.0.0.0"``, other machines can also read the counters, without a password.
    scheduler : kvcore.scheduler.Scheduler, optional
        Its preemptions and waiting requests are also served.
    name : str
        Value of the label ``manager``, which distinguishes the managers of a process.

    Returns
    -------
    Exporter

    Raises
    ------
    ImportError
        prometheus-client is not installed.
    OSError
        The address cannot be bound, or the port is in use.

    Notes
    -----
    Counters are read only for a scrape; a step does not read them. Calls are timed while the
    manager has at least one exporter, which costs each call about 30 ns. Calls that raise an error
    are not counted. Metric names begin with ``kvcore_`` and follow the conventions of Prometheus:
    base units, and ``_total`` for counters. ``reset_metrics`` sets counters and histograms to 0.

    Examples
    --------
    >>> from kvcore import KVCacheParams, PagedKVCacheManager, metrics
    >>> params = KVCacheParams("float32", 1, 8, 1, page_size=4)
    >>> mgr = PagedKVCacheManager(params, 2, max_seq_len=64, num_pages=16)
    >>> with metrics.export(mgr, port=0) as exporter:
    ...     address = f"http://{exporter.host}:{exporter.port}/metrics"
    """
    return Exporter(manager, scheduler, host, integer("port", port, 0, 65_535), name)
