"""Miniatures of families that run through transformers, served: tokens, batches, and what is refused. What is found
goes into docs/transformers-models.md."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from hydra_engine import Engine
from hydra_engine.errors import CheckpointError, ConfigError
from hydra_transformers.describe import load_config, model_class
from hydra_transformers.processor import load_processor
from tests.engine.conftest import assert_at_rest, picture
from tests.transformers_models import BEGINNING, EQUAL, INVARIANT, MINIATURES, REASON, TYPE
from tools.miniatures import make_tiny

Record = Callable[[str, object], None]
Case = tuple[str, list[Any] | None]  # a text behind pictures
NUM_TOKENS = 20
OPTIONS: dict[str, Any] = {"temperature": 0, "max_tokens": NUM_TOKENS, "ignore_eos": True, "logprobs": 0}
CASES: list[tuple[str, list[tuple[int, int]]]] = [
    ("What is this?", []),
    ("One picture.", [(200, 140)]),
    ("Two of them: compare.", [(64, 64), (300, 100)]),
    ("A large one.", [(640, 480)]),
]


class Answer(NamedTuple):
    token_ids: list[int]
    logprobs: list[float]


@contextlib.contextmanager
def served(directory: Path) -> Iterator[Engine]:
    """An engine that gives the same bits in any batch, or, of a model that does not, one that need not."""
    options: dict[str, Any] = {"threads": 1, "block_size": 8, "num_kv_blocks": 1024, "token_budget": 96}
    options |= {"model_impl": "transformers", "prefix_caching": False}
    try:
        engine = Engine(directory, **options)
    except ConfigError as error:
        assert error.param == "deterministic"
        engine = Engine(directory, deterministic=False, **options)
    with engine:
        yield engine
        assert_at_rest(engine)


def pictures(sizes: list[tuple[int, int]]) -> list[Any]:
    return [picture(index, *size) for index, size in enumerate(sizes)]


def answers_of_transformers(directory: Path, cases: Sequence[Case]) -> list[Answer]:
    config = load_config(directory, trust_remote_code=False)
    processor = load_processor(directory, config.model_type, trust_remote_code=False)
    kind = model_class(config, directory, trust_remote_code=False)
    model = kind.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager")
    return [answer_of_transformers(processor, model, *case) for case in cases]


def answer_of_transformers(processor: Any, model: Any, prompt: str, images: list[Any] | None) -> Answer:
    content = [{"type": "image"}] * len(images or ()) + [{"type": "text", "text": prompt}]
    messages = [{"role": "user", "content": content}]
    text = [processor.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)]
    options: dict[str, Any] = {"text": text, "add_special_tokens": False, "return_tensors": "pt"}
    if images is None:
        inputs = processor.tokenizer(**options)
    else:
        try:
            inputs = processor(images=[images], **options)
        except ValueError:  # takes no lists in a list
            inputs = processor(images=images, **options)
    asked: dict[str, Any] = {"max_new_tokens": NUM_TOKENS, "min_new_tokens": NUM_TOKENS, "eos_token_id": None}
    asked |= {"output_logits": True, "return_dict_in_generate": True}
    with torch.inference_mode():
        output = model.generate(**inputs, do_sample=False, **asked)
    tokens = output.sequences[0, inputs["input_ids"].shape[1] :].tolist()
    scores = [logits[0].float().log_softmax(0) for logits in output.logits]
    return Answer(tokens, [float(each[token]) for token, each in zip(tokens, scores, strict=True)])


def answer(result: Any) -> Answer:
    return Answer(list(result.token_ids), [entry.logprob for entry in result.logprobs])


def is_equal(ours: Answer, expected: Answer) -> bool:
    """True if the tokens are equal, and their log probabilities but for rounding."""
    pairs = zip(ours.logprobs, expected.logprobs, strict=True)
    return ours.token_ids == expected.token_ids and all(math.isclose(*pair, abs_tol=1e-3) for pair in pairs)


@pytest.mark.drawn
@pytest.mark.slow
@pytest.mark.parametrize("family", [name for name, refusal in MINIATURES.items() if not refusal])
def test_a_miniature_answers_as_transformers_does_and_in_any_batch(
    family: str, tmp_path: Path, record_property: Record
) -> None:
    record_property(TYPE, family)
    make_tiny(family, tmp_path / family, seed=5)
    with served(tmp_path / family) as engine:
        one = "one picture a request" in str(engine.summary.notes)
        taken = [(text, pictures(sizes) or None) for text, sizes in CASES if not one or len(sizes) < 2]
        expected = answers_of_transformers(tmp_path / family, taken)
        alone = [answer(engine.submit(*case, **OPTIONS).result(120)) for case in taken]
        handles = [engine.submit(*case, **OPTIONS) for case in taken * 2]
        together = [answer(handle.result(120)) for handle in handles]
        num_equal, invariant = sum(map(is_equal, alone, expected)), together == alone * 2
        record_property(EQUAL, f"{num_equal} of {len(taken)}" + ", one picture a request" * one)
        record_property(INVARIANT, "yes" if invariant else "no: `--no-deterministic`")
        assert num_equal == len(taken)
        assert invariant or not engine.summary.deterministic


@pytest.mark.slow
@pytest.mark.parametrize("family", [name for name, refusal in MINIATURES.items() if refusal])
def test_a_miniature_that_does_not_fit_is_refused_with_the_reason(
    family: str, tmp_path: Path, record_property: Record
) -> None:
    record_property(TYPE, family)
    make_tiny(family, tmp_path / family, seed=5)
    with pytest.raises(CheckpointError, match=MINIATURES[family]) as caught:
        Engine(tmp_path / family, model_impl="transformers", threads=1)
    record_property(REASON, BEGINNING.sub("", caught.value.message))
