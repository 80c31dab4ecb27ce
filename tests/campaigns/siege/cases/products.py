"""Fields at their limits, two at a time: what they ask for together is bounded before anything is made of it."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

from tests.campaigns.siege import oracles
from tests.campaigns.siege.clients import CHAT
from tests.campaigns.siege.oracles import Finding
from tests.campaigns.siege.stage import Case, Stage

COMPLETIONS = "/v1/completions"
_VOCABULARY = 641  # of the demo


def _words(count: int, chars: int) -> list[str]:
    return [f"{i:05d}".ljust(chars, "x") for i in range(count)]


def _tools(count: int) -> list[dict[str, Any]]:
    parameters = {
        "type": "object",
        "properties": {f"p{i}": {"type": "string", "enum": _words(8, 20)} for i in range(16)},
    }
    function = {"description": "d" * 500, "parameters": parameters}
    return [{"type": "function", "function": {"name": f"f{i}", **function}} for i in range(count)]


def _schemas_named_twice() -> dict[str, Any]:
    steps = {f"a{i}": {"anyOf": [{"$ref": f"#/$defs/a{i + 1}"}] * 2} for i in range(17)}
    schema = {"$ref": "#/$defs/a0", "$defs": {**steps, "a17": {"type": "object"}}}
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    return {"tools": [tool], "tool_choice": "auto"}


# Each at the largest value that is taken alone.
FIELDS: dict[str, Callable[[], dict[str, Any]]] = {
    "allowed ids": lambda: {"allowed_token_ids": [7 + i % (_VOCABULARY - 7) for i in range(65_536)]},
    "bias": lambda: {"logit_bias": {str(i): -1 for i in range(_VOCABULARY)}},
    "stops": lambda: {"stop": _words(16, 256)},
    "stop ids": lambda: {"stop_token_ids": [9] * 64},
    "log probabilities": lambda: {"logprobs": 20},
    "prompt log probabilities": lambda: {"prompt_logprobs": 20},
    "echo": lambda: {"echo": True},
    "prompts": lambda: {"prompt": ["x"] * 128},
    "long prompts": lambda: {"prompt": ["word " * 300] * 64},
    "answers": lambda: {"n": 4},
    "choices": lambda: {"guided_choice": _words(500, 100)},
}
CHAT_FIELDS: dict[str, Callable[[], dict[str, Any]]] = {
    "tools": lambda: {"tools": _tools(128), "tool_choice": "auto"},
    "messages": lambda: {"messages": [{"role": "user", "content": "x"}] * 900},
    "parts": lambda: {"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}] * 900}]},
    "variables": lambda: {"chat_template_kwargs": {f"v{i}": _words(10, 50) for i in range(60)}},
    "answers": lambda: {"n": 64},
    "allowed ids": FIELDS["allowed ids"],
}


async def _post(
    path: str, base: dict[str, Any], fields: list[Callable[[], dict[str, Any]]], stage: Stage
) -> list[Finding]:
    body = {"model": "demo", "max_tokens": 2, **base}
    for field in fields:
        body |= field()
    return oracles.theirs([await stage.alice.post(path, body)])


async def _refused(stage: Stage) -> list[Finding]:
    body = {"model": "demo", "prompt": ["x"] * 128, "n": 4, "guided_choice": ["a", "b"], "allowed_token_ids": [9]}
    return oracles.theirs([await stage.alice.post(COMPLETIONS, body) for _ in range(8)])


def _cases() -> list[Case]:
    made = []
    prompt, chat = {"prompt": "x"}, {"messages": [{"role": "user", "content": "x"}]}
    for path, base, fields in ((COMPLETIONS, prompt, FIELDS), (CHAT, chat, CHAT_FIELDS)):
        for names in itertools.combinations(fields, 2):
            name = f"{'chat: ' * (path == CHAT)}{' x '.join(names)}"
            made.append(Case("products", name, partial(_post, path, base, [fields[n] for n in names])))
    twice = partial(_post, CHAT, chat, [_schemas_named_twice])
    made.append(Case("products", "chat: schemas that are each named twice", twice))
    three = [FIELDS["prompts"], FIELDS["answers"], FIELDS["allowed ids"]]
    made.insert(0, Case("products", "prompts x answers x allowed ids", partial(_post, COMPLETIONS, prompt, three)))
    three = [FIELDS["prompts"], FIELDS["answers"], FIELDS["bias"]]
    made.insert(1, Case("products", "prompts x answers x bias", partial(_post, COMPLETIONS, prompt, three)))
    made.insert(2, Case("products", "prompts x answers, all refused", _refused))
    return made


CASES = _cases()
