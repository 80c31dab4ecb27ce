"""Connections between two instances on different nodes: the peer sockets of the engine, over sessions."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from hydra_engine.cluster import channel
from hydra_engine.instance.ports import FromPeer, PeerDown, PeerUp
from hydra_nodes.facts import deployment_facts
from hydra_nodes.links import LINK, LinkCodec, LinkMaker
from hydra_nodes.session import Greeting, SessionError
from tests.cluster.conftest import no_leak  # noqa: F401
from tests.cluster.stand_in import offer
from tests.cluster.test_peers import Node, nodes  # noqa: F401
from tests.nodes.proxy import Proxy

pytestmark = pytest.mark.usefixtures("no_leak")

SECRET = b"the secret of this deployment"
FACTS = deployment_facts(None)


def node(name: str, incarnation: int, secret: bytes = SECRET, facts: dict[str, str] = FACTS) -> Node:
    greeting = Greeting(LINK, f"node of {name}", name, incarnation, facts)
    started = Node(name, incarnation, make_codec=LinkMaker(secret, greeting, 0.5, None))  # type: ignore[arg-type]
    started.start()
    return started


@pytest.fixture
def pair(nodes: list[Node]) -> tuple[Node, Node]:  # noqa: F811
    nodes += [node("e0", 11), node("p0", 12)]
    return nodes[0], nodes[1]


@pytest.fixture
def proxy() -> Iterator[Proxy]:
    listener = socket.create_server(("127.0.0.1", 0))
    relay = Proxy(listener.getsockname())
    relay.far = listener  # type: ignore[attr-defined]
    yield relay
    relay.close()
    listener.close()


def join(one: Node, other: Node, proxy: Proxy | None = None) -> None:
    """Connects two nodes over TCP as their agents do."""
    if proxy is None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            near = socket.create_connection(listener.getsockname())
            far, _ = listener.accept()
    else:
        near = socket.create_connection(proxy.address)
        far, _ = proxy.far.accept()  # type: ignore[attr-defined]
    one.connect(other.name, other.incarnation, near)
    other.connect(one.name, one.incarnation, far)


def test_peers_on_two_nodes_speak_without_descriptors(pair: tuple[Node, Node]) -> None:
    e0, p0 = pair
    join(e0, p0)
    (up,) = e0.wait(PeerUp)
    assert (up.name, up.incarnation, up.descriptors) == ("p0", 12, ())
    p0.wait(PeerUp)
    for sequence in range(300):
        e0.sockets.send("p0", [offer(sequence)])
    p0.sockets.send("e0", [offer(9)])
    assert [event.message.sequence for event in p0.wait(FromPeer, 300)] == list(range(300))
    assert [event.message for event in e0.wait(FromPeer)] == [offer(9)]
    join(e0, p0)  # again, as after a break
    assert e0.wait(PeerUp, 2) and p0.wait(PeerUp, 2)


def test_peers_on_one_node_still_map_each_others_memory(pair: tuple[Node, Node]) -> None:
    left, right = socket.socketpair()
    pair[0].connect("p0", 12, left)
    pair[1].connect("e0", 11, right)
    assert len(pair[0].wait(PeerUp)[0].descriptors) == len(pair[1].wait(PeerUp)[0].descriptors) == 1


@pytest.mark.parametrize(
    ("other", "problem"),
    [
        ({"secret": b"another secret of the same length"}, "secret differs"),
        ({"facts": FACTS | {"model digest": "3f"}}, "has model digest"),
    ],
)
def test_a_peer_of_another_deployment_is_refused(nodes: list[Node], other: dict, problem: str) -> None:  # noqa: F811
    nodes += [node("e0", 11), node("p0", 12, **other)]
    join(nodes[0], nodes[1])
    reasons = [n.wait(PeerDown)[0].problem for n in nodes]
    assert any(problem in reason for reason in reasons), reasons
    assert not any(isinstance(event, PeerUp) for n in nodes for event in n.drain())


def test_another_instance_than_announced_is_refused(pair: tuple[Node, Node]) -> None:
    e0, p0 = pair
    with socket.create_server(("127.0.0.1", 0)) as listener:
        near = socket.create_connection(listener.getsockname())
        far, _ = listener.accept()
    e0.connect("p0", 13, near)  # a later life
    p0.connect("e0", 11, far)
    assert "sends instance 'p0' in life 12, not 'p0' in life 13" in e0.wait(PeerDown)[0].problem
    p0.wait(PeerDown)


def test_an_altered_byte_ends_the_connection(pair: tuple[Node, Node], proxy: Proxy) -> None:
    e0, p0 = pair
    join(e0, p0, proxy)
    e0.wait(PeerUp), p0.wait(PeerUp)
    proxy.alter = lambda upwards, data: data[:-1] + bytes([data[-1] ^ 1]) if upwards else data
    e0.sockets.send("p0", [offer(1)])
    assert "not authentic" in p0.wait(PeerDown)[0].problem
    e0.wait(PeerDown)
    assert not any(isinstance(event, FromPeer) for event in p0.events)


@pytest.mark.slow
def test_a_peer_that_is_cut_off_is_given_up(pair: tuple[Node, Node], proxy: Proxy) -> None:
    e0, p0 = pair
    join(e0, p0, proxy)
    e0.wait(PeerUp), p0.wait(PeerUp)
    proxy.passed.clear()
    assert "node 'node of p0' has not been heard of for 0.5 s" in e0.wait(PeerDown)[0].problem
    p0.wait(PeerDown)


def test_a_codec_that_fails_while_the_instance_sends_ends_the_connection(
    pair: tuple[Node, Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    e0, p0 = pair
    join(e0, p0)
    e0.wait(PeerUp)

    def fail(*_: object) -> bytes:
        raise SessionError("TLS ended")

    monkeypatch.setattr(LinkCodec, "seal", fail)
    e0.sockets.send("p0", [offer(1)])
    assert e0.wait(PeerDown)[0].problem == "TLS ended"


def test_a_connection_that_brings_no_handshake_is_refused(pair: tuple[Node, Node]) -> None:
    e0, _ = pair
    with socket.create_server(("127.0.0.1", 0)) as listener:
        stranger = socket.create_connection(listener.getsockname())
        far, _ = listener.accept()
    e0.connect("p0", 12, far)
    with stranger:
        stranger.sendall(channel.encode_to_peer([offer(1)]))
        assert "does not speak this protocol" in e0.wait(PeerDown)[0].problem
