"""Messages between instances and the one frontend: bytes, and seconds of a core to encode, authenticate and read them.

Statuses are those of a simulated deployment under load; codec, sessions and tables are the real ones."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from bench.common import interleaved
from hydra_engine.cluster.channel import (
    HEADER_BYTES,
    decode_to_frontend,
    encode_frames,
    encode_to_instance,
)
from hydra_engine.config import EngineConfig
from hydra_engine.core.ids import ImageDigest, RequestId
from hydra_engine.core.instances import Role
from hydra_engine.core.messages import PixelPayload, Submit, Tokens
from hydra_engine.core.reports import Status
from hydra_engine.core.request import ImageItem, Request
from hydra_engine.core.sampling import SamplingParams
from hydra_engine.frontend.reports import StatusTable, Watch
from hydra_engine.frontend.transitions import Dispatcher
from hydra_engine.instance.instance import STATUS_PERIOD_S
from hydra_nodes.session import PING_S, Greeting, Handshake, Session

_SIDE, _FEATURES = 336, 576  # of a CLIP-L/336 picture
_SECRET = b"of no other deployment"


def sessions() -> tuple[Session, Session]:
    """Two ends of an authenticated session, without a socket."""
    greeting = Greeting("bench", "a")
    client, server = Handshake(_SECRET, greeting=greeting), Handshake(_SECRET, answer=lambda _: greeting)
    while client.session is None or server.session is None:
        server.receive(client.take_outgoing())
        client.receive(server.take_outgoing())
    return client.session, server.session


def _each(call: Callable[[Any], Any], values: Sequence[Any]) -> tuple[float, list[Any]]:
    """Returns mean seconds of a core of one call, and what the calls returned."""
    began_s = time.thread_time()
    found = [call(one) for one in values]
    return (time.thread_time() - began_s) / len(values), found


def messages(kind: str, made: Sequence[Any]) -> dict[str, Any]:
    """Microseconds of a message to the frontend at both ends, with a MAC and without, best of seven rounds."""
    rounds: list[dict[str, float]] = []
    frames = [encode_frames([one]) for one in made]
    bodies = [bytes(one[HEADER_BYTES:]) for one in frames]
    for _ in range(7):
        here, there = sessions()
        encode_s, _ = _each(lambda one: encode_frames([one]), made)
        seal_s, sealed = _each(here.seal, frames)
        open_s, _ = _each(there.open, sealed)
        decode_s, _ = _each(decode_to_frontend, bodies)
        rounds.append({"encode_us": encode_s, "seal_us": seal_s, "open_us": open_s, "decode_us": decode_s})
    best = {name: 1e6 * min(one[name] for one in rounds) for name in rounds[0]}
    return {"kind": kind, "bytes": sum(map(len, frames)) / len(frames), **best}


def _ignore(*_: object) -> None:
    """Sends and reports nothing."""


def status_table(statuses: Sequence[Status]) -> dict[str, float]:
    """Microseconds for the frontend's tables to take a status of each of so many instances: the mean, and the most of
    one, which compares the paces of all."""
    names = [f"epd{number}" for number in range(len(statuses))]
    roles = dict.fromkeys(names, Role.parse("EPD"))
    numbers = iter(range(1, 1 << 30))
    dispatcher = Dispatcher(
        EngineConfig(),
        roles,
        send=_ignore,
        next_id=lambda: RequestId(next(numbers)),
        report=_ignore,
    )
    table = StatusTable()
    watch = Watch(dispatcher, table)
    means, most = [], []
    for _ in range(5):
        took = []
        for name, status in zip(names, statuses, strict=True):
            began_s = time.thread_time()
            table.put(name, status)
            watch.on_status(name, status)
            dispatcher.instances.on_status(name, status)
            took.append(time.thread_time() - began_s)
        means.append(sum(took) / len(took))
        most.append(max(took))
    return {"us": 1e6 * min(means), "compare_us": 1e6 * min(most)}


def tokens(rows: int) -> Tokens:
    return Tokens(list(range(1 << 20, (1 << 20) + rows)), list(range(rows)), [1 << 14] * rows, 1234.5)


def submit(picture: bool) -> Submit:
    digest = ImageDigest(bytes(32))
    image = ImageItem(digest, _SIDE, _SIDE, _FEATURES, _FEATURES, 4, (1, 24, 24))
    prompt = tuple(range(4 + _FEATURES * picture + 64))
    request = Request(
        id=RequestId(1),
        prompt_token_ids=prompt,
        sampling=SamplingParams(),
        max_new_tokens=128,
        seed=0,
        arrival_s=0.0,
        images=(image,) if picture else (),
    )
    pixels = (PixelPayload(digest, _SIDE, _SIDE, bytes(3 * _SIDE * _SIDE)),) if picture else ()
    return Submit(request, pixels, "EPD", ())


def requests() -> list[dict[str, Any]]:
    """Microseconds of the frontend to send one request to an instance on another node."""
    found = []
    for picture in (False, True):
        made, (here, _) = submit(picture), sessions()
        data = encode_to_instance([made])
        calls: dict[str, Callable[[], object]] = {
            "encode": partial(encode_to_instance, [made]),
            "seal": partial(here.seal, data),
        }
        best = interleaved(calls, clock=time.thread_time)
        row = {"picture": picture, "bytes": len(data)}
        found.append(row | {f"{name}_us": 1e6 * times.best for name, times in best.items()})
    return found


def measure(statuses: Sequence[Status], rows: int) -> dict[str, Any]:
    """`statuses`: one of each instance; `rows`: tokens of a step."""
    ours, theirs = sessions()
    ours.set_fence(10.0)
    ping = ours.take_outgoing()
    theirs.open(ping)
    return {
        "instances": len(statuses),
        "status_period_s": STATUS_PERIOD_S,
        "ping_period_s": PING_S,
        "ping_bytes": len(ping) + len(theirs.take_outgoing()),
        "messages": [messages("Status", statuses), messages("Tokens", [tokens(rows)] * 256)],
        "tokens_of_a_message": rows,
        "status_table": status_table(statuses),
        "requests": requests(),
    }
