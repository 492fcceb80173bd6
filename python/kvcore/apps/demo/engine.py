# SPDX-License-Identifier: Apache-2.0
"""The settings of an engine."""

from __future__ import annotations

from dataclasses import dataclass

from kvcore import Device, KVCacheParams
from kvcore.apps.demo.protocol import LanguageModel
from kvcore.support.dtypes import itemsize

_HOST = Device("cpu")


@dataclass(frozen=True, kw_only=True)
class EngineSettings:
    """The settings of an engine.

    Attributes
    ----------
    pages, page_size : int
        Number of pages in the pool; tokens of a page.
    dtype : str
        Dtype of the pages. float8 and int8 pages have a scale per token and head.
    prefix_caching : bool
        True if prompts reuse cached pages.
    max_running : int
        Maximum number of running turns.
    step_tokens : int
        Maximum number of tokens in a step, at least `max_running`.
    threads : int
        Threads of the cache's kernels.
    device : Device
        Device of the pages and of attention.
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
