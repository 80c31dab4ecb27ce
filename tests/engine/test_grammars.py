"""Structured output from real engines: the text keeps to its grammar and is the same text on every way through."""

from __future__ import annotations

import json
import os
import re
import signal
from pathlib import Path
from typing import Any, Literal

import pydantic
import pytest

import hydra_engine
from hydra_engine import Engine, Grammar, SamplingParams
from hydra_engine.core.outputs import FinishReason, Result
from hydra_engine.errors import InvalidRequest
from tests.engine.conftest import EngineFactory, picture
from tools.miniatures import make_tiny

SCHEMA = {
    "type": "object",
    "properties": {
        "count": {"type": "integer", "minimum": 0, "maximum": 99},
        "kind": {"enum": ["red", "blue", "grün"]},
        "name": {"type": "string", "maxLength": 6},
        "flags": {"type": "array", "items": {"type": "boolean"}, "maxItems": 3},
    },
    "required": ["count", "kind", "name", "flags"],
    "additionalProperties": False,
}
EXPRESSION = "[a-f]{3}-[0-9]{2,4}(?: x| y)?"
CHOICES = ["yes", "no", "yes and no", 'a "quoted" one\n']
EBNF = 'root ::= word ("," word){2}\nword ::= [a-z]{1,4}'
KINDS = {
    "json_schema": json.dumps(SCHEMA),
    "regex": EXPRESSION,
    "choice": json.dumps(CHOICES),
    "lark": 'start: "<" NAME ">" | start start\nNAME: /[A-Z]{2}/',
    "ebnf": EBNF,
}


def fits(kind: str, text: str) -> bool:
    match kind:
        case "json_schema":
            value = json.loads(text)
            assert value["kind"] in SCHEMA["properties"]["kind"]["enum"]  # type: ignore[index]
            assert type(value["count"]) is int and 0 <= value["count"] <= 99
            assert len(value["name"]) <= 6 and len(value["flags"]) <= 3
            return list(value) == SCHEMA["required"] and all(type(flag) is bool for flag in value["flags"])
        case "regex":
            return re.fullmatch(EXPRESSION, text) is not None
        case "choice":
            return text in CHOICES
        case "lark":
            return re.fullmatch("(<[A-Z]{2}>)+", text) is not None
        case _:
            return re.fullmatch("[a-z]{1,4}(,[a-z]{1,4}){2}", text) is not None


def sampling_of(index: int, kind: str, **more: Any) -> SamplingParams:
    """Greedy and seeded requests, half each; one with everything else that bends logits."""
    chosen: dict[str, Any] = {"max_tokens": 150, "grammar": Grammar(kind, KINDS[kind], "grammar")}
    if index % 2 == 0:
        chosen["temperature"] = 0
    else:
        chosen |= {"temperature": 1.0, "seed": index, "top_p": 0.95}
    if index == 3:
        chosen |= {"repetition_penalty": 1.2, "frequency_penalty": 0.4, "logit_bias": {34: 2.0}, "top_k": 20}
    return SamplingParams(**(chosen | more))


CASES = [(index, kind) for index, kind in enumerate([*KINDS, *KINDS])]
PLAIN = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)


def prompt_of(index: int) -> tuple[str, list[Any] | None]:
    return "word " * (1 + 7 * (index % 4)), [picture(index)] if index % 3 == 1 else None


def one_by_one(engine: Engine) -> list[tuple[int, ...]]:
    golden = [engine.generate(*prompt_of(i), sampling=sampling_of(i, kind)) for i, kind in CASES]
    for (_, kind), result in zip(CASES, golden, strict=True):
        if result.finish_reason == FinishReason.STOP:
            assert fits(kind, result.text), (kind, result.text)
            assert result.stop_reason is None
        else:  # a string of a lark grammar that has no end, for a model that never wants to stop
            assert kind == "lark", (kind, result.text)
    return [result.token_ids for result in golden]


def together(engine: Engine) -> list[Result]:
    """Unconstrained neighbours too."""
    handles = [engine.submit(*prompt_of(i), sampling=sampling_of(i, kind)) for i, kind in CASES]
    plain = [engine.submit(prompt_of(i)[0], sampling=PLAIN) for i in range(4)]
    results = [handle.result(120) for handle in handles]
    assert [handle.result(120).token_ids for handle in plain] == [
        engine.generate(prompt_of(i)[0], sampling=PLAIN).token_ids for i in range(4)
    ]
    return results


@pytest.fixture(scope="module")
def golden(tiny_model: Path) -> list[tuple[int, ...]]:
    with Engine(tiny_model, threads=1, block_size=4, num_kv_blocks=512, token_budget=512) as engine:
        return one_by_one(engine)


@pytest.mark.parametrize(
    "options",
    [
        {"token_budget": 5},
        {"look_ahead": True},
        {"max_num_seqs": 3, "prefix_caching": False},
        {"topology": "EP+D", "token_budget": 24, "look_ahead": True},
    ],
    ids=str,
)
@pytest.mark.slow
def test_the_same_tokens_on_every_way(
    make_engine: EngineFactory, golden: list[tuple[int, ...]], options: dict[str, Any]
) -> None:
    engine = make_engine(**options)
    results = together(engine)
    assert [result.token_ids for result in results] == golden


def test_preempted_requests_go_on_where_they_were(make_engine: EngineFactory) -> None:
    engine = make_engine(num_kv_blocks=24, max_model_len=80)
    sampling = SamplingParams(temperature=0, max_tokens=45, grammar=Grammar("regex", "([a-z]{5} ){7}"))
    prompt = [40, 41, 42]  # ids reach the instance together, texts one by one
    expected = engine.generate(prompt, sampling=sampling)
    assert re.fullmatch("([a-z]{5} ){7}", expected.text)
    results = [handle.result(120) for handle in [engine.submit(prompt, sampling=sampling) for _ in range(6)]]
    assert all(result.token_ids == expected.token_ids for result in results)
    assert sum(result.metrics.num_preemptions for result in results) > 0


@pytest.mark.slow
def test_a_request_whose_instance_dies_goes_on_in_its_grammar(make_engine: EngineFactory) -> None:
    engine = make_engine(topology="2EPD", recovery_s=30.0)
    expression = "([a-z]{2}[0-9]{3} ){30}"
    sampling = SamplingParams(temperature=1.0, seed=3, max_tokens=200, grammar=Grammar("regex", expression))
    expected = engine.generate("abc", sampling=sampling)
    assert re.fullmatch(expression, expected.text)
    handles = [engine.submit("abc", sampling=sampling) for _ in range(6)]
    next(iter(handles[0]))
    victim = engine.instances()[0]
    assert victim.pid is not None
    os.kill(victim.pid, signal.SIGKILL)
    assert [handle.result(120).token_ids for handle in handles] == [expected.token_ids] * 6
    assert engine.instances()[0].restarts > 0 or engine.instances()[0].pid is None


@pytest.mark.quick("qwen2_vl")
@pytest.mark.parametrize("family", ["qwen2_vl", "minicpmv4_6"])
def test_other_families(family: str, tmp_path: Path, make_engine: EngineFactory) -> None:
    make_tiny(family, tmp_path, seed=7)
    engine = make_engine(model=tmp_path)
    for index, kind in [(0, "json_schema"), (1, "regex"), (2, "choice")]:
        result = engine.generate("abc", [picture(1)], sampling=sampling_of(index, kind))
        assert result.finish_reason == FinishReason.STOP and fits(kind, result.text)


def test_the_demo_model_keeps_to_it_and_ends(tmp_path: Path) -> None:
    with Engine("demo", threads=1) as engine:
        asked = "What is two plus three?"
        free = engine.generate(asked, temperature=0, max_tokens=32)
        among = json.dumps(["I like bananas.", free.text, free.text + " Really."])
        same = engine.generate(asked, temperature=0, max_tokens=32, grammar=Grammar("choice", among))
        assert same.text == free.text and same.finish_reason == FinishReason.STOP
        for kind in KINDS:
            result = engine.generate(asked, sampling=sampling_of(1, kind))
            assert result.finish_reason == FinishReason.STOP and fits(kind, result.text), (kind, result.text)
        parsed = engine.generate(asked, temperature=0, seed=1, max_tokens=400, grammar=Grammar("json_object"))
        if parsed.finish_reason == FinishReason.STOP:
            assert isinstance(json.loads(parsed.text), dict)
        assert parsed.text.startswith("{")
        handle = engine.submit(asked, sampling=sampling_of(0, "json_schema", logprobs=2))
        pieces = list(handle)
        whole = engine.generate(asked, sampling=sampling_of(0, "json_schema", logprobs=2))
        assert "".join(piece.text for piece in pieces) == whole.text
        # Log probabilities are the model's own: what the grammar forces may be what the model would not have said.
        assert whole.logprobs is not None and len(whole.logprobs) == len(whole.token_ids)
        assert any(entry.token_id not in [top[0] for top in entry.top] for entry in whole.logprobs)


class Star(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid")

    answer: Literal["The star is red.", "The star is yellow.", "The star is blue."]


@pytest.mark.slow
def test_a_pydantic_model_a_dict_and_the_apis_shape_are_the_same() -> None:
    picture = Path(hydra_engine.__file__).parent / "demo" / "pictures" / "stars.png"
    schema = Star.model_json_schema()
    forms: list[dict[str, Any]] = [
        {"response_format": Star},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "star", "schema": schema}}},
        {"grammar": Grammar("json_schema", schema)},
        {"grammar": Grammar("json_schema", Star)},
        {"sampling": SamplingParams(temperature=0, max_tokens=60), "response_format": Star},
    ]
    with Engine("demo", threads=1) as engine:
        for form in forms:
            greedy = {} if "sampling" in form else {"temperature": 0}
            result = engine.generate("What color is the star?", picture, **greedy, **form)
            assert Star.model_validate_json(result.text).answer == "The star is yellow."
        several = [Grammar("choice", ["yes", "no"]), Grammar("choice", '["yes", "no"]')]
        assert len({engine.generate("Yes?", temperature=0, grammar=one).text for one in several}) == 1
        free = engine.generate("What is two plus three?", temperature=0, response_format={"type": "text"})
        assert free.text == "Two plus three is five."
        # However it is asked, an object ends and has no more white space than one space at a time.
        for seed in range(3):
            parsed = engine.generate("Hello", seed=seed, max_tokens=100, response_format={"type": "json_object"})
            assert "  " not in re.sub('"[^"]*"', "", parsed.text) and "\n" not in re.sub('"[^"]*"', "", parsed.text)


@pytest.mark.quick("asked0", "asked4")
@pytest.mark.parametrize(
    ("asked", "param"),
    [
        ({"response_format": Star, "grammar": Grammar("regex", "a")}, "response_format"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema.schema"),
        ({"response_format": {"type": "jsn"}}, "response_format"),
        ({"response_format": "json"}, "response_format"),
        ({"response_format": int}, "response_format"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"a": object()}}}},
         "response_format.json_schema.schema"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)  # fmt: skip
def test_a_wrong_response_format_is_named(engine: Engine, asked: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        engine.generate("abc", **asked)
    assert caught.value.param == param


@pytest.mark.parametrize(
    ("kind", "source", "words"),
    [
        ("regex", 5, "must be text"),
        ("json_schema", [1], "a dict, JSON text or a pydantic model"),
        ("json_schema", int, "a dict, JSON text or a pydantic model"),
        ("choice", {"a": 1}, "a list of texts"),
        ("json_schema", {"a": {1, 2}}, "plain JSON"),
    ],
)
def test_a_grammar_is_made_of_the_right_things(kind: str, source: Any, words: str) -> None:
    with pytest.raises(InvalidRequest, match=words) as caught:
        Grammar(kind, source, "guided")
    assert caught.value.param == "guided"


def test_a_complete_text_ends_whatever_else_is_asked(engine: Engine) -> None:
    for more in ({"ignore_eos": True}, {"min_tokens": 30}, {"allowed_token_ids": tuple(range(3, 250))}):
        result = engine.generate("abc", sampling=sampling_of(0, "choice", **more, skip_special_tokens=False))
        assert (result.finish_reason, result.stop_reason) == (FinishReason.STOP, None)
        assert result.text in CHOICES
    # Of what could end and could go on, these go on.
    open_end = Grammar("regex", "a{2,40}")
    result = engine.generate("abc", temperature=0, max_tokens=60, ignore_eos=True, grammar=open_end)
    assert result.text == "a" * 40
    short = engine.generate("abc", temperature=0, max_tokens=2, grammar=Grammar("regex", "(abc ){30}"))
    assert short.finish_reason == FinishReason.LENGTH


def test_a_grammar_that_other_parameters_leave_nothing_of_fails_alone(engine: Engine) -> None:
    other = engine.submit("abc", sampling=sampling_of(0, "regex"))
    with pytest.raises(InvalidRequest, match="allowed_token_ids leaves no token") as caught:
        engine.generate("abc", grammar=Grammar("regex", "[0-9]+"), allowed_token_ids=[5])
    assert caught.value.param == "allowed_token_ids"
    assert fits("regex", other.result(60).text)


def test_refusals_name_the_field(engine: Engine) -> None:
    for name, value in (("logit_bias", {1 << 20: 1.0}), ("allowed_token_ids", [1 << 20])):
        with pytest.raises(InvalidRequest, match="token ids go from 0 to") as caught:
            engine.generate("abc", **{name: value})
        assert caught.value.param == name
    with pytest.raises(InvalidRequest, match="the grammar cannot be used: unclosed character class") as caught:
        engine.generate("abc", grammar=Grammar("regex", "[", "guided_regex"))
    assert caught.value.param == "guided_regex"


def test_bias_and_allowed_tokens(engine: Engine) -> None:
    assert set(engine.generate("abc", temperature=0, max_tokens=6, logit_bias={77: 100}).token_ids) == {77}
    drawn = engine.generate("abc", seed=1, max_tokens=40, allowed_token_ids=[50, 60, 70]).token_ids
    assert set(drawn) == {50, 60, 70}
