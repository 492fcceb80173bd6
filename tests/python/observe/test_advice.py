# SPDX-License-Identifier: Apache-2.0
"""Advice on other numbers of pages, from all pages or from a sample."""

from __future__ import annotations

import random
import threading
from pathlib import Path
from typing import Any

import pytest

from builders import error_of, make_manager, prefilled, put_in_cache
from conftest import require
from kvcore import CacheOptions, PagedKVCacheManager, TextGenerationContext
from kvcore.groups import FullAttention, SlidingWindow, State
from kvcore.metrics import AdviceRates, export
from tier_steps import A, B, C, serve, tiered

PAGE = 4


def advised(num_pages: int = 8, **options: Any) -> PagedKVCacheManager:
    cache = CacheOptions(advice=options.pop("advice", 1), **options.pop("cache", {}))
    return make_manager(PAGE, num_pages, cache=cache, **options)


def prompt(n: int, first: int = 0) -> list[int]:
    return list(range(first, first + n))


def hits(rates: AdviceRates) -> list[int]:
    """Return the tokens that each size finds, and the tokens that the optimum finds."""
    return [round(row.hit_rate * rates.prompt_tokens) for row in (*rates.rows, rates.optimum)]


# ---- sizes ---------------------------------------------------------------------------------------


def test_rows_have_pages_and_bytes() -> None:
    mgr = advised(8)
    found = mgr.advice()
    assert [(row.factor, row.pages) for row in found.rows] == [(0.5, 4), (1, 8), (2, 16), (4, 32)]
    assert [row.bytes for row in found.rows] == [
        row.pages * mgr.params.bytes_per_page for row in found.rows
    ]
    assert found.optimum[:3] == (1.0, 8, 8 * mgr.params.bytes_per_page)
    assert (found.prompt_tokens, found.hit_rate, found.sample) == (0, 0.0, 1)
    assert hits(found) == [0, 0, 0, 0, 0]


def test_a_prompt_counts_for_each_size_that_keeps_it() -> None:
    mgr = advised(8)
    put_in_cache(mgr, prompt(13))
    put_in_cache(mgr, prompt(24, 100))  # 6 pages
    put_in_cache(mgr, prompt(13))  # 3 pages, after 6 others: 8 pages keep 2 of them
    found = mgr.advice()
    assert found.prompt_tokens == 13 + 24 + 13
    assert (found.admissions, found.sampled_uses, found.lost_uses) == (3, 3 + 5 + 3, 0)
    assert found.hit_rate == mgr.metrics.cache_hit_rate == 8 / 50
    assert hits(found) == [0, 8, 12, 12, 8]


def test_the_optimum_keeps_pages_that_are_used_again() -> None:
    mgr = advised(3)
    for first in (0, 100, 200, 0, 100, 200):
        put_in_cache(mgr, prompt(8, first))  # 2 pages, of which a hit may contain the first
    assert mgr.metrics.cache_tokens == 0
    assert hits(mgr.advice()) == [0, 0, 12, 12, 8]


def test_other_policies_get_the_estimates_of_lru() -> None:
    mgr = advised(8, cache={"eviction": "fifo"})
    for first in (0, 100, 0, 200, 0):
        put_in_cache(mgr, prompt(13, first))
    # FIFO evicts the first prompt, which LRU keeps.
    assert hits(mgr.advice())[1] == 24 > mgr.metrics.cache_tokens


def test_partial_pages_count_as_they_were() -> None:
    mgr = advised(8)
    put_in_cache(mgr, prompt(11))
    put_in_cache(mgr, [*prompt(7), 50, 51])
    assert mgr.metrics.copied_tokens == 3
    assert hits(mgr.advice()) == [7, 7, 7, 7, 7]


def test_generated_tokens_are_found_by_the_next_turn() -> None:
    mgr = advised(8)
    ctx = prefilled(mgr, prompt(7), sampled=7)
    for token in range(8, 13):
        mgr.fetch([ctx])
        ctx.update(token)
        mgr.step([ctx])
    mgr.release(ctx.request_id)
    put_in_cache(mgr, prompt(13))
    found = mgr.advice()
    assert found.prompt_tokens == mgr.metrics.input_tokens + mgr.metrics.cache_tokens
    assert hits(found) == [12] * 5


def test_a_namespace_has_its_own_pages() -> None:
    mgr = advised(8)
    put_in_cache(mgr, prompt(9))
    put_in_cache(mgr, prompt(9), cache_salt="other")
    assert hits(mgr.advice()) == [0] * 5
    put_in_cache(mgr, prompt(9), cache_salt="other")
    assert hits(mgr.advice()) == [8] * 5


def test_replicas_are_added() -> None:
    mgr = advised(8, replicas=2)
    for replica in (0, 1, 1):
        put_in_cache(mgr, prompt(9), replica_idx=replica)
    found = mgr.advice()
    assert (found.prompt_tokens, found.admissions) == (27, 3)
    assert hits(found) == [8] * 5
    assert found.rows[1].pages == 8


# ---- pages that leave for good -------------------------------------------------------------------


def test_a_reset_empties_all_sizes() -> None:
    mgr = advised(8)
    put_in_cache(mgr, prompt(9))
    mgr.reset_prefix_cache()
    put_in_cache(mgr, prompt(9))
    assert hits(mgr.advice()) == [0] * 5
    put_in_cache(mgr, prompt(9))
    assert hits(mgr.advice()) == [8] * 5


def test_a_reset_while_a_request_holds_pages() -> None:
    mgr = advised(8)
    ctx = prefilled(mgr, prompt(9))
    mgr.reset_prefix_cache()
    mgr.release(ctx.request_id)
    put_in_cache(mgr, prompt(9))
    assert hits(mgr.advice()) == [0] * 5


def test_no_size_finds_a_forgotten_page_or_a_page_after_it() -> None:
    mgr = advised(8)
    put_in_cache(mgr, prompt(13))
    _, pages = mgr.match_prefix(prompt(13), return_pages=True)
    mgr.forget([int(pages[1])])
    put_in_cache(mgr, prompt(13))
    assert hits(mgr.advice()) == [4] * 5


# ---- requests ------------------------------------------------------------------------------------


def test_a_request_that_comes_back_counts_once() -> None:
    mgr = advised(8)
    ctx = prefilled(mgr, prompt(9), sampled=9)
    mgr.release(ctx.request_id)
    ctx.start_idx = 0
    mgr.claim(ctx.request_id)
    mgr.fetch([ctx])
    ctx.update(10)
    mgr.step([ctx])
    mgr.release(ctx.request_id)
    found = mgr.advice()
    assert mgr.metrics.resumed_tokens == 8
    assert found.prompt_tokens == mgr.metrics.input_tokens + mgr.metrics.cache_tokens
    assert hits(found) == [mgr.metrics.cache_tokens] * 5


def test_a_fork_keeps_its_pages_and_is_no_admission() -> None:
    mgr = advised(8)
    ctx = prefilled(mgr, prompt(9), sampled=9)
    child = TextGenerationContext("child", ctx.tokens)
    mgr.fork(ctx.request_id, child)
    mgr.release(ctx.request_id)
    for first in (100, 200, 300):
        put_in_cache(mgr, prompt(13, first))
    assert mgr.advice().admissions == 4
    put_in_cache(mgr, prompt(9))
    assert hits(mgr.advice())[:4] == [8] * 4  # the fork holds them, after 9 other pages
    mgr.release("child")
    mgr.check_integrity()


def test_a_request_that_never_runs_is_no_admission() -> None:
    mgr = advised(8)
    ctx = TextGenerationContext("a", prompt(9))
    mgr.claim("a")
    assert mgr.maybe_reserve(ctx)
    mgr.release("a")
    assert mgr.advice().admissions == 0


def test_tenants_share_the_pages() -> None:
    mgr = advised(8, cache={"quotas": {"a": (0, None), "b": (0, None)}})
    for tenant, first in (("a", 0), ("b", 100), ("b", 100), ("a", 0)):
        put_in_cache(mgr, prompt(13, first), tenant=tenant)
    put_in_cache(mgr, prompt(13))  # without a tenant
    found = mgr.advice()
    assert {name: hits(rates) for name, rates in found.tenants.items()} == {
        "a": [4, 12, 12, 12, 12],
        "b": [12, 12, 12, 12, 12],
    }
    assert hits(found) == [28, 36, 36, 36, 36]
    assert [found.tenants[name].prompt_tokens for name in "ab"] == [26, 26]
    assert found.prompt_tokens == 65
    for name, rates in found.tenants.items():
        counts = mgr.tenant_metrics[name]
        assert rates.hit_rate == counts.cache_tokens / (counts.cache_tokens + counts.input_tokens)


def test_hits_of_a_host_tier_are_no_hits_of_the_device() -> None:
    mgr, pool = tiered(8, cache=CacheOptions(advice=1))
    for tokens in (A, B, C, A):
        serve(mgr, pool, tokens)
    assert mgr.metrics.h2d_blocks_copied > 0
    found = mgr.advice()
    assert found.hit_rate == mgr.metrics.cache_hit_rate > 0
    assert hits(found) == [0, 0, 4, 16, 0]  # after 15 other pages
    serve(mgr, pool, A)  # the pages that came from the tier are the last used pages
    assert hits(mgr.advice()) == [19, 19, 23, 35, 19]  # 3 tokens of a partial page


def test_restored_pages_are_found(tmp_path: Path) -> None:
    mgr = advised(8, blocks="allocate")
    put_in_cache(mgr, prompt(13))
    mgr.snapshot(tmp_path / "cache.kv")
    other = advised(8, blocks="allocate")
    other.restore(tmp_path / "cache.kv")
    put_in_cache(other, prompt(13))
    assert hits(other.advice()) == [12] * 5


# ---- samples -------------------------------------------------------------------------------------


def test_a_sample_estimates_what_all_pages_show() -> None:
    draw = random.Random(3)
    starts = [[draw.randrange(1000) for _ in range(160)] for _ in range(40)]
    exact, sampled = advised(600), advised(600, advice=4)
    for _ in range(1000):
        start = draw.choice(starts)
        tokens = [*start[: draw.randrange(20, 160)], *(draw.randrange(1000) for _ in range(40))]
        for mgr in (exact, sampled):
            put_in_cache(mgr, tokens)
    wanted, found = exact.advice(), sampled.advice()
    assert found.sample == 4
    assert 0.2 < found.sampled_uses / wanted.sampled_uses < 0.3
    assert wanted.rows[0].hit_rate + 0.1 < wanted.rows[3].hit_rate
    for row, other in zip(
        (*wanted.rows, wanted.optimum), (*found.rows, found.optimum), strict=True
    ):
        assert abs(row.hit_rate - other.hit_rate) < 0.025


@pytest.mark.parametrize(("pages", "sample"), [(16_384, 1), (16_385, 2), (1 << 22, 256)])
def test_large_pools_are_sampled_less(pages: int, sample: int) -> None:
    assert advised(pages, advice=1).advice().sample == sample


def test_true_is_one_page_in_64() -> None:
    assert advised(advice=True).advice().sample == 64
    assert CacheOptions(advice=True).advice_sample == 64


# ---- threads and exporters -----------------------------------------------------------------------


def test_advice_while_another_thread_serves() -> None:
    mgr = advised(64, enable_runtime_checks=False)
    done = threading.Event()
    found: list[int] = []

    def ask() -> None:
        while not done.is_set():
            found.append(mgr.advice().admissions)

    asking = threading.Thread(target=ask)
    asking.start()
    try:
        for i in range(300):
            put_in_cache(mgr, prompt(40, 40 * (i % 7)))
    finally:
        done.set()
        asking.join()
    assert found == sorted(found)
    assert mgr.advice().admissions == 300
    mgr.check_integrity()


def test_families_of_prometheus() -> None:
    require("prometheus_client")
    from scraped import of, scrape

    mgr = advised(8, cache={"quotas": {"a": (0, None)}})
    for first in (0, 100, 0):
        put_in_cache(mgr, prompt(13, first), tenant="a")
    with export(mgr, port=0) as exporter:
        samples = scrape(exporter)
    found = mgr.advice()
    for row, of_a in zip(found.rows, found.tenants["a"].rows, strict=True):
        factor = f"{row.factor:g}"
        assert of(samples, "advice_hit_ratio", pages_factor=factor) == row.hit_rate
        of_tenant = of(samples, "tenant_advice_hit_ratio", tenant="a", pages_factor=factor)
        assert of_tenant == of_a.hit_rate
    assert of(samples, "advice_optimum_hit_ratio") == found.optimum.hit_rate > 0
    assert of(samples, "tenant_advice_optimum_hit_ratio", tenant="a") > 0
    assert 0 < of(samples, "advice_window_seconds") <= found.seconds


def test_no_families_without_advice() -> None:
    require("prometheus_client")
    from scraped import scrape

    with export(make_manager(), port=0) as exporter:
        assert not any("advice" in name for name, _ in scrape(exporter))


# ---- refusals ------------------------------------------------------------------------------------


def test_a_manager_without_advice_refuses() -> None:
    text = str(error_of(make_manager().advice))
    assert "no advice" in text
    assert "CacheOptions(advice=True)" in text


@pytest.mark.parametrize("advice", [0, -1, 3, 1 << 21])
def test_a_sample_is_a_power_of_two(advice: int) -> None:
    with pytest.raises(ValueError, match=f"advice is {advice}, must be "):
        advised(advice=advice)


@pytest.mark.parametrize("advice", ["64", 2.5, None])
def test_a_sample_is_a_number(advice: Any) -> None:
    with pytest.raises(TypeError, match="advice"):
        CacheOptions(advice=advice)


@pytest.mark.parametrize(
    "groups",
    [
        (FullAttention(layers=(0,)), SlidingWindow(layers=(1,), window=8)),
        (FullAttention(layers=(0,)), State(layers=(1,), arrays={"s": ((2,), "float32")})),
    ],
)
def test_layers_that_keep_different_tokens_are_refused(groups: Any) -> None:
    with pytest.raises(ValueError, match="must be 0 for layers with windows or states"):
        advised(64, params={"groups": groups})
