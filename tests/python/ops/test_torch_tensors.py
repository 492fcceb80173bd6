# SPDX-License-Identifier: Apache-2.0
"""Functions that take numpy arrays also take torch's tensors, or refuse them with a reason."""

from __future__ import annotations

import subprocess
import sys
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from conftest import require
from kvcore import PagedBatch, TextGenerationContext, ops, update_batch
from kvcore.backends.arrays import host_array, in_library_of
from kvcore.backends.selection import any_array, call_array
from kvcore.native.contexts import host_tensor
from kvcore.support.dtypes import NARROW, WIDE, numpy_dtype
from torch_exchange import require_exchange
from toy_engine import make_manager

torch: Any = require("torch")

DTYPES = (
    *("float32", "float64", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "bool"),
    *("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
)


class Subclass(torch.Tensor):  # type: ignore[misc]
    pass


# -- accepted tensors ----------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_shares_its_memory(dtype: str) -> None:
    tensor = torch.ones((3, 4), dtype=torch.uint8).to(getattr(torch, dtype))
    for each in (tensor, tensor.T, tensor[1:, ::2], tensor[:0], tensor[0, 0]):
        seen = host_array(each, "k")
        assert seen.dtype.name == dtype
        assert seen.shape == tuple(each.shape)
        strides = [step * each.element_size() for step in each.stride()]
        assert each.numel() == 0 or list(seen.strides) == strides
        assert each.numel() == 0 or seen.__array_interface__["data"][0] == each.data_ptr()
        assert seen.flags.writeable
        assert (seen == 1).all()


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "int32", "int64", "uint32"])
def test_common_dtypes_need_no_python_code(dtype: str) -> None:
    tensor = torch.ones((3, 4), dtype=getattr(torch, dtype))
    require_exchange()
    seen = host_tensor(tensor)
    assert seen is not None
    assert np.array_equal(seen, host_array(Subclass(tensor), "k"))


def test_memory_lives_as_long_as_an_array_over_it() -> None:
    tensor = torch.arange(1000, dtype=torch.int64)
    seen = host_array(tensor, "k")
    del tensor
    others = [torch.full((1000,), -1) for _ in range(8)]
    assert np.array_equal(seen, np.arange(1000))
    assert len(others) == 8


def test_tensors_may_be_resized_as_before() -> None:
    tensor = torch.zeros(4)
    host_array(tensor, "k")
    assert tensor.resize_(8).shape == (8,)


@pytest.mark.parametrize(
    "tensor",
    [
        Subclass(torch.ones(3)),
        torch.nn.Parameter(torch.ones(3), requires_grad=False),
        torch.ones(3, requires_grad=True).detach(),
        torch.ones(3, dtype=torch.complex64).conj().imag.resolve_neg() + 1,
    ],
)
def test_what_has_plain_memory_is_seen(tensor: Any) -> None:
    assert host_array(tensor, "k").tolist() == [1.0, 1.0, 1.0]


# -- refusals ------------------------------------------------------------------------------------
def fake() -> Any:
    mode = require("torch._subclasses.fake_tensor").FakeTensorMode()
    with mode:
        return torch.zeros(3)


REFUSED: list[tuple[str, Callable[[], Any], str]] = [
    ("gradient", lambda: torch.zeros(3, requires_grad=True), "gradient"),
    ("gradient16", lambda: torch.zeros(3, dtype=torch.bfloat16, requires_grad=True), "gradient"),
    ("negated", lambda: torch.ones(3, dtype=torch.complex64).conj().imag, "negative bit is set"),
    ("negated16", lambda: torch._neg_view(torch.ones(3, dtype=torch.bfloat16)), "negative bit"),
    ("conjugate", lambda: torch.ones(3, dtype=torch.complex64).conj(), "conjugate bit"),
    ("meta", lambda: torch.zeros(3, device="meta"), "meta"),
    ("sparse", lambda: torch.zeros(3, 3).to_sparse(), "storage"),
    ("fake", fake, "no memory"),
    ("no memory", lambda: torch._efficientzerotensor(3), "no memory"),
]


@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")
@pytest.mark.parametrize(("make", "text"), [each[1:] for each in REFUSED], ids=lambda x: str(x)[:9])
def test_what_has_no_plain_memory_is_refused_by_name(make: Callable[[], Any], text: str) -> None:
    with pytest.raises(TypeError, match=f"^k is a .*{text}"):
        host_array(make(), "k")


def test_mapped_tensors_are_refused() -> None:
    def inner(tensor: Any) -> Any:
        with pytest.raises(TypeError, match=r"^k is a Tensor that cannot be seen"):
            host_array(tensor, "k")
        return tensor

    torch.vmap(inner)(torch.zeros(2, 3))


# -- results -------------------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(2, 3), (5,), (), (0, 3)])
def test_a_result_is_a_tensor_over_its_memory(dtype: str, shape: tuple[int, ...]) -> None:
    kind = numpy_dtype(dtype) if dtype in (*WIDE, *NARROW) else np.dtype(dtype)
    result = np.ones(shape, kind)
    tensor = in_library_of(torch.zeros(1), result)
    assert (tensor.dtype, tuple(tensor.shape)) == (getattr(torch, dtype), shape)
    assert tensor.is_contiguous()
    assert (tensor.to(torch.float64) == 1).all()
    assert not result.size or tensor.data_ptr() == result.__array_interface__["data"][0]


def test_a_result_lives_as_long_as_the_last_tensor_over_it() -> None:
    class Result(np.ndarray[Any, Any]):
        pass

    array = np.ones((2, 3), np.float32).view(Result)
    alive = weakref.ref(array)
    tensor = in_library_of(torch.zeros(1), array)
    del array
    last = tensor[1:]
    del tensor
    assert alive() is not None
    assert last.tolist() == [[1, 1, 1]]
    del last
    assert alive() is None


def test_results_that_the_exchange_cannot_have_are_converted_in_python() -> None:
    strided = in_library_of(torch.zeros(1), np.arange(8, dtype=np.float32)[::2])
    assert strided.tolist() == [0, 2, 4, 6]
    assert in_library_of(torch.zeros(1), np.zeros(2, np.complex64)).dtype == torch.complex64


# -- operations ----------------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", WIDE)
def test_a_step_is_what_it_is_with_numpy(dtype: str) -> None:
    rng = np.random.default_rng(7)
    qkv = torch.from_numpy(rng.normal(size=(3, 8, 16)).astype(np.float32)).to(getattr(torch, dtype))
    table, lengths = np.array([[0, 1], [2, 3]], np.uint32), np.array([3, 4], np.uint32)
    offsets = torch.tensor([0, 2, 3], dtype=torch.int32)
    keys, values = (torch.zeros((4, 4, 2, 16), dtype=getattr(torch, dtype)) for _ in "kv")
    given = PagedBatch(keys, values, torch.from_numpy(table), torch.from_numpy(lengths))
    own = [host_array(pool.clone(), "pool") for pool in (keys, values)]
    seen = PagedBatch(own[0], own[1], table, lengths)
    q, k, v = qkv[:, :4], qkv[:, 4:6], qkv[:, 6:]
    ops.append(given, 0, k, v, offsets)
    ops.append(seen, 0, host_array(k, "k"), host_array(v, "v"), np.array([0, 2, 3], np.uint32))
    o = ops.attention(given, 0, q, offsets)
    expected = ops.attention(seen, 0, host_array(q, "q"), np.array([0, 2, 3], np.uint32))
    assert type(o) is torch.Tensor
    assert o.dtype == getattr(torch, dtype)
    assert np.array_equal(host_array(o, "o"), expected)
    out = torch.empty_like(o)
    assert ops.attention(given, 0, q, offsets, out=out) is out
    assert torch.equal(out, o)


def test_outputs_that_expect_a_gradient_are_refused_and_not_written() -> None:
    keys, values = (torch.ones((1, 4, 1, 8)) for _ in "kv")
    table, lengths = torch.zeros((1, 1), dtype=torch.uint32), torch.zeros(1, dtype=torch.uint32)
    batch = PagedBatch(keys, values, table, lengths)
    out = torch.zeros((1, 1, 8), requires_grad=True)
    with pytest.raises(TypeError, match=r"^out is a Tensor that cannot be seen from numpy"):
        ops.attention(batch, 0, torch.ones((1, 1, 8)), [0, 1], out=out)
    assert not out.any()


def test_models_find_their_layers_in_every_step() -> None:
    params = make_manager(4).params
    keys, values = ([torch.zeros((4, 4, 1, 1))] for _ in "kv")
    table, lengths = torch.zeros((1, 1), dtype=torch.uint32), torch.zeros(1, dtype=torch.uint32)
    model = PagedBatch(keys, values, table, lengths, params=params)
    for page in (3, 1):
        there = torch.full((1, 1), page).to(torch.uint32)
        step = model.with_tables(there, lengths)
        ops.append(step, 0, torch.full((1, 1, 1), 5.0), torch.ones((1, 1, 1)), [0, 1])
        assert keys[0][page, 0] == 5.0
        assert step.lookup_table is there
        assert step.params is params
    assert not keys[0][0].any()


# -- reused memory --------------------------------------------------------------------------------
def stored(k: Any, offsets: Any = (0, 1)) -> Any:
    """Return the stored keys of one appended token."""
    pool, table = torch.zeros(1, 1, *k.shape[1:]), np.zeros((1, 1), np.uint32)
    batch = PagedBatch(pool, torch.zeros_like(pool), table, np.zeros(1, np.uint32))
    ops.append(batch, 0, k, torch.zeros(k.shape), offsets)
    return pool[0, 0]


def test_tensors_of_a_call_may_have_been_given_other_memory() -> None:
    k, offsets = torch.full((1, 2, 8), 1.0), torch.tensor([0, 1])
    assert (stored(k, offsets) == 1).all()
    k.data, offsets.data = torch.full((1, 2, 8), 2.0), torch.tensor([0, 1])
    assert (stored(k, offsets) == 2).all()
    offsets.data = torch.tensor([0, 2])
    with pytest.raises(ValueError, match="must be \\(2, 2, 8\\)"):
        stored(k, offsets)


def test_tensors_of_a_call_may_lie_where_others_did() -> None:
    for i in range(24):  # equal sizes, so that memory is reused
        shape = (1, 2, 8) if i % 2 else (1, 4, 4)
        assert (stored(torch.full(shape, float(i))) == i).all()
    memory = torch.arange(16.0)
    for strides in ((16, 8, 1), (16, 4, 1), (16, 0, 1)):
        k = memory.as_strided((1, 2, 8), strides)
        assert torch.equal(stored(k), k[0])
    with pytest.raises(TypeError, match="k has dtype int32"):
        stored(memory.view(torch.int32).as_strided((1, 2, 8), (16, 8, 1)))


def test_tensors_of_a_call_may_no_longer_be_plain() -> None:
    k = torch.ones(1, 2, 8)
    for make, text in (
        (lambda: torch._neg_view(k), "negative bit"),
        (k.requires_grad_, "expects a gradient"),
    ):
        assert (stored(k) == 1).all()
        with pytest.raises(TypeError, match=text):
            stored(make())
    numbers = torch.ones(3, dtype=torch.complex64)
    assert call_array(numbers.imag, "k").shape == (3,)
    with pytest.raises(TypeError, match="negative bit"):
        call_array(numbers.conj().imag, "k")


def test_nothing_of_a_call_is_kept() -> None:
    memory = [np.ones((1, 1, 8), np.float32), np.array([0, 1], np.uint32)]
    before = [sys.getrefcount(each) for each in memory]
    pool, table = torch.zeros(1, 1, 1, 8), np.zeros((1, 1), np.uint32)
    batch = PagedBatch(pool, pool.clone(), table, np.zeros(1, np.uint32))
    k, offsets = map(torch.from_numpy, memory)
    for _ in range(2):
        ops.append(batch, 0, k, k, offsets)
        ops.attention(batch, 0, k, offsets, out=torch.zeros(1, 1, 8))
    del k, offsets
    assert [sys.getrefcount(each) for each in memory] == before


def test_tables_are_seen_again_where_their_memory_is_the_same() -> None:
    require_exchange()
    table = torch.arange(4, dtype=torch.int32).reshape(2, 2)
    first = any_array(table, "table")
    assert any_array(table, "table", first) is first
    assert any_array(table[:], "table", first) is first
    for other in (table.T, table[:1], table[0], table.view(torch.float32), table.clone()):
        seen = any_array(other, "table", first)
        assert seen is not first
        assert np.array_equal(seen, other.numpy())
    table.data = torch.full((2, 2), 7, dtype=torch.int32)
    assert (any_array(table, "table", first) == 7).all()
    assert first.tolist() == [[0, 1], [2, 3]]


def test_memory_of_a_table_is_kept_by_who_owns_it_now() -> None:
    require_exchange()
    memory = np.arange(4, dtype=np.uint32)
    one, two = torch.from_numpy(memory), torch.from_numpy(memory)
    first = any_array(one, "table")
    second = any_array(two, "table", first)
    assert second is not first
    assert any_array(two, "table", memory) is not memory
    before = sys.getrefcount(memory)
    del one, first
    assert sys.getrefcount(memory) == before - 1  # `one` held one reference
    del two
    assert sys.getrefcount(memory) == before - 1
    assert second.tolist() == [0, 1, 2, 3]


def test_batches_with_other_tables_see_those() -> None:
    pool, lengths = torch.zeros(4, 1, 1, 1), torch.zeros(1, dtype=torch.int32).view(torch.uint32)
    table = torch.zeros((1, 1), dtype=torch.int32).view(torch.uint32)
    batch = PagedBatch(pool, None, table, lengths)
    for page in (0, 2, 2, 3):
        if page == 3:
            table.data = torch.zeros((1, 1), dtype=torch.int32).view(torch.uint32)
        table.fill_(page)
        batch = batch.with_tables(table, lengths)
        ops.append(batch, 0, torch.ones(1, 1, 1), None, [0, 1])
        assert pool[page] == 1
    assert pool.flatten().tolist() == [1.0, 0.0, 1.0, 1.0]


# -- tokens --------------------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", ["int32", "int64"])
def test_tokens_may_be_tensors(dtype: str) -> None:
    wanted = getattr(torch, dtype)
    context = TextGenerationContext("a", torch.tensor([1, 0, 2, 0, 3, 0], dtype=wanted)[::2])
    other = TextGenerationContext("b", [4])
    update_batch([context, other], torch.tensor([5, 6], dtype=wanted))
    context.extend(torch.tensor([7, 8], dtype=wanted))
    assert context.tokens.tolist() == [1, 2, 3, 5, 7, 8]
    assert other.tokens.tolist() == [4, 6]


def test_tokens_of_a_context_are_copied() -> None:
    tokens = torch.tensor([1, 2, 3], dtype=torch.int32)
    context = TextGenerationContext("a", tokens)
    tokens[0] = 9
    assert context.tokens.tolist() == [1, 2, 3]


@pytest.mark.parametrize(
    ("tokens", "error", "text"),
    [
        (torch.tensor([1.0]), TypeError, "tokens have dtype float32"),
        (torch.tensor([True]), TypeError, "tokens have dtype bool"),
        (torch.tensor([1], dtype=torch.int16), TypeError, "tokens have dtype int16"),
        (torch.tensor([2**31]), ValueError, "token 0 is 2147483648"),
        (torch.tensor([[1]]), ValueError, "must have one dimension"),
        (torch.tensor([1], device="meta"), TypeError, "Tensor"),
        (torch.tensor([1]).to_sparse(), TypeError, "Tensor that numpy cannot read"),
    ],
)
def test_other_tensors_are_no_tokens(tokens: Any, error: type[Exception], text: str) -> None:
    context = TextGenerationContext("a", [1, 2])
    for call in (context.extend, lambda given: TextGenerationContext("b", given)):
        with pytest.raises(error, match=text):
            call(tokens)
    assert context.end_idx == 2


def test_lengths_of_own_pools_are_compared_with_the_contexts() -> None:
    pool, table = torch.zeros((1, 4, 1, 1)), torch.zeros((1, 1), dtype=torch.uint32)
    batch = PagedBatch(pool, None, table, torch.ones(1, dtype=torch.uint32))
    with pytest.raises(ValueError, match="row 0 has 1 tokens written, its context has 0"):
        ops.pack(batch, [TextGenerationContext("a", [1, 2])])


# -- without torch -------------------------------------------------------------------------------
PROGRAM = """
import sys
import numpy as np
import kvcore
from kvcore.native.contexts import host_tensor
kvcore.TextGenerationContext("a", np.arange(4))
assert host_tensor(object()) is None
assert "torch" not in sys.modules
sys.modules["torch"] = object()  # something else of that name
assert host_tensor(object()) is None
del sys.modules["torch"]
import torch
assert host_tensor(torch.zeros(3)) is not None or not hasattr(
    torch.Tensor, "__dlpack_c_exchange_api__"
)
"""


def test_torch_is_not_imported_and_may_come_later() -> None:
    subprocess.run([sys.executable, "-W", "error", "-c", PROGRAM], check=True, timeout=120)


REPLACED = """
import torch
torch.Tensor.is_neg = lambda tensor: False
from kvcore.native.contexts import host_tensor
from kvcore.backends.arrays import host_array
assert host_tensor(torch.zeros(3)) is None
assert host_array(torch.ones(3), "k").tolist() == [1, 1, 1]
"""


def test_methods_that_somebody_replaced_are_called() -> None:
    subprocess.run([sys.executable, "-W", "error", "-c", REPLACED], check=True, timeout=120)


def test_pools_stay_when_their_tensors_are_given_other_memory() -> None:
    k, v = (torch.zeros(1 << 14, 4, 1, 16) for _ in range(2))
    kept = k.detach()
    batch = PagedBatch(k, v, np.zeros((1, 1), np.uint32), np.zeros(1, np.uint32))
    seen = host_array(k, "k")
    k.data, v.data = torch.zeros(1), torch.zeros(1)
    seen[:] = 1
    assert kept.sum() == seen.size
    del kept
    seen[:] = 2  # no other object uses the memory now
    ops.append(batch, 0, torch.ones(1, 1, 16), torch.ones(1, 1, 16), [0, 1])
    assert seen.flat[-1] == 2
