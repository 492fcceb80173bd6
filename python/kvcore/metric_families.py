# SPDX-License-Identifier: Apache-2.0
"""What Prometheus is told of a manager and a scheduler: names, labels, values."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from math import isinf
from typing import Any, NamedTuple

__all__ = ["Family", "manager_families", "scheduler_families"]

_BREAKERS = ("closed", "open", "half-open")
_CALLS = (
    ("reserve", "Seconds that a call of reserve took."),
    ("reserve_batch", "Seconds that a call of maybe_reserve_batch took."),
    ("fetch", "Seconds that a call of fetch took."),
    ("step", "Seconds that a call of step took."),
)

#: Of a histogram: calls up to each bound in seconds, which is text, and the seconds of all.
Times = tuple[Sequence[tuple[str, float]], float]


class Value(NamedTuple):
    """A value, and the labels it has behind the manager's own."""

    labels: tuple[str, ...]
    value: float | Times


class Family(NamedTuple):
    """What Prometheus calls a metric family: its name ends in the unit, a counter's not in _total.

    `labels` are those behind the manager's own.
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
        ("computed_tokens", "Prompt tokens to compute, each once.", "input_tokens"),
        ("cached_tokens", "Prompt tokens taken from the cache instead.", "cache_tokens"),
        ("generated_tokens", "Tokens appended behind prompts.", "generated_tokens"),
        ("resumed_tokens", "Tokens that preempted requests found again.", "resumed_tokens"),
        ("recomputed_tokens", "Tokens that run again after a preemption.", "recomputed_tokens"),
        ("copied_tokens", "Of tokens from the cache, those copied out of a page.", "copied_tokens"),
        ("host_loaded_pages", "Pages copied from the host tier.", "h2d_blocks_copied"),
        ("host_stored_pages", "Pages copied to the host tier.", "d2h_blocks_copied"),
    ):
        yield Family("counter", name, text, (), _plain(getattr(found, value)))
    peak = _plain(found.peak_used_pages)
    yield Family("gauge", "peak_used_pages", "Most pages held or pinned at a time.", (), peak)


def _evictions(mgr: Any) -> Iterator[Family]:
    values = [
        Value((tier, reason), n)
        for tier, counts in mgr.eviction_metrics.items()
        for reason, n in asdict(counts).items()
    ]
    text = "Cached pages that went, by why it was these."
    yield Family("counter", "evicted_pages", text, ("tier", "reason"), values)


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
    text = "Pages of the device: of requests and pins, cached and nobody's, free."
    yield Family("gauge", "pages", text, ("replica", "state"), pages)
    text = "Pages of the host tier; a cached one can be evicted."
    yield Family("gauge", "host_pages", text, ("replica", "state"), host)
    yield Family("gauge", "sequences", "Requests that are claimed.", ("replica",), sequences)


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
    text = "Pages of an attention group: read, cached (read or not), evicted behind windows."
    yield Family("gauge", "group_pages", text, ("group", "state"), pages)
    for name, text, field in (
        ("group_returned_pages", "Pages given back behind windows.", "given_back"),
        ("group_refilled_pages", "Pages of windows that were there again.", "filled"),
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
    text = "Slots of recurrent states: of requests, of cached prefixes, free."
    yield Family("gauge", "state_slots", text, ("state",), values)
    for name, text, field in (
        ("checkpoint_hits", "Requests that began with a checkpoint.", "checkpoint_hits"),
        ("checkpoints_made", "Checkpoints of states that were kept.", "checkpoints_made"),
        ("checkpoints_evicted", "Checkpoints that gave up their slots.", "evicted_checkpoints"),
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
    text = "Pages of a tenant: held, left to it by others, the most it may hold."
    yield Family("gauge", "tenant_pages", text, ("tenant", "state"), pages)
    for name, text, field in (
        ("tenant_refusals", "Reservations that quotas alone were in the way of.", "refused"),
        ("tenant_computed_tokens", "Prompt tokens to compute for a tenant.", "input_tokens"),
        ("tenant_cached_tokens", "Prompt tokens that the cache had for a tenant.", "cache_tokens"),
        ("tenant_generated_tokens", "Tokens generated for a tenant.", "generated_tokens"),
    ):
        values = [Value((tenant,), getattr(found, field)) for tenant, found in tenants.items()]
        yield Family("counter", name, text, ("tenant",), values)


def _tiers(mgr: Any) -> Iterator[Family]:
    tiers = mgr.tier_metrics
    for kind, name, text, field in (
        ("counter", "tier_hits", "Pages that were read, and were right.", "hits"),
        ("counter", "tier_misses", "Pages that prompts lacked and it did not have.", "misses"),
        ("counter", "tier_read_tokens", "Prompt tokens whose pages the tier had.", "tokens"),
        ("counter", "tier_written_bytes", "Bytes written to the tier.", "bytes_in"),
        ("counter", "tier_read_bytes", "Bytes read from the tier.", "bytes_out"),
        ("counter", "tier_corrupt_pages", "Pages whose bytes were not those stored.", "corrupt"),
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
        text = f"Seconds that a batch's {way} took, of the last 512."
        yield Family("gauge", f"tier_{way}_seconds", text, ("tier", "quantile"), values)
    breakers = [
        Value((tier, state), found.breaker == state)
        for tier, found in tiers.items()
        for state in _BREAKERS
    ]
    text = "1 for the state that the tier's circuit breaker is in."
    yield Family("gauge", "tier_breaker", text, ("tier", "state"), breakers)


def _latencies(mgr: Any) -> Iterator[Family]:
    found = mgr._call_times()  # noqa: SLF001 - counted in native code, for exporters alone
    for call, text in _CALLS:
        upto, seconds = found[call]
        buckets = [("+Inf" if isinf(bound) else repr(bound), n) for bound, n in upto]
        yield Family("histogram", f"{call}_seconds", text, (), [Value((), (buckets, seconds))])


def manager_families(mgr: Any) -> Iterator[Family]:
    """Read the counters of a manager; families without a value do not apply to it.

    Raises
    ------
    KVCacheError
        It is closed.
    """
    for read in (_tokens, _evictions, _pages, _groups, _states, _tenants, _tiers, _latencies):
        yield from read(mgr)


def scheduler_families(scheduler: Any) -> Iterator[Family]:
    """Read the counters of a scheduler."""
    text = "Requests sent back to the queue for want of pages."
    yield Family("counter", "preemptions", text, (), _plain(scheduler.num_preemptions))
    waiting = _plain(len(scheduler.waiting))
    yield Family("gauge", "waiting_requests", "Requests in the queue.", (), waiting)
