# SPDX-License-Identifier: Apache-2.0
"""Traces captured from cache events: chains become requests, and a replay finds their hits."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import combinations
from pathlib import Path
from typing import Any, Literal

import pytest

from cli_runs import refused, shown
from conftest import require
from kvcore import KVCacheParams, PagedKVCacheManager, TextGenerationContext
from kvcore.apps.cli.main import main
from kvcore.apps.traces.canonical import write_trace
from kvcore.apps.traces.read import load_trace
from kvcore.apps.traces.read_options import ReadOptions
from kvcore.replay import PoolSettings, read_trace, replay_admission

require("msgspec")
require("zmq")

from foreign_publisher import ForeignPublisher  # noqa: E402
from kvcore import events  # noqa: E402
from kvcore.apps.traces import capture  # noqa: E402

ANY = "tcp://127.0.0.1:*"
SIZE = 4


def stored(parent: int | None, *hashes: int, **more: Any) -> Any:
    tokens = [token for each in hashes for token in range(each * SIZE, each * SIZE + SIZE)]
    return events.BlockStored(list(hashes), parent, tokens, SIZE, **more)


def rows_of(*batches: tuple[float, list[Any]], gap: float = 10, **more: Any) -> list[Any]:
    reader = capture.ChainReader(gap, with_tokens=more.pop("with_tokens", False))
    rows: list[Any] = []
    for ts, found in batches:
        reader.take(events.KVEventBatch(1.7e9 + ts, found))
    rows += reader.finish()
    rows.append(reader.captured)
    return rows


def test_events_that_continue_a_chain_are_one_request() -> None:
    first, other, captured = rows_of(
        (0, [stored(None, 10, 11), stored(None, 20)]),
        (0.5, [stored(11, 12)]),
        (2, [stored(12, 13), events.BlockRemoved([20]), events.AllBlocksCleared()]),
    )
    assert first == {"time": 0, "input": 4, "output": 1, "blocks": [2]}
    assert other == {"time": 0, "input": 16, "output": 1, "blocks": [0, 1, 3, 4]}
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


def test_rows_are_in_the_order_of_arrival() -> None:
    """The first chain goes on for 40 seconds; the others end before it."""
    long = [(8.0 * n, [stored(n or None, n + 1)]) for n in range(6)]
    short = [(n + 0.5, [stored(None, 100 + n)]) for n in range(30)]
    *rows, captured = rows_of(*sorted(long + short, key=lambda batch: batch[0]))
    assert [row["time"] for row in rows] == pytest.approx([0, *(ts for ts, _ in short)])
    assert [row["input"] for row in rows] == [6 * SIZE] + 30 * [SIZE]
    assert captured.requests == 31


def test_earlier_events_of_another_rank_keep_their_time() -> None:
    """A replay socket repeats the old events of two ranks, rank by rank."""
    *rows, _ = rows_of(
        (100, [stored(None, 1)]),
        (130, [stored(None, 2)]),
        (0, [stored(None, 3)]),
        (115, [stored(None, 4)]),
    )
    assert [row["time"] for row in rows] == pytest.approx([0, 100, 115, 130])
    assert [row["blocks"] for row in rows] == [[2], [0], [3], [1]]


def of_adapters(tmp_path: Path, *, with_tokens: bool) -> list[list[int]]:
    """Return a prompt for each of six requests whose blocks have equal tokens or equal hashes."""
    tokens = list(range(2 * SIZE))

    def prompt(ts: float, parent: int | None, *hashes: int) -> tuple[float, list[Any]]:
        shown = tokens[: len(hashes) * SIZE] if parent is None else tokens[SIZE:]
        return ts, [events.BlockStored(list(hashes), parent, shown, SIZE)]

    *rows, captured = rows_of(
        prompt(0, None, 10, 11),  # no adapter
        prompt(20, None, 20, 21),  # an adapter: other hashes
        prompt(40, 20, 22),  # the adapter, and an image in the second block
        prompt(60, None, 30, 31),  # a cache salt
        prompt(80, 20, 21),  # the adapter again
        prompt(100, 10, 12),  # an image in the second block
        with_tokens=with_tokens,
    )
    assert captured.twins == (4 if with_tokens else 0)
    header = {"kvcore_trace": 1, "time_unit": "s", "content": "tokens" if with_tokens else "blocks"}
    if not with_tokens:
        header["block_size"] = SIZE
    path = tmp_path / f"{with_tokens}.jsonl"
    path.write_text("".join(f"{json.dumps(row)}\n" for row in [header, *rows]))
    again = tmp_path / f"{with_tokens}-again.jsonl"
    write_trace(load_trace(str(path), ReadOptions()), again)
    assert [json.loads(line) for line in again.read_text().splitlines()[1:]] == rows
    workload = read_trace(again)
    return [workload.prompt(index).tolist() for index in range(len(workload))]


def common(first: list[int], second: list[int]) -> int:
    pairs = zip(first, second, strict=True)
    return next((at for at, (a, b) in enumerate(pairs) if a != b), len(first))


def test_prompts_of_two_adapters_share_no_prefix(tmp_path: Path) -> None:
    plain, adapter, image, salt, again, plain_image = of_adapters(tmp_path, with_tokens=True)
    assert plain == list(range(2 * SIZE))
    for other in (adapter, image, salt, again):
        assert common(plain, other) == 0
    for other in (adapter, image, again):
        assert common(salt, other) == 0
    assert common(adapter, image) == SIZE
    assert common(adapter, again) == 2 * SIZE
    assert common(plain, plain_image) == SIZE
    assert common(image, plain_image) == 0


def test_token_ids_have_the_same_prefixes_as_hashes(tmp_path: Path) -> None:
    tokens, blocks = (of_adapters(tmp_path, with_tokens=each) for each in (True, False))
    for first, second in combinations(range(len(tokens)), 2):
        found = common(tokens[first], tokens[second])
        assert found == common(blocks[first], blocks[second]), (first, second)


def test_adapters_of_a_manager_are_captured_apart(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    params = KVCacheParams("float16", 1, 8, 1, page_size=4, enable_prefix_caching=True)
    manager = PagedKVCacheManager(
        params, max_batch_size=2, max_seq_len=64, num_pages=200, events=True
    )
    target = tmp_path / "trace.jsonl"
    contexts = [TextGenerationContext(n, list(range(40)), extra_key=f"lora {n}") for n in range(3)]
    with events.EventPublisher(manager, ANY, replay_endpoint=ANY) as publisher:
        (replay,) = publisher.replay_endpoints
        for context in contexts:
            serve(manager, context)
        publisher.flush()
        options = ["--replay-endpoint", replay, "--seconds", "1.5", "--token-ids"]
        out = shown(capsys, "trace", "capture", publisher.endpoints[0], target, *options)
    line = "kept apart by their hashes, not by tokens, such as of two adapters: 2 blocks"
    assert out.splitlines() == ["3 requests, 30 distinct blocks", line]
    assert b"lora" not in target.read_bytes()
    workload = read_trace(target)
    assert workload.assumptions[-1] == line
    assert replay_admission(workload, PoolSettings(page_size=4, pages=100)).cached_pages == 0


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


def serve(manager: PagedKVCacheManager, context: TextGenerationContext) -> None:
    manager.claim(context.request_id)
    manager.fetch([context])
    context.update(7)
    manager.step([context])
    manager.release(context.request_id)


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

        for index, prompt in enumerate(prompts):
            serve(manager, TextGenerationContext(index, prompt))
        publisher.flush()
        out = shown(capsys, "trace", "capture", publisher.endpoints[0], target, *options)
    if token_ids:
        counts = {"requests": 5, "blocks": 20, "unknown": 0, "left_out": 0, "twins": 0}
        assert json.loads(out) == counts
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


@contextmanager
def foreign(found: list[Any], form: Literal["map", "array"] = "map") -> Iterator[Any]:
    """Publish events as another engine does."""
    publisher = ForeignPublisher()
    publisher.publish(events.encode_batch(events.KVEventBatch(1.7e9, found), form))
    try:
        yield publisher
    finally:
        publisher.close()


def captured_from(publisher: Any, target: Path, **more: Any) -> Any:
    with events.EventSubscriber(
        publisher.endpoint, replay_endpoint=publisher.replay_endpoint
    ) as subscriber:
        return capture.capture_trace(subscriber, target, **{"seconds": 1.0, **more})


@pytest.mark.parametrize("form", ["map", "array"])
def test_capture_of_another_engine(tmp_path: Path, form: Literal["map", "array"]) -> None:
    """vLLM and SGLang have the same protocol; SGLang sends a page per event."""
    target = tmp_path / "trace.jsonl.gz"
    with foreign([stored(None, 1), stored(1, 2), stored(2, 3), stored(1, 9, 10)], form) as found:
        done = captured_from(found, target)
    assert (done.requests, done.blocks) == (2, 5)
    workload = read_trace(target)
    assert workload.prompt_lengths.tolist() == [3 * SIZE, 3 * SIZE]
    assert workload.prompt(0)[:SIZE].tolist() == workload.prompt(1)[:SIZE].tolist()


def test_a_capture_goes_to_stdout_and_its_report_to_stderr(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with foreign([stored(None, 1, 2)]) as found:
        command = ["trace", "capture", found.endpoint, "-", "--seconds", "1"]
        assert main([*command, "--replay-endpoint", found.replay_endpoint]) == 0
    captured = capsys.readouterr()
    header, row = map(json.loads, captured.out.splitlines())
    assert (header["content"], row["blocks"]) == ("blocks", [0, 1])
    assert captured.err == "1 request, 2 distinct blocks\n"
    assert list(tmp_path.iterdir()) == []


def test_a_capture_ends_at_its_bounds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "trace.jsonl"
    for name in ("MOST_ROWS", "MOST_NODES"):
        with monkeypatch.context() as patch, foreign([stored(None, 1), stored(None, 2)]) as found:
            patch.setattr(capture, name, 2)
            assert captured_from(found, target, seconds=600.0).requests == 2
    assert len(read_trace(target, block_size=SIZE)) == 2


@pytest.mark.parametrize("with_tokens", [False, True])
def test_memory_of_a_capture_is_bounded(with_tokens: bool) -> None:
    """The bytes that docs/traces.md states for each block and each request."""
    size, chains, requests = 16, 2_000, 20_000
    tracemalloc.start()
    try:
        reader = capture.ChainReader(1.0, with_tokens=with_tokens)
        for chain in range(chains):
            hashes: list[int | bytes] = [2**63 + 10 * chain + n for n in range(10)]
            event = events.BlockStored(hashes, None, list(range(10 * size)), size)
            reader.take(events.KVEventBatch(float(chain), [event]))
        of_blocks = tracemalloc.get_traced_memory()[0]
        for n in range(requests):
            event = events.BlockStored([2**63], None, list(range(size)), size)
            reader.take(events.KVEventBatch(1e6 + 5 * n, [event]))
        of_requests = tracemalloc.get_traced_memory()[0] - of_blocks
        tracemalloc.reset_peak()
        assert sum(1 for _ in reader.finish()) == chains + requests
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    bound = 200 + with_tokens * (150 + 4 * size)
    assert of_blocks < bound * 10 * chains
    assert of_requests < 14 * requests  # an array grows by an eighth
    # At the end, each request takes 24 bytes more for the order of the rows.
    assert peak < bound * 10 * chains + (14 + 24 + 8) * (chains + requests) + 1_000_000


def test_a_capture_of_chains_that_are_left_out_writes_no_file(tmp_path: Path) -> None:
    told = "got only 1 chain too long, without tokens or behind a"
    with foreign([stored(99, 1)]) as found, pytest.raises(ValueError, match=told):
        captured_from(found, tmp_path / "trace.jsonl", with_tokens=True)
    assert list(tmp_path.iterdir()) == []


def test_a_capture_without_events_writes_no_file(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    target = tmp_path / "trace.jsonl"
    quiet = ("trace", "capture", "tcp://127.0.0.1:1", target, "--seconds", "0.1")
    assert "expected events of stored blocks, got none" in refused(capsys, *quiet)
    assert list(tmp_path.iterdir()) == []
    assert "cannot subscribe to nowhere" in refused(capsys, "trace", "capture", "nowhere", target)
    assert "'--seconds': expected at least 0" in refused(capsys, *quiet[:-1], "-1")
