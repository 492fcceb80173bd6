# SPDX-License-Identifier: Apache-2.0
"""Every argument of every public call on elements, in place of which comes something else.

Whatever it is, the call raises TypeError, ValueError, IndexError or an error of kvcore's, in words
of kvcore's, or it takes it; one that raises has written nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import kvcore
from kvcore import functional, ops
from kvcore.sizing import estimated_memory_size, infer_optimal_batch_size

Scene = tuple[Callable[..., object], dict[str, Any]]

SHAPE = (4, 2, 1, 8)  # pages, page_size, heads, dim


def array(*shape: int, dtype: Any = np.float32) -> Any:
    return np.arange(int(np.prod(shape))).reshape(shape).astype(dtype)


def batch(dtype: Any = np.float32) -> kvcore.PagedBatch:
    table, lengths = np.array([[2, 0], [1, 3]], np.uint32), np.array([1, 2], np.uint32)
    return kvcore.PagedBatch(array(*SHAPE, dtype=dtype), array(*SHAPE, dtype=dtype), table, lengths)


def step() -> dict[str, Any]:
    return {"row_offsets": np.array([0, 2, 3], np.uint32), "threads": 1, "stream": None}


def params(**rest: Any) -> kvcore.KVCacheParams:
    return kvcore.KVCacheParams("float32", 1, 4, 2, page_size=4, **rest)


def cache() -> functional.PagedKVCache:
    lengths = np.array([2, 0], np.int32)
    table = np.array([[3, -1], [-1, -1]], np.int32)
    return functional.PagedKVCache(array(*SHAPE), array(*SHAPE), table, lengths)


def fetched() -> Any:
    manager = kvcore.PagedKVCacheManager(params(), 4, 64, num_pages=8)
    manager.claim("a")
    return manager, manager.fetch([kvcore.TextGenerationContext("a", [1, 2, 3])], 3)


def slots() -> Any:
    manager = kvcore.ContinuousBatchingKVCacheManager(params(), 4, 16, 2, ["cpu"])
    manager.claim(2)
    return manager


def view() -> Any:
    lengths, table = np.array([1], np.uint32), np.array([2], np.uint32)
    return {
        "blocks": array(4, 2, 2, 4, 1, 3),
        "cache_lengths": lengths,
        "lookup_table": table,
        "max_seq_length": 1,
        "max_cache_length": 2,
        "scales": None,
        "kv_params": None,
        "guard": None,
    }


def layer() -> Any:
    return kvcore.ContinuousBatchingKVCacheCollection(**view()).get_key_cache(0)


def layouts() -> dict[str, Any]:
    sizes = {"pages": 4, "layers": 2, "page_size": 2, "heads": 1, "head_dim": 8, "dtype": "int8"}
    source = ops.PoolLayout.allocate("page_first", **sizes)  # type: ignore[arg-type]
    return {"source": source, "destination": ops.PoolLayout.allocate("max", **sizes)}  # type: ignore[arg-type]


def attends() -> dict[str, Any]:
    rule = {"scale": 0.5, "causal": True, "window": 3, "soft_cap": 2.0, "return_lse": False}
    arguments = {"inputs": batch(), "layer": 0, "q": array(3, 2, 8), "out": array(3, 2, 8)}
    rest = {"sinks": array(2), "v_head_dim": 8, "threads": 1}
    return arguments | rule | rest | {"row_offsets": step()["row_offsets"]}


def config() -> dict[str, Any]:
    return {
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "hidden_size": 8,
        "num_key_value_heads": 1,
        "head_dim": 4,
        "dtype": "float32",
    }


TOKENS = {"k": array(3, 1, 8), "v": array(3, 1, 8)}

SCENES: dict[str, Callable[[], Scene]] = {
    "append": lambda: (
        ops.append,
        {"inputs": batch(), "layer": 0, "scale": None} | TOKENS | step(),
    ),
    "append scaled": lambda: (
        ops.append,
        {"inputs": batch(np.int8), "layer": 0, "scale": 0.5} | TOKENS | step(),
    ),
    "scatter": lambda: (
        ops.scatter,
        {"inputs": batch(), "layer": 0, "scale": None} | TOKENS | step(),
    ),
    "gather": lambda: (
        ops.gather,
        {
            "inputs": batch(),
            "layer": 0,
            "lengths": np.array([1, 2], np.uint32),
            "dtype": None,
            "out": (array(3, 1, 8), array(3, 1, 8)),
            "stream": None,
            "threads": 1,
        },
    ),
    "build_slots": lambda: (
        ops.build_slots,
        {
            "inputs": batch(),
            "row_offsets": step()["row_offsets"],
            "out": np.zeros(3, np.int64),
            "stream": None,
        },
    ),
    "append_slots": lambda: (
        ops.append_slots,
        {"inputs": batch(), "layer": 0, "slots": np.array([0, 1, -1]), "stream": None, "threads": 1}
        | TOKENS,
    ),
    "advance_lengths": lambda: (
        ops.advance_lengths,
        {
            "lengths": np.array([1, 2], np.uint32),
            "row_offsets": step()["row_offsets"],
            "active": np.array([True, False]),
            "out": np.zeros(2, np.uint32),
            "stream": None,
        },
    ),
    "attention": lambda: (ops.attention, attends()),
    "cascade_attention": lambda: (
        ops.cascade_attention,
        attends() | {"shared": [kvcore.SharedPrefix((0,), 1, 0)], "replica": 0},
    ),
    "merge_states": lambda: (
        ops.merge_states,
        {
            "o_a": array(2, 4),
            "lse_a": array(2),
            "o_b": array(2, 4),
            "lse_b": array(2),
            "out": (array(2, 4), array(2)),
            "stream": None,
            "threads": 1,
        },
    ),
    "copy_pages": lambda: (
        ops.copy_pages,
        {"blocks": (array(*SHAPE), array(*SHAPE)), "pairs": [(0, 1)], "stream": None, "threads": 1},
    ),
    "fill_pages": lambda: (
        ops.fill_pages,
        {"blocks": array(*SHAPE), "ids": [0, 1], "byte": 3, "stream": None, "threads": 1},
    ),
    "zero_pages": lambda: (
        ops.zero_pages,
        {"blocks": (array(*SHAPE), array(*SHAPE)), "ids": [0, 1], "stream": None, "threads": 1},
    ),
    "checksum": lambda: (
        ops.checksum,
        {"blocks": array(*SHAPE), "ids": [0, 1], "stream": None, "threads": 1},
    ),
    "copy_partial": lambda: (
        ops.copy_partial,
        {"blocks": array(4, 2, 2, 2, 1, 3), "copies": [(0, 1, 1)], "stream": None, "threads": 1},
    ),
    "transfer": lambda: (
        ops.transfer,
        {
            "source_ids": [0],
            "destination_ids": [1],
            "layers": None,
            "max_blocks": 0,
            "stream": None,
            "threads": 1,
        }
        | layouts(),
    ),
    "quantize": lambda: (
        ops.quantize,
        {
            "x": array(2, 8),
            "dtype": "int8",
            "granularity": 8,
            "out": (np.zeros((2, 8), np.int8), array(2, 1)),
            "stream": None,
            "threads": 1,
        },
    ),
    "dequantize": lambda: (
        ops.dequantize,
        {
            "values": np.zeros((2, 8), np.int8),
            "scales": array(2, 1),
            "dtype": "float32",
            "out": array(2, 8),
            "stream": None,
            "threads": 1,
        },
    ),
    "PoolLayout": lambda: (
        ops.PoolLayout,
        {"arrays": array(4, 2, 2, 2, 1, 3), "layout": "max"},
    ),
    "PoolLayout.allocate": lambda: (
        ops.PoolLayout.allocate,
        {
            "layout": "max",
            "pages": 2,
            "layers": 1,
            "page_size": 2,
            "heads": 1,
            "head_dim": 2,
            "v_head_dim": None,
            "dtype": "int8",
            "device": "cpu",
        },
    ),
    "PagedBatch": lambda: (
        kvcore.PagedBatch,
        {
            "key_pool": array(*SHAPE, dtype=np.int8),
            "value_pool": array(*SHAPE, dtype=np.int8),
            "lookup_table": np.array([[1]], np.uint32),
            "cache_lengths": np.array([1], np.uint32),
            "layout": "NHD",
            "key_scales": 0.5,
            "value_scales": 0.5,
        },
    ),
    "init_paged_kv_cache": lambda: (
        functional.init_paged_kv_cache,
        {
            "num_blocks": 2,
            "block_size": 2,
            "num_kv_heads": 1,
            "head_dim": 2,
            "batch_size": 1,
            "max_blocks_per_seq": 2,
            "dtype": "float32",
        },
    ),
    "allocate_blocks": lambda: (
        functional.allocate_blocks,
        {
            "cache": cache(),
            "sequence_idx": 1,
            "num_new_tokens": 1,
            "free_block_ids": [1, 2],
            "donate": True,
        },
    ),
    "append_kv": lambda: (
        functional.append_kv,
        {
            "cache": cache(),
            "sequence_idx": 1,
            "keys_new": array(0, 1, 8),
            "values_new": array(0, 1, 8),
            "donate": True,
        },
    ),
    "gather_kv": lambda: (functional.gather_kv, {"cache": cache(), "sequence_idx": 0}),
    "ContinuousBatchingKVCacheCollection": lambda: (
        kvcore.ContinuousBatchingKVCacheCollection,
        view(),
    ),
    "PagedKVCacheCollection": lambda: (
        kvcore.PagedKVCacheCollection,
        {"inputs": fetched()[1][0], "kv_params": None, "guard": None},
    ),
    "FetchContinuousBatchingKVCacheCollection": lambda: (
        kvcore.FetchContinuousBatchingKVCacheCollection,
        {"kv_params": params()},
    ),
    "fetch of a collection": lambda: (
        kvcore.FetchContinuousBatchingKVCacheCollection(params()),
        dict(
            zip(
                ("blocks", "cache_lengths", "lookup_table", "is_cache_empty"),
                slots().fetch([0, 1])[0],
                strict=True,
            )
        )
        | {"new_tokens": [1, 2]},
    ),
    "get_key_cache": lambda: (
        kvcore.ContinuousBatchingKVCacheCollection(**view()).get_key_cache,
        {"layer_idx": 0},
    ),
    "load": lambda: (layer().load, {"bs": 0, "head": 0, "tok": 0, "dim": 0}),
    "store": lambda: (layer().store, {"bs": 0, "head": 0, "tok": 0, "dim": 0, "value": 1.0}),
    "cache_length": lambda: (layer().cache_length, {"batch_idx": 0}),
    "increment_cache_lengths": lambda: (
        fetched()[0].increment_cache_lengths,
        {
            "kv_cache_inputs": fetched()[1],
            "prev_model_inputs": np.array([0, 3], np.uint32),
        },
    ),
    "increment of slots": lambda: (
        slots().increment_cache_lengths,
        {
            "kv_cache_inputs": slots().fetch([0, 1]),
            "prev_model_inputs": np.array([0, 3, 4], np.uint32),
        },
    ),
    "KVCacheParams": lambda: (
        kvcore.KVCacheParams,
        {
            "dtype": "float32",
            "n_kv_heads": 1,
            "head_dim": 4,
            "num_layers": 2,
            "page_size": 4,
            "enable_prefix_caching": True,
            "enable_kvcache_swapping_to_host": True,
            "host_kvcache_swap_space_gb": 1.0,
            "n_devices": 1,
            "data_parallel_degree": 1,
            "is_mla": False,
            "kv_scale_granularity": None,
            "v_head_dim": None,
            "cache_strategy": "paged",
        },
    ),
    "from_hf_config": lambda: (
        kvcore.KVCacheParams.from_hf_config,
        {"config": config(), "dtype": "float32", "page_size": 4},
    ),
    "a config": lambda: (lambda **fields: kvcore.KVCacheParams.from_hf_config(fields), config()),
    "estimated_memory_size": lambda: (
        kvcore.PagedKVCacheManager.estimated_memory_size,
        {
            "params": params(),
            "max_batch_size": 4,
            "max_seq_len": 8,
            "num_layers": 2,
            "available_cache_memory": 10_000,
            "devices": ("cpu",),
        },
    ),
    "max_supported_sequence_length": lambda: (
        kvcore.PagedKVCacheManager.max_supported_sequence_length,
        {"params": params(), "num_layers": 2, "memory_available": 10_000},
    ),
    "infer_optimal_batch_size": lambda: (
        kvcore.PagedKVCacheManager.infer_optimal_batch_size,
        {
            "params": params(),
            "max_seq_len": 8,
            "num_layers": 2,
            "available_cache_memory": 10_000,
            "devices": ("cpu",),
        },
    ),
    "sizing": lambda: (
        estimated_memory_size,
        {"params": params(), "max_batch_size": 4, "max_seq_len": 8, "memory": 10_000},
    ),
    "sizing of batches": lambda: (
        infer_optimal_batch_size,
        {"params": params(), "max_seq_len": 8, "memory": 10_000},
    ),
    "ContinuousBatchingKVCacheManager": lambda: (
        kvcore.ContinuousBatchingKVCacheManager,
        {
            "params": params(),
            "max_cache_batch_size": 2,
            "max_seq_len": 4,
            "num_layers": 2,
            "devices": ["cpu"],
        },
    ),
    "memory of slots": lambda: (
        kvcore.ContinuousBatchingKVCacheManager.estimated_memory_size,
        {
            "params": params(),
            "max_cache_batch_size": 2,
            "max_seq_len": 4,
            "num_layers": 2,
            "devices": ["cpu"],
        },
    ),
    "block_shape": lambda: (slots().block_shape, {"n_sequences": 2}),
    "claim": lambda: (slots().claim, {"batch_size": 1}),
    "external_claim": lambda: (slots().external_claim, {"seq_ids": [2, 3]}),
    "contains": lambda: (slots().contains, {"seq_id": 0}),
    "release": lambda: (slots().release, {"seq_id": 0}),
    "fetch": lambda: (slots().fetch, {"seq_ids": [0, 1]}),
    "fetch_collection": lambda: (
        slots().fetch_collection,
        {"seq_ids": [0, 1], "new_tokens": [1, 2]},
    ),
    "step": lambda: (slots().step, {"valid_lengths": [1, 2], "seq_ids": [0, 1]}),
    "input_symbols": lambda: (slots().input_symbols, {"devices": ["cpu"], "num_layers": 2}),
    "a pool of the caller's": lambda: (
        lambda blocks: kvcore.PagedKVCacheManager(params(), 4, 64, num_pages=4, blocks=[blocks]),
        {"blocks": array(4, 2, 2, 4, 1, 4)},
    ),
    "a pair of the caller's": lambda: (
        lambda blocks: kvcore.PagedKVCacheManager(
            params(v_head_dim=2), 4, 64, num_pages=4, blocks=[blocks]
        ),
        {"blocks": (array(4, 1, 2, 4, 1, 4), array(4, 1, 2, 4, 1, 2))},
    ),
}


class Nothing:
    """No attribute that anybody asks for."""

    def __repr__(self) -> str:
        return "Nothing()"


HOSTILE: list[Any] = [
    None, True, False, -1, 2**31, 2**32 + 1, 2**63, 2**64, -(2**63) - 1, 2**70, 10**400,
    1.5, -0.0, float("nan"), float("inf"), 1j, "x", "", "0", b"x", b"",
    [], (), {}, [None], [[1], [1, 2]], ["x"], [1.5], [-1], [2**70], [True], (1, 2, 3), {0: 1},
    range(2**70), Nothing(), Nothing, len,
    np.float32(1), np.int64(-1), np.uint64(2**64 - 1), np.bool_(True), np.array(1.5), np.array(7),
    np.array([]), np.array([[]]), np.array([1.5, 2.0]), np.array([-1, 3]), np.array([True, False]),
    np.array([2**64 - 1] * 2, np.uint64), np.array([2**32 + 1, 1]), np.array(["a", "b"]),
    np.array([None, 1], object), np.array([1, 2], "datetime64[s]"), np.zeros((2, 2), "i4,f4"),
    np.zeros((3, 1, 8), ">f4"), np.zeros((0, 0, 0, 0), np.float32), np.zeros((1,) * 7, np.float32),
]  # fmt: skip

ALLOWED = (TypeError, ValueError, IndexError, kvcore.KVCacheError)


HOLDERS = (
    "arrays", "blocks", "cache_lengths", "lookup_table", "max_lengths",
    "key_pool", "value_pool", "block_table", "seq_lengths",
)  # fmt: skip


def arrays_in(value: Any, depth: int = 0) -> Iterator[Any]:
    if isinstance(value, np.ndarray):
        yield value
    elif isinstance(value, list | tuple):
        for each in value:
            yield from arrays_in(each, depth + 1)
    elif depth < 4:
        for name in HOLDERS:
            yield from arrays_in(getattr(value, name, None), depth + 1)


def arguments_of(name: str) -> list[str]:
    return list(SCENES[name]()[1])


@pytest.mark.parametrize(
    ("name", "argument"), [(name, each) for name in SCENES for each in arguments_of(name)]
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_hostile_argument_is_refused_or_taken(name: str, argument: str) -> None:
    for value in HOSTILE:
        call, arguments = SCENES[name]()
        arguments[argument] = value
        owner = getattr(call, "__self__", None)
        kept = [*arrays_in(list(arguments.values())), *arrays_in(owner)]
        before = [each.tobytes() for each in kept if not each.dtype.hasobject]
        try:
            call(**arguments)
        except ALLOWED as error:
            words = str(error)
            assert "incompatible function arguments" not in words, f"{value!r}: {words}"
            assert "has no attribute" not in words, f"{value!r}: {words}"
            after = [each.tobytes() for each in kept if not each.dtype.hasobject]
            assert after == before, f"{value!r} was refused and something was written"
        except FileNotFoundError:
            assert argument == "config"  # a path like any other
        except Exception as error:
            raise AssertionError(f"{argument}={value!r} raises {error!r}") from error


@pytest.mark.parametrize("name", SCENES)
def test_scenes_are_accepted_as_they_are(name: str) -> None:
    call, arguments = SCENES[name]()
    call(**arguments)


COUNTS = [
    ("append", "layer"), ("append", "threads"), ("gather", "layer"), ("gather", "threads"),
    ("attention", "window"), ("attention", "v_head_dim"), ("attention", "threads"),
    ("cascade_attention", "replica"), ("fill_pages", "byte"), ("copy_pages", "threads"),
    ("transfer", "layers"), ("transfer", "max_blocks"), ("quantize", "threads"),
    ("allocate_blocks", "sequence_idx"), ("allocate_blocks", "num_new_tokens"),
    ("append_kv", "sequence_idx"), ("gather_kv", "sequence_idx"), ("load", "bs"), ("load", "dim"),
    ("get_key_cache", "layer_idx"), ("claim", "batch_size"), ("release", "seq_id"),
    ("KVCacheParams", "page_size"), ("max_supported_sequence_length", "memory_available"),
    ("merge_states", "threads"), ("PoolLayout.allocate", "pages"),
    ("ContinuousBatchingKVCacheCollection", "max_seq_length"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "argument"), COUNTS)
@pytest.mark.parametrize("value", [1.0, "1", True, 1j, b"1", Nothing(), [1], np.float32(1)])
def test_what_is_no_int_is_a_type_error_that_names_the_argument(
    name: str, argument: str, value: Any
) -> None:
    call, arguments = SCENES[name]()
    known = {"memory_available": "memory", "pages": "axis page"}
    with pytest.raises(TypeError, match=known.get(argument, argument)):
        call(**(arguments | {argument: value}))


@pytest.mark.parametrize("value", [2**31, 2**63, 2**70, 0, -1])
@pytest.mark.parametrize("name", [name for name in SCENES if "threads" in arguments_of(name)])
def test_threads_beyond_int32_are_a_value_error(name: str, value: int) -> None:
    call, arguments = SCENES[name]()
    with pytest.raises(ValueError, match=f"threads is {value}, must be at"):
        call(**(arguments | {"threads": value}))


@pytest.mark.parametrize(
    ("lengths", "error", "match"),
    [
        (np.array([-1, 2]), ValueError, "lengths holds -1, must be 0 .. 4294967295"),
        (np.array([2**32 + 1, 1]), ValueError, "lengths holds 4294967297"),
        (np.array([2**64 - 1, 1], np.uint64), ValueError, "lengths holds 18446744073709551615"),
        (np.array([1.0, 2.0]), TypeError, "lengths has dtype float64, must be integers"),
        (np.array([True, True]), TypeError, "lengths has dtype bool"),
        (np.array([2**32 - 1, 1]), IndexError, "position 4 of row 0 has no page"),
    ],
)
def test_lengths_of_a_gather_are_not_cast(lengths: Any, error: Any, match: str) -> None:
    with pytest.raises(error, match=match):
        ops.gather(batch(), 0, lengths=lengths)


@pytest.mark.parametrize("dtype", [np.int8, np.int32, np.int64, np.uint64])
def test_lengths_of_a_gather_may_be_any_integers(dtype: Any) -> None:
    k, _, ends = ops.gather(batch(), 0, lengths=np.array([3, 1], dtype))
    assert ends.tolist() == [0, 3, 4]
    assert len(k) == 4


def test_lengths_that_wrap_together_are_refused() -> None:
    """A table that is seen many times holds more tokens than 32 bits count."""
    table = np.broadcast_to(np.zeros((1, 1), np.uint32), (2, 2**20))
    pool = np.broadcast_to(np.zeros(1, np.float32), (1, 2**12, 1, 1))
    many = kvcore.PagedBatch(pool, None, table, np.zeros(2, np.uint32))
    with pytest.raises(ValueError, match="lengths are 4294967296 tokens together"):
        ops.gather(many, 0, lengths=np.array([2**31, 2**31]))


@pytest.mark.parametrize("offsets", [[0, 2**32 + 1], [0, -1], [0, 2**62]])
def test_row_offsets_of_a_step_are_not_wrapped(offsets: Any) -> None:
    manager, inputs = fetched()
    with pytest.raises(ValueError, match="row offsets holds"):
        manager.increment_cache_lengths(inputs, np.array(offsets))
    with pytest.raises(ValueError, match="row offsets holds"):
        slots().increment_cache_lengths(slots().fetch([0]), np.array(offsets))


def test_lengths_that_would_wrap_are_refused() -> None:
    manager, (entry,) = fetched()
    full = kvcore.RaggedKVCacheInputs(
        entry.blocks, np.array([2**32 - 1], np.uint32), entry.lookup_table, entry.max_lengths
    )
    with pytest.raises(ValueError, match="cache_lengths holds 4294967296"):
        manager.increment_cache_lengths([full], np.array([0, 1], np.uint32))
