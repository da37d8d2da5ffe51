#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Asks a language model that runs on kvleaf; several prompts are answered at once.

    tools/generate.py "What is the capital of France?" "Name three rivers."
    echo "Tell me a short story." | tools/generate.py --max-new-tokens 400 --temperature 0.7

Puts text in front of kvleaf-generate: the model's tokenizer and chat template turn each prompt into
tokens, the answers stream to the terminal as they come.
"""
import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from model_text import MODEL, PROGRAM, Failure, Text, TextStream, enter_project_venv, require_files


class Answer:
    """One prompt and what has come of its answer."""

    def __init__(self, prompt, text):
        self.prompt, self.codec = prompt, text
        self.stream = TextStream(text)
        self.tokens, self.taken = [], 0
        self.result = None

    def fresh(self):
        """The text that came since the last call."""
        new, self.taken = self.tokens[self.taken:], len(self.tokens)
        text = self.stream.add(new)
        return text if self.result is None else text + self.stream.finish()


# ------------------------------------------------------------------------------------ display

class Display:
    """Prints the answers in the order of the prompts: the first unfinished one as it comes, the
    others, computed at the same time, when their turn comes."""

    def __init__(self, answers, total):
        from tqdm import tqdm

        self.answers, self.current = answers, 0
        self.live = sys.stdout.isatty()
        self.bold, self.dim, self.plain = ("\033[1m", "\033[2m", "\033[0m") if self.live else ("", "", "")
        # Where the answers themselves are the sign of progress, a bar only fills the wait before them.
        self.bar = tqdm(total=total, unit="token", desc="answering", file=sys.stderr, leave=False,
                        dynamic_ncols=True, disable=not sys.stderr.isatty())
        self.begun = False

    def begin(self):
        lines = self.answers[self.current].prompt.strip().splitlines() or [""]
        head = "\n".join(self.dim + "> " + self.plain + self.bold + line + self.plain for line in lines)
        print(("\n" if self.current else "") + head, flush=True)
        self.begun = True

    def update(self, count):
        if not self.live:
            self.bar.update(count)
        else:
            self.bar.close()
        while self.current < len(self.answers):
            answer = self.answers[self.current]
            if not self.live and answer.result is None:
                return
            if not self.begun:
                self.bar.clear()
                self.begin()
            print(answer.fresh(), end="", flush=True)
            if answer.result is None:
                return
            self.finish(answer)

    def finish(self, answer):
        if "error" in answer.result:
            print(f"{self.dim}[{answer.result['error']['message']}]{self.plain}", flush=True)
        else:
            cut = " [cut at the limit]" if answer.result["finish_reason"] == "length" else ""
            print(self.dim + cut + self.plain, flush=True)
        self.current += 1
        self.begun = False

    def close(self):
        self.bar.close()


# ------------------------------------------------------------------------------------ running

def command(args):
    options = ["--model", args.model, "--requests", "-", "--out", "-", "--stream", "--json",
               "--kv-dtype", args.kv_dtype, "--block-size", args.block_size, "--blocks", args.blocks,
               "--max-batch", args.max_batch, "--prefill-chunk", args.prefill_chunk]
    if args.device:
        options += ["--device", args.device]
    return [str(args.program)] + [str(option) for option in options]


def conversation(args, prompt):
    system = [] if args.system is None else [{"role": "system", "content": args.system}]
    return [*system, {"role": "user", "content": prompt}]


def requests(args, answers):
    lines = []
    for index, answer in enumerate(answers):
        text = answer.prompt if args.raw else answer.codec.chat(conversation(args, answer.prompt))
        lines.append(json.dumps({
            "id": index, "tokens": answer.codec.encode(text), "max_new_tokens": args.max_new_tokens,
            "temperature": args.temperature, "top_p": args.top_p, "seed": args.seed + index}))
    return "\n".join(lines) + "\n"


def follow(process, answers, show):
    """Reads the program's lines until it ends; show(count) after each. Returns its summary."""
    summary = {}
    for line in process.stdout:
        row = json.loads(line)
        if "summary" in row:
            summary = row["summary"]
        elif "token" in row:
            answers[row["id"]].tokens.append(row["token"])
            show(1)
        elif row.get("id") is not None:
            answers[row["id"]].result = row
            show(0)
    return summary


def run(args, answers):
    text = requests(args, answers)
    display = None if args.json else Display(answers, args.max_new_tokens * len(answers))
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(command(args), stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                   stderr=log, text=True, encoding="utf-8")
        try:
            process.stdin.write(text)
            process.stdin.close()
        except BrokenPipeError:
            pass  # it ended early, and its log says why
        try:
            summary = follow(process, answers, display.update if display else lambda count: None)
        except BaseException:
            process.kill()
            raise
        finally:
            if display:
                display.close()
        code = process.wait()
        log.seek(0)
        said = log.read().strip().splitlines()
    if any(answer.result is None for answer in answers):
        raise Failure(said[-1] if said else f"{args.program} ended with status {code}")
    return summary


def print_json(answers):
    for index, answer in enumerate(answers):
        row = {"index": index, "prompt": answer.prompt, **{k: v for k, v in answer.result.items()
                                                           if k in ("finish_reason", "usage", "error")}}
        if "error" not in answer.result:
            row.update(text=answer.codec.decode(answer.tokens), tokens=answer.tokens)
        print(json.dumps(row, ensure_ascii=False))


def print_summary(answers, summary):
    if not summary:
        return
    count = len(answers)
    print(f"\n{count} answer{'s' if count > 1 else ''}, {summary['generated']} tokens in "
          f"{summary['seconds']:.1f} s ({summary['tokens_per_second']:.0f} a second) on "
          f"{summary['device']}; {summary['peak_blocks']} of {summary['blocks']} cache blocks used",
          file=sys.stderr)


def parse_arguments():
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], epilog="Without a prompt, standard input is the prompt.")
    parser.add_argument("prompts", nargs="*", metavar="PROMPT")
    parser.add_argument("--prompt", action="append", default=[], metavar="PROMPT",
                        help="another prompt; may be given several times")
    parser.add_argument("--system", help="system message (default: the chat template's own)")
    parser.add_argument("--raw", action="store_true",
                        help="continue the prompt as it is, without the chat template")
    parser.add_argument("--max-new-tokens", type=int, default=256, metavar="N")
    parser.add_argument("--temperature", type=float, default=0.0, metavar="T", help="0 is greedy")
    parser.add_argument("--top-p", type=float, default=1.0, metavar="P")
    parser.add_argument("--seed", type=int, default=0, metavar="N",
                        help="of the first prompt; the next ones count up")
    parser.add_argument("--model", type=Path, default=MODEL, metavar="DIR")
    parser.add_argument("--program", type=Path, default=PROGRAM, help="kvleaf-generate")
    parser.add_argument("--device", metavar="SUBSTRING", help="of an OpenCL platform or device name")
    parser.add_argument("--max-batch", type=int, default=16, metavar="N")
    parser.add_argument("--block-size", type=int, default=16, metavar="N")
    parser.add_argument("--blocks", type=int, default=0, metavar="N", help="0 = for 8192 tokens")
    parser.add_argument("--prefill-chunk", type=int, default=256, metavar="N")
    parser.add_argument("--kv-dtype", choices=("f16", "bf16", "f32"), default="f32")
    parser.add_argument("--json", action="store_true", help="one JSON object a prompt on stdout")
    args = parser.parse_args()
    args.prompts += args.prompt
    if not args.prompts and not sys.stdin.isatty():
        args.prompts = [sys.stdin.read()]
    if not any(prompt.strip() for prompt in args.prompts):
        parser.error("no prompt")
    return args


def main():
    args = parse_arguments()
    enter_project_venv(("tokenizers", "jinja2", "tqdm"))
    require_files(args.program, args.model)
    text = Text(args.model)
    answers = [Answer(prompt, text) for prompt in args.prompts]
    summary = run(args, answers)
    if args.json:
        print_json(answers)
    else:
        print_summary(answers, summary)
    return 1 if any("error" in answer.result for answer in answers) else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except Failure as failure:
        print(f"generate.py: {failure}", file=sys.stderr)
        sys.exit(1)
    except BrokenPipeError:
        sys.exit(1)
    except KeyboardInterrupt:
        print(file=sys.stderr)
        sys.exit(130)
