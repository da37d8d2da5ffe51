# SPDX-License-Identifier: Apache-2.0
"""The server's routes."""
from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from model_text import Failure, Text

from . import bodies
from .answers import Call, Event
from .errors import ApiError, unavailable
from .generator import Down, Generator
from .metrics import Metrics

PAGE = Path(__file__).with_name("page.html")
PAGE_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; connect-src 'self'; img-src blob:; script-src 'unsafe-inline'; "
                               "style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}
DEFAULT_COMPLETION_TOKENS = 16      # the API's


class ChatShape:
    """The objects of /v1/chat/completions."""

    prefix, name, part = "chatcmpl-", "chat.completion", "chat.completion.chunk"

    @staticmethod
    def first() -> dict[str, Any] | None:
        return {"delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}

    @staticmethod
    def piece(text: str, reason: str | None) -> dict[str, Any]:
        return {"delta": {"content": text} if text else {}, "logprobs": None, "finish_reason": reason}

    @staticmethod
    def whole(text: str, reason: str) -> dict[str, Any]:
        return {"message": {"role": "assistant", "content": text, "refusal": None}, "logprobs": None,
                "finish_reason": reason}


class CompletionShape:
    """The objects of /v1/completions."""

    prefix, name, part = "cmpl-", "text_completion", "text_completion"

    @staticmethod
    def first() -> dict[str, Any] | None:
        return None

    @staticmethod
    def piece(text: str, reason: str | None) -> dict[str, Any]:
        return {"text": text, "logprobs": None, "finish_reason": reason}

    whole = piece


Shape = type[ChatShape] | type[CompletionShape]


class EventStream(Response):
    """A call's events as server-sent events, to be followed by [DONE]."""

    media_type = "text/event-stream"

    def __init__(self, call: Call, lines: AsyncIterator[object]) -> None:
        super().__init__(headers={"Cache-Control": "no-store"})
        del self.headers["content-length"]
        self.call, self.lines = call, lines

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            try:
                async for line in self.lines:
                    await self._data(send, json.dumps(line, ensure_ascii=False))
                await self._data(send, "[DONE]")
            except ApiError as error:
                scope["state"]["note"] = error.message
                await self._data(send, json.dumps(error.body()))
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            self.call.close()

    @staticmethod
    async def _data(send: Send, text: str) -> None:
        await send({"type": "http.response.body", "body": f"data: {text}\n\n".encode(), "more_body": True})


@dataclass(frozen=True)
class Service:
    """What the endpoints share."""

    text: Text
    generator: Generator
    limits: bodies.Limits
    vocabulary: int
    max_queue: int
    metrics: Metrics
    created: int

    # ------------------------------------------------------------------------------ completions

    async def chat(self, request: Request) -> Response:
        messages, sampling = bodies.read_chat(await json_body(request), self.limits)
        try:
            text = self.text.chat(messages)
        except Failure as failure:
            raise ApiError(400, str(failure), param="messages", code="invalid_value") from failure
        tokens = await asyncio.to_thread(self.text.encode, text)
        return await self.answer(request, [tokens], sampling, ChatShape, "messages")

    async def completion(self, request: Request) -> Response:
        fields = await json_body(request)
        sampling = bodies.read_completion({"max_tokens": DEFAULT_COMPLETION_TOKENS, **fields}, self.limits)
        prompts = await asyncio.to_thread(bodies.read_prompts, fields, self.vocabulary,
                                          lambda text: self.text.encode(text, specials=True))
        return await self.answer(request, prompts, sampling, CompletionShape, "prompt")

    def admit(self, prompts: Sequence[list[int]], sampling: bodies.Sampling, param: str) -> None:
        samples = len(prompts) * sampling.n
        if samples > self.limits.max_batch:
            raise ApiError(400, f"{len(prompts)} prompts of {sampling.n} choices each are {samples}, a batch holds "
                           f"{self.limits.max_batch}", param=param, code="invalid_value")
        for tokens in prompts:
            if len(tokens) >= self.limits.context:
                raise ApiError(400, f"{param} has {len(tokens)} tokens, the context is {self.limits.context} with the "
                               "answer", param=param, code="context_length_exceeded")
        if self.generator.in_flight + samples > self.limits.max_batch + self.max_queue:
            raise ApiError(429, f"{self.generator.in_flight} choices are being made or wait, with {samples} more they "
                           f"would be over the limit of {self.limits.max_batch} + {self.max_queue}",
                           kind="rate_limit_error", code="rate_limit_exceeded", headers={"Retry-After": "1"})

    async def answer(self, request: Request, prompts: Sequence[list[int]], sampling: bodies.Sampling, shape: Shape,
                     param: str) -> Response:
        self.admit(prompts, sampling, param)
        call = Call(self.generator, self.text, prompts, sampling, param)
        head = {"id": shape.prefix + uuid4().hex, "created": int(time.time()), "model": self.limits.model}
        handed_on = False
        try:
            events = call.events()
            if sampling.stream:
                # A refusal comes in place of the first event, and is still a status of its own.
                first = await anext(events)
                lines = self.chunks(request, call, first, events, {**head, "object": shape.part}, shape,
                                    sampling.include_usage)
                handed_on = True
                return EventStream(call, lines)
            texts = [""] * len(call.choices)
            async for event in events:
                texts[event.choice] += event.text
            self.account(request, call)
            choices = [{"index": i, **shape.whole(text, choice.finish_reason or "stop")}
                       for i, (text, choice) in enumerate(zip(texts, call.choices))]
            return JSONResponse({**head, "object": shape.name, "choices": choices,
                                 "usage": call.usage.body(call.choices)})
        finally:
            if not handed_on:
                call.close()

    async def chunks(self, request: Request, call: Call, first: Event, events: AsyncIterator[Event],
                     head: dict[str, Any], shape: Shape, include_usage: bool) -> AsyncIterator[object]:
        usage: dict[str, Any] = {"usage": None} if include_usage else {}
        opening = shape.first()
        if opening is not None:
            for i in range(len(call.choices)):
                yield {**head, "choices": [{"index": i, **opening}], **usage}
        event: Event | None = first
        while event is not None:
            piece = shape.piece(event.text, event.finish_reason)
            yield {**head, "choices": [{"index": event.choice, **piece}], **usage}
            event = await anext(events, None)
        self.account(request, call)
        if include_usage:
            yield {**head, "choices": [], "usage": call.usage.body(call.choices)}

    def account(self, request: Request, call: Call) -> None:
        self.metrics.count_call(call)
        usage = call.usage
        request.state.note = f"{usage.prompt} prompt tokens, {usage.cached} cached, {usage.generated} generated"

    # ------------------------------------------------------------------------------ the rest

    def model_object(self) -> dict[str, object]:
        return {"id": self.limits.model, "object": "model", "created": self.created, "owned_by": "kvleaf"}

    async def models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [self.model_object()]})

    async def model(self, request: Request) -> Response:
        name = request.path_params["name"]
        if name != self.limits.model:
            raise ApiError(404, f"there is no model {bodies.shown(name)}, only {bodies.shown(self.limits.model)}",
                           param="model", code="model_not_found")
        return JSONResponse(self.model_object())

    async def health(self, request: Request) -> Response:
        if self.generator.failure is not None:
            raise unavailable(self.generator.failure)
        if not self.generator.ready:
            raise unavailable("the model is being loaded")
        return JSONResponse({"status": "ok"})

    async def show_metrics(self, request: Request) -> Response:
        try:
            self.metrics.cache.stats = (await self.generator.stats())["stats"]
        except Down:
            self.metrics.cache.stats = {}
        self.metrics.cache.restarts = self.generator.restarts
        return Response(self.metrics.text(), media_type=CONTENT_TYPE_LATEST)

    async def cache(self, request: Request) -> Response:
        try:
            return JSONResponse(await self.generator.stats(with_map=True))
        except Down as down:
            raise unavailable(str(down)) from down

    async def page(self, request: Request) -> Response:
        return HTMLResponse(PAGE.read_text(encoding="utf-8"), headers=PAGE_HEADERS)


async def json_body(request: Request) -> bodies.Fields:
    # A page elsewhere can't send this type without asking first, so that it can't use a server at home.
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise ApiError(415, f"the Content-Type is {bodies.shown(kind)}, not application/json", code="invalid_type")
    return bodies.parse(await request.body())


def show_error(request: Request, error: Exception) -> Response:
    if isinstance(error, HTTPException):
        error = ApiError(error.status_code, f"{request.method} {request.url.path[:100]}: {error.detail}",
                         code="not_found" if error.status_code == 404 else None,
                         headers=dict(error.headers) if error.headers else None)
    if not isinstance(error, ApiError):
        error = ApiError(500, "the server has a fault; its log says more", kind="server_error", code="internal_error")
    request.state.note = error.message
    return error.response()


def make_app(service: Service) -> Starlette:
    return Starlette(
        routes=[
            Route("/", service.page),
            Route("/health", service.health),
            Route("/metrics", service.show_metrics),
            Route("/cache", service.cache),
            Route("/v1/models", service.models),
            Route("/v1/models/{name:path}", service.model),
            Route("/v1/chat/completions", service.chat, methods=["POST"]),
            Route("/v1/completions", service.completion, methods=["POST"]),
        ],
        exception_handlers={ApiError: show_error, HTTPException: show_error, Exception: show_error})
