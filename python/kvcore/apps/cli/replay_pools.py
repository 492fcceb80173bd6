# SPDX-License-Identifier: Apache-2.0
"""Make the pools of ``kvcore replay`` from its sizes: pages or bytes, one size or lists."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from itertools import product

import typer

from kvcore import KVCacheParams
from kvcore.apps.cli.model_sizes import model_pools, pages_or_none
from kvcore.apps.cli.options import MOST_PAGES, checked, fitting_pages, listed
from kvcore.apps.cli.options import pages as read_pages
from kvcore.apps.cli.page_style import SLOTS
from kvcore.apps.cli.presets import find_model, model_params
from kvcore.apps.replay.model_pools import is_hybrid
from kvcore.apps.replay.pool import flat_page_bytes, require_windows
from kvcore.replay import PoolSettings
from kvcore.support.byte_sizes import format_size, parse_size
from kvcore.support.dtypes import itemsize

__all__ = ["PoolSizes"]

_MOST_GROUPED = SLOTS // 2  # each policy has two curves


@dataclass(frozen=True, kw_only=True)
class PoolSizes:
    """The options that give the sizes of the pools, as a user wrote them."""

    page_size: int
    replicas: int
    pages: str | None
    memory: str | None
    model: str | None
    bytes_per_token: int | None
    dtype: str | None
    groups: str | None
    state_slots: str | None
    checkpoint_every: int | None
    requests: int
    host_pages: str | None
    host_memory: str | None
    disk_pages: str | None
    disk: str | None

    def grouped(self, policies: int) -> KVCacheParams | None:
        """Find the model of --groups and check that a replay supports it; None without it."""
        if self.dtype is not None:
            checked("--dtype", itemsize, self.dtype)
        if self.groups is None:
            return None
        if policies > _MOST_GROUPED:
            raise typer.BadParameter(
                f"expected at most {_MOST_GROUPED} policies with --groups, got {policies}",
                param_hint="'--policy'",
            )
        found = checked("--groups", find_model, self.groups)
        params = checked("--groups", partial(found.params, groups=True), self.page_size, self.dtype)
        checked("--groups", require_windows, params)
        return params

    def pools(self, grouped: KVCacheParams | None) -> list[PoolSettings]:
        """Return a pool for each number of pages and each pair of tiers."""
        page_bytes, served = self._page_bytes(grouped)
        if served is not None:
            self._check_tiers()
            return model_pools(self, served)
        for option, value in self._state_options():
            if value is not None:
                raise typer.BadParameter(
                    "expected --model with a model whose layers keep a state", param_hint=option
                )
        counts = self._counts(page_bytes)
        self._check_tiers()
        host = self._tier("host", self.host_pages, self.host_memory, page_bytes, self.replicas)
        disk = self._tier("disk", self.disk_pages, self.disk, page_bytes, 1)
        tiers = dict.fromkeys((h, d if h else 0) for h, d in product(host, disk))
        return [
            PoolSettings(
                page_size=self.page_size,
                pages=n,
                replicas=self.replicas,
                host_pages=h,
                disk_pages=d,
                page_bytes=page_bytes,
            )
            for (h, d), n in product(tiers, counts)
        ]

    def _state_options(self) -> tuple[tuple[str, object], ...]:
        slots, every = self.state_slots, self.checkpoint_every
        return ("'--state-slots'", slots), ("'--checkpoint-every'", every)

    def _page_bytes(self, grouped: KVCacheParams | None) -> tuple[int, KVCacheParams | None]:
        """Return the bytes of a page, 0 if no option gives them, and the model to serve.

        The model is None if each page has all layers.
        """
        options = {
            "--model": self.model,
            "--bytes-per-token": self.bytes_per_token,
            "--groups": grouped,
        }
        given = [name for name, value in options.items() if value is not None]
        if len(given) > 1:
            raise typer.BadParameter(
                f"expected {given[0]} or {given[1]}, not both: each sets the bytes of a page"
            )
        if self.dtype is not None and self.model is None and grouped is None:
            raise typer.BadParameter(
                "expected --model or --groups with --dtype", param_hint="'--dtype'"
            )
        if self.bytes_per_token is not None:
            return self.bytes_per_token * self.page_size, None
        if grouped is not None:
            return flat_page_bytes(grouped), None
        if self.model is None:
            return 0, None
        self._check_sized()
        model = checked("--model", model_params, self.model, self.page_size, self.dtype)
        return flat_page_bytes(model), model if is_hybrid(model) else None

    def _check_sized(self) -> None:
        """Check that the options have either --pages or --memory."""
        if (self.pages is None) == (self.memory is None):
            raise typer.BadParameter(_SIZED)

    def _counts(self, page_bytes: int) -> tuple[int | None, ...]:
        """Return the numbers of pages per replica; None for the default number."""
        if self.bytes_per_token is not None:
            self._check_sized()
        if self.memory is None:
            return (
                (None,)
                if self.pages is None
                else checked("--pages", listed, self.pages, read_pages)
            )
        if self.pages is not None or not page_bytes:
            raise typer.BadParameter(_SIZED)
        sizes = checked("--memory", listed, self.memory, parse_size)
        return tuple(
            dict.fromkeys(fitting_pages(size, self.replicas, page_bytes) for size in sizes)
        )

    def _check_tiers(self) -> None:
        has_host = self.host_pages is not None or self.host_memory is not None
        if has_host and self.groups is not None:
            raise typer.BadParameter(
                "expected --host-pages or --groups, not both: tiers hold flat pages"
            )
        if not has_host and (self.disk_pages is not None or self.disk is not None):
            raise typer.BadParameter(
                "expected --host-pages with --disk-pages, or --host-memory with --disk: pages "
                "reach the disk through a host tier"
            )

    def _tier(
        self, name: str, pages: str | None, size: str | None, page_bytes: int, parts: int
    ) -> tuple[int, ...]:
        """Return the pages of a tier on each of `parts`; 0 without the tier."""
        by_pages = f"--{name}-pages"
        by_size = "--host-memory" if name == "host" else "--disk"
        if pages is not None and size is not None:
            raise typer.BadParameter(f"expected {by_pages} or {by_size}, not both")
        if pages is not None:
            # A list may contain 0, to compare with no tier.
            read = pages_or_none if "," in pages else read_pages
            return checked(by_pages, listed, pages, read)
        if size is None:
            return (0,)
        if not page_bytes:
            raise typer.BadParameter(
                f"expected --model or --bytes-per-token with {by_size}", param_hint=f"'{by_size}'"
            )
        sizes = checked(by_size, listed, size, parse_size)
        counts = [each // parts // page_bytes for each in sizes]
        for each, found in zip(sizes, counts, strict=True):
            is_none = each == 0 and len(sizes) > 1
            if not is_none and not 1 <= found <= MOST_PAGES:
                raise typer.BadParameter(
                    f"expected room for 1 to {MOST_PAGES} pages of {format_size(page_bytes)} on "
                    f"each of {parts} replicas, got {format_size(each)}",
                    param_hint=f"'{by_size}'",
                )
        return tuple(dict.fromkeys(counts))


_SIZED = "expected --pages, or --memory together with --model, --bytes-per-token or --groups"
