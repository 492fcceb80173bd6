# SPDX-License-Identifier: Apache-2.0
"""What ``ops`` asks for on a GPU: attention with its checks and memory, and lists of pages."""

from __future__ import annotations

from typing import Any

import numpy as np

from kvcore.arguments import flag, integer
from kvcore.backends.cuda.attention.call import Call, attend, planned
from kvcore.backends.cuda.attention.checks import checked_call, checked_out, checked_scratch
from kvcore.backends.cuda.attention.indices import write_page_indices
from kvcore.backends.cuda.attention.plan import MOST_SPLITS, Plan, scratch_elements
from kvcore.backends.protocol import AttentionRequest, Place

__all__ = ["run", "write_page_indices"]

_FLOAT32 = np.dtype(np.float32)


def run(place: Place, request: AttentionRequest) -> tuple[Any, Any]:
    """Attend; return the result and its logarithms, None where they are not asked for.

    Raises
    ------
    ValueError, TypeError
        What does not fit; nothing has been written then.
    """
    has_lse = flag("return_lse", request.return_lse)
    rule = (*request.rule[:5], _sinks(place, request.rule[5]))
    pools, step = request.pools, request.step
    call = checked_call(pools, request.v_head_dim, step, request.q, rule)
    given_out = None if request.out is None else checked_out(call, request.out)
    plan = _planned(call, request, place)
    scratch = _scratch(call, plan, request, place)
    shape = *call.q.shape[:2], call.v_dim
    out = place.empty(shape, call.q.dtype) if given_out is None else given_out
    lse = place.empty(shape[:2], _FLOAT32) if has_lse else None
    attend(call, plan, out, lse, scratch, place)
    return out, lse


def _sinks(place: Place, given: Any) -> Any:
    """Return sinks that lie on the device; the host's are copied."""
    if not isinstance(given, np.ndarray) or place.reaches(given):
        return given
    return place.from_host(given)


def _planned(call: Call, request: AttentionRequest, place: Place) -> Plan:
    """Return the plan: as many splits as asked for, or as the scratch holds."""
    if request.splits is not None:
        return planned(call, integer("splits", request.splits, 1, MOST_SPLITS), place)
    plan = planned(call, None, place)
    if request.scratch is None:
        return plan
    one = scratch_elements(call.sizes, 2) // 2
    most = max(1, request.scratch.size // max(1, one))
    return planned(call, min(plan.grid[2], most), place)


def _scratch(call: Call, plan: Plan, request: AttentionRequest, place: Place) -> Any:
    needed = scratch_elements(call.sizes, plan.grid[2])
    if request.scratch is not None:
        return checked_scratch(request.scratch, needed)
    return place.empty((needed,), _FLOAT32) if needed else None
