#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Runs kvleaf-check on other OpenCL drivers than the one the unit tests run on, side by side, a line each:
#
#   tests/drivers/run.sh [BUILD] [pocl | rusticl | intel | oclgrind]...      default: build; rusticl, intel, oclgrind
#
#   pocl      PoCL, the fixed list
#   rusticl   Mesa's rusticl on llvmpipe: another compiler and another rounding, so slow that it gets one shape of the
#             generic variants, whose source the others share, with windows, and decode another without
#   intel     Intel's CPU runtime, from PyPI into the project's .venv: another vectoriser, sub-groups, half precision;
#             the first shape of the fixed list and, without the cpu family, whose programs take 10 to 40 s each, a
#             small one with windows
#   oclgrind  a simulator that sees accesses out of bounds and data races; the small list: its first shape, the generic
#             variants on the second, which has windows, and on the last, in dim8, those that need such a layout
#
# A driver that is missing is skipped, with what that leaves unchecked. Exit code: 0 right, 1 wrong, 77 all skipped. The
# last line is "N passed, N failed, N skipped", in runs of kvleaf-check.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.." || exit 1

build=build
if [ $# -gt 0 ] && [ -d "$1" ]; then
    build=$1
    shift
fi
[ $# -gt 0 ] || set -- rusticl intel oclgrind
check=$build/tools/kvleaf-check
[ -x "$check" ] || { echo "run.sh: $check is missing, build it first" >&2 && exit 1; }

scratch=$(mktemp -d) || exit 1
trap 'rm -rf "$scratch"' EXIT
unset KVLEAF_VARIANT KVLEAF_KERNEL_DIR
export XDG_CACHE_HOME=$scratch/cache POCL_CACHE_DIR=$scratch/pocl
mkdir -p "$XDG_CACHE_HOME" "$POCL_CACHE_DIR"

skip() {
    printf 'skipped: %s: %s\n' "$1" "$2"
}

# check_driver NAME LOST LIMIT COMMAND...: one run with a limit in seconds; what it checked in a line, all of it when it
# fails. A driver that offers no device is skipped, and LOST says what nothing checks then.
check_driver() {
    local name=$1 lost=$2 limit=$3 code=0 started=$SECONDS out=$scratch/$1.out err=$scratch/$1.err
    shift 3
    timeout "$limit" "$@" >"$out" 2>"$err" || code=$?
    # A driver can answer right and yet be seen to do wrong: Oclgrind reports on its own.
    if [ "$code" -eq 0 ] &&
        grep -qE 'Invalid (read|write)|[Dd]ata race|[Uu]ninitialized' "$out" "$err"; then
        code=1
    fi
    if [ "$code" -eq 0 ]; then
        printf 'passed:  %s: %s in %d s\n' "$name" "$(tail -n 1 "$out")" $((SECONDS - started))
        return
    fi
    if grep -q "can't open a device" "$err"; then
        skip "$name" "it offers no device: $lost"
        return
    fi
    tail -n 60 "$err" "$out"
    [ "$code" -ne 124 ] || echo "stopped after $limit s"
    printf 'FAILED:  %s: exit code %d after %d s\n' "$name" "$code" $((SECONDS - started))
}

run_pocl() {
    local icd=/etc/OpenCL/vendors/pocl.icd lost='nothing checks the CPU kernels'
    if [ ! -f $icd ]; then
        skip pocl "no pocl-opencl-icd: $lost"
        return
    fi
    OCL_ICD_VENDORS=$icd check_driver pocl "$lost" 600 "$check" --device 'Portable Computing Language'
}

run_rusticl() {
    local icd=/etc/OpenCL/vendors/rusticl.icd lost="nothing checks Mesa's compiler and rounding"
    if [ ! -f $icd ]; then
        skip rusticl "no mesa-opencl-icd with rusticl: $lost"
        return
    fi
    export RUSTICL_ENABLE=llvmpipe
    OCL_ICD_VENDORS=$icd check_driver rusticl "$lost" 600 "$check" --device rusticl --small --case 1 \
        --variant '*.portable'
    OCL_ICD_VENDORS=$icd check_driver rusticl-decode "$lost" 600 "$check" --device rusticl --small --case 0 \
        --variant 'decode.portable'
}

# The runtime's library, installed into .venv where it is missing.
intel_library() {
    local python=.venv/bin/python
    if [ ! -f .venv/lib/libintelocl.so ]; then
        [ -x $python ] || python3 -m venv .venv || return 1
        $python -m pip install -q --disable-pip-version-check intel-opencl-rt intel-cmplr-lib-rt || return 1
    fi
    [ -f .venv/lib/libintelocl.so ]
}

# Its folder stays out of LD_LIBRARY_PATH: it holds an OpenCL loader that reads OCL_ICD_VENDORS in another way.
run_intel() {
    local lost="nothing runs the kernels through another vendor's vectoriser"
    if [ "$(uname -m)" != x86_64 ] || ! intel_library >"$scratch/venv" 2>&1 </dev/null; then
        skip intel "no Intel CPU runtime (Python packages intel-opencl-rt, intel-cmplr-lib-rt): $lost"
        return
    fi
    echo "$PWD/.venv/lib/libintelocl.so" >"$scratch/intel.icd"
    OCL_ICD_VENDORS=$scratch/intel.icd check_driver intel "$lost" 600 "$check" --device Intel --case 0
    OCL_ICD_VENDORS=$scratch/intel.icd check_driver intel-small "$lost" 600 "$check" --device Intel --small --case 1 \
        --variant '*.portable*'
}

run_oclgrind() {
    local lost='nothing looks for data races and accesses out of bounds'
    if ! command -v oclgrind >/dev/null; then
        skip oclgrind "it is not installed: $lost"
        return
    fi
    local run=(oclgrind --data-races --num-threads 1 "$check" --device Oclgrind --small)
    export OCL_ICD_VENDORS=$scratch/none
    check_driver oclgrind "$lost" 600 "${run[@]}" --case 0
    check_driver oclgrind-windows "$lost" 600 "${run[@]}" --case 1 --variant '*.portable'
    check_driver oclgrind-dim8 "$lost" 600 "${run[@]}" --case 2 --variant '*.portable_vector'
}

for driver in "$@"; do
    case $driver in
    pocl | rusticl | intel | oclgrind) ;;
    *) echo "run.sh: unknown driver $driver" >&2 && exit 2 ;;
    esac
done
# Side by side: each is one thread most of the time, in a compiler or a simulator.
for driver in "$@"; do
    "run_$driver" >"$scratch/$driver.log" 2>&1 &
done
wait
cat "$scratch"/*.log
count() {
    cat "$scratch"/*.log | grep -c "^$1:"
}
passed=$(count passed) failed=$(count FAILED) skipped=$(count skipped)
printf '%d passed, %d failed, %d skipped\n' "$passed" "$failed" "$skipped"
[ "$failed" -eq 0 ] || exit 1
[ "$passed" -gt 0 ] || exit 77
