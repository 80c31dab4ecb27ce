"""Grammars of an instance's requests: compiled in a thread of their own, followed by the sampler.

A request's grammar is compiled while it is prefilled. Its constraint is brought to where the request is from the tokens
that it has so far, so steps that are run again, preemptions, replays and KV from elsewhere need nothing of it. The
frontend has refused grammars that compile slowly or not at all; one that still fails here fails its request. Does not
know plans, slots or limits.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from pathlib import Path

from hydra_engine.core.grammar import Grammar
from hydra_engine.core.request import Request
from hydra_engine.errors import InvalidRequest, RequestFailed
from hydra_engine.guidance.guide import GrammarError, Guide, Matcher, TokenMask

MAX_COMPILED = 16  # grammars that are kept for the next request; a large one takes tens of megabytes
WAIT_SECONDS = 60.0  # for a compilation; the frontend's limit is a second of CPU time each

_TOKENIZER_FILE = "tokenizer.json"


class Constraints:
    """One per instance. `of` belongs to its thread; everything else happens in the compiler's."""

    def __init__(self, model_dir: Path) -> None:
        self._tokenizer_file = model_dir / _TOKENIZER_FILE
        self._compiler = ThreadPoolExecutor(1, thread_name_prefix="grammars")
        self._guides: dict[tuple[int, ...], Guide] = {}  # one: the model's end-of-sequence tokens do not change
        self._compiled: OrderedDict[tuple[Hashable, ...], Matcher] = OrderedDict()

    def of(self, request: Request) -> GrammarConstraint | None:
        """None for requests without a grammar, and for encode jobs, which have no prompt."""
        grammar = request.sampling.grammar
        if grammar is None or not request.num_prompt:
            return None
        return GrammarConstraint(self._compiler.submit(self._matcher, grammar, request.eos_token_ids), grammar.param)

    def close(self) -> None:
        """Does not wait for what is being compiled."""
        self._compiler.shutdown(wait=False, cancel_futures=True)

    def _matcher(self, grammar: Grammar, eos_token_ids: tuple[int, ...]) -> Matcher:
        """At the beginning of the text, for one request alone."""
        key = grammar.language
        compiled = self._compiled.pop(key, None)
        if compiled is None:
            guide = self._guides.get(eos_token_ids)
            if guide is None:
                guide = self._guides[eos_token_ids] = Guide(self._tokenizer_file, eos_token_ids)
            compiled = guide.compile(grammar)
        self._compiled[key] = compiled
        while len(self._compiled) > MAX_COMPILED:
            self._compiled.popitem(last=False)
        return compiled.copy()


class GrammarConstraint:
    """A `Constraint` of one request. Used by the language lane's thread alone."""

    def __init__(self, matcher: Future[Matcher], param: str) -> None:
        self._matcher = matcher
        self._param = param
        self._num_accepted = 0

    def allowed(self, output_ids: Sequence[int]) -> TokenMask:
        """Waits for the compilation, the first time. Raises InvalidRequest, RequestFailed."""
        try:
            matcher = self._matcher.result(WAIT_SECONDS)
            if len(output_ids) > self._num_accepted:
                matcher.accept(output_ids[self._num_accepted :])
                self._num_accepted = len(output_ids)
            return matcher.allowed()
        except GrammarError as error:
            raise InvalidRequest(f"the grammar cannot be followed any further: {error}", param=self._param) from None
        except (TimeoutError, CancelledError):
            raise RequestFailed("the request's grammar was not compiled in time") from None
