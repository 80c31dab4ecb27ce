"""The grammar child: `hydra_engine.preprocess.sandbox.grammar_child FD SETUP` compiles untrusted grammars.

A grammar that crashes or blocks the compiler harms only this process: each has limits of CPU time, memory and stack,
and reaching one ends the process. Instances compile the grammars that pass, with the same code and higher limits.
"""

from __future__ import annotations

import resource
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import numpy as np

from hydra_engine.core.grammar import Grammar
from hydra_engine.errors import InvalidRequest
from hydra_engine.guidance.guide import NO_TEXT, GrammarError, Guide
from hydra_engine.preprocess.sandbox.child_loop import Memory, limit, limit_memory_beyond, serve

CPU_SECONDS = 1.0  # per grammar; ordinary ones take a few milliseconds
MEMORY_BYTES = 256 << 20  # of address space, in addition to the tokenizer's
STACK_BYTES = 1 << 20  # an instance's threads have eight times that
NUM_TRIED_TOKENS = 16  # length of the sample that must follow the grammar
NO_TOKENIZER = "structured output is not available: this model's tokenizer cannot be used for grammars"


class Setup(msgspec.Struct):
    """The child's argument, as JSON."""

    tokenizer_file: str
    eos_token_ids: tuple[int, ...]


class Verdict(msgspec.Struct):
    """The result of a check; `problem` is None if the grammar can be used."""

    problem: str | None = None


def main() -> None:
    limit(resource.RLIMIT_FSIZE, 0)
    serve(msgspec.msgpack.Decoder(Grammar), start, lambda _grammar: CPU_SECONDS)


def start() -> Callable[[Grammar, Memory], Verdict]:
    setup = msgspec.json.decode(sys.argv[2], type=Setup)
    try:
        guide = Guide(Path(setup.tokenizer_file), setup.eos_token_ids)
    except GrammarError as error:
        raise InvalidRequest(NO_TOKENIZER, code="unsupported_parameter") from error
    limit_memory_beyond(MEMORY_BYTES)
    threading.stack_size(STACK_BYTES)
    thread = ThreadPoolExecutor(1)

    def answer(grammar: Grammar, _memory: Memory) -> Verdict:
        return Verdict(thread.submit(problem_of, guide, grammar).result())

    return answer


def problem_of(guide: Guide, grammar: Grammar) -> str | None:
    """Returns the grammar's problem, or None: it does not compile, has no text, or cannot be followed for its first
    tokens. A grammar with calls or reasoning is first checked without them."""
    if grammar != grammar.without_calls:
        problem = problem_of(guide, grammar.without_calls)
        if problem is not None:
            return problem
    try:
        matcher = guide.compile(grammar)
        ends = matcher.end_token_mask()
        for step in range(NUM_TRIED_TOKENS):
            mask = matcher.allowed()
            mask[: ends.size] &= ~ends[: mask.size]
            ids = np.flatnonzero(mask)
            if not ids.size:
                return None if matcher.allowed().any() else NO_TEXT
            matcher.accept([int(ids[step * 7919 % ids.size])])  # spread over the allowed ids
    except GrammarError as error:
        return str(error)
    return None


if __name__ == "__main__":
    main()
