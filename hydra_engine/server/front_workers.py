"""The processes that serve HTTP for this one: starts them on the port that this one has bound, tells them what they
have to know, and starts them again when they die.

What dies with a worker are its connections and their requests; the others serve on. Does not know HTTP, or what a
worker asks (`relay.py` does).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import subprocess
import sys
from dataclasses import dataclass, field, replace

from hydra_engine.clock import Clock, MonotonicClock
from hydra_engine.cluster.children import describe_exit, spawn
from hydra_engine.cluster.watch import PACE, OwnPauses, Pace, Restarts
from hydra_engine.config import ServerConfig
from hydra_engine.errors import ResourceError
from hydra_engine.observe.metrics import FrontWorkersReport
from hydra_engine.server import relay_wire as wire
from hydra_engine.server.admin import TopologySwitch
from hydra_engine.server.app import House
from hydra_engine.server.auth import KeyRing
from hydra_engine.server.commons import OwnCommons
from hydra_engine.server.listening import CLOSE_S, Bound
from hydra_engine.server.loop_lag import LoopLag
from hydra_engine.server.port import EnginePort
from hydra_engine.server.relay import Relay
from hydra_engine.server.relay_link import Link

logger = logging.getLogger(__name__)

COMMAND = (sys.executable, "-m", "hydra_engine.server.front_worker")
TICK_S = 0.1  # between two looks at what workers have to be told
STATE_S = 1.0  # at most between two messages to a worker, see SILENT_S of the client
FENCE_S = 30.0  # a worker that has not been heard for this long is killed
_EXIT_S = CLOSE_S + 2.0  # from Shutdown to SIGKILL
_REAP_S = 5.0  # from SIGKILL, or the end of the channel, to the exit code
_SPARE_BYTES = 1 << 20  # that a worker may hold for bodies that come next, where there is plenty
_SPARE_SHARE = 64  # or that part of all, divided among the workers


@dataclass(slots=True)
class _Slot:
    """One of the workers, over all its lives."""

    name: str
    restarts: Restarts
    link: Link[wire.ToMain] | None = None  # of the live one
    process: subprocess.Popen[bytes] | None = None
    ready_s: float | None = None
    heard_s: float = 0.0
    told_s: float = 0.0
    state: bytes = b""  # as it was told last
    loaded: wire.Loaded | None = None  # the same
    cpu_s: float = 0.0
    ended_cpu_s: float = 0.0  # of earlier lives
    failed: bool = False


@dataclass(frozen=True, slots=True)
class Logging:
    level: str = "info"
    format: str = "text"


@dataclass
class FrontWorkers:
    """On the loop that `start` is called on. `bound` is closed at the end, too."""

    engine: EnginePort
    config: ServerConfig
    house: House
    commons: OwnCommons
    keys: KeyRing
    bound: Bound
    logging: Logging = Logging()
    pace: Pace = PACE
    clock: Clock = field(default_factory=MonotonicClock)

    def __post_init__(self) -> None:
        names = [f"front{number}" for number in range(1, self.config.front_workers + 1)]
        self._slots = [_Slot(name, Restarts(self.pace)) for name in names]
        self._switch = TopologySwitch(self.engine)
        self._changed = asyncio.Event()
        self._is_open = False  # until then workers are told that the model is loading
        self._lag = LoopLag(self.commons.lagged)  # of this process; workers report their own
        self._closing = False
        self._tasks: list[asyncio.Task[None]] = []
        self.commons.metrics.front_workers = self.report

    @property
    def url(self) -> str:
        return self.bound.url

    @property
    def addresses(self) -> list[str]:
        return self.bound.addresses

    @property
    def pids(self) -> list[int]:
        """Of those that take connections."""
        return [one.process.pid for one in self._slots if one.process is not None and one.ready_s is not None]

    def report(self) -> FrontWorkersReport:
        slots = self._slots
        cpu_s = sum(one.cpu_s + one.ended_cpu_s for one in slots)
        return FrontWorkersReport(len(self.pids), sum(one.restarts.total for one in slots), cpu_s)

    # ---- life

    def start(self) -> None:
        self._tasks = [asyncio.create_task(self._keep(slot)) for slot in self._slots]
        self._tasks.append(asyncio.create_task(self._tick()))
        self._lag.start()

    async def wait_open(self) -> None:
        """Until all that can live take connections; from then on they serve. Raises ResourceError when none can."""
        while not all(one.failed or one.ready_s is not None for one in self._slots):
            self._changed.clear()
            await self._changed.wait()
        if self.lost:
            raise ResourceError("no front worker stays alive; see the log, or leave out --front-workers")
        self._is_open = True
        self.push_state()
        for slot in self._slots:
            if slot.link is not None:
                slot.link.flush()

    @property
    def lost(self) -> bool:
        """None is alive, and none will be started again."""
        return all(one.failed for one in self._slots)

    async def close(self) -> None:
        """Lets the last answers leave and ends the workers."""
        self._closing = True
        self._lag.stop()
        for slot in self._slots:
            if slot.link is not None:
                slot.link.send(wire.Shutdown())
        living = [task for task, slot in zip(self._tasks, self._slots, strict=False) if slot.link is not None]
        if living:
            await asyncio.wait(living, timeout=_EXIT_S)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self.bound.close()

    async def _keep(self, slot: _Slot) -> None:
        """One worker, life after life."""
        while not self._closing:
            await self._live(slot)
            if self._closing:
                return
            now = self.clock.now()
            wait_s = slot.restarts.died(now, now - slot.ready_s if slot.ready_s is not None else 0.0)
            slot.ready_s = None
            if wait_s is None:
                logger.error("%s dies too often and is not started again", slot.name)
                slot.failed = True
            self._changed.set()
            if wait_s is None:
                return
            await asyncio.sleep(wait_s)

    async def _live(self, slot: _Slot) -> None:
        """From its start to its end, whatever that is. Nothing is left of it then."""
        closed = asyncio.Event()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        link = Link(wire.decode_to_main, wire.max_up_bytes(self.config))
        link.on_closed = closed.set
        relay = self._relay(slot, link)
        with theirs:
            await link.open(ours)
            descriptors = [theirs.fileno(), *(sock.fileno() for sock in self.bound.sockets)]
            listening = ",".join(map(str, descriptors[1:]))
            try:
                process = spawn([*COMMAND, "--fd", str(descriptors[0]), "--listen", listening], descriptors)
            except OSError as error:
                link.close()
                logger.error("%s cannot be started: %s", slot.name, error.strerror)
                return
        link.send(self._start_frame(slot))
        now = self.clock.now()
        slot.link, slot.process, slot.heard_s = link, process, now
        slot.state, slot.loaded, slot.cpu_s = b"", None, 0.0
        self.push_state()
        try:
            await self._until_end(slot, closed)
        finally:
            slot.link = slot.process = None
            relay.close()
            link.close()
            slot.ended_cpu_s += slot.cpu_s
            slot.cpu_s = 0.0
            ended = await _reap(process, self.pace.last_words_s)
            if not self._closing:
                logger.error("%s %s; its requests have ended, and it is started again", slot.name, ended)

    async def _until_end(self, slot: _Slot, closed: asyncio.Event) -> None:
        pauses = OwnPauses(self.clock.now(), FENCE_S / 4)
        while not closed.is_set():
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(closed.wait(), STATE_S)
            now = self.clock.now()
            if pauses.paused(now):
                slot.heard_s = now
            if now - slot.heard_s > FENCE_S:
                logger.error("%s has not been heard for %g s and is killed", slot.name, FENCE_S)
                return

    def _relay(self, slot: _Slot, link: Link[wire.ToMain]) -> Relay:
        def greeted() -> None:
            slot.ready_s = self.clock.now()
            self._changed.set()

        def beat(one: wire.Beat) -> None:
            slot.heard_s, slot.cpu_s = self.clock.now(), one.cpu_s

        return Relay(
            self.engine,
            self.commons,
            self._switch,
            link,
            push_state=self.push_state,
            on_hello=greeted,
            on_beat=beat,
        )

    # ---- what workers are told

    def _start_frame(self, slot: _Slot) -> wire.Start:
        plain = replace(self.config, api_key=(), api_key_file=None, admin_key=None, front_workers=0)
        most = self.config.max_inflight_body_bytes // (_SPARE_SHARE * len(self._slots))
        return wire.Start(
            name=slot.name,
            config=plain,
            model_name=self.house.model_name,
            created=self.engine.created,
            secret=self.house.secret,
            keys=self.keys.keys,
            admin=self.keys.admin,
            debug_endpoints=self.house.debug_endpoints,
            log_level=self.logging.level,
            log_format=self.logging.format,
            spare_bytes=min(_SPARE_BYTES, most),
        )

    def reload_keys(self) -> None:
        """Reads the file again, for all."""
        self.keys.reload()
        for slot in self._slots:
            if slot.link is not None:
                slot.link.send(wire.KeysHold(self.keys.keys))

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            self.push_state()

    def push_state(self) -> None:
        """To those that have not been told the same, or anything for a while."""
        draining = self.commons.lifecycle.draining
        loaded, state = facts_of(self.engine, draining=draining) if self._is_open else (None, _loading(draining))
        encoded, now = wire.encode(state), self.clock.now()
        for slot in self._slots:
            if slot.link is None:
                continue
            if loaded is not None and loaded != slot.loaded:
                slot.loaded = loaded
                slot.link.send(loaded)
            if encoded != slot.state or now - slot.told_s >= STATE_S:
                slot.state, slot.told_s = encoded, now
                slot.link.send_encoded(encoded)


def facts_of(engine: EnginePort, *, draining: bool) -> tuple[wire.Loaded | None, wire.State]:
    """What a worker has to know of an engine: what stays, once it is loaded, and what changes."""
    serving, reason = engine.health()
    instances = tuple(replace(one, summary=None) for one in engine.instances())
    if reason in ("loading", "closed"):
        return None, wire.State(serving, reason, draining, instances)
    loaded = wire.Loaded(engine.max_model_len, engine.chat_template, tuple(engine.summaries))
    return loaded, wire.State(serving, reason, draining, instances, dict(engine.statuses()), engine.stats())


def _loading(draining: bool) -> wire.State:
    return wire.State(False, "loading", draining)


async def _reap(process: subprocess.Popen[bytes], last_words_s: float) -> str:
    """How it ended, as what follows its name. Its channel has ended or been silent; what is still there is killed."""
    code = await _exit_code(process, last_words_s)
    if code is None:
        process.kill()
        code = await _exit_code(process, _REAP_S)
    return "does not end" if code is None else describe_exit(code)


async def _exit_code(process: subprocess.Popen[bytes], limit_s: float) -> int | None:
    """None: it has not ended in time."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(limit_s):
            while (code := process.poll()) is None:  # noqa: ASYNC110 - a process that ends wakes nobody here
                await asyncio.sleep(0.01)
            return code
    return None
