"""Common parts of the checks of all clients: the server, questions for it, and the outcome of each check.

Needs only the standard library, for a client's environment has that client in it and not the engine.
"""

from __future__ import annotations

import asyncio
import base64
import inspect
import json
import re
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

QUESTION = "What is two plus three?"
ANSWER = "Two plus three is five."
PICTURE_QUESTION = "How many red objects are there?"
PICTURE_ANSWER = "There are two red objects."
PICTURE = Path(__file__).parents[3] / "hydra_engine" / "demo" / "pictures" / "diamonds.png"

WEATHER_SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Oslo"]}, "days": {"type": "integer", "minimum": 1, "maximum": 3}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {"name": "weather", "description": "Tells the weather.", "parameters": WEATHER_SCHEMA},
}

# A check returns a short note on what it saw, or nothing; what it raises is its failure.
Check = Callable[[], Any]


class Skip(Exception):
    """Raised where the server, or this version of the client, cannot do what a check is about; the message says why."""


@dataclass(frozen=True)
class Target:
    """A running server. Without keys there `api_key` is any text."""

    base_url: str  # without /v1
    api_key: str
    model: str
    asks_for_keys: bool

    @property
    def v1(self) -> str:
        return self.base_url + "/v1"

    @cached_property
    def picture_url(self) -> str:
        return f"data:image/png;base64,{self.picture_base64}"

    @cached_property
    def picture_base64(self) -> str:
        return base64.b64encode(PICTURE.read_bytes()).decode()

    def is_answer(self, text: str | None, expected: str = ANSWER) -> str:
        """Checks what the demo model says to the letter, of other models only that they say something."""
        assert text and text.strip(), f"the answer is {text!r}"
        if self.model == "demo":
            assert text.strip() == expected, f"{text!r} instead of {expected!r}"
        return text

    def is_picture_answer(self, text: str | None) -> str:
        return self.is_answer(text, PICTURE_ANSWER)

    def need_keys(self) -> None:
        if not self.asks_for_keys:
            raise Skip("the server asks for no key")

    def get(self, path: str) -> Any:
        request = urllib.request.Request(self.base_url + path, headers={"Authorization": f"Bearer {self.api_key}"})
        with urllib.request.urlopen(request, timeout=30) as response:
            return json.loads(response.read())


class Outcome(NamedTuple):
    check: str
    result: str  # ok, skipped or FAILED
    note: str


def is_weather(arguments: str | dict[str, Any]) -> str:
    """Checks arguments of a call of `WEATHER`, or an answer of its schema."""
    value = json.loads(arguments) if isinstance(arguments, str) else arguments
    assert set(value) == {"city", "days"} and value["city"] in ("Rome", "Oslo") and 1 <= value["days"] <= 3, value
    return json.dumps(value)


@contextmanager
def raises(*kinds: type[BaseException], match: str = "") -> Iterator[list[BaseException]]:
    """The list has the exception afterwards."""
    caught: list[BaseException] = []
    try:
        yield caught
    except kinds as error:
        assert re.search(match, str(error)), f"{match!r} is not in {str(error)[:300]!r}"
        caught.append(error)
    else:
        raise AssertionError(f"no {' or '.join(kind.__name__ for kind in kinds)}")


def run(name: str, check: Check) -> Outcome:
    try:
        note = check()
        if inspect.iscoroutine(note):
            note = asyncio.run(note)
    except Skip as reason:
        return Outcome(name, "skipped", str(reason))
    except Exception as error:  # noqa: BLE001 - whatever a client raises is what is looked for
        return Outcome(name, "FAILED", f"{type(error).__name__}: {' '.join(str(error).split())[:400]}")
    return Outcome(name, "ok", str(note or ""))
