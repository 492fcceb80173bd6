# SPDX-License-Identifier: Apache-2.0
"""``kvcore replay --groups``: JSON, tables, bad values."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cli_runs import refused, told, write_windowed_config
from hf_group_configs import MIMO
from kvcore.apps.cli.main import main
from trace_files import random_rows, row, write_trace

GROUPS = ("--groups", "gemma-3-1b")


@pytest.fixture
def trace(tmp_path: Path) -> str:
    return str(write_trace(tmp_path, *random_rows(7, requests=60, depth=6, fan_out=2)))


def test_the_same_memory_is_replayed_twice(capsys: pytest.CaptureFixture[str], trace: str) -> None:
    answer = told(capsys, "replay", trace, *GROUPS, "--pages", "300,900", "--policy", "lru,lfu")
    # 26 layers: 4 full layers and 22 with a window; bundles of 2.
    assert answer["flat_page_bytes"] == 13 * answer["group_page_bytes"] == 26 * 16 * 256 * 2 * 2
    assert answer["memory"] == [pages * answer["flat_page_bytes"] for pages in (300, 900)]
    assert (answer["pages"], answer["policies"]) == ([300, 900], ["lru", "lfu"])
    names = [(each["curve"], each["policy"], each["pages"]) for each in answer["results"]]
    assert names == [
        (f"{policy} {kind}", policy, pages * times)
        for policy in ("lru", "lfu")
        for kind, times in (("flat", 1), ("groups", 13))
        for pages in (300, 900)
    ]
    assert len(answer["optimum"]) == 2
    for each in answer["results"]:
        assert each["leaked_pages"] == 0
        kinds = [(group["kind"], group["layers"], group["bundles"]) for group in each["groups"]]
        is_flat = each["curve"].endswith("flat")
        assert kinds == ([] if is_flat else [("full", 4, 2), ("window", 22, 11)])
    for flat, grouped in zip(answer["results"][:2], answer["results"][2:4], strict=True):
        assert grouped["concurrency"] > flat["concurrency"]
        assert grouped["refused"] <= flat["refused"]


def test_an_engine_serves_groups_too(capsys: pytest.CaptureFixture[str], trace: str) -> None:
    mode = ("--mode", "online", "--concurrency", "8", "--chunk", "1024")
    answer = told(capsys, "replay", trace, *GROUPS, "--pages", "250,800", *mode)
    assert (answer["mode"], answer["optimum"]) == ("online", [])
    for each in answer["results"]:
        assert each["leaked_pages"] == 0
        assert each["requests"] + each["refused"] == 60
        assert 0 < each["concurrency"] <= 8


def test_memory_names_the_pools_of_both(capsys: pytest.CaptureFixture[str], trace: str) -> None:
    answer = told(capsys, "replay", trace, *GROUPS, "--memory", "416MiB,104MiB,104.1MiB")
    assert answer["pages"] == [256, 1024]
    both = ("--memory", "104MiB,416MiB", "--bytes-per-token", str(26 * 256 * 2 * 2))
    assert told(capsys, "replay", trace, *both)["pages"] == [256, 1024]
    served = ("--memory", "104MiB,416MiB", "--model", "gemma-3-1b")
    assert told(capsys, "replay", trace, *served)["pages"] == [13 * 256, 13 * 1024]


def test_a_config_file_names_a_model(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, trace: str
) -> None:
    write_windowed_config(tmp_path)
    answer = told(capsys, "replay", trace, "--groups", str(tmp_path), "--pages", "300")
    (window,) = answer["results"][1]["groups"]
    assert (window["kind"], window["keeps"], window["bundles"]) == ("window", 512, 1)


def test_rows_of_their_own_are_counted_in_pages_of_their_own(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Two full layers of 4 heads, four with 8 heads and a window of 128 tokens; K 192, V 128."""
    (tmp_path / "config.json").write_text(json.dumps(MIMO), encoding="utf-8")
    prompts = (row([0, 1]), row([2, 3]), row([0, 1, 4]))  # 1,024 tokens, 1,024 others, and 1,536
    trace = write_trace(tmp_path, *prompts)
    options = ("--pages", "90,400", "--mode", "admission", "--chunk", "512")
    answer = told(capsys, "replay", trace, "--groups", tmp_path, *options)
    # Two layers share a page: 32 tokens of full layers, or 16 of wide layers; 1 bundle and 2
    # bundles.
    token = 2 * (2 * 4 + 4 * 8) * (192 + 128)
    assert (answer["flat_page_bytes"], answer["group_page_bytes"]) == (
        16 * token,
        16 * token * 2 // 5,
    )
    small_flat, large_flat, small, large = answer["results"]
    assert (small_flat["refused"], small_flat["cached_tokens"]) == (1, 0)  # of 96 flat pages
    assert (large_flat["refused"], large_flat["cached_tokens"]) == (0, 1024)
    for each, pages in ((small, 225), (large, 1000)):
        assert (each["pages"], each["refused"], each["cached_tokens"]) == (pages, 0, 1024)
        full, window = each["groups"]
        assert (full["layers"], full["bundles"], full["keeps"]) == (2, 1, None)
        assert (window["layers"], window["bundles"], window["keeps"]) == (4, 2, 128)
        # 1,024, 1,024 and 1,536 tokens in pages of 32; a window always has 8 pages of 16, twice.
        assert full["held_pages"] == (32 + 32 + 48) / 3
        assert window["held_pages"] == 2 * 8
        assert each["mean_used_pages"] == (48 + 48 + 64) / 3
        assert each["concurrency"] == pages / ((48 + 48 + 64) / 3)
        assert each["peak_used_pages"] == 48 + 2 * (8 + 32)  # the last prompt's last chunk
        # The first 56 of 64 pages, twice; of the third prompt 8 from the hit and 24 of its own
        # pages.
        assert (full["given_back"], window["given_back"]) == (0, 2 * (56 + 56 + 32))
        assert full["cached_pages"] == 32 + 32 + 16
        assert (full["holes"], full["filled"], window["filled"]) == (0, 0, 0)
    window_pages = 2 * (64 + 64 + 32)
    assert (large["evicted_pages"], large["groups"][1]["cached_pages"]) == (0, window_pages)
    # 225 pages: 160 of the first prompt leave 65 of the 160 that the second needs, and the third
    # needs 80 more. The pages that windows passed are evicted, 4 pages at once: all window pages of
    # 32 tokens.
    gone = 4 * (24 + 20)
    assert (small["evicted_pages"], small["groups"][1]["holes"]) == (gone, gone)
    assert small["groups"][1]["cached_pages"] == window_pages - gone


@pytest.mark.parametrize("columns", ["80", "200"])
def test_tables_tell_of_the_same_memory(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, trace: str, columns: str
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    assert main(["replay", trace, *GROUPS, "--pages", "300,900", "--policy", "lru,lfu"]) == 0
    shown = capsys.readouterr().out
    assert "token hit rate by pages of 16 tokens of all 26 layers" in shown.replace("\n", " ")
    assert "A flat page has 16 tokens of all 26 layers: 416 KiB." in shown
    for name in ("lfu groups", "flat optimum", "a request holds", "121.88", "22", "filled"):
        assert name in shown
    assert "…" not in shown


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--groups", "gemma-9"], "'--groups': expected the path of a config.json or one of"),
        (["--groups", ""], "'--groups': "),
        (["--groups", "x" * 5000], "'--groups': "),
        (["--groups", "llama-3.1-8b"], "'--groups': all 32 layers keep every token; expected a"),
        (["--groups", "qwen3-next-80b-a3b"], "'--groups': 36 of 48 layers keep a state, which h"),
        ([*GROUPS, "--model", "gemma-3-1b"], "expected --model or --groups, not both"),
        ([*GROUPS, "--policy", "lru,lfu,slru,fifo,arc"], "'--policy': expected at most 4 policies"),
        ([*GROUPS, "--pages", "9", "--memory", "1GiB"], "expected --pages, or --memory together"),
        ([*GROUPS, "--memory", "1GiB,1GiB"], "'--memory': expected each value once"),
        ([*GROUPS, "--memory", "1GiB,much"], "'--memory': expected a size such as 80GiB"),
        ([*GROUPS, "--memory", "1GiB,1"], "room for 1 to 2147483647 pages of 425984 bytes"),
        ([*GROUPS, "--page-size", "0"], "'--page-size': expected 1 to 2147483647, got 0"),
    ],
)
def test_bad_value_is_one_line_and_exit_2(
    capsys: pytest.CaptureFixture[str], arguments: list[str], told: str
) -> None:
    # The trace does not exist: the arguments are checked before any file is read.
    line = refused(capsys, "replay", "no-such-trace", *arguments)
    assert line.startswith("kvcore: error: ")
    assert told in line


def test_more_pages_than_can_be_numbered_are_told(
    capsys: pytest.CaptureFixture[str], trace: str
) -> None:
    told = refused(capsys, "replay", trace, *GROUPS, "--pages", "10,2147483647")
    assert "expected at most 2147483647 pages of the groups" in told


def test_a_pool_without_room_refuses_everything(
    capsys: pytest.CaptureFixture[str], trace: str
) -> None:
    answer = told(capsys, "replay", trace, *GROUPS, "--pages", "1", "--page-size", "1")
    for each in answer["results"]:
        assert each["refused"] > 50
        assert (each["requests"], each["leaked_pages"]) == (60 - each["refused"], 0)
