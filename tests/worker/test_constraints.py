"""A request's grammar is where its tokens are, however they came; compiled once, followed by each request alone."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from queue import Queue

import numpy as np
import pytest

from hydra_engine.core.grammar import Grammar
from hydra_engine.core.ids import RequestId
from hydra_engine.core.request import Request
from hydra_engine.core.results import ReadyResult
from hydra_engine.core.sampling import SamplingParams
from hydra_engine.errors import ErrorInfo, InvalidRequest
from hydra_engine.preprocess.text.tokenizer import Tokenizer, load_tokenizer
from hydra_engine.worker.language.constraints import Constraints, GrammarConstraint
from hydra_engine.worker.language.sampler import NO_FAST_PATH, SamplingState
from tests.faults.points import BEFORE_COMPILE, FaultPoints
from tests.faults.worker import make_faulty
from tests.worker.host_sampler import sample_row

DEMO = Path(__file__).parents[2] / "hydra_engine" / "demo" / "model"
EOS = 2
PROMPT = (10, 11, 12)
DIGITS = Grammar("regex", "[0-9]{3}(-[0-9]{2})?")


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return load_tokenizer(DEMO)


class Compiler(Constraints):
    """Waits for what has been asked for, unless a test keeps the compiler from it."""

    def __init__(self) -> None:
        self.faults = FaultPoints()
        self.results: Queue[ReadyResult] = Queue()
        super().__init__(DEMO, self.results.put)
        make_faulty(self, self.faults)

    def ready(self, request: Request) -> GrammarConstraint:
        constraint = self.constraint_of(request)
        assert constraint is not None
        if not constraint.is_ready:
            assert self.results.get(timeout=60) == ReadyResult(request.id)
        assert constraint.is_ready
        return constraint

    def refused(self, request: Request) -> ErrorInfo:
        assert self.constraint_of(request) is not None
        result = self.results.get(timeout=60)
        assert result.request_id == request.id and result.error is not None
        return result.error


@pytest.fixture
def compiler() -> Iterator[Compiler]:
    made = Compiler()
    yield made
    made.close()


_NUMBERS = itertools.count(1)


def request_of(grammar: Grammar | None = DIGITS, generated: tuple[int, ...] = (), **sampling: object) -> Request:
    params = SamplingParams(grammar=grammar, **{"temperature": 1.0, **sampling})  # type: ignore[arg-type]
    return Request(
        RequestId(next(_NUMBERS)),
        PROMPT,
        params,
        64,
        seed=5,
        arrival_s=0.0,
        eos_token_ids=(EOS,),
        generated_token_ids=generated,
    )


def logits_of(step: int, size: int = 650) -> np.ndarray:
    """Wider than the vocabulary, and most likely what no tokenizer knows."""
    logits = np.random.default_rng(step).normal(size=size).astype(np.float32)
    logits[641:] = 9.0
    return logits


def run(sampling_state: SamplingState, generated: tuple[int, ...] = (), limit: int = 20) -> list[int]:
    """Step by step, each token told when the next one is sampled."""
    output = list(generated)
    while len(output) < limit and EOS not in output:
        assert sampling_state.history is not None
        if output:
            sampling_state.history.record(len(PROMPT) + len(output) - 1, output[-1:])
        output.append(sample_row(logits_of(len(output)), sampling_state, len(output)).token_id)
    return output


def test_text_keeps_to_the_grammar_and_ends(compiler: Compiler, tokenizer: Tokenizer) -> None:
    request = request_of()
    output = run(SamplingState.from_request(request, compiler.ready(request)))
    text = tokenizer.decode(output[:-1])
    assert output[-1] == EOS and text[:3].isdigit() and len(text) in (3, 6)


def test_from_wherever_a_request_begins(compiler: Compiler) -> None:
    request = request_of(min_tokens=5)
    whole = run(SamplingState.from_request(request, compiler.ready(request)))
    assert len(whole) == 7
    for count in range(len(whole)):  # a replay, or a decode that is taken over, of which `count` tokens are known
        known = tuple(whole[:count])
        again = request_of(generated=known, min_tokens=5)
        assert run(SamplingState.from_request(again, compiler.ready(again)), known) == whole
    sampling_state = SamplingState.from_request(request, compiler.ready(request))
    assert sampling_state.history is not None
    for start in (0, 3, 4, 1, 5, 3):  # prefilled again after a preemption, in chunks, and a step run twice
        positions = [*PROMPT, *whole[:-1]]
        sampling_state.history.record(start, positions[start : start + 4] if start < 4 else positions[start:])
        sampling_state.history.record(start, positions[start : start + 1])
    for _ in range(2):
        assert sample_row(logits_of(6), sampling_state, 6).token_id == whole[6]


def test_requests_with_one_grammar_do_not_share_a_place(compiler: Compiler) -> None:
    requests = [request_of(), request_of()]
    first, second = (SamplingState.from_request(request, compiler.ready(request)) for request in requests)
    expected = run(first)
    assert run(second) == expected
    assert len(compiler._kept) == 1


def test_rows_with_a_grammar_are_never_plain(compiler: Compiler) -> None:
    request = request_of(temperature=0.0)
    assert SamplingState.from_request(request, compiler.ready(request)).fast_path_from == NO_FAST_PATH
    assert compiler.constraint_of(request_of(None)) is None
    assert compiler.constraint_of(replace(request_of(), prompt_token_ids=())) is None, "an encode job"


def test_what_cannot_be_followed_fails_with_a_sentence(compiler: Compiler) -> None:
    request = request_of(Grammar("choice", json.dumps(["yes"]), "regex"), (400, 401))
    sampling_state = SamplingState.from_request(request, compiler.ready(request))
    for _ in range(2):  # and does so again
        with pytest.raises(InvalidRequest, match=r"^the grammar cannot be followed any further: ") as caught:
            sample_row(logits_of(0), sampling_state, 2)
    assert caught.value.param == "regex" and "\n" not in caught.value.message


def test_what_was_accepted_and_does_not_compile_is_not_the_clients_fault(
    compiler: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    error = compiler.refused(request_of(Grammar("regex", "[")))
    assert error.kind == "Unavailable" and error.message.startswith("the grammar was accepted and could not be comp")
    compiler.faults.arm(BEFORE_COMPILE, "raise", "times=1")
    assert compiler.refused(request_of(Grammar("regex", "[ab]"))).kind == "RequestFailed"
    compiler.ready(request_of(Grammar("regex", "[ab]")))


def test_a_text_that_spells_the_end_does_not_end(compiler: Compiler, tokenizer: Tokenizer) -> None:
    """The text is made of other tokens than the end-of-sequence token, which the tokenizer would read in it."""
    request = request_of(Grammar("choice", json.dumps(["<|end|> is near"])))
    output = run(SamplingState.from_request(request, compiler.ready(request)))
    assert output[-1] == EOS and EOS not in output[:-1] and tokenizer.decode(output[:-1]) == "<|end|> is near"
