#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Draws what `kvleaf-bench serving --json` measured: an SVG or PNG for a talk.

    build/tools/kvleaf-bench serving --json > serving.jsonl
    tools/serving_chart.py serving.jsonl --out serving.svg

Four pictures: where the slots of used blocks went, how many sequences ran at once, tokens a second (paged with
a batch that keeps the reservation's 99th percentile, and with all that fits), and what sharing saves with several
samples or beams. Needs matplotlib.
"""
import argparse
import json
import sys
from pathlib import Path

PAGED, OTHER, FAINT = "#2a6f97", "#b8b8b8", "#e3e3e3"
RUNS = (("reserved, longest", "longest\nreserved"), ("reserved, true length", "true length\nreserved"),
        ("paged", "paged"))


class Failure(Exception):
    """What the user is told in one line before exit status 1."""


def read(path):
    """The last row of each name, and the summary."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
        rows = {row["run"]: row for row in map(json.loads, lines) if row.get("bench") == "serving"}
    except (OSError, ValueError, KeyError) as error:
        raise Failure(f"{path}: {error}") from error
    missing = [name for name, _ in RUNS if name not in rows] + ["summary"] * ("summary" not in rows)
    if missing:
        raise Failure(f"{path} has no row {missing[0]!r}")
    if not any(name.endswith(", shared") for name in rows):
        raise Failure(f"{path} has no run with several samples; --no-sharing left them out")
    return rows


def bars(axes, title, labels, values, text, colours):
    drawn = axes.bar(labels, values, color=colours, width=0.62)
    axes.bar_label(drawn, [text(value) for value in values], padding=3, fontweight="bold")
    axes.set_title(title, loc="left", fontsize=11)
    axes.set_yticks([])
    axes.margins(y=0.18)
    axes.spines[["top", "right", "left"]].set_visible(False)


def draw(rows, out):
    import matplotlib
    matplotlib.use("Agg")
    from matplotlib import pyplot

    matplotlib.rcParams.update({"font.size": 10, "svg.hashsalt": "kvleaf"})
    figure, ((waste, held), (speed, sharing)) = pyplot.subplots(2, 2, figsize=(9.6, 6.4), layout="constrained")
    labels, colours = [label for _, label in RUNS], [OTHER, OTHER, PAGED]
    of = lambda field: [rows[name][field] for name, _ in RUNS]

    share = of("waste")
    waste.bar(labels, [100 * (1 - w) for w in share], color=colours, width=0.62)
    waste.bar(labels, [100 * w for w in share], bottom=[100 * (1 - w) for w in share], color=FAINT, width=0.62)
    for at, w in enumerate(share):
        waste.text(at, 103, f"{100 * w:.1f}% wasted", ha="center", fontweight="bold")
    waste.set_ylim(0, 118)
    waste.set_title("Slots of used blocks that hold a token", loc="left", fontsize=11)
    waste.set_yticks([])
    waste.spines[["top", "right", "left"]].set_visible(False)

    bars(held, "Sequences at once, in the same memory", labels, of("sequences"), lambda v: f"{v:.0f}", colours)
    equal = rows.get("paged, equal latency", rows["paged"])
    values = [row["tokens_per_second"] for row in (rows["reserved, longest"], equal, rows["paged"])]
    bars(speed, "Tokens a second", ["longest\nreserved", "paged, its 99th\npercentile", "paged"], values,
         lambda v: f"{v:,.0f}", [OTHER, PAGED, PAGED])

    shared = [(name.removesuffix(", shared"), row["saved"]) for name, row in rows.items() if name.endswith(", shared")]
    bars(sharing, "Blocks that sharing saves", [name for name, _ in shared], [100 * saved for _, saved in shared],
         lambda v: f"{v:.0f}%", PAGED)
    figure.suptitle(f"Paged against contiguous reservation: {rows['paged']['device']}", fontsize=13)
    figure.savefig(out, metadata={"Date": None} if out.suffix == ".svg" else None, dpi=150)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("rows", type=Path, help="what kvleaf-bench serving --json wrote")
    parser.add_argument("--out", type=Path, default=Path("serving.svg"), help="an .svg or a .png file")
    args = parser.parse_args()
    if args.out.suffix not in (".svg", ".png"):
        parser.error(f"--out is {args.out}, must end in .svg or .png")
    try:
        draw(read(args.rows), args.out)
    except ImportError as error:
        raise Failure(f"{error.name} is missing: pip install matplotlib") from error
    print(f"{args.out} written", file=sys.stderr)
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except Failure as failure:
        print(f"serving_chart.py: {failure}", file=sys.stderr)
        sys.exit(1)
