#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Installs what is missing, builds into build/ and runs every test. Ends with one line "N passed, N failed, N skipped"
# and exit code 0, or 1 where something failed or could not be done. Safe to run again.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1
# shellcheck source=tools/setup.sh
source tools/setup.sh

usage() {
    cat <<'END'
tools/test.sh [--quick]

  --quick   PoCL only, no model: under 3 minutes
  --help    this text
END
}

quick=0
case ${1-} in
--quick) quick=1 ;;
--help | -h) usage && exit 0 ;;
'') ;;
*) say "unknown argument: $1" && usage >&2 && exit 2 ;;
esac

readonly test_packages=(g++ cmake clang-format)
readonly full_packages=(clang clang-tidy cppcheck mesa-opencl-icd oclgrind intel-opencl-icd chromium chromium-driver)
readonly logs=$build/test-logs

passed=0 failed=0 skipped=0
missed=()

# Runs a stage. A last line "N passed, N failed, N skipped" of its output counts as it says; any other output counts as
# one test by the exit code: 0 passed, 77 skipped with the last line as the reason.
stage() {
    local name=$1 log code=0 started counts p=0 f=0 s=0 word
    shift
    log=$logs/${name//[^A-Za-z0-9]/-}.log
    started=$(date +%s%N)
    ("$@") >"$log" 2>&1 </dev/null || code=$?
    counts=$(tail -n 1 "$log" | grep -xE '[0-9]+ passed, [0-9]+ failed, [0-9]+ skipped')
    if [ -n "$counts" ]; then
        read -r p f s < <(tr -dc '0-9 \n' <<<"$counts" | tr -s ' ')
        [ "$code" -eq 0 ] || [ "$f" -gt 0 ] || f=1
        [ "$s" -eq 0 ] || missed+=("$name: $(grep -E '^skipped: ' "$log" | sed 's/^skipped: //' | paste -sd ';' -)")
    elif [ "$code" -eq 0 ]; then
        p=1
    elif [ "$code" -eq 77 ]; then
        s=1
        missed+=("$name: $(tail -n 1 "$log")")
    else
        f=1
    fi
    passed=$((passed + p)) failed=$((failed + f)) skipped=$((skipped + s))
    word=passed
    [ "$s" -eq 0 ] || [ "$p" -gt 0 ] || word=skipped
    [ "$f" -eq 0 ] || word=FAILED
    awk -v name="$name" -v word="$word" -v p="$p" -v f="$f" -v s="$s" -v ns=$(($(date +%s%N) - started)) 'BEGIN {
        printf "%-8s %7.1f s  %-28s %d passed", word, ns / 1e9, name, p
        if (f) printf ", %d failed", f
        if (s) printf ", %d skipped", s
        printf "\n" }'
    if [ "$f" -gt 0 ]; then
        printf -- '--- all output of "%s" ---\n' "$name"
        cat "$log"
        printf -- '--- end of "%s" ---\n' "$name"
    fi
}

# beside FUNCTION: runs its stages beside those that follow, up to `join`, which prints and counts them.
beside() {
    (
        passed=0 failed=0 skipped=0 missed=()
        "$1"
        printf '%s\n' "${missed[@]-}" >"$logs"/beside.missed
        echo "$passed $failed $skipped" >"$logs"/beside.counts
    ) >"$logs"/beside.out 2>&1 &
}

join() {
    local p=0 f=1 s=0 reason
    wait
    cat "$logs"/beside.out
    read -r p f s <"$logs"/beside.counts
    while IFS= read -r reason; do
        [ -z "$reason" ] || missed+=("$reason")
    done <"$logs"/beside.missed
    rm -f "$logs"/beside.*
    passed=$((passed + p)) failed=$((failed + f)) skipped=$((skipped + s))
}

# meson_suite FOLDER ARGUMENTS: builds those of Meson's tests there, runs them and counts their cases.
meson_suite() {
    local folder=$1 code=0
    shift
    meson test -C "$folder" --print-errorlogs "$@" || code=$?
    python3 tests/count_tests.py "$folder"/meson-logs/testlog.json
    return $code
}

# check_device ARGUMENTS: kvleaf-check, its JSON summary turned into a line that counts.
check_device() {
    local rows=$logs/check.jsonl code=0
    "$build"/tools/kvleaf-check --json "$@" >"$rows" || code=$?
    grep '"failure"' "$rows"
    python3 -c '
import json, sys
*rows, last = [json.loads(line) for line in sys.stdin]
for row in rows:
    if row.get("why_skipped"):
        print("skipped: {check} is {why_skipped}".format(**row))
print("seed", last["seed"])
print("{passed} passed, {failed} failed, {skipped} skipped".format(**last))' <"$rows" || code=1
    return $code
}

# A part of the unit tests under the sanitizers, in a build of their own. Kernels run as PoCL compiles them,
# uninstrumented: as the unit tests before them left them in PoCL's caches.
sanitized_tests() {
    configure_folder build-asan -Dwarning_level=3 -Dwerror=true -Dtools=false -Db_sanitize=address,undefined \
        -Db_lundef=false -Dbuildtype=debugoptimized -Doptimization=1 -Ddriver_caches="$PWD/$build/tests"
    LSAN_OPTIONS=suppressions=$PWD/tests/lsan.supp UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1 \
        meson_suite build-asan --suite sanitized
}

# Each libFuzzer target over its corpus, and from there on for 8 seconds; what it crashes on stays in the logs' folder.
fuzz() {
    local name found
    CC=clang build_folder build-fuzz -Dfuzz=true -Dtools=false -Dtests=false -Db_sanitize=address,undefined \
        -Db_lundef=false
    for name in tests/fuzz/*/; do
        name=$(basename "$name") found=$build/fuzz-$name
        mkdir -p "$found"
        UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1 "build-fuzz/tests/fuzz/fuzz_$name" -max_total_time=8 \
            -max_len=4096 -artifact_prefix="$logs/$name-" "$found" "tests/fuzz/$name" || return 1
    done
}

# Caches and managers in threads, where what they share without a lock is found.
thread_sanitizer() {
    configure_folder build-tsan -Dwarning_level=3 -Dwerror=true -Dtools=false \
        -Db_sanitize=thread -Db_lundef=false -Dbuildtype=debugoptimized
    meson_suite build-tsan test_cache_threads
}

# The seed documents' figures; the picture in the README must be the one that the tour draws.
tour() {
    "$build"/tools/kvleaf-tour --svg "$build"/tour.svg && cmp "$build"/tour.svg tools/tour/pool.svg
}

left_out() {
    echo '--quick leaves it out'
    return 77
}

tidy() {
    printf '%s\n' lib/*/*.c | xargs -P "$(nproc)" -n 8 clang-tidy --quiet -p "$build" --warnings-as-errors='*'
}

# What needs little or nothing of PoCL, for the core that kvleaf-check leaves idle while PoCL compiles for it.
other_checks() {
    stage 'clang-tidy' tidy
    stage 'cppcheck' cppcheck --quiet --error-exitcode=1 --std=c11 -I include -I lib -I cl_kernels --inline-suppr \
        --enable=warning,performance,portability lib tools
    stage 'offline compile for AMD' python3 tests/check_offline.py amd
    stage 'offline compile for Intel' python3 tests/check_offline.py intel
    stage 'fuzzing' fuzz
    stage 'ThreadSanitizer' thread_sanitizer
}

# For the core that the model leaves idle. On PoCL with the kernels of the second lane: two programs must not use one
# cache at once.
server_and_drivers() {
    export POCL_CACHE_DIR=$PWD/$build/tests/lane-1/pocl
    mkdir -p "$POCL_CACHE_DIR"
    stage 'the server' .venv/bin/python tests/test_serve.py --seconds 12
    stage 'other drivers' bash tests/drivers/run.sh "$build"
}

if [ $quick -eq 1 ]; then
    install_packages "${build_packages[@]}" "${test_packages[@]}"
else
    install_packages "${build_packages[@]}" "${test_packages[@]}" "${full_packages[@]}"
    make_venv tools/requirements.txt tests/requirements.txt & # waits for the network while the compiler works
    venv=$!
fi

# Tests run on PoCL unless a stage says otherwise: other drivers on the machine stay out, whatever they do when loaded.
if [ -z "${OCL_ICD_VENDORS-}" ] && [ -f /etc/OpenCL/vendors/pocl.icd ]; then
    export OCL_ICD_VENDORS=/etc/OpenCL/vendors/pocl.icd
fi
mkdir -p "$logs"
build_folder "$build" -Dwarning_level=3 -Dwerror=true
[ $quick -eq 1 ] || wait "$venv" || exit 1
# Stages outside Meson run with the kernels that its tests leave in their first lane, one after the other: what runs
# beside them on PoCL takes another cache.
export XDG_CACHE_HOME=$PWD/$build/cache POCL_CACHE_DIR=$PWD/$build/tests/lane-0/pocl
mkdir -p "$POCL_CACHE_DIR"
"$build"/tools/kvleaf-info >"$logs"/info.log 2>&1 || die "no OpenCL device: $(tail -n 1 "$logs"/info.log)"

if [ $quick -eq 1 ]; then
    stage 'unit tests' meson_suite "$build" --suite unit --no-suite slow
    stage 'repository' meson_suite "$build" --suite repository
    stage 'kvleaf-check, small' check_device --small --variant '*.cpu'
    stage 'tour of the seed documents' tour
    for name in 'slow unit tests' 'all of kvleaf-check' 'sanitizers' 'fuzzing' 'ThreadSanitizer' 'clang-tidy' \
        'cppcheck' 'other drivers' 'offline compilers' 'the model' 'the server' 'the server with the model'; do
        stage "$name" left_out
    done
else
    stage 'unit tests' meson_suite "$build" --suite unit
    stage 'repository' meson_suite "$build" --suite repository
    beside other_checks
    stage 'kvleaf-check on PoCL' check_device
    stage 'tour of the seed documents' tour
    stage 'sanitizers' sanitized_tests
    join
    beside server_and_drivers
    stage 'the runner, small models' .venv/bin/python tests/test_generate_sharing.py
    stage 'the model' .venv/bin/python tests/test_generate.py
    stage 'the server with the model' .venv/bin/python tests/test_serve_model.py
    join
fi

for reason in "${missed[@]-}"; do
    [ -z "$reason" ] || printf 'skipped: %s\n' "$reason"
done
printf '%d passed, %d failed, %d skipped\n' $passed $failed $skipped
[ $failed -eq 0 ]
