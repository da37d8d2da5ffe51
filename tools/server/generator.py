# SPDX-License-Identifier: Apache-2.0
"""kvleaf-generate as a child process: requests in, rows out to whoever waits for them."""
from __future__ import annotations

import asyncio
import json
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

Row = dict[str, Any]

LINE_LIMIT = 1 << 28    # bytes of one row; the picture of a large pool takes a few MiB
STOP_SECONDS = 10
STATS_AGE = 0.2         # counts younger than this are given out again


class Down(Exception):
    """kvleaf-generate is not there to answer; the message says why."""


@dataclass(eq=False)
class Job:
    """One request to kvleaf-generate. Its rows go to the queue as (job, row), its end by accident as (job, Down)."""

    id: int
    samples: int
    queue: asyncio.Queue[tuple[Job, Row | Down]]
    first: int = 0              # the number of its first sample for whoever asked
    open: set[int] = field(default_factory=set)     # samples that have not been answered for


class Counts:
    """One kind of statistics: whoever asks while a question is open shares its answer."""

    def __init__(self, question: object) -> None:
        self.question = question
        self.row: Row = {}
        self.taken = float("-inf")
        self.waiting: asyncio.Future[Row] | None = None


class Generator:
    """Runs the command. A child that dies after it has answered something is started again."""

    def __init__(self, command: Sequence[str], log: Callable[[str], None]) -> None:
        self.command, self.log = list(command), log
        self.failure: str | None = None     # why there is no child
        self.ready = False                  # it has answered something
        self.restarts = 0
        self.in_flight = 0                  # samples of open jobs
        self.jobs: dict[int, Job] = {}
        self.counts = {False: Counts(True), True: Counts("map")}
        self.asked: deque[Counts] = deque()
        self.process: asyncio.subprocess.Process | None = None
        self.watch: asyncio.Task[None] | None = None
        self.said: deque[str] = deque(maxlen=20)    # the last lines of its stderr
        self.last_id = 0
        self.stopping = False

    # ------------------------------------------------------------------------------ the process

    async def start(self) -> None:
        """Starts the child and waits until it answers. Raises Down where it does not."""
        await self._spawn()
        await self.stats()

    async def _spawn(self) -> None:
        self.ready, self.failure = False, None
        self.said.clear()
        try:
            # A session of its own: an interrupt at the terminal is for the server, which ends the child in order.
            self.process = await asyncio.create_subprocess_exec(
                *self.command, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE, limit=LINE_LIMIT, start_new_session=True)
        except OSError as error:
            self.failure = f"{self.command[0]} can't be run: {error.strerror}"
            raise Down(self.failure) from error
        self.watch = asyncio.create_task(self._follow(self.process))

    async def _follow(self, process: asyncio.subprocess.Process) -> None:
        """Reads all that the child writes until it ends; then tells everybody, and starts it again."""
        errors = asyncio.create_task(self._read_errors(process))
        try:
            await self._read_rows(process)
        except (ValueError, LookupError, TypeError) as error:
            self.said.append(f"a row is not understood: {error!r}")
            process.kill()
        await errors
        code = await process.wait()
        if self.stopping:
            return
        how = f"signal {-code}" if code < 0 else f"status {code}"
        why = f"kvleaf-generate ended with {how}" + (f": {self.said[-1]}" if self.said else "")
        for line in [*self.said, why]:
            self.log(line)
        again = self.ready
        self._end_all(why)
        if again:
            self.restarts += 1
            self.log("kvleaf-generate is started again")
            try:
                await self._spawn()
                self._ask(self.counts[False])
            except Down as down:
                self._end_all(str(down))

    async def _read_errors(self, process: asyncio.subprocess.Process) -> None:
        assert process.stderr is not None
        async for line in process.stderr:
            self.said.append(line.decode(errors="replace").rstrip())

    async def _read_rows(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdout is not None
        async for line in process.stdout:
            row = json.loads(line)
            self.ready = True
            if "stats" in row:
                self._take_stats(self.asked.popleft(), row)
            elif row.get("id") in self.jobs:
                self._take_row(self.jobs[row["id"]], row)
            elif row.get("id") is None:
                raise ValueError(line[:200])

    def _end_all(self, why: str) -> None:
        self.failure, self.ready = why, False
        for job in list(self.jobs.values()):
            self._forget(job)
            job.queue.put_nowait((job, Down(why)))
        for counts in self.asked:
            if counts.waiting is not None and not counts.waiting.done():
                counts.waiting.set_exception(Down(why))
                counts.waiting.exception()  # nobody may be waiting
            counts.waiting = None
        self.asked.clear()

    def give_up(self) -> None:
        """Ends all that runs; whoever waits for it hears why."""
        self.stopping = True
        for job in self.jobs.values():
            self._send({"cancel": job.id})
        self._end_all("the server is being stopped")

    async def stop(self) -> None:
        """Ends the child."""
        self.give_up()
        if self.process is None or self.watch is None:
            return
        assert self.process.stdin is not None
        self.process.stdin.close()
        try:
            await asyncio.wait_for(asyncio.shield(self.watch), STOP_SECONDS)
        except asyncio.TimeoutError:
            self.process.kill()
            await self.watch

    # ------------------------------------------------------------------------------ requests

    def _send(self, line: object) -> None:
        if self.failure is not None or self.process is None:
            raise Down(self.failure or "kvleaf-generate is not running")
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(line).encode() + b"\n")

    def submit(self, fields: Row, samples: int, queue: asyncio.Queue[tuple[Job, Row | Down]], first: int = 0) -> Job:
        """Hands a request in. Its samples' rows come to the queue until each was answered for or the job is closed."""
        self.last_id += 1
        job = Job(self.last_id, samples, queue, first, set(range(samples)))
        self._send({"id": job.id, "n": samples, **fields})
        self.jobs[job.id] = job
        self.in_flight += samples
        return job

    def cancel(self, job: Job, index: int) -> None:
        """Ends one sample; its answer says finish_reason "cancel", or whatever it came to before."""
        if job.id in self.jobs:
            self._send({"cancel": job.id, "index": index})

    def close(self, job: Job) -> None:
        """Ends the job and all that still runs of it."""
        if job.id in self.jobs:
            self._forget(job)
            self._send({"cancel": job.id})

    def _forget(self, job: Job) -> None:
        del self.jobs[job.id]
        self.in_flight -= job.samples

    def _take_row(self, job: Job, row: Row) -> None:
        if "error" in row:
            job.open.clear()
        elif "token" not in row:
            job.open.discard(row["index"])
        if not job.open:
            self._forget(job)
        job.queue.put_nowait((job, row))

    # ------------------------------------------------------------------------------ statistics

    def _ask(self, counts: Counts) -> asyncio.Future[Row]:
        if counts.waiting is None:
            self._send({"stats": counts.question})
            counts.waiting = asyncio.get_running_loop().create_future()
            self.asked.append(counts)
        return counts.waiting

    def _take_stats(self, counts: Counts, row: Row) -> None:
        counts.row, counts.taken = row, time.monotonic()
        if counts.waiting is not None and not counts.waiting.done():
            counts.waiting.set_result(row)
        counts.waiting = None

    async def stats(self, with_map: bool = False) -> Row:
        """{"stats": {name: number}} and, if asked for, "map": a picture of the pool as SVG."""
        counts = self.counts[with_map]
        if self.failure is None and time.monotonic() - counts.taken < STATS_AGE:
            return counts.row
        return await asyncio.shield(self._ask(counts))
