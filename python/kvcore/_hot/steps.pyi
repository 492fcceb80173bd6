# SPDX-License-Identifier: Apache-2.0
import logging
from typing import final

from typing_extensions import Self

from kvcore.backends.protocol import DevicePools, Shard

log: logging.Logger

@final
class InputMaker:
    """Make the inputs of every device out of the tables that a fetch writes.

    Parameters
    ----------
    shards : list of list of (blocks, scales)
        The pools by replica and device in it.
    gpus : kvcore.backends.protocol.DevicePools, or None
        None where no pool is on a GPU.
    layers : kvcore.layers.layer_map.LayerMap, or None
        None without groups.
    pages_per_column : tuple of int
        Pages of each bundle for the tokens that hits are counted in; (1,) without groups.
    state_groups : int
        Groups of layers with a state.
    states : kvcore.pools.StateArrays, or None
        None without arrays of states.
    """

    def __new__(
        cls, shards: list[list[Shard]], gpus: DevicePools | None, total_pages: int
    ) -> Self: ...
