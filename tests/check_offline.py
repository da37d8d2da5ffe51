#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The portable kernels compile for GPUs that are not at hand, by their vendors' offline compilers: clang for AMD, ocloc
for Intel. What they compute there is not checked by this.

    check_offline.py [amd|intel]...    default: both
"""
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import tree

KERNELS = tree.ROOT / "cl_kernels"
# dtype numbers as in common/plan.h: 0 f16, 1 bf16, 2 f32; layouts 1 strided, 2 rows, 4 dim8.
CONFIGURATIONS = [
    {"Q_DTYPE": 0, "KV_DTYPE": 0, "OUT_DTYPE": 0, "KV_LAYOUT": 4},
    {"Q_DTYPE": 1, "KV_DTYPE": 1, "OUT_DTYPE": 1, "KV_LAYOUT": 2},
    {"Q_DTYPE": 2, "KV_DTYPE": 2, "OUT_DTYPE": 2, "KV_LAYOUT": 1, "KV_PAGED": 0},
]
AMD_TARGETS = ["gfx906", "gfx90a", "gfx1030"]
INTEL_TARGETS = ["dg2", "pvc"]
INCLUDE = re.compile(r'^#include "([^"]+)"', re.M)


def expand(text, seen):
    """The text with its includes put in, each once, as the library's loader does."""
    def one(match):
        name = match.group(1)
        if name in seen:
            return ""
        seen.add(name)
        return expand((KERNELS / name).read_text(encoding="utf-8"), seen)
    return INCLUDE.sub(one, text)


def amd(source, target, defines, _):
    return ["clang", "-x", "cl", "-cl-std=CL1.2", "-Xclang", "-finclude-default-header", "-target",
            "amdgcn-amd-amdhsa", f"-mcpu={target}", "-nogpulib", "-O1", "-S", *defines, "-o", "/dev/null", str(source)]


def intel(source, target, defines, folder):
    options = " ".join(["-cl-std=CL1.2", *defines])
    return ["ocloc", "compile", "-file", str(source), "-device", target, "-options", options, "-out_dir", str(folder)]


COMPILERS = {"amd": ("clang", amd, AMD_TARGETS), "intel": ("ocloc", intel, INTEL_TARGETS)}


def compile_all(vendor, sources, folder):
    """[problem], number of compilations."""
    _, command, targets = COMPILERS[vendor]
    problems, count = [], 0
    for source in sources:
        for index, configuration in enumerate(CONFIGURATIONS):
            defines = [f"-D{name}={value}" for name, value in configuration.items()]
            target = targets[index % len(targets)]
            done = subprocess.run(command(source, target, defines, folder), capture_output=True, text=True, check=False,
                                  cwd=folder)
            count += 1
            if done.returncode != 0:
                problems.append(f"{source.name} for {target} with {' '.join(defines)}:\n{done.stdout}{done.stderr}")
    return problems, count


def main():
    vendors = sys.argv[1:] or sorted(COMPILERS)
    if any(v not in COMPILERS for v in vendors):
        print(__doc__)
        sys.exit(2)
    missing = [COMPILERS[v][0] for v in vendors if not shutil.which(COMPILERS[v][0])]
    if missing:
        print(f"missing: {', '.join(missing)}")
        sys.exit(tree.SKIPPED)
    with tempfile.TemporaryDirectory() as folder:
        sources = []
        for path in sorted((KERNELS / "portable").glob("*.cl")):
            sources.append(Path(folder) / path.name)
            sources[-1].write_text(expand(path.read_text(encoding="utf-8"), set()), encoding="utf-8")
        broken = Path(folder) / "broken.cl"
        broken.write_text("__kernel void broken(__global float *a) { *a = no_such_thing; }\n", encoding="utf-8")
        problems, count = [], 0
        for vendor in vendors:
            tree.expect_complaint(compile_all(vendor, [broken], folder)[0], f"a broken kernel ({vendor})")
            found, compiled = compile_all(vendor, sources, folder)
            problems, count = problems + found, count + compiled
    tree.finish(problems, f"{len(sources)} portable kernel files, {count} compilations for {', '.join(vendors)}")


main()
