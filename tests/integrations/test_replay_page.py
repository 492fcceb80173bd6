# SPDX-License-Identifier: Apache-2.0
"""The page of ``kvcore replay --html``: self-contained, correct, safe with any names."""

from __future__ import annotations

import dataclasses
import json
import os
import re
from html import escape
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import pytest

from kvcore import KVCacheParams
from kvcore.apps.cli.comparison_page import comparison_page, comparison_picture
from kvcore.apps.cli.main import main
from kvcore.groups import FullAttention, SlidingWindow
from kvcore.replay import (
    POLICIES,
    Comparison,
    EngineSettings,
    PoolSettings,
    chat_workload,
    compare,
    read_trace,
)
from trace_files import random_rows, row, write_trace

EMPTY = {"meta", "br", "input"}
LOADING = {"src", "href", "srcset", "action", "data", "poster", "xlink:href", "background"}


class Page(HTMLParser):
    """A parser that checks that opened tags are closed, and collects the parts for a test."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self.text: dict[str, str] = {}
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]
        if tag not in EMPTY:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        tag = self.open[-1] if self.open else ""
        self.text[tag] = self.text.get(tag, "") + data


@pytest.fixture
def comparison(tmp_path: Path) -> Comparison:
    rows = random_rows(7, requests=80, depth=6, fan_out=2)
    workload = read_trace(write_trace(tmp_path, *rows))
    pools = [PoolSettings(page_size=128, pages=pages) for pages in (30, 60, 400)]
    return compare(workload, pools, POLICIES)


def assert_needs_nothing_else(text: str) -> None:
    page = Page(text)
    assert {"link", "img", "iframe", "object", "embed", "base"} & set(page.tags) == set()
    assert {name for name, _ in page.attributes} & LOADING == set()
    assert not re.search(r"https?:|//[a-z]|url\(|@import|\bimport\b|fetch\(|XMLHttp", text)
    assert "default-src 'none'" in text


def data_of(text: str) -> dict[str, Any]:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.S)
    assert found
    answer: dict[str, Any] = json.loads(found[1])
    return answer


def test_page_is_whole_by_itself(comparison: Comparison) -> None:
    text = comparison_page(comparison, "kvcore replay trace.jsonl")
    assert_needs_nothing_else(text)
    page = Page(text)
    assert page.tags.count("svg") == 2 + 3 * 4  # the first chart also for a narrow screen
    assert page.text["pre"] == "kvcore replay trace.jsonl"
    assert "prefers-color-scheme:dark" in text


def test_curves_hold_what_was_measured(comparison: Comparison) -> None:
    data = data_of(comparison_page(comparison, ""))
    lines = {line["name"]: line["points"] for line in data["capacity"]["lines"]}
    assert list(lines) == [*POLICIES, "optimum"]
    for policy in POLICIES:
        rates = [run.report.token_hit_rate for run in comparison.of(policy)]
        assert [x for x, _ in lines[policy]] == [30, 60, 400]
        assert [y for _, y in lines[policy]] == pytest.approx(rates, rel=1e-4)
    best = [each.token_hit_rate for each in comparison.optima]
    assert [y for _, y in lines["optimum"]] == pytest.approx(best, rel=1e-4)
    small = {"capacity", "capacity-narrow"}
    assert set(data) == small | {f"{pool}-{i}" for pool in range(3) for i in range(4)}
    assert data["capacity"]["lines"] == data["capacity-narrow"]["lines"]
    for key, chart in data.items():
        for line in chart["lines"]:
            for x, y in line["points"]:
                assert chart["x"]["low"] <= x <= chart["x"]["high"] * 1.0001, key
                assert chart["y"]["low"] <= y <= chart["y"]["high"] * 1.0001, key


def test_decision_and_assumptions_are_on_top(comparison: Comparison) -> None:
    text = comparison_page(comparison, "")
    top = text[: text.index("Hit rate over capacity")]
    assert escape(comparison.decision.text) in top
    assert comparison.assumptions
    assert all(f"<li>{escape(line)}</li>" in top for line in comparison.assumptions)


def test_the_optimum_is_always_visible(comparison: Comparison) -> None:
    text = comparison_page(comparison, "")
    # Each curve has a button that hides it, the optimum has none; its line is drawn last.
    assert re.findall(r'data-line="(\d+)"', text) == [str(i) for i in range(len(POLICIES))]
    assert '<span class="limit"><i></i>optimum</span>' in text
    first = text[text.index("<svg") : text.index("</svg>")]
    lines = re.findall(r'<g class="curve (\w+) c\d+"><path class="line"', first)
    assert (len(lines), lines[-1]) == (len(POLICIES) + 1, "limit")
    assert Page(text).text["th"].split("optimum")[0] == "pages"


def test_one_pool_has_bars(tmp_path: Path) -> None:
    workload = chat_workload(seed=2, limit=60)
    found = compare(workload, [PoolSettings(pages=300, page_bytes=2**30)], ["lru", "arc"])
    text = comparison_page(found, "", prefill_speed=1000.0)
    assert_needs_nothing_else(text)
    bars = re.findall(r"<span>(\w+)</span><i style=\"width:([\d.]+)%\"></i><b>([\d.]+)%</b>", text)
    rates = {run.report.policy: run.report.token_hit_rate for run in found.runs}
    rates["optimum"] = found.optima[0].token_hit_rate
    assert [name for name, *_ in bars] == list(rates)
    shown = [float(rate) / 100 for *_, rate in bars]
    assert shown == pytest.approx(list(rates.values()), abs=1e-4)
    assert [float(width) for _, width, _ in bars][-1] == 100
    assert "in 300 GiB (300 pages)" in text
    assert "an estimate at 1,000 prompt tokens/s" in text


def test_memory_is_on_the_axis(comparison: Comparison) -> None:
    sized = dataclasses.replace(comparison, page_bytes=2**29)
    data = data_of(comparison_page(sized, ""))
    assert [x for x, _ in data["capacity"]["lines"][0]["points"]] == [15, 30, 200]
    assert data["capacity"]["x"]["kind"] == "gib"
    text = comparison_page(sized, "")
    assert "memory for pages of 128 tokens" in text
    assert all(f">{size} GiB</label>" in text for size in (15, 30, 200))


def test_every_number_is_in_the_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "page.html"
    swept = ("--pages", "100,400", "--host-pages", "0,300", "--policy", "lru,arc")
    more = ("--bytes-per-token", "1000", "--prefill-speed", "1000")
    arguments = ["replay", "--limit", "40", *swept, *more, "--html", str(page), "--json"]
    assert main(arguments) == 0
    told = json.loads(capsys.readouterr().out)
    text = page.read_text(encoding="utf-8")
    data = data_of(text)
    rates = [each["token_hit_rate"] for each in told["results"]]
    rates += [each["token_hit_rate"] for each in told["optimum"]]
    drawn = [y for line in data["capacity"]["lines"] for _, y in line["points"]]
    assert drawn == pytest.approx(rates, rel=1e-4)
    for i in range(2):
        for n, key in enumerate(("hit_rates", "cached_pages", "step_us_p50", "step_us_p99")):
            for k, line in enumerate(data[f"{i}-{n}"]["lines"]):
                timeline = told["timelines"][2 * k + i]
                scale = 1 if key != "cached_pages" else timeline["pages"]
                values = [y / scale for y in timeline[key] if y is not None]
                assert [y for _, y in line["points"]] == pytest.approx(values, rel=1e-4)
    for each in told["results"]:
        for name in ("evicted_pages", "peak_used_pages", "requests"):
            assert f"<td>{each[name]:,}</td>" in text
        for value in each["saved_seconds"].values():
            assert f"<td>{value:,.3f} s</td>" in text
    assert escape(told["decision"]["text"]) in text


def test_table_has_the_figures(comparison: Comparison) -> None:
    text = comparison_page(comparison, "")
    for run in comparison.runs:
        assert f"<td>{run.report.served_token_hit_rate:.2%}</td>" in text
    for each in comparison.optima:
        assert f'<td class="far">{each.token_hit_rate:.2%}</td>' in text
    assert text.count('class="best"') >= 3


def test_names_are_text_wherever_they_stand(tmp_path: Path) -> None:
    name = "</title><script>alert(1)</script>&\"'.jsonl"
    path = write_trace(tmp_path, row([0, 1]), row([0, 1]), row([2]))
    odd = tmp_path / name.replace("/", "\N{DIVISION SLASH}")
    path.rename(odd)
    page = tmp_path / "page.html"
    assert main(["replay", str(odd), "--pages", "200,400", "--html", str(page)]) == 0
    text = page.read_text(encoding="utf-8")
    assert_needs_nothing_else(text)
    assert "<script>alert" not in text
    assert odd.name in Page(text).text["h1"]
    assert odd.name in Page(text).text["title"]
    assert Page(text).tags.count("script") == 2


def test_picture_is_a_file_of_its_own(comparison: Comparison) -> None:
    picture = ET.fromstring(comparison_picture(comparison))
    assert picture.tag == "{http://www.w3.org/2000/svg}svg"
    told = "".join(picture.itertext())
    for name in (*POLICIES, "optimum", "token hit rate", "pages of 128 tokens", "400"):
        assert name in told


@pytest.mark.parametrize("mode", ["online", "admission"])
@pytest.mark.parametrize("more", [[], ["--pages", "1000,9000"], ["--replicas", "2"]])
def test_any_replay_may_have_a_page(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], mode: str, more: list[str]
) -> None:
    page = tmp_path / "page.html"
    arguments = ["replay", "--limit", "60", "--mode", mode, *more, "--html", str(page), "--json"]
    assert main(arguments) == 0
    shown = json.loads(capsys.readouterr().out)
    assert ("results" in shown) == (more[:1] == ["--pages"])
    assert {"decision", "timelines", "optimum", "most_cached_tokens"} <= shown.keys()
    text = page.read_text(encoding="utf-8")
    assert_needs_nothing_else(text)
    assert Page(text).text["pre"].startswith("kvcore replay --limit 60 --mode")
    assert ("optimum" in Page(text).text["th"]) == (mode == "admission")


def test_command_is_quoted_as_a_shell_needs_it(tmp_path: Path) -> None:
    page = tmp_path / "a page.html"
    assert main(["replay", "--limit", "3", "--html", str(page)]) == 0
    assert f"--html '{page}'" in Page(page.read_text(encoding="utf-8")).text["pre"]


def test_a_page_has_no_control_characters_of_names(tmp_path: Path) -> None:
    trace, page = tmp_path / "\x1b[2J\u202e\udcff.jsonl", tmp_path / "page.html"
    write_trace(tmp_path, row([0])).rename(trace)
    assert main(["replay", str(trace), "--pages", "9", "--html", str(page)]) == 0
    text = page.read_text(encoding="utf-8")
    assert {each for each in text if not each.isprintable()} == {"\n"}
    assert "\\x1b[2J\\u202e\\udcff.jsonl" in Page(text).text["pre"]


def test_without_hits_there_are_curves_all_the_same(tmp_path: Path) -> None:
    workload = read_trace(write_trace(tmp_path, row([0], length=3)))
    text = comparison_page(compare(workload, [PoolSettings(pages=1)], ["lru"]), "")
    assert_needs_nothing_else(text)
    assert [line["points"] for line in data_of(text)["capacity"]["lines"]] == [[[1, 0]], [[1, 0]]]


def test_a_place_that_cannot_be_written_is_told_before_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    for place, reason in (
        (tmp_path, "Is a directory"),
        (tmp_path / "none" / "page.html", "No such file or directory"),
        (tmp_path / "file" / "page.html", "Not a directory"),
    ):
        assert main(["replay", "no-such-trace", "--html", str(place)]) == 2
        shown = capsys.readouterr()
        assert shown.err.count("\n") == 1
        assert f"'--html': {place} cannot be written: {reason}" in shown.err


def test_the_trace_is_not_replaced(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = write_trace(tmp_path, row([0]))
    before = trace.read_bytes()
    (tmp_path / "link").symlink_to(trace)
    for place in (trace, tmp_path / "link"):
        assert main(["replay", str(trace), "--html", str(place)]) == 2
        assert f"{place} cannot be written: it is the input file" in capsys.readouterr().err
    assert trace.read_bytes() == before


def test_a_name_that_is_no_text_is_shown_all_the_same(tmp_path: Path) -> None:
    path = os.fsencode(write_trace(tmp_path, row([0]))).replace(b"trace", b"tr\xffce")
    os.rename(tmp_path / "trace.jsonl", path)  # noqa: PTH104 - bytes
    page = tmp_path / "page.html"
    assert main(["replay", os.fsdecode(path), "--html", str(page)]) == 0
    assert "tr\\udcffce.jsonl" in Page(page.read_text(encoding="utf-8")).text["h1"]


def test_a_run_that_fails_leaves_what_was_there(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    assert main(["replay", "no-such-trace", "--html", str(page)]) == 2
    assert not page.exists()
    page.write_text("before")
    assert main(["replay", "no-such-trace", "--html", str(page)]) == 2
    assert page.read_text() == "before"


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full here")  # noqa: PTH110
def test_a_full_disk_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", "--limit", "3", "--html", "/dev/full"]) == 1
    assert "No space left" in capsys.readouterr().err


def test_chat_draws_curves_over_simulated_time() -> None:
    workload = chat_workload(seed=2, limit=80)
    online = compare(workload, [PoolSettings(pages=2_000)], ["lru"], engine=EngineSettings())
    text = comparison_page(online, "")
    assert "simulated seconds" in text
    assert "Time in the manager per step, p99" in text


def test_a_page_with_groups_has_two_curves_for_each_policy() -> None:
    model = KVCacheParams(
        "float16",
        *(1, 1, 3),
        page_size=128,
        groups=[FullAttention([0]), SlidingWindow([1, 2], 600)],
    )
    workload = chat_workload(seed=2, limit=40)
    pools = [PoolSettings(page_size=128, pages=pages) for pages in (200, 900)]
    for engine in (None, EngineSettings()):
        found = compare(workload, pools, ["lru", "lfu"], engine=engine, model=model, chunk=512)
        text = comparison_page(found, "")
        assert_needs_nothing_else(text)
        data = data_of(text)
        names = ["lru flat", "lru groups", "lfu flat", "lfu groups"]
        more = ["flat optimum"] * (engine is None)
        assert [line["name"] for line in data["capacity"]["lines"]] == names + more
        lines = {line["name"]: line["points"] for line in data["concurrency"]["lines"]}
        assert list(lines) == names
        for name in names:
            rates = [run.report.concurrency for run in found.of(name)]
            assert [y for _, y in lines[name]] == pytest.approx(rates, rel=1e-4)
        assert "has 128 tokens of all 3 layers" in text
        assert '<td class="left">2 window 600</td>' in text
