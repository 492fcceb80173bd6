# SPDX-License-Identifier: Apache-2.0
import logging
from typing import final

from typing_extensions import Self

from kvcore.engine_parts import Stager
from kvcore.pools import Shard

log: logging.Logger

@final
class InputMaker:
    """Make the inputs of every device out of the tables that a fetch writes.

    Parameters
    ----------
    shards : list of list of (blocks, scales)
        The pools by replica and device in it.
    gpus : kvcore.engine_parts.Stager, or None
        None where no pool is on a GPU.
    """

    def __new__(cls, shards: list[list[Shard]], gpus: Stager | None, total_pages: int) -> Self: ...
