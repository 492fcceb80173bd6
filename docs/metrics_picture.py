# SPDX-License-Identifier: Apache-2.0
"""Draw docs/metrics.svg: the panels of docs/grafana.json while generated chats are served.

Chats of two tenants run on a pool that is too small for them, over a host tier and a disk. The
exporter is scraped every few steps, and the panels' expressions are evaluated over the scrapes.
Rates are per step.
"""

from __future__ import annotations

import json
import math
import re
import tempfile
import urllib.request
from collections.abc import Iterator
from html import escape
from pathlib import Path
from typing import Any

from metrics_panels import Scrape, evaluate
from prometheus_client.parser import text_string_to_metric_families

from kvcore import KVCacheParams, PagedKVCacheManager, TextGenerationContext
from kvcore.apps.cli.page_style import CHART_STYLE, SLOTS
from kvcore.apps.cli.svg_chart import Chart, Line, linear_axis
from kvcore.metrics import Exporter, export
from kvcore.replay import ChatSettings, chat_workload
from kvcore.scheduler import Request, Scheduler

HERE = Path(__file__).parent
STEPS, EVERY, WINDOW = 1500, 25, 4  # steps; between two scrapes; scrapes behind a rate
WIDTH, HEIGHT, HEAD, GAP = 480, 230, 30, 40  # of a panel; for long names between two
CHATS = ChatSettings(
    conversations=400,
    conversations_per_second=2.0,
    system_prompts=6,
    system_tokens=(100, 400),
    max_turns=6,
    median_message=40.0,
    median_output=30.0,
    max_message=400,
    max_output=100,
    mean_pause=10.0,
)
STEPS_PER_SECOND = 22.0
TENANTS = {"chat": (40, 200), "batch": (0, 180)}


def manager(folder: str) -> PagedKVCacheManager:
    """Make a manager with quotas, a host tier and a disk."""
    params = KVCacheParams("float32", 1, 8, 1, page_size=16, enable_prefix_caching=True)
    return PagedKVCacheManager(
        params,
        max_batch_size=12,
        max_seq_len=4096,
        num_pages=240,
        tiers=["host:400KiB", f"disk:{folder}:16MiB"],
        quotas=TENANTS,
    )


def scrape(exporter: Exporter) -> Scrape:
    """Ask the exporter, as Prometheus does."""
    with urllib.request.urlopen(f"http://{exporter.host}:{exporter.port}/metrics") as answer:
        families = list(text_string_to_metric_families(answer.read().decode()))
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in families
        for sample in family.samples
    }


def serve() -> Iterator[Scrape]:
    """Serve the chats, and yield a scrape every few steps."""
    chats = chat_workload(settings=CHATS)
    names = list(TENANTS)
    came = 0
    with tempfile.TemporaryDirectory() as folder, manager(folder) as mgr:
        scheduler = Scheduler(mgr, max_batch_tokens=512)
        with export(mgr, port=0, scheduler=scheduler) as exporter:
            for step in range(STEPS + 1):
                while chats.arrivals[came] * STEPS_PER_SECOND <= step:
                    prompt = chats.prompt(came).copy()
                    tenant = names[came % 3 % 2]
                    context = TextGenerationContext(came, prompt, tenant=tenant)
                    scheduler.add(Request(context, int(chats.output_lengths[came])))
                    came += 1
                if batch := scheduler.next_batch():
                    scheduler.update(batch, [_next_token(chats, each) for each in batch.requests])
                if step % EVERY == 0:
                    yield scrape(exporter)


def _next_token(chats: Any, request: Request) -> int:
    index = request.context.request_id
    done = len(request.context.tokens) - int(chats.prompt_lengths[index])
    return int(chats.output(index)[done])


def lines_of(panel: dict[str, Any], scrapes: list[Scrape]) -> list[Line]:
    """Evaluate the expressions of a panel at every scrape that has enough before it."""
    found: dict[str, dict[int, float]] = {}
    for at in range(WINDOW, len(scrapes)):
        part = scrapes[at - WINDOW : at + 1]
        for target in panel["targets"]:
            for labels, value in evaluate(target["expr"], part, EVERY).items():
                name = target["legendFormat"]
                for label, text in labels:
                    name = name.replace("{{" + label + "}}", text)
                found.setdefault(name, {})[at * EVERY] = value
    shown = [(name, points) for name, points in found.items() if any(points.values())]
    return [
        Line(name, f"s{i % SLOTS}", [*points], [*points.values()])
        for i, (name, points) in enumerate(shown)
    ]


def panel_picture(panel: dict[str, Any], lines: list[Line], place: int) -> str:
    """Draw a panel at its place, two in a row."""
    values = [y for line in lines for y in line.ys if not math.isnan(y)]
    x = linear_axis("steps", 0.0, STEPS, "{:,.0f}".format)
    unit = panel["fieldConfig"]["defaults"]["unit"]
    y = linear_axis(_UNITS[unit], 0.0, max(values, default=1.0), "{:,.3g}".format)
    chart = Chart(f"p{place}", panel["title"], tuple(lines), x, y, WIDTH, HEIGHT, is_labelled=True)
    drawn = re.sub(r'<path class="mark"[^>]*/>', "", chart.svg())  # too many to tell apart
    left, top = place % 2 * (WIDTH + GAP), place // 2 * (HEIGHT + HEAD)
    title = f'<text class="name" x="{left + 62}" y="{top + 20}">{escape(panel["title"])}</text>'
    where = f'x="{left}" y="{top + HEAD}" width="{WIDTH}" height="{HEIGHT}" overflow="visible"'
    return title + drawn.replace('class="chart"', where, 1)


_UNITS = {"short": "", "percentunit": "share", "s": "seconds", "Bps": "bytes"}


def picture(scrapes: list[Scrape]) -> str:
    """Draw the panels that have lines; heat maps are left out."""
    panels = json.loads((HERE / "grafana.json").read_text(encoding="utf-8"))["panels"]
    drawn: list[str] = []
    for panel in panels:
        if panel["type"] == "timeseries" and (lines := lines_of(panel, scrapes)):
            drawn.append(panel_picture(panel, lines, len(drawn)))
    height = math.ceil(len(drawn) / 2) * (HEIGHT + HEAD)
    return (
        f'<svg class="chart" xmlns="http://www.w3.org/2000/svg" role="img" '
        f'viewBox="0 0 {2 * (WIDTH + GAP)} {height}"><style>{CHART_STYLE}</style>'
        f"<title>Panels of the dashboard</title>{''.join(drawn)}</svg>"
    )


if __name__ == "__main__":
    (HERE / "metrics.svg").write_text(f"{picture([*serve()])}\n", encoding="utf-8")
