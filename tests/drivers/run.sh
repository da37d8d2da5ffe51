#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Runs kvleaf-check on other OpenCL drivers than the one the unit tests run on, a line each:
#
#   tests/drivers/run.sh [BUILD] [pocl | rusticl | intel | oclgrind]...      default: build; rusticl, intel, oclgrind
#
#   pocl      PoCL, the fixed list
#   rusticl   Mesa's rusticl on llvmpipe: another compiler and another rounding, slow; the small list
#   intel     Intel's CPU runtime, from PyPI into the project's .venv: sub-groups and half precision; the fixed list
#   oclgrind  a simulator that sees accesses out of bounds and data races; the small list, a variant at a time
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

passed=0 failed=0 skipped=0

skip() {
    skipped=$((skipped + 1))
    printf 'skipped: %s: %s\n' "$1" "$2"
}

# check_driver NAME LIMIT COMMAND...: one run with a limit in seconds; what it checked in a line, all of it when it fails.
check_driver() {
    local name=$1 limit=$2 code=0 started=$SECONDS
    shift 2
    timeout "$limit" "$@" >"$scratch/out" 2>"$scratch/err" || code=$?
    # A driver can answer right and yet be seen to do wrong: Oclgrind reports on its own.
    if [ "$code" -eq 0 ] && grep -qE 'Invalid (read|write)|[Dd]ata race|[Uu]ninitialized' "$scratch/out" "$scratch/err"; then
        code=1
    fi
    if [ "$code" -eq 0 ]; then
        passed=$((passed + 1))
        printf 'passed:  %s: %s in %d s\n' "$name" "$(tail -n 1 "$scratch/out")" $((SECONDS - started))
        return
    fi
    failed=$((failed + 1))
    tail -n 60 "$scratch/err" "$scratch/out"
    [ "$code" -ne 124 ] || echo "stopped after $limit s"
    printf 'FAILED:  %s: exit code %d after %d s\n' "$name" "$code" $((SECONDS - started))
}

run_pocl() {
    local icd=/etc/OpenCL/vendors/pocl.icd
    if [ ! -f $icd ]; then
        skip pocl "no pocl-opencl-icd: nothing checks the CPU kernels"
        return
    fi
    OCL_ICD_VENDORS=$icd check_driver pocl 300 "$check" --device 'Portable Computing Language'
}

run_rusticl() {
    local icd=/etc/OpenCL/vendors/rusticl.icd
    if [ ! -f $icd ]; then
        skip rusticl "no mesa-opencl-icd with rusticl: nothing checks Mesa's compiler and rounding"
        return
    fi
    if ! OCL_ICD_VENDORS=$icd RUSTICL_ENABLE=llvmpipe "$build/tools/kvleaf-info" --device rusticl >"$scratch/out" 2>&1; then
        skip rusticl "it offers no llvmpipe device: nothing checks Mesa's compiler and rounding"
        return
    fi
    OCL_ICD_VENDORS=$icd RUSTICL_ENABLE=llvmpipe check_driver rusticl 300 "$check" --small --device rusticl
}

# The folder's runtime library, installed into .venv where it is missing.
intel_library() {
    local python=.venv/bin/python
    if ! compgen -G '.venv/lib/libintelocl.so' >/dev/null; then
        [ -x $python ] || python3 -m venv .venv >"$scratch/venv" 2>&1 || return 1
        $python -m pip install -q --disable-pip-version-check intel-opencl-rt intel-cmplr-lib-rt \
            >"$scratch/venv" 2>&1 </dev/null || return 1
    fi
    compgen -G "$PWD/.venv/lib/libintelocl.so"
}

run_intel() {
    local library
    if [ "$(uname -m)" != x86_64 ] || ! library=$(intel_library); then
        skip intel "no Intel CPU runtime (packages intel-opencl-rt, intel-cmplr-lib-rt): nothing runs the kernels with another vendor's vectoriser"
        return
    fi
    echo "$library" >"$scratch/intel.icd"
    OCL_ICD_VENDORS=$scratch/intel.icd LD_LIBRARY_PATH=$(dirname "$library")${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH} \
        check_driver intel 300 "$check" --device Intel
}

run_oclgrind() {
    if ! command -v oclgrind >/dev/null; then
        skip oclgrind "it is not installed: nothing looks for data races and accesses out of bounds"
        return
    fi
    OCL_ICD_VENDORS=$scratch/none check_driver oclgrind 300 \
        oclgrind --data-races --num-threads 1 "$check" --small --device Oclgrind
}

for driver in "$@"; do
    case $driver in
    pocl | rusticl | intel | oclgrind) "run_$driver" ;;
    *) echo "run.sh: unknown driver $driver" >&2 && exit 2 ;;
    esac
done
printf '%d passed, %d failed, %d skipped\n' $passed $failed $skipped
[ $failed -eq 0 ] || exit 1
[ $passed -gt 0 ] || exit 77
