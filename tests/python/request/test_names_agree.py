# SPDX-License-Identifier: Apache-2.0
"""Every pair of names for the same data: two names are equal exactly if the data are equal."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from conftest import require
from kvcore import KVCacheParams, PagedKVCacheManager, PrefixTree, TextGenerationContext
from kvcore.groups import FullAttention, State
from kvcore.keys import KeyChain, context_keys, format_fingerprint, page_keys, root_key
from kvcore.routing import PrefixIndex
from kvcore.stores import MemoryStore

PAGE = 4
PARAMS = KVCacheParams("float32", 1, 4, 1, page_size=PAGE, enable_prefix_caching=True)

#: Few values of each kind, so that two draws often agree in all but one value.
TEXTS = st.sampled_from([None, "", "a", "b", "ab", "\udc80", "a\0"])
KEYS = st.lists(
    st.tuples(
        st.sampled_from([0, 1, 3, 4, 6]),
        st.sampled_from([1, 2, 4, 8]),
        st.sampled_from([b"", b"i"]),
    ),
    max_size=3,
)
TOKENS = st.lists(st.sampled_from([0, 1]), min_size=8, max_size=13)


@st.composite
def requests(draw: st.DrawFn) -> dict[str, Any]:
    """Draw the arguments of a request: tokens, extra keys over some of them, and names."""
    tokens = draw(TOKENS)
    keys = [key for key in draw(KEYS) if key[0] + key[1] <= len(tokens)]
    return {
        "tokens": tokens,
        "extra_keys": keys or None,
        "extra_key": draw(TEXTS),
        "cache_salt": draw(TEXTS),
    }


def of_context(request: dict[str, Any], name: Any = "r") -> TextGenerationContext:
    return TextGenerationContext(name, request["tokens"], **without(request, "tokens"))


def without(request: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in request.items() if name not in names}


def common(one: list[Any], other: list[Any]) -> int:
    """Return the number of leading items that are equal."""
    pairs = zip(one, other, strict=False)
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))


def keys_of(request: dict[str, Any], **options: Any) -> list[bytes]:
    return page_keys(request["tokens"], PAGE, **without(request, "tokens"), **options)


def nearly(request: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the request with another length, start, order or number of its extra keys."""
    keys = request["extra_keys"] or [(0, 4, b"i")]
    yield request | {"extra_keys": keys[::-1]}
    yield request | {"extra_keys": [*keys, *keys]}
    for length, start in ((1, 0), (-1, 0), (0, 1)):
        moved = [(s + start, n + length, key) for s, n, key in keys]
        if all(n > 0 and s + n <= len(request["tokens"]) for s, n, _ in moved):
            yield request | {"extra_keys": moved}


# -- pages -----------------------------------------------------------------------------------------
@given(requests(), requests())
def test_a_tree_takes_pages_for_each_other_where_their_keys_are_equal(
    one: dict[str, Any], other: dict[str, Any]
) -> None:
    """A tree compares the stand-ins of extra keys; names compare the chained keys of pages."""
    for second in (other, *nearly(one)):
        tree = PrefixTree(PAGE)
        pages = len(one["tokens"]) // PAGE
        whole = one["tokens"][: pages * PAGE]
        inside = [key for key in one["extra_keys"] or () if key[0] < len(whole)]
        names = without(one, "tokens", "extra_keys")
        tree.insert(whole, list(range(pages)), extra_keys=inside, **names)
        found, handle = tree.match(second["tokens"], **without(second, "tokens"))
        del handle
        assert len(found) == common(keys_of(one), keys_of(second)), (one, second)


@given(requests(), requests())
def test_stores_and_events_have_the_keys_of_requests(
    one: dict[str, Any], other: dict[str, Any]
) -> None:
    """In either order of commits, the store, the events and the request have the same names."""
    store = MemoryStore(1 << 20)
    for request in (one, other):
        with PagedKVCacheManager(
            PARAMS, 1, 64, num_pages=16, tiers=["host:64KiB", store], fingerprint="m", events=True
        ) as manager:
            context = of_context(request)
            keys = context_keys(context, PAGE, seed=manager.fingerprint)
            assert keys == keys_of(request, seed=manager.fingerprint)
            known = sum(itertools.takewhile(bool, store.contains(keys)))
            manager.claim("r")
            manager.fetch([context])
            hit = context.start_idx
            assert hit == min(known * PAGE, (len(request["tokens"]) - 1) // PAGE * PAGE)
            context.update(7)
            manager.step([context])
            manager.flush()
            written = len(request["tokens"]) // PAGE
            assert all(store.contains(keys[:written]))
            stored = [e for e in manager.take_events() if type(e).__name__ == "PagesStored"]
            on_device = [e for e in stored if e.medium == "GPU"]
            assert {e.extra_key for e in on_device} == {request["extra_key"]}
            assert {e.cache_salt for e in on_device} == {request["cache_salt"]}
            assert [key for e in on_device for key in e.keys] == keys[:written]
            manager.release("r")


def test_extra_keys_of_other_lengths_share_nothing_through_a_store() -> None:
    """An image has 8 tokens in one prompt and 12 in another."""
    store = MemoryStore(1 << 20)

    def manager() -> PagedKVCacheManager:
        return PagedKVCacheManager(
            PARAMS, 4, 64, num_pages=16, tiers=["host:64KiB", store], fingerprint="m"
        )

    def serve(mgr: PagedKVCacheManager, placeholders: int, value: float) -> tuple[int, list[float]]:
        keys = [(0, placeholders, b"sha256 of the picture")]
        context = TextGenerationContext("r", [9] * placeholders + [1, 2, 3], extra_keys=keys)
        mgr.claim("r")
        (inputs,) = mgr.fetch([context])
        hit, pages = context.start_idx, inputs.lookup_table[0]
        for t in range(hit, context.active_idx):
            inputs.blocks[pages[t // PAGE], :, 0, t % PAGE] = value
        read = [float(inputs.blocks[pages[t // PAGE], 0, 0, t % PAGE, 0, 0]) for t in range(hit)]
        context.update(5)
        mgr.step([context])
        mgr.release("r")
        return hit, read

    with manager() as first:
        assert serve(first, 8, 1.0) == (0, [])
        first.flush()
    with manager() as second:
        assert serve(second, 12, 2.0) == (0, [])
        second.flush()
    with manager() as third:
        assert serve(third, 8, 3.0) == (8, [1.0] * 8)
        assert serve(third, 12, 3.0) == (12, [2.0] * 12)


@given(requests(), st.data())
def test_a_chain_and_a_cut_context_keep_whole_lengths(
    request: dict[str, Any], data: st.DataObject
) -> None:
    """An extra key keeps its identity if a cut ends in the middle of it."""
    n = data.draw(st.integers(1, len(request["tokens"])))
    context = of_context(request)
    context.rewind(n)
    keys = keys_of(request)
    assert context_keys(context, PAGE) == keys[: n // PAGE]
    chain = KeyChain(PAGE, extra_key=request["extra_key"], cache_salt=request["cache_salt"])
    inside = [key for key in request["extra_keys"] or () if key[0] < n]
    chain.extend(request["tokens"][:n], inside)
    assert chain.keys == keys[: n // PAGE]


@pytest.mark.parametrize("token_dtype", ["int32", "int64"])
@pytest.mark.parametrize("paired", [False, True])
@given(one=TOKENS, other=TOKENS, names=st.tuples(TEXTS, TEXTS, TEXTS, TEXTS))
def test_trees_of_pairs_and_of_wide_tokens_compare_tokens(
    token_dtype: str, paired: bool, one: list[int], other: list[int], names: Any
) -> None:
    wide = 1 << 32 if token_dtype == "int64" else 1
    tree = PrefixTree(PAGE, token_dtype=token_dtype, paired=paired)
    first, second = (np.array(each, np.int64) * wide for each in (one, other))
    pages = (len(one) - paired) // PAGE
    whole = first[: pages * PAGE + paired]
    tree.insert(whole, list(range(pages)), extra_key=names[0], cache_salt=names[1])
    found, handle = tree.match(second, extra_key=names[2], cache_salt=names[3])
    del handle
    items = [list(itertools.pairwise(t)) if paired else t for t in (one, other)]
    same = common(*items) if names[:2] == names[2:] else 0
    assert len(found) == min(same // PAGE, pages)


# -- namespaces ------------------------------------------------------------------------------------
def test_namespaces_are_the_roots_of_keys() -> None:
    """Names may have lone surrogates, be "", or be split at another place."""
    names = [None, "", "a", "b", "ab", "\udc80", "\ud800", "é", "a\0", "\0a"]
    pairs = list(itertools.product(names, names))
    roots = {root_key(extra_key=a, cache_salt=b) for a, b in pairs}
    assert len(roots) == len(pairs)
    tree = PrefixTree(1)
    for page, (extra_key, salt) in enumerate(pairs):
        tree.insert([1], [page], extra_key=extra_key, cache_salt=salt)
    for page, (extra_key, salt) in enumerate(pairs):
        found, handle = tree.match([1], extra_key=extra_key, cache_salt=salt)
        del handle
        assert found.tolist() == [page]


@pytest.mark.parametrize("wrong", [b"a", 1, 1.5, ["a"], ("a",)])
def test_a_name_is_a_text_wherever_it_is_given(wrong: Any) -> None:
    manager = PagedKVCacheManager(PARAMS, 1, 64, num_pages=4)
    tree = PrefixTree(PAGE)
    for name in ("extra_key", "cache_salt"):
        for call in (
            lambda given: TextGenerationContext("r", [1], **given),
            lambda given: manager.match_prefix([1], **given),
            lambda given: manager.pin([1], **given),
            lambda given: tree.match([1], **given),
            lambda given: page_keys([1], 1, **given),
            lambda given: root_key(**given),
        ):
            with pytest.raises(TypeError):
                call({name: wrong})


def test_names_with_lone_surrogates_are_sent() -> None:
    """A client may choose its salt: a salt that msgpack cannot encode must not end a publisher."""
    require("msgspec")
    from kvcore.observe.wire import KVEventBatch, decode_batch, encode_batch, wire_event

    manager = PagedKVCacheManager(PARAMS, 1, 64, num_pages=4, events=True)
    context = TextGenerationContext("r", list(range(9)), extra_key="\ud800", cache_salt="\udc80")
    manager.claim("r")
    manager.fetch([context])
    context.update(1)
    manager.step([context])
    event: Any
    sent: Any
    (event,) = manager.take_events()
    assert (event.extra_key, event.cache_salt) == ("\ud800", "\udc80")
    batch = KVEventBatch(0.0, [wire_event(event)])
    (sent,) = decode_batch(encode_batch(batch)).events
    assert sent.lora_name == "\\ud800"
    assert sent.extra_keys == [["\\ud800", "\\udc80"], ["\\ud800"]]
    assert sent.block_hashes == event.hashes


# -- hashes ----------------------------------------------------------------------------------------
@given(requests(), requests())
def test_a_router_finds_pages_by_keys_and_by_their_hashes(
    one: dict[str, Any], other: dict[str, Any]
) -> None:
    keys, asked = keys_of(one), keys_of(other)
    hashes = [int.from_bytes(key[-8:], "big") for key in keys]
    forms: list[Any] = [keys, hashes, np.array(hashes, np.uint64), [key[-8:] for key in keys]]
    for stored in forms:
        index = PrefixIndex(["w"])
        index.store("w", stored)
        for form in forms:
            assert index.match(form).tolist() == [len(keys)]
        assert index.match(asked).tolist() == [common(keys, asked)]
        index.remove("w", forms[0])
        assert index.match(keys).tolist() == [0]


# -- bytes -----------------------------------------------------------------------------------------
def test_states_with_one_fingerprint_have_one_order_of_bytes() -> None:
    """Arrays may be in any order: a manager reads the checkpoint that another manager stored."""
    arrays = {"b": ((2,), "float32"), "a": ((3,), "int8"), "c": ((1,), "float32")}
    store = MemoryStore(1 << 20)
    fingerprints = set()
    for names in itertools.permutations("abc"):
        state = State([1], {name: arrays[name] for name in names})
        groups: list[Any] = [FullAttention([0]), state]
        params = KVCacheParams(
            "float32", 1, 4, 2, page_size=PAGE, enable_prefix_caching=True, groups=groups
        )
        fingerprints.add(format_fingerprint(params, "m"))
        with PagedKVCacheManager(
            params, 1, 64, num_pages=8, tiers=["host:64KiB", store], fingerprint="m"
        ) as manager:
            context = TextGenerationContext("r", list(range(10)))
            manager.claim("r")
            while context.end_idx == 10:
                (inputs,) = manager.fetch([context])
                slot = inputs.states[0][0]
                for value, name in enumerate("abc", 1):
                    array = manager.states[0][name][0]
                    if context.start_idx:
                        assert set(np.unique(array[slot])) == {value}, (names, name)
                    array[slot] = value
                context.update(1)
                manager.step([context])
            manager.flush()
    assert len(fingerprints) == 1
