# SPDX-License-Identifier: Apache-2.0
"""One call of the API while it is answered: its prompts as jobs of kvleaf-generate, the text of its choices."""
from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from model_text import Text, TextStream

from .bodies import Sampling
from .errors import ApiError, unavailable
from .generator import Down, Generator, Job, Row

# kvleaf-generate takes shares above 0; one that rounds to nothing leaves the best token.
LEAST_TOP_P = 1e-30
# Its statuses that are the client's doing: the prompt and what it wants don't fit.
TOO_LARGE = {"KVLEAF_INVALID", "KVLEAF_NO_BLOCKS", "KVLEAF_TOO_SMALL"}


class StopStrings:
    """Lets text through up to the string that is complete first, however the text is cut into pieces."""

    def __init__(self, stops: Sequence[str]) -> None:
        self.stops = stops
        self.held = ""      # the end of the text, which a string may begin with
        self.found = False

    def add(self, text: str) -> str:
        text = self.held + text
        found = [(at + len(stop), at) for stop in self.stops if (at := text.find(stop)) >= 0]
        if found:
            self.found, self.held = True, ""
            return text[:min(found)[1]]
        keep = max((self._beginning(text, stop) for stop in self.stops), default=0)
        self.held = text[len(text) - keep:]
        return text[:len(text) - keep]

    def finish(self) -> str:
        text, self.held = self.held, ""
        return text

    @staticmethod
    def _beginning(text: str, stop: str) -> int:
        """How many characters at the text's end are the string's first ones."""
        longest = min(len(stop) - 1, len(text))
        return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)


class Choice:
    """One continuation of one prompt."""

    def __init__(self, text: Text, stops: Sequence[str]) -> None:
        self.stream, self.stops = TextStream(text), StopStrings(stops)
        self.finish_reason: str | None = None
        self.tokens = 0
        self.usage: dict[str, int] = {}     # kvleaf-generate's account of it

    def add(self, token: int) -> str:
        self.tokens += 1
        text = self.stops.add(self.stream.add([token]))
        if self.stops.found:
            self.finish_reason = "stop"
        return text

    def finish(self, reason: str) -> str:
        text = self.stops.add(self.stream.finish())
        if self.stops.found:
            reason = "stop"
        self.finish_reason = reason
        return text + self.stops.finish()


@dataclass
class Usage:
    """What a call took, of all prompts and choices."""

    prompt: int = 0
    cached: int = 0
    generated: int = 0

    def body(self, choices: Sequence[Choice]) -> dict[str, object]:
        return {"prompt_tokens": self.prompt, "completion_tokens": self.generated,
                "total_tokens": self.prompt + self.generated,
                "prompt_tokens_details": {"cached_tokens": self.cached},
                # Blocks of the cache, a number a choice: held at most, and of these at most shared with others.
                "kvleaf": {name: [choice.usage.get(name, 0) for choice in choices]
                           for name in ("peak_blocks", "shared_blocks")}}


class Event(NamedTuple):
    """New text of a choice, and why it has ended if it has."""

    choice: int
    text: str
    finish_reason: str | None


class Call:
    """The jobs of one call. Whoever makes one must close it."""

    def __init__(self, generator: Generator, text: Text, prompts: Sequence[list[int]], sampling: Sampling,
                 param: str) -> None:
        self.generator, self.param = generator, param
        self.choices = [Choice(text, sampling.stops) for _ in range(len(prompts) * sampling.n)]
        self.usage = Usage(prompt=sum(map(len, prompts)))
        self.queue: asyncio.Queue[tuple[Job, Row | Down]] = asyncio.Queue()
        self.jobs: list[Job] = []
        self.started = time.monotonic()
        self.first_token: float | None = None   # seconds after that
        self.seconds = 0.0
        fields: Row = {"temperature": sampling.temperature, "top_p": max(sampling.top_p, LEAST_TOP_P),
                       "seed": sampling.seed}
        if sampling.max_tokens is not None:
            fields["max_new_tokens"] = sampling.max_tokens
        try:
            for tokens in prompts:
                self.jobs.append(generator.submit({**fields, "tokens": tokens}, sampling.n, self.queue,
                                                  len(self.jobs) * sampling.n))
        except Down as down:
            self.close()
            raise unavailable(str(down)) from down

    def close(self) -> None:
        """Gives up what still runs, so that its blocks are free at once."""
        for job in self.jobs:
            self.generator.close(job)

    async def events(self) -> AsyncIterator[Event]:
        """The choices' text as it comes. Ends when all have ended and usage is complete."""
        answers = 0
        while answers < len(self.choices):
            job, row = await self.queue.get()
            if isinstance(row, Down):
                raise unavailable(str(row))
            if "error" in row:
                raise self._refusal(row["error"])
            at = job.first + row["index"]
            event = self._take_token(job, row, at) if "token" in row else self._take_answer(row, at)
            answers += "token" not in row
            if event is not None:
                yield event
        self.usage.generated = sum(choice.tokens for choice in self.choices)
        self.usage.cached = sum(self.choices[job.first].usage["cached"] for job in self.jobs)
        self.seconds = time.monotonic() - self.started

    def _take_token(self, job: Job, row: Row, at: int) -> Event | None:
        choice = self.choices[at]
        if self.first_token is None:
            self.first_token = time.monotonic() - self.started
        if choice.finish_reason is not None:
            return None     # on its way when the choice was cancelled
        text = choice.add(row["token"])
        if choice.finish_reason is not None:
            self.generator.cancel(job, row["index"])
        return Event(at, text, choice.finish_reason) if text or choice.finish_reason else None

    def _take_answer(self, row: Row, at: int) -> Event | None:
        choice = self.choices[at]
        choice.usage = row["usage"]
        if choice.finish_reason is not None:
            return None
        text = choice.finish(row["finish_reason"])
        return Event(at, text, choice.finish_reason)

    def _refusal(self, error: dict[str, str]) -> ApiError:
        if error["status"] in TOO_LARGE:
            return ApiError(400, error["message"], param=self.param, code="context_length_exceeded")
        return ApiError(500, error["message"], kind="server_error", code=error["status"].lower())
