#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What `meson install` puts down is complete and usable: headers, libraries, pkg-config and CMake files. The program of
the README is built against the installed copy, shared and static, and must print what the README says.

    test_install.py FOLDER    the build folder, built
"""
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import tree

STRICT = ["-std=c11", "-Wall", "-Wextra", "-pedantic", "-Werror"]
BLOCKS_PROGRAM = """
#include <kvleaf/blocks.h>
#include <stdio.h>
int main(void)
{
    kvleaf_blocks *blocks = NULL;
    kvleaf_seq seq = 0;
    kvleaf_tokens tokens = {.struct_size = sizeof tokens, .count = 40};
    int32_t table[8], count = 0;
    if (kvleaf_blocks_create(kvleaf_blocks_params(.num_blocks = 8), &blocks) ||
        kvleaf_blocks_seq_create(blocks, NULL, &seq) || kvleaf_blocks_seq_extend(blocks, seq, &tokens, NULL) ||
        kvleaf_blocks_seq_table(blocks, seq, 0, table, 8, &count))
        return 1;
    printf("%s: %d blocks\\n", kvleaf_version(), (int)count);
    kvleaf_blocks_destroy(&blocks);
    return 0;
}
"""
CMAKE_PROJECT = """
cmake_minimum_required(VERSION 3.16)
project(user C)
find_package(kvleaf 0.1 REQUIRED)
add_executable(program program.c)
target_link_libraries(program kvleaf::kvleaf)
add_executable(blocks blocks.c)
target_link_libraries(blocks kvleaf::kvleaf-blocks)
"""


def run(command, **options):
    """The command's output; on failure the test ends with all that it said."""
    done = subprocess.run([str(c) for c in command], capture_output=True, text=True, check=False, **options)
    if done.returncode != 0:
        print(f"{' '.join(str(c) for c in command)}\nexit code {done.returncode}\n{done.stdout}{done.stderr}")
        sys.exit(1)
    return done.stdout


def expect(condition, claim):
    if not condition:
        print(f"wrong: {claim}")
        sys.exit(1)


def readme_program():
    """The README's C program and the output it promises."""
    text = (tree.ROOT / "README.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```(\w+)\n(.*?)```", text, re.S)
    at = next((i for i, (kind, body) in enumerate(blocks) if kind == "c" and "int main(" in body), None)
    expect(at is not None and at + 1 < len(blocks) and blocks[at + 1][0] == "text",
           "README.md has a C program and behind it a text block with its output")
    return blocks[at][1], blocks[at + 1][1]


class Installed:
    """A staged installation and how programs are built against it."""

    def __init__(self, build, stage):
        run(["meson", "install", "-C", build, "--no-rebuild", "--destdir", stage])
        headers = list(stage.rglob("kvleaf/kvleaf.h"))
        libraries = list(stage.rglob("libkvleaf.so"))
        expect(len(headers) == 1 and len(libraries) == 1, "one kvleaf.h and one libkvleaf.so are installed")
        self.prefix = headers[0].parent.parent.parent
        self.libdir = libraries[0].parent
        self.environment = {**os.environ, "PKG_CONFIG_PATH": str(self.libdir / "pkgconfig"),
                            "LD_LIBRARY_PATH": str(self.libdir)}

    def flags(self, package, *options):
        asked = ["pkg-config", f"--define-variable=prefix={self.prefix}", *options, package]
        return run(asked, env=self.environment).split()

    def output(self, program):
        return run([program], env=self.environment)


def check_files(installed):
    public = sorted(p.name for p in (tree.ROOT / "include" / "kvleaf").glob("*.h"))
    there = sorted(p.name for p in (installed.prefix / "include" / "kvleaf").glob("*.h"))
    expect(public == there, f"every public header is installed: {there}")
    for name in ("libkvleaf", "libkvleaf-blocks"):
        for ending in (".so", ".so.0", ".a"):
            expect((installed.libdir / (name + ending)).exists(), f"{name}{ending} is installed")
    header = (tree.ROOT / "include" / "kvleaf" / "status.h").read_text(encoding="utf-8")
    version = ".".join(re.search(rf"KVLEAF_VERSION_{part} (\d+)", header).group(1)
                       for part in ("MAJOR", "MINOR", "PATCH"))
    for package in ("kvleaf", "kvleaf-blocks"):
        expect(installed.flags(package, "--modversion") == [version], f"{package}.pc says version {version}")
    return version


def check_pkg_config(installed, work, version):
    program, promised = readme_program()
    (work / "program.c").write_text(program, encoding="utf-8")
    (work / "blocks.c").write_text(BLOCKS_PROGRAM, encoding="utf-8")
    run(["cc", *STRICT, work / "program.c", "-o", work / "shared", *installed.flags("kvleaf", "--cflags", "--libs")])
    expect(installed.output(work / "shared") == promised, f"the README's program prints {promised!r}")

    static = installed.flags("kvleaf", "--cflags", "--libs", "--static")
    static = ["-l:libkvleaf.a" if flag == "-lkvleaf" else flag for flag in static]
    run(["cc", *STRICT, work / "program.c", "-o", work / "static", *static])
    expect("libkvleaf" not in run(["ldd", work / "static"]), "the static program needs no libkvleaf.so")
    expect(installed.output(work / "static") == promised, "linked statically it prints the same")

    blocks = installed.flags("kvleaf-blocks", "--cflags", "--libs")
    run(["cc", *STRICT, work / "blocks.c", "-o", work / "blocks", *blocks])
    expect("OpenCL" not in run(["ldd", work / "blocks"], env=installed.environment), "libkvleaf-blocks needs no OpenCL")
    expect(installed.output(work / "blocks") == f"{version}: 3 blocks\n", "a program of blocks alone works")
    return promised


def check_cmake(installed, work, promised):
    (work / "CMakeLists.txt").write_text(CMAKE_PROJECT, encoding="utf-8")
    run(["cmake", "-S", work, "-B", work / "out", f"-DCMAKE_PREFIX_PATH={installed.prefix}"])
    run(["cmake", "--build", work / "out"])
    expect(installed.output(work / "out" / "program") == promised, "built with CMake it prints the same")
    installed.output(work / "out" / "blocks")


def main():
    if len(sys.argv) != 2:
        print(__doc__)
        sys.exit(2)
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        installed = Installed(Path(sys.argv[1]).resolve(), work / "stage")
        version = check_files(installed)
        promised = check_pkg_config(installed, work, version)
        if shutil.which("cmake"):
            check_cmake(installed, work, promised)
        print(f"installed {version}: headers, libraries, pkg-config"
              + (", CMake" if shutil.which("cmake") else "; CMake is not here to be tried"))


main()
