"""Requests that need a grammar wait while it is compiled; others go on, and those that wait hold nothing of theirs."""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import Iterator

import pytest

from hydra_engine import Grammar, SamplingParams
from hydra_engine.core.call import GenerationCall
from hydra_engine.errors import RequestAborted, Unavailable
from hydra_engine.guidance.guide import GrammarError, Guide, Matcher
from hydra_engine.instance import instance
from tests import faults
from tests.engine.conftest import EngineFactory, assert_at_rest, picture
from tests.engine.faulty import until
from tests.faults import set_fault

PLAIN = {"temperature": 0, "max_tokens": 40, "ignore_eos": True}


def bound_by(expression: str) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=20, grammar=Grammar("regex", expression))


class Gate:
    """Compiles nothing before the test says so, in the process of the test, where an instance alone is."""

    def __init__(self) -> None:
        self.begun = threading.Event()
        self.open = threading.Event()
        self._compile = Guide.compile

    def compile(self, guide: Guide, grammar: Grammar) -> Matcher:
        self.begun.set()
        assert self.open.wait(60)
        return self._compile(guide, grammar)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    made = Gate()
    monkeypatch.setattr(Guide, "compile", lambda guide, grammar: made.compile(guide, grammar))
    yield made
    made.open.set()


def test_streams_and_pictures_go_on_while_a_compiler_is_busy(make_engine: EngineFactory, gate: Gate) -> None:
    """Streams go on although more requests with pictures than may run at once wait for their grammars."""
    engine = make_engine(max_num_seqs=2, look_ahead=True)
    stream = iter(engine.submit("a story", **PLAIN))
    first = next(stream)
    slow = [engine.submit("x", [picture(i)], sampling=bound_by(f"[a-c]{{{i}}}")) for i in range(1, 5)]
    assert gate.begun.wait(60)
    tokens = [first, *stream]
    assert sum(len(piece.token_ids) for piece in tokens) == 40
    assert len(engine.generate("What?", [picture(9)], **PLAIN).token_ids) == 40
    assert not any(handle.done for handle in slow)
    until(lambda: (status := engine.stats()) is not None and not status.num_running and status.num_waiting == 4, "idle")
    gate.open.set()
    for count, handle in enumerate(slow, start=1):
        result = handle.result(60)
        assert re.fullmatch(f"[a-c]{{{count}}}", result.text)
        assert any(span.cause == "grammar" for span in result.timeline if span.stage == "prefill_wait")


def test_cancelling_what_waits_frees_everything(make_engine: EngineFactory, gate: Gate) -> None:
    engine = make_engine()
    doomed = [engine.submit("x", [picture(i)], sampling=bound_by(f"[a-c]{{{i}}}")) for i in range(1, 4)]
    assert gate.begun.wait(60)
    for handle in doomed:
        handle.cancel()
        with pytest.raises(RequestAborted):
            handle.result(30)
    assert_at_rest(engine)
    gate.open.set()
    assert engine.generate("x", sampling=bound_by("[d-f]{3}")).finish_reason == "stop"


def test_who_waits_too_long_is_told_so(make_engine: EngineFactory, gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(instance, "HOLD_S", 0.1)
    engine = make_engine()
    with pytest.raises(Unavailable, match="the grammar of this request was not ready within") as caught:
        engine.generate("x", sampling=bound_by("[a-c]{3}"))
    assert caught.value.status == 503
    assert_at_rest(engine)


def test_a_grammar_that_was_accepted_and_cannot_be_compiled_is_not_the_clients_fault(
    make_engine: EngineFactory, gate: Gate
) -> None:
    def fails(guide: Guide, grammar: Grammar) -> Matcher:
        raise GrammarError("it is too complex")

    compile_one, gate._compile = gate._compile, fails
    gate.open.set()
    engine = make_engine()
    with pytest.raises(Unavailable, match="was accepted and could not be compiled for the model: it is too") as caught:
        engine.generate("x", sampling=bound_by("[a-c]{3}"))
    assert caught.value.status == 503
    gate._compile = compile_one
    assert re.fullmatch("[a-c]{3}", engine.generate("x", sampling=bound_by("[a-c]{3}")).text)


@pytest.mark.slow
@pytest.mark.parametrize("where", ["p0", "d0"])
def test_streams_go_on_in_each_instance(
    make_engine: EngineFactory, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    faults.enable(monkeypatch)
    engine = make_engine(topology="E+P+D")
    expected = engine.generate("a story", **PLAIN).token_ids
    set_fault(engine.frontend, "eng.before_compile", "delay", "seconds=6 times=1", where)
    slow = engine.submit("x", [picture(1)], sampling=bound_by("[a-c]{3}"))
    others = [engine.submit("a story", **PLAIN) for _ in range(3)]
    assert [handle.result(60).token_ids for handle in others] == [expected] * 3
    assert not slow.done, "the compiler was ready before others had their answers"
    assert re.fullmatch("[a-c]{3}", slow.result(60).text)


@pytest.mark.slow
def test_an_instance_that_dies_while_it_compiles_is_replaced(
    make_engine: EngineFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    faults.enable(monkeypatch)
    engine = make_engine(topology="2EPD", recovery_s=30.0)
    set_fault(engine.frontend, "eng.before_compile", "kill", "times=1", engine.instances()[0].name)
    handles = [engine.submit("x", sampling=bound_by(f"[a-c]{{{i}}}")) for i in range(1, 5)]
    for count, handle in enumerate(handles, start=1):
        assert re.fullmatch(f"[a-c]{{{count}}}", handle.result(60).text)


def test_grammars_of_one_client_are_compiled_for_no_other(make_engine: EngineFactory, gate: Gate) -> None:
    gate.open.set()
    engine = make_engine()
    compiled: list[str] = []
    compile_one = gate._compile
    gate._compile = lambda guide, grammar: compiled.append(grammar.source) or compile_one(guide, grammar)
    for client, salt in (("alice", "a"), ("alice", "a"), ("bob", "b"), ("bob", "b")):
        call = GenerationCall(prompt="x", sampling=bound_by("[a-c]{3}"), client=client, cache_salt=salt)
        assert asyncio.run(engine.add_request(call)).result(60).finish_reason == "stop"
    assert len(compiled) == 2
