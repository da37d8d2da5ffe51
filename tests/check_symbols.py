#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The libraries export exactly what include/ declares, and every other non-static symbol in them begins with kvl_.

    check_symbols.py FOLDER    the build folder's lib/
"""
import re
import shutil
import subprocess
import sys
from pathlib import Path

import tree

DECLARED = re.compile(r"KVLEAF_API\s[^;{(#]*?\b(kvleaf_\w+)\s*\(", re.S)
LIBRARIES = {"libkvleaf-blocks": ["status.h", "blocks.h"], "libkvleaf": None}  # None: every header


def declared(headers):
    names = set()
    for path in (tree.ROOT / "include" / "kvleaf").glob("*.h"):
        if headers is None or path.name in headers:
            names |= set(DECLARED.findall(path.read_text(encoding="utf-8")))
    return names


def symbols(library, options):
    done = subprocess.run(["nm", *options, "--defined-only", "--format=posix", str(library)], capture_output=True,
                          text=True, check=True)
    return {line.split()[0] for line in done.stdout.splitlines() if len(line.split()) > 2}


def problems_of(name, promised, exported, non_static):
    found = [f"{name}: {s} is declared in include/ but not exported" for s in sorted(promised - exported)]
    found += [f"{name}: {s} is exported but not declared in include/" for s in sorted(exported - promised)]
    found += [f"{name}: {s} is neither static nor begins with kvl_" for s in sorted(non_static - promised)
              if not s.startswith("kvl_")]
    return found


def main():
    if len(sys.argv) != 2:
        print(__doc__)
        sys.exit(2)
    if not shutil.which("nm"):
        print("nm is missing (binutils)")
        sys.exit(tree.SKIPPED)
    tree.expect_complaint(problems_of("x", {"kvleaf_a"}, set(), set()), "a missing function")
    tree.expect_complaint(problems_of("x", set(), {"kvleaf_a"}, set()), "an undeclared function")
    tree.expect_complaint(problems_of("x", set(), set(), {"helper"}), "a name without prefix")
    problems, count = [], 0
    for name, headers in LIBRARIES.items():
        shared, static = Path(sys.argv[1]) / f"{name}.so", Path(sys.argv[1]) / f"{name}.a"
        promised, exported = declared(headers), symbols(shared, ["-D"])
        problems += problems_of(name, promised, exported, symbols(static, ["-g"]))
        count += len(exported)
    tree.finish(problems, f"{count} exported symbols")


main()
