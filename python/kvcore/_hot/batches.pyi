# SPDX-License-Identifier: Apache-2.0
from typing import final

from typing_extensions import Self

from kvcore._hot.claims import ClaimTable

@final
class BatchReader:
    """Point to the requests of contexts, and remember the batch that was done with last."""

    def __new__(cls, claims: ClaimTable) -> Self: ...
