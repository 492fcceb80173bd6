# SPDX-License-Identifier: Apache-2.0
"""What a file holds of one request: who it is, how far it is written, and in which layout."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvcore.context import TextGenerationContext
from kvcore.snapshots.files import bytes_of
from kvcore.snapshots.pickling import VERSION as STATE_VERSION
from kvcore.snapshots.pickling import make_context
from kvcore.snapshots.tensors import DTYPES, damaged, pack, unpack
from kvcore.support.dtypes import numpy_dtype

__all__ = [
    "FORMAT",
    "VERSION",
    "SavedLayer",
    "SavedSequence",
    "SavedState",
    "check_sequence",
    "read_sequence",
]

FORMAT = "kvcore.sequence"
#: Of the layout; raised when a reader of an older one would get something wrong.
VERSION = 1

_MOST = 2**31 - 1
#: Raised by what reads metadata, where it is of another shape.
_OTHER_SHAPE = (KeyError, TypeError, AttributeError, IndexError, OverflowError)
_FIELDS = {
    *("format", "version", "model", "dtype", "page_size", "kv_scale_granularity"),
    *("tensor_parallel_degree", "layers", "states", "written", "start_idx", "active_idx"),
    *("end_idx", "extra_key", "cache_salt", "extra_keys"),
}


@dataclass(frozen=True)
class SavedLayer:
    """What is saved of a layer with K and V: rows of the tokens `first` .. written - 1.

    Attributes
    ----------
    first : int
        The first token that is there: those before, no layer of its group reads any more.
    heads : int
        Of the whole model; 1 for latent rows.
    widths : tuple of int
        Elements per head of K and V; (latent,) for MLA.
    """

    first: int
    heads: int
    widths: tuple[int, ...]


@dataclass(frozen=True)
class SavedState:
    """What is saved of layers with a state.

    Attributes
    ----------
    layers : tuple of int
    arrays : dict of str to (shape, dtype)
        Of one layer, on one device.
    """

    layers: tuple[int, ...]
    arrays: Mapping[str, tuple[tuple[int, ...], str]]


@dataclass(frozen=True)
class SavedSequence:
    """Hold one request as ``PagedKVCacheManager.export_sequence`` wrote it.

    Attributes
    ----------
    tokens : int32 [end_idx]
    written : int
        Of these, the ones whose K, V and state the file has.
    start_idx, active_idx : int
        Of the context, when it was saved.
    extra_key, cache_salt : str or None
    extra_keys : tuple of (int, int, bytes)
    model : str or None
        As it was given to ``export_sequence``.
    dtype : str
    page_size : int
        Tokens of a page where it comes from.
    kv_scale_granularity : int or None
    tensor_parallel_degree : int
    layers : dict of int to SavedLayer
        Those with K and V of their own, by the model's index.
    states : tuple of SavedState
    tensors : dict of str to array
        "layers.3.k", "layers.3.v" or "layers.3.latent" [tokens, heads, width], with "_scale" behind
        these [tokens, heads, groups] in a quantised cache; "states.0.conv" [devices, layers, ...].

    Examples
    --------
    >>> from kvcore import KVCacheParams, PagedKVCacheManager, TextGenerationContext
    >>> from kvcore.moving import read_sequence
    >>> params = KVCacheParams("float32", 1, 4, 2, page_size=2)
    >>> manager = PagedKVCacheManager(params, 4, 64, num_pages=16)
    >>> context = TextGenerationContext("r", [10, 11, 12])
    >>> manager.claim("r")
    >>> _ = manager.fetch([context])  # here a model runs
    >>> context.update(13)
    >>> _ = manager.step([context])
    >>> saved = read_sequence(manager.export_sequence("r"))
    >>> saved.written, saved.tokens.tolist(), saved.tensors["layers.1.v"].shape
    (3, [10, 11, 12, 13], (3, 1, 4))
    """

    tokens: NDArray[np.int32]
    written: int
    start_idx: int
    active_idx: int
    extra_key: str | None
    cache_salt: str | None
    extra_keys: tuple[tuple[int, int, bytes], ...]
    model: str | None
    dtype: str
    page_size: int
    kv_scale_granularity: int | None
    tensor_parallel_degree: int
    layers: Mapping[int, SavedLayer]
    states: tuple[SavedState, ...]
    tensors: Mapping[str, NDArray[Any]] = field(repr=False)

    def context(self, request_id: Hashable) -> TextGenerationContext:
        """Return a fresh context with the tokens and keys of the request, to import it with.

        Raises
        ------
        ValueError
            A key that does not fit its tokens, or reaches more than 2**20 tokens behind them.
        """
        return make_context(
            {
                "version": STATE_VERSION,
                "request_id": request_id,
                "tokens": np.array(self.tokens),
                "start_idx": 0,
                "active_idx": len(self.tokens),
                "extra_keys": self.extra_keys or None,
                "extra_key": self.extra_key,
                "cache_salt": self.cache_salt,
                "priority": 50,
                "ttl": None,
                "retention": None,
                "tenant": None,
            }
        )

    def packed(self) -> list[Any]:
        """Return the parts of its file."""
        metadata = {
            "format": FORMAT,
            "version": VERSION,
            "model": self.model,
            "dtype": self.dtype,
            "page_size": self.page_size,
            "kv_scale_granularity": self.kv_scale_granularity,
            "tensor_parallel_degree": self.tensor_parallel_degree,
            "layers": {
                str(index): [layer.first, layer.heads, list(layer.widths)]
                for index, layer in self.layers.items()
            },
            "states": [
                [list(state.layers), {n: [list(s), d] for n, (s, d) in state.arrays.items()}]
                for state in self.states
            ],
            "written": self.written,
            "start_idx": self.start_idx,
            "active_idx": self.active_idx,
            "end_idx": len(self.tokens),
            "extra_key": self.extra_key,
            "cache_salt": self.cache_salt,
            "extra_keys": [[start, length, key.hex()] for start, length, key in self.extra_keys],
        }
        return pack({"tokens": self.tokens, **self.tensors}, metadata)


def parts_of_layer(layer: SavedLayer, granularity: int | None) -> Iterable[tuple[str, int, bool]]:
    """Return suffix, elements per head, and whether it is scales, of a layer's tensors."""
    names = ("latent",) if len(layer.widths) == 1 else ("k", "v")
    for name, width in zip(names, layer.widths, strict=True):
        yield name, width, False
        if granularity is not None:
            yield f"{name}_scale", width // granularity, True


def read_sequence(data: Any) -> SavedSequence:
    """Read and check a file of ``PagedKVCacheManager.export_sequence``.

    Parameters
    ----------
    data : bytes-like, path or binary file
        A file is read to its end.

    Returns
    -------
    SavedSequence
        Whose tensors are read-only views of the bytes. A bytearray, or the memory under a
        memoryview, remains the caller's: what is written there later is not noticed.

    Raises
    ------
    ValueError
        Bytes that were changed, cut off or added; another format, or a version of it that this one
        does not know.
    OSError
        The file cannot be read.

    Notes
    -----
    Costs reading the bytes, and their checksums.
    """
    whole = bytes_of(data)
    try:
        return _described(*unpack(whole))
    except _OTHER_SHAPE as error:
        raise damaged(f"its metadata is of another shape ({str(error)[:80]})") from None


def check_sequence(saved: SavedSequence) -> None:
    """Check that tokens, tensors and indices belong to what is said about them.

    Raises
    ------
    ValueError
        They do not: somebody has made or changed it.
    """
    try:
        _check(saved, len(saved.tokens))
    except _OTHER_SHAPE as error:
        raise damaged(f"a field is of another type ({str(error)[:80]})") from None


def _described(tensors: dict[str, NDArray[Any]], metadata: dict[str, Any]) -> SavedSequence:
    found, version = metadata.get("format"), metadata.get("version")
    if found != FORMAT or version != VERSION:
        raise ValueError(
            f"the data has format {str(found)[:40]!r} version {str(version)[:40]!r}, must be "
            f"{FORMAT!r} version {VERSION}; read it with the version of kvcore that wrote it"
        )
    if metadata.keys() != _FIELDS:
        raise damaged(f"its metadata has {sorted(metadata.keys() ^ _FIELDS)} more or less")
    tokens = tensors.pop("tokens")
    saved = SavedSequence(
        tokens=tokens,
        written=metadata["written"],
        start_idx=metadata["start_idx"],
        active_idx=metadata["active_idx"],
        extra_key=_text("extra_key", metadata["extra_key"]),
        cache_salt=_text("cache_salt", metadata["cache_salt"]),
        extra_keys=tuple(map(_extra_key, metadata["extra_keys"])),
        model=_text("model", metadata["model"]),
        dtype=_dtype(metadata["dtype"]),
        page_size=_count("page_size", metadata["page_size"], 1),
        kv_scale_granularity=(
            None
            if metadata["kv_scale_granularity"] is None
            else _count("kv_scale_granularity", metadata["kv_scale_granularity"], 1)
        ),
        tensor_parallel_degree=_count("degree", metadata["tensor_parallel_degree"], 1),
        layers={_index(index): _layer(given) for index, given in metadata["layers"].items()},
        states=tuple(map(_state, metadata["states"])),
        tensors=tensors,
    )
    _check(saved, _count("end_idx", metadata["end_idx"], 1))
    return saved


def _check(saved: SavedSequence, end: int) -> None:
    _count("written", saved.written, 1)
    for name in ("start_idx", "active_idx"):
        _count(name, getattr(saved, name))
    tokens = saved.tokens
    if tokens.shape != (end,) or tokens.dtype != np.int32:
        raise damaged(f"its tokens are {tokens.dtype} {tokens.shape}, must be int32 ({end},)")
    if not saved.written < end or not saved.start_idx < saved.active_idx <= end:
        raise damaged(f"it has {saved.written} tokens written of {end}, or other indices")
    wanted = dict(shapes_of(saved))
    if wanted.keys() != saved.tensors.keys():
        raise damaged(f"its tensors are others than its layers': {_some(wanted, saved.tensors)}")
    for name, (shape, dtype) in wanted.items():
        found = saved.tensors[name]
        if found.shape != shape or found.dtype != numpy_dtype(dtype):
            raise damaged(f"tensor {name!r} is {found.dtype} {found.shape}, not {dtype} {shape}")


def _some(wanted: Mapping[str, Any], found: Mapping[str, Any]) -> str:
    return ", ".join(sorted(wanted.keys() ^ found.keys())[:3])


def shapes_of(saved: SavedSequence) -> Iterable[tuple[str, tuple[tuple[int, ...], str]]]:
    """Return shape and dtype of each tensor that belongs to a description, by name."""
    for index, layer in saved.layers.items():
        rows = saved.written - layer.first
        _count("first", layer.first)
        if rows <= 0:
            continue
        for suffix, width, is_scale in parts_of_layer(layer, saved.kv_scale_granularity):
            dtype = "float32" if is_scale else saved.dtype
            yield f"layers.{index}.{suffix}", ((rows, layer.heads, width), dtype)
    for i, state in enumerate(saved.states):
        for name, (shape, dtype) in state.arrays.items():
            whole = (saved.tensor_parallel_degree, len(state.layers), *shape)
            yield f"states.{i}.{name}", (whole, dtype)


def _count(name: str, value: Any, least: int = 0) -> int:
    if type(value) is not int or not least <= value <= _MOST:
        raise damaged(f"{name} is {str(value)[:40]}, must be {least} .. {_MOST}")
    return value


def _text(name: str, value: Any) -> str | None:
    if value is not None and not isinstance(value, str):
        raise damaged(f"{name} is no text")
    return value


def _dtype(value: Any) -> str:
    if value not in DTYPES or value == "int32":
        raise damaged(f"dtype is {str(value)[:40]!r}")
    return str(value)


def _index(text: str) -> int:
    if not text.isdecimal() or not text.isascii() or len(text) > 9 or str(int(text)) != text:
        raise damaged(f"a layer is called {text[:40]!r}")
    return int(text)


def _layer(given: Any) -> SavedLayer:
    first, heads, widths = given
    if len(widths) not in (1, 2):
        raise damaged(f"a layer has {len(widths)} rows for a token")
    return SavedLayer(
        first,
        _count("heads", heads, 1),
        tuple(_count("width", width, 1) for width in widths),
    )


def _state(given: Any) -> SavedState:
    layers, arrays = given
    return SavedState(
        tuple(_count("a layer", layer) for layer in layers),
        {
            name: (tuple(_count("a dimension", n, 1) for n in shape), _dtype(dtype))
            for name, (shape, dtype) in arrays.items()
        },
    )


def _extra_key(given: Any) -> tuple[int, int, bytes]:
    start, length, key = given
    found = bytes.fromhex(key)
    if found.hex() != key:
        raise damaged(f"an extra key is {key[:40]!r}, not in small hex digits")
    return _count("a key's start", start), _count("a key's length", length, 1), found
