# SPDX-License-Identifier: Apache-2.0
"""Every class of the transformers library that generates text, with its defaults."""

from __future__ import annotations

import functools
from typing import Any

from transformers.cache_utils import DynamicCache
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

__all__ = ["CAUSAL", "decoders", "whole_configs"]

CAUSAL = frozenset(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


@functools.cache
def whole_configs() -> dict[str, Any]:
    """Return the config of each class whose language model has a cache, by its type."""
    found = {}
    for kind in {**MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, **MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES}:
        try:
            config = CONFIG_MAPPING[kind]()
            DynamicCache(config=config.get_text_config(decoder=True))
        except Exception:  # noqa: BLE001 - classes that need arguments, or cannot be made
            continue
        found[kind] = config
    return found


@functools.cache
def decoders() -> dict[str, Any]:
    """Return the config of the language model of each class."""
    return {kind: config.get_text_config(decoder=True) for kind, config in whole_configs().items()}
