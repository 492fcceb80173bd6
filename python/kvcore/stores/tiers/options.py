# SPDX-License-Identifier: Apache-2.0
"""Check a manager's tiers, and open its stores."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvcore.backends.protocol import Mover
from kvcore.errors import CapacityError
from kvcore.layers.layer_map import pages_per_column
from kvcore.native.contexts import stand_ins_capsule
from kvcore.options import TierOptions
from kvcore.params import KVCacheParams
from kvcore.stores.tiers.choice import TierChoice, chosen_tiers, model_fingerprint, with_host_tier

if TYPE_CHECKING:
    from kvcore.stores import BlockStore
    from kvcore.stores.tiers.memory import TierStates
    from kvcore.stores.tiers.stack import TierStack

__all__ = ["ChosenTiers"]


@dataclass(frozen=True)
class ChosenTiers:
    """Hold the checked tiers of a manager, and open them.

    Parameters
    ----------
    options : TierOptions
    choice : TierChoice
    fingerprint : bytes [32]
    """

    options: TierOptions
    choice: TierChoice
    fingerprint: bytes

    @classmethod
    def of(cls, options: TierOptions, params: KVCacheParams, *, has_pool: bool) -> ChosenTiers:
        """Check the tiers and the fingerprint.

        Raises
        ------
        ValueError, TypeError
        """
        return cls(
            options,
            chosen_tiers(options.tiers, params, has_pool=has_pool),
            model_fingerprint(params, options.fingerprint),
        )

    def with_host_tier(
        self, params: KVCacheParams, num_pages: int, max_seq_len: int
    ) -> KVCacheParams:
        """Return params with the host tier that the tiers name, or that the stores need."""
        return with_host_tier(
            params, self.choice, num_pages, max_seq_len, self.options.num_host_states
        )

    def core_options(self, *, has_keys: bool) -> dict[str, Any]:
        """Return the options of ``CacheConfig`` about stores and keys, for one model."""
        if not (self.choice.stores or has_keys):
            return {}
        return {
            "has_stores": bool(self.choice.stores),
            "key_seed": _CBOR_32_BYTES + self.fingerprint,
            "stand_ins": stand_ins_capsule(),
        }

    def opened(
        self, params: KVCacheParams, mover: Mover | None, states: TierStates | None
    ) -> TierStack | None:
        """Open the lower stores of the host tier; return None if `tiers` names no stores.

        If this raises, all stores that it opened are closed.

        Raises
        ------
        CapacityError
            The host tier has no page.
        KVCacheError
            A directory is in use, or cannot be written.
        OSError
            The certificates of a Redis tier cannot be read, or the system has no memory to share
            with the client of a Mooncake tier.
        ImportError
            The client of a Mooncake tier is not installed.
        ValueError
            An open DiskStore of `tiers` is for smaller pages.
        """
        if not self.choice.stores:
            return None
        if mover is None:
            raise CapacityError(
                f"the host tier of {params.host_kvcache_swap_space_gb} GiB holds no page of "
                f"{params.bytes_per_page} bytes, but stores need at least one; give it more"
            )
        # Only managers with stores import these modules.
        from kvcore.stores.tiers.calls import StoreLimits
        from kvcore.stores.tiers.memory import HostMemory
        from kvcore.stores.tiers.records import RecordLayout
        from kvcore.stores.tiers.stack import TierStack, adapters_of

        memory = HostMemory(mover, states, params.data_parallel_degree)
        layout = RecordLayout(memory.part_bytes(sum(pages_per_column(params))), self.fingerprint)
        limits = StoreLimits(seconds=self.options.store_timeout)
        return TierStack(
            adapters_of(self._opened(layout.payload_bytes), layout, limits),
            memory,
            page_bytes=layout.payload_bytes,
            limits=limits,
            max_write_wait=self.options.max_write_wait,
        )

    def _opened(self, page_bytes: int) -> list[tuple[BlockStore, bool]]:
        """Return each store, and whether the manager has opened it."""
        from kvcore.stores import (
            DiskStore,
            DiskTier,
            MooncakeStore,
            MooncakeTier,
            RedisStore,
            RedisTier,
        )

        found: list[tuple[BlockStore, bool]] = []
        try:
            for item in self.choice.stores:
                if isinstance(item, DiskTier):
                    disk = DiskStore(item, page_bytes=page_bytes, fingerprint=self.fingerprint)
                    found.append((disk, True))
                    continue
                if isinstance(item, RedisTier):
                    found.append((RedisStore(item), True))
                    continue
                if isinstance(item, MooncakeTier):
                    found.append((MooncakeStore(item), True))
                    continue
                if isinstance(item, DiskStore) and item.page_bytes < page_bytes:
                    raise ValueError(
                        f"a DiskStore of tiers is for pages of {item.page_bytes} bytes, must be "
                        f"for {page_bytes}; open it with page_bytes={page_bytes}"
                    )
                found.append((item, False))
        except BaseException:
            for store, is_own in found:
                if is_own:
                    store.close()
            raise
        return found


#: The head of a CBOR byte string of 32 bytes.
_CBOR_32_BYTES = b"\x58\x20"
