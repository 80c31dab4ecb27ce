"""The frontend over several instances: health, reports, faults, roles at run time. Instances and supervisor are played;
intake, messages and handles are real."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest
from PIL import Image

from hydra_engine.cluster.member import ClusterListener, InstanceLink
from hydra_engine.config import ClusterConfig, EngineConfig, SchedulerConfig
from hydra_engine.core.ids import RequestId
from hydra_engine.core.instances import Condition, InstanceState, Role, Topology
from hydra_engine.core.messages import Loading, QueryLedger, ToInstance
from hydra_engine.core.outputs import FinishReason, Result
from hydra_engine.core.reports import InstanceSummary, LedgerReport, StageReport, Status, TransferReport
from hydra_engine.core.sampling import SamplingParams
from hydra_engine.errors import ConfigError, EngineClosed, Unavailable
from hydra_engine.frontend.frontend import Frontend
from tests.calls import asked
from tests.faults import SetFault, set_fault
from tests.frontend.played import Played
from tests.frontend.rig import token
from tests.frontend.test_router import status
from tests.virtual_clock import VirtualClock

BEGAN_S = 50.0


class PlayedEnd:
    """The frontend's end of a channel to a played instance, which answers on the loop."""

    def __init__(self, supervisor: PlayedSupervisor, name: str) -> None:
        self.supervisor = supervisor
        self.name = name
        self.faults: list[SetFault] = []
        self.answers_queries = True

    def send(self, messages: Sequence[ToInstance]) -> None:
        one = self.supervisor.played.get(self.name)
        for message in messages:
            if isinstance(message, SetFault):
                self.faults.append(message)
            elif isinstance(message, QueryLedger):
                if self.answers_queries:
                    self.supervisor.tell(self.name, self.ledger(message.query_id))
            elif one is not None:
                one.inbox.append(message)
        self.supervisor.pump_soon()

    def ledger(self, query_id: int) -> LedgerReport:
        return LedgerReport(1, 2, 10, 3, 20, ("r1",), ("odd",), query_id=query_id, pixel_bytes=4, offers=5)


class PlayedSupervisor:
    """`works`: instances do all they can whenever the loop is idle."""

    def __init__(self, config: EngineConfig, lengths: dict[str, int]) -> None:
        topology = Topology.parse(config.topology)
        self.roles = {n: spec.role for n, spec in zip(topology.names, topology.instances, strict=True)}
        self.loaded = dict(self.roles)
        self.lengths = lengths
        self.played: dict[str, Played] = {}
        self.ends: dict[str, PlayedEnd] = {}
        self.works = True
        self.stopped = False
        self.incarnation = 0
        self.listener: ClusterListener | None = None

    async def start(self, listener: ClusterListener) -> None:
        self.listener = listener
        links = []
        for name in self.roles:
            listener.on_progress(name, Loading("weights", 1, 2))
            links.append(self.link(name))
        for link in links:
            listener.on_up(link)
        self.connect()

    def link(self, name: str) -> InstanceLink:
        self.incarnation += 1
        self.played[name] = Played(name)
        self.ends[name] = PlayedEnd(self, name)
        summary = InstanceSummary(
            *(name, self.roles[name].letters, "demo", "demo", "cpu", "float32", "native", True, 1),
            *(0, 0, 0, 10, 20, 16, 64, self.lengths.get(name, 256), 64, 64, 0.1),
        )
        role = self.loaded[name]
        return InstanceLink(name, role, "cpu", self.incarnation, self.ends[name], summary, 4000 + self.incarnation)

    def connect(self) -> None:
        assert self.listener is not None
        for one in self.played:
            for other in self.played:
                if one < other:
                    self.listener.on_pair(one, other, True)

    async def stop(self) -> None:
        self.stopped = True

    def states(self) -> tuple[InstanceState, ...]:
        return tuple(
            InstanceState(
                name,
                role.letters,
                self.loaded[name].letters,
                Condition.READY if name in self.played else Condition.STARTING,
                1,
            )
            for name, role in self.roles.items()
        )

    def set_role(self, name: str, role: Role) -> None:
        is_idle, grows = self.played[name].idle, self.roles[name] in role
        assert is_idle or grows, "a stage is given up only while nothing is held"
        self.roles[name] = role

    # ---- what happens

    def die(self, name: str, *, restarts: bool = True) -> None:
        assert self.listener is not None
        del self.played[name]
        for other in self.played:
            self.listener.on_pair(name, other, False)
        self.listener.on_down(name, "was killed", BEGAN_S, restarts=restarts)

    def back(self, name: str) -> None:
        assert self.listener is not None
        self.listener.on_up(self.link(name))
        self.connect()

    def tell(self, name: str, *messages: Any) -> None:
        assert self.listener is not None
        asyncio.get_running_loop().call_soon(self.listener.on_messages, name, list(messages))

    def pump_soon(self) -> None:
        asyncio.get_running_loop().call_soon(self.pump)

    def pump(self) -> None:
        """Everything that can be done now, one step for each instance in turn."""
        assert self.listener is not None
        progress = self.works
        while progress:
            progress = False
            for name, one in list(self.played.items()):
                before = len(one.inbox), len(one.outbox), len(one.parts), len(one.jobs)
                if one.inbox:
                    one.receive()
                for number in [*one.parts, *one.jobs]:
                    if number in one.parts or number in one.jobs:
                        one.work(number, self.played)
                messages = list(one.outbox)
                one.outbox.clear()
                if messages:
                    self.listener.on_messages(name, messages)
                progress |= bool(messages) or before != (len(one.inbox), 0, len(one.parts), len(one.jobs))


@asynccontextmanager
async def started(topology: str, lengths: dict[str, int] | None = None, **cluster: Any) -> AsyncIterator[Any]:
    config = EngineConfig(
        topology=topology, cluster=ClusterConfig(**cluster), scheduler=SchedulerConfig(max_queue=4, max_num_seqs=4)
    )
    supervisor = PlayedSupervisor(config, lengths or {})
    frontend = Frontend(config, processes=True, clock=VirtualClock(BEGAN_S), supervisor=supervisor)  # type: ignore[arg-type]
    await frontend.start(lambda loading: None)
    try:
        yield frontend, supervisor
    finally:
        await frontend.close()


async def ask(frontend: Frontend, *, images: Any = None, max_tokens: int = 5) -> tuple[int, Awaitable[Result]]:
    number, handle = frontend.open_handle()
    sampling = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    await frontend.submit(number, handle, asked("Hello", images=images, sampling=sampling))
    return number, handle


@pytest.mark.quick("[EP+D", "[2E+P+D")
@pytest.mark.parametrize("topology", ["EPD", "EP+D", "ED+P", "2E+P+D", "E+PD", "2EPD"])
async def test_answers_come_back_over_every_topology(topology: str) -> None:
    async with started(topology) as (frontend, _):
        for images in (None, Image.new("RGB", (32, 32), "red")):
            number, handle = await ask(frontend, images=images)
            result = await asyncio.wait_for(handle, 30)
            assert result.token_ids == tuple(token(number, i) for i in range(5))
            assert result.finish_reason is FinishReason.LENGTH
        assert frontend.num_active == 0
        assert frontend.health() == (True, "ok")


async def test_a_death_is_not_seen_in_the_answer() -> None:
    async with started("P+2D+E") as (frontend, supervisor):
        supervisor.works = False
        number, handle = await ask(frontend, max_tokens=20)
        source = supervisor.played["p0"]
        source.receive()
        source.work(RequestId(number), supervisor.played)  # asks where it goes on
        supervisor.tell("p0", source.outbox.popleft())
        await asyncio.sleep(0)
        supervisor.die(frontend._dispatcher.requests[number].attempt.decoder)
        supervisor.works = True
        supervisor.pump_soon()
        result = await asyncio.wait_for(handle, 30)
        assert result.token_ids == tuple(token(number, i) for i in range(20))


async def test_what_a_request_waits_for_is_told_from_its_intake_on() -> None:
    async with started("EPD") as (frontend, supervisor):
        supervisor.works = False
        number, handle = frontend.open_handle("mine")
        sampling = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
        call = asked("Hello", images=Image.new("RGB", (32, 32), "red"), sampling=sampling)
        submitting = asyncio.create_task(frontend.submit_detached(number, handle, call))
        await asyncio.sleep(0)
        (live,) = frontend.activity(0, 10, None).running
        assert (live.id, live.stage, live.instance) == ("mine", "preprocess", "")
        await submitting
        stages = (StageReport(number, "encode", 0, 1),)
        frontend.on_messages("epd0", [msgspec.structs.replace(status(), time_s=50.0, stages=stages)])
        (live,) = frontend.activity(0, 10, None).running
        assert (live.id, live.stage, live.instance, live.done, live.of) == ("mine", "encode", "epd0", 0, 1)
        supervisor.works = True
        supervisor.pump_soon()
        await asyncio.wait_for(handle, 30)
        assert frontend.activity(0, 10, None).running == []


async def test_health_says_which_words_when() -> None:
    async with started("2E+P+D") as (frontend, supervisor):
        supervisor.die("e0")
        assert frontend.health() == (True, "ok")
        frontend.on_silent("e1", BEGAN_S)
        assert frontend.health() == (False, "hung")
        frontend.on_silent("e1", None)
        supervisor.die("d0")
        assert frontend.health() == (False, "instance_lost") and not frontend.lost
        supervisor.back("d0")
        assert frontend.health() == (True, "ok")
        supervisor.die("d0", restarts=False)
        assert frontend.health() == (False, "instance_lost") and frontend.lost
        with pytest.raises(Unavailable, match="restarted"):
            await ask(frontend)
    assert frontend.health() == (False, "closed")


async def test_an_instance_without_progress_is_hung() -> None:
    async with started("2P+D+E") as (frontend, _):
        clock = frontend._clock
        for name in ("p0", "d0"):
            frontend.on_messages(name, [status(time_s=clock.now(), num_running=1, language_steps=3)])
        clock.advance(6.0)
        frontend.on_messages("d0", [status(time_s=clock.now(), num_running=1, language_steps=4)])
        assert frontend.health() == (True, "ok")  # p1 has not said anything wrong
        clock.advance(6.0)
        assert frontend.health() == (False, "hung")


async def test_requests_wait_for_an_instance_within_the_queue() -> None:
    async with started("P+D+E") as (frontend, supervisor):
        supervisor.die("d0")
        waiting = [await ask(frontend) for _ in range(4)]
        with pytest.raises(Unavailable) as caught:
            await ask(frontend)
        assert caught.value.code == "overloaded"
        supervisor.back("d0")
        supervisor.pump_soon()
        for number, handle in waiting:
            result = await asyncio.wait_for(handle, 30)
            assert result.token_ids == tuple(token(number, i) for i in range(5))


async def test_a_request_that_nobody_can_go_on_with_fails_in_time() -> None:
    async with started("P+D+E", recovery_s=5.0) as (frontend, supervisor):
        supervisor.die("p0")
        _, handle = await ask(frontend)
        frontend._clock.advance(4.9)
        with pytest.raises(Unavailable) as caught:
            await asyncio.wait_for(handle, 30)
        assert caught.value.code == "instance_lost"


async def test_ledgers_are_added_up() -> None:
    async with started("E+P+D") as (frontend, supervisor):
        report = await frontend.ledger()
        assert (report.num_requests, report.kv_blocks_held, report.kv_blocks_total) == (3, 6, 30)
        assert (report.pixel_bytes, report.offers) == (12, 15)
        assert report.problems == ("d0: odd", "e0: odd", "p0: odd")
        supervisor.ends["p0"].answers_queries = False
        asking = asyncio.ensure_future(frontend.ledger())
        await asyncio.sleep(0)
        supervisor.die("p0")
        assert (await asyncio.wait_for(asking, 30)).num_requests == 2


async def test_reports_are_added_up_and_counters_never_go_back() -> None:
    async with started("E+P+D") as (frontend, supervisor):
        assert frontend.statuses.total() is None
        moved = TransferReport(offers=1, pulled=7)
        frontend.on_messages("p0", [status(time_s=1, num_running=2, prompt_tokens=30, transfer=moved)])
        frontend.on_messages("d0", [status(time_s=2, num_running=3, generation_tokens=5, transfer=moved)])
        total = frontend.statuses.total()
        assert isinstance(total, Status)
        assert (total.num_running, total.prompt_tokens, total.generation_tokens) == (5, 30, 5)
        assert (total.kv_blocks_total, total.transfer.offers, total.transfer.pulled) == (200, 2, 14)
        assert set(frontend.statuses.latest) == {"p0", "d0"}
        supervisor.die("p0")
        left = frontend.statuses.total()
        assert (left.num_running, left.prompt_tokens, left.transfer.pulled, left.transfer.offers) == (3, 30, 14, 1)
        assert set(frontend.statuses.latest) == {"d0"}


async def test_a_fault_point_of_one_instance_or_all() -> None:
    async with started("E+P+D") as (frontend, supervisor):
        set_fault(frontend, "eng.before_step", "kill", "", "p0")
        set_fault(frontend, "eng.mid_step", "raise")
        counts = {name: len(end.faults) for name, end in supervisor.ends.items()}
        assert counts == {"e0": 1, "p0": 2, "d0": 1}


async def test_the_shortest_decoder_decides_how_long_a_request_may_be() -> None:
    async with started("E+P+D", {"e0": 16, "p0": 200, "d0": 100}) as (frontend, _):
        assert frontend.max_model_len == 100
        assert [summary.name for summary in frontend.summaries] == ["e0", "p0", "d0"]


async def test_closing_ends_what_runs() -> None:
    async with started("P+D+E") as (frontend, supervisor):
        supervisor.works = False
        _, handle = await ask(frontend)
        await frontend.close()
        with pytest.raises(EngineClosed):
            await handle
        assert supervisor.stopped


# ---- roles at run time


async def test_roles_are_switched_after_an_instance_has_finished() -> None:
    async with started("3EPD") as (frontend, supervisor):
        supervisor.works = False
        asked = [await ask(frontend) for _ in range(3)]
        switching = asyncio.ensure_future(frontend.set_topology("E+P+D"))
        await asyncio.sleep(0.05)
        conditions = {state.name: state.condition for state in frontend.instances()}
        assert conditions["epd0"] is Condition.DRAINING and supervisor.roles["epd0"].letters == "EPD"
        supervisor.works = True
        supervisor.pump_soon()
        await asyncio.wait_for(switching, 30)
        assert [state.role for state in frontend.instances()] == ["E", "P", "D"]
        assert [state.loaded for state in frontend.instances()] == ["EPD"] * 3
        for _, handle in asked:
            await asyncio.wait_for(handle, 30)
        number, handle = await ask(frontend, images=Image.new("RGB", (32, 32), "blue"))
        assert (await asyncio.wait_for(handle, 30)).token_ids == tuple(token(number, i) for i in range(5))
        supervisor.die("epd1")
        supervisor.back("epd1")
        assert [state.role for state in frontend.instances()] == ["E", "P", "D"]
        await frontend.set_topology("EPD+EPD+EPD")
        assert [state.role for state in frontend.instances()] == ["EPD"] * 3


@pytest.mark.quick("[PD+E-1-EPD")
@pytest.mark.parametrize(
    ("topology", "lost", "stands_in"), [("EP+D", 1, "EPD"), ("E+PD", 1, "EPD"), ("P+ED", 0, "EPD"), ("PD+E", 1, "EPD")]
)
async def test_who_has_the_weights_stands_in_for_the_only_one_of_a_stage(
    topology: str, lost: int, stands_in: str
) -> None:
    """Requests go on there with the same tokens; it gives the stage back when the other one is there again."""
    async with started("2EPD") as (frontend, supervisor):
        await frontend.set_topology(topology)
        before = [state.role for state in frontend.instances()]
        dead, survivor = f"epd{lost}", f"epd{1 - lost}"
        asked = [await ask(frontend, images=Image.new("RGB", (32, 32), "blue")) for _ in range(3)]
        supervisor.die(dead)
        assert frontend.instances()[1 - lost].role == supervisor.roles[survivor].letters == stands_in
        assert frontend.health() == (True, "ok")
        asked.append(await ask(frontend))
        for number, handle in asked:
            result = await asyncio.wait_for(handle, 30)
            assert result.token_ids == tuple(token(number, i) for i in range(5))
        supervisor.back(dead)
        assert [state.role for state in frontend.instances()] == before
        assert supervisor.roles[survivor].letters == before[1 - lost]
        number, handle = await ask(frontend, images=Image.new("RGB", (32, 32), "red"))
        assert (await asyncio.wait_for(handle, 30)).token_ids == tuple(token(number, i) for i in range(5))


async def test_a_switch_that_is_refused_ends_no_stand_in() -> None:
    async with started("2EPD") as (frontend, supervisor):
        await frontend.set_topology("EP+D")
        supervisor.die("epd1", restarts=False)
        with pytest.raises(ConfigError, match="cannot be added"):
            await frontend.set_topology("EP+D+D")
        assert frontend.instances()[0].role == supervisor.roles["epd0"].letters == "EPD"
        number, handle = await ask(frontend)
        assert (await asyncio.wait_for(handle, 30)).token_ids == tuple(token(number, i) for i in range(5))
        await asyncio.wait_for(frontend.set_topology("EPD+D"), 30)
        assert frontend.instances()[0].role == supervisor.roles["epd0"].letters == "EPD"


async def test_who_lacks_the_weights_stands_in_for_nobody() -> None:
    async with started("EP+D") as (frontend, supervisor):
        supervisor.die("d0")
        assert [state.role for state in frontend.instances()] == ["EP", "D"]
        assert frontend.health() == (False, "instance_lost")


async def test_two_that_swap_their_roles_do_it_at_once() -> None:
    async with started("3EPD") as (frontend, supervisor):
        await frontend.set_topology("E+P+D")
        seen: list[set[str]] = []
        supervisor.set_role = lambda name, role: (
            seen.append(set(supervisor.played)),
            supervisor.roles.update({name: role}),
        )
        asking = [await ask(frontend)]
        await asyncio.wait_for(frontend.set_topology("P+E+D"), 30)
        assert len(seen) == 2
        await asyncio.wait_for(asking[0][1], 30)
        assert frontend.health() == (True, "ok")


@pytest.mark.quick("E+P+D-P+E+D")
@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ("E+P+D", "P+E+D", "weights for E"),
        ("2EPD", "E+P+D", "cannot be added"),
        ("2EPD", "EP+EPD@cuda:1", "no cuda:1"),
        ("2EPD", "E+P", "no instance for stage D"),
    ],
)
async def test_what_cannot_be_switched_is_told(before: str, after: str, message: str) -> None:
    async with started(before) as (frontend, _):
        with pytest.raises(ConfigError, match=message):
            await frontend.set_topology(after)
        assert {state.condition for state in frontend.instances()} == {Condition.READY}
