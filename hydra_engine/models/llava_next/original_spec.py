"""LLaVA-1.5 and LLaVA-1.6 as liuhaotian published them (`LlavaLlamaForCausalLM`): the models of `llava` and
`llava_next` from a flat config.json, without an image processor's settings and without a token for pictures.

The tower is named, not described: its shape is known for OpenAI's, others are described by a config.json in a
subfolder with the last part of the tower's name. Pictures are those of `process_images` of the published code: padded
to a square ("pad"), on a canvas ("anyres"), or cropped. A row at the border of a canvas may differ from the published
code's where that lacks transformers' correction of rounding.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hydra_engine.errors import CheckpointError
from hydra_engine.models.llava.spec import LlavaVisionSpec, clip_tower
from hydra_engine.models.llava_next.spec import LlavaNextVisionSpec, read_resolutions
from hydra_engine.models.specs.assemble import ModelFiles, model_spec
from hydra_engine.models.specs.base import ModelSpec, PreprocessSpec
from hydra_engine.models.specs.decoder import build_language
from hydra_engine.models.specs.fields import Fields, read_json_if_present
from hydra_engine.models.specs.vision import CLIP_MEAN, CLIP_STD, SquareTowerSpec, SquareVisionSpec

ANYRES = "llava_llama_anyres"
_IMAGE = "<image>"
_CLIP_L: dict[str, Any] = {
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_attention_heads": 16,
    "num_hidden_layers": 24,
    "patch_size": 14,
}
_TOWERS: dict[str, dict[str, Any]] = {
    "clip-vit-large-patch14": {**_CLIP_L, "image_size": 224},
    "clip-vit-large-patch14-336": {**_CLIP_L, "image_size": 336},
}
_FIXED = {  # what these models have in common; other values are of other models
    "mm_projector_type": ("mlp2x_gelu", "linear"),
    "mm_resampler_type": (None, None),
    "mm_use_im_start_end": (False, False),
}


def build_llava_original(files: ModelFiles) -> ModelSpec:
    config = files.config
    for name, (expected, default) in _FIXED.items():
        if (default if config.get(name) is None else config.get(name)) != expected:
            raise config.wrong_value(name, "null" if expected is None else str(expected).lower())
    text = Fields({**config.values, "model_type": "llama"}, config.where)
    language = build_language(text, tie_embeddings=text.flag("tie_word_embeddings", False), nested=False)
    name = config.text("mm_vision_tower").rstrip("/")
    tower = _tower(files, name.rsplit("/", 1)[-1])
    vision = _vision(config, tower, language.hidden_size)
    family = "llava_llama" if isinstance(vision, LlavaVisionSpec) else ANYRES
    spec = model_spec(
        files, family, text, language, vision=vision, image_token_id=_image_token_id(files, language.vocab_size)
    )
    return replace(spec, tower=name)


def _tower(files: ModelFiles, name: str) -> SquareTowerSpec:
    config = files.config
    described = read_json_if_present(files.model_dir, f"{name}/config.json")
    if described is not None:  # of the whole CLIP model, or of its tower alone
        values = (described.section_if_present("vision_config") or described).values
    elif name in _TOWERS:
        values = _TOWERS[name]
    else:
        raise CheckpointError(
            f"the vision tower {name[:60]!r} is not known; put its config.json into a folder of that name in the model "
            f"directory (known are {', '.join(_TOWERS)})"
        )
    feature = config.text("mm_vision_select_feature", "patch")
    if feature not in ("patch", "cls_patch"):
        raise config.wrong_value("mm_vision_select_feature", '"patch" or "cls_patch"')
    renamed = {
        "vision_config": {"model_type": "clip_vision_model"} | values,
        "vision_feature_layer": config.get("mm_vision_select_layer"),
        "vision_feature_select_strategy": "default" if feature == "patch" else "full",
    }
    return clip_tower(Fields(renamed, config.where))


def _vision(config: Fields, tower: SquareTowerSpec, feature_size: int) -> SquareVisionSpec:
    side, aspect = tower.image_size, config.get("image_aspect_ratio")
    shared: dict[str, Any] = {"tower": tower, "projector_act": "gelu", "feature_size": feature_size}
    if aspect == "anyres":
        if (merge := config.text("mm_patch_merge_type", "flat")) != "spatial_unpad" or tower.keep_cls:
            raise CheckpointError(
                f"mm_patch_merge_type {merge[:40]!r} or class tokens beside anyres are not supported; of the published "
                "models all have spatial_unpad and patches"
            )
        # Widths before heights, the other way round than in transformers' settings.
        resolutions = tuple((width, height) for height, width in read_resolutions(config, side, ()))
        preprocess = _preprocess(f"llava_next/{side}/bicubic")
        return LlavaNextVisionSpec(**shared, resolutions=resolutions, preprocess=preprocess)
    if aspect not in (None, "square", "pad"):
        raise config.wrong_value("image_aspect_ratio", '"square", "pad" or "anyres"')
    if aspect == "pad":
        red, green, blue = (int(value * 255) for value in CLIP_MEAN)
        shared["padding"] = red, green, blue
        return LlavaVisionSpec(**shared, shortest_edge=0, preprocess=_preprocess(f"clip/pad/{side}"))
    return LlavaVisionSpec(**shared, shortest_edge=side, preprocess=_preprocess(f"clip/{side}/{side}x{side}/bicubic"))


def _preprocess(identity: str) -> PreprocessSpec:
    return PreprocessSpec(resample="bicubic", rescale=1 / 255, mean=CLIP_MEAN, std=CLIP_STD, identity=identity)


def _image_token_id(files: ModelFiles, vocab_size: int) -> int:
    """Id of <image>: the tokenizer's, else the first one behind the vocabulary, which a tokenizer that is made from
    tokenizer.model gets."""
    tokenizer = read_json_if_present(files.model_dir, "tokenizer.json")
    if tokenizer is None:
        return vocab_size
    added = tokenizer.get("added_tokens")
    for token in added if isinstance(added, list) else []:
        if isinstance(token, dict) and token.get("content") == _IMAGE and type(token.get("id")) is int:
            return int(token["id"])
    raise CheckpointError(
        f"tokenizer.json has no token {_IMAGE}; add it, or remove tokenizer.json so that tokenizer.model is read"
    )
