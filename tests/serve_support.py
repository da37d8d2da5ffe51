# SPDX-License-Identifier: Apache-2.0
"""For the tests of tools/serve.py: a server to ask, and a model small enough to answer thousands of tokens a second."""
import http.client
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

from test_generate import ROOT, small_model, write_model

SERVE = ROOT / "tools" / "serve.py"
JSON = {"Content-Type": "application/json"}
START_SECONDS = 300     # the first build of a device's kernels takes its time
TEMPLATE = """{%- if messages[0].role == 'assistant' %}{{ raise_exception('a user speaks first') }}{% endif %}
{%- for message in messages %}{{ '<s>' + message.role + ': ' + message.content + '<e>' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<s>assistant: ' }}{% endif %}"""
FIRST_BYTE, VOCABULARY, CONTEXT = 3, 259, 4096


def byte_order():
    """The bytes in the order of their tokens: those that the tokenizer writes as themselves, then the others."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    return plain + [b for b in range(256) if b not in plain]


def byte_tokenizer(path):
    """A token a byte, after three special ones."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {"<pad>": 0, "<s>": 1, "<e>": 2} | {letter: FIRST_BYTE + i for i, letter in enumerate(letters)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(t, special=True) for t in ("<pad>", "<s>", "<e>")])
    tokenizer.save(str(path))


def make_model(folder):
    """A random Llama of two layers over bytes, with a chat template. Its text is noise, always the same for the same
    prompt, and has no end."""
    config, tensors = small_model(folder, num_hidden_layers=2, vocab_size=VOCABULARY, max_position_embeddings=CONTEXT)
    draw = random.Random(20)
    for name, (shape, values) in tensors.items():
        if "proj" in name:
            tensors[name] = (shape, [draw.gauss(0, 0.7) for _ in values])
        if "norm" in name:
            tensors[name] = (shape, [1.0 + v for v in values])
    # Letters are likelier than the pieces of other characters; the end is never the likeliest.
    scales = [0.0] * FIRST_BYTE + [0.5 if 32 <= b < 127 else 0.3 for b in byte_order()]
    tensors["model.embed_tokens.weight"] = ([VOCABULARY, 32], [draw.gauss(0, 0.5) for _ in range(VOCABULARY * 32)])
    tensors["lm_head.weight"] = ([VOCABULARY, 32], [draw.gauss(0, s) if s else 0.0 for s in scales for _ in range(32)])
    write_model(folder / "model.safetensors", tensors)
    byte_tokenizer(folder / "tokenizer.json")
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    return folder


class Server:
    """tools/serve.py in a process of its own, on a port of its own."""

    def __init__(self, program, model, *options, device=None):
        command = [sys.executable, str(SERVE), "--program", str(program), "--model", str(model), "--port", "0",
                   *map(str, options), *(["--device", device] if device else [])]
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        self.lines, self.port, self.model = [], None, Path(model).resolve().name
        self.up = threading.Event()
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()
        if not self.up.wait(START_SECONDS) or self.port is None:
            self.process.kill()
            raise RuntimeError("no server: " + "".join(self.lines[-5:]))

    def _read(self):
        for line in self.process.stderr:
            self.lines.append(line)
            found = re.search(r"^serving .* at http://.*:(\d+)$", line)
            if found:
                self.port = int(found[1])
                self.up.set()
        self.up.set()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.stop()

    def stop(self, number=signal.SIGTERM):
        """Ends it in order; returns the exit status."""
        self.process.send_signal(number)
        try:
            return self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise

    @property
    def url(self):
        return f"http://127.0.0.1:{self.port}"

    def client(self, key="none", timeout=300):
        import openai

        return openai.OpenAI(base_url=self.url + "/v1", api_key=key, max_retries=0, timeout=timeout)

    def connect(self):
        return socket.create_connection(("127.0.0.1", self.port), timeout=60)

    def ask(self, method, path, body=None, headers=None):
        """One request as it is; returns (status, headers, body)."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=300)
        try:
            connection.request(method, path, json.dumps(body) if isinstance(body, dict) else body,
                               JSON if headers is None else headers)
            answer = connection.getresponse()
            return answer.status, answer.headers, answer.read()
        finally:
            connection.close()

    def get(self, path, headers=None):
        status, _, body = self.ask("GET", path, headers=headers or {})
        return status, json.loads(body)

    def stats(self, headers=None):
        return self.get("/cache", headers)[1]["stats"]

    def metrics(self):
        """{name or name{labels}: value}"""
        text = self.ask("GET", "/metrics", headers={})[2].decode()
        return {name: float(value) for name, value in
                (line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))}

    def until(self, wanted, seconds=30, headers=None):
        """Waits for statistics for which wanted(stats) holds; returns the last ones."""
        end = time.monotonic() + seconds
        while True:
            stats = self.stats(headers)
            if wanted(stats) or time.monotonic() > end:
                return stats
            time.sleep(0.05)

    def child(self):
        """The process id of its kvleaf-generate."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        return int(children[0]) if children else None


def gone(process_id, seconds=20):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        try:
            os.kill(process_id, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.05)
    return False
