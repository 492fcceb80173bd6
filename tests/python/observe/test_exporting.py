# SPDX-License-Identifier: Apache-2.0
"""A manager's Prometheus metrics, fetched over HTTP and read with Prometheus' own parser."""

from __future__ import annotations

import gc
import threading
from typing import Any

import pytest

import kvcore
from builders import claimed, make_manager
from kvcore.metrics import export
from kvcore.scheduler import Request, Scheduler
from scraped import of, scrape
from tier_steps import A, B, C, serve, tiered


def test_counters_are_those_of_the_manager() -> None:
    manager, pool = tiered()
    with export(manager, port=0) as exporter:
        assert of(scrape(exporter), "computed_tokens_total") == 0
        for tokens in (A, B, C, A):
            serve(manager, pool, tokens)
        running = claimed(manager, B)
        pool.run([running])
        found, metrics = scrape(exporter), manager.metrics
        for name, value in (
            ("computed_tokens", metrics.input_tokens),
            ("cached_tokens", metrics.cache_tokens),
            ("copied_tokens", metrics.copied_tokens),
            ("host_loaded_pages", metrics.h2d_blocks_copied),
            ("host_stored_pages", metrics.d2h_blocks_copied),
        ):
            assert of(found, f"{name}_total") == value
        assert metrics.h2d_blocks_copied > 0
        evicted = manager.eviction_metrics["device"]
        assert evicted.policy == metrics.evicted_pages > 0
        assert of(found, "evicted_pages_total", tier="device", reason="policy") == evicted.policy
        assert of(found, "evicted_pages_total", tier="host", reason="policy") == 0
        pages = {
            state: of(found, "pages", replica="0", state=state)
            for state in ("held", "evictable", "free")
        }
        assert sum(pages.values()) == manager.total_num_pages == 8
        assert pages["held"] == 8 - manager.num_free_blocks == 8
        assert of(found, "sequences", replica="0") == 1
        assert of(found, "host_pages", replica="0", state="cached") > 0
        tier = manager.tier_metrics["host"]
        assert of(found, "tier_hits_total", tier="host") == tier.hits
        assert of(found, "tier_read_tokens_total", tier="host") == tier.hits * 4
        assert of(found, "tier_read_bytes_total", tier="host") == tier.bytes_out
        assert of(found, "tier_breaker", tier="host", state="closed") == 1
        assert of(found, "tier_breaker", tier="host", state="open") == 0


def test_groups_states_and_tenants_have_labels() -> None:
    groups = (
        kvcore.groups.FullAttention(layers=(0,)),
        kvcore.groups.SlidingWindow(layers=(1,), window=8),
    )
    manager = make_manager(4, 64, params={"groups": groups}, quotas={"a": (4, 32), "b": (0, None)})
    with export(manager, port=0) as exporter:
        context = claimed(manager, range(64), tenant="a")
        manager.fetch([context])
        context.update(0)
        manager.step([context])
        found = scrape(exporter)
        for i, group in enumerate(manager.group_metrics):
            for state, n in (("held", group.held_pages), ("cached", group.cached_pages)):
                assert of(found, "group_pages", group=str(i), state=state) == n > 0
        assert of(found, "group_returned_pages_total", group="1") > 0
        assert of(found, "tenant_pages", tenant="a", state="held") > 0
        assert of(found, "tenant_pages", tenant="a", state="ceiling") == 32
        assert ("kvcore_tenant_pages", (("state", "ceiling"), ("tenant", "b"))) not in found
        assert of(found, "tenant_refusals_total", tenant="b") == 0
        assert of(found, "tenant_computed_tokens_total", tenant="a") == 64
        assert of(found, "tenant_cached_tokens_total", tenant="b") == 0


def test_preemptions_are_the_schedulers() -> None:
    manager = make_manager(4, 8, max_seq_len=32)
    scheduler = Scheduler(manager)
    for i in range(4):
        prompt = list(range(100 * i, 100 * i + 7))
        scheduler.add(Request(kvcore.TextGenerationContext(str(i), prompt), 12))
    with export(manager, port=0, scheduler=scheduler) as exporter:
        assert of(scrape(exporter), "waiting_requests") == 4
        while batch := scheduler.next_batch():
            scheduler.update(batch, [7] * len(batch.requests))
        found = scrape(exporter)
        assert of(found, "preemptions_total") == scheduler.num_preemptions > 0
        assert of(found, "recomputed_tokens_total") == scheduler.recomputed_tokens > 0


def test_what_is_closed_or_gone_is_not_served() -> None:
    first, second = make_manager(4, 8), make_manager(4, 8)
    with export(first, port=0) as one, export(second, port=0) as two:
        first.close()
        assert scrape(one) == {}
        assert scrape(two) != {}
        del second
        gc.collect()
        assert scrape(two) == {}


def test_close_ends_the_thread_and_frees_the_port() -> None:
    manager = make_manager(4, 8)
    before = set(threading.enumerate())
    exporter = export(manager, port=0)
    with pytest.raises(OSError, match=f"cannot listen at 127.0.0.1:{exporter.port}"):
        export(manager, port=exporter.port)
    exporter.close()
    exporter.close()
    assert set(threading.enumerate()) <= before
    export(manager, port=exporter.port).close()


@pytest.mark.parametrize(
    ("port", "error"), [(-1, ValueError), (65_536, ValueError), ("9100", TypeError)]
)
def test_a_port_is_an_int(port: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="port is"):
        export(make_manager(4, 8), port=port)


def test_scrapes_beside_traffic() -> None:
    """A scrape belongs to one moment: the parts of a pool add up to the pool."""
    manager = make_manager(4, 64)
    stopped = threading.Event()

    def serve_on() -> None:
        n = 0
        while not stopped.is_set():
            context = claimed(manager, range(n, n + 40))
            manager.fetch([context])
            context.update(0)
            manager.step([context])
            manager.release(context.request_id)
            n += 7

    thread = threading.Thread(target=serve_on)
    with export(manager, port=0) as exporter:
        thread.start()
        for _ in range(50):
            found = scrape(exporter)
            states = ("held", "evictable", "free")
            assert sum(of(found, "pages", replica="0", state=state) for state in states) == 64
        stopped.set()
        thread.join()
