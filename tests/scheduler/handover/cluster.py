"""Several real schedulers with the fake lanes of `sim.py`, a frontend that routes and replays, and a network that loses
nothing: what happens next is drawn by a seeded generator, and nothing in it depends on time.

Memory is real here too: a pull copies slots from lane to lane, and whether it was valid is decided after the copy by
whether the source has taken the offer back. Every call is followed by `check()`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from random import Random

from hydra_engine.cache.blocks import CacheManager
from hydra_engine.config import ClusterConfig, SchedulerConfig
from hydra_engine.core.ids import RequestId
from hydra_engine.core.instances import Role, Topology, lends_decodes
from hydra_engine.core.messages import Finished, NeedDecoder, NeedImages
from hydra_engine.core.outputs import Departure, FinishReason
from hydra_engine.core.plans import LanguagePlan, VisionPlan
from hydra_engine.core.request import Request
from hydra_engine.core.results import VisionResult
from hydra_engine.scheduler.handover.connector import PeerConnector
from hydra_engine.scheduler.handover.events import FeaturesEvent, FeaturesGoneEvent, KvEvent, KvGoneEvent, UnneededEvent
from hydra_engine.scheduler.latency.attribution import StepHistory
from hydra_engine.scheduler.scheduler import StageScheduler
from hydra_engine.transfer.plans import KvEnd, PullPlan
from tests.scheduler.audit import check
from tests.scheduler.sim import FakeLanes, expected_tokens, fake_states, tokens_of

ALL_ON = ClusterConfig()
SIZE = 4  # tokens of a block, in both caches


@dataclass(eq=False)
class Offer:
    """An offer of blocks of `source` to request `request_id` of `target`."""

    number: int
    source: Node
    owner: int
    image_index: int | None  # of the owner
    target: Node
    request_id: int
    target_index: int | None
    blocks: list[int] = field(default_factory=list)
    end: KvEnd | None = None
    valid: bool = True  # the source has not taken it back
    over: bool = False  # the target has done with it


class Node:
    def __init__(
        self,
        name: str,
        role: Role,
        config: SchedulerConfig,
        switches: ClusterConfig,
        kv_blocks: int,
        image_blocks: int,
        state_blocks: int,
    ) -> None:
        kv = CacheManager(kv_blocks if role.needs_language else 0, SIZE)
        images = CacheManager(image_blocks if Role.E in role or Role.P in role else 0, SIZE)
        self.name, self.role = name, role
        num_snapshots = 3 if state_blocks else None
        self.lanes = FakeLanes(kv, images, fake_states(config, num_snapshots, kv))
        self.connector = PeerConnector(config, switches)
        self.scheduler = StageScheduler(
            role,
            kv,
            images,
            config,
            instance=name,
            num_snapshots=num_snapshots,
            num_state_blocks=state_blocks,
            observer=StepHistory(),
            connector=self.connector,
        )
        self.look_ahead = config.look_ahead
        self.offers: dict[tuple[int, int | None], Offer] = {}  # that are live here, by owner and image
        self.known: dict[int, Offer] = {}  # that others have made to us
        self.language: list[LanguagePlan] = []
        self.vision: list[VisionPlan] = []
        self.pulls: list[PullPlan] = []
        self.held: list[RequestId] = []


@dataclass(eq=False)
class User:
    """A request of a user: one attempt after the other."""

    request: Request
    tokens: list[int] = field(default_factory=list)
    attempt: int = 0  # the id of the current one; 0: none yet
    parts: dict[int, list[Node]] = field(default_factory=dict)  # attempts that may still be somewhere
    ended: Finished | None = None
    num_attempts: int = 0


@dataclass(eq=False)
class Job:
    user: User
    node: Node
    target: Node
    request_id: int
    indices: list[int]


class Cluster:
    def __init__(
        self,
        topology: str,
        seed: int,
        *,
        kv_blocks: int,
        image_blocks: int,
        config: SchedulerConfig,
        state_blocks: int = 0,
        switches: ClusterConfig = ALL_ON,
        bad_copies: float = 0.0,
        withdrawals: float = 0.0,
        lends: float = 0.0,
    ) -> None:
        parsed = Topology.parse(topology)
        named = zip(parsed.names, parsed.instances, strict=True)
        self.nodes = [
            Node(name, spec.role, config, switches, kv_blocks + state_blocks, image_blocks, state_blocks)
            for name, spec in named
        ]
        self.random = Random(seed)
        self.bad_copies, self.withdrawals, self.lends = bad_copies, withdrawals, lends
        self.users: list[User] = []
        self.jobs: dict[int, Job] = {}
        self.owner: dict[int, User] = {}  # by attempt
        self.requests: dict[int, Request] = {}  # by attempt
        self.kv_target: dict[int, Node] = {}
        self._channels: dict[tuple[str, str], list[Callable[[], None]]] = defaultdict(list)  # in order
        self._speeds: dict[tuple[str, str], float] = {}
        self.now = 1.0
        self.counts: dict[str, int] = defaultdict(int)
        self._next_id = 0
        self._next_offer = 0

    # ---- the frontend

    def submit(self, request: Request) -> User:
        """`request.id` is not used: every attempt gets one."""
        user = User(request)
        self.users.append(user)
        self._attempt(user)
        return user

    def _attempt(self, user: User) -> None:
        user.num_attempts += 1
        user.attempt = self._id()
        again = user.num_attempts > 1
        request = replace(
            user.request, id=RequestId(user.attempt), generated_token_ids=tuple(user.tokens), preempted=again
        )
        self.owner[request.id] = user
        prefill = self.random.choice([node for node in self.nodes if Role.P in node.role])
        user.parts[request.id] = [prefill]
        self.requests[request.id] = request
        remote = frozenset(i for i in range(len(request.images)) if self.random.random() < 0.5)
        encoders = [node for node in self.nodes if Role.E in node.role and node is not prefill]
        self._add(prefill, request, stages=prefill.role, external_images=remote if encoders else frozenset())

    def _bind(self, request_id: int) -> None:
        """Chooses a decode node for a request whose prefill begins, and adds the request to it, if it has none."""
        if request_id not in self.kv_target:
            decode = self.random.choice([node for node in self.nodes if Role.D in node.role])
            self.kv_target[request_id] = decode
            self.owner[request_id].parts[request_id].append(decode)
            self._add(decode, self.requests[request_id], stages=Role.D, external_kv=True)

    def _add(self, node: Node, request: Request, **kwargs) -> None:
        held = bool(request.prompt_token_ids) and self.random.random() < 0.3
        node.scheduler.add(request, self.now, held_for="grammar" if held else "", **kwargs)
        if held:
            node.held.append(request.id)
        self._after(node)

    def _release(self, node: Node) -> None:
        """The first one that is held may have ended meanwhile."""
        self._on(node, node.scheduler.release_held(node.held.pop(0), self.now))

    def abort(self, user: User) -> None:
        if user.ended is None:
            user.ended = Finished(RequestId(user.attempt), FinishReason.ABORT, len(user.tokens))
            self._end_attempts(user)

    def _end_attempts(self, user: User) -> None:
        for attempt, nodes in list(user.parts.items()):
            for node in list(nodes):
                self._on(node, node.scheduler.abort(RequestId(attempt), self.now))
        for number, job in list(self.jobs.items()):
            if job.user is user:
                self._on(job.node, job.node.scheduler.abort(RequestId(number), self.now))

    def _encode(self, user: User, target: Node, request_id: int, indices: list[int]) -> None:
        """Asks one encoder or several."""
        encoders = [node for node in self.nodes if Role.E in node.role and node is not target]
        groups: dict[Node, list[int]] = defaultdict(list)
        for index in indices:
            groups[self.random.choice(encoders)].append(index)
        for node, part in groups.items():
            number = self._id()
            images = tuple(user.request.images[index] for index in part)
            request = replace(user.request, id=RequestId(number), prompt_token_ids=(), images=images)
            self.jobs[number] = Job(user, node, target, request_id, part)
            self._add(node, request, stages=Role.E)

    def lend(self, user: User) -> None:
        """A decode goes from an instance that keeps its requests to one that encodes and decodes."""
        nodes = user.parts.get(user.attempt, [])
        sources = [node for node in nodes if node.role & (Role.P | Role.D) == Role.P | Role.D]
        targets = [node for node in self.nodes if sources and lends_decodes(sources[0].role, node.role)]
        if user.ended is not None or not targets or len(nodes) > 1:
            return
        source, target = sources[0], self.random.choice(targets)
        known = user.tokens[: self.random.randint(0, len(user.tokens))]
        request = replace(user.request, id=RequestId(user.attempt), generated_token_ids=tuple(known))
        nodes.append(target)
        self.kv_target[request.id] = target
        self._add(target, request, stages=Role.D, external_kv=True)
        if source.connector.offers.hand_over(request.id, self.now):
            self.counts["lent"] += 1
            self._after(source)
        else:
            self._on(target, target.scheduler.abort(request.id, self.now))

    # ---- what happens next

    def run(self, arrivals: list[Request], *, aborts: float = 0.0, max_steps: int = 60_000) -> None:
        """Runs random events until every request has ended and nothing is held."""
        ages = self.random.sample(range(1, len(arrivals) + 1), len(arrivals))  # who is older may come later
        waiting = [
            replace(request, arrival_index=arrival_index)
            for request, arrival_index in zip(reversed(arrivals), ages, strict=True)
        ]
        pace = self.random.choice((0.02, 0.2, 1.0))
        for _ in range(max_steps):
            self.now += 0.001
            happened = self._random_event()
            if waiting and (not happened or self.random.random() < pace):
                self.submit(waiting.pop())
                happened = True
            if self.users and self.random.random() < aborts:
                self.abort(self.random.choice(self.users))
            if self.users and self.random.random() < self.lends:
                self.lend(self.random.choice(self.users))
            if not happened and not waiting and not any(list(map(self._turn, self.nodes))) and not self._pending():
                break
        else:
            raise AssertionError("the cluster works on and on and finishes nothing")
        held = {node.name: node.scheduler.ledger().holders for node in self.nodes if node.scheduler.has_work}
        assert not held and not self.jobs, f"stuck: {held}, {self.jobs}"
        self._check_rest()

    def _check_rest(self) -> None:
        for user in self.users:
            assert user.ended is not None and user.ended.error is None
            expected = expected_tokens(user.request)
            if user.ended.reason == FinishReason.ABORT:
                expected = expected[: len(user.tokens)]
            assert user.tokens == expected, f"request {user.request.arrival_index}: wrong tokens"
        for node in self.nodes:
            assert not node.offers and not node.known, "an offer is still there"
            ledger = node.scheduler.ledger()
            assert ledger.kv_blocks_held == ledger.image_blocks_held == 0 and not ledger.problems

    def _pending(self) -> list[tuple[float, Callable[[], None]]]:
        """Possible next events with their weights: some lanes are slow."""
        found: list[tuple[float, Callable[[], None]]] = []
        for (_, target), messages in self._channels.items():
            if messages:
                found.append((self._speed("messages", target), lambda messages=messages: messages.pop(0)()))
        for node in self.nodes:
            if node.language:
                found.append((self._speed("language", node.name), lambda node=node: self._end_language(node)))
            if node.vision:
                found.append((self._speed("vision", node.name), lambda node=node: self._end_vision(node)))
            if node.held:
                found.append((self._speed("held", node.name), lambda node=node: self._release(node)))
            for pull in node.pulls:
                found.append((self._speed("pulls", node.name), lambda n=node, p=pull: self._end_pull(n, p)))
        return found

    def _speed(self, lane: str, name: str) -> float:
        return self._speeds.setdefault((lane, name), self.random.choice((1.0, 1.0, 0.1, 0.01)))

    def _random_event(self) -> bool:
        pending = self._pending()
        if not pending or self.random.random() < 0.5:
            return self._turn(self.random.choice(self.nodes)) or bool(pending)
        weights, actions = zip(*pending, strict=True)
        self.random.choices(actions, weights)[0]()
        if self.random.random() < self.withdrawals:
            self._withdraw()
        return True

    def _turn(self, node: Node) -> bool:
        """Plans what idle lanes can do; whether there was anything, for them or for other instances."""
        scheduler, before = node.scheduler, len(node.language) + len(node.vision) + len(node.pulls)
        told = self.counts["told"]
        plans = [self._plan_vision, self._plan_pulls]  # behind the language step, which may start what needs them
        self.random.shuffle(plans)
        for plan in [*([self._plan_vision] if scheduler.vision_first else []), self._plan_language, *plans]:
            plan(node)
        self._after(node)
        return len(node.language) + len(node.vision) + len(node.pulls) > before or self.counts["told"] > told

    def _plan_language(self, node: Node) -> None:
        if len(node.language) < 1 + node.look_ahead:
            plan = node.scheduler.plan_language(self.now)
            node.language += [] if plan is None else [plan]

    def _plan_vision(self, node: Node) -> None:
        if not node.vision:
            plan = node.scheduler.plan_vision(self.now)
            node.vision += [] if plan is None else [plan]

    def _plan_pulls(self, node: Node) -> None:
        node.pulls += node.connector.pulls.plan(self.now)

    def _end_language(self, node: Node) -> None:
        plan = node.language.pop(0)
        result = node.lanes.compute(plan, self.now, self.now, lambda row: False)
        self._on(node, node.scheduler.on_language(result, self.now))

    def _end_vision(self, node: Node) -> None:
        plan = node.vision.pop()
        node.lanes.encode(plan)
        self._on(
            node,
            node.scheduler.on_vision(
                VisionResult(plan.step_id, self.now, self.now, (None,) * len(plan.items)), self.now
            ),
        )

    # ---- transfers

    def _end_pull(self, node: Node, pull: PullPlan) -> None:
        node.pulls.remove(pull)
        offer = node.known[pull.offer]
        name = "_kv" if pull.image_index is None else "_images"
        source, target = (getattr(n.lanes, name).reshape(-1, SIZE) for n in (offer.source, node))
        stop = pull.first_block + len(pull.block_ids)
        target[pull.block_ids] = source[offer.blocks[pull.first_block : stop]]
        bad = self.random.random() < self.bad_copies
        valid = offer.valid and not bad
        self.counts["copies"] += 1
        self.counts["invalid"] += not valid
        if not valid or pull.last:
            node.known.pop(pull.offer).over = True
        if valid and pull.last:
            self._send(node, offer.source, lambda: self._released(offer))
        elif offer.valid and bad:
            self._send(node, offer.source, lambda: self._offer_again(offer))
        events = node.connector.on_pull(pull.step_id, self.now, valid=valid, started_s=self.now, ended_s=self.now)
        self._on(node, events)

    def _offer_again(self, offer: Offer) -> None:
        """Offers the blocks again under another number."""
        if not offer.valid:
            return
        del offer.source.offers[offer.owner, offer.image_index]
        offer.valid = False
        self._offer(offer.source, offer.owner, offer.image_index, offer.blocks, offer.end)

    def _offer(self, node: Node, owner: int, index: int | None, blocks: list[int], end: KvEnd | None) -> None:
        offer = node.offers.get((owner, index))
        if offer is None:
            self._next_offer += 1
            if index is None:
                offer = Offer(self._next_offer, node, owner, None, self.kv_target[owner], owner, None)
            else:
                job = self.jobs[owner]
                offer = Offer(self._next_offer, node, owner, index, job.target, job.request_id, job.indices[index])
            node.offers[owner, index] = offer
        offer.blocks.extend(blocks)
        offer.end = end
        count = len(offer.blocks)
        self._send(node, offer.target, lambda: self._offered(offer, count, end))

    def _offered(self, offer: Offer, num_blocks: int, end: KvEnd | None) -> None:
        node, number = offer.target, offer.number
        if offer.over:
            return
        node.known[number] = offer
        if offer.target_index is None:
            node.connector.pulls.on_kv_offer(RequestId(offer.request_id), number, num_blocks, end)
        else:
            node.connector.pulls.images.on_offer(RequestId(offer.request_id), offer.target_index, number)
        self._after(node)

    def _gone(self, node: Node, owner: int, index: int | None) -> None:
        offer = node.offers.pop((owner, index), None)
        if offer is not None:
            offer.valid = False
            self._send(node, offer.target, lambda: self._offer_gone(offer))

    def _offer_gone(self, offer: Offer) -> None:
        node = offer.target
        if offer.number in node.known and not any(pull.offer == offer.number for pull in node.pulls):
            node.known.pop(offer.number).over = True
        if offer.target_index is None:
            node.connector.pulls.on_kv_offer_gone(offer.number)
        else:
            node.connector.pulls.images.on_offer_gone(offer.number)
        self._after(node)

    def _released(self, offer: Offer) -> None:
        """Acknowledged or refused. What the source has taken back meanwhile is none of its business any more."""
        node, key = offer.source, (offer.owner, offer.image_index)
        if node.offers.get(key) is not offer:
            return
        del node.offers[key]
        offer.valid = False
        if offer.image_index is None:
            self._on(node, node.connector.offers.release_kv(RequestId(offer.owner), self.now))
        else:
            self._on(node, node.connector.offers.release_features(RequestId(offer.owner), offer.image_index, self.now))

    def _withdraw(self) -> None:
        """A lease is over."""
        offers = [offer for node in self.nodes for offer in node.offers.values()]
        if offers:
            offer = self.random.choice(offers)
            self.counts["withdrawn"] += 1
            self._on(offer.source, offer.source.connector.offers.withdraw(RequestId(offer.owner), self.now, "lease"))

    def _send(self, source: Node, target: Node, message: Callable[[], None]) -> None:
        self._channels[source.name, target.name].append(message)

    # ---- what schedulers say

    def _on(self, node: Node, events) -> None:
        for event in events:
            if isinstance(event, Finished):
                self._finished(node, event)
                continue
            for request_id, position, token_id in tokens_of(event):
                user = self.owner[request_id]
                if user.attempt == request_id and user.ended is None:
                    assert position == len(user.tokens), "a token was repeated or skipped"
                    user.tokens.append(token_id)
        self._after(node)

    def _after(self, node: Node) -> None:
        for event in node.connector.take_events():
            self.counts["told"] += 1
            match event:
                case NeedImages(request_id, indices):
                    self._encode(self.owner[request_id], node, request_id, list(indices))
                case NeedDecoder(request_id):
                    self._bind(request_id)
                case FeaturesEvent(request_id, index, block_ids):
                    self._offer(node, request_id, index, list(block_ids), None)
                case FeaturesGoneEvent(request_id, index):
                    self._gone(node, request_id, index)
                case KvEvent(request_id, block_ids, end):
                    self._offer(node, request_id, None, list(block_ids), end)
                case KvGoneEvent(request_id):
                    self._gone(node, request_id, None)
                case UnneededEvent(number):
                    offer = node.known.pop(number)
                    offer.over = True
                    self._send(node, offer.source, lambda offer=offer: self._released(offer))
                case Finished():
                    self._finished(node, event)
        check(node.scheduler)

    def _finished(self, node: Node, event: Finished) -> None:
        number = int(event.request_id)
        if number in self.jobs:
            job = self.jobs.pop(number)
            self.counts[f"job {event.reason}"] += 1
            current = job.user.attempt == job.request_id and job.user.ended is None
            if event.reason == Departure.WITHDRAWN and current:
                self._encode(job.user, job.target, job.request_id, job.indices)
            return
        user = self.owner[number]
        user.parts[number].remove(node)
        self.counts[str(event.reason)] += 1
        if user.attempt != number or user.ended is not None:
            return
        if event.reason in (Departure.RETURNED, Departure.WITHDRAWN):
            self._end_attempts(user)
            if user.ended is None and user.attempt == number and not self._has_last_token(user):
                self._attempt(user)
        elif event.reason in (FinishReason.STOP, FinishReason.LENGTH, FinishReason.ERROR):
            assert event.num_generated == len(user.tokens)
            user.ended = event
            self._end_attempts(user)

    def _has_last_token(self, user: User) -> bool:
        """True if the last token of `user` ended the request; notes its result, which was on the way when the attempt
        ended."""
        reason = user.request.finish_reason(len(user.tokens), user.tokens[-1]) if user.tokens else None
        if reason is not None:
            user.ended = Finished(RequestId(user.attempt), reason, len(user.tokens))
        return reason is not None

    def _id(self) -> int:
        self._next_id += 1
        return self._next_id
