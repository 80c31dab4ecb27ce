"""Grammars at the door: a request is let in only with one that compiles, soon and in little memory.

The parent's side of the grammar child, which is started when the first grammar comes, ended when it does not answer,
and started again for the next one. Does not know how grammars are enforced, nor HTTP.
"""

from __future__ import annotations

import hashlib
import json
import logging
import signal
import subprocess
import sys
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path

import msgspec

from hydra_engine.core.grammar import Grammar
from hydra_engine.errors import EngineClosed, InvalidRequest, Unavailable
from hydra_engine.guidance import TOO_COMPLEX, is_installed
from hydra_engine.intake.grammar_child import Job, Setup, Verdict
from hydra_engine.intake.pool import WorkerPool
from hydra_engine.intake.processor_child import receive, send
from hydra_engine.intake.spawn import SpawnedChild, spawn

logger = logging.getLogger(__name__)

START_SECONDS = 60.0  # a tokenizer of 150,000 tokens on a busy machine takes seconds
ANSWER_SECONDS = 20.0  # the child's own limit is CPU time, this one is for a child that sleeps
MAX_WAITING = 64  # grammars
MAX_VERDICTS = 1024
MAX_DEPTH = 64  # of a schema
MAX_CHOICES = 8192

_SETTINGS = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "RAYON_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "1"}
_COMMAND = (sys.executable, "-m", "hydra_engine.intake.grammar_child")
_MISSING = "structured output needs the package llguidance, which is not installed here: pip install llguidance"
_NO_TOKENIZER = "structured output is not available: this model's tokenizer cannot be used for grammars"


class Grammars:
    """Owned by one event loop. `tokenizer_file` None: the model has no tokenizer.json."""

    def __init__(
        self,
        tokenizer_file: Path | None,
        eos_token_ids: Sequence[int],
        command: Sequence[str] = _COMMAND,
        answer_seconds: float = ANSWER_SECONDS,
    ) -> None:
        self._setup = Setup(str(tokenizer_file), tuple(eos_token_ids))
        self._usable = tokenizer_file is not None and bool(eos_token_ids)
        self._command = tuple(command)
        self._answer_seconds = answer_seconds
        self._pool = WorkerPool("intake-grammar", num_workers=1, max_waiting=MAX_WAITING)
        self._verdicts: OrderedDict[bytes, Verdict] = OrderedDict()
        self._child: _Child | None = None
        self._closed = False

    async def check(self, grammar: Grammar) -> None:
        """Raises InvalidRequest that names the grammar's field, Unavailable when no child can be started."""
        if not is_installed():
            raise InvalidRequest(_MISSING, param=grammar.param, code="unsupported_parameter")
        if not self._usable:
            raise InvalidRequest(_NO_TOKENIZER, param=grammar.param, code="unsupported_parameter")
        key = _key(grammar)
        verdict = self._verdicts.get(key)
        if verdict is None:
            _check_form(grammar)
            verdict = await self._pool.run(self._ask, key, grammar)
        if verdict.problem is not None:
            raise InvalidRequest(f"the grammar cannot be used: {verdict.problem}", param=grammar.param)

    def close(self) -> None:
        """Ends the child now, whatever it does."""
        self._closed = True
        self._pool.close()
        if self._child is not None:
            self._child.end()

    # ---- in the pool's one thread

    def _ask(self, key: bytes, grammar: Grammar) -> Verdict:
        """A grammar that ended the child is wrong; one that the child did not get done is so this time only."""
        verdict = self._verdicts.get(key)  # asked while this one waited
        if verdict is not None:
            return verdict
        child = self._running(grammar.param)
        try:
            verdict = child.ask(Job(grammar.kind, grammar.source), self._answer_seconds)
        except (OSError, EOFError, msgspec.MsgspecError) as error:
            self._child = None
            by_itself, status = child.ended_by_itself(), child.end()
            if self._closed:
                raise _closed() from error
            logger.warning("the grammar process ended with status %s", status)
            verdict = Verdict(TOO_COMPLEX)
            if not by_itself:
                return verdict
        self._verdicts[key] = verdict
        if len(self._verdicts) > MAX_VERDICTS:
            self._verdicts.popitem(last=False)
        return verdict

    def _running(self, param: str) -> _Child:
        if self._closed:
            raise _closed()
        if self._child is not None and not self._child.is_alive:
            self._child.end()
            self._child = None
        if self._child is None:
            try:
                child = _Child(self._command, self._setup)
            except (OSError, EOFError, msgspec.MsgspecError) as error:
                raise Unavailable("no process to check grammars could be started; try again later") from error
            if child.greeting.problem is not None:
                child.end()
                raise InvalidRequest(_NO_TOKENIZER, param=param, code="unsupported_parameter")
            self._child = child
            if self._closed:  # by another thread, which saw no child
                child.end()
                raise _closed()
        return self._child


class _Child(SpawnedChild):
    def __init__(self, command: Sequence[str], setup: Setup) -> None:
        super().__init__(spawn(command, msgspec.json.encode(setup).decode(), settings=_SETTINGS))
        try:
            self.greeting = self._verdict(START_SECONDS)
        except (OSError, EOFError, msgspec.MsgspecError):
            self.end()
            raise

    def ask(self, job: Job, seconds: float) -> Verdict:
        """Raises OSError, EOFError or MsgspecError when the child is broken."""
        self._socket.settimeout(seconds)
        send(self._socket, job, ())
        return self._verdict(seconds)

    def ended_by_itself(self) -> bool:
        """By a limit or a crash, and not because somebody kills it. Waits a moment for that."""
        try:
            return self._process.wait(1.0) != -signal.SIGKILL
        except subprocess.TimeoutExpired:
            return False

    def _verdict(self, seconds: float) -> Verdict:
        self._socket.settimeout(seconds)
        data = receive(self._socket)
        if data is None:
            raise EOFError
        return msgspec.msgpack.decode(data, type=Verdict)


def _key(grammar: Grammar) -> bytes:
    return hashlib.blake2b(
        grammar.source.encode("utf-8", "surrogatepass"), digest_size=16, person=grammar.kind.encode()
    ).digest()


def _check_form(grammar: Grammar) -> None:
    """What can be said without compiling: it is text, JSON where that is asked for, and not too deep."""
    try:
        grammar.source.encode()
    except UnicodeEncodeError:
        raise InvalidRequest("the grammar is not valid Unicode (lone surrogates)", param=grammar.param) from None
    if grammar.kind == "json_schema":
        schema = _json_of(grammar)
        if not isinstance(schema, dict):
            raise InvalidRequest("the schema must be a JSON object", param=grammar.param)
        if _depth(schema) > MAX_DEPTH:
            raise InvalidRequest(f"the schema is nested deeper than {MAX_DEPTH} levels", param=grammar.param)
    elif grammar.kind == "choice":
        choices = _json_of(grammar)
        texts = [one for one in choices if isinstance(one, str)] if isinstance(choices, list) else []
        if texts != choices or not 1 <= len(texts) <= MAX_CHOICES:
            raise InvalidRequest(f"choices must be a list of 1 to {MAX_CHOICES} strings", param=grammar.param)
    elif grammar.kind != "json_object" and not grammar.source:
        raise InvalidRequest("the grammar is empty", param=grammar.param)


def _json_of(grammar: Grammar) -> object:
    try:
        return json.loads(grammar.source)
    except (ValueError, RecursionError):
        raise InvalidRequest("it must be valid JSON, and not nested deeply", param=grammar.param) from None


def _depth(value: object) -> int:
    """Of nested arrays and objects, at most one more than MAX_DEPTH."""
    depth, level = 0, [value]
    while level and depth <= MAX_DEPTH:
        inner: list[object] = []
        for one in level:
            if isinstance(one, dict):
                inner += one.values()
            elif isinstance(one, list):
                inner += one
        depth, level = depth + 1, [one for one in inner if isinstance(one, dict | list)]
    return depth


def _closed() -> EngineClosed:
    return EngineClosed("the engine was closed before the request was read")
