# SPDX-License-Identifier: Apache-2.0
"""Quotas of tenants, and what they hold."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from kvcore.support.arguments import MOST_INT64, integer

__all__ = ["TenantMetrics", "checked_quotas"]


@dataclass(frozen=True, slots=True)
class TenantMetrics:
    """Count the pages of one tenant at one moment, summed over replicas.

    Attributes
    ----------
    held_pages : int
        That requests, pins and copies keep, and that count for the tenant.
    reserved_pages : int
        That others leave it.
    max_pages : int or None
        That it never holds more of; None without a ceiling.
    refused : int
        Reservations of its requests that quotas alone were in the way of, since the metrics were
        reset.
    input_tokens, cache_tokens, generated_tokens : int
        Prompt tokens of its requests to compute, those taken from the cache instead, and generated
        tokens, as of `KVCacheMetrics`.
    """

    held_pages: int
    reserved_pages: int
    max_pages: int | None
    refused: int
    input_tokens: int
    cache_tokens: int
    generated_tokens: int

    @classmethod
    def summed(cls, stats: Iterable[Any]) -> TenantMetrics:
        """Sum the TenantStats of one tenant over replicas."""
        found = tuple(stats)
        most = found[0].max_pages
        return cls(
            held_pages=sum(each.held_pages for each in found),
            reserved_pages=sum(each.reserved_pages for each in found),
            max_pages=None if most is None else most * len(found),
            refused=sum(each.refused for each in found),
            input_tokens=sum(each.input_tokens for each in found),
            cache_tokens=sum(each.cache_tokens for each in found),
            generated_tokens=sum(each.generated_tokens for each in found),
        )


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
    least = max(1, reserved)  # what is reserved, and never nothing at all
    return reserved, integer(f"max_pages of quotas[{tenant!r}]", most, least, MOST_INT64)


def checked_quotas(
    quotas: Mapping[str, tuple[int, int | None]] | None, num_pages: int
) -> dict[str, tuple[int, int | None]]:
    """Return quotas by tenant, a copy, checked against the pages of a replica.

    Raises
    ------
    ValueError
        Less than 0 pages, more reserved than ``max_pages``, more in all than there are.
    TypeError
        A tenant that is not a string, pages that are no integers.
    """
    given: dict[str, tuple[int, int | None]] = {}
    for tenant, quota in dict(quotas or {}).items():
        if not isinstance(tenant, str):
            raise TypeError(f"tenant {tenant!r} of quotas is not a string")
        given[str.__str__(tenant)] = _pages(tenant, quota)
    reserved = sum(quota[0] for quota in given.values())
    if reserved > num_pages:
        raise ValueError(
            f"quotas reserve {reserved} pages in all, must be at most the {num_pages} of a replica"
        )
    return given
