"""What travels between the process with the engine and one that serves HTTP for it (a front worker), in the frames of
`cluster/wire.py`. Both ends are of one version: the worker is started from the files of its parent.

Numbers are the worker's and name one generation, one submission or one question of its life. Does not know sockets.
"""

from __future__ import annotations

from typing import Any

import msgspec

from hydra_engine.cluster.wire import WireError
from hydra_engine.config import ServerConfig
from hydra_engine.core.instances import InstanceState
from hydra_engine.core.messages import InstanceSummary, Status
from hydra_engine.core.outputs import Piece, Result, Usage
from hydra_engine.core.prompting import PixelBudget, TemplateOptions
from hydra_engine.core.request import SamplingParams, Slo
from hydra_engine.errors import ErrorInfo, HydraError, from_info
from hydra_engine.server.auth import Key

MAX_DOWN_BYTES = (1 << 32) - 1  # of one frame; what an answer may be is bounded where it is made
_UP_BYTES = 16 << 20  # besides what follows from a body
_BODY_GROWTH = 4  # a body as messages takes at most this many times its bytes: names of fields, and headers of values


def max_up_bytes(config: ServerConfig) -> int:
    return min(_UP_BYTES + _BODY_GROWTH * config.max_body_bytes, MAX_DOWN_BYTES)


# ---- to the engine's process


class Hello(msgspec.Struct, frozen=True, tag=True):
    """Connections are taken from here on."""


class Open(msgspec.Struct, frozen=True, tag=True):
    """A generation begins. What speaks against it is the answer to the submissions that name it."""

    number: int
    client: str
    tenant: str
    ids: tuple[str, ...]
    num_answers: int


class Close(msgspec.Struct, frozen=True, tag=True):
    number: int


class Submit(msgspec.Struct, frozen=True, tag=True):
    """Answered by Admitted or Failed. `template` is JSON: the integers in it may have more than 64 bits."""

    number: int
    generation: int  # 0: none
    request_id: str
    prompt: str | list[int] | None
    messages: list[dict[str, Any]] | None
    sampling: SamplingParams
    raw: bool
    slo: Slo
    cache_salt: str
    priority: int
    template: bytes | None
    pixels: PixelBudget | None


class Read(msgspec.Struct, frozen=True, tag=True):
    """Somebody waits for an admitted submission: for its pieces, or for the result alone."""

    number: int
    pieces: bool


class Cancel(msgspec.Struct, frozen=True, tag=True):
    """Nobody waits any more for a submission or an answer."""

    number: int


class Ask(msgspec.Struct, frozen=True, tag=True):
    """Answered by Answer or Failed."""

    number: int
    question: Question


class Counted(msgspec.Struct, frozen=True, tag=True):
    """What `Metrics` is to be told, in the order of its parameters."""

    answered: list[tuple[str, int, str | None, str, float]] = []  # route, status, client, method, seconds
    generated: list[tuple[int, int]] = []
    rejected: list[str | None] = []


class Beat(msgspec.Struct, frozen=True, tag=True):
    """At intervals: a sign of life. `lags` of the loop in seconds, `cpu_s` of the process since its start."""

    lags: list[float]
    cpu_s: float


class GiveBack(msgspec.Struct, frozen=True, tag=True):
    """Of what was granted for bodies."""

    num_bytes: int


class LeaveSeat(msgspec.Struct, frozen=True, tag=True):
    """A viewer of the page has gone."""


# ---- questions, and what answers them


class Tokenize(msgspec.Struct, frozen=True, tag=True):
    """list[int]"""

    prompt: str | None
    messages: list[dict[str, Any]] | None
    add_special_tokens: bool
    template: bytes | None


class CountTokens(msgspec.Struct, frozen=True, tag=True):
    """int"""

    messages: list[dict[str, Any]]
    template: bytes | None


class Detokenize(msgspec.Struct, frozen=True, tag=True):
    """str"""

    token_ids: list[int]


class SpellTokens(msgspec.Struct, frozen=True, tag=True):
    """list[str], as the vocabulary has each token"""

    token_ids: list[int]


class SetTopology(msgspec.Struct, frozen=True, tag=True):
    """None, behind a State in which it can be seen."""

    text: str


class ResetCaches(msgspec.Struct, frozen=True, tag=True):
    """None"""

    kv: bool
    images: bool


class TraceEvents(msgspec.Struct, frozen=True, tag=True):
    """list[dict]"""

    seconds: float


class GetActivity(msgspec.Struct, frozen=True, tag=True):
    """Activity"""

    since: int
    limit: int


class GetLedger(msgspec.Struct, frozen=True, tag=True):
    """LedgerReport"""


class CountRequest(msgspec.Struct, frozen=True, tag=True):
    """None"""

    client: str


class EndRequests(msgspec.Struct, frozen=True, tag=True):
    """int"""

    tenant: str
    one: str


class NumRunning(msgspec.Struct, frozen=True, tag=True):
    """int"""


class GetOutcomes(msgspec.Struct, frozen=True, tag=True):
    """Outcomes"""


class MetricsPage(msgspec.Struct, frozen=True, tag=True):
    """tuple[bytes, str]"""

    accept: str


class Grant(msgspec.Struct, frozen=True, tag=True):
    """int: bytes granted for bodies, the least or the more that was asked for; 0: there is no room."""

    least: int
    rather: int


class Fits(msgspec.Struct, frozen=True, tag=True):
    """bool: `num_bytes` would be granted."""

    num_bytes: int


class TakeSeat(msgspec.Struct, frozen=True, tag=True):
    """None"""


Question = (
    Tokenize
    | CountTokens
    | Detokenize
    | SpellTokens
    | SetTopology
    | ResetCaches
    | TraceEvents
    | GetActivity
    | GetLedger
    | CountRequest
    | EndRequests
    | NumRunning
    | GetOutcomes
    | MetricsPage
    | Grant
    | Fits
    | TakeSeat
)
ToMain = Hello | Open | Close | Submit | Read | Cancel | Ask | Counted | Beat | GiveBack | LeaveSeat


# ---- to the worker


class Start(msgspec.Struct, frozen=True, tag=True):
    """The first frame. `config` is without keys and files of keys, of which a worker has digests alone."""

    name: str
    config: ServerConfig
    model_name: str
    created: int
    secret: bytes
    keys: tuple[Key, ...]
    admin: tuple[bytes, ...]
    debug_endpoints: bool
    log_level: str
    log_format: str
    spare_bytes: int  # that a worker may hold for bodies that come next


class KeysHold(msgspec.Struct, frozen=True, tag=True):
    """From here on these."""

    keys: tuple[Key, ...]


class Loaded(msgspec.Struct, frozen=True, tag=True):
    """What is known once the model has been loaded."""

    max_model_len: int
    chat_template: str | None
    summaries: tuple[InstanceSummary, ...]


class State(msgspec.Struct, frozen=True, tag=True):
    """When it has changed, and at intervals. Instances come without their summaries."""

    serving: bool
    reason: str
    draining: bool
    instances: tuple[InstanceState, ...] = ()
    statuses: dict[str, Status] = {}
    total: Status | None = None


class Admitted(msgspec.Struct, frozen=True, tag=True):
    number: int
    prompt_usage: Usage | None


class Pieces(msgspec.Struct, tag=True):
    """Pieces of one token and its text, of a turn of the loop: entry i of every list belongs together."""

    numbers: list[int]
    texts: list[str]
    token_ids: list[int]


class OnePiece(msgspec.Struct, frozen=True, tag=True):
    """Any other one."""

    number: int
    piece: Piece


class Ended(msgspec.Struct, frozen=True, tag=True):
    """The last message about a submission, unless Failed is; the result where that alone was waited for."""

    number: int
    result: Result | None = None


class Answer(msgspec.Struct, frozen=True, tag=True):
    number: int
    body: msgspec.Raw


class Failed(msgspec.Struct, frozen=True, tag=True):
    """The last message about a submission or a question."""

    number: int
    error: ErrorInfo


class EndGeneration(msgspec.Struct, frozen=True, tag=True):
    """Somebody ends it; `error` is what its client is told."""

    number: int
    error: ErrorInfo


class Shutdown(msgspec.Struct, frozen=True, tag=True):
    """Take no more connections, let the last answers leave, and exit."""


ToWorker = (
    Start
    | KeysHold
    | Loaded
    | State
    | Admitted
    | Pieces
    | OnePiece
    | Ended
    | Answer
    | Failed
    | EndGeneration
    | Shutdown
)


# ---- bytes


def _encode_hook(value: object) -> object:
    if isinstance(value, HydraError):
        return value.info()
    raise NotImplementedError(f"{type(value).__name__} does not travel")


def _decode_hook(kind: type, value: object) -> object:
    if kind is Exception:
        return from_info(msgspec.convert(value, ErrorInfo))
    raise NotImplementedError(f"{kind.__name__} does not travel")


encode = msgspec.msgpack.Encoder(enc_hook=_encode_hook).encode
_to_main = msgspec.msgpack.Decoder(ToMain)
_to_worker = msgspec.msgpack.Decoder(ToWorker, dec_hook=_decode_hook)


def decode_to_main(body: bytes) -> ToMain:
    try:
        message: ToMain = _to_main.decode(body)
    except (msgspec.DecodeError, HydraError) as error:
        raise WireError(f"unreadable frame from a front worker: {error}") from error
    return message


def decode_to_worker(body: bytes) -> ToWorker:
    try:
        message: ToWorker = _to_worker.decode(body)
    except (msgspec.DecodeError, HydraError) as error:
        raise WireError(f"unreadable frame from the engine's process: {error}") from error
    return message


def encode_template(template: TemplateOptions | None) -> bytes | None:
    return None if template is None else msgspec.json.encode(template)


def decode_template(template: bytes | None) -> TemplateOptions | None:
    return None if template is None else msgspec.json.decode(template, type=TemplateOptions)
