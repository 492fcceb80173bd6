# SPDX-License-Identifier: Apache-2.0
"""Fixed calls to SGLang's prefix cache and kvcore's, and checks of kvcore's cache only.

Needs SGLang's sources (`sglang_sources.open_sources`).
"""

from __future__ import annotations

import logging
import random
from array import array
from collections.abc import Callable
from dataclasses import fields
from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.arg_groups.fields import memory
from sglang.srt.disaggregation import kv_events
from sglang.srt.mem_cache import registry
from sglang.srt.mem_cache.base_prefix_cache import (
    BasePrefixCache,
    EvictParams,
    InsertParams,
    MatchPrefixParams,
)
from sglang.srt.mem_cache.pure_swa_radix_cache import PureSWARadixCache
from sglang.srt.mem_cache.radix_cache import RadixCache, RadixKey
from sglang.srt.plugins import load_plugins_by_group

import kvcore
import kvcore.integrations.sglang as plugin
import peer_events
from kvcore.integrations.sglang import served
from kvcore.integrations.sglang.cache import KVCoreRadixCache, KVCoreWindowCache
from sglang_pair import Side, init_params, ours_content

CHECKS: dict[str, Callable[[], None]] = {}
BOTH = (RadixCache, KVCoreRadixCache)
PLAIN = (None, None)


def check(body: Callable[[], None]) -> Callable[[], None]:
    """Add a function to the list, by its name."""
    CHECKS[body.__name__.replace("_", " ")] = body
    return body


def same(scene: Callable[[Side], Any], *types: Any, page: int = 4, **options: Any) -> list[Any]:
    """Run a scene on each cache, compare the answers and return them."""
    found = [scene(Side(each, page, 256 * page, **options)) for each in types or BOTH]
    assert found[0] == found[1], found
    return found


def put(side: Side, tokens: list[int], name: Any = PLAIN, priority: int | None = 0) -> int:
    """Insert tokens into new slots; free the slots of tokens that were cached already."""
    whole = side.pages(len(tokens)) * side.page
    slots = side.allocator.alloc(whole)
    key = side.key(tokens, name)
    result = side.cache.insert(InsertParams(key=key, value=slots, priority=priority))
    side.allocator.free_segment(slots[: result.prefix_len], start_pos=0)
    kept = len(tokens) // side.page * side.page
    side.allocator.free_segment(slots[kept:], start_pos=0)
    return int(result.prefix_len)


@check
def insert_and_match_answer_the_same() -> None:
    def scene(side: Side) -> list[Any]:
        tokens = list(range(1, 40))
        answers: list[Any] = [put(side, tokens[:n]) for n in (0, 3, 8, 9, 39, 20, 39)]
        answers += [put(side, [*tokens[:12], 99, 98, 97, 96, 95])]
        for n in (0, 1, 3, 4, 5, 15, 16, 39):
            found = side.match(tokens[:n], PLAIN)
            nodes = (found.last_device_node, found.last_host_node, found.best_match_node)
            assert nodes[0] is nodes[1] is nodes[2]
            answers.append((found.device_prefix_len, len(side.cache.path_device_indices(nodes[0]))))
        answers += [side.sizes(), side.cache.supports_prefix_sharing(), side.cache.disable]
        return [*answers, side.cache.supports_swa(), side.cache.supports_mamba()]

    for page in (1, 4, 16):
        same(scene, page=page)


@check
def namespaces_share_nothing() -> None:
    def scene(side: Side) -> list[Any]:
        names = [(a, b) for a in (None, "", "x", "é\ud800") for b in (None, "", "x")]
        answers: list[Any] = []
        for name in names:
            answers += [side.match([1, 2, 3, 4, 5], name).device_prefix_len]
            answers += [put(side, [1, 2, 3, 4, 5], name)]
        return [*answers, side.cache.total_size()]

    same(scene)


@check
def a_key_may_be_limited_and_tokens_need_64_bits() -> None:
    def scene(side: Side) -> list[Any]:
        big = [2**40, -(2**63), 2**63 - 1, 1, 2**32 + 1, 1, 1, 1]
        answers: list[Any] = [put(side, big)]
        for limit in (0, 3, 4, 7, 8, 20):
            key = RadixKey(array("q", big), limit=limit)
            found = side.cache.match_prefix(MatchPrefixParams(key=key))
            answers.append(found.device_prefix_len)
        return [*answers, side.match([2**40, -(2**63), 2**63 - 1, 1, 1, 1, 1, 1], PLAIN)[0]]

    for eagle in (False, True):
        same(scene, is_eagle=eagle)


@check
def locks_count_and_keep() -> None:
    def scene(side: Side) -> list[Any]:
        put(side, list(range(16)))
        short, long = (side.match(list(range(n)), PLAIN).last_device_node for n in (8, 16))
        answers = []
        for verb, node in (("inc", long), ("inc", short), ("inc", long), ("dec", long)):
            answers.append(getattr(side.cache, f"{verb}_lock_ref")(node).delta)
            answers.append((side.sizes(), side.evict(100)))
        locks = [side.cache.lock(node) for node in (short, side.cache.root_node_handle())]
        for lock in (*locks, None):
            side.cache.unlock(lock)
        answers += [side.cache.dec_lock_ref(node).delta for node in (long, short)]
        return [*answers, side.sizes(), side.evict(100), side.sizes()]

    same(scene)


@check
def what_was_asked_for_is_evicted_in_pages() -> None:
    for page in (1, 4):
        side = Side(KVCoreRadixCache, page, 64 * page)
        put(side, list(range(10 * page)))
        assert side.evict(0) == side.evict(-5) == 0
        assert side.evict(1) == page
        assert side.evict(2 * page + 1) == 3 * page
        assert side.match(list(range(10 * page)), PLAIN).device_prefix_len == 6 * page
        assert side.evict(10**6) == 6 * page
        assert side.allocator.available_size() == 64 * page


@check
def each_policy_takes_the_same_leaf_first() -> None:
    def scene(side: Side) -> list[Any]:
        prompts = {each: [each] * 4 for each in range(6)}
        for each, tokens in prompts.items():
            put(side, tokens, priority=each % 3)
        for each in (0, 0, 3):
            put(side, prompts[each])
        side.match(prompts[1], PLAIN)
        side.cache.touch_prefix(side.key(prompts[2], PLAIN))
        order: list[int] = []
        while side.cache.total_size():
            before = {k for k, tokens in prompts.items() if cached(side, tokens)}
            assert side.evict(1) == 4
            order += before - {k for k, tokens in prompts.items() if cached(side, tokens)}
        return order

    def cached(side: Side, tokens: list[int]) -> bool:
        if isinstance(side.cache, KVCoreRadixCache):
            return side.cache.tree.match(tokens)[1].num_pages > 0
        return tuple(tokens) in side.cache.root_node.children

    orders = [same(scene, eviction_policy=policy)[0] for policy in KVCoreRadixCache.POLICIES]
    assert len({tuple(order) for order in orders}) == 5, orders


@check
def requests_are_walked_in_the_same_order() -> None:
    rng = random.Random(7)
    prompts = [[rng.randrange(2) for _ in range(rng.randrange(12))] for _ in range(40)]

    def scene(side: Side) -> Any:
        for tokens in prompts:
            put(side, tokens)
        nodes = [side.match(tokens, PLAIN).last_device_node for tokens in prompts]
        order = side.cache.dfs_weight_order(nodes)
        assert sorted(order) == list(range(len(prompts)))
        return order

    theirs, ours = (scene(Side(each, 1, 999)) for each in BOTH)
    side = Side(KVCoreRadixCache, 1, 999)
    for tokens in prompts:
        put(side, tokens)
    hits = [tokens[: side.match(tokens, PLAIN).device_prefix_len] for tokens in prompts]
    # Groups of equal size may be visited in any order: the weight of each prefix must agree.
    for order in (theirs, ours):
        for depth in range(12):
            seen = [tuple(hits[i][:depth]) for i in order if len(hits[i]) >= depth]
            runs = [a for a, b in zip(seen, [None, *seen], strict=False) if a != b]
            assert len(runs) == len(set(runs)), "the requests of a prefix are not adjacent"
    weights = [[len(hits[i]) for i in order if not hits[i]] for order in (theirs, ours)]
    assert weights[0] == weights[1]


@check
def windows_keep_what_is_in_front_of_their_floor() -> None:
    def scene(side: Side) -> list[Any]:
        answers: list[Any] = [side.cache.supports_swa(), side.cache.swa_retain_window]
        tokens = list(range(30))
        for rid, floor in (("a", 5), ("b", 0), ("c", 17)):
            answers.append(side.start(rid, tokens, PLAIN, None))
            side.grow(rid, 29)
            side.requests[rid].kv.swa_evict_floor = floor
            answers.append(side.checkpoint(rid, 20 if floor != 17 else 29))
            side.release(rid, checkpoint=False)
            side.check()
            cache = side.cache
            answers += [cache.swa_evictable_size(), cache.swa_protected_size(), side.sizes()]
        gone = side.cache.evict(EvictParams(swa_num_tokens=400)).num_tokens_evicted
        return [*answers, gone, side.cache.full_evictable_size(), side.cache.full_protected_size()]

    same(scene, PureSWARadixCache, KVCoreWindowCache, sliding_window_size=8)


@check
def a_lock_from_before_a_reset_is_refused() -> None:
    side = Side(KVCoreRadixCache, 4, 256)
    put(side, list(range(32)))
    lock = side.cache.lock(side.match(list(range(32)), PLAIN).last_device_node)
    side.cache.reset()
    assert side.cache.total_size() == 0
    try:
        side.cache.unlock(lock)
    except kvcore.InvalidHandleError:
        return
    raise AssertionError("the lock belonged to another tree")


def context(**options: Any) -> Any:
    """Return the context from which SGLang makes a cache."""
    params = init_params(4, 64)
    params.eviction_policy = options.pop("eviction_policy", "lru")
    params.eviction_policy_config = options.pop("config", None)
    params.sliding_window_size = 8
    given: dict[str, Any] = {
        "disable_radix_cache": False,
        "is_hybrid_swa": False,
        "is_hybrid_ssm": False,
    }
    given |= {"full_tokens_per_layer": None} | options
    return SimpleNamespace(params=params, **given)


@check
def the_backend_is_registered_and_says_what_it_refuses() -> None:
    settings = dict.fromkeys(served._OTHERS, False)
    assert settings.keys() <= {*memory.Memory.__annotations__}, (
        "an option of SGLang has another name"
    )
    bags = {
        "get_memory": SimpleNamespace(**settings),
        "get_disagg": SimpleNamespace(disaggregation_decode_retraction_backup="none"),
    }
    for name, bag in bags.items():
        setattr(served, name, lambda bag=bag: bag)
    found = load_plugins_by_group("sglang.srt.plugins")["kvcore"][0]
    found()
    make = registry.get_radix_cache_factory("kvcore")
    assert make is plugin.make_cache
    assert type(make(context())) is KVCoreRadixCache
    windows = context(is_hybrid_swa=True, full_tokens_per_layer=0)
    assert type(make(windows)) is KVCoreWindowCache
    refused: list[dict[str, Any]] = [
        {"is_hybrid_ssm": True},
        {"is_hybrid_swa": True, "full_tokens_per_layer": 9},
        {"eviction_policy": "mru"},
        {"eviction_policy": "tlru"},
        {"config": {"protected_threshold": 3}},
    ]
    for options in refused:
        expect_refusal(make, context(**options))
    sparse = context()
    sparse.params.token_to_kv_pool_allocator = SimpleNamespace()
    expect_refusal(make, sparse)
    for name in settings:
        setattr(bags["get_memory"], name, True)
        expect_refusal(make, context())
        setattr(bags["get_memory"], name, False)


def expect_refusal(make: Any, given: Any) -> None:
    try:
        made = make(given)
    except NotImplementedError as error:
        assert "does not serve" in str(error)
        return
    raise AssertionError(f"{type(made)} was made from {given}")


@check
def sglang_keeps_its_own_cache_with_a_line_where_kvcore_cannot_be_it() -> None:
    import sglang.version

    def fail(_params: Any) -> None:
        raise RuntimeError("no tree today")

    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("kvcore.integrations.sglang")
    logger.addHandler(handler)
    made, own = registry.default_radix_cache_factory, object()
    lock, cache_class = BasePrefixCache.lock, served.cache_class
    version = sglang.version.__version__
    try:
        registry.default_radix_cache_factory = lambda _context: own
        assert plugin.make_cache(context(disable_radix_cache=True)) is own
        sglang.version.__version__ = "0.6.0"
        assert plugin.make_cache(context()) is own
        sglang.version.__version__ = version
        assert plugin.make_cache(context(shares_pages=True)) is own
        later = context()
        later.params.compressed = True
        assert plugin.make_cache(later) is own
        BasePrefixCache.lock = lambda self, node, *, tier: None
        assert plugin.make_cache(context()) is own
        BasePrefixCache.lock = lock
        served.cache_class = lambda _context: fail  # type: ignore[assignment,return-value]
        assert plugin.make_cache(context()) is own
    finally:
        registry.default_radix_cache_factory, sglang.version.__version__ = made, version
        BasePrefixCache.lock, served.cache_class = lock, cache_class
        logger.removeHandler(handler)
    kept = f"SGLang {version} uses its own cache: "
    assert lines[0] == "--disable-radix-cache leaves kvcore nothing to do: no prefix is cached"
    assert lines[1:-2] == [
        "SGLang 0.6.0 uses its own cache: kvcore serves 0.5.23",
        f"{kept}kvcore does not know the cache's arguments shares_pages",
        f"{kept}kvcore does not know the cache's arguments compressed",
    ]
    assert lines[-2].startswith(
        f"{kept}this SGLang calls its cache in another way (KVCoreRadixCache.l"
    )
    assert lines[-1] == f"{kept}kvcore failed with RuntimeError: no tree today"


@check
def every_argument_of_a_cache_is_known() -> None:
    assert {*vars(init_params(4, 64))} == served._PARAMS
    assert {each.name for each in fields(registry.TreeCacheBuildContext)} == served._CONTEXT


@check
def priorities_beyond_50_are_the_nearest() -> None:
    side = Side(KVCoreRadixCache, 1, 64, eviction_policy="priority")
    for token, priority in enumerate((10**9, -(10**9), 51, 0, 1, -1, None)):
        put(side, [token], priority=priority)
    order = []
    for _ in range(7):
        before = ours_content(side.cache)
        side.evict(1)
        order += [key[1][0] for key in before.keys() - ours_content(side.cache).keys()]
    assert order == [1, 5, 3, 6, 4, 0, 2], order


@check
def slots_go_to_the_device_of_the_allocator() -> None:
    side = Side(KVCoreRadixCache, 4, 256)
    put(side, list(range(8)))
    slots = side.cache.path_device_indices(side.match(list(range(8)), PLAIN).last_device_node)
    assert (slots.dtype, str(slots.device)) == (torch.int64, "cpu")
    assert sorted(slots.tolist()) == sorted(side.cache.all_values_flatten().tolist())
    assert len(ours_content(side.cache)) == 2


@check
def cache_events_have_the_fields_that_the_publisher_is_tested_with() -> None:
    assert peer_events.differing("sglang", kv_events) == []
