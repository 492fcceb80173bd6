# SPDX-License-Identifier: Apache-2.0
"""Compiles the attention kernels for GPUs that are not here, and reads the assembler's output.

``python triton_ahead.py ARCH CASE`` prints one JSON object for each kernel. It is a separate
process, because the process of the tests interprets the kernels.
"""

from __future__ import annotations

import functools
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from kvcore.support.dtypes import numpy_dtype

#: Tokens, rows, heads of K and of q, elements of K and of V, dtype of q and of pools, scales.
CASES: dict[str, tuple[int, int, int, int, int, int, str, str, str]] = {
    "decode": (64, 64, 8, 32, 128, 128, "bfloat16", "bfloat16", ""),
    "decode_fp8": (64, 64, 8, 32, 128, 128, "bfloat16", "float8_e4m3fn", "tokens"),
    "decode_int8": (64, 64, 8, 32, 128, 128, "float16", "int8", "heads"),
    "prompt": (4096, 2, 8, 32, 128, 128, "bfloat16", "bfloat16", ""),
    "prompt_fp8": (4096, 2, 8, 32, 128, 128, "bfloat16", "float8_e4m3fn", "groups"),
    "decode_64": (64, 64, 8, 64, 64, 64, "bfloat16", "bfloat16", ""),
    "prompt_64": (4096, 2, 8, 64, 64, 64, "bfloat16", "bfloat16", ""),
    "decode_256": (64, 64, 4, 16, 256, 256, "bfloat16", "bfloat16", ""),
    "prompt_256": (4096, 2, 4, 16, 256, 256, "bfloat16", "bfloat16", ""),
    "decode_80": (64, 64, 8, 32, 80, 80, "float16", "float16", ""),
    "float32": (64, 64, 8, 32, 128, 128, "float32", "float32", ""),
    "decode_group": (64, 64, 1, 64, 128, 128, "bfloat16", "bfloat16", ""),
    "decode_group_fp8": (64, 64, 1, 64, 128, 128, "bfloat16", "float8_e5m2", "heads"),
    "decode_64_fp8": (64, 64, 8, 64, 64, 64, "bfloat16", "float8_e4m3fn", "tokens"),
    "prompt_64_int8": (4096, 2, 8, 64, 64, 64, "float16", "int8", "tokens"),
    "decode_256_fp8": (64, 64, 4, 16, 256, 256, "bfloat16", "float8_e4m3fn", "tokens"),
    "prompt_256_fp8": (4096, 2, 4, 16, 256, 256, "bfloat16", "float8_e4m3fn", "tokens"),
    "decode_nvfp4": (64, 64, 8, 32, 128, 128, "bfloat16", "nvfp4", "numbers"),
    "decode_nvfp4_arrays": (64, 64, 8, 32, 128, 128, "float16", "nvfp4", "arrays"),
    "decode_group_nvfp4": (64, 64, 1, 64, 128, 128, "bfloat16", "nvfp4", "numbers"),
    "prompt_nvfp4": (4096, 2, 8, 32, 128, 128, "bfloat16", "nvfp4", "numbers"),
    "decode_64_nvfp4": (64, 64, 8, 64, 64, 64, "bfloat16", "nvfp4", "numbers"),
    "prompt_64_nvfp4": (4096, 2, 8, 64, 64, 64, "float16", "nvfp4", "arrays"),
    "decode_256_nvfp4": (64, 64, 4, 16, 256, 256, "bfloat16", "nvfp4", "numbers"),
    "prompt_256_nvfp4": (4096, 2, 4, 16, 256, 256, "bfloat16", "nvfp4", "numbers"),
    "decode_80_nvfp4": (64, 64, 8, 32, 80, 80, "bfloat16", "nvfp4", "numbers"),
    "prompt_latent": (4096, 2, 1, 128, 576, 512, "bfloat16", "bfloat16", "latent"),
    "stacked": (64, 64, 8, 32, 128, 128, "bfloat16", "bfloat16", "stacked"),
    "latent": (64, 64, 1, 128, 576, 512, "bfloat16", "bfloat16", "latent"),
    "latent_fp8": (64, 64, 1, 128, 576, 512, "bfloat16", "float8_e4m3fn", "latent_fp8"),
}
_PAGE = 16


def call_of(case: str) -> Any:
    """Return a call with the shapes of a case, over memory that is never read."""
    tokens, rows, heads, q_heads, dim, v_dim, q_dtype, dtype, scales = CASES[case]

    def memory(*shape: int, dtype: str) -> Any:
        return np.empty(shape, numpy_dtype(dtype))

    pages = 64
    if dtype == "nvfp4":
        codes = [np.empty((pages, _PAGE, heads, n // 2), np.uint8) for n in (dim, v_dim)]
        of_blocks = [
            memory(pages, _PAGE, heads, n // 16, dtype="float8_e4m3fn") for n in (dim, v_dim)
        ]
        given = (0.5, 0.25) if scales == "numbers" else (np.ones(1, np.float32),) * 2
        q = memory(tokens, q_heads, dim, dtype=q_dtype)
        return _call(q, [*codes, None, *of_blocks], v_dim, rows)._replace(global_scales=given)
    key, value, rest, ks, vs = memory(pages, _PAGE, heads, dim, dtype=dtype), None, None, None, None
    if scales == "latent_fp8":
        from kvcore.ops.latent import latent_fp8_parts

        key, rest, ks = latent_fp8_parts(np.empty((pages, _PAGE, 656), np.uint8))
    elif scales != "latent":
        value = memory(pages, _PAGE, heads, v_dim, dtype=dtype)
    if scales in ("tokens", "groups"):
        groups = 1 if scales == "tokens" else dim // 32
        ks, vs = (memory(pages, _PAGE, heads, groups, dtype="float32") for _ in range(2))
    elif scales == "heads":
        each = memory(heads, 1, dtype="float32")
        ks = vs = np.broadcast_to(each, (pages, _PAGE, heads, 1))
    stack = None
    if scales == "stacked":
        from kvcore.backends.cuda.attention.cascade import Group, make_stack

        made = make_stack([Group((0, 1), 32)], np.arange(rows + 1, dtype=np.uint32))
        stack = made, made.numbers
    q = memory(tokens, q_heads, dim, dtype=q_dtype)
    return _call(q, [key, value, rest, ks, vs], v_dim, rows)._replace(stack=stack)


def _call(q: Any, pools: list[Any], v_dim: int, rows: int) -> Any:
    key, value, rest, ks, vs = pools
    from kvcore.backends.cuda.attention.call import Call, Rule

    return Call(
        q,
        key,
        value,
        rest,
        ks,
        vs,
        np.empty((rows, 512), np.uint32),
        np.empty(rows, np.uint32),
        np.empty(rows + 1, np.uint32),
        Rule(0.1, True, None, None, None, None),
        v_dim,
    )


def compiled(kernel: Any, arch: int, args: tuple[Any, ...], options: dict[str, int]) -> Any:
    """Return the compiled kernel of a launch with these arguments, by Triton's own steps."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, make_backend
    from triton.compiler import compile as compile_source
    from triton.runtime.jit import create_function_from_signature

    target = GPUTarget("cuda", arch, 32)
    backend = make_backend(target)
    bind = create_function_from_signature(kernel.signature, kernel.params, backend)
    bound, special, rest = bind(*args, **options)
    given, signature, constants, attrs = kernel._pack_args(backend, options, bound, special, rest)
    source = ASTSource(kernel, signature, constants, attrs)
    return compile_source(source, target=target, options=given.__dict__)


def resources(kernel: Any) -> dict[str, int]:
    """Return registers, bytes of stack, shared memory, and counts of some instructions."""
    return used_by(kernel.asm["cubin"]) | {"shared": int(kernel.metadata.shared)}


@functools.cache  # many calls use the same kernel to join the parts of their rows
def used_by(cubin: bytes) -> dict[str, int]:
    """Return the resources that machine code declares."""
    import triton

    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        used = _output(tools / "cuobjdump", "--dump-resource-usage", path)
        code = _output(tools / "nvdisasm", "-c", path)
    found = {name.lower(): int(n) for name, n in re.findall(r"(REG|STACK|LOCAL):(\d+)", used)}
    for name, pattern in (
        ("mma", r"HMMA|HGMMA|UTCHMMA|UTCQMMA"),
        ("async_16", r"LDGSTS.*\.128"),
        ("load_16", r"LDG.*\.128"),
    ):
        found[name] = len(re.findall(pattern, code))
    found["spilled"] = spilled_in_loops(code)
    return found


def spilled_in_loops(code: str) -> int:
    """Count loads and stores of the stack between a backward branch and its target."""
    lines = code.splitlines()
    labels = {line.rstrip(":"): i for i, line in enumerate(lines) if line.startswith(".L_")}
    found: set[int] = set()
    for i, line in enumerate(lines):
        target = re.search(r"BRA\b.*`\((\.L_\w+)\)", line)
        begin = labels.get(target[1], i) if target else i
        found |= {at for at in range(begin, i) if re.search(r"\b(LDL|STL)\b", lines[at])}
    return len(found)


def _output(*command: Any) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def main(arch: int, case: str) -> None:
    from kvcore.backends.cuda.attention import call as calls
    from kvcore.backends.cuda.attention.launch import COMPILED
    from kvcore.backends.cuda.attention.plan import scratch_elements

    vars(calls)["architecture"] = lambda *_: arch
    call = call_of(case)
    plan = calls.planned(call, 4, None)
    out = np.empty((*call.q.shape[:2], call.v_dim), call.q.dtype)
    scratch = np.empty(scratch_elements(call.sizes, 4, is_stacked=True), np.float32)
    for each in calls.launches(call, plan, out, None, scratch):
        made = resources(compiled(each.kernel, arch, each.args, each.options | COMPILED))
        print(json.dumps({"case": case, "arch": arch, "kernel": each.kernel.__name__} | made))


if __name__ == "__main__":
    for each in sys.argv[2:] or CASES:
        main(int(sys.argv[1]), each)
