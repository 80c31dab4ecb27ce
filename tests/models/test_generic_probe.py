"""Findings of the generic adapter about a model before it serves: whether answers depend on who shares a step or on
chunks, what several pictures in a prompt become, what a processor gives."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import wraps
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor
from transformers.models.phi3.modeling_phi3 import Phi3MLP

from hydra_engine.backend.base import Backend
from hydra_engine.backend.select import create_backend
from hydra_engine.clock import MonotonicClock
from hydra_engine.config import MediaConfig
from hydra_engine.core.call import ImagePart
from hydra_engine.core.instances import EPD
from hydra_engine.errors import CheckpointError, InvalidRequest
from hydra_engine.models.build import load_model
from hydra_engine.models.specs.base import ModelSpec
from hydra_engine.models.specs.registry import load_spec
from hydra_engine.preprocess.media.media import MediaLoader
from hydra_transformers.classes import image_inputs
from hydra_transformers.describe import _max_position, probe_picture
from hydra_transformers.processor import PictureProcessor
from tests.models.generic_pair import GENERIC, Pair, picture
from tools.miniatures import make_tiny
from tools.miniatures.base import TEXT, TinyFamily, make_checkpoint
from tools.miniatures.llava_siglip import longrope

ORIGINAL = 384  # tokens of the miniature's short factors
Make = Callable[..., Path]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Make:
    """Checkpoints by family and the decoder's fields, each made once."""
    known: dict[str, Path] = {}

    def make(family: str, **text: Any) -> Path:
        key = f"{family}-{text}"
        if key not in known:
            known[key] = tmp_path_factory.mktemp(family)
            make_tiny(family, known[key], seed=3, text=text)
        return known[key]

    return make


@pytest.fixture
def native() -> Backend:
    return create_backend("cpu", torch.float32, backend="native", threads=1)


@pytest.fixture
def copied(made: Make, tmp_path: Path) -> Callable[[str], Path]:
    """A directory that was not described before."""

    def copy(family: str) -> Path:
        shutil.copytree(made(family), tmp_path / family)
        return tmp_path / family

    return copy


def with_context(spec: ModelSpec, longest: int) -> ModelSpec:
    return replace(spec, language=replace(spec.language, max_position=longest))


# ---- who shares a step


@pytest.mark.quick("[phi3]")
@pytest.mark.parametrize("family", ["phi3", "llava_phi3"])
def test_a_context_ends_where_the_length_of_a_call_would_choose_other_factors(
    family: str, made: Make, native: Backend
) -> None:
    directory = made(family, **longrope(ORIGINAL))
    spec = load_spec(directory, GENERIC)
    assert spec.max_model_len == ORIGINAL
    model = load_model(directory, spec, native, EPD)
    assert model.deterministic
    (note,) = model.notes
    assert note.startswith(f"the context ends at {ORIGINAL} of the model's 512 tokens: ")
    with pytest.raises(CheckpointError, match=r"differ by [0-9.]+ of their spread beside a request of 385 tokens"):
        load_model(directory, with_context(spec, ORIGINAL + 1), native, EPD)


def test_a_long_request_beside_a_short_one_and_chunks_change_nothing(made: Make, native: Backend) -> None:
    """Chunks and short requests beside it change nothing for a request that is almost as long as the original context;
    the miniature's factors for longer ones begin behind that."""
    pair = Pair(made("phi3", **longrope(ORIGINAL)), native)
    short, long = "<s>Hello there.", "<s>" + "Once upon a time, " * 21
    short, long = pair.prompt(short), pair.prompt(long)
    assert ORIGINAL - 10 < len(long.token_ids) <= ORIGINAL
    alone = pair.driver.run(pair.request(short), [])
    assert (alone - pair.logits(short)).abs().max() <= 1e-4
    whole = pair.driver.run(pair.request(long), [])
    assert (whole - pair.logits(long)).abs().max() <= 1e-4
    pair.driver.reset()
    assert torch.equal(pair.driver.run(pair.request(long), [100, 200, 1]), whole)
    both = [(pair.request(long), len(long.token_ids)), (pair.request(short), len(short.token_ids))]
    beside = pair.driver.step(both)[1]
    assert torch.equal(beside.flatten(), alone[-1])


def test_frequencies_that_grow_with_the_longest_request_are_found(made: Make, native: Backend) -> None:
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
    directory = made("llama", rope_parameters=rope)
    spec = load_spec(directory, GENERIC)
    assert load_model(directory, spec, native, EPD).deterministic
    with pytest.raises(CheckpointError, match=r"beside a request of 1024 tokens; .* depends on how long others are"):
        load_model(directory, with_context(spec, 1024), native, EPD)


def test_every_type_of_layers_bounds_the_context() -> None:
    rope = {"rope_type": "longrope", "original_max_position_embeddings": 96}
    config = transformers.Phi3Config(max_position_embeddings=512)
    assert _max_position(config) == 512
    config.rope_parameters = {"full_attention": rope, "sliding_attention": {"rope_type": "default"}}
    assert _max_position(config) == 96


def test_a_model_whose_bits_depend_on_the_batch_is_not_called_deterministic(
    made: Make, native: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward, size = Phi3MLP.forward, 1e-7
    monkeypatch.setattr(Phi3MLP, "forward", lambda mlp, x: forward(mlp, x * (1 + size * x.shape[1])))
    directory = made("phi3", **longrope(ORIGINAL))
    spec = load_spec(directory, GENERIC)
    assert not load_model(directory, spec, native, EPD).deterministic


def test_temperatures_that_count_the_rows_of_a_step_rest(tmp_path: Path, native: Backend) -> None:
    """Three requests together have more rows than the context has tokens."""
    fields = {**TEXT, "num_local_experts": 2, "num_hidden_layers": 4, "floor_scale": 24, "attn_scale": 4.0}
    family = TinyFamily(
        lambda *_: transformers.AutoConfig.for_model("llama4_text", **fields),
        lambda directory, config, tokenizer: tokenizer.save_pretrained(directory),
        with_images=False,
    )
    empty: dict[str, Any] = {"text": {}, "vision": {}, "overrides": {}}
    make_checkpoint(family, tmp_path, seed=3, dtype="float32", max_shard_size="1GB", **empty)
    pair = Pair(tmp_path, native)
    assert pair.spec.max_model_len == 24
    prompts = [pair.prompt(f"<s>{text}") for text in ("a short prompt here", "and another one", "the last of them")]
    work = [(pair.request(prompt), len(prompt.token_ids)) for prompt in prompts]
    for prompt, together in zip(prompts, pair.driver.step(work), strict=True):
        assert (together.flatten() - pair.logits(prompt)[-1]).abs().max() <= 1e-4


# ---- several pictures


def test_a_processor_that_counts_pictures_takes_one_a_request(made: Make, native: Backend) -> None:
    spec = load_spec(made("llava_onevision"), GENERIC)
    assert spec.processor is not None and not spec.processor.joins
    model = load_model(made("llava_onevision"), spec, native, EPD)
    why = "the model's processor makes something else of several pictures in a prompt than of each alone"
    assert model.notes == (f"one picture a request: {why}",)
    loader = MediaLoader(spec, MediaConfig(), MonotonicClock())
    parts = [ImagePart(picture(40, 30), param=f"messages[0].content[{index}]") for index in range(2)]
    loader.resolve_sources(parts[:1])
    with pytest.raises(InvalidRequest, match=f"the request has 2 images; at most 1 is allowed: {why}") as caught:
        loader.resolve_sources(parts)
    assert (caught.value.code, caught.value.param) == ("too_many_images", "messages[0].content[1]")
    loader.close()


def padded(outputs: Any) -> Any:
    """Pixels of several pictures on a common canvas, as processors make them that give no sizes beside."""
    if outputs["pixel_values"].shape[0] > 1:
        outputs["pixel_values"] = torch.nn.functional.pad(outputs["pixel_values"], (0, 4))
    return outputs


def taking_one(outputs: Any) -> Any:
    if outputs["pixel_values"].shape[0] > 1:
        raise ValueError("one picture, please")
    return outputs


@pytest.mark.parametrize("change", [padded, taking_one])
def test_pictures_that_change_beside_others_are_taken_alone(
    change: Callable[[Any], Any], copied: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    call = transformers.LlavaProcessor.__call__
    directory = copied("llava")
    assert processor_of(directory).joins_pictures([probe_picture(), probe_picture((80, 40))])
    monkeypatch.setattr(transformers.LlavaProcessor, "__call__", lambda *args, **more: change(call(*args, **more)))
    assert not processor_of(directory).joins_pictures([probe_picture(), probe_picture((80, 40))])


def test_pictures_that_a_processor_parts_where_nothing_stands_between_come_one_a_request(
    copied: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    call, directory = transformers.LlavaProcessor.__call__, copied("llava")

    def parted(processor: Any, *, text: list[str], **more: Any) -> Any:
        return call(processor, text=[each.replace("<image><image>", "<image> <image>") for each in text], **more)

    monkeypatch.setattr(transformers.LlavaProcessor, "__call__", parted)
    assert not processor_of(directory).joins_pictures([probe_picture(), probe_picture((80, 40))])


def processor_of(directory: Path) -> PictureProcessor:
    spec = load_spec(directory, GENERIC)
    assert spec.processor is not None
    return PictureProcessor.from_spec(spec.processor)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["gemma3", "smolvlm", "idefics3", "llava_phi3"])
def test_other_processors_take_several(family: str, made: Make) -> None:
    spec = load_spec(made(family), GENERIC)
    assert spec.processor is not None and spec.processor.joins


# ---- positions on three axes


def rows_first(positions: Tensor) -> Tensor:
    return positions[[0, 2, 1]]


def with_a_gap(positions: Tensor) -> Tensor:
    return positions + torch.arange(positions.shape[-1]).clamp(max=3)


def of_four_axes(positions: Tensor) -> Tensor:
    return torch.cat((positions[:1], positions))


@pytest.mark.quick("rows_first", "four_axes")
@pytest.mark.parametrize(
    ("change", "words"),
    [
        (rows_first, "positions of a picture are no grid of rows and columns from the next position on"),
        (with_a_gap, "positions of a picture are no grid of rows and columns from the next position on"),
        (of_four_axes, "positions have 4 axes, and the engine counts time, rows and columns"),
    ],
)
def test_positions_of_another_form_are_refused(
    change: Callable[[Tensor], Tensor], words: str, copied: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    count = transformers.GlmOcrModel.get_rope_index

    @wraps(count)
    def changed(*args: Any, **more: Any) -> tuple[Tensor, Tensor]:
        positions, delta = count(*args, **more)
        return change(positions[:, 0])[:, None], delta

    monkeypatch.setattr(transformers.GlmOcrModel, "get_rope_index", changed)
    with pytest.raises(CheckpointError, match=f"the model's {words}"):
        load_spec(copied("glm_ocr"), GENERIC)


def test_pictures_whose_positions_change_beside_others_are_taken_alone(
    copied: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = load_spec(copied("glm_ocr"), GENERIC)
    assert spec.processor is not None and spec.processor.joins and spec.processor.multimodal
    count = transformers.GlmOcrModel.get_rope_index

    @wraps(count)
    def numbered(*args: Any, image_grid_thw: Tensor, **more: Any) -> tuple[Tensor, Tensor]:
        positions, delta = count(*args, image_grid_thw=image_grid_thw, **more)
        return positions + len(image_grid_thw) - 1, delta

    monkeypatch.setattr(transformers.GlmOcrModel, "get_rope_index", numbered)
    processor = PictureProcessor.from_spec(spec.processor)
    assert not processor.joins_pictures([probe_picture(), probe_picture((80, 40))])


@pytest.mark.slow
def test_features_for_several_layers_are_refused(made: Make, native: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    features = transformers.GlmOcrModel.get_image_features

    def with_more(*args: Any, **more: Any) -> Any:
        output = features(*args, **more)
        output.deepstack_features = [output.pooler_output]
        return output

    monkeypatch.setattr(transformers.GlmOcrModel, "get_image_features", with_more)
    directory = made("glm_ocr")
    with pytest.raises(CheckpointError, match=r"features to several layers of the decoder \(DeepStack\)"):
        load_model(directory, load_spec(directory, GENERIC), native, EPD)


# ---- what a processor gives


@pytest.mark.slow
def test_experts_of_pictures_are_chosen_by_tokens(made: Make, native: Backend) -> None:
    """Marks around a picture count as the picture, in prompts whose pictures and marks the probe has not seen too."""
    pair = Pair(made("ernie4_5_vl_moe"), native)
    assert not pair.driver.model.deterministic
    begin, end = pair.marks
    for parts in (["<s>", begin, picture(40, 50), end, "What?"], ["<s>", end, "and", begin, "alone"]):
        prompt = pair.prompt(*parts)
        inputs = pair.inputs(prompt)
        marks = [pair.tokenizer.encode(mark, add_special_tokens=False)[0] for mark in (begin, end)]
        is_picture = [id in (*marks, pair.processor.image_token_id) for id in prompt.token_ids]
        inputs["moe_mm_token_type_ids"] = torch.tensor([is_picture]).int()
        with torch.inference_mode():
            expected = pair.reference(**inputs).logits[0]
        pair.driver.reset()
        assert (pair.driver.run(pair.request(prompt), []) - expected).abs().max() <= 1e-4


def test_numbers_of_tokens_that_do_not_follow_from_the_tokens_are_refused(
    copied: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    call = transformers.LlavaProcessor.__call__

    def numbered(*args: Any, **more: Any) -> Any:
        outputs = call(*args, **more)
        outputs["places"] = torch.arange(outputs["input_ids"].shape[1])[None]
        return outputs

    monkeypatch.setattr(transformers.LlavaProcessor, "__call__", numbered)
    with pytest.raises(CheckpointError, match="gives places, which does not follow from the token ids"):
        processor_of(copied("llava")).token_types(["places"], [7, 7], probe_picture())


def test_a_placeholder_that_the_tokenizer_does_not_know(copied: Callable[[str], Path]) -> None:
    with pytest.raises(CheckpointError, match=r"the tokenizer does not know '<\|image_pad\|>', which the model's proc"):
        load_spec(copied("qwen2_vl"), GENERIC)


def test_arguments_that_the_inner_class_knows_are_given_too() -> None:
    config = transformers.VideoLlama3Config()
    names, required = image_inputs(config, transformers.VideoLlama3ForConditionalGeneration)
    assert names == ("pixel_values", "image_grid_thw", "image_merge_sizes")
    assert required == ("pixel_values", "image_merge_sizes")
    names, required = image_inputs(transformers.LlamaConfig(), transformers.LlamaForCausalLM)
    assert not names and not required


@pytest.fixture
def changed(copied: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[Any], Any]], Path]:
    """A LLaVA whose processor's outputs go through `change`."""

    def of(change: Callable[[Any], Any]) -> Path:
        call = transformers.LlavaProcessor.__call__
        monkeypatch.setattr(transformers.LlavaProcessor, "__call__", lambda *args, **more: change(call(*args, **more)))
        return copied("llava")

    return of


def test_what_is_for_training_alone_stays_out_of_the_model(
    changed: Callable[[Callable[[Any], Any]], Path], native: Backend
) -> None:
    def with_labels(outputs: Any) -> Any:
        outputs["labels"] = torch.full((1, 3), -100)
        return outputs

    directory = changed(with_labels)
    load_model(directory, load_spec(directory, GENERIC), native, EPD)


def test_bfloat16_arrays_are_read(changed: Callable[[Callable[[Any], Any]], Path], native: Backend) -> None:
    def narrowed(outputs: Any) -> Any:
        outputs["pixel_values"] = outputs["pixel_values"].bfloat16()
        return outputs

    directory = changed(narrowed)
    (array,) = processor_of(directory).expand(probe_picture()).arrays.values()
    assert array.dtype == np.float32 and (torch.from_numpy(array).bfloat16().float().numpy() == array).all()
    load_model(directory, load_spec(directory, GENERIC), native, EPD)


GIVEN = {
    "several arrays of different shapes as pixel_values": [torch.ones(2, 3), torch.ones(1, 3)],
    "something else than numbers as pixel_values": ["three", "words"],
}


@pytest.mark.parametrize("words", GIVEN)
def test_what_is_no_array_is_named(words: str, changed: Callable[[Callable[[Any], Any]], Path]) -> None:
    def replaced(outputs: Any) -> Any:
        outputs["pixel_values"] = GIVEN[words]
        return outputs

    with pytest.raises(CheckpointError, match=f"the model's processor gives {words}, where the engine takes one array"):
        load_spec(changed(replaced), GENERIC)


def test_what_the_tower_needs_and_does_not_get_is_named(changed: Callable[[Callable[[Any], Any]], Path]) -> None:
    def emptied(outputs: Any) -> Any:
        del outputs["pixel_values"]
        return outputs

    with pytest.raises(CheckpointError, match="the model's processor gives no pixel_values, which the tower needs"):
        load_spec(changed(emptied), GENERIC)
