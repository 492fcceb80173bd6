# SPDX-License-Identifier: Apache-2.0
"""Groups of layers: their pages, the tokens they read, and the hits they can serve."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcore.groups import AttentionGroup, ChunkedLocal, FullAttention, SlidingWindow, State
from tables import table

ARRAYS = {"conv": ((8, 4), "bfloat16"), "ssm": ((2, 3, 5), "float32")}


# -- tokens that are read ------------------------------------------------------------------------
@pytest.mark.parametrize(("n", "first"), [(0, 0), (4, 1), (5, 2), (6, 3), (7, 4), (11, 8)])
def test_sliding_window_skips_what_lies_behind_it(n: int, first: int) -> None:
    assert SlidingWindow([0], 4).skipped_tokens(n) == first


@pytest.mark.parametrize(("n", "first"), [(0, 0), (7, 0), (8, 8), (13, 8), (16, 16)])
def test_chunk_skips_the_chunks_before(n: int, first: int) -> None:
    assert ChunkedLocal([0], 8).skipped_tokens(n) == first


def test_full_attention_skips_nothing() -> None:
    assert [FullAttention([0]).skipped_tokens(n) for n in (0, 1, 10**9)] == [0, 0, 0]


def is_read(group: AttentionGroup, query: int, key: int) -> bool:
    """Return true if the group's mask lets the query read the key."""
    if isinstance(group, SlidingWindow):
        return query - group.window < key <= query
    if isinstance(group, ChunkedLocal):
        return key <= query and query // group.chunk == key // group.chunk
    return key <= query


def groups_of_any_kind() -> st.SearchStrategy[AttentionGroup]:
    sizes = st.integers(1, 9)
    return st.one_of(
        st.just(FullAttention([0])),
        sizes.map(lambda size: SlidingWindow([0], size)),
        sizes.map(lambda size: ChunkedLocal([0], size)),
    )


@given(groups_of_any_kind(), st.integers(0, 40))
def test_first_token_read_is_that_of_the_mask(group: AttentionGroup, n: int) -> None:
    later = range(n, n + 25)
    read = [key for key in range(n) if any(is_read(group, query, key) for query in later)]
    assert group.skipped_tokens(n) == (read[0] if read else n)
    assert read == list(range(group.skipped_tokens(n), n))


# -- the longest hit -----------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("present", "hit", "holes"),
    [
        ("", 0, 0),
        ("0", 0, 0),
        ("1", 1, 0),
        ("10", 1, 0),
        ("11", 2, 0),
        ("110", 2, 0),
        ("111", 3, 1),
        ("1110", 3, 1),
        ("110100110111", 12, 10),
        ("110100110000", 8, 6),
    ],
)
def test_longest_hit_of_a_window_of_4_in_pages_of_2(present: str, hit: int, holes: int) -> None:
    assert SlidingWindow([0], 4).longest_hit(present, 2) == (hit, holes)


@pytest.mark.parametrize(
    ("present", "hit", "holes"),
    [
        ("1", 1, 0),
        ("10", 2, 2),
        ("11", 2, 2),
        ("111", 3, 2),
        ("1110", 4, 4),
        ("000000001", 9, 8),
    ],
)
def test_longest_hit_of_chunks_of_4_in_pages_of_2(present: str, hit: int, holes: int) -> None:
    assert ChunkedLocal([0], 4).longest_hit(present, 2) == (hit, holes)


@pytest.mark.parametrize(("present", "hit"), [("1101", 2), ("0111", 0), ("1111", 4)])
def test_longest_hit_of_full_attention(present: str, hit: int) -> None:
    assert FullAttention([0]).longest_hit(present, 16) == (hit, 0)


@pytest.mark.parametrize(("present", "hit"), [("", 0), ("000", 0), ("1010", 3), ("0001", 4)])
def test_longest_hit_of_a_state_ends_at_a_checkpoint(present: str, hit: int) -> None:
    assert State([0], ARRAYS).longest_hit(present, 16) == (hit, max(0, hit - 1))


def test_window_of_one_token_needs_no_page() -> None:
    assert SlidingWindow([0], 1).longest_hit("0000", 4) == (4, 4)


@given(groups_of_any_kind(), st.lists(st.booleans(), max_size=14), st.integers(1, 5))
def test_longest_hit_is_the_last_legal_one(
    group: AttentionGroup, present: list[bool], page: int
) -> None:
    """A legal hit has every page with a token that a token after the hit reads."""
    best = (0, 0)
    for hit in range(1, len(present) + 1):
        n = hit * page
        keys = [key for key in range(n) if any(is_read(group, q, key) for q in range(n, n + 12))]
        if all(present[key // page] for key in keys):
            best = (hit, keys[0] // page if keys else hit)
    assert group.longest_hit(present, page) == best


@given(groups_of_any_kind(), st.lists(st.booleans(), max_size=14), st.integers(1, 5))
def test_pages_are_a_string_or_any_sequence(
    group: AttentionGroup, present: list[bool], page: int
) -> None:
    hit = group.longest_hit(present, page)
    assert group.longest_hit("".join("01"[each] for each in present), page) == hit
    assert group.longest_hit(np.array(present, bool), page) == hit  # type: ignore[arg-type]
    assert group.longest_hit([*map(int, present)], page) == hit  # type: ignore[list-item]


def hit_of_all(groups: list[Any], present: list[str], page: int) -> tuple[int, list[int]]:
    """Return the longest hit that every group can serve; repeat until no group shrinks it."""
    hit, before = len(present[0]), -1
    while hit != before:
        before = hit
        for group, pages in zip(groups, present, strict=True):
            hit = group.longest_hit(pages[:hit], page)[0]
    return hit, [group.longest_hit("1" * hit, page)[1] for group in groups]


@pytest.mark.parametrize(
    ("present", "hit", "holes"),
    [
        (["111", "111", "111"], 3, [0, 1, 1]),
        (["111", "011", "111"], 3, [0, 1, 1]),
        (["011", "111", "111"], 0, [0, 0, 0]),
        (["110", "111", "111"], 2, [0, 0, 0]),
        (["111", "110", "111"], 2, [0, 0, 0]),
        (["111", "111", "110"], 2, [0, 0, 0]),
    ],
)
def test_hit_of_full_and_two_sliding_bundles(
    present: list[str], hit: int, holes: list[int]
) -> None:
    groups = [FullAttention([0]), SlidingWindow([1], 32), SlidingWindow([2], 32)]
    assert hit_of_all(groups, present, 16) == (hit, holes)


@pytest.mark.parametrize(
    ("full", "checkpoints", "hit"), [("111", "001", 3), ("111", "100", 1), ("110", "001", 0)]
)
def test_hit_of_full_and_state_ends_at_the_deepest_checkpoint(
    full: str, checkpoints: str, hit: int
) -> None:
    groups = [FullAttention([0]), State([1], ARRAYS)]
    assert hit_of_all(groups, [full, checkpoints], 16)[0] == hit


@table("group", [FullAttention([0]), State([0], ARRAYS)])
@table(
    ("present", "page", "error", "words"),
    [
        ("12", 2, ValueError, "'2'"),
        ([0, 2], 2, ValueError, "present holds 2"),
        (["1"], 2, ValueError, "present holds '1'"),
        (b"11", 2, TypeError, "present is a bytes"),
        (7, 2, TypeError, "present is a int"),
        ("11", 0, ValueError, "page_size is 0"),
        ("11", 2.0, TypeError, "page_size is a float"),
    ],
)
def test_pages_that_are_none_are_refused(
    group: Any, present: Any, page: Any, error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        group.longest_hit(present, page)


# -- largest number of pages ---------------------------------------------------------------------
def test_pages_of_a_window_do_not_grow_with_the_sequence() -> None:
    group = SlidingWindow([0], 1024)
    assert group.max_pages(10**9, 16) == -(-(1023 + 2048) // 16) + 1 == 193
    assert group.max_pages(10**9, 16, max_chunk_tokens=64) == 69
    assert group.max_pages(100, 16) == 7
    assert FullAttention([0]).max_pages(131_072, 16, 64) == 8192


def test_live_pages_of_a_window_of_32_in_chunks_of_64() -> None:
    group, page = SlidingWindow([0], 32), 16
    reserved = [(n + 64) // page - group.skipped_tokens(n) // page for n in range(0, 320, 64)]
    assert reserved == [4, 6, 6, 6, 6]
    assert max(reserved) <= group.max_pages(320, page, 64)
    columns = -(-321 // page)  # one more token, after 320 computed tokens
    assert (columns, columns - group.skipped_tokens(320) // page) == (21, 3)


def test_pages_of_a_chunk_that_begins_with_a_page() -> None:
    assert ChunkedLocal([0], 8192).max_pages(10**9, 16) == (8192 + 2048) // 16 == 640


@given(
    groups_of_any_kind(),
    st.integers(1, 60),
    st.integers(1, 6),
    st.integers(1, 9),
    st.randoms(use_true_random=False),
)
def test_no_request_holds_more_pages_than_at_most(
    group: AttentionGroup, tokens: int, page: int, most: int, random: Any
) -> None:
    n, held = 0, 0
    while n < tokens:
        chunk = min(tokens - n, random.randint(1, most))
        held = max(held, -(-(n + chunk) // page) - group.skipped_tokens(n) // page)
        n += chunk
    assert held <= group.max_pages(tokens, page, most)


@table("kind", [FullAttention, SlidingWindow, ChunkedLocal])
@table(
    ("given", "error", "words"),
    [
        ((-1, 4, 4), ValueError, "tokens is -1"),
        ((8, 0, 4), ValueError, "page_size is 0"),
        ((8, 4, 0), ValueError, "max_chunk_tokens is 0"),
        ((8, 4, 2.5), TypeError, "max_chunk_tokens is a float"),
    ],
)
def test_sizes_that_are_none_are_refused(
    kind: Any, given: tuple[Any, ...], error: type[Exception], words: str
) -> None:
    group = kind([0]) if kind is FullAttention else kind([0], 8)
    with pytest.raises(error, match=words):
        group.max_pages(*given)


@pytest.mark.parametrize("n", [-1, 2.0, None])
def test_tokens_that_are_none_are_refused(n: Any) -> None:
    for group in (FullAttention([0]), SlidingWindow([0], 4), ChunkedLocal([0], 4)):
        with pytest.raises((ValueError, TypeError), match=r"n is .*, must be (an int|at least 0)"):
            group.skipped_tokens(n)


# -- construction --------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "make",
    [
        FullAttention,
        lambda layers: SlidingWindow(layers, 4),
        lambda layers: ChunkedLocal(layers, 4),
        lambda layers: State(layers, ARRAYS),
    ],
    ids=["full", "window", "chunk", "state"],
)
class TestEveryKind:
    def test_layers_become_an_ascending_tuple(self, make: Callable[[Any], Any]) -> None:
        for layers in ([4, 1, 2], (1, 2, 4), np.array([2, 1, 4]), {1, 2, 4}, iter([1, 2, 4])):
            made = make(layers)
            assert made.layers == (1, 2, 4)
            assert {type(layer) for layer in made.layers} == {int}

    def test_it_is_a_value(self, make: Callable[[Any], Any]) -> None:
        made, same = make([1, 2]), make((2, 1))
        assert made == same
        assert hash(made) == hash(same)
        assert made != make([1])
        assert pickle.loads(pickle.dumps(made)) == made
        assert copy.deepcopy(made) == made
        assert eval(repr(made)) == made
        with pytest.raises(AttributeError):
            made.layers = (3,)

    @pytest.mark.parametrize(
        ("layers", "error", "words"),
        [
            ([], ValueError, "layers is empty"),
            ([0, -1], ValueError, "layers holds -1"),
            ([3, 1, 3], ValueError, "layers holds 3 twice"),
            ([2**31], ValueError, "layers holds 2147483648"),
            (3, TypeError, "layers is a int"),
            ("12", TypeError, "layers is a str"),
            ([1.0], TypeError, "is a float"),
            ([True], TypeError, "is a bool"),
            (None, TypeError, "layers is a NoneType"),
        ],
    )
    def test_layers_that_are_none_are_refused(
        self, make: Callable[[Any], Any], layers: Any, error: type[Exception], words: str
    ) -> None:
        with pytest.raises(error, match=words):
            make(layers)


@pytest.mark.parametrize("kind", [SlidingWindow, ChunkedLocal])
@pytest.mark.parametrize(
    ("size", "error"), [(0, ValueError), (-4, ValueError), (2.0, TypeError), (None, TypeError)]
)
def test_window_and_chunk_are_at_least_one_token(
    kind: Any, size: Any, error: type[Exception]
) -> None:
    name = "window" if kind is SlidingWindow else "chunk"
    with pytest.raises(error, match=f"{name} is "):
        kind([0], size)


@pytest.mark.parametrize("name", ["n_kv_heads", "head_dim", "v_head_dim"])
def test_sizes_of_rows_are_given_by_name(name: str) -> None:
    made = FullAttention([0], **{name: 4})
    assert getattr(made, name) == 4
    assert made != FullAttention([0])
    with pytest.raises(ValueError, match=f"{name} is 0"):
        FullAttention([0], **{name: 0})
    with pytest.raises(TypeError, match=f"{name} is a str"):
        FullAttention([0], **{name: "4"})  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        FullAttention([0], 4)  # type: ignore[call-arg]


# -- states --------------------------------------------------------------------------------------
def test_arrays_are_a_mapping_that_can_be_hashed() -> None:
    made = State([0, 1], {"conv": ([8, 4], "bfloat16"), "ssm": (np.array([2]).tolist(), "int8")})
    assert made.arrays == {"conv": ((8, 4), "bfloat16"), "ssm": ((2,), "int8")}
    assert list(made.arrays) == ["conv", "ssm"]
    assert hash(made) == hash(State([0, 1], dict(reversed(list(made.arrays.items())))))
    with pytest.raises(TypeError, match="does not support item assignment"):
        made.arrays["conv"] = ((1,), "int8")  # type: ignore[index]


def test_bytes_of_a_slot_are_those_of_all_layers() -> None:
    assert State([3, 5], ARRAYS).bytes_per_slot == 2 * (8 * 4 * 2 + 2 * 3 * 5 * 4)
    assert State([0], {"one": ((), "float32")}).bytes_per_slot == 4


@table(
    ("arrays", "error", "words"),
    [
        ({}, ValueError, "arrays is empty"),
        ([("conv", ((8, 4), "bfloat16"))], TypeError, "arrays is a list"),
        ({1: ((8,), "int8")}, TypeError, "a int for a name"),
        ({"conv": (8, 4)}, TypeError, "shape of 'conv' is 8"),
        ({"conv": "bfloat16"}, TypeError, r"arrays\['conv'\] is 'bfloat16'"),
        ({"conv": ((8, 4),)}, TypeError, r"must be \(shape, dtype\)"),
        ({"conv": ((8, 0), "int8")}, ValueError, "dimension of 'conv' is 0"),
        ({"conv": ((8, 2.0), "int8")}, TypeError, "dimension of 'conv' is a float"),
        ({"conv": ("8", "int8")}, TypeError, "shape of 'conv' is '8'"),
        ({"conv": ((8,), "float64")}, ValueError, "'float64', must be one of .*'conv'"),
        ({"conv": ((8,), np.float32)}, TypeError, "dtype of 'conv' is a type"),
    ],
)
def test_arrays_that_are_none_are_refused(arrays: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        State([0], arrays)


@pytest.mark.parametrize(
    ("interval", "error"), [(0, ValueError), (-16, ValueError), (1.5, TypeError)]
)
def test_interval_that_is_none_is_refused(interval: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="interval is "):
        State([0], ARRAYS, interval)
