"""Makes the lines of a workload file from requests that end: sizes and times, never contents.

A line goes out when every earlier request has ended, since a file is in order of arrival. Repeated pictures and prompt
prefixes are found by hashes under a key of this run; the latest are kept in memory and none is written: a line has
numbers in order of first appearance. Requests that were refused, failed or were cancelled before their first token have
no line; those cancelled later have one with the tokens generated until then. Reads no clock, writes nothing.
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
from hydra_engine.core.outputs import Result
from hydra_engine.core.request import ImageItem, Request
from hydra_engine.preprocess.preprocessor import CallFacts
from hydra_planner.workload.file import MAX_REQUESTS, Picture, Video, WorkloadRequest, problem_of, request_line

BLOCK_TOKENS = 64  # of text; the granularity of shared prefixes
MAX_WAITING = 4096  # ended requests that wait for an older one; above this the older one gets no line
MAX_PICTURES = 1 << 16  # whose numbers are kept
MAX_BLOCKS = 1 << 17  # of text, whose sessions are kept
_MAX_BLOCKS_OF_PROMPT = 2048
_KEY_BYTES = 16


@dataclass(slots=True)
class _Ended:
    """A request whose line is not out yet. `media`: keys of its pictures and videos; `blocks`: the keys of its text
    blocks, concatenated."""

    row: WorkloadRequest
    media: tuple[bytes, ...]
    blocks: bytes


class WorkloadRecorder:
    """The recorder of requests that arrive at `began_s` or later. `key`: random bytes, at most 64."""

    def __init__(self, key: bytes, began_s: float) -> None:
        self.num_lines = 0
        self._key = key
        self._began_s = began_s
        self._released_s = float("-inf")  # arrival of the latest request whose line is out
        self._waiting: dict[RequestId, _Ended] = {}
        self._order: list[tuple[float, RequestId]] = []  # a heap
        self._numbers: OrderedDict[bytes, int] = OrderedDict()  # of pictures and videos, by key
        self._num_media = 0
        self._sessions: OrderedDict[bytes, int] = OrderedDict()  # by key of a block
        self._num_sessions = 0

    @property
    def full(self) -> bool:
        """True once there are as many lines as a file may have."""
        return self.num_lines >= MAX_REQUESTS

    def record_request(self, request: Request, facts: CallFacts, result: Result) -> None:
        """Adds a request that has ended. Of several answers to one prompt, the longest counts."""
        num_tokens, arrival_s = result.usage.completion_tokens, request.arrival_s
        if not num_tokens or not self._began_s <= arrival_s > self._released_s or self.full:
            return
        known = self._waiting.get(facts.number)
        if known is not None:
            most = max(num_tokens, known.row.output_tokens)
            known.row = msgspec.structs.replace(known.row, output_tokens=most)
            return
        ended = self._ended(request, facts, num_tokens)
        if problem_of(ended.row) is None:
            self._waiting[facts.number] = ended
            heapq.heappush(self._order, (arrival_s, facts.number))

    def release(self, oldest_s: float) -> list[bytes]:
        """Returns the lines that are ready when every request that came before `oldest_s` has ended."""
        lines = []
        while self._order and not self.full:
            if self._order[0][0] >= oldest_s and len(self._order) <= MAX_WAITING:
                break
            self._released_s, number = heapq.heappop(self._order)
            lines.append(request_line(self._row(self._waiting.pop(number))))
            self.num_lines += 1
        return lines

    # ---- one request

    def _ended(self, request: Request, facts: CallFacts, num_tokens: int) -> _Ended:
        salt = request.cache_salt.encode("utf-8", "surrogatepass")
        firsts: dict[int, ImageItem] = {}
        for image in request.images:
            firsts.setdefault(image.source, image)
        pictures: dict[tuple[bytes, int], Picture] = {}  # by key and source
        videos: dict[tuple[bytes, int], Video] = {}
        for source, first in firsts.items():
            key, video = (self._hash(first.digest, salt), source), facts.videos[source]
            if video is None:
                pictures[key] = Picture(first.width, first.height, 0)
            else:
                videos[key] = Video(video.width, video.height, video.num_frames, video.fps, 0)
        row = WorkloadRequest(
            at_s=round(request.arrival_s - self._began_s, 6),
            prompt_tokens=max(facts.num_text, 1),  # 0 for a picture alone
            output_tokens=num_tokens,
            pictures=tuple(pictures.values()),
            videos=tuple(videos.values()),
        )
        return _Ended(row, tuple(key for key, _ in (*pictures, *videos)), b"".join(self._blocks(request, salt)))

    def _blocks(self, request: Request, salt: bytes) -> Iterator[bytes]:
        """Yields a key for each full block of the prompt's text; it covers all text and pictures up to the block's
        end."""
        text = array("q")
        pictures: list[tuple[int, bytes]] = []  # (text tokens before it, digest)
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

    # ---- repeated media and prefixes

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
        """Returns the session and the number of leading blocks shared with its earlier requests; (None, 0) for a prompt
        without a full block."""
        if not keys:
            return None, 0
        num_shared = next((place for place, key in enumerate(keys) if key not in self._sessions), len(keys))
        if num_shared:
            session = self._sessions[keys[num_shared - 1]]
        else:
            session = self._num_sessions
            self._num_sessions += 1
        for key in reversed(keys):  # so that a block is evicted before its predecessors
            _remember(self._sessions, key, session, MAX_BLOCKS)
        return session, num_shared


def _remember(known: OrderedDict[bytes, int], key: bytes, number: int, most: int) -> None:
    """Stores `number` as the most recently used; evicts the least recently used above `most` entries."""
    known[key] = number
    known.move_to_end(key)
    if len(known) > most:
        known.popitem(last=False)
