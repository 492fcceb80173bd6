# SPDX-License-Identifier: Apache-2.0
"""TextGenerationContext: every rule of tokens and indices; refused calls change nothing."""

from __future__ import annotations

import fractions
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvcore
from builders import error_of
from foreign_context import Context, Refused
from kvcore import TextGenerationContext
from tables import table

INT32 = np.iinfo(np.int32)


def context(tokens: Any = (1, 2, 3, 4, 5), **rest: Any) -> TextGenerationContext:
    if isinstance(tokens, tuple):
        tokens = list(tokens)
    return TextGenerationContext("request", tokens, **rest)


def indices(made: Any) -> tuple[int, int, int]:
    return made.start_idx, made.active_idx, made.end_idx


# -- construction --------------------------------------------------------------------------------
def test_fresh_context_runs_all_its_tokens() -> None:
    made = context()
    assert indices(made) == (0, 5, 5)
    assert (made.active_length, made.current_length) == (5, 5)
    assert made.request_id == "request"
    assert (made.extra_key, made.cache_salt) == (None, None)
    assert made.tokens.dtype == np.int32
    assert made.tokens.tolist() == [1, 2, 3, 4, 5]


def test_active_idx_makes_a_chunk() -> None:
    made = context(active_idx=2)
    assert indices(made) == (0, 2, 5)
    assert (made.active_length, made.current_length) == (2, 5)


@pytest.mark.parametrize("active_idx", [0, -1, 6, 2**40])
def test_chunk_outside_the_tokens_is_refused(active_idx: int) -> None:
    with pytest.raises(ValueError, match=str(active_idx)):
        context(active_idx=active_idx)


@pytest.mark.parametrize(
    "tokens",
    [
        [7, -1, 3],
        np.array([7, -1, 3], np.int32),
        np.array([7, -1, 3], np.int64),
        np.array([7, 0, -1, 0, 3, 0], np.int32)[::2],
        np.array([3, -1, 7], np.int64)[::-1],
        np.array([[7, 1], [-1, 1], [3, 1]], np.int32)[:, 0],
        np.array([7, -1, 3], ">i4").astype("=i4"),
    ],
)
def test_tokens_may_be_a_list_or_an_array_in_any_order(tokens: Any) -> None:
    assert context(tokens).tokens.tolist() == [7, -1, 3]


@pytest.mark.parametrize("token", [INT32.min, INT32.max, 0, -1])
def test_whole_int32_range_is_legal(token: int) -> None:
    for made in (context([token]), context(np.array([token], np.int64))):
        assert made.tokens.tolist() == [token]
        made.update(token)
        made.extend([token, token])
        assert made.tokens.tolist() == [token] * 4


@table(
    ("tokens", "error", "word"),
    [
        ([], ValueError, "0"),
        (np.zeros(0, np.int32), ValueError, "0"),
        (np.zeros((2, 2), np.int32), ValueError, "2"),
        (np.int32(5), (TypeError, ValueError), ""),
        (np.zeros(3, np.float32), TypeError, "float32"),
        (np.zeros(3, np.float64), TypeError, "float64"),
        (np.zeros(3, np.int16), TypeError, "int16"),
        (np.zeros(3, np.uint32), TypeError, "uint32"),
        (np.zeros(3, np.uint64), TypeError, "uint64"),
        (np.zeros(3, bool), TypeError, "bool"),
        (np.array(["a"]), TypeError, ""),
        (np.array([1, None]), TypeError, ""),
        ([1, 2.5], TypeError, ""),
        ([1, "2"], TypeError, ""),
        ([1, None], TypeError, ""),
        ([1, [2]], TypeError, ""),
        ("123", TypeError, ""),
        (None, TypeError, ""),
        (5, TypeError, ""),
        ([1, 2**31], ValueError, "2147483648"),
        ([-(2**31) - 1], ValueError, "-2147483649"),
        ([2**70], ValueError, ""),
        (np.array([1, 2**31], np.int64), ValueError, "2147483648"),
        (np.array([-(2**63)], np.int64), ValueError, ""),
    ],
)
def test_bad_tokens_are_refused(tokens: Any, error: Any, word: str) -> None:
    caught = error_of(lambda: TextGenerationContext("request", tokens))
    assert isinstance(caught, error), repr(caught)
    assert word in str(caught)


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_constructor_copies_the_tokens(dtype: Any) -> None:
    given_tokens = np.arange(5, dtype=dtype)
    made = context(given_tokens)
    given_tokens[:] = 9
    assert made.tokens.tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    "request_id",
    ["text", "", 5, -1, 2**80, 1.5, ("a", 1), frozenset({1}), b"bytes", None, True, object(),
     fractions.Fraction(1, 3)],
)  # fmt: skip
def test_any_hashable_is_a_request_id(request_id: Any) -> None:
    assert TextGenerationContext(request_id, [1]).request_id is request_id


@pytest.mark.parametrize("request_id", [[1], {}, np.zeros(2), {1}])
def test_unhashable_request_id_is_refused(request_id: Any) -> None:
    with pytest.raises(TypeError, match="unhashable type: '"):
        TextGenerationContext(request_id, [1])


@pytest.mark.parametrize("name", ["extra_key", "cache_salt"])
def test_namespace_is_text_or_none(name: str) -> None:
    for value in ("", "tenant", "λ\0x", None):
        assert getattr(context(**{name: value}), name) == value
    for bad in (b"bytes", 5, ["a"]):
        with pytest.raises(TypeError):
            context(**{name: bad})


# -- snapshots -----------------------------------------------------------------------------------
def test_tokens_cannot_be_written() -> None:
    made: Any = context()
    with pytest.raises(ValueError, match="read-only"):
        made.tokens[0] = 9
    with pytest.raises(AttributeError):
        made.tokens = np.zeros(5, np.int32)


def test_snapshots_stay_valid_when_the_context_grows() -> None:
    made = context()
    snapshots = []
    for n in range(5, 3000):
        snapshots.append((n, made.tokens))
        made.update(n + 1)
    for n, tokens in snapshots:
        assert tokens.shape == (n,)
        assert tokens[-1] == n
    assert snapshots[0][1].tolist() == [1, 2, 3, 4, 5]


def test_snapshots_stay_valid_when_the_context_is_rewound_and_overwritten() -> None:
    made = context(range_of(1000))
    before = made.tokens
    made.rewind(500)
    middle = made.tokens
    for _ in range(2000):
        made.update(-7)
    made.extend([-8] * 1000)
    assert before.tolist() == list(range(1000))
    assert middle.tolist() == list(range(500))


def range_of(n: int) -> np.ndarray[Any, Any]:
    return np.arange(n, dtype=np.int32)


def test_snapshot_outlives_its_context() -> None:
    tokens = context(range_of(100_000)).tokens
    junk = [context(np.full(100_000, 7, np.int32)) for _ in range(5)]
    assert tokens.tolist() == list(range(100_000))
    assert len(junk) == 5


def test_snapshots_do_not_copy_every_time() -> None:
    made = context(range_of(1_000_000))
    snapshots = [made.tokens for _ in range(1000)]  # 4 GB if each were a copy
    assert all(np.shares_memory(snapshots[0], s) for s in snapshots[1:5])


# -- update --------------------------------------------------------------------------------------
def test_update_appends_the_sampled_token() -> None:
    made = context()
    made.update(6)
    assert indices(made) == (5, 6, 6)
    assert made.tokens.tolist() == [1, 2, 3, 4, 5, 6]


def test_update_of_a_chunk_discards_the_token() -> None:
    made = context(active_idx=2)
    made.update(99)
    assert indices(made) == (2, 5, 5)
    assert made.tokens.tolist() == [1, 2, 3, 4, 5]
    made.update(6)
    assert indices(made) == (5, 6, 6)


@table(
    ("token", "error"),
    [(2**31, ValueError), (-(2**31) - 1, ValueError), (2**70, ValueError), (1.5, TypeError),
     ("1", TypeError), (None, TypeError)],
)  # fmt: skip
@table("active_idx", [None, 2])
def test_bad_token_changes_nothing(token: Any, error: Any, active_idx: int | None) -> None:
    made = context(active_idx=active_idx)
    before = indices(made)
    with pytest.raises(error):
        made.update(token)
    for tokens in ([token], [1, token]):
        with pytest.raises(error):
            made.extend(tokens)
    assert indices(made) == before
    assert made.tokens.tolist() == [1, 2, 3, 4, 5]


def test_update_takes_numpy_integers() -> None:
    made: Any = context()
    for token in (np.int32(6), np.int64(7), np.uint8(8)):
        made.update(token)
    assert made.tokens.tolist() == [1, 2, 3, 4, 5, 6, 7, 8]


# -- extend, rewind, active_idx ------------------------------------------------------------------
@pytest.mark.parametrize("tokens", [[6, 7], np.array([6, 7], np.int32), np.array([6, 7], np.int64)])
def test_extend_appends_tokens_to_run(tokens: Any) -> None:
    made = context()
    made.extend(tokens)
    assert indices(made) == (0, 7, 7)
    made.update(8)
    made.extend(tokens)
    assert indices(made) == (7, 10, 10)
    assert made.tokens.tolist() == [1, 2, 3, 4, 5, 6, 7, 8, 6, 7]


def test_extend_ends_a_chunk() -> None:
    made = context(active_idx=2)
    made.extend([6])
    assert indices(made) == (0, 6, 6)


def test_extend_with_own_tokens() -> None:
    made = context()
    for _ in range(8):
        made.extend(made.tokens)
    assert made.tokens.tolist() == [1, 2, 3, 4, 5] * 256


@pytest.mark.parametrize(("n", "expected"), [(5, (4, 5, 5)), (4, (3, 4, 4)), (1, (0, 1, 1))])
def test_rewind_cuts_the_tokens(n: int, expected: tuple[int, int, int]) -> None:
    made = context()
    made.update(6)
    made.rewind(n)
    assert indices(made) == expected
    assert made.tokens.tolist() == [1, 2, 3, 4, 5, 6][:n]


def test_rewind_keeps_a_start_below_it() -> None:
    made = context(active_idx=2)
    made.update(0)
    made.rewind(4)
    assert indices(made) == (2, 4, 4)


@pytest.mark.parametrize("n", [0, -1, 6, 2**40])
def test_rewind_outside_the_tokens_is_refused(n: int) -> None:
    made = context()
    with pytest.raises(ValueError, match=str(n)):
        made.rewind(n)
    assert indices(made) == (0, 5, 5)


def test_active_idx_is_a_checked_setter() -> None:
    made = context(active_idx=2)
    made.update(0)
    made.active_idx = 3
    assert indices(made) == (2, 3, 5)
    for bad in (2, 1, 0, -1, 6):
        with pytest.raises(ValueError, match=str(bad)):
            made.active_idx = bad
    with pytest.raises(TypeError):
        made.active_idx = 2.5  # type: ignore[assignment]
    assert indices(made) == (2, 3, 5)


def test_start_idx_may_be_set_back() -> None:
    made = context()
    made.update(7)
    made.start_idx = 2
    assert indices(made) == (2, 6, 6)
    for bad in (3, -1, 2**40):
        with pytest.raises(ValueError, match=f"start_idx {bad} "):
            made.start_idx = bad
    with pytest.raises(TypeError):
        made.start_idx = 1.0  # type: ignore[assignment]
    assert indices(made) == (2, 6, 6)
    made.start_idx = 0
    assert made.active_length == 6


def test_lengths_are_read_only() -> None:
    made = context()
    for name in ("end_idx", "active_length", "current_length", "request_id"):
        with pytest.raises(AttributeError):
            setattr(made, name, 3)


OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("update"), st.integers(INT32.min, INT32.max)),
        st.tuples(st.just("extend"), st.lists(st.integers(-9, 9), min_size=1, max_size=40)),
        st.tuples(st.just("rewind"), st.integers(-1, 60)),
        st.tuples(st.just("active_idx"), st.integers(-1, 60)),
    ),
    max_size=60,
)


@given(st.lists(st.integers(INT32.min, INT32.max), min_size=1, max_size=20), OPERATIONS)
def test_any_sequence_of_changes_agrees_with_the_reference(
    tokens: list[int], operations: list[tuple[str, Any]]
) -> None:
    core, model = TextGenerationContext(0, tokens), Context(0, tokens)
    held = []
    for verb, value in operations:
        held.append((core.tokens, model.tokens))
        if verb == "active_idx":
            if model.start_idx < value <= model.end_idx:
                core.active_idx = model.active_idx = value
        else:
            apply_both(core, model, verb, value)
        assert indices(core) == indices(model)
        assert 0 <= core.start_idx < core.active_idx <= core.end_idx
        assert (core.active_length, core.current_length) == (model.active_length, model.end_idx)
    for snapshot, expected in [*held, (core.tokens, model.tokens)]:
        np.testing.assert_array_equal(snapshot, expected)


def apply_both(core: Any, model: Context, verb: str, value: Any) -> None:
    try:
        getattr(model, verb)(value)
    except Refused:
        with pytest.raises(ValueError, match=str(value)):
            getattr(core, verb)(value)
    else:
        getattr(core, verb)(value)


# -- update_batch --------------------------------------------------------------------------------
def test_update_batch_updates_each() -> None:
    batch: list[Any] = [context(), context(active_idx=2), Context("foreign", [1, 2])]
    kvcore.update_batch(batch, np.array([7, 8, 9], np.int32))
    assert [indices(c) for c in batch] == [(5, 6, 6), (2, 5, 5), (2, 3, 3)]
    assert [c.tokens.tolist()[-1] for c in batch] == [7, 5, 9]
    kvcore.update_batch([], np.zeros(0, np.int32))


def test_contexts_are_compared_by_identity_and_print_their_state() -> None:
    made, other = context(), context()
    assert made == made
    assert made != other
    assert len({made, other}) == 2
    for part in ("request", "5"):
        assert part in repr(made)
