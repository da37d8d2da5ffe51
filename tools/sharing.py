#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Shows what requests share: a system prompt that several have in common, and three samples of one prompt.

    tools/sharing.py [--svg build/sharing.svg]

A first request brings a long system prompt into the prefix cache. Then three run at once: two with other
questions after the same system prompt, one that asks for three samples. While they run, the program says
which blocks are shared, and draws the pool.
"""
from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from model_text import MODEL, PROGRAM, ROOT, Failure, Text, enter_project_venv, require_files

BLOCK, BLOCKS, NEW_TOKENS = 16, 128, 24

SYSTEM = """You are the assistant of a public library. The library stands on the market square and opens at nine in the
morning on every day but Sunday. It lends books for four weeks, films and records for one week, and games for two. A
reader may borrow ten things at a time. A loan can be made longer twice, unless somebody else waits for the thing. Who
brings something back late pays ten cents a day. Children pay nothing. Newspapers and dictionaries stay in the house.
The reading room on the first floor is quiet; the room beside it is for groups and can be reserved for two hours. There
are six computers, which anybody may use for an hour. Lost cards are replaced at the desk. Answer briefly and kindly,
in one or two sentences, and say so if you do not know."""
FIRST = "When do you open?"
QUESTIONS = [("ask", "How long may I keep a film?", 1), ("late", "What do I pay when a book is late?", 1),
             ("three", "Write a sentence that invites children to the library.", 3)]


class Runner:
    """kvleaf-generate with its input open."""

    def __init__(self, args: argparse.Namespace) -> None:
        command = [str(args.program), "--model", str(args.model), "--requests", "-", "--out", "-", "--stream",
                   "--block-size", str(BLOCK), "--blocks", str(BLOCKS)]
        command += ["--device", args.device] if args.device else []
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                        stderr=subprocess.PIPE, text=True, encoding="utf-8")

    def send(self, line: dict[str, Any]) -> None:
        assert self.process.stdin
        try:
            self.process.stdin.write(json.dumps(line) + "\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            pass  # the next read says why it ended

    def next(self) -> dict[str, Any]:
        assert self.process.stdout and self.process.stderr
        line = self.process.stdout.readline()
        if not line:
            said = self.process.stderr.read().strip().splitlines()
            raise Failure(said[-1] if said else "kvleaf-generate ended early")
        row: dict[str, Any] = json.loads(line)
        if "error" in row:
            raise Failure(row["error"]["message"])
        return row

    def end(self) -> None:
        self.process.communicate()


class Asked:
    """A question, and what has come of its samples."""

    def __init__(self, text: Text, name: str, question: str, samples: int) -> None:
        messages = [{"role": "system", "content": " ".join(SYSTEM.split())}, {"role": "user", "content": question}]
        self.name, self.question, self.samples = name, question, samples
        self.prompt = text.encode(text.chat(messages))
        self.tokens: list[list[int]] = [[] for _ in range(samples)]
        self.usage: dict[str, int] = {}

    def request(self) -> dict[str, Any]:
        return {"id": self.name, "tokens": self.prompt, "n": self.samples, "max_new_tokens": NEW_TOKENS,
                "temperature": 0.8 if self.samples > 1 else 0.0, "seed": 3, "stop_tokens": []}

    def take(self, row: dict[str, Any]) -> None:
        if "token" in row:
            self.tokens[row["index"]].append(row["token"])
        else:
            self.usage = row["usage"]

    def blocks(self) -> int:
        """What its samples would hold if none shared a block."""
        return sum(-(-(len(self.prompt) + len(tokens)) // BLOCK) for tokens in self.tokens)

    def done(self) -> bool:
        return all(len(tokens) == NEW_TOKENS for tokens in self.tokens) and bool(self.usage)


def run(runner: Runner, asked: list[Asked]) -> tuple[dict[str, int], int, str]:
    """Runs them at once; returns the cache's counts half way, what their tables name there, and the picture."""
    named, counts, picture, wanted = 0, {}, "", False
    by_name = {one.name: one for one in asked}
    for one in asked:
        runner.send(one.request())
    while not all(one.done() for one in asked) or (wanted and not counts):
        row = runner.next()
        if "stats" in row:
            counts, picture = row["stats"], row["map"]
            named = sum(one.blocks() for one in asked)
            continue
        by_name[row["id"]].take(row)
        if not wanted and all(len(tokens) >= NEW_TOKENS // 2 for one in asked for tokens in one.tokens):
            runner.send({"stats": "map"})
            wanted = True
    return counts, named, picture


def show(text: Text, asked: list[Asked], counts: dict[str, int], named: int) -> None:
    bold, plain = ("\033[1m", "\033[0m") if sys.stdout.isatty() else ("", "")
    print(f"\n  {'request':<10}{'samples':>8}{'prompt':>8}{'found':>8}{'to compute':>12}{'shared blocks':>15}")
    for one in asked:
        found = one.usage["cached"]
        print(f"  {one.name:<10}{one.samples:>8}{len(one.prompt):>8}{found:>8}{len(one.prompt) - found:>12}"
              f"{one.usage['shared_blocks']:>15}")
    print()
    for one in asked:
        print(f"  {one.question}")
        for tokens in one.tokens:
            print("    - " + " ".join(text.decode(tokens).split()) + " ...")
    print(f"\n  Half way, {sum(one.samples for one in asked)} sequences name {named} blocks and hold {bold}"
          f"{counts['used']}{plain}: sharing saves {bold}{100 * (1 - counts['used'] / named):.0f}%{plain} of them.")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--svg", type=Path, default=ROOT / "build" / "sharing.svg", help="the picture of the pool")
    parser.add_argument("--model", type=Path, default=MODEL, metavar="DIR")
    parser.add_argument("--program", type=Path, default=PROGRAM, help="kvleaf-generate")
    parser.add_argument("--device", metavar="SUBSTRING", help="of an OpenCL platform or device name")
    args = parser.parse_args()
    enter_project_venv(("tokenizers", "jinja2"))
    require_files(args.program, args.model)
    text = Text(args.model)
    first, asked = Asked(text, "first", FIRST, 1), [Asked(text, *question) for question in QUESTIONS]
    print(f"A system prompt of {len(text.encode(SYSTEM))} tokens is computed once, for the question \"{FIRST}\". Then "
          f"three requests\nrun at once over the same system prompt, one of them with n = 3.")
    runner = Runner(args)
    run(runner, [first])
    counts, named, picture = run(runner, asked)
    runner.end()
    show(text, asked, counts, named)
    args.svg.parent.mkdir(parents=True, exist_ok=True)
    args.svg.write_text(picture, encoding="utf-8")
    print(f"  The pool at that moment: {args.svg}")
    shared = all(one.usage["cached"] >= BLOCK for one in asked) and counts["used"] < named
    return 0 if shared else 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except Failure as failure:
        print(f"sharing.py: {failure}", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)
