"""A whole deployment on virtual time: the real dispatcher, and instances of `node.py`, one device each or all on one
machine.

Everything that decides is the code that serves: routing, replays, scheduling, budgets, migration, leases. What is
played: bytes, steps, and the processes between them. One thread, no clock of the system, no randomness of its own.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, cast

from bench.serve.records import Record
from bench.topology.agenda import Agenda
from bench.topology.asks import Ask, request_of
from bench.topology.machine import Machine
from bench.topology.node import Node, Site
from hydra_engine.core.ids import RequestId
from hydra_engine.core.messages import (
    LedgerReport,
    PeerState,
    QueryLedger,
    Status,
    ToFront,
    ToInstance,
)
from hydra_engine.core.outputs import Piece, Result
from hydra_engine.core.roles import Topology
from hydra_engine.frontend.active import ActiveRequest
from hydra_engine.frontend.dispatch import Dispatcher
from hydra_engine.frontend.frontend import TICK_S
from hydra_engine.frontend.handle import Handle
from hydra_engine.frontend.incoming import Incoming
from hydra_engine.frontend.routing.decode_stealing import DecodeStealing

_FIRST_ATTEMPT = 1 << 32  # ids behind those of the requests
_REST_S = 1.0  # after the last request: what is on its way arrives
_LONGEST_S = 36_000.0  # of virtual time: what has not ended by then never does


class SimulationError(RuntimeError):
    """The deployment has lost something, which is a bug of the engine or of the simulator."""


class _Stamped(Handle):
    """A handle without a reader, which records when tokens reach the frontend."""

    def __init__(self, name: str, now: Callable[[], float]) -> None:
        super().__init__(name, lambda: None)
        self.stamps: list[float] = []
        self.counts: list[int] = []
        self._now = now

    def feed(self, piece: Piece) -> None:
        if piece.token_ids:
            self.stamps.append(self._now())
            self.counts.append(len(piece.token_ids))
        if piece.result is not None:
            super().feed(piece)


class _NoText:
    """A detokenizer of tokens without meaning."""

    stop_string: str | None = None

    def feed(self, token_ids: Sequence[int]) -> str:
        return ""

    def feed_one(self, token_id: int) -> str:
        return ""

    def flush(self) -> str:
        return ""


class Cluster:
    """`submit`, then `run` once. `one_machine`: all lanes of all instances share the cores of the profile."""

    def __init__(self, topology: str, site: Site, *, one_machine: bool = False) -> None:
        self.agenda = Agenda()
        self.results: dict[int, Result] = {}  # by the number of the request
        self.handles: dict[int, _Stamped] = {}
        self.statuses: dict[str, Status] = {}
        self._site = site
        self._ended_s: dict[int, float] = {}
        self._ledgers: dict[str, LedgerReport] = {}
        self._up_sides: set[frozenset[str]] = set()
        self._asks: list[Ask] = []
        self._planned_s: list[float] = []
        self._open_s = 0.0
        ids = itertools.count(_FIRST_ATTEMPT)
        parsed = Topology.parse(topology)
        roles = {name: one.role for name, one in zip(parsed.names, parsed.instances, strict=True)}
        self.dispatcher = Dispatcher(
            site.config,
            roles,
            send=self._send,
            next_id=lambda: RequestId(next(ids)),
            report=self._report,
        )
        self._stealing = DecodeStealing(site.config, self.dispatcher)
        self._incoming = Incoming(self.dispatcher, self._stealing)
        shared = Machine(self.agenda, site.costs.cores, site.costs.threads) if one_machine else None
        self.nodes = {
            name: Node(name, role, site, self.agenda, shared or Machine(self.agenda), self._on_messages)
            for name, role in roles.items()
        }
        for name in roles:
            self.dispatcher.on_up(name, 0.0)
        for one, other in itertools.combinations(self.nodes.values(), 2):
            one.connect(other)
        num_pairs = len(roles) * (len(roles) - 1) // 2
        self._until(lambda: len(self._up_sides) == num_pairs)
        self._open_s = self.agenda.now()

    # ---- requests

    def submit(self, ask: Ask, planned_s: float) -> None:
        """At so many seconds after the deployment is up."""
        number = len(self._asks) + 1
        self._asks.append(ask)
        self._planned_s.append(planned_s)
        self.agenda.at(self._open_s + planned_s, lambda: self._submit(number, ask))

    def _submit(self, number: int, ask: Ask) -> None:
        now = self.agenda.now()
        request, pixels = request_of(ask, self._site.spec, number, now)
        scheduler = self._site.config.scheduler
        request = replace(request, slo=request.slo.with_defaults(scheduler.ttft_slo, scheduler.tpot_slo))
        handle = self.handles[number] = _Stamped(f"r{number}", self.agenda.now)
        no_text: Any = _NoText()
        active = ActiveRequest(request, handle, cast(Any, None), no_text, ())
        self.dispatcher.submit(active, pixels, now)

    def run(self) -> list[Record]:
        """Until every request has ended. Raises SimulationError if one does not, or if something is held then."""
        self._tick()
        self._until(lambda: len(self.results) == len(self._asks))
        rest_s = self.agenda.now() + _REST_S
        self._until(lambda: self.agenda.now() >= rest_s)
        self._check_rest()
        return [self._record(index) for index in range(len(self._asks))]

    def _tick(self) -> None:
        self.dispatcher.tick(self.agenda.now())
        self._stealing.tick(self.agenda.now())
        self.agenda.after(TICK_S, self._tick)

    def _until(self, reached: Callable[[], bool]) -> None:
        while not reached():
            if not self.agenda.step() or self.agenda.now() > _LONGEST_S:
                lost = [number for number in range(1, len(self._asks) + 1) if number not in self.results]
                raise SimulationError(f"{len(lost)} requests have not ended, the first is {lost[:1]}")

    def _check_rest(self) -> None:
        for node in self.nodes.values():
            node.send([QueryLedger(0)])
        self._until(lambda: len(self._ledgers) == len(self.nodes))
        held = {name: ledger for name, ledger in self._ledgers.items() if not ledger.at_rest}
        if held or self.dispatcher.requests:
            raise SimulationError(f"held at rest: {held}, {list(self.dispatcher.requests)}")

    def _record(self, index: int) -> Record:
        number, ask = index + 1, self._asks[index]
        result, handle = self.results[number], self.handles[number]
        stamps = tuple(stamp - self._open_s for stamp in handle.stamps)
        return Record(
            index=index,
            kind=ask.kind,
            planned_s=self._planned_s[index],
            sent_s=self._planned_s[index],
            end_s=self._ended_s[number] - self._open_s,
            wanted_tokens=ask.max_tokens,
            stamps=stamps,
            counts=tuple(handle.counts),
            prompt_tokens=result.usage.prompt_tokens,
            cached_tokens=result.usage.cached_tokens,
            error=None if result.error is None else str(result.error),
        )

    # ---- messages

    def _send(self, name: str, messages: Sequence[ToInstance]) -> None:
        self.nodes[name].send(messages)

    def _report(self, active: ActiveRequest, result: Result) -> None:
        number = int(active.request.age)
        if number in self.results:
            raise SimulationError(f"request {number} has ended twice")
        self.results[number] = result
        self._ended_s[number] = self.agenda.now()

    def _on_messages(self, name: str, messages: Sequence[ToFront]) -> None:
        """As frontend/frontend.py takes them."""
        now = self.agenda.now()
        for message in messages:
            match message:
                case Status():
                    self.statuses[name] = message
                    self.dispatcher.instances[name].status = message
                case LedgerReport():
                    self._ledgers[name] = message
                case PeerState():
                    self._on_peer(name, message, now)
                case _:
                    self._incoming.take(name, message, now)

    def _on_peer(self, name: str, state: PeerState, now: float) -> None:
        """A pair is up once both sides have said so; here both do in the same moment."""
        pair = frozenset((name, state.name))
        if state.up and pair not in self._up_sides:
            self._up_sides.add(pair)
            self.dispatcher.on_pair(name, state.name, True, now)
