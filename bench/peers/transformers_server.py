"""A peer as a server: transformers' own generate behind the OpenAI protocol, in batches of whatever waits, bf16, sdpa.

A stand-in, and named as one ("static batches"): the continuous batching of transformers 5.23 takes text-only models
(`transformers serve --continuous-batching` falls back to one request after the other for a model with pictures), so
its best way to serve pictures is to gather what waits, generate for all until the longest is done, and begin again.
`python -m bench.serve ... --command "transformers=python -m bench.peers.transformers_server --model DIR"`.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import io
import json
import queue
import sys
import threading
from dataclasses import dataclass, field
from typing import Any

import torch
from aiohttp import web
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoProcessor
from transformers.generation.stopping_criteria import StoppingCriteria, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer

_MAX_BODY_BYTES = 64 << 20


@dataclass(slots=True, eq=False)
class Job:
    """A request. `out` gets a text for every token, then None, or an exception."""

    messages: list[dict[str, Any]]
    images: list[Image.Image]
    max_tokens: int
    ignore_eos: bool
    loop: asyncio.AbstractEventLoop
    out: asyncio.Queue[str | Exception | None] = field(default_factory=asyncio.Queue)
    prompt_tokens: int = 0
    count: int = 0
    done: bool = False


class Rows(BaseStreamer, StoppingCriteria):
    """Hands each row's token to its job, and ends a row when its job has all it asked for. The batch goes on until
    every row has ended: that is what a static batch is."""

    def __init__(self, jobs: list[Job], tokenizer: Any) -> None:
        self._jobs = jobs
        self._tokenizer = tokenizer
        self._prompt_seen = False

    def put(self, value: torch.Tensor) -> None:
        if not self._prompt_seen:
            self._prompt_seen = True
            return
        for job, token_id in zip(self._jobs, value.reshape(-1).tolist(), strict=True):
            if not job.done:
                job.count += 1
                ended = token_id == self._tokenizer.eos_token_id and not job.ignore_eos
                job.done = ended or job.count >= job.max_tokens
                text = "" if ended else self._tokenizer.decode([token_id])
                _tell(job, text, *((None,) if job.done else ()))

    def end(self) -> None:
        """Called when the batch is over; every job has its answer."""

    def __call__(self, input_ids: torch.Tensor, scores: Any, **options: Any) -> torch.Tensor:
        return torch.tensor([job.done for job in self._jobs], device=input_ids.device)


class Generator(threading.Thread):
    """Owns the model. Takes what waits, up to `max_batch` jobs, generates for them, and begins again."""

    def __init__(self, model_path: str, max_batch: int) -> None:
        super().__init__(daemon=True)
        self.waiting: queue.Queue[Job] = queue.Queue()
        self._max_batch = max_batch
        self._processor = AutoProcessor.from_pretrained(model_path)
        self._processor.tokenizer.padding_side = "left"
        if self._processor.tokenizer.pad_token_id is None:
            self._processor.tokenizer.pad_token = self._processor.tokenizer.eos_token
        self._model = AutoModelForImageTextToText.from_pretrained(model_path, dtype=torch.bfloat16).eval()

    def run(self) -> None:
        while True:
            jobs = [self.waiting.get()]
            while len(jobs) < self._max_batch and not self.waiting.empty():
                jobs.append(self.waiting.get())
            try:
                self._generate(jobs)
            except (ValueError, RuntimeError, LookupError, TypeError) as error:
                for job in jobs:
                    job.done = True
                    _tell(job, error)

    @torch.inference_mode()
    def _generate(self, jobs: list[Job]) -> None:
        texts = [self._processor.apply_chat_template(job.messages, add_generation_prompt=True) for job in jobs]
        images = [image for job in jobs for image in job.images]
        inputs = self._processor(images=images or None, text=texts, return_tensors="pt", padding=True)
        for job, mask in zip(jobs, inputs["attention_mask"], strict=True):
            job.prompt_tokens = int(mask.sum())
        if "pixel_values" in inputs:
            inputs["pixel_values"] = inputs["pixel_values"].to(self._model.dtype)
        rows = Rows(jobs, self._processor.tokenizer)
        longest = max(job.max_tokens for job in jobs)
        self._model.generate(
            **inputs,
            do_sample=False,
            max_new_tokens=longest,
            eos_token_id=None,
            streamer=rows,
            stopping_criteria=StoppingCriteriaList([rows]),
        )


class Api:
    def __init__(self, generator: Generator, model_name: str) -> None:
        self._generator = generator
        self._model_name = model_name

    def app(self) -> web.Application:
        app = web.Application(client_max_size=_MAX_BODY_BYTES)
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/v1/chat/completions", self._chat)
        return app

    async def _models(self, _request: web.Request) -> web.Response:
        model = {"id": self._model_name, "object": "model", "owned_by": "transformers"}
        return web.json_response({"object": "list", "data": [model]})

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        """Streams only: one event for every token, each with the usage so far."""
        body = await request.json()
        if not body.get("stream"):
            raise web.HTTPBadRequest(text="this stand-in only streams")
        job = _job(body)
        self._generator.waiting.put(job)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        try:
            while (text := await job.out.get()) is not None:
                if isinstance(text, Exception):
                    await response.write(_event({"error": {"message": str(text)[:300]}}))
                    return response
                await response.write(_event(self._chunk(job, {"content": text}, None)))
            await response.write(_event(self._chunk(job, {}, "length" if job.ignore_eos else "stop")))
            await response.write(b"data: [DONE]\n\n")
        finally:
            job.done = True
        return response

    def _chunk(self, job: Job, delta: dict[str, str], finish_reason: str | None) -> dict[str, Any]:
        usage = {"prompt_tokens": job.prompt_tokens, "completion_tokens": job.count}
        choice = {"index": 0, "delta": delta, "finish_reason": finish_reason}
        return {"object": "chat.completion.chunk", "model": self._model_name, "choices": [choice], "usage": usage}


def _job(body: dict[str, Any]) -> Job:
    images, messages = [], []
    for message in body["messages"]:
        parts = message["content"]
        parts = [{"type": "text", "text": parts}] if isinstance(parts, str) else parts
        content = []
        for part in parts:
            if part["type"] == "image_url":
                encoded = part["image_url"]["url"].partition("base64,")[2]
                images.append(Image.open(io.BytesIO(base64.b64decode(encoded))).convert("RGB"))
                content.append({"type": "image"})
            else:
                content.append(part)
        messages.append({"role": message["role"], "content": content})
    ignore_eos = bool(body.get("ignore_eos"))
    return Job(messages, images, int(body.get("max_tokens", 16)), ignore_eos, asyncio.get_running_loop())


def _event(document: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(document).encode() + b"\n\n"


def _tell(job: Job, *words: str | Exception | None) -> None:
    for word in words:
        job.loop.call_soon_threadsafe(job.out.put_nowait, word)


async def _serve(arguments: argparse.Namespace) -> None:
    generator = Generator(arguments.model, arguments.max_batch)
    generator.start()
    runner = web.AppRunner(Api(generator, arguments.model).app(), access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", arguments.port)
    await site.start()
    print(f"ready on http://127.0.0.1:{runner.addresses[0][1]}", file=sys.stderr, flush=True)
    await asyncio.Event().wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--max-batch", type=int, default=16)
    arguments = parser.parse_args()
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    asyncio.run(_serve(arguments))


if __name__ == "__main__":
    main()
