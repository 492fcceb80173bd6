# SPDX-License-Identifier: Apache-2.0
"""A manager's counters for Prometheus, read when they are asked for."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterable, Iterator
from threading import Lock
from types import TracebackType
from typing import TYPE_CHECKING, Any

from kvcore.errors import KVCacheError
from kvcore.metric_families import Family, manager_families, scheduler_families
from kvcore.support.arguments import integer

if TYPE_CHECKING:
    from prometheus_client import Metric

__all__ = ["Exporter", "export"]


class _Collector:
    """Asked by prometheus_client for each scrape; keeps neither manager nor scheduler alive."""

    def __init__(self, manager: Any, scheduler: Any, name: str) -> None:
        self._manager = weakref.ref(manager)
        self._scheduler = None if scheduler is None else weakref.ref(scheduler)
        self._name = name

    def describe(self) -> Iterable[Metric]:
        return ()  # so that registering it asks for nothing

    def _families(self) -> Iterator[Family]:
        manager = self._manager()
        if manager is not None:
            with contextlib.suppress(KVCacheError):  # it is closed
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
        manager._time_calls(True)  # noqa: SLF001 - where it is ended
        self._timed: weakref.ref[Any] | None = weakref.ref(manager)
        self._closing = Lock()

    def close(self) -> None:
        """Stop answering, free the port and time no calls any more; once more does nothing.

        A scrape that is under way gets its answer.
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
    Counters are read when they are asked for, so that they cost a step nothing. Calls are timed
    from the first exporter of a manager to the end of its last one, which costs each about 30 ns;
    those that raise count nowhere. Metric names begin with ``kvcore_`` and follow Prometheus'
    conventions: base units, ``_total`` for counters, which begin at 0 again with
    ``reset_metrics``, as the histograms do.

    Examples
    --------
    >>> from kvcore import KVCacheParams, PagedKVCacheManager, metrics
    >>> params = KVCacheParams("float32", 1, 8, 1, page_size=4)
    >>> mgr = PagedKVCacheManager(params, 2, max_seq_len=64, num_pages=16)
    >>> with metrics.export(mgr, port=0) as exporter:
    ...     address = f"http://{exporter.host}:{exporter.port}/metrics"
    """
    return Exporter(manager, scheduler, host, integer("port", port, 0, 65_535), name)
