"""InternVL in OpenGVLab's own layout (`internvl_chat`: InternVL 1.5 to 3.5), which comes with InternLM2's, Llama's or
Qwen's decoder.

The same model as in `spec.py` from other fields. Knows config.json and the ids of tokens that no config names. Tiles
follow `dynamic_preprocess` of the published code, with its constants: the settings of an image processor are not read.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from hydra_engine.errors import CheckpointError
from hydra_engine.models.internvl.spec import (
    MAX_TILES,
    InternVlVisionSpec,
    arrangements_of,
    feature_layer,
    merge_side,
)
from hydra_engine.models.specs.assemble import ModelFiles, model_spec
from hydra_engine.models.specs.base import ModelSpec, PreprocessSpec
from hydra_engine.models.specs.decoder import build_language
from hydra_engine.models.specs.fields import Fields, read_json_if_present
from hydra_engine.models.specs.vision import SquareTowerSpec, TowerSpec, check_patches, tower_config, tower_shape

IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
_CONTEXT, _FRAME = "<IMG_CONTEXT>", ("<img>", "</img>")
_TURN_END = "<|im_end|>"  # of the chat formats that these models were trained with
_DEFAULTS = TowerSpec(  # InternVisionConfig's
    hidden_size=3200, num_layers=48, num_heads=25, intermediate_size=12800, hidden_act="gelu", norm_eps=1e-6
)
_INTERNLM2 = "internlm2"
_DECODERS = (_INTERNLM2, "llama", "qwen2", "qwen3", "qwen3_moe")
_QK_NORM_EPS = 1e-6  # of the layers that are shared with transformers' layout


def build_internvl_chat(files: ModelFiles) -> ModelSpec:
    config = files.config
    text, is_internlm2 = config.section("llm_config"), False
    if (name := text.text("model_type")) not in _DECODERS:
        raise text.wrong_value("model_type", f"one of {', '.join(_DECODERS)}")
    if name == _INTERNLM2:  # Llama's decoder, with another name for the flag of biases
        values = {**text.values, "model_type": "llama", "attention_bias": text.flag("bias", True)}
        text, is_internlm2 = Fields(values, text.where), True
    language = build_language(text, tie_embeddings=text.flag("tie_word_embeddings", False), nested=True)
    language = replace(language, grouped_qkv=is_internlm2)
    token_ids = _token_ids(files.model_dir)
    if _CONTEXT not in token_ids:
        raise CheckpointError(
            f"the tokenizer's files name no token {_CONTEXT}, which stands for a picture's features; take those that "
            "came with the model"
        )
    spec = model_spec(
        files,
        "internvl_chat",
        text,
        language,
        vision=_vision(config, language.hidden_size),
        image_token_id=token_ids[_CONTEXT],
    )
    ends = [token_ids[_TURN_END]] if _TURN_END in token_ids else []
    return replace(spec, eos_token_ids=tuple(dict.fromkeys((*spec.eos_token_ids, *ends))))


def _vision(config: Fields, feature_size: int) -> InternVlVisionSpec:
    tower = _tower(config)
    version = config.text("ps_version", "v1")
    if version not in ("v1", "v2"):
        raise config.wrong_value("ps_version", '"v1" or "v2"')
    arrangements = arrangements_of(1, 1)
    if config.flag("dynamic_image_size", False):
        min_tiles, max_tiles = config.integer("min_dynamic_patch", 1), config.integer("max_dynamic_patch", 6)
        if not min_tiles <= max_tiles <= MAX_TILES:
            raise config.wrong_value("max_dynamic_patch", f"from min_dynamic_patch to {MAX_TILES}")
        arrangements = arrangements_of(min_tiles, max_tiles)
    return InternVlVisionSpec(
        tower=tower,
        merge=merge_side(config, tower),
        projector_act="gelu",
        feature_size=feature_size,
        arrangements=arrangements,
        frame=_FRAME,
        thumbnail=config.flag("use_thumbnail", False),
        by_columns=version == "v1",
        preprocess=PreprocessSpec(
            resample="bicubic",
            rescale=1 / 255,
            mean=IMAGENET_MEAN,
            std=IMAGENET_STD,
            identity=f"internvl/{tower.image_size}/bicubic",
        ),
    )


def _tower(config: Fields) -> SquareTowerSpec:
    tower = tower_config(config, "intern_vit_6b")
    shape = tower_shape(tower, _DEFAULTS)
    image_size, patch_size = tower.integer("image_size", 224), tower.integer("patch_size", 14)
    check_patches(tower, image_size, patch_size)
    if config.integer("force_image_size", image_size) != image_size:
        raise config.wrong_value("force_image_size", f"{image_size}, the size that the tower has positions for")
    norm_type, qk_norm = tower.text("norm_type", "rms_norm"), tower.flag("qk_normalization", True)
    if norm_type not in ("layer_norm", "rms_norm"):
        raise tower.wrong_value("norm_type", '"layer_norm" or "rms_norm"')
    if qk_norm and shape["norm_eps"] != _QK_NORM_EPS:
        raise tower.wrong_value("layer_norm_eps", f"{_QK_NORM_EPS:g} where queries and keys are normalised")
    layer = feature_layer(config, "select_layer", shape["num_layers"])
    return SquareTowerSpec(
        **shape,
        image_size=image_size,
        patch_size=patch_size,
        feature_layers=(layer % (shape["num_layers"] + 1),),
        rms_norms=norm_type == "rms_norm",
        qkv_bias=tower.flag("qkv_bias", False),
        qk_norm=qk_norm,
        layer_scale=True,
    )


def _token_ids(model_dir: Path) -> dict[str, int]:
    """Returns the ids of added tokens, from the first of the tokenizer's files that has any."""
    settings = read_json_if_present(model_dir, "tokenizer_config.json")
    if settings is not None and (added := settings.section_if_present("added_tokens_decoder")) is not None:
        return {added.section(id).text("content"): int(id) for id in added.values if id.isdecimal()}
    if (named := read_json_if_present(model_dir, "added_tokens.json")) is not None:
        return {token: named.integer(token, at_least=0) for token in named.values}
    tokenizer = read_json_if_present(model_dir, "tokenizer.json")
    listed = [] if tokenizer is None else tokenizer.get("added_tokens")
    tokens = [Fields(one, "added_tokens of tokenizer.json") for one in listed or [] if isinstance(one, dict)]
    return {token.text("content"): token.integer("id", at_least=0) for token in tokens}
