"""The grammar child: `python -m hydra_engine.intake.grammar_child FD SETUP` compiles strangers' grammars, one by one.

What a grammar does to the compiler, it does to this process alone: each has a limit of CPU time, of memory and of
stack, and whoever reaches one ends the process. What passes is what instances compile, with the same code and with
more of everything. Frames are those of the processor child. Ends when its socket closes.
"""

from __future__ import annotations

import resource
import signal
import socket
import sys
import threading
from pathlib import Path

import msgspec
import numpy as np

from hydra_engine.core.grammar import Grammar
from hydra_engine.guidance import NO_TEXT, GrammarError, Guide
from hydra_engine.intake.processor_child import receive, send

CPU_SECONDS = 1.0  # of one grammar; ordinary ones take a few milliseconds
MEMORY_BYTES = 256 << 20  # of address space, besides what the tokenizer takes
STACK_BYTES = 1 << 20  # an instance's threads have eight times that
NUM_TRIED_TOKENS = 16  # that are taken behind one another, to see that the grammar can be followed
NO_LIMIT = 0.0

_PAGE_BYTES = resource.getpagesize()


class Setup(msgspec.Struct):
    """What the child is started with, as JSON."""

    tokenizer_file: str
    eos_token_ids: tuple[int, ...]


class Job(msgspec.Struct):
    kind: str
    source: str


class Verdict(msgspec.Struct):
    """On a grammar, and once at the start on the tokenizer. None: it can be used."""

    problem: str | None = None


def main() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # draining is the parent's business; its end closes the socket
    for limit in (resource.RLIMIT_CORE, resource.RLIMIT_FSIZE):
        resource.setrlimit(limit, (0, 0))
    setup = msgspec.json.decode(sys.argv[2], type=Setup)
    with socket.socket(fileno=int(sys.argv[1])) as connection:
        try:
            guide = Guide(Path(setup.tokenizer_file), setup.eos_token_ids)
        except GrammarError as error:
            send(connection, Verdict(str(error)), ())
            return
        threading.stack_size(STACK_BYTES)
        worker = threading.Thread(target=serve, args=(connection, guide))
        worker.start()
        worker.join()


def serve(connection: socket.socket, guide: Guide) -> None:
    """Answers until the parent has gone."""
    limit = _address_space() + MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    send(connection, Verdict(), ())
    while (data := receive(connection)) is not None:
        job = msgspec.msgpack.decode(data, type=Job)
        signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)  # its signal ends the process, whatever that does
        verdict = Verdict(problem_of(guide, Grammar(job.kind, job.source)))
        signal.setitimer(signal.ITIMER_PROF, NO_LIMIT)
        send(connection, verdict, ())


def problem_of(guide: Guide, grammar: Grammar) -> str | None:
    """What is wrong with it: it does not compile, has no text, or cannot be followed for its first tokens."""
    try:
        matcher = guide.compile(grammar)
        ends = matcher.ends()
        for step in range(NUM_TRIED_TOKENS):
            mask = matcher.allowed()
            mask[: ends.size] &= ~ends[: mask.size]
            ids = np.flatnonzero(mask)
            if not ids.size:
                return None if matcher.allowed().any() else NO_TEXT
            matcher.accept([int(ids[step * 7919 % ids.size])])  # one here, one there
    except GrammarError as error:
        return str(error)
    return None


def _address_space() -> int:
    """Bytes."""
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[0]) * _PAGE_BYTES


if __name__ == "__main__":
    main()
