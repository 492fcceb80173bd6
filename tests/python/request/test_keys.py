# SPDX-License-Identifier: Apache-2.0
"""Chained content keys: the bytes of the documented scheme, in every process and call order."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
import threading
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from conftest import require
from kvcore import TextGenerationContext, keys
from kvcore.extra_keys import keys_of_pages
from kvcore.keys import KeyChain, context_keys, page_key, page_keys, root_key
from slow_keys import digest, encoded, slow_keys, slow_root, vllm_keys

VECTOR = "2464a2d934d06889ea9ce93b71642eaf2348923006a6214c1d6b1340eb482213"

#: Both signs and each length of a CBOR integer, with the values where the length grows.
TOKENS = st.integers(-(2**31), 2**31 - 1) | st.sampled_from(
    [0, 23, 24, 255, 256, 65535, 65536, 2**31 - 1, -1, -24, -25, -256, -257, -65536, -65537]
)
ITEMS = st.recursive(
    st.none()
    | st.integers(-(2**63), 2**63 - 1)
    | st.binary(max_size=300)
    | st.text(st.characters(exclude_categories=["Cs"]), max_size=30),
    lambda inner: st.lists(inner, max_size=4) | st.lists(inner, max_size=3).map(tuple),
    max_leaves=8,
)
NAMES = st.none() | st.text(max_size=20)


@st.composite
def prompts(draw: st.DrawFn) -> tuple[list[int], int, list[tuple[int, int, bytes]]]:
    """Draw tokens, a page size and extra keys in any order, some of them twice."""
    tokens = draw(st.lists(TOKENS, max_size=200))
    size = draw(st.integers(1, 40) | st.just(len(tokens) + 1))
    if not tokens:
        return tokens, size, []
    one = st.tuples(
        st.integers(0, len(tokens) - 1), st.integers(1, 90), st.sampled_from([b"", b"a", b"image"])
    )
    return tokens, size, draw(st.lists(one, max_size=6))


# -- the scheme ----------------------------------------------------------------------------------
def test_a_page_has_the_key_that_every_implementation_gives_it() -> None:
    assert page_key(bytes(32), list(range(16))).hex() == VECTOR
    assert digest((bytes(32), tuple(range(16)), None)).hex() == VECTOR


def test_root_is_made_of_version_seed_salt_and_extra_key() -> None:
    assert keys.SCHEME_VERSION == 1
    assert root_key() == digest(["kvcore", 1, None, None, None])
    for seed in (0, -5, 2**63 - 1, "0", "", b"0", b""):
        expected = digest(["kvcore", 1, seed, "salt", "lora"])
        assert root_key(seed=seed, cache_salt="salt", extra_key="lora") == expected


@given(prompts(), NAMES, NAMES, st.none() | st.text() | st.binary() | st.integers(-(2**63), 99))
def test_keys_are_those_of_the_scheme(
    prompt: tuple[list[int], int, list[tuple[int, int, bytes]]],
    extra_key: str | None,
    salt: str | None,
    seed: Any,
) -> None:
    tokens, size, extra_keys = prompt
    given_names: dict[str, Any] = {"extra_key": extra_key, "cache_salt": salt, "seed": seed}
    expected = slow_keys(tokens, size, extra_keys=extra_keys, **given_names)
    assert root_key(**given_names) == slow_root(seed, salt, extra_key)
    assert page_keys(tokens, size, extra_keys=extra_keys, **given_names) == expected
    # One page after the other, with the lists that are also public.
    key = root_key(**given_names)
    for i, extra in enumerate(keys_of_pages(extra_keys, len(tokens), size)):
        key = page_key(key, tokens[i * size : (i + 1) * size], extra)
        assert key == expected[i]


@given(st.binary(min_size=32, max_size=32), st.lists(TOKENS, max_size=300), st.lists(ITEMS))
def test_key_of_a_page_takes_any_extra(parent: bytes, tokens: list[int], extra: list[Any]) -> None:
    assert page_key(parent, tokens) == digest([parent, tokens, None])
    expected = digest([parent, tokens, extra or None])
    assert page_key(parent, tokens, extra) == expected
    assert page_key(parent, tokens, tuple(extra)) == expected


@given(ITEMS)
def test_oracle_encodes_as_a_library_does(item: Any) -> None:
    assert encoded(item) == require("cbor2").dumps(item, canonical=True)


def test_every_length_of_a_page_is_hashed_right() -> None:
    """Lengths are around the hash's blocks, and around the buffer in which a page is gathered."""
    for n in [*range(130), 600, 637, 638, 639, 640, 641, 1279, 1280, 1281, 5000]:
        for token in (1, 100, 1000, 100_000, -1):
            tokens = [token] * n
            assert page_key(bytes(32), tokens) == digest([bytes(32), tokens, None]), (n, token)
        extra = [b"x" * n]
        assert page_key(bytes(32), [7], extra) == digest([bytes(32), [7], extra])


def test_large_pages_are_hashed_right() -> None:
    drawn = np.random.default_rng(1).integers(0, 200_000, 70_000, dtype=np.int32)
    for size in (1, 500, 4096, 65_536, 70_000):
        tokens = drawn[: 2000 + 2 * size]
        assert page_keys(tokens, size) == slow_keys(tokens.tolist(), size)


def test_tokens_are_taken_as_elsewhere() -> None:
    tokens = np.arange(0, 96, 3)
    expected = slow_keys(tokens.tolist(), 8)
    for same in (tokens, tokens.astype(np.int32), tokens.tolist(), tuple(tokens.tolist())):
        assert page_keys(same, 8) == expected
    assert page_keys(np.repeat(tokens, 2)[::2], 8) == expected
    assert page_keys([], 8) == []


def test_names_are_told_apart() -> None:
    names = [None, "", "a", "b", "ab", "\udc80", "é"]
    found = {root_key(extra_key=a, cache_salt=b) for a in names for b in names}
    assert len(found) == len(names) ** 2
    assert len({root_key(seed=seed) for seed in (None, "", 0, "0", b"0", b"", 1)}) == 7


PROGRAM = """
from kvcore.keys import page_keys
for scheme in ("kvcore", "vllm"):
    for key in page_keys(list(range(-50, 70000, 7)), 64, cache_salt="t", extra_key="l", seed="s",
                         extra_keys=[(5, 70, b"image")], scheme=scheme):
        print(key.hex())
"""


@pytest.mark.parametrize("variable", ["PYTHONHASHSEED", "KVCORE_ISA"])
def test_keys_are_the_same_in_every_process(variable: str) -> None:
    """The seed of hash() and the processor's instructions do not matter."""
    values = {"PYTHONHASHSEED": ("1", "2"), "KVCORE_ISA": ("baseline", "")}[variable]
    answers = set()
    for value in values:
        environment = {k: v for k, v in os.environ.items() if k != variable}
        environment |= {variable: value} if value else {}
        answers.add(subprocess.check_output([sys.executable, "-c", PROGRAM], env=environment))
    assert len(answers) == 1
    assert len(answers.pop().split()) == 2 * (70_050 // 7 // 64)


def test_keys_do_not_load_more_than_the_core() -> None:
    program = "import kvcore, sys; print('kvcore.keys' in sys.modules)"
    assert subprocess.check_output([sys.executable, "-c", program]).split() == [b"False"]


# -- vLLM ----------------------------------------------------------------------------------------
@given(
    st.lists(TOKENS, max_size=120),
    st.integers(1, 40),
    st.lists(st.tuples(st.integers(0, 9), st.integers(1, 30), st.sampled_from(["a", "é" * 40]))),
    NAMES,
    NAMES,
    st.none() | st.text(max_size=5),
    st.none() | st.integers(0, 60),
)
def test_keys_are_those_of_vllm(
    tokens: list[int],
    size: int,
    gaps: list[tuple[int, int, str]],
    lora: str | None,
    salt: str | None,
    seed: str | None,
    num_embeds: int | None,
) -> None:
    images, end = [], 0
    for gap, length, name in gaps:  # in order, without overlaps
        if end + gap < len(tokens):
            images.append((end + gap, length, name))
        end += gap + length
    embeds = None if num_embeds is None else np.arange(num_embeds * 3.0).reshape(-1, 3)
    found = page_keys(
        tokens,
        size,
        extra_key=lora,
        cache_salt=salt,
        seed=seed,
        extra_keys=[(start, length, name.encode()) for start, length, name in images],
        prompt_embeds=embeds,
        scheme="vllm",
    )
    assert found == vllm_keys(
        tokens,
        size,
        lora_name=lora,
        cache_salt=salt,
        hash_seed=seed,
        images=images,
        embeds=embeds,
    )


def test_root_of_vllm_is_the_hash_of_its_seed() -> None:
    assert root_key(scheme="vllm") == digest("vllm-none-hash")
    assert root_key(scheme="vllm", seed="42") == root_key(scheme="vllm", seed=42) == digest("42")
    assert root_key(scheme="vllm", extra_key="l", cache_salt="s") == root_key(scheme="vllm")


def test_images_change_the_keys_of_the_pages_they_touch_and_of_those_behind() -> None:
    tokens = [7] * 64
    for scheme in ("kvcore", "vllm"):
        one = page_keys(tokens, 8, extra_keys=[(11, 10, b"a"), (30, 18, b"b")], scheme=scheme)
        other = page_keys(tokens, 8, extra_keys=[(11, 10, b"a"), (30, 18, b"c")], scheme=scheme)
        plain = page_keys(tokens, 8, scheme=scheme)
        assert [a == b for a, b in zip(one, other, strict=True)] == [True] * 3 + [False] * 5
        assert [a == b for a, b in zip(one, plain, strict=True)] == [True] + [False] * 7


@pytest.mark.parametrize("dtype", ["float16", "uint8", "int64", "V3"])
def test_embeddings_count_by_their_bytes(dtype: str) -> None:
    rows = np.random.default_rng(0).integers(0, 255, (20, 24), np.uint8).view(dtype)
    found = page_keys([0] * 20, 8, prompt_embeds=rows, scheme="vllm")
    assert found == vllm_keys([0] * 20, 8, embeds=rows)
    both = np.concatenate([rows, rows])[::2]
    assert page_keys([0] * 20, 8, prompt_embeds=both, scheme="vllm") == vllm_keys(
        [0] * 20, 8, embeds=both
    )


# -- sequences that grow -------------------------------------------------------------------------
@given(prompts(), st.data())
def test_a_chain_has_the_keys_of_the_whole_sequence(
    prompt: tuple[list[int], int, list[tuple[int, int, bytes]]], data: st.DataObject
) -> None:
    """The sequence may come in any pieces; copied and truncated chains continue."""
    tokens, size, extra_keys = prompt
    expected = slow_keys(tokens, size, cache_salt="s", extra_keys=extra_keys)
    chain = KeyChain(size, cache_salt="s")
    assert chain.root == slow_root(None, "s")
    for _ in range(8):
        start = chain.num_tokens
        end = data.draw(st.integers(start, len(tokens)))
        now = [key for key in extra_keys if start <= key[0] < end]
        twin = copy.deepcopy(chain) if data.draw(st.booleans()) else chain.copy()
        assert twin.extend(tokens[start:end], now) == expected[start // size : end // size]
        assert (chain.num_tokens, twin.num_tokens) == (start, end)
        chain = twin
        assert chain.keys == expected[: end // size]
        assert chain.num_pages == len(chain.keys)
        if data.draw(st.booleans()):
            chain.truncate(data.draw(st.integers(0, chain.num_pages)))
            assert chain.num_tokens == chain.num_pages * size
    start = chain.num_tokens
    chain.extend(np.array(tokens[start:], np.int32), [k for k in extra_keys if k[0] >= start])
    assert chain.keys == expected


def test_a_chain_shows_itself() -> None:
    chain = KeyChain(4, scheme="vllm")
    chain.extend([1, 2, 3, 4, 5])
    assert repr(chain) == "KeyChain(page_size=4, num_tokens=5, num_pages=1)"
    assert chain.page_size == copy.copy(chain).page_size == 4


def test_a_chain_that_refuses_is_as_it_was() -> None:
    chain = KeyChain(4)
    chain.extend([1, 2, 3, 4, 5, 6], [(2, 5, b"a")])
    refused: list[tuple[Any, Any]] = [
        ([1, 2**31], None),
        ([1.5], None),
        (np.ones(3), None),
        ("abc", None),
        ([7, 8], [(5, 1, b"a")]),
        ([7, 8], [(8, 1, b"a")]),
        ([7, 8], [(6, 0, b"a")]),
        ([7, 8], [(6, 1, "a")]),
        ([7, 8], 5),
        ([], [(6, 1, b"a")]),
    ]
    for tokens, extra_keys in refused:
        with pytest.raises((ValueError, TypeError)):
            chain.extend(tokens, extra_keys)
    for n in (-1, 2, 2**63, 1.5, None):
        with pytest.raises((ValueError, TypeError)):
            chain.truncate(n)  # type: ignore[arg-type]
    chain.extend([7, 8], [(7, 1, b"b")])
    whole = [1, 2, 3, 4, 5, 6, 7, 8]
    assert chain.keys == slow_keys(whole, 4, extra_keys=[(2, 5, b"a"), (7, 1, b"b")])


def test_threads_make_keys_beside_each_other() -> None:
    tokens = np.arange(100_000, dtype=np.int32)
    expected = page_keys(tokens, 16)
    answers: list[list[bytes]] = []
    threads = [
        threading.Thread(target=lambda: answers.append(page_keys(tokens, 16))) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == [expected] * 4


# -- requests ------------------------------------------------------------------------------------
def test_a_request_has_the_keys_of_its_tokens_and_namespace() -> None:
    tokens = list(range(100, 140))
    given_keys = [(3, 20, b"image"), (9, 2, b"other")]
    context = TextGenerationContext(
        "a", tokens, extra_key="lora", cache_salt="tenant", extra_keys=given_keys
    )
    context.update(5)
    expected = slow_keys(
        [*tokens, 5], 8, extra_key="lora", cache_salt="tenant", extra_keys=given_keys
    )
    assert context_keys(context, 8) == expected
    assert context_keys(context, 8, seed=1) != expected
    assert context_keys(context, 8, scheme="vllm") == vllm_keys(
        tokens,
        8,
        lora_name="lora",
        cache_salt="tenant",
        images=[(3, 20, "image"), (9, 2, "other")],
    )


def test_a_chain_follows_a_request() -> None:
    context = TextGenerationContext("a", list(range(20)), extra_keys=[(3, 20 - 3, b"image")])
    chain = KeyChain(8)
    chain.extend(context.tokens, context.extra_keys)
    for token in range(20, 50):
        context.update(token)
        chain.extend(context.tokens[chain.num_tokens :])
        assert chain.keys == context_keys(context, 8)


def test_an_object_of_the_callers_has_keys_too() -> None:
    class Own:
        tokens = (1, 2, 3, 4)

    assert context_keys(Own(), 2) == slow_keys([1, 2, 3, 4], 2)  # type: ignore[arg-type]

    class Roomy(Own):
        end_idx = 3
        extra_keys = ((2, 1, b"image"), (3, 1, b"not there yet"))

    expected = page_keys([1, 2, 3], 1, extra_keys=[(2, 1, b"image")])
    assert context_keys(Roomy(), 1) == expected  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="ctx is a int, must have tokens"):
        context_keys(3, 2)  # type: ignore[arg-type]
