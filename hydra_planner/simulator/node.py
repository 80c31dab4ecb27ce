"""A simulated instance: the real loop, scheduler, migration and caches over a worker that only takes time.

The loop's thread is played: a turn comes whenever something wakes it, and when its own deadlines say so. Messages take
a moment between processes and come in order.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from hydra_engine.cache.blocks import CacheManager
from hydra_engine.config import EngineConfig
from hydra_engine.core.ids import FeatureKey, RequestId
from hydra_engine.core.instances import Role, role_of
from hydra_engine.core.messages import ToFrontend, ToInstance
from hydra_engine.core.pools import PoolKind
from hydra_engine.instance.instance import Instance
from hydra_engine.instance.migration import Migration
from hydra_engine.instance.ports import FromPeer, PeerDown, PeerUp
from hydra_engine.models.specs.base import DTYPE_BYTES, ModelSpec
from hydra_engine.scheduler.handover.connector import PeerConnector
from hydra_engine.scheduler.latency.attribution import StepHistory
from hydra_engine.scheduler.latency.latency_budget import LatencyBudgets
from hydra_engine.scheduler.scheduler import StageScheduler
from hydra_engine.transfer.messages import TransferMessage
from hydra_planner.simulator.agenda import Agenda
from hydra_planner.simulator.costs import DeviceKind, Host
from hydra_planner.simulator.sizing import Sizes, sizes_of
from hydra_planner.simulator.worker import EXPORTS, NUM_WORDS, SimulatedWorker, Surroundings

# Pieces of the largest encode between which it can wait: 24 layers, as CLIP-L has; only budgets ask for it.
NUM_SLICES = 24
_MIN_PAUSE_S = 1e-6  # between two turns of one loop
_OVERDUE_PAUSE_S = 1e-3  # where a deadline has passed and the turn could do nothing about it

FromNode = Callable[["Node", Sequence[ToFrontend]], None]


@dataclass(frozen=True, slots=True)
class Site:
    """The node and the model. `devices`: what kind each one is, by name; an instance on "auto" has one of its own, in
    their order, or where there is one device shares that. `scheduler`: another one than the engine's is that of a
    baseline (`schedules.py`). `parallel_encodes` False: one encoder has all images of a request."""

    spec: ModelSpec
    config: EngineConfig
    devices: Mapping[str, DeviceKind]
    host: Host = field(default_factory=Host)
    scheduler: type[StageScheduler] = StageScheduler
    parallel_encodes: bool = True


class _Inbox:
    def __init__(self) -> None:
        self.messages: list[ToInstance] = []

    def drain(self) -> list[ToInstance]:
        messages, self.messages = self.messages, []
        return messages


class _Peers:
    """`PeerPort` to nodes of this process."""

    def __init__(self, name: str, incarnation: int, agenda: Agenda, delay_s: float) -> None:
        self.items: list[PeerUp | PeerDown | FromPeer] = []
        self._name = name
        self._incarnation = incarnation
        self._agenda = agenda
        self._delay_s = delay_s
        self._met: dict[tuple[str, int], Node] = {}
        self._nodes: dict[str, Node] = {}  # whose PeerUp has been drained, and no PeerDown

    def meet(self, other: Node) -> None:
        self._met[other.name, other.incarnation] = other
        self.items.append(PeerUp(other.name, other.incarnation, EXPORTS, ()))

    def drain(self) -> list[PeerUp | PeerDown | FromPeer]:
        items, self.items = self.items, []
        for item in items:
            if isinstance(item, PeerUp):
                self._nodes[item.name] = self._met[item.name, item.incarnation]
            elif isinstance(item, PeerDown):
                self._nodes.pop(item.name, None)
        return items

    def send(self, name: str, messages: Sequence[TransferMessage]) -> None:
        """Sends to the present incarnation of a peer; later ones never get these messages."""
        target = self._nodes.get(name)
        if target is None:
            return

        def arrive() -> None:
            target.peers.items += [FromPeer(self._name, self._incarnation, message) for message in messages]
            target.wake()

        self._agenda.schedule_after(self._delay_s, arrive)


class _Outbox:
    def __init__(self, node: Node, agenda: Agenda, delay_s: float, deliver: FromNode) -> None:
        self._node = node
        self._agenda = agenda
        self._delay_s = delay_s
        self._deliver = deliver

    def send(self, messages: Sequence[ToFrontend]) -> None:
        self._agenda.schedule_after(self._delay_s, lambda: self._deliver(self._node, messages))


class Node:
    """An incarnation of an instance. `neighbours`: names of all instances on its device, its own among them."""

    def __init__(
        self,
        name: str,
        role: Role,
        incarnation: int,
        site: Site,
        agenda: Agenda,
        around: Surroundings,
        neighbours: Sequence[str],
        deliver: FromNode,
    ) -> None:
        self.name, self.role, self.incarnation = name, role, incarnation
        self.alive = True
        self.inbox = _Inbox()
        self.peers = _Peers(name, incarnation, agenda, around.host.message_s)
        kind = site.devices[around.device]
        self.worker = SimulatedWorker(name, agenda, around, _block_bytes(site, kind), self.wake)
        self._agenda = agenda
        self._delay_s = around.host.message_s
        self._awake = False
        self._turns = 0
        roles = [role_of(neighbour) for neighbour in neighbours]
        configs = [site.config.for_instance(*named) for named in zip(neighbours, roles, strict=True)]
        self.sizes = sizes_of(site.spec, site.config.for_instance(name, role), kind, role, roles, configs)
        config = self.sizes.config
        connector = PeerConnector(config.scheduler, config.cluster)
        scheduler = _scheduler(site.scheduler, name, role, kind, self.sizes, connector)
        self.instance = Instance(
            scheduler=scheduler,
            worker=self.worker,
            inbox=self.inbox,
            outbox=_Outbox(self, agenda, around.host.message_s, deliver),
            wake=threading.Event(),
            clock=agenda,
            look_ahead=bool(config.scheduler.look_ahead),
            migration=Migration(
                incarnation=incarnation,
                connector=connector,
                transfer=self.worker,
                peers=self.peers,
                num_slots=NUM_WORDS,
                config=config.cluster,
                cache=config.cache,
            ),
        )

    @property
    def device(self) -> str:
        return self.worker.device

    def connect(self, other: Node) -> None:
        """Makes this node and `other` peers of each other."""
        for one, two in ((self, other), (other, self)):
            one.worker.peers[two.name] = two.worker
            one.peers.meet(two)
            one.wake()

    def die(self) -> None:
        """Stops the instance. What it has sent still arrives."""
        self.alive = self.worker.alive = False

    def lose(self, other: Node) -> None:
        """The connection to it ends."""

        def arrive() -> None:
            self.peers.items.append(PeerDown(other.name, other.incarnation, "the other side has closed the connection"))
            self.wake()

        self._agenda.schedule_after(self._delay_s, arrive)

    def send(self, messages: Sequence[ToInstance]) -> None:
        """Delivers messages of the frontend, after the delay of a message."""

        def arrive() -> None:
            self.inbox.messages += messages
            self.wake()

        self._agenda.schedule_after(self._delay_s, arrive)

    # ---- the loop

    def wake(self) -> None:
        if not self._awake and self.alive:
            self._awake = True
            self._agenda.schedule_after(0.0, self._turn)

    def _turn(self) -> None:
        if not self.alive:
            return
        self._awake = False
        self._turns += 1
        self.instance.turn()
        turn, pause_s = self._turns, self.instance.wait_s()
        pause_s = max(pause_s, _MIN_PAUSE_S) if pause_s else _OVERDUE_PAUSE_S
        self._agenda.schedule_after(pause_s, lambda: self._wake_unless(turn))

    def _wake_unless(self, turn: int) -> None:
        """A deadline is reckoned anew with every turn."""
        if turn == self._turns:
            self.wake()


def _block_bytes(site: Site, kind: DeviceKind) -> dict[str, int]:
    size, cache, spec = DTYPE_BYTES[kind.costs.dtype], site.config.cache, site.spec
    found: dict[str, int] = {PoolKind.KV: cache.block_size * spec.language.kv_bytes_per_token(size)}
    if spec.vision is not None:
        found[PoolKind.FEATURES] = cache.image_block_size * spec.vision.num_planes * spec.vision.feature_size * size
    return found


def _scheduler(
    made: type[StageScheduler], name: str, role: Role, kind: DeviceKind, sizes: Sizes, connector: PeerConnector
) -> StageScheduler:
    """Builds the scheduler as instance/build.py does."""
    config, plan = sizes.config, sizes.plan
    limited = config.scheduler.tpot_slo is not None or config.scheduler.ttft_slo is not None
    surface = kind.costs.surface if limited and role.needs_language else None
    budgets = None
    if surface is not None:
        budgets = LatencyBudgets(surface, config.scheduler, num_slices=NUM_SLICES if role.needs_vision else 0)
    return made(
        role,
        CacheManager[RequestId](plan.num_kv_blocks, config.cache.block_size),
        CacheManager[FeatureKey](plan.num_image_blocks, config.cache.image_block_size),
        config.scheduler,
        instance=name,
        reuse=config.cache.prefix_caching,
        num_snapshots=plan.num_snapshots if plan.num_state_slots else None,
        num_state_blocks=plan.num_state_blocks,
        budgets=budgets,
        observer=StepHistory(surface),
        connector=connector,
    )
