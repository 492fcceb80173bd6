# SPDX-License-Identifier: Apache-2.0
"""The options of a manager, in groups: the prefix cache, the layers, the tiers.

An option has a line in its group (name, type and default) and, if it is a keyword, a line in
``Keywords``. An option of the C++ cache has the name of a field of ``CacheConfig`` and reaches this
field without further code.
"""

from __future__ import annotations

import functools
import inspect
import math
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, Field, dataclass, field, fields
from typing import TYPE_CHECKING, Any, TypedDict, TypeVar, cast

import numpy as np

from kvcore._core import CacheConfig
from kvcore.policies import LRU, EvictionPolicy, resolved
from kvcore.support.arguments import MOST_INT64, flag, integer, number

if TYPE_CHECKING:
    from kvcore.stores import BlockStore

__all__ = ["CacheOptions", "LayerOptions", "TierOptions"]

#: Maximum number of pages whose events wait, for ``events=True``.
DEFAULT_EVENT_PAGES = 1 << 16
#: ``explain=True`` remembers this many pages for each page of the caches, and at most this many.
EXPLAINED_PER_PAGE = 4
MOST_EXPLAINED_PAGES = 1 << 18
#: One page in this many is sampled, for ``advice=True``.
DEFAULT_ADVICE_SAMPLE = 64
MOST_ADVICE_SAMPLE = 1 << 20


def _optional_integer(name: str, value: Any) -> int | None:
    return None if value is None else integer(name, value)


_CHECKS: dict[str, Callable[[str, Any], Any]] = {
    "bool": flag,
    "int": integer,
    "int | None": _optional_integer,
}

_CORE_OPTIONS = frozenset(CacheConfig.options)


#: Marks of a field: it is also a keyword of the constructor; this keyword is deprecated; the option
#: needs a host tier.
_KEYWORD = {"is_keyword": True}
_OLD = {"is_keyword": True, "is_deprecated": True}
_HOST = {"needs_host": True}


class Options:
    """Base of the groups: checks of flags and integers, and the options of ``CacheConfig``."""

    def __post_init__(self) -> None:
        """Check each field of the type bool, int or int | None; make it a plain bool or int."""
        for name, check in _checks_of(type(self)):  # type: ignore[arg-type]
            object.__setattr__(self, name, check(name, getattr(self, name)))

    def core_options(self) -> dict[str, Any]:
        """Return the options that are fields of ``CacheConfig``; None leaves its default."""
        values = ((name, getattr(self, name)) for name in _core_names(type(self)))  # type: ignore[arg-type]
        return {name: value for name, value in values if value is not None}


def _fields(group: type[Options]) -> tuple[Field[Any], ...]:
    return fields(group)  # type: ignore[arg-type]  # each group is a dataclass


@functools.cache
def _checks_of(group: type[Options]) -> list[tuple[str, Callable[[str, Any], Any]]]:
    kinds = [(each.name, str(each.type)) for each in _fields(group)]
    return [(name, _CHECKS[kind]) for name, kind in kinds if kind in _CHECKS]


@functools.cache
def _core_names(group: type[Options]) -> list[str]:
    return [each.name for each in _fields(group) if each.name in _CORE_OPTIONS]


@dataclass(frozen=True)
class CacheOptions(Options):
    """Options of the pages and of the prefix cache.

    Parameters
    ----------
    dedup : bool
        ``step`` swaps a page for an equal cached page.
    partial_page_reuse : bool or int
        Smallest number of tokens that a prefix hit copies from a partly equal page, so the hit ends
        inside a page. True means 1. With False or 0, hits end only between pages.
    eviction : str or kvcore.policies.EvictionPolicy
        The order in which cached pages are evicted when memory is full.
    clock : callable
        Returns the time in seconds, used to end the priorities of contexts and for their
        ``returns_in``. The manager calls it only with ``eviction="priority"`` or ``"hinted"``. By
        default ``time.monotonic``.
    quotas : dict of str to (reserved_pages, max_pages), optional
        For each tenant (``tenant=``) and each replica: the pages that all other tenants must leave
        to the tenant, and the largest number of pages that the tenant may hold, None for no
        ceiling.
    events : bool or int
        Record pages that enter and leave the caches for ``take_events``. The number is the maximum
        number of pages whose events wait; True means 65,536.
    first_page : int
        Number of page ids reserved for the caller, from 0. All pools have these pages in addition
        to the pages of the manager. vLLM's null block is ``first_page=1``.
    explain : bool or int
        Find out for each admission why tokens were not cached: ``explain``, ``ctx.misses`` and
        ``miss_metrics``. The number is the number of pages that left the cache and are remembered,
        4 bytes per page and 48 per run of pages. Each page of the pools takes 4 bytes as well. True
        means four times the pages of the device and the host tier, and at most 262,144. Pages that
        left the cache earlier count as never seen.
    advice : bool or int
        Sample pages, to compute for ``advice`` the hit rates of other numbers of pages. One page in
        this number is sampled, a power of two; True means 64. Small pools need a smaller number:
        with 1, every page is sampled. With pools of more than a million pages, fewer pages are
        sampled, so that the record stays below 8 MiB.

    Raises
    ------
    TypeError
        A flag is not a bool, a number is not an int, `clock` cannot be called, or `quotas` is not a
        mapping. The manager checks all other values.

    Examples
    --------
    >>> from kvcore import CacheOptions, KVCacheParams, PagedKVCacheManager
    >>> params = KVCacheParams("float32", 1, 16, 1, page_size=1, enable_prefix_caching=True)
    >>> options = CacheOptions(eviction="lfu", first_page=1)
    >>> PagedKVCacheManager(params, 4, 64, num_pages=128, cache=options).next_pages()[:3]
    array([1, 2, 3], dtype=int32)
    """

    _: KW_ONLY
    dedup: bool = field(default=True, metadata=_KEYWORD)
    partial_page_reuse: bool | int = field(default=True, metadata=_KEYWORD)
    eviction: EvictionPolicy | str = field(default="lru", metadata=_KEYWORD)
    clock: Callable[[], float] = field(default=time.monotonic, metadata=_KEYWORD)
    quotas: Mapping[str, tuple[int, int | None]] | None = field(default=None, metadata=_KEYWORD)
    events: bool | int = field(default=False, metadata=_KEYWORD)
    first_page: int = field(default=0, metadata=_KEYWORD)
    explain: bool | int = False
    advice: bool | int = False

    def __post_init__(self) -> None:
        """Check flags, numbers, the clock and the type of the quotas."""
        super().__post_init__()
        for name in ("partial_page_reuse", "events", "explain", "advice"):
            value = getattr(self, name)
            is_flag = isinstance(value, bool | np.bool_)
            object.__setattr__(self, name, bool(value) if is_flag else integer(name, value))
        if not callable(self.clock):
            raise TypeError(f"clock is a {type(self.clock).__name__}, must be callable")
        if self.quotas is not None and not isinstance(self.quotas, Mapping):
            raise TypeError(f"quotas is a {type(self.quotas).__name__}, must be a dict or None")

    def core_options(self) -> dict[str, Any]:
        """Return the options that are fields of ``CacheConfig``, except quotas."""
        options = super().core_options() | {
            "partial_page_reuse": int(self.partial_page_reuse),
            "event_pages": self.event_pages,
            "advice_sample": self.advice_sample,
        }
        options.pop("quotas", None)
        return options

    @property
    def event_pages(self) -> int:
        """Maximum number of pages whose events may wait; 0 for no events."""
        if isinstance(self.events, bool):
            return DEFAULT_EVENT_PAGES if self.events else 0
        return integer("events", self.events, 1)

    def explain_pages(self, pages: int) -> int:
        """Return how many lost pages caches of ``pages`` pages remember; 0 without ``explain``."""
        if isinstance(self.explain, bool):
            most = min(EXPLAINED_PER_PAGE * pages, MOST_EXPLAINED_PAGES)
            return most if self.explain else 0
        return integer("explain", self.explain, 1, (1 << 31) - 1)

    @property
    def advice_sample(self) -> int:
        """Number of pages of which one is sampled; 0 if there is no advice."""
        if isinstance(self.advice, bool):
            return DEFAULT_ADVICE_SAMPLE if self.advice else 0
        sample = integer("advice", self.advice, 1, MOST_ADVICE_SAMPLE)
        if sample & (sample - 1):
            raise ValueError(f"advice is {sample}, must be a power of two")
        return sample

    def quotas_in(self, num_pages: int) -> dict[str, tuple[int, int | None]]:
        """Check the quotas against the pages of a replica, and return a copy by tenant.

        Raises
        ------
        ValueError
            A number of pages is below 0, a tenant reserves more than its ``max_pages``, or all
            tenants together reserve more than the pages of a replica.
        TypeError
            A tenant is not a string, or a number of pages is not an integer.
        """
        given: dict[str, tuple[int, int | None]] = {}
        for tenant, quota in dict({} if self.quotas is None else self.quotas).items():
            if not isinstance(tenant, str):
                raise TypeError(f"tenant {tenant!r} of quotas is not a string")
            given[str.__str__(tenant)] = _pages(tenant, quota)
        reserved = sum(quota[0] for quota in given.values())
        if reserved > num_pages:
            raise ValueError(
                f"quotas reserve {reserved} pages in all, must be at most the {num_pages} of a "
                "replica"
            )
        return given


def _pages(tenant: str, quota: Any) -> tuple[int, int | None]:
    try:
        reserved, most = quota
    except (TypeError, ValueError):
        raise ValueError(
            f"quotas[{tenant!r}] is {quota!r}, must be (reserved_pages, max_pages)"
        ) from None
    reserved = integer(f"reserved_pages of quotas[{tenant!r}]", reserved, 0)
    if most is None:
        return reserved, None
    least = max(1, reserved)  # at least the reserved pages, and at least 1
    return reserved, integer(f"max_pages of quotas[{tenant!r}]", most, least, MOST_INT64)


@dataclass(frozen=True)
class LayerOptions(Options):
    """Options for models whose layers keep different tokens, and for chunked prefill.

    Parameters
    ----------
    reserve_chunks : bool
        Reserve pages only for the tokens that run next. By default, full-attention layers reserve
        pages for the whole request at once, so the request cannot run out of pages later.
    max_draft_tokens : int
        If layers have windows, chunks or a state: number of last written tokens that may be
        truncated. Pages of windows are released that many tokens later. If `num_states` has two
        slots for each request, the second slot keeps the state before the drafts of the request.
    keep_windows : bool
        ``step`` keeps the pages that a window has passed until ``leave_windows`` releases them.
    num_states : int, optional
        If layers keep a state: the state slots of each replica. Each request needs a slot, and
        drafts use a second slot of the request. Additional slots store checkpoints, from which
        other requests can begin. The default has the slots of all requests and a checkpoint slot
        for each request. With fewer than 16 requests it adds checkpoint slots, up to 16 in all, if
        the additional slots fit into an eighth of the memory.

    Raises
    ------
    TypeError
        A flag is not a bool, or a number is not an int. The manager checks all other values.
    """

    _: KW_ONLY
    reserve_chunks: bool = field(default=False, metadata=_KEYWORD)
    max_draft_tokens: int = field(default=0, metadata=_KEYWORD)
    keep_windows: bool = field(default=False, metadata=_OLD)
    num_states: int | None = field(default=None, metadata=_KEYWORD)


@dataclass(frozen=True)
class TierOptions(Options):
    """Options of the tiers below the device: the host tier, and the stores below it.

    Parameters
    ----------
    tiers : list of str or kvcore.stores.BlockStore, optional
        The tiers below the device, in this order: "host:64MiB" (size for each replica; must be
        first; the same as ``enable_kvcache_swapping_to_host``), "disk:/var/cache/kv:200GiB", or
        stores. Stores need a host tier. If the caller gives no host tier, the manager adds a tier
        with the size of the device's pages, at most 1 GiB, but at least the pages of two requests.
    fingerprint : bytes or str, optional
        Identifies the weights. Without it, stores distinguish models only by layers, heads and
        dtype.
    write_policy : {"write_through", "write_through_selective", "write_back"}
        A cached page is copied to the host tier when the page enters the cache ("write_through"),
        after `write_threshold` uses ("write_through_selective"), or just before the page is evicted
        ("write_back").
    write_threshold : int
        1 .. 255. A page is used by the ``step`` that commits it, and by each request that takes the
        page from the cache or commits it again.
    host_eviction : str or kvcore.policies.EvictionPolicy
        The order in which pages of the host tier are evicted when the tier is full. "priority"
        and "hinted" need the same policy as `eviction`.
    host_min_priority : int
        With ``eviction="priority"``: pages with a lower priority, and all pages that follow them in
        a prompt, are not copied to the host tier.
    num_host_states : int, optional
        If layers keep a state: the checkpoint slots of the host tier in each replica. By default
        they take half of ``host_kvcache_swap_space_gb``. With 0, checkpoints stay on the device.
    async_onload : bool
        ``maybe_reserve`` does not wait for pages from stores: see ``poll``.
    store_timeout : float
        Seconds that a call of a store may take; a longer call counts as a miss.
    max_write_wait : float
        Longest time, in seconds, that a ``step`` waits for stores while half of the host tier waits
        to be written.
    layerwise_loads : bool
        On GPUs, pages are loaded from the host tier layer by layer. Each operation of
        ``kvcore.ops`` waits only for its layer. Your own kernels wait with ``ops.wait_layer``.

    Raises
    ------
    TypeError
        A flag is not a bool, or a number has a wrong type.
    ValueError
        A time is not finite, or not more than 0. The manager checks all other values.

    Examples
    --------
    >>> from kvcore import KVCacheParams, PagedKVCacheManager, TierOptions
    >>> params = KVCacheParams("float32", 1, 16, 1, page_size=1, enable_prefix_caching=True)
    >>> tiers = TierOptions(["host:1MiB"], write_policy="write_back")
    >>> PagedKVCacheManager(params, 4, 64, num_pages=128, tiers=tiers).total_num_host_pages
    8192
    """

    tiers: Sequence[str | BlockStore] | None = None
    _: KW_ONLY
    fingerprint: bytes | str | None = field(default=None, metadata=_KEYWORD)
    write_policy: str = field(default="write_through", metadata=_KEYWORD | _HOST)
    write_threshold: int = field(default=2, metadata=_OLD | _HOST)
    host_eviction: EvictionPolicy | str = field(default="lru", metadata=_OLD | _HOST)
    host_min_priority: int = field(default=0, metadata=_OLD | _HOST)
    num_host_states: int | None = field(default=None, metadata=_OLD)
    async_onload: bool = field(default=False, metadata=_OLD)
    store_timeout: float = field(default=5.0, metadata=_OLD)
    max_write_wait: float = field(default=1.0, metadata=_OLD)
    layerwise_loads: bool = field(default=False, metadata=_OLD)

    def __post_init__(self) -> None:
        """Check flags, numbers and times."""
        super().__post_init__()
        for name in ("store_timeout", "max_write_wait"):
            seconds = number(name, getattr(self, name))
            if not 0 < seconds < math.inf:
                raise ValueError(f"{name} is {seconds}, must be more than 0 seconds, and finite")

    def require_host(self, *, has_host_tier: bool) -> None:
        """Check the options of the host tier.

        Raises
        ------
        ValueError
            An option is given without a host tier, or a name is not the name of a policy.
        TypeError
            `write_policy` is not a string.
        """
        if not isinstance(self.write_policy, str):
            raise TypeError(f"write_policy is {self.write_policy!r}, must be the name of a policy")
        resolved(self.host_eviction, "host_eviction")
        if has_host_tier:
            return
        for each in _fields(type(self)):
            if not each.metadata.get("needs_host"):
                continue
            value = getattr(self, each.name)
            if value not in (each.default, LRU() if each.default == "lru" else each.default):
                raise ValueError(
                    f"{each.name} is {value!r}, must be left out: enable_kvcache_swapping_to_host "
                    "is off"
                )


class Keywords(TypedDict, total=False):
    """Options that are also keywords of ``PagedKVCacheManager``. New options are not."""

    dedup: bool
    partial_page_reuse: bool | int
    eviction: EvictionPolicy | str
    clock: Callable[[], float]
    reserve_chunks: bool
    max_draft_tokens: int
    quotas: Mapping[str, tuple[int, int | None]] | None
    num_states: int | None
    num_host_states: int | None
    write_policy: str
    write_threshold: int
    host_eviction: EvictionPolicy | str
    host_min_priority: int
    fingerprint: bytes | str | None
    async_onload: bool
    store_timeout: float
    max_write_wait: float
    layerwise_loads: bool
    events: bool | int
    first_page: int
    keep_windows: bool


# ---- keywords of the constructor -----------------------------------------------------------------

_GROUPS: dict[str, type[Options]] = {
    "cache": CacheOptions,
    "layers": LayerOptions,
    "tiers": TierOptions,
}


def _options() -> Iterator[tuple[str, type[Options], Field[Any]]]:
    for group, kind in _GROUPS.items():
        for each in _fields(kind):
            yield group, kind, each


_DEFAULTS = {group: kind() for group, kind in _GROUPS.items()}
_PLACES = {each.name: (group, kind, each) for group, kind, each in _options()}

_Group = TypeVar("_Group", bound=Options)


def grouped(
    cache: CacheOptions | None,
    layers: LayerOptions | None,
    tiers: TierOptions | Sequence[str | BlockStore] | None,
    keywords: Mapping[str, Any],
) -> tuple[CacheOptions, LayerOptions, TierOptions]:
    """Return the groups of a constructor's arguments.

    Raises
    ------
    TypeError
        A keyword is not an option of the constructor, or a group has a wrong type.
    ValueError
        An option is given as a keyword although its group is given.
    """
    given: dict[str, dict[str, Any]] = {group: {} for group in _GROUPS}
    if tiers is not None and not isinstance(tiers, Options):
        given["tiers"]["tiers"] = tiers
        tiers = None
    groups = {"cache": cache, "layers": layers, "tiers": tiers}
    for name, value in keywords.items():
        given[_group_of(name, groups)][name] = value
    return (
        _made("cache", CacheOptions, cache, given),
        _made("layers", LayerOptions, layers, given),
        _made("tiers", TierOptions, tiers, given),
    )


def _group_of(name: str, groups: Mapping[str, Any]) -> str:
    """Return the group of a keyword; warn if the keyword is deprecated."""
    if name not in _PLACES:
        raise TypeError(
            f"PagedKVCacheManager has no option {name!r}; its options are its arguments and the "
            f"fields of {', '.join(kind.__name__ for kind in _GROUPS.values())}"
        )
    group, kind, each = _PLACES[name]
    spelling = f"{group}={kind.__name__}({name}=...)"
    if not each.metadata.get("is_keyword"):
        raise TypeError(f"{name} is no argument of PagedKVCacheManager; pass {spelling}")
    if groups[group] is not None:
        raise ValueError(f"{name} and {group} are both given, must be one of them; pass {spelling}")
    if each.metadata.get("is_deprecated"):
        warnings.warn(
            f"the argument {name} of PagedKVCacheManager is deprecated; pass {spelling}",
            DeprecationWarning,
            stacklevel=4,
        )
    return group


def _made(
    group: str, kind: type[_Group], value: Any, given: Mapping[str, dict[str, Any]]
) -> _Group:
    if value is None:
        return kind(**given[group]) if given[group] else cast("_Group", _DEFAULTS[group])
    if not isinstance(value, kind):
        raise TypeError(f"{group} is a {type(value).__name__}, must be a {kind.__name__}")
    return value


def signature_of(init: Callable[..., Any]) -> inspect.Signature:
    """Return the signature of a constructor with a parameter for each keyword."""
    signature = inspect.signature(init)
    plain = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
    named = [
        inspect.Parameter(each.name, inspect.Parameter.KEYWORD_ONLY, default=each.default)
        for _, _, each in _PLACES.values()
        if each.metadata.get("is_keyword")
    ]
    return signature.replace(parameters=[*plain, *named])
