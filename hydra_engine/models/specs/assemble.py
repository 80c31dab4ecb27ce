"""The JSON files of a model directory that a spec is built from, and the parts of a spec that all families build
alike."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from hydra_engine.core.options import SpecOptions
from hydra_engine.models.specs.base import LanguageSpec, ModelSpec, VisionSpec
from hydra_engine.models.specs.decoder import build_language, special_tokens, stored_dtype
from hydra_engine.models.specs.fields import Fields, read_json, read_json_if_present
from hydra_engine.models.specs.quantization import read_quantization


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """The parsed files of a model directory. `images` and `videos` are the processors' settings; None if there are
    none."""

    model_dir: Path
    architecture: str
    config: Fields
    generation: Fields | None
    processor: Fields | None  # processor_config.json as a whole
    images: Fields | None
    videos: Fields | None
    options: SpecOptions = field(default_factory=SpecOptions)


def read_files(model_dir: Path, options: SpecOptions) -> ModelFiles:
    """Reads a model directory. Newer directories nest the processors' settings in processor_config.json, older ones
    have a file for each. `architecture` is left empty."""
    processor = read_json_if_present(model_dir, "processor_config.json")
    nested_images = nested_videos = None
    if processor is not None:
        nested_images = processor.section_if_present("image_processor")
        nested_videos = processor.section_if_present("video_processor")
    return ModelFiles(
        model_dir=model_dir,
        architecture="",
        config=read_json(model_dir, "config.json"),
        generation=read_json_if_present(model_dir, "generation_config.json"),
        processor=processor,
        images=nested_images or read_json_if_present(model_dir, "preprocessor_config.json"),
        videos=nested_videos or read_json_if_present(model_dir, "video_preprocessor_config.json"),
        options=options,
    )


def nested_language(files: ModelFiles, model_type: str, *, mrope: bool = False) -> tuple[Fields, LanguageSpec]:
    """Returns the text part of a nested config.json and the decoder's spec. `model_type` is used if the text part has
    none. Embeddings are tied if either level says so."""
    text = with_model_type(files.config.section("text_config"), model_type)
    tie = files.config.flag("tie_word_embeddings", False) or text.flag("tie_word_embeddings", False)
    return text, build_language(text, tie_embeddings=tie, nested=True, mrope=mrope)


def with_model_type(text: Fields, model_type: str) -> Fields:
    """Adds `model_type` to a part of config.json that has none."""
    return text if "model_type" in text else Fields({**text.values, "model_type": model_type}, text.where)


def model_spec(
    files: ModelFiles,
    family: str,
    text: Fields,
    language: LanguageSpec,
    *,
    vision: VisionSpec | None = None,
    image_token_id: int | None = None,
    video_token_id: int | None = None,
) -> ModelSpec:
    """Completes a spec with special tokens, dtype and quantisation. `text` is the part of config.json with the
    decoder."""
    bos, pad, eos = special_tokens(files.generation, files.config, text)
    return ModelSpec(
        family=family,
        architecture=files.architecture,
        language=language,
        vision=vision,
        image_token_id=image_token_id,
        bos_token_id=bos,
        pad_token_id=pad,
        eos_token_ids=eos,
        dtype=stored_dtype(files.config, text),
        video_token_id=video_token_id,
        quantization=read_quantization(files.model_dir, files.config, text),
    )
