# SPDX-License-Identifier: Apache-2.0
# shellcheck shell=bash disable=SC2034
# What tools/demo.sh and tools/test.sh share: install what is missing, make the Python environment, build. Sourced by
# them, with the project's root as working directory. Every failure is one line on stderr and exit code 1.

readonly build=build
setup_log=$build/setup.log # of what is under way

# What building and running needs.
readonly build_packages=(
    gcc libc6-dev meson ninja-build pkg-config python3 python3-venv
    opencl-headers ocl-icd-opencl-dev pocl-opencl-icd libclblast-dev libcjson-dev libxxhash-dev libcmocka-dev
)

say() {
    printf '%s\n' "$*" >&2
}

die() {
    say "${0##*/}: $*"
    exit 1
}

# Runs a command with its output in a log; on failure the last lines of it and one line that says what failed.
logged() {
    local what=$1
    shift
    mkdir -p "$build"
    if ! "$@" >"$setup_log" 2>&1 </dev/null; then
        tail -n 15 "$setup_log" >&2
        die "$what failed; all of its output is in $setup_log"
    fi
}

missing_packages() {
    local package
    for package in "$@"; do
        [ "$(dpkg-query -W -f='${db:Status-Status}' "$package" 2>/dev/null)" = installed ] || printf '%s\n' "$package"
    done
}

# Installs those of the named Debian packages that are missing.
install_packages() {
    local missing as_root=()
    if ! command -v apt-get >/dev/null || ! command -v dpkg-query >/dev/null; then
        say "no apt-get here; these have to be there already, by whatever name: $*"
        return
    fi
    mapfile -t missing < <(missing_packages "$@")
    [ ${#missing[@]} -gt 0 ] || return 0
    if [ "$(id -u)" -ne 0 ]; then
        command -v sudo >/dev/null || die "neither root nor sudo, but these packages are missing: ${missing[*]}"
        sudo -v || die "sudo refused, but these packages are missing: ${missing[*]}"
        as_root=(sudo)
    fi
    say "installing Debian packages: ${missing[*]}"
    mkdir -p "$build"
    if ! "${as_root[@]}" apt-get update -q >"$setup_log" 2>&1 </dev/null; then
        say "apt-get update failed, going on with the package lists that are there"
    fi
    if ! "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -y -q --no-install-recommends \
        "${missing[@]}" >>"$setup_log" 2>&1 </dev/null; then
        die "could not install them: $(grep -m1 '^E:' "$setup_log" || echo 'no network?') (all in $setup_log)"
    fi
}

# make_venv FILE ...: the project's own Python environment in .venv with the packages that the files ask for. Debian's
# python3 if there is one.
make_venv() {
    local python=/usr/bin/python3 wanted there setup_log=$build/venv.log
    mkdir -p "$build"
    [ -x "$python" ] || python=$(command -v python3) || die "python3 is missing"
    if ! .venv/bin/python -m pip --version >/dev/null 2>&1; then
        say "making the Python environment .venv"
        rm -rf .venv
        logged "$python -m venv .venv" "$python" -m venv .venv
    fi
    for wanted in "$@"; do
        there=.venv/installed-${wanted//\//-}
        cmp -s "$wanted" "$there" && continue
        say "installing the Python packages of $wanted into .venv"
        if ! .venv/bin/python -m pip install -q --disable-pip-version-check -r "$wanted" >"$setup_log" 2>&1 </dev/null
        then
            die "could not install the packages of $wanted: $(grep -m1 '^ERROR' "$setup_log" || echo 'no network?')"
        fi
        cp "$wanted" "$there"
    done
}

# Configures the folder, or again, with the options given.
configure_folder() {
    local folder=$1 setup_log=$build/setup-$1.log
    shift
    command -v meson >/dev/null || die "meson is missing"
    if [ ! -f "$folder/build.ninja" ]; then
        logged "meson setup $folder" meson setup "$folder" "$@"
    elif [ $# -gt 0 ]; then
        # A folder of another meson or another place is made anew.
        mkdir -p "$build"
        meson setup --reconfigure "$folder" "$@" >"$setup_log" 2>&1 </dev/null ||
            logged "meson setup --wipe $folder" meson setup --wipe "$folder" "$@"
    fi
}

# Configures the folder and builds it.
build_folder() {
    local setup_log=$build/setup-$1.log
    configure_folder "$@"
    logged "building $1" ninja -C "$1"
}
