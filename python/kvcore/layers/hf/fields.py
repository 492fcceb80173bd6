# SPDX-License-Identifier: Apache-2.0
"""The fields of a Hugging Face ``config.json``, under the names that model families give them.

`Fields` notes which fields are read.
"""

from __future__ import annotations

import errno
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from kvcore.layers.hf.defaults import CLASS_DEFAULTS

__all__ = [
    "DTYPE",
    "HEADS",
    "HEAD_DIM",
    "HIDDEN",
    "KV_HEADS",
    "LAYERS",
    "Config",
    "Fields",
    "Notes",
    "count",
    "field",
    "flag",
    "language_model",
    "load",
    "optional_count",
    "require_agreement",
]


class Notes:
    """Record the fields of a config that were read, and the ignored fields with the reasons.

    Attributes
    ----------
    read : dict of str to object
        Values by name; the name of a field inside an object is "object.field".
    defaults : dict of str to object
        Values that the config leaves to the model's class, by name.
    ignored : dict of str to str
        Reasons by name.
    """

    def __init__(self) -> None:
        self.read: dict[str, Any] = {}
        self.defaults: dict[str, Any] = {}
        self.ignored: dict[str, str] = {}


class Fields(Mapping[str, Any]):
    """Read the fields of a config, or of an object in it, and note every name that is read.

    Parameters
    ----------
    fields : mapping
    notes : Notes
        Shared by all objects of a config.
    path : str
        Names of the objects around these fields, each followed by a dot.
    defaults : mapping, optional
        Values that the model's class uses for fields that are missing or null.

    Notes
    -----
    ``fields[name]``, ``fields.get(name)`` and ``name in fields`` read a field. Iteration over the
    names reads no field.
    """

    def __init__(
        self,
        fields: Mapping[str, Any],
        notes: Notes,
        path: str = "",
        defaults: Mapping[str, Any] | None = None,
    ) -> None:
        self._fields = fields
        self._defaults = defaults or {}
        self.path = path
        self.notes = notes

    def __getitem__(self, name: str) -> Any:
        value = self._fields.get(name)
        if value is None and name in self._defaults:
            value = self.notes.defaults[self.path + name] = self._defaults[name]
            return value
        if name in self._fields:
            self.notes.read[self.path + name] = value
        return self._fields[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._fields)

    def __len__(self) -> int:
        return len(self._fields)

    def part(self, name: str) -> Fields:
        """Return an object inside the config; an empty one if the field is missing or null.

        Raises
        ------
        ValueError
            The field is not an object.
        """
        value = self._fields.get(name)
        if not value:
            value = {}
        if not isinstance(value, Mapping):
            raise ValueError(f"{name} of the config is {value!r}, must be an object")
        return Fields(value, self.notes, f"{self.path}{name}.")

    def with_defaults(self, defaults: Mapping[str, Any]) -> Fields:
        """Return the same fields with values for the fields that are missing or null."""
        return Fields(self._fields, self.notes, self.path, defaults)

    def says(self, name: str) -> bool:
        """Return true if the config has a field with this name, without reading the field."""
        return name in self._fields

    def holds(self, name: str, value: Any) -> bool:
        """Return true if the config has a field with this name and value, without reading it."""
        return name in self._fields and bool(self._fields[name] == value)

    def ignore(self, why: str, *names: str) -> None:
        """Note that the fields with these names do not change the cache."""
        for name in names:
            if name in self._fields:
                self.notes.ignored.setdefault(self.path + name, why)


Config = Mapping[str, Any]
_MOST_BYTES = 1 << 24  # a thousand times the size of usual configs

# Errors of the system for a text that cannot be a file name.
_NO_NAMES = (errno.ENAMETOOLONG, errno.EINVAL, errno.ELOOP)

# The names of one field in different model families; the most common name first.
LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "num_transformer_layers")
HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads", "num_query_heads")
HIDDEN = ("hidden_size", "n_embd", "d_model", "n_embed", "model_dim", "dim")
HEAD_DIM = (
    *("head_dim", "attention_head_dim", "kv_channels", "head_size", "attention_head_size"),
    *("d_head", "dim_head"),
)
KV_HEADS = (
    *("num_key_value_heads", "num_kv_heads", "n_head_kv", "n_kv_heads", "n_kv_head"),
    *("num_attention_groups", "num_query_groups"),
)
DTYPE = ("dtype", "torch_dtype")
# Fields with the language model of a multimodal model; a thinker_config may contain another field.
_TEXT = ("thinker_config", "text_config", "language_config", "llm_config")
# Fields that the config itself must have; a nested config may leave them to its class.
_OF_THE_FILE = (*LAYERS, *HEADS, *HIDDEN, "sliding_window", "attention_chunk_size")
# ModelOpt writes its quantization to this file, in the folder of config.json.
_MODELOPT = "hf_quant_config.json"


def load(config: Config | str | Path) -> Config:
    """Return the config as a mapping; read it from its file if `config` is a path."""
    if isinstance(config, Mapping):
        return config
    if not isinstance(config, (str, Path)):
        raise TypeError(
            f"config is a {type(config).__name__}, must be a mapping or a path; "
            f"for a transformers config, pass config.to_dict()"
        )
    path = Path(config)
    try:
        if path.is_dir():
            path = path / "config.json"
        loaded = _object(path)
        quantized = path.with_name(_MODELOPT) if path.name == "config.json" else None
        if quantized is not None and "quantization_config" not in loaded and quantized.is_file():
            loaded = {**loaded, "quantization_config": _object(quantized)}
    except OSError as error:
        if error.errno not in _NO_NAMES:
            raise
        raise ValueError(
            f"config is not a path, {error.strerror}: {str(config)[:50]!r}...; pass a mapping, or "
            f"the path of a config.json"
        ) from None
    return loaded


def _object(path: Path) -> dict[str, Any]:
    """Read a JSON object."""
    try:
        loaded = json.loads(_text(path))
    except RecursionError as error:
        raise ValueError(f"{path}: not a config: its JSON is nested too deeply") from error
    except ValueError as error:
        raise ValueError(f"{path}: not JSON: {error}") from error
    if not isinstance(loaded, dict):
        raise ValueError(f"{path}: holds a {type(loaded).__name__}, must hold a JSON object")
    return loaded


def _text(path: Path) -> str:
    """Read a file, which may be a pipe or a device, within bounds."""
    with path.open("rb") as file:
        data = file.read(_MOST_BYTES + 1)
    if len(data) > _MOST_BYTES:
        raise ValueError(f"expected at most {_MOST_BYTES} bytes")
    return data.decode("utf-8")


def field(config: Config, names: tuple[str, ...]) -> tuple[str, Any]:
    """Return the name that the config uses, and its value; None if the field is missing."""
    name = next((name for name in names if config.get(name) is not None), names[0])
    return name, config.get(name)


def optional_count(config: Config, names: tuple[str, ...]) -> int | None:
    """Return a count of the config; None if it is missing, ValueError if it is not a count."""
    name, value = field(config, names)
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{name} of the config is {value!r}, must be an int of at least 1")
    return value


def count(config: Config, names: tuple[str, ...]) -> int:
    """Return a count of the config; ValueError if it is missing or not a count."""
    value = optional_count(config, names)
    if value is None:
        also = f" (or {', '.join(names[1:])})" if names[1:] else ""
        raise ValueError(
            f"the config lacks {names[0]}{also}; it may be the config of another kind of model: "
            f"give KVCacheParams the numbers"
        )
    return value


def flag(config: Config, name: str, *, default: bool) -> bool:
    """Return a flag of the config; ValueError if it is not a bool."""
    value = config.get(name)
    if value is not None and not isinstance(value, bool):
        raise ValueError(f"{name} of the config is {value!r}, must be true or false")
    return default if value is None else value


def require_agreement(config: Config, names: tuple[str, ...]) -> None:
    """Raise ValueError if a config has a field under several names with different values."""
    given = {name: config[name] for name in names if config.get(name) is not None}
    first = next(iter(given), None)
    for name, value in given.items():
        if first is not None and value != given[first]:
            raise ValueError(
                f"{first} of the config is {given[first]!r} and {name} is {value!r}, must be the "
                f"same: both are names of one field; remove {first} or {name}"
            )


def language_model(whole: Fields) -> Fields:
    """Return the config of the language model, with the defaults of its class."""
    text, is_nested = whole, False
    for name in _TEXT:
        if text.part(name):
            text, is_nested = text.part(name), True
    known = CLASS_DEFAULTS.get(str(text.get("model_type")), {})
    return text.with_defaults(
        {
            name: value
            for name, value in known.items()
            if not text.says(name) and (is_nested or name not in _OF_THE_FILE)
        }
    )
