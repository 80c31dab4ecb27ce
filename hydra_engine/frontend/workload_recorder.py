"""The lines of a workload file for the requests that end: sizes and times, never contents.

A line goes out when every request that came earlier has ended, for a file is in the order of arrival. Pictures and
beginnings of prompts that come again are found by hashes under a key of this run, of which the latest are kept and none
is written: a line has numbers in the order of appearance. Requests that were refused, failed or were cancelled before
their first token have no line; those that were cancelled later have what was generated. Reads no clock, writes nothing.
"""

from __future__ import annotations

import heapq
from array import array
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b

import msgspec

from hydra_engine.core.ids import RequestId
from hydra_engine.core.media import ImageItem
from hydra_engine.core.outputs import Result
from hydra_engine.core.request import Request
from hydra_engine.preprocess.preprocessor import Asked
from hydra_engine.telemetry.workload import MOST_REQUESTS, Picture, Video, WorkloadRequest, problem_of, request_line

BLOCK_TOKENS = 64  # of text; shared beginnings are told in steps of it
MAX_WAITING = 4096  # requests that have ended behind one that runs, which has no line if there are more
MAX_PICTURES = 1 << 16  # remembered
MAX_BLOCKS = 1 << 17  # of text, remembered
_MAX_BLOCKS_OF_PROMPT = 2048
_KEY_BYTES = 16


@dataclass(slots=True)
class _Ended:
    """A request whose line waits. `media`: the keys of its pictures and videos; `blocks`: of its text, one after the
    other."""

    row: WorkloadRequest
    media: tuple[bytes, ...]
    blocks: bytes


class WorkloadRecorder:
    """`key`: random bytes, at most 64. Records requests that came at `began_s` or later."""

    def __init__(self, key: bytes, began_s: float) -> None:
        self.num_lines = 0
        self._key = key
        self._began_s = began_s
        self._released_s = float("-inf")  # when the latest one came whose line is out
        self._waiting: dict[RequestId, _Ended] = {}
        self._order: list[tuple[float, RequestId]] = []  # a heap
        self._numbers: OrderedDict[bytes, int] = OrderedDict()  # of pictures and videos
        self._num_media = 0
        self._sessions: OrderedDict[bytes, int] = OrderedDict()  # by blocks
        self._num_sessions = 0

    @property
    def full(self) -> bool:
        """There are as many lines as a file may have; no more come."""
        return self.num_lines >= MOST_REQUESTS

    def ended(self, request: Request, asked: Asked, result: Result) -> None:
        """Of several answers to one prompt the longest counts."""
        num_tokens, arrival_s = result.usage.completion_tokens, request.arrival_s
        if not num_tokens or not self._began_s <= arrival_s > self._released_s or self.full:
            return
        known = self._waiting.get(asked.number)
        if known is not None:
            most = max(num_tokens, known.row.output_tokens)
            known.row = msgspec.structs.replace(known.row, output_tokens=most)
            return
        ended = self._ended(request, asked, num_tokens)
        if problem_of(ended.row) is None:
            self._waiting[asked.number] = ended
            heapq.heappush(self._order, (arrival_s, asked.number))

    def release(self, oldest_s: float) -> list[bytes]:
        """The lines that can be written now that all requests have ended that came before `oldest_s`."""
        lines = []
        while self._order and not self.full:
            if self._order[0][0] >= oldest_s and len(self._order) <= MAX_WAITING:
                break
            self._released_s, number = heapq.heappop(self._order)
            lines.append(request_line(self._row(self._waiting.pop(number))))
            self.num_lines += 1
        return lines

    # ---- one request

    def _ended(self, request: Request, asked: Asked, num_tokens: int) -> _Ended:
        salt = request.cache_salt.encode("utf-8", "surrogatepass")
        firsts: dict[int, ImageItem] = {}
        for image in request.images:
            firsts.setdefault(image.source, image)
        pictures: dict[tuple[bytes, int], Picture] = {}  # by key and source
        videos: dict[tuple[bytes, int], Video] = {}
        for source, first in firsts.items():
            key, video = (self._hash(first.digest, salt), source), asked.videos[source]
            if video is None:
                pictures[key] = Picture(first.width, first.height, 0)
            else:
                videos[key] = Video(video.width, video.height, video.num_frames, video.fps, 0)
        row = WorkloadRequest(
            at_s=round(request.arrival_s - self._began_s, 6),
            prompt_tokens=max(asked.num_text, 1),  # of a picture alone there are none
            output_tokens=num_tokens,
            pictures=tuple(pictures.values()),
            videos=tuple(videos.values()),
        )
        return _Ended(row, tuple(key for key, _ in (*pictures, *videos)), b"".join(self._blocks(request, salt)))

    def _blocks(self, request: Request, salt: bytes) -> Iterator[bytes]:
        """A key for each full block of the prompt's text, which covers all text and pictures before its end."""
        text = array("q")
        pictures: list[tuple[int, bytes]] = []  # tokens of text before it
        begin = 0
        for image in request.images:
            text.extend(request.prompt_token_ids[begin : image.start])
            pictures.append((len(text), image.digest))
            begin = image.end
        text.extend(request.prompt_token_ids[begin:])
        parent, place = salt, 0
        for end in range(BLOCK_TOKENS, min(len(text), _MAX_BLOCKS_OF_PROMPT * BLOCK_TOKENS) + 1, BLOCK_TOKENS):
            before = place
            while place < len(pictures) and pictures[place][0] < end:
                place += 1
            seen = b"".join(b"%d:" % at + digest for at, digest in pictures[before:place])
            parent = self._hash(parent, text[end - BLOCK_TOKENS : end].tobytes(), seen)
            yield parent

    def _hash(self, *parts: bytes) -> bytes:
        digest = blake2b(digest_size=_KEY_BYTES, key=self._key)
        for part in parts:
            digest.update(b"%d:" % len(part))
            digest.update(part)
        return digest.digest()

    # ---- what came before

    def _row(self, ended: _Ended) -> WorkloadRequest:
        row = ended.row
        numbers = map(self._number, ended.media)
        keys = [ended.blocks[at : at + _KEY_BYTES] for at in range(0, len(ended.blocks), _KEY_BYTES)]
        session, num_shared = self._session(keys)
        return msgspec.structs.replace(
            row,
            pictures=tuple(msgspec.structs.replace(picture, number=next(numbers)) for picture in row.pictures),
            videos=tuple(msgspec.structs.replace(video, number=next(numbers)) for video in row.videos),
            session=session,
            shared_tokens=min(num_shared * BLOCK_TOKENS, row.prompt_tokens),
        )

    def _number(self, key: bytes) -> int:
        number = self._numbers.get(key)
        if number is None:
            number = self._num_media
            self._num_media += 1
        _remember(self._numbers, key, number, MAX_PICTURES)
        return number

    def _session(self, keys: Sequence[bytes]) -> tuple[int | None, int]:
        """The session, and how many blocks an earlier request of it has too. A prompt without a full block has none."""
        if not keys:
            return None, 0
        num_shared = next((place for place, key in enumerate(keys) if key not in self._sessions), len(keys))
        if num_shared:
            session = self._sessions[keys[num_shared - 1]]
        else:
            session = self._num_sessions
            self._num_sessions += 1
        for key in reversed(keys):  # a block is forgotten before those that it needs to be found
            _remember(self._sessions, key, session, MAX_BLOCKS)
        return session, num_shared


def _remember(known: OrderedDict[bytes, int], key: bytes, number: int, most: int) -> None:
    """As the latest; forgets the one that was not seen for longest where there are too many."""
    known[key] = number
    known.move_to_end(key)
    if len(known) > most:
        known.popitem(last=False)
