# SPDX-License-Identifier: Apache-2.0
"""Prefix caches are saved and restored: every page, in every kind of pool, at its place."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from conftest import slow_but
from grouped_traffic import SHAPES, Traffic
from kvcore import InsufficientBlocksError, TextGenerationContext, moving
from kvcore.groups import FullAttention, SlidingWindow, State
from kvcore.policies import BY_NAME
from moved_requests import (
    content,
    moving_manager,
    moving_params,
    read_rows,
    write_chunk,
    written_request,
)
from snapshot_contents import cached_in, contents_of
from state_model import ARRAYS, prefill, prompt, run_states, state_manager, state_params


def put(manager: Any, tokens: list[int], **options: Any) -> None:
    """Leave the pages of a prompt cached and unused."""
    context = written_request(manager, "put", tokens, **options)
    manager.release(context.request_id)


def assert_comes_back(manager: Any, other: Any, folder: Path) -> moving.RestoredCache:
    path = folder / "cache.kv"
    saved = manager.snapshot(path)
    assert moving.check_snapshot(path) == saved
    assert saved.num_bytes == path.stat().st_size
    wanted = contents_of(path)
    restored: moving.RestoredCache = other.restore(path)
    assert restored.is_whole
    assert restored.damaged == 0
    assert (restored.num_pages, restored.num_states) == (saved.num_pages, saved.num_states)
    assert restored.num_tokens == saved.num_tokens
    assert cached_in(other, folder) == wanted
    again = other.restore(path)
    assert again == replace(restored, num_pages=0, num_states=0)
    assert cached_in(other, folder) == wanted
    return restored


# ---- kinds of pools ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"dtype": "bfloat16", "page_size": 3},
        {"dtype": "float8_e4m3fn"},
        {"dtype": "int8"},
        {"v_head_dim": 8},
        {"is_mla": True},
        {"is_mla": True, "n_devices": 2},
        {"n_devices": 2},
        {"n_devices": 2, "data_parallel_degree": 2},
        {"n_devices": 4, "data_parallel_degree": 2},
        {"dtype": "float8_e4m3fn", "kv_scale_granularity": 2},
        {"dtype": "int8", "kv_scale_granularity": 4, "n_devices": 2},
        {"dtype": "int8", "kv_scale_granularity": 4, "v_head_dim": 8},
    ],
    ids=str,
)
def test_every_kind_of_pool(options: dict[str, Any], tmp_path: Path) -> None:
    manager = moving_manager(moving_params(**options))
    common = [(3 * i) % 11 for i in range(9)]
    prompts = [common + [i] * 8 for i in range(3)] + [common[:5]]
    for tokens in prompts:
        put(manager, tokens)
    other = moving_manager(moving_params(**options))
    assert_comes_back(manager, other, tmp_path)
    for tokens in prompts:
        context = TextGenerationContext("r", [*tokens, 1, 2, 3])
        for each in (manager, other):
            each.claim("r", "auto")
            copy = TextGenerationContext("r", context.tokens)
            each.reserve(copy)
            hit = copy.start_idx
            write_chunk(each, copy, 5)
            rows = read_rows(each, copy)
            each.release("r")
            if each is manager:
                wanted, wanted_hit = rows, hit
        assert hit == wanted_hit > 0
        for found, row in zip(rows, wanted, strict=True):
            np.testing.assert_array_equal(found, row)


def test_into_a_pool_of_the_callers_with_strides(tmp_path: Path) -> None:
    manager = moving_manager()
    put(manager, list(range(17)))
    wide = np.full((32, 2, 2, 4, 2, 8), np.nan, np.float32)
    other = moving_manager(blocks=[wide[..., :4]])
    assert_comes_back(manager, other, tmp_path)
    assert np.isnan(wide[..., 4:]).all()
    _, pages = other.match_prefix(list(range(17)), return_pages=True)
    rows = wide[pages][:, 0, 1, :, :, :4].reshape(16, 2, 4)
    np.testing.assert_array_equal(rows, content(1, 0, list(range(16)), 2, 4))


@pytest.mark.parametrize("seed", slow_but([0], range(3)))
@pytest.mark.parametrize("shape", SHAPES)
def test_every_kind_of_group(shape: str, seed: int, tmp_path: Path) -> None:
    side = Traffic(SHAPES[shape], seed)
    side.act(["claim", "release", "fork", "crowd_out", *(["step"] * 6)], 60)
    other = Traffic(SHAPES[shape], seed)
    assert_comes_back(side.manager, other.manager, tmp_path)
    side.end()
    other.act(["claim", "release", "fork", "crowd_out", *(["step"] * 6)], 60)
    other.end()
    assert other.read > 0
    assert other.manager.metrics.cache_tokens > 0


def run(manager: Any, tokens: list[int]) -> None:
    """Leave the pages of a prompt cached, without written contents."""
    manager.claim("r")
    context = TextGenerationContext("r", tokens)
    manager.fetch([context])
    context.update(1)
    manager.step([context])
    manager.release("r")


def test_holes_stay_holes_and_are_filled_where_they_were_not(tmp_path: Path) -> None:
    params = moving_params(groups=(FullAttention([0]), SlidingWindow([1], 5)), page_size=2)
    manager, path = Traffic(params, 1).manager, tmp_path / "cache.kv"
    long = [5] * 41
    run(manager, long)
    run(manager, [7] * 31)  # the pool has no room for windows that were passed
    manager.snapshot(path)
    lanes = [each[0] for each in contents_of(path).values()]
    assert sum(lane[0] for lane in lanes) == 35
    assert 0 < sum(lane[1] for lane in lanes) < 35
    other = Traffic(params, 1, num_pages=100).manager
    for n in (8, 14):
        run(other, long[: n + 1])
    before = cached_in(other, tmp_path)
    restored = other.restore(path)
    assert restored.is_whole
    after = cached_in(other, tmp_path)
    for key, (present, _, _) in contents_of(path).items():
        had = before.get(key, ((False, False), b"", None))[0]
        assert after[key][0] == tuple(a or b for a, b in zip(present, had, strict=True))


# ---- states --------------------------------------------------------------------------------------


def test_checkpoints_come_back(tmp_path: Path) -> None:
    params = state_params(interval=8)
    manager, other = state_manager(params, num_states=16), state_manager(params, num_states=16)
    for i, tokens in enumerate([prompt((0, 21)), prompt((0, 12), (40, 9)), prompt((70, 7))]):
        prefill(manager, str(i), tokens)
        manager.release(str(i))
    restored = assert_comes_back(manager, other, tmp_path)
    assert restored.num_states >= 4
    tokens = prompt((0, 12), (40, 9))
    assert other.match_prefix(tokens) == manager.match_prefix(tokens) == 20
    other.claim("r")
    context = TextGenerationContext("r", tokens)
    (inputs,) = other.fetch([context])
    assert context.start_idx == 20
    run_states(other.states, inputs.states, [context])  # compares the state with the tokens


def test_without_slots_there_are_no_checkpoints(tmp_path: Path) -> None:
    params = state_params(interval=4)
    manager, other = state_manager(params, num_states=16), state_manager(params, num_states=6)
    prefill(manager, "r", prompt((0, 41)))
    manager.release("r")
    path = tmp_path / "cache.kv"
    saved = manager.snapshot(path)
    restored = other.restore(path)
    assert saved.num_states == 10
    assert restored.num_states == 6
    assert restored.num_pages == saved.num_pages
    other.check_integrity()


def test_states_of_several_devices_and_windows(tmp_path: Path) -> None:
    params = state_params(
        FullAttention([0]), SlidingWindow([3], 5), State([1, 2], ARRAYS, 8), n_devices=2,
        n_kv_heads=2, data_parallel_degree=2,
    )  # fmt: skip
    options: dict[str, Any] = {"devices": ["cpu"] * 2, "num_states": 12}
    manager, other = state_manager(params, **options), state_manager(params, **options)
    for replica in range(2):
        name = f"r{replica}"
        manager.claim(name, replica)
        context = TextGenerationContext(name, prompt((9 * replica, 21)))
        while context.end_idx == 21:
            inputs = manager.fetch([context])[replica]
            run_states(manager.states, inputs.states, [context], device=replica)
            context.update(1)
            manager.step([context])
        manager.release(name)
    assert assert_comes_back(manager, other, tmp_path).num_states > 2


# ---- namespaces and images -----------------------------------------------------------------------


def test_namespaces_and_images_stay_apart(tmp_path: Path) -> None:
    manager, other = moving_manager(), moving_manager()
    tokens = list(range(17))
    spaces: list[dict[str, Any]] = [
        {},
        {"extra_key": "lora"},
        {"cache_salt": "lora"},
        {"extra_keys": [(5, 3, b"cat")]},
        {"extra_keys": [(5, 3, b"dog"), (9, 1, b"cat")]},
        {"extra_key": "", "extra_keys": [(5, 3, b"dog")]},
    ]
    for i, space in enumerate(spaces[:-1]):
        put(manager, tokens[: 9 + i], **space)
    assert_comes_back(manager, other, tmp_path)
    for space in spaces:
        assert other.match_prefix(tokens, **space) == manager.match_prefix(tokens, **space)
    assert other.match_prefix(tokens, **spaces[-1]) == 0
    assert other.match_prefix(tokens, **spaces[4]) == 12
    assert other.match_prefix(tokens, extra_keys=[(5, 3, b"cow")]) == 4


def test_low_tokens_are_no_stand_ins(tmp_path: Path) -> None:
    manager, path = moving_manager(), tmp_path / "cache.kv"
    low = [-(2**31)] * 9
    put(manager, low)
    manager.snapshot(path)
    other = moving_manager()
    assert other.restore(path).is_whole
    assert other.match_prefix(low) == 8
    keyed = moving_manager()
    put(keyed, list(range(9)), extra_keys=[(0, 1, b"x")])
    with pytest.raises(ValueError, match="the snapshot holds token -2147483648"):
        keyed.restore(path)
    put(moving_manager(), list(range(9)), extra_keys=[(0, 1, b"x")])
    keyed.snapshot(path)
    with pytest.raises(ValueError, match="the prefix cache holds token -2147483648"):
        other.restore(path)


def test_what_an_import_left_to_itself_is_not_saved(tmp_path: Path) -> None:
    whole = moving_manager()
    written_request(whole, "r", list(range(17)))
    params = moving_params(groups=(FullAttention([0]), SlidingWindow([1], 3)))
    data = whole.export_sequence("r")
    manager = moving_manager(params)
    assert manager.import_sequence(moving.read_sequence(data).context("r"), data)
    manager.release("r")
    for name, *_ in cached_in(manager, tmp_path):
        assert isinstance(name, int)


# ---- sizes that fit ------------------------------------------------------------------------------


def test_a_smaller_pool_takes_what_is_used_last(tmp_path: Path) -> None:
    manager, path = moving_manager(num_pages=40), tmp_path / "cache.kv"
    prompts = [[50 * i + j for j in range(16)] for i in range(8)]
    for tokens in prompts:
        put(manager, tokens)
    put(manager, prompts[1])
    manager.snapshot(path)
    other = moving_manager(num_pages=18)
    restored = other.restore(path)
    assert not restored.is_whole
    assert restored.num_pages == 18
    assert restored.num_tokens == 18 * 4
    assert [other.match_prefix(tokens) for tokens in prompts] == [0, 16, 0, 0, 8, 16, 16, 16]


@pytest.mark.parametrize("eviction", BY_NAME)
def test_pages_go_in_the_order_in_which_they_would_have_gone(eviction: str, tmp_path: Path) -> None:
    managers = [moving_manager(num_pages=24, eviction=eviction) for _ in range(2)]
    prompts = [[50 * i + j for j in range(8)] for i in range(10)]
    for tokens in prompts:
        put(managers[0], tokens)
    for i in (3, 7, 3):
        managers[0].match_prefix(prompts[i], touch=True)
    assert_comes_back(managers[0], managers[1], tmp_path)
    gone: list[list[tuple[int, ...]]] = [[], []]
    for round_ in range(6):
        for manager, order in zip(managers, gone, strict=True):
            manager.claim("r")
            tokens = [9000 + round_] * (4 * (6 + 2 * round_))
            manager.reserve(TextGenerationContext("r", tokens))
            manager.release("r")
            left = [i for i, p in enumerate(prompts) if manager.match_prefix(p) < 8]
            order.append(tuple(left))
    assert gone[0] == gone[1]


def test_restored_pages_join_what_is_cached(tmp_path: Path) -> None:
    manager, other, path = moving_manager(), moving_manager(), tmp_path / "cache.kv"
    put(manager, [*range(8), *range(40, 48), 1])
    manager.snapshot(path)
    put(other, [*range(8), *range(60, 68), 1])
    held = written_request(other, "held", [*range(12), 1])
    _, before = other.match_prefix(list(range(8)), return_pages=True)
    restored = other.restore(path)
    assert restored.num_pages == 2
    assert restored.is_whole
    _, after = other.match_prefix([*range(8), *range(40, 48)], return_pages=True)
    assert len(after) == 4
    np.testing.assert_array_equal(after[:2], before)
    write_chunk(other, held, 3)
    other.release("held")


def test_other_numbers_of_replicas(tmp_path: Path) -> None:
    params = moving_params(n_devices=3, data_parallel_degree=3, n_kv_heads=1)
    manager, path = moving_manager(params), tmp_path / "cache.kv"
    for replica in range(3):
        manager.claim("r", replica)
        write_chunk(manager, TextGenerationContext("r", [*range(8), replica, 1, 1, 1, 1]), 1)
        manager.release("r")
    manager.snapshot(path)
    other = moving_manager(moving_params(n_devices=2, data_parallel_degree=2, n_kv_heads=1))
    assert other.restore(path).is_whole
    found = [[other.match_prefix([*range(8), i, 1, 1, 1], replica_idx=r) for i in range(3)]
             for r in range(2)]  # fmt: skip
    assert found == [[12, 8, 12], [8, 12, 8]]


def test_an_empty_cache(tmp_path: Path) -> None:
    manager, path = moving_manager(), tmp_path / "cache.kv"
    saved = manager.snapshot(path, model="m")
    assert (saved.num_tokens, saved.num_pages, saved.num_states) == (0, 0, 0)
    assert moving.check_snapshot(path) == saved
    assert moving_manager().restore(path, model="m").is_whole


def test_large_runs_come_back_in_portions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvcore.snapshots.cache._PORTION", 3000)
    manager, other = moving_manager(), moving_manager()
    put(manager, list(range(100)))
    put(manager, [*range(60), *([1] * 30)])
    assert_comes_back(manager, other, tmp_path)


def test_a_host_tier_is_no_part_of_it(tmp_path: Path) -> None:
    params = moving_params()
    space = 20.5 * params.bytes_per_page / 2**30
    tiered = replace(params, enable_kvcache_swapping_to_host=True, host_kvcache_swap_space_gb=space)
    manager, path = moving_manager(tiered, num_pages=8), tmp_path / "cache.kv"
    for i in range(3):
        put(manager, [100 * i + j for j in range(16)])
    assert manager.snapshot(path).num_pages == 8
    other = moving_manager(tiered, num_pages=8)
    assert other.restore(path).is_whole
    assert other.metrics.h2d_blocks_copied == 0
    put(other, [200 + j for j in range(16)])
    other.check_integrity()


# ---- quotas --------------------------------------------------------------------------------------


def test_a_snapshot_leaves_out_pages_that_quotas_leave_no_room_to_hold(tmp_path: Path) -> None:
    groups = [FullAttention([0]), SlidingWindow([1], 2)]
    params = moving_params(groups=groups, page_size=2)
    manager = moving_manager(params, 16, quotas={"a": (8, None)}, max_batch_size=16)
    put(manager, [1, 2, 3, 4])
    names = [f"r{i}" for i in range(20)]

    def fill() -> None:
        for i, name in enumerate(names):
            written_request(manager, name, [10 + i, 9])

    with pytest.raises(InsufficientBlocksError):  # requests without a tenant take all they can
        fill()
    path = tmp_path / "cache.kv"
    saved = manager.snapshot(path)
    assert moving.check_snapshot(path) == saved
    manager.check_integrity()
    for name in names:
        if manager.contains(name):
            manager.release(name)
    assert manager.snapshot(path).num_pages > saved.num_pages
