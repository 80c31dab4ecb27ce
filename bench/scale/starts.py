"""Real starts: many instances on nodes of their own, all of this machine, and one of the demo model's that comes back
into a deployment that serves.

The supervisor, the launcher of nodes, its agents, sessions and connections are the real ones; Ray, which would reach
the agents, is left out. Instances of the first kind compute nothing, and their processes import no torch."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any
from unittest import mock

from bench.scale.instance import COMMAND
from hydra_engine.cluster import supervisor as supervisor_module
from hydra_engine.cluster.member import InstanceLink
from hydra_engine.cluster.supervisor import Supervisor
from hydra_engine.config import ClusterConfig, EngineConfig
from hydra_engine.core.messages import Loading, ToFrontend, ToInstance
from hydra_engine.core.sampling import SamplingParams
from hydra_engine.engine import Engine
from hydra_nodes.agent import NodeAgent
from hydra_nodes.launcher import NodeLauncher, PlacedAgent

_IDLE_S = 3.0
_BACK_S = 60.0
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


class _Nodes:
    """A cluster of this machine, with a node for each instance."""

    def __init__(self) -> None:
        self.agents: dict[str, NodeAgent] = {}

    async def place(self, config: EngineConfig) -> Any:
        topology = config.parsed_topology
        specs = dict(zip(topology.names, topology.instances, strict=True))
        self.agents = {name: NodeAgent(spec.node, COMMAND) for name, spec in specs.items()}
        places = {name: PlacedAgent(one, specs[name].node, "cpu") for name, one in self.agents.items()}
        return ("front", "127.0.0.1"), places

    def describe(self, config: EngineConfig) -> list[tuple[str, str]]:
        return []

    async def free(self) -> None:
        for agent in self.agents.values():
            await agent.end()

    @property
    def pids(self) -> list[int]:
        return [life.process.pid for agent in self.agents.values() for life in agent._lives.values()]


class _Listener:
    """Notes when instances and pairs come up, in seconds on the monotonic clock."""

    def __init__(self) -> None:
        self.up_s: dict[str, float] = {}
        self.pairs_s: list[tuple[float, str, str]] = []
        self.changed = asyncio.Event()

    def on_progress(self, name: str, loading: Loading) -> None: ...

    def on_messages(self, name: str, messages: list[ToFrontend]) -> None: ...

    def on_up(self, link: InstanceLink) -> None:
        self.up_s[link.name] = time.monotonic()

    def on_down(self, name: str, reason: str, since_s: float, *, restarts: bool) -> None: ...

    def on_silent(self, name: str, silent: bool) -> None: ...

    def on_pair(self, one: str, other: str, up: bool) -> None:
        if up:
            self.pairs_s.append((time.monotonic(), one, other))
            self.changed.set()


def start(count: int) -> dict[str, Any]:
    """Starts `count` instances, idles, and starts one of them again."""
    return asyncio.run(_start(count))


async def _start(count: int) -> dict[str, Any]:
    nodes, listener = _Nodes(), _Listener()
    topology = "+".join(f"EPD@n{number}" for number in range(count))
    config = EngineConfig(
        topology=topology, device="cpu", cluster=ClusterConfig(launcher="ray", suspect_s=30.0, fence_s=60.0)
    )
    with mock.patch.object(supervisor_module, "load_launcher", lambda _, config: NodeLauncher(config, nodes)):
        supervisor = Supervisor(config, processes=True)
    began_s, cpu_s = time.monotonic(), time.process_time()
    try:
        await supervisor.start(listener)
        started_s, start_cpu_s = time.monotonic() - began_s, time.process_time() - cpu_s
        await asyncio.sleep(1.0)
        cpu_s, children_s = time.process_time(), [_cpu_s(pid) for pid in nodes.pids]
        await asyncio.sleep(_IDLE_S)
        idle_core = (time.process_time() - cpu_s) / _IDLE_S
        each_core = [(_cpu_s(pid) - before) / _IDLE_S for pid, before in zip(nodes.pids, children_s, strict=True)]
        return {
            "instances": count,
            "pairs": len(listener.pairs_s),
            "started_s": started_s,
            "last_ready_s": max(listener.up_s.values()) - began_s,
            "frontend_cpu_s": start_cpu_s,
            "idle_frontend_core": idle_core,
            "idle_instance_core": fmean(each_core),
            "descriptors": len(os.listdir(f"/proc/{nodes.pids[0]}/fd")),
            "rss_mib": median(_rss_bytes(pid) for pid in nodes.pids) / 2**20,
            "again": await _again(supervisor, listener, f"epd{count - 1}", count - 1),
        }
    finally:
        await supervisor.stop()


async def _again(supervisor: Supervisor, listener: _Listener, name: str, pairs: int) -> dict[str, float]:
    listener.up_s.pop(name)
    listener.pairs_s.clear()
    killed_s = time.monotonic()
    supervisor.kill(name)
    async with asyncio.timeout(_BACK_S):
        while len(listener.pairs_s) < pairs:
            await listener.changed.wait()
            listener.changed.clear()
    times_s = sorted(at_s for at_s, _, _ in listener.pairs_s)
    ready_s = listener.up_s[name]
    return {
        "ready_s": ready_s - killed_s,
        "first_pair_s": times_s[0] - ready_s,
        "all_pairs_s": times_s[-1] - ready_s,
    }


def _cpu_s(pid: int) -> float:
    user, system = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[11:13]
    return (int(user) + int(system)) / _TICKS_PER_S


def _rss_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


# ---- an instance with a model


def joins(model: str, topology: str = "2EPD") -> dict[str, float]:
    """Kills an instance of a deployment that serves. Returns seconds since then until its end is noticed, until it is
    ready, until it is connected with its peers, and until a request is sent to it."""
    engine = Engine(model, topology=topology, threads=1, log_level="warning")
    try:
        return asyncio.run_coroutine_threadsafe(_join(engine), _loop(engine)).result()
    finally:
        engine.close()


def _loop(engine: Engine) -> asyncio.AbstractEventLoop:
    frontend = engine._frontend
    assert frontend is not None
    return frontend._loop


async def _join(engine: Engine) -> dict[str, float]:
    frontend = engine._frontend
    assert frontend is not None
    name, at_s = next(iter(frontend._dispatcher.instances)), dict[str, float]()

    def noted(owner: Any, method: str, what: str, is_it: Any) -> None:
        call = getattr(owner, method)

        def noting(*arguments: Any, **named: Any) -> Any:
            if is_it(*arguments):
                at_s.setdefault(what, time.monotonic() - killed_s)
            return call(*arguments, **named)

        setattr(owner, method, noting)

    def is_request(to: str, messages: Sequence[ToInstance]) -> bool:
        return to == name and "ready_s" in at_s and any(type(one).__name__ == "Submit" for one in messages)

    killed_s = time.monotonic()
    noted(frontend, "on_down", "noticed_s", lambda other, *_: other == name)
    noted(frontend, "on_up", "ready_s", lambda link: link.name == name)
    noted(frontend, "on_pair", "connected_s", lambda one, other, up: up and name in (one, other))
    noted(frontend._dispatcher.instances, "_send", "first_request_s", is_request)
    frontend._supervisor.kill(name)
    while "first_request_s" not in at_s and time.monotonic() - killed_s < _BACK_S:
        await engine.agenerate("Count to twenty.", sampling=SamplingParams(max_tokens=8, ignore_eos=True))
    return at_s
