"""Grammars are compiled in turns of their clients, for one client and salt alone, within bounds of memory."""

from __future__ import annotations

import ctypes
import gc
import json
import threading
import weakref
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from hydra_engine.core.grammar import Grammar
from hydra_engine.core.request import Request
from hydra_engine.errors import Unavailable
from hydra_engine.guidance.guide import Guide, Matcher
from hydra_engine.worker.language import constraints
from tests.worker.test_constraints import DEMO, EOS, Compiler, request_of


class Gate:
    """A compiler whose compilations are recorded in order and wait for the test."""

    def __init__(self) -> None:
        self.begun: list[str] = []
        self._may_go = threading.Semaphore(0)
        self._compile = Guide.compile

    def compile(self, guide: Guide, grammar: Grammar) -> Matcher:
        self.begun.append(grammar.source)
        assert self._may_go.acquire(timeout=60)
        return self._compile(guide, grammar)

    def open(self, count: int = 1000) -> None:
        self._may_go.release(count)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Gate:
    made = Gate()
    monkeypatch.setattr(Guide, "compile", lambda guide, grammar: made.compile(guide, grammar))
    return made


@pytest.fixture
def compiler(gate: Gate) -> Iterator[Compiler]:
    made = Compiler()
    yield made
    gate.open()
    made.close()
    made._compiler.shutdown()  # what it is in the middle of would begin at the gate of the next test


def asks(client: str, expression: str, salt: str = "") -> Request:
    return replace(request_of(Grammar("regex", expression)), client=client, cache_salt=salt)


def all_ready(compiler: Compiler, requests: list[Request]) -> None:
    """Waits until the grammars of these requests are ready, in this order."""
    for request in requests:
        result = compiler.results.get(timeout=60)
        assert (result.request_id, result.error) == (request.id, None)


def test_whoever_asks_waits_for_nothing_and_what_is_kept_is_there_at_once(compiler: Compiler, gate: Gate) -> None:
    gate.open(1)
    compiler.ready(asks("bob", "[0-9]"))
    waiting = [compiler.constraint_of(asks("alice", f"a{{{number}}}")) for number in range(1, 5)]
    assert not any(constraint.is_ready for constraint in waiting if constraint)
    kept = compiler.constraint_of(asks("bob", "[0-9]"))
    assert kept is not None and kept.is_ready and kept.allowed(()).any()


def test_at_most_two_of_somebody_else_begin_before_the_next_one_of_a_client(compiler: Compiler, gate: Gate) -> None:
    alice = [asks("alice", f"a{{{number}}}") for number in range(1, 7)]
    for request in alice:
        compiler.constraint_of(request)
    while not gate.begun:
        threading.Event().wait(0.001)
    bob = [asks("bob", f"b{{{number}}}") for number in range(1, 4)]
    for request in bob:
        compiler.constraint_of(request)
    gate.open()
    for _ in alice + bob:
        compiler.results.get(timeout=60)
    places = [gate.begun.index(request.sampling.grammar.source) for request in bob if request.sampling.grammar]
    assert places[0] <= 2 and all(after - before <= 2 for before, after in pairwise(places))
    assert len(gate.begun) == len(alice) + len(bob)


def test_what_several_answers_wait_for_is_compiled_once(compiler: Compiler, gate: Gate) -> None:
    answers = [asks("alice", "[a-z]{3}") for _ in range(8)]
    for request in answers:
        compiler.constraint_of(request)
    gate.open()
    all_ready(compiler, answers)
    assert gate.begun == ["[a-z]{3}"]


@pytest.mark.parametrize("other", [{"client": "bob"}, {"salt": "another"}])
def test_what_one_has_compiled_is_there_for_no_other(compiler: Compiler, gate: Gate, other: dict[str, str]) -> None:
    gate.open()
    mine = {"client": "alice", "expression": "[a-z]{3}", "salt": "one"}
    compiler.ready(asks(**mine))
    compiler.ready(asks(**mine))
    assert len(gate.begun) == 1
    assert compiler.ready(asks(**(mine | other))).is_ready and len(gate.begun) == 2


def test_who_is_gone_leaves_the_queue(compiler: Compiler, gate: Gate) -> None:
    first, second, third, twin = (asks("alice", source) for source in ("a", "b", "c", "c"))
    for request in (first, second, third, twin):
        compiler.constraint_of(request)
    while not gate.begun:
        threading.Event().wait(0.001)
    for request in (first, second, third):  # the first one is being compiled, and the third one's is wanted by its twin
        compiler.forget(request.id)
    compiler.forget(request_of(None).id)
    gate.open()
    all_ready(compiler, [twin])
    assert gate.begun == ["a", "c"] and not compiler._jobs and not compiler._job_of
    assert compiler._used.keys() == {twin.id}


def test_more_than_may_wait_are_refused(compiler: Compiler, gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler._queue, "_max_waiting", 4)
    with pytest.raises(Unavailable, match="too many grammars are waiting"):
        for number in range(1, 9):
            compiler.constraint_of(asks("alice", f"a{{{number}}}"))
    compiler.constraint_of(asks("bob", "b"))


# ---- memory


def test_what_nobody_uses_is_kept_up_to_so_many_bytes(
    compiler: Compiler, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate.open()
    requests = [asks("alice", f"a{{{number}}}") for number in range(1, 6)]
    used = asks("alice", "[0-9]{9}")
    compiler.ready(used)
    size = compiler._used[used.id][0].num_bytes
    monkeypatch.setattr(constraints, "MAX_KEPT_BYTES", 3 * size)
    for request in requests:
        compiler.ready(request)
        compiler.forget(request.id)
    kept = [key[3:5][1] for key in compiler._kept]  # type: ignore[index]
    assert kept == ["[0-9]{9}", "a{4}", "a{5}"] or kept == ["[0-9]{9}", "a{3}", "a{4}", "a{5}"]
    assert sum(entry.num_bytes for entry in compiler._kept.values() if not entry.num_users) <= 3 * size


def test_those_in_use_are_bounded_and_no_client_has_all_of_it(
    compiler: Compiler, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate.open()
    first = asks("alice", "a{1}")
    compiler.ready(first)
    size = compiler._used[first.id][0].num_bytes
    monkeypatch.setattr(constraints, "MAX_USED_BYTES", 4 * size + size // 2)
    second, third, fourth, fifth = more = [asks("alice", f"a{{{number}}}") for number in range(2, 6)]
    for request in more:
        compiler.constraint_of(request)
    all_ready(compiler, [second, third])  # half of it, and the one that began before that was reached
    bob = asks("bob", "b")
    compiler.ready(bob)
    assert len(gate.begun) == 4 and compiler.results.empty()
    compiler.forget(second.id)
    compiler.forget(first.id)
    all_ready(compiler, [fourth])
    compiler.forget(fifth.id)
    assert compiler.results.empty() and len(gate.begun) == 5


def test_what_has_been_followed_for_long_is_compiled_anew(
    compiler: Compiler, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate.open()
    monkeypatch.setattr(constraints, "MAX_STEPS", 4)
    constraint = compiler.ready(asks("alice", "[a-z]{9}"))
    before = compiler._kept.copy()
    for _ in range(4):
        constraint.allowed(())
    (entry,) = before.values()
    assert entry.num_bytes == entry.own_bytes + 4 * constraints.STEP_BYTES
    compiler.ready(asks("alice", "[a-z]{9}"))
    assert len(gate.begun) == 2 and compiler._kept.keys() == before.keys() and constraint.allowed(()).any()


def test_nothing_of_a_request_that_is_gone_keeps_its_memory(
    compiler: Compiler, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The table of slots may still have its constraint; free memory is given back."""
    trimmed = threading.Event()
    monkeypatch.setattr(constraints, "trim_heap", trimmed.set)
    monkeypatch.setattr(constraints, "MAX_KEPT_BYTES", 0)
    monkeypatch.setattr(constraints, "TRIM_BYTES", 1)
    gate.open()
    request = asks("alice", "[a-z]{9}")
    constraint = compiler.ready(request)
    gone = weakref.ref(compiler._used[request.id][0].matcher)
    compiler.forget(request.id)
    assert gone() is None and not constraint.is_ready and trimmed.wait(60)


class _MallocInfo(ctypes.Structure):
    _fields_ = tuple((f"field{index}", ctypes.c_size_t) for index in range(10))


def heap_bytes() -> int:
    """Bytes of the heap in use, from the C library."""
    info = mallinfo2()
    return int(info.field4 + info.field7)


try:
    mallinfo2 = ctypes.CDLL(None).mallinfo2
    mallinfo2.restype = _MallocInfo
except AttributeError:  # not glibc
    mallinfo2 = None

RULES = "\n".join(f'b{i} ::= "x{i}" [a-z]+ b{i * 7 % 900} | [0-9]{{1,{i % 9 + 1}}}' for i in range(900))
SIZES = {
    "factor": Grammar("json_schema", {"type": "integer", "multipleOf": 30_011}),
    "small factor": Grammar("json_schema", {"type": "integer", "multipleOf": 1_009}),
    "many objects": Grammar(
        "json_schema",
        {"properties": {f"k{i}": {"type": "object", "properties": {"a": {"type": "string"}}} for i in range(300)}},
    ),
    "patterns": Grammar(
        "json_schema",
        {"properties": {f"k{i}": {"type": "string", "pattern": f"^[a-z]{{{i % 30 + 1}}}x{i}$"} for i in range(200)}},
    ),
    "ranges": Grammar(
        "json_schema",
        {"properties": {f"k{i}": {"type": "integer", "minimum": i * 7919, "maximum": 10**12 + i} for i in range(100)}},
    ),
    "short names": Grammar("json_schema", {"properties": {f"{i:x}": {} for i in range(900)}}),
    "texts": Grammar("choice", [f"choice number {i} of many" for i in range(1500)]),
    "rules": Grammar("ebnf", "root ::= " + " | ".join(f"b{i}" for i in range(900)) + "\n" + RULES),
    "words": Grammar("regex", r"(\w+ ){3}\p{L}{2,900}"),
    "object": Grammar("json_object"),
}


@pytest.mark.skipif(mallinfo2 is None, reason="needs glibc")
@pytest.mark.parametrize("name", SIZES)
def test_what_is_said_of_its_memory_is_no_less_than_it_takes(name: str) -> None:
    guide = Guide(DEMO / "tokenizer.json", (EOS,))
    guide.compile(Grammar("regex", "a"))
    gc.collect()
    before = heap_bytes()
    matcher = guide.compile(SIZES[name])
    taken, said = heap_bytes() - before, matcher.num_bytes()
    assert taken <= said <= max(taken * 16, 1 << 20), json.dumps([taken, said])
    assert matcher.copy().allowed().any() and np.array_equal(matcher.copy().allowed(), matcher.allowed())
