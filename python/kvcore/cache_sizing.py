# SPDX-License-Identifier: Apache-2.0
"""What a cache needs, asked of a manager's class before there is one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvcore import sizing
from kvcore.device import Device
from kvcore.layers.kinds import MAX_CHUNK_TOKENS

if TYPE_CHECKING:
    from kvcore.params import KVCacheParams

__all__ = ["CacheSizing"]


class CacheSizing:
    """Tell sizes by arithmetic alone: no memory is asked for."""

    @classmethod
    def estimated_memory_size(
        cls,
        params: KVCacheParams,
        max_batch_size: int,
        max_seq_len: int,
        num_layers: int,
        available_cache_memory: int,
        devices: Sequence[Device | str],  # noqa: ARG003 - params.n_devices counts them
        *,
        max_chunk_tokens: int = MAX_CHUNK_TOKENS,
        **kwargs: object,  # noqa: ARG003 - call compatibility
    ) -> int:
        """Estimate the bytes of the cache over all replicas.

        Per replica the smaller of its share of the memory and what the largest batch of longest
        sequences needs.

        Parameters
        ----------
        params : KVCacheParams
        max_batch_size, max_seq_len : int
            Requests over all replicas, tokens of the longest.
        num_layers : int
            Re-derives `params`.
        available_cache_memory : int
            Bytes over all devices.
        max_chunk_tokens : int
            Tokens of a request that run in one step at most, for layers with a window.
        devices, **kwargs
            Not used: ``params.n_devices`` counts the devices.
        """
        params = sizing.rederived(params, num_layers=num_layers)
        return sizing.estimated_memory_size(
            params, max_batch_size, max_seq_len, available_cache_memory, max_chunk_tokens
        )

    @classmethod
    def max_supported_sequence_length(
        cls,
        params: KVCacheParams,
        num_layers: int,
        memory_available: int,
        *,
        max_chunk_tokens: int = MAX_CHUNK_TOKENS,
    ) -> int:
        """Return the longest sequence in tokens, a multiple of the page; 0 when no page fits.

        `memory_available` counts bytes over all devices; a sequence has those of one replica.
        """
        params = sizing.rederived(params, num_layers=num_layers)
        return sizing.max_supported_sequence_length(params, memory_available, max_chunk_tokens)

    @classmethod
    def infer_optimal_batch_size(
        cls,
        params: KVCacheParams,
        max_seq_len: int,
        num_layers: int,
        available_cache_memory: int,
        devices: Sequence[Device | str],  # noqa: ARG003 - params.n_devices counts them
        *,
        max_chunk_tokens: int = MAX_CHUNK_TOKENS,
        **kwargs: object,  # noqa: ARG003 - call compatibility
    ) -> int:
        """Return the largest batch of longest sequences that fits; 0 when not one does.

        Over all replicas; the arguments are those of ``estimated_memory_size``.
        """
        params = sizing.rederived(params, num_layers=num_layers)
        return sizing.infer_optimal_batch_size(
            params, max_seq_len, available_cache_memory, max_chunk_tokens
        )
