"""instructor: its modes over the openai package."""

from __future__ import annotations

from typing import Any, Literal

from tests.campaigns.clients.checks import QUESTION, Check, Target

PACKAGES = ("instructor", "openai")


def checks(target: Target) -> dict[str, Check]:
    import instructor
    import openai
    from pydantic import BaseModel

    asked: dict[str, Any] = {
        "model": target.model,
        "messages": [{"role": "user", "content": QUESTION}],
        "temperature": 0,
        "max_retries": 0,
    }

    class Weather(BaseModel, extra="forbid"):  # in JSON_SCHEMA it sends no `strict`, and a small model finds no end
        city: Literal["Rome", "Oslo"]
        days: Literal[1, 2, 3]

    def mode(name: str) -> Check:
        def check() -> str:
            plain = openai.OpenAI(base_url=target.v1, api_key=target.api_key, max_retries=0)
            client = instructor.from_openai(plain, mode=instructor.Mode[name])
            return repr(client.chat.completions.create(response_model=Weather, **asked))

        return check

    def partial() -> str:
        plain = openai.OpenAI(base_url=target.v1, api_key=target.api_key, max_retries=0)
        client = instructor.from_openai(plain, mode=instructor.Mode.JSON_SCHEMA)
        return repr(list(client.chat.completions.create_partial(response_model=Weather, **asked))[-1])

    return {name: mode(name) for name in ("TOOLS", "JSON_SCHEMA", "TOOLS_STRICT")} | {"partial": partial}
