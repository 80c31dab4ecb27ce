"""How many log probabilities one answer may hold: bounded before the request runs.

Does not know how they are kept or written.
"""

from __future__ import annotations

from dataclasses import replace

from aiohttp import web

from hydra_engine.core.request import SamplingParams
from hydra_engine.errors import InvalidRequest
from hydra_engine.server.context import CONFIG, ENGINE
from hydra_engine.server.protocol.fields import GenerationFields


def num_entries(body: GenerationFields, sampling: SamplingParams, num_prompt: int = 0) -> int:
    """At most so many, of tokens and of candidates beside them: answers (of all prompts) x tokens x (1 + candidates),
    and `num_prompt` tokens of all prompts in each place that repeats them. Without `max_tokens` of no answer."""
    count = 0
    if sampling.logprobs is not None:
        count += body.num_choices * (sampling.max_tokens or 0) * (1 + sampling.logprobs)
    if sampling.prompt_logprobs is not None:
        count += body.num_prompt_copies * num_prompt * (1 + sampling.prompt_logprobs)
    return count


def bounded(request: web.Request, body: GenerationFields, sampling: SamplingParams) -> SamplingParams:
    """The same, with an end where the request names none and could go on for too long. Raises InvalidRequest."""
    most = request.app[CONFIG].max_logprob_entries
    if sampling.logprobs is not None and sampling.max_tokens is None:
        room, engine = most // (body.num_choices * (1 + sampling.logprobs)), request.app[ENGINE]
        if room < min(engine.max_model_len, engine.default_sampling_params.max_tokens or engine.max_model_len):
            sampling = replace(sampling, max_tokens=max(room, sampling.min_tokens, 1))
    check(request, body, sampling)
    return sampling


def check(request: web.Request, body: GenerationFields, sampling: SamplingParams, num_prompt: int = 0) -> None:
    """Raises InvalidRequest for too many. `num_prompt`: once it is known."""
    count, most = num_entries(body, sampling, num_prompt), request.app[CONFIG].max_logprob_entries
    if count > most:
        fields = body.logprob_fields
        raise InvalidRequest(
            f"this request asks for up to {count} log probabilities (answers x tokens x (1 + candidates), and those of "
            f"the prompt); at most {most} are given in one answer: lower {', '.join(fields[:-1])} or {fields[-1]}",
            param=fields[-1],
        )
