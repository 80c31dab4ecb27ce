"""Checks before a request is admitted that its grammar compiles within limits of time and memory.

The parent's side of the grammar child. Does not know how grammars are enforced, nor HTTP.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path

from hydra_engine.core.fairness import WorkerPool
from hydra_engine.core.grammar import Grammar
from hydra_engine.core.processes import launch
from hydra_engine.errors import InvalidRequest, Unavailable
from hydra_engine.guidance.guide import TOO_COMPLEX, is_installed
from hydra_engine.preprocess.sandbox.child_host import ChildDied, ChildHost
from hydra_engine.preprocess.sandbox.grammar_child import NO_TOKENIZER, Setup, Verdict

ANSWER_SECONDS = 20.0  # the child's own limit is CPU time; this one ends a child that sleeps
MAX_WAITING = 1 << 14  # grammars; `max_queue` as a rule limits requests to fewer
WAIT_SECONDS = 60.0  # in the queue, behind other requests' grammars
MAX_VERDICTS = 8192  # of all clients
MAX_DEPTH = 64  # of a schema
MAX_CHOICES = 8192

_SETTINGS = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "RAYON_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "1"}
_COMMAND = launch.command("hydra_engine.preprocess.sandbox.grammar_child")
_MISSING = "structured output needs the package llguidance, which is not installed here: pip install llguidance"


class Grammars:
    """Grammar checks and a cache of their results. Use it on one event loop. `tokenizer_file` None: the model has no
    tokenizer.json."""

    def __init__(
        self,
        tokenizer_file: Path | None,
        eos_token_ids: Sequence[int],
        wait_seconds: float = WAIT_SECONDS,
    ) -> None:
        self._usable = tokenizer_file is not None and bool(eos_token_ids)
        self._wait_seconds = wait_seconds
        self._pool = WorkerPool("preprocess-grammar", num_workers=1, max_waiting=MAX_WAITING, noun="grammars")
        self._verdicts: OrderedDict[bytes, Verdict] = OrderedDict()
        self._host = ChildHost(
            "check grammars",
            _COMMAND,
            Verdict,
            setup=Setup(str(tokenizer_file), tuple(eos_token_ids)),
            variables=_SETTINGS,
        )

    async def check(self, grammar: Grammar, client: str = "", salt: str = "") -> None:
        """Raises InvalidRequest that names the grammar's field, or Unavailable if no child can be started or other
        requests' grammars take too long. Clients take turns, and results are cached per client and salt: durations
        reveal nothing about other clients."""
        if not is_installed():
            raise InvalidRequest(_MISSING, param=grammar.param, code="unsupported_parameter")
        if not self._usable:
            raise InvalidRequest(NO_TOKENIZER, param=grammar.param, code="unsupported_parameter")
        key = _key(grammar, client, salt)
        verdict = self._verdicts.get(key)
        if verdict is None:
            _check_form(grammar)
            try:
                async with asyncio.timeout(self._wait_seconds):
                    verdict = await self._pool.run(client, self._ask, key, grammar)
            except TimeoutError:
                raise Unavailable("the grammars of other requests take too long to check; try again later") from None
        if verdict.problem is not None:
            raise InvalidRequest(f"the grammar cannot be used: {verdict.problem}", param=grammar.param)

    def close(self) -> None:
        """Ends the child now, whatever it does."""
        self._pool.close()
        self._host.close()

    def _ask(self, key: bytes, grammar: Grammar) -> Verdict:
        """Sends the grammar to the child, from the pool's only thread, so there is one child. A grammar that ended the
        child is refused."""
        verdict = self._verdicts.get(key)  # checked while this one waited
        if verdict is not None:
            return verdict
        try:
            verdict, _ = self._host.run(grammar, ANSWER_SECONDS)
        except ChildDied:
            verdict = Verdict(TOO_COMPLEX)
        except InvalidRequest as error:  # the tokenizer cannot be used
            error.param = grammar.param
            raise
        self._verdicts[key] = verdict
        if len(self._verdicts) > MAX_VERDICTS:
            self._verdicts.popitem(last=False)
        return verdict


def _key(grammar: Grammar, client: str, salt: str) -> bytes:
    return hashlib.blake2b(repr((client, salt, grammar.language)).encode(), digest_size=16).digest()


def _check_form(grammar: Grammar) -> None:
    """Checks that need no compiler: text, JSON where needed, and depth. Raises InvalidRequest."""
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
        texts = [choice for choice in choices if isinstance(choice, str)] if isinstance(choices, list) else []
        if texts != choices or not 1 <= len(texts) <= MAX_CHOICES:
            raise InvalidRequest(f"choices must be a list of 1 to {MAX_CHOICES} strings", param=grammar.param)
    elif grammar.kind != "json_object" and not grammar.source:
        raise InvalidRequest("the grammar is empty", param=grammar.param)


def _json_of(grammar: Grammar) -> object:
    try:
        return json.loads(grammar.source, parse_int=float)  # only its form counts here; numbers may be long
    except (ValueError, RecursionError):
        raise InvalidRequest("it must be valid JSON, and not nested deeply", param=grammar.param) from None


def _depth(value: object) -> int:
    """Depth of nested arrays and objects, at most MAX_DEPTH + 1."""
    depth, level = 0, [value]
    while level and depth <= MAX_DEPTH:
        inner: list[object] = []
        for node in level:
            if isinstance(node, dict):
                inner += node.values()
            elif isinstance(node, list):
                inner += node
        depth, level = depth + 1, [node for node in inner if isinstance(node, dict | list)]
    return depth
