# SPDX-License-Identifier: Apache-2.0
"""Hugging Face transformers on kvcore: generation over a paged pool, and its parts.

Importing this package registers the attention implementation "kvcore".
"""

from __future__ import annotations

from kvcore.integrations.transformers.attention import register
from kvcore.integrations.transformers.batch import PackedBatch
from kvcore.integrations.transformers.cache import KVCoreCache
from kvcore.integrations.transformers.checks import cache_params
from kvcore.integrations.transformers.generation import generate
from kvcore.integrations.transformers.requests import GenerationResult
from kvcore.integrations.transformers.session import paged_attention

__all__ = [
    "GenerationResult",
    "KVCoreCache",
    "PackedBatch",
    "cache_params",
    "generate",
    "paged_attention",
]

register()
