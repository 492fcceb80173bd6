# SPDX-License-Identifier: Apache-2.0
"""Two images in a prompt of 70 tokens, at 11 + 10 and 30 + 18: shared pages from end to end."""

from __future__ import annotations

from hashlib import sha256
from typing import Any

import pytest

import kvcore
from builders import make_context
from grouped_traffic import manager_of, params_of
from kvcore.extra_keys import keys_of_pages
from kvcore.groups import ChunkedLocal, FullAttention, SlidingWindow, State
from kvcore.keys import context_keys, page_key, page_keys, root_key
from state_model import ARRAYS

Keys = list[tuple[int, int, bytes]]

PLACE = 5  # the token id of all tokens of an image
PROMPT = [*range(1000, 1011), *[PLACE] * 10, *range(1021, 1030), *[PLACE] * 18, *range(1048, 1070)]
N, PAGE = 70, 16


def images(first: bytes, second: bytes) -> Keys:
    return [(11, 10, first), (30, 18, second)]


CAT_DOG, CAT_COW, OWL_DOG = images(b"cat", b"dog"), images(b"cat", b"cow"), images(b"owl", b"dog")

KINDS: dict[str, tuple[Any, ...]] = {
    "full": (FullAttention([0]),),
    "window": (FullAttention([0]), SlidingWindow([1], 20)),
    "chunk": (FullAttention([0]), ChunkedLocal([1], 32)),
    "state": (FullAttention([0]), State([1], ARRAYS, 16)),
}


def make(kind: str, **options: Any) -> kvcore.PagedKVCacheManager:
    return manager_of(params_of(*KINDS[kind], page_size=PAGE), **options)


def served(manager: kvcore.PagedKVCacheManager, tokens: list[int], keys: Keys | None = None) -> int:
    """Run and release a prompt; return its hit, which must equal the planned hit."""
    context = make_context(tokens, extra_keys=keys)
    manager.claim(context.request_id)
    planned = manager.plan(context).hit_tokens
    hits: list[int] = []
    while context.end_idx == len(tokens):
        manager.fetch([context])
        hits.append(context.start_idx)
        context.update(9)
        manager.step([context])
    manager.release(context.request_id)
    assert hits[0] == planned
    return hits[0]


def test_the_tokens_are_those_of_two_images() -> None:
    assert len(PROMPT) == N
    assert [t for t in range(N) if PROMPT[t] == PLACE] == [*range(11, 21), *range(30, 48)]


# -- requests ------------------------------------------------------------------------------------
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("partial", [False, True])
def test_pages_in_front_of_the_first_image_that_differs_are_shared(
    kind: str, partial: bool
) -> None:
    manager = make(kind, partial_page_reuse=partial, num_pages=200)
    cut = partial and kind != "state"  # a hit may end inside a page, where the image begins
    assert served(manager, PROMPT, CAT_DOG) == 0
    assert served(manager, PROMPT, CAT_DOG) == 64
    assert served(manager, PROMPT, CAT_COW) == (30 if cut else 16)
    assert served(manager, PROMPT, OWL_DOG) == (11 if cut else 0)
    assert served(manager, PROMPT) == (11 if cut else 0)
    for keys in (CAT_DOG, CAT_COW, OWL_DOG, None):
        assert manager.match_prefix(PROMPT, extra_keys=keys) == 64
    assert manager.match_prefix(PROMPT, extra_keys=images(b"owl", b"cow")) == 16
    assert manager.match_prefix(PROMPT, extra_keys=images(b"new", b"dog")) == 0


@pytest.mark.parametrize("kind", KINDS)
def test_a_system_prompt_in_front_of_different_images_stays_shared(kind: str) -> None:
    manager = make(kind, num_pages=200)
    system, at = list(range(500, 548)), 51  # three pages, and three more tokens
    for n, image in enumerate((b"one", b"two", b"three")):
        prompt = [*system, 1, 2, 3, *[PLACE] * 20, 7]
        hit = served(manager, prompt, [(at, 20, image)])
        assert hit == (0 if n == 0 else 48 if kind == "state" else at)
    assert served(manager, [*system, 4, 5, 6]) == 48


@pytest.mark.parametrize("kind", KINDS)
def test_equal_ids_behind_different_images_are_never_shared(kind: str) -> None:
    manager = make(kind, num_pages=200, dedup=True)
    contexts = [make_context(PROMPT, extra_keys=keys) for keys in (CAT_DOG, OWL_DOG)]
    for context in contexts:
        manager.claim(context.request_id)
    while contexts[0].end_idx == N:
        manager.fetch(contexts)
        for context in contexts:
            context.update(9)
        assert len(manager.step(contexts)) == 0  # not even deduplication shares a page
    pages = [set(manager.get_req_blocks(context.request_id)) for context in contexts]
    assert not pages[0] & pages[1]
    assert manager.shared_prefixes(contexts) == []


@pytest.mark.parametrize("kind", KINDS)
def test_forks_have_the_images_of_their_parent(kind: str) -> None:
    manager = make(kind, num_pages=200)
    parent = make_context(PROMPT, extra_keys=CAT_DOG)
    manager.claim(parent.request_id)
    while parent.end_idx == N:
        manager.fetch([parent])
        parent.update(9)
        manager.step([parent])
    child = make_context([*PROMPT, 9, 8])
    manager.fork(parent.request_id, child)
    assert (child.extra_keys, child.start_idx) == (tuple(CAT_DOG), N)
    other = make_context([*PROMPT, 9, 8], extra_keys=CAT_COW)
    with pytest.raises(ValueError, match="extra key"):
        manager.fork(parent.request_id, other)
    for token in range(20):
        manager.fetch([child])
        child.update(token)
        manager.step([child])
    assert manager.match_prefix(child.tokens, extra_keys=CAT_DOG) == 80
    assert manager.match_prefix(child.tokens, extra_keys=CAT_COW) == 16
    assert manager.match_prefix(child.tokens) == 0


@pytest.mark.parametrize("target", KINDS)
def test_a_moved_request_takes_its_images_along(target: str) -> None:
    source, other = make(target, num_pages=200), make(target, num_pages=200)
    context = make_context(PROMPT, extra_keys=CAT_DOG)
    source.claim(context.request_id)
    while context.end_idx == N:
        source.fetch([context])
        context.update(9)
        source.step([context])
    data = source.export_sequence(context.request_id)
    for wrong in (CAT_COW, OWL_DOG, None, CAT_DOG[:1]):
        stranger = make_context([*PROMPT, 9], extra_keys=wrong)
        with pytest.raises(ValueError, match="other extra keys"):
            other.import_sequence(stranger, data)
        assert not other.contains(stranger.request_id)
    moved = make_context([*PROMPT, 9], extra_keys=CAT_DOG)
    assert other.import_sequence(moved, data)
    assert moved.start_idx == N
    other.fetch([moved])
    moved.update(8)
    other.step([moved])
    # A hit of 64 reads a window page that the source had given back, but no page of a chunk.
    # Only the last state has moved, and it is no checkpoint.
    hit = 0 if target in ("window", "state") else 64
    assert other.match_prefix(PROMPT, extra_keys=CAT_DOG) == hit
    for wrong in (OWL_DOG, None):
        assert other.match_prefix(PROMPT, extra_keys=wrong) == 0


def test_a_tree_by_itself_tells_them_apart() -> None:
    tree = kvcore.PrefixTree(page_size=PAGE)
    tree.insert(PROMPT[:64], [0, 1, 2, 3], extra_keys=CAT_DOG)
    assert tree.insert(PROMPT[:64], [4, 5, 6, 7], extra_keys=CAT_COW).tolist() == [0, 5, 6, 7]
    assert tree.insert(PROMPT[:64], [8, 9, 10, 11], extra_keys=OWL_DOG).tolist() == [8, 9, 10, 11]
    for keys, pages in ((CAT_DOG, [0, 1, 2, 3]), (CAT_COW, [0, 5, 6, 7]), (None, [])):
        assert tree.match(PROMPT, extra_keys=keys)[0].tolist() == pages
    tree.check_integrity()


# -- keys ----------------------------------------------------------------------------------------
def test_keys_change_in_the_pages_that_an_image_touches_and_behind() -> None:
    known = {
        name: page_keys(PROMPT, PAGE, extra_keys=keys)
        for name, keys in (("both", CAT_DOG), ("cow", CAT_COW), ("owl", OWL_DOG), ("none", None))
    }

    def agree(name: str) -> list[bool]:
        return [a == b for a, b in zip(known["both"], known[name], strict=True)]

    assert agree("cow") == [True, False, False, False]
    assert agree("owl") == [False] * 4
    assert agree("none") == [False] * 4
    context = make_context(PROMPT, extra_keys=CAT_DOG)
    assert context_keys(context, PAGE) == known["both"]


def test_the_third_element_of_a_key_is_what_overlaps_its_page() -> None:
    """An overlap has bytes, a start relative to the page, and a length; no overlap is nil."""
    cat, dog = [(b"cat", 11, 10)], [(b"dog", -2, 18)]
    overlaps: list[Any] = [cat, [(b"cat", -5, 10), (b"dog", 14, 18)], dog, None]
    assert keys_of_pages(CAT_DOG, 64, PAGE) == overlaps
    key, chain = root_key(), []
    for page, extra in enumerate(overlaps):
        tokens = PROMPT[PAGE * page : PAGE * (page + 1)]
        listed = extra and [list(each) for each in extra]
        key = page_key(key, tokens, listed)
        chain.append(key)
    assert page_keys(PROMPT, PAGE, extra_keys=CAT_DOG) == chain
    last = chain[2], PROMPT[48:64], None  # no image, but still another key than without images
    assert page_key(*last) == chain[3] != page_keys(PROMPT, PAGE)[3]


def test_bytes_of_a_key_are_those_of_canonical_cbor() -> None:
    def head(major: int, n: int) -> bytes:
        size = next(i for i, most in enumerate((24, 2**8, 2**16)) if n < most)
        return bytes([major << 5 | (n if size == 0 else 23 + size)]) + (
            n.to_bytes(size, "big") if size else b""
        )

    parent, tokens = bytes(range(32)), PROMPT[16:32]
    item = head(4, 3) + head(2, 32) + parent
    item += head(4, 16) + b"".join(head(0, token) for token in tokens)
    # cat at -5 is the value 4 of CBOR's negative type.
    item += head(4, 2) + head(4, 2) + head(2, 3) + b"cat" + head(1, 4)
    item += head(4, 2) + head(2, 3) + b"dog" + head(0, 14)
    assert page_key(parent, tokens, [[b"cat", -5], [b"dog", 14]]) == sha256(item).digest()
