# SPDX-License-Identifier: Apache-2.0
"""The bytes of events, against bytes written by hand."""

from __future__ import annotations

import struct

import pytest

from conftest import require

require("msgspec")

from kvcore.events import (  # noqa: E402
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KVEventBatch,
    decode_batch,
    encode_batch,
)

STORED = BlockStored(
    [0x1122334455667788, 7], 0xFFFFFFFFFFFFFFFF, [1, 300], 1, None, "GPU", "lora", [["lora"], None],
    2,
)  # fmt: skip
BATCH = KVEventBatch(1.5, [STORED, BlockRemoved([9], "CPU", None), AllBlocksCleared()], 3)

#: Msgpack codes: fixarray 9n, fixstr an, uint64 cf, uint16 cd, nil c0, float64 cb.
ARRAY = b"".join(
    [
        b"\x93" + b"\xcb" + struct.pack(">d", 1.5),
        b"\x93",
        b"\x9a" + b"\xabBlockStored",
        b"\x92" + b"\xcf\x11\x22\x33\x44\x55\x66\x77\x88" + b"\x07",
        b"\xcf" + b"\xff" * 8,
        b"\x92\x01" + b"\xcd\x01\x2c",
        b"\x01",
        b"\xc0",
        b"\xa3GPU",
        b"\xa4lora",
        b"\x92" + b"\x91\xa4lora" + b"\xc0",
        b"\x02",
        b"\x94" + b"\xacBlockRemoved" + b"\x91\x09" + b"\xa3CPU" + b"\xc0",
        b"\x91" + b"\xb0AllBlocksCleared",
        b"\x03",
    ]
)
MAP = b"".join(
    [
        b"\x93" + b"\xcb" + struct.pack(">d", 1.5),
        b"\x93",
        b"\x8a" + b"\xa4type" + b"\xabBlockStored",
        b"\xacblock_hashes\x92" + b"\xcf\x11\x22\x33\x44\x55\x66\x77\x88" + b"\x07",
        b"\xb1parent_block_hash\xcf" + b"\xff" * 8,
        b"\xa9token_ids\x92\x01" + b"\xcd\x01\x2c",
        b"\xaablock_size\x01",
        b"\xa7lora_id\xc0",
        b"\xa6medium\xa3GPU",
        b"\xa9lora_name\xa4lora",
        b"\xaaextra_keys\x92" + b"\x91\xa4lora" + b"\xc0",
        b"\xa9group_idx\x02",
        b"\x84" + b"\xa4type" + b"\xacBlockRemoved",
        b"\xacblock_hashes\x91\x09" + b"\xa6medium\xa3CPU" + b"\xa9group_idx\xc0",
        b"\x81" + b"\xa4type" + b"\xb0AllBlocksCleared",
        b"\x03",
    ]
)


def test_both_forms_byte_for_byte() -> None:
    assert encode_batch(BATCH) == encode_batch(BATCH, "map") == MAP
    assert encode_batch(BATCH, "array") == ARRAY
    assert decode_batch(ARRAY) == decode_batch(MAP) == BATCH


def test_whole_keys_and_what_later_versions_add() -> None:
    batch = KVEventBatch(0.0, [BlockRemoved([b"k" * 32], "GPU")], None)
    for form in ("map", "array"):
        assert decode_batch(encode_batch(batch, form)) == batch
    longer = b"\x93\x00\x91\x95\xacBlockRemoved\x91\x09\xa3CPU\xc0\x01\xc0"
    assert decode_batch(longer) == KVEventBatch(0.0, [BlockRemoved([9], "CPU")], None)
    # The format of vLLM before it had media and groups.
    older = b"\x92\x00\x91\x92\xacBlockRemoved\x91\x09"
    assert decode_batch(older) == KVEventBatch(0.0, [BlockRemoved([9])], None)
    named = b"\x92\x00\x91\x83\xa4type\xacBlockRemoved\xacblock_hashes\x91\x09\xa4more\x01"
    assert decode_batch(named) == KVEventBatch(0.0, [BlockRemoved([9])], None)


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\xc1",
        b"\x93",
        ARRAY[:-1],
        b"\x92\x00\x91\x91\xa7unknown",
        b"\x92\x00\x91\x90",
        b"\x92\x00\x91\x80",
        b"\x92\x00\x91\x07",
        b"\x92\x00\x91\x91\xacBlockRemoved",
        b"\x92\x00\x91\x92\xacBlockRemoved\x91\xa1x",
        b"\x92\xa1x\x90",
    ],
)
def test_what_is_no_batch_is_refused(payload: bytes) -> None:
    with pytest.raises(ValueError, match="is not a batch of events"):
        decode_batch(payload)


def test_another_form_is_refused() -> None:
    with pytest.raises(ValueError, match="form is 'list'"):
        encode_batch(BATCH, "list")  # type: ignore[arg-type]
