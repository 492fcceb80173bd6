# SPDX-License-Identifier: Apache-2.0
"""Checks of models and managers: supported models, their longest sequence, and their pages."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

from kvcore import Device, KVCacheParams, PagedKVCacheManager
from kvcore.integrations.transformers import devices
from kvcore.integrations.transformers.attention import MASK_WINDOWS
from kvcore.integrations.transformers.mixers import mixers_of
from kvcore.integrations.transformers.names import CACHE
from kvcore.integrations.transformers.probe import (
    Arrays,
    LayerRow,
    Probe,
    flat_params,
    grouped_params,
)
from kvcore.integrations.transformers.session import paged_attention, refused
from kvcore.layers.hf.config import read_config
from kvcore.layers.layer_map import LayerMap, LayerPlace
from kvcore.support.arguments import flag
from kvcore.support.dtypes import NARROW

__all__ = ["Limits", "cache_params", "check_manager", "check_model"]


@dataclass(frozen=True)
class _Probed:
    """The results of a probe of a model's layers."""

    dtype: str
    layers: Mapping[int, LayerRow]
    states: Mapping[int, Arrays]
    num_layers: int


_PROBED: weakref.WeakKeyDictionary[Any, _Probed] = weakref.WeakKeyDictionary()


@dataclass(frozen=True)
class Limits:
    """A model's device, and the length up to which its packed forward equals the model's own.

    Attributes
    ----------
    device : Device
    length : int, or None
        The most tokens of a sequence; None for no limit.
    reason : str
        The reason of the limit.
    """

    device: Device
    length: int | None = None
    reason: str = ""


def check_model(model: Any) -> Limits:
    """Refuse a model that cannot run on pages, without running it.

    Raises
    ------
    TypeError
        `model` is no transformers model that can generate.
    ValueError
        The model cannot run on pages, with the reason.
    KVCacheError
        The model is on a GPU on which attention cannot run here, with the reason.
    """
    if not isinstance(model, PreTrainedModel) or not model.can_generate():
        raise TypeError(
            f"model is a {type(model).__name__}, must be a causal language model of transformers, "
            f"such as AutoModelForCausalLM.from_pretrained gives"
        )
    if getattr(model.config, "is_encoder_decoder", False):
        raise refused(model, "it is an encoder-decoder, which also caches cross attention")
    device = _device_of(model)
    config = model.config.get_text_config(decoder=True)
    if getattr(config, "index_topk", None) is not None:
        raise refused(model, "an indexer chooses and caches tokens for its layers")
    _kept(model, config)
    return _rope_limits(model, config, device)


def _device_of(model: Any) -> Device:
    try:
        device = devices.device_of_model(model)
    except ValueError as error:
        raise refused(model, str(error)) from None
    devices.require_attention(device)
    return device


def _kept(model: Any, config: Any) -> tuple[set[int], set[int]]:
    """Return the layers with K and V, their own or another layer's, and the layers with states.

    Raises
    ------
    ValueError
        A layer keeps other data.
    """
    # Unsupported fields do not matter here: the probe's forward shows the layers' K and V.
    fields = config.to_dict()
    try:
        flat = read_config(fields, "float32", refuse=False).shape
        return set(range(flat["num_layers"])), set()
    except ValueError as error:
        reason = str(error)
    try:
        grouped = KVCacheParams(**read_config(fields, "float32", groups=True, refuse=False).shape)
    except ValueError:
        raise refused(model, reason) from None
    if grouped.groups is None:
        raise refused(model, reason)
    states = {layer for group in grouped.state_groups for layer in group.layers}
    if not states <= {module.layer_idx for module in mixers_of(model)}:
        raise refused(model, "it does not keep states in a cache of transformers")
    rows = {layer for group in grouped.attention_groups for layer in group.layers}
    return rows | set(grouped.shared or ()), states


def _rope_limits(model: Any, config: Any, device: Device) -> Limits:
    kinds = {part.get("rope_type") for part in _ropes(config)}
    if "dynamic" in kinds:
        raise refused(
            model, "dynamic NTK rope takes its frequencies from the longest row of a forward"
        )
    if "longrope" in kinds:
        found = [part.get("original_max_position_embeddings") for part in _ropes(config)]
        line = found[0] or getattr(config, "original_max_position_embeddings", None)
        return Limits(device, line, "longrope has other frequencies beyond this length")
    return Limits(device)


def _ropes(config: Any) -> list[dict[str, Any]]:
    """Return the rope parameters: one set, or one set per type of layer."""
    found = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    if "rope_type" in found:
        return [found]
    return [part for part in found.values() if isinstance(part, dict)]


def cache_params(
    model: Any, page_size: int = 16, *, groups: bool = True, **overrides: Any
) -> KVCacheParams:
    """Return the KVCacheParams of the pages that a model needs.

    Parameters
    ----------
    model : PreTrainedModel
        On the CPU, or on one GPU.
    page_size : int
        Tokens per page.
    groups : bool
        True: layers with windows or chunks keep only their tokens, recurrent layers keep a state,
        and layers that read another layer's K and V keep nothing. A model with these layers gets
        params with groups. False: every layer keeps every token; a ValueError for models with
        states.
    **overrides
        Other fields of KVCacheParams; ``enable_prefix_caching`` is True by default.

    Raises
    ------
    TypeError, ValueError
        The model cannot run on pages, with the reason.
    KVCacheError
        The model is on a GPU, and kvcore's kernels, cupy or Triton are missing, with the reason.

    Notes
    -----
    Runs one token through the model, once for each model object. The params describe the K and V
    of this forward pass, even if the config differs.
    """
    device = check_model(model).device
    flag("groups", groups)
    known = _PROBED.get(model)
    if known is None or known.dtype != str(model.dtype).removeprefix("torch."):
        known = _PROBED[model] = _probed(model)
    _check_heads(model, known.layers.values(), device)
    if known.states and not groups:
        raise ValueError(
            f"{len(known.states)} of the {known.num_layers} layers of {type(model).__name__} keep "
            f"a state, which needs groups; leave out groups=False"
        )
    try:
        if groups:
            shape = grouped_params(known.dtype, known.layers, known.states, known.num_layers)
        else:
            shape = flat_params(known.dtype, known.layers)
    except ValueError as error:
        raise refused(model, str(error)) from None
    fields = {"page_size": page_size, "enable_prefix_caching": True} | overrides
    return replace(shape, **fields)


def _check_heads(model: Any, rows: Iterable[LayerRow], device: Device) -> None:
    """Refuse heads that are too wide for attention on a GPU; attention itself checks latents."""
    widest = max((max(row.shape[2:]) for row in rows if not row.shape[0]), default=0)
    most = devices.most_head_dim(device)
    if most is not None and widest > most:
        raise refused(
            model, f"its heads have {widest} elements, attention on a GPU takes up to {most}"
        )


def _probed(model: Any) -> _Probed:
    config = model.config.get_text_config(decoder=True)
    attending, recurrent = _kept(model, config)
    probe, masks = Probe(), set[int]()
    zero = torch.zeros((1, 1), dtype=torch.int64, device=model.device)
    noted = MASK_WINDOWS.set(masks)
    try:
        with paged_attention(model), torch.inference_mode():
            model(
                input_ids=zero,
                position_ids=zero,
                use_cache=False,
                logits_to_keep=1,
                kvcore_batch=probe,
                **{CACHE: probe.tray},
            )
    finally:
        MASK_WINDOWS.reset(noted)
    if probe.layers.keys() != attending:
        raise refused(
            model,
            f"{len(probe.layers)} of its {len(attending)} layers attend through kvcore in "
            f"transformers {transformers.__version__}",
        )
    if {layer for layer, arrays in probe.states.items() if arrays} != recurrent:
        raise refused(
            model, f"layers {sorted(probe.states)} keep states, not only {sorted(recurrent)}"
        )
    if probe.spans != masks:
        raise refused(
            model, f"its masks have windows of {sorted(masks)}, its layers {sorted(probe.spans)}"
        )
    return _Probed(probe.dtype, probe.layers, probe.states, config.num_hidden_layers)


def check_manager(manager: Any, params: KVCacheParams, device: Device) -> None:
    """Refuse a manager whose pages do not fit a model, or are on another device.

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
    _check_groups(given, params)
    _check_states(given, params)
    if given.dtype != params.dtype and given.dtype not in NARROW:
        raise ValueError(
            f"the manager's dtype is {given.dtype}, must be the model's {params.dtype} or one of "
            f"{', '.join(NARROW)}"
        )
    if manager.fetch([])[0].blocks is None:
        raise ValueError("blocks is None: this manager has no pool for the model's K and V")
    if manager.devices != (device,):
        raise ValueError(
            f"the manager's pool is on {manager.devices[0]}, the model on {device}; make the "
            f"manager with devices=['{device}']"
        )


def _check_groups(given: KVCacheParams, params: KVCacheParams) -> None:
    """Refuse pages that do not keep a layer's K and V as long as the layer reads them."""
    pages, needed = LayerMap(given), LayerMap(params)
    attending = set(range(params.num_layers))
    if params.groups is not None:
        attending = {layer for group in params.attention_groups for layer in group.layers}
        attending |= set(params.shared or ())
    for layer in sorted(attending):
        read = needed[layer]
        try:
            kept = pages[layer]
        except IndexError as error:
            raise ValueError(f"{error}; take the params from cache_params(model)") from None
        owner = (given.shared or {}).get(layer)
        is_alike = (kept.heads, kept.widths) == (read.heads, read.widths)
        is_own = owner in (None, (params.shared or {}).get(layer))
        if not (is_alike and is_own and _keeps(kept, read)):
            raise ValueError(
                f"layer {layer} brings {_told(read)}, the manager keeps {_told(kept)}"
                f"{'' if is_own else f' of layer {owner}'}; take the params from "
                f"cache_params(model)"
            )


def _check_states(given: KVCacheParams, params: KVCacheParams) -> None:
    """Refuse slots that do not fit the states of a layer."""
    slots = {layer: group.arrays for group in given.state_groups for layer in group.layers}
    for group in params.state_groups:
        for layer in group.layers:
            if slots.get(layer) != group.arrays:
                raise ValueError(
                    f"layer {layer} keeps a state of {group.arrays}, the manager has slots for "
                    f"{slots.get(layer, 'none')}; take the params from cache_params(model)"
                )


def _keeps(kept: LayerPlace, read: LayerPlace) -> bool:
    """Return true if a layer's pages keep every token that the layer reads."""
    if kept.window is not None:
        return read.window is not None and read.window <= kept.window
    if kept.chunk is not None:
        return read.chunk is not None and kept.chunk % read.chunk == 0
    return True


def _told(place: LayerPlace) -> str:
    kept = "all tokens"
    if place.window is not None:
        kept = f"a window of {place.window}"
    elif place.chunk is not None:
        kept = f"chunks of {place.chunk}"
    widths = " and ".join(map(str, place.widths))
    return f"{place.heads} heads of {widths} for {kept}"
