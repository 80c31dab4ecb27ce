"""Instances that join a frontend over TCP: who is let in, and how a connection that is lost or altered ends them."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest

from hydra_engine.cluster import channel
from hydra_engine.cluster.channel import EXIT_ORPHANED, FrontendSocket
from hydra_engine.cluster.spawn import start_python
from hydra_engine.config import ClusterConfig, EngineConfig
from hydra_engine.core.messages import WIRE_VERSION, Ready, Shutdown, ToFrontend
from hydra_engine.core.processes.preloaded import Process
from hydra_engine.core.reports import Status
from hydra_engine.errors import ResourceError
from hydra_nodes import listener as module
from hydra_nodes.facts import deployment_facts
from hydra_nodes.links import CHANNEL
from hydra_nodes.listener import Listener
from hydra_nodes.process import Order, encode_order
from hydra_nodes.session import Greeting, SessionError, handshake_client
from tests.nodes.proxy import Proxy
from tests.nodes.stand_in import COMMAND

SECRET = b"the secret of this deployment"
ORDER = Order(SECRET, "b", "p0", 7)
GREETING = Greeting(CHANNEL, "a", must_agree=deployment_facts(None))
THEIRS = ORDER.greeting(CHANNEL)
FENCE_S = 1.0


@asynccontextmanager
async def listening() -> AsyncIterator[Listener]:
    opened = await Listener.open("127.0.0.1", SECRET, GREETING, fence_s=FENCE_S)
    try:
        yield opened
    finally:
        opened.close()


async def dial(address: tuple[str, int], greeting: Greeting = THEIRS, secret: bytes = SECRET) -> socket.socket:
    sock = socket.create_connection(address)
    try:
        await asyncio.to_thread(handshake_client, sock, secret, greeting)
    except BaseException:
        sock.close()
        raise
    return sock


async def test_who_is_expected_gets_in_and_nobody_else() -> None:
    async with listening() as opened:
        expected = opened.expect("p0", 7)
        with pytest.raises(SessionError, match="secret differs"):
            await dial(opened.address, secret=b"another secret of the same length")
        for changes in ({"name": "p1"}, {"incarnation": 8}):
            with pytest.raises(SessionError, match="node 'a' does not expect instance"):
                await dial(opened.address, msgspec.structs.replace(THEIRS, **changes))
        assert not expected.done()
        with await dial(opened.address):
            end = await expected
            with pytest.raises(SessionError, match="does not expect"):
                await dial(opened.address)  # once
            end.close()
        waiting = opened.expect("p0", 8)
    assert waiting.cancelled()


async def test_a_node_with_other_facts_fails_the_start_and_says_which() -> None:
    async with listening() as opened:
        expected = opened.expect("p0", 7)
        facts = THEIRS.must_agree | {"engine version": "0.0.9"}
        with pytest.raises(SessionError, match=r"node 'b' has engine version 0\.0\.9, node 'a' has"):
            await dial(opened.address, msgspec.structs.replace(THEIRS, must_agree=facts))
        with pytest.raises(SessionError, match="node 'b' has engine version"):
            await expected


@pytest.mark.parametrize("name", ["model-00001.gguf", "model.safetensors"])
async def test_a_node_with_another_file_of_the_same_name_and_size_is_refused(tmp_path: Path, name: str) -> None:
    for node in "ab":
        (tmp_path / node).mkdir()
        (tmp_path / f"blob of {node}").write_bytes(bytes(200_000) + node.encode())
        (tmp_path / node / name).symlink_to(tmp_path / f"blob of {node}")  # as in the caches
    ours = Greeting(CHANNEL, "a", must_agree=deployment_facts(tmp_path / "a"))
    theirs = Order(SECRET, "b", "p0", 7, str(tmp_path / "b")).greeting(CHANNEL)
    opened = await Listener.open("127.0.0.1", SECRET, ours, fence_s=FENCE_S)
    try:
        expected = opened.expect("p0", 7)
        sentence = "node 'b' has model digest [0-9a-f]{16}, node 'a' has [0-9a-f]{16}: all nodes need the same"
        with pytest.raises(SessionError, match=sentence):
            await dial(opened.address, theirs)
        with pytest.raises(SessionError, match=sentence):
            await expected
    finally:
        opened.close()


async def test_who_is_expected_no_longer_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    async with listening() as opened:
        expected = opened.expect("p0", 7)
        open_end = FrontendSocket.open

        async def cancel_and_open(sock: socket.socket, codec: channel.Codec) -> FrontendSocket:
            expected.cancel()
            await asyncio.sleep(0)
            return await open_end(sock, codec)

        monkeypatch.setattr(FrontendSocket, "open", cancel_and_open)
        with await dial(opened.address) as sock:
            sock.settimeout(5)
            assert await asyncio.to_thread(sock.recv, 10) == b""


async def test_a_connection_that_is_made_as_it_closes_is_no_other() -> None:
    """The next socket has the number of one that is closed, which the loop still watches in that moment."""
    async with listening() as other:
        async with listening():
            await asyncio.sleep(0)
        _, writer = await asyncio.open_connection(*other.address)
        writer.close()


async def test_a_port_that_is_taken_is_refused_with_the_node() -> None:
    async with listening() as opened:
        with pytest.raises(ResourceError, match=r"node 'a' cannot listen for instances at 127\.0\.0\.1:\d+ \(Address"):
            await Listener.open("127.0.0.1", SECRET, GREETING, port=opened.address[1])


async def test_strangers_take_no_more_than_their_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_STRANGERS", 2)
    monkeypatch.setattr(module, "STRANGER_S", 0.2)
    async with listening() as opened:
        expected = opened.expect("p0", 7)
        silent = [socket.create_connection(opened.address) for _ in range(3)]  # one of them might be p0
        await asyncio.sleep(0.05)
        with pytest.raises(SessionError):
            await dial(opened.address)
        await asyncio.sleep(0.3)
        with await dial(opened.address):
            (await expected).close()
        for sock in silent:
            assert sock.recv(10) == b""
            sock.close()


async def test_instances_that_all_connect_before_they_speak_get_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """An agent connects first; its process imports for seconds before it introduces itself."""
    monkeypatch.setattr(module, "MAX_STRANGERS", 1)
    async with listening() as opened:
        waiting = [opened.expect("p0", incarnation) for incarnation in range(5)]
        socks = [socket.create_connection(opened.address) for _ in waiting]
        await asyncio.sleep(0.05)
        for incarnation, (sock, expected) in enumerate(zip(socks, waiting, strict=True)):
            with sock:
                theirs = msgspec.structs.replace(THEIRS, incarnation=incarnation)
                await asyncio.to_thread(handshake_client, sock, SECRET, theirs)
                (await expected).close()


# ---- a process on a node


class Agent:
    """Stands in for the agent of one instance: a connection to the frontend, an order, a process."""

    def __init__(self, order: Order = ORDER) -> None:
        self.order = order
        self.process: Process | None = None

    def start(self, address: tuple[str, int]) -> None:
        self.control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with socket.create_connection(address) as sock, theirs:
            self.control.send(encode_order(self.order))
            self.process = start_python(COMMAND, sock, theirs)

    async def exit_code(self, within_s: float = 20.0) -> int:
        assert self.process is not None
        deadline = time.monotonic() + within_s
        while (code := self.process.poll()) is None:
            assert time.monotonic() < deadline, "the process runs on"
            await asyncio.sleep(0.01)
        return code

    def close(self) -> None:
        if isinstance(self.process, subprocess.Popen):
            self.process.kill()
            self.process.wait()
            self.control.close()


@pytest.fixture
def agent() -> Iterator[Agent]:
    one = Agent()
    yield one
    one.close()


def shown_to_all(pid: int) -> list[bytes]:
    return [Path(f"/proc/{pid}/{file}").read_bytes() for file in ("cmdline", "environ")]


class Received:
    """The frontend's side of a channel."""

    def __init__(self, end: FrontendSocket, fence_s: float) -> None:
        self.messages: list[ToFrontend] = []
        self.arrived, self.closed = asyncio.Event(), asyncio.Event()
        self.end = end
        end.attach(self._receive, self.closed.set)
        config = EngineConfig(cluster=ClusterConfig(suspect_s=fence_s / 2, fence_s=fence_s))
        end.send_start(channel.Start(WIRE_VERSION, "p0", "P", config, incarnation=7))

    def _receive(self, messages: list[ToFrontend]) -> None:
        self.messages += messages
        self.arrived.set()

    async def wait(self, kind: type, count: int = 1) -> None:
        async with asyncio.timeout(20):
            while sum(isinstance(message, kind) for message in self.messages) < count:
                self.arrived.clear()
                await self.arrived.wait()


async def join(agent: Agent, opened: Listener, address: tuple[str, int], *, fence_s: float = FENCE_S) -> Received:
    expected = opened.expect("p0", 7)
    agent.start(address)
    return Received(await expected, fence_s)


@pytest.mark.slow
async def test_an_instance_serves_over_tcp_and_ends_when_it_is_asked(agent: Agent) -> None:
    async with listening() as opened:
        received = await join(agent, opened, opened.address)
        await received.wait(Ready)
        await received.wait(Status, 40)  # two seconds, twice the fence: the frontend says nothing but answers pings
        received.end.send([Shutdown()])
        assert await agent.exit_code() == 0
        await received.closed.wait()


@pytest.mark.slow
async def test_an_instance_ends_with_its_frontend(agent: Agent) -> None:
    async with listening() as opened:
        received = await join(agent, opened, opened.address, fence_s=600.0)
        await received.wait(Ready)
        received.end.close()
        assert await agent.exit_code() == EXIT_ORPHANED


@pytest.mark.slow
async def test_an_instance_that_is_cut_off_ends_itself(agent: Agent) -> None:
    async with listening() as opened:
        proxy = Proxy(opened.address)
        received = await join(agent, opened, proxy.address)
        await received.wait(Ready)
        proxy.passed.clear()
        begun_s = time.monotonic()
        assert await agent.exit_code() == EXIT_ORPHANED
        assert time.monotonic() - begun_s > FENCE_S / 2
        proxy.close()


@pytest.mark.slow
@pytest.mark.parametrize("upwards", [True, False], ids=["from the instance", "from the frontend"])
async def test_an_altered_byte_ends_the_connection_and_the_instance(agent: Agent, upwards: bool) -> None:
    async with listening() as opened:
        proxy = Proxy(opened.address)
        received = await join(agent, opened, proxy.address)
        await received.wait(Ready)
        proxy.alter = lambda is_up, data: data[:-1] + bytes([data[-1] ^ 1]) if is_up is upwards else data
        assert await agent.exit_code() == EXIT_ORPHANED
        await received.closed.wait()
        assert ("not authentic" in received.end.problem) is upwards
        proxy.close()


@pytest.mark.slow
async def test_an_instance_with_another_secret_ends_and_says_so(capfd: pytest.CaptureFixture[str]) -> None:
    agent = Agent(msgspec.structs.replace(ORDER, secret=b"another secret of the same length"))
    async with listening() as opened:
        opened.expect("p0", 7)
        agent.start(opened.address)
        assert await agent.exit_code() == EXIT_ORPHANED
        assert "secret differs" in capfd.readouterr().err
    agent.close()


@pytest.mark.slow
async def test_the_secret_is_in_no_argument_and_no_variable(agent: Agent) -> None:
    async with listening() as opened:
        received = await join(agent, opened, opened.address)
        await received.wait(Ready)
        assert agent.process is not None
        shown = shown_to_all(agent.process.pid)
        assert all(shown) and not any(SECRET in text for text in shown)
        agent.process.kill()
        await received.closed.wait()
