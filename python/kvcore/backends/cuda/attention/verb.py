# SPDX-License-Identifier: Apache-2.0
"""The GPU side of ``ops``: attention with its checks and memory, and lists of pages."""

from __future__ import annotations

from typing import Any

import numpy as np

from kvcore.backends.cuda.attention.call import Call, attend, planned
from kvcore.backends.cuda.attention.cascade import checked_groups, make_stack
from kvcore.backends.cuda.attention.checks import (
    checked_call,
    checked_lse,
    checked_out,
    checked_scratch,
)
from kvcore.backends.cuda.attention.indices import write_page_indices
from kvcore.backends.cuda.attention.plan import MOST_SPLITS, Plan, scratch_elements
from kvcore.backends.protocol import AttentionRequest, Place
from kvcore.support.arguments import flag, integer

__all__ = ["run", "write_page_indices"]

_FLOAT32 = np.dtype(np.float32)


def run(place: Place, request: AttentionRequest) -> tuple[Any, Any]:
    """Run attention; return the result and its logarithms, None if not requested.

    Raises
    ------
    ValueError, TypeError
        An argument does not fit. Raised before anything is written.
    """
    has_lse = flag("return_lse", request.return_lse)
    rule = (*request.rule[:5], _sinks(place, request.rule[5]))
    pools, step = request.pools, request.step
    checked = checked_call(pools, request.v_head_dim, step, request.q, rule, request.global_scales)
    call = _stacked(checked, request, place)
    given_out = None if request.out is None else checked_out(call, request.out)
    given_lse = None if request.lse is None else checked_lse(call, request.lse, given_out)
    plan = _planned(call, request, place)
    scratch = _scratch(call, plan, request, place)
    shape = *call.q.shape[:2], call.v_dim
    out = place.empty(shape, call.q.dtype, "the result") if given_out is None else given_out
    lse = given_lse
    if has_lse and lse is None:
        lse = place.empty(shape[:2], _FLOAT32, "the array of logarithms")
    attend(call, plan, out, lse, scratch, place)
    return out, lse


def _stacked(call: Call, request: AttentionRequest, place: Place) -> Call:
    """Stack the rows that share pages.

    Each row reads its own pages in two cases: the row offsets are on the device, so the host does
    not have the tokens of the rows; or a window or chunks make rows see different parts of the
    shared tokens.
    """
    groups = checked_groups(*request.shared, call.table.shape[0])
    offsets = request.step[2]
    is_plain = call.rule.window is None and call.rule.chunk is None
    if not groups or not is_plain or not isinstance(offsets, tuple):
        return call
    stack = make_stack(groups, offsets[0])
    return call._replace(stack=(stack, place.from_host(stack.numbers, "shared")))


def _sinks(place: Place, given: Any) -> Any:
    """Return sinks as kernels reach them; copy host sinks that are not pinned to the device."""
    if not isinstance(given, np.ndarray) or place.reaches(given):
        return given
    return place.from_host(given, "sinks")


def _planned(call: Call, request: AttentionRequest, place: Place) -> Plan:
    """Return the plan with the requested splits, or with at most the splits that scratch holds."""
    if request.splits is not None:
        return planned(call, integer("splits", request.splits, 1, MOST_SPLITS), place)
    plan = planned(call, None, place)
    if request.scratch is None:
        return plan
    one = scratch_elements(call.sizes, 1, is_stacked=True)
    most = max(1, request.scratch.size // max(1, one))
    return planned(call, min(plan.grid[2], most), place)


def _scratch(call: Call, plan: Plan, request: AttentionRequest, place: Place) -> Any:
    needed = scratch_elements(call.sizes, plan.grid[2], is_stacked=call.stack is not None)
    if request.scratch is not None:
        return checked_scratch(request.scratch, needed)
    return place.empty((needed,), _FLOAT32, "scratch") if needed else None
