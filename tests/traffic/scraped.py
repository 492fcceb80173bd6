# SPDX-License-Identifier: Apache-2.0
"""Metrics of an exporter, read with Prometheus' own parser."""

from __future__ import annotations

import urllib.request

from conftest import require
from kvcore.metrics import Exporter

require("prometheus_client")
parser = require("prometheus_client.parser")

Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def scrape(exporter: Exporter) -> Samples:
    """Return every sample by its name and labels, without the manager label."""
    with urllib.request.urlopen(f"http://{exporter.host}:{exporter.port}/metrics") as answer:
        text = answer.read().decode()
    found: Samples = {}
    for family in parser.text_string_to_metric_families(text):
        assert family.documentation.endswith(".")
        assert family.type in ("counter", "gauge", "histogram")
        for sample in family.samples:
            labels = dict(sample.labels)
            assert labels.pop("manager") == "kvcore"
            found[sample.name, tuple(sorted(labels.items()))] = sample.value
    return found


def of(samples: Samples, name: str, **labels: str) -> float:
    return samples[f"kvcore_{name}", tuple(sorted(labels.items()))]
