# SPDX-License-Identifier: Apache-2.0
"""Size the pool of a model whose layers keep windows, chunks or states."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from kvcore import KVCacheParams
from kvcore.apps.replay.pool import MOST_PAGES, PoolError, PoolSettings
from kvcore.groups import State
from kvcore.layers.kinds import described
from kvcore.layers.layer_map import column_tokens, has_windows
from kvcore.pools import chosen_states, intervals
from kvcore.sizing import batch_with_slots, pages_per_replica
from kvcore.support.byte_sizes import format_size

__all__ = ["is_hybrid", "model_pool", "served_lines", "with_checkpoints", "with_host_tier"]


def is_hybrid(model: KVCacheParams) -> bool:
    """Return whether some layers keep a window, a chunk or a state instead of every token."""
    return has_windows(model) or bool(model.state_groups)


def with_checkpoints(model: KVCacheParams, every: int) -> KVCacheParams:
    """Return the model with checkpoints of its states every `every` tokens of a prompt.

    Raises
    ------
    PoolError
        No layer keeps a state, or `every` is no positive multiple of the tokens of a page.
    """
    if not model.state_groups:
        raise PoolError("no layer of the model keeps a state, so there are no checkpoints")
    page = column_tokens(model)
    if every < 1 or every % page:
        raise PoolError(
            f"checkpoints every {every} tokens do not end pages; expected a multiple of {page}, "
            f"the tokens of a page"
        )
    groups = tuple(
        replace(group, interval=every) if isinstance(group, State) else group
        for group in model.groups or ()
    )
    return replace(model, groups=groups)


def model_pool(
    model: KVCacheParams,
    *,
    memory: int | None = None,
    pages: int | None = None,
    replicas: int = 1,
    requests: int = 1,
    state_slots: int | None = None,
    state_share: float | None = None,
) -> PoolSettings:
    """Divide memory into the pages and the state slots of a model, as a manager does.

    Parameters
    ----------
    model : KVCacheParams
        Model of one device; layers may keep windows, chunks and states.
    memory : int, optional
        Bytes of all replicas, for pages and state slots.
    pages : int, optional
        Instead of `memory`: pages of each replica. State slots take memory in addition.
    replicas : int
        Data-parallel replicas.
    requests : int
        Number of requests that run at a time, over all replicas, for the number of slots.
    state_slots : int, optional
        State slots of each replica. By default two slots for each request, one for the request and
        one for a checkpoint, and up to 16 checkpoints if there are fewer than 16 requests. If two
        slots for each request take more memory than the pages, there are fewer slots, so that both
        take half.
    state_share : float, optional
        Instead of `state_slots`: the share of the memory that state slots take, above 0 and below
        1; at least one slot.

    Raises
    ------
    PoolError
        The memory has no room for a page, `state_share` is not between 0 and 1, both `state_slots`
        and `state_share` are given, or one of them is given for a model without states.
    """
    if (memory is None) == (pages is None):
        raise PoolError(f"memory is {memory} and pages is {pages}; expected one of them")
    if state_slots is not None or state_share is not None:
        _check_states(model, state_slots, state_share)
    # The default is half of the memory at most. So without a memory, it is twice the pages.
    of_pages = (pages or 0) * model.bytes_per_page
    share = int(of_pages / (1 - (state_share or 0.5))) if memory is None else memory // replicas
    slots = state_slots
    if state_share is not None:
        slots = max(1, int(share * state_share) // model.bytes_per_state_slot)
    if slots is None:
        slots = _default_slots(model, share, -(-requests // replicas))
    if pages is None:
        pages = pages_per_replica(model, share, slots)
        if not 1 <= pages <= MOST_PAGES:
            beside = slots * model.bytes_per_state_slot
            states = f" and {slots} state slots of {format_size(beside)}" if slots else ""
            raise PoolError(
                f"{format_size(share)} on each of {replicas} replicas have room for {pages} pages "
                f"of {format_size(model.bytes_per_page)}{states}; expected 1 to {MOST_PAGES} pages"
                f"{': more memory, or fewer state slots' if slots else ''}"
            )
    return PoolSettings(
        page_size=model.page_size,
        pages=pages,
        replicas=replicas,
        model=model,
        page_bytes=model.bytes_per_page,
        state_slots=slots,
    )


def with_host_tier(
    pool: PoolSettings,
    *,
    memory: int | None = None,
    pages: int | None = None,
    state_share: float | None = None,
) -> PoolSettings:
    """Return the pool of a model with a host tier, whose memory is divided as a manager does it.

    Parameters
    ----------
    pool : PoolSettings
        A pool of `model_pool`.
    memory : int, optional
        Bytes of the host tiers of all replicas, for pages and checkpoints.
    pages : int, optional
        Instead of `memory`: pages of each replica's host tier. Checkpoints take memory in addition.
    state_share : float, optional
        The share of the memory that the slots of checkpoints take. By default half.

    Raises
    ------
    PoolError
        The memory has no room for a page, not exactly one of `memory` and `pages` is given, or the
        pool has no model.
    """
    model = pool.model
    if model is None:
        raise PoolError("the pool has no model; expected a pool of model_pool, or host_pages=")
    if (memory is None) == (pages is None):
        raise PoolError(f"memory is {memory} and pages is {pages}; expected one of them")
    share = 0.5 if state_share is None else state_share
    slot = model.bytes_per_state_slot
    if pages is not None:
        of_pages = pages * model.bytes_per_page
        slots = max(1, int(of_pages * share / (1 - share)) // slot) if slot else 0
        return replace(pool, host_pages=pages, host_state_slots=slots)
    each = (memory or 0) // pool.replicas
    slots = max(1, int(each * share) // slot) if slot else 0
    found = max(0, each - slots * slot) // model.bytes_per_page
    if not 1 <= found <= MOST_PAGES:
        raise PoolError(
            f"{format_size(each)} for a host tier on each of {pool.replicas} replicas have room "
            f"for {found} pages of {format_size(model.bytes_per_page)}; expected 1 to {MOST_PAGES}"
        )
    return replace(pool, host_pages=found, host_state_slots=slots)


def _check_states(model: KVCacheParams, state_slots: int | None, state_share: float | None) -> None:
    """Refuse slots for a model without states, two numbers of slots, and a wrong share."""
    if not model.state_groups:
        raise PoolError("no layer of the model keeps a state; leave out the state slots")
    if state_slots is not None and state_share is not None:
        raise PoolError(
            f"state_slots is {state_slots} and state_share is {state_share}; expected one of them"
        )
    if state_share is not None and not 0 < state_share < 1:
        raise PoolError(f"state_share is {state_share}; expected more than 0 and less than 1")


def _default_slots(model: KVCacheParams, share: int, requests: int) -> int:
    """Return the state slots of a replica with `share` bytes, of which states take up to half."""
    pages = max(1, share // 2 // model.bytes_per_page)
    batch = batch_with_slots(model, share, pages, requests)
    # This number of slots depends on the longest request only if a memory is given.
    return chosen_states(model, batch, None, max_seq_len=model.page_size, num_pages=pages)


def served_lines(pool: PoolSettings, block_tokens: int) -> tuple[str, ...]:
    """Describe the layers of a model, its checkpoints, and the assumptions about blocks.

    There is no line for a pool without a model.

    Parameters
    ----------
    pool : PoolSettings
        A pool of `model_pool`.
    block_tokens : int
        Tokens per block of the trace; 0 if the trace has tokens.
    """
    model = pool.model
    if model is None:
        return ()
    kinds = [_layers_text(described(group)) for group in model.groups or ()]
    page = f"{model.page_size:,} tokens of up to {model.layers_per_page} layers"
    lines = [f"layers: {', '.join(kinds)}; a page has {page}, {format_size(model.bytes_per_page)}"]
    size = pool.hit_tokens
    if size != model.page_size:
        lines.append(f"pages have several sizes: checkpoints and commits are in {size:,} tokens")
    if model.state_groups:
        every = dict.fromkeys(f" and every {each:,} tokens" for each in intervals(model) if each)
        lines.append(
            f"a hit ends at a checkpoint: at the last page end before the end of a prompt, where "
            f"prompts branch{''.join(every)}; a state slot is "
            f"{format_size(model.bytes_per_state_slot)}"
        )
    if block_tokens > size:
        kept = "checkpoints" if model.state_groups else "windows"
        lines.append(
            f"prompts share whole blocks of {block_tokens:,} tokens, so a longer prompt never "
            f"finds the {kept} inside the last block of a shorter prompt: --page-size "
            f"{block_tokens} keeps {kept} at the ends of blocks"
        )
    return tuple(lines)


def _layers_text(group: dict[str, Any]) -> str:
    """Write the number of layers of a group, and the tokens that they keep."""
    kept = f" of {group['keeps']:,}" if group["keeps"] is not None else ""
    name = {"full": "keep every token", "state": "keep a state"}.get(
        group["kind"], f"keep a {group['kind']}{kept}"
    )
    return f"{group['layers']} {name}"
