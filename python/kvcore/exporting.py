# SPDX-License-Identifier: Apache-2.0
"""A manager's counters for Prometheus, read when they are asked for."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterable, Iterator, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple

from kvcore.arguments import integer
from kvcore.errors import KVCacheError

if TYPE_CHECKING:
    from prometheus_client import Metric

__all__ = ["Exporter", "export"]

_BREAKERS = ("closed", "open", "half-open")


class _Value(NamedTuple):
    labels: tuple[str, ...]
    value: float


class _Family(NamedTuple):
    """What Prometheus calls a metric family: its name ends in the unit, a counter's not in _total.

    `labels` are those behind the manager's own.
    """

    kind: str  # "counter" or "gauge"
    name: str
    help: str
    labels: tuple[str, ...]
    values: Sequence[_Value]


def _plain(value: float) -> list[_Value]:
    return [_Value((), value)]


def _tokens(mgr: Any) -> Iterator[_Family]:
    found = mgr.metrics
    for name, text, value in (
        ("computed_tokens", "Tokens to compute, each position of a claim once.", "input_tokens"),
        ("cached_tokens", "Tokens taken from the cache instead.", "cache_tokens"),
        ("copied_tokens", "Of the cached tokens, those copied out of a page.", "copied_tokens"),
        ("evicted_pages", "Cached pages given up for new ones.", "evicted_pages"),
        ("host_loaded_pages", "Pages copied from the host tier.", "h2d_blocks_copied"),
        ("host_stored_pages", "Pages copied to the host tier.", "d2h_blocks_copied"),
    ):
        yield _Family("counter", name, text, (), _plain(getattr(found, value)))
    peak = _plain(found.peak_used_pages)
    yield _Family("gauge", "peak_used_pages", "Most pages held or pinned at a time.", (), peak)


def _pages(mgr: Any) -> Iterator[_Family]:
    pages, sequences, host = list[_Value](), list[_Value](), list[_Value]()
    for replica, stats in enumerate(mgr.replica_metrics):
        free = stats.free_pages
        held = stats.total_pages - free - stats.evictable_pages
        for state, n in (("held", held), ("evictable", stats.evictable_pages), ("free", free)):
            pages.append(_Value((str(replica), state), n))
        sequences.append(_Value((str(replica),), stats.num_sequences))
        if stats.host_pages:
            cached = stats.host_cached_pages
            host.append(_Value((str(replica), "cached"), cached))
            host.append(_Value((str(replica), "free"), stats.host_pages - cached))
    text = "Pages of the device: of requests and pins, cached and nobody's, free."
    yield _Family("gauge", "pages", text, ("replica", "state"), pages)
    text = "Pages of the host tier; a cached one can be evicted."
    yield _Family("gauge", "host_pages", text, ("replica", "state"), host)
    yield _Family("gauge", "sequences", "Requests that are claimed.", ("replica",), sequences)


def _groups(mgr: Any) -> Iterator[_Family]:
    groups = list(enumerate(mgr.group_metrics))
    pages = [
        _Value((str(i), state), n)
        for i, group in groups
        for state, n in (
            ("held", group.held_pages),
            ("cached", group.cached_pages),
            ("missing", group.holes),
        )
    ]
    text = "Pages of an attention group: read, cached (read or not), evicted behind windows."
    yield _Family("gauge", "group_pages", text, ("group", "state"), pages)
    for name, text, field in (
        ("group_returned_pages", "Pages given back behind windows.", "given_back"),
        ("group_refilled_pages", "Pages of windows that were there again.", "filled"),
    ):
        values = [_Value((str(i),), getattr(group, field)) for i, group in groups]
        yield _Family("counter", name, text, ("group",), values)


def _states(mgr: Any) -> Iterator[_Family]:
    found = mgr.state_metrics
    if not found.total_slots:
        return
    free = found.total_slots - found.used_slots - found.checkpoints
    slots = [("used", found.used_slots), ("checkpoint", found.checkpoints), ("free", free)]
    values = [_Value((state,), n) for state, n in slots]
    text = "Slots of recurrent states: of requests, of cached prefixes, free."
    yield _Family("gauge", "state_slots", text, ("state",), values)
    for name, text, field in (
        ("checkpoint_hits", "Requests that began with a checkpoint.", "checkpoint_hits"),
        ("checkpoints_made", "Checkpoints of states that were kept.", "checkpoints_made"),
    ):
        yield _Family("counter", name, text, (), _plain(getattr(found, field)))


def _tenants(mgr: Any) -> Iterator[_Family]:
    tenants = mgr.tenant_metrics
    pages, refused = list[_Value](), list[_Value]()
    for name, found in tenants.items():
        bounds = [("held", found.held_pages), ("reserved", found.reserved_pages)]
        if found.max_pages is not None:
            bounds.append(("ceiling", found.max_pages))
        pages += [_Value((name, state), n) for state, n in bounds]
        refused.append(_Value((name,), found.refused))
    text = "Pages of a tenant: held, left to it by others, the most it may hold."
    yield _Family("gauge", "tenant_pages", text, ("tenant", "state"), pages)
    text = "Reservations that quotas alone were in the way of."
    yield _Family("counter", "tenant_refusals", text, ("tenant",), refused)


def _tiers(mgr: Any) -> Iterator[_Family]:
    tiers = mgr.tier_metrics
    for kind, name, text, field in (
        ("counter", "tier_hits", "Pages that were read, and were right.", "hits"),
        ("counter", "tier_misses", "Pages that were asked for and not had.", "misses"),
        ("counter", "tier_written_bytes", "Bytes written to the tier.", "bytes_in"),
        ("counter", "tier_read_bytes", "Bytes read from the tier.", "bytes_out"),
        ("counter", "tier_corrupt_pages", "Pages whose bytes were not those stored.", "corrupt"),
        ("counter", "tier_timeouts", "Calls of the store that took too long.", "timeouts"),
        ("counter", "tier_errors", "Calls of the store that failed.", "errors"),
        ("gauge", "tier_waiting_pages", "Pages that wait to be written.", "pages_waiting"),
    ):
        values = [_Value((tier,), getattr(found, field)) for tier, found in tiers.items()]
        yield _Family(kind, name, text, ("tier",), values)
    for way in ("read", "write"):
        values = [
            _Value((tier, quantile), getattr(found, f"{way}_p{percent}"))
            for tier, found in tiers.items()
            for quantile, percent in (("0.5", 50), ("0.99", 99))
        ]
        text = f"Seconds that a batch's {way} took, of the last 512."
        yield _Family("gauge", f"tier_{way}_seconds", text, ("tier", "quantile"), values)
    breakers = [
        _Value((tier, state), found.breaker == state)
        for tier, found in tiers.items()
        for state in _BREAKERS
    ]
    text = "1 for the state that the tier's circuit breaker is in."
    yield _Family("gauge", "tier_breaker", text, ("tier", "state"), breakers)


def _preemptions(scheduler: Any) -> Iterator[_Family]:
    text = "Requests sent back to the queue for want of pages."
    yield _Family("counter", "preemptions", text, (), _plain(scheduler.num_preemptions))
    text = "Tokens run again for that."
    yield _Family("counter", "recomputed_tokens", text, (), _plain(scheduler.recomputed_tokens))
    waiting = _plain(len(scheduler.waiting))
    yield _Family("gauge", "waiting_requests", "Requests in the queue.", (), waiting)


class _Collector:
    """Asked by prometheus_client for each scrape; keeps neither manager nor scheduler alive."""

    def __init__(self, manager: Any, scheduler: Any, name: str) -> None:
        self._manager = weakref.ref(manager)
        self._scheduler = None if scheduler is None else weakref.ref(scheduler)
        self._name = name

    def describe(self) -> Iterable[Metric]:
        return ()  # so that registering it asks for nothing

    def _families(self) -> Iterator[_Family]:
        manager = self._manager()
        if manager is not None:
            readers = (_tokens, _pages, _groups, _states, _tenants, _tiers)
            with contextlib.suppress(KVCacheError):  # it is closed
                yield from [family for read in readers for family in read(manager)]
        scheduler = None if self._scheduler is None else self._scheduler()
        if scheduler is not None:
            yield from _preemptions(scheduler)

    def collect(self) -> Iterator[Metric]:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        kinds = {"counter": CounterMetricFamily, "gauge": GaugeMetricFamily}
        for family in self._families():
            if not family.values:
                continue
            labels = ("manager", *family.labels)
            metric = kinds[family.kind](f"kvcore_{family.name}", family.help, labels=labels)
            for labels_of_one, value in family.values:
                metric.add_metric((self._name, *labels_of_one), value)
            yield metric


class Exporter:
    """Serve a manager's counters until ``close``, the end of a ``with`` or of the program.

    Attributes
    ----------
    host : str
    port : int
        Where ``/metrics`` is answered.
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
                error.errno, f"nobody can listen at {host}:{port} ({error.strerror}); try port=0"
            ) from None
        self.host = host
        self.port: int = self._server.server_port

    def close(self) -> None:
        """Stop answering and free the port; once more does nothing."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def __enter__(self) -> Any:
        """Return it."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Close it."""
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
        Not kept alive: once it is closed or gone nothing of it is served.
    port : int
        0 takes a free one, see ``Exporter.port``.
    host : str
        Others than this machine can ask where it is ``"0.0.0.0"``: nothing asks them for a
        password.
    scheduler : kvcore.scheduler.Scheduler, optional
        Whose preemptions are counted as well.
    name : str
        Value of the label ``manager``, which tells the managers of a process apart.

    Returns
    -------
    Exporter

    Raises
    ------
    ImportError
        prometheus-client is not installed.
    OSError
        Nobody can listen there, or somebody does.

    Notes
    -----
    Counters are read when they are asked for, so that they cost a step nothing. Metric names begin
    with ``kvcore_`` and follow Prometheus' conventions: base units, ``_total`` for counters, which
    begin at 0 again with ``reset_metrics``.

    Examples
    --------
    >>> from kvcore import KVCacheParams, PagedKVCacheManager, metrics
    >>> params = KVCacheParams("float32", 1, 8, 1, page_size=4)
    >>> mgr = PagedKVCacheManager(params, 2, max_seq_len=64, num_pages=16)
    >>> with metrics.export(mgr, port=0) as exporter:
    ...     address = f"http://{exporter.host}:{exporter.port}/metrics"
    """
    return Exporter(manager, scheduler, host, integer("port", port, 0, 65_535), name)
