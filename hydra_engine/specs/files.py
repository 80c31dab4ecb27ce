"""The JSON files of a model directory that a spec is made from, and where newer and older layouts keep them."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from hydra_engine.core.options import SpecOptions
from hydra_engine.specs.fields import Fields, read_json, read_json_if_present


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """`images` and `videos` are the settings of the processors, None where the directory has none."""

    model_dir: Path
    architecture: str
    config: Fields
    generation: Fields | None
    processor: Fields | None  # processor_config.json as a whole
    images: Fields | None
    videos: Fields | None
    options: SpecOptions = field(default_factory=SpecOptions)


def read_files(model_dir: Path, options: SpecOptions) -> ModelFiles:
    """Newer directories nest the processors' settings in processor_config.json, older ones have a file for each.
    `architecture` is still empty."""
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
