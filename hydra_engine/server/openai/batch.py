"""A file of requests in OpenAI's batch form, answered by the HTTP application: one line in, one line out, up to a
number at once.

Requests go through a socket that only this process can reach, so a line is read, refused and answered like the same
body at its route. Answers are written as they come, in any order; `custom_id` identifies them. Does not know files,
command lines or engines.
"""

from __future__ import annotations

import asyncio
import tempfile
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Annotated, Literal

import aiohttp
import msgspec
from aiohttp import web
from msgspec import Meta

from hydra_engine.core.units import size
from hydra_engine.errors import HydraError, InvalidRequest
from hydra_engine.server.http.answers import ErrorBody, error_json
from hydra_engine.server.http.body import parse_request
from hydra_engine.server.http.strict_json import NO_NUL

MAX_ID_CHARS = 512
MAX_OVERHEAD = 1 << 16  # bytes of a line in addition to its body
_ATTEMPTS = 5  # after 503: the server is overloaded, or an instance was lost
_MAX_WAIT_S = 30.0
_CLOSE_S = 1.0

ENDPOINTS = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages")


class BatchLine(msgspec.Struct, frozen=True):
    custom_id: Annotated[str, Meta(min_length=1, max_length=MAX_ID_CHARS, pattern=NO_NUL)]
    method: Literal["POST"]
    url: Annotated[str, Meta(max_length=MAX_ID_CHARS)]
    body: msgspec.Raw


class BatchAnswer(msgspec.Struct, frozen=True):
    """A route's answer; `body` is its JSON."""

    status_code: int
    request_id: str
    body: msgspec.Raw


class BatchResult(msgspec.Struct, frozen=True):
    """A line of the output. `custom_id` is null if it cannot be read. `error` repeats the error of the body."""

    id: str
    custom_id: str | None
    response: BatchAnswer
    error: ErrorBody | None


class _Streaming(msgspec.Struct, frozen=True):
    stream: bool | None = None


class _Named(msgspec.Struct, frozen=True):
    custom_id: str | None = None


class Batch:
    """A client that sends lines to the application on its own socket; created by `serving`."""

    def __init__(self, session: aiohttp.ClientSession, max_bytes: int) -> None:
        self.num_done = 0
        self.num_failed = 0  # part of num_done
        self.first_failure = ""  # the line that failed first, and the reason
        self._session = session
        self._max_bytes = max_bytes

    @property
    def max_line_bytes(self) -> int:
        return self._max_bytes + MAX_OVERHEAD

    async def run(
        self, lines: AsyncIterator[tuple[int, bytes]], write: Callable[[bytes], None], concurrency: int
    ) -> None:
        """Answers all lines, up to `concurrency` at once. `lines` yields (number, text) and is read only when a request
        can start; lines that are too long may be cut, to more than `max_line_bytes`. `write` takes a line without its
        line end; an exception from it ends the run."""
        room = asyncio.Semaphore(concurrency)

        async def run_line(number: int, line: bytes) -> None:
            try:
                write(msgspec.json.encode(await self._answered(number, line)))
            finally:
                room.release()

        try:
            async with asyncio.TaskGroup() as running:
                await room.acquire()
                async for number, line in lines:
                    running.create_task(run_line(number, line))
                    await room.acquire()
        except ExceptionGroup as failures:
            task = asyncio.current_task()
            if task is not None and task.cancelling():  # closed connections fail in many ways
                raise asyncio.CancelledError from None
            raise failures.exceptions[0] from None

    async def _answered(self, number: int, line: bytes) -> BatchResult:
        try:
            answer = await self._ask(self._read(number, line))
        except HydraError as error:
            answer = BatchAnswer(error.status, "", msgspec.Raw(error_json(error)))
        self.num_done += 1
        problem = None if answer.status_code == 200 else _error_of(answer)
        if problem is not None:
            self.num_failed += 1
            where = f"line {number}: "
            self.first_failure = self.first_failure or where + problem.message.removeprefix(where)
        return BatchResult(f"batch_req_{uuid.uuid4().hex}", _custom_id(line), answer, problem)

    def _read(self, number: int, line: bytes) -> BatchLine:
        """Parses a line. Raises InvalidRequest, which names the line if nothing else does."""
        if len(line) > self.max_line_bytes:
            raise InvalidRequest(f"line {number} is longer than {size(self.max_line_bytes)}")
        try:
            item = parse_request(line, BatchLine)
        except InvalidRequest as error:
            raise InvalidRequest(f"line {number}: {error.message}", param=error.param) from None
        if item.url not in ENDPOINTS:
            raise InvalidRequest(f"line {number}: url must be one of {', '.join(ENDPOINTS)}", param="url")
        return item

    async def _ask(self, item: BatchLine) -> BatchAnswer:
        body = bytes(item.body)
        if _is_streamed(body):
            raise InvalidRequest("answers of a batch are whole; leave out stream", param="stream")
        for attempt in range(1, _ATTEMPTS + 1):
            headers = {"Content-Type": "application/json"}
            async with self._session.post("http://localhost" + item.url, data=body, headers=headers) as response:
                answer = BatchAnswer(
                    response.status, response.headers.get("X-Request-Id", ""), msgspec.Raw(await response.read())
                )
                wait_s = min(float(response.headers.get("Retry-After", 0)), _MAX_WAIT_S)
            if answer.status_code != 503 or attempt == _ATTEMPTS:
                break
            await asyncio.sleep(wait_s)
        return answer


def _custom_id(line: bytes) -> str | None:
    try:
        name = msgspec.json.decode(line, type=_Named).custom_id
    except msgspec.DecodeError:
        return None
    return name if name is None or len(name) <= MAX_ID_CHARS else None


def _is_streamed(body: bytes) -> bool:
    """True if the body asks for a stream. An invalid body gives False: its route reports the error."""
    try:
        return bool(msgspec.json.decode(body, type=_Streaming).stream)
    except msgspec.DecodeError:
        return False


def _error_of(answer: BatchAnswer) -> ErrorBody:
    """The error in OpenAI's form, also from a route with another error form."""
    error = msgspec.json.decode(answer.body)["error"]
    return ErrorBody(error["message"], error["type"], error.get("param"), error.get("code"))


@asynccontextmanager
async def serving(app: web.Application, max_bytes: int) -> AsyncIterator[Batch]:
    """Runs the application on a socket in a folder that no other user may enter, and yields a Batch. `max_bytes`:
    limit of one body."""
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=_CLOSE_S, access_log=None)
    await runner.setup()
    try:
        with tempfile.TemporaryDirectory(prefix="hydra-") as folder:
            path = str(Path(folder) / "batch")
            await web.UnixSite(runner, path).start()
            connector = aiohttp.UnixConnector(path, limit=0)
            timeout = aiohttp.ClientTimeout(total=None)
            async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
                yield Batch(session, max_bytes)
    finally:
        await runner.cleanup()
