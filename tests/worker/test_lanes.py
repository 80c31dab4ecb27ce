"""Whole steps through the worker: right tokens, failures that stay with their owner, lanes that do not wait."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch

from hydra_engine.core.plans import VisionPlan
from hydra_engine.core.request import Request
from hydra_engine.core.results import VisionResult
from tests.faults.points import FaultPoints
from tests.worker.fakes import (
    BAD_PIXEL,
    IMAGE_TOKENS,
    NAN_PIXEL,
    NAN_TOKEN,
    POISON_TOKEN,
    FakeModel,
    Rig,
    fake_logits,
    make_picture,
    make_request,
    picture_features,
    plan_of,
)


@pytest.fixture(params=[False, True], ids=["synchronous", "asynchronous"])
def rig(request: pytest.FixtureRequest) -> Iterator[Rig]:
    rig = Rig(faults=FaultPoints(), asynchronous=request.param)
    yield rig
    rig.worker.close()


def alone(request: Request, **options: int) -> list[int]:
    """Tokens of the request in an engine of its own."""
    rig = Rig()
    rig.add(request)
    tokens = rig.generate(request, **options)[0]
    rig.worker.close()
    return tokens


def mixed_requests() -> list[Request]:
    return [
        make_request(1, range(3, 20)),
        make_request(2, range(30, 39), temperature=1.0, seed=5, top_p=0.9),
        make_request(3, [4, 4, 4], temperature=0.8, seed=6, presence_penalty=1.0, repetition_penalty=1.2),
        make_request(4, range(50, 61), temperature=1.5, seed=7, top_k=10, min_p=0.02, logprobs=3),
        make_request(5, [8], frequency_penalty=2.0, min_tokens=6),
    ]


def test_greedy_tokens_are_those_of_the_model_over_the_paged_context(rig: Rig) -> None:
    request = make_request(1, range(3, 20))
    rig.add(request)
    history = list(request.prompt_token_ids)
    for token in rig.generate(request, chunk=5)[0]:
        assert token == int(fake_logits([float(t) for t in history]).argmax())
        history.append(token)


@pytest.mark.parametrize("chunk", [1, 3, 1000])
def test_tokens_do_not_depend_on_the_rest_of_the_batch_or_on_chunks(rig: Rig, chunk: int) -> None:
    requests = mixed_requests()
    for request in requests:
        rig.add(request)
    together = rig.generate(*requests, chunk=chunk)
    assert together == [alone(request) for request in requests]
    assert all(len(tokens) == 8 for tokens in together)


def test_a_preempted_request_goes_on_with_the_same_tokens(rig: Rig) -> None:
    request = make_request(3, [4, 4, 4], temperature=0.8, seed=6, frequency_penalty=0.9)
    expected = alone(request)
    rig.add(request)
    head = rig.generate(request, steps=4)[0]
    rig.move(request)
    tokens = [*request.prompt_token_ids, *head]
    (outcome,) = rig.language(rig.row(request, 0, tokens, 4))
    assert [*head, outcome.token_id] == expected[:5]
    (outcome,) = rig.language(rig.row(request, len(tokens), [-1], 5))
    assert outcome.token_id == expected[5]


def test_a_chunk_that_ends_early_samples_nothing(rig: Rig) -> None:
    request = make_request(1, range(3, 20))
    rig.add(request)
    (outcome,) = rig.language(rig.row(request, 0, request.prompt_token_ids[:5], 0))
    assert outcome.token_id is None and outcome.error is None and outcome.logprobs is None


def test_logprobs_come_with_the_tokens(rig: Rig) -> None:
    request = make_request(4, range(50, 61), logprobs=3)
    rig.add(request)
    (outcome,) = rig.language(rig.row(request, 0, request.prompt_token_ids, 0))
    logits = fake_logits([float(t) for t in request.prompt_token_ids])
    assert outcome.logprobs.token_id == outcome.token_id and outcome.logprobs.rank == 1
    assert len(outcome.logprobs.top) == 3
    assert outcome.logprobs.logprob == pytest.approx(float(logits.log_softmax(-1).max()), abs=1e-5)


# ---- failures stay with their owner


@pytest.mark.parametrize(("bad_token", "code"), [(POISON_TOKEN, "internal_error"), (NAN_TOKEN, "numerical_error")])
def test_one_poison_row_among_four_fails_alone(
    rig: Rig, bad_token: int, code: str, caplog: pytest.LogCaptureFixture
) -> None:
    healthy = mixed_requests()[:4]
    poison = make_request(9, [5, bad_token, 6])
    for request in (*healthy, poison):
        rig.add(request)
    rows = [rig.row(r, 0, r.prompt_token_ids, 0) for r in (healthy[0], poison, *healthy[1:])]
    with caplog.at_level(logging.ERROR):
        outcomes = rig.language(*rows)
    error = outcomes[1].error
    assert (error.kind, error.code) == ("RequestFailed", code)
    assert outcomes[1].token_id is None
    assert "secret" not in error.message
    assert ("secret" in caplog.text) == (bad_token == POISON_TOKEN)  # the log has the traceback
    others = [o for o in outcomes if o.request_id != poison.id]
    assert [[o.token_id] for o in others] == [alone(r, steps=1) for r in healthy]


def test_an_exception_text_reaches_the_log_only(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    poison = make_request(9, [POISON_TOKEN])
    rig.add(poison)
    (outcome,) = rig.language(rig.row(poison, 0, poison.prompt_token_ids, 0))
    assert "secret" not in outcome.error.message and "secret" in caplog.text
    rig.add(make_request(1, [5, 6]))  # and the lane still serves
    assert rig.generate(make_request(1, [5, 6]))[0] == alone(make_request(1, [5, 6]))


def test_a_request_whose_sampling_fails_fails_alone(rig: Rig) -> None:
    everything = tuple(range(64))
    broken = make_request(1, [5], min_tokens=1, stop_token_ids=everything)
    healthy = make_request(2, [6])
    model = rig.model
    model.vocabulary = 64
    for request in (broken, healthy):
        rig.add(request)
    outcomes = rig.language(rig.row(broken, 0, [5], 0), rig.row(healthy, 0, [6], 0))
    assert outcomes[0].error.param == "min_tokens" and outcomes[0].token_id is None
    assert outcomes[1].token_id == int(fake_logits([6.0], 64).argmax())


def test_injected_faults_hit_only_matching_requests(rig: Rig) -> None:
    requests = [make_request(1, [5, 6]), make_request(2, [7, 8]), make_request(3, [9, 10], temperature=1.0, seed=3)]
    for request in requests:
        rig.add(request)
    expected = [alone(request, steps=1) for request in requests]
    rows = [rig.row(r, 0, r.prompt_token_ids, 0) for r in requests]
    cases = [
        ("eng.before_step", "raise", "internal_error"),
        ("eng.mid_step", "raise", "internal_error"),
        ("eng.mid_step", "nan", "numerical_error"),
    ]
    for point, action, code in cases:
        rig.worker.faults.arm(point, action, "token=8")
        outcomes = rig.language(*rows)
        assert outcomes[1].error.code == code
        assert [[outcomes[i].token_id] for i in (0, 2)] == [expected[0], expected[2]]
        rig.worker.faults.arm(point, "off")
    assert [[o.token_id] for o in rig.language(*rows)] == expected


def test_a_step_that_fails_once_costs_nobody_anything(rig: Rig) -> None:
    requests = mixed_requests()
    for request in requests:
        rig.add(request)
    rig.worker.faults.arm("eng.mid_step", "raise", "times=1")
    assert rig.generate(*requests) == [alone(request) for request in requests]


# ---- pictures


def picture_request(request_id: int, *fills: int, width: int = 8) -> tuple[Request, list]:
    """Text, then pictures with one text token behind each."""
    prompt, images, pixels = [3, 4, 5], [], []
    for index, fill in enumerate(fills):
        image, payload = make_picture(f"{request_id}.{index}.{fill}", fill, len(prompt), width=width)
        prompt += [96] * IMAGE_TOKENS + [10 + index]
        images.append(image)
        pixels.append(payload)
    return make_request(request_id, prompt, images=tuple(images)), pixels


def context_of(request: Request, pixels: list) -> list[float]:
    context = [float(t) for t in request.prompt_token_ids]
    for image, payload in zip(request.images, pixels, strict=True):
        picture = torch.from_numpy(np.frombuffer(payload.data, np.uint8).reshape(1, 8, -1, 3).copy())
        context[image.start : image.end] = picture_features(picture)[0].tolist()
    return context


@pytest.mark.parametrize("chunk", [1, 4, 7, 1000])
def test_image_features_reach_their_positions_whatever_the_chunks(rig: Rig, chunk: int) -> None:
    request, pixels = picture_request(1, 10, 20, 30)
    rig.add(request, pixels)
    errors = rig.vision(*(rig.item(request, index) for index in (2, 0, 1)))
    assert errors == (None, None, None)
    expected = int(fake_logits(context_of(request, pixels)).argmax())
    assert rig.generate(request, chunk=chunk, steps=1) == [[expected]]


def test_pictures_of_all_sizes_share_an_encode(rig: Rig) -> None:
    small, small_pixels = picture_request(1, 10, 20)
    wide, wide_pixels = picture_request(2, 30, 40, width=16)
    rig.add(small, small_pixels)
    rig.add(wide, wide_pixels)
    items = [rig.item(small, 0), rig.item(wide, 0), rig.item(small, 1), rig.item(wide, 1)]
    assert not any(rig.vision(*items))
    assert rig.model.batch_sizes == [4]
    for request, pixels in ((small, small_pixels), (wide, wide_pixels)):
        expected = int(fake_logits(context_of(request, pixels)).argmax())
        assert rig.generate(request, steps=1) == [[expected]]


@pytest.mark.parametrize(("fill", "code"), [(BAD_PIXEL, "internal_error"), (NAN_PIXEL, "numerical_error")])
def test_a_bad_picture_fails_alone(rig: Rig, fill: int, code: str) -> None:
    request, pixels = picture_request(1, 10, fill, 30)
    other, other_pixels = picture_request(2, 40)
    rig.add(request, pixels)
    rig.add(other, other_pixels)
    items = [*(rig.item(request, index) for index in range(3)), rig.item(other, 0)]
    errors = rig.vision(*items)
    assert [error and error.code for error in errors] == [None, code, None, None]
    expected = int(fake_logits(context_of(other, other_pixels)).argmax())
    assert rig.generate(other, steps=1) == [[expected]]


def test_missing_pixels_fail_their_picture_only(rig: Rig) -> None:
    request, pixels = picture_request(1, 10, 20)
    rig.add(request, pixels[:1])
    errors = rig.vision(rig.item(request, 0), rig.item(request, 1))
    assert [error is None for error in errors] == [True, False]


def test_pixels_that_are_too_short_fail_their_picture_only(rig: Rig) -> None:
    request, pixels = picture_request(1, 10, 20)
    rig.add(request, [pixels[0], replace(pixels[1], data=b"short")])
    errors = rig.vision(rig.item(request, 0), rig.item(request, 1))
    assert [error is None for error in errors] == [True, False]


@pytest.mark.parametrize("action", ["raise", "nan"])
def test_injected_vision_faults_hit_only_matching_requests(rig: Rig, action: str) -> None:
    bad, bad_pixels = picture_request(1, 10)
    good, good_pixels = picture_request(2, 20)
    rig.add(bad, bad_pixels)
    rig.add(good, good_pixels)
    rig.worker.faults.arm("vis.before_step", action, "request=1")
    errors = rig.vision(rig.item(bad, 0), rig.item(good, 0))
    assert [error is None for error in errors] == [False, True]


# ---- two lanes


def test_language_steps_go_on_while_an_encode_runs() -> None:
    gate = threading.Event()
    rig = Rig(FakeModel(encode_gate=gate))
    request, pixels = picture_request(1, 10)
    text = make_request(2, range(3, 12))
    rig.add(request, pixels)
    rig.add(text)
    step = rig.next_step()
    rig.worker.submit_vision(VisionPlan(step, (rig.item(request, 0),)))
    tokens = rig.generate(text)[0]  # eight steps come back while the encode holds its lane
    assert tokens == alone(text)
    last_language_s = time.monotonic()
    gate.set()
    result = rig.wait(step)
    assert isinstance(result, VisionResult) and result.errors[0] is None
    assert result.started_s < last_language_s < result.ended_s
    assert rig.model.encode_threads == {"vision"} and rig.model.forward_threads == {"language"}
    rig.worker.close()


def test_results_of_a_lane_come_in_order_and_wake_the_loop(rig: Rig) -> None:
    request = make_request(1, range(3, 12))
    rig.add(request)
    row = rig.row(request, 0, request.prompt_token_ids, 0)
    steps = [rig.next_step() for _ in range(5)]
    for step in steps:
        rig.worker.submit_language(plan_of(step, (row,)))
    seen = []
    while len(seen) < 5:
        assert rig.woken.wait(30)
        rig.woken.clear()
        seen += [result.step_id for result in rig.worker.poll()]
    assert seen == steps
    assert rig.worker.poll() == []


def test_empty_plans_come_back_empty(rig: Rig) -> None:
    assert rig.language() == () and rig.vision() == ()
