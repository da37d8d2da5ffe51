#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Every public header compiles alone, in C11 and in C++17, without a warning, and the literals that a header offers for
its params structs compile in both."""
import os
import re
import shutil
import subprocess
import sys

import tree

INCLUDE_DIR = tree.ROOT / "include"
WARNINGS = ["-Wall", "-Wextra", "-pedantic", "-Werror", "-fsyntax-only", f"-I{INCLUDE_DIR}"]
LANGUAGES = [("C11", "c", "-std=c11", ["cc", "gcc", "clang"]),
             ("C++17", "c++", "-std=c++17", ["c++", "g++", "clang++"])]


def compile_text(compiler, language, options, text):
    """What the compiler says against a program text, or an empty string."""
    done = subprocess.run([compiler, *WARNINGS, *options, "-x", language, "-"], input=text, capture_output=True,
                          text=True, check=False)
    return "" if done.returncode == 0 else done.stderr.strip()


def alone(header):
    return f"#include <kvleaf/{header}>\n" * 2


def literals(header, language):
    """A program text that makes each params struct of the header."""
    text = INCLUDE_DIR.joinpath("kvleaf", header).read_text(encoding="utf-8")
    lines = [f"#include <kvleaf/{header}>"]
    for macro in re.findall(r"#define (KVLEAF_\w+)_INIT ", text):
        lines.append(f"{macro.lower()} made_{macro.lower()} = {macro}_INIT;")
    if language == "c":
        lines += ["unsigned sizes(void);", "unsigned sizes(void)", "{", "    unsigned all = 0;"]
        for macro in re.findall(r"#define (kvleaf_\w+_params)\(", text):
            lines.append(f"    all += {macro}()->struct_size;")
        lines += ["    return all;", "}"]
    return "\n".join(lines) + "\n"


def main():
    headers = sorted(p.name for p in (INCLUDE_DIR / "kvleaf").glob("*.h"))
    problems, compiled = [], 0
    for name, language, standard, compilers in LANGUAGES:
        found = {os.path.realpath(shutil.which(c)): c for c in compilers if shutil.which(c)}
        if not found:
            print(f"no {name} compiler: {', '.join(compilers)}")
            sys.exit(tree.SKIPPED)
        for path, compiler in found.items():
            broken = compile_text(path, language, [standard], alone("missing.h"))
            tree.expect_complaint(broken, "a missing header")
            for header in headers:
                for text in (alone(header), literals(header, language)):
                    said = compile_text(path, language, [standard], text)
                    problems += [f"{header}, {name}, {compiler}:\n{said}"] if said else []
                    compiled += 1
    tree.finish(problems, f"{len(headers)} public headers, {compiled} compilations")


main()
