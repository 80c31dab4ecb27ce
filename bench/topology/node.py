"""One simulated instance: the real loop, scheduler, migration and caches over a worker that only takes time.

The loop's thread is played: a turn comes whenever something wakes it, and when its own deadlines say so. Messages take
a moment between processes and come in order.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from bench.topology.agenda import Agenda
from bench.topology.costs import Costs
from bench.topology.machine import Machine
from bench.topology.worker import EXPORTS, NUM_WORDS, SimulatedWorker
from hydra_engine.cache.manager import CacheManager
from hydra_engine.config import EngineConfig
from hydra_engine.core.ids import FeatureKey, RequestId
from hydra_engine.core.messages import ToFront, ToInstance
from hydra_engine.core.pools import PoolKind
from hydra_engine.core.request import Request
from hydra_engine.core.roles import Role
from hydra_engine.instance.instance import Instance
from hydra_engine.instance.migration import Migration
from hydra_engine.instance.ports import FromPeer, PeerDown, PeerUp
from hydra_engine.models.specs.base import DTYPE_BYTES, ModelSpec
from hydra_engine.scheduler.handover.connector import PeerConnector
from hydra_engine.scheduler.latency.attribution import StepHistory
from hydra_engine.scheduler.latency.latency_budget import LatencyBudgets
from hydra_engine.scheduler.scheduler import StageScheduler
from hydra_engine.transfer.messages import TransferMessage

GIB = 1 << 30
# Pieces of the largest encode between which it can wait: 24 layers, as CLIP-L has; only budgets ask for it.
NUM_SLICES = 24
_MOST_PATCHES = 16384  # of a vision step, as in instance/compute_stack.py
_LEAST_PAUSE_S = 1e-6  # between two turns of one loop
_OVERDUE_PAUSE_S = 1e-3  # where a deadline has passed and the turn could do nothing about it
_INCARNATION = 1

FromNode = Callable[[str, Sequence[ToFront]], None]


@dataclass(frozen=True, slots=True)
class Site:
    """What all instances of a simulation have in common. `device_bytes`: memory of one device."""

    spec: ModelSpec
    config: EngineConfig
    costs: Costs
    device_bytes: int = 16 * GIB

    def resolved(self) -> EngineConfig:
        """Without "auto", as an instance resolves it."""
        scheduler, vision = self.config.scheduler, self.spec.vision
        if scheduler.image_budget <= 0 and vision is not None:
            most = min(2 * vision.max_patches_per_image, _MOST_PATCHES)
            scheduler = replace(scheduler, image_budget=most)
        return replace(self.config, scheduler=scheduler)


class _Inbox:
    def __init__(self) -> None:
        self.messages: list[ToInstance] = []

    def drain(self) -> list[ToInstance]:
        messages, self.messages = self.messages, []
        return messages


class _Peers:
    """`PeerPort` to nodes of this process."""

    def __init__(self, name: str, agenda: Agenda, delay_s: float) -> None:
        self.nodes: dict[str, Node] = {}
        self.items: list[PeerUp | PeerDown | FromPeer] = []
        self._name = name
        self._agenda = agenda
        self._delay_s = delay_s

    def drain(self) -> list[PeerUp | PeerDown | FromPeer]:
        items, self.items = self.items, []
        return items

    def send(self, name: str, messages: Sequence[TransferMessage]) -> None:
        target = self.nodes[name]

        def arrive() -> None:
            target.peers.items += [FromPeer(self._name, _INCARNATION, message) for message in messages]
            target.wake()

        self._agenda.after(self._delay_s, arrive)


class _Outbox:
    def __init__(self, name: str, agenda: Agenda, delay_s: float, deliver: FromNode) -> None:
        self._name = name
        self._agenda = agenda
        self._delay_s = delay_s
        self._deliver = deliver

    def send(self, messages: Sequence[ToFront]) -> None:
        self._agenda.after(self._delay_s, lambda: self._deliver(self._name, messages))


class Node:
    def __init__(self, name: str, role: Role, site: Site, agenda: Agenda, machine: Machine, deliver: FromNode) -> None:
        self.name, self.role = name, role
        self.inbox = _Inbox()
        self.peers = _Peers(name, agenda, site.costs.message_s)
        self.worker = SimulatedWorker(name, agenda, machine, site.costs, _block_bytes(site), self.wake)
        self._agenda = agenda
        self._delay_s = site.costs.message_s
        self._awake = False
        self._turns = 0
        config = site.resolved()
        connector = PeerConnector(config.scheduler)
        scheduler = _scheduler(name, role, site, config, connector)
        self.instance = Instance(
            scheduler=scheduler,
            worker=self.worker,
            inbox=self.inbox,
            outbox=_Outbox(name, agenda, site.costs.message_s, deliver),
            wake=threading.Event(),
            clock=agenda,
            look_ahead=config.scheduler.look_ahead,
            peers=Migration(
                incarnation=_INCARNATION,
                connector=connector,
                transfer=self.worker,
                peers=self.peers,
                num_slots=NUM_WORDS,
                config=config.cluster,
                hit=_no_fault,
            ),
        )

    def connect(self, other: Node) -> None:
        """Both know each other from here on."""
        for one, two in ((self, other), (other, self)):
            one.peers.nodes[two.name] = two
            one.worker.peers[two.name] = two.worker
            one.peers.items.append(PeerUp(two.name, _INCARNATION, EXPORTS, ()))
            one.wake()

    def send(self, messages: Sequence[ToInstance]) -> None:
        """From the front."""

        def arrive() -> None:
            self.inbox.messages += messages
            self.wake()

        self._agenda.after(self._delay_s, arrive)

    # ---- the loop

    def wake(self) -> None:
        if not self._awake:
            self._awake = True
            self._agenda.after(0.0, self._turn)

    def _turn(self) -> None:
        self._awake = False
        self._turns += 1
        self.instance.turn()
        turn, pause_s = self._turns, self.instance.wait_s()
        pause_s = max(pause_s, _LEAST_PAUSE_S) if pause_s else _OVERDUE_PAUSE_S
        self._agenda.after(pause_s, lambda: self._wake_unless(turn))

    def _wake_unless(self, turn: int) -> None:
        """A deadline is reckoned anew with every turn."""
        if turn == self._turns:
            self.wake()


def _no_fault(point: str, requests: Iterable[Request]) -> None: ...


def _block_bytes(site: Site) -> dict[str, int]:
    size, cache, spec = DTYPE_BYTES[site.costs.dtype], site.config.cache, site.spec
    found: dict[str, int] = {PoolKind.KV: cache.block_size * spec.language.kv_bytes_per_token(size)}
    if spec.vision is not None:
        found[PoolKind.FEATURES] = cache.image_block_size * spec.vision.num_planes * spec.vision.feature_size * size
    return found


def _scheduler(name: str, role: Role, site: Site, config: EngineConfig, connector: PeerConnector) -> StageScheduler:
    """As instance/build.py assembles it."""
    import torch

    from hydra_engine.worker.memory.plan import plan_memory

    dtype = getattr(torch, site.costs.dtype)
    plan = plan_memory(site.spec, role, config, dtype.itemsize, site.device_bytes)
    limited = config.scheduler.tpot_slo is not None or config.scheduler.ttft_slo is not None
    surface = site.costs.surface if limited and role.needs_language else None
    budgets = None
    if surface is not None:
        budgets = LatencyBudgets(surface, config.scheduler, num_slices=NUM_SLICES if role.needs_vision else 0)
    return StageScheduler(
        role,
        CacheManager[RequestId](plan.num_kv_blocks, config.cache.block_size),
        CacheManager[FeatureKey](plan.num_image_blocks, config.cache.image_block_size),
        config.scheduler,
        instance=name,
        reuse=config.cache.prefix_caching,
        has_states=plan.num_state_slots > 0,
        budgets=budgets,
        observer=StepHistory(surface),
        connector=connector,
    )
