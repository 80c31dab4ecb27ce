"""Frames of all channels: limits, and that no channel takes what belongs to another."""

from __future__ import annotations

import dataclasses
import struct

import pytest
from msgspec.structs import replace

from hydra_engine.cluster import channel
from hydra_engine.config import EngineConfig
from hydra_engine.core.ids import ImageDigest, RequestId
from hydra_engine.core.instances import Role
from hydra_engine.core.messages import Abort, Loading, PixelPayload, Submit, ToInstance
from hydra_engine.core.pools import Exports, PoolExport, PoolKind, PoolLayout
from hydra_engine.core.request import Request
from hydra_engine.core.sampling import SamplingParams
from hydra_engine.instance.ports import InstanceContext
from hydra_engine.transfer.messages import Ack, Hello, More, Offer, Refuse, Renew, TransferMessage, Withdraw
from hydra_engine.transfer.plans import KvEnd

LAYOUT = PoolLayout(PoolKind.KV, 7, (2, 2, 16, 2, 8), "float32", 4096)
EXPORTS = Exports(
    (PoolExport(LAYOUT, "memfd", 7 * 4096, 1), PoolExport(LAYOUT, "cuda-ipc", 9, handle=b"\0\xff")), 0, 64
)
END = KvEnd(9, 42, 1.5, 1.25, 3)
MESSAGES: list[Hello | TransferMessage] = [
    Hello(1, "e0", 1 << 62, EXPORTS),
    Offer(1 << 62, 3, RequestId(4), 2, 5, (1 << 64) - 1, (6, 7)),
    Offer(1, 3, RequestId(4), None, 5, 8, (), END, (1, 2)),
    More(1, 3, 1, (9, 10), END, (5,)),
    Withdraw(1, 3),
    Renew(1, (3, 4), (0, 2)),
    Ack(1, 3),
    Ack(1, 4, 2.5e-5),
    Refuse(1, 4),
]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda m: type(m).__name__)
def test_what_peers_say_survives(message: Hello | TransferMessage) -> None:
    (body,) = channel.FrameReader(channel.MAX_PEER_FRAME_BYTES).read_frames(channel.encode_to_peer([message]))
    assert channel.decode_to_peer(body) == message


def test_a_connection_survives() -> None:
    connect = channel.Connect("p1", 1 << 62)
    assert channel.decode_connect(channel.encode_connect(connect)) == connect


def test_no_channel_takes_what_belongs_to_another() -> None:
    bodies = {
        "front": channel.encode_frames([Loading("weights", 1, 2)])[channel.HEADER_BYTES :],
        "instance": channel.encode_frames([Abort(RequestId(1))])[channel.HEADER_BYTES :],
        "peer": channel.encode_to_peer([Ack(1, 2)])[channel.HEADER_BYTES :],
        "control": channel.encode_connect(channel.Connect("p0", 1)),
    }
    decoders = {
        "front": channel.decode_to_frontend,
        "instance": channel.decode_to_instance,
        "peer": channel.decode_to_peer,
        "control": channel.decode_connect,
    }
    for sender, body in bodies.items():
        for receiver, decode in decoders.items():
            if sender == receiver:
                decode(body)
            else:
                with pytest.raises(channel.WireError):
                    decode(body)


def test_the_start_says_what_the_instance_is_among_others() -> None:
    start = channel.Start(
        2, "ed0", "ED", EngineConfig(device="cuda:1"), incarnation=7, neighbours=("e0", "ed0"), has_peers=True
    )
    again = channel.decode_to_instance(channel.encode_frames([start])[channel.HEADER_BYTES :])
    assert again == start
    configs = (start.config, start.config)
    assert start.context == InstanceContext(Role.E | Role.D, 7, (Role.E, Role.E | Role.D), configs, True)


def test_neighbours_come_with_the_limits_of_each() -> None:
    config = EngineConfig(topology="E+ED+P", instance_limits="ED:max_num_seqs=9;ed0:token_budget=70;e0:image_budget=5")
    start = channel.Start(2, "p0", "P", config, neighbours=("e0", "ed0", "p0"), has_peers=True)
    again = channel.decode_to_instance(channel.encode_frames([start])[channel.HEADER_BYTES :])
    assert isinstance(again, channel.Start)
    encoder, decoder, own = (c.scheduler for c in again.context.neighbour_configs)
    assert (encoder.image_budget, decoder.max_num_seqs, decoder.token_budget) == (5, 9, 70)
    assert own == config.scheduler


def test_a_frame_over_the_limit_is_refused_by_its_length_alone() -> None:
    with pytest.raises(channel.WireError, match="limit of 100"):
        channel.FrameReader(100).read_frames(struct.pack("<I", 101))
    assert channel.FrameReader(100).read_frames(struct.pack("<I", 100) + bytes(100)) == [bytes(100)]
    with pytest.raises(channel.WireError, match="limit"):
        channel.encode_frames([Renew(1, tuple(range(200)), ())], max_bytes=100)


def test_frames_cut_anywhere_are_put_together() -> None:
    data = channel.encode_to_peer(MESSAGES)
    for step in (1, 3, 7, len(data)):
        reader = channel.FrameReader()
        bodies = [body for i in range(0, len(data), step) for body in reader.read_frames(data[i : i + step])]
        assert [channel.decode_to_peer(body) for body in bodies] == MESSAGES


def submit(number: int, sampling: SamplingParams, prompt: tuple[int, ...], pixels: tuple[PixelPayload, ...]) -> Submit:
    request = Request(
        RequestId(number), prompt, sampling, max_new_tokens=3, seed=7 * number, arrival_s=1.0, arrival_index=number
    )
    return Submit(request, pixels)


def test_what_answers_have_in_common_travels_once() -> None:
    sampling = SamplingParams(allowed_token_ids=tuple(range(100_000, 140_000)))
    prompt, pixels = tuple(range(5000)), (PixelPayload(ImageDigest(b"d" * 32), 100, 100, bytes(30_000)),)
    answers = [submit(number, sampling, prompt, pixels) for number in range(1, 65)]
    messages: list[ToInstance] = [Abort(RequestId(99)), *answers, Abort(RequestId(1)), answers[0]]
    one, all_of_them = (len(channel.encode_to_instance(some)) for some in (answers[:1], messages))
    assert all_of_them < 2 * one + 64 * 32
    bodies = channel.FrameReader().read_frames(channel.encode_to_instance(messages))
    assert len(bodies) == 4 and channel.messages_to_instance(bodies) == messages


def test_what_differs_in_anything_else_travels_by_itself() -> None:
    sampling, prompt = SamplingParams(n=2), (1, 2, 3)
    first = submit(1, sampling, prompt, ())
    others = [
        submit(2, SamplingParams(n=3), prompt, ()),
        submit(2, sampling, (1, 2, 4), ()),
        submit(2, sampling, prompt, (PixelPayload(ImageDigest(b"d" * 32), 1, 1, bytes(3)),)),
        replace(submit(2, sampling, prompt, ()), stages="D"),
        replace(first, request=dataclasses.replace(first.request, id=RequestId(2), cache_salt="bob")),
    ]
    for other in others:
        bodies = channel.FrameReader().read_frames(channel.encode_to_instance([first, other, first]))
        assert len(bodies) == 3 and channel.messages_to_instance(bodies) == [first, other, first]
