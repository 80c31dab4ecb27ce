"""POST /v1/completions, the legacy form: texts or token ids as they are, no chat template. Does not know how events are
written.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import NamedTuple

import msgspec
from aiohttp import web
from msgspec import UNSET, UnsetType

from hydra_engine.core import outputs
from hydra_engine.core.outputs import Piece, Result, TextLogprob
from hydra_engine.core.request import SamplingParams
from hydra_engine.errors import InvalidRequest
from hydra_engine.server.body import read_request
from hydra_engine.server.chunks import TextEvents
from hydra_engine.server.context import LIFECYCLE, loaded_engine
from hydra_engine.server.generate import Identity, UsageMeter, identify, respond
from hydra_engine.server.isolation import cache_salt
from hydra_engine.server.port import EnginePort, Handle
from hydra_engine.server.protocol.common import (
    FINGERPRINT,
    Metrics,
    Usage,
    metrics_of,
    prompt_logprobs,
    usage_of,
)
from hydra_engine.server.protocol.completions import (
    CompletionRequest,
    TextChoice,
    TextCompletion,
    TextLogprobs,
    text_logprobs,
)
from hydra_engine.server.several import Several, usage_of_all
from hydra_engine.server.sse import DONE, json_events

Prompt = str | list[int]


class Echo(NamedTuple):
    """A prompt as its answers repeat it, and the text of its first token."""

    text: str = ""
    first_token: str = ""


async def completions(request: web.Request) -> web.StreamResponse:
    engine = loaded_engine(request)
    request.app[LIFECYCLE].check()
    asked = await read_request(request, CompletionRequest)
    identity = identify(request, asked, "cmpl")
    sampling = asked.sampling()
    prompts, echoes = asked.prompts(), [Echo()]
    if asked.echo:
        prompts, echoes = await _read_back(engine, prompts, by_token=asked.logprobs is not None)
    return await respond(
        request,
        lambda: _submit(request, engine, prompts, sampling, asked, identity),
        CompletionAnswer(asked, identity, echoes),
        asked,
    )


async def _submit(
    request: web.Request,
    engine: EnginePort,
    prompts: Sequence[Prompt],
    sampling: SamplingParams,
    asked: CompletionRequest,
    identity: Identity,
) -> Handle:
    """All prompts, or none if one is refused."""
    handles: list[Handle] = []
    with ExitStack() as admitted:
        for place, prompt in enumerate(prompts):
            handle = await engine.asubmit(
                prompt,
                sampling=sampling,
                request_id=identity.id if len(prompts) == 1 else f"{identity.id}-{place}",
                raw=True,
                slo=asked.slo,
                cache_salt=cache_salt(request, asked.cache_salt),
                priority=asked.priority or 0,
            )
            admitted.callback(handle.cancel)
            handles.append(handle)
        admitted.pop_all()
    return handles[0] if len(handles) == 1 else Several(identity.id, handles, asked.num_each)


async def _read_back(
    engine: EnginePort, prompts: Sequence[Prompt], *, by_token: bool
) -> tuple[list[Prompt], list[Echo]]:
    """The prompts, with `by_token` as token ids, and what of them goes into the answers."""
    try:
        known = [await _echo(engine, prompt, by_token) for prompt in prompts]
    except InvalidRequest as error:
        error.param = "prompt"
        raise
    return [prompt for prompt, _ in known], [echo for _, echo in known]


async def _echo(engine: EnginePort, prompt: Prompt, by_token: bool) -> tuple[Prompt, Echo]:
    if isinstance(prompt, str):
        if not by_token:
            return prompt, Echo(prompt)
        text, prompt = prompt, await engine.atokenize(prompt)
    elif len(prompt) > engine.max_model_len:
        return prompt, Echo()  # it is refused in a moment
    else:
        text = await engine.adetokenize(prompt)
    return prompt, Echo(text, await engine.adetokenize(prompt[:1]))


class CompletionAnswer:
    """`echoes` has an entry for each prompt where prompts are repeated."""

    def __init__(self, asked: CompletionRequest, identity: Identity, echoes: Sequence[Echo]) -> None:
        self._asked = asked
        self._identity = identity
        self._echoes = echoes
        self._offsets: dict[int, int] = {}  # of each choice: characters of the tokens whose log probabilities were sent
        self._results: dict[int, Result] = {}
        self._is_plain = not (asked.only_prompt or asked.return_token_ids)
        self._texts = TextEvents(self._text_chunk)
        self.meter = UsageMeter(asked)

    # ---- whole

    def whole(self, result: Result) -> TextCompletion:
        choices = [self._whole_choice(index, answer) for index, answer in enumerate(result.choices or (result,))]
        metrics = metrics_of(result) if self._asked.return_metrics else UNSET
        return self._completion(choices, self._usage(result.usage), metrics)

    def _whole_choice(self, index: int, result: Result) -> TextChoice:
        asked = self._asked
        text, token_ids, entries = result.text, result.token_ids, list[TextLogprob | None](result.logprobs or ())
        if asked.only_prompt:
            text, token_ids, entries = "", (), []
        if asked.echo:
            text = self._echo(index).text + text
            entries = [*(result.prompt_logprobs or ()), *entries]
        reason, stop_reason = self._end(result)
        return TextChoice(
            index,
            text,
            self._logprobs(index, entries, result.prompt_token_ids) if asked.logprobs is not None else None,
            reason,
            stop_reason,
            token_ids=token_ids if asked.return_token_ids else UNSET,
            prompt_logprobs=prompt_logprobs(result.prompt_logprobs, asked.prompt_logprobs),
            prompt_token_ids=result.prompt_token_ids if asked.return_token_ids else UNSET,
        )

    # ---- a stream

    @property
    def last(self) -> bytes:
        return DONE

    def events(self, piece: Piece) -> bytes:
        return json_events(self._chunks(piece))

    def text_event(self, piece: Piece) -> bytes | None:
        if not self._is_plain or piece.logprobs or piece.prompt_token_ids:
            return None
        self.meter.add(piece)
        return self._texts.event(piece.index, piece.text, self.meter.now()) if piece.text else b""

    def _chunks(self, piece: Piece) -> Sequence[msgspec.Struct]:
        asked, chunks = self._asked, []
        if piece.prompt_token_ids and (asked.echo or asked.return_token_ids or asked.prompt_logprobs is not None):
            chunks.append(self._chunk(self._prompt_choice(piece)))
        if not asked.only_prompt:
            self.meter.add(piece)
            if piece.text or piece.logprobs or (asked.return_token_ids and piece.token_ids):
                chunks.append(self._chunk(self._text_choice(piece)))
        if (result := piece.result) is not None:
            metrics = metrics_of(result, streamed=True) if asked.return_metrics else UNSET
            reason, stop_reason = self._end(result)
            chunks.append(self._chunk(TextChoice(piece.index, "", None, reason, stop_reason), metrics))
            self._results[piece.index] = result
            if self.meter.wanted and len(self._results) == asked.num_choices:
                results = [self._results[index] for index in range(asked.num_choices)]
                chunks.append(self._completion([], self._usage(usage_of_all(results, asked.num_each))))
        return chunks

    def _prompt_choice(self, piece: Piece) -> TextChoice:
        """What comes before the answer."""
        asked, logprobs = self._asked, None
        if asked.echo and asked.logprobs is not None:
            logprobs = self._logprobs(piece.index, piece.prompt_logprobs or (), piece.prompt_token_ids)
        return TextChoice(
            piece.index,
            self._echo(piece.index).text if asked.echo else "",
            logprobs,
            prompt_logprobs=prompt_logprobs(piece.prompt_logprobs, asked.prompt_logprobs),
            prompt_token_ids=piece.prompt_token_ids if asked.return_token_ids else UNSET,
        )

    def _text_choice(self, piece: Piece) -> TextChoice:
        return TextChoice(
            piece.index,
            piece.text,
            self._logprobs(piece.index, piece.logprobs) if piece.logprobs else None,
            token_ids=piece.token_ids if self._asked.return_token_ids else UNSET,
        )

    # ---- both

    def _echo(self, index: int) -> Echo:
        return self._echoes[index // self._asked.num_each]

    def _end(self, result: Result) -> tuple[str, str | int | None]:
        if self._asked.only_prompt:
            return outputs.FinishReason.LENGTH.value, None
        return result.finish_reason.value, result.stop_reason

    def _usage(self, usage: outputs.Usage) -> Usage:
        return usage_of(usage, 0 if self._asked.only_prompt else None)

    def _logprobs(
        self, index: int, entries: Sequence[TextLogprob | None], prompt_token_ids: Sequence[int] = ()
    ) -> TextLogprobs:
        """Of the next tokens of a choice. None, of a prompt's first one, comes with the prompt's ids."""
        offset = self._offsets.get(index, 0)
        first = (
            (prompt_token_ids[0], self._echo(index).first_token) if prompt_token_ids and self._asked.echo else (0, "")
        )
        told = text_logprobs(
            entries,
            offset,
            num_top=self._asked.logprobs or 0,
            as_ids=bool(self._asked.return_tokens_as_token_ids),
            first=first,
        )
        self._offsets[index] = offset + sum(len(first[1] if entry is None else entry.token) for entry in entries)
        return told

    def _text_chunk(self, index: int, text: str, usage: Usage | UnsetType | None) -> TextCompletion:
        return self._completion([TextChoice(index, text)], usage)

    def _chunk(self, choice: TextChoice, metrics: Metrics | UnsetType = UNSET) -> TextCompletion:
        return self._completion([choice], self.meter.now(), metrics)

    def _completion(
        self,
        choices: list[TextChoice],
        usage: Usage | UnsetType | None,
        metrics: Metrics | UnsetType = UNSET,
    ) -> TextCompletion:
        return TextCompletion(
            id=self._identity.id,
            object="text_completion",
            created=self._identity.created,
            model=self._identity.model,
            system_fingerprint=FINGERPRINT,
            choices=choices,
            usage=usage,
            metrics=metrics,
        )
