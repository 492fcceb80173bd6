# SPDX-License-Identifier: Apache-2.0
"""Requests are exported from a manager and continue in another manager."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from conftest import require
from foreign_context import Context
from kvcore import (
    TextGenerationContext,
    moving,
)
from kvcore.groups import FullAttention, SlidingWindow, State
from moved_requests import (
    PROMPT,
    assert_reads,
    exported,
    moving_manager,
    moving_params,
    read_rows,
    write_chunk,
    written_request,
)
from state_model import ARRAYS, prefill, prompt, state_manager, state_params, step_states

# ---- contents of a move --------------------------------------------------------------------------

TARGETS: dict[str, dict[str, Any]] = {
    "the same": {},
    "smaller pages": {"page_size": 3},
    "larger pages": {"page_size": 32},
    "two shards": {"n_devices": 2},
    "two replicas of two shards": {"n_devices": 4, "data_parallel_degree": 2},
    "no caching": {"enable_prefix_caching": False},
}


@pytest.mark.parametrize("source", ["the same", "two shards"])
@pytest.mark.parametrize("target", TARGETS)
def test_a_moved_request_goes_on(source: str, target: str) -> None:
    data = exported(moving_params(**TARGETS[source]))
    manager = moving_manager(moving_params(**TARGETS[target]))
    context = moving.read_sequence(data).context("moved")
    assert manager.import_sequence(context, data)
    assert (context.start_idx, context.active_idx, context.end_idx) == (18, 19, 19)
    for token in range(6):
        assert_reads(manager, context)
        write_chunk(manager, context, token)
    assert_reads(manager, context)
    assert manager.metrics.cache_tokens == 18


@pytest.mark.parametrize(
    "options",
    [
        {"dtype": "float16"},
        {"dtype": "bfloat16"},
        {"dtype": "float8_e4m3fn"},
        {"dtype": "float8_e5m2"},
        {"dtype": "int8"},
        {"v_head_dim": 8},
        {"is_mla": True},
        {"is_mla": True, "n_devices": 2},
        {"dtype": "float8_e4m3fn", "kv_scale_granularity": 2},
        {"dtype": "int8", "kv_scale_granularity": 4, "n_devices": 2},
        {"dtype": "int8", "kv_scale_granularity": 4, "v_head_dim": 8},
        {"dtype": "int8", "kv_scale_granularity": 4, "is_mla": True},
    ],
    ids=str,
)
def test_every_kind_of_pool(options: dict[str, Any]) -> None:
    manager = moving_manager(moving_params(**options))
    context = written_request(manager, "r", PROMPT)
    wanted = read_rows(manager, context)
    other = moving_manager(moving_params(**(options | {"page_size": 5, "n_devices": 1})))
    moved = TextGenerationContext("r", context.tokens)
    assert other.import_sequence(moved, manager.export_sequence("r"))
    for found, each in zip(read_rows(other, moved), wanted, strict=True):
        np.testing.assert_array_equal(found, each)


@pytest.mark.parametrize(
    ("narrow", "wide"),
    [
        ("float16", "float32"),
        ("bfloat16", "float32"),
        ("float8_e4m3fn", "bfloat16"),
        ("float8_e5m2", "float16"),
        ("float8_e5m2", "float32"),
    ],
)
def test_what_a_wider_dtype_holds_exactly_is_widened(narrow: str, wide: str) -> None:
    source = moving_manager(moving_params(dtype=narrow))
    wanted = read_rows(source, written_request(source, "r", PROMPT))
    data = source.export_sequence("r")
    manager = moving_manager(moving_params(dtype=wide))
    context = moving.read_sequence(data).context("r")
    assert manager.import_sequence(context, data)
    for found, each in zip(read_rows(manager, context), wanted, strict=True):
        np.testing.assert_array_equal(found, each)


def test_into_a_pool_of_the_callers() -> None:
    params = moving_params(n_devices=2)
    pools = [np.full((32, 2, 2, 4, 1, 4), np.nan, np.float32) for _ in range(2)]
    manager = moving_manager(params, blocks=pools)
    data = exported()
    context = moving.read_sequence(data).context("r")
    assert manager.import_sequence(context, data)
    assert_reads(manager, context)
    pages = manager.get_req_blocks("r")
    assert not np.isnan(pools[1][pages[:4]]).any()
    again = manager.export_sequence("r")
    assert moving.read_sequence(again).tensors["layers.0.k"].shape == (18, 2, 4)


def test_whole_pages_are_found_by_others_afterwards() -> None:
    data = exported(cache_salt="s", extra_keys=[(2, 3, b"cat")])
    manager = moving_manager(moving_params(page_size=5))
    context = moving.read_sequence(data).context("r")
    assert manager.import_sequence(context, data)
    assert manager.match_prefix(PROMPT) == 0
    keys: dict[str, Any] = {"cache_salt": "s", "extra_keys": [(2, 3, b"cat")]}
    assert manager.match_prefix(PROMPT, **keys) == 15
    manager.release("r")
    assert manager.match_prefix(PROMPT, **keys) == 15
    again = moving.read_sequence(data).context("again")
    assert manager.import_sequence(again, data)
    assert manager.num_cached_blocks == 3  # deduplicated
    assert_reads(manager, again)


def test_a_fork_of_a_moved_request() -> None:
    data = exported()
    manager = moving_manager(moving_params(page_size=5))
    context = moving.read_sequence(data).context("r")
    assert manager.import_sequence(context, data)
    child = TextGenerationContext("child", [*PROMPT, 4, 4])
    manager.fork("r", child)
    write_chunk(manager, child, 3)
    write_chunk(manager, context, 3)
    assert_reads(manager, child)
    assert_reads(manager, context)
    manager.truncate("r", 7)
    context.rewind(7)
    context.start_idx = min(context.start_idx, 6)
    write_chunk(manager, context, 3)
    assert_reads(manager, context)


def test_contexts_of_another_class() -> None:
    source = moving_manager()
    context: Any = Context("r", PROMPT)
    source.claim("r")
    write_chunk(source, context, 9)
    data = source.export_sequence("r")
    other = moving_manager(moving_params(page_size=7))
    moved: Any = Context("moved", context.tokens)
    assert other.import_sequence(moved, data)
    assert (moved.start_idx, moved.active_idx) == (18, 19)
    assert_reads(other, moved)
    write_chunk(other, moved, 5)
    assert_reads(other, moved)


def test_the_prompt_of_a_chunked_prefill_goes_on() -> None:
    source = moving_manager()
    context = TextGenerationContext("r", PROMPT, active_idx=7)
    source.claim("r")
    write_chunk(source, context, 0)
    saved = moving.read_sequence(source.export_sequence("r"))
    assert (saved.written, saved.start_idx, saved.active_idx, len(saved.tokens)) == (7, 7, 18, 18)
    other = moving_manager(moving_params(page_size=2))
    moved = saved.context("r")
    assert other.import_sequence(moved, saved)
    write_chunk(other, moved, 3)
    assert_reads(other, moved)


def test_windows_hold_only_what_is_read_again() -> None:
    params = moving_params(groups=(FullAttention([0]), SlidingWindow([1], 5)))
    saved = moving.read_sequence(exported(params))
    assert saved.tensors["layers.0.k"].shape[0] == 18
    assert saved.layers[1].first == 12  # the page of token 18 - 5 + 1
    assert saved.tensors["layers.1.v"].shape[0] == 6
    manager = moving_manager(params, num_pages=10)
    context = saved.context("r")
    assert manager.import_sequence(context, saved)
    assert manager.total_num_pages - manager.num_free_blocks == 5 + 2
    assert manager.match_prefix(PROMPT) == 16
    assert manager.match_prefix(PROMPT[:12]) == 0  # the file lacks the windows of this prefix


def test_where_pages_lack_tokens_nothing_is_cached_for_others() -> None:
    groups = (FullAttention([0]), SlidingWindow([1], 5))
    saved = moving.read_sequence(exported(moving_params(groups=groups)))
    manager = moving_manager(moving_params(groups=groups, page_size=8))
    context = saved.context("r")
    assert manager.import_sequence(context, saved)
    assert manager.match_prefix(PROMPT) == 0
    write_chunk(manager, context, 3)
    child = TextGenerationContext("child", [*context.tokens, 3])
    manager.fork("r", child)
    write_chunk(manager, child, 3)


def test_a_flat_cache_serves_windows_but_not_the_other_way() -> None:
    windows = moving_params(groups=(FullAttention([0]), SlidingWindow([1], 5)))
    manager = moving_manager(windows)
    data = exported()
    assert manager.import_sequence(moving.read_sequence(data).context("r"), data)
    data = exported(windows)
    flat = moving_manager()
    with pytest.raises(ValueError, match="tokens of layer 1 from 12, must be at most 0"):
        flat.import_sequence(moving.read_sequence(data).context("r"), data)


def test_states_move() -> None:
    source = state_manager(state_params())
    tokens = prompt((0, 21))
    context = prefill(source, "r", tokens)
    data = source.export_sequence("r")
    saved = moving.read_sequence(data)
    assert saved.tensors["states.0.conv"].shape == (1, 2, 3)
    other = state_manager(state_params(page_size=8))
    moved = saved.context("r")
    assert other.import_sequence(moved, saved)
    for token in range(9):
        step_states(other, moved, token=token)  # compares the state with its tokens
        step_states(source, context, token=token)
    assert other.export_sequence("r") != data
    other.release("r")
    prefill(other, "again", tokens)


def test_states_move_between_steps_alone() -> None:
    manager = state_manager(state_params())
    context = prefill(manager, "r", prompt((0, 9)))
    manager.fetch([context])
    with pytest.raises(
        ValueError, match="its state is at a later token; export it between step and"
    ):
        manager.export_sequence("r")


def test_states_of_another_model_or_degree_are_refused() -> None:
    source = state_manager(state_params())
    prefill(source, "r", prompt((0, 9)))
    saved = moving.read_sequence(source.export_sequence("r"))
    arrays = {"conv": ((4,), "float32"), "ssm": ARRAYS["ssm"]}
    other = state_manager(state_params(FullAttention([0]), State([1, 2], arrays)))
    with pytest.raises(ValueError, match="has states"):
        other.import_sequence(saved.context("r"), saved)
    wide = replace(state_params(), n_kv_heads=1, is_mla=False)
    with pytest.raises(ValueError, match=r"the saved request has (layers|states) .*, must be "):
        state_manager(
            replace(wide, groups=(FullAttention([0, 1]), State([2], ARRAYS)))
        ).import_sequence(saved.context("r"), saved)


# ---- files ---------------------------------------------------------------------------------------


def test_files_of_every_kind(tmp_path: Path) -> None:
    manager = moving_manager()
    written_request(manager, "r", PROMPT)
    data = manager.export_sequence("r", model="llama")
    path = tmp_path / "r.kv"
    path.write_bytes(b"what was there before")
    assert manager.export_sequence("r", path, model="llama") is None
    assert path.read_bytes() == data
    assert [each.name for each in tmp_path.iterdir()] == ["r.kv"]
    file = io.BytesIO()
    manager.export_sequence("r", file, model="llama")
    assert file.getvalue() == data
    file.seek(0)
    kinds: list[Any] = [data, bytearray(data), memoryview(data), path, str(path), file]
    for i, given in enumerate(kinds):
        other = moving_manager()
        context = moving.read_sequence(data).context(i)
        assert other.import_sequence(context, given, model="llama")
        assert_reads(other, context)


def test_a_file_that_cannot_be_written_leaves_what_was_there(tmp_path: Path) -> None:
    manager = moving_manager()
    written_request(manager, "r", PROMPT)
    with pytest.raises(OSError, match="no_such_folder"):
        manager.export_sequence("r", tmp_path / "no_such_folder" / "r.kv")
    folder = tmp_path / "r.kv"
    folder.mkdir()
    with pytest.raises(OSError):  # noqa: PT011 - the system's text
        manager.export_sequence("r", folder)
    assert [each.name for each in tmp_path.iterdir()] == ["r.kv"]


def test_safetensors_reads_it() -> None:
    safetensors = require("safetensors.numpy")
    data = exported(moving_params(dtype="float16"), cache_salt="s")
    found = safetensors.load(data)
    saved = moving.read_sequence(data)
    assert found.keys() == saved.tensors.keys() | {"tokens"}
    for name, array in saved.tensors.items():
        np.testing.assert_array_equal(found[name], array)
