# SPDX-License-Identifier: Apache-2.0
"""Print a plan as a table."""

from collections.abc import Iterator
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvcore.support.byte_sizes import format_size

Plan = dict[str, Any]


def print_plan(model: str, plan: Plan) -> None:
    """Print the table of ``kvcore plan``: a row per number, a column per dtype of the pages."""
    columns: list[Plan] = [plan, *plan["quantised"]]
    # A Text, because a path may contain rich's markup.
    table = Table(title=Text(_title(model, plan)), title_justify="left", caption_justify="left")
    table.caption = f"+ scales: one float32 per token and head\n{_memory_text(plan)}"
    if plan["fields"]["assumed"]:
        table.caption += f"\nassumed to change nothing: {', '.join(plan['fields']['assumed'])}"
    table.add_column("", no_wrap=True)
    for column in columns:
        scales = "" if column["kv_scale_granularity"] is None else "\n+ scales"
        table.add_column(f"{column['dtype']}{scales}", justify="right", no_wrap=True)
    for name, values in _rows(plan, columns):
        table.add_row(name, *values)
    Console().print(table)
    if "groups" in plan:
        Console().print(_groups(plan))


def _memory_text(plan: Plan) -> str:
    if "weights" not in plan:
        return "memory only for K and V, not for weights and activations"
    each = " on each replica" if plan["data_parallel_degree"] > 1 else ""
    return (
        f"{format_size(plan['kv_memory'])} for K and V after {format_size(plan['weights'])} of "
        f"weights{each}, activations not subtracted"
    )


def _groups(plan: Plan) -> Table:
    """Make a table of the groups: layers, kept tokens, and pages of a sequence."""
    table = Table(title_justify="left", caption_justify="left")
    table.title = f"a sequence of {plan['max_seq_len']:,} tokens"
    table.caption = (
        f"steps of at most {plan['max_chunk_tokens']:,} tokens\n"
        f"pages are shared by up to {plan['layers_per_page']} layers"
    )
    if plan["shared_layers"]:
        table.caption += f"\n{plan['shared_layers']} more layers read the K and V of others"
    for name in ("layers", "keep", "page tables", "pages"):
        table.add_column(name, justify="left" if name == "keep" else "right", no_wrap=True)
    for group in plan["groups"]:
        if group["kind"] == "state":
            slot = format_size(group["bytes_per_slot"])
            table.add_row(str(group["layers"]), f"a state of {slot}", "", "")
            continue
        keeps = {
            "full": "all tokens",
            "window": f"a window of {group['keeps'] or 0:,}",
            "chunk": f"a chunk of {group['keeps'] or 0:,}",
        }[group["kind"]]
        size = group["page_size"]
        if size != plan["page_size"]:
            keeps += f", {size:,} a page"
        pages = f"{group['pages_per_sequence']:,}"
        table.add_row(str(group["layers"]), keeps, str(group["bundles"]), pages)
    return table


def _title(model: str, plan: Plan) -> str:
    devices = plan["tensor_parallel_degree"] * plan["data_parallel_degree"]
    width = plan["head_dim"]
    row = f"a latent row of {width}" if plan["is_mla"] else f"{plan['n_kv_heads']} K/V heads of"
    if not plan["is_mla"]:
        row += f" {width}" if plan["v_head_dim"] is None else f" {width} and {plan['v_head_dim']}"
    if plan["kv_head_copies"] > 1:
        row += f", each on {plan['kv_head_copies']} devices"
    layers = f"{plan['num_layers']} layers"
    if plan["mtp_layers"]:
        layers += f", {plan['mtp_layers']} of them MTP"
    spread = "1 device" if devices == 1 else f"{devices} devices"
    if plan["data_parallel_degree"] > 1:
        spread += f", {plan['data_parallel_degree']} replicas"
    return f"{model}: {layers}, {row}; {format_size(plan['memory'])} on {spread}"


def _rows(plan: Plan, columns: list[Plan]) -> Iterator[tuple[str, list[str]]]:
    def numbers(name: str) -> list[str]:
        return [f"{column[name]:,}" for column in columns]

    yield "bytes per token", numbers("bytes_per_token")
    yield (
        f"page of {plan['page_size']:,} tokens",
        [format_size(column["bytes_per_page"]) for column in columns],
    )
    yield "pages" if plan["data_parallel_degree"] == 1 else "pages per replica", numbers("pages")
    yield "tokens", numbers("tokens")
    yield f"sequences of {plan['max_seq_len']:,}", numbers("batch")
    if "groups" in plan:
        yield "without groups", numbers("flat_batch")
        yield (
            "bytes per sequence",
            [format_size(column["bytes_per_sequence"]) for column in columns],
        )
        yield (
            "without groups",
            [format_size(column["flat_bytes_per_sequence"]) for column in columns],
        )
    yield "longest sequence", numbers("longest_sequence")
    yield (
        "tokens / first column",
        [f"{column['tokens'] / plan['tokens']:.2f} x" for column in columns],
    )
