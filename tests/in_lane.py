#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Runs a program in a lane: with a PoCL kernel cache that no other program uses at the time.

    in_lane.py FOLDER PROGRAM [ARGUMENT ...]

Two programs that use one PoCL cache at once may harm each other, and one cache a test would build every kernel again
for each test. So there are as many caches as tests that run at once, FOLDER/lane-0, FOLDER/lane-1 and so on, and a
program takes one that is free for as long as it runs.
"""
import fcntl
import os
import sys
from pathlib import Path


def take_lane(folder):
    """The first lane that is free. Its lock lives as long as the process, whatever it becomes."""
    number = 0
    while True:
        lane = folder / f"lane-{number}"
        lane.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(lane / "lock", os.O_RDWR | os.O_CREAT, 0o644)
        os.set_inheritable(descriptor, True)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return lane
        except BlockingIOError:
            os.close(descriptor)
            number += 1


def main():
    folder, program = Path(sys.argv[1]), sys.argv[2:]
    os.environ["POCL_CACHE_DIR"] = str(take_lane(folder).resolve() / "pocl")
    Path(os.environ["POCL_CACHE_DIR"]).mkdir(exist_ok=True)
    os.execv(program[0], program)


if __name__ == "__main__":
    main()
