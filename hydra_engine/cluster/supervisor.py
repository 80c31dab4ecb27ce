"""Starts the instances of a topology, connects them with each other, watches them and starts the dead ones again.

A launcher runs them: a single one on a thread of this process with an in-memory channel (the embedded default), or each
as a process of its own, here or on other machines. Either way the listener learns of progress, readiness, silence and
death in the same form. Does not know requests.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial, reduce
from operator import or_

from hydra_engine.clock import Clock, MonotonicClock
from hydra_engine.cluster.children import REAPING_S, Child, wait_for_end
from hydra_engine.cluster.launcher import Ahead, Launcher, LocalLauncher, load_launcher
from hydra_engine.cluster.member import PACE, Change, ClusterListener, Exiting, InstanceLink, Member, OwnPauses, Pace
from hydra_engine.cluster.pairs import Names, Pairs
from hydra_engine.cluster.spawn import COMMAND
from hydra_engine.config import EngineConfig
from hydra_engine.core.instances import Condition, InstanceState, Role
from hydra_engine.core.messages import (
    WIRE_VERSION,
    Failed,
    Loading,
    PeerState,
    Ready,
    SetRole,
    Shutdown,
    StartMessage,
    ToFrontend,
)
from hydra_engine.core.processes.preloaded import Preloaded
from hydra_engine.core.reports import BlockFormat, Status
from hydra_engine.errors import ConfigError, EngineClosed, HydraError, ResourceError, TransferError, from_info

logger = logging.getLogger(__name__)


class Supervisor:
    """The instances of a topology. Start it once, stop it once; everything runs on the loop that called `start`.

    A death shows by the end of the channel, the end of the process or silence; the timer task alone handles it.
    `ahead`: as of `LocalLauncher`. `pace` and `command` are for tests."""

    def __init__(
        self,
        config: EngineConfig,
        *,
        processes: bool,
        strict_channel: bool = False,
        clock: Clock | None = None,
        pace: Pace = PACE,
        command: Sequence[str] = COMMAND,
        ahead: Ahead | None = None,
    ) -> None:
        topology = config.parsed_topology
        placed = topology.with_devices(topology.devices(config.device))
        members = zip(topology.names, placed.instances, strict=True)
        self._members = {name: Member(name, spec, config, pace) for name, spec in members}
        self._has_peers = len(self._members) > 1
        elsewhere = config.cluster.launcher
        self.processes = processes or self._has_peers or elsewhere is not None
        self._launcher: Launcher
        if elsewhere is None:
            self._launcher = LocalLauncher(
                processes=self.processes, strict=strict_channel, command=command, ahead=ahead
            )
        else:
            self._launcher = load_launcher(elsewhere, config)
        self._clock = clock or MonotonicClock()
        self._pace = pace
        self.preloaded: Preloaded | None = None  # what instance processes are forks of
        self._longest_pause_s = config.cluster.suspect_s / 2
        # Unique over all starts of the engine on this machine, as nothing of an earlier one may be taken for ours.
        self._incarnations = itertools.count(time.time_ns())
        self._pairs = Pairs(topology.names, pace)
        self._timer: asyncio.Task[None] | None = None
        self._stopping = False

    # ---- what the frontend asks for

    async def start(self, listener: ClusterListener) -> None:
        """Starts all instances; returns when every one is ready, every pair connected, and the listener has the events.
        Otherwise stops all and raises the HydraError of the first one that cannot start."""
        self._listener = listener
        self._started: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._timer = asyncio.create_task(self._watch(), name="supervisor")
        self._timer.add_done_callback(self._timer_ended)
        try:
            await self._launcher.open()
            for member in self._members.values():
                try:
                    await self._launch(member)
                except OSError as error:
                    raise ResourceError(f"instance {member.label} cannot be started: {error.strerror}") from error
            await self._started
        except BaseException:
            self._started.cancel()
            await self.stop()
            raise

    async def stop(self) -> None:
        """Asks instances to end and waits; kills processes that do not. Idempotent."""
        if self._stopping:
            return
        self._stopping = True
        if self._timer is not None:
            self._timer.cancel()
            await asyncio.wait([self._timer])
        for member in self._members.values():
            if (child := member.child) is not None:
                if not child.killable or member.condition is Condition.READY:
                    child.end.send([Shutdown()])
                else:  # it has nothing to end in order, or cannot
                    child.kill()
        children = [c for m in self._members.values() for c in (m.child, m.killed_child) if c is not None]
        for child in await wait_for_end(children, self._clock, self._pace.exit_grace_s):
            logger.warning("instance %s did not end in %.0f s and is killed", child.name, self._pace.exit_grace_s)
            child.kill()
        for child in await wait_for_end(children, self._clock, self._pace.exit_grace_s):
            logger.error("instance %s is killed and does not end", child.name)
        for child in children:
            child.close()
        for member in self._members.values():
            member.child = member.killed_child = None
            member.condition = Condition.STOPPED
        await self._launcher.close()

    def states(self) -> tuple[InstanceState, ...]:
        return tuple(member.state() for member in self._members.values())

    def set_role(self, name: str, role: Role) -> None:
        """Changes the stages that the instance serves, after restarts too. Raises ConfigError if it was not loaded for
        them."""
        member = self._members[name]
        if not role or role not in member.loaded:
            raise ConfigError(
                f"instance {name} was loaded for {member.loaded.letters} and cannot serve {role.letters or 'nothing'}",
                param="role",
            )
        member.role = role
        if member.is_up and member.child is not None:
            member.child.end.send([SetRole(role.letters)])

    def kill(self, name: str) -> None:
        """Kills the process (SIGKILL); it is restarted as after any death. An instance on a thread cannot be killed."""
        child = self._members[name].child
        if child is not None:
            child.kill()

    # ---- life

    async def _launch(self, member: Member) -> None:
        """Starts the next incarnation. Raises OSError."""
        place = member.node, member.config.device
        neighbours = tuple(m.name for m in self._members.values() if (m.node, m.config.device) == place)
        start = member.begin(
            self._clock.now(), next(self._incarnations), neighbours=neighbours, has_peers=self._has_peers
        )
        member.child = child = await self._launcher.launch(start, member.node, self.preloaded)
        child.end.attach(partial(self._receive, member, child), partial(self._on_channel_end, member, child))

    def _on_channel_end(self, member: Member, child: Child) -> None:
        if member.child is child:
            member.exiting = member.exiting or Exiting(self._clock.now())
            member.exiting.channel_ended = True

    def _receive(self, member: Member, child: Child, messages: list[ToFrontend]) -> None:
        """Handles the supervisor's own messages and passes the others on in order."""
        if member.child is not child or self._stopping:
            return
        now = self._clock.now()
        member.start_progress.record_sign(now)
        if member.silence.heartbeat(now) and member.exiting is None:
            member.condition, member.reason = Condition.READY, ""
            self._listener.on_silent(member.name, None)
        rest: list[ToFrontend] = []
        for message in messages:
            if isinstance(message, StartMessage | PeerState):
                if rest:
                    self._listener.on_messages(member.name, rest)
                    rest = []
                self._handle(member, child, message, now)
                continue
            if isinstance(message, Status):
                member.status = message
            rest.append(message)
        if rest:
            self._listener.on_messages(member.name, rest)

    def _handle(self, member: Member, child: Child, message: StartMessage | PeerState, now: float) -> None:
        match message:
            case Loading():
                self._listener.on_progress(member.name, message)
            case Ready() if message.version != WIRE_VERSION:
                self._on_failed(
                    member,
                    ConfigError(f"the instance speaks wire version {message.version}, the frontend {WIRE_VERSION}"),
                )
                child.kill()
            case BlockFormat():
                if problem := self._find_difference(member, message):
                    self._on_failed(member, ConfigError(problem))
                    child.kill()
                else:
                    member.format = message
            case Ready():
                self._on_ready(member, child, message, now)
            case Failed():
                self._on_failed(member, from_info(message.error))
            case PeerState():
                self._on_peer_state(member, message, now)

    def _find_difference(self, member: Member, ours: BlockFormat) -> str:
        """Returns why an instance cannot exchange blocks with one on another node, "" if it can."""
        for other in self._members.values():
            if (theirs := other.format) is None or theirs == ours or other.node == member.node:
                continue
            fact = next(name for name in ours.__struct_fields__ if getattr(ours, name) != getattr(theirs, name))
            here, there = getattr(ours, fact), getattr(theirs, fact)
            advice = "; give a --dtype that each can compute, such as float32" if fact == "dtype" else ""
            return f"{fact} {here} differs from {there} of instance {other.label}{advice}"
        return ""

    def _on_ready(self, member: Member, child: Child, message: Ready, now: float) -> None:
        summary = member.become_ready(message.summary, now)
        if member.role != member.loaded:
            child.end.send([SetRole(member.role.letters)])
        device = member.config.device
        self._listener.on_up(
            InstanceLink(member.name, member.loaded, device, child.incarnation, child.end, summary, child.pid)
        )
        self._pairs.join(member.name, now)
        self._connect_due(now)
        self._check_start()

    def _on_failed(self, member: Member, error: HydraError) -> None:
        """Fails the start: the instance cannot start, and ends by itself after this message."""
        member.failure = error
        self._fail_start(self._naming(member, error))

    def _naming(self, member: Member, error: HydraError) -> HydraError:
        if len(self._members) == 1 and not member.node:
            return error
        return from_info(replace(error.info(), message=f"instance {member.label}: {error.message}"))

    def _check_start(self) -> None:
        if self._started.done():
            return
        if self._pairs.complete:
            self._started.set_result(None)
        elif (hopeless := self._pairs.find_hopeless()) is not None:
            (one, other), problem = hopeless
            self._fail_start(TransferError(f"instances {one} and {other} cannot exchange blocks: {problem}"))

    def _fail_start(self, error: BaseException) -> None:
        if not self._started.done():
            self._started.set_exception(error)

    # ---- the timer

    async def _watch(self) -> None:
        pauses = OwnPauses(self._clock.now(), self._longest_pause_s)
        while True:
            any_exiting = any(member.exiting is not None for member in self._members.values())
            await asyncio.sleep(REAPING_S if any_exiting else self._pace.tick_s)
            now = self._clock.now()
            if pauses.was_paused(now):
                for member in self._members.values():
                    member.silence.reset_timer(now)
                    member.start_progress.record_sign(now)
            for member in self._members.values():
                if member.child is None:
                    await self._restart(member, now)
                elif not self._finish_if_exited(member, member.child, now):
                    self._check_silence(member, member.child, now)
            self._connect_due(now)
            self._check_start()

    def _timer_ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.critical("instances are not watched any more", exc_info=error)
            self._fail_start(error)

    def _check_silence(self, member: Member, child: Child, now: float) -> None:
        if not member.is_up:
            self._check_start_progress(member, child, now)
            return
        match member.silence.change_due(now):
            case Change.SILENT:
                member.condition = Condition.SILENT
                member.reason = "has not been heard of for a while"
                logger.warning("instance %s is silent", member.label)
                self._listener.on_silent(member.name, member.silence.heard_s)
            case Change.FENCE if child.killable:
                child.kill()
                seconds = member.config.cluster.fence_s
                member.exiting = Exiting(now, f"was silent for {seconds:g} s and was killed")

    def _check_start_progress(self, member: Member, child: Child, now: float) -> None:
        if not child.killable or not member.start_progress.is_due(now):
            return
        if (problem := member.start_progress.problem(now, child.status())) is not None:
            child.kill()
            member.exiting = Exiting(now, problem)

    def _finish_if_exited(self, member: Member, child: Child, now: float) -> bool:
        """True once the instance exits. The exit is reported when its last messages have been read and its exit code is
        known, but not later than `last_words_s`, or `start_last_words_s` for one that has not been ready."""
        how = child.exit_description()
        if how is not None and member.exiting is None:
            member.exiting = Exiting(now)
        exiting = member.exiting
        if exiting is None:
            return False
        patience_s = self._pace.last_words_s if member.is_up else self._pace.start_last_words_s
        if (how is not None and exiting.channel_ended) or now - exiting.since_s >= patience_s:
            self._finish_exit(member, child, exiting, how, now)
        return True

    def _finish_exit(self, member: Member, child: Child, exiting: Exiting, how: str | None, now: float) -> None:
        report = member.failure.message if member.failure is not None else None
        reason = exiting.reason or report or how or "closed its channel"
        if how is None:
            child.kill()
            member.killed_child = child
        child.close()
        was_starting = not member.is_up
        member.child = member.exiting = None
        for one, other in self._pairs.remove(member.name):
            self._listener.on_pair(one, other, False)
        if not self._started.done():
            when = "while it started" if was_starting else "while the others started"
            self._fail_start(EngineClosed(f"instance {member.label} {reason} {when}; see its log above"))
            return
        self._schedule_restart(member, reason, now, exiting.since_s)

    def _schedule_restart(self, member: Member, reason: str, now: float, since_s: float) -> None:
        waits = member.restarts.record_death(member.served_s(now)) if self.processes else None
        if waits is not None:
            member.start_due_s, member.start_due_if_needed_s = now + waits.usual_s, now + waits.needed_s
            member.condition = Condition.STARTING
            wait_s = waits.needed_s if self._is_needed(member) else waits.usual_s
            logger.error("instance %s %s; it starts again in %g s", member.label, reason, wait_s)
        else:
            member.condition = Condition.FAILED
            if self.processes:
                reason += f"; {self._pace.max_failed_starts} starts in a row have failed"
            logger.error("instance %s %s; it is not started again", member.label, reason)
        member.reason = reason
        self._listener.on_down(member.name, reason, since_s, restarts=waits is not None)

    async def _restart(self, member: Member, now: float) -> None:
        """Starts the instance again once it is due and its last process has ended and freed its memory."""
        if member.killed_child is not None and member.killed_child.exit_description() is not None:
            member.killed_child = None
        if member.start_due_s is None or member.killed_child is not None:
            return
        if now < (member.start_due_if_needed_s if self._is_needed(member) else member.start_due_s):
            return
        try:
            await self._launch(member)
        except OSError as error:
            self._schedule_restart(member, f"cannot be started: {error.strerror}", now, now)

    def _is_needed(self, member: Member) -> bool:
        """True if no other ready instance serves one of its stages."""
        others = (other.role for other in self._members.values() if other.condition is Condition.READY)
        return bool(member.role & ~reduce(or_, others, Role(0)))

    # ---- pairs

    def _on_peer_state(self, member: Member, message: PeerState, now: float) -> None:
        peer = self._members.get(message.name)
        if peer is None or peer.incarnation != message.incarnation:
            return
        change = self._pairs.report(member.name, peer.name, message.up, message.problem, now)
        if change is not None:
            one, other = self._pairs.names_of(member.name, peer.name)
            self._listener.on_pair(one, other, change)
        self._check_start()

    def _connect_due(self, now: float) -> None:
        for names in self._pairs.pairs_due(now):
            try:
                self._connect(names)
            except OSError as error:
                self._pairs.record_failure(names, f"no connection can be made: {error.strerror}", now)
            else:
                self._pairs.connected(names, now)

    def _connect(self, names: Names) -> None:
        """Connects two instances. Raises OSError."""
        one, other = (self._members[name].child for name in names)
        assert one is not None and other is not None
        self._launcher.connect(one, other, partial(self._connection_failed, names, (one, other)))

    def _connection_failed(self, names: Names, children: tuple[Child, Child], problem: str) -> None:
        """Takes the problem of a connection that was under way, unless one of the two has ended since."""
        if all(self._members[name].child is child for name, child in zip(names, children, strict=True)):
            self._pairs.record_failure(names, problem, self._clock.now())
            self._check_start()
