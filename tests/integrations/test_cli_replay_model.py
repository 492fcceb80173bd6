# SPDX-License-Identifier: Apache-2.0
"""``kvcore replay --model`` with windows and states: JSON, tables, the page, bad values."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from cli_runs import refused, shown, told, write_windowed_config
from trace_files import random_rows, write_trace

GIB = 1 << 30
GEMMA = ("--model", "gemma-3-27b")
QWEN = ("--model", "qwen3-next-80b-a3b")
SLOT = 36 * (8192 * 4 * 2 + 32 * 128 * 128 * 4)  # bytes of the states of 36 layers
PAGED = ("--page-size", "512")


@pytest.fixture
def trace(tmp_path: Path) -> str:
    return str(write_trace(tmp_path, *random_rows(7, requests=80, depth=6, fan_out=2)))


def test_a_plan_and_a_replay_have_the_same_pages(
    capsys: pytest.CaptureFixture[str], trace: str
) -> None:
    options = ("--memory", "24GiB", "--page-size", "32")
    plan = told(capsys, "plan", GEMMA[1], *options, "--max-seq-len", "8k")
    answer = told(capsys, "replay", trace, *GEMMA, *options, "--mode", "admission")
    assert answer["pages"] == plan["pages"]
    assert answer["page_bytes"] == plan["bytes_per_page"]
    assert answer["states"] is None
    kinds = [(g["kind"], g["keeps"], g["layers"], g["bundles"]) for g in answer["groups"]]
    assert kinds == [(g["kind"], g["keeps"], g["layers"], g["bundles"]) for g in plan["groups"]]


def test_a_plan_with_states_and_a_replay_have_the_same_pages(
    capsys: pytest.CaptureFixture[str], trace: str
) -> None:
    options = ("--memory", "24GiB", "--page-size", "32")
    plan = told(capsys, "plan", QWEN[1], *options, "--max-seq-len", "16k")
    slots = ("--state-slots", str(2 * plan["batch"]), "--mode", "admission")
    answer = told(capsys, "replay", trace, *QWEN, *options, *slots)
    assert answer["pages"] == plan["pages"]
    assert answer["states"]["slot_bytes"] == plan["bytes_per_state_slot"] == SLOT


def test_json_has_slots_and_checkpoints(capsys: pytest.CaptureFixture[str], trace: str) -> None:
    sizes = ("--memory", "12GiB,48GiB", "--policy", "lru,lfu")
    answer = told(capsys, "replay", trace, *QWEN, *PAGED, *sizes)
    assert answer["state_slot_bytes"] == SLOT
    assert answer["group_page_bytes"] == 12 * 512 * 2 * 2 * 256 * 2
    assert "flat_page_bytes" not in answer
    assert answer["optimum_name"] == "bound"
    for memory, most in zip(answer["memory"], (12 * GIB, 48 * GIB), strict=True):
        assert most - answer["group_page_bytes"] < memory <= most
    pools = zip(answer["pages"], answer["state_slots"], strict=True)
    rooms = [pages * answer["group_page_bytes"] + slots * SLOT for pages, slots in pools]
    assert rooms == answer["memory"]
    results = answer["results"]
    assert [each["policy"] for each in results] == ["lru", "lru", "lfu", "lfu"]
    for each, memory, best in zip(
        results, answer["memory"] * 2, answer["optimum"] * 2, strict=True
    ):
        assert each["memory_gib"] == memory / GIB
        assert each["states"]["slots"] in answer["state_slots"]
        assert each["states"]["layers"] == 36
        assert each["states"]["checkpoint_hits"] > 0
        assert (each["leaked_pages"], each["states"]["leaked_slots"]) == (0, 0)
        assert each["token_hit_rate"] <= best["token_hit_rate"]
    assert answer["decision"]["memory_gib"] in [each / GIB for each in answer["memory"]]
    assert any("a hit ends at a checkpoint" in line for line in answer["assumptions"])


def test_slots_and_checkpoints_are_options(capsys: pytest.CaptureFixture[str], trace: str) -> None:
    sizes = ("--memory", "48GiB", "--mode", "admission", "--page-size", "128")
    few = told(capsys, "replay", trace, *QWEN, *sizes, "--state-slots", "2")
    many = told(capsys, "replay", trace, *QWEN, *sizes, "--state-slots", "400")
    often = ("--state-slots", "400", "--checkpoint-every", "512")
    every = told(capsys, "replay", trace, *QWEN, *sizes, *often)
    assert [each["states"]["slots"] for each in (few, many, every)] == [2, 400, 400]
    assert [each["states"]["every"] for each in (few, many, every)] == [None, None, 512]
    assert few["pages"] - many["pages"] == pytest.approx(398 * SLOT / few["page_bytes"], abs=1)
    assert few["cached_tokens"] < many["cached_tokens"] < every["cached_tokens"]
    assert many["states"]["checkpoints_made"] < every["states"]["checkpoints_made"]
    assert any("and every 512 tokens" in line for line in every["assumptions"])


def test_slots_may_be_a_share_of_the_memory(capsys: pytest.CaptureFixture[str], trace: str) -> None:
    sizes = ("--memory", "12GiB,48GiB", "--state-slots", "25%")
    answer = told(capsys, "replay", trace, *QWEN, *PAGED, *sizes)
    assert answer["state_slots"] == [3 * GIB // SLOT, 12 * GIB // SLOT]
    by_pages = ("--pages", ",".join(map(str, answer["pages"])), "--state-slots", "25%")
    found = told(capsys, "replay", trace, *QWEN, *PAGED, *by_pages)
    for one, other in zip(answer["state_slots"], found["state_slots"], strict=True):
        assert abs(one - other) <= 1


def test_online_runs_two_slots_for_each_request(
    capsys: pytest.CaptureFixture[str], trace: str
) -> None:
    sizes = ("--pages", "400", "--mode", "online", "--concurrency", "50", "--state-slots", "6")
    answer = told(capsys, "replay", trace, *QWEN, *PAGED, *sizes)
    assert answer["requests"] == 80
    assert 0 < answer["concurrency"] <= 3
    assert answer["states"]["leaked_slots"] == 0


def test_blocks_larger_than_pages_are_an_assumption(
    capsys: pytest.CaptureFixture[str], trace: str
) -> None:
    small = told(capsys, "replay", trace, *QWEN, "--pages", "4000", "--mode", "admission")
    assert "--page-size 512 keeps checkpoints at the ends" in small["assumptions"][-1]
    large = told(capsys, "replay", trace, *QWEN, *PAGED, "--pages", "400", "--mode", "admission")
    assert not any("--page-size" in line for line in large["assumptions"])
    window = told(capsys, "replay", trace, *GEMMA, "--pages", "4000", "--mode", "admission")
    assert "--page-size 512 keeps windows at the ends" in window["assumptions"][-1]


@pytest.mark.parametrize("columns", ["80", "200"])
def test_tables_name_groups_and_slots(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, trace: str, columns: str
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    out = shown(capsys, "replay", trace, *QWEN, *PAGED, "--memory", "12GiB,48GiB")
    whole = " ".join(out.split())
    assert "token hit rate by pages of 512 tokens of up to 12 layers" in whole
    assert "A page has 512 tokens of up to 12 layers: 12 MiB." in whole
    for name in ("12 full", "state slots and checkpoints", "evicted", "bound", "at a time"):
        assert name in out
    assert "optimum" not in out
    assert "without and with groups" not in out
    assert "…" not in out
    one = shown(capsys, "replay", trace, *QWEN, *PAGED, "--memory", "12GiB", "--explain")
    assert re.search(r"36 state +│ +[\d,]+ slots │ of 74.25 MiB", one)
    assert re.search(r"hits of checkpoints +│ +\d+ │ \d+ made, \d+ evicted", one)
    assert re.search(r"missed: without a checkpoint +│ +[\d.]+%", one)
    few = ("--pages", "3000", "--mode", "admission", "--explain", "--chunk", "512")
    windows = shown(capsys, "replay", trace, *GEMMA, *few)
    assert "52 window 1,024" in windows
    assert re.search(r"missed: behind a window +│ +[\d.]+%", windows)


def test_the_page_names_groups_and_the_bound(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, trace: str
) -> None:
    page = tmp_path / "page.html"
    sizes = ("--memory", "12GiB,48GiB", "--explain")
    out = shown(capsys, "replay", trace, *QWEN, *PAGED, *sizes, "--html", page)
    answer = told(capsys, "replay", trace, *QWEN, *PAGED, *sizes)
    misses = answer["results"][0]["misses"]
    share = f"{misses['unreachable'] / misses['prompt_tokens']:.2%}"
    assert misses["unreachable"] > 0
    assert "prompt tokens that were not cached, by reason" in out
    assert "without" in out  # "without a checkpoint", maybe on two lines
    assert share in out
    text = page.read_text(encoding="utf-8")
    for part in (
        "It is a bound: windows and checkpoints only shorten hits",
        "State slots and checkpoints",
        "Bytes of each group",
        "12 full",
        "memory for pages of 512 tokens and state slots",
        "Requests at a time over capacity",
        "Prompt tokens that were not cached, by reason",
        ">without a checkpoint<",
        f"<td>{share}</td>",
        ">bound<",
    ):
        assert part in text
    assert "flat cache" not in text


def test_a_config_file_names_a_model(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, trace: str
) -> None:
    write_windowed_config(tmp_path)
    answer = told(capsys, "replay", trace, "--model", tmp_path, "--pages", "300,900")
    (window,) = answer["results"][0]["groups"]
    assert (window["kind"], window["keeps"]) == ("window", 512)
    # No layer keeps every token, so only hits without any eviction bound the model.
    assert len({each["cached_tokens"] for each in answer["optimum"]}) == 1


@pytest.mark.parametrize(
    ("config", "told"),
    [
        ({"model_type": "mamba2", "num_hidden_layers": 4, "state_size": 8}, "has no K and V"),
        ({"num_hidden_layers": 4, "layer_types": ["strange"] * 4}, "config.json: "),
        ({"num_hidden_layers": 4, "kv_share_every": 2}, "config.json: "),
        ([], "config.json: "),
    ],
)
def test_a_config_without_a_cache_is_one_line_and_exit_2(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, config: object, told: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    line = refused(capsys, "replay", "no-such-trace", "--model", tmp_path, "--pages", "9")
    assert "'--model': " in line
    assert told in line


def test_host_tiers_are_compared(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, trace: str
) -> None:
    page = tmp_path / "page.html"
    sizes = ("--memory", "4GiB,12GiB", "--host-memory", "0,8GiB,24GiB", "--state-slots", "25%")
    answer = told(capsys, "replay", trace, *QWEN, *PAGED, *sizes)
    slots = [0, 2 * GIB // SLOT, 6 * GIB // SLOT]
    assert [each["host_state_slots"] for each in answer["tiers"]] == slots
    assert answer["optimum_name"] == "device bound"
    assert len(answer["results"]) == 6
    for each in answer["results"][2:]:
        tiers = each["tiers"]
        memory = tiers["host_pages"] * each["page_bytes"] + tiers["host_state_slots"] * SLOT
        assert tiers["host_gib"] == memory / GIB
        assert tiers["device_tokens"] + tiers["host_tokens"] == each["cached_tokens"]
    assert answer["results"][-2]["states"]["loaded_checkpoints"] > 0
    assert answer["results"][-2]["cached_tokens"] > answer["results"][0]["cached_tokens"]
    tier = answer["decision"]["tier"]
    assert tier is None or tier["host_state_slots"] > 0
    out = shown(capsys, "replay", trace, *QWEN, *PAGED, *sizes, "--html", page)
    assert "where prompt tokens were found" in out
    assert "device bound" in out
    text = page.read_text(encoding="utf-8")
    assert "The optimum is only for the device: tiers find more." in text
    one = ("--memory", "4GiB", "--host-pages", "500", "--mode", "admission")
    alone = shown(capsys, "replay", trace, *QWEN, *PAGED, *one)
    whole = " ".join(alone.split())
    assert re.search(r"with 500 pages and \d+ state slots \([\d.]+ GiB\) of a host tier", whole)
    assert "found in the host tier" in alone
    by_list = ("--memory", "4GiB", "--host-pages", "0,500")
    found = told(capsys, "replay", trace, *QWEN, *PAGED, *by_list)
    assert [each["host_pages"] for each in found["tiers"]] == [0, 500]


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (
            [*QWEN, "--memory", "9GiB", "--host-memory", "4GiB", "--disk", "1TiB"],
            "expected no disk with a model whose layers keep windows, chunks or states",
        ),
        ([*GEMMA, "--pages", "99", "--disk-pages", "9"], "expected --host-pages with --disk-pages"),
        (
            [*QWEN, "--memory", "9GiB", "--host-memory", "1MiB"],
            "'--host-memory': 1 MiB for a host tier on each of 1 replicas have room for 0 pages",
        ),
        ([*GEMMA, "--pages", "99", "--host-pages", "0"], "'--host-pages': expected 1 to"),
        (
            [*GEMMA, "--pages", "99", "--host-pages", "9", "--host-memory", "1GiB"],
            "expected --host-pages or --host-memory, not both",
        ),
        ([*GEMMA, "--pages", "99", "--route", "prefix"], "'--route': a router counts whole pages"),
        ([*QWEN, "--memory", "1MiB"], "'--memory': 1 MiB on each of 1 replicas have room for 0"),
        (
            [*QWEN, "--memory", "1GiB", "--state-slots", "99"],
            "and 99 state slots of 7.18 GiB; expected 1 to 2147483647 pages: more memory, or fewer",
        ),
        ([*QWEN, "--memory", "9GiB", "--state-slots", "0"], "'--state-slots': expected 1 to"),
        ([*QWEN, "--memory", "9GiB", "--state-slots", "all"], "'--state-slots': expected 1 to"),
        ([*QWEN, "--memory", "9GiB", "--state-slots", "100%"], "'--state-slots': expected more"),
        ([*QWEN, "--memory", "9GiB", "--state-slots", "nan%"], "'--state-slots': expected more"),
        ([*GEMMA, "--memory", "9GiB", "--state-slots", "9"], "'--state-slots': expected a model"),
        (["--pages", "9", "--state-slots", "9"], "'--state-slots': expected --model with a model"),
        (
            [*GEMMA, "--pages", "9", "--checkpoint-every", "64"],
            "'--checkpoint-every': no layer of the model keeps a state",
        ),
        (
            [*QWEN, "--pages", "9", "--checkpoint-every", "100"],
            "'--checkpoint-every': checkpoints every 100 tokens do not end pages; expected a mult",
        ),
        (
            ["--bytes-per-token", "9", "--pages", "9", "--checkpoint-every", "64"],
            "'--checkpoint-every': expected --model with a model",
        ),
        ([*QWEN], "expected --pages, or --memory together with --model"),
    ],
)
def test_bad_value_is_one_line_and_exit_2(
    capsys: pytest.CaptureFixture[str], arguments: list[str], told: str
) -> None:
    # The trace does not exist: the arguments are checked before any file is read.
    assert told in refused(capsys, "replay", "no-such-trace", *arguments)
