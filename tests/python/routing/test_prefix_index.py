# SPDX-License-Identifier: Apache-2.0
"""Pages of workers, against a dictionary of sets: out of order, twice, and from many threads."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from kvcore.keys import page_keys
from kvcore.routing import POLICIES, PrefixIndex, Router
from together import run_together

MEDIA = ("GPU", "CPU", "STORAGE")


class BlockStored(SimpleNamespace):
    """vLLM's event."""


class BlockRemoved(SimpleNamespace):
    """vLLM's event."""


class AllBlocksCleared(SimpleNamespace):
    """vLLM's event."""


def stored(*pages: Any, medium: str | None = "GPU", group: int | None = None) -> BlockStored:
    return BlockStored(block_hashes=list(pages), medium=medium, group_idx=group)


def removed(*pages: Any, medium: str | None = "GPU", group: int | None = None) -> BlockRemoved:
    return BlockRemoved(block_hashes=list(pages), medium=medium, group_idx=group)


def batch(*events: Any) -> Any:
    return SimpleNamespace(ts=0.0, events=list(events), data_parallel_rank=None)


WORKERS = st.sampled_from("abc")
PAGES = st.lists(st.integers(0, 12), max_size=6)
ACTIONS = st.one_of(
    st.tuples(st.just("store"), WORKERS, PAGES, st.sampled_from(MEDIA)),
    st.tuples(st.just("remove"), WORKERS, PAGES, st.sampled_from(MEDIA)),
    st.tuples(st.just("clear"), WORKERS),
    st.tuples(st.just("away"), WORKERS),
    st.tuples(st.just("match"), PAGES, st.sets(st.sampled_from(MEDIA), min_size=1)),
)


@given(st.lists(ACTIONS, max_size=60), st.sampled_from([None, 3, 70, 4096]))
def test_it_is_a_dictionary_of_sets(actions: list[Any], most: int | None) -> None:
    index = PrefixIndex("abc", max_workers=most)
    there: dict[str, set[tuple[int, str]]] = {name: set() for name in "abc"}
    for verb, *rest in actions:
        if verb == "match":
            prompt, media = rest
            expected = []
            for worker in map(str, index.workers):
                held = 0
                while held < len(prompt) and any((prompt[held], m) in there[worker] for m in media):
                    held += 1
                expected.append(held)
            assert index.match(prompt, sorted(media)).tolist() == expected
            continue
        worker, *rest = rest
        if verb == "store":
            index.store(worker, *rest)
            there[worker] |= {(page, rest[1]) for page in rest[0]}
        elif verb == "remove":
            index.remove(worker, *rest)
            there[worker] -= {(page, rest[1]) for page in rest[0]}
        else:
            there[worker].clear()
            if verb == "clear":
                index.clear(worker)
            else:  # removes the worker and adds it again at another place
                index.remove_worker(worker)
                index.add_worker(worker)
        assert index.pages_of(worker) == len({page for page, _ in there[worker]})
    index.check_integrity()
    assert index.num_pages == len({page for pages in there.values() for page, _ in pages})


def test_keys_are_what_managers_and_events_call_pages() -> None:
    keys = page_keys(list(range(80)), 16)
    hashes = np.array([int.from_bytes(key[-8:], "big") for key in keys], np.uint64)
    index = PrefixIndex(["one", 2])
    index.store("one", keys)
    index.store(2, hashes[:2])
    for asked in (
        keys,
        hashes,
        hashes.tolist(),
        hashes[::-1][::-1],
        hashes.astype(object).tolist(),
    ):
        assert index.match(asked).tolist() == [5, 2]
    assert index.best(keys) == ("one", 5)
    assert index.best(keys[:2]) == ("one", 2)
    assert index.best([]) == ("one", 0)
    assert index.match([]).dtype == np.int32
    assert repr(index) == "PrefixIndex(2 workers, 5 pages)"


def test_events_count_once_and_in_their_order() -> None:
    batches = [
        batch(stored(1, 2, 3), stored(4, medium="CPU")),
        batch(removed(3), stored(3, medium="DISK")),  # an unknown medium counts as far away
        batch(stored(5, medium=None), removed(1, medium="CPU")),
        batch(AllBlocksCleared(), stored(1, 2)),
        batch(stored(3), removed(2)),
    ]
    in_order = PrefixIndex("a")
    states = []
    for each in batches:
        assert in_order.apply("a", each)
        states.append(in_order.match([1, 2, 3, 4, 5]).tolist())
    assert states == [[4], [4], [5], [2], [1]]
    for seed in range(50):
        order = [i for i in range(5) for _ in range(2)]
        random.Random(seed).shuffle(order)
        index = PrefixIndex("a")
        seen: set[int] = set()
        for i in order:
            seen.add(i)
            ends = next(k for k in range(6) if k not in seen)
            index.apply("a", batches[i], i)
            later = [k for k in seen if k >= ends]
            assert index.missing("a") == range(ends, min(later, default=ends))
            expected = states[ends - 1] if ends else [0]
            assert index.match([1, 2, 3, 4, 5]).tolist() == expected


def test_a_batch_says_whether_it_is_in_the_index() -> None:
    index = PrefixIndex("a")
    assert not index.apply("a", batch(stored(2)), 1)
    assert index.missing("a") == range(1)
    assert index.apply("a", batch(stored(1)), 0)
    assert index.match([1, 2]).tolist() == [2]
    assert not index.apply("a", batch(removed(1)), 0)  # an older event changes nothing
    assert index.match([1, 2]).tolist() == [2]
    assert not index.missing("a")


def test_too_many_early_batches_begin_anew() -> None:
    index = PrefixIndex("a")
    index.apply("a", batch(stored(1)), 0)
    for i in range(2, 1026):
        assert not index.apply("a", batch(stored(i)), i)
    assert index.match([1]).tolist() == [1]
    assert index.apply("a", batch(stored(1026)), 1026)
    assert index.match([1]).tolist() == [0]  # the lost event may have removed the page
    assert index.pages_of("a") == 1025
    assert not index.missing("a")
    index.restart("a", 7)
    assert index.pages_of("a") == 0
    assert index.apply("a", batch(stored(1)), 7)


def test_a_bad_event_changes_nothing() -> None:
    index = PrefixIndex("a")
    for number in (0, None):
        with pytest.raises(ValueError, match="a key is -1"):
            index.apply("a", batch(stored(1), stored(-1)), number)
    assert index.num_pages == 0
    assert not index.missing("a")
    bare = BlockStored(block_hashes=[7])  # an older format
    assert index.apply("a", batch(bare, SimpleNamespace()), 0)
    assert index.match([7]).tolist() == [1]


def test_workers_that_change_while_keys_are_read() -> None:
    index = PrefixIndex("abc", max_workers=3)

    class Keys(list[int]):
        def __iter__(self) -> Any:
            index.remove_worker("a")
            index.add_worker("d")
            return super().__iter__()

    with pytest.raises(ValueError, match="worker 'a' is unknown"):
        index.store("a", Keys([1, 2, 3]))
    assert index.num_pages == 0
    index = PrefixIndex("abc", max_workers=4)
    index.store("c", [1, 2, 3])
    assert index.best(Keys([1, 2, 3])) == ("c", 3)
    assert index.lookup([1, 2])[0] == ("b", "c", "d")


def test_groups_that_do_not_decide_are_left_out() -> None:
    for group in (0, 2):
        index = PrefixIndex("a", group=group)
        index.apply("a", batch(stored(1, group=0), stored(1, 2, group=2), stored(9)))
        assert index.match([1, 2]).tolist() == [1 if group == 0 else 2]
        index.apply("a", batch(removed(1, group=1)))
        assert index.match([1]).tolist() == [1]
        index.apply("a", batch(removed(1, group=group)))
        assert index.match([1]).tolist() == [0]


def test_threads_feed_and_ask() -> None:
    index = PrefixIndex(range(8), max_workers=100)
    prompts = [np.random.default_rng(i).integers(0, 1 << 63, 50, np.uint64) for i in range(20)]

    def work(worker: int) -> None:
        order = random.Random(worker)
        for _ in range(300):
            prompt = order.choice(prompts)[: order.randrange(1, 50)]
            index.store(worker, prompt)
            assert index.match(prompt)[worker] == len(prompt)
            index.remove(worker, prompt[::2])
            assert index.match(prompt)[worker] == 0
            if order.random() < 0.02:
                index.clear(worker)
                assert index.pages_of(worker) == 0

    run_together(work)
    index.check_integrity()


@pytest.mark.parametrize(
    ("act", "text"),
    [
        (lambda index: index.store("x", [1]), "worker 'x' is unknown"),
        (lambda index: index.store("a", [1], "RAM"), "medium is 'RAM'"),
        (lambda index: index.match([1], ["RAM"]), "medium is 'RAM'"),
        (lambda index: index.store("a", [-1]), "a key is -1"),
        (lambda index: index.store("a", [1 << 64]), "a key is"),
        (lambda index: index.store("a", [b"short"]), "must be 8 bytes or more"),
        (lambda index: index.store("a", ["text"]), "a key is 'text'"),
        (lambda index: index.match(np.zeros((2, 2), np.uint64)), r"uint64 \[2, 2\]"),
        (lambda index: index.match(np.zeros(2)), "float64"),
        (lambda index: index.match(np.array([-5])), "-5"),
        (lambda index: index.add_worker("a"), "is known already"),
        (lambda index: index.add_worker("b"), "there are 1 workers"),
        (lambda index: index.remove_worker("b"), "worker 'b' is unknown"),
        (lambda index: index.apply("a", batch(), -1), "sequence is -1"),
        (lambda index: PrefixIndex(max_workers=4097), "max_workers is 4097"),
        (lambda index: PrefixIndex(max_workers=3).best([1]), "there is no worker"),
    ],
)
def test_what_cannot_be_is_refused(act: Any, text: str) -> None:
    index = PrefixIndex("a", max_workers=1)
    index.store("a", [1, 2])
    with pytest.raises(ValueError, match=text):
        act(index)
    assert index.match([1, 2, 3]).tolist() == [2]
    assert index.num_pages == 2


# ---- routers -----------------------------------------------------------------------------------
def test_policies_weigh_what_is_there_and_what_runs() -> None:
    index = PrefixIndex("abc")
    keys = list(range(10))
    index.store("b", keys[:8])
    index.store("c", keys[:8])
    chosen = {}
    for policy in POLICIES:
        router = Router(index, policy)
        chosen[policy] = "".join(str(router.choose(i, keys)) for i in range(6))
    assert chosen == {
        "prefix": "bcbcbc",  # the less loaded of the two workers with most pages
        "least-loaded": "abcabc",
        "round-robin": "abcabc",
        "prefix+load": "bcabca",
    }
    router = Router(index, "prefix+load", prefix_weight=100)
    assert "".join(str(router.choose(i, keys)) for i in range(4)) == "bcbc"
    assert router.load_of("b") == 20
    router.finish(0)
    assert router.load_of("b") == 10
    assert router.choose(9, keys) == "b"


def test_routers_follow_workers_that_come_and_go() -> None:
    index = PrefixIndex("ab", max_workers=3)
    router = Router(index, "least-loaded")
    assert "".join(str(router.choose(i, range(5))) for i in range(3)) == "aba"
    index.remove_worker("a")
    assert router.choose(3, range(7)) == "b"
    router.finish(0)  # its worker is gone
    index.add_worker("c")
    index.add_worker("a")  # the worker still runs a request
    assert (router.load_of("a"), router.load_of("b"), router.load_of("c")) == (5, 12, 0)
    assert "".join(str(router.choose(i, range(4))) for i in range(4, 7)) == "cca"
    for request in (2, 6, 1, 3, 4, 5):
        router.finish(request)
    assert router.choose("last", [1]) == "b"  # all are idle, "b" for the longest time
    assert [router.load_of(worker) for worker in "abc"] == [0, 1, 0]


def test_keys_that_ask_the_router() -> None:
    router = Router(PrefixIndex("ab"))

    class Keys(list[int]):
        def __iter__(self) -> Any:
            router.choose("inner", [1, 2])
            return super().__iter__()

    assert router.choose("outer", Keys([1, 2])) == "b"
    assert (router.load_of("a"), router.load_of("b")) == (2, 2)


def test_routers_refuse() -> None:
    index = PrefixIndex("a")
    for policy, weight, text in (("best", 1, "policy is 'best'"), ("prefix", -1, "prefix_weight")):
        with pytest.raises(ValueError, match=text):
            Router(index, policy, prefix_weight=weight)
    router = Router(index)
    router.choose("r", [1])
    with pytest.raises(ValueError, match="runs already"):
        router.choose("r", [1])
    with pytest.raises(ValueError, match="does not run"):
        router.finish("s")
    with pytest.raises(ValueError, match="there is no worker"):
        Router(PrefixIndex()).choose("r", [1])
    assert router.load_of("a") == 1
