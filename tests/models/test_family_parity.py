"""Native families against transformers in float32: positions, features, embeddings, logits, greedy tokens,
however the work is cut, shared or mixed. The cases are in families/; the table of
docs/models.md is made from these tests.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
import transformers
from _pytest.mark import ParameterSet
from packaging.version import Version
from torch import Tensor

from hydra_engine.backend.base import Backend
from hydra_engine.backend.select import create_backend
from hydra_engine.core.instances import Role
from tests.models.conftest import BACKENDS
from tests.models.driver import Driver
from tests.models.families.base import Checkpoints, FamilyCase, Pair, Prompt, Reference, conversations, picture, words
from tests.models.families.cases import CASES
from tests.support_table import record
from tools.miniatures.base import BOS_ID

TOLERANCE = 1e-4
NUM_GREEDY = 64
NUM_STEPS = 16  # that transformers takes one by one
DRIVER = {"num_blocks": 768}


def param(case: FamilyCase, variant: str, name: str) -> ParameterSet:
    is_older = Version(transformers.__version__) < Version(case.reference_from)
    mark = pytest.mark.skipif(is_older, reason=f"transformers runs this family from {case.reference_from} on")
    return pytest.param(case, variant, id=name, marks=mark)


ALL = [param(case, variant, f"{case.family}-{variant}") for case in CASES.values() for variant in case.variants]
PLAIN = [param(case, next(iter(case.variants)), case.family) for case in CASES.values()]
# A decoder that keeps a state per request besides keys and values.
STATEFUL = [
    param(case, "hybrid", f"{case.family}-hybrid") for case in CASES.values() if "hybrid" in list(case.variants)[1:]
]
STATELESS = [one for one in PLAIN if one.values[1] != "hybrid"]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    return Checkpoints(tmp_path_factory.mktemp("families"))


@pytest.fixture(autouse=True)
def row(request: pytest.FixtureRequest, case: FamilyCase, record_property: Callable[[str, object], None]) -> None:
    """Records the test for the table of docs/models.md."""
    record(request.node.name, case.family, record_property)


def assert_close(actual: Tensor, expected: Tensor, what: str) -> float:
    """The largest difference."""
    assert actual.shape == expected.shape, what
    assert torch.isfinite(actual).all(), what
    difference = (actual - expected).abs().max().item()
    assert difference <= TOLERANCE, f"{what}: largest difference {difference:.3g}"
    return difference


def assert_greedy(pair: Pair, prompt: Prompt, generated: list[int], what: str) -> None:
    """Raises AssertionError unless each token is what transformers finds likeliest after those before it, so that it
    would generate the same; one pass checks them all. Where transformers has a tie, two logits nearer to each other
    than the tolerance of logits, either is right: rounding, which differs from processor to processor, breaks those."""
    logits = pair.reference.logits_of(generated, prompt)
    chosen = logits.gather(1, torch.tensor(generated)[:, None])[:, 0]
    gaps = (logits.amax(1) - chosen).tolist()
    worst = max(range(len(gaps)), key=gaps.__getitem__)
    assert gaps[worst] <= TOLERANCE, f"{what}: token {worst} is {generated[worst]}, worse by {gaps[worst]:.3g}"


@pytest.mark.parametrize(("case", "variant"), ALL)
def test_positions_match(case: FamilyCase, variant: str, checkpoints: Checkpoints) -> None:
    pair = Pair(
        case,
        variant,
        checkpoints.of(case, variant),
        create_backend("cpu", torch.float32, backend="reference", threads=1),
    )
    if pair.spec.language.rope_sections is None:
        assert all(not prompt.ropes for prompt in conversations(case, pair).values())
        return
    for name, prompt in conversations(case, pair).items():
        positions, delta = pair.reference.rope(prompt)
        assert torch.equal(prompt.rope(), positions), name
        assert prompt.rope_delta == delta, name


@pytest.mark.quick("native")
@pytest.mark.parametrize(("case", "variant"), ALL)
def test_features_match(case: FamilyCase, variant: str, checkpoints: Checkpoints, backend: Backend) -> None:
    pair = Pair(case, variant, checkpoints.of(case, variant), backend, **DRIVER)
    media = [picture(size, 3) for size in (*case.sizes, *case.extreme)]
    expected = pair.reference.features(media)
    spans = iter(pair.driver.encode(pair.spans(media)))
    for one, planes in zip(media, expected, strict=True):
        slots = [slot for _ in pair.plan(one)[0].items for slot in next(spans)]
        for plane, rows in enumerate(planes):
            assert_close(pair.driver.features(slots, plane), rows, f"{one.size}, plane {plane}")
        assert len(planes) == pair.vision.num_planes


@pytest.mark.quick("native", "llava-plain")
@pytest.mark.parametrize(("case", "variant"), ALL)
def test_logits_and_greedy_tokens_match(
    case: FamilyCase,
    variant: str,
    checkpoints: Checkpoints,
    backend: Backend,
    record_property: Callable[[str, object], None],
) -> None:
    pair = Pair(case, variant, checkpoints.of(case, variant), backend, **DRIVER)
    largest = 0.0
    for name, prompt in conversations(case, pair).items():
        pair.driver.reset()
        logits = pair.driver.run(pair.request(prompt), [])
        largest = max(largest, assert_close(logits, pair.reference.logits(prompt), name))
        # The reference ops are slow; where there are better ones, their word is good for the beginning.
        count = NUM_GREEDY if backend.ops.name == BACKENDS[-1] else NUM_GREEDY // 8
        generated = pair.driver.generate(pair.request(prompt), count, [11])
        assert len(generated) == count
        assert_greedy(pair, prompt, generated, name)
    record_property("difference", largest)


@pytest.mark.parametrize(("case", "variant"), PLAIN)
def test_transformers_generates_the_same(case: FamilyCase, variant: str, checkpoints: Checkpoints) -> None:
    """Generation by transformers, step by step over its own cache, passes the measure of the test above. Another
    implementation that passes it differs from transformers in ties alone."""
    backend = create_backend("cpu", torch.float32, backend=BACKENDS[-1], threads=1)
    pair = Pair(case, variant, checkpoints.of(case, variant), backend, **DRIVER)
    prompt = conversations(case, pair)["two turns"]
    assert_greedy(pair, prompt, pair.reference.generate(prompt, NUM_STEPS), "two turns")


@pytest.mark.quick("native")
@pytest.mark.parametrize(("case", "variant"), PLAIN)
def test_merged_embeddings_match(case: FamilyCase, variant: str, checkpoints: Checkpoints, backend: Backend) -> None:
    pair = Pair(case, variant, checkpoints.of(case, variant), backend, **DRIVER)
    prompt = conversations(case, pair)["many images"]
    assert_close(pair.driver.embeddings(pair.request(prompt)), pair.reference.embeddings(prompt), "many images")


@pytest.mark.quick("native")
@pytest.mark.parametrize(("case", "variant"), [*PLAIN, *STATEFUL])
def test_logits_do_not_depend_on_how_the_prompt_is_cut(
    case: FamilyCase, variant: str, checkpoints: Checkpoints, backend: Backend
) -> None:
    pair = Pair(case, variant, checkpoints.of(case, variant), backend, **DRIVER)
    prompt = conversations(case, pair)["many images"]
    (start, item), count = prompt.spans[0], len(prompt.token_ids)
    whole = pair.driver.run(pair.request(prompt), [])
    cuts = {
        "one token at a time": [1] * count,
        "at block ends": [4] * count,
        "one past block ends": [5, *[4] * count],
        "at the image": [start, item.num_tokens] if start else [item.num_tokens],
        "inside the image": [start + 1, item.num_tokens - 2],
        "after the image": [start + item.num_tokens],
        "all but the last token": [count - 1],
    }
    for name, chunks in cuts.items():
        pair.driver.reset()
        assert torch.equal(pair.driver.run(pair.request(prompt), [n for n in chunks if n > 0]), whole), f"cut {name}"


@pytest.mark.quick("native")
@pytest.mark.parametrize(("case", "variant"), STATELESS)
def test_a_shared_prefix_gives_the_same_logits(
    case: FamilyCase, variant: str, checkpoints: Checkpoints, backend: Backend
) -> None:
    """Two prompts with the same beginning; the hit ends before, inside and behind a picture."""
    pair = Pair(case, variant, checkpoints.of(case, variant), backend, **DRIVER)
    first, second = picture(case.sizes[0], 1), picture(case.sizes[1], 2)
    begin = [BOS_ID, *words(21, 6)]
    source = pair.request(pair.prompt(begin, first, words(22, 9), second, words(23, 4)))
    pair.driver.run(source, [])
    prompt = pair.prompt(begin, first, words(22, 9), second, words(24, 7))
    alone = pair.driver.run(pair.request(prompt), [])
    (at, item), (_, _) = prompt.spans[0], prompt.spans[-1]
    shared = len(prompt.token_ids) - 7
    for hit in (len(begin) - 1, at + item.num_tokens // 2, at + item.num_tokens, shared):
        request = pair.request(prompt)
        pair.driver.fork(request, source, hit)
        hit = request.num_computed
        assert torch.equal(pair.driver.run(request, [5]), alone[hit:]), f"hit of {hit} tokens"


@pytest.mark.quick("native")
@pytest.mark.parametrize(("case", "variant"), [*PLAIN, *STATEFUL])
def test_mixed_batches_match_each_request_alone(
    case: FamilyCase, variant: str, checkpoints: Checkpoints, backend: Backend
) -> None:
    """Random steps over all kinds of prompt: decodes beside prefill chunks, some ending inside images."""
    pair = Pair(case, variant, checkpoints.of(case, variant), backend, num_blocks=2048)
    rng, driver = random.Random(4), pair.driver
    prompts = list(conversations(case, pair).values())
    requests = [pair.request(prompt) for prompt in prompts]
    wanted = [rng.randrange(4, 12) for _ in prompts]

    def num_generated(index: int) -> int:
        return len(requests[index].token_ids) - len(prompts[index].token_ids)

    while unfinished := [i for i in range(len(prompts)) if num_generated(i) < wanted[i]]:
        chosen = rng.sample(unfinished, rng.randrange(1, len(unfinished) + 1))
        work = [(requests[i], rng.randrange(1, requests[i].num_left + 1)) for i in chosen]
        for (request, _), logits in zip(work, driver.step(work), strict=True):
            if request.num_left == 0:
                request.token_ids.append(int(logits.argmax()))
    for index, prompt in enumerate(prompts):
        mixed = requests[index].token_ids[len(prompt.token_ids) :]
        assert mixed == driver.generate(pair.request(prompt), wanted[index])


@pytest.mark.quick("native")
@pytest.mark.parametrize(("case", "variant"), PLAIN)
def test_a_picture_has_the_same_features_in_any_company(
    case: FamilyCase, variant: str, checkpoints: Checkpoints, backend: Backend
) -> None:
    pair = Pair(case, variant, checkpoints.of(case, variant), backend, **DRIVER)
    spans = pair.spans([picture(size, 3) for size in (*case.sizes, *case.extreme)])
    together = [pair.driver.features(slots) for slots in pair.driver.encode(spans)]
    for span, features in zip(spans, together, strict=True):
        (alone,) = pair.driver.encode([span])
        assert torch.equal(pair.driver.features(alone), features)


@pytest.mark.quick("native")
@pytest.mark.parametrize(("case", "variant"), [*PLAIN, *STATEFUL])
def test_a_row_has_the_same_bits_in_any_batch(
    case: FamilyCase, variant: str, checkpoints: Checkpoints, backend: Backend
) -> None:
    pair = Pair(case, variant, checkpoints.of(case, variant), backend, **DRIVER)
    driver, prompts = pair.driver, conversations(case, pair)
    alone = driver.run(pair.request(prompts["one image"]), [9])
    crowd = [pair.request(prompts[kind]) for kind in ("text only", "many images", "two turns")]
    target = pair.request(prompts["one image"])
    logits = [driver.step([(crowd[0], 3), (target, 9), (crowd[1], 20)], all_logits=True)[1]]
    driver.step([(crowd[2], 12), (crowd[1], 1)], want_logits=False)
    logits += driver.step([(crowd[2], 10), (crowd[1], 1), (target, target.num_left)], all_logits=True)[2:]
    assert torch.equal(torch.cat(logits), alone)


@pytest.mark.parametrize(("case", "variant"), [*PLAIN, *STATEFUL])
def test_halves_of_a_model_work_together(case: FamilyCase, variant: str, checkpoints: Checkpoints) -> None:
    """E encodes, P computes the prompt, D goes on from copied caches: the tokens of one whole model."""
    model_dir = checkpoints.of(case, variant)
    backend = create_backend("cpu", torch.float32, backend=BACKENDS[-1], threads=1)
    whole = Pair(case, variant, model_dir, backend, **DRIVER)
    prompt = conversations(case, whole)["one image"]
    expected = whole.driver.generate(whole.request(prompt), 8)
    encoder, prefiller, decoder = (Driver(model_dir, backend, role=Role.parse(role), **DRIVER) for role in "EPD")
    slots = encoder.encode(whole.spans(prompt.media))
    prefiller.image_cache.data.copy_(encoder.image_cache.data)
    starts = [start for start, _ in prompt.spans]
    rope = prompt.rope() if prompt.ropes else None
    request = prefiller.request(prompt.token_ids, list(zip(starts, slots, strict=True)), rope, prompt.rope_delta)
    tokens = [int(prefiller.run(request, [5])[-1].argmax())]
    decoder.adopt(request, prefiller)
    for _ in range(7):
        request.token_ids.append(tokens[-1])
        (logits,) = decoder.step([(request, 1)])
        tokens.append(int(logits.argmax()))
    assert tokens == expected
    assert encoder.model.weights_bytes + decoder.model.weights_bytes == whole.driver.model.weights_bytes


@pytest.mark.quick("[llava]")
@pytest.mark.parametrize(("case", "variant"), [*PLAIN, *STATEFUL])
def test_bfloat16_is_as_good_as_transformers_in_bfloat16(
    case: FamilyCase, variant: str, checkpoints: Checkpoints
) -> None:
    """Mean squared error against float32, over prompts of several kinds: at most twice that of transformers."""
    model_dir = checkpoints.of(case, variant)
    pair = Pair(
        case, variant, model_dir, create_backend("cpu", torch.bfloat16, backend=BACKENDS[-1], threads=1), **DRIVER
    )
    half = Reference.of(case, model_dir, torch.bfloat16)
    ours = theirs = 0.0
    prompts = conversations(case, pair)
    for prompt in (prompts["one image"], prompts["many images"], prompts["two turns"]):
        pair.driver.reset()
        truth = pair.reference.logits(prompt)
        ours += _error(pair.driver.run(pair.request(prompt), [13]), truth)
        theirs += _error(half.logits(prompt), truth)
    assert ours <= 2 * theirs


def _error(logits: Tensor, truth: Tensor) -> float:
    return float((logits - truth).square().mean())
