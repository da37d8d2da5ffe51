#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Counts test cases in Meson's log: those that a cmocka program reports, else one a test. A program that ends badly
without reporting a failed case counts as one more that failed. Prints what is not right and then one line of numbers.

    count_tests.py testlog.json
"""
import json
import re
import sys

CMOCKA = {"passed": r"\[  PASSED  \] (\d+) test", "failed": r"\[  FAILED  \] (\d+) test",
          "skipped": r"\[  SKIPPED \] (\d+) test"}
ENDED_WELL = ("OK", "EXPECTEDFAIL")


def count(test):
    """{"passed": n, "failed": n, "skipped": n} of one line of the log."""
    text = test.get("stdout", "") + test.get("stderr", "")
    cases = {kind: sum(int(n) for n in re.findall(pattern, text)) for kind, pattern in CMOCKA.items()}
    if test["result"] == "SKIP":
        return {"passed": 0, "failed": 0, "skipped": 1}
    if test["result"] not in ENDED_WELL:
        cases["failed"] = cases["failed"] or 1
    elif not any(cases.values()):
        cases["passed"] = 1
    return cases


def main():
    if len(sys.argv) != 2:
        print(__doc__)
        sys.exit(2)
    total = {"passed": 0, "failed": 0, "skipped": 0}
    with open(sys.argv[1], encoding="utf-8") as log:
        tests = [json.loads(line) for line in log if line.strip()]
    for test in tests:
        cases = count(test)
        total = {kind: total[kind] + cases[kind] for kind in total}
        if cases["failed"]:
            print(f"failed: {test['name']} ({test['result']})")
        if cases["skipped"]:
            print(f"skipped: {test['name']}")
    print(", ".join(f"{number} {kind}" for kind, number in total.items()))


main()
