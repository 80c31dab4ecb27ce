"""A server that answers: its address, its model, and which fields beyond OpenAI's it takes."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from dataclasses import dataclass, field

_DIALECTS = {"hydra-engine": "hydra", "vllm": "vllm", "transformers": "vllm"}  # by `owned_by` of the model


@dataclass(frozen=True, slots=True)
class Target:
    """A server that answers. `dialect`: hydra, vllm or openai, which fields beyond OpenAI's it takes."""

    name: str
    base_url: str
    model: str
    dialect: str
    headers: dict[str, str] = field(default_factory=dict)


class ServerFailed(RuntimeError):
    """Raised if a server did not start, with the end of its log, or is no OpenAI-compatible one."""


def identify(name: str, base_url: str, headers: dict[str, str]) -> Target:
    """Asks /v1/models which model is served and by whom. Raises ServerFailed."""
    base_url = (base_url if "://" in base_url else f"http://{base_url}").rstrip("/").removesuffix("/v1")
    try:
        request = urllib.request.Request(base_url + "/v1/models", headers=headers)
        with urllib.request.urlopen(request, timeout=30) as answer:
            model = json.load(answer)["data"][0]
        return Target(name, base_url, model["id"], _DIALECTS.get(model.get("owned_by"), "openai"), headers)
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise ServerFailed(f"{name}: {base_url}/v1/models does not answer as OpenAI's: {_reason(error)}") from error


def _reason(error: Exception) -> str:
    if isinstance(error, urllib.error.HTTPError):
        return f"HTTP {error.code}, {error.reason}"
    return str(getattr(error, "reason", error))
