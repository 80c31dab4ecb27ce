"""Tools, several answers and options of the prompt over HTTP, also through the official client."""

from __future__ import annotations

import json
import re
from typing import Any

import openai
import pytest

from hydra_engine.core.call import ImagePart
from hydra_engine.core.logprobs import TextLogprob
from hydra_engine.core.prompting import PixelBudget, TemplateOptions
from hydra_engine.server.tools.tool_calls import ToolUse
from tests.calls import plain
from tests.server.conftest import Serve, Served, chat_body
from tests.server.stub import top_logprob
from tests.server.test_chat import client_of
from tests.server.test_tool_parsers import CLOCK, PARAMETERS, PARIS, TOOLS, tool


def cut(text: str, size: int = 5) -> list[str]:
    return [text[begin : begin + size] for begin in range(0, len(text), size)]


async def whole(served: Served, **fields: Any) -> Any:
    async with served.chat(**({"tools": TOOLS} | fields)) as response:
        body = await response.json()
        assert response.status == 200, body
    return body["choices"][0]


async def test_calls_in_a_whole_answer(served: Served) -> None:
    served.engine.pieces = cut(f"Wait.\n{PARIS}")
    choice = await whole(served)
    (call,) = choice["message"].pop("tool_calls")
    assert re.fullmatch(r"call_\w{24}", call.pop("id"))
    assert call == {"type": "function", "function": {"name": "weather", "arguments": '{"city": "Paris"}'}}
    assert choice["message"] == {"content": "Wait.\n", "role": "assistant", "refusal": None}
    assert choice["finish_reason"] == "tool_calls"
    (submission,) = served.engine.submissions
    assert submission.template.tools == tuple(TOOLS) and submission.sampling.grammar is None
    assert submission.sampling.skip_special_tokens is False  # the marks may be special tokens
    served.engine.pieces = cut(PARIS)
    assert (await whole(served))["message"]["content"] is None
    served.engine.pieces = None
    choice = await whole(served)
    assert (choice["finish_reason"], choice["message"]["content"]) == ("stop", "one two three")
    assert "tool_calls" not in choice["message"]
    served.engine.pieces = cut(PARIS)
    assert (await whole(served, max_tokens=len(cut(PARIS)) - 4))["finish_reason"] == "length"


async def test_tool_choice_none_offers_none(served: Served) -> None:
    served.engine.pieces = cut(PARIS)
    choice = await whole(served, tool_choice="none")
    assert (choice["message"]["content"], choice["finish_reason"]) == (PARIS, "stop")
    assert served.engine.submissions[0].template.tools == ()


async def test_a_call_that_must_come(served: Served) -> None:
    served.engine.pieces = cut(
        '[{"name": "clock", "parameters": {}}, {"name": "weather", "parameters": {"city": "P"}}]'
    )
    choice = await whole(served, tool_choice="required")
    calls = [(c["function"]["name"], c["function"]["arguments"]) for c in choice["message"]["tool_calls"]]
    assert calls == [("clock", "{}"), ("weather", '{"city": "P"}')]
    assert (choice["finish_reason"], choice["message"]["content"]) == ("tool_calls", None)
    grammar = served.engine.submissions[0].sampling.grammar
    assert grammar is not None and grammar == ToolUse(tuple(TOOLS), "required").grammar()
    served.engine.pieces = cut('{"city": "Rome"}')
    choice = await whole(served, tool_choice=tool("weather"))
    assert [c["function"] for c in choice["message"]["tool_calls"]] == [
        {"name": "weather", "arguments": '{"city": "Rome"}'}
    ]
    assert choice["finish_reason"] == "stop"  # as OpenAI's for a named function
    grammar = served.engine.submissions[1].sampling.grammar
    assert grammar is not None and json.loads(grammar.source) == PARAMETERS | {"additionalProperties": False}


async def test_templates_that_know_no_tools_cannot_offer_them(serve: Serve) -> None:
    served = await serve()
    served.engine.chat_template = "{{ messages }}"
    async with served.chat(tools=TOOLS) as response:
        error = (await response.json())["error"]
    assert (response.status, error["param"], error["code"]) == (400, "tools", "unsupported_parameter")
    for choice in ("none", "required"):
        await whole(served, tool_choice=choice)
    served = await serve(tool_parser="none")
    served.engine.chat_template, served.engine.answer = "{{ messages }}", PARIS
    assert "<tool_call>" in (await whole(served))["message"]["content"]
    served = await serve(tool_parser="json")
    served.engine.pieces = cut('{"name": "clock", "parameters": {}}')
    assert (await whole(served))["finish_reason"] == "tool_calls"


async def test_a_template_of_its_own_for_tools_says_how_they_are_called(served: Served) -> None:
    served.engine.chat_template, served.engine.own_tool_template = "{{ messages }}", "{{ tools }} <tool_call></think>"
    served.engine.pieces = cut(f"<think>Hm.</think>{PARIS}")
    choice = await whole(served)
    assert (choice["message"]["reasoning"], choice["finish_reason"]) == ("Hm.", "tool_calls")
    assert "reasoning" not in (await whole(served, tools=[]))["message"]


async def test_the_official_client_reads_streamed_calls(served: Served) -> None:
    async with client_of(served) as client:
        for size in (1, 3, 7, 1000):
            served.engine.pieces = cut(f"Wait.\n{PARIS}\n{CLOCK}", size)
            async with client.chat.completions.stream(
                model="stub", messages=[{"role": "user", "content": "x"}], tools=TOOLS, n=2, logprobs=True
            ) as stream:
                events = [event async for event in stream]
                completion = await stream.get_final_completion()
            for choice in completion.choices:
                assert (choice.finish_reason, choice.message.content) == ("tool_calls", "Wait.\n")
                calls = choice.message.tool_calls or []
                assert [call.function.name for call in calls] == ["weather", "clock"]
                assert [json.loads(call.function.arguments) for call in calls] == [{"city": "Paris"}, {}]
                assert len({call.id for call in calls}) == 2
                assert choice.logprobs is not None and choice.logprobs.content is not None
                assert len(choice.logprobs.content) == len(served.engine.pieces)
            assert sum(event.type == "tool_calls.function.arguments.done" for event in events) == 4


async def test_stream_deltas_are_openai_s(served: Served) -> None:
    served.engine.pieces = ["<tool_call>", '{"name": "clock",', ' "arguments": {"a"', ": 1}}</tool_call>"]
    deltas = []
    async with served.chat(tools=TOOLS, stream=True) as response:
        async for line in response.content:
            if line.startswith(b"data: {"):
                deltas.append(json.loads(line[6:])["choices"][0])
    assert deltas[0]["delta"] == {"role": "assistant", "content": ""}
    first, second, third, last = (choice["delta"].get("tool_calls") for choice in deltas[1:])
    assert re.fullmatch(r"call_\w{24}", first[0].pop("id"))
    assert first == [{"index": 0, "function": {"arguments": "", "name": "clock"}, "type": "function"}]
    assert second == [{"index": 0, "function": {"arguments": '{"a"'}}]
    assert third == [{"index": 0, "function": {"arguments": ": 1}"}}]
    assert last is None and deltas[-1]["finish_reason"] == "tool_calls"


async def test_a_history_of_calls_reaches_the_engine(served: Served) -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "clock", "arguments": '{"a": 1}'}}
    body = chat_body(tools=TOOLS, chat_template_kwargs={"enable_thinking": False})
    body["messages"] += [
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "12:00"},
    ]
    async with served.post("/v1/chat/completions", body) as response:
        assert response.status == 200
    (submission,) = served.engine.submissions
    call["function"] = {"name": "clock", "arguments": {"a": 1}}
    assert plain(submission.messages[1:]) == [
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "12:00", "tool_call_id": "call_1"},
    ]
    assert submission.template == TemplateOptions(tuple(TOOLS), {"enable_thinking": False})


async def test_tokenize_takes_what_the_template_takes(served: Served) -> None:
    body = {"messages": chat_body()["messages"], "tools": TOOLS, "chat_template_kwargs": {"a": 1}}
    for more, begins, goes_on in (
        ({}, True, False),
        ({"add_generation_prompt": False}, False, False),
        ({"continue_final_message": True}, False, True),
    ):
        async with served.post("/tokenize", body | more) as response:
            assert response.status == 200
        assert served.engine.tokenized[-1].template == TemplateOptions(tuple(TOOLS), {"a": 1}, begins, goes_on)
    both = {"add_generation_prompt": True, "continue_final_message": True}
    for path in ("/tokenize", "/v1/chat/completions"):
        async with served.post(path, {"messages": body["messages"], **both}) as response:
            assert (response.status, (await response.json())["error"]["param"]) == (400, "continue_final_message")


async def test_pixels_and_detail_reach_the_engine(served: Served) -> None:
    body = chat_body(mm_processor_kwargs={"min_pixels": 100, "max_pixels": 5000})
    body["messages"][0]["content"] = [{"type": "image_url", "image_url": {"url": "data:,x", "detail": "low"}}]
    async with served.post("/v1/chat/completions", body) as response:
        assert response.status == 200
    asked = {name: body[name] for name in ("messages", "mm_processor_kwargs")}
    async with served.post("/tokenize", asked) as response:
        assert response.status == 200
    for call in (*served.engine.submissions, *served.engine.tokenized):
        assert call.pixels == PixelBudget(100, 5000)
        assert call.messages[0].content == (ImagePart("data:,x", "messages[0].content[0].image_url.url", "low"),)
    assert (len(served.engine.submissions), len(served.engine.tokenized)) == (1, 1)


# ---- several answers, and the prompt's own log probabilities


async def test_several_answers(served: Served) -> None:
    async with served.chat("a b", n=3, logprobs=True) as response:
        body = await response.json()
    assert [(choice["index"], choice["message"]["content"]) for choice in body["choices"]] == [
        *((0, "a b"), (1, "b a"), (2, "a b"))
    ]
    assert body["usage"]["completion_tokens"] == 6
    assert served.engine.submissions[0].sampling.n == 3


async def test_several_streamed_answers(served: Served) -> None:
    chunks = []
    options = {"stream_options": {"include_usage": True}, "return_metrics": True}
    async with served.chat("a b", n=3, stream=True, **options) as response:
        async for line in response.content:
            if line.startswith(b"data: {"):
                chunks.append(json.loads(line[6:]))
    for index in range(3):
        own = [c["choices"][0] for c in chunks if c["choices"] and c["choices"][0]["index"] == index]
        assert own[0]["delta"] == {"role": "assistant", "content": ""}
        assert [choice["delta"].get("content") for choice in own] == [
            "",
            *(["a", " b"] if index != 1 else ["b", " a"]),
            None,
        ]
        assert [choice["finish_reason"] for choice in own] == [None, None, None, "stop"]
    assert [c["usage"] and c["usage"]["completion_tokens"] for c in chunks] == [None] * (len(chunks) - 1) + [6]
    assert ["metrics" in c for c in chunks] == [False] * (len(chunks) - 2) + [True, False]


async def test_log_probabilities_of_the_prompt_are_vllm_s(served: Served) -> None:
    best = (top_logprob(7, "he", -0.5), top_logprob(9, "it", -1.5))
    served.engine.prompt_logprobs = (
        None,
        TextLogprob(9, "it", -1.5, 2, best, b"it"),
        TextLogprob(5, "xy", float("-inf"), 600, best, b"xy"),
    )
    async with served.chat(prompt_logprobs=2) as response:
        body = await response.json()
    one, two = (
        {"logprob": logprob, "rank": rank, "decoded_token": text} for rank, (_, text, logprob, _) in enumerate(best, 1)
    )
    own = {"logprob": -9999.0, "rank": 600, "decoded_token": "xy"}
    assert body["prompt_logprobs"] == [None, {"9": two, "7": one}, {"5": own, "7": one, "9": two}]
    async with served.chat(prompt_logprobs=2, stream=True) as response:
        assert (response.status, (await response.json())["error"]["param"]) == (400, "prompt_logprobs")
    async with client_of(served) as client:
        with pytest.raises(openai.BadRequestError) as caught:
            await client.chat.completions.create(model="stub", messages=[], tools=TOOLS)
        assert caught.value.param == "messages"


async def test_special_tokens_around_a_prompt_are_by_choice(served: Served) -> None:
    """The default is not to say: the engine follows the model's processor."""
    asked = {"/v1/chat/completions": chat_body(), "/v1/completions": {"prompt": "x"}, "/tokenize": {"prompt": "x"}}
    for path, body in asked.items():
        for choice in (None, True, False):
            more = {} if choice is None else {"add_special_tokens": choice}
            async with served.post(path, body | more) as response:
                assert response.status == 200
            engine = served.engine
            template = (engine.tokenized if path == "/tokenize" else engine.submissions)[-1].template
            assert (template or TemplateOptions()).add_special_tokens is choice
