#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Runs kvleaf-bench and its peers (nvidia.py beside this file) on one NVIDIA GPU, shape by shape, and prints a table.

The peers' rows come first, all in one process, since they take long to load; kvleaf follows on the same shapes. A row
of the table is a shape, a column a program: microseconds in decode, TFLOP/s in prefill, medians with the best run
behind.
"""
import argparse
import json
import subprocess
import sys
from pathlib import Path

from shapes import SHAPES

HERE = Path(__file__).resolve().parent
OURS = "kvleaf, paged"


def rows_of(command):
    """The JSON rows that a program prints; its other output goes to stderr as it is."""
    done = subprocess.run([str(part) for part in command], stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode != 0:
        program = command[1] if command[0] == sys.executable else command[0]
        print(f"side_by_side.py: {Path(program).name} ended with exit code {done.returncode}", file=sys.stderr)
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def shape_of(row):
    return row["batch"], row["context"], row["q_len"]


def measure_kvleaf(options, shape):
    batch, context, q_len = shape
    command = [options.kvleaf_bench, options.bench, "--device", options.device, "--batch", batch, "--context", context,
               "--runs", options.runs, "--rest", options.rest, "--json"]
    if options.bench == "prefill":
        command += ["--q-len", q_len]
    return rows_of(command)


def cell(row):
    """Median and best run as the table has them."""
    if row is None:
        return "-"
    if "gflop_per_s" not in row:
        return f"{row['median_us']:.1f} ({row['best_us']:.1f})"
    median = row["gflop_per_s"] / 1e3
    return f"{median:.0f} ({median * row['median_us'] / row['best_us']:.0f})"


def name_of(shape, bench):
    batch, context, q_len = shape
    if bench == "decode" or q_len == context:
        return f"{batch} x {context}"
    return f"{batch} x {q_len} new on {context - q_len} cached"


def print_table(table, bench):
    """table: shape to {program: row}."""
    programs = list(dict.fromkeys(program for rows in table.values() for program in rows))
    programs.sort(key=lambda program: program != OURS)
    unit = "us" if bench == "decode" else "TFLOP/s"
    print(f"| {bench}, {unit} | " + " | ".join(programs) + " |")
    print("|---" * (len(programs) + 1) + "|")
    for shape, rows in table.items():
        print(f"| {name_of(shape, bench)} | " + " | ".join(cell(rows.get(program)) for program in programs) + " |")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("bench", choices=["decode", "prefill"])
    parser.add_argument("--kvleaf-bench", default="build/tools/kvleaf-bench", metavar="PATH", help="the program")
    parser.add_argument("--device", default="NVIDIA", metavar="SUBSTRING", help="of platform or device name (NVIDIA)")
    parser.add_argument("--runs", type=int, default=50, metavar="N", help="timed runs (50)")
    parser.add_argument("--rest", type=int, default=0, metavar="MS", help="idle time before each run (0)")
    parser.add_argument("--json", action="store_true", help="every row as a line, no table")
    options = parser.parse_args()
    peers = rows_of([sys.executable, HERE / "nvidia.py", options.bench, "--runs", options.runs, "--rest",
                     options.rest])
    table = {shape: {} for shape in SHAPES[options.bench]}
    for row in peers:
        table[shape_of(row)][row["peer"]] = row
    for shape, rows in table.items():
        for row in measure_kvleaf(options, shape):
            rows[OURS] = row
    if options.json:
        for rows in table.values():
            for row in rows.values():
                print(json.dumps(row))
    else:
        print_table(table, options.bench)
    return 0 if all(OURS in rows for rows in table.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
