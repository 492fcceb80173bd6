# SPDX-License-Identifier: Apache-2.0
"""Hostile values in every argument of every public call on elements.

The call raises TypeError, ValueError, IndexError or an error of kvcore's, with a text of kvcore's,
or it accepts the value. A call that raises has written nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import kvcore
from hostile_inputs import batch, fetched, slots
from hostile_scenes import SCENES
from kvcore import ops


class Nothing:
    """An object without attributes."""

    def __repr__(self) -> str:
        return "Nothing()"


HOSTILE: list[Any] = [
    None, True, False, -1, 2**31, 2**32 + 1, 2**63, 2**64, -(2**63) - 1, 2**70, 10**400,
    1.5, -0.0, float("nan"), float("inf"), 1j, "x", "", "0", b"x", b"",
    [], (), {}, [None], [[1], [1, 2]], ["x"], [1.5], [-1], [2**70], [True], (1, 2, 3), {0: 1},
    range(2**70), Nothing(), Nothing, len,
    np.float32(1), np.int64(-1), np.uint64(2**64 - 1), np.bool_(True), np.array(1.5), np.array(7),
    np.array([]), np.array([[]]), np.array([1.5, 2.0]), np.array([-1, 3]), np.array([True, False]),
    np.array([2**64 - 1] * 2, np.uint64), np.array([2**32 + 1, 1]), np.array(["a", "b"]),
    np.array([None, 1], object), np.array([1, 2], "datetime64[s]"), np.zeros((2, 2), "i4,f4"),
    np.zeros((3, 1, 8), ">f4"), np.zeros((0, 0, 0, 0), np.float32), np.zeros((1,) * 7, np.float32),
]  # fmt: skip

ALLOWED = (TypeError, ValueError, IndexError, kvcore.KVCacheError)


HOLDERS = (
    "arrays", "blocks", "cache_lengths", "lookup_table", "max_lengths",
    "key_pool", "value_pool", "block_table", "seq_lengths",
)  # fmt: skip


def arrays_in(value: Any, depth: int = 0) -> Iterator[Any]:
    if isinstance(value, np.ndarray):
        yield value
    elif isinstance(value, list | tuple):
        for each in value:
            yield from arrays_in(each, depth + 1)
    elif depth < 4:
        for name in HOLDERS:
            held = getattr(value, name, None)
            if held is not None:
                yield from arrays_in(held, depth + 1)


def arguments_of(name: str) -> list[str]:
    return list(SCENES[name]()[1])


PLACES = [(name, each) for name in SCENES for each in arguments_of(name)]


@pytest.mark.parametrize(("name", "argument"), PLACES)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_hostile_argument_is_refused_or_taken(name: str, argument: str) -> None:
    """Test every sixth value in each place, so each verb meets each value in some argument."""
    check_refused_or_taken(name, argument, HOSTILE[PLACES.index((name, argument)) % 6 :: 6])


@pytest.mark.slow
@pytest.mark.parametrize(("name", "argument"), PLACES)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_every_hostile_value_is_refused_or_taken(name: str, argument: str) -> None:
    check_refused_or_taken(name, argument, HOSTILE)


def check_refused_or_taken(name: str, argument: str, values: list[Any]) -> None:
    for each in values:
        value = each.copy() if isinstance(each, np.ndarray) else each  # the call may write to it
        call, arguments = SCENES[name]()
        arguments[argument] = value
        owner = getattr(call, "__self__", None)
        kept = [*arrays_in(list(arguments.values())), *arrays_in(owner)]
        before = [each.tobytes() for each in kept if not each.dtype.hasobject]
        try:
            call(**arguments)
        except ALLOWED as error:
            words = str(error)
            assert "incompatible function arguments" not in words, f"{value!r}: {words}"
            assert "has no attribute" not in words, f"{value!r}: {words}"
            after = [each.tobytes() for each in kept if not each.dtype.hasobject]
            assert after == before, f"{value!r} was refused, but the call has written"
        except FileNotFoundError:
            assert argument == "config"  # a valid path of no file
        except Exception as error:
            raise AssertionError(f"{argument}={value!r} raises {error!r}") from error


@pytest.mark.parametrize("name", SCENES)
def test_scenes_are_accepted_as_they_are(name: str) -> None:
    call, arguments = SCENES[name]()
    call(**arguments)


COUNTS = [
    ("append", "layer"), ("append", "threads"), ("gather", "layer"), ("gather", "threads"),
    ("attention", "window"), ("attention", "chunk"), ("attention", "v_head_dim"),
    ("attention", "threads"),
    ("cascade_attention", "replica"), ("fill_pages", "byte"), ("copy_pages", "threads"),
    ("transfer", "layers"), ("transfer", "max_blocks"), ("quantize", "threads"),
    ("allocate_blocks", "sequence_idx"), ("allocate_blocks", "num_new_tokens"),
    ("append_kv", "sequence_idx"), ("gather_kv", "sequence_idx"), ("load", "bs"), ("load", "dim"),
    ("get_key_cache", "layer_idx"), ("claim", "batch_size"), ("release", "seq_id"),
    ("KVCacheParams", "page_size"), ("max_supported_sequence_length", "memory_available"),
    ("merge_states", "threads"), ("PoolLayout.allocate", "pages"),
    ("ContinuousBatchingKVCacheCollection", "max_seq_length"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "argument"), COUNTS)
@pytest.mark.parametrize("value", [1.0, "1", True, 1j, b"1", Nothing(), [1], np.float32(1)])
def test_what_is_no_int_is_a_type_error_that_names_the_argument(
    name: str, argument: str, value: Any
) -> None:
    call, arguments = SCENES[name]()
    known = {"memory_available": "memory", "pages": "axis page"}
    with pytest.raises(TypeError, match=known.get(argument, argument)):
        call(**(arguments | {argument: value}))


@pytest.mark.parametrize("value", [2**31, 2**63, 2**70, 0, -1])
@pytest.mark.parametrize("name", [name for name in SCENES if "threads" in arguments_of(name)])
def test_threads_beyond_int32_are_a_value_error(name: str, value: int) -> None:
    call, arguments = SCENES[name]()
    with pytest.raises(ValueError, match=f"threads is {value}, must be at"):
        call(**(arguments | {"threads": value}))


@pytest.mark.parametrize(
    ("lengths", "error", "match"),
    [
        (np.array([-1, 2]), ValueError, "lengths holds -1, must be 0 .. 4294967295"),
        (np.array([2**32 + 1, 1]), ValueError, "lengths holds 4294967297"),
        (np.array([2**64 - 1, 1], np.uint64), ValueError, "lengths holds 18446744073709551615"),
        (np.array([1.0, 2.0]), TypeError, "lengths has dtype float64, must be integers"),
        (np.array([True, True]), TypeError, "lengths has dtype bool"),
        (np.array([2**32 - 1, 1]), IndexError, "position 4 of row 0 has no page"),
    ],
)
def test_lengths_of_a_gather_are_not_cast(lengths: Any, error: Any, match: str) -> None:
    with pytest.raises(error, match=match):
        ops.gather(batch(), 0, lengths=lengths)


@pytest.mark.parametrize("dtype", [np.int8, np.int32, np.int64, np.uint64])
def test_lengths_of_a_gather_may_be_any_integers(dtype: Any) -> None:
    k, _, ends = ops.gather(batch(), 0, lengths=np.array([3, 1], dtype))
    assert ends.tolist() == [0, 3, 4]
    assert len(k) == 4


def test_lengths_that_wrap_together_are_refused() -> None:
    """A table that is a broadcast view holds more tokens than 32 bits can count."""
    table = np.broadcast_to(np.zeros((1, 1), np.uint32), (2, 2**20))
    pool = np.broadcast_to(np.zeros(1, np.float32), (1, 2**12, 1, 1))
    many = kvcore.PagedBatch(pool, None, table, np.zeros(2, np.uint32))
    with pytest.raises(ValueError, match="lengths are 4294967296 tokens together"):
        ops.gather(many, 0, lengths=np.array([2**31, 2**31]))


@pytest.mark.parametrize("offsets", [[0, 2**32 + 1], [0, -1], [0, 2**62]])
def test_row_offsets_of_a_step_are_not_wrapped(offsets: Any) -> None:
    manager, inputs = fetched()
    with pytest.raises(ValueError, match="row offsets holds"):
        manager.increment_cache_lengths(inputs, np.array(offsets))
    with pytest.raises(ValueError, match="row offsets holds"):
        slots().increment_cache_lengths(slots().fetch([0]), np.array(offsets))


def test_lengths_that_would_wrap_are_refused() -> None:
    manager, (entry,) = fetched()
    full = kvcore.RaggedKVCacheInputs(
        entry.blocks, np.array([2**32 - 1], np.uint32), entry.lookup_table, entry.max_lengths
    )
    with pytest.raises(ValueError, match="cache_lengths holds 4294967296"):
        manager.increment_cache_lengths([full], np.array([0, 1], np.uint32))
