# SPDX-License-Identifier: Apache-2.0
"""kvcore.ops.attention on arrays of an emulated GPU, whose memory Triton's interpreter reads."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest

from attention_oracle import assert_close, assert_lse
from attention_scenes import Scene, on_device
from cuda_machine import Machine, require_emulation
from fake_torch import FakeTorch
from kvcore import (
    KVCacheError,
    KVCacheParams,
    PagedBatch,
    PagedKVCacheManager,
    TextGenerationContext,
    ops,
)
from kvcore.backends.cuda import availability, driver
from kvcore.groups import FullAttention, SlidingWindow
from nvfp4_scenes import Nvfp4Scene
from triton_interpreter import require_interpreter

require_interpreter()
require_emulation()


@pytest.mark.parametrize(
    "options",
    [
        {"dtype": "float16", "q_dtype": "float16"},
        {"dtype": "float8_e4m3fn", "q_dtype": "bfloat16", "scales": "heads", "layout": "HND"},
        {"dtype": "int8", "q_dtype": "float32", "scales": "number"},
    ],
)
@pytest.mark.parametrize("splits", [None, 3])
def test_results_are_those_of_the_cpu(
    machine: Machine, options: dict[str, Any], splits: int | None
) -> None:
    scene = Scene(cached=[20, 0, 3], new=[1, 5, 2], page=3, **options)
    batch, q = on_device(machine, scene)
    rule: dict[str, Any] = {"window": 9, "soft_cap": 20.0, "scale": 0.2}
    sinks = np.linspace(-1, 1, scene.q_heads).astype(np.float32)
    expected, sums = scene.expected(sinks=sinks, **rule)
    for offsets in (scene.offsets.tolist(), machine.array(scene.offsets, 1)):
        o, lse = ops.attention(
            batch, 0, q, offsets, sinks=sinks, return_lse=True, splits=splits, **rule
        )
        assert_close(machine.host(o), expected, scene.q_dtype)
        assert_lse(machine.host(lse), sums)
    o = ops.attention(batch, 0, q, scene.offsets, sinks=machine.array(sinks, 1), **rule)
    assert_close(machine.host(o), expected, scene.q_dtype)
    cpu = ops.attention(scene.batch, 0, scene.q, scene.offsets, sinks=sinks, **rule)
    assert_close(cpu, expected, scene.q_dtype)


@pytest.mark.parametrize("kind", ["numbers", "host", "device"])
def test_pools_in_nvfp4_and_their_global_scales(machine: Machine, kind: str) -> None:
    scales: list[Any] = [0.75, 0.02]
    if kind != "numbers":
        scales = [np.array([scale], np.float32) for scale in scales]
    scene = Nvfp4Scene(
        cached=[20, 3], new=[1, 2], page=3, dim=48, global_scales=(scales[0], scales[1])
    )
    batch, q = on_device(machine, scene)
    if kind == "device":
        made = [machine.array(scale, 1) for scale in scales]
        batch = PagedBatch(
            *(batch.key_pool, batch.value_pool, batch.lookup_table, batch.cache_lengths),
            key_scales=batch.key_scales,
            value_scales=batch.value_scales,
            global_scales=(made[0], made[1]),
        )
    o, lse = ops.attention(batch, 0, q, scene.offsets, return_lse=True)
    expected, sums = scene.expected()
    assert_close(machine.host(o), expected, scene.q_dtype)
    assert_lse(machine.host(lse), sums)
    if kind == "device":  # the kernel reads the scale when it runs
        machine.view(made[1])[...] = 0.04
        twice = ops.attention(batch, 0, q, scene.offsets)
        assert_close(machine.host(twice), 2 * expected, scene.q_dtype)


@pytest.mark.parametrize("seed", range(3))
def test_work_on_the_stream_of_the_call_is_done_first(machine: Machine, seed: int) -> None:
    """The stream writes queries and tokens first, in any order of the streams."""
    scene = Scene(cached=[6], new=[2], page=3, heads=1)
    batch, q = on_device(machine, scene)
    late = machine.memory(q.shape, q.dtype, 1)
    machine.view(late)[...] = np.nan
    machine.in_any_order(seed)
    stream = machine.kernels.Stream(1)
    fresh = machine.array(np.ascontiguousarray(scene.q), 1)
    machine.kernels.copy(late.data.ptr, fresh.data.ptr, fresh.nbytes, 1, stream.ptr)
    o = ops.attention(batch, 0, late, scene.offsets, stream=stream)
    assert_close(machine.host(o), scene.expected()[0], "float32")


def test_with_out_and_scratch_nothing_is_allocated(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A graph capture requires this."""
    scene = Scene(cached=[30, 4], new=[1, 2])
    batch, q = on_device(machine, scene)
    offsets = machine.array(scene.offsets, 1)
    out = machine.memory(q.shape, np.float32, 1)
    scratch = machine.memory((ops.attention_scratch(batch, q, 4),), np.float32, 1)
    for name in set(driver.__all__) - {"current", "on_device"}:  # these two allocate nothing
        monkeypatch.setattr(driver, name, None)
    stream = machine.kernels.Stream(1)
    found = ops.attention(batch, 0, q, offsets, out=out, scratch=scratch, splits=4, stream=stream)
    assert found is out
    assert_close(machine.host(out), scene.expected()[0], "float32")
    machine.view(out)[...] = 0
    ops.attention(batch, 0, q, offsets, out=out, scratch=scratch[:1], stream=stream)
    assert_close(machine.host(out), scene.expected()[0], "float32")  # the scratch fits one split


def test_scratch_is_for_the_states_of_splits(machine: Machine) -> None:
    scene = Scene(cached=[30, 4], new=[1, 2], v_dim=24)
    batch, q = on_device(machine, scene)
    assert ops.attention_scratch(batch, q, 1) == 0
    assert ops.attention_scratch(batch, q, 4) == 4 * 3 * 4 * 25
    assert ops.attention_scratch(scene.batch, scene.q, 4, v_head_dim=5) == 4 * 3 * 4 * 6
    with pytest.raises(ValueError, match="splits is 0, must be at least 1"):
        ops.attention_scratch(batch, q, 0)
    with pytest.raises(ValueError, match=r"q has shape \(3, 4\), must be"):
        ops.attention_scratch(batch, q[..., 0], 2)
    with pytest.raises(IndexError, match="layer is 1"):
        ops.attention_scratch(batch, q, 2, layer=1)


def u32(*values: int) -> Any:
    return np.array(values, np.uint32)


Q = np.ones((5, 4, 16), np.float32)
BAD: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"q": Q[0]}, ValueError, r"q has shape \(4, 16\), must be \(tokens, q_heads, head_dim\)"),
    ({"q": Q[:4]}, ValueError, "q has 4 tokens, row_offsets ends at 5"),
    ({"q": Q[:, :3]}, ValueError, "q has 3 heads, must have a multiple of the 2 heads"),
    ({"q": Q[..., :15]}, ValueError, "q has a head_dim of 15, keys have 16"),
    ({"q": Q.astype(np.int8)}, TypeError, "q has dtype int8, must be float32, float16 or bfloat"),
    ({"row_offsets": u32(0, 5)}, ValueError, r"row_offsets has shape \(2,\), must be \(3,\)"),
    ({"row_offsets": u32(1, 4, 5)}, ValueError, r"row_offsets\[0\] is 1, must be 0"),
    ({"row_offsets": u32(0, 6, 5)}, ValueError, "must not be below the one before"),
    ({"scale": np.inf}, ValueError, "scale is inf, must be finite"),
    ({"scale": 1e39}, ValueError, r"scale is 1e\+39, must be finite in float32"),
    ({"scale": "1"}, TypeError, "scale is a str, must be a number"),
    ({"causal": 1}, TypeError, "causal is a int, must be a bool"),
    ({"return_lse": 1}, TypeError, "return_lse is a int, must be a bool"),
    ({"window": 0}, ValueError, "window is 0, must be at least 1"),
    ({"chunk": -3}, ValueError, "chunk is -3, must be at least 1"),
    ({"soft_cap": 0.0}, ValueError, "soft_cap is 0.0, must be above 0"),
    ({"sinks": np.zeros(3, np.float32)}, ValueError, r"sinks has shape \(3,\), must be \(4,\)"),
    ({"sinks": np.zeros(4)}, TypeError, "sinks has dtype float64"),
    ({"v_head_dim": 0}, ValueError, "v_head_dim is 0, must be 1 to 16"),
    ({"v_head_dim": 17}, ValueError, "v_head_dim is 17"),
    ({"splits": 0}, ValueError, "splits is 0, must be 1 .. 64"),
    ({"splits": 65}, ValueError, "splits is 65, must be 1 .. 64"),
    ({"splits": 2.0}, TypeError, "splits is a float"),
    ({"splits": 2, "scratch": np.zeros(7, np.float32)}, ValueError, "scratch has 7 elements, must"),
    ({"scratch": np.zeros(7, np.int32)}, TypeError, "scratch has dtype int32, must be float32"),
    ({"out": np.ones((5, 4, 15), np.float32)}, ValueError, r"out has shape .*, must be \(5, 4, 16"),
    ({"out": Q.astype(np.float16)}, TypeError, "out has dtype float16, must be that of q, float32"),
]


@pytest.mark.parametrize(("change", "error", "match"), BAD)
def test_refused_calls_write_nothing(
    machine: Machine, change: dict[str, Any], error: type[Exception], match: str
) -> None:
    scene = Scene(cached=[44, 3], new=[4, 1])
    batch, _ = on_device(machine, scene)
    arguments: dict[str, Any] = {
        "q": Q,
        "row_offsets": scene.offsets,
        "out": np.full(Q.shape, 7, np.float32),
    } | change
    for name in ("q", "out", "scratch"):
        if name in arguments:
            arguments[name] = machine.array(arguments[name], 1)
    with pytest.raises(error, match=match):
        ops.attention(batch, 0, **arguments)
    if "out" not in change:
        assert (machine.host(arguments["out"]) == 7).all()


def test_arrays_elsewhere_are_named(machine: Machine) -> None:
    scene = Scene(cached=[4], new=[1])
    batch, q = on_device(machine, scene)
    with pytest.raises(ValueError, match="q is in host memory, must be on cuda:1"):
        ops.attention(batch, 0, scene.q, scene.offsets)
    with pytest.raises(ValueError, match="out is on cuda:0, must be on cuda:1"):
        ops.attention(batch, 0, q, scene.offsets, out=machine.memory(q.shape, q.dtype, 0))
    dense = machine.array(np.ascontiguousarray(scene.q), 1)
    with pytest.raises(ValueError, match="out overlaps what is read"):
        ops.attention(batch, 0, dense, scene.offsets, out=dense)
    with pytest.raises(ValueError, match="stream is given for arrays in host memory"):
        ops.attention(scene.batch, 0, scene.q, scene.offsets, stream=0)


def test_rows_of_more_elements_than_a_program_holds_are_refused(machine: Machine) -> None:
    pool = machine.memory((2, 16, 1, 576), np.float16, 1)
    table, lengths = (machine.array(u32(*x), 1) for x in ((0,), (1,)))
    batch = PagedBatch(pool, None, table[None], lengths)
    q = machine.memory((1, 16, 576), np.float16, 1)
    with pytest.raises(ValueError, match="keys have 576 elements and values 576, must have at mos"):
        ops.attention(batch, 0, q, u32(0, 1))
    ops.attention(batch, 0, q, u32(0, 1), v_head_dim=512)


def test_triton_that_is_missing_is_named(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(cached=[4], new=[1])
    batch, q = on_device(machine, scene)
    availability._imported.cache_clear()
    for name in [n for n in sys.modules if n.startswith("kvcore.backends.cuda.attention")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "triton", None)
    with pytest.raises(KVCacheError, match=r"triton is not installed; pip install 'kvcore\[atte"):
        ops.attention(batch, 0, q, scene.offsets)


def test_a_triton_without_a_gpu_says_what_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton 3.6 and 3.7 need torch to find a GPU, later ones do not."""
    from triton.runtime import driver

    from kvcore.backends.cuda.attention import launch

    class NoDriver:
        @property
        def active(self) -> None:
            raise RuntimeError("0 active drivers ([])")

    monkeypatch.setattr(type(driver), "active", NoDriver.active)
    with pytest.raises(KVCacheError, match=r"no GPU, 0 active .* before 3\.8 Triton needs torch"):
        launch._driver()


# ---- pools of a manager --------------------------------------------------------------------------
def test_layers_of_a_manager_with_their_windows(machine: Machine) -> None:
    """A window gives back its old pages, and their table entries name no page."""
    groups = FullAttention([0]), SlidingWindow([1], 6)
    params = KVCacheParams("float32", 2, 16, num_layers=2, page_size=4, groups=groups)
    rng = np.random.default_rng(1)
    k, v = (rng.normal(size=(21, 2, 2, 16)).astype(np.float32) for _ in range(2))
    managers = [
        PagedKVCacheManager(params, 2, 64, devices=[name], num_pages=40)
        for name in ("cpu", "cuda:0")
    ]
    for manager in managers:
        manager.claim("a")
    contexts = [TextGenerationContext("a", list(range(17))) for _ in managers]
    begin = 0
    for end in (17, 18, 19, 20, 21):
        results = []
        for manager, context in zip(managers, contexts, strict=True):
            put = machine.array if manager is managers[1] else np.array
            (inputs,) = manager.fetch([context])
            offsets = u32(0, end - begin)
            for layer in range(2):
                new_k, new_v = (put(x[begin:end, layer]) for x in (k, v))
                ops.append(inputs, layer, new_k, new_v, offsets)
            q = put(np.concatenate([k[begin:end, 0], v[begin:end, 0]], axis=1))
            results.append([ops.attention(inputs, layer, q, offsets) for layer in range(2)])
            context.update(1)
            manager.step([context])
        for host, device in zip(*results, strict=True):
            np.testing.assert_allclose(machine.host(device), host, atol=1e-5)
        begin = end
    with pytest.raises(ValueError, match="window is 7, layer 1 keeps 6"):
        ops.attention(inputs, 1, q, offsets, window=7)


# ---- lists of pages ------------------------------------------------------------------------------
@pytest.mark.parametrize("seed", range(3))
def test_lists_of_pages_are_those_of_the_cpu(machine: Machine, seed: int) -> None:
    """Rows exceed one block of a sum, and a row's pages exceed one block of the lists."""
    rng = np.random.default_rng(seed)
    rows, columns, page = ((600, 3, 3), (2, 300, 1), (0, 4, 2))[seed]
    table = rng.integers(0, 60, (rows, columns)).astype(np.uint32)
    lengths = rng.integers(0, columns * page - 1, rows).astype(np.uint32)
    offsets = np.arange(rows + 1, dtype=np.uint32)
    pool = np.zeros((50, page, 1, 8), np.float16)
    host = PagedBatch(pool, None, table, lengths)
    moved = [machine.array(array) for array in (pool, table, lengths)]
    device = PagedBatch(moved[0], None, *moved[1:])
    expected = ops.page_indices(host, offsets)
    stream = machine.kernels.Stream(0)
    found = ops.page_indices(device, offsets, stream=stream)
    room = [len(array) + (i == 1) * 5 for i, array in enumerate(expected)]
    fixed = [machine.array(np.full(n, 7, np.int32)) for n in room]
    again = ops.page_indices(device, machine.array(offsets), out=fixed, stream=stream)
    total = int(expected.indptr[-1])
    for i, (one, two, wanted) in enumerate(zip(found, again, expected, strict=True)):
        size = total if i == 1 else len(wanted)
        assert np.array_equal(machine.host(one)[:size], wanted[:size])
        assert np.array_equal(machine.host(two)[:size], wanted[:size])
        assert (machine.host(two)[size:] == 7).all()


def test_rows_that_are_longer_than_their_columns_are_cut(machine: Machine) -> None:
    table = machine.array(np.array([[4, 3]], np.uint32))
    pool = machine.memory((9, 2, 1, 8), np.float16)
    batch = PagedBatch(pool, None, table, machine.array(u32(7)))
    found = [machine.host(x).tolist() for x in ops.page_indices(batch, u32(0, 1))]
    assert found == [[0, 2], [4, 3], [2], [4]]


# ---- shared prefixes -----------------------------------------------------------------------------
@pytest.mark.parametrize("offsets_from", ["host", "device"])
def test_shared_prefixes_of_a_batch_on_a_device(machine: Machine, offsets_from: str) -> None:
    """Offsets on the device are not read back, so each row reads its own pages."""
    scene = Scene(
        cached=[9, 11, 9], new=[1, 2, 0], page=3, heads=1, shared=[([0, 1, 2], 2), ([0, 1], 3)]
    )
    batch, q = on_device(machine, scene)
    stacks = offsets_from == "host"
    offsets = scene.offsets if stacks else machine.array(scene.offsets, 1)
    stream = machine.kernels.Stream(1)
    o, lse = ops.cascade_attention(
        batch, 0, q, offsets, scene.groups(), return_lse=True, splits=2, stream=stream
    )
    expected, sums = scene.expected()
    assert_close(machine.host(o), expected, "float32")
    assert_lse(machine.host(lse), sums)
    needed = 2 * (3 + 3 * stacks + 3 * stacks) * 2 * 17
    scratch = machine.memory((needed - 1,), np.float32, 1)
    with pytest.raises(ValueError, match=f"scratch has {needed - 1} elements, must have {needed}"):
        ops.cascade_attention(batch, 0, q, offsets, scene.groups(), splits=2, scratch=scratch)


# ---- streams and graphs --------------------------------------------------------------------------
@pytest.mark.parametrize("seed", range(3))
def test_the_current_stream_of_the_queries_library_counts(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """A torch model's queries read cupy's pools, as managers allocate them."""
    torch = FakeTorch()
    monkeypatch.setitem(sys.modules, "torch", torch)
    scene = Scene(cached=[6], new=[2], page=3, heads=1)
    batch, q = on_device(machine, scene)
    late = machine.memory(q.shape, q.dtype, 1)
    machine.view(late)[...] = np.nan
    machine.in_any_order(seed)
    torch.streams[1] = machine.kernels.Stream(1)
    fresh = machine.array(np.ascontiguousarray(scene.q), 1)
    handle = torch.streams[1].ptr
    machine.kernels.copy(late.data.ptr, fresh.data.ptr, fresh.nbytes, 1, handle)
    o = ops.attention(batch, 0, torch.Tensor(late), machine.array(scene.offsets, 1))
    assert isinstance(o, torch.Tensor)
    assert_close(machine.host(o.array), scene.expected()[0], "float32")


def test_what_a_graph_cannot_hold_is_refused_by_name(machine: Machine) -> None:
    scene = Scene(cached=[6], new=[2], page=3, heads=1, shared=[([0], 2)])
    batch, q = on_device(machine, scene)
    offsets = machine.array(scene.offsets, 1)
    out = machine.memory(q.shape, np.float32, 1)
    refused: list[tuple[str, dict[str, Any]]] = [
        ("the result", {}),
        ("scratch", {"out": out, "splits": 2}),
        ("the array of logarithms", {"out": out, "return_lse": True}),
    ]
    stream = machine.kernels.Stream(1)
    emulation = machine.kernels.emulation
    emulation.begin_capture(1, stream.ptr)
    for name, asked in refused:
        with pytest.raises(ValueError, match=f"^{name} would be new memory, while the stream is"):
            ops.attention(batch, 0, q, offsets, stream=stream, **asked)
    with pytest.raises(ValueError, match="row_offsets is in host memory, while the stream is"):
        ops.attention(batch, 0, q, scene.offsets, stream=stream, out=out)
    sinks = np.zeros(2, np.float32)
    with pytest.raises(ValueError, match="sinks is in host memory, while the stream is"):
        ops.attention(batch, 0, q, offsets, stream=stream, out=out, sinks=sinks)
    emulation.end_capture(1, stream.ptr)
