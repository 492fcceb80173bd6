# SPDX-License-Identifier: Apache-2.0
"""The page of ``kvcore replay --html`` in a real browser, on a phone and on a desk."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from chromium import Browser, browser
from conftest import require_program
from kvcore.apps.cli.main import main
from trace_files import random_rows, write_trace

PAGES = {
    "sizes": ("--memory", "30GiB,60GiB,400GiB", "--policy", "lru,lfu,slru,fifo,priority,cost,arc"),
    "tiers": (
        *("--memory", "30GiB,60GiB", "--host-memory", "0,40GiB,90GiB", "--disk", "0,400GiB"),
        *("--policy", "lru,arc", "--prefill-speed", "1000"),
    ),
    "one": ("--pages", "40"),
    "online": ("--pages", "200,400", "--mode", "online"),
}
SHAPE = ("--page-size", "128", "--bytes-per-token", str(2**30 // 128))
CHATS = {
    "groups": ("--limit", "40", "--groups", "gemma-3-1b", "--memory", "256MiB,1GiB"),
    "states": ("--limit", "40", "--model", "qwen3-next-80b-a3b", "--memory", "4GiB,12GiB"),
}
NAME = "a trace with a long name and <b>marks</b> & more " + "x" * 120 + ".jsonl"


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    with browser(require_program("chromium")) as found:
        yield found


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The page of each kind of comparison."""
    folder = tmp_path_factory.mktemp("pages")
    trace = write_trace(folder, *random_rows(7, requests=80, depth=6, fan_out=2))
    trace = trace.rename(folder / NAME.replace("/", "\N{DIVISION SLASH}"))
    found = {}
    arguments = {name: (str(trace), *SHAPE, *more) for name, more in PAGES.items()}
    for name, given in (arguments | CHATS).items():
        found[name] = folder / f"{name}.html"
        assert main(["replay", *given, "--html", str(found[name])]) == 0
    return found


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [400, 1400])
@pytest.mark.parametrize("name", [*PAGES, *CHATS])
def test_page_fits_and_has_no_error(
    chromium: Browser, pages: dict[str, Path], tmp_path: Path, name: str, width: int, scheme: str
) -> None:
    shown = chromium.show(pages[name], width=width, scheme=scheme)
    assert shown.value("document.scrollingElement.scrollWidth") <= width
    # Every drawn chart is inside the screen, and every text of it is inside the chart.
    charts = "[...document.querySelectorAll('svg.chart')].filter(s => s.getClientRects().length)"
    assert shown.value(f"{charts}.length") > 0
    outside = shown.value(
        f"{charts}.flatMap(s => {{ const box = s.getBoundingClientRect();"
        "return box.left < 0 || box.right > innerWidth ? ['chart ' + s.dataset.key] :"
        "[...s.querySelectorAll('text')].filter(t => {const b = t.getBoundingClientRect();"
        "return b.left < box.left - 1 || b.right > box.right + 1 || b.bottom > box.bottom + 1})"
        ".map(t => t.textContent); })"
    )
    assert outside == []
    smallest = shown.value(
        f"Math.min(...{charts}.map(s => 12 * s.getBoundingClientRect().width"
        " / s.viewBox.baseVal.width))"
    )
    assert smallest >= 9  # pixels of a label
    background = shown.value("getComputedStyle(document.body).backgroundColor")
    assert background == ("rgb(255, 255, 255)" if scheme == "light" else "rgb(16, 22, 28)")
    picture = shown.screenshot()
    (tmp_path / f"{name}-{width}-{scheme}.png").write_bytes(picture)
    assert picture.startswith(b"\x89PNG")
    assert shown.errors == []


def test_curves_can_be_hidden_and_read(chromium: Browser, pages: dict[str, Path]) -> None:
    shown = chromium.show(pages["sizes"], width=1400)
    count = "[...document.querySelectorAll('.wide g.curve')].filter(g => g.getClientRects().length)"
    before = shown.value(f"{count}.length")
    shown.value("document.querySelector('.legend button').click()")
    assert shown.value(f"{count}.length") == before - 2  # the curve and its name
    shown.value(
        "{const s = document.querySelector('.wide svg'), b = s.getBoundingClientRect();"
        "s.dispatchEvent(new PointerEvent('pointermove',"
        "{clientX: b.left + b.width / 3, clientY: b.top + 50}))}"
    )
    tip = shown.value("document.querySelector('.wide .tip').innerText")
    assert "GiB" in tip.splitlines()[0]
    assert "optimum" in tip
    assert "lru" not in tip.replace("slru", "")
    assert shown.errors == []


def test_errors_are_seen(chromium: Browser, tmp_path: Path) -> None:
    page = tmp_path / "broken.html"
    page.write_text("<script>console.error('one'); nothing();</script>")
    shown = chromium.show(page, width=400)
    assert len(shown.errors) == 2
    assert any("nothing is not defined" in error for error in shown.errors)
