"""Messages between the frontend process and an instance: tagged structs, encoded with msgpack by `cluster/channel.py`.

The first tag of each union is fixed text, so a frame of another version fails to decode instead of being misread.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from hydra_engine.core.ids import ImageDigest, RequestId
from hydra_engine.core.outputs import StageSpan
from hydra_engine.core.reports import BlockFormat, InstanceSummary, LedgerReport, Status
from hydra_engine.core.request import Request
from hydra_engine.core.results import TokenLogprobs
from hydra_engine.errors import ErrorInfo

WIRE_VERSION = 10


# ---- pixels of an image span, from the preprocessor to a vision lane


@dataclass(frozen=True, slots=True)
class ArrayLayout:
    """An array inside a payload: name, numpy dtype, shape. Its bytes are C-contiguous and follow the bytes of the array
    before it."""

    name: str
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PixelPayload:
    """The pixels of one span, for a vision lane.

    Plain: `count` pictures of one size, uint8 RGB, `count * height * width * 3` bytes, row-major. With `arrays` the
    bytes are those arrays instead (models that run through transformers' own processors).
    """

    digest: ImageDigest
    width: int
    height: int
    data: bytes
    count: int = 1
    arrays: tuple[ArrayLayout, ...] = ()


# ---- frontend -> instance


class Submit(msgspec.Struct, frozen=True, tag=True):
    """A request, or the stages of it that this instance runs.

    `stages`: "EPD" is all of them. With P but not D the KV is offered to another instance while it is computed;
    `HandOver` names that instance in reply to `NeedDecoder`. With `source` the request starts with KV pulled from
    instance `source`. The images with the indices `remote_images` are encoded elsewhere: the instance asks for them
    (`NeedImages`) and pulls the features that are offered to it. An instance without peers refuses a request that needs
    them.
    """

    request: Request
    pixels: tuple[PixelPayload, ...] = ()  # pixels of the images that may be encoded here, in prompt order
    stages: str = "EPD"
    remote_images: tuple[int, ...] = ()
    source: str = ""


class Encode(msgspec.Struct, frozen=True, tag=True):
    """Encodes images of a request that is on instance `target`, and offers the features to that instance.

    `request` has an id of its own, no prompt, and only these images; its image i is image `indices[i]` of request
    `target_request`. Ends with Finished(reason="moved") when all features have been pulled or refused, with
    "withdrawn" if some will not be fetched, or with "error" or "abort" like any request.
    """

    request: Request
    pixels: tuple[PixelPayload, ...]
    target: str
    target_request: RequestId
    indices: tuple[int, ...]


class HandOver(msgspec.Struct, frozen=True, tag=True):
    """Moves a request that decodes here, or is prefilled here for another instance, to instance `target`, which already
    has its `Submit`. Replaces an earlier target; ignored if the request is gone, or if it decodes with penalties or a
    grammar, whose history the other instance does not have."""

    request_id: RequestId
    target: str


class SetRole(msgspec.Struct, frozen=True, tag=True):
    """Sets the stages that the instance accepts from now on, as letters, among those that it was loaded for. Requests
    accepted before are completed."""

    role: str


class ResetCaches(msgspec.Struct, frozen=True, tag=True):
    """Forgets KV blocks (`kv`) and image features (`images`) that no request holds and that could be reused."""

    kv: bool
    images: bool


class Abort(msgspec.Struct, frozen=True, tag=True):
    """Ends a request. The instance answers with Finished(reason="abort") once no step or pull in flight uses its
    blocks. Ignored if the id is unknown or the request has ended already."""

    request_id: RequestId


class QueryLedger(msgspec.Struct, frozen=True, tag=True):
    """Asks for a LedgerReport with the same `query_id`."""

    query_id: int


class Shutdown(msgspec.Struct, frozen=True, tag=True):
    """Stops the instance at once: requests that still run get no Finished. To drain it, the frontend first stops
    submitting and waits."""


ToInstance = Submit | Encode | Abort | HandOver | SetRole | ResetCaches | QueryLedger | Shutdown


# ---- instance -> frontend


class Loading(msgspec.Struct, frozen=True, tag=True):
    """Progress of the start: `done` of `total` of what `what` says to a reader, such as bytes of weights."""

    what: str
    done: int
    total: int


class Ready(msgspec.Struct, frozen=True, tag=True):
    """Reports that the instance has started and accepts requests. `version`: its WIRE_VERSION."""

    version: int
    summary: InstanceSummary


class Delta(msgspec.Struct, frozen=True, tag=True):
    """New tokens of one request with log probabilities; without these `Tokens` is sent. `position`: number of generated
    tokens before these, so that a lost message is noticed. `time_s`: end of the step, on the monotonic clock."""

    request_id: RequestId
    position: int
    token_ids: tuple[int, ...]
    time_s: float
    logprobs: tuple[TokenLogprobs, ...] = ()
    late: StageSpan | None = None  # the wait for the first of these tokens, if that is late


class Tokens(msgspec.Struct, frozen=True, tag=True):
    """The new tokens of one step, at most one per request; entries i of all lists belong to the same token. Stop tokens
    are included. `time_s`: end of the step, on the monotonic clock."""

    request_ids: list[int]
    positions: list[int]  # number of generated tokens before this one
    token_ids: list[int]
    time_s: float
    late: dict[int, StageSpan] = {}  # request id -> the wait for its token, for late tokens


class Finished(msgspec.Struct, frozen=True, tag=True):
    """The last message of this instance about a request: no step or pull in flight uses it, and its blocks here are
    free. The only message about a request that the instance refuses."""

    request_id: RequestId
    reason: str  # a FinishReason or a Departure
    num_generated: int  # with the tokens of earlier attempts
    stop_token_id: int | None = None  # the end-of-sequence or stop token that ended it
    error: ErrorInfo | None = None
    spans: tuple[StageSpan, ...] = ()  # times absolute, on the monotonic clock
    num_preemptions: int = 0
    cached_tokens: int = 0  # prompt tokens found in the KV cache
    cached_images: int = 0  # images without an encode of their own
    clock_error_s: float = 0.0  # of the times of the spans and tokens, against the frontend's clock


class NeedImages(msgspec.Struct, frozen=True, tag=True):
    """Asks the frontend to have these images of a request encoded by other instances, since their features are not in
    the cache here. Sent again for an image whose features were pulled and then evicted."""

    request_id: RequestId
    indices: tuple[int, ...]


class NeedDecoder(msgspec.Struct, frozen=True, tag=True):
    """Asks which instance will decode a request that is prefilled here for another one, when its first chunk is about
    to be computed. `HandOver` answers; the question may be repeated until then."""

    request_id: RequestId


class PeerState(msgspec.Struct, frozen=True, tag=True):
    """Reports whether blocks can be exchanged with this incarnation of another instance. `problem`: why not, if that is
    known."""

    name: str
    incarnation: int
    up: bool
    problem: str = ""


class PromptScores(msgspec.Struct, frozen=True, tag=True):
    """Log probabilities of prompt tokens that a chunk has computed. `logprobs[i]` belongs to the prompt token at
    position `start` + i, given the tokens before it. Chunks may be computed and sent again, with equal values. All are
    sent before the request's first token."""

    request_id: RequestId
    start: int
    logprobs: tuple[TokenLogprobs, ...]


class Failed(msgspec.Struct, frozen=True, tag=True):
    """Reports that the instance cannot start or continue; it exits after this."""

    error: ErrorInfo
    exit_code: int


RequestMessage = Tokens | Delta | PromptScores | Finished
"""Messages of a scheduler about requests. Each accepted request ends in one Finished. The messages of one step's result
come in this order: prompt scores, tokens, then the Finished of requests that have ended."""

StartMessage = Loading | BlockFormat | Ready | Failed
ToFrontend = RequestMessage | NeedImages | NeedDecoder | StartMessage | PeerState | Status | LedgerReport
