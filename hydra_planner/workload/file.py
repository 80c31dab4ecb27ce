"""A workload as a file: sizes and times of each request of a load, never contents.

JSON lines. The first one names the format; each other one is a request, in the order of arrival:

    {"format": "hydra-engine workload", "version": 1}
    {"at_s": 0.0, "prompt_tokens": 32, "output_tokens": 64, "pictures": [[1024, 768, 0]]}
    {"at_s": 0.4, "prompt_tokens": 90, "output_tokens": 64, "session": 3, "shared_tokens": 32}

The server records one (`--record-workload FILE`), generators make others, the planner reads them. A file can be read
while it is written, or after its writer has died: an incomplete last line is ignored.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from hydra_engine.errors import ConfigError

FORMAT, VERSION = "hydra-engine workload", 1
MAX_REQUESTS = 1_000_000  # per file
_MAX_TOKENS = 1 << 24
_MAX_SIDE = 1 << 20  # pixels
_MAX_FRAMES = 1 << 20


class Picture(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A picture's size in pixels before any resizing. Requests with the same picture have the same `number`."""

    width: int
    height: int
    number: int


class Video(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    width: int
    height: int
    frames: int  # of the source
    fps: float
    number: int


class WorkloadRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """A request. `prompt_tokens` are those of its text, without image tokens. The first `shared_tokens` of them are
    also the first ones of an earlier request of the same `session` (a conversation, or one system prompt), so a prefix
    cache may have them. `kind` is a label for tables."""

    at_s: float  # seconds since the load, or its recording, began
    prompt_tokens: int
    output_tokens: int
    pictures: tuple[Picture, ...] = ()
    videos: tuple[Video, ...] = ()
    session: int | None = None
    shared_tokens: int = 0
    kind: str = ""


class _Header(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    format: str
    version: int
    source: str = ""


def header_line(source: str = "") -> bytes:
    """Returns the first line of a file, without its newline. `source`: where the requests come from, in a few words."""
    return msgspec.json.encode(_Header(format=FORMAT, version=VERSION, source=source))


def request_line(request: WorkloadRequest) -> bytes:
    return msgspec.json.encode(request)


def read_workload(path: Path) -> tuple[WorkloadRequest, ...]:
    """Returns the requests in order of arrival. Raises ConfigError, which names the line and its problem."""
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise _refused(path, f"cannot be read: {error.strerror}") from error
    if len(lines) > 1 and not _is_whole(lines[-1]):
        lines.pop()
    _check_header(path, lines)
    if len(lines) - 1 > MAX_REQUESTS:
        raise _refused(path, f"has {len(lines) - 1} requests; give at most {MAX_REQUESTS}")
    decoder = msgspec.json.Decoder(WorkloadRequest, strict=True)
    requests: list[WorkloadRequest] = []
    for number, line in enumerate(lines[1:], start=2):
        try:
            request = decoder.decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            problem = str(error) if line.strip() else "it is empty"
            raise _refused(path, f"has a line {number} that is no request: {problem}") from error
        if (wrong := problem_of(request)) is not None:
            raise _refused(path, f"has a line {number} that makes no sense: {wrong}")
        if requests and request.at_s < requests[-1].at_s:
            raise _refused(path, f"is out of order: line {number} comes before the one above it; sort it by at_s")
        requests.append(request)
    if not requests:
        raise _refused(path, "has no requests")
    return tuple(requests)


def problem_of(request: WorkloadRequest) -> str | None:
    """Returns why the request is impossible, or None."""
    if not math.isfinite(request.at_s) or request.at_s < 0:
        return "at_s must be a number of seconds, 0 or more"
    for name, value, least in (
        ("prompt_tokens", request.prompt_tokens, 1),
        ("output_tokens", request.output_tokens, 1),
        ("shared_tokens", request.shared_tokens, 0),
    ):
        if not least <= value <= _MAX_TOKENS:
            return f"{name} must be between {least} and {_MAX_TOKENS}"
    if request.session is not None and request.session < 0:
        return "session must be 0 or more"
    if request.shared_tokens > request.prompt_tokens:
        return "shared_tokens must not exceed prompt_tokens"
    if request.shared_tokens and request.session is None:
        return "shared_tokens needs a session that shares them"
    media: tuple[Picture | Video, ...] = (*request.pictures, *request.videos)
    for picture in media:
        if not (1 <= picture.width <= _MAX_SIDE and 1 <= picture.height <= _MAX_SIDE):
            return f"a picture of {picture.width} x {picture.height} pixels cannot be"
        if picture.number < 0:
            return "the number of a picture must be 0 or more"
    for video in request.videos:
        if not (1 <= video.frames <= _MAX_FRAMES and 0 < video.fps < math.inf):
            return "a video needs frames, and frames per second"
    return None


def _is_whole(last: bytes) -> bool:
    """True if the bytes after the last newline are a complete line."""
    try:
        msgspec.json.decode(last)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return False
    return True


def _check_header(path: Path, lines: Sequence[bytes]) -> None:
    try:
        found: Any = msgspec.json.decode(lines[0], type=_Header, strict=True)
    except (msgspec.DecodeError, UnicodeDecodeError):
        found = None
    if found is None or found.format != FORMAT:
        raise _refused(path, f'is no workload: its first line must be {{"format": "{FORMAT}", "version": {VERSION}}}')
    if found.version != VERSION:
        raise _refused(path, f"is a workload of version {found.version}; this version of the engine reads {VERSION}")


def _refused(path: Path, problem: str) -> ConfigError:
    return ConfigError(f"the workload {path.name} {problem}", param="workload")
