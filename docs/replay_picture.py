# SPDX-License-Identifier: Apache-2.0
"""Draw docs/replay.svg: hit rate over capacity on the generated chats, for each policy."""

from __future__ import annotations

from pathlib import Path

from kvcore.apps.cli.comparison_page import comparison_picture
from kvcore.replay import PoolSettings, chat_workload, compare

# Without priorities, as here, the policy "priority" is lru.
POLICIES = ("lru", "lfu", "slru", "fifo", "cost", "arc")
PAGES = (1_000, 2_000, 5_000, 10_000, 20_000, 50_000, 100_000)

if __name__ == "__main__":
    pools = [PoolSettings(pages=pages) for pages in PAGES]
    comparison = compare(chat_workload(limit=10_000), pools, POLICIES)
    picture = comparison_picture(comparison)
    Path(__file__).with_name("replay.svg").write_text(f"{picture}\n", encoding="utf-8")
