"""Sessions between nodes: who is let in, and that nothing that was altered on its way is ever passed on."""

from __future__ import annotations

import random
import socket
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import msgspec
import pytest

from hydra_nodes import session as module
from hydra_nodes.session import (
    MAX_RECORD_BYTES,
    Greeting,
    Handshake,
    Session,
    SessionError,
    check_agreement,
    handshake_client,
    handshake_server,
)

SECRET = b"the secret of this deployment"
FACTS = {"engine version": "0.1.0", "dtype": "bfloat16"}
CLIENT = Greeting("channel", "b", "p1", 7, FACTS)
SERVER = Greeting("channel", "a", must_agree=FACTS)
OVERHEAD = 5 + 32  # of a record


class Hours:
    """A clock that stands still until it is moved."""

    def __init__(self, start_s: float = 0.0) -> None:
        self.now_s = start_s

    def now(self) -> float:
        return self.now_s


def client(secret: bytes = SECRET, greeting: Greeting = CLIENT, clock: Hours | None = None) -> Handshake:
    return Handshake(secret, greeting=greeting, clock=clock)


def server(secret: bytes = SECRET, greeting: Greeting = SERVER, clock: Hours | None = None) -> Handshake:
    return Handshake(secret, answer=lambda _: greeting, clock=clock)


def shake(one: Handshake, other: Handshake) -> None:
    """Passes on everything until neither has more to send. Raises SessionError."""
    while sent := one.take_outgoing():
        other.receive(sent)
        if sent := other.take_outgoing():
            one.receive(sent)


def pair(clock: Hours | None = None) -> tuple[Session, Session]:
    one, other = client(clock=clock), server(clock=clock)
    shake(one, other)
    assert one.session is not None and other.session is not None
    return one.session, other.session


def test_both_sides_know_each_other_and_read_what_the_other_wrote() -> None:
    near, far = pair()
    assert msgspec.structs.replace(near.greeting, now_s=0.0) == SERVER
    assert msgspec.structs.replace(far.greeting, now_s=0.0) == CLIENT
    data = random.Random(1).randbytes(2 * MAX_RECORD_BYTES + 9)
    sent = near.seal(data) + near.seal(b"") + near.seal(memoryview(b"end"))
    assert len(sent) == len(data) + 3 + 4 * OVERHEAD
    for step in (len(sent), 4097):
        received = b"".join(far.open(sent[start : start + step]) for start in range(0, len(sent), step))
        assert received == data + b"end"
        sent = near.seal(data + b"end")
    assert near.open(far.seal(b"answer")) == b"answer"
    assert near.derive_key("blocks") == far.derive_key("blocks") != far.derive_key("other")
    assert near.derive_key("blocks") != pair()[0].derive_key("blocks")


def test_another_secret_is_refused_before_anything_is_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.msgspec.msgpack, "decode", lambda *_, **__: pytest.fail("decoded what nobody proved"))
    with pytest.raises(SessionError, match="secret differs"):
        shake(client(b"another secret of the same length"), server())
    with pytest.raises(SessionError, match="at least 16 bytes, not 5"):
        client(b"short")


def test_another_version_is_refused_by_both(monkeypatch: pytest.MonkeyPatch) -> None:
    newer = client()
    hello = bytearray(newer.take_outgoing())
    hello[10] = 2
    listening = server()
    with pytest.raises(SessionError, match="speaks session version 2, not 1"):
        listening.receive(bytes(hello))
    monkeypatch.setattr(module, "VERSION", 2)
    with pytest.raises(SessionError, match="speaks session version 1, not 2"):
        newer.receive(listening.take_outgoing())


@pytest.mark.parametrize(
    ("theirs", "sentence"),
    [
        ({"engine version": "0.2.0", "dtype": "bfloat16"}, "node 'b' has engine version 0.2.0, node 'a' has 0.1.0"),
        ({"engine version": "0.1.0"}, "node 'b' has dtype none, node 'a' has bfloat16"),
        (FACTS | {"model": "3f"}, "node 'b' has model 3f, node 'a' has none"),
    ],
)
def test_what_must_agree_and_does_not_is_told_to_both(theirs: dict[str, str], sentence: str) -> None:
    one, other = client(greeting=Greeting("channel", "b", must_agree=theirs)), server()
    with pytest.raises(SessionError, match=sentence):
        shake(one, other)
    with pytest.raises(SessionError, match=sentence):
        one.receive(other.take_outgoing())
    assert one.session is None and other.session is None
    with pytest.raises(SessionError, match="for 'blocks', which is for 'channel'"):
        check_agreement(SERVER, Greeting("blocks", "b", must_agree=FACTS))


def test_a_reflected_handshake_proves_nothing() -> None:
    one = client()
    with pytest.raises(SessionError, match="same role"):
        one.receive(one.take_outgoing())
    # with the role in the hello changed, the client's own proof comes back under the wrong direction's key
    one = client()
    hello = bytearray(one.take_outgoing())
    hello[12] = 2
    one.receive(bytes(hello))
    with pytest.raises(SessionError, match="not authentic"):
        one.receive(one.take_outgoing())


def test_a_recorded_handshake_opens_nothing() -> None:
    one, other, recorded = client(), server(), b""
    while sent := one.take_outgoing():
        recorded += sent
        other.receive(sent)
        if answer := other.take_outgoing():
            one.receive(answer)
    again = server()
    with pytest.raises(SessionError, match="not authentic"):
        again.receive(recorded)


Attack = Callable[[list[bytes]], list[bytes]]
ATTACKS: dict[str, Attack] = {
    "replayed": lambda records: [records[0], records[0], records[1], records[2]],
    "reordered": lambda records: [records[1], records[0], records[2]],
    "left out": lambda records: [records[0], records[2]],
    "cut": lambda records: [records[0], records[1][:-1], records[2]],
    "lengthened": lambda records: [records[0], records[1] + b"\0", records[2]],
    "swapped payloads": lambda records: [records[0][:5] + records[1][5:-32] + records[0][-32:], *records[1:]],
}


@pytest.mark.parametrize("attack", ATTACKS.values(), ids=ATTACKS)
def test_only_what_was_sent_in_its_order_comes_through(attack: Attack) -> None:
    near, far = pair()
    sent = [b"first", b"other", b"third"]
    received = b""
    with pytest.raises(SessionError, match=r"not authentic|over the limit"):
        for record in attack([near.seal(data) for data in sent]):
            received += far.open(record)
        far.open(bytes(MAX_RECORD_BYTES))
    assert b"".join(sent).startswith(received)
    with pytest.raises(SessionError, match="has ended"):
        far.open(near.seal(b"more"))


def test_two_sessions_of_one_deployment_do_not_mix() -> None:
    (near, far), (other, _) = pair(), pair()
    with pytest.raises(SessionError, match="not authentic"):
        far.open(other.seal(b"what"))
    with pytest.raises(SessionError, match="not authentic"):
        near.open(near.seal(b"what"))  # its own, sent back


def test_every_altered_byte_ends_the_session_and_nothing_of_it_is_read() -> None:
    rng = random.Random(5)
    length = len(pair()[0].seal(b"sixteen bytes it"))
    for position in range(length):
        near, far = pair()
        first, altered = near.seal(b"good"), bytearray(near.seal(b"sixteen bytes it"))
        altered[position] ^= rng.randrange(1, 256)
        assert far.open(first) == b"good"
        with pytest.raises(SessionError, match=r"not authentic|over the limit"):
            # a length that has grown waits for more; what comes then is not authentic either
            assert far.open(altered) == b""
            far.open(bytes(MAX_RECORD_BYTES + OVERHEAD))


def test_every_altered_byte_of_a_handshake_ends_it() -> None:
    sizes = []
    one, other = client(), server()
    while sent := one.take_outgoing():
        sizes.append(len(sent))
        other.receive(sent)
        answer = other.take_outgoing()
        sizes.append(len(answer))
        one.receive(answer)
    for turn, size in enumerate(sizes):
        for position in range(size):
            with pytest.raises(SessionError):
                shake_altered(turn, position)


def shake_altered(turn: int, position: int) -> None:
    """Alters one byte of the message of that turn. Raises SessionError, also if a side still waits for bytes that do
    not come."""
    sides = client(), server()
    for count in range(4):
        sender, receiver = sides[count % 2], sides[1 - count % 2]
        sent = bytearray(sender.take_outgoing())
        if count == turn:
            sent[position] ^= 1 << position % 8
        receiver.receive(bytes(sent))
    if sides[0].session is None or sides[1].session is None:
        raise SessionError("waits")


def test_a_stranger_can_make_a_side_hold_little() -> None:
    for greeting in (b"GET / HTTP/1.1\r\n", b"\x16\x03\x01\x02\0"):
        with pytest.raises(SessionError, match="does not speak this protocol"):
            server().receive(greeting)
    waiting = server()
    waiting.receive(client().take_outgoing())
    with pytest.raises(SessionError, match="5000 bytes is over the limit of 4096"):
        waiting.receive(b"\x01" + (5000).to_bytes(4, "little"))
    _, far = pair()
    with pytest.raises(SessionError, match="over the limit"):
        far.open(b"\x00" + (MAX_RECORD_BYTES + 1).to_bytes(4, "little"))


def test_pings_tell_that_the_other_lives_and_compare_clocks() -> None:
    clock = Hours(50.0)
    near, far = pair(clock)
    near.set_fence(10.0)
    assert far.take_outgoing() == b""  # without a fence it pings nobody
    assert near.clock_samples.popleft() == (50.0, 50.0, 50.0)  # of the handshake
    assert far.open(near.take_outgoing()) == b""
    assert near.take_outgoing() == b""  # not due again
    clock.now_s += 0.25
    assert near.open(far.take_outgoing()) == b""
    assert list(near.clock_samples) == [(50.0, 50.0, 50.25)]
    far.set_fence(10.0)
    clock.now_s += 3600.0  # this process was stopped: that is no silence
    assert near.take_outgoing()
    with pytest.raises(SessionError, match="node 'b' has not been heard of for 10 s"):
        for _ in range(25):
            clock.now_s += far.ping_s
            far.take_outgoing()
    assert 3613.0 > clock.now_s - 50.25 > 3610.0


# ---- over sockets


def test_sides_meet_over_a_socket() -> None:
    one, other = socket.socketpair()
    with one, other, ThreadPoolExecutor(1) as pool:
        far = pool.submit(handshake_server, other, SECRET, lambda _: SERVER)
        near = handshake_client(one, SECRET, CLIENT)
        other.sendall(far.result().seal(b"over there"))
        assert near.open(one.recv(1000)) == b"over there"
        assert one.gettimeout() is None


def test_a_refusal_reaches_the_other_side() -> None:
    def refuse(greeting: Greeting) -> Greeting:
        raise SessionError(f"nobody expects {greeting.name}")

    one, other = socket.socketpair()
    with one, ThreadPoolExecutor(1) as pool:
        with other:
            near = pool.submit(handshake_client, one, SECRET, CLIENT)
            with pytest.raises(SessionError, match="nobody expects p1"):
                handshake_server(other, SECRET, refuse)
        with pytest.raises(SessionError, match="nobody expects p1"):
            near.result()
    one, other = socket.socketpair()
    with one, ThreadPoolExecutor(1) as pool:
        with other:
            near = pool.submit(handshake_client, one, b"another secret of the same length", CLIENT)
            with pytest.raises(SessionError, match="secret differs"):
                handshake_server(other, SECRET, lambda _: SERVER)
        with pytest.raises(SessionError, match="its secret differs, or it is another service"):
            near.result()


def test_who_sends_a_byte_now_and_then_is_not_waited_for() -> None:
    one, other = socket.socketpair()
    stopped = threading.Event()

    def trickle() -> None:
        for byte in client().take_outgoing():
            if stopped.wait(0.02):
                return
            one.send(bytes([byte]))

    with one, other, ThreadPoolExecutor(1) as pool:
        slow = pool.submit(trickle)
        with pytest.raises(SessionError, match=r"within 0\.2 s"):
            handshake_server(other, SECRET, lambda _: SERVER, limit_s=0.2)
        assert not slow.done()
        stopped.set()
        slow.result()
