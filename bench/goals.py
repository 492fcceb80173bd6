# SPDX-License-Identifier: Apache-2.0
"""The goals of the rows, as data.

A goal bounds one statistic of a row. The statistic is at most ``per_limit`` times the
limit of the same run plus ``bound``, or at least ``bound`` if ``at_least`` is set. No test
checks the goals; ``run.py`` prints for each row whether its goals are met.
"""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase

from harness import Row, number


@dataclass(frozen=True)
class Goal:
    """A bound of one statistic of the rows whose key matches `key`, a shell pattern."""

    key: str
    bound: float
    stat: str = "median"
    per_limit: float = 0.0
    at_least: bool = False

    def value(self, row: Row) -> float:
        """Return the bound for this run, in the row's unit."""
        return self.bound + self.per_limit * (row.limit or 0.0)

    def is_met(self, row: Row) -> bool:
        """Return true if the row meets the goal."""
        measured = row.value(self.stat)
        return measured >= self.value(row) if self.at_least else measured <= self.value(row)

    def text(self, row: Row) -> str:
        """Return the goal as text; if it depends on the limit, with its value in this run."""
        sign = "≥" if self.at_least else "≤"
        stat = "" if self.stat == "median" else f"{self.stat} "
        if not self.per_limit:
            return f"{stat}{sign} {number(self.bound)}"
        rest = f" + {number(self.bound)}" if self.bound else ""
        name = row.limit_name or "limit"
        return f"{stat}{sign} {number(self.per_limit)} x {name}{rest} = {number(self.value(row))}"


# Several threads reach 0.85 of the disk's own rate.
_OF_DISK = 1 / 0.85

GOALS = (
    Goal("disk.put.*.4", 0.0, per_limit=_OF_DISK),
    Goal("disk.get.*.4", 0.0, per_limit=_OF_DISK),
    Goal("shared.*.*", 0.0, per_limit=1 / 0.9),
    Goal("shared.miss", 0.0, per_limit=1.0),
    Goal("tiers.nothing.*", 3.0, per_limit=1.0),
    Goal("tiers.load", 0.0, per_limit=1 / 0.8),
    Goal("tiers.decode.ratio", 1.1),
    Goal("match.hot.64", 0.25),
    Goal("match.hot.256", 0.25),
    Goal("match.hot.8192", 0.25, per_limit=1.5),
    Goal("match.hot.32768", 0.25, per_limit=1.5),
    Goal("match.hot.131072", 0.25, per_limit=1.5),
    Goal("match.2k.distinct", 0.3, per_limit=1.5),
    Goal("match.2k.hot", 0.9),
    Goal("match.tree.1000000.distinct", 1.2),
    Goal("match.tree.1000000.hot", 0.3),
    Goal("match.flat", 1.5),
    Goal("admit.64.fresh", 3.0),
    Goal("admit.2048.fresh", 4.0),
    Goal("admit.8192.fresh", 6.0),
    Goal("admit.131072.fresh", 0.0, per_limit=1.0),
    Goal("reserve.128.*.begin", 0.0, per_limit=1.0),
    Goal("explain.*.ratio", 1.03),
    Goal("pin.1", 0.15),
    Goal("pin.8", 0.15),
    Goal("pin.64", 0.15),
    Goal("pin.512", 0.15),
    Goal("pin.flat", 1.25),
    Goal("keys.*.*", 0.0, per_limit=2.0),
    Goal("events.*.added", 60.0),
    Goal("events.take", 60.0, per_limit=1.0),
    Goal("exporter.step.share", 1.0),
    Goal("exporter.scrape.share", 1.0),
    Goal("routing.match.64", 5.0),
    Goal("routing.ingest.*", 1.0),
    Goal("pin.tokens.64", 0.3, per_limit=1.0),
    Goal("pin.tokens.2048", 0.3, per_limit=1.0),
    *(
        goal
        for leaves in (1_000, 20_000, 50_000, 200_000)
        for goal in (Goal(f"evict.{leaves}", 2.0), Goal(f"evict.{leaves}", 6.0, "p99"))
    ),
    Goal("evict.flat", 1.5),
    *(
        Goal(f"policy.{name}.{leaves}", 0.0, per_limit=2.0)
        for name in ("lfu", "slru", "fifo", "priority", "cost", "arc")
        for leaves in (1_000, 10_000, 100_000)
    ),
    Goal("policy.*.flat", 2.0),
    Goal("reserve.4096.4096", 2.5),
    Goal("alloc.fresh", 1.0),
    Goal("alloc.scrambled", 3.0),
    Goal("alloc.scrambled.ring", 3.0),
    Goal("alloc.build", 1000.0),
    *(
        goal
        for context in (512, 8_192, 32_768)
        for goal in (
            Goal(f"decode.{context}", 10.0, "mean"),
            Goal(f"decode.{context}", 30.0, "p99"),
            Goal(f"decode.{context}.replace.512", 20.0, "mean"),
        )
    ),
    Goal("decode.flat", 1.25),
    *(Goal(f"memory.{n}", 0.0, per_limit=1.0) for n in (256, 1024, 8192, 32_768)),
    Goal("memory.bundles.*", 5.0),
    *(Goal(f"groups.decode.{n}", 0.0, "mean", per_limit=1 + 0.35 * (n - 1)) for n in (2, 4, 6)),
    Goal("groups.match.32768", 0.0, per_limit=1.3),
    Goal("groups.match.32768", 100.0),
    Goal("groups.*.flat", 1.5),
    Goal("groups.window.*", 0.0, per_limit=1.0),
    *(Goal(f"quotas.*.{n}", 0.0, per_limit=1.25) for n in (2, 64)),
    Goal("replay.inside", 500.0, at_least=True),
    Goal("replay.all_in", 250.0, at_least=True),
    Goal("replay.online", 200.0, at_least=True),
    Goal("import", 60.0, per_limit=1.0),
    Goal("first_manager", 10.0, per_limit=1.0),
    *(
        Goal(f"data.{verb}.{page}", 0.0, per_limit=1 / 0.9)
        for page in (1, 16, 128)
        for verb in ("append", "scatter", "gather")
    ),
    Goal("small.attention*.numpy", 15.0),
    Goal("small.append.numpy", 5.0),
    Goal("small.fetched_append.numpy", 5.0),
    Goal("small.fetched_attention.numpy", 7.8),
    Goal("small.*.torch", 0.0, per_limit=1.2),
    Goal("data.copy_pages", 0.0, per_limit=1 / 0.9),
    *(
        Goal(f"transfer.{key}", 0.0, per_limit=1 / 0.9)  # runs of 1 KiB and more
        for key in (
            "max.page_first_direct.pages.16.8x128",
            "max.page_first_direct.layer.16.8x128",
            "layer_first_nhd.page_first_direct.layer.16.8x128",
            "layer_first_nhd.page_first.pages.16.8x128",
            "layer_first_nhd.max.pages.1.8x128",
            "copy_partial.16",
            "copy_partial.1",
            "append_slots.NHD.16.8x128",
            "append_slots.NHD.1.8x128",
            "fill.16",
            "fill.1",
        )
    ),
    *(
        Goal(f"data.{verb}.*{wide}.{narrow}", 0.0, per_limit=1 / 0.8)
        for wide in ("float32", "bfloat16")
        for narrow in ("float8_e4m3fn", "float8_e5m2", "int8")
        for verb in ("quantize", "quantize_head", "dequantize", "append", "gather")
    ),
    *(
        Goal(f"attention.{work}.{dtype}.*", 0.0, per_limit=1 / 0.85)
        for dtype in ("float32", "float16", "bfloat16")
        for work in ("decode", "prefill")
    ),
    *(Goal(f"attention.{peer}.*", 0.0, per_limit=1.0) for peer in ("torch", "gather")),
    Goal("attention.prefill.torch.*", 0.0, per_limit=1.0),
    Goal("attention.threads.*", 1.8, at_least=True),
    # On a GPU: the required share of the rate of the driver's copy.
    *(
        Goal(f"gpu.{verb}.*", 0.0, per_limit=1 / share)
        for verb, share in (
            ("append", 0.75),
            ("append_slots", 0.75),
            ("gather", 0.85),
            ("scatter", 0.85),
            ("copy_pages", 0.85),
            ("zero_pages", 0.85),
            ("quantize", 0.75),
            ("dequantize", 0.75),
            ("transfer", 0.75),
        )
    ),
    Goal("gpu.graph.append.*", 6.0),
    Goal("gpu.attention.decode.*.copy", 0.0, per_limit=1 / 0.75),
    Goal("gpu.attention.*.torch", 0.0, per_limit=1.0),
    Goal("gpu.attention.*.flashinfer", 0.0, per_limit=1.1),
    *(
        Goal(f"gpu.{way}.{piece}", 0.0, per_limit=1 / share)
        for way in ("d2h", "h2d")
        for piece, share in ((2097152, 0.9), (8192, 0.6), (4096, 0.6))
    ),
    Goal("generate.padded", 0.0, per_limit=1.0),
    Goal("generate.generate_batch", 0.0, per_limit=1.0),
    Goal("generate.outside", 5.0),
    Goal("vllm.decode.*.kvcore", 0.0, per_limit=0.9),
    Goal("vllm.unseen.32768.kvcore", 0.0, per_limit=0.35),
    Goal("vllm.hit.32768.kvcore", 0.0, per_limit=0.35),
    Goal("vllm.windows.hit.kvcore", 200.0),
    Goal("offload.*.kvcore", 0.0, per_limit=1.0),
    Goal("sglang.match.kvcore", 0.0, per_limit=1.0),
    Goal("sglang.insert.kvcore", 0.0, per_limit=1.0),
    Goal("sglang.evict.kvcore", 20.0),
    Goal("sglang.lock.kvcore", 1.0),
    Goal("engine.one_process", 0.0, per_limit=0.95, at_least=True),
    Goal("vllm.decode.flat", 1.25),
    Goal("hf_groups.bytes.groups", 0.0, per_limit=0.4),
    Goal("hf_groups.all.groups", 0.0, per_limit=0.95, at_least=True),
    Goal("hf_groups.decode.groups", 0.0, per_limit=0.95, at_least=True),
)


def goals_of(row: Row) -> list[Goal]:
    """Return the goals of a row; an empty list if it has no goal."""
    return [goal for goal in GOALS if fnmatchcase(row.key, goal.key)]
