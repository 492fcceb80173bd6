# SPDX-License-Identifier: Apache-2.0
"""Draw docs/demo.svg, the last screen of ``kvcore demo`` on this machine."""

from __future__ import annotations

import io
import os
from pathlib import Path

from rich.console import Console

from kvcore.apps.cli.demo_table import print_demo
from kvcore.apps.demo import DemoSettings, run_demo

WIDTH = 80

if __name__ == "__main__":
    console = Console(record=True, width=WIDTH, file=io.StringIO(), force_terminal=True)
    print_demo(run_demo(DemoSettings(threads=os.cpu_count() or 1)), console)
    picture = console.export_svg(title="kvcore demo")
    Path(__file__).with_name("demo.svg").write_text(picture, encoding="utf-8")
