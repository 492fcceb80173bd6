# SPDX-License-Identifier: Apache-2.0
"""A row of latent tokens (MLA) in pages, and the expected result of attention over it."""

from __future__ import annotations

from typing import Any

import numpy as np

from attention_oracle import attend


class Latent:
    """Latent rows of `rank` + `rope` elements in scattered pages, with poison everywhere else."""

    def __init__(
        self,
        cached: int,
        new: int,
        *,
        page: int = 16,
        rank: int = 64,
        rope: int = 16,
        heads: int = 16,
    ) -> None:
        rng = np.random.default_rng(cached + new)
        length = cached + new
        columns = -(-length // page)
        self.table = rng.permutation(columns + 2)[None, :columns].astype(np.uint32)
        self.rows = rng.normal(size=(length, rank + rope)).astype(np.float32)
        self.pool = np.full((columns + 2, page, rank + rope), np.nan, np.float32)
        at = np.arange(length)
        self.pool[self.table[0, at // page], at % page] = self.rows
        self.cached = np.array([cached], np.uint32)
        self.offsets = np.array([0, new], np.uint32)
        self.q = rng.normal(size=(new, heads, rank + rope)).astype(np.float32)
        self.rank, self.page = rank, page

    def expected(self, rows: Any = None, **rule: Any) -> Any:
        keys = (self.rows if rows is None else rows)[:, None].astype(float)
        return attend(self.q, [keys], [keys[..., : self.rank]], self.offsets, **rule)
