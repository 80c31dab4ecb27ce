"""Connections between instances: introductions, what ends them, and that nothing stays open or waits."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import struct
import threading
from collections.abc import Iterator

import pytest

from hydra_engine.cluster import channel
from hydra_engine.cluster.channel import send_with
from hydra_engine.cluster.children import ProcessChild
from hydra_engine.cluster.peers import PeerLink, PeerSockets
from hydra_engine.config import EngineConfig
from hydra_engine.core.messages import WIRE_VERSION, PeerState, ToFrontend
from hydra_engine.core.pools import Exports
from hydra_engine.instance.ports import FromPeer, PeerDown, PeerUp
from hydra_engine.transfer.messages import TRANSFER_VERSION, Ack, Hello, Renew
from tests.cluster.conftest import alive, open_descriptors, wait_until
from tests.cluster.stand_in import COMMAND, exports, offer
from tests.faults import SetFault

pytestmark = pytest.mark.usefixtures("no_leak")


class Node:
    """The side of an instance: its peer sockets, the supervisor's end of its control socket, and what it has
    drained."""

    def __init__(self, name: str, incarnation: int = 1, **options: float) -> None:
        self.name, self.incarnation = name, incarnation
        self.frontend, control = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.woken = threading.Event()
        self.sockets = PeerSockets(name, incarnation, control, self.woken.set, **options)  # type: ignore[arg-type]
        self.events: list[PeerUp | PeerDown | FromPeer] = []
        self.exports, self.descriptors = exports()

    def start(self) -> None:
        self.sockets.start(self.exports, self.descriptors)

    def connect(self, name: str, incarnation: int, sock: socket.socket) -> None:
        """Connects two nodes as the supervisor does; closes our copies."""
        with sock:
            send_with(self.frontend, channel.encode_connect(channel.Connect(name, incarnation)), [sock.fileno()])

    def drain(self) -> list[PeerUp | PeerDown | FromPeer]:
        """Events so far. Closes descriptors of a PeerUp, as its receiver must."""
        new = self.sockets.drain()
        for event in new:
            if isinstance(event, PeerUp):
                for descriptor in event.descriptors:
                    os.close(descriptor)
        self.events += new
        return self.events

    def wait(self, kind: type, count: int = 1) -> list:
        """The events of a kind once there are so many."""
        wait_until(lambda: sum(isinstance(e, kind) for e in self.drain()) >= count, f"{self.name}: {kind.__name__}")
        return [event for event in self.events if isinstance(event, kind)]

    def close(self) -> None:
        self.sockets.close()
        self.frontend.close()
        for descriptor in self.descriptors:
            os.close(descriptor)


@pytest.fixture
def nodes() -> Iterator[list[Node]]:
    made: list[Node] = []
    yield made
    for node in made:
        node.close()
    assert not [t for t in threading.enumerate() if t.name == "peers"], "a thread outlives its sockets"


def two(nodes: list[Node], **options: float) -> tuple[Node, Node]:
    nodes += [Node("e0", 11, **options), Node("p0", 12, **options)]
    for node in nodes:
        node.start()
    return nodes[0], nodes[1]


def join(one: Node, other: Node) -> None:
    left, right = socket.socketpair()
    one.connect(other.name, other.incarnation, left)
    other.connect(one.name, one.incarnation, right)


def stranger(node: Node, name: str = "x0", incarnation: int = 5) -> socket.socket:
    """A connection whose other end is in the test's hands."""
    ours, theirs = socket.socketpair()
    node.connect(name, incarnation, theirs)
    ours.settimeout(5)
    return ours


def hello(**changes: object) -> bytes:
    fields = {"version": TRANSFER_VERSION, "name": "x0", "incarnation": 5, "exports": Exports((), 0, 8)} | changes
    return channel.encode_frames([Hello(**fields)])  # type: ignore[arg-type]


def introduced(node: Node, num_descriptors: int = 1, **changes: object) -> socket.socket:
    peer = stranger(node)
    descriptors = [os.memfd_create("words") for _ in range(num_descriptors)]
    send_with(peer, hello(**changes), descriptors)
    for descriptor in descriptors:
        os.close(descriptor)
    return peer


def drained_until_end(peer: socket.socket) -> None:
    while peer.recv(1 << 16):
        pass


def test_both_learn_of_each_other_and_get_readable_memory(nodes: list[Node]) -> None:
    one, other = two(nodes)
    join(one, other)
    wait_until(lambda: bool(one.sockets._events), "an introduction")
    assert one.woken.is_set()
    (up,) = one.sockets.drain()
    assert isinstance(up, PeerUp) and (up.name, up.incarnation, up.exports) == ("p0", 12, other.exports)
    assert os.pread(up.descriptors[0], 64, 0) == bytes(range(64))
    assert not os.get_inheritable(up.descriptors[0]), "a child of this process would keep the peer's memory"
    for descriptor in up.descriptors:
        os.close(descriptor)
    (up,) = other.wait(PeerUp)
    assert (up.name, up.incarnation) == ("e0", 11)


def test_messages_arrive_whole_and_in_order_both_ways(nodes: list[Node]) -> None:
    one, other = two(nodes)
    join(one, other)
    one.wait(PeerUp), other.wait(PeerUp)
    for i in range(300):
        one.sockets.send("p0", [offer(i), Ack(11, i)])
        other.sockets.send("e0", [Renew(12, tuple(range(i)), ())])
    got = other.wait(FromPeer, 600)
    assert [e.message for e in got] == [m for i in range(300) for m in (offer(i), Ack(11, i))]
    assert {(e.name, e.incarnation) for e in got} == {("e0", 11)}
    assert [e.message for e in one.wait(FromPeer, 300)] == [Renew(12, tuple(range(i)), ()) for i in range(300)]


def test_connections_made_before_the_start_are_served(nodes: list[Node]) -> None:
    nodes += [Node("e0", 11), Node("p0", 12)]
    join(*nodes)
    for node in nodes:
        node.start()
    nodes[0].wait(PeerUp), nodes[1].wait(PeerUp)


def test_closing_one_side_is_seen_by_the_other(nodes: list[Node]) -> None:
    one, other = two(nodes)
    join(one, other)
    one.wait(PeerUp), other.wait(PeerUp)
    one.sockets.close()
    (down,) = other.wait(PeerDown)
    assert (down.name, down.incarnation) == ("e0", 11) and "closed" in down.problem
    other.sockets.send("e0", [offer(1)])  # dropped


@pytest.mark.parametrize(
    ("changes", "num_descriptors", "problem"),
    [
        ({"version": 99}, 1, "version 99"),
        ({"name": "e7"}, 1, "'e7'"),
        ({"incarnation": 4}, 1, "life 4"),
        ({}, 0, "descriptors"),
        ({}, 2, "descriptors"),
        ({"exports": Exports((), 3, 8)}, 1, "descriptors"),
        ({}, 9, "more than 8"),
    ],
)
def test_a_wrong_introduction_ends_the_connection(
    nodes: list[Node], changes: dict[str, object], num_descriptors: int, problem: str
) -> None:
    node, _ = two(nodes)
    before = open_descriptors()
    with introduced(node, num_descriptors, **changes) as peer:
        (down,) = node.wait(PeerDown)
        assert (down.name, down.incarnation) == ("x0", 5) and problem in down.problem
        drained_until_end(peer)
        assert open_descriptors() == before + 1, "descriptors of a refused peer stay open"
    assert not any(isinstance(event, PeerUp) for event in node.events)


def test_a_message_before_the_introduction_ends_the_connection(nodes: list[Node]) -> None:
    node, _ = two(nodes)
    with stranger(node) as peer:
        peer.sendall(channel.encode_frames([offer(1)]))
        (down,) = node.wait(PeerDown)
        assert "introduce" in down.problem


@pytest.mark.parametrize(
    ("frame", "problem"),
    [
        (struct.pack("<I", 5) + b"hello", "unreadable"),
        (struct.pack("<I", channel.MAX_PEER_FRAME_BYTES + 1), "over the limit"),
        (hello(), "twice"),
        (channel.encode_frames([PeerState("e0", 1, True)]), "unreadable"),  # a message to the frontend only
    ],
)
def test_a_bad_frame_ends_only_its_connection(nodes: list[Node], frame: bytes, problem: str) -> None:
    node, other = two(nodes)
    join(node, other)
    node.wait(PeerUp), other.wait(PeerUp)
    with introduced(node) as peer:
        node.wait(PeerUp, 2)
        peer.sendall(frame)
        (down,) = node.wait(PeerDown)
        assert down.name == "x0" and problem in down.problem
        drained_until_end(peer)
    node.sockets.send("p0", [offer(3)])
    other.wait(FromPeer)


def test_a_frame_cut_by_a_death_is_no_message(nodes: list[Node]) -> None:
    node, _ = two(nodes)
    with introduced(node) as peer:
        node.wait(PeerUp)
        peer.sendall(channel.encode_frames([offer(1)])[:-1])
    node.wait(PeerDown)
    assert not [event for event in node.events if isinstance(event, FromPeer)]


def test_uninvited_descriptors_do_not_stay_open(nodes: list[Node]) -> None:
    node, _ = two(nodes)
    with introduced(node) as peer:
        node.wait(PeerUp)
        before = open_descriptors()
        for i in range(20):
            with open(os.devnull) as file:
                send_with(peer, channel.encode_frames([Ack(1, i)]), [file.fileno()])
        node.wait(FromPeer, 20)
        assert open_descriptors() == before


def test_a_peer_that_does_not_read_is_given_up_when_too_much_waits(nodes: list[Node]) -> None:
    node, other = two(nodes, max_queued_bytes=1 << 20)
    join(node, other)
    node.wait(PeerUp), other.wait(PeerUp)
    message = Renew(1, tuple(range(10_000, 30_000)), ())
    with introduced(node):
        node.wait(PeerUp, 2)
        for _ in range(100):
            node.sockets.send("x0", [message])  # must not block: nobody reads
        (down,) = node.wait(PeerDown)
        assert "does not read" in down.problem
    node.sockets.send("p0", [offer(1)])
    other.wait(FromPeer)


@pytest.mark.parametrize("greets", [True, False])
def test_a_peer_that_stays_silent_where_it_must_not_is_given_up(nodes: list[Node], greets: bool) -> None:
    node, _ = two(nodes, patience_s=0.3)
    with introduced(node) if greets else stranger(node):
        if greets:
            node.wait(PeerUp)
            while not node.sockets._links["x0"].has_backlog:
                node.sockets.send("x0", [Renew(1, tuple(range(10_000)), ())])
        (down,) = node.wait(PeerDown)
        assert ("does not read" if greets else "does not introduce itself") in down.problem


def test_a_slow_reader_gets_everything(nodes: list[Node]) -> None:
    node, _ = two(nodes)
    messages = [Renew(1, tuple(range(i, i + 5000)), ()) for i in range(200)]
    with introduced(node) as peer:
        node.wait(PeerUp)
        for message in messages:
            node.sockets.send("x0", [message])
        assert node.sockets._links["x0"].has_backlog, "the test sends too little"
        reader = channel.FrameReader()
        received = []
        while len(received) < 1 + len(messages):
            received += reader.read_frames(peer.recv(1 << 16))
    assert [channel.decode_to_peer(body) for body in received[1:]] == messages


def test_a_message_is_looked_after_alone_however_many_peers_there_are(
    nodes: list[Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    node, other = two(nodes)
    join(node, other)
    with contextlib.ExitStack() as opened:
        for number in range(24):
            peer = opened.enter_context(stranger(node, f"x{number}"))
            descriptor = os.memfd_create("words")
            send_with(peer, hello(name=f"x{number}"), [descriptor])
            os.close(descriptor)
        node.wait(PeerUp, 25), other.wait(PeerUp)
        looks: list[PeerLink] = []
        monkeypatch.setattr(PeerLink, "keep_alive", lambda link: looks.append(link))
        for number in range(1, 51):
            other.sockets.send("e0", [offer(number)])
            node.wait(FromPeer, number)
        assert len(looks) < 50 * 24 / 4


def test_a_new_connection_replaces_the_old_one(nodes: list[Node]) -> None:
    node, _ = two(nodes)
    with introduced(node) as old:
        node.wait(PeerUp)
        with stranger(node, "x0", 6) as new:
            words = os.memfd_create("words")
            send_with(new, hello(incarnation=6), [words])
            os.close(words)
            node.wait(PeerUp, 2)
            kinds = [(type(event), event.incarnation) for event in node.events]
            assert kinds == [(PeerUp, 5), (PeerDown, 5), (PeerUp, 6)]
            drained_until_end(old)


def test_what_was_meant_for_one_life_of_a_peer_does_not_reach_the_next(nodes: list[Node]) -> None:
    """The instance has not heard yet of the death of the peer that it sends to."""
    node, _ = two(nodes)
    with introduced(node):
        node.wait(PeerUp)
        with stranger(node, "x0", 6) as new:
            words = os.memfd_create("words")
            send_with(new, hello(incarnation=6), [words])
            os.close(words)
            wait_until(lambda: len(node.sockets._events) == 2, "the new introduction, not drained")
            node.sockets.send("x0", [offer(1)])
            node.wait(PeerUp, 2)
            node.sockets.send("x0", [offer(2)])
            reader = channel.FrameReader()
            bodies: list[bytes] = []
            while len(bodies) < 2:
                bodies += reader.read_frames(new.recv(1 << 16))
    assert channel.decode_to_peer(bodies[1]) == offer(2)


@pytest.mark.parametrize("num_descriptors", [0, 2])
def test_a_connection_without_its_one_descriptor_is_refused(nodes: list[Node], num_descriptors: int) -> None:
    node, other = two(nodes)
    before = open_descriptors()
    descriptors = [os.open(os.devnull, os.O_RDONLY) for _ in range(num_descriptors)]
    send_with(node.frontend, channel.encode_connect(channel.Connect("x0", 5)), descriptors)
    for descriptor in descriptors:
        os.close(descriptor)
    send_with(node.frontend, b"what", [])
    join(node, other)
    assert [event.name for event in node.wait(PeerUp)] == ["p0"]
    other.wait(PeerUp)
    wait_until(lambda: open_descriptors() == before + 2, "only the connection's two ends are new")


def test_a_frontend_that_is_gone_ends_no_connection(nodes: list[Node]) -> None:
    one, other = two(nodes)
    join(one, other)
    one.wait(PeerUp), other.wait(PeerUp)
    one.frontend.close()
    one.sockets.send("p0", [offer(1)])
    other.wait(FromPeer)
    other.sockets.send("e0", [Ack(11, 1)])
    one.wait(FromPeer)


def test_closing_closes_what_nobody_has_taken(nodes: list[Node]) -> None:
    """PeerUps that wait, and a Hello that is not complete; the barrier of each test counts descriptors."""
    node, _ = two(nodes)
    with introduced(node), stranger(node, "y0", 6) as half:
        words = os.memfd_create("words")
        send_with(half, hello(name="y0", incarnation=6)[:-1], [words])
        os.close(words)
        wait_until(lambda: len(node.sockets._events) == 1, "an introduction that is not drained")
        wait_until(lambda: "y0" in node.sockets._links, "a second connection")
        wait_until(lambda: bool(node.sockets._links["y0"]._received), "half an introduction")
        node.sockets.close()
        node.sockets.close()
        assert len(node.descriptors) == 1 and os.pread(node.descriptors[0], 1, 0) == b"\0", "ours stay ours"


async def test_a_peer_in_another_process_that_is_killed(nodes: list[Node]) -> None:
    """The killed peer's memory can still be read, and its end is noticed."""
    node = Node("e0", 11)
    nodes.append(node)
    node.start()
    start = channel.Start(WIRE_VERSION, "p0", "P", EngineConfig(), 12, has_peers=True)
    child = await ProcessChild.launch(COMMAND, start)
    states: list[PeerState] = []
    loop = asyncio.get_running_loop()
    ready, told = loop.create_future(), loop.create_future()

    def on_messages(messages: list[ToFrontend]) -> None:
        states.extend(m for m in messages if isinstance(m, PeerState))
        if not ready.done():
            ready.set_result(None)
        if states and not told.done():
            told.set_result(None)

    child.end.attach(on_messages, lambda: None)
    await asyncio.wait_for(ready, 20)
    left, right = socket.socketpair()
    with left:
        child.connect(channel.Connect("e0", 11), left)
    node.connect("p0", 12, right)
    await asyncio.wait_for(told, 20)
    assert states == [PeerState("e0", 11, True)]
    wait_until(lambda: bool(node.sockets._events), "an introduction")
    (up,) = node.sockets.drain()
    assert isinstance(up, PeerUp)
    child.end.send([SetFault("", "offer", "e0")])
    await asyncio.sleep(0)  # the loop writes
    assert [event.message for event in node.wait(FromPeer)] == [offer(77)]
    assert child.pid is not None
    os.kill(child.pid, signal.SIGKILL)
    (down,) = node.wait(PeerDown)
    assert (down.name, down.incarnation) == ("p0", 12)
    assert os.pread(up.descriptors[0], 64, 0) == bytes(range(64)), "a dead peer's memory stays readable"
    os.close(up.descriptors[0])
    wait_until(lambda: child.exit_description() is not None, "the process is reaped")
    assert child.exit_description() == "was killed by SIGKILL" and not alive(child.pid)
    child.close()
    await asyncio.sleep(0.05)
