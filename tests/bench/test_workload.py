"""Synthetic requests: shaped as asked, equal for equal seeds, with nothing of another load in them."""

from __future__ import annotations

import base64
import io
import json
from statistics import median

import pytest
from PIL import Image

from hydra_planner.workload.shapes import MIXED, SHAPES, TABLE_3, TEXT
from hydra_terminal.load.pictures import jpeg
from hydra_terminal.load.workload import Spec, Workload, body


@pytest.mark.parametrize("name", MIXED)
def test_requests_have_the_sizes_and_lengths_of_their_shape(name: str) -> None:
    shape = SHAPES[name]
    specs = Workload((name,)).specs(400)
    sizes = {(width, height) for width, height, _ in shape.sizes}
    for spec in specs:
        assert len(spec.pictures) == 1 and spec.pictures[0][:2] in sizes
        assert shape.text.least <= len(spec.question.split()) <= shape.text.most
        assert shape.output.least <= spec.max_tokens <= shape.output.most
    assert {spec.pictures[0][:2] for spec in specs} == sizes
    assert median(spec.max_tokens for spec in specs) == pytest.approx(shape.output.median, rel=0.15)


@pytest.mark.quick("mme")
@pytest.mark.parametrize("name", MIXED)
def test_as_many_questions_share_a_picture_as_in_the_data_set(name: str) -> None:
    pictures = {spec.pictures for spec in Workload((name,)).specs(3000)}
    assert 3000 / len(pictures) == pytest.approx(SHAPES[name].questions, rel=0.15)
    assert len({spec.pictures for spec in Workload((name,), reuse=False).specs(300)}) == 300


def test_a_load_repeats_with_new_pictures_and_words_but_the_same_shape() -> None:
    workload = Workload((*MIXED, "epd-2", "picture-chat"), text_share=0.3, seed=5)
    first, same, other = workload.specs(60, 1), workload.specs(60, 1), workload.specs(60, 2)
    assert first == same
    assert [(s.kind, s.max_tokens, [picture[:2] for picture in s.pictures]) for s in first] == [
        (s.kind, s.max_tokens, [picture[:2] for picture in s.pictures]) for s in other
    ]
    assert not {picture for s in first for picture in s.pictures} & {picture for s in other for picture in s.pictures}
    assert not {s.question for s in first} & {s.question for s in other}


def test_the_share_of_text_alone_and_the_scale_are_kept() -> None:
    specs = Workload(("textcaps",), text_share=0.4, scale=0.25).specs(1000)
    text = [spec for spec in specs if not spec.pictures]
    assert len(text) / 1000 == pytest.approx(0.4, abs=0.05)
    assert {spec.kind for spec in text} == {TEXT.name}
    assert {picture[:2] for spec in specs for picture in spec.pictures} == {(256, 192), (192, 256), (256, 171)}
    assert median(spec.max_tokens for spec in specs if spec.pictures) == pytest.approx(32, abs=3)


def test_a_body_freezes_the_output_and_carries_the_picture() -> None:
    spec = Spec("pope", ((64, 48, 3),), "what is this", 8)
    document = json.loads(body(spec, "m", "hydra"))
    picture, text = document["messages"][0]["content"]
    encoded = picture["image_url"]["url"].removeprefix("data:image/jpeg;base64,")
    assert Image.open(io.BytesIO(base64.b64decode(encoded))).size == (64, 48)
    assert text == {"type": "text", "text": "what is this"}
    assert (document["model"], document["max_tokens"], document["ignore_eos"]) == ("m", 8, True)
    assert document["stream"] and document["stream_options"]["include_usage"] and document["return_metrics"]
    assert "return_metrics" not in json.loads(body(spec, "m", "vllm"))
    assert "continuous_usage_stats" not in json.loads(body(spec, "m", "openai"))["stream_options"]
    assert len(json.loads(body(Spec("text", (), "hello", 8), "m", "vllm"))["messages"][0]["content"]) == 1


def test_requests_have_as_many_pictures_as_their_paper_says_and_all_are_sent() -> None:
    for name, count in (("epd-2", 2), ("epd-8", 8), ("epd-10-313x234", 10)):
        specs = Workload((name,), scale=0.01).specs(20)
        assert {len(spec.pictures) for spec in specs} == {count}
        assert len({picture for spec in specs for picture in spec.pictures}) == 20 * count, "no picture comes twice"
        assert {(len(spec.question.split()), spec.max_tokens) for spec in specs} == {(22, 10)}
        *shown, text = json.loads(body(specs[0], "m", "hydra"))["messages"][0]["content"]
        assert [part["type"] for part in shown] == ["image_url"] * count and text["type"] == "text"
        assert len({part["image_url"]["url"] for part in shown}) == count


def test_a_turn_repeats_what_was_said_before() -> None:
    specs = Workload(("picture-chat",), scale=0.1, seed=2).specs(60)
    repeated = 0
    for place, spec in enumerate(specs):
        before = [s for s in specs[:place] if spec.question.startswith(s.question + " ")]
        repeated += bool(before)
        assert all(s.pictures == spec.pictures for s in before)
    assert 25 <= repeated <= 50, "two thirds of the turns have others before them"


@pytest.mark.parametrize(
    ("text", "given", "share"),
    [
        ("mixed", None, 0.25),
        ("pope,mme", None, 0.25),
        ("epd-4", None, 0.0),
        ("epd-4,pope", None, 0.0),
        ("epd-4", 0.5, 0.5),
    ],
)
def test_papers_loads_get_no_text_alone_unless_asked(text: str, given: float | None, share: float) -> None:
    workload = Workload.named(text, given, 1.0, True, 0)
    assert workload.text_share == share and workload.shapes == (MIXED if text == "mixed" else tuple(text.split(",")))


def test_pictures_differ_by_seed_alone() -> None:
    assert jpeg(40, 30, 1) == jpeg(40, 30, 1)
    assert jpeg(40, 30, 1) != jpeg(40, 30, 2)


def test_every_shape_has_the_limits_of_the_paper() -> None:
    assert all(set(limits) == set(MIXED) for limits in TABLE_3.values())
