# SPDX-License-Identifier: Apache-2.0
"""Check the items of ``tiers=`` before a manager opens any store."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeAlias

from kvcore.errors import CapacityError
from kvcore.params import KVCacheParams
from kvcore.sizing import pages_per_sequence

if TYPE_CHECKING:
    from kvcore.stores import BlockStore, DiskTier, MooncakeTier, RedisTier, TierSpec

__all__ = ["TierChoice", "chosen_tiers", "model_fingerprint", "with_host_tier"]

_GIB = 1 << 30
_MOST_STAGING = 1 << 30

#: The methods that every store has.
_METHODS = (
    *("contains", "get_into", "put_from", "remove", "clear", "capacity", "health", "close"),
)

#: The description of a store to open, or an open store.
StoreChoice: TypeAlias = "DiskTier | RedisTier | MooncakeTier | BlockStore"


@dataclass(frozen=True)
class TierChoice:
    """Hold the checked items of ``tiers=``.

    Parameters
    ----------
    host_bytes : int
        Bytes of each replica's host tier; 0 if no item gives the size.
    stores : tuple
        The lower stores in order: a DiskTier, RedisTier or MooncakeTier to open, or an open store.
    """

    host_bytes: int
    stores: tuple[StoreChoice, ...]


def chosen_tiers(
    tiers: Sequence[str | BlockStore] | None, params: KVCacheParams, *, has_pool: bool
) -> TierChoice:
    """Read the items.

    Raises
    ------
    ValueError
        A text that does not name a tier; a host tier that is not the first item; host tiers in both
        `tiers` and `params`; the same store twice; tiers without prefix caching or without a pool.
    TypeError
        `tiers` is not a sequence; an item is neither a text nor a store (the text lists the methods
        that it lacks).
    """
    if tiers is None:
        return TierChoice(0, ())
    if isinstance(tiers, str | bytes) or not isinstance(tiers, Sequence):
        raise TypeError(
            f"tiers is a {type(tiers).__name__}, must be a list such as ['host:8GiB', "
            f"'disk:/var/cache/kv:200GiB']"
        )
    from kvcore.stores import HostTier  # managers without tiers do not import it

    items = [_read(item) for item in tiers]
    if items and not has_pool:
        raise ValueError("tiers are given, but blocks is None; tiers need a manager with a pool")
    if items and not params.enable_prefix_caching:
        raise ValueError("tiers are given, but enable_prefix_caching is off; turn it on")
    hosts = [i for i, item in enumerate(items) if isinstance(item, HostTier)]
    if hosts and hosts != [0]:
        raise ValueError(
            f"tiers[{hosts[-1]}] is {tiers[hosts[-1]]!r}; a host tier is the first item"
        )
    if hosts and params.enable_kvcache_swapping_to_host:
        raise ValueError(
            f"tiers[0] is {tiers[0]!r}, and enable_kvcache_swapping_to_host is a host tier of "
            f"{params.host_kvcache_swap_space_gb} GiB; leave one of them out"
        )
    stores = tuple(item for item in items if not isinstance(item, HostTier))
    _require_distinct(stores)
    return TierChoice(sum(item.bytes for item in items if isinstance(item, HostTier)), stores)


def _read(item: Any) -> TierSpec | BlockStore:
    if isinstance(item, str):
        from kvcore.stores import parse_tier

        return parse_tier(item)
    lacking = [name for name in _METHODS if not callable(getattr(item, name, None))]
    if lacking or isinstance(item, type):
        found = "the class itself" if isinstance(item, type) else f"has no {', '.join(lacking)}"
        name = item.__name__ if isinstance(item, type) else type(item).__name__
        raise TypeError(
            f"an item of tiers is a {name}, must be a text such as 'disk:/var/cache/kv:200GiB' or "
            f"a kvcore.stores.BlockStore: it {'is ' if isinstance(item, type) else ''}{found}"
        )
    store: BlockStore = item
    return store


def _require_distinct(stores: tuple[StoreChoice, ...]) -> None:
    from kvcore.stores import DiskTier, MooncakeTier, RedisTier

    objects = [
        store if isinstance(store, (RedisTier, MooncakeTier)) else id(store)
        for store in stores
        if not isinstance(store, DiskTier)
    ]
    if len({*objects}) < len(objects):
        raise ValueError("tiers contain one store twice; name each once")
    paths = [path for each in stores if isinstance(each, DiskTier) for path, _ in each.directories]
    if len({*paths}) < len(paths):
        raise ValueError(f"tiers name a directory twice in {', '.join(paths)}; name each once")


def with_host_tier(
    params: KVCacheParams,
    choice: TierChoice,
    num_pages: int,
    max_seq_len: int,
    num_host_states: int | None,
) -> KVCacheParams:
    """Return params with the host tier that the choice names, or that its stores need.

    Stores read and write through the host tier. Its default size is the size of the device's pages,
    at most 1 GiB, but at least the pages of two requests of `max_seq_len`.

    Raises
    ------
    CapacityError
        The host tier holds no page.
    """
    size = choice.host_bytes
    if size and size < params.bytes_per_page:
        raise CapacityError(
            f"the host tier of {size} bytes holds no page of {params.bytes_per_page} bytes; give "
            f"it more"
        )
    if not size:
        if not choice.stores or params.enable_kvcache_swapping_to_host:
            return params
        size = _staging_bytes(params, num_pages, max_seq_len, num_host_states)
    return replace(
        params, enable_kvcache_swapping_to_host=True, host_kvcache_swap_space_gb=size / _GIB
    )


def _staging_bytes(
    params: KVCacheParams, num_pages: int, max_seq_len: int, num_host_states: int | None
) -> int:
    page = params.bytes_per_page
    least = 2 * pages_per_sequence(params, max_seq_len) * page
    pages = max(least, min(num_pages * page, _MOST_STAGING))
    if num_host_states is not None:
        return pages + num_host_states * params.bytes_per_state_slot
    return 2 * pages if params.state_groups else pages  # half for state slots, if any


def model_fingerprint(params: KVCacheParams, fingerprint: bytes | str | None) -> bytes:
    """Return the 32 bytes that identify pages of a model in this layout.

    Raises
    ------
    TypeError
        `fingerprint` is neither bytes nor a str.
    """
    if fingerprint is not None and not isinstance(fingerprint, bytes | str):
        raise TypeError(
            f"fingerprint is a {type(fingerprint).__name__}, must be bytes or a str that names the "
            f"model"
        )
    from kvcore.keys import format_fingerprint  # not imported by `import kvcore`

    if isinstance(fingerprint, bytes):
        return format_fingerprint(params, f"bytes {fingerprint.hex()}")
    return format_fingerprint(params, "" if fingerprint is None else f"str {fingerprint}")
