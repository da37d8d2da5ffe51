#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""kvleaf-generate and its model against the golden continuations, and against bad input.

    test_generate.py [BUILD] [--model models/SmolLM2-135M-Instruct] [--device SUBSTRING] [--only NAME ...]

Protects: greedy tokens equal to those of an independent implementation, batched and alone, at block
sizes 8, 16 and 32; the logits' error with 16-bit caches; results that don't depend on the other
requests, on preemption or on how a prompt is chunked; an error line for each bad request and a
sentence for each bad model file. BUILD is the build folder (default: build). Obtains the model if it is
not there; exits 77 (skipped) where that or the program is not to be had.
"""
import argparse
import json
import math
import os
import shutil
import struct
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MODEL = ROOT / "models" / "SmolLM2-135M-Instruct"
GOLDEN = ROOT / "tests" / "golden" / "smollm2.json"
MARGIN = 1e-3   # below this lead of the best token, rounding decides
NEW_TOKENS = 48   # of the golden file
SKIPPED = 77
# Largest difference of a logit from the reference's, with each dtype of the cache. The logits' spread
# is about 20; measured on PoCL: 1.0e-4, 1.7e-2 and 9.8e-2.
BOUNDS = {"f32": 5e-4, "f16": 5e-2, "bf16": 3e-1}


def make_parser(doc):
    """A parser of what each test of kvleaf-generate may be told."""
    parser = argparse.ArgumentParser(description=doc.splitlines()[0])
    parser.set_defaults(model=None)
    parser.add_argument("build", nargs="?", type=Path, default=ROOT / "build", metavar="BUILD")
    parser.add_argument("--program", type=Path, help="default: BUILD/tools/kvleaf-generate")
    parser.add_argument("--device", default=os.environ.get("KVLEAF_TEST_DEVICE"))
    return parser


def parse(parser):
    """Its arguments; exits as skipped where the program is not built."""
    args = parser.parse_args()
    args.program = args.program or args.build / "tools" / "kvleaf-generate"
    if not args.program.exists():
        print(f"skipped: {args.program} is not built (it needs CLBlast)")
        sys.exit(SKIPPED)
    return args


class Bench:
    """Where the program and the model are, and how often a check held."""

    def __init__(self, args):
        self.program, self.model, self.device = args.program, args.model, args.device
        self.passed = self.failed = 0
        self.folder = None

    def check(self, right, text):
        if right:
            self.passed += 1
        else:
            self.failed += 1
        print(f"  {'ok' if right else 'FAILED'}: {text}", flush=True)

    def test(self, name, function, *what):
        print(f"{name}: {function.__doc__}", flush=True)
        start = time.monotonic()
        function(self, *what)
        print(f"  ({time.monotonic() - start:.1f} s)", flush=True)

    def result(self, skipped=0):
        """The exit status, after a line that counts."""
        print(f"{self.passed} passed, {self.failed} failed, {skipped} skipped")
        return 1 if self.failed else 0

    def run(self, lines, *options, model=None):
        """Runs the program on the request lines; returns (exit code, output objects, stderr)."""
        requests, out = self.folder / "requests.jsonl", self.folder / "out.jsonl"
        text = [line if isinstance(line, (str, bytes)) else json.dumps(line) for line in lines]
        requests.write_bytes(b"\n".join(t.encode() if isinstance(t, str) else t for t in text))
        out.unlink(missing_ok=True)
        command = [str(self.program), "--model", str(model or self.model), "--requests",
                   str(requests), "--out", str(out), *map(str, options)]
        if self.device:
            command += ["--device", self.device]
        done = subprocess.run(command, capture_output=True, text=True)
        answers = out.read_text().splitlines() if out.exists() else []
        return done.returncode, [json.loads(line) for line in answers], done.stderr


def golden():
    return json.loads(GOLDEN.read_text())["prompts"]


def by_id(answers):
    return {answer["id"]: answer for answer in answers}


# ------------------------------------------------------------------------------ the golden file

def first_small_margin(margins):
    return next((i for i, margin in enumerate(margins) if margin <= MARGIN), len(margins))


def compare_free(bench, prompt, answer, what):
    """Free running: the same tokens up to the first step where rounding may decide."""
    steps = min(NEW_TOKENS, first_small_margin(prompt["margins"]))
    same = answer is not None and answer.get("tokens", [])[:steps] == prompt["new"][:steps]
    got = answer.get("tokens", answer) if answer else None
    bench.check(same, f"{what}, {prompt['name']} ({len(prompt['tokens'])} tokens): {steps} greedy "
                f"tokens as the reference" + ("" if same else f"; got {got}, want {prompt['new']}"))


def logit_error(prompt, steps):
    """Largest difference of a logit that both sides report."""
    worst = 0.0
    for i, (ids, values) in enumerate(zip(prompt["top_ids"], prompt["top_logits"])):
        ours = dict(zip(steps["top_ids"][i], steps["top_logits"][i]))
        worst = max([worst] + [abs(ours[t] - v) for t, v in zip(ids, values) if t in ours])
    return worst


def compare_forced(bench, prompt, answer, what, bound):
    """Teacher-forced: arg-max agrees wherever the reference's margin is clear, logits are near."""
    steps = answer["steps"] if answer and "steps" in answer else None
    if steps is None:
        bench.check(False, f"{what}, {prompt['name']}: no steps in {answer}")
        return 0.0
    # With a coarser cache only a lead above twice the logits' bound is clear.
    clear = max(MARGIN, 2 * bound if bound > BOUNDS["f32"] else MARGIN)
    wrong = [i for i, margin in enumerate(prompt["margins"])
             if margin > clear and steps["argmax"][i] != prompt["new"][i]]
    error = logit_error(prompt, steps)
    bench.check(not wrong and error <= bound,
                f"{what}, {prompt['name']}: arg-max agrees at every step with a margin over "
                f"{clear:g}; largest logit error {error:.2e} (limit {bound:g})"
                + (f"; differs at steps {wrong}" if wrong else ""))
    return error


def free_request(prompt):
    return {"id": prompt["name"], "tokens": prompt["tokens"], "max_new_tokens": NEW_TOKENS,
            "stop_tokens": []}


def forced_request(prompt):
    return {"id": prompt["name"] + " forced", "tokens": prompt["tokens"],
            "teacher": prompt["new"]}


def test_golden(bench):
    """Batched with free and forced requests mixed, and alone, at every block size, f32 cache."""
    prompts = golden()
    for block_size in (8, 16, 32):
        requests = [free_request(p) for p in prompts] + [forced_request(p) for p in prompts]
        # Eight at once: the last four wait, and find their prompts' full blocks in the prefix cache.
        _, answers, errors = bench.run(requests, "--block-size", block_size, "--max-batch", 8)
        batched = by_id(answers)
        for number, prompt in enumerate(prompts):
            found = batched.get(prompt["name"] + " forced", {}).get("usage", {}).get("cached", -1)
            full = (len(prompt["tokens"]) - 1) // block_size * block_size
            bench.check(found == 0 if number < 2 else found >= full,
                        f"batched, block {block_size}, {prompt['name']}: {found} prompt tokens found in the cache")
        for prompt in prompts:
            compare_free(bench, prompt, batched.get(prompt["name"]), f"batched, block {block_size}")
            compare_forced(bench, prompt, batched.get(prompt["name"] + " forced"),
                           f"batched, block {block_size}", BOUNDS["f32"])
        # One at a time in one process, so that the model is loaded once.
        _, answers, errors = bench.run([free_request(p) for p in prompts],
                                       "--block-size", block_size, "--max-batch", 1)
        alone = by_id(answers)
        for prompt in prompts:
            compare_free(bench, prompt, alone.get(prompt["name"]), f"alone, block {block_size}")
        other = [p["name"] for p in prompts if alone.get(p["name"], {}).get("tokens", "none")
                 != batched.get(p["name"], {}).get("tokens", [])]
        bench.check(not other, f"block {block_size}: batched and alone give the same tokens"
                    + (f", but for {other}: {errors[-300:]}" if other else ""))


def test_cache_dtypes(bench):
    """Half and bfloat16 caches: the logits stay within their bounds, teacher-forced, in three of the prompts."""
    prompts = golden()[::2]
    for dtype in ("f16", "bf16"):
        _, answers, _ = bench.run([forced_request(p) for p in prompts], "--kv-dtype", dtype)
        found = by_id(answers)
        worst = max(compare_forced(bench, p, found.get(p["name"] + " forced"), f"{dtype} cache",
                                   BOUNDS[dtype]) for p in prompts)
        print(f"  {dtype} cache: largest logit error {worst:.3e}")


def test_independence(bench):
    """Preemption, chunking and company change no token and no logit."""
    prompts = golden()[:4]
    forced = [forced_request(p) for p in prompts]
    sampled = [{"id": f"sampled {seed}", "tokens": prompts[1]["tokens"], "max_new_tokens": 24,
                "temperature": 0.9, "top_p": 0.95, "seed": seed, "stop_tokens": []}
               for seed in (1, 2, 2**53)]
    _, calm, _ = bench.run(forced + sampled)
    # Five that begin in 9 blocks and would grow to 18, then two that must wait: 13 are too few.
    code, tight, errors = bench.run(forced[:2] + sampled + forced[2:], "--blocks", 13, "--prefill-chunk", 24)
    _, alone, _ = bench.run(sampled[:1])
    calm, tight, alone = by_id(calm), by_id(tight), by_id(alone)
    bench.check(code == 0, "a pool too small for all at once still finishes everything")
    bench.check(" preemptions" in errors and " 0 preemptions" not in errors,
                f"some request was preempted on the way: {errors.strip()[-120:]}")
    for prompt in prompts:
        name = prompt["name"] + " forced"
        bench.check(name in calm and calm[name].get("steps") == tight.get(name, {}).get("steps"),
                    f"{name}: logits are bit for bit the same after chunking and preemption")
    for request in sampled:
        name = request["id"]
        bench.check(name in calm and calm[name].get("tokens") == tight.get(name, {}).get("tokens"),
                    f"{name}: the same tokens in other company")
    bench.check(calm.get("sampled 1", {}).get("tokens") == alone.get("sampled 1", {}).get("tokens"),
                "sampled 1: the same tokens alone")
    bench.check(calm.get("sampled 1", {}).get("tokens") != calm.get("sampled 2", {}).get("tokens"),
                "another seed gives other tokens")


# ------------------------------------------------------------------------------ what is refused

def test_requests(bench):
    """Each bad request gets its error line with value and limit; the good ones go on."""
    good = {"id": "good", "tokens": [504, 3575, 282, 4649, 314], "max_new_tokens": 5,
            "stop_tokens": []}
    stop = {"id": "stop", "tokens": [504, 3575, 282, 4649, 314], "stop_tokens": [198]}

    def bad(**changes):
        return {**good, "id": "bad", **changes}

    huge = list(range(2000))
    cases = [  # line, id expected, status, words expected in the message
        ("{not json", None, "INVALID", ["JSON"]),
        ('{"id": "x", "tokens": [1], "temperature": NaN}', None, "INVALID", ["JSON", "NaN"]),
        (b'\xff\xfe{"id"', None, "INVALID", ["JSON"]),
        ("[1, 2]", None, "INVALID", ["array"]),
        ('{"id": "cut", "tokens": [1, 2', None, "INVALID", ["JSON"]),
        ({"tokens": [1]}, None, "INVALID", ["id"]),
        ({"id": "bad"}, "bad", "INVALID", ["tokens", "missing"]),
        (bad(tokens=[]), "bad", "INVALID", ["tokens", "empty"]),
        (bad(tokens="hello"), "bad", "INVALID", ["tokens", "string"]),
        (bad(tokens=[1, "2"]), "bad", "INVALID", ["tokens[1]", "string"]),
        (bad(tokens=[1, 49152]), "bad", "INVALID", ["tokens[1]", "49152", "49151"]),
        (bad(tokens=[-1]), "bad", "INVALID", ["tokens[0]", "-1"]),
        (bad(tokens=[1.5]), "bad", "INVALID", ["tokens[0]", "1.5"]),
        (bad(tokens=[1e300]), "bad", "INVALID", ["tokens[0]", "49151"]),
        ('{"id": "bad", "tokens": [1], "temperature": 1e999}', "bad", "INVALID",
         ["temperature", "inf"]),
        (bad(temperature="NaN"), "bad", "INVALID", ["temperature", "string"]),
        (bad(temperature=-0.5), "bad", "INVALID", ["temperature", "-0.5", "0"]),
        (bad(top_p=0), "bad", "INVALID", ["top_p", "0", "1"]),
        (bad(top_p=1.5), "bad", "INVALID", ["top_p", "1.5", "1"]),
        (bad(top_p=True), "bad", "INVALID", ["top_p", "boolean"]),
        (bad(seed=-1), "bad", "INVALID", ["seed", "-1"]),
        (bad(seed=0.5), "bad", "INVALID", ["seed", "0.5"]),
        (bad(max_new_tokens=0), "bad", "INVALID", ["max_new_tokens", "0", "1"]),
        (bad(stop_tokens=[50000]), "bad", "INVALID", ["stop_tokens[0]", "50000", "49151"]),
        (bad(n=0), "bad", "INVALID", ["n is 0", "1"]),
        (bad(n=17), "bad", "INVALID", ["n is 17", "16", "--max-batch"]),
        (bad(n=3, max_new_tokens=400), "bad", "NO_BLOCKS", ["3 samples", "78 blocks", "64"]),
        (bad(beam=65), "bad", "INVALID", ["beam is 65", "64"]),
        (bad(beam=2, n=3), "bad", "INVALID", ["n is 3", "2"]),
        (bad(beam=2, temperature=0.5), "bad", "INVALID", ["temperature", "0.5", "beam"]),
        (bad(beam=2, teacher=[1]), "bad", "INVALID", ["teacher", "2"]),
        (bad(priority=4), "bad", "INVALID", ["priority", "4", "3"]),
        (bad(salt=0.5), "bad", "INVALID", ["salt", "0.5"]),
        ({"cancel": [1]}, None, "INVALID", ["cancel", "array"]),
        (bad(colour="red"), "bad", "INVALID", ["colour"]),
        (bad(max_new_tokens=9000), "bad", "INVALID", ["9000", "8192"]),
        (bad(tokens=huge), "bad", "NO_BLOCKS", ["126 blocks", "64"]),
        (bad(max_new_tokens=1200), "bad", "NO_BLOCKS", ["1200", "76 blocks", "64"]),
    ]
    lines = [good] + [case[0] for case in cases] + ["", "   ", stop]
    code, answers, errors = bench.run(lines, "--blocks", 64)
    failed = {a["line"]: a for a in answers if "error" in a}
    answered = {a["id"]: a for a in answers if "error" not in a}
    bench.check(code == 1, f"exit code is 1 where a request failed: {code} {errors[-200:]}")
    for number, (line, want_id, status, words) in enumerate(cases, start=2):
        answer = failed.get(number, {"id": "none", "error": {"status": "none", "message": ""}})
        message = answer["error"]["message"]
        shown = line if isinstance(line, str) else json.dumps(line) if isinstance(line, dict) else str(line)
        bench.check(answer["id"] == want_id and answer["error"]["status"] == "KVLEAF_" + status
                    and all(word in message for word in words),
                    f"{shown[:60]}: {answer['error']['status']} {message}")
    bench.check(len(failed) == len(cases), f"{len(failed)} error lines for {len(cases)} bad lines")
    bench.check(answered.get("good", {}).get("tokens") == [7042, 30, 198, 198, 504],
                "the good request among them has its tokens")
    bench.check(answered.get("stop", {}).get("tokens") == [7042, 30, 198]
                and answered["stop"]["finish_reason"] == "stop", "a stop token ends a request")
    usage = answered.get("good", {}).get("usage")
    bench.check(usage == {"prompt": 5, "cached": 0, "generated": 5, "peak_blocks": 1,
                          "shared_blocks": 0}, f"usage of the good request: {usage}")


def test_usage(bench):
    """Exit codes and the standard options."""
    run = lambda *options: subprocess.run([str(bench.program), *options], capture_output=True, text=True)
    done = run("--help")
    bench.check(done.returncode == 0 and "--prefill-chunk" in done.stdout, "--help")
    done = run("--version")
    bench.check(done.returncode == 0 and done.stdout.startswith("kvleaf-generate "), "--version")
    for options in (["--nonsense"], [], ["--model", "x"], ["--block-size", "0"],
                    ["--kv-dtype", "f8"], ["--max-batch", "many"]):
        done = run(*options)
        bench.check(done.returncode == 2 and done.stdout == "" and done.stderr != "",
                    f"{' '.join(options) or 'no option'}: exit 2, {done.stderr.splitlines()[:1]}")
    code, _, errors = bench.run([], model=bench.folder / "nowhere")
    bench.check(code == 1 and "nowhere/config.json" in errors, f"no such model: {errors.strip()}")


def small_model(folder, **changes):
    """A Llama-shaped model of one layer, small enough to break in many ways; returns its config and tensors."""
    folder.mkdir()
    config = {"model_type": "llama", "hidden_act": "silu", "vocab_size": 64, "hidden_size": 32,
              "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2,
              "num_key_value_heads": 1, "max_position_embeddings": 128, "rms_norm_eps": 1e-5,
              "rope_theta": 10000.0, "tie_word_embeddings": False, "eos_token_id": 2, **changes}
    (folder / "config.json").write_text(json.dumps(config))
    shapes = {"model.embed_tokens.weight": [64, 32], "lm_head.weight": [64, 32], "model.norm.weight": [32]}
    for layer in (f"model.layers.{i}." for i in range(config["num_hidden_layers"])):
        shapes.update({layer + "input_layernorm.weight": [32],
                       layer + "post_attention_layernorm.weight": [32],
                       layer + "self_attn.q_proj.weight": [32, 32],
                       layer + "self_attn.k_proj.weight": [16, 32],
                       layer + "self_attn.v_proj.weight": [16, 32],
                       layer + "self_attn.o_proj.weight": [32, 32],
                       layer + "mlp.gate_proj.weight": [48, 32], layer + "mlp.up_proj.weight": [48, 32],
                       layer + "mlp.down_proj.weight": [32, 48]})
    return config, {name: (shape, [math.sin(sum(map(ord, name)) + 1.7 * i) / 4
                                   for i in range(math.prod(shape))])
                    for name, shape in shapes.items()}


def test_streams(bench):
    """Standard input and output, tokens as they come, and CLBlast's parameters from a file."""
    folder = bench.folder / "small"
    _, tensors = small_model(folder)
    write_model(folder / "model.safetensors", tensors)
    device = ["--device", bench.device] if bench.device else []
    request = json.dumps({"id": 7, "tokens": [3, 1, 4], "max_new_tokens": 3, "stop_tokens": []})
    done = subprocess.run([str(bench.program), "--model", str(folder), "--requests", "-", "--out", "-",
                           "--stream", "--json", "--blocks", "4", *device], input=request,
                          capture_output=True, text=True, check=False)
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    tokens = [row["token"] for row in rows if "token" in row]
    bench.check(done.returncode == 0 and len(rows) == 5 and rows[3].get("tokens") == tokens
                and len(tokens) == 3 and all(row.get("id") == 7 for row in rows[:4])
                and rows[4].get("summary", {}).get("generated") == 3,
                f"3 token lines, their answer, a summary: {done.stdout.splitlines()[:4] or done.stderr}")
    params = bench.folder / "params.json"
    for text, words in [(None, ["params.json"]), ("[]", ["params.json", "object"]),
                        ('{"Xgemm": {"MWG": 64}}', ["params.json", "Xgemm"]),
                        ('{"Xgemm": {"MWG": -64}}', ["params.json", "MWG"]),
                        ('{"Nonsense": {"MWG": 64}}', ["params.json", "Nonsense"])]:
        if text is not None:
            params.write_text(text)
        code, answers, errors = bench.run([], "--clblast-params", params, model=folder)
        bench.check(code == 1 and not answers and all(word in errors for word in words),
                    f"--clblast-params with {text or 'no file'}: {errors.strip()}")


def test_text(bench):
    """tools/generate.py: text in, text out."""
    command = [sys.executable, str(ROOT / "tools" / "generate.py"), "--program", str(bench.program),
               "--model", str(bench.model), "--max-new-tokens", "5"]
    command += ["--device", bench.device] if bench.device else []
    done = subprocess.run([*command, "--json", "--raw", "The capital of France is", "--prompt", "One, two,"],
                          capture_output=True, text=True, check=False)
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    bench.check(done.returncode == 0 and len(rows) == 2 and rows[0]["tokens"] == [7042, 30, 198, 198, 504]
                and rows[0]["text"] == " Paris.\n\nThe" and rows[1]["text"],
                f"two prompts as they are: {[row.get('text') for row in rows] or done.stderr}")
    done = subprocess.run([*command, "What is the capital of France?"], capture_output=True, text=True, check=False)
    bench.check(done.returncode == 0 and done.stdout.startswith("> What is the capital of France?\nThe capital of")
                and "1 answer, 5 tokens" in done.stderr, f"a chat: {done.stdout!r} {done.stderr.strip()[-200:]}")
    done = subprocess.run([*command, "--top-p", "0", "Hello"], capture_output=True, text=True, check=False)
    bench.check(done.returncode == 1 and "top_p is 0" in done.stdout, f"a refused request: {done.stdout!r}")
    done = subprocess.run([*command, ""], capture_output=True, text=True, check=False)
    bench.check(done.returncode == 2, f"an empty prompt is bad usage: {done.stderr.strip()[-60:]}")


def encode(values, dtype):
    if dtype == "BF16":  # exact for values that are multiples of a bfloat16
        return b"".join(struct.pack("<f", v)[2:] for v in values)
    return struct.pack(f"<{len(values)}{'f' if dtype == 'F32' else 'e'}", *values)


def write_model(path, tensors, dtype="F32", change=None):
    """Writes a safetensors file; change(header) may break its header first."""
    header, data = {"__metadata__": {"format": "pt"}}, b""
    for name, (shape, values) in tensors.items():
        piece = encode(values, dtype)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [len(data), len(data) + len(piece)]}
        data += piece
    if change:
        change(header)
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def test_model_files(bench):
    """A model file cut short or altered is refused with tensor, value and limit."""
    folder = bench.folder / "small"
    config, tensors = small_model(folder)
    path = folder / "model.safetensors"
    request = [{"id": "a", "tokens": [3, 1, 4, 1, 5], "max_new_tokens": 4, "stop_tokens": []}]
    run = lambda: bench.run(request, "--blocks", 4, model=folder)
    q = "model.layers.0.self_attn.q_proj.weight"

    # Values that every dtype holds exactly, so that all three files are one model.
    exact = {n: (s, [struct.unpack("<f", b"\0\0" + struct.pack("<f", v)[2:])[0]
                     if abs(v) > 1e-4 else 0.0 for v in values]) for n, (s, values) in tensors.items()}
    results = []
    for dtype in ("F32", "F16", "BF16"):
        write_model(path, exact, dtype)
        code, answers, errors = run()
        results.append(answers[0].get("tokens") if code == 0 and answers else errors)
    bench.check(isinstance(results[0], list) and results[0] == results[1] == results[2],
                f"untied weights in F32, F16 and BF16 give the same tokens: {results}")

    def refused(what, words):
        code, answers, errors = run()
        bench.check(code == 1 and not answers and all(word in errors for word in words),
                    f"{what}: {errors.strip().splitlines()[-1] if errors.strip() else code}")

    whole = None
    for what, change, words in [
        ("an offset beyond the file", lambda h: h[q].update(data_offsets=[0, 10**9]), [q, "1000000000"]),
        ("offsets in the wrong order", lambda h: h[q].update(data_offsets=[64, 0]), [q, "64"]),
        ("a negative offset", lambda h: h[q].update(data_offsets=[-4, 0]), [q]),
        ("offsets over another tensor", lambda h: h[q].update(data_offsets=[0, 4096]), ["4096"]),
        ("offsets that don't fit the shape", lambda h: h[q].update(shape=[32, 31]), [q, "4096", "3968"]),
        ("a wrong shape", lambda h: h[q].update(shape=[64, 16]), [q, "[64, 16]", "[32, 32]"]),
        ("a wrong rank", lambda h: h[q].update(shape=[1024]), [q, "[1024]", "[32, 32]"]),
        ("a shape that overflows", lambda h: h[q].update(shape=[2**40, 2**40]), [q, "2^53"]),
        ("a dtype that is no float", lambda h: h[q].update(dtype="I32"), [q, "I32", "BF16"]),
        ("an unknown dtype", lambda h: h[q].update(dtype="Q4_1"), [q, "Q4_1"]),
        ("a missing tensor", lambda h: h.update({"other": h.pop(q)}), [q, "missing"]),
        ("an entry that is no object", lambda h: h.update({q: 7}), [q]),
    ]:
        write_model(path, tensors, change=change)
        refused(what, words)
    write_model(path, tensors)
    whole = path.read_bytes()
    for what, data, words in [
        ("cut short in the data", whole[:-100], ["data bytes", "cut short"]),
        ("cut short in the header", whole[:100], ["header length", "100 bytes"]),
        ("cut short in the first 8 bytes", whole[:5], ["5 bytes"]),
        ("empty", b"", ["0 bytes"]),
        ("bytes behind the last tensor", whole + b"1234", ["data bytes"]),
        ("a header length over the limit", struct.pack("<Q", 2**62) + whole[8:], [str(2**62), "100000000"]),
        ("a header that is no JSON", whole[:8] + b"!" + whole[9:], ["no JSON"]),
        ("a header that is an array", struct.pack("<Q", 2) + b"[]", ["object"]),
    ]:
        path.write_bytes(data)
        refused(what, words)
    path.write_bytes(whole)

    for field, value, words in [
        ("rope_scaling", {"rope_type": "yarn", "factor": 4.0}, ["rope_scaling", "yarn"]),
        ("model_type", "gpt2", ["model_type", "gpt2"]),
        ("attention_bias", True, ["attention_bias"]),
        ("quantization_config", {"bits": 4}, ["quantization_config"]),
        ("num_key_value_heads", 3, ["num_key_value_heads", "3"]),
        ("hidden_size", 0, ["hidden_size", "0"]),
        ("intermediate_size", 40, ["gate_proj", "[48, 32]", "[40, 32]"]),
        ("vocab_size", "many", ["vocab_size"]),
    ]:
        (folder / "config.json").write_text(json.dumps({**config, field: value}))
        refused(f"config.json with {field} {json.dumps(value)}", words)
    (folder / "config.json").write_text("{")
    refused("config.json that is no JSON", ["config.json"])


def test_cut_model(bench):
    """The real model file, cut short and with one offset altered."""
    folder = bench.folder / "cut"
    folder.mkdir()
    shutil.copy(bench.model / "config.json", folder)
    source = bench.model / "model.safetensors"
    with open(source, "rb") as file:
        length = struct.unpack("<Q", file.read(8))[0]
        header = file.read(length)
        (folder / "model.safetensors").write_bytes(struct.pack("<Q", length) + header + file.read(1 << 20))
    code, answers, errors = bench.run([], model=folder)
    bench.check(code == 1 and not answers and "cut short" in errors and "tensor" in errors,
                f"cut short: {errors.strip()}")
    size = source.stat().st_size - 8 - length
    altered = json.loads(header)
    name = "model.layers.7.mlp.up_proj.weight"
    altered[name]["data_offsets"][1] += 4
    text = json.dumps(altered).encode()
    with open(folder / "model.safetensors", "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + size)
    code, answers, errors = bench.run([], model=folder)
    bench.check(code == 1 and not answers and name in errors, f"one offset altered: {errors.strip()}")


TESTS = {"usage": test_usage, "requests": test_requests, "model-files": test_model_files,
         "streams": test_streams,
         "text": test_text, "cut-model": test_cut_model, "golden": test_golden,
         "cache-dtypes": test_cache_dtypes,
         "independence": test_independence}


def main():
    parser = make_parser(__doc__)
    parser.add_argument("--model", type=Path, default=MODEL)
    parser.add_argument("--only", nargs="+", choices=TESTS, default=list(TESTS))
    args = parse(parser)
    if not (args.model / "model.safetensors").exists():
        done = subprocess.run([sys.executable, str(ROOT / "tools" / "get_model.py"), "--out", str(args.model)],
                              check=False)
        if done.returncode != 0:
            print(f"skipped: no model in {args.model} and none to be had")
            return SKIPPED
    bench = Bench(args)
    with tempfile.TemporaryDirectory(prefix="kvleaf-generate-") as folder:
        bench.folder = Path(folder)
        for name in args.only:
            bench.test(name, TESTS[name])
            for left in bench.folder.iterdir():
                shutil.rmtree(left) if left.is_dir() else left.unlink()
    return bench.result()


if __name__ == "__main__":
    sys.exit(main())
