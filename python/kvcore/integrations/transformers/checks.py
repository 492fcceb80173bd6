# SPDX-License-Identifier: Apache-2.0
"""Which models run on pages, how far, and what their pages hold."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from kvcore import KVCacheParams, PagedKVCacheManager
from kvcore.dtypes import NARROW
from kvcore.hf_config import cache_shape
from kvcore.integrations.transformers.attention import MASK_WINDOWS
from kvcore.integrations.transformers.latents import LatentTray, keeps_latents
from kvcore.integrations.transformers.rules import AttentionRule
from kvcore.integrations.transformers.session import paged_attention, refused

__all__ = ["Limits", "cache_params", "check_manager", "check_model"]

_PARAMS: weakref.WeakKeyDictionary[Any, KVCacheParams] = weakref.WeakKeyDictionary()


@dataclass(frozen=True)
class Limits:
    """Say how far a model's packed forward is what the model alone computes.

    Attributes
    ----------
    length : int, or None
        Tokens of a sequence.
    batch_tokens : int, or None
        Tokens of a forward.
    reason : str
        What sets them.
    """

    length: int | None = None
    batch_tokens: int | None = None
    reason: str = ""


def check_model(model: Any) -> Limits:
    """Refuse a model that cannot run on pages; nothing of it is run.

    Raises
    ------
    TypeError
        No model of transformers that generates.
    ValueError
        The model, with the reason.
    """
    if not isinstance(model, PreTrainedModel) or not model.can_generate():
        raise TypeError(
            f"model is a {type(model).__name__}, must be a causal language model of transformers, "
            f"such as AutoModelForCausalLM.from_pretrained gives"
        )
    if getattr(model.config, "is_encoder_decoder", False):
        raise refused(model, "it is an encoder-decoder, which caches cross attention too")
    if model.device.type != "cpu":
        raise refused(model, f"it is on {model.device}, this version's kernels run on the CPU")
    config = model.config.get_text_config(decoder=True)
    try:
        cache_shape(config.to_dict(), dtype="float32")
    except ValueError as error:
        raise refused(model, str(error)) from None
    if getattr(config, "index_topk", None) is not None:
        raise refused(model, "an indexer chooses tokens for its layers, and caches them")
    return _rope_limits(model, config)


def _rope_limits(model: Any, config: Any) -> Limits:
    kinds = {part.get("rope_type") for part in _ropes(config)}
    if "dynamic" in kinds:
        raise refused(
            model, "dynamic NTK rope takes its frequencies from the longest row of a forward"
        )
    if "longrope" in kinds:
        found = [part.get("original_max_position_embeddings") for part in _ropes(config)]
        line = found[0] or getattr(config, "original_max_position_embeddings", None)
        return Limits(line, None, "longrope has other frequencies beyond that")
    if "chunked_attention" in (getattr(config, "layer_types", None) or ()):
        sizes = [config.attention_chunk_size]
        if getattr(config, "attn_temperature_tuning", False):
            sizes.append(int(config.floor_scale))
        return Limits(min(sizes), min(sizes), "its layers attend in chunks of that size")
    return Limits()


def _ropes(config: Any) -> list[dict[str, Any]]:
    """Return the rope parameters: one set, or one per type of layer."""
    found = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    if "rope_type" in found:
        return [found]
    return [part for part in found.values() if isinstance(part, dict)]


class _Probe:
    """Stand in for a packed batch: note what each layer brings, answer zeros."""

    def __init__(self) -> None:
        self.tray = LatentTray()
        self.layers: dict[int, tuple[bool, int, int, int]] = {}
        self.windows: set[int] = set()
        self.dtype = ""

    def attend(
        self,
        module: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        rule: AttentionRule,
    ) -> torch.Tensor:
        self.dtype = str(key.dtype).removeprefix("torch.")
        width = value.shape[-1]
        if rule.window is not None:
            self.windows.add(rule.window)
        if keeps_latents(module):
            self.layers[module.layer_idx] = (True, 1, self.tray.take().shape[-1], width)
        else:
            self.layers[module.layer_idx] = (False, key.shape[1], key.shape[-1], width)
        return query.new_zeros(1, query.shape[2], query.shape[1], width)


def cache_params(model: Any, page_size: int = 16, **overrides: Any) -> KVCacheParams:
    """Return the KVCacheParams of the pages that a model needs.

    Parameters
    ----------
    model : PreTrainedModel
        On the CPU.
    page_size : int
        Tokens per page.
    **overrides
        Other fields of KVCacheParams; ``enable_prefix_caching`` is True by default.

    Raises
    ------
    TypeError, ValueError
        The model cannot run on pages, with the reason.

    Notes
    -----
    Runs one token through the model, once for each model object: what its layers bring is the
    truth, whatever the config says.
    """
    check_model(model)
    known = _PARAMS.get(model)
    if known is None or known.dtype != str(model.dtype).removeprefix("torch."):
        known = _PARAMS[model] = _probed(model)
    fields = {name: getattr(known, name) for name in known.__dataclass_fields__}
    return KVCacheParams(
        **(fields | {"page_size": page_size, "enable_prefix_caching": True} | overrides)
    )


def _probed(model: Any) -> KVCacheParams:
    probe, masks = _Probe(), set[int]()
    zero = torch.zeros((1, 1), dtype=torch.int64)
    noted = MASK_WINDOWS.set(masks)
    try:
        with paged_attention(model), torch.inference_mode():
            model(
                input_ids=zero,
                position_ids=zero,
                past_key_values=probe.tray,
                use_cache=False,
                logits_to_keep=1,
                kvcore_batch=probe,
            )
    finally:
        MASK_WINDOWS.reset(noted)
    return _params_of(model, probe, masks)


def _params_of(model: Any, probe: _Probe, masks: set[int]) -> KVCacheParams:
    layers = model.config.get_text_config(decoder=True).num_hidden_layers
    if sorted(probe.layers) != list(range(layers)):
        raise refused(model, f"{len(probe.layers)} of its {layers} layers attend through kvcore")
    if len(set(probe.layers.values())) > 1:
        raise refused(
            model, "its layers differ in their K and V, one pool of equal pages does not hold them"
        )
    if probe.windows != masks and check_model(model).length is None:
        raise refused(
            model, f"its masks have windows of {sorted(masks)}, its layers {sorted(probe.windows)}"
        )
    is_mla, heads, k_width, v_width = probe.layers[0]
    other = None if is_mla or v_width == k_width else v_width
    return KVCacheParams(
        probe.dtype, heads, k_width, layers, is_mla=is_mla, v_head_dim=other, page_size=1
    )


def check_manager(manager: Any, params: KVCacheParams) -> None:
    """Refuse a manager whose pages do not hold what a model brings.

    Raises
    ------
    TypeError, ValueError
    """
    if not isinstance(manager, PagedKVCacheManager):
        raise TypeError(
            f"manager is a {type(manager).__name__}, must be a kvcore.PagedKVCacheManager"
        )
    given = manager.params
    for name in ("n_devices", "num_layers", "is_mla", "n_kv_heads", "row_widths"):
        if getattr(given, name) != getattr(params, name):
            raise ValueError(
                f"the manager's {name} is {getattr(given, name)}, the model needs "
                f"{getattr(params, name)}; take the params from cache_params(model)"
            )
    if given.dtype != params.dtype and given.dtype not in NARROW:
        raise ValueError(
            f"the manager's dtype is {given.dtype}, must be the model's {params.dtype} or one of "
            f"{', '.join(NARROW)}"
        )
    if manager.fetch([])[0].blocks is None:
        raise ValueError("blocks is None: this manager has no pool for the model's K and V")
