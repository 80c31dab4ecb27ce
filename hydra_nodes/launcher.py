"""`NodeLauncher`: instances on nodes, each started by an agent there and connected with the frontend by TCP.

Who places the agents is another's business (`ray_launcher.py`). Two instances on one node are connected by a Unix
socket, so that they map each other's blocks; on different nodes by TCP.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Coroutine, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import msgspec

from hydra_engine.clock import Clock, MonotonicClock
from hydra_engine.cluster import channel
from hydra_engine.cluster.children import Child
from hydra_engine.cluster.launcher import OnFailure
from hydra_engine.config import DEMO_MODEL, SHAPES, EngineConfig
from hydra_engine.core.processes.preloaded import Preloaded
from hydra_engine.errors import ConfigError
from hydra_engine.preprocess.model_files import is_gguf_model
from hydra_nodes.agent import CONNECT_S, TICKET_BYTES, AgentError
from hydra_nodes.children import Agent, AgentLost, NodeChild
from hydra_nodes.facts import deployment_facts
from hydra_nodes.links import CHANNEL
from hydra_nodes.listener import Listener
from hydra_nodes.nixl_blocks import active_ports, installed_version
from hydra_nodes.process import Order, encode_order
from hydra_nodes.session import Greeting, SessionError
from hydra_nodes.tls import TlsFiles

AGAIN_S = 0.5  # between two tries to reach an agent
FIRST_START_S = 30.0  # for an agent to answer when its instance starts first; later its node may be away for long


@dataclass(frozen=True, slots=True)
class PlacedAgent:
    """The agent of an instance, and where it is. `device`: as the node calls it."""

    agent: Agent
    node: str
    device: str


class Cluster(Protocol):
    async def place(self, config: EngineConfig) -> tuple[tuple[str, str], Mapping[str, PlacedAgent]]:
        """Starts an agent for each instance of the topology. Returns name and address of this node, and the places by
        name of the instance. Raises HydraError; `free` is called after that too."""
        ...

    def describe(self, config: EngineConfig) -> list[tuple[str, str]]:
        """Returns what each node has, by name. Raises HydraError."""
        ...

    async def free(self) -> None:
        """Ends the agents, and with them what they have started. Idempotent."""
        ...


class NodeLauncher:
    """A `Launcher` (`cluster/launcher.py`) on the nodes of a cluster."""

    def __init__(self, config: EngineConfig, cluster: Cluster, clock: Clock | None = None) -> None:
        self._config = config = _with_absolute_paths(config)
        self._model = None if config.model in (DEMO_MODEL, *SHAPES) else config.model_path  # those ship with the engine
        self._cluster = cluster
        self._clock = clock or MonotonicClock()
        self._secret = secrets.token_bytes(32)  # of this deployment
        tls = config.cluster.cluster_tls
        self._tls = None if tls is None else Path(tls).resolve()
        self._make_layer = None if self._tls is None else TlsFiles(self._tls)
        self._places: Mapping[str, PlacedAgent] = {}
        self._listener: Listener | None = None
        self._started: set[str] = set()
        self._children: set[NodeChild] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    def describe(self) -> list[tuple[str, str]]:
        nixl, ports = installed_version(), active_ports()
        here = [("NIXL here", nixl or "not installed"), ("RDMA here", ", ".join(ports) or "no port is up")]
        return [*self._cluster.describe(self._config), *here]

    async def open(self) -> None:
        (node, host), self._places = await self._cluster.place(self._config)
        if self._tls is not None:
            await self._check_certificates(str(self._tls))
        facts = await asyncio.to_thread(deployment_facts, self._model)
        fence_s = self._config.cluster.fence_s
        self._listener = await Listener.open(
            host,
            self._secret,
            Greeting(CHANNEL, node, must_agree=facts),
            fence_s=fence_s,
            make_layer=self._make_layer,
        )

    async def _check_certificates(self, folder: str) -> None:
        """Raises ConfigError if a node lacks them."""
        for place in {place.node: place for place in self._places.values()}.values():
            try:
                problem = await place.agent.find_tls_problem(folder)
            except AgentLost as error:
                problem = f"its agent {error}"
            if problem:
                raise ConfigError(f"node {place.node} cannot join: {problem}", param="cluster_tls")

    async def launch(self, start: channel.Start, node: str, preloaded: Preloaded | None) -> Child:
        place = self._places[start.name]
        child = NodeChild(start.name, start.incarnation, place.agent)
        self._children.add(child)
        config = replace(_with_absolute_paths(start.config), device=place.device)
        child.run(partial(self._live, child, place, msgspec.structs.replace(start, config=config)))
        return child

    async def _live(self, child: NodeChild, place: PlacedAgent, start: channel.Start) -> str:
        """Starts, connects and outlives one incarnation. Returns how it ended."""
        assert self._listener is not None
        connecting = self._listener.expect(start.name, start.incarnation)
        try:
            await self._start(place, start)
            child.started = True
            exiting = asyncio.create_task(_wait(place.agent, start.incarnation))
            try:
                either: list[asyncio.Future[Any]] = [connecting, exiting]
                await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
                if connecting.done():
                    end = connecting.result()
                    end.send_start(start)
                    child.end.connect(end)
                return await exiting
            finally:
                exiting.cancel()
        except (AgentError, AgentLost) as error:
            return str(error)
        except SessionError as error:
            child.end.refuse(ConfigError(str(error)))
            child.kill()
            return f"is refused ({error})"
        finally:
            connecting.cancel()

    async def _start(self, place: PlacedAgent, start: channel.Start) -> None:
        """Raises AgentError, and AgentLost if this is the first start and the agent does not answer for a while."""
        assert self._listener is not None
        give_up_s = self._clock.now() + FIRST_START_S
        model = "" if self._model is None else str(self._model)
        tls = "" if self._tls is None else str(self._tls)
        order = Order(self._secret, place.node, start.name, start.incarnation, model, tls=tls)
        if is_gguf_model(self._config):
            order = msgspec.structs.replace(order, gguf=self._config.model, mmproj=self._config.mmproj or "")
        while True:
            try:
                order = msgspec.structs.replace(order, host=await place.agent.host())
                await place.agent.start(start.name, start.incarnation, self._listener.address, encode_order(order))
            except AgentLost:
                if start.name not in self._started and self._clock.now() >= give_up_s:
                    raise
                await asyncio.sleep(AGAIN_S)
            else:
                self._started.add(start.name)
                return

    def connect(self, one: Child, other: Child, on_failure: OnFailure) -> None:
        assert isinstance(one, NodeChild) and isinstance(other, NodeChild)
        self._run(self._connect(one, other, on_failure))

    async def _connect(self, one: NodeChild, other: NodeChild, on_failure: OnFailure) -> None:
        first, second = self._places[one.name], self._places[other.name]
        ticket = secrets.token_bytes(TICKET_BYTES)
        try:
            async with asyncio.timeout(2 * CONNECT_S):
                host = "" if first.node == second.node else await first.agent.host()
                address = await first.agent.listen(one.incarnation, other.name, other.incarnation, ticket, host)
                await second.agent.dial(other.incarnation, one.name, one.incarnation, ticket, address)
        except (AgentError, AgentLost) as error:
            on_failure(str(error))
        except TimeoutError:
            on_failure(f"nodes {first.node} and {second.node} did not connect them within {2 * CONNECT_S:g} s")

    async def close(self) -> None:
        for task in list(self._tasks):
            task.cancel()
        for child in self._children:
            child.cancel()
        self._children.clear()
        if self._listener is not None:
            self._listener.close()
            self._listener = None
        await self._cluster.free()

    def _run(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


async def _wait(agent: Agent, incarnation: int) -> str:
    try:
        return await agent.wait(incarnation)
    except AgentLost as error:
        return str(error)


def _with_absolute_paths(config: EngineConfig) -> EngineConfig:
    """Returns the configuration for processes with another working folder."""
    paths: dict[str, Any] = {
        name: str(Path(path).resolve())
        for name in ("model", "model_folder", "mmproj", "packed_cache", "profile_dir")
        if (path := getattr(config, name)) is not None and Path(path).exists()
    }
    return replace(config, **paths)
