#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What kvleaf-generate makes of the memory manager, on a model small enough to compute in Python.

    test_generate_sharing.py [BUILD] [--device SUBSTRING] [--only NAME ...]

Protects: models with sliding windows, in all layers or in some; n samples that share their prompt; beam search;
prompts found in the prefix cache; preemption to host memory and by computing again; priorities; requests that come
and are cancelled while others run; the tool that makes random models. The model is random; a float64 implementation
of it in NumPy, written for this test, says what is right. BUILD is the build folder (default: build).
"""
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from test_generate import ROOT, Bench, by_id, make_parser, parse, small_model, write_model

BLOCK = 4
PROMPT = [3, 14, 15, 9, 26, 5, 35, 8, 9, 7, 9, 32, 38, 46, 26, 43, 38, 32, 7, 9, 50, 28]
# Largest difference of a logit from the reference's; the logits' spread is about 2, float32 gives 1e-6.
BOUND = 2e-5


class Reference:
    """The model in float64: logits of every position of a token sequence."""

    def __init__(self, config, tensors):
        self.config = config
        self.tensors = {name: np.array(values, np.float32).astype(np.float64).reshape(shape)
                        for name, (shape, values) in tensors.items()}

    def norm(self, x, name):
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + self.config["rms_norm_eps"]) * self.tensors[name]

    def rope(self, x):
        """x [tokens, heads, dim]: pairs (i, i + dim / 2)."""
        half = x.shape[2] // 2
        angle = np.arange(len(x))[:, None] * self.config["rope_theta"] ** (-np.arange(half) / half)
        cos, sin = np.cos(angle)[:, None], np.sin(angle)[:, None]
        a, b = x[..., :half], x[..., half:]
        return np.concatenate([a * cos - b * sin, b * cos + a * sin], -1)

    def window(self, layer):
        types = self.config.get("layer_types")
        sliding = types is None or types[layer] == "sliding_attention"
        return self.config.get("sliding_window") if sliding else None

    def attention(self, x, layer, name):
        heads, kv_heads = self.config["num_attention_heads"], self.config["num_key_value_heads"]
        q, k, v = (x @ self.tensors[f"{name}self_attn.{p}_proj.weight"].T for p in "qkv")
        q, k, v = (y.reshape(len(x), h, -1) for y, h in ((q, heads), (k, kv_heads), (v, kv_heads)))
        q, k = self.rope(q), self.rope(k)
        behind = np.arange(len(x))[:, None] - np.arange(len(x))[None]
        seen = (behind >= 0) & (behind < (self.window(layer) or len(x)))
        out = np.empty_like(q)
        for head in range(heads):
            kv = head // (heads // kv_heads)
            scores = np.where(seen, q[:, head] @ k[:, kv].T / np.sqrt(q.shape[2]), -np.inf)
            weights = np.exp(scores - scores.max(-1, keepdims=True))
            out[:, head] = weights / weights.sum(-1, keepdims=True) @ v[:, kv]
        return out.reshape(len(x), -1) @ self.tensors[f"{name}self_attn.o_proj.weight"].T

    def logits(self, tokens):
        x = self.tensors["model.embed_tokens.weight"][tokens]
        for layer in range(self.config["num_hidden_layers"]):
            name = f"model.layers.{layer}."
            x = x + self.attention(self.norm(x, name + "input_layernorm.weight"), layer, name)
            y = self.norm(x, name + "post_attention_layernorm.weight")
            gate, up = (y @ self.tensors[f"{name}mlp.{p}_proj.weight"].T for p in ("gate", "up"))
            x = x + (gate / (1 + np.exp(-gate)) * up) @ self.tensors[name + "mlp.down_proj.weight"].T
        return self.norm(x, "model.norm.weight") @ self.tensors["lm_head.weight"].T

    def greedy(self, prompt, count):
        tokens = list(prompt)
        for _ in range(count):
            tokens.append(int(self.logits(tokens)[-1].argmax()))
        return tokens[len(prompt):]

    def beams(self, prompt, width, count, stops):
        """Beam search as the program documents it; returns [(tokens, score)], best first."""
        live, ended = [([], 0.0)], []
        while True:
            ranked = []
            for tokens, score in live:
                logits = self.logits(prompt + tokens)[-1]
                logs = logits - logits.max() - np.log(np.exp(logits - logits.max()).sum())
                ranked += [(tokens + [t], score + logs[t]) for t in range(len(logs))]
            ranked.sort(key=lambda entry: -entry[1])
            live = []
            for rank, (tokens, score) in enumerate(ranked):
                if tokens[-1] not in stops:
                    live.append((tokens, score))
                elif rank < width:
                    ended.append((tokens, score / len(tokens)))
                if len(live) == width:
                    break
            length = len(live[0][0])
            if length == count:
                ended += [(tokens, score / length) for tokens, score in live]
            ended = sorted(ended, key=lambda entry: -entry[1])[:width]
            if length == count or (len(ended) == width and live[0][1] / length <= ended[-1][1]):
                return ended


def make_model(bench, name="model", **changes):
    folder = bench.folder / name
    config, tensors = small_model(folder, num_hidden_layers=2, max_position_embeddings=256, **changes)
    # Sharper than the other tests' model, so that what attention reads matters to every logit.
    tensors = {n: (shape, [v * (3 if "proj" in n or "head" in n else 1) + (1 if "norm" in n else 0) for v in values])
               for n, (shape, values) in tensors.items()}
    write_model(folder / "model.safetensors", tensors)
    return folder, Reference(config, tensors)


def request(name, **changes):
    return {"id": name, "tokens": PROMPT, "max_new_tokens": 24, "stop_tokens": [], **changes}


def test_windows(bench):
    """Sliding windows in all layers, in the second, in the first; long runs, chunked prompts."""
    teacher = [(7 * i * i + 3) % 64 for i in range(60)]
    for what, changes in [
        ("no window", {}),
        ("a window of 9 in every layer", {"model_type": "mistral", "sliding_window": 9}),
        ("a window of 4 in the second layer",
         {"sliding_window": 4, "layer_types": ["full_attention", "sliding_attention"]}),
        ("a window of 13 in the first layer",
         {"sliding_window": 13, "layer_types": ["sliding_attention", "full_attention"]}),
    ]:
        folder, reference = make_model(bench, what.replace(" ", "-"), **changes)
        free = {k: v for k, v in request("free").items()}
        code, answers, errors = bench.run([request("forced", teacher=teacher), free], "--block-size", BLOCK,
                                          "--blocks", 48, "--prefill-chunk", 5, model=folder)
        answers = by_id(answers)
        steps = answers.get("forced", {}).get("steps")
        if code or not steps:
            bench.check(False, f"{what}: {errors}")
            continue
        want = reference.logits(PROMPT + teacher)[len(PROMPT) - 1:-1]
        worst = max(abs(want[i][t] - v) for i in range(len(teacher))
                    for t, v in zip(steps["top_ids"][i], steps["top_logits"][i]))
        bench.check(worst < BOUND, f"{what}: largest logit error {worst:.1e} (limit {BOUND:g})")
        bench.check(answers["free"]["tokens"] == reference.greedy(PROMPT, 24), f"{what}: the reference's greedy tokens")


def test_samples(bench):
    """n samples hold the prompt's full blocks once, and are those of their seeds alone."""
    folder, reference = make_model(bench)
    lines = [request("three", n=3, temperature=1.0, seed=5)]
    lines += [request(f"alone {i}", temperature=1.0, seed=5 + i, salt=1 + i) for i in range(3)]
    code, answers, errors = bench.run(lines, "--block-size", BLOCK, "--blocks", 64, model=folder)
    three = sorted((a for a in answers if a["id"] == "three"), key=lambda a: a.get("index", -1))
    alone = by_id(answers)
    bench.check(code == 0 and [a["index"] for a in three] == [0, 1, 2], f"three answers: {errors.strip()[-80:]}")
    for i, answer in enumerate(three):
        bench.check(answer["tokens"] == alone[f"alone {i}"]["tokens"], f"sample {i} is that of seed {5 + i} alone")
    bench.check(len({tuple(a["tokens"]) for a in three}) == 3, "and they differ")
    full = len(PROMPT) // BLOCK
    shared = [a["usage"]["shared_blocks"] for a in three]
    bench.check(all(full <= s <= full + 1 for s in shared),
                f"each shared the {full} full blocks of the prompt: {shared}")
    # 5 full ones of the prompt, and 7 more a sample for 45 tokens; in three copies they would be 36.
    code, answers, errors = bench.run(lines[:1], "--block-size", BLOCK, "--blocks", 26, model=folder)
    bench.check(code == 0 and " 0 preemptions" in errors,
                f"26 blocks are enough for all three: {errors.strip()[-160:]}")
    _, answers, _ = bench.run([request("greedy", n=2)], "--block-size", BLOCK, model=folder)
    bench.check([a["tokens"] for a in answers] == [reference.greedy(PROMPT, 24)] * 2, "two greedy samples are the same")
    stop = reference.greedy(PROMPT, 1)
    code, answers, errors = bench.run([request("stops", n=3, temperature=2.0, seed=s, stop_tokens=list(range(0, 64, 3)))
                                       for s in range(20)], "--block-size", BLOCK, model=folder)
    bench.check(code == 0 and len(answers) == 60 and any(len(a["tokens"]) == 1 for a in answers)
                and any(a["finish_reason"] == "stop" and len(a["tokens"]) > 1 for a in answers),
                f"samples that end at once leave the others their prompt: {errors.strip()[-80:]} {stop}")


def test_beams(bench):
    """Beam search gives the reference's beams, scores and order, whatever it is preempted by."""
    folder, reference = make_model(bench)
    stops = list(range(0, 64, 5))
    cases = [("wide", 4, 4, 12, stops), ("narrow", 2, 1, 20, []), ("many", 8, 8, 6, stops)]
    lines = [request(name, beam=beam, n=n, max_new_tokens=count, stop_tokens=stop)
             for name, beam, n, count, stop in cases]
    for what, options in (("calm", []), ("preempted", ["--blocks", 24]),
                          ("swapped", ["--blocks", 24, "--swap-blocks", 64])):
        code, answers, errors = bench.run(lines, "--block-size", BLOCK, *options, model=folder)
        bench.check(code == 0, f"{what}: {errors.strip()[-100:]}")
        for name, beam, n, count, stop in cases:
            got = [(a["tokens"], a["score"]) for a in answers if a["id"] == name]
            want = reference.beams(PROMPT, beam, count, stop)[:n]
            right = len(got) == n and all(g[0] == w[0] and abs(g[1] - w[1]) < 1e-4 for g, w in zip(got, want))
            bench.check(right, f"{what}, {name}: {n} of {beam} beams" + ("" if right else f": got {got}, want {want}"))


def test_prefix(bench):
    """A second request finds the first one's prompt; another salt does not; the tokens stay the same."""
    folder, reference = make_model(bench)
    longer = PROMPT + [1, 2, 3]
    lines = [request("first"), request("again"), request("longer", tokens=longer), request("salted", salt=9),
             request("salted again", salt=9)]
    code, answers, errors = bench.run(lines, "--block-size", BLOCK, "--max-batch", 1, model=folder)
    answers = by_id(answers)
    bench.check(code == 0, f"{len(answers)} answers: {errors.strip()[-80:]}")
    cached = {name: answer["usage"]["cached"] for name, answer in answers.items()}
    # One token at least is left to compute; beyond whole blocks the next one's match is copied.
    want = {"first": 0, "again": len(PROMPT) - 1, "longer": len(PROMPT), "salted": 0, "salted again": len(PROMPT) - 1}
    bench.check(cached == want, f"tokens found in the prefix cache: {cached}")
    for name, answer in answers.items():
        right = answer["tokens"] == reference.greedy(longer if name == "longer" else PROMPT, 24)
        bench.check(right, f"{name}: the reference's greedy tokens")
    _, answers, _ = bench.run(lines[:2], "--block-size", BLOCK, "--max-batch", 1, "--no-prefix-cache", model=folder)
    bench.check(len(answers) == 2 and all(a["usage"]["cached"] == 0 for a in answers), "nothing with --no-prefix-cache")


def test_preemption(bench):
    """To host memory and back, or computed again: the same tokens; the first and the important ones stay."""
    folder, _ = make_model(bench)
    lines = [request(f"r{i}", tokens=[(i * 17 + k * k) % 64 for k in range(5 + 6 * i)], temperature=0.8, seed=i,
                     max_new_tokens=30, n=1 + i % 2) for i in range(6)]
    _, calm, _ = bench.run(lines, "--block-size", BLOCK, "--blocks", 128, model=folder)
    keyed = {(a["id"], a["index"]): a["tokens"] for a in calm}
    for what, options, words in [
        ("computed again", ["--blocks", 30], ", 0 by swap"),
        ("swapped", ["--blocks", 30, "--swap-blocks", 64], " by swap"),
        ("swapped while host memory lasts", ["--blocks", 30, "--swap-blocks", 9], " by swap"),
        ("without a prefix cache", ["--blocks", 30, "--swap-blocks", 64, "--no-prefix-cache"], " by swap"),
    ]:
        code, answers, errors = bench.run(lines, "--block-size", BLOCK, *options, model=folder)
        got = {(a["id"], a.get("index")): a.get("tokens") for a in answers}
        summary = errors.strip().splitlines()[-1] if errors.strip() else ""
        bench.check(code == 0 and got == keyed, f"{what}: the same tokens")
        bench.check(words in summary and "; 0 preemptions" not in summary and
                    ("swapped" not in what or ", 0 by swap" not in summary), f"{what}: {summary[-60:]}")
    lines[5]["priority"] = 3
    _, answers, _ = bench.run(lines, "--block-size", BLOCK, "--blocks", 30, "--max-batch", 2, model=folder)
    bench.check(answers[0]["id"] == "r5" and {(a["id"], a["index"]): a["tokens"] for a in answers} == keyed,
                f"a high priority goes first: {[a['id'] for a in answers]}")


class Session:
    """The program with its input open."""

    def __init__(self, bench, folder, *options):
        command = [str(bench.program), "--model", str(folder), "--requests", "-", "--out", "-", "--stream",
                   "--block-size", str(BLOCK), *map(str, options)]
        command += ["--device", bench.device] if bench.device else []
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                        stderr=subprocess.PIPE, text=True)

    def send(self, line):
        self.process.stdin.write(json.dumps(line) + "\n")
        self.process.stdin.flush()

    def next(self):
        return json.loads(self.process.stdout.readline())

    def until(self, wanted):
        """Reads on until an answer (no token) for which wanted(row) holds."""
        while True:
            row = self.next()
            if "token" not in row and wanted(row):
                return row

    def end(self):
        out, errors = self.process.communicate(timeout=120)
        return self.process.returncode, [json.loads(line) for line in out.splitlines()], errors


def test_streaming(bench):
    """Requests come while others run; one is cancelled; a wrong line disturbs nobody; waiting costs nothing."""
    folder, reference = make_model(bench)
    session = Session(bench, folder, "--blocks", 64)
    session.send(request("long", max_new_tokens=200))
    first = session.next()
    bench.check(first.get("id") == "long" and "token" in first, f"a token before the input ends: {first}")
    session.send(request("short", max_new_tokens=3))
    session.send({"id": "wrong", "tokens": "x"})
    wrong = session.until(lambda row: row["id"] == "wrong")
    bench.check(wrong.get("line") == 3 and "error" in wrong, f"the wrong line is answered: {wrong}")
    short = session.until(lambda row: row["id"] == "short")
    bench.check(short.get("tokens") == reference.greedy(PROMPT, 3), "a short one beside the long one")
    session.send({"cancel": "long"})
    session.send({"cancel": "nobody"})
    long = session.until(lambda row: row["id"] == "long")
    tokens = long.get("tokens", [])
    bench.check(long.get("finish_reason") == "cancel" and 0 < len(tokens) < 200
                and tokens[:20] == reference.greedy(PROMPT, 20)[:len(tokens)], f"cancelled after {len(tokens)} tokens")
    before = os.times()
    idle = Path(f"/proc/{session.process.pid}/stat")
    used = lambda: sum(map(int, idle.read_text().rsplit(")", 1)[1].split()[11:13]))
    start = used()
    time.sleep(0.5)
    bench.check(used() - start <= 5, f"idle, it takes {used() - start} ticks in half a second ({before.user:.0f})")
    session.send(request("after"))
    after = session.until(lambda row: row["id"] == "after")
    bench.check(after.get("tokens") == reference.greedy(PROMPT, 24) and after["usage"]["cached"] > 0,
                f"and it goes on: {after.get('usage')}")
    session.send(request("last", n=2, temperature=1.0))
    code, rows, errors = session.end()
    last = [row for row in rows if row["id"] == "last" and "tokens" in row]
    streamed = [[row["token"] for row in rows if row["id"] == "last" and row["index"] == i and "token" in row]
                for i in range(2)]
    bench.check(code == 1 and len(last) == 2 and sorted(streamed) == sorted(row["tokens"] for row in last),
                f"the input ends, what runs is finished: {errors.strip().splitlines()[-1][:70]}")


def test_cancelled_in_the_prompt(bench):
    """A sample cancelled while its prompt is computed, at first or again, leaves what there is of it to the other."""
    folder, reference = make_model(bench)
    prompt = [(5 * i + i * i) % 64 for i in range(100)]
    session = Session(bench, folder, "--blocks", 56, "--prefill-chunk", 1, "--no-prefix-cache")

    def running():
        """Until one request runs and none waits."""
        while True:
            session.send({"stats": True})
            while "stats" not in (row := session.next()):
                pass
            if (row["stats"]["running"], row["stats"]["waiting"]) == (1, 0):
                return

    def end_first(name, tokens, what):
        session.send({"cancel": name, "index": 0})
        first = session.until(lambda row: row["id"] == name)
        second = session.until(lambda row: row["id"] == name)
        bench.check(first.get("finish_reason") == "cancel" and first["tokens"] == tokens,
                    f"{what}: cancelled with {len(first.get('tokens', []))} tokens")
        bench.check(second.get("index") == 1 and second.get("tokens") == reference.greedy(prompt, 60),
                    f"{what}: the other's tokens are the reference's")

    session.send(request("new", tokens=prompt, n=2, max_new_tokens=60))
    running()
    end_first("new", [], "at first")
    session.send(request("again", tokens=prompt, n=2, max_new_tokens=60))
    rows = [session.next() for _ in range(2)]
    # Of the 56 blocks, 25 to 55 hold the first and 2 to 40 this one: as both grow, the first has to go.
    session.send(request("important", tokens=[1] * 8, max_new_tokens=150, priority=1))
    while rows[-1]["id"] != "important" or "tokens" not in rows[-1]:
        rows.append(session.next())
    running()
    tokens = [row["token"] for row in rows if row["id"] == "again" and row["index"] == 0]
    end_first("again", tokens, "again")
    code, _, errors = session.end()
    bench.check(code == 0 and "; 1 preemptions" in errors, errors.strip().splitlines()[-1][-60:])


def test_random_model(bench):
    """tools/random_model.py writes a model that runs, the same one for the same seed."""
    files = []
    for name, seed in (("one", 1), ("same", 1), ("other", 2)):
        shape = "--layers 2 --hidden 32 --heads 4 --kv-heads 2 --head-dim 8 --intermediate 48 --vocab 64"
        subprocess.run([sys.executable, ROOT / "tools/random_model.py", "--out", bench.folder / name,
                        "--seed", str(seed), *shape.split()], check=True, capture_output=True)
        files.append((bench.folder / name / "model.safetensors").read_bytes())
    bench.check(files[0] == files[1] != files[2], f"{len(files[0])} bytes, a seed's own")
    code, answers, errors = bench.run([request("random")], "--block-size", BLOCK, model=bench.folder / "one")
    bench.check(code == 0 and len(answers[0]["tokens"]) == 24, f"it runs: {errors.strip()[-80:]}")


TESTS = {"windows": test_windows, "samples": test_samples, "beams": test_beams, "prefix": test_prefix,
         "preemption": test_preemption, "streaming": test_streaming,
         "cancelled": test_cancelled_in_the_prompt, "random": test_random_model}


def main():
    parser = make_parser(__doc__)
    parser.add_argument("--only", nargs="+", choices=TESTS, default=list(TESTS))
    args = parse(parser)
    bench = Bench(args)
    for name in args.only:
        with tempfile.TemporaryDirectory(prefix="kvleaf-generate-") as folder:
            bench.folder = Path(folder)
            bench.test(name, TESTS[name])
    return bench.result()


if __name__ == "__main__":
    sys.exit(main())
