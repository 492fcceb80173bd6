# SPDX-License-Identifier: Apache-2.0
"""Set up an engine."""

from __future__ import annotations

from dataclasses import dataclass

from kvcore import Device, KVCacheParams
from kvcore.apps.demo.protocol import LanguageModel
from kvcore.support.dtypes import itemsize

_HOST = Device("cpu")


@dataclass(frozen=True, kw_only=True)
class EngineSettings:
    """Set up an engine.

    Attributes
    ----------
    pages, page_size : int
        The pool; tokens of a page.
    dtype : str
        Of the pages. float8 and int8 ones have a scale per token and head.
    prefix_caching : bool
        Whether prompts reuse what was computed before.
    max_running : int
        Turns that run at a time.
    step_tokens : int
        Most tokens of a step, at least `max_running`.
    threads : int
        Of the cache's kernels.
    device : Device
        Where the pages are and attention runs.
    """

    pages: int
    page_size: int = 16
    dtype: str = "float32"
    prefix_caching: bool = True
    max_running: int = 16
    step_tokens: int = 256
    threads: int = 1
    device: Device = _HOST

    def params(self, model: LanguageModel) -> KVCacheParams:
        """Return the parameters of a model's cache."""
        return KVCacheParams(
            self.dtype,
            model.n_kv_heads,
            model.head_dim,
            model.num_layers,
            page_size=self.page_size,
            enable_prefix_caching=self.prefix_caching,
            kv_scale_granularity=model.head_dim if itemsize(self.dtype) == 1 else None,
        )
