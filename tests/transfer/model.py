"""The migration protocol as a transition system, small enough to look at every state.

One source, one target, the front, and a network that delivers in any order (or by streams, `in_order`). A request has
`parts` blocks; the first one travels in an Offer, each further one in a More. Contents are (request, part), so whatever
ends up in the wrong place is seen. Moves are of three kinds: normal ones, leases that end although the target renews (a
stopped peer looks like that; always allowed, never needed), and faults, of which there is a budget: death with restart
of either side, messages lost or doubled, a client that aborts, a source that takes blocks back for something older, a
target that finds it cached.

A state without a normal move must be at rest: everything free, every request answered. Nothing has a deadline.
`mutants` switch single safeguards off. Messages between front and instances are neither lost nor doubled.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from tests.transfer.explore import Violation
from tests.transfer.states import (
    ABORTED,
    COPYING,
    DONE,
    FAILED,
    LANDED,
    RUN,
    VERIFIED,
    Entry,
    Job,
    Key,
    Message,
    State,
    assign,
    release,
    replace_at,
)

TO_SOURCE = ("ack", "refuse")
TO_TARGET = ("offer", "more", "withdraw")
CHANNELS = {
    **dict.fromkeys([*TO_TARGET, "target learns of source"], "source to target"),
    **dict.fromkeys([*TO_SOURCE, "source learns of target"], "target to source"),
    **dict.fromkeys(["withdrawn", "front learns of source"], "source to front"),
    **dict.fromkeys(["lost", "committed", "finish", "front learns of target"], "target to front"),
    **dict.fromkeys(["cancel at source"], "front to source"),
    **dict.fromkeys(["expect", "cancel at target"], "front to target"),
}


class Model:
    def __init__(
        self,
        *,
        requests: int = 1,
        parts: int = 1,
        blocks: int = 1,
        attempts: int = 2,
        faults: int = 1,
        leases: bool = True,
        in_order: bool = False,
        mutants: tuple[str, ...] = (),
    ) -> None:
        self.num_requests, self.parts, self.num_blocks = requests, parts, blocks
        self.attempts, self.faults, self.mutants = attempts, faults, frozenset(mutants)
        self.in_order = in_order  # each channel is a stream
        self.leases = leases and "no_lease" not in mutants

    def initial(self) -> State:
        empty = (None,) * self.num_blocks
        return State(
            life=1,
            next_sequence=1,
            memory=(empty,),
            owned=empty,
            jobs=frozenset(Job(r, 1) for r in range(self.num_requests)),
            words=frozenset(),
            unwritten=frozenset(),
            target_life=1,
            peer=(1, 0),
            expected=frozenset(),
            entries=frozenset(),
            held=frozenset(),
            target_owned=empty,
            target_memory=empty,
            requests=((1, RUN, False),) * self.num_requests,
            network=tuple(("expect", r, 1) for r in range(self.num_requests)),
            budget=self.faults,
        )

    # ---- moves: (label, state after), normal ones first

    def moves(self, x: State) -> tuple[list[tuple[str, State]], int]:
        """The moves, and how many of them are normal."""
        normal = [*self._source_moves(x), *self._target_moves(x), *self._deliveries(x)]
        other = [] if not self.leases else [("lease ends", s) for j, s in self._leases(x) if self._renewed(x, j)]
        if x.budget:
            other += [(label, s._replace(budget=x.budget - 1)) for label, s in self._faults(x)]
        return [(label, self._tidy(s)) for label, s in [*normal, *other]], len(normal)

    def _source_moves(self, x: State) -> Iterator[tuple[str, State]]:
        for job in x.jobs:
            if not job.blocks:
                free = [b for b, owner in enumerate(x.owned) if owner is None][: self.parts]
                if len(free) == self.parts:
                    started = job._replace(blocks=tuple(free))
                    owned = assign(x.owned, free, (job.request, job.attempt))
                    yield "source: start", x._replace(jobs=x.jobs - {job} | {started}, owned=owned)
            elif job.computed < self.parts:
                yield "source: compute", self._compute(x, job)
        for key in x.unwritten:
            yield "source: write the word late", x._replace(words=x.words - {key}, unwritten=x.unwritten - {key})
        if self.leases:
            for job, after in self._leases(x):
                if not self._renewed(x, job):
                    yield "lease ends", after

    def _compute(self, x: State, job: Job) -> State:
        """The next part; what is computed is offered at once."""
        block, number = job.blocks[job.computed], job.computed
        memory = list(x.memory)
        memory[x.life - 1] = assign(memory[x.life - 1], [block], (job.request, number))
        after = job._replace(computed=number + 1)
        ended = after.computed == self.parts
        words, next_sequence = x.words, x.next_sequence
        if number == 0:
            after = after._replace(sequence=next_sequence)
            message = ("offer", *self._key(x.life, next_sequence), job.request, job.attempt, block, ended)
            words |= {self._key(x.life, next_sequence)}
            next_sequence += "reuse_sequence" not in self.mutants
        else:
            message = ("more", *self._key(x.life, job.sequence), number, block, ended)
        jobs = x.jobs - {job} | {after}
        return x._replace(
            jobs=jobs, memory=tuple(memory), words=words, next_sequence=next_sequence, network=(*x.network, message)
        )

    def _leases(self, x: State) -> Iterator[tuple[Job, State]]:
        for job in x.jobs:
            if job.sequence:
                after = self._withdraw(x, job)
                yield job, after._replace(network=(*after.network, ("withdrawn", job.request, job.attempt)))

    def _renewed(self, x: State, job: Job) -> bool:
        """The target asks for it again and again, and has heard of all that was added to it."""
        for entry in x.entries:
            if entry.key == self._key(x.life, job.sequence) and not entry.cancelled:
                heard = len(entry.source_blocks) == job.computed or "renew_deaf" in self.mutants
                return heard and (entry.request, entry.attempt) in x.expected
        return False

    def _withdraw(self, x: State, job: Job, *, tell: bool = True) -> State:
        """The source takes its blocks back on its own, whatever the target does."""
        after = self._release(x, job)
        if not job.sequence or not tell:
            return after
        return after._replace(network=(*after.network, ("withdraw", *self._key(x.life, job.sequence))))

    def _release(self, x: State, job: Job) -> State:
        key = self._key(x.life, job.sequence)
        late = x.unwritten | ({key} & x.words) if "free_before_gone" in self.mutants else x.unwritten
        return x._replace(
            jobs=x.jobs - {job},
            owned=tuple(None if b in job.blocks else owner for b, owner in enumerate(x.owned)),
            words=x.words - ({key} - late),
            unwritten=late,
        )

    # ---- target

    def _target_moves(self, x: State) -> Iterator[tuple[str, State]]:
        for entry in x.entries:
            ours = (entry.request, entry.attempt) in x.expected
            if ours and not entry.target_blocks:
                free = [b for b, owner in enumerate(x.target_owned) if owner is None][: self.parts]
                if len(free) == self.parts:
                    yield "target: grant", self._grant(x, entry, free)
            for i, copy in enumerate(entry.copies):
                if copy == COPYING:
                    yield "target: copy", self._land(x, entry, i)
                elif copy == LANDED:
                    yield "target: end of copy", self._end_copy(x, entry, i)
            if not ours and not entry.cancelled and not self._arriving(x, entry) and "keep_records" not in self.mutants:
                yield "target: forget an unclaimed offer", x._replace(entries=x.entries - {entry})
        for entry in x.held:
            network = (*x.network, ("finish", entry.request, entry.attempt))
            yield "target: finish", self._forget(x._replace(network=network), entry.request, entry.attempt)

    def _grant(self, x: State, entry: Entry, free: list[int]) -> State:
        # Not every request gets its blocks in the same order: what a stray copy writes is not right by chance.
        granted = self._begin(entry._replace(target_blocks=tuple(free[:: 1 - 2 * (entry.request % 2)])), x)
        network = x.network
        if "ack_before_copy" in self.mutants:
            network = (*network, ("ack", *entry.key, entry.source_blocks))
        return x._replace(
            entries=x.entries - {entry} | {granted},
            target_owned=assign(x.target_owned, free, entry.key),
            network=network,
        )

    def _begin(self, entry: Entry, x: State) -> Entry:
        """Copies of all parts that are known. Reading the word now instead of afterwards is a mutant."""
        if not entry.target_blocks or entry.cancelled:
            return entry
        cancelled = "verify_first" in self.mutants and entry.key not in x.words
        return entry._replace(
            copies=entry.copies + (COPYING,) * (len(entry.source_blocks) - len(entry.copies)), cancelled=cancelled
        )

    def _land(self, x: State, entry: Entry, i: int) -> State:
        life = x.life if "no_incarnation" in self.mutants else entry.key[0]
        content = x.memory[life - 1][entry.source_blocks[i]]
        after = entry._replace(copies=replace_at(entry.copies, i, LANDED))
        memory = assign(x.target_memory, [entry.target_blocks[min(i, self.parts - 1)]], content)
        return x._replace(entries=x.entries - {entry} | {after}, target_memory=memory)

    def _end_copy(self, x: State, entry: Entry, i: int) -> State:
        valid = entry.key in x.words or not self.mutants.isdisjoint({"no_verify", "verify_first"})
        after = entry._replace(copies=replace_at(entry.copies, i, VERIFIED), cancelled=entry.cancelled or not valid)
        x = x._replace(entries=x.entries - {entry} | {after})
        if after.in_flight and not ("free_early" in self.mutants and after.cancelled):
            return x
        if after.cancelled and "commit_cancelled" not in self.mutants:
            network = (*x.network, ("lost", entry.request, entry.attempt))
            if after.in_flight:  # mutant: its copies go on without an owner of their target
                x = x._replace(target_owned=release(x.target_owned, entry.key))
                return x._replace(network=network)
            return self._drop(x, after)._replace(network=network)
        if len(after.copies) < len(after.source_blocks) or not (after.ended or "commit_early" in self.mutants):
            return x
        return self._commit(x, after)

    def _commit(self, x: State, entry: Entry) -> State:
        if (entry.request, entry.attempt) not in x.expected:
            raise Violation(f"GHOST: {entry} is committed though its request is over")
        found = [x.target_memory[b] for b in entry.target_blocks]
        if found != [(entry.request, part) for part in range(self.parts)]:
            raise Violation(f"TORN: {entry} is committed with {found}")
        message: Message = ("ack", *entry.key, entry.source_blocks)
        sent = () if "ack_before_copy" in self.mutants else (message,)
        return x._replace(
            entries=x.entries - {entry},
            held=x.held | {entry},
            network=(*x.network, *sent, ("committed", entry.request, entry.attempt)),
        )

    def _drop(self, x: State, entry: Entry) -> State:
        return x._replace(
            entries=x.entries - {entry}, held=x.held - {entry}, target_owned=release(x.target_owned, entry.key)
        )

    def _forget(self, x: State, request: int, attempt: int) -> State:
        """The request is over at the target. A running copy is never cut: it ends, then its blocks are free."""
        x = x._replace(expected=x.expected - {(request, attempt)})
        for entry in [e for e in x.held if (e.request, e.attempt) == (request, attempt)]:
            x = self._drop(x, entry)
        for entry in [e for e in x.entries if (e.request, e.attempt) == (request, attempt)]:
            if not entry.cancelled:
                x = self._give_up(x, entry)._replace(network=(*x.network, ("refuse", *entry.key)))
        return x

    def _give_up(self, x: State, entry: Entry) -> State:
        if not entry.in_flight:
            return self._drop(x, entry)
        if "cut_copy" in self.mutants:
            x = x._replace(target_owned=release(x.target_owned, entry.key))
        return x._replace(entries=x.entries - {entry} | {entry._replace(cancelled=True)})

    # ---- deliveries, in any order

    def _deliveries(self, x: State) -> Iterator[tuple[str, State]]:
        busy = set()
        for message in dict.fromkeys(x.network):
            if self.in_order and CHANNELS[message[0]] in busy:
                continue
            busy.add(CHANNELS[message[0]])
            i = x.network.index(message)
            after = self._deliver(x._replace(network=x.network[:i] + x.network[i + 1 :]), message)
            if after is not None:
                yield f"deliver {message[0]}", after

    def _deliver(self, x: State, message: Message) -> State | None:
        """None: not yet possible."""
        kind, *rest = message
        if kind in TO_SOURCE:
            return self._at_source(x, kind, (rest[0], rest[1]), rest[2:])
        if kind in TO_TARGET:
            key = (rest[0], rest[1])
            if "no_incarnation" not in self.mutants and key[0] > x.peer[0]:
                return None  # a peer introduces itself first
            return self._at_target(x, kind, key, rest[2:])
        if kind in ("withdrawn", "lost", "committed", "finish"):
            return self._at_front(x, kind, rest[0], rest[1])
        if kind == "expect":
            return x._replace(expected=x.expected | {(rest[0], rest[1])})
        if kind == "cancel at source":
            for job in [j for j in x.jobs if [j.request, j.attempt] == rest]:
                x = self._withdraw(x, job)
            return x
        if kind == "cancel at target":
            return None if ("expect", *rest) in x.network else self._forget(x, rest[0], rest[1])
        return self._after_death(x, kind, rest)

    def _at_source(self, x: State, kind: str, key: Key, rest: list[Any]) -> State:
        if kind == "ack" and "ack_lists_blocks" in self.mutants:
            owned = tuple(None if b in rest[0] else owner for b, owner in enumerate(x.owned))
            jobs = frozenset(j for j in x.jobs if not j.sequence or self._key(x.life, j.sequence) != key)
            return x._replace(owned=owned, jobs=jobs, words=x.words - {key})
        for job in x.jobs:
            if job.sequence and self._key(x.life, job.sequence) == key:
                return self._release(x, job)
        return x

    def _at_target(self, x: State, kind: str, key: Key, rest: list[Any]) -> State:
        entry = next((e for e in x.entries if e.key == key and not e.cancelled), None)
        if kind == "offer":
            request, attempt, block, ended = rest
            if key[1] <= x.peer[1] and "reuse_sequence" not in self.mutants:
                return x
            x = x._replace(peer=(x.peer[0], max(x.peer[1], key[1])))
            new = Entry(key, request, attempt, (block,), ended)
            same = [e for e in x.entries if (e.request, e.attempt) == (request, attempt) and not e.cancelled]
            if (request, attempt) in x.expected and "no_replace" not in self.mutants:
                for earlier in same:
                    x = self._give_up(x, earlier)._replace(network=(*x.network, ("refuse", *earlier.key)))
            return x._replace(entries=x.entries | {new})
        if entry is None:
            return x
        if kind == "withdraw":
            return self._give_up(x, entry)
        number, block, ended = rest
        follows = number == len(entry.source_blocks) or "unnumbered" in self.mutants
        if entry.ended or not follows:
            return x
        grown = self._begin(entry._replace(source_blocks=(*entry.source_blocks, block), ended=ended), x)
        return x._replace(entries=x.entries - {entry} | {grown})

    def _at_front(self, x: State, kind: str, request: int, attempt: int) -> State:
        current, status, committed = x.requests[request]
        if status != RUN or attempt != current:
            return x
        if kind == "committed":
            return self._set_request(x, request, (attempt, RUN, True))
        if kind == "finish":
            return self._set_request(x, request, (attempt, DONE, True))
        return x if committed else self._retry(x, request)

    def _set_request(self, x: State, request: int, value: tuple[int, str, bool]) -> State:
        return x._replace(requests=replace_at(x.requests, request, value))

    def _retry(self, x: State, request: int) -> State:
        """Only the front numbers attempts: the old one ends everywhere, a new one starts."""
        attempt = x.requests[request][0]
        if attempt == self.attempts:
            return self._cancel(x, request, FAILED)
        x = self._cancel(x, request, RUN)
        x = self._set_request(x, request, (attempt + 1, RUN, False))
        return x._replace(
            jobs=x.jobs | {Job(request, attempt + 1)}, network=(*x.network, ("expect", request, attempt + 1))
        )

    def _cancel(self, x: State, request: int, status: str) -> State:
        attempt, _, committed = x.requests[request]
        x = self._set_request(x, request, (attempt, status, committed))
        return x._replace(
            network=(*x.network, ("cancel at source", request, attempt), ("cancel at target", request, attempt))
        )

    def _after_death(self, x: State, kind: str, rest: list[Any]) -> State:
        if kind == "target learns of source":
            x = x._replace(peer=(rest[0] + 1, 0))
            if "no_incarnation" in self.mutants or "target_ignores_death" in self.mutants:
                return x
            for entry in [e for e in x.entries if e.key[0] <= rest[0] and not e.cancelled]:
                x = self._give_up(x, entry)
            return x
        if kind == "source learns of target":
            if "source_ignores_death" in self.mutants:
                return x
            for job in [j for j in x.jobs if j.sequence]:
                x = self._withdraw(x, job, tell=False)
                x = x._replace(network=(*x.network, ("withdrawn", job.request, job.attempt)))
            return x
        for request, (_, status, committed) in enumerate(x.requests):
            if status == RUN and (kind == "front learns of target" or not committed):
                x = self._retry(x, request)
        return x

    # ---- faults

    def _faults(self, x: State) -> Iterator[tuple[str, State]]:
        empty = (None,) * self.num_blocks
        news: tuple[Message, ...] = (("front learns of source",), ("target learns of source", x.life))
        yield (
            "KILL source",
            x._replace(
                life=x.life + 1,
                next_sequence=1,
                memory=(*x.memory, empty),
                owned=empty,
                jobs=frozenset(job for job in x.jobs if not job.blocks),  # a Submit may reach the new process
                words=frozenset() if "no_incarnation" in self.mutants else x.words,
                unwritten=frozenset(),
                network=(*(m for m in x.network if m[0] not in TO_SOURCE), *news),
            ),
        )
        lost = (*TO_TARGET, "expect", "cancel at target", "target learns of source")
        news = (("front learns of target",), ("source learns of target", x.target_life))
        yield (
            "KILL target",
            x._replace(
                target_life=x.target_life + 1,
                peer=(x.life, 0),
                expected=frozenset(),
                entries=frozenset(),
                held=frozenset(),
                target_owned=empty,
                target_memory=empty,
                network=(*(m for m in x.network if m[0] not in lost), *news),
            ),
        )
        for message in dict.fromkeys(x.network):
            if message[0] in TO_SOURCE + TO_TARGET:
                i = x.network.index(message)
                yield f"LOSE {message[0]}", x._replace(network=x.network[:i] + x.network[i + 1 :])
                yield f"DOUBLE {message[0]}", x._replace(network=(*x.network, message))
        for request, (_, status, _) in enumerate(x.requests):
            if status == RUN:
                yield "CLIENT aborts", self._cancel(x, request, ABORTED)
        for job in x.jobs:
            if job.blocks:
                after = self._withdraw(x, job)
                yield "PREEMPT", after._replace(jobs=after.jobs | {Job(job.request, job.attempt)})
        for entry in x.entries:
            if (entry.request, entry.attempt) in x.expected and not entry.cancelled:
                network = (*x.network, ("finish", entry.request, entry.attempt))
                yield "CACHED", self._forget(x._replace(network=network), entry.request, entry.attempt)

    # ---- what must hold

    def check(self, x: State, *, at_rest: bool) -> None:
        for job in x.jobs:
            if any(x.owned[b] != (job.request, job.attempt) for b in job.blocks):
                raise Violation(f"OWNER: {job} has lost blocks: {x.owned}")
        for entry in x.entries | x.held:
            if entry.cancelled and not self.mutants.isdisjoint({"cut_copy", "free_early"}):
                continue  # what these two break; to be seen in what it leads to
            if any(x.target_owned[b] != entry.key for b in entry.target_blocks):
                raise Violation(f"OWNER: {entry} has lost blocks: {x.target_owned}")
        for entry in x.held:
            found = [x.target_memory[b] for b in entry.target_blocks]
            if found != [(entry.request, part) for part in range(self.parts)]:
                raise Violation(f"CORRUPT: committed {entry} holds {found}")
        owners = {(job.request, job.attempt) for job in x.jobs}
        keys = {entry.key for entry in x.entries | x.held}
        if {o for o in x.owned if o} - owners or {o for o in x.target_owned if o} - keys:
            raise Violation(f"ORPHAN: blocks without an owner: {x.owned}, {x.target_owned}")
        if not at_rest:
            return
        if any(status == RUN for _, status, _ in x.requests):
            raise Violation(f"STUCK: {x.requests}")
        if x.jobs or x.entries or x.held or x.expected or x.words & {(x.life, s) for s in range(x.next_sequence)}:
            raise Violation(f"LEAK: {x.jobs} {x.entries} {x.held}")

    # ---- fewer states, the same behaviour

    def _key(self, life: int, sequence: int) -> Key:
        return (0 if "no_incarnation" in self.mutants else life, sequence)

    def _arriving(self, x: State, entry: Entry) -> bool:
        return ("expect", entry.request, entry.attempt) in x.network

    def _tidy(self, x: State) -> State:
        """Messages that can have no effect any more are dropped."""
        if not self.mutants.isdisjoint({"ack_lists_blocks", "reuse_sequence", "keep_records"}):
            return x._replace(network=self._ordered(x.network))
        live = {self._key(x.life, job.sequence) for job in x.jobs if job.sequence}
        known = {entry.key for entry in x.entries if not entry.cancelled}
        coming = {(m[1], m[2]) for m in x.network if m[0] == "offer"}
        jobs = {(job.request, job.attempt) for job in x.jobs}
        at_target = {(entry.request, entry.attempt) for entry in x.entries | x.held} | x.expected

        def matters(m: Message) -> bool:
            if m[0] in TO_SOURCE:
                return (m[1], m[2]) in live
            if m[0] == "offer":
                awaited = (m[3], m[4]) in x.expected or ("expect", m[3], m[4]) in x.network
                return awaited and (m[1] > x.peer[0] or m[2] > x.peer[1])
            if m[0] in TO_TARGET:
                return (m[1], m[2]) in known or (m[1], m[2]) in coming
            if m[0] in ("withdrawn", "lost", "finish", "committed"):
                return x.requests[m[1]][:2] == (m[2], RUN)
            if m[0] == "cancel at source":
                return (m[1], m[2]) in jobs
            if m[0] == "cancel at target":
                return (m[1], m[2]) in at_target or ("expect", m[1], m[2]) in x.network
            return True

        return x._replace(network=self._ordered(filter(matters, x.network)))

    def _ordered(self, messages: Iterable[Message]) -> tuple[Message, ...]:
        """Messages in the order of their channels; sorted where streams do not keep an order."""
        return tuple(sorted(messages, key=lambda m: CHANNELS[m[0]])) if self.in_order else tuple(sorted(messages))
