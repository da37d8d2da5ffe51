#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Serves a language model that runs on kvleaf, with the API of OpenAI.

    tools/serve.py
    curl http://127.0.0.1:8000/v1/chat/completions -H 'Content-Type: application/json' \\
        -d '{"messages": [{"role": "user", "content": "Name three rivers."}]}'

Chat completions, completions, models, a page with a chat and the live map of the cache's blocks at /, metrics for
Prometheus at /metrics. One kvleaf-generate answers all requests together; what they share is in the cache once.
"""
from __future__ import annotations

import argparse
import asyncio
import json
import logging
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Any

from model_text import MODEL, PROGRAM, Failure, Text, enter_project_venv, require_files

LOOPBACK = {"127.0.0.1", "::1", "localhost"}


def log(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def command(args: argparse.Namespace) -> list[str]:
    options = ["--model", args.model, "--requests", "-", "--out", "-", "--stream", "--kv-dtype", args.kv_dtype,
               "--block-size", args.block_size, "--blocks", args.blocks, "--swap-blocks", args.swap_blocks,
               "--max-batch", args.max_batch, "--prefill-chunk", args.prefill_chunk]
    if args.device:
        options += ["--device", args.device]
    return [str(args.program), *map(str, options)]


def listen(host: str, port: int) -> socket.socket:
    try:
        return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET,
                                    backlog=1024)
    except OSError as error:
        raise Failure(f"can't listen on {host} port {port}: {error.strerror}") from error


def address(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


def read_keys(args: argparse.Namespace) -> list[bytes]:
    keys = [key.encode() for key in args.api_key]
    if args.api_key_file:
        try:
            keys += [line.strip() for line in args.api_key_file.read_bytes().splitlines() if line.strip()]
        except OSError as error:
            raise Failure(f"{args.api_key_file}: {error.strerror}") from error
        if not keys:
            raise Failure(f"{args.api_key_file} holds no key")
    return keys


def log_request(scope: Any, status: int, seconds: float) -> None:
    client = (scope.get("client") or ["?"])[0]
    # A client's words are escaped, so that a request is one line whatever it says.
    path, note = (json.dumps(text)[1:-1] for text in (scope["path"][:100], scope["state"].get("note", "")))
    log(f"{time.strftime('%Y-%m-%dT%H:%M:%S')} {client} {scope['method']} {path} {status} {seconds:.3f} s"
        + (f"; {note}" if note else ""))


async def serve(args: argparse.Namespace, text: Text, listener: socket.socket) -> None:
    import uvicorn

    from server.app import Service, make_app
    from server.bodies import Limits
    from server.generator import Down, Generator
    from server.guard import Guard, Rules
    from server.metrics import Metrics

    config = json.loads((args.model / "config.json").read_text(encoding="utf-8"))
    limits = Limits(args.model_name or args.model.resolve().name, config["max_position_embeddings"], args.max_batch)
    generator, metrics = Generator(command(args), log), Metrics()
    service = Service(text, generator, limits, config["vocab_size"], args.max_queue, metrics, int(time.time()))
    paths = {route.path for route in make_app(service).routes}      # type: ignore[attr-defined]

    def done(scope: Any, status: int, seconds: float) -> None:
        # Paths that are none of ours share a label, else a client could make any number of them.
        path = scope["path"] if scope["path"] in paths else "other"
        metrics.requests.labels(path, status).inc()
        log_request(scope, status, seconds)

    rules = Rules(args.max_body, args.body_seconds, read_keys(args),
                  {"127.0.0.1", "[::1]", "localhost"} if args.host in LOOPBACK else set())

    class Server(uvicorn.Server):
        async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
            """Takes no more requests; those that run may end within a while."""
            asyncio.get_running_loop().call_later(args.shutdown_seconds, generator.give_up)
            await super().shutdown(sockets)

    server = Server(uvicorn.Config(
        Guard(make_app(service), rules, done), lifespan="off", ws="none", log_config=None, access_log=False,
        server_header=False, proxy_headers=False, timeout_graceful_shutdown=args.shutdown_seconds + 5))

    def interrupt(*_: object) -> None:
        if not server.started:      # the server's own handler ends it in order
            raise KeyboardInterrupt

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, interrupt)
    try:
        log(f"loading {args.model}")
        await generator.start()
        log(f"serving {limits.model} at {address(listener)}")
        await server.serve([listener])
    except Down as down:
        raise Failure(str(down)) from down
    finally:
        await generator.stop()


def at_least(least: int) -> Any:
    def read(text: str) -> int:
        value = int(text)
        if value < least:
            raise argparse.ArgumentTypeError(f"{value} is below {least}")
        return value
    read.__name__ = "whole number"      # what argparse calls it where it is none
    return read


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    where = parser.add_argument_group("where and for whom")
    where.add_argument("--host", default="127.0.0.1", help="address to listen on (default: this machine only)")
    where.add_argument("--port", type=at_least(0), default=8000, metavar="N", help="default 8000; 0 = any free one")
    where.add_argument("--api-key", action="append", default=[], metavar="KEY",
                       help="clients must send it; other users of this machine see it in the list of processes")
    where.add_argument("--api-key-file", type=Path, metavar="FILE", help="a key a line")
    load = parser.add_argument_group("load")
    load.add_argument("--max-queue", type=at_least(0), default=64, metavar="N",
                      help="choices that may wait while the batch is full, more get status 429 (default 64)")
    load.add_argument("--max-body", type=at_least(1), default=1 << 20, metavar="BYTES",
                      help="of a request, more gets status 413 (default 1 MiB)")
    load.add_argument("--body-seconds", type=at_least(1), default=30, metavar="N",
                      help="a body must be complete by then, else status 408 (default 30)")
    load.add_argument("--shutdown-seconds", type=at_least(0), default=5, metavar="N",
                      help="how long what runs may go on once the server is told to end (default 5)")
    model = parser.add_argument_group("model and cache, as kvleaf-generate has them")
    model.add_argument("--model", type=Path, default=MODEL, metavar="DIR")
    model.add_argument("--model-name", metavar="NAME", help="for clients (default: the folder's)")
    model.add_argument("--program", type=Path, default=PROGRAM, help="kvleaf-generate")
    model.add_argument("--device", metavar="SUBSTRING", help="of an OpenCL platform or device name")
    model.add_argument("--max-batch", type=at_least(1), default=16, metavar="N", help="choices made at once")
    model.add_argument("--block-size", type=at_least(1), default=16, metavar="N")
    model.add_argument("--blocks", type=at_least(0), default=0, metavar="N", help="0 = for 8192 tokens")
    model.add_argument("--swap-blocks", type=at_least(0), default=0, metavar="N",
                       help="in host memory, for preempted requests; 0 = compute them again")
    model.add_argument("--prefill-chunk", type=at_least(1), default=256, metavar="N")
    model.add_argument("--kv-dtype", choices=("f16", "bf16", "f32"), default="f32")
    return parser.parse_args()


def main() -> int:
    args = parse_arguments()
    enter_project_venv(("tokenizers", "jinja2", "starlette", "uvicorn", "prometheus_client"))
    require_files(args.program, args.model)
    logging.basicConfig(stream=sys.stderr, level=logging.WARNING, format="%(message)s")
    with listen(args.host, args.port) as listener:
        if args.host not in LOOPBACK and not (args.api_key or args.api_key_file):
            log(f"warning: anybody who reaches {address(listener)} may use it; --api-key-file asks for a key")
        asyncio.run(serve(args, Text(args.model), listener))
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except Failure as failure:
        print(f"serve.py: {failure}", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)
