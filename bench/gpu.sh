#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# All that needs a GPU, offline, in under ten minutes:
#   1. builds and installs kvcore for the GPU of this machine
#   2. runs tests/gpu, a reduced set of them under compute-sanitizer's memcheck and racecheck
#   3. runs the benches and writes one JSON: the machine, limits measured in the same run, every row
#      as a share of its limit beside its goal, and how the steps above went
# Usage: bench/gpu.sh OUT.json          exit 0: all passed, 1: a step failed, 2: no GPU here
#        bench/gpu.sh --dry-run         checks what can be checked without a GPU
# PYTHON names the interpreter (python3), which has cupy, numpy, ml_dtypes, typer, rich, pytest,
# hypothesis, scikit-build-core, pybind11, cython, cmake and ninja; with triton attention is tested
# and measured, with torch and transformers their tensors and models, with pytest-xdist the tests
# run side by side.
set -uo pipefail

python=${PYTHON:-python3}
usage="usage: bench/gpu.sh OUT.json | --dry-run"
here=$(cd "$(dirname "$0")/.." && pwd)

if [[ $# -ne 1 ]]; then
    echo "$usage" >&2
    exit 2
fi
if [[ $1 == --dry-run ]]; then
    exec "$python" "$here/bench/gpu_run.py" --json /dev/null --dry-run
fi
case $1 in
    -*) echo "$usage" >&2; exit 2 ;;
    /*) out=$1 ;;
    *) out=$PWD/$1 ;;
esac
cd "$here" || exit 2

if ! gpu=$("$python" -c 'import cupy; cupy.cuda.runtime.getDeviceCount(); cupy.zeros(1)
print(cupy.cuda.runtime.getDeviceProperties(0)["name"].decode())' 2>&1); then
    echo "no GPU: $(tail -n 1 <<<"$gpu")" >&2
    exit 2
fi
echo "$gpu"

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
steps=$work/steps
: >"$steps"
failed=0

# step NAME SECONDS COMMAND...: runs a command with a limit and notes how it went.
step() {
    local name=$1 limit=$2 begin code
    shift 2
    echo "==== $name"
    begin=$SECONDS
    timeout -k 5 "$limit" "$@" 2>&1 | tee "$work/$name.log"
    code=${PIPESTATUS[0]}
    printf '%s\t%d\t%d\t%s\n' "$name" "$code" $((SECONDS - begin)) \
        "$(tail -n 1 "$work/$name.log" | tr '\t' ' ')" >>"$steps"
    ((code == 0)) || failed=1
    return "$code"
}

sanitizer=$(command -v compute-sanitizer || echo /usr/local/cuda/bin/compute-sanitizer)
tests=("$python" -m pytest -q -p no:cacheprovider tests/gpu)
side_by_side=()
if "$python" -c 'import xdist' 2>/dev/null; then side_by_side=(-n 6 --dist worksteal); fi
sanitized=(--target-processes all --error-exitcode 9 --print-limit 20)
export KVCORE_REQUIRE=gpu PYTHONUNBUFFERED=1 PIP_DISABLE_PIP_VERSION_CHECK=1
export TRITON_INTERPRET=0  # attention is compiled for the GPU

step build 240 "$python" -m pip install -q --no-build-isolation --no-deps \
    -C cmake.define.KVCORE_CUDA=ON -C cmake.define.CMAKE_CUDA_ARCHITECTURES=native . || {
    echo "the build failed" >&2
    exit 1
}
step tests 180 "${tests[@]}" "${side_by_side[@]}"
# In the memory pool of cupy, what is read behind the end of an array is still somebody's.
export KVCORE_GPU_TESTS_UNPOOLED=1
step memcheck 80 "$sanitizer" --tool memcheck "${sanitized[@]}" "${tests[@]}" -m reduced -x
step racecheck 60 "$sanitizer" --tool racecheck "${sanitized[@]}" "${tests[@]}" -m reduced -x
unset KVCORE_GPU_TESTS_UNPOOLED
step bench 150 "$python" bench/gpu_run.py --json "$out" --steps "$steps"
if ((failed)); then
    echo "failed steps:" >&2
    awk -F '\t' '$2 != 0 { print "  " $1 ", exit code " $2 ": " $4 }' "$steps" >&2
fi
exit "$failed"
