# SPDX-License-Identifier: Apache-2.0
"""Snapshots on disk: complete after any kill, refused or skipped if damaged, during traffic."""

from __future__ import annotations

import json
import os
import random
import threading
from pathlib import Path
from typing import Any

import pytest

from conftest import require
from kvcore import KVCacheError, PagedKVCacheManager, TextGenerationContext, moving
from kvcore.groups import FullAttention, SlidingWindow
from kvcore.snapshots import format as tensors
from moved_requests import moving_manager, moving_params, read_rows, written_request
from snapshot_contents import assert_right, contents_of, filled
from state_model import prefill, prompt, state_manager, state_params

# ---- files ---------------------------------------------------------------------------------------


def test_what_was_there_before_stays_where_the_writing_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager, path = filled(), tmp_path / "cache.kv"
    manager.snapshot(path)
    before = path.read_bytes()
    for name in ("add", "finish"):
        with monkeypatch.context() as patch:
            patch.setattr(f"kvcore.snapshots.cache.SnapshotWriter.{name}", _no_space)
            with pytest.raises(OSError, match="No space left"):
                manager.snapshot(path)
        assert path.read_bytes() == before
        assert [each.name for each in tmp_path.iterdir()] == ["cache.kv"]
    manager.check_integrity()


def _no_space(*_: Any) -> None:
    raise OSError(28, "No space left on device")


def test_where_a_snapshot_cannot_be(tmp_path: Path) -> None:
    manager = filled()
    with pytest.raises(ValueError, match="is not a regular file"):
        manager.snapshot(tmp_path)
    if os.name == "posix":
        with pytest.raises(ValueError, match="is not a regular file"):
            manager.snapshot("/dev/null")
    with pytest.raises(FileNotFoundError):
        manager.snapshot(tmp_path / "none" / "cache.kv")
    with pytest.raises(FileNotFoundError):
        manager.restore(tmp_path / "cache.kv")
    with pytest.raises(TypeError, match="model is a int"):
        manager.snapshot(tmp_path / "cache.kv", model=3)  # type: ignore[arg-type]
    link = tmp_path / "link"
    (tmp_path / "target").touch()
    link.symlink_to(tmp_path / "target")
    manager.snapshot(link)
    assert link.is_symlink()
    moving.check_snapshot(tmp_path / "target")


# ---- snapshots that do not fit -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"dtype": "float16"}, "dtype float32, must be float16"),
        ({"page_size": 8}, "page_size 4, must be 8"),
        ({"num_layers": 3}, "num_layers 2, must be 3"),
        ({"n_devices": 2}, "tensor_parallel_degree 1, must be 2"),
        ({"head_dim": 8}, r"row_widths \[4, 4\], must be \[8, 8\]"),
        ({"is_mla": True}, "kv_dim 2, must be 1"),
        ({"groups": (FullAttention([0]), SlidingWindow([1], 5))}, "groups"),
    ],
)
def test_a_cache_of_another_format_is_refused(
    options: dict[str, Any], text: str, tmp_path: Path
) -> None:
    path = tmp_path / "cache.kv"
    filled().snapshot(path)
    other = moving_manager(moving_params(**options))
    with pytest.raises(ValueError, match=text):
        other.restore(path)
    assert other.num_free_blocks == 32


def test_models_are_compared(tmp_path: Path) -> None:
    path = tmp_path / "cache.kv"
    filled().snapshot(path, model="one")
    for model in ("other", ""):
        with pytest.raises(ValueError, match=f"has model 'one', must be '{model}'"):
            moving_manager().restore(path, model=model)
    assert moving_manager().restore(path, model="one").is_whole
    assert moving_manager().restore(path).is_whole


def test_managers_without_pages_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "cache.kv"
    filled().snapshot(path)
    for manager in (
        moving_manager(blocks=None),
        moving_manager(moving_params(enable_prefix_caching=False)),
    ):
        for call in (manager.snapshot, manager.restore):
            with pytest.raises(ValueError, match=r"this manager has no p(ool|refix cache)"):
                call(path)


# ---- damage --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "times", [120, pytest.param(1200, marks=pytest.mark.slow)], ids=["few", "many"]
)
def test_damaged_files_are_refused_or_skipped(times: int, tmp_path: Path) -> None:
    path, bad = tmp_path / "cache.kv", tmp_path / "bad.kv"
    saved = filled().snapshot(path)
    data = path.read_bytes()
    pages_end = (64 << 10) + saved.num_pages * (len(data) - (64 << 10)) // (saved.num_pages + 1)
    text = data[8 : 64 << 10].rstrip(b" ")
    draw = random.Random(3)
    refused = skipped = 0
    for i in range(times):
        damaged = bytearray(data)
        kind = i % 6
        places = [(0, 8 + len(text)), (0, 64 << 10), (64 << 10, pages_end), (pages_end, len(data))]
        if kind < 4:
            for _ in range(1 + i % 3):
                damaged[draw.randrange(*places[kind])] ^= 1 << draw.randrange(8)
        elif kind == 4:
            del damaged[draw.randrange(len(data)) :]
        else:
            at, other = (draw.randrange(64 << 10, len(data) - 200) for _ in range(2))
            damaged[at : at + 100] = data[other : other + 100]
        bad.write_bytes(damaged)
        manager = moving_manager(enable_runtime_checks=False)
        try:
            restored = manager.restore(bad)
        except ValueError:
            refused += 1
            assert manager.num_free_blocks == 32
            assert manager._core.stats(0).cached_pages == 0
            continue
        skipped += restored.damaged > 0
        assert restored.is_whole == (restored.damaged == 0)
        assert restored.is_whole == (bytes(damaged) == data or assert_right(manager) == 5 * 16)
        assert_right(manager)
        manager.check_integrity()
    assert refused > times // 2
    assert skipped > times // 10


def test_what_continues_a_damaged_page_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "cache.kv"
    manager = filled()
    manager.snapshot(path)
    page = 2 * 2 * 4 * 2 * 4 * 4
    data = bytearray(path.read_bytes())
    data[(64 << 10) + page + 7] ^= 1  # the second page of the prefix that all prompts share
    path.write_bytes(data)
    with pytest.raises(ValueError, match="row 1 of tensor 'pages'"):
        moving.check_snapshot(path)
    other = moving_manager()
    restored = other.restore(path)
    assert (restored.damaged, restored.num_pages, restored.num_tokens) == (1, 1, 4)
    assert not restored.is_whole
    assert assert_right(other) == 5 * 4


def test_a_damaged_checkpoint_is_left_out(tmp_path: Path) -> None:
    path, params = tmp_path / "cache.kv", state_params(interval=4)
    manager, other = state_manager(params, num_states=16), state_manager(params, num_states=16)
    prefill(manager, "r", prompt((0, 21)))
    manager.release("r")
    saved = manager.snapshot(path)
    data = bytearray(path.read_bytes())
    header = json.loads(data[8 : 64 << 10])
    begin, end = header["states"]["data_offsets"]
    at = (64 << 10) + end - (end - begin) // saved.num_states  # the last state
    data[at] ^= 1
    path.write_bytes(data)
    restored = other.restore(path)
    assert (restored.damaged, restored.num_states) == (1, saved.num_states - 1)
    assert restored.num_pages == saved.num_pages
    assert other.match_prefix(prompt((0, 21))) == 16


def test_the_file_is_one_of_safetensors(tmp_path: Path) -> None:
    safe_open = require("safetensors").safe_open
    path = tmp_path / "cache.kv"
    saved = filled().snapshot(path)
    with safe_open(path, "np") as file:
        assert file.get_tensor("pages").shape == (saved.num_pages, 512)
        assert file.get_tensor("tokens").shape == (saved.num_pages, 4)
        assert json.loads(file.metadata()["format"]) == "kvcore.snapshot"


# ---- other threads -------------------------------------------------------------------------------


def serve(manager: PagedKVCacheManager, seed: int, stop: threading.Event, reads: list[int]) -> None:
    """Run requests with few prompts, and compare the values they read with the written values."""
    draw = random.Random(seed)
    while not stop.is_set():
        name = f"{seed}"
        tokens = [*range(8), *([draw.randrange(12)] * draw.randrange(3, 20))]
        manager.claim(name)
        context = TextGenerationContext(name, tokens)
        try:
            if manager.reserve(context):
                manager.release(name)
                written_request(manager, name, tokens)
                rows = read_rows(manager, TextGenerationContext(name, tokens))
                reads[seed] += len(rows)
        finally:
            if manager.contains(name):
                manager.release(name)


@pytest.mark.slow
def test_snapshots_beside_traffic(tmp_path: Path) -> None:
    manager = moving_manager(num_pages=40, enable_runtime_checks=False, max_batch_size=8)
    stop, reads = threading.Event(), [0] * 3
    threads = [threading.Thread(target=serve, args=(manager, i, stop, reads)) for i in range(3)]
    for thread in threads:
        thread.start()
    prompts = [[*range(8), *([i] * 20)] for i in range(12)]
    found = 0
    try:
        for i in range(40):
            path = tmp_path / f"{i % 2}.kv"
            manager.snapshot(path)
            moving.check_snapshot(path)
            other = moving_manager(num_pages=40)
            other.restore(path)
            found += assert_right(other, prompts)
            if i % 8 == 5:
                manager.reset_prefix_cache()
            if i % 4 == 3:
                manager.restore(tmp_path / "0.kv")
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    manager.check_integrity()
    assert_right(manager, prompts)
    assert found > 0
    assert all(reads)


def test_a_reset_in_the_middle_of_a_snapshot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager, path = filled(), tmp_path / "cache.kv"
    from kvcore.snapshots.cache import PageBytes

    read = PageBytes.read
    calls: list[int] = []

    def reading(self: PageBytes, ids: Any) -> Any:
        calls.append(len(ids))
        if len(calls) == 2:
            manager.reset_prefix_cache()
            written_request(manager, "new", [9] * 9)
        return read(self, ids)

    monkeypatch.setattr(PageBytes, "read", reading)
    assert manager.snapshot(path).num_tokens == 8
    assert [key[2][0] for key in contents_of(path)] == [9, 9]

    def resetting(self: PageBytes, ids: Any) -> Any:
        manager.release("new")
        manager.reset_prefix_cache()
        written_request(manager, "new", [9] * 9)
        return read(self, ids)

    monkeypatch.setattr(PageBytes, "read", resetting)
    before = path.read_bytes()
    with pytest.raises(KVCacheError, match="was reset 16 times"):
        manager.snapshot(path)
    assert path.read_bytes() == before
    assert len(list(tmp_path.iterdir())) == 1


def test_a_reset_in_the_middle_of_a_restore(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "cache.kv"
    filled().snapshot(path)
    from kvcore.snapshots.cache import PageBytes

    write, manager = PageBytes.write, moving_manager()
    calls: list[int] = []

    def writing(self: PageBytes, ids: Any, rows: Any) -> None:
        write(self, ids, rows)
        calls.append(len(ids))
        if len(calls) == 3:
            manager.reset_prefix_cache()

    monkeypatch.setattr(PageBytes, "write", writing)
    restored = manager.restore(path)
    assert not restored.is_whole
    assert len(calls) == 3
    assert manager.num_free_blocks == 32
    assert assert_right(manager) == 0
    manager.check_integrity()


def test_an_exception_in_the_middle_leaves_nothing_half_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "cache.kv"
    filled().snapshot(path)
    from kvcore.snapshots.cache import PageBytes

    write, manager = PageBytes.write, moving_manager()
    calls: list[int] = []

    def writing(self: PageBytes, ids: Any, rows: Any) -> None:
        calls.append(len(ids))
        if len(calls) == 3:
            raise MemoryError
        write(self, ids, rows)

    monkeypatch.setattr(PageBytes, "write", writing)
    with pytest.raises(MemoryError):
        manager.restore(path)
    manager.check_integrity()
    assert 0 < assert_right(manager) < 5 * 16
    monkeypatch.undo()
    assert manager.restore(path).is_whole
    assert assert_right(manager) == 5 * 16


@pytest.mark.parametrize("depth", [40, 600, 930, 20_000])
def test_metadata_that_is_nested_deeply_is_damage(
    depth: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At depths that Python's parser accepts, comparing and printing would raise."""
    nested = "[" * depth + "]" * depth
    text = tensors.json_text

    def with_params(value: Any) -> str:
        return nested if isinstance(value, dict) and "row_widths" in value else text(value)

    path = tmp_path / "cache.kv"
    with monkeypatch.context() as patch:
        patch.setattr("kvcore.snapshots.format.json_text", with_params)
        filled().snapshot(path)
    for manager in (moving_manager(), moving_manager(moving_params(head_dim=8))):
        with pytest.raises(ValueError, match="the data is damaged"):
            manager.restore(path)
        manager.check_integrity()
    with pytest.raises(ValueError, match="the data is damaged"):
        moving.check_snapshot(path)
