"""The parent's side of the text children: conversations and texts to token ids, with turns for clients.

There are two children, one of them for long prompts, so that short ones do not wait behind long ones. Does not trust a
child's answers: ids must lie in the vocabulary. Does not know requests.
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from hydra_engine.core.call import Role
from hydra_engine.core.fairness import WorkerPool
from hydra_engine.core.processes import launch
from hydra_engine.core.prompting import TemplateOptions
from hydra_engine.errors import InvalidRequest, RequestFailed, Unavailable
from hydra_engine.models.specs.base import MediaPlan
from hydra_engine.preprocess.sandbox.child_host import ChildDied, ChildHost
from hydra_engine.preprocess.sandbox.text_child import (
    Job,
    Method,
    Setup,
    Written,
    as_json,
    cpu_seconds,
    option_fields,
    plan_fields,
    prompt_fields,
    too_much,
)
from hydra_engine.preprocess.text.tokenizer import LONG_TEXT_CHARS, Tokenizer
from hydra_engine.preprocess.text.writer import Prompt, TextSpec

MAX_WAITING_TEXTS = 1024  # in each of two queues; one client may have half
MAX_ANSWER_BYTES = 128 << 20  # a tokenizer, or the ids of the longest prompts
MAX_ERROR_CHARS = 2000
WAIT_SECONDS = 30.0  # ends a child that sleeps; its own limit is CPU time

_SETTINGS = {
    **{"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "RAYON_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "1"},
    **{"TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1", "USE_TORCH": "0"},
}
_COMMAND = launch.command("hydra_engine.preprocess.sandbox.text_child")


class SandboxedTexts:
    """A reader of prompts in child processes: texts to token ids. Use it on one event loop; call `start` first. Methods
    raise InvalidRequest for a fault of the request."""

    def __init__(
        self, model_dir: Path, spec: TextSpec, chat_template_path: str | None = None, command: Sequence[str] = _COMMAND
    ) -> None:
        self._model_dir = model_dir
        setup = Setup(str(model_dir), spec, None if chat_template_path is None else str(chat_template_path))
        self._short, self._long = (_Lane(length, setup, command) for length in ("short", "long"))

    async def start(self) -> Tokenizer:
        """Returns the model's tokenizer, for work that needs no child. Raises CheckpointError if loading the model's
        files exceeds a limit."""
        return await asyncio.get_running_loop().run_in_executor(None, self._start)

    def _start(self) -> Tokenizer:
        self._short.start()
        parts = self._short.run(Job("tokenizer", b"", 0)).tokenizer
        assert parts is not None
        return Tokenizer.from_parts(parts, self._model_dir)

    def warm_up(self) -> None:
        """Starts the child for long prompts without waiting for it."""
        self._long.host.warm_up(1)

    async def encode(self, client: str, prompt: Prompt) -> list[int]:
        (ids,) = (await self._run(client, "encode", prompt.num_chars, prompt_fields(prompt))).ids
        return _ids(ids)

    async def encode_with_media(self, client: str, prompt: Prompt, plans: Sequence[MediaPlan]) -> list[int]:
        """Returns token ids with the texts that a model's processor writes around pictures."""
        (ids,) = (await self._run(client, "place", prompt.num_chars, prompt_fields(prompt), plan_fields(plans))).ids
        return _ids(ids)

    async def parts(self, client: str, texts: Sequence[str]) -> list[list[int]]:
        """Returns the token ids of each text, tokenised separately."""
        return [_ids(ids) for ids in (await self._run(client, "parts", sum(map(len, texts)), texts)).ids]

    async def generation_prompt(self, client: str, options: TemplateOptions, role: Role) -> str:
        return (await self._run(client, "generation_prompt", 0, option_fields(options), role)).text

    def close(self) -> None:
        for lane in (self._short, self._long):
            lane.pool.close()
            lane.host.close()

    async def _run(
        self,
        client: str,
        method: Method,
        num_chars: int,
        *args: object,
    ) -> Written:
        job = Job(method, as_json(args), num_chars)
        lane = self._short if num_chars < LONG_TEXT_CHARS else self._long
        written = await lane.pool.run(client, partial(lane.run, job))
        if written.error is not None:
            error = written.error
            raise InvalidRequest(error.message[:MAX_ERROR_CHARS], code=error.code, param=error.param)
        if written.exhausted:
            raise _failed()
        return written


class _Lane:
    """A child and its queue."""

    def __init__(self, length: str, setup: Setup, command: Sequence[str]) -> None:
        self.pool = WorkerPool(f"text-{length}", num_workers=1, max_waiting=MAX_WAITING_TEXTS, noun="prompts")
        self.host = ChildHost(
            "read prompts",
            command,
            Written,
            setup=setup,
            variables=_SETTINGS,
            inherited=("TZ",),
            max_answer_bytes=MAX_ANSWER_BYTES,
        )

    def start(self) -> None:
        """Starts the child and blocks until it is ready. Raises CheckpointError if its setup exceeds a limit."""
        try:
            self.host.start()
        except Unavailable as error:
            if isinstance(error.__cause__, ChildDied) and error.__cause__.by_itself:
                raise too_much() from error
            raise

    def run(self, job: Job) -> Written:
        """Runs a job, blocking. If the job ends its child, the next child starts at once."""
        try:
            return self.host.run(job, WAIT_SECONDS + 2 * cpu_seconds(job.num_chars))[0]
        except ChildDied as death:
            self.host.warm_up(1)
            if death.by_itself:
                raise _failed() from death
            raise Unavailable("the process that reads prompts was stopped or killed; try again later") from death


def _ids(data: bytes) -> list[int]:
    ids = array("I")
    ids.frombytes(data)
    return ids.tolist()


def _failed() -> RequestFailed:
    return RequestFailed(
        "the model's chat template or tokenizer needs more time or memory for this prompt than it may have; "
        "other prompts are served"
    )
