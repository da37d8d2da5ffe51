# SPDX-License-Identifier: Apache-2.0
"""What every request passes first: whom it calls, its key, its size. And what ends it when the client hangs up."""
from __future__ import annotations

import asyncio
import hmac
import logging
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .errors import ApiError

OPEN_PATHS = {"/", "/health"}       # need no key: they tell nothing of anybody's
HUNG_UP = 499                       # in logs and metrics, as nginx has it
# Of a body over the limit this many times as much is read and thrown away, so that a client that still writes gets
# its answer instead of a broken connection.
PATIENCE = 16


@dataclass(frozen=True)
class Rules:
    max_body: int                   # bytes
    body_seconds: float
    keys: Collection[bytes]         # empty: nobody needs one
    hosts: Collection[str]          # names the server answers to; empty: any


class HungUp(Exception):
    """The client is gone before its request was complete."""


class Guard:
    """An ASGI layer: reads the body, then runs the application until it is done or the client hangs up."""

    def __init__(self, app: ASGIApp, rules: Rules, done: Callable[[Scope, int, float], None]) -> None:
        self.app, self.rules, self.done = app, rules, done

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        exchange = Exchange(send)
        started = time.monotonic()
        scope["state"]["note"] = ""
        try:
            headers = Headers(scope=scope)
            self._check(headers, scope["path"])
            body = await self._body(headers, receive)
            await self._run(scope, body, receive, exchange)
        except ApiError as error:
            await error.response()(scope, receive, exchange.send)
        except HungUp:
            exchange.status = HUNG_UP
        except Exception:
            logging.exception("a fault of the server's")    # it has answered 500 by now
        self.done(scope, exchange.status, time.monotonic() - started)

    def _check(self, headers: Headers, path: str) -> None:
        host = headers.get("host", "").rsplit("]", 1)
        name = host[0] + "]" if len(host) > 1 else host[0].split(":", 1)[0]
        if self.rules.hosts and name.lower() not in self.rules.hosts:
            # A page of somebody else's whose name was made to point here.
            raise ApiError(403, f"this server is {' or '.join(sorted(self.rules.hosts))}, not {name[:60]}",
                           code="wrong_host")
        if self.rules.keys and path not in OPEN_PATHS:
            kind, _, key = headers.get("authorization", "").partition(" ")
            sent = key.strip().encode()
            # All are compared, so that time tells nothing.
            right = [hmac.compare_digest(sent, k) for k in self.rules.keys]
            if kind.lower() != "bearer" or not any(right):
                message = "the API key is wrong" if key else "an API key is needed: Authorization: Bearer KEY"
                raise ApiError(401, message, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})

    async def _body(self, headers: Headers, receive: Receive) -> bytes:
        announced = headers.get("content-length", "")
        body = bytearray()
        try:
            await asyncio.wait_for(self._read(body, receive), self.rules.body_seconds)
        except asyncio.TimeoutError:
            of = f" of {announced}" if announced else ""
            raise ApiError(408, f"the body is cut short: {len(body)}{of} bytes came in {self.rules.body_seconds:g} s",
                           code="body_incomplete", headers={"Connection": "close"}) from None
        if len(body) > self.rules.max_body:
            raise ApiError(413, f"the body has {announced or f'over {len(body)}'} bytes, the limit is "
                           f"{self.rules.max_body}", code="body_too_large", headers={"Connection": "close"})
        return bytes(body)

    async def _read(self, body: bytearray, receive: Receive) -> None:
        count, more = 0, True
        while more and count <= self.rules.max_body * PATIENCE:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise HungUp
            piece = message.get("body", b"")
            count += len(piece)
            if len(body) <= self.rules.max_body:
                body += piece
            more = message.get("more_body", False)

    async def _run(self, scope: Scope, body: bytes, receive: Receive, exchange: Exchange) -> None:
        """Runs the application beside a look at the connection."""
        whole: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]
        never = asyncio.Event()

        async def replay() -> Message:
            if not whole:
                await never.wait()
            return whole.pop()

        work = asyncio.ensure_future(self.app(scope, replay, exchange.send))
        watch = asyncio.ensure_future(receive())    # with the body read, it has only a hang-up to tell
        try:
            await asyncio.wait({work, watch}, return_when=asyncio.FIRST_COMPLETED)
            if not work.done() and not exchange.complete:
                work.cancel()
                await asyncio.wait({work})
                exchange.status = HUNG_UP
            if not work.cancelled():
                await work
        finally:
            work.cancel()
            watch.cancel()


class Exchange:
    """What was answered."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.status = 0
        self.complete = False

    async def send(self, message: Any) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
        elif not message.get("more_body", False):
            self.complete = True
        await self._send(message)
