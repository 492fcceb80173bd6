# SPDX-License-Identifier: Apache-2.0
"""Select the rows for the README, with the figures of other engines.

The figures of vLLM and SGLang were measured once, with unmodified releases, on the CPU of a machine
of the same kind (2 cores, Python 3.11). No run of these benches repeats them, so compare only their
order of magnitude.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from harness import Row, number

VLLM = "vLLM 0.33"
SGLANG = "SGLang 0.5.23"


@dataclass(frozen=True)
class Headline:
    """A row of the control path in plain words, with the figures of other engines."""

    key: str
    work: str
    vllm: str = ""
    sglang: str = ""
    stat: str = "median"


HEADLINES = (
    Headline("match.hot.8192", "find a cached prompt of 8,192 tokens", "270 + 781 hashing", "8.4"),
    Headline(
        "match.hot.131072",
        "find a cached prompt of 131,072 tokens",
        "4,533 + 13,903 hashing",
        "118",
    ),
    Headline(
        "admit.131072.fresh",
        "admit a new prompt of 131,072 tokens, pool full",
        "7,923 + hashing",
        "319 (only insert)",
    ),
    Headline(
        "evict.50000",
        "serve a request that must evict 8 pages, 50,000 cached prompts",
        "",
        "643 (only evict)",
    ),
    Headline("pin.64", "pin and unpin a prefix, 64 nodes deep", "", "8.8"),
    Headline(
        "decode.8192",
        "one decode step of 256 requests, 8k tokens each",
        "1,201 + 151 hashing",
        stat="mean",
    ),
    Headline("alloc.build", "build a pool of 1,000,000 pages", "510,000"),
    Headline(
        "memory.8192",
        "memory for bookkeeping, per cached token, without groups",
        "18 B",
        "16.6 to 20.3 B",
    ),
)


def headline_table(rows: Sequence[Row], version: str) -> str:
    """Return the measured headlines as a Markdown table."""
    by_key = {row.key: row for row in rows}
    lines = [
        f"| work, in µs | kvcore {version} | {VLLM} * | {SGLANG} * |",
        "|---|---|---|---|",
    ]
    for line in HEADLINES:
        if row := by_key.get(line.key):
            unit = "" if row.unit == "us" else f" {row.unit}"
            value = f"**{number(row.value(line.stat))}{unit}**"
            lines.append(f"| {line.work} | {value} | {line.vllm} | {line.sglang} |")
    return "\n".join(lines)
