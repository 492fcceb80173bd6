# SPDX-License-Identifier: Apache-2.0
"""Layers that share a page."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcore import KVCacheParams
from kvcore.groups import Bundle, ChunkedLocal, FullAttention, SlidingWindow, State, bundles


def make_params(num_layers: int, *groups: Any, **rest: Any) -> KVCacheParams:
    given: dict[str, Any] = {"n_kv_heads": 8, "head_dim": 64, "page_size": 16} | rest
    return KVCacheParams("bfloat16", num_layers=num_layers, groups=groups or None, **given)


def mixed(full: int, sliding: int, **rest: Any) -> KVCacheParams:
    """Return the parameters of a model with `full` full and `sliding` sliding layers."""
    groups = [FullAttention(range(full))] if full else []
    groups += [SlidingWindow(range(full, full + sliding), 128)] if sliding else []  # type: ignore[list-item]
    return make_params(full + sliding, *groups, **rest)


@pytest.mark.parametrize(
    ("full", "sliding", "number", "width"),
    [
        (18, 18, 2, 18),  # GPT-OSS 120B
        (12, 12, 2, 12),  # GPT-OSS 20B
        (10, 52, 13, 5),  # Gemma 3 27B; 10 leaves 8 of 62 places empty, 13 leaves three full places
        (8, 40, 6, 8),  # Gemma 3 12B
        (5, 29, 7, 5),  # Gemma 3 4B: 1 of 35 places stays empty
        (4, 22, 13, 2),  # Gemma 3 1B
        (21, 21, 2, 21),  # Gemma 2 9B
        (12, 36, 4, 12),
        (32, 0, 1, 32),
        (0, 32, 1, 32),  # Mistral 7B
        (1, 20, 11, 2),  # a page for each single layer would make 21
        (1, 1, 2, 1),
        (11, 50, 16, 4),  # only pages of one layer leave no place of full groups empty
    ],
)
def test_bundles_are_few_and_hardly_padded(
    full: int, sliding: int, number: int, width: int
) -> None:
    params = mixed(full, sliding)
    assert (len(bundles(params)), params.layers_per_page) == (number, width)


def test_bundles_come_in_the_order_of_the_groups_and_of_their_layers() -> None:
    window, full = SlidingWindow([0, 1, 3, 4, 6, 7], 128), FullAttention([2, 5, 8])
    assert bundles(make_params(9, window, full)) == (
        Bundle(window, (0, 1, 3), 16),
        Bundle(window, (4, 6, 7), 16),
        Bundle(full, (2, 5, 8), 16),
    )


def test_without_groups_there_is_one_bundle_of_all_layers() -> None:
    flat = make_params(7)
    layers = tuple(range(7))
    assert bundles(flat) == (Bundle(FullAttention(layers), layers, 16),)
    assert flat.layers_per_page == 7


def test_states_are_in_no_bundle() -> None:
    state = State([0, 1, 2], {"ssm": ((4,), "float32")})
    full = FullAttention([3])
    assert bundles(make_params(4, state, full)) == (Bundle(full, (3,), 16),)


def test_bundles_are_computed_once() -> None:
    assert bundles(mixed(10, 52)) is bundles(mixed(10, 52))


# -- bytes ---------------------------------------------------------------------------------------
def test_page_has_a_place_for_each_layer_of_the_widest_bundle() -> None:
    params = mixed(10, 52, n_kv_heads=16, head_dim=128)
    assert params.bytes_per_page == 2 * 5 * 16 * 16 * 128 * 2
    assert params.bytes_per_token == 2 * 62 * 16 * 128 * 2


def test_scales_count_in_pages_of_groups() -> None:
    params = mixed(10, 52, kv_scale_granularity=64)
    assert params.bytes_per_page == 2 * 5 * 16 * 8 * (64 * 2 + 4)
    assert params.bytes_per_token == 2 * 62 * 8 * (64 * 2 + 4)


def test_shards_hold_their_heads_of_a_page() -> None:
    one, four = mixed(10, 52), mixed(10, 52, n_devices=4)
    assert bundles(one) == bundles(four)
    assert (one.bytes_per_page, one.bytes_per_token) == (four.bytes_per_page, four.bytes_per_token)


def test_latent_rows_have_one_part() -> None:
    rest = {"n_kv_heads": 1, "head_dim": 576, "is_mla": True}
    assert mixed(2, 6, **rest).bytes_per_page == 2 * 16 * 576 * 2
    assert mixed(2, 6, n_devices=2, **rest).bytes_per_page == 2 * 2 * 16 * 576 * 2


def test_state_slots_are_counted_over_the_devices_of_a_replica() -> None:
    states = [State([0], {"a": ((4,), "float32")}), State([1, 2], {"b": ((3,), "bfloat16")})]
    params = make_params(4, FullAttention([3]), *states, n_devices=4, data_parallel_degree=2)
    assert params.bytes_per_state_slot == 2 * (16 + 2 * 6)
    assert make_params(4).bytes_per_state_slot == 0


# -- rows that differ ----------------------------------------------------------------------------
def test_narrower_rows_have_longer_pages() -> None:
    full, window = FullAttention([0, 1], n_kv_heads=2), SlidingWindow([2, 3], 128)
    params = make_params(4, full, window)
    assert [bundle.page_size for bundle in bundles(params)] == [64, 16]
    assert params.bytes_per_page == 2 * 2 * 16 * 8 * 64 * 2
    assert params.bytes_per_token == 2 * 2 * (2 + 8) * 64 * 2


def test_widest_rows_have_the_page_size_of_the_params() -> None:
    full, window = FullAttention([0, 1], head_dim=128), SlidingWindow([2, 3], 128)
    params = make_params(4, full, window, page_size=1)
    assert [bundle.page_size for bundle in bundles(params)] == [1, 2]
    assert params.bytes_per_page == 2 * 2 * 8 * 128 * 2


@pytest.mark.parametrize(("heads", "fits"), [(21, True), (20, True), (19, False), (22, False)])
def test_bytes_of_pages_agree_within_5_percent(heads: int, fits: bool) -> None:
    groups = FullAttention([0], n_kv_heads=heads), SlidingWindow([1], 8, n_kv_heads=20)
    if fits:
        assert make_params(2, *groups).bytes_per_page == 2 * 16 * max(heads, 20) * 64 * 2
    else:
        with pytest.raises(ValueError, match=r"19456|22528") as caught:
            make_params(2, *groups)
        assert "20480" in str(caught.value)
        assert "5 %" in str(caught.value)
        assert "n_kv_heads and head_dim" in str(caught.value)


def test_rows_that_no_page_size_makes_equal_are_refused() -> None:
    with pytest.raises(ValueError, match=r"ChunkedLocal from layer 3 on .* must agree within 5 %"):
        make_params(4, FullAttention(range(3)), ChunkedLocal([3], 8, head_dim=48))


def test_width_of_v_alone_makes_two_pools() -> None:
    """The row sizes of K must agree, and the row sizes of V must agree."""
    both = FullAttention([0], head_dim=64, v_head_dim=32)
    like = SlidingWindow([1], 8, n_kv_heads=4, head_dim=128, v_head_dim=64)
    assert make_params(2, both, like).bytes_per_page == 16 * 8 * (64 + 32) * 2
    with pytest.raises(ValueError, match="must agree within 5 %"):
        make_params(2, both, SlidingWindow([1], 8, head_dim=32, v_head_dim=64))


# -- any model -----------------------------------------------------------------------------------
@given(st.lists(st.integers(1, 128), min_size=1, max_size=4), st.integers(0, 4))
def test_every_layer_has_its_place(counts: list[int], full_groups: int) -> None:
    groups: list[Any] = []
    for number, layers in enumerate(counts):
        first = sum(counts[:number])
        span = range(first, first + layers)
        groups.append(FullAttention(span) if number < full_groups else SlidingWindow(span, 8))
    params = make_params(sum(counts), *groups)
    made, width = bundles(params), params.layers_per_page
    assert [layer for bundle in made for layer in bundle.layers] == list(range(sum(counts)))
    assert max(len(bundle.layers) for bundle in made) == width
    assert all(bundle.layers == bundle.group.layers[:width] for bundle in made[:1])
    empty = len(made) * width - sum(counts)
    assert empty <= sum(counts) / 20
    # No width that keeps the rules leaves fewer empty places.
    full = counts[:full_groups]

    def rules(wide: int) -> bool:
        places = sum(-(-each // wide) for each in counts) * wide
        return places - sum(counts) <= sum(counts) / 20

    def leaves_full_groups_whole(wide: int) -> bool:
        return wide > 1 and all(each % wide == 0 for each in full)

    allowed = [wide for wide in range(1, max(counts) + 1) if rules(wide)]
    allowed = [wide for wide in allowed if leaves_full_groups_whole(wide)] or allowed
    assert width in allowed
    assert len(made) == min(sum(-(-each // wide) for each in counts) for wide in allowed)


# -- where every layer keeps every token ---------------------------------------------------------
def test_flat_bytes_count_each_layer_with_its_own_rows() -> None:
    full, window = FullAttention([0, 1], n_kv_heads=2), SlidingWindow([2, 3], 128)
    params = make_params(4, full, window)
    assert params.flat_bytes_per_token == params.bytes_per_token
    halves = make_params(4, full, window, n_devices=2)
    assert halves.flat_bytes_per_token == halves.bytes_per_token


def test_flat_bytes_count_shared_layers_and_layers_of_states() -> None:
    full, window = FullAttention([0], n_kv_heads=2), SlidingWindow([1], 128)
    shared = make_params(4, full, window, shared={2: 0, 3: 1})
    assert shared.flat_bytes_per_token == 2 * 2 * (2 + 8) * 64 * 2 == 2 * shared.bytes_per_token
    state = make_params(2, FullAttention([0]), State([1], {"ssm": ((4,), "float32")}))
    assert state.flat_bytes_per_token == 2 * 2 * 8 * 64 * 2 == 2 * state.bytes_per_token


def test_flat_bytes_without_groups_are_those_of_a_token() -> None:
    plain = make_params(4)
    assert plain.flat_bytes_per_token == plain.bytes_per_token == 4 * 2 * 8 * 64 * 2
    scaled = make_params(4, kv_scale_granularity=64)
    assert scaled.flat_bytes_per_token == scaled.bytes_per_token
