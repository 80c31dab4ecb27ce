"""An instance of some role, for tests that play its peers: the scheduler with its connector.

Tokens of whole clusters are in `test_cluster_machine.py`.
"""

from __future__ import annotations

from dataclasses import replace

from hydra_engine.cache.blocks import CacheManager
from hydra_engine.config import ClusterConfig
from hydra_engine.core.ids import RequestId
from hydra_engine.core.instances import Role
from hydra_engine.core.messages import Finished
from hydra_engine.core.request import Request
from hydra_engine.core.state import ImageProgress
from hydra_engine.scheduler.handover.connector import PeerConnector
from hydra_engine.scheduler.latency.attribution import StepHistory
from hydra_engine.scheduler.scheduler import StageScheduler
from hydra_engine.transfer.plans import KvEnd, PullPlan
from tests.scheduler.audit import check
from tests.scheduler.sim import Img, expected_tokens, feature, make_request
from tests.scheduler.stepper import Stepper

WAITING, ENCODING, ENCODED = ImageProgress.WAITING, ImageProgress.ENCODING, ImageProgress.ENCODED
CACHED, CONSUMED = ImageProgress.CACHED, ImageProgress.CONSUMED
E, P, D = Role.E, Role.P, Role.D
ALL_ON = ClusterConfig()
A, B = Img(4, name="a"), Img(8, name="b")


class NoOracle:
    """The one of `Stepper` knows only what is computed here."""

    def look(self) -> None: ...

    def language_ends(self, *args) -> None: ...


class Part(Stepper):
    """An instance of some role. A test plays the others: it sees events with `told` and does what they would do."""

    def __init__(
        self, role: Role, *, kv_blocks: int = 64, image_blocks: int = 64, cluster: ClusterConfig = ALL_ON, **changes
    ) -> None:
        super().__init__(kv_blocks=kv_blocks, image_blocks=image_blocks, **changes)
        kv, images = CacheManager(kv_blocks, 4), CacheManager(image_blocks, 4)
        self.connector = PeerConnector(self.config, cluster)
        self.scheduler = StageScheduler(
            role, kv, images, self.config, instance="test", observer=StepHistory(), connector=self.connector
        )
        self.oracle = NoOracle()

    def put(self, request: Request, *, arrival_index: int = 0, **kwargs) -> Request:
        request = replace(request, arrival_index=arrival_index)
        self.requests[request.id] = request
        self.scheduler.add(request, self.now, **kwargs)
        check(self.scheduler)
        return request

    def job(self, number: int, *images: Img, arrival_index: int = 0, at: int = 0) -> None:
        request = make_request(number, *([at] if at else []), *images)
        self.put(replace(request, prompt_token_ids=()), arrival_index=arrival_index, stages=E)

    def told(self) -> list:
        events = self.connector.take_events()
        self._collect([event for event in events if isinstance(event, Finished)])
        return events

    def pulls(self) -> list[PullPlan]:
        plans = self.connector.pulls.plan(self.now)
        check(self.scheduler)
        return plans

    def pull(self) -> PullPlan:
        (plan,) = self.pulls()
        return plan

    def pulled(self, plan: PullPlan, *, valid: bool = True, took_s: float = 0.0) -> list:
        """Writes here what the source holds, as a copy does."""
        request = self.requests[plan.request_id]
        if plan.image_index is not None:
            image = request.images[plan.image_index]
            rows = [feature(image.digest, row) for row in range(image.num_tokens)]
            memory, first = self.lanes._images, 0
        else:
            rows = context_of(request)
            memory, first = self.lanes._kv, plan.first_block
        for place, block in enumerate(plan.block_ids.tolist(), first):
            part = rows[place * 4 : place * 4 + 4]
            memory[block * 4 : block * 4 + len(part)] = part
        started_s, self.now = self.now, self.now + took_s
        times = {"started_s": started_s, "ended_s": self.now}
        return self._collect(self.connector.on_pull(plan.step_id, self.now, valid=valid, **times))

    def offer_kv(self, number: int, offer: int, num_blocks: int, end: KvEnd | None = None) -> None:
        self.connector.pulls.on_kv_offer(RequestId(number), offer, num_blocks, end)
        check(self.scheduler)

    def offer_image(self, number: int, index: int, offer: int) -> None:
        self.connector.pulls.images.on_offer(RequestId(number), index, offer)
        check(self.scheduler)


def context_of(request: Request) -> list[int]:
    """The tokens that the KV of prompt and answer was computed from."""
    context = list(request.prompt_token_ids)
    for image in request.images:
        context[image.start : image.end] = [feature(image.digest, row) for row in range(image.num_tokens)]
    return context + expected_tokens(request)


def end_of(request: Request, num_generated: int = 1, **kwargs) -> KvEnd:
    tokens = expected_tokens(request)
    return KvEnd(request.num_prompt + num_generated - 1, tokens[num_generated - 1], 0.0, 0.0, **kwargs)


def arrive(s: Part, number: int, offer: int) -> None:
    """Pulls everything at once."""
    request = s.requests[number]
    s.offer_kv(number, offer, -(-request.num_prompt // 4), end_of(request))
    s.pulled(s.pull())
    s.tokens[number] = expected_tokens(request)[:1]


def lend(s: Part, number: int) -> None:
    """A decode that ran elsewhere goes on here."""
    request = make_request(number, 9, max_new=200)
    tokens = expected_tokens(request)
    s.put(replace(request, generated_token_ids=tuple(tokens[:1])), stages=D, external_kv=True)
    s.offer_kv(number, number, 3, end_of(request, 2, earlier_token_ids=tuple(tokens[:1])))
    s.tokens[number] = tokens[:2]
    s.pulled(s.pull())
