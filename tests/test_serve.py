#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""tools/serve.py as its clients see it, on a model small enough for thousands of tokens a second.

    test_serve.py [BUILD] [--device SUBSTRING] [--seconds 20] [--seed N] [--only NAME ...]

Protects: answers of the openai client, streamed and whole, equal to what kvleaf-generate says alone; stop strings;
samples that share their prompt and prompts found in the prefix cache; an error of the API's for each bad request;
keys; a full queue; blocks that are free once a client hangs up; a kvleaf-generate that dies; many clients at once, some
hanging up, some wrong. BUILD is the build folder (default: build).
"""
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from serve_support import CONTEXT, JSON, SERVE, VOCABULARY, Server, gone, make_model
from test_generate import Bench, make_parser, parse

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
MAX_BATCH, MAX_BODY = 8, 100_000
SYSTEM = "You answer in noise, at length, and without an end in sight; nobody will mind."
STEPS = 40


def user(text, system=None):
    return ([{"role": "system", "content": system}] if system else []) + [{"role": "user", "content": text}]


def rendered(messages):
    """What the model's template makes of them."""
    return "".join(f"<s>{m['role']}: {m['content']}<e>" for m in messages) + "<s>assistant: "


class Alone:
    """What kvleaf-generate answers by itself: one request at a time, nothing shared."""

    def __init__(self, bench, folder):
        from tokenizers import Tokenizer

        self.bench, self.folder = bench, folder
        self.tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))

    def texts(self, prompts, steps=STEPS, **fields):
        """The text after each prompt, which is a list of messages or a text."""
        lines = [{"id": i, "max_new_tokens": steps, "tokens": self.tokenizer.encode(
            rendered(p) if isinstance(p, list) else p).ids, **fields} for i, p in enumerate(prompts)]
        code, rows, errors = self.bench.run(lines, "--max-batch", 1, "--no-prefix-cache", model=self.folder)
        assert code == 0, errors
        return [self.tokenizer.decode(row["tokens"]) for row in sorted(rows, key=lambda row: row["id"])]


def collect(stream):
    """What a streamed answer came to: {index: (text, finish_reason)} and the usage, if it came."""
    texts, reasons, usage, opened = {}, {}, None, set()
    for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            text = getattr(choice, "text", None)
            if text is None:
                opened |= {choice.index} if choice.delta.role == "assistant" else set()
                text = choice.delta.content or ""
            assert choice.index not in reasons, "text after the end"
            texts[choice.index] = texts.get(choice.index, "") + text
            if choice.finish_reason:
                reasons[choice.index] = choice.finish_reason
    return {i: (texts[i], reasons.get(i)) for i in texts}, usage


# --------------------------------------------------------------------------------- what is served

def test_answers(bench, server, alone):
    """Chat and text, whole and streamed, say what kvleaf-generate says alone."""
    client, model = server.client(), server.model
    chats = [user("Hello"), user("Name three rivers.", SYSTEM), user("é😀 ünïcode\n\n")]
    chats.append([*user("One"), {"role": "assistant", "content": "two"}, *user("Three")])
    for messages, want in zip(chats, alone.texts(chats)):
        ask = {"model": model, "messages": messages, "max_tokens": STEPS, "temperature": 0}
        whole = client.chat.completions.create(**ask)
        streamed, usage = collect(client.chat.completions.create(**ask, stream=True,
                                                                 stream_options={"include_usage": True}))
        choice = whole.choices[0]
        bench.check(choice.message.content == want and choice.finish_reason == "length",
                    f"chat: {want[:20]!r} ... as alone")
        bench.check(streamed == {0: (want, "length")}, f"and the same as a stream: {streamed[0][0][:20]!r}")
        counts = [(u.prompt_tokens, u.completion_tokens, u.total_tokens) for u in (whole.usage, usage)]
        tokens = len(alone.tokenizer.encode(rendered(messages)).ids)
        bench.check(counts == [(tokens, STEPS, tokens + STEPS)] * 2, f"usage: {counts}")
    parts = [{"role": "developer", "content": [{"type": "text", "text": "Name "}, {"type": "text", "text": "it."}]},
             *user("Now")]
    got = client.chat.completions.create(model=model, messages=parts, max_completion_tokens=9, temperature=0, user="me")
    want = alone.texts([user("Now", "Name it.")], 9)[0]
    bench.check(got.choices[0].message.content == want, "parts of text are one text, a developer is the system")
    texts = ["Once upon", "a time there", [3, 40, 50, 60]]
    wants = alone.texts(texts[:2], 16) + alone.texts([alone.tokenizer.decode(texts[2])], 16)
    ask = {"model": model, "temperature": 0}
    got = client.completions.create(prompt=texts[:2], **ask)
    bench.check([c.text for c in got.choices] == wants[:2] and [c.index for c in got.choices] == [0, 1],
                "completions of two texts, 16 tokens where nobody says how many")
    streamed, _ = collect(client.completions.create(prompt=texts[:2], **ask, stream=True))
    bench.check(streamed == {i: (w, "length") for i, w in enumerate(wants[:2])}, "and the same as a stream")
    got = client.completions.create(prompt=texts[2], **ask)
    bench.check(got.choices[0].text == wants[2], "a completion of token ids")
    names = [m.id for m in client.models.list()] + [client.models.retrieve(model).id]
    bench.check(names == [model] * 2, f"models: {names}")
    bench.check(server.get("/health") == (200, {"status": "ok"}), "/health")


def test_samples(bench, server, alone):
    """n choices hold the prompt's blocks once; each is that of its seed; a system prompt is computed once."""
    client, model = server.client(), server.model
    messages = user("Tell me of blocks that three of us share.", SYSTEM)
    ask = {"model": model, "messages": messages, "max_tokens": STEPS, "temperature": 0.8, "top_p": 0.9}
    before = server.metrics()
    three = client.chat.completions.create(**ask, n=3, seed=7)
    after = server.metrics()
    texts = [c.message.content for c in three.choices]
    wants = [alone.texts([messages], temperature=0.8, top_p=0.9, seed=7 + i)[0] for i in range(3)]
    bench.check(texts == wants and len(set(texts)) == 3, f"three samples, those of seeds 7, 8, 9: {texts[0][:16]!r}")
    streamed, _ = collect(client.chat.completions.create(**ask, n=3, seed=7, stream=True))
    bench.check([streamed[i][0] for i in range(3)] == wants, "and the same as a stream")
    prompt = three.usage.prompt_tokens
    full, held = prompt // 16, -(-(prompt + STEPS - 1) // 16)
    shared = three.usage.kvleaf["shared_blocks"]
    counted = [after[n] - before[n] for n in ("kvleaf_choice_blocks_total", "kvleaf_choice_blocks_shared_total")]
    bench.check(three.usage.completion_tokens == 3 * STEPS and all(full <= s <= full + 1 for s in shared)
                and counted == [3 * held, sum(shared)],
                f"{prompt} prompt tokens: each shared {shared} of its {held} blocks, and /metrics adds {counted}")
    again = client.chat.completions.create(model=model, messages=user("Something else", SYSTEM), max_tokens=2)
    common = len(os.path.commonprefix([rendered(messages), rendered(user("Something else", SYSTEM))]))
    cached = again.usage.prompt_tokens_details.cached_tokens
    # The special tokens are one each, of three letters.
    bench.check(common - 16 - 6 <= cached <= common, f"the same system prompt: {cached} tokens found in the cache")
    seeds = [client.chat.completions.create(**ask, seed=s).choices[0].message.content for s in (-1, -1, 2**62)]
    free = [client.chat.completions.create(**ask).choices[0].message.content for _ in range(2)]
    bench.check(seeds[0] == seeds[1] != seeds[2] and free[0] != free[1], "a seed repeats, none does not")
    sure = client.chat.completions.create(**{**ask, "top_p": 0}).choices[0].message.content
    bench.check(sure == alone.texts([messages])[0], "top_p 0 leaves the best token")


def test_stops(bench, server, alone):
    """Text ends before a stop string, which is never shown, wherever it lies over the tokens."""
    client, model = server.client(), server.model
    messages = user("Until when?")
    text = alone.texts([messages], 80)[0]
    ask = {"model": model, "messages": messages, "max_tokens": 80, "temperature": 0}
    cases = [("a piece of nine", [text[30:39]]), ("the first letter", [text[0]]), ("the last letters", [text[-4:]]),
             ("the earlier of two", [text[50:54], text[20:24]]), ("one never found", [text[10:14] + "\0"]),
             ("one that overlaps another's beginning", [text[40:45] + "\0", text[43:48]]),
             ("one inside another", [text[20:30], text[24:27]]),
             ("four, one of them there", ["\1\1", "\1\2", "\1\3", text[25:28]]), ("a string, no list", text[33:40])]
    for what, stops in cases:
        found = [(text.find(s) + len(s), text.find(s)) for s in ([stops] if isinstance(stops, str) else stops)]
        cut = min((place for place in found if place[1] >= 0), default=(0, None))[1]
        want = (text if cut is None else text[:cut], "length" if cut is None else "stop")
        whole = client.chat.completions.create(**ask, stop=stops)
        choice = whole.choices[0]
        streamed, _ = collect(client.chat.completions.create(**ask, stop=stops, stream=True))
        bench.check((choice.message.content, choice.finish_reason) == want, f"{what}: {choice.message.content[-12:]!r}")
        bench.check(streamed == {0: want}, f"{what}, streamed: {streamed[0][0][-12:]!r}")
        spent = whole.usage.completion_tokens
        bench.check(spent == 80 if cut is None else spent < 80, f"{what}: {spent} tokens")
    sampled = {**ask, "n": 4, "seed": 3, "temperature": 1.0}
    texts = [c.message.content for c in client.chat.completions.create(**sampled).choices]
    stop = texts[1][20:22]
    got = [c.message.content for c in client.chat.completions.create(**sampled, stop=stop).choices]
    bench.check(got == [t.split(stop)[0] for t in texts] and len(got[1]) <= 20,
                "one of four choices stops, others go on")
    stats = server.until(lambda s: s["used"] == 0)
    bench.check(stats["used"] == 0 and stats["running"] == 0, "what was stopped holds no blocks")


# --------------------------------------------------------------------------------- what is refused

def bad_requests(model):
    """(what, path, body or object, status, code, words of the message)"""
    def chat(**changes):
        return {"model": model, "messages": user("Hello"), "max_tokens": 4, **changes}

    def text(**changes):
        return {"model": model, "prompt": "Hello", "max_tokens": 4, **changes}

    return [
        ("no JSON", CHAT, b"{nonsense", 400, None, ["JSON", "character 1"]),
        ("a body cut short", CHAT, json.dumps(chat()).encode()[:-9], 400, None, ["JSON"]),
        ("no body", CHAT, b"", 400, None, ["JSON"]),
        ("broken UTF-8", CHAT, b'{"messages": "\xff\xfe"}', 400, None, ["UTF-8", "byte 14", "0xff"]),
        ("half a surrogate pair", CHAT, b'{"messages": [{"role": "user", "content": "\\ud800"}]}', 400, None,
         ["surrogate", "d800"]),
        ("NaN", CHAT, b'{"temperature": NaN}', 400, None, ["NaN"]),
        ("a number of 5000 digits", CHAT, b'{"seed": ' + b"1" * 5000 + b"}", 400, None, ["JSON"]),
        ("a deep nest", CHAT, b"[" * 50000, 400, None, ["deep"]),
        ("an array", CHAT, b"[1]", 400, None, ["an array"]),
        ("an infinite temperature", CHAT, b'{"messages": [{"role": "user", "content": "x"}], "temperature": 1e999}',
         400, "invalid_value", ["temperature", "Infinity", "0 .. 2"]),
        ("another model", CHAT, chat(model="gpt-4"), 404, "model_not_found", ["gpt-4", model]),
        ("no messages", CHAT, {"model": model}, 400, "invalid_type", ["messages", "null"]),
        ("empty messages", CHAT, chat(messages=[]), 400, "empty_array", ["messages", "1"]),
        ("a strange role", CHAT, chat(messages=[{"role": "tool", "content": "x"}]), 400, "invalid_value",
         ["messages[0].role", "tool", "assistant"]),
        ("an image", CHAT, chat(messages=[{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]), 400,
         "unsupported_parameter", ["messages[0].content[0].type", "image_url"]),
        ("a number as content", CHAT, chat(messages=[{"role": "user", "content": 1}]), 400, "invalid_type", ["number"]),
        ("what the template refuses", CHAT, chat(messages=[{"role": "assistant", "content": "x"}]), 400,
         "invalid_value", ["a user speaks first"]),
        ("n over the batch", CHAT, chat(n=MAX_BATCH + 1), 400, "invalid_value", ["n is 9", "8", "batch"]),
        ("n of 0", CHAT, chat(n=0), 400, "invalid_value", ["n is 0", "1 .. 8"]),
        ("n of true", CHAT, chat(n=True), 400, "invalid_type", ["n is true"]),
        ("a temperature of text", CHAT, chat(temperature="hot"), 400, "invalid_type", ["temperature", "string"]),
        ("too hot", CHAT, chat(temperature=2.5), 400, "invalid_value", ["temperature", "2.5", "0 .. 2"]),
        ("top_p of 2", CHAT, chat(top_p=2), 400, "invalid_value", ["top_p", "2", "0 .. 1"]),
        ("half a seed", CHAT, chat(seed=0.5), 400, "invalid_type", ["seed", "0.5", "whole"]),
        ("a long stop list", CHAT, chat(stop=list("abcde")), 400, "array_above_max_length", ["stop", "5", "4"]),
        ("an empty stop", CHAT, chat(stop=[""]), 400, "invalid_value", ["stop"]),
        ("a long stop", CHAT, chat(stop="x" * 1001), 400, "string_above_max_length", ["1001", "1000"]),
        ("no tokens wanted", CHAT, chat(max_tokens=0), 400, "invalid_value", ["max_tokens", "0", "1 .."]),
        ("more than the context", CHAT, chat(max_tokens=CONTEXT + 1), 400, "invalid_value", [str(CONTEXT + 1),
                                                                                            str(CONTEXT)]),
        ("prompt and answer over the context", CHAT, chat(max_tokens=CONTEXT - 3), 400, "context_length_exceeded",
         ["prompt tokens", str(CONTEXT)]),
        ("the same, streamed", CHAT, chat(max_tokens=CONTEXT - 3, stream=True), 400, "context_length_exceeded",
         [str(CONTEXT)]),
        ("a prompt over the context", CHAT, chat(messages=user("x" * CONTEXT)), 400, "context_length_exceeded",
         ["tokens", str(CONTEXT)]),
        ("two limits", CHAT, chat(max_completion_tokens=4), 400, "invalid_value", ["max_completion_tokens"]),
        ("an unknown field", CHAT, chat(colour="red"), 400, "unknown_parameter", ["colour"]),
        ("tools", CHAT, chat(tools=[{"type": "function"}]), 400, "unsupported_parameter", ["tools"]),
        ("logprobs", CHAT, chat(logprobs=True), 400, "unsupported_parameter", ["logprobs", "true"]),
        ("a penalty", CHAT, chat(frequency_penalty=0.5), 400, "unsupported_parameter", ["frequency_penalty", "0.5"]),
        ("a response format", CHAT, chat(response_format={"type": "json_object"}), 400, "unsupported_parameter",
         ["response_format", "json_object"]),
        ("stream options without a stream", CHAT, chat(stream_options={"include_usage": True}), 400, "invalid_value",
         ["stream_options"]),
        ("a stream of 1", CHAT, chat(stream=1), 400, "invalid_type", ["stream", "number"]),
        ("no prompt", COMPLETIONS, {"model": model}, 400, "invalid_type", ["prompt", "null"]),
        ("an empty prompt", COMPLETIONS, text(prompt=""), 400, "invalid_value", ["prompt", "empty"]),
        ("a token that is none", COMPLETIONS, text(prompt=[1, VOCABULARY]), 400, "invalid_value",
         [str(VOCABULARY), str(VOCABULARY - 1)]),
        ("too many prompts", COMPLETIONS, text(prompt=["x"] * 5, n=2), 400, "invalid_value", ["5", "10", "8"]),
        ("an echo", COMPLETIONS, text(echo=True), 400, "unsupported_parameter", ["echo"]),
        ("an unknown path", "/v1/embeddings", text(), 404, "not_found", ["/v1/embeddings"]),
        ("GET where POST belongs", CHAT, None, 405, None, ["GET"]),
        ("too large", CHAT, chat(messages=user("x" * MAX_BODY)), 413, "body_too_large", [str(MAX_BODY)]),
    ]


def complaint(server, path, body, status, code, words):
    """None where a request is refused as it should be, else what came."""
    got, _, text = server.ask("GET" if body is None else "POST", path, body)
    try:
        error = json.loads(text)["error"]
        right = got == status and error["code"] == code and set(error) == {"message", "type", "param", "code"}
        return None if right and all(w in error["message"] for w in words) else (got, error)
    except (ValueError, KeyError, TypeError):
        return got, text[:200]


def test_refusals(bench, server, alone):
    """Each bad request gets the API's error with field, value and limit."""
    client = server.client()
    going = client.chat.completions.create(model=server.model, messages=user("On and on"), max_tokens=1500,
                                           temperature=0, stream=True)
    beside = iter(going)
    next(beside)
    for what, path, body, status, code, words in bad_requests(server.model):
        wrong = complaint(server, path, body, status, code, words)
        bench.check(wrong is None, f"{what}: {status} {code}" + (f", but {wrong}" if wrong else ""))
    status, _, _ = server.ask("POST", CHAT, b"{}", {"Content-Type": "text/plain"})
    bench.check(status == 415, "a type that any page may send is not taken")
    status, body = server.get("/health", {"Host": "elsewhere.example"})
    bench.check(status == 403 and "elsewhere" in body["error"]["message"], "a name that is not this machine's")
    status, _ = server.get("/v1/models/nobody")
    bench.check(status == 404, "a model that is not there")
    rest = "".join(chunk.choices[0].delta.content or "" for chunk in beside)
    bench.check(alone.texts([user("On and on")], 1500)[0].endswith(rest) and len(rest) > 1000,
                f"a stream beside all this came out right ({len(rest)} letters)")


def raw(server, data, shut=False):
    """Sends the bytes; returns all that comes back, which may be nothing."""
    with server.connect() as connection:
        connection.sendall(data)
        if shut:
            return b""
        got = b""
        try:
            while piece := connection.recv(65536):
                got += piece
        except ConnectionResetError:
            pass
        return got


def test_wire(bench, server, alone):
    """Broken HTTP, bodies that stop half-way or never end: an error or a closed connection, and the server goes on."""
    head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    cut = (head + 'Content-Length: 100\r\n\r\n{"messages": ').encode()
    cases = [("no HTTP at all", b"\x16\x03\x01nonsense\r\n\r\n", b"400"),
             ("a length that is none", (head + "Content-Length: many\r\n\r\n").encode(), b"400"),
             ("chunks over the limit", (head + "Transfer-Encoding: chunked\r\nConnection: close\r\n\r\n").encode()
              + b"10000\r\n" + b"x" * 0x10000 + b"\r\n10000\r\n" + b"x" * 0x10000 + b"\r\n0\r\n\r\n", b"413"),
             ("a body that stops", cut, b"408")]
    for what, data, status in cases:
        got = raw(server, data)
        bench.check(got.startswith(b"HTTP/1.1 " + status), f"{what}: {got[:40]}")
    bench.check(b"13 of 100 bytes" in got, f"the bytes that came and those announced are named: {got[-120:]}")
    for _ in range(20):
        raw(server, cut, shut=True)
    bench.check(server.get("/health")[0] == 200, "20 bodies cut by a hang-up later, the server is there")


def test_hang_up(bench, server, alone):
    """A client that hangs up frees its blocks, whether it streams, waits for the whole, or waits for its turn."""
    long = {"model": server.model, "messages": user("Forever"), "max_tokens": 3000, "temperature": 0}
    for what, changes, count, wanted in [
        ("a stream", {"stream": True}, 1, lambda s: s["used"] > 4),
        ("a whole answer", {}, 1, lambda s: s["used"] > 4),
        ("four choices", {"n": 4, "stream": True}, 1, lambda s: s["used"] > 16),
        ("some that wait for the batch", {"n": 4}, 5, lambda s: s["waiting"] >= 2),
    ]:
        body = json.dumps(long | changes).encode()
        head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: "
        connections = [server.connect() for _ in range(count)]
        for connection in connections:
            connection.sendall(head.encode() + str(len(body)).encode() + b"\r\n\r\n" + body)
        busy = server.until(wanted)
        for connection in connections:
            connection.close()
        start = time.monotonic()
        idle = server.until(lambda s: s["used"] + s["running"] + s["waiting"] == 0)
        bench.check(wanted(busy) and idle["used"] + idle["running"] + idle["waiting"] == 0,
                    f"{what}: {busy['used']} blocks used, {busy['waiting']} waiting; {idle['used']} used "
                    f"{time.monotonic() - start:.2f} s after the hang-up")
    log = "".join(server.lines)
    bench.check(log.count(" 499 ") >= 8, "each is in the log")
    bench.check("Traceback" not in log, "and no fault of the server's")


# --------------------------------------------------------------------------------- other servers

def outcome(call):
    """What a call of the client returns or raises."""
    import openai

    try:
        return call()
    except openai.OpenAIError as error:
        return error


def test_keys(bench, folder):
    """With keys set, nothing is told without one; a full queue answers 429; it ends in order."""
    keys = bench.folder / "keys"
    keys.write_text("first-key\n\nsecond-key\n")
    with Server(bench.program, folder, "--api-key-file", keys, "--max-batch", 2, "--max-queue", 1,
                "--shutdown-seconds", 0, device=bench.device) as server:
        for path in ("/v1/models", "/metrics", "/cache", "/v1/nothing"):
            for header in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "Basic first-key"},
                           {"Authorization": "Bearer \xff"}):
                status, body = server.get(path, header)
                bench.check(status == 401 and body["error"]["code"] == "invalid_api_key", f"{path} {header}: {status}")
        bench.check(server.get("/health")[0] == 200, "/health needs no key")
        client = server.client("second-key")
        bench.check([m.id for m in client.models.list()] == [server.model], "a right key opens")
        ask = {"model": server.model, "messages": user("Busy"), "max_tokens": 1500, "temperature": 0}
        long = [client.chat.completions.create(**ask, stream=True) for _ in range(2)]
        for stream in long:
            next(iter(stream))
        answers = []
        short = {**ask, "max_tokens": 2}
        third = threading.Thread(target=lambda: answers.append(client.chat.completions.create(**short)))
        third.start()
        key = {**JSON, "Authorization": "Bearer first-key"}
        waiting = server.until(lambda s: s["waiting"] == 1, headers=key)["waiting"]
        status, headers, body = server.ask("POST", CHAT, {**ask, "max_tokens": 1}, key)
        error = json.loads(body)["error"]
        bench.check(waiting == 1 and status == 429 and error["code"] == "rate_limit_exceeded"
                    and headers["Retry-After"] == "1" and "2 + 1" in error["message"], f"a full queue: {error}")
        for stream in long:
            stream.close()
        third.join(60)
        bench.check(len(answers) == 1, "what waited is answered once there is room")
        child = server.child()
        stream = client.chat.completions.create(**ask | {"max_tokens": 4000}, stream=True)
        next(iter(stream))
        code = server.stop()
        said = outcome(lambda: list(stream))
        bench.check(code == 0 and gone(child), f"ends with status {code} on SIGTERM, kvleaf-generate with it")
        bench.check("being stopped" in str(said), f"and what still ran hears of it: {str(said)[-300:]}")
        bench.check("Traceback" not in "".join(server.lines), "without a fault")


def test_death(bench, folder):
    """kvleaf-generate dies: those who wait hear of it, the next ones are served; where it can't, the reason is told."""
    once = bench.folder / "once"
    wrapper = bench.folder / "generate"
    wrapper.write_text(f'#!/bin/sh\n[ ! -e "{once}" ] || {{ echo "no more of this" >&2; exit 3; }}\n'
                       f'exec "{bench.program.resolve()}" "$@"\n')
    wrapper.chmod(0o755)
    with Server(wrapper, folder, device=bench.device) as server:
        client = server.client()
        ask = {"model": server.model, "messages": user("Doomed"), "max_tokens": 3000, "temperature": 0}
        outcomes = []
        waiting = threading.Thread(
            target=lambda: outcomes.append(outcome(lambda: client.chat.completions.create(**ask))))
        waiting.start()
        stream = client.chat.completions.create(**ask, stream=True)
        next(iter(stream))
        server.until(lambda s: s["running"] == 2)
        os.kill(server.child(), signal.SIGKILL)
        waiting.join(60)
        bench.check(len(outcomes) == 1 and getattr(outcomes[0], "status_code", 0) == 503
                    and "signal 9" in str(outcomes[0]), f"who waits for the whole: {outcomes}")
        broken = outcome(lambda: list(stream))
        bench.check("signal 9" in str(broken), f"who streams: {broken!r}")
        answer = client.chat.completions.create(**ask | {"max_tokens": 3})
        metrics = server.metrics()
        bench.check(answer.usage.completion_tokens == 3 and metrics["kvleaf_restarts_total"] == 1
                    and metrics["kvleaf_up"] == 1, "the next one is answered by another kvleaf-generate")
        once.touch()
        os.kill(server.child(), signal.SIGKILL)
        end = time.monotonic() + 30
        while "no more of this" not in "".join(server.lines) and time.monotonic() < end:
            time.sleep(0.05)
        got = [server.get("/health"), server.get("/cache")]
        status, _, body = server.ask("POST", CHAT, {**ask, "max_tokens": 3})
        got.append((status, json.loads(body)))
        bench.check(all(s == 503 and "no more of this" in b["error"]["message"] for s, b in got),
                    f"one that can't start again is not tried for ever: {got[-1]}")
        bench.check(server.metrics()["kvleaf_up"] == 0, "and /metrics says that it is down")


def test_command(bench, folder):
    """What it says of itself, and of what it can't do."""
    base = ["--program", str(bench.program), "--model", str(folder), "--port", "0"]
    with Server(bench.program, folder, device=bench.device) as server:
        cases = [(["--help"], 0, "--max-queue"), (["--nonsense"], 2, "--nonsense"),
                 (["--max-batch", "0"], 2, "below 1"), (["--port", "x"], 2, "--port"),
                 ([*base, "--port", str(server.port)], 1, f"port {server.port}"),
                 ([*base, "--model", str(bench.folder)], 1, "no model"),
                 ([*base, "--program", str(bench.folder / "nothing")], 1, "nothing is missing"),
                 ([*base, "--api-key-file", str(bench.folder / "nokeys")], 1, "nokeys"),
                 ([*base, "--device", "no such device"], 1, "no such device")]
        for options, code, words in cases:
            done = subprocess.run([sys.executable, str(SERVE), *options], capture_output=True, text=True, check=False,
                                  timeout=60)
            said = done.stdout + done.stderr
            bench.check(done.returncode == code and words in said and "Traceback" not in said,
                        f"{' '.join(options[-2:])}: exit {done.returncode}, {said.strip().splitlines()[-1][:90]}")
        child = server.child()
        bench.check(server.stop(signal.SIGINT) == 0 and gone(child), "an interrupt ends it in order")


# --------------------------------------------------------------------------------- many at once

class Client(threading.Thread):
    """Asks until the time is over: mostly well, sometimes badly, sometimes hanging up."""

    def __init__(self, server, seed, end, wants, bad):
        super().__init__()
        self.server, self.draw, self.end, self.wants, self.bad = server, random.Random(seed), end, wants, bad
        self.right, self.hung_up, self.refused, self.wrong = 0, 0, 0, []

    def run(self):
        client = self.server.client()
        while time.monotonic() < self.end and len(self.wrong) < 3:
            kind = self.draw.random()
            if kind < 0.15:
                self.ask_badly()
            else:
                self.ask(client, hang_up=kind < 0.3)
        client.close()

    def ask_badly(self):
        what, *case = self.draw.choice(self.bad)
        wrong = complaint(self.server, *case)
        self.refused += wrong is None
        self.wrong += [(what, wrong)] if wrong else []

    def ask(self, client, hang_up):
        import openai

        messages, want = self.draw.choice(self.wants)
        n = self.draw.choice([1, 1, 1, 2])
        ask = {"model": self.server.model, "messages": messages, "max_tokens": STEPS, "temperature": 0, "n": n}
        try:
            if hang_up:
                stream = client.chat.completions.create(**ask, stream=True)
                for _, _ in zip(range(self.draw.randrange(8)), stream):
                    pass
                stream.close()
                self.hung_up += 1
                return
            if self.draw.random() < 0.5:
                texts = [c.message.content for c in client.chat.completions.create(**ask).choices]
            else:
                found, _ = collect(client.chat.completions.create(**ask, stream=True))
                texts = [found[i][0] for i in sorted(found)]
        except openai.OpenAIError as error:     # none may come
            self.wrong.append(error)
            return
        self.right += texts == [want] * n
        self.wrong += [] if texts == [want] * n else [(want, texts)]


def test_load(bench, folder):
    """32 clients at once in a pool too small for the batch, some hanging up, some wrong: every good one gets its text,
    and no block stays behind."""
    chats = [user(f"Question {i}", SYSTEM if i % 2 else None) for i in range(24)]
    wants = list(zip(chats, Alone(bench, folder).texts(chats)))
    print(f"  seed {bench.seed}, {bench.seconds} s")
    with Server(bench.program, folder, "--max-batch", MAX_BATCH, "--max-body", MAX_BODY, "--blocks", 36,
                "--swap-blocks", 24, device=bench.device) as server:
        load(bench, server, wants, bad_requests(server.model))


def load(bench, server, wants, bad):
    start = time.monotonic()
    clients = [Client(server, bench.seed + i, start + bench.seconds, wants, bad) for i in range(32)]
    for client in clients:
        client.start()
    for client in clients:
        client.join()
    took = time.monotonic() - start
    right, hung_up, refused = (sum(getattr(c, n) for c in clients) for n in ("right", "hung_up", "refused"))
    wrong = [w for c in clients for w in c.wrong]
    stats = server.until(lambda s: s["used"] + s["running"] + s["waiting"] == 0)
    bench.check(not wrong and right > 0,
                f"{right} good ones answered rightly" + (f"; not: {wrong[:3]}" if wrong else ""))
    bench.check(hung_up > 0 and refused > 0, f"beside {hung_up} that hung up and {refused} refused, in {took:.1f} s")
    bench.check(stats["used"] == 0 and stats["running"] == 0 and stats["waiting"] == 0 and stats["sequences"] == 0,
                f"then no block is used: {stats}")
    bench.check(min(stats["hits"], stats["evictions"], stats["swapped_out"]) > 0,
                "with hits in the prefix cache, evictions, and blocks that went to host memory")
    log = "".join(server.lines)
    bench.check("Traceback" not in log, f"no fault in the server's log {log[-300:] if 'Traceback' in log else ''}")


SHARED = {"answers": test_answers, "samples": test_samples, "stops": test_stops, "refusals": test_refusals,
          "wire": test_wire, "hang_up": test_hang_up}
OWN = {"load": test_load, "keys": test_keys, "death": test_death, "command": test_command}


def main():
    parser = make_parser(__doc__)
    parser.add_argument("--seconds", type=float, default=20, metavar="N", help="of the load")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 30), metavar="N")
    parser.add_argument("--only", nargs="+", choices=[*SHARED, *OWN], default=[*SHARED, *OWN])
    args = parse(parser)
    bench = Bench(args)
    bench.seconds, bench.seed = args.seconds, args.seed
    with tempfile.TemporaryDirectory(prefix="kvleaf-serve-") as folder:
        bench.folder = Path(folder)
        model = make_model(bench.folder / "noise")
        if any(name in SHARED for name in args.only):
            with Server(args.program, model, "--max-batch", MAX_BATCH, "--max-body", MAX_BODY, "--body-seconds", 1,
                        "--blocks", 1024, device=args.device) as server:
                for name in args.only:
                    if name in SHARED:
                        bench.test(name, SHARED[name], server, Alone(bench, model))
        for name in args.only:
            if name in OWN:
                bench.test(name, OWN[name], model)
    return bench.result()


if __name__ == "__main__":
    sys.exit(main())
