# SPDX-License-Identifier: Apache-2.0
"""Values at and beyond the limits end every command with one line, never with a traceback."""

from __future__ import annotations

import itertools
import json
import os
import threading
from pathlib import Path

import pytest

from cli_runs import refused, told
from kvcore import KVCacheParams, PagedKVCacheManager
from kvcore.apps.cli.presets import model_params
from kvcore.replay import PoolSettings
from trace_files import row, write_trace

EDGES = ["0", "-1", "2147483648", "9" * 30, "9" * 5000, "nan", "inf", "-inf", "1e308", ""]
COUNTS = {
    "replay": ["page-size", "pages", "replicas", "limit", "concurrency", "chunk", "decode-steps"],
    "demo": ["chats", "turns", "page-size", "pages", "threads", "dtype"],
    "plan": ["max-seq-len", "tp", "dp", "page-size", "dtype"],
    "generate": ["max-new-tokens", "page-size"],
}
GIVEN = {
    "replay": [],
    "demo": [],
    "plan": ["llama-3.1-8b", "--memory", "80GiB", "--max-seq-len", "32k"],
    "generate": ["no-such-folder", "w1"],
}
CONFIG = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "torch_dtype": "float16",
}


@pytest.fixture
def trace(tmp_path: Path) -> str:
    rows = [row([0, n % 3], timestamp=n * 50, output=20) for n in range(30)]
    return str(write_trace(tmp_path, *rows))


@pytest.mark.parametrize(
    ("command", "option"), [(c, option) for c, names in COUNTS.items() for option in names]
)
def test_no_edge_is_a_count(capsys: pytest.CaptureFixture[str], command: str, option: str) -> None:
    for edge in EDGES:
        refused(capsys, command, *GIVEN[command], f"--{option}={edge}")


@pytest.mark.parametrize("rate", ["--prefill-rate", "--decode-rate"])
def test_rates_may_be_as_large_as_they_like(
    capsys: pytest.CaptureFixture[str], trace: str, rate: str
) -> None:
    for edge in ("0", "-1", "nan", "-inf", ""):
        refused(capsys, "replay", trace, f"{rate}={edge}")
    for edge in ("9" * 30, "1e308", "inf"):
        assert told(capsys, "replay", trace, f"{rate}={edge}")["requests"] == 30


@pytest.mark.parametrize("mode", ["online", "admission"])
@pytest.mark.parametrize("size", [["--replicas", "100000"], ["--replicas", "2147483647"]])
def test_replicas_beyond_the_managers_bound_are_bad_input(
    capsys: pytest.CaptureFixture[str], trace: str, mode: str, size: list[str]
) -> None:
    line = refused(capsys, "replay", trace, "--mode", mode, *size)
    assert f"'--replicas': expected 1 to 32767, got {size[1]}" in line


def test_sequences_beyond_the_managers_bound_are_bad_input(
    capsys: pytest.CaptureFixture[str], trace: str
) -> None:
    line = refused(capsys, "replay", trace, "--decode-steps", "2147483647")
    assert "max_seq_len is 2147484691, must be 1 .. 2147483647" in line


def test_concurrency_costs_no_more_than_the_requests(
    capsys: pytest.CaptureFixture[str], trace: str
) -> None:
    assert told(capsys, "replay", trace, "--concurrency", "2147483647")["requests"] == 30


@pytest.mark.parametrize("mode", ["online", "admission"])
def test_pool_larger_than_memory_is_told_in_pages(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, trace: str, mode: str
) -> None:
    def no_memory(*_: object, **__: object) -> None:
        raise MemoryError

    sized = ["--mode", mode, "--pages", "2147483647", "--replicas", "7"]
    monkeypatch.setattr("kvcore.apps.replay.pool.PagedKVCacheManager", no_memory)
    line = refused(capsys, "replay", trace, *sized)
    assert "2,147,483,647 pages of 16 tokens on each of 7 replicas needs more memory" in line


def test_replay_that_runs_out_of_memory_says_what_it_replays(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, trace: str
) -> None:
    class Hungry(PagedKVCacheManager):
        def maybe_reserve(self, *_: object, **__: object) -> bool:
            raise MemoryError

    monkeypatch.setattr("kvcore.apps.replay.pool.PagedKVCacheManager", Hungry)
    line = refused(capsys, "replay", trace)
    assert "30 requests of up to 1,044 tokens in a pool of 32,768 pages of 16 tokens" in line
    assert "more memory than there is" in line


def test_demo_larger_than_memory_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    line = refused(capsys, "demo", "--chats", "1", "--pages", "2147483647")
    assert "1 chats of 3 turns in 2,147,483,647 pages of 16 tokens need more memory" in line


def test_running_out_of_memory_elsewhere_names_the_command(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_memory() -> None:
        raise MemoryError

    monkeypatch.setattr("kvcore.apps.cli.info.collect", no_memory)
    line = refused(capsys, "info", "--json", code=1)
    assert line == "kvcore: error: kvcore info --json: it would need more memory than there is\n"


def test_pools_that_no_manager_takes_are_one_kind_of_error() -> None:
    told = "the manager refuses a pool of 1 pages of 16 tokens"
    with (
        pytest.raises(ValueError, match=told),
        PoolSettings(pages=1).manager(max_batch_size=1, max_seq_len=2**31),
    ):
        raise AssertionError("it was made")


# -- configs -------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("[" * 100_000, "nested too deeply"),
        ('{"a":' * 100_000, "nested too deeply"),
        (" " * (1 << 24) + "{}", "expected at most 16777216 bytes"),
        ("\x00", "not JSON"),
        ("", "not JSON"),
        (json.dumps({**CONFIG, "num_hidden_layers": 10**400}), "num_layers is 1000"),
        (json.dumps({**CONFIG, "hidden_size": float("inf")}), "hidden_size"),
        (json.dumps({**CONFIG, "num_attention_heads": float("nan")}), "num_attention_heads"),
    ],
    ids=["arrays", "objects", "bytes", "zero", "empty", "huge", "inf", "nan"],
)
def test_configs_at_the_edges_are_bad_input(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, trace: str, text: str, told: str
) -> None:
    path = tmp_path / "config.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=told):
        KVCacheParams.from_hf_config(path)
    for command in (
        ["plan", str(path), "--memory", "1GiB", "--max-seq-len", "1k"],
        ["replay", trace, "--memory", "1GiB", "--model", str(tmp_path)],
    ):
        assert told in refused(capsys, *command)


def test_nesting_of_every_depth_is_an_answer(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    for depth, name in itertools.product(range(850, 1050, 10), ["multi_query", "hidden_size"]):
        nested = "[" * depth + "]" * depth
        path.write_text(json.dumps(CONFIG)[:-1] + f', "{name}": {nested}}}', encoding="utf-8")
        with pytest.raises(ValueError, match=r"config"):
            model_params(str(path), 16)


@pytest.mark.skipif(not Path("/dev/zero").exists(), reason="there is no /dev/zero")
def test_config_without_an_end_is_bad_input(capsys: pytest.CaptureFixture[str]) -> None:
    line = refused(capsys, "plan", "/dev/zero", "--memory", "1GiB", "--max-seq-len", "1k")
    assert "/dev/zero: not JSON: expected at most 16777216 bytes" in line


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="there are no named pipes")
def test_config_may_come_through_a_pipe(tmp_path: Path) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    writer = threading.Thread(target=lambda: path.write_text(json.dumps(CONFIG), encoding="utf-8"))
    writer.start()
    assert model_params(str(path), 16).num_layers == 2
    writer.join()


def test_path_longer_than_any_is_bad_input(capsys: pytest.CaptureFixture[str]) -> None:
    line = refused(capsys, "plan", "x" * 5000, "--memory", "1GiB", "--max-seq-len", "1k")
    assert "expected the path of a config.json or one of" in line


@pytest.mark.parametrize("size", ["0", "-1", "9" * 30, "nan", "inf", "1e308", ""])
def test_sizes_that_are_none_are_bad_input(capsys: pytest.CaptureFixture[str], size: str) -> None:
    given = ["llama-3.1-8b", "--max-seq-len", "1k"]
    assert "'--memory': expected" in refused(capsys, "plan", *given, f"--memory={size}")


@pytest.mark.parametrize("size", ["9" * 400 + ".5GiB", "9" * 5000, "." + "9" * 5000])
def test_sizes_longer_than_any_are_bad_input(capsys: pytest.CaptureFixture[str], size: str) -> None:
    line = refused(capsys, "plan", "llama-3.1-8b", "--memory", size, "--max-seq-len", "1k")
    assert "'--memory': expected at most 40 characters" in line
