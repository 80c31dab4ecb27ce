"""Encodes cut into pieces: waits between them change no bit, whatever the family and wherever the cut is; and every
piece has the size that was asked for.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from hydra_engine.backend.base import Backend
from hydra_engine.backend.select import create_backend
from hydra_engine.clock import MonotonicClock
from hydra_engine.core.instances import Role
from hydra_engine.models.layers.vision import Slices, attention_pieces
from hydra_engine.worker.vision.gate import LaneGate
from hydra_transformers.surgery import call_before_listed
from tests.examples import examples
from tests.models.conftest import BACKENDS
from tests.models.driver import Driver, Span
from tests.models.families.base import Checkpoints, FamilyCase, Pair, clip, picture
from tests.models.families.cases import CASES
from tests.models.generic_pair import Pair as GenericPair
from tests.models.generic_pair import picture as any_picture
from tools.miniatures import make_tiny

PLAIN = [pytest.param(case, next(iter(case.variants)), id=case.family) for case in CASES.values()]
# Every variant on the best ops; the reference ops are slow, and plain models show all their paths.
RUNS = [
    pytest.param(case, variant, ops, id=f"{case.family}-{variant}-{ops}")
    for ops in BACKENDS
    for case in CASES.values()
    for variant in (case.variants if ops == BACKENDS[-1] else list(case.variants)[:1])
]
GENERIC = ("smolvlm", "gemma3", "llava")


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    return Checkpoints(tmp_path_factory.mktemp("sliced"))


@pytest.fixture(scope="module")
def generic_directory(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    root = tmp_path_factory.mktemp("sliced-generic")

    def of(family: str) -> Path:
        if not (root / family).exists():
            make_tiny(family, root / family, seed=3)
        return root / family

    return of


class Pauses:
    """A checkpoint that counts, and sleeps now and then so that other threads run."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self) -> None:
        self.count += 1
        if self.count % 5 == 1:
            time.sleep(1e-4)


def spans_of(pair: Pair) -> list[Span]:
    """Pictures of two sizes, one of them twice, a strange one, and a video where the family takes them."""
    case = pair.case
    sizes = (*case.sizes[:2], case.sizes[0], case.extreme[-1])
    clips = [clip(size, num_frames, fps) for size, num_frames, fps in case.clips[:1]]
    return pair.spans([*(picture(size, 3) for size in sizes), *clips])


def encoded(driver: Driver, spans: Sequence[Span], num_planes: int, **slicing: object) -> list[Tensor]:
    """Features of all spans, plane by plane."""
    driver.reset()
    slots = [slot for own in driver.encode(spans, **slicing) for slot in own]
    return [driver.features(slots, plane) for plane in range(num_planes)]


def assert_equal(actual: Sequence[Tensor], expected: Sequence[Tensor], what: str) -> None:
    for plane, (one, other) in enumerate(zip(actual, expected, strict=True)):
        assert torch.isfinite(other).all()
        assert torch.equal(one, other), f"{what}, plane {plane}"


@pytest.mark.drawn
@pytest.mark.quick("llava-gqa-native", "minicpmv4_6-plain-native", "qwen2_5_vl-plain-native")
@pytest.mark.parametrize(("case", "variant", "ops"), RUNS)
def test_waits_and_cuts_change_no_bit(case: FamilyCase, variant: str, ops: str, checkpoints: Checkpoints) -> None:
    backend = create_backend("cpu", torch.float32, backend=ops, threads=1)
    pair = Pair(case, variant, checkpoints.of(case, variant), backend)
    spans, planes = spans_of(pair), pair.vision.num_planes
    plain = encoded(pair.driver, spans, planes)
    seen = []
    for piece_rows in (0, 10**6, 37, 5):
        pauses = Pauses()
        sliced = encoded(pair.driver, spans, planes, checkpoint=pauses, piece_rows=piece_rows)
        assert_equal(sliced, plain, f"{piece_rows} rows")
        seen.append(pauses.count)
    num_slices = pair.driver.model.num_slices
    assert seen[0] == seen[1] == num_slices - 1, "as many pieces as the model says"
    assert seen[1] < seen[2] < seen[3], "smaller pieces are more pieces"
    alone = Pauses()
    pair.driver.encode(spans[:1], checkpoint=alone)
    assert alone.count == num_slices - 1, "pieces do not depend on the batch"


@pytest.mark.quick("[llava]", "qwen2_5_vl")
@pytest.mark.parametrize(("case", "variant"), PLAIN)
def test_cuts_change_no_bit_in_bfloat16(case: FamilyCase, variant: str, checkpoints: Checkpoints) -> None:
    """bfloat16 has kernels of its own."""
    backend = create_backend("cpu", torch.bfloat16, backend=BACKENDS[-1], threads=2)
    pair = Pair(case, variant, checkpoints.of(case, variant), backend)
    spans, planes = spans_of(pair), pair.vision.num_planes
    plain = encoded(pair.driver, spans, planes)
    for piece_rows in (37, 5):
        assert_equal(encoded(pair.driver, spans, planes, piece_rows=piece_rows), plain, f"{piece_rows} rows")


@pytest.mark.parametrize(("case", "variant"), PLAIN)
def test_every_layer_begins_behind_a_checkpoint(case: FamilyCase, variant: str, checkpoints: Checkpoints) -> None:
    """A tower asks the backend for attention at most once between two checkpoints."""
    backend = create_backend("cpu", torch.float32, backend="reference", threads=1)
    pair = Pair(case, variant, checkpoints.of(case, variant), backend)
    calls: list[str] = []
    attend = backend.ops.attention_packed
    backend.ops.attention_packed = lambda *args: calls.append("attention") or attend(*args)
    pair.driver.encode(spans_of(pair), checkpoint=lambda: calls.append("|"))
    pieces = "".join("a" if call == "attention" else "|" for call in calls).split("|")
    assert len(pieces) == pair.driver.model.num_slices and set(pieces) == {"", "a"}
    assert pieces[0] == pieces[-1] == ""


@pytest.mark.quick("[llava]", "qwen2_5_vl")
@pytest.mark.parametrize(("case", "variant"), PLAIN)
def test_no_call_gets_more_rows_than_a_piece(case: FamilyCase, variant: str, checkpoints: Checkpoints) -> None:
    backend = create_backend("cpu", torch.float32, backend="reference", threads=1)
    pair = Pair(case, variant, checkpoints.of(case, variant), backend)
    rows: list[int] = []
    linear = backend.ops.linear
    backend.ops.linear = lambda x, *args, **kwargs: rows.append(x.shape[0]) or linear(x, *args, **kwargs)
    spans = spans_of(pair)
    pair.driver.encode(spans)
    assert max(rows) > 24
    rows.clear()
    pair.driver.encode(spans, checkpoint=Pauses(), piece_rows=24)
    assert max(rows) <= 24


@pytest.mark.parametrize(("case", "variant"), PLAIN)
def test_an_encode_that_waits_in_every_step_has_the_same_features(
    case: FamilyCase, variant: str, checkpoints: Checkpoints
) -> None:
    """The gate is the real one, beside a lane whose steps leave no time at all."""
    backend = create_backend("cpu", torch.float32, backend=BACKENDS[-1], threads=1)
    pair = Pair(case, variant, checkpoints.of(case, variant), backend)
    spans, planes = spans_of(pair)[:2], pair.vision.num_planes
    plain = encoded(pair.driver, spans, planes)
    gate, done, num_steps = LaneGate(MonotonicClock()), threading.Event(), 0
    found: list[list[Tensor]] = []

    def encode() -> None:
        gate.enter()
        try:
            found.append(encoded(pair.driver, spans, planes, checkpoint=gate.checkpoint, piece_rows=16))
        finally:
            gate.leave()
            done.set()

    gate.begin(0.0)
    lane = threading.Thread(target=encode)
    lane.start()
    while not done.is_set():
        if gate._waiting:
            gate.end()
            num_steps += 1
            gate.begin(0.0)
        time.sleep(0)
    lane.join()
    gate.end()
    assert_equal(found[0], plain, "gate")
    assert num_steps >= pair.driver.model.num_slices


@pytest.mark.quick("smolvlm")
@pytest.mark.parametrize("family", GENERIC)
def test_models_of_transformers_wait_between_layers_and_pictures(
    family: str, generic_directory: Callable[[str], Path], backend: Backend
) -> None:
    pair = GenericPair(generic_directory(family), backend)
    sizes = [(60, 40), (31, 90), (28, 28)]
    parts = [any_picture(*size, seed) for seed, size in enumerate(sizes)]
    spans = [span for _, span in pair.prompt("<s>", *parts, "what?").spans]
    plain = encoded(pair.driver, spans, 1)
    pauses = Pauses()
    assert_equal(encoded(pair.driver, spans, 1, checkpoint=pauses), plain, family)
    model = pair.driver.model
    decoder = set(model._decoder.modules())
    lists = [m for m in model._module.modules() if isinstance(m, nn.ModuleList) and m not in decoder]
    num_layers = max(map(len, lists))
    assert model.num_slices >= num_layers + 1 > 2
    assert pauses.count == len(spans) * model.num_slices - 1
    after = pauses.count
    assert_equal(encoded(pair.driver, spans, 1), plain, "without a checkpoint again")
    assert pauses.count == after, "a checkpoint is forgotten when its encode has ended"


def test_a_failed_encode_of_transformers_forgets_its_checkpoint(generic_directory: Callable[[str], Path]) -> None:
    pair = GenericPair(generic_directory("llava"), create_backend("cpu", torch.float32, threads=1))
    ((_, span),) = pair.prompt("<s>", any_picture(30, 30), "?").spans

    def refuse() -> None:
        raise RuntimeError("stop here")

    with pytest.raises(RuntimeError, match="stop here"):
        pair.driver.encode([span], checkpoint=refuse)
    pair.driver.encode([span])


def test_decoder_layers_are_not_hooked(generic_directory: Callable[[str], Path]) -> None:
    """Decoder layers run in the other lane."""
    backend = create_backend("cpu", torch.float32, threads=1)
    pair = GenericPair(generic_directory("llava"), backend)
    assert all(not module._forward_pre_hooks for module in pair.driver.model._decoder.modules())
    text_only = nn.ModuleDict({"decoder": nn.ModuleList([nn.Linear(2, 2)]), "tower": nn.Linear(2, 2)})
    call_before_listed(text_only, text_only["decoder"], lambda: pytest.fail("no list outside the decoder"))
    text_only["decoder"][0](torch.zeros(1, 2))
    text_only["tower"](torch.zeros(1, 2))


def test_a_model_without_a_tower_has_no_slices(checkpoints: Checkpoints) -> None:
    backend = create_backend("cpu", torch.float32, threads=1)
    case = CASES["llava"]
    driver = Driver(checkpoints.of(case, next(iter(case.variants))), backend, role=Role.parse("D"))
    assert driver.model.num_slices == 0


# ---- the cuts themselves

LENGTHS = st.lists(st.integers(0, 40), max_size=12)


@settings(max_examples=examples(300), deadline=None)
@given(lengths=LENGTHS, num_heads=st.integers(1, 7), most=st.integers(1, 4000))
def test_attention_pieces_cover_every_head_of_every_segment_once(lengths: list[int], num_heads: int, most: int) -> None:
    bounds = [sum(lengths[:i]) for i in range(len(lengths) + 1)]
    covered: list[tuple[int, int]] = []
    for piece in attention_pieces(bounds, num_heads, most):
        pairs = sum(length**2 for length in lengths[piece.first : piece.last])
        heads = piece.head_end - piece.head
        assert pairs * heads <= most or (heads == 1 and sum(map(bool, lengths[piece.first : piece.last])) == 1)
        covered += [(s, h) for s in range(piece.first, piece.last) for h in range(piece.head, piece.head_end)]
    assert sorted(covered) == [(s, h) for s in range(len(lengths)) for h in range(num_heads)]


@settings(max_examples=examples(200), deadline=None)
@given(num_groups=st.integers(0, 50), group=st.sampled_from([1, 4, 16]), piece_rows=st.integers(0, 70))
def test_rows_are_computed_in_order_in_equal_pieces(num_groups: int, group: int, piece_rows: int) -> None:
    x = torch.arange(num_groups * group)
    log: list[int] = []

    def total(rows: Tensor) -> Tensor:
        log.append(rows.shape[0])
        return rows.view(-1, group).sum(1)

    found = Slices(lambda: log.append(-1), piece_rows).rows(total, x, group=group)
    assert torch.equal(found, x.view(-1, group).sum(1))
    sizes = log[::2]
    assert log[1::2] == [-1] * (len(sizes) - 1), "a checkpoint between any two pieces, and nowhere else"
    if piece_rows == 0:
        assert len(sizes) == 1
    else:
        assert max(sizes) <= max(-(-piece_rows // group) * group, group)
        assert max(sizes) - min(sizes) <= group
