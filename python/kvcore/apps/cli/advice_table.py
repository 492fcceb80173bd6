# SPDX-License-Identifier: Apache-2.0
"""Print the advice of a replay with the exact hit rates."""

from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvcore.apps.replay.advised import AdviceCheck
from kvcore.support.byte_sizes import format_size


def print_advice(check: AdviceCheck) -> None:
    """Print a row for each size of LRU, and a row for the optimum."""
    advice = check.advice
    title = (
        f"advice from one page in {advice.sample:,} ({advice.sampled_uses:,} uses), beside exact "
        "token hit rates"
    )
    table = Table(title=Text(title), title_justify="left")
    table.add_column("policy")
    has_bytes = check.report.page_bytes > 0
    heads = ("pages", *(["memory"] if has_bytes else []), "advice", "exact", "error, points")
    for head in heads:
        table.add_column(head, justify="right", no_wrap=True)
    for rate in check.rates:
        memory = [format_size(rate.pages * rate.page_bytes)] if has_bytes else []
        table.add_row(
            rate.policy,
            f"{rate.pages:,} ({rate.factor:g}x)",
            *memory,
            f"{rate.estimate:.2%}",
            f"{rate.exact:.2%}",
            f"{rate.error_points:+.2f}",
        )
    Console().print(table)
