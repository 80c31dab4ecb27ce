"""POST /v1/completions, the legacy form: texts or token ids without a chat template. Does not know how events are
written."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import msgspec
from aiohttp import web
from msgspec import UNSET, UnsetType

from hydra_engine.core import outputs
from hydra_engine.core.call import GenerationCall
from hydra_engine.core.logprobs import TextLogprob
from hydra_engine.core.outputs import Piece, Result
from hydra_engine.core.prompting import TemplateOptions
from hydra_engine.errors import InvalidRequest
from hydra_engine.server.generate import ChunkAnswer, Identity, build_call, read_generation, respond
from hydra_engine.server.openai.several import usage_of_all
from hydra_engine.server.port import EnginePort
from hydra_engine.server.protocol.common import (
    Metrics,
    Usage,
    prompt_logprobs,
    usage_of,
)
from hydra_engine.server.protocol.completions import (
    CompletionRequest,
    Entries,
    TextChoice,
    TextCompletion,
    TextLogprobs,
    TextOffset,
    text_logprobs,
)

Prompt = str | list[int]


class Echo(NamedTuple):
    """A prompt as its answers repeat it, and the text of its first token."""

    text: str = ""
    first_token: str = ""


async def completions(request: web.Request) -> web.StreamResponse:
    engine, body, identity = await read_generation(request, CompletionRequest, "cmpl-")
    sampling = body.sampling(engine.default_sampling_params)
    prompts, echoes = body.prompts(), [Echo()]
    template = TemplateOptions(add_special_tokens=body.add_special_tokens)
    call = replace(build_call(request, body, sampling), raw=True, template=template)
    if body.echo:
        prompts, echoes = await _read_back(engine, prompts, body, call)
    ids = [identity.id] if len(prompts) == 1 else [f"{identity.id}-{place}" for place in range(len(prompts))]
    calls = [replace(call, prompt=prompt, request_id=id) for prompt, id in zip(prompts, ids, strict=True)]
    return await respond(request, calls, CompletionAnswer(body, identity, echoes), body)


async def _read_back(
    engine: EnginePort, prompts: Sequence[Prompt], body: CompletionRequest, call: GenerationCall
) -> tuple[list[Prompt], list[Echo]]:
    """The prompts, as token ids if log probabilities are requested, and their echoes for the answers."""
    pairs = []
    try:
        for prompt in prompts:
            pairs.append(await _echo(engine, prompt, body, call))
            await asyncio.sleep(0)  # other tasks run between two prompts
    except InvalidRequest as error:
        error.param = "prompt"
        raise
    return [prompt for prompt, _ in pairs], [echo for _, echo in pairs]


async def _echo(
    engine: EnginePort, prompt: Prompt, body: CompletionRequest, call: GenerationCall
) -> tuple[Prompt, Echo]:
    if isinstance(prompt, str):
        if body.logprobs is None:
            return prompt, Echo(prompt)
        text, prompt = prompt, await engine.tokenize_call(replace(call, prompt=prompt))
    elif len(prompt) > engine.max_model_len:
        return prompt, Echo()  # `add_request` refuses it
    else:
        text = await engine.adetokenize(prompt, call.client)
    return prompt, Echo(text, await engine.adetokenize(prompt[:1], call.client))


class CompletionAnswer(ChunkAnswer):
    """An answer of /v1/completions. `echoes` has one entry per prompt if prompts are repeated, else none."""

    def __init__(self, body: CompletionRequest, identity: Identity, echoes: Sequence[Echo]) -> None:
        super().__init__(body, identity, self._text_chunk)
        self._body = body
        self._echoes = echoes
        self._offsets: dict[int, TextOffset] = {}  # offset after the tokens sent, per choice
        self._results: dict[int, Result] = {}
        self._is_plain = not (body.is_prompt_only or body.return_token_ids)

    # ---- whole

    def full_answer(self, result: Result) -> TextCompletion:
        choices = [self._whole_choice(index, answer) for index, answer in enumerate(result.choices or (result,))]
        return self._completion(choices, self._usage(result.usage), self._metrics(result))

    def _whole_choice(self, index: int, result: Result) -> TextChoice:
        body = self._body
        text, token_ids, parts = result.text, result.token_ids, [self._answer_entries(index, result.logprobs)]
        if body.is_prompt_only:
            text, token_ids, parts = "", (), []
        if body.echo:
            text = self._echo(index).text + text
            parts.insert(0, self._prompt_entries(index, result.prompt_logprobs, result.prompt_token_ids))
        reason, stop_reason = self._end(result)
        return TextChoice(
            index,
            text,
            self._logprobs(*parts),
            reason,
            stop_reason,
            token_ids=token_ids if body.return_token_ids else UNSET,
            prompt_logprobs=prompt_logprobs(result.prompt_logprobs, body.prompt_logprobs, self.slices),
            prompt_token_ids=result.prompt_token_ids if body.return_token_ids else UNSET,
        )

    # ---- a stream

    def text_event(self, piece: Piece) -> bytes | None:
        if not self._is_plain or piece.logprobs or piece.prompt_token_ids:
            return None
        self._num_tokens += len(piece.token_ids)
        return self._texts.event(piece.index, piece.text, self._usage_now()) if piece.text else b""

    def _chunks(self, piece: Piece) -> Sequence[msgspec.Struct]:
        body, chunks = self._body, []
        if piece.prompt_token_ids and (body.echo or body.return_token_ids or body.prompt_logprobs is not None):
            chunks.append(self._chunk(self._prompt_choice(piece)))
        if not body.is_prompt_only:
            self._num_tokens += len(piece.token_ids)
            if piece.text or piece.logprobs or (body.return_token_ids and piece.token_ids):
                chunks.append(self._chunk(self._text_choice(piece)))
        if (result := piece.result) is not None:
            metrics = self._metrics(result, streamed=True)
            reason, stop_reason = self._end(result)
            chunks.append(self._chunk(TextChoice(piece.index, "", None, reason, stop_reason), metrics))
            self._results[piece.index] = result
            if self._includes_usage and len(self._results) == body.num_choices:
                results = [self._results[index] for index in range(body.num_choices)]
                chunks.append(self._completion([], self._usage(usage_of_all(results, body.num_each))))
        return chunks

    def _prompt_choice(self, piece: Piece) -> TextChoice:
        """The choice that precedes the answer: the echoed prompt with its log probabilities and ids."""
        body, index = self._body, piece.index
        entries = [self._prompt_entries(index, piece.prompt_logprobs, piece.prompt_token_ids)] if body.echo else []
        return TextChoice(
            index,
            self._echo(index).text if body.echo else "",
            self._logprobs(*entries) if entries else None,
            prompt_logprobs=prompt_logprobs(piece.prompt_logprobs, body.prompt_logprobs, self.slices),
            prompt_token_ids=piece.prompt_token_ids if body.return_token_ids else UNSET,
        )

    def _text_choice(self, piece: Piece) -> TextChoice:
        return TextChoice(
            piece.index,
            piece.text,
            self._logprobs(self._answer_entries(piece.index, piece.logprobs)) if piece.logprobs else None,
            token_ids=piece.token_ids if self._body.return_token_ids else UNSET,
        )

    # ---- both

    def _echo(self, index: int) -> Echo:
        return self._echoes[index // self._body.num_each]

    def _end(self, result: Result) -> tuple[str, str | int | None]:
        if self._body.is_prompt_only:
            return outputs.FinishReason.LENGTH.value, None
        return result.finish_reason.value, result.stop_reason

    def _usage(self, usage: outputs.Usage) -> Usage:
        return usage_of(usage, 0 if self._body.is_prompt_only else None)

    def _prompt_entries(
        self, index: int, entries: Sequence[TextLogprob | None] | None, prompt_token_ids: Sequence[int]
    ) -> Entries:
        echo = self._echo(index)
        first = (prompt_token_ids[0], echo.first_token, echo.first_token.encode()) if prompt_token_ids else (0, "", b"")
        return Entries(entries or (), TextOffset(beginning=echo.text), first)

    def _answer_entries(self, index: int, entries: Sequence[TextLogprob] | None) -> Entries:
        """The next log probabilities of a choice, with the offset of their text."""
        if index not in self._offsets:
            self._offsets[index] = TextOffset(len(self._echo(index).text) if self._body.echo else 0)
        return Entries(entries or (), self._offsets[index])

    def _logprobs(self, *parts: Entries) -> TextLogprobs | None:
        body = self._body
        if body.logprobs is None:
            return None
        as_ids = bool(body.return_tokens_as_token_ids)
        return text_logprobs(parts, self.slices, num_top=body.logprobs, as_ids=as_ids)

    def _text_chunk(self, index: int, text: str, usage: Usage | UnsetType | None) -> TextCompletion:
        return self._completion([TextChoice(index, text)], usage)

    def _chunk(self, choice: TextChoice, metrics: Metrics | UnsetType = UNSET) -> TextCompletion:
        return self._completion([choice], self._usage_now(), metrics)

    def _completion(
        self,
        choices: list[TextChoice],
        usage: Usage | UnsetType | None,
        metrics: Metrics | UnsetType = UNSET,
    ) -> TextCompletion:
        return TextCompletion(
            *self._identity.head("text_completion"),
            choices=choices,
            usage=usage,
            metrics=metrics,
        )
