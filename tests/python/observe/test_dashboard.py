# SPDX-License-Identifier: Apache-2.0
"""docs/grafana.json queries only exported metrics, and docs/metrics.md names all metrics."""

from __future__ import annotations

import importlib.util
import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from grouped_traffic import params_of
from kvcore import KVCacheParams, PagedKVCacheManager, TextGenerationContext
from kvcore.groups import FullAttention, SlidingWindow, State
from kvcore.metrics import export
from kvcore.scheduler import Scheduler
from scraped import Samples, of, scrape

DOCS = Path(__file__).parents[3] / "docs"
PANELS = json.loads((DOCS / "grafana.json").read_text(encoding="utf-8"))["panels"]
TARGETS = [target["expr"] for panel in PANELS for target in panel["targets"]]
# Families that no panel shows: parts of other families, or numbers for troubleshooting.
LEFT_OUT = {
    "kvcore_copied_tokens_total",
    "kvcore_peak_used_pages",
    "kvcore_group_returned_pages_total",
    "kvcore_group_refilled_pages_total",
    "kvcore_tenant_generated_tokens_total",
}


def _panels_module() -> Any:
    spec = importlib.util.spec_from_file_location("metrics_panels", DOCS / "metrics_panels.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def scrapes(tmp_path: Path) -> Iterator[list[Samples]]:
    """Return two scrapes of a manager with groups, states, tiers and tenants, and its scheduler."""
    params = params_of(
        FullAttention([0]),
        SlidingWindow([1], 4),
        State([2], {"s": ((2,), "float32")}),
        num_layers=3,
    )
    with PagedKVCacheManager(
        params,
        max_batch_size=4,
        max_seq_len=200,
        num_pages=32,
        tiers=["host:256KiB", f"disk:{tmp_path}:16MiB"],
        quotas={"a": (2, 30)},
    ) as manager:
        scheduler = Scheduler(manager)
        with export(manager, port=0, scheduler=scheduler) as exporter:
            found = [scrape(exporter)]
            for i in range(12):
                context = TextGenerationContext(
                    i, [*range(50 * (i % 5), 50 * (i % 5) + 17)], tenant="a"
                )
                manager.claim(i)
                assert manager.reserve(context)
                manager.fetch([context])
                context.update(9)
                manager.step([context])
                manager.release(i)
            assert manager.flush(timeout=60)
            found.append(scrape(exporter))
            yield found


def test_every_name_is_served_and_every_family_is_used(scrapes: list[Samples]) -> None:
    served = {name for name, _ in scrapes[-1]}
    asked = {name for target in TARGETS for name in re.findall(r"kvcore_\w+", target)}
    assert asked <= served
    families = {re.sub(r"_(bucket|sum|count)$", "", name) for name in served}
    used = {re.sub(r"_bucket$", "", name) for name in asked}
    assert families - used == LEFT_OUT


def test_the_documentation_names_every_family(scrapes: list[Samples]) -> None:
    text = (DOCS / "metrics.md").read_text(encoding="utf-8")
    named = {f"kvcore_{name}" for name in re.findall(r"`(\w+)`", text)}
    served = {re.sub(r"_(bucket|sum|count)$", "", name) for name, _ in scrapes[-1]}
    assert served <= named


def test_every_expression_has_a_value(scrapes: list[Samples]) -> None:
    evaluate = _panels_module().evaluate
    for target in TARGETS:
        found = evaluate(target, scrapes, 10.0)
        assert found, target
        assert all(value >= 0 or math.isnan(value) for value in found.values()), target


def test_shares_of_tokens_are_those_of_the_counters(scrapes: list[Samples]) -> None:
    evaluate = _panels_module().evaluate
    by_title = {panel["title"]: panel["targets"] for panel in PANELS}
    last = scrapes[-1]
    cached, computed = of(last, "cached_tokens_total"), of(last, "computed_tokens_total")
    (target,) = by_title["Prefix hit rate"]
    assert evaluate(target["expr"], scrapes, 10.0) == {(): cached / (cached + computed)}
    assert cached > 0
    (target,) = by_title["Hit rate of tenants"]
    (share,) = evaluate(target["expr"], scrapes, 10.0).values()
    assert share == cached / (cached + computed)  # all requests are this tenant's
    below, device = (
        evaluate(each["expr"], scrapes, 10.0) for each in by_title["Prompt tokens by tier"]
    )
    host = below[("tier", "host"),]
    assert device[()] + host == pytest.approx(cached / (cached + computed))
    assert host * (cached + computed) == pytest.approx(
        of(last, "tier_read_tokens_total", tier="host")
    )


def test_pages_that_requests_hold_are_exported_whether_they_are_cached_or_not() -> None:
    with PagedKVCacheManager(
        KVCacheParams("float32", 1, 8, 1, page_size=4, enable_prefix_caching=True),
        max_batch_size=2,
        max_seq_len=64,
        num_pages=16,
    ) as manager:
        context = TextGenerationContext("r", list(range(9)))
        manager.claim("r")
        manager.fetch([context])
        context.update(9)
        manager.step([context])
        assert manager.num_cached_blocks == 2
        with export(manager, port=0) as exporter:
            held = [of(scrape(exporter), "pages", replica="0", state="held")]
            manager.release("r")
            held.append(of(scrape(exporter), "pages", replica="0", state="held"))
        assert held == [3, 0]


def test_quantiles_lie_in_their_buckets() -> None:
    quantile = _panels_module()._quantile
    buckets = {(("le", "1e-06"),): 10.0, (("le", "2e-06"),): 30.0, (("le", "+Inf"),): 40.0}
    assert quantile(0.25, buckets) == {(): pytest.approx(1e-6)}
    assert quantile(0.5, buckets) == {(): pytest.approx(1.5e-6)}
    assert quantile(0.99, buckets) == {(): 2e-6}
    assert math.isnan(quantile(0.5, dict.fromkeys(buckets, 0.0))[()])
