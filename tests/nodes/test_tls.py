"""Sessions in TLS: certificates of the deployment's authority on both sides, and nothing readable on the way."""

from __future__ import annotations

import random
import shutil
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from hydra_engine.errors import ConfigError
from hydra_nodes.session import Handshake, Session, SessionError, handshake_client, handshake_server
from hydra_nodes.tls import AUTHORITY, CERTIFICATE, KEY, TlsFiles
from tests.nodes.certificates import make_authority, make_node
from tests.nodes.test_session import CLIENT, SECRET, SERVER, shake


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders a and b of one deployment, and c of another."""
    folder = tmp_path_factory.mktemp("nodes")
    for authority, names in (("ours", "ab"), ("theirs", "c")):
        make_authority(folder / authority)
        for name in names:
            make_node(folder / name, folder / authority)
    return folder


def sides(one: Path, other: Path) -> tuple[Handshake, Handshake]:
    near = Handshake(SECRET, greeting=CLIENT, layer=TlsFiles(one)(False))
    return near, Handshake(SECRET, answer=lambda _: SERVER, layer=TlsFiles(other)(True))


def pair(one: Path, other: Path) -> tuple[Session, Session]:
    near, far = sides(one, other)
    shake(near, far)
    assert near.session is not None and far.session is not None
    return near.session, far.session


def test_what_is_sealed_can_be_read_by_the_other_side_alone(nodes: Path) -> None:
    near, far = pair(nodes / "b", nodes / "a")
    data = b"a picture of a secret" + random.Random(1).randbytes(1 << 20)
    sent = near.seal(data)
    assert b"a picture of a secret" not in sent
    assert b"".join(far.open(sent[start : start + 5000]) for start in range(0, len(sent), 5000)) == data
    assert near.open(far.seal(b"answer")) == b"answer"


def test_an_altered_byte_ends_it(nodes: Path) -> None:
    near, far = pair(nodes / "b", nodes / "a")
    sent = bytearray(near.seal(b"what"))
    sent[-1] ^= 1
    with pytest.raises(SessionError, match="TLS ended"):
        far.open(sent)


def test_a_certificate_of_another_authority_is_refused(nodes: Path) -> None:
    for one, other in (("c", "a"), ("a", "c")):
        with pytest.raises(SessionError, match=r"certificate is refused .*authority of all nodes"):
            shake(*sides(nodes / one, nodes / other))


def test_a_certificate_does_not_replace_the_secret(nodes: Path) -> None:
    near = Handshake(b"another secret of the same length", greeting=CLIENT, layer=TlsFiles(nodes / "b")(False))
    far = Handshake(SECRET, answer=lambda _: SERVER, layer=TlsFiles(nodes / "a")(True))
    with pytest.raises(SessionError, match="secret differs"):
        shake(near, far)


def test_who_relays_between_two_connections_of_its_own_is_found(nodes: Path) -> None:
    """Lets a third node, with a good certificate, pass on what two others say inside of TLS."""
    near, middle_far = sides(nodes / "a", nodes / "b")
    middle_near, far = sides(nodes / "b", nodes / "a")

    def settle(one: Handshake, other: Handshake) -> None:
        assert one._layer is not None and other._layer is not None
        for _ in range(3):
            other._layer.unwrap(one._layer.take_outgoing())
            one._layer.unwrap(other._layer.take_outgoing())

    settle(near, middle_far)
    settle(middle_near, far)
    assert middle_far._layer is not None and middle_near._layer is not None
    with pytest.raises(SessionError, match="not authentic"):
        for _ in range(3):
            said = middle_far._layer.unwrap(near.take_outgoing())
            far.receive(middle_near._layer.wrap(said))
            answer = middle_near._layer.unwrap(far.take_outgoing())
            near.receive(middle_far._layer.wrap(answer))


def test_one_side_without_tls_is_told_apart(nodes: Path) -> None:
    with pytest.raises(SessionError, match="does not speak TLS"):
        shake(
            Handshake(SECRET, greeting=CLIENT),
            Handshake(SECRET, answer=lambda _: SERVER, layer=TlsFiles(nodes / "a")(True)),
        )
    with pytest.raises(SessionError, match="has TLS where this one has none"):
        shake(
            Handshake(SECRET, greeting=CLIENT, layer=TlsFiles(nodes / "b")(False)),
            Handshake(SECRET, answer=lambda _: SERVER),
        )


def test_two_threads_use_a_session_over_sockets(nodes: Path) -> None:
    one, other = socket.socketpair()
    data = random.Random(2).randbytes(3 << 20)

    def echo(session: Session) -> None:
        left = len(data)
        while left:
            received = session.open(other.recv(1 << 16))
            left -= len(received)
            other.sendall(session.seal(received) if received else session.take_outgoing())

    with one, other, ThreadPoolExecutor(2) as pool:
        served = pool.submit(handshake_server, other, SECRET, lambda _: SERVER, layer=TlsFiles(nodes / "a")(True))
        near = handshake_client(one, SECRET, CLIENT, layer=TlsFiles(nodes / "b")(False))
        echoing = pool.submit(echo, served.result())
        sender = threading.Thread(
            target=lambda: [one.sendall(near.seal(data[i : i + 65536])) for i in range(0, len(data), 65536)]
        )
        sender.start()
        received = b""
        while len(received) < len(data):
            received += near.open(one.recv(1 << 16))
        sender.join()
        echoing.result()
    assert received == data


def test_a_certificate_that_others_refuse_is_refused_where_it_is(nodes: Path, tmp_path: Path) -> None:
    shutil.copytree(nodes / "a", tmp_path / "a")
    shutil.copy(nodes / "c" / AUTHORITY, tmp_path / "a")
    with pytest.raises(
        ConfigError, match=r"tls\.crt in the folder of --cluster-tls .* is refused by other nodes \(.*cert"
    ):
        TlsFiles(tmp_path / "a")


@pytest.mark.parametrize("missing", [CERTIFICATE, KEY, AUTHORITY])
def test_a_folder_that_lacks_a_file_is_refused(nodes: Path, tmp_path: Path, missing: str) -> None:
    shutil.copytree(nodes / "a", tmp_path / "a")
    (tmp_path / "a" / missing).unlink()
    with pytest.raises(ConfigError, match=r"--cluster-tls .*tls\.crt, tls\.key and ca\.crt .*No such file"):
        TlsFiles(tmp_path / "a")
    (tmp_path / "a" / missing).write_text("no PEM")
    with pytest.raises(ConfigError, match="--cluster-tls"):
        TlsFiles(tmp_path / "a")
