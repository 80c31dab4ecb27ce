"""The supervisor over agents of two nodes, both on this machine: start, connections, deaths, a node that is away."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hydra_engine.cluster import supervisor as module
from hydra_engine.cluster.member import PACE
from hydra_engine.cluster.supervisor import Supervisor
from hydra_engine.config import ClusterConfig, EngineConfig
from hydra_engine.core.instances import Condition
from hydra_engine.core.messages import NeedImages
from hydra_engine.errors import ConfigError
from hydra_nodes import launcher
from hydra_nodes.agent import NodeAgent
from hydra_nodes.children import AgentLost
from hydra_nodes.launcher import NodeLauncher, PlacedAgent
from tests.cluster.conftest import alive, no_leak, wait_until
from tests.cluster.recorder import Recorder
from tests.faults import SetFault
from tests.nodes.certificates import make_authority, make_node
from tests.nodes.stand_in import COMMAND

__all__ = ["no_leak"]
pytestmark = pytest.mark.usefixtures("no_leak")

QUICK = replace(PACE, backoff_s=(0.0, 0.05), reconnect_s=0.1, exit_grace_s=5.0)


class LosableAgent:
    """An agent on a node that may be lost and come back: what runs there is killed, and no call is answered."""

    def __init__(self, node: str) -> None:
        self.agent = NodeAgent(node, COMMAND)
        self.is_lost = asyncio.Event()

    @property
    def pid(self) -> int:
        (life,) = self.agent._lives.values()
        return life.process.pid

    def lose(self) -> None:
        self.is_lost.set()
        os.kill(self.pid, signal.SIGKILL)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        async def call(*arguments: Any) -> Any:
            lost = asyncio.create_task(self.is_lost.wait())
            answer = asyncio.create_task(getattr(self.agent, name)(*arguments))
            try:
                await asyncio.wait([lost, answer], return_when=asyncio.FIRST_COMPLETED)
                if lost.done():
                    raise AgentLost(f"was lost with node {self.agent._node}")
                return await answer
            finally:
                lost.cancel()
                answer.cancel()

        return call


class Nodes:
    """A cluster of this machine. Every node has the address of a loopback device."""

    def __init__(self) -> None:
        self.agents: dict[str, LosableAgent] = {}
        self.freed = False

    async def place(self, config: EngineConfig) -> Any:
        topology = config.parsed_topology
        for name, spec in zip(topology.names, topology.instances, strict=True):
            self.agents[name] = LosableAgent(spec.node)
        specs = dict(zip(topology.names, topology.instances, strict=True))
        places = {name: PlacedAgent(one, specs[name].node, "cpu") for name, one in self.agents.items()}
        return ("front", "127.0.0.1"), places

    def describe(self, config: EngineConfig) -> list[tuple[str, str]]:
        return []

    async def free(self) -> None:
        self.freed = True
        for one in self.agents.values():
            await one.agent.end()


Make = Callable[..., Supervisor]


@pytest.fixture
def nodes() -> Nodes:
    return Nodes()


@pytest.fixture
async def make(nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Make]:
    made: list[Supervisor] = []
    monkeypatch.setattr(module, "load_launcher", lambda name, config: NodeLauncher(config, nodes))

    def supervisor(topology: str, **cluster: Any) -> Supervisor:
        options = ClusterConfig(launcher="ray", **cluster)
        config = EngineConfig(topology=topology, device="cpu", cluster=options)
        made.append(Supervisor(config, processes=True, pace=QUICK))
        return made[-1]

    yield supervisor
    pids = [one.pid for one in nodes.agents.values() if one.agent._lives]
    for one in made:
        await one.stop()
    assert nodes.freed and not [pid for pid in pids if alive(pid)]
    await asyncio.sleep(0)


async def test_instances_of_two_nodes_come_up_talk_and_come_back(make: Make, nodes: Nodes) -> None:
    supervisor, recorder = make("2E@a+PD@b"), Recorder()
    links = await recorder.start(supervisor)
    assert [(link.name, link.device, link.pid) for link in links] == [
        (name, "cpu", None) for name in ("e0", "e1", "pd0")
    ]
    assert [(state.node, link.summary.device) for state, link in zip(supervisor.states(), links, strict=True)] == [
        ("a", "a:cpu"),
        ("a", "a:cpu"),
        ("b", "b:cpu"),
    ]
    assert recorder.pairs == {("e0", "e1"), ("e0", "pd0"), ("e1", "pd0")}
    links[0].end.send([SetFault("", "offer", "pd0")])
    await recorder.until(lambda: recorder.messages.get("pd0"))
    assert recorder.messages["pd0"] == [NeedImages(77, ())]
    told = len(recorder.events)
    old = recorder.links["pd0"]
    supervisor.kill("pd0")
    await recorder.until(lambda: "pd0" in recorder.links and recorder.links["pd0"] is not old)
    await recorder.until(lambda: len(recorder.pairs) == 3)
    (down,) = [event for event in recorder.events[told:] if event[0] == "down"]
    assert down[1] == "pd0" and "SIGKILL" in down[2] and down[3] == "restarts"
    assert recorder.links["pd0"].incarnation > old.incarnation
    await supervisor.stop()
    assert [state.condition for state in supervisor.states()] == [Condition.STOPPED] * 3


@pytest.mark.slow
async def test_instances_with_certificates_come_up(make: Make, nodes: Nodes, tmp_path: Path) -> None:
    make_authority(tmp_path / "authority")
    folder = make_node(tmp_path / "node", tmp_path / "authority")
    supervisor, recorder = make("E@a+PD@b", cluster_tls=str(folder)), Recorder()
    await recorder.start(supervisor)
    assert recorder.pairs == {("e0", "pd0")}
    with pytest.raises(ConfigError, match=r"--cluster-tls .*tls\.crt"):
        make("E@a+PD@b", cluster_tls=str(tmp_path))
    lacking = make("E@a+PD@b", cluster_tls=str(folder))
    (folder / "tls.key").unlink()
    with pytest.raises(ConfigError, match=r"node [ab] cannot join: .*tls\.key .*No such file"):
        await lacking.start(Recorder())


@pytest.mark.slow
async def test_a_node_that_is_away_for_a_while(make: Make, nodes: Nodes) -> None:
    supervisor, recorder = make("E@a+PD@b"), Recorder()
    await recorder.start(supervisor)
    nodes.agents["e0"].lose()
    await recorder.until(lambda: recorder.of("down", "e0"))
    await asyncio.sleep(2.0)
    (state, other) = supervisor.states()
    assert state.condition is Condition.STARTING and other.condition is Condition.READY
    assert len(recorder.of("down", "e0")) == 1, "a node that is away is no start that fails"
    nodes.agents["e0"].is_lost.clear()
    await recorder.until(lambda: len(recorder.pairs) == 1)
    nodes.agents["pd0"].lose()
    await recorder.until(lambda: recorder.of("down", "pd0"))
    await asyncio.wait_for(supervisor.stop(), 5.0)


async def test_an_instance_that_does_not_agree_is_refused_by_a_sentence_that_names_its_node(
    make: Make, nodes: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launcher, "deployment_facts", lambda model: {"engine version": "0.0.9"})
    sentence = r"instance (e0 on node a|pd0 on node b): node '[ab]' has engine version .*0\.0\.9"
    with pytest.raises(ConfigError, match=sentence):
        await make("E@a+PD@b").start(Recorder())
    wait_until(lambda: nodes.freed, "nothing stays")


async def test_an_instance_of_another_dtype_is_refused_before_it_reads_its_weights(
    make: Make, nodes: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STAND_IN_E0", "float32")
    one = "instance (e0 on node a|pd0 on node b)"
    sentence = rf"^{one}: dtype \w+ differs from \w+ of {one}; give a --dtype that each can compute"
    with pytest.raises(ConfigError, match=sentence):
        await make("E@a+PD@b").start(Recorder())
    wait_until(lambda: nodes.freed, "nothing stays")
