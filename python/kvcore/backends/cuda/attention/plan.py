# SPDX-License-Identifier: Apache-2.0
"""The plan of a call: its programs and tiles, from shapes only, which the host has."""

from __future__ import annotations

from typing import Any, NamedTuple

from kvcore.backends.cuda.attention.settings import Settings

__all__ = [
    "MOST_SPLITS",
    "Plan",
    "Sizes",
    "default_splits",
    "dim_of",
    "make_plan",
    "power_of_two",
    "scratch_elements",
    "sizes_of",
]

MOST_SPLITS = 64
_LEAST_DIM = 16  # of a matrix product
_PROGRAMS = 4  # per processor
_TOKENS_OF_A_SPLIT = 256  # fewer are not worth a program and the join


class Sizes(NamedTuple):
    """Hold the shapes that the plan of a call depends on.

    `dim`, `rest` and `v_dim` are the elements of K, of the ends of latent K and of V.
    """

    tokens: int
    rows: int
    q_heads: int
    heads: int
    dim: int
    rest: int
    v_dim: int
    page_size: int
    columns: int

    @property
    def group(self) -> int:
        """Query heads that share a head of K and V."""
        return self.q_heads // self.heads


class Plan(NamedTuple):
    """Hold the compile-time sizes of the kernel, and its grid."""

    heads_per_block: int
    block_m: int
    block_n: int
    block_dim: int
    block_rest: int
    block_v: int
    warps: int
    stages: int
    arch: int
    grid: tuple[int, int, int]


def power_of_two(n: int, least: int = 1) -> int:
    """Return the smallest power of two that is at least `n` and `least`."""
    return max(least, 1 << max(0, n - 1).bit_length())


def make_plan(sizes: Sizes, settings: Settings, arch: int, splits: int) -> Plan:
    """Cut a call into programs.

    The grid depends only on the numbers of tokens, rows and heads, so lengths may change between
    the replays of a captured graph.
    """
    heads_per_block = min(sizes.group, settings.block_m)
    tokens_per_block = settings.block_m // heads_per_block
    parts = -(-sizes.group // heads_per_block)
    return Plan(
        heads_per_block,
        settings.block_m,
        settings.block_n,
        power_of_two(sizes.dim, _LEAST_DIM),
        power_of_two(sizes.rest, _LEAST_DIM) if sizes.rest else 0,
        power_of_two(sizes.v_dim, _LEAST_DIM),
        settings.warps,
        settings.stages,
        arch,
        (sizes.tokens // tokens_per_block + sizes.rows, sizes.heads * parts, splits),
    )


def default_splits(sizes: Sizes, plan: Plan, processors: int) -> int:
    """Return the number of splits of a row's tokens that keeps all processors busy."""
    # The grid has spare programs, because rows begin anywhere; only `blocks` programs have tokens.
    blocks = max(sizes.rows, -(-sizes.tokens * plan.heads_per_block // plan.block_m))
    wanted = _PROGRAMS * processors // max(1, blocks * plan.grid[1])
    worth = sizes.columns * sizes.page_size // _TOKENS_OF_A_SPLIT
    return max(1, min(wanted, worth, MOST_SPLITS))


def scratch_elements(sizes: Sizes, splits: int, *, is_stacked: bool = False) -> int:
    """Return the number of float32 elements for the states of splits and stacked rows."""
    if splits == 1 and not is_stacked:
        return 0
    return splits * sizes.tokens * sizes.q_heads * (sizes.v_dim + 1)


def dim_of(pool: Any) -> int:
    """Return the elements of a head of a pool: 2 per byte for nvfp4, the only uint8 pool."""
    return int(pool.shape[3]) * (2 if pool.dtype.name == "uint8" else 1)


def sizes_of(q: Any, pools: tuple[Any, Any, Any], table: Any, v_dim: int) -> Sizes:
    """Return the shapes of a call.

    Parameters
    ----------
    q : array [tokens, q_heads, dim]
    pools : (array, array or None, array or None)
        Keys, values and the ends of latent keys, [pages, page_size, heads, dim].
    table : array [rows, columns]
    v_dim : int
    """
    key, value, rest = pools
    tokens, q_heads, wide = q.shape
    _, page_size, heads, _ = key.shape
    dim = dim_of(key)
    # A row of a latent cache holds the value, and after it the elements that only keys have.
    main = v_dim if value is None and rest is None else dim
    return Sizes(
        tokens, table.shape[0], q_heads, heads, main, wide - main, v_dim, page_size, table.shape[1]
    )
