# SPDX-License-Identifier: Apache-2.0
"""One request as bytes: the file format, and the functions that export and import a request."""

from __future__ import annotations

import os
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvcore.backends.protocol import DevicePools, Shard
from kvcore.backends.selection import place_of
from kvcore.context import ContextLike, TextGenerationContext
from kvcore.errors import KVCacheError
from kvcore.groups import bundles
from kvcore.layers.layer_map import LayerMap, LayerPlace, column_tokens
from kvcore.native.contexts import RaggedKVCacheInputs, normalized
from kvcore.native.engine import Mark, StepEngine, begin_at, mark_of
from kvcore.ops.batch import PagedBatch, layer_pools
from kvcore.ops.paging import append, gather
from kvcore.params import KVCacheParams
from kvcore.snapshots.format import DTYPES, bytes_of, damaged, pack, unpack
from kvcore.snapshots.pickling import VERSION as STATE_VERSION
from kvcore.snapshots.pickling import make_context
from kvcore.support.dtypes import numpy_dtype

__all__ = [
    "FORMAT",
    "VERSION",
    "LayerRows",
    "Pools",
    "SavedLayer",
    "SavedSequence",
    "SavedState",
    "check_sequence",
    "export_sequence",
    "import_sequence",
    "read_sequence",
]

FORMAT = "kvcore.sequence"
#: Version of the layout. It rises when a reader of an older version would misread the file.
VERSION = 1

_MOST = 2**31 - 1
#: Errors that reading metadata of another structure raises.
_OTHER_SHAPE = (KeyError, TypeError, AttributeError, IndexError, OverflowError)
_FIELDS = {
    *("format", "version", "model", "dtype", "page_size", "kv_scale_granularity"),
    *("tensor_parallel_degree", "layers", "states", "written", "start_idx", "active_idx"),
    *("end_idx", "extra_key", "cache_salt", "extra_keys"),
}


@dataclass(frozen=True)
class SavedLayer:
    """The saved rows of a layer with K and V, for the tokens `first` .. written - 1.

    Attributes
    ----------
    first : int
        The first token with saved rows. No layer of the group reads earlier tokens.
    heads : int
        Heads of the whole model; 1 for latent rows.
    widths : tuple of int
        Elements per head of K and V; (latent,) for MLA.
    """

    first: int
    heads: int
    widths: tuple[int, ...]


@dataclass(frozen=True)
class SavedState:
    """The saved states of a group of layers.

    Attributes
    ----------
    layers : tuple of int
    arrays : dict of str to (shape, dtype)
        The arrays of one layer on one device.
    """

    layers: tuple[int, ...]
    arrays: Mapping[str, tuple[tuple[int, ...], str]]


@dataclass(frozen=True)
class SavedSequence:
    """One request, as ``PagedKVCacheManager.export_sequence`` wrote it.

    Attributes
    ----------
    tokens : int32 [end_idx]
    written : int
        Number of tokens whose K, V and state are in the file.
    start_idx, active_idx : int
        Indices of the context at the time of the export.
    extra_key, cache_salt : str or None
    extra_keys : tuple of (int, int, bytes)
    model : str or None
        The `model` argument of ``export_sequence``.
    dtype : str
    page_size : int
        Tokens per page of the manager that exported the request.
    kv_scale_granularity : int or None
    tensor_parallel_degree : int
    layers : dict of int to SavedLayer
        Layers with K and V of their own, by the model's index.
    states : tuple of SavedState
    tensors : dict of str to array
        Rows: "layers.3.k", "layers.3.v" or "layers.3.latent" [tokens, heads, width]. Scales of a
        quantised cache: "layers.3.k_scale" and so on [tokens, heads, groups]. States:
        "states.0.conv" [devices, layers, ...].

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
            An extra key does not fit its tokens, or ends more than 2**20 tokens after them.
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
                "returns_in": None,
            }
        )

    def packed(self) -> list[Any]:
        """Return the parts of the file."""
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
    """Yield each tensor of a layer: suffix, elements per head, true for scales."""
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
        Its tensors are read-only views of the bytes. A bytearray, or the memory of a memoryview,
        is not copied, and later changes to it are not detected.

    Raises
    ------
    ValueError
        Bytes were changed, removed or added, or the file has another format or an unsupported
        version.
    OSError
        The file cannot be read.

    Notes
    -----
    Cost: reading the bytes, and their checksums.
    """
    whole = bytes_of(data)
    try:
        return _described(*unpack(whole))
    except _OTHER_SHAPE as error:
        raise damaged(f"its metadata has another structure ({str(error)[:80]})") from None


def check_sequence(saved: SavedSequence) -> None:
    """Check that the tokens, tensors and indices of a saved request match its description.

    Raises
    ------
    ValueError
        They do not match, for example because the sequence was made by hand.
    """
    try:
        _check(saved, len(saved.tokens))
    except _OTHER_SHAPE as error:
        raise damaged(f"a field has another type ({str(error)[:80]})") from None


def _described(tensors: dict[str, NDArray[Any]], metadata: dict[str, Any]) -> SavedSequence:
    found, version = metadata.get("format"), metadata.get("version")
    if found != FORMAT or version != VERSION:
        raise ValueError(
            f"the data has format {str(found)[:40]!r} version {str(version)[:40]!r}, must be "
            f"{FORMAT!r} version {VERSION}; read it with the version of kvcore that wrote it"
        )
    if metadata.keys() != _FIELDS:
        raise damaged(
            f"its metadata has extra or missing fields: {sorted(metadata.keys() ^ _FIELDS)}"
        )
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
        raise damaged(f"its tensors do not match its layers: {_some(wanted, saved.tensors)}")
    for name, (shape, dtype) in wanted.items():
        found = saved.tensors[name]
        if found.shape != shape or found.dtype != numpy_dtype(dtype):
            raise damaged(
                f"tensor {name!r} is {found.dtype} {found.shape}, must be {dtype} {shape}"
            )


def _some(wanted: Mapping[str, Any], found: Mapping[str, Any]) -> str:
    return ", ".join(sorted(wanted.keys() ^ found.keys())[:3])


def shapes_of(saved: SavedSequence) -> Iterable[tuple[str, tuple[tuple[int, ...], str]]]:
    """Yield the name, and the shape and dtype, of each tensor that a description requires."""
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
        raise damaged(f"{name} is not a text")
    return value


def _dtype(value: Any) -> str:
    if value not in DTYPES or value == "int32":
        raise damaged(f"dtype {str(value)[:40]!r} is not supported")
    return str(value)


def _index(text: str) -> int:
    if not text.isdecimal() or not text.isascii() or len(text) > 9 or str(int(text)) != text:
        raise damaged(f"a layer has index {text[:40]!r}, must be a number")
    return int(text)


def _layer(given: Any) -> SavedLayer:
    first, heads, widths = given
    if len(widths) not in (1, 2):
        raise damaged(f"a layer has {len(widths)} rows per token, must have 1 or 2")
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
        raise damaged(f"an extra key is {key[:40]!r}, must be lower-case hex digits")
    return _count("a key's start", start), _count("a key's length", length, 1), found


# ---- rows of layers in the pools of a manager ----------------------------------------------------


@dataclass(frozen=True)
class LayerRows:
    """The place of a layer's rows, and the rows that are still read after `n` written tokens.

    Attributes
    ----------
    place : LayerPlace
    skipped : int
        The first token that a later token reads.
    first : int
        The first token of the pages that the layer's group keeps.
    """

    place: LayerPlace
    skipped: int
    first: int


@dataclass(frozen=True)
class Pools:
    """The pools of a manager, and the places of its layers in them.

    Parameters
    ----------
    engine : StepEngine
    params : KVCacheParams
    shards : list of list of Shard
        The pools, by replica and device of the replica.
    states : tuple of dict of str to list of array
        See ``PagedKVCacheManager.states``.
    gpus : DevicePools or None
        The object that orders streams; None for pools in host memory.
    """

    engine: StepEngine
    params: KVCacheParams
    shards: list[list[Shard]]
    states: tuple[dict[str, list[Any]], ...]
    gpus: DevicePools | None

    def require(self, verb: str) -> None:
        """Raise ValueError if the manager has no pool."""
        if self.shards[0][0][0] is None:
            raise ValueError(
                f"this manager has no pool (blocks=None), so it has no bytes to {verb}; call it in "
                f"the process with the pool, or copy the pages of get_req_blocks yourself"
            )

    def enter(self, replica: int) -> None:
        """Make the current streams wait for all earlier work on a replica's pools."""
        if self.gpus is not None:
            self.gpus.enter(replica)

    # ---- layers and states -------------------------------------------------------------------

    def layers(self, n: int) -> dict[int, LayerRows]:
        """Return the rows of every layer that has K and V of its own."""
        params = self.params
        found = LayerMap.of(params)
        if found is None:
            page, heads = params.page_size, params.n_kv_heads_per_device
            widths = params.row_widths
            return {
                i: LayerRows(LayerPlace(0, i, page, heads, widths, None, None), 0, 0)
                for i in range(params.num_layers)
            }
        column = column_tokens(params)
        rows = {}
        for bundle in bundles(params):
            skipped = bundle.group.skipped_tokens(n)
            for layer in bundle.layers:
                rows[layer] = LayerRows(found[layer], skipped, skipped // column * column)
        return rows

    def saved_layer(self, rows: LayerRows) -> SavedLayer:
        """Describe a layer for a file, with the heads of all devices."""
        tp = 1 if self.params.is_mla else self.params.tensor_parallel_degree
        return SavedLayer(rows.first, rows.place.heads * tp, rows.place.widths)

    def saved_states(self) -> tuple[SavedState, ...]:
        """Describe the groups of layers with a state."""
        return tuple(
            SavedState(
                tuple(group.layers),
                {name: (tuple(shape), dtype) for name, (shape, dtype) in group.arrays.items()},
            )
            for group in self.params.state_groups
        )

    # ---- rows --------------------------------------------------------------------------------

    def parts(self, rows: LayerRows) -> Iterator[tuple[str, int, bool]]:
        """Yield each tensor of a layer: suffix, elements per head, true for scales."""
        granularity = self.params.kv_scale_granularity
        yield from parts_of_layer(self.saved_layer(rows), granularity)

    def read(
        self, replica: int, layer: int, rows: LayerRows, pages: Sequence[int], n: int
    ) -> dict[str, NDArray[Any]]:
        """Read the rows `first` .. `n` - 1 of a layer, by suffix, with the heads of all devices."""
        table, _ = _table(rows, pages, rows.first, n)
        found: dict[str, list[NDArray[Any]]] = {}
        for pools in self._pools(replica, layer):
            for name, pool in pools.items():
                found.setdefault(name, []).append(_gather(pool, table, n - rows.first))
        return {name: np.concatenate(parts, axis=1) for name, parts in found.items()}

    def write(
        self,
        replica: int,
        layer: int,
        rows: LayerRows,
        pages: Sequence[int],
        first: int,
        tensors: dict[str, NDArray[Any]],
    ) -> None:
        """Write the rows of tokens `first` and later into the pages of a layer."""
        n = first + len(next(iter(tensors.values())))
        table, offset = _table(rows, pages, first, n)
        for shard, pools in enumerate(self._pools(replica, layer, all_shards=True)):
            begin = 0 if self.params.is_mla else shard * rows.place.heads
            for name, pool in pools.items():
                part = tensors[name][:, begin : begin + rows.place.heads]
                _append(pool, table, offset, part)

    def _pools(
        self, replica: int, layer: int, *, all_shards: bool = False
    ) -> Iterator[dict[str, Any]]:
        """Yield a layer's view in each device's pools: [pages, page_size, heads, width] by suffix.

        Every device has all latent rows, so their first view is enough, unless `all_shards`.
        """
        layers = LayerMap.of(self.params)
        none = np.zeros((0, 1), np.uint32)
        tables = None if layers is None else (none,) * len(bundles(self.params))
        shards = self.shards[replica]
        for blocks, scales in shards if all_shards or not self.params.is_mla else shards[:1]:
            inputs = RaggedKVCacheInputs(
                blocks, none[:, 0], none, none, scales, tables=tables, layers=layers
            )
            seen = layer_pools(inputs, layer)
            names = ("k", "v") if len(seen.pools) == 2 else ("latent",)
            found = dict(zip(names, seen.pools, strict=True))
            if seen.scales is not None:
                found |= {f"{n}_scale": s for n, s in zip(names, seen.scales, strict=True)}
            yield found

    # ---- states ------------------------------------------------------------------------------

    def state_rows(self, replica: int, slot: int) -> Iterator[tuple[str, list[Any]]]:
        """Yield the name and arrays [layers, ...], one per device, of each state in a slot."""
        tp = self.params.tensor_parallel_degree
        for i, group in enumerate(self.states):
            for name, arrays in group.items():
                own = arrays[replica * tp : (replica + 1) * tp]
                yield f"states.{i}.{name}", [array[slot] for array in own]


def _table(
    rows: LayerRows, pages: Sequence[int], first: int, n: int
) -> tuple[NDArray[np.uint32], int]:
    """Return the block table of tokens `first` .. `n` - 1, and the offset of `first` in it."""
    page = rows.place.page_size
    own = pages[first // page : -(-n // page)]
    return np.array([own], np.uint32), first % page


def _gather(pool: Any, table: NDArray[np.uint32], n: int) -> NDArray[Any]:
    place = place_of(None, {"pool": pool})
    lengths = np.array([n], np.uint32)
    batch = PagedBatch(pool, None, place.from_host(table), place.from_host(lengths))
    rows, _, _ = gather(batch, 0, lengths=lengths)
    return place.to_host(rows)


def _append(pool: Any, table: NDArray[np.uint32], offset: int, rows: NDArray[Any]) -> None:
    place = place_of(None, {"pool": pool})
    begin = place.from_host(np.array([offset], np.uint32))
    batch = PagedBatch(pool, None, place.from_host(table), begin)
    source = place.from_host(np.ascontiguousarray(rows))
    append(batch, 0, source, None, np.array([0, len(rows)], np.uint32))
    place.wait()


# ---- export --------------------------------------------------------------------------------------


_TRIES = 16  # attempts at a copy, while other threads step the request


def export_sequence(pools: Pools, request_id: Hashable, model: str | None) -> SavedSequence:
    """Copy the written rows of a request; see ``PagedKVCacheManager.export_sequence``.

    Notes
    -----
    The copy pins no pages, so it makes no other call fail. Marks of the request before and after
    the copy show whether its pages have changed; if they have, the copy is repeated.
    """
    pools.require("export")
    for _ in range(_TRIES):
        mark = mark_of(pools.engine, request_id)
        written = _require_written(request_id, mark)
        try:
            saved = _saved(pools, request_id, mark, written, model)
        except IndexError:  # a page was freed
            if mark_of(pools.engine, request_id).stamp != mark.stamp:
                continue
            raise ValueError(
                f"request {request_id!r} has {written} tokens written, but windows have freed "
                f"pages that the next token reads; set start_idx no lower than truncate allows"
            ) from None
        if mark_of(pools.engine, request_id).stamp == mark.stamp:
            return saved
    raise KVCacheError(
        f"request {request_id!r} was stepped {_TRIES} times during its export; export it between "
        f"two steps"
    )


def _require_written(request_id: Hashable, mark: Mark) -> int:
    """Return the number of tokens to export, counted as in ``fork``."""
    context = mark.context
    written = 0 if context is None else min(mark.written, int(context.start_idx))
    if written < 1:
        raise ValueError(
            f"request {request_id!r} has 0 tokens written, must have at least 1 to be exported; "
            f"step it first, or claim a new request in the other manager"
        )
    if mark.slot >= 0 and mark.stands_at != written:
        at = "a later token" if mark.stands_at < 0 else f"token {mark.stands_at}"
        raise ValueError(
            f"request {request_id!r} has {written} tokens written, but its state is at {at}; "
            f"export it between step and fetch"
        )
    return written


def _saved(
    pools: Pools, request_id: Hashable, mark: Mark, written: int, model: str | None
) -> SavedSequence:
    context, params = mark.context, pools.params
    tokens = np.array(context.tokens, np.int32)[: int(context.end_idx)]
    layers = pools.layers(written)
    given = [key for key in extra_keys_of(context) if key[0] < len(tokens)]
    return SavedSequence(
        tokens=tokens,
        written=written,
        start_idx=int(context.start_idx),
        active_idx=int(context.active_idx),
        extra_key=getattr(context, "extra_key", None),
        cache_salt=getattr(context, "cache_salt", None),
        extra_keys=normalized(given, len(tokens)),
        model=model,
        dtype=params.dtype,
        page_size=params.page_size,
        kv_scale_granularity=params.kv_scale_granularity,
        tensor_parallel_degree=params.tensor_parallel_degree,
        layers={layer: pools.saved_layer(rows) for layer, rows in layers.items()},
        states=pools.saved_states(),
        tensors=_tensors(pools, request_id, mark, written),
    )


def extra_keys_of(context: Any) -> list[tuple[int, int, bytes]]:
    """Return the extra keys of a context of any class."""
    return list(getattr(context, "extra_keys", None) or ())


def _tensors(
    pools: Pools, request_id: Hashable, mark: Mark, written: int
) -> dict[str, NDArray[Any]]:
    found: dict[str, NDArray[Any]] = {}
    pages: dict[int, list[int]] = {}
    pools.enter(mark.replica)
    for layer, rows in pools.layers(written).items():
        bundle = rows.place.bundle
        if bundle not in pages:
            pages[bundle] = pools.engine.get_req_blocks(request_id, bundle)
        if rows.first >= written:
            continue
        for name, array in pools.read(mark.replica, layer, rows, pages[bundle], written).items():
            found[f"layers.{layer}.{name}"] = array
    if mark.slot >= 0:
        for name, arrays in pools.state_rows(mark.replica, mark.slot):
            found[name] = np.stack([place_of(None, {name: a}).to_host(a) for a in arrays])
    return found


# ---- import --------------------------------------------------------------------------------------


#: Dtypes that represent every element of a dtype exactly.
_HOLD = {
    "float16": ("float32",),
    "bfloat16": ("float32",),
    "float8_e4m3fn": ("float16", "bfloat16", "float32"),
    "float8_e5m2": ("float16", "bfloat16", "float32"),
}


def import_sequence(
    pools: Pools,
    context: TextGenerationContext | ContextLike,
    saved: SavedSequence,
    replica_idx: int | str | None,
    model: str | None,
) -> bool:
    """Copy a saved request into new pages; see ``PagedKVCacheManager.import_sequence``."""
    pools.require("import")
    check_sequence(saved)
    layers = pools.layers(saved.written)
    _check_model(saved, model)
    _check_layout(pools, saved, layers)
    _check_context(context, saved)
    request_id, active = context.request_id, context.active_idx
    pools.engine.external_claim(request_id, replica_idx)  # type: ignore[arg-type]
    try:
        fits = begin_at(pools.engine, context, saved.written, _name_space(saved, layers))
        if fits:
            _write(pools, context, saved, layers)
            pools.engine.step([context])
    except BaseException:
        _undo(pools, context, active)
        raise
    if not fits:
        pools.engine.release(request_id)
    return fits


def _undo(pools: Pools, context: Any, active: int) -> None:
    """Release a request after a failed import, and reset the indices of its context."""
    if pools.engine.contains(context.request_id):
        pools.engine.release(context.request_id)
    context.start_idx = 0
    context.active_idx = active


def _name_space(saved: SavedSequence, layers: dict[int, LayerRows]) -> bytes | None:
    """Return a private namespace if the imported pages lack rows that another request may read.

    The file may begin within a page of this manager. The imported request does not read the rows
    before that token, but a request with a shorter prefix hit would.
    """
    is_whole = all(saved.layers[layer].first <= rows.first for layer, rows in layers.items())
    return None if is_whole else b"kvcore.import" + os.urandom(16)


# ---- checks ----------------------------------------------------------------------------------


def _refuse(what: str, found: object, wanted: object, remedy: str) -> ValueError:
    return ValueError(f"the saved request has {what} {found}, must be {wanted}; {remedy}")


def _check_model(saved: SavedSequence, model: str | None) -> None:
    if model is not None and saved.model != model:
        raise _refuse("model", repr(saved.model), repr(model), "import it where that model runs")


def _check_layout(pools: Pools, saved: SavedSequence, layers: dict[int, LayerRows]) -> None:
    params = pools.params
    remedy = "import it into a manager for the same model"
    if saved.layers.keys() != layers.keys():
        raise _refuse("layers", _brief(saved.layers), _brief(layers), remedy)
    is_scaled = saved.kv_scale_granularity is not None or params.kv_scale_granularity is not None
    if saved.dtype != params.dtype and (
        is_scaled or params.dtype not in _HOLD.get(saved.dtype, ())
    ):
        others = ", ".join(_HOLD.get(saved.dtype, ())) if not is_scaled else ""
        wanted = f"{params.dtype}, as the pool" + (f" (it fits in {others})" if others else "")
        raise _refuse("dtype", saved.dtype, wanted, "use the same dtype: import never rounds")
    if saved.kv_scale_granularity != params.kv_scale_granularity:
        raise _refuse(
            "kv_scale_granularity",
            saved.kv_scale_granularity,
            params.kv_scale_granularity,
            "use the same granularity: import never recomputes scales",
        )
    for layer, rows in layers.items():
        _check_layer(pools, saved, layer, rows)
    _check_states(pools, saved)


def _brief(layers: Any) -> str:
    names = sorted(layers)
    return f"{len(names)} ({', '.join(map(str, names[:8]))}{', ...' if len(names) > 8 else ''})"


def _check_layer(pools: Pools, saved: SavedSequence, layer: int, rows: LayerRows) -> None:
    found, own = saved.layers[layer], pools.saved_layer(rows)
    if (found.heads, found.widths) != (own.heads, own.widths):
        raise _refuse(
            f"heads and widths of layer {layer}",
            (found.heads, found.widths),
            (own.heads, own.widths),
            "import it into a manager for the same model",
        )
    if found.first > rows.skipped and rows.skipped < saved.written:
        raise _refuse(
            f"tokens of layer {layer} from",
            found.first,
            f"at most {rows.skipped}, which this manager reads",
            "give that layer the same window here",
        )


def _check_states(pools: Pools, saved: SavedSequence) -> None:
    wanted = pools.saved_states()
    if saved.states != wanted:
        raise _refuse("states", saved.states, wanted, "import it where the same model runs")
    degree = pools.params.tensor_parallel_degree
    if wanted and saved.tensor_parallel_degree != degree:
        raise _refuse(
            "states of tensor parallel degree",
            saved.tensor_parallel_degree,
            degree,
            "use the same degree: the model decides how states are split",
        )


def _check_context(context: Any, saved: SavedSequence) -> None:
    n = saved.written
    name = f"request {context.request_id!r}"
    if context.start_idx != 0:
        raise ValueError(
            f"{name} has start_idx {context.start_idx}, must be 0 to be imported; set it to 0, or "
            f"make a context with read_sequence(data).context(request_id)"
        )
    if context.end_idx <= n:
        raise ValueError(
            f"{name} has {context.end_idx} tokens, must have more than the {n} that are written in "
            f"the saved request; extend it by the token that runs next"
        )
    tokens = np.asarray(context.tokens)[:n]
    if not np.array_equal(tokens, saved.tokens[:n]):
        at = int((tokens != saved.tokens[:n]).argmax())
        raise ValueError(
            f"token {at} of {name} is {tokens[at]}, must be {saved.tokens[at]} as in the saved "
            f"request; import it with the same tokens"
        )
    for term in ("extra_key", "cache_salt"):
        own, found = getattr(context, term, None), getattr(saved, term)
        if own != found:
            raise ValueError(
                f"{name} has {term} {own!r}, must be {found!r} as in the saved request; give the "
                f"context the same {term}"
            )
    if _keys(extra_keys_of(context), n) != _keys(saved.extra_keys, n):
        raise ValueError(
            f"{name} has other extra keys in its first {n} tokens than the saved request; import "
            f"it with the same extra keys"
        )


def _keys(keys: Any, n: int) -> tuple[tuple[int, int, bytes], ...]:
    return normalized([key for key in keys if key[0] < n], n)


# ---- writing ---------------------------------------------------------------------------------


def _write(pools: Pools, context: Any, saved: SavedSequence, layers: dict[int, LayerRows]) -> None:
    mark = mark_of(pools.engine, context.request_id)
    dtype = numpy_dtype(pools.params.dtype)
    pages: dict[int, list[int]] = {}
    pools.enter(mark.replica)
    for layer, rows in layers.items():
        first = max(rows.first, saved.layers[layer].first)
        bundle = rows.place.bundle
        if first >= saved.written:
            continue
        if bundle not in pages:
            pages[bundle] = pools.engine.get_req_blocks(context.request_id, bundle)
        tensors = {
            name: _rows_of(saved, f"layers.{layer}.{name}", first - saved.layers[layer].first)
            for name, _, _ in pools.parts(rows)
        }
        if saved.dtype != pools.params.dtype:
            tensors = {name: array.astype(dtype) for name, array in tensors.items()}
        pools.write(mark.replica, layer, rows, pages[bundle], first, tensors)
    for name, arrays in pools.state_rows(mark.replica, mark.slot):
        for array, content in zip(arrays, saved.tensors[name], strict=True):
            place = place_of(None, {name: array})
            place.copy_into(array, content)
            place.wait()


def _rows_of(saved: SavedSequence, name: str, begin: int) -> NDArray[Any]:
    return saved.tensors[name][begin:]
