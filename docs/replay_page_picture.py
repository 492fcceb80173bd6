# SPDX-License-Identifier: Apache-2.0
"""Draw docs/replay_page_400.png and docs/replay_page_1400.png: the top of a page of kvcore replay.

The page is drawn by a headless Chromium, on a phone and on a desk.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from kvcore.apps.cli.comparison_page import comparison_page
from kvcore.replay import PoolSettings, chat_workload, compare

HERE = Path(__file__).parent
POLICIES = ("lru", "slru", "fifo", "arc")
GIBS = (2, 4, 8, 16, 32, 64)
PAGE_BYTES = 2 << 20  # 16 tokens of Llama 3.1 8B
COMMAND = (
    "kvcore replay --limit 2000 --model llama-3.1-8b --policy lru,slru,fifo,arc "
    "--memory 2GiB,4GiB,8GiB,16GiB,32GiB,64GiB --html replay.html"
)
HEIGHTS = {400: 1210, 1400: 1020}

if __name__ == "__main__":
    sys.path.insert(0, str(HERE.parent / "tests/fakes"))
    from chromium import browser

    pools = [PoolSettings(pages=(gib << 30) // PAGE_BYTES, page_bytes=PAGE_BYTES) for gib in GIBS]
    comparison = compare(chat_workload(limit=2_000), pools, POLICIES)
    with tempfile.TemporaryDirectory() as folder, browser("chromium") as chromium:
        page = Path(folder) / "replay.html"
        page.write_text(comparison_page(comparison, COMMAND), encoding="utf-8")
        for width, height in HEIGHTS.items():
            picture = chromium.show(page, width=width).screenshot(height)
            (HERE / f"replay_page_{width}.png").write_bytes(picture)
