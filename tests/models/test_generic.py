"""Models through transformers' own modules in our stages, against the same modules by themselves: families that have no
native implementation, and one that has (LLaVA).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from hydra_engine.backend.base import Backend
from hydra_engine.backend.select import create_backend
from hydra_engine.core.instances import Role
from tests.models.conftest import BACKENDS, CheckpointFactory
from tests.models.generic_pair import Pair, Prompt, picture
from tests.support_table import record

TOLERANCE = 1e-4
NUM_GREEDY = 64
NUM_STEPS = 16  # that transformers takes one by one
GREEDY = ("text only", "one image", "many images")  # prompts whose answers are compared too
VARIANTS: dict[str, tuple[str, Mapping[str, Any]]] = {
    "smolvlm": ("smolvlm", {}),
    "smolvlm-whole-pictures": ("smolvlm", {"text": {"num_key_value_heads": 4}, "scale_factor": 1}),
    "gemma3": ("gemma3", {}),
    "gemma3-wide-window": ("gemma3", {"text": {"sliding_window": 400, "num_key_value_heads": 1}}),
    "gemma3-tied": ("gemma3", {"tie_word_embeddings": True}),
    "llava": ("llava", {}),
    "llava-siglip-phi3": ("llava_phi3", {}),  # longrope
    "llava-onevision": ("llava_onevision", {}),
    "idefics3": ("idefics3", {}),
    "glm4v": ("glm4v", {}),
    "glm46v": ("glm46v", {}),
    "glm_ocr": ("glm_ocr", {}),
    "paddleocr_vl": ("paddleocr_vl", {}),
    "ernie4_5_vl_moe": ("ernie4_5_vl_moe", {}),
}
PLAIN = ("smolvlm", "gemma3", "llava-siglip-phi3", "glm46v", "paddleocr_vl", "llava")
FURTHER = VARIANTS.keys() - {"smolvlm", "gemma3"}  # by the reference ops in the slow tests alone


@pytest.fixture(autouse=True)
def row(request: pytest.FixtureRequest, record_property: Callable[[str, object], None]) -> None:
    """Records the test for the table of docs/models.md."""
    record(request.node.name, "generic", record_property)


Directories = Callable[[str], Path]


@pytest.fixture(scope="module")
def directories(checkpoint: CheckpointFactory) -> Directories:
    def of(name: str) -> Path:
        family, overrides = VARIANTS[name]
        return checkpoint(f"generic-{name}", family, **overrides)

    return of


def prompts(pair: Pair) -> dict[str, Prompt]:
    begin, end = pair.marks
    first, second, third, thin = (
        (begin, picture(*size), end) for size in ((60, 40, 1), (31, 90, 2), (28, 28, 3), (300, 3, 4))
    )
    asked = {
        "text only": pair.prompt("<s><|user|>Hello there.\n\n<|end|>"),
        "one image": pair.prompt("<s><|user|>", *first, "What is this?<|end|><|assistant|>"),
        "image between newlines": pair.prompt("<s>a\n", *first, "\nWhat is this?"),
        "image first": pair.prompt(*second, "and then"),
        "many images": pair.prompt("<s>", *first, *second, "or", *third, " Which one?"),
        "long": pair.prompt("<s>Once upon a time, long ago, " * 2, *third, " there was a picture. " * 3),
        "extreme": pair.prompt("<s>", *thin, "?"),
    }
    most = 3 if pair.processor.joins else 1
    return {what: prompt for what, prompt in asked.items() if len(prompt.pictures) <= most}


def assert_close(actual: Tensor, expected: Tensor, what: str) -> None:
    assert actual.shape == expected.shape, what
    assert torch.isfinite(actual).all(), what
    difference = (actual - expected).abs().max().item() if actual.numel() else 0.0
    assert difference <= TOLERANCE, f"{what}: largest difference {difference:.3g}"


class Expected(NamedTuple):
    """Token ids of transformers' processor and logits of its model for one prompt."""

    token_ids: list[int]
    logits: Tensor


@pytest.fixture(scope="module")
def expectations(directories: Directories) -> Callable[[Pair, str], dict[str, Expected]]:
    known: dict[str, dict[str, Expected]] = {}

    def of(pair: Pair, name: str) -> dict[str, Expected]:
        if name not in known:
            known[name] = {
                what: Expected(pair.inputs(prompt)["input_ids"][0].tolist(), pair.logits(prompt))
                for what, prompt in prompts(pair).items()
            }
        return known[name]

    return of


@pytest.mark.quick("native-smolvlm", "native-llava")
@pytest.mark.parametrize("name", VARIANTS)
def test_logits_and_greedy_tokens_match(
    name: str,
    directories: Directories,
    backend: Backend,
    expectations: Callable[[Pair, str], dict[str, Expected]],
) -> None:
    pair = Pair(directories(name), backend)
    said: set[int] = set()
    for what, prompt in prompts(pair).items():
        expected = expectations(pair, name)[what]
        assert prompt.token_ids == expected.token_ids, what
        pair.driver.reset()
        assert_close(pair.driver.run(pair.request(prompt), []), expected.logits, what)
        if what in GREEDY:
            generated = pair.driver.generate(pair.request(prompt), NUM_GREEDY)
            # What is likeliest behind all that came before it is what transformers would generate.
            assert generated == pair.logits_of(generated, prompt).argmax(1).tolist(), what
            said.update(generated)
    assert len(said) > 20 or name == "gemma3-tied", "the miniature says nothing"


@pytest.mark.quick("gemma3")
@pytest.mark.parametrize("name", PLAIN)
def test_transformers_generates_the_same(name: str, directories: Directories) -> None:
    """Step by step over its own cache, which is slow: one prompt of each family."""
    pair = Pair(directories(name), create_backend("cpu", torch.float32, backend=BACKENDS[-1], threads=1))
    prompt = prompts(pair)["one image"]
    assert pair.driver.generate(pair.request(prompt), NUM_STEPS) == pair.generate(prompt, NUM_STEPS)


@pytest.mark.quick("native")
@pytest.mark.parametrize("name", PLAIN)
def test_features_match_and_text_inside_a_span_is_embedded(
    name: str, directories: Directories, backend: Backend
) -> None:
    pair = Pair(directories(name), backend)
    prompt = prompts(pair)["many images"]
    found = [pair.driver.features(slots) for slots in pair.driver.encode([span for _, span in prompt.spans])]
    image_token_id = pair.processor.image_token_id
    rows, num_text = [], 0
    for (_, span), features in zip(prompt.spans, found, strict=True):
        ids = span.arrays["span_token_ids"]
        rows.append(features[ids == image_token_id])
        text = ids[ids != image_token_id]
        num_text += len(text)
        with torch.inference_mode():
            assert_close(features[ids != image_token_id], pair.reference.get_input_embeddings()(text), "text in a span")
    assert_close(torch.cat(rows), pair.features(prompt), "features")
    assert (num_text > 0) == (name == "smolvlm")


def whole_pieces(pair: Pair, prompt: Prompt, sizes: list[int]) -> list[int]:
    """Chunks that end where `sizes` say, moved behind a picture whose rows see each other."""
    ends, end = [], 0
    for size in sizes:
        end = min(end + size, len(prompt.token_ids))
        if pair.processor.bidirectional:
            for start, span in prompt.spans:
                if start < end < start + span.num_tokens:
                    end = start + span.num_tokens
        ends.append(end)
    ends = sorted(set(ends))
    return [end - begin for begin, end in zip([0, *ends], ends, strict=False)]


@pytest.mark.quick("native-gemma3")
@pytest.mark.parametrize("name", PLAIN)
def test_logits_do_not_depend_on_how_the_prompt_is_cut(name: str, directories: Directories, backend: Backend) -> None:
    pair = Pair(directories(name), backend)
    prompt = prompts(pair)["many images"]
    count, (start, span) = len(prompt.token_ids), prompt.spans[0]
    whole = pair.driver.run(pair.request(prompt), [])
    for sizes in ([1] * count, [4] * count, [5, *[7] * count], [start, span.num_tokens], [start + 3, 2], [count - 1]):
        pair.driver.reset()
        chunks = whole_pieces(pair, prompt, [size for size in sizes if size])
        assert torch.equal(pair.driver.run(pair.request(prompt), chunks), whole), sizes[:3]


@pytest.mark.quick("native")
@pytest.mark.parametrize("name", PLAIN)
def test_a_shared_prefix_gives_the_same_logits(name: str, directories: Directories, backend: Backend) -> None:
    """The hit ends before, inside and behind a picture, also one whose rows see each other."""
    pair = Pair(directories(name), backend)
    one, other = picture(60, 40, 1), picture(31, 90, 2)
    source = pair.request(pair.prompt("<s>abc", one, "def", other, "gh"))
    pair.driver.run(source, [])
    prompt = pair.prompt("<s>abc", one, "def", other, "ij")
    alone = pair.driver.run(pair.request(prompt), [])
    start, span = prompt.spans[0]
    for hit in (start - 1, start + span.num_tokens // 2, start + span.num_tokens, len(prompt.token_ids) - 3):
        request = pair.request(prompt)
        pair.driver.fork(request, source, hit)
        hit = request.num_computed
        assert torch.equal(pair.driver.run(request, []), alone[hit:]), f"hit of {hit} tokens"


@pytest.mark.quick("native-smolvlm")
@pytest.mark.parametrize("name", PLAIN)
def test_mixed_batches_match_each_request_alone(name: str, directories: Directories, backend: Backend) -> None:
    pair = Pair(directories(name), backend, num_blocks=2048)
    rng, driver = random.Random(4), pair.driver
    asked = list(prompts(pair).values())
    requests = [pair.request(prompt) for prompt in asked]
    wanted = [rng.randrange(4, 12) for _ in asked]
    chunks = [whole_pieces(pair, prompt, [rng.randrange(1, 60) for _ in range(200)]) for prompt in asked]

    def num_generated(index: int) -> int:
        return len(requests[index].token_ids) - len(asked[index].token_ids)

    while unfinished := [i for i in range(len(asked)) if num_generated(i) < wanted[i]]:
        chosen = rng.sample(unfinished, rng.randrange(1, len(unfinished) + 1))
        work = [(requests[i], chunks[i].pop(0) if chunks[i] else 1) for i in chosen]
        for (request, _), logits in zip(work, driver.step(work), strict=True):
            if request.num_left == 0:
                request.token_ids.append(int(logits.argmax()))
    for index, prompt in enumerate(asked):
        mixed = requests[index].token_ids[len(prompt.token_ids) :]
        assert mixed == driver.generate(pair.request(prompt), wanted[index])


@pytest.mark.slow
@pytest.mark.parametrize("name", PLAIN)
def test_halves_of_a_model_work_together(name: str, directories: Directories) -> None:
    backend = create_backend("cpu", torch.float32, backend=BACKENDS[-1], threads=1)
    whole = Pair(directories(name), backend)
    prompt = prompts(whole)["one image"]
    expected = whole.driver.generate(whole.request(prompt), 8)
    encoder, prefiller, decoder = (Pair(directories(name), backend, role=Role.parse(role)).driver for role in "EPD")
    slots = encoder.encode([span for _, span in prompt.spans])
    prefiller.image_cache.data.copy_(encoder.image_cache.data)
    starts = [start for start, _ in prompt.spans]
    placed = list(zip(starts, slots, strict=True))
    request = prefiller.request(prompt.token_ids, placed, rope=prompt.rope, rope_delta=prompt.rope_delta)
    tokens = [int(prefiller.run(request, [])[-1].argmax())]
    decoder.adopt(request, prefiller)
    for _ in range(7):
        request.token_ids.append(tokens[-1])
        (logits,) = decoder.step([(request, 1)])
        tokens.append(int(logits.argmax()))
    assert tokens == expected
    total = whole.driver.model.weights_bytes
    assert encoder.model.weights_bytes < 0.6 * total and decoder.model.weights_bytes < total
    assert encoder.model.weights_bytes + decoder.model.weights_bytes >= total  # both hold the embeddings


@pytest.mark.slow
@pytest.mark.parametrize("name", [*(pytest.param(name, marks=pytest.mark.slow) for name in PLAIN[:-1]), PLAIN[-1]])
def test_bfloat16_is_as_good_as_transformers_in_bfloat16(name: str, directories: Directories) -> None:
    pair = Pair(directories(name), create_backend("cpu", torch.bfloat16, backend=BACKENDS[-1], threads=1))
    truths = {}
    for what, prompt in prompts(pair).items():
        truths[what] = prompt, pair.logits(prompt)
    pair.reference.to(torch.bfloat16)
    ours = theirs = 0.0
    for prompt, truth in truths.values():
        pair.driver.reset()
        ours += float((pair.driver.run(pair.request(prompt), []) - truth).square().mean())
        inputs = {name: x.bfloat16() if x.is_floating_point() else x for name, x in pair.inputs(prompt).items()}
        with torch.inference_mode():
            theirs += float((pair.reference(**inputs).logits[0].float() - truth).square().mean())
    assert ours <= 2 * theirs
