"""Grammars at the door: good ones pass, wrong ones are refused, and hostile ones cost one child at most."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import threading
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from hydra_engine.core.grammar import MAX_GRAMMAR_CHARS, Calls, Grammar
from hydra_engine.core.processes.status import is_stopped
from hydra_engine.errors import EngineClosed, InvalidRequest, Unavailable
from hydra_engine.preprocess.sandbox import grammars as module
from hydra_engine.preprocess.sandbox.grammar_child import Verdict
from hydra_engine.preprocess.sandbox.grammars import MAX_DEPTH, Grammars
from hydra_engine.server.tools.tool_grammars import calls_of

TOKENIZER = Path(__file__).parents[2] / "hydra_engine" / "demo" / "model" / "tokenizer.json"

CLOCK = {"type": "function", "function": {"name": "clock", "parameters": {"type": "object", "properties": {}}}}
SCHEMA = {
    "type": "object",
    "properties": {"next": {"$ref": "#"}, "kind": {"enum": ["a", "b"]}, "n": {"type": "number", "minimum": 0}},
    "required": ["kind"],
}


def calls(dialect: str) -> Calls:
    made = calls_of(dialect, [CLOCK], True)
    assert made is not None
    return made


GOOD = [
    Grammar("json_object"),
    Grammar("json_schema", json.dumps(SCHEMA)),
    Grammar("json_schema", json.dumps({"enum": [f"value {i * 7919}" for i in range(3000)]})),
    Grammar("json_schema", json.dumps({"type": "string", "minLength": 1000, "maxLength": 100_000})),
    Grammar("regex", r"^\d{3}-[a-z]+(?: é|😀)$"),
    Grammar("regex", "(a+)+b"),  # no backtracking here
    Grammar("choice", json.dumps(["yes", "no", "", '"\\\n\x01'])),
    Grammar("choice", json.dumps([f"word {i}" for i in range(4000)])),
    Grammar("regex", "a\0b"),
    Grammar("regex", r"[a-z]+\\"),
    Grammar("choice", json.dumps(["\0", "a"])),
    Grammar("json_schema", json.dumps({"const": "a\0b"})),
    Grammar("json_schema", json.dumps({"properties": {"pattern": {"type": "string", "pattern": r"\\\\"}}})),
    Grammar("json_schema", json.dumps({"enum": [{"pattern": "\\"}]})),
    Grammar("lark", 'start: "a" start | NAME\nNAME: /[a-z]+/'),
    Grammar("ebnf", 'root ::= "a" | b "c"{2,3}\nb ::= [0-9]+ root'),
    Grammar("choice", json.dumps(["<s>", "<|end|>"])),
    Grammar("json_object").after_reasoning("<think>", "</think>", opened=True),
    Grammar("json_schema", SCHEMA).with_calls(calls("hermes")),
    Grammar("regex", "a").with_calls(calls("qwen3_coder")).after_reasoning("<s>", "</s>", opened=False),
]
WRONG = [
    (Grammar("json_schema", "true"), "must be a JSON object"),
    (Grammar("json_schema", "{"), "must be valid JSON"),
    (Grammar("json_schema", '{"type": "objet"}'), "Invalid type: objet"),
    (Grammar("json_schema", '{"$ref": "file:///etc/passwd"}'), "leads out of the schema"),
    (Grammar("json_schema", '{"$ref": "#"}'), "no text fits it"),
    (Grammar("json_schema", '{"enum": []}'), "no value fits the schema"),
    (Grammar("json_schema", '{"x": ' * MAX_DEPTH + "{}" + "}" * MAX_DEPTH), "nested deeper than 64 levels"),
    (Grammar("json_schema", "[" * 60_000), "must be valid JSON"),
    (Grammar("json_schema", '{"const": "\ud800"}'), "lone surrogates"),
    (Grammar("json_schema", '{"const": 1' + "0" * 5000 + "}"), "would not be kept exactly"),
    (Grammar("json_schema", {"const": 1790000000000000001}), "const 1790000000000000001 would not be kept exactly"),
    (Grammar("regex", "["), "unclosed character class"),
    (Grammar("regex", "[").after_reasoning("<think>", "</think>", opened=True), "unclosed character class"),
    (Grammar("regex", r"[a&&b]").after_reasoning("<think>", "</think>", opened=False), "no text fits it"),
    (Grammar("regex", r"[a&&b]").with_calls(calls("json")), "no text fits it"),
    (Grammar("regex", "\\"), "ends in a single backslash"),
    (Grammar("regex", r"a\\" + "\\"), "ends in a single backslash"),
    (Grammar("json_schema", json.dumps({"items": [{"pattern": "a\\"}]})), "ends in a single backslash"),
    (Grammar("json_schema", json.dumps({"patternProperties": {"\\": {}}})), "ends in a single backslash"),
    (Grammar("regex", "(?=a)b"), "look-around"),
    (Grammar("regex", ""), "the grammar is empty"),
    (Grammar("regex", r"[a&&b]"), "no text fits it"),
    (Grammar("choice", "[]"), "list of 1 to"),
    (Grammar("choice", '["a", 5]'), "list of 1 to"),
    (Grammar("choice", '{"a": 1}'), "list of 1 to"),
    (Grammar("lark", "start: foo"), 'unknown name: "foo"'),
    (Grammar("lark", 'begin: "a"'), "start"),
    (Grammar("lark", '%import "/etc/passwd"\nstart: "a"'), "Expected name"),
    (Grammar("lark", "start: " + "(" * 5000 + '"a"' + ")" * 5000), "too deeply nested"),
    (Grammar("lark", "start: <|end|>"), "no text fits it"),
    (Grammar("ebnf", "root ::= nothing"), "Rule 'nothing' not found"),
    (Grammar("ebnf", 'root ::= "'), "Unexpected end"),
    (Grammar("ebnf", "root ::= " + "(" * 5000), "recursion"),
]


def chain(count: int, rule: str, last: str) -> str:
    return "\n".join(rule.format(i, i + 1) for i in range(count)) + "\n" + last.format(count)


# Each of these overflows a stack, runs for minutes, or takes gigabytes where nothing holds it back.
HOSTILE = {
    "chain of tokens": Grammar("lark", "start: T0\n" + chain(2500, 'T{0}: "a" T{1} | "b"', 'T{0}: "b"')),
    "chain of rules": Grammar("lark", "start: r0\n" + chain(3000, 'r{0}: r{1} | "a"', 'r{0}: "b"')),
    "ambiguous": Grammar("lark", "start: s\ns: " + " | ".join("s" + " s" * (i % 20) for i in range(1500)) + ' | "a"'),
    "intersection": Grammar("lark", "start: T\nT: " + " & ".join(f"/(.|\\n)*{c}(.|\\n){{24}}/" for c in "abcdefgh")),
    "chain of references": Grammar(
        "json_schema",
        json.dumps({"$ref": "#/$defs/0", "$defs": {str(i): {"$ref": f"#/$defs/{i + 1}"} for i in range(1900)}}),
    ),
    "factors": Grammar("json_schema", json.dumps({"type": "integer", "multipleOf": 999_999_937})),
    "optional": Grammar("regex", "(a?){400}a{400}"),
}
ENDLESS = Grammar(
    "json_schema", json.dumps({"allOf": [{"type": "string", "pattern": f"^.*a.{{{i}}}b"} for i in range(900)]})
)


@pytest.fixture
async def checker() -> AsyncIterator[Grammars]:
    made = Grammars(TOKENIZER, (2,))
    yield made
    made.close()


async def problem_of(checker: Grammars, grammar: Grammar) -> str:
    with pytest.raises(InvalidRequest) as caught:
        await checker.check(grammar)
    assert caught.value.param == grammar.param
    assert "\n" not in caught.value.message and len(caught.value.message) < 300
    return caught.value.message


async def test_good_ones_pass_and_wrong_ones_are_told_why(checker: Grammars) -> None:
    for grammar in GOOD:
        await checker.check(grammar)
    children = checker._host.pids()
    for grammar, words in WRONG:
        assert words in await problem_of(checker, grammar), grammar.source[:60]
    assert len(children) == 1 and checker._host.pids() == children


@pytest.mark.slow
async def test_hostile_ones_are_refused_in_bounded_time_and_the_next_one_is_checked(checker: Grammars) -> None:
    await checker.check(GOOD[0])
    for name, grammar in HOSTILE.items():
        assert len(grammar.source) <= MAX_GRAMMAR_CHARS
        words = await problem_of(checker, grammar)
        assert "too complex" in words or "not present" in words or "points to" in words, (name, words)
        await checker.check(Grammar("regex", f"[a-z]{{{len(name)}}}"))


@pytest.mark.slow
async def test_a_limit_ends_the_child_and_is_remembered(checker: Grammars) -> None:
    await checker.check(GOOD[0])
    first = checker._host._idle[0]._process
    assert "too complex" in await problem_of(checker, ENDLESS)
    # Of time, or of memory where a fast processor needs more of that first.
    assert first.poll() in (-signal.SIGPROF, -signal.SIGABRT)
    before = checker._host.pids()
    again = Grammar(ENDLESS.kind, ENDLESS.source, "another_field")
    assert "too complex" in await problem_of(checker, again)
    assert checker._host.pids() == before  # nobody was started for it


async def test_a_verdict_is_asked_for_once(checker: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    await checker.check(GOOD[0])
    jobs: list[Any] = []
    run = checker._host.run
    monkeypatch.setattr(checker._host, "run", lambda job, seconds: jobs.append(job) or run(job, seconds))
    await asyncio.gather(*(checker.check(GOOD[1]) for _ in range(5)))
    assert len(jobs) == 1
    monkeypatch.setattr(module, "MAX_VERDICTS", 2)
    for grammar in GOOD[:4]:
        await checker.check(grammar)
    assert len(checker._verdicts) <= 3


@pytest.mark.parametrize("other", [("bob", "a"), ("alice", "b")])
async def test_a_verdict_is_for_one_client_and_salt_alone(
    checker: Grammars, monkeypatch: pytest.MonkeyPatch, other: tuple[str, str]
) -> None:
    jobs: list[Any] = []
    run = checker._host.run
    monkeypatch.setattr(checker._host, "run", lambda job, seconds: jobs.append(job) or run(job, seconds))
    for owner in (("alice", "a"), other, ("alice", "a"), other):
        await checker.check(GOOD[1], *owner)
    assert len(jobs) == 2


async def test_clients_take_turns(checker: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    """A waiting check of bob's lets at most two of alice's begin."""
    begun: list[str] = []
    first_begun, may_go = threading.Event(), threading.Semaphore(0)

    def run(grammar: Grammar, _seconds: float) -> tuple[Verdict, None]:
        begun.append(grammar.source)
        first_begun.set()
        assert may_go.acquire(timeout=60)
        return Verdict(), None

    monkeypatch.setattr(checker._host, "run", run)
    checks = [asyncio.create_task(checker.check(Grammar("regex", f"a{{{i}}}"), "alice")) for i in range(1, 8)]
    await asyncio.to_thread(first_begun.wait, 60)
    checks += [asyncio.create_task(checker.check(Grammar("regex", f"b{{{i}}}"), "bob")) for i in range(1, 3)]
    await asyncio.sleep(0)
    may_go.release(len(checks))
    await asyncio.gather(*checks)
    places = [begun.index(f"b{{{i}}}") for i in range(1, 3)]
    assert places[0] <= 2 and places[1] - places[0] <= 2 and len(begun) == len(checks)


async def test_as_many_at_once_as_requests_may_wait(checker: Grammars) -> None:
    """512 by default, each with a grammar of its own."""
    verdicts = [checker.check(Grammar("choice", json.dumps([f"word {index}", "b"]))) for index in range(512)]
    assert await asyncio.gather(*verdicts, return_exceptions=True) == [None] * 512


async def test_who_waits_too_long_for_others_is_told_so() -> None:
    checker = Grammars(TOKENIZER, (2,), wait_seconds=0.5)
    try:
        await asyncio.to_thread(checker._host.run, GOOD[0], 20.0)  # loads the tokenizer
        (pid,) = checker._host.pids()
        os.kill(pid, signal.SIGSTOP)
        with pytest.raises(Unavailable, match="grammars of other requests take too long") as caught:
            await checker.check(GOOD[1])
        assert caught.value.status == 503
    finally:
        checker.close()


@pytest.mark.slow
async def test_a_child_that_is_killed_or_stopped_condemns_no_grammar() -> None:
    checker = Grammars(TOKENIZER, (2,))
    await checker.check(GOOD[0])
    for grammar, sent in ((GOOD[1], signal.SIGSTOP), (GOOD[5], signal.SIGKILL)):
        (pid,) = checker._host.pids()
        os.kill(pid, sent)
        await checker.check(grammar)
        assert checker._host.pids() != [pid]
    checker.close()
    with pytest.raises(EngineClosed):
        await checker.check(GOOD[7])


def wait_until_stopped(pid: int) -> None:
    while not is_stopped(pid):
        time.sleep(0.01)


async def test_close_ends_the_child_whatever_it_does() -> None:
    checker = Grammars(TOKENIZER, (2,))
    await checker.check(GOOD[0])
    (pid,) = checker._host.pids()
    os.kill(pid, signal.SIGSTOP)
    await asyncio.to_thread(wait_until_stopped, pid)
    waiting = asyncio.create_task(checker.check(GOOD[1]))
    await asyncio.sleep(0.05)
    checker.close()
    with pytest.raises(EngineClosed):
        await waiting
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


async def test_without_the_package_or_a_tokenizer_that_fits(
    tmp_path: Path, checker: Grammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    for unusable in (Grammars(None, (2,)), Grammars(TOKENIZER, ()), Grammars(tmp_path / "tokenizer.json", (2,))):
        assert "this model's tokenizer cannot be used" in await problem_of(unusable, GOOD[0])
        unusable.close()
    monkeypatch.setattr(module, "is_installed", lambda: False)
    assert "pip install llguidance" in await problem_of(checker, GOOD[0])


async def test_ids_outside_the_vocabulary_are_refused(kitchen: Any) -> None:
    size = kitchen.preprocessor.tokenizer.vocab_size
    await kitchen.prepare("hi", sampling={"logit_bias": {size - 1: 1.0}, "allowed_token_ids": [0, size - 1]})
    for sampling in ({"logit_bias": {size: 1.0}}, {"allowed_token_ids": [3, size]}):
        with pytest.raises(InvalidRequest, match=f"names token {size}; this model's token ids go from 0"):
            await kitchen.prepare("hi", sampling=sampling)
