#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Every program says what it is: --help and --version on stdout with exit code 0, an unknown option on stderr with 2,
and where no device is to be had one clear line and 1.

    check_tools.py FOLDER    the build folder's tools/
"""
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import tree

COMMON_OPTIONS = ("--help", "--version", "--json")


def run(program, *arguments, **environment):
    return subprocess.run([str(program), *arguments], capture_output=True, text=True, check=False, timeout=120,
                          stdin=subprocess.DEVNULL, env={**os.environ, **environment})


def problems_of(program, version):
    name, found = program.name, []
    for option, needed in (("--help", name), ("--version", version)):
        done = run(program, option)
        if done.returncode != 0 or needed not in done.stdout or done.stderr:
            found.append(f"{name} {option}: exit code {done.returncode}, must be 0 with {needed!r} on stdout only")
    text = run(program, "--help").stdout
    found += [f"{name} --help does not name {o}" for o in COMMON_OPTIONS if o not in text]
    done = run(program, "--no-such-option")
    if done.returncode != 2 or done.stdout or "--no-such-option" not in done.stderr:
        found.append(f"{name} --no-such-option: exit code {done.returncode}, must be 2 with the option named on stderr")
    return found


def no_device_problems(program):
    """With a vendors folder that holds no driver there is no platform."""
    with tempfile.TemporaryDirectory() as empty:
        done = run(program, OCL_ICD_VENDORS=empty)
    lines = done.stderr.strip().splitlines()
    if done.returncode != 1 or len(lines) != 1 or "platform" not in lines[0]:
        return [f"{program.name} without OpenCL: exit code {done.returncode}, must be 1 with one line that says so, "
                "not: " + " / ".join(lines[:4])]
    return []


def layout_problems(program, header):
    """--layout takes every layout there is."""
    text = run(program, "--help").stdout
    given = re.search(r"--layout NAME.*?: ([\w, ]+) \(", text)
    given = given.group(1).split(", ") if given else []
    layouts = [name.lower() for name in re.findall(r"KVLEAF_LAYOUT_(\w+) *= *\d", header)]
    return [f"{program.name} --layout does not take {name}" for name in layouts if name not in given]


def main():
    if len(sys.argv) != 2:
        print(__doc__)
        sys.exit(2)
    header = (tree.ROOT / "include" / "kvleaf" / "status.h").read_text(encoding="utf-8")
    version = ".".join(re.findall(r"KVLEAF_VERSION_(?:MAJOR|MINOR|PATCH) (\d+)", header))
    programs = sorted(p for p in Path(sys.argv[1]).glob("kvleaf-*") if p.is_file() and os.access(p, os.X_OK))
    device = (tree.ROOT / "include" / "kvleaf" / "device.h").read_text(encoding="utf-8")
    tree.expect_complaint(problems_of(Path("/bin/true"), version), "a program that says nothing")
    tree.expect_complaint(layout_problems(Path("/bin/true"), device), "a program without layouts")
    if not programs:
        print(f"no program in {sys.argv[1]}")
        sys.exit(1)
    problems = [problem for p in programs for problem in problems_of(p, version)]
    for p in programs:
        if p.name in ("kvleaf-info", "kvleaf-check", "kvleaf-tour"):
            problems += no_device_problems(p)
        if p.name in ("kvleaf-info", "kvleaf-bench"):
            problems += layout_problems(p, device)
    tree.finish(problems, f"{len(programs)} programs")


main()
