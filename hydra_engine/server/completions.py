"""POST /v1/completions, the legacy form: text or token ids as they are, no chat template. Does not know how events are
written.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from aiohttp import web
from msgspec import UNSET, UnsetType

from hydra_engine.core.outputs import Piece, Result, TextLogprob
from hydra_engine.server.body import read_request
from hydra_engine.server.context import LIFECYCLE, loaded_engine
from hydra_engine.server.generate import Identity, UsageMeter, identify, respond
from hydra_engine.server.protocol.common import FINGERPRINT, Metrics, Usage, metrics_of, usage_of
from hydra_engine.server.protocol.completions import (
    CompletionRequest,
    TextChoice,
    TextCompletion,
    TextLogprobs,
    text_logprobs,
)
from hydra_engine.server.sse import DONE, event


async def completions(request: web.Request) -> web.StreamResponse:
    engine = loaded_engine(request)
    request.app[LIFECYCLE].check()
    asked = await read_request(request, CompletionRequest)
    identity = identify(request, asked, "cmpl")
    sampling = asked.sampling()
    prompt = asked.one_prompt()
    return await respond(
        request,
        lambda: engine.asubmit(
            prompt,
            sampling=sampling,
            request_id=identity.id,
            raw=True,
            slo=asked.slo,
            cache_salt=asked.cache_salt or "",
            priority=asked.priority or 0,
        ),
        CompletionAnswer(asked, identity),
        asked,
    )


class CompletionAnswer:
    def __init__(self, asked: CompletionRequest, identity: Identity) -> None:
        self._asked = asked
        self._identity = identity
        self._offset = 0  # characters of the tokens whose log probabilities were sent
        self.meter = UsageMeter(asked)

    def whole(self, result: Result) -> TextCompletion:
        choice = TextChoice(
            0,
            result.text,
            text_logprobs(result.logprobs, 0) if result.logprobs is not None else None,
            result.finish_reason.value,
            result.stop_reason,
        )
        metrics = metrics_of(result) if self._asked.return_metrics else UNSET
        return self._completion([choice], usage_of(result.usage), metrics)

    @property
    def last(self) -> bytes:
        return DONE

    def events(self, piece: Piece) -> bytes:
        return b"".join(event(msgspec.json.encode(chunk)) for chunk in self._chunks(piece))

    def _chunks(self, piece: Piece) -> Sequence[msgspec.Struct]:
        self.meter.add(piece)
        chunks = []
        if piece.text or piece.logprobs:
            chunks.append(self._chunk(TextChoice(0, piece.text, self._logprobs(piece.logprobs))))
        if (result := piece.result) is not None:
            closing = TextChoice(0, "", None, result.finish_reason.value, result.stop_reason)
            metrics = metrics_of(result, streamed=True) if self._asked.return_metrics else UNSET
            chunks.append(self._chunk(closing, metrics))
            if self.meter.wanted:
                chunks.append(self._completion([], usage_of(result.usage)))
        return chunks

    def _logprobs(self, entries: Sequence[TextLogprob]) -> TextLogprobs | None:
        if not entries:
            return None
        logprobs = text_logprobs(entries, self._offset)
        self._offset += sum(len(entry.token) for entry in entries)
        return logprobs

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
