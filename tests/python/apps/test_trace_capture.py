# SPDX-License-Identifier: Apache-2.0
"""Traces captured from cache events: chains become requests, and a replay finds their hits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cli_runs import refused, shown
from kvcore import KVCacheParams, PagedKVCacheManager, TextGenerationContext
from kvcore.replay import PoolSettings, read_trace, replay_admission

events = pytest.importorskip("kvcore.events")
capture = pytest.importorskip("kvcore.apps.traces.capture")
ForeignPublisher = pytest.importorskip("foreign_publisher").ForeignPublisher

ANY = "tcp://127.0.0.1:*"
SIZE = 4


def stored(parent: int | None, *hashes: int, **more: Any) -> Any:
    tokens = [token for each in hashes for token in range(each * SIZE, each * SIZE + SIZE)]
    return events.BlockStored(list(hashes), parent, tokens, SIZE, **more)


def rows_of(*batches: tuple[float, list[Any]], gap: float = 10, **more: Any) -> list[Any]:
    reader = capture.ChainReader(gap, with_tokens=more.pop("with_tokens", False))
    rows = []
    for ts, found in batches:
        rows += reader.take(events.KVEventBatch(1.7e9 + ts, found))
    rows += reader.finish()
    rows.append(reader.captured)
    return rows


def test_events_that_continue_a_chain_are_one_request() -> None:
    first, other, captured = rows_of(
        (0, [stored(None, 10, 11), stored(None, 20)]),
        (0.5, [stored(11, 12)]),
        (2, [stored(12, 13), events.BlockRemoved([20]), events.AllBlocksCleared()]),
    )
    assert other == {"time": 0, "input": 16, "output": 1, "blocks": [0, 1, 3, 4]}
    assert first == {"time": 0, "input": 4, "output": 1, "blocks": [2]}
    assert (captured.requests, captured.blocks, captured.unknown) == (2, 5, 0)


def test_a_later_block_and_another_branch_are_new_requests() -> None:
    *rows, captured = rows_of(
        (0, [stored(None, 10, 11)]),
        (1, [stored(10, 30)]),
        (60, [stored(11, 12)]),
        (70, [stored(None, 10)]),
    )
    assert [row["blocks"] for row in rows] == [[0, 1], [0, 2], [0, 1, 3], [0]]
    assert [row["time"] for row in rows] == pytest.approx([0, 1, 60, 70])
    assert captured.requests == 4


def test_a_beginning_before_the_capture_is_one_block() -> None:
    row, captured = rows_of((0, [stored(99, 10)]))
    assert row["blocks"] == [0, 1]
    assert captured.unknown == 1
    assert captured.notes()[1] == "begun before the capture: 1 chain"
    (captured,) = rows_of((0, [stored(99, 10)]), with_tokens=True)
    assert (captured.requests, captured.left_out) == (0, 1)


def test_token_ids_are_written_only_on_request() -> None:
    row, _ = rows_of((0, [stored(None, 1, 2)]), with_tokens=True)
    assert row["tokens"] == [4, 5, 6, 7, 8, 9, 10, 11]
    assert "blocks" not in row


def test_other_media_are_left_out() -> None:
    (captured,) = rows_of((0, [stored(None, 1, medium="CPU")]))
    assert captured.requests == 0


def windowed(parent: int | None, *hashes: int, behind: int, **more: Any) -> Any:
    """Return an event without the hashes of its first blocks, as vLLM's groups with windows."""
    event = stored(parent, *hashes, **more)
    event.block_hashes = event.block_hashes[behind:]
    return event


def test_groups_are_read_once_and_windows_lack_no_block() -> None:
    row, captured = rows_of(
        (
            0,
            [
                windowed(None, 1, 2, 3, behind=2, group_idx=0),
                stored(None, 1, 2, 3, group_idx=1),
                stored(None, 1, 2, 3, group_idx=2),
            ],
        ),
        (1, [windowed(3, 4, behind=1, group_idx=0), stored(3, 4, group_idx=1)]),
    )
    assert row["blocks"] == [0, 1, 2, 3]
    assert (captured.requests, captured.blocks, captured.left_out) == (1, 4, 0)


def test_chains_behind_the_windows_of_all_groups_are_counted() -> None:
    row, captured = rows_of(
        (0, [windowed(None, 1, 2, 3, behind=2, group_idx=0), stored(None, 5, group_idx=0)]),
        (1, [windowed(3, 4, 6, behind=1, group_idx=0)]),
    )
    assert row["blocks"] == [0]
    assert (captured.requests, captured.left_out) == (1, 1)
    assert captured.notes()[-1] == "left out, too long, without tokens or behind a window: 1 chain"


def test_groups_with_larger_blocks_are_left_out() -> None:
    large = events.BlockStored([7], None, [0] * 8, 8, group_idx=1)
    row, captured = rows_of((0, [stored(None, 1, 2, group_idx=0), large]))
    assert (row["blocks"], captured.blocks) == ([0, 1], 2)
    with pytest.raises(ValueError, match="expected blocks of 4 tokens, got 8"):
        rows_of((0, [stored(None, 1), events.BlockStored([2], None, [0] * 8, 8)]))
    with pytest.raises(ValueError, match="expected blocks of 1 to 16777216 tokens, got 0"):
        rows_of((0, [events.BlockStored([2], None, [], 0)]))


def serve(manager: PagedKVCacheManager, prompts: list[list[int]]) -> None:
    for index, prompt in enumerate(prompts):
        context = TextGenerationContext(index, prompt)
        manager.claim(index)
        manager.fetch([context])
        context.update(7)
        manager.step([context])
        manager.release(index)


@pytest.mark.parametrize("token_ids", [False, True])
def test_capture_of_a_manager_is_replayed(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, token_ids: bool
) -> None:
    params = KVCacheParams(
        "float16", n_kv_heads=1, head_dim=8, num_layers=1, page_size=4, enable_prefix_caching=True
    )
    manager = PagedKVCacheManager(
        params, max_batch_size=2, max_seq_len=64, num_pages=200, events=True
    )
    prompts = [[*range(40), *range(100 * n, 100 * n + 8), 1] for n in range(1, 6)]
    target = tmp_path / "trace.jsonl"
    with events.EventPublisher(manager, ANY, replay_endpoint=ANY) as publisher:
        (replay,) = publisher.replay_endpoints
        options = ["--replay-endpoint", replay, "--seconds", "1.5"]
        options += ["--token-ids", "--json"] if token_ids else []

        serve(manager, prompts)
        publisher.flush()
        out = shown(capsys, "trace", "capture", publisher.endpoints[0], target, *options)
    if token_ids:
        assert json.loads(out) == {"requests": 5, "blocks": 20, "unknown": 0, "left_out": 0}
    else:
        assert out == "5 requests, 20 distinct blocks\n"
    assert (b'tokens":' in target.read_bytes().replace(b'"notes"', b"")) == token_ids
    workload = read_trace(target)
    assert len(workload) == 5
    assert workload.prompt_lengths.tolist() == [48] * 5
    assert "blocks of 4 tokens" in workload.assumptions
    report = replay_admission(workload, PoolSettings(page_size=4, pages=100))
    assert report.cached_pages == 4 * 10
    header, *rows = map(json.loads, target.read_text().splitlines())
    assert header["content"] == ("tokens" if token_ids else "blocks")
    assert all(row.keys() >= {"time", "input", "output"} for row in rows)


@pytest.mark.parametrize("form", ["map", "array"])
def test_capture_of_another_engine(tmp_path: Path, form: str) -> None:
    """vLLM and SGLang have the same protocol; SGLang sends a page per event."""
    target = tmp_path / "trace.jsonl.gz"
    publisher = ForeignPublisher()
    found = [stored(None, 1), stored(1, 2), stored(2, 3), stored(1, 9, 10)]
    publisher.publish(events.encode_batch(events.KVEventBatch(1.7e9, found), form))
    try:
        with events.EventSubscriber(
            publisher.endpoint, replay_endpoint=publisher.replay_endpoint
        ) as subscriber:
            done = capture.capture_trace(subscriber, target, seconds=1.0)
    finally:
        publisher.close()
    assert (done.requests, done.blocks) == (2, 5)
    workload = read_trace(target)
    assert workload.prompt_lengths.tolist() == [3 * SIZE, 3 * SIZE]
    assert workload.prompt(0)[:SIZE].tolist() == workload.prompt(1)[:SIZE].tolist()


def test_a_capture_without_events_writes_no_file(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    target = tmp_path / "trace.jsonl"
    quiet = ("trace", "capture", "tcp://127.0.0.1:1", target, "--seconds", "0.1")
    assert "expected events of stored blocks, got none" in refused(capsys, *quiet)
    assert list(tmp_path.iterdir()) == []
    assert "cannot subscribe to nowhere" in refused(capsys, "trace", "capture", "nowhere", target)
    assert "'--seconds': expected at least 0" in refused(capsys, *quiet[:-1], "-1")
