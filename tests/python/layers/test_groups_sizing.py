# SPDX-License-Identifier: Apache-2.0
"""The numbers of pages, states and sequences of a model with groups that fit into memory."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcore import KVCacheParams, PagedKVCacheManager
from kvcore.groups import ChunkedLocal, FullAttention, SlidingWindow, State, bundles
from kvcore.sizing import (
    estimated_memory_size,
    infer_optimal_batch_size,
    max_supported_sequence_length,
    pages_per_replica,
    pages_per_sequence,
    sequence_bytes,
)

FULL, WINDOW = FullAttention([0]), SlidingWindow([1, 2], 32)
STATE = State([3], {"ssm": ((25,), "float32")})


def make_params(*groups: Any, **rest: Any) -> KVCacheParams:
    given: dict[str, Any] = {"n_kv_heads": 1, "head_dim": 4, "page_size": 16} | rest
    return KVCacheParams("float32", num_layers=4, groups=groups or None, **given)


def test_pages_of_a_sequence_are_those_of_every_bundle() -> None:
    params = make_params(FULL, WINDOW)
    assert len(bundles(params)) == 3  # a page holds one layer
    # Full: ceil(n / 16). Each window of 32 with steps of 64: ceil(95 / 16) + 1 = 7.
    for tokens, pages in ((1, 3), (16, 3), (55, 12), (112, 21), (113, 8 + 14), (320, 20 + 14)):
        assert pages_per_sequence(params, tokens, 64) == pages
    assert pages_per_sequence(make_params(), 320, 64) == 20


def test_bytes_of_a_sequence_count_two_states() -> None:
    params = make_params(FULL, WINDOW, STATE)
    assert (params.bytes_per_page, params.bytes_per_state_slot) == (512, 100)
    assert sequence_bytes(params, 320, 64) == 34 * 512 + 200
    assert pages_per_replica(params, 10_000) == 10_000 // 512
    assert pages_per_replica(params, 10_000, num_states=4) == (10_000 - 400) // 512
    assert pages_per_replica(params, 300, num_states=4) == 0


@pytest.mark.parametrize("each", [34 * 512 + 200])
def test_sequences_that_fit_pay_for_pages_and_states(each: int) -> None:
    params = make_params(FULL, WINDOW, STATE)
    assert infer_optimal_batch_size(params, 320, each - 1, 64) == 0
    assert infer_optimal_batch_size(params, 320, 3 * each, 64) == 3
    assert estimated_memory_size(params, 2, 320, 10**9, 64) == 2 * each
    assert estimated_memory_size(params, 2, 320, each, 64) == each
    two = make_params(FULL, WINDOW, STATE, n_devices=2, data_parallel_degree=2)
    assert infer_optimal_batch_size(two, 320, 3 * each, 64) == 2
    assert estimated_memory_size(two, 3, 320, 10**9, 64) == 4 * each


def test_manager_sizes_with_groups_that_it_does_not_keep_yet() -> None:
    of, params = PagedKVCacheManager, make_params(FULL, WINDOW)
    pages = {"max_chunk_tokens": 64}
    assert of.infer_optimal_batch_size(params, 320, 4, 34 * 512, ("cpu",), **pages) == 1
    assert of.infer_optimal_batch_size(params, 320, 4, 34 * 512, ("cpu",)) == 0
    assert of.estimated_memory_size(params, 1, 320, 4, 10**9, ("cpu",), **pages) == 34 * 512
    assert of.max_supported_sequence_length(params, 4, 34 * 512, **pages) == 320
    with pytest.raises(TypeError, match="max_chunk_tokens is a str"):
        of.max_supported_sequence_length(params, 4, 1, max_chunk_tokens="64")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="layer 2 of SlidingWindow is beyond the model"):
        of.max_supported_sequence_length(params, 2, 1)


def test_windows_alone_have_no_longest_sequence() -> None:
    params = make_params(SlidingWindow(range(4), 32))
    enough = params.bytes_per_page * 7
    assert max_supported_sequence_length(params, enough, 64) == 2**31 - 16
    assert max_supported_sequence_length(params, enough - 1, 64) == 6 * 16


def test_longest_sequence_is_whole_pages_of_every_bundle() -> None:
    narrow = FullAttention([0], n_kv_heads=1)
    params = make_params(narrow, SlidingWindow([1], 8), n_kv_heads=4)
    assert [bundle.page_size for bundle in bundles(params)] == [64, 16]
    for pages in range(40):
        longest = max_supported_sequence_length(params, pages * params.bytes_per_page, 16)
        assert longest % 64 == 0
        assert longest == 0 or pages_per_sequence(params, longest, 16) <= pages
        assert pages_per_sequence(params, longest + 64, 16) > pages


def any_groups() -> st.SearchStrategy[list[Any]]:
    size = st.integers(1, 70)
    kind = st.one_of(
        st.just(FullAttention),
        size.map(lambda n: lambda layers: SlidingWindow(layers, n)),
        size.map(lambda n: lambda layers: ChunkedLocal(layers, n)),
    )
    return st.tuples(kind, kind, st.booleans()).map(
        lambda each: [each[0]([0, 1]), each[1]([2]), *([STATE] if each[2] else [])]
    )


@given(any_groups(), st.integers(0, 60_000), st.integers(1, 100))
def test_longest_sequence_fits_and_the_next_does_not(
    groups: list[Any], memory: int, chunk: int
) -> None:
    params = make_params(*groups)
    longest = max_supported_sequence_length(params, memory, chunk)
    assert longest % 16 == 0
    if longest:
        assert sequence_bytes(params, longest, chunk) <= memory
        assert infer_optimal_batch_size(params, longest, memory, chunk) >= 1
    if longest < 2**31 - 16:
        assert sequence_bytes(params, longest + 16, chunk) > memory


@given(st.integers(0, 10**7), st.integers(1, 4), st.integers(1, 300), st.integers(1, 9))
def test_params_without_groups_are_sized_as_ever(
    memory: int, replicas: int, tokens: int, batch: int
) -> None:
    params = make_params(n_devices=replicas, data_parallel_degree=replicas)
    pages, each = memory // replicas // params.bytes_per_page, -(-tokens // 16)
    assert pages_per_replica(params, memory) == pages
    assert max_supported_sequence_length(params, memory) == pages * 16
    assert infer_optimal_batch_size(params, tokens, memory) == pages // each * replicas
    most = -(-batch // replicas) * each * params.bytes_per_page
    assert estimated_memory_size(params, batch, tokens, memory) == replicas * min(
        memory // replicas, most
    )
