# SPDX-License-Identifier: Apache-2.0
"""The elements of a token in each layer, compared with the cache that a transformers model writes.

Models run whole, with the defaults of their class, on the meta device, where weights have no bytes.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest

from conftest import require

torch = require("torch")
transformers = require("transformers")

from hf_decoders import CAUSAL, decoders, whole_configs  # noqa: E402
from kvcore import KVCacheParams  # noqa: E402
from kvcore.integrations.transformers.names import CACHE  # noqa: E402
from kvcore.layers.packing import row_elements  # noqa: E402

torch.set_num_threads(1)

TOKENS = 7
#: Latents with indexers, other heads in window layers, one head for all queries.
FAST = ("axk2", "mimo_v2_flash", "gpt_bigcode")


def elements_of_cache(kind: str) -> dict[int, int] | None:
    """Return a token's elements in each layer with K and V; None if the model cannot run here."""
    config = copy.deepcopy(whole_configs()[kind])
    text = config.get_text_config(decoder=True)
    if hasattr(text, "is_decoder"):
        text.is_decoder = True  # for classes that encode by default
    auto = "AutoModelForCausalLM" if kind in CAUSAL else "AutoModelForImageTextToText"
    try:
        with torch.device("meta"), torch.no_grad():
            model = getattr(transformers, auto).from_config(config, dtype=torch.bfloat16).eval()
            ids = torch.zeros((1, TOKENS), dtype=torch.long)
            cache = model(input_ids=ids, use_cache=True)[CACHE]
    except Exception:  # noqa: BLE001 - needs images, or values of arrays, or cannot run at all
        return None
    layers = getattr(cache, "self_attention_cache", cache).layers
    return {
        i: elements(layer)
        for i, layer in enumerate(layers)
        if getattr(layer, "keys", None) is not None
    }


def elements(layer: Any) -> int:
    keys = getattr(layer, "indexer_keys", None)
    row = layer.keys.shape[1] * (layer.keys.shape[3] + layer.values.shape[3])
    return int(row + (0 if keys is None else keys.shape[-1]))


def elements_of_params(kind: str) -> dict[int, int] | None:
    try:
        made = KVCacheParams.from_hf_config(decoders()[kind].to_dict(), "bfloat16", page_size=16)
    except ValueError:
        return None
    return {i: sum(row_elements(made, each)) for each in made.attention_groups for i in each.layers}


@pytest.mark.parametrize("kind", FAST)
def test_rows_are_those_of_the_cache(kind: str) -> None:
    if kind not in whole_configs():
        pytest.skip(f"this version of transformers has no {kind}")
    read = elements_of_params(kind)
    assert read is not None
    assert read == elements_of_cache(kind)


@pytest.mark.slow
def test_rows_of_all_classes_are_those_of_their_caches() -> None:
    wrong, alike = {}, 0
    caches: dict[str, dict[int, int] | None] = {}  # a text model and models around it have one
    for kind, config in whole_configs().items():
        read = elements_of_params(kind)
        if read is None:
            continue
        text = config.get_text_config(decoder=True).to_json_string(use_diff=False)
        if caches.get(text) is None:
            caches[text] = elements_of_cache(kind)
        cached = caches[text]
        if cached is None:
            continue
        alike += read == cached
        if read != cached:
            wrong[kind] = (read, cached)
    assert wrong == {}
    assert alike > 160
