"""`--cluster ray`: an agent for each instance, placed by Ray, which also watches them and starts dead ones again.

The only module that imports Ray. Nodes are called by a label that they have, else as Ray calls them: by `ray start
--node-name`, their host names or addresses. A node that comes back with its label gets its instances again, at whatever
address. One placement group holds all resources of a topology, a bundle for each device of a node, and each agent is an
actor in its bundle, so that Ray sets the visible devices. What passes through Ray is calls of agents: no byte of a
request.
"""

from __future__ import annotations

import asyncio
import atexit
import ctypes
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from hydra_engine.clock import Clock, MonotonicClock
from hydra_engine.cluster.children import REAPING_S
from hydra_engine.config import EngineConfig
from hydra_engine.core.instances import InstanceSpec
from hydra_engine.errors import ConfigError, ResourceError
from hydra_nodes.agent import Address, NodeAgent
from hydra_nodes.children import AgentLost
from hydra_nodes.launcher import NodeLauncher, PlacedAgent

logger = logging.getLogger(__name__)

# Seconds without Ray's head after which Ray ends a process: a server outlives the head, nodes if they have this too.
HEADLESS = ("RAY_gcs_rpc_server_reconnect_timeout_s", "86400")
JOIN_TRIES = ("RAY_NUM_REDIS_GET_RETRIES", "3")  # a second each: a wrong token is no better later
NO_REPORTS = ("RAY_USAGE_STATS_ENABLED", "0")  # a Ray that is started here dials out otherwise
LEAVE_S = 5.0
REACH_S = 3.0  # for a connection to the cluster's address
PLACE_S = 8.0  # for Ray to place the bundles: what a server before this one had is free after some seconds
EMPTY_S = 0.1  # after an empty answer of Ray's head
START_S = 30.0  # for Ray to start the agents, each of which imports the engine
CPU, GPU = "CPU", "GPU"  # names of Ray's resources
LABEL = "hydra-engine/node"  # of Ray's, whose value is a node's name wherever it runs
_MAX_NAMED = 8  # nodes named in an error


def find_token() -> str | None:
    """Returns where Ray finds its token, which it looks for in the environment, then in files; None if nowhere."""
    if os.environ.get("RAY_AUTH_TOKEN"):
        return "RAY_AUTH_TOKEN"
    path = os.environ.get("RAY_AUTH_TOKEN_PATH") or str(Path.home() / ".ray" / "auth_token")
    return path if Path(path).is_file() and Path(path).stat().st_size > 0 else None


def facts() -> dict[str, str]:
    """Returns what must be the same on all nodes, and whether Ray checks tokens on this one."""
    return {
        "Python": ".".join(map(str, sys.version_info[:2])),
        "hydra-engine": import_module("hydra_engine").__version__,
        "RAY_AUTH_MODE": os.environ.get("RAY_AUTH_MODE", "disabled"),
    }


class RayAgent(NodeAgent):
    """The actor: an agent that says what its node has."""

    def __init__(self, node: str) -> None:
        super().__init__(node, host=str(import_module("ray").util.get_node_ip_address()))

    async def facts(self) -> dict[str, str]:
        return facts()


class _Calls:
    """Calls of an actor as an `Agent`."""

    def __init__(self, actor: Any, node: str) -> None:
        self._actor = actor
        self._node = node

    async def host(self) -> str:
        return str(await self._call(self._actor.host.remote()))

    async def start(self, name: str, incarnation: int, frontend: Address, order: bytes) -> None:
        await self._call(self._actor.start.remote(name, incarnation, frontend, order))

    async def wait(self, incarnation: int) -> str:
        return str(await self._call(self._actor.wait.remote(incarnation)))

    async def kill(self, incarnation: int) -> None:
        await self._call(self._actor.kill.remote(incarnation))

    async def find_tls_problem(self, folder: str) -> str:
        return str(await self._call(self._actor.find_tls_problem.remote(folder)))

    async def listen(self, incarnation: int, peer: str, peer_incarnation: int, ticket: bytes, host: str) -> Address:
        address: Address = await self._call(
            self._actor.listen.remote(incarnation, peer, peer_incarnation, ticket, host)
        )
        return address

    async def dial(self, incarnation: int, peer: str, peer_incarnation: int, ticket: bytes, address: Address) -> None:
        await self._call(self._actor.dial.remote(incarnation, peer, peer_incarnation, ticket, address))

    async def _call(self, reference: Awaitable[Any]) -> Any:
        errors = import_module("ray.exceptions")
        try:
            return await reference
        except errors.RayActorError as error:  # also ActorUnavailableError
            raise AgentLost(f"was lost: Ray does not reach node {self._node}") from error


class RayCluster:
    """The agents of a topology in a Ray cluster that is joined, or started here if there is none."""

    def __init__(self, clock: Clock | None = None) -> None:
        self._clock = clock or MonotonicClock()
        self._ray: Any = None
        self._group: Any = None
        self._head = ""  # address of Ray's head
        self._actors: list[Any] = []

    async def place(self, config: EngineConfig) -> tuple[tuple[str, str], Mapping[str, PlacedAgent]]:
        check_token()
        specs = specs_by_name(config)
        await asyncio.to_thread(self._join, config.cluster.ray_address)
        _take_back_signals()
        nodes = _alive_nodes(self._ray)
        by_name = {spec.node: find_node(nodes, spec.node) for spec in specs.values()}
        bundles = bundles_by_device(specs, by_name)
        await self._reserve(bundles)
        places = self._start_agents(specs, by_name, list(bundles))
        await self._check_agents(places)
        host = str(self._ray.util.get_node_ip_address())
        return (next((_name(node) for node in nodes if host in _names(node)), host), host), places

    def describe(self, config: EngineConfig) -> list[tuple[str, str]]:
        check_token()
        self._join(config.cluster.ray_address or os.environ.get("RAY_ADDRESS", "auto"))
        ray, self._ray = self._ray, None
        rows = [("ray", f"{ray.__version__}, with a token")]
        for node in sorted(_alive_nodes(ray), key=_names):
            resources = ", ".join(f"{node['Resources'].get(kind, 0):g} {kind}" for kind in (CPU, GPU))
            rows.append((_name(node), f"{node['NodeManagerAddress']}, {resources}"))
        self._leave(ray)
        return rows

    def _join(self, address: str | None) -> None:
        """Connects this process with the cluster. Raises ConfigError."""
        os.environ["RAY_AUTH_MODE"] = "token"
        for variable in (HEADLESS, JOIN_TRIES, NO_REPORTS):
            os.environ.setdefault(*variable)
        hook = sys.excepthook
        try:
            self._ray = import_module("ray")
        except ImportError as error:
            raise ConfigError(
                f"--cluster ray needs the package ray, which is not here ({error}); install it with `make ray` or "
                "`pip install 'ray>=2.60,<3'`",
                param="launcher",
            ) from error
        sys.excepthook = hook  # Ray's tells the head of an exception first, and without a head it waits for a minute
        check_reachable(address or os.environ.get("RAY_ADDRESS", ""))
        _pause_listeners()
        _print_to_stderr()
        try:
            self._ray.init(address=address, logging_level="error", namespace="hydra-engine")
        except (ConnectionError, RuntimeError, ValueError, PermissionError) as error:
            reason = " ".join(str(error).split())[:300]
            if isinstance(error, ConnectionError):
                reason += f"; is its token another than the one of this node, in {find_token()}?"
            raise ConfigError(f"the Ray cluster cannot be joined: {reason}", param="ray_address") from error
        self._head = str(self._ray.get_runtime_context().gcs_address)

    async def _reserve(self, bundles: Mapping[tuple[str, str], dict[str, float]]) -> None:
        """Raises ResourceError if the nodes have no room for the bundles."""
        self._group = self._place(bundles)
        try:
            await asyncio.wait_for(self._group.ready(), PLACE_S)
        except TimeoutError as error:
            self._ray.util.remove_placement_group(self._group)
            names = dict.fromkeys(node for node, _ in bundles)
            full = [f"node {name}" for name in names if not await self._fits(name, bundles)]
            raise ResourceError(
                f"what the topology needs is not free on {' and '.join(full) or 'its nodes'}: others use CPUs or GPUs "
                "there, or Ray has lost it; `ray status` shows what is free",
                param="topology",
            ) from error

    def _place(self, bundles: Mapping[tuple[str, str], dict[str, float]]) -> Any:
        """Returns a placement group of the bundles, those that name no address on the nodes with their label."""
        named = [any(kind.startswith("node:") for kind in bundle) for bundle in bundles.values()]
        selectors = [{} if has else {LABEL: node} for has, (node, _) in zip(named, bundles, strict=True)]
        return self._ray.util.placement_group(
            list(bundles.values()), strategy="PACK", bundle_label_selector=None if all(named) else selectors
        )

    async def _fits(self, node: str, bundles: Mapping[tuple[str, str], dict[str, float]]) -> bool:
        """True if Ray can place the bundles of this node."""
        self._group = self._place({key: bundle for key, bundle in bundles.items() if key[0] == node})
        try:
            await asyncio.wait_for(self._group.ready(), 1.0)
        except TimeoutError:
            return False
        finally:
            self._ray.util.remove_placement_group(self._group)
        return True

    def _start_agents(
        self, specs: Mapping[str, InstanceSpec], nodes: Mapping[str, dict[str, Any]], bundles: list[tuple[str, str]]
    ) -> dict[str, PlacedAgent]:
        strategy = import_module("ray.util.scheduling_strategies").PlacementGroupSchedulingStrategy
        together = Counter((spec.node, spec.device) for spec in specs.values())
        places = {}
        for name, spec in specs.items():
            key = (spec.node, spec.device)
            has_gpu = _has_gpu(spec, nodes[spec.node])
            actor = (
                self._ray.remote(RayAgent)
                .options(
                    num_cpus=1,
                    num_gpus=1 / together[key] if has_gpu else 0,
                    max_restarts=-1,
                    max_concurrency=64,
                    scheduling_strategy=strategy(self._group, placement_group_bundle_index=bundles.index(key)),
                )
                .remote(spec.node)
            )
            self._actors.append(actor)
            device = "cuda:0" if spec.device.startswith("cuda") else spec.device
            places[name] = PlacedAgent(_Calls(actor, spec.node), spec.node, device)
        return places

    async def _check_agents(self, places: Mapping[str, PlacedAgent]) -> None:
        """Raises ConfigError if a node has other software than this one, or if its Ray checks no token."""
        all_facts = await asyncio.gather(
            *(self._facts_of(*pair) for pair in zip(places.values(), self._actors, strict=True))
        )
        here = facts()
        for place, there in zip(places.values(), all_facts, strict=True):
            for fact, value in there.items():
                if value != here[fact]:
                    raise ConfigError(
                        f"node {place.node} has {fact} {value}, this one {here[fact]}; all nodes need the same",
                        param="topology",
                    )

    async def _facts_of(self, place: PlacedAgent, actor: Any) -> dict[str, str]:
        """Raises ConfigError if the agent does not start."""
        try:
            async with asyncio.timeout(START_S):
                found: dict[str, str] = await actor.facts.remote()
        except (TimeoutError, import_module("ray.exceptions").RayError) as error:
            reason = str(error).strip().splitlines()[-1][:200] if str(error) else f"no answer within {START_S:g} s"
            raise ConfigError(f"the agent on node {place.node} does not start: {reason}", param="topology") from error
        return found

    async def free(self) -> None:
        """Leaves the cluster, or gives up if that takes too long: without its head Ray waits for it here too."""
        if (ray := self._ray) is None:
            return
        self._ray = None
        leaving = threading.Thread(target=self._leave, args=(ray,), name="ray", daemon=True)
        has_head = await self._reaches_head()
        if has_head:
            leaving.start()
        give_up_s = self._clock.now() + LEAVE_S
        while leaving.is_alive() and self._clock.now() < give_up_s:  # noqa: ASYNC110 - a thread has no event of this loop
            await asyncio.sleep(REAPING_S)
        if leaving.is_alive() or not has_head:
            logger.warning("Ray does not answer: it ends its agents once it finds that this server is gone")
            _exit_without(ray)

    async def _reaches_head(self) -> bool:
        """True if Ray's head takes connections or was not joined. Without it, Ray aborts a process that leaves."""
        host, _, port = self._head.rpartition(":")
        if not port:
            return True
        try:
            async with asyncio.timeout(REACH_S):
                _, writer = await asyncio.open_connection(host.strip("[]"), int(port))
        except (OSError, TimeoutError):
            return False
        writer.close()
        return True

    def _leave(self, ray: Any) -> None:
        for actor in self._actors:
            ray.kill(actor)
        self._actors = []
        if self._group is not None:
            ray.util.remove_placement_group(self._group)
            self._group = None
        ray.shutdown()


class RayLauncher(NodeLauncher):
    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config, RayCluster())


def _exit_without(ray: Any) -> None:
    """Makes this process end without Ray, which would wait for its head again, and crash behind that: with the exit
    code that it is ended with, once Python has ended."""
    atexit.unregister(ray.shutdown)
    libc = ctypes.CDLL(None)
    libc.on_exit(libc._exit, None)  # ahead of what Ray has registered; it gets the exit code


def check_token() -> None:
    """Raises ConfigError unless Ray will check a token: without one, anybody who reaches its ports runs code here."""
    if os.environ.get("RAY_AUTH_MODE", "token") != "token" or find_token() is None:
        raise ConfigError(
            "Ray has no token, and without one anybody who reaches its ports can run code; make one with "
            "`ray get-auth-token --generate`, copy ~/.ray/auth_token to all nodes and start Ray everywhere with "
            "RAY_AUTH_MODE=token",
            param="launcher",
        )


def check_reachable(address: str) -> None:
    """Raises ConfigError if nothing listens at HOST:PORT, for which Ray would wait long. Other forms are Ray's."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or "/" in host:
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), REACH_S).close()
    except OSError as error:
        reason = error.strerror or f"no answer within {REACH_S:g} s"
        raise ConfigError(f"no Ray cluster is reached at {address} ({reason})", param="ray_address") from error


def _pause_listeners() -> None:
    """Makes Ray's threads that print logs and errors of nodes wait after an empty answer. Without a head each answer is
    empty and comes at once, and Ray 2.60 asks again at once: two busy threads, which hold Python's lock."""
    raylet = import_module("ray._raylet")
    for name in ("GcsErrorSubscriber", "GcsLogSubscriber"):
        subscriber = getattr(raylet, name, None)
        if subscriber is not None and not hasattr(subscriber, "pauses"):
            setattr(raylet, name, _with_pauses(subscriber))


def _with_pauses(subscriber: Any) -> type:
    def poll(self: Any, timeout: float | None = None) -> Any:
        answer = subscriber.poll(self, timeout)
        said = answer.get("lines") if isinstance(answer, dict) else answer and answer[1]
        if not said:
            time.sleep(EMPTY_S)
        return answer

    return type(subscriber.__name__, (subscriber,), {"poll": poll, "pauses": True})


def _print_to_stderr() -> None:
    """Makes Ray print what nodes log, and that one is lost, on standard error: on standard output are answers."""
    worker: Any = import_module("ray._private.worker")
    prints = getattr(worker, "print_worker_logs", None)
    if prints is not None and prints.__module__ != __name__:
        worker.print_worker_logs = lambda data, _, ignore_prefix=False: prints(data, sys.stderr, ignore_prefix)


def _take_back_signals() -> None:
    """Makes SIGTERM Python's again, for which Ray prints a stack before it passes it on."""
    handler = signal.getsignal(signal.SIGTERM)
    if threading.current_thread() is threading.main_thread() and handler is not None:
        signal.signal(signal.SIGTERM, handler)


def specs_by_name(config: EngineConfig) -> dict[str, InstanceSpec]:
    """Returns the instances by name. Raises ConfigError if one names no node."""
    topology = config.parsed_topology
    placed = topology.with_devices(topology.devices(config.device))
    for name, spec in zip(topology.names, placed.instances, strict=True):
        if not spec.node:
            raise ConfigError(
                f"topology {config.topology[:80]!r}: instance {name} has no node; write for example E@node1+PD@node2",
                param="topology",
            )
    return dict(zip(topology.names, placed.instances, strict=True))


def _alive_nodes(ray: Any) -> list[dict[str, Any]]:
    return [node for node in ray.nodes() if node["Alive"]]


def _names(node: Mapping[str, Any]) -> tuple[str, ...]:
    """Returns its label ("": it has none) and what Ray calls it."""
    named = (str(node.get(key)) for key in ("NodeName", "NodeManagerHostname", "NodeManagerAddress"))
    return node.get("Labels", {}).get(LABEL, ""), *named


def _name(node: Mapping[str, Any]) -> str:
    label, name, *_ = _names(node)
    return label or name


def find_node(nodes: list[dict[str, Any]], name: str) -> dict[str, Any]:
    """Returns the node of this name. Raises ResourceError if there is none, ConfigError if there are several."""
    for names in zip(*map(_names, nodes), strict=True):
        found = [node for node, other in zip(nodes, names, strict=True) if other == name]
        if len(found) == 1:
            return found[0]
        if found:
            raise ConfigError(
                f"{len(found)} nodes are called {name}; give them names with `ray start --node-name`", param="topology"
            )
    known = [_name(node) for node in nodes]
    listed = ", ".join(known[:_MAX_NAMED]) + (f" and {len(known) - _MAX_NAMED} others" * (len(known) > _MAX_NAMED))
    raise ResourceError(  # it may come
        f"the Ray cluster has no node {name}, only {listed}; names are given by `ray start --node-name`",
        param="topology",
    )


def _has_gpu(spec: InstanceSpec, node: Mapping[str, Any]) -> bool:
    """True if the instance gets a GPU: one that it names, or any where the node has some."""
    return spec.device.startswith("cuda") or (spec.device == "auto" and node["Resources"].get(GPU, 0) >= 1)


def bundles_by_device(
    specs: Mapping[str, InstanceSpec], nodes: Mapping[str, dict[str, Any]]
) -> dict[tuple[str, str], dict[str, float]]:
    """Returns the resources of each device of each node. Raises ResourceError if a node has not so many."""
    bundles: dict[tuple[str, str], dict[str, float]] = {}
    for spec in specs.values():
        label, *_, address = _names(nodes[spec.node])
        here = {} if spec.node == label else {f"node:{address}": 0.001}
        bundle = bundles.setdefault((spec.node, spec.device), {CPU: 0} | here)
        bundle[CPU] += 1
        if _has_gpu(spec, nodes[spec.node]):
            bundle[GPU] = 1
    for name, node in nodes.items():
        for kind in (CPU, GPU):
            wanted = sum(bundle.get(kind, 0) for (on, _), bundle in bundles.items() if on == name)
            if wanted > (has := node["Resources"].get(kind, 0)):
                raise ResourceError(
                    f"node {name} has {has:g} {kind} for Ray and the topology needs {wanted:g} there; start Ray with "
                    f"--num-{kind.lower()}s or put fewer instances on it",
                    param="topology",
                )
    return bundles
