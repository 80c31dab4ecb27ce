"""Synthetic requests: shaped as asked, equal for equal seeds, with nothing of another load in them."""

from __future__ import annotations

import base64
import io
import json
from statistics import median

import pytest
from PIL import Image

from bench.serve.pictures import jpeg
from bench.serve.workload import Spec, Workload, body
from hydra_engine.planner.workload.shapes import SHAPES, TABLE_3, TEXT


@pytest.mark.parametrize("name", SHAPES)
def test_requests_have_the_sizes_and_lengths_of_their_shape(name: str) -> None:
    shape = SHAPES[name]
    specs = Workload((name,)).specs(400)
    sizes = {(width, height) for width, height, _ in shape.sizes}
    for spec in specs:
        assert spec.picture is not None and spec.picture[:2] in sizes
        assert shape.text.least <= len(spec.question.split()) <= shape.text.most
        assert shape.output.least <= spec.max_tokens <= shape.output.most
    assert {spec.picture[:2] for spec in specs if spec.picture} == sizes
    assert median(spec.max_tokens for spec in specs) == pytest.approx(shape.output.median, rel=0.15)


@pytest.mark.quick("mme")
@pytest.mark.parametrize("name", SHAPES)
def test_as_many_questions_share_a_picture_as_in_the_data_set(name: str) -> None:
    pictures = {spec.picture for spec in Workload((name,)).specs(3000)}
    assert 3000 / len(pictures) == pytest.approx(SHAPES[name].questions, rel=0.15)
    assert len({spec.picture for spec in Workload((name,), reuse=False).specs(300)}) == 300


def test_a_load_repeats_with_new_pictures_and_words_but_the_same_shape() -> None:
    workload = Workload(tuple(SHAPES), text_share=0.3, seed=5)
    first, same, other = workload.specs(60, 1), workload.specs(60, 1), workload.specs(60, 2)
    assert first == same
    assert [(s.kind, s.max_tokens, s.picture and s.picture[:2]) for s in first] == [
        (s.kind, s.max_tokens, s.picture and s.picture[:2]) for s in other
    ]
    assert not {s.picture for s in first if s.picture} & {s.picture for s in other if s.picture}
    assert not {s.question for s in first} & {s.question for s in other}


def test_the_share_of_text_alone_and_the_scale_are_kept() -> None:
    specs = Workload(("textcaps",), text_share=0.4, scale=0.25).specs(1000)
    text = [spec for spec in specs if spec.picture is None]
    assert len(text) / 1000 == pytest.approx(0.4, abs=0.05)
    assert {spec.kind for spec in text} == {TEXT.name}
    assert {spec.picture[:2] for spec in specs if spec.picture} == {(256, 192), (192, 256), (256, 171)}
    assert median(spec.max_tokens for spec in specs if spec.picture) == pytest.approx(32, abs=3)


def test_a_body_freezes_the_output_and_carries_the_picture() -> None:
    spec = Spec("pope", (64, 48, 3), "what is this", 8)
    document = json.loads(body(spec, "m", "hydra"))
    picture, text = document["messages"][0]["content"]
    encoded = picture["image_url"]["url"].removeprefix("data:image/jpeg;base64,")
    assert Image.open(io.BytesIO(base64.b64decode(encoded))).size == (64, 48)
    assert text == {"type": "text", "text": "what is this"}
    assert (document["model"], document["max_tokens"], document["ignore_eos"]) == ("m", 8, True)
    assert document["stream"] and document["stream_options"]["include_usage"] and document["return_metrics"]
    assert "return_metrics" not in json.loads(body(spec, "m", "vllm"))
    assert "continuous_usage_stats" not in json.loads(body(spec, "m", "openai"))["stream_options"]
    assert len(json.loads(body(Spec("text", None, "hello", 8), "m", "vllm"))["messages"][0]["content"]) == 1


def test_pictures_differ_by_seed_alone() -> None:
    assert jpeg(40, 30, 1) == jpeg(40, 30, 1)
    assert jpeg(40, 30, 1) != jpeg(40, 30, 2)


def test_every_shape_has_the_limits_of_the_paper() -> None:
    assert all(set(limits) == set(SHAPES) for limits in TABLE_3.values())
