"""Two sources and two targets that use the real protocol classes, with memory whose contents say what they are.

The network between them loses, doubles and reorders; instances die and come back; copies take their time, half a block
at a step; leases end. A row of memory holds (request, image, block, version), so a copy that mixes two computations, or
lands in somebody else's block, is seen. `World.check` holds after every step, `World.settle` stops all faults and
expects everything to come to rest.

Choices are small numbers that the caller gives: a property test draws them, a random walk throws dice. Memory is large
enough for all requests that may be open at once, so nothing here waits for room for ever.
"""

from __future__ import annotations

from collections import deque

import numpy as np

from hydra_engine.core.ids import RequestId, StepId
from hydra_engine.transfer.messages import Ack, More, Offer, Refuse, Renew, TransferMessage, Withdraw
from hydra_engine.transfer.offers import Owner, Source
from hydra_engine.transfer.plans import KvEnd, PullJob, PullPlan
from hydra_engine.transfer.pulls import Committed, Destination, Gone, Offered
from tests.transfer.audit import check_destination, check_source
from tests.transfer.nodes import (
    MAX_OPEN,
    NOBODY,
    NUM_BLOCKS,
    SOURCES,
    TARGETS,
    Item,
    Job,
    Open,
    Packet,
    Running,
    SourceNode,
    TargetNode,
)


def begin(target: Destination, handle: int, first_block: int, count: int) -> PullJob | None:
    """A copy of so many blocks of the offer."""
    blocks = np.arange(count, dtype=np.int32)
    return target.begin(PullPlan(StepId(1), handle, RequestId(1), None, first_block, blocks, last=False))


def waiting_for(node: TargetNode, handle: int) -> tuple[int, int | None, Item] | None:
    """The request that waits for this offer, and for which of its images or its KV."""
    for request_id, items in node.requests.items():
        for image, item in items.items():
            if item.handle == handle:
                return request_id, image, item
    return None


def copying(target: Destination, handle: int) -> bool:
    """A copy of the offer is in flight."""
    return handle in target._records.pulls and target._records.pulls[handle].copies > 0


class World:
    def __init__(
        self, source_type: type[Source] = Source, target_type: type[Destination] = Destination, *, tables: bool = True
    ) -> None:
        self.source_type, self.target_type = source_type, target_type
        self.tables = tables  # check those of the protocol classes too
        self.now = 0.0
        self.sources = {name: SourceNode(name, 1, source_type) for name in SOURCES}
        self.targets = {name: TargetNode(name, 1, target_type) for name in TARGETS}
        self.network: list[Packet] = []
        self.orders: dict[str, deque[tuple]] = {name: deque() for name in SOURCES + TARGETS}  # of the frontend
        self.requests: dict[int, Open] = {}
        self.next_id = 1
        self.next_version = 1
        self.committed = 0
        for target in self.targets.values():
            for source in self.sources.values():
                self._introduce(target, source)

    # ---- the frontend: orders arrive in order at each instance, news from instances at once

    def submit(self, n: int) -> None:
        if sum(request.status == "run" for request in self.requests.values()) >= MAX_OPEN:
            return
        target, source = TARGETS[n % 2], SOURCES[n // 2 % 2]
        request_id = self._new_id()
        if n // 4 % 3:
            shape: dict[int | None, int] = {None: 2 + n // 12 % 3}
            self.requests[request_id] = Open(target, shape, source)
            self.orders[source].append(("compute", request_id, None, request_id, target, shape[None]))
        else:
            shape = {0: 1 + n // 12 % 2, 1: 2}
            self.requests[request_id] = Open(target, shape, None)
            for image in shape:
                self._encode(request_id, image, SOURCES[(n // 24 + (image or 0)) % 2])
        self.orders[target].append(("expect", request_id))

    def _encode(self, request_id: int, image: int | None, source: str) -> None:
        request = self.requests[request_id]
        assert image is not None
        order = ("compute", self._new_id(), image, request_id, request.target, request.shape[image])
        self.orders[source].append(order)

    def _again(self, request_id: int, image: int | None, source: str) -> None:
        """An image is encoded again, elsewhere perhaps. A request whose KV is lost is over; a new attempt would have an
        id of its own."""
        if image is None:
            self._close(request_id, "failed")
        elif self.requests[request_id].status == "run":
            self._encode(request_id, image, source)

    def abort(self, n: int) -> None:
        running = [request_id for request_id, request in self.requests.items() if request.status == "run"]
        if running:
            self._close(running[n % len(running)], "aborted")

    def _close(self, request_id: int, status: str) -> None:
        """Ends it everywhere. Nobody asks for an id twice."""
        request = self.requests[request_id]
        if request.status != "run":
            return
        request.status = status
        for name in (*SOURCES, request.target):
            self.orders[name].append(("cancel", request_id))

    def obey(self, n: int) -> None:
        """Lets an instance take its next order."""
        waiting = [name for name, orders in self.orders.items() if orders]
        if not waiting:
            return
        name = waiting[n % len(waiting)]
        kind, *rest = self.orders[name].popleft()
        if kind == "compute":
            job_id, image, request_id, target, num_blocks = rest
            owner = (job_id, image)
            job = Job(owner, target, request_id, image, num_blocks, self._new_version())
            self.sources[name].jobs[owner] = job
        elif kind == "expect":
            self._expect(self.targets[name], rest[0])
        elif name in self.sources:
            for job in [job for job in self.sources[name].jobs.values() if job.request_id == rest[0]]:
                self._take_back(self.sources[name], job)
                del self.sources[name].jobs[job.owner]
        else:
            self._forget(self.targets[name], rest[0])

    # ---- sources

    def compute(self, n: int) -> None:
        """A job goes on: some more of its blocks."""
        node = self.sources[SOURCES[n % 2]]
        jobs = list(node.jobs.values())
        if not jobs:
            return
        job = jobs[n // 2 % len(jobs)]
        if not job.blocks:
            if len(node.memory.free) < job.num_blocks:
                return
            job.blocks = node.memory.allocate(job.num_blocks)
        count = job.num_blocks if job.image_index is not None else 1 + n // 8 % 2
        for i in range(job.computed, min(job.computed + count, job.num_blocks)):
            image = NOBODY if job.image_index is None else job.image_index
            node.memory.rows[job.blocks[i]] = (job.request_id, image, i, job.version)
            job.computed = i + 1

    def offer(self, n: int) -> None:
        """Offers what has been computed since, if a slot is free."""
        node = self.sources[SOURCES[n % 2]]
        jobs = [job for job in node.jobs.values() if job.sent < job.computed]
        if jobs:
            self._offer(node, jobs[n // 2 % len(jobs)])

    def _offer(self, node: SourceNode, job: Job) -> None:
        done = job.computed == job.num_blocks
        end = KvEnd(job.num_blocks, job.version, 0.0, 0.0) if done and job.image_index is None else None
        fresh = tuple(job.blocks[job.sent : job.computed])
        message: Offer | More | None
        if job.owner in node.source._sequence_of:
            message = node.source.extend(job.owner, fresh, end=end)
        else:
            message = node.source.offer(
                job.owner,
                job.target,
                job.request_id,
                job.image_index,
                fresh,
                now=self.now,
                end=end,
            )
        if message is not None:
            job.sent = job.computed
            self._send(node.name, node.life, job.target, message)

    def preempt(self, n: int) -> None:
        """Something older takes a job's blocks; it is computed again, and differently."""
        node = self.sources[SOURCES[n % 2]]
        jobs = [job for job in node.jobs.values() if job.blocks]
        if jobs:
            job = jobs[n // 2 % len(jobs)]
            self._take_back(node, job)
            job.blocks, job.computed, job.sent, job.version = [], 0, 0, self._new_version()

    def _take_back(self, node: SourceNode, job: Job) -> None:
        withdrawn = node.source.withdraw(job.owner)
        node.memory.release(job.blocks)
        if withdrawn is not None:
            self._send(node.name, node.life, *withdrawn)

    def _over(self, node: SourceNode, owner: Owner | None, *, delivered: bool) -> None:
        """An offer is not live any more: its blocks are free."""
        if owner is None:
            return
        job = node.jobs.pop(owner)
        node.memory.release(job.blocks)
        if not delivered:
            self._close(job.request_id, "failed")

    def expire(self, n: int) -> None:
        node = self.sources[SOURCES[n % 2]]
        for owner, peer, withdrawal in node.source.expire(self.now):
            self._send(node.name, node.life, peer, withdrawal)
            self._over(node, owner, delivered=False)

    # ---- targets

    def _introduce(self, target: TargetNode, source: SourceNode) -> None:
        target.mapped[source.name] = (source.life, source.memory)
        target.target.peer_up(source.name, source.life)

    def _expect(self, node: TargetNode, request_id: int) -> None:
        request = self.requests[request_id]
        node.requests[request_id] = {image: Item(count) for image, count in request.shape.items()}
        self._tell(node, node.target.expect(request_id, request.kv_source))

    def _tell(self, node: TargetNode, events: list) -> None:
        for event in events:
            if isinstance(event, Offered):
                item = node.requests[event.request_id][event.image_index]
                if item.handle == event.handle:  # there is more of it
                    item.known, item.end = event.num_blocks, event.end
                    continue
                if item.handle is not None:  # of another source, or its last copy is in flight: the later one is taken
                    self._refuse(node, item.handle)
                    if copying(node.target, item.handle):
                        node.leftover[item.handle] = item.blocks
                    else:
                        node.memory.release(item.blocks)
                if item.ready:  # a job that was sent twice
                    self._refuse(node, event.handle)
                    continue
                item.handle, item.known, item.end = event.handle, event.num_blocks, event.end
                item.blocks, item.begun = [], 0
            else:
                self._lose(node, event.handle)

    def _lose(self, node: TargetNode, handle: int, *, copied: bool = False) -> None:
        """The offer is over, `copied`: with a copy of it. Whatever was reserved for it is free, in this very moment."""
        blocks = node.leftover.pop(handle, None)
        found = waiting_for(node, handle)
        if found is not None:
            assert blocks is None
            request_id, image, item = found
            blocks, item.blocks, item.handle, item.known, item.begun = item.blocks, [], None, 0, 0
            if copied:
                self._again(request_id, image, SOURCES[handle % 2])
        node.memory.release(blocks or [])

    def _forget(self, node: TargetNode, request_id: int) -> None:
        items = node.requests.pop(request_id, {})
        handles = {item.handle: item for item in items.values() if item.handle is not None}
        for peer, refusal in node.target.end_request(request_id):
            self._send(node.name, node.life, peer, refusal)
        for item in items.values():
            if item.handle in handles and copying(node.target, item.handle):
                node.leftover[item.handle] = item.blocks
            else:
                node.memory.release(item.blocks)

    def _refuse(self, node: TargetNode, handle: int) -> None:
        refusal = node.target.refuse(handle)
        if refusal is not None:
            self._send(node.name, node.life, *refusal)

    def cached(self, n: int) -> None:
        """An item is found in a cache: what is offered is not needed any more."""
        node = self.targets[TARGETS[n % 2]]
        items = [i for items in node.requests.values() for i in items.values() if i.handle is not None and not i.ready]
        if items:
            item = items[n // 2 % len(items)]
            assert item.handle is not None
            self._refuse(node, item.handle)
            if copying(node.target, item.handle):
                node.leftover[item.handle] = item.blocks
            else:
                node.memory.release(item.blocks)
            item.handle, item.blocks, item.ready = None, [], True

    def pull(self, n: int) -> None:
        """Reserves room for an item, all at once, and begins a copy of some of what is known of it."""
        node = self.targets[TARGETS[n % 2]]
        items = [
            item
            for items in node.requests.values()
            for item in items.values()
            if item.handle is not None and not item.ready and item.begun < item.known
        ]
        if not items:
            return
        item = items[n // 2 % len(items)]
        assert item.handle is not None
        if not item.blocks:
            if len(node.memory.free) < item.num_blocks:
                return
            item.blocks = node.memory.allocate(item.num_blocks)
        count = 1 + n // 8 % (item.known - item.begun)
        blocks = item.blocks[item.begun : item.begun + count]
        copy = begin(node.target, item.handle, item.begun, count)
        if copy is None:
            return  # what is in flight ends first
        item.begun += count
        last = item.begun == item.known and (item.end is not None or item.known == item.num_blocks)
        memory = node.mapped[copy.peer][1]
        node.running.append(Running(item.handle, copy, memory, blocks, last, memory.words[copy.slot] == copy.word))

    def copy(self, n: int) -> None:
        """Half a block of a copy in flight; behind the last one the control word is read."""
        node = self.targets[TARGETS[n % 2]]
        if not node.running:
            return
        running = node.running[n // 2 % len(node.running)]
        if running.progress < 2 * len(running.blocks):
            i, half = divmod(running.progress, 2)
            node.memory.rows[running.blocks[i], half] = running.memory.rows[running.copy.source_blocks[i], half]
            running.progress += 1
            return
        node.running.remove(running)
        outcome = node.target.end(running.handle, valid=self.is_valid(running), last=running.last)
        if isinstance(outcome, Gone):
            assert outcome.handle == running.handle
            self._lose(node, outcome.handle, copied=True)
        elif isinstance(outcome, Committed):
            found = waiting_for(node, running.handle)
            assert found is not None, "GHOST: no request waits for the offer that is committed"
            request_id, image, item = found
            item.ready, item.handle = True, None
            self.committed += 1
            self._check_item(node, request_id, image, item)
            self._send(node.name, node.life, outcome.peer, outcome.ack)

    def is_valid(self, running: Running) -> bool:
        """True if the copy that has ended is valid."""
        return running.memory.words[running.copy.slot] == running.copy.word

    def finish(self, n: int) -> None:
        node = self.targets[TARGETS[n % 2]]
        ready = [id for id, items in node.requests.items() if all(item.ready for item in items.values())]
        if ready:
            request_id = ready[n // 2 % len(ready)]
            self._forget(node, request_id)
            self._close(request_id, "done")

    def renew(self, n: int) -> None:
        node = self.targets[TARGETS[n % 2]]
        for peer, message in node.target.renewals(self.now):
            self._send(node.name, node.life, peer, message)

    # ---- time, network, death

    def wait(self, n: int) -> None:
        self.now += (0.5, 2.0, 5.0)[n % 3]

    def _send(self, sender: str, life: int, receiver: str, message: TransferMessage) -> None:
        self.network.append(Packet(sender, receiver, message, life))

    def deliver(self, n: int) -> None:
        """Delivers a message of the network, mostly the oldest one."""
        if self.network:
            self._receive(self.network.pop(0 if n % 4 else n // 4 % len(self.network)))

    def lose(self, n: int) -> None:
        packets = [packet for packet in self.network if packet.message is not None]
        if packets:
            self.network.remove(packets[n % len(packets)])

    def double(self, n: int) -> None:
        packets = [packet for packet in self.network if packet.message is not None]
        if packets:
            self.network.insert(n // 8 % (len(self.network) + 1), packets[n % len(packets)])

    def _receive(self, packet: Packet) -> None:
        message = packet.message
        if packet.receiver in self.targets:
            target = self.targets[packet.receiver]
            known = target.mapped[packet.sender][0]
            if message is None:
                if known == packet.life:
                    self._tell(target, [*target.target.peer_lost(packet.sender)])
                    self._introduce(target, self.sources[packet.sender])
            elif packet.life > known:
                self.network.append(packet)  # a peer introduces itself first
            elif isinstance(message, Offer):
                self._tell(target, target.target.on_offer(packet.sender, message, self.now))
            elif isinstance(message, More):
                self._tell(target, target.target.on_more(packet.sender, message))
            elif isinstance(message, Withdraw):
                self._tell(target, target.target.on_withdraw(packet.sender, message))
            return
        node = self.sources[packet.receiver]
        if message is None:
            for owner in node.source.peer_lost(packet.sender):
                self._over(node, owner, delivered=False)
        elif isinstance(message, Renew):
            node.source.on_renew(packet.sender, message, self.now)
        elif isinstance(message, Ack):
            owner = node.source.on_ack(packet.sender, message.incarnation, message.sequence)
            self._over(node, owner, delivered=True)
        elif isinstance(message, Refuse):
            owner = node.source.on_refuse(packet.sender, message.incarnation, message.sequence)
            self._over(node, owner, delivered=not message.failed)

    def kill(self, n: int) -> None:
        """An instance dies and starts again with nothing. Whatever was on its way to it is lost; the others hear of it
        some time."""
        name = (*SOURCES, *TARGETS)[n % 4]
        self.network = [packet for packet in self.network if packet.receiver != name]
        if name in self.sources:
            node = self.sources[name]
            jobs = [(job.request_id, job.image_index) for job in node.jobs.values()]
            jobs += [(order[3], order[2]) for order in self.orders[name] if order[0] == "compute"]
            self.sources[name] = SourceNode(name, node.life + 1, self.source_type)
            self._report_death(name, node.life, TARGETS)
            for request_id, image in jobs:
                self._again(request_id, image, next(other for other in SOURCES if other != name))
        else:
            life = self.targets[name].life
            self.targets[name] = TargetNode(name, life + 1, self.target_type)
            for source in self.sources.values():
                self._introduce(self.targets[name], source)
            self._report_death(name, life, SOURCES)
            for request_id, request in self.requests.items():
                if request.target == name:
                    self._close(request_id, "failed")

    def _report_death(self, name: str, life: int, others: tuple[str, ...]) -> None:
        self.orders[name].clear()
        self.network += [Packet(name, other, None, life) for other in others]

    # ---- what holds

    def check(self) -> None:
        for node in self.sources.values():
            if self.tables:
                words = node.memory.words
                check_source(node.source, dict(enumerate(words)), len(words))
                num_valid = sum(word & 1 for word in words)
                assert num_valid == node.source.num_live, "OWNER: a control word outlives its offer"
            held = [block for job in node.jobs.values() for block in job.blocks]
            assert sorted(held + node.memory.free) == list(range(NUM_BLOCKS)), "OWNER: a source block"
            for owner in node.source._sequence_of:
                assert node.jobs[owner].sent, "OWNER: blocks are offered that nobody holds"
        for target in self.targets.values():
            if self.tables:
                check_destination(target.target)
            held = [b for items in target.requests.values() for item in items.values() for b in item.blocks]
            held += [block for blocks in target.leftover.values() for block in blocks]
            assert sorted(held + target.memory.free) == list(range(NUM_BLOCKS)), "OWNER: a target block"
            for request_id, items in target.requests.items():
                for image, item in items.items():
                    if item.ready and item.blocks:
                        self._check_item(target, request_id, image, item)

    def _check_item(self, node: TargetNode, request_id: int, image: int | None, item: Item) -> None:
        """Checks that every half of every block was written by one computation for this very item."""
        rows = node.memory.rows[item.blocks]
        version = item.end.token_id if item.end is not None else rows[0, 0, 3]
        for i in range(item.num_blocks):
            expected = (request_id, NOBODY if image is None else image, i, version)
            assert (rows[i] == expected).all(), f"TORN: {rows.tolist()} instead of {expected}"

    def settle(self) -> None:
        """Runs at most a minute without faults and new requests; requires that everything is at rest then."""
        deadline = self.now + 60.0
        while self.now < deadline and not self._at_rest:
            self._work_off()
            self.now += 1.0
        open_requests = [id for id, request in self.requests.items() if request.status == "run"]
        assert not open_requests, f"STUCK: {open_requests}"
        for node in self.sources.values():
            assert not node.jobs and not node.source.num_live, "LEAK: offers"
            assert sorted(node.memory.free) == list(range(NUM_BLOCKS)), "LEAK: source blocks"
        for target in self.targets.values():
            assert not target.requests and not target.leftover and not target.running, "LEAK: requests"
            assert not target.target.num_live, "LEAK: pulls"
            assert sorted(target.memory.free) == list(range(NUM_BLOCKS)), "LEAK: target blocks"

    @property
    def _at_rest(self) -> bool:
        sources, targets = self.sources.values(), self.targets.values()
        waiting = self.network or any(self.orders.values())
        return (
            not waiting
            and not any(s.jobs for s in sources)
            and not any(t.target.num_live or t.requests for t in targets)
        )

    def _work_off(self) -> None:
        """Does all that can be done without time passing."""
        busy = True
        while busy:
            before = self._progress()
            for n in range(8):
                self.obey(n)
                self.compute(n)
                self.offer(n)
                self.pull(n + 8)
                self.copy(n)
                self.finish(n)
            while self.network:
                self._receive(self.network.pop(0))
            self.check()
            busy = before != self._progress()
        for n in range(2):
            self.renew(n)
            self.expire(n)

    def _progress(self) -> list[int]:
        jobs = [job for node in self.sources.values() for job in node.jobs.values()]
        running = [running for target in self.targets.values() for running in target.running]
        return [
            *(len(orders) for orders in self.orders.values()),
            *(job.computed + job.sent for job in jobs),
            *(len(target.requests) for target in self.targets.values()),
            *(running.progress for running in running),
            sum(node.source.acknowledged for node in self.sources.values()),
            self.committed,
        ]

    def _new_id(self) -> int:
        self.next_id += 1
        return self.next_id

    def _new_version(self) -> int:
        self.next_version += 1
        return self.next_version


# The moves of a walk, with how often each one is taken.
WORK = {
    "submit": 12,
    "obey": 50,
    "compute": 50,
    "offer": 40,
    "pull": 40,
    "copy": 120,
    "deliver": 90,
    "finish": 20,
    "renew": 15,
    "expire": 15,
    "wait": 8,
}
FAULTS = {"abort": 1, "preempt": 10, "cached": 2, "lose": 8, "double": 8, "kill": 1}
