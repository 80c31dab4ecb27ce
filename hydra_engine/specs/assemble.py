"""From the parts of a family to its ModelSpec: what every family does alike with tokens and stored weights."""

from __future__ import annotations

from hydra_engine.specs.base import LanguageSpec, ModelSpec, VisionSpec
from hydra_engine.specs.decoder import build_language, special_tokens, stored_dtype
from hydra_engine.specs.fields import Fields
from hydra_engine.specs.files import ModelFiles


def nested_language(files: ModelFiles) -> tuple[Fields, LanguageSpec]:
    """The text part of a nested config.json and its decoder; embeddings are tied where either level says so."""
    text = files.config.section("text_config")
    tie = files.config.flag("tie_word_embeddings", False) or text.flag("tie_word_embeddings", False)
    return text, build_language(text, tie_embeddings=tie, nested=True)


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
    """`text` is the part of config.json that the decoder was built from."""
    tokens = special_tokens(files.generation, files.config, text)
    return ModelSpec(
        family=family,
        architecture=files.architecture,
        language=language,
        vision=vision,
        image_token_id=image_token_id,
        bos_token_id=tokens.bos_token_id,
        pad_token_id=tokens.pad_token_id,
        eos_token_ids=tokens.eos_token_ids,
        dtype=stored_dtype(files.config, text),
        video_token_id=video_token_id,
    )
