"""Agents of nodes, on this machine: what they start, connect and end."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from hydra_engine.core.processes import launch
from hydra_nodes import agent
from hydra_nodes.agent import AgentError, NodeAgent
from tests.cluster.conftest import alive, no_leak

__all__ = ["no_leak"]
pytestmark = pytest.mark.usefixtures("no_leak")

COMMAND = launch.command("tests.nodes.agent_child")
TICKET = b"0123456789abcdef"
Make = Callable[[str], NodeAgent]


class Front:
    """A frontend that reads lines of whoever connects."""

    def __init__(self) -> None:
        self.lines: asyncio.Queue[str] = asyncio.Queue()
        self.address = ("", 0)
        self.num_open = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_open += 1
        with contextlib.suppress(ConnectionError):
            while line := await reader.readline():
                self.lines.put_nowait(line.decode().strip())
        self.lines.put_nowait("end")
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()
        self.num_open -= 1

    async def line(self) -> str:
        return await asyncio.wait_for(self.lines.get(), 30)


@pytest.fixture
async def front() -> AsyncIterator[Front]:
    front = Front()
    server = await asyncio.start_server(front.serve, "127.0.0.1", 0)
    front.address = server.sockets[0].getsockname()
    yield front
    async with asyncio.timeout(30):
        while front.num_open:  # noqa: ASYNC110 - what is waited for has no event
            await asyncio.sleep(0.005)
    server.close()
    await server.wait_closed()


@pytest.fixture
async def make() -> AsyncIterator[Make]:
    agents: list[NodeAgent] = []

    def make(node: str) -> NodeAgent:
        agents.append(NodeAgent(node, COMMAND))
        return agents[-1]

    yield make
    for one in agents:
        await one.end()
    await asyncio.sleep(0)


def pid_of(one: NodeAgent) -> int:
    (life,) = one._lives.values()
    return life.process.pid


async def test_a_process_gets_its_order_and_its_end_is_known(front: Front, make: Make) -> None:
    one = make("a")
    await one.start("e0", 7, front.address, b"an order")
    assert await front.line() == "an order"
    first = pid_of(one)
    waiting = asyncio.create_task(one.wait(7))
    await asyncio.sleep(0)
    await one.start("e0", 8, front.address, b"another")
    assert not alive(first) and "SIGKILL" in await waiting, "an agent has one process"
    assert sorted([await front.line(), await front.line()]) == ["another", "end"]
    await one.kill(7)
    assert alive(pid_of(one)), "it is another's life"
    await one.kill(8)
    assert "SIGKILL" in await asyncio.wait_for(one.wait(8), 30)
    assert "ended" in await one.wait(7)
    with pytest.raises(AgentError, match="has ended on node a"):
        await one.dial(8, "p0", 1, TICKET, ("nobody", 0))


@pytest.mark.parametrize(
    ("host", "family"), [pytest.param("", "AF_UNIX", marks=pytest.mark.slow), ("127.0.0.1", "AF_INET")]
)
async def test_two_processes_are_connected_with_each_other_and_with_no_stranger(
    front: Front, make: Make, host: str, family: str
) -> None:
    one, other = make("a"), make("a" if not host else "b")
    await one.start("e0", 1, front.address, b"order")
    await other.start("p0", 2, front.address, b"order")
    assert [await front.line(), await front.line()] == ["order", "order"]
    address = await one.listen(1, "p0", 2, TICKET, host)
    strangers = [await agent._connect(address) for _ in range(3)]
    strangers[0].send(b"x" * len(TICKET))
    strangers[1].send(TICKET[:4])
    strangers[2].close()
    await other.dial(2, "e0", 1, TICKET, address)
    assert sorted([await front.line(), await front.line()]) == [f"e0 1 {family} e0", f"p0 2 {family} p0"]
    with pytest.raises(AgentError, match=r"node . does not reach instance e0"):
        await other.dial(2, "e0", 1, TICKET, address)
    for stranger in strangers:
        stranger.close()


async def test_who_never_comes_leaves_nothing_behind(front: Front, make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent, "CONNECT_S", 0.1)
    one = make("a")
    await one.start("e0", 1, front.address, b"order")
    await front.line()
    address = await one.listen(1, "p0", 2, TICKET, "127.0.0.1")
    await asyncio.wait_for(asyncio.gather(*one._accepting), 30)
    with pytest.raises(AgentError, match="Connection refused"):
        await make("b").start("p0", 2, address, b"order")


async def test_a_frontend_that_is_not_reached_and_a_command_that_is_not_there(front: Front) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        address = closed.getsockname()
    one = NodeAgent("far", COMMAND)
    with pytest.raises(AgentError, match=r"node far does not reach the frontend at 127.0.0.1:[0-9]+ .Connection refu"):
        await one.start("e0", 1, address, b"order")
    with pytest.raises(AgentError, match="cannot be started on node a: No such file"):
        await NodeAgent("a", ["/no/such/program"]).start("e0", 1, front.address, b"order")
    assert await front.line() == "end"


AGENT = """
import asyncio, sys
from hydra_nodes.agent import NodeAgent
from tests.nodes.test_agent import COMMAND, pid_of

async def main():
    one = NodeAgent("a", COMMAND)
    await one.start("e0", 1, (sys.argv[1], int(sys.argv[2])), b"order")
    print(pid_of(one), flush=True)
    await one.wait(1)

asyncio.run(main())
"""


@pytest.mark.slow
async def test_a_process_ends_with_its_agent_and_inherits_no_secret(front: Front) -> None:
    environment = os.environ | {"RAY_AUTH_TOKEN": "ossifrage", "HYDRA_API_KEY": "ossifrage"}
    host, port = front.address
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", AGENT, host, str(port)), stdout=asyncio.subprocess.PIPE, env=environment
    )
    assert process.stdout is not None
    pid = int(await process.stdout.readline())
    assert await front.line() == "order"
    assert b"ossifrage" not in Path(f"/proc/{pid}/environ").read_bytes()  # noqa: ASYNC240
    process.kill()
    await process.wait()
    assert await front.line() == "end"
