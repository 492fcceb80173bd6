# SPDX-License-Identifier: Apache-2.0
"""Tiny models with recurrent layers, and managers whose slots are full of noise."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import transformers

import hf_models
from generated import LONGEST, checked_manager
from kvcore import PagedKVCacheManager
from kvcore.integrations.transformers import cache_params


def model_of(family: str) -> Any:
    if not hf_models.exists(family):
        pytest.skip(f"transformers {transformers.__version__} does not run {family} in packed rows")
    return hf_models.model_of(family)


def manager_of(model: Any, page: int, pages: int = 0, **options: Any) -> PagedKVCacheManager:
    """Return a manager for all prompts at once, or with `pages` pages; slots are full of noise."""
    params = options.pop("params", None) or cache_params(model, page)
    manager = checked_manager(params, pages or 16 * -(-LONGEST // page), **options)
    overwrite(manager)
    return manager


def overwrite(manager: PagedKVCacheManager) -> None:
    for group in manager.states:
        for (array,) in group.values():
            array[:] = np.random.default_rng(0).normal(size=array.shape)
