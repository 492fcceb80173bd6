# SPDX-License-Identifier: Apache-2.0
"""The dtype of K and V that a quantised checkpoint asks for."""

from __future__ import annotations

from typing import Any

from kvcore.layers.hf.reading import Fields

__all__ = ["quantized_dtype"]

_REMEDY = "pass dtype= of the cache"
# Type and bits of `kv_cache_scheme`, which compressed-tensors and ModelOpt write.
_SCHEMES: dict[tuple[Any, Any], str] = {("float", 8): "float8_e4m3fn", ("int", 8): "int8"}
_PLAIN = (None, "tensor", "attn_head")  # scales that do not grow with the tokens
# Of ModelOpt.
_ALGORITHMS = {"FP8": "float8_e4m3fn", "INT8": "int8"}


def quantized_dtype(whole: Fields, text: Fields) -> str | None:
    """Return the dtype that ``quantization_config`` gives K and V, None where it gives none.

    Parameters
    ----------
    whole, text : Fields
        The config, and that of the language model in it.

    Raises
    ------
    ValueError
        K and V are quantised in a way that no dtype of a cache is.

    Notes
    -----
    Read are ``kv_cache_scheme`` of compressed-tensors and ``kv_cache_quant_algo`` of ModelOpt.
    """
    for fields in (text, whole):
        section = fields.part("quantization_config")
        for part in (section, section.part("quantization")):
            found = _by_scheme(part.get("kv_cache_scheme")) or _by_algorithm(
                part.get("kv_cache_quant_algo")
            )
            if found is not None:
                return found
    return None


def _by_scheme(scheme: Any) -> str | None:
    if scheme is None:
        return None
    name = f"kv_cache_scheme of the config's quantization_config is {scheme!r}"
    if not isinstance(scheme, dict):
        raise ValueError(f"{name}, must be an object; {_REMEDY}")
    found = _SCHEMES.get((scheme.get("type", "float"), scheme.get("num_bits")))
    if found is None:
        raise ValueError(f"{name}, must have a type and num_bits of {list(_SCHEMES)}; {_REMEDY}")
    if scheme.get("strategy") not in _PLAIN:
        raise ValueError(
            f"{name}, whose scales are kept with every token; {_REMEDY}, and kv_scale_granularity="
        )
    return found


def _by_algorithm(name: Any) -> str | None:
    if name is None:
        return None
    if name not in _ALGORITHMS:
        raise ValueError(
            f"kv_cache_quant_algo of the config's quantization_config is {name!r}, must be one of "
            f"{', '.join(_ALGORITHMS)}; {_REMEDY}"
        )
    return _ALGORITHMS[name]
