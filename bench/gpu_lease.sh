#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# All checks that need a GPU, offline, in one call of eight minutes, the most valuable first:
#   1. installs kvcore: a wheel in .wheel/ (CMAKE_CUDA_ARCHITECTURES of this GPU) spares the build
#   2. hazards and host costs (gpu_checks.py), tests of the newest kernels, benches (gpu_run.py)
#   3. sanitizers, then every other test, for as long as time is left
# Usage: bench/gpu_lease.sh OUT [SECONDS]   exit 0: all passed, 1: a step failed, 2: no GPU here
#        bench/gpu_lease.sh --dry-run       checks all that needs no GPU
# After SECONDS (480) the step that runs is ended, and the run with it. A step writes its log to the
# folder OUT from its first line on, and adds a line to OUT/steps.tsv as it ends: name, exit code,
# seconds, last line. OUT/result.json has the rows of each bench as soon as that bench ends. A second call
# needs another OUT. OUT gets seven files: env.txt, steps.tsv, build.log, checks.jsonl, tests.log,
# bench.log, result.json.
# PYTHON names the interpreter (python3), which has cupy, numpy, ml_dtypes, typer, rich, pytest,
# hypothesis, scikit-build-core, pybind11, cython, cmake and ninja. With triton attention is tested
# and measured, with torch and transformers their tensors and models, with jax its arrays, with
# pytest-xdist the tests run side by side.
set -uo pipefail

python=${PYTHON:-python3}
usage="usage: bench/gpu_lease.sh OUT [SECONDS] | --dry-run"
here=$(cd "$(dirname "$0")/.." && pwd)

if [[ $# -lt 1 || $# -gt 2 ]]; then
    echo "$usage" >&2
    exit 2
fi
case $1 in
    --dry-run) out="" ;;
    -*) echo "$usage" >&2; exit 2 ;;
    /*) out=$1 ;;
    *) out=$PWD/$1 ;;
esac
whole=${2:-480}
if [[ ! $whole =~ ^[1-9][0-9]*$ ]]; then
    echo "$usage" >&2
    exit 2
fi
cd "$here" || exit 2

export PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 PIP_DISABLE_PIP_VERSION_CHECK=1
new_tests=(tests/gpu/test_gpu_nvfp4.py tests/gpu/test_gpu_pages.py tests/gpu/test_gpu_steps.py
    tests/gpu/test_gpu_layer_loads.py tests/gpu/test_gpu_graphs.py)
other_tests=(tests/gpu "${new_tests[@]/#/--ignore=}")
sanitized_tests=(-m reduced -x tests/gpu/test_gpu_nvfp4.py tests/gpu/test_gpu_steps.py)
tests=("$python" -m pytest -q -p no:cacheprovider)

if [[ -z $out ]]; then
    set -e
    "$python" bench/gpu_run.py --json /dev/null --dry-run
    "$python" bench/gpu_checks.py --list
    collect() { # code 5: files without a GPU have no tests
        "${tests[@]}" --collect-only "$@" >/dev/null || (($? == 5))
    }
    collect "${new_tests[@]}"
    collect "${other_tests[@]}"
    collect "${sanitized_tests[@]}"
    echo "ready: every step can begin"
    exit 0
fi

if ! gpu=$("$python" -c 'import cupy; cupy.cuda.runtime.getDeviceCount(); cupy.zeros(1)
print(cupy.cuda.runtime.getDeviceProperties(0)["name"].decode())' 2>&1); then
    echo "no GPU: $(tail -n 1 <<<"$gpu")" >&2
    exit 2
fi
if [[ -e $out/steps.tsv ]]; then
    echo "$out has the steps of another run; name another folder" >&2
    exit 2
fi
mkdir -p "$out" || exit 2
steps=$out/steps.tsv
: >"$steps"
echo "$gpu"

grace=5 # seconds between the two signals that end a step
left() { echo $((whole - grace - SECONDS)); }

# step NAME SECONDS LOG COMMAND...: runs a command for SECONDS at most, or for the time that is left.
step() {
    local name=$1 limit=$2 log=$out/$3 begin=$SECONDS code rest
    shift 3
    rest=$(left)
    ((limit <= rest)) || limit=$rest
    if ((limit < 5)); then
        printf '%s\t124\t0\tno time left\n' "$name" | tee -a "$steps"
        return 124
    fi
    echo "==== $name (at $SECONDS s, limit $limit s)" | tee -a "$log"
    timeout -k "$grace" "$limit" "$@" >>"$log" 2>&1
    code=$?
    printf '%s\t%d\t%d\t%s\n' "$name" "$code" $((SECONDS - begin)) \
        "$(tail -n 1 "$log" | tr '\t' ' ' | cut -c1-160)" | tee -a "$steps"
    return "$code"
}

{
    nvidia-smi --query-gpu=name,driver_version,clocks.sm,clocks.mem,memory.used --format=csv
    nvcc --version | tail -n 1
    "$python" -c 'import sys, importlib.metadata as m
names = "cupy-cuda13x cupy-cuda12x torch triton jax numpy transformers pytest-xdist".split()
versions = {d.metadata["Name"]: d.version for d in m.distributions() if d.metadata["Name"] in names}
print(sys.version, *(f"{name} {versions.get(name)}" for name in names), sep="\n")'
} >"$out/env.txt" 2>&1

pip=("$python" -m pip install -q --no-deps)
if compgen -G '.wheel/kvcore-*.whl' >/dev/null; then
    step install 30 build.log "${pip[@]}" --no-index --force-reinstall .wheel/kvcore-*.whl
else
    step build 240 build.log "${pip[@]}" --no-build-isolation -C cmake.define.KVCORE_CUDA=ON \
        -C cmake.define.CMAKE_CUDA_ARCHITECTURES=native -C cmake.define.KVCORE_JAX=OFF .
fi || {
    tail -n 40 "$out/build.log"
    exit 1
}

export KVCORE_REQUIRE=gpu TRITON_INTERPRET=0 # attention is compiled for the GPU
export XLA_PYTHON_CLIENT_PREALLOCATE=false   # jax leaves memory to the others
side_by_side=()
if "$python" -c 'import xdist' 2>/dev/null; then side_by_side=(-n 8 --dist worksteal); fi
bench=("$python" bench/gpu_run.py --json "$out/result.json" --steps "$steps" --only)

step checks 110 checks.jsonl "$python" bench/gpu_checks.py
step new-tests 90 tests.log "${tests[@]}" --durations=15 "${side_by_side[@]}" "${new_tests[@]}"
# Each bench is a process: a bench that fails takes no row of another with it.
step moves 45 bench.log "${bench[@]}" limits moves
step attention 90 bench.log "${bench[@]}" attention
step hosts 40 bench.log "${bench[@]}" hosts
# In the memory pool of cupy, a read past the end of an array may still be inside an allocation.
sanitizer=$(command -v compute-sanitizer || echo /usr/local/cuda/bin/compute-sanitizer)
sanitized=(--target-processes all --error-exitcode 9 --print-limit 20 "${tests[@]}")
export KVCORE_GPU_TESTS_UNPOOLED=1
step memcheck 60 tests.log "$sanitizer" --tool memcheck "${sanitized[@]}" "${sanitized_tests[@]}"
unset KVCORE_GPU_TESTS_UNPOOLED
step other-tests "$whole" tests.log "${tests[@]}" "${side_by_side[@]}" "${other_tests[@]}"
export KVCORE_GPU_TESTS_UNPOOLED=1
step racecheck 60 tests.log "$sanitizer" --tool racecheck "${sanitized[@]}" "${sanitized_tests[@]}"

echo
grep '^{' "$out/checks.jsonl" | cut -c1-400
echo
cat "$steps"
awk -F '\t' '$2 != 0 { failed = 1 } END { exit failed }' "$steps"
