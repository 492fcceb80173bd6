# SPDX-License-Identifier: Apache-2.0
"""The messages: structs with vLLM's fields, and their bytes in msgpack."""

from __future__ import annotations

from typing import Any, Literal

try:
    import msgspec
except ImportError as error:
    raise ImportError("kvcore.events needs msgspec: pip install 'kvcore[events]'") from error

from kvcore.cache_events import CacheCleared, PagesRemoved, PagesStored

__all__ = [
    "AllBlocksCleared",
    "BlockRemoved",
    "BlockStored",
    "KVEventBatch",
    "WireEvent",
    "decode_batch",
    "encode_batch",
    "wire_event",
]


class BlockStored(msgspec.Struct, array_like=True, tag=True):
    """Consecutive pages of a prompt that a medium now has.

    Parameters
    ----------
    block_hashes : list of int or bytes
        The low 64 bits of each page's key, or the whole keys [32].
    parent_block_hash : int, bytes or None
        The hash of the page before the first page; None if the first page begins a prompt.
    token_ids : list of int
        [pages * block_size]; empty for "STORAGE".
    block_size : int
        Tokens of a page.
    lora_id : int, optional
        None: kvcore sends only `lora_name`.
    medium : str, optional
        "GPU", "CPU" or "STORAGE".
    lora_name : str, optional
        The ``extra_key`` of the requests.
    extra_keys : list, optional
        For each page, the inputs of its key apart from tokens, in vLLM's order: `lora_name`,
        [bytes, start] of each extra key, and for the first page of a prompt the cache salt. None
        for a page without these inputs.
    group_idx : int, optional
        The group of layers; None without groups.
    """

    block_hashes: list[int | bytes]
    parent_block_hash: int | bytes | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None = None
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: list[Any] | None = None
    group_idx: int | None = None


class BlockRemoved(msgspec.Struct, array_like=True, tag=True):
    """Pages that a medium no longer has.

    Parameters
    ----------
    block_hashes : list of int or bytes
    medium : str, optional
    group_idx : int, optional
        As in BlockStored.
    """

    block_hashes: list[int | bytes]
    medium: str | None = None
    group_idx: int | None = None


class AllBlocksCleared(msgspec.Struct, array_like=True, tag=True):
    """All pages are removed; pages of later events are cached again."""


WireEvent = BlockStored | BlockRemoved | AllBlocksCleared


class KVEventBatch(msgspec.Struct, array_like=True):
    """Events of one replica, in their order.

    Parameters
    ----------
    ts : float
        Time at which the events were taken, in seconds since 1970.
    events : list of BlockStored, BlockRemoved and AllBlocksCleared
    data_parallel_rank : int, optional
    """

    ts: float
    events: list[WireEvent]
    data_parallel_rank: int | None = None


class _RawBatch(msgspec.Struct, array_like=True):
    ts: float
    events: list[Any]
    data_parallel_rank: int | None = None


_KINDS: dict[str, type[Any]] = {
    kind.__name__: kind for kind in (BlockStored, BlockRemoved, AllBlocksCleared)
}
_LOW_64_BITS = 2**64 - 1
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(_RawBatch).decode


def wire_event(
    event: PagesStored | PagesRemoved | CacheCleared, *, raw_keys: bool = False
) -> WireEvent:
    """Convert an event of ``take_events`` to its message.

    Parameters
    ----------
    event : PagesStored, PagesRemoved or CacheCleared
    raw_keys : bool
        Use whole keys, bytes [32], instead of their low 64 bits.
    """
    if isinstance(event, CacheCleared):
        return AllBlocksCleared()
    hashes: Any = event.keys if raw_keys else event.hashes
    if isinstance(event, PagesRemoved):
        return BlockRemoved(hashes, event.medium, event.group_idx)
    return BlockStored(
        hashes,
        event.parent_key if raw_keys else event.parent_hash,
        event.tokens.tolist(),
        event.page_size,
        None,
        event.medium,
        _text(event.extra_key),
        _extra_keys(event),
        event.group_idx,
    )


def _text(name: str | None) -> str | None:
    """Escape lone surrogates in a name: a str may contain them, but msgpack cannot encode them."""
    return name and name.encode("utf-8", "backslashreplace").decode()


def _extra_keys(event: PagesStored) -> list[list[Any] | None] | None:
    name, placed = _text(event.extra_key), event.extra_keys
    salt = _text(event.cache_salt) if event.parent_key is None else None
    if name is None and placed is None and not salt:
        return None
    pages: list[list[Any]] = [[] if name is None else [name] for _ in range(len(event))]
    for own, keys in zip(pages, placed or (), strict=False):
        own += [[key, start] for key, start, _ in keys or ()]
    if salt:
        pages[0].append(salt)
    return [own or None for own in pages]


def encode_batch(batch: KVEventBatch, form: Literal["map", "array"] = "map") -> bytes:
    """Return the payload of a batch.

    Parameters
    ----------
    batch : KVEventBatch
    form : {"map", "array"}
        Form of the events. "map": the fields by name, and the name of the event as "type"; vLLM
        0.33 and SGLang 0.5.23 read it. "array": the name of the event, and the fields in order;
        llm-d reads it. The batch itself is an array in both.

    Raises
    ------
    ValueError
        Unknown form.

    Examples
    --------
    >>> from kvcore.events import BlockRemoved, KVEventBatch, encode_batch
    >>> encode_batch(KVEventBatch(0.0, [BlockRemoved([7], "GPU")], 0), "array").hex()
    '93cb00000000000000009194ac426c6f636b52656d6f7665649107a3475055c000'
    """
    if form == "array":
        return _encode(batch)
    if form != "map":
        raise ValueError(f"form is {form!r}, must be 'map' or 'array'")
    events = [{"type": type(e).__name__, **msgspec.structs.asdict(e)} for e in batch.events]
    return _encode([batch.ts, events, batch.data_parallel_rank])


def decode_batch(payload: bytes) -> KVEventBatch:
    """Read a payload with events of either form; unknown fields are left out.

    The returned hashes are unsigned. SGLang sends the same 64 bits as signed numbers.

    Raises
    ------
    ValueError
        The payload is not a batch of events.
    """
    try:
        raw = _decode(payload)
        return KVEventBatch(raw.ts, [*map(_event_of, raw.events)], raw.data_parallel_rank)
    except (msgspec.MsgspecError, KeyError, IndexError, TypeError, RecursionError) as error:
        raise ValueError(f"the payload is not a batch of events: {error!r}") from error


def _event_of(raw: Any) -> WireEvent:
    if isinstance(raw, dict):
        kind = _KINDS[raw["type"]]
        known = {name: raw[name] for name in kind.__struct_fields__ if name in raw}
        fields = [known.get(name) for name in kind.__struct_fields__]
        raw = [raw["type"], *fields]
    event: WireEvent = msgspec.convert(raw, _KINDS[raw[0]])
    if not isinstance(event, AllBlocksCleared):
        event.block_hashes = [*map(_unsigned, event.block_hashes)]
    if isinstance(event, BlockStored) and event.parent_block_hash is not None:
        event.parent_block_hash = _unsigned(event.parent_block_hash)
    return event


def _unsigned(value: int | bytes) -> int | bytes:
    return value if isinstance(value, bytes) else value & _LOW_64_BITS
