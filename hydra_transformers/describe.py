"""Describes a checkpoint by transformers' classes: config with all defaults, model class, a run of its processor.

    python -m hydra_transformers.describe DIR [--trust-remote-code]

prints one line of JSON. Imported only where torch may be loaded; opens no weights. Code that comes with the model is
run only when the caller says so.
"""

from __future__ import annotations

import hashlib
import os
import sys
from pathlib import Path
from typing import Any

import msgspec
import torch
import transformers
from PIL import Image

from hydra_engine.core.model_folder import check_small_files, read_file
from hydra_engine.errors import CheckpointError, HydraError, InvalidImage
from hydra_engine.models.specs.base import LanguageSpec, ModelSpec, PreprocessSpec, ProcessorSpec
from hydra_engine.models.specs.decoder import stored_dtype
from hydra_engine.models.specs.fields import read_json
from hydra_transformers.classes import cannot_run, image_inputs, load_config, model_class, quiet_logging
from hydra_transformers.processor import Expansion, PictureProcessor, num_runs
from hydra_transformers.rope import AXES, RopeIndex, find_rope_index
from hydra_transformers.spec import (
    DEEPSTACK,
    FAMILY,
    PROCESSOR_ERRORS,
    Answer,
    GenericVisionSpec,
    describe_error,
)

_LOADER = "hydra_transformers.processor:load_in_child"
_SIZES = ("head_dim", "num_key_value_heads", "num_attention_heads", "intermediate_size")  # of a layer
_LAYER_TYPES = {"full_attention", "sliding_attention", "chunked_attention"}
# Shapes of pictures that are tried: ordinary ones, small, large and long.
_PROBES = ((64, 64), (1024, 1024), (1280, 320), (320, 1280), (2048, 1536))
# Pictures of one prompt, which may be anything else than each by itself.
_TOGETHER = (((64, 64), (320, 80)), ((320, 80), (64, 64), (80, 320)))


def probe_picture(size: tuple[int, int] = _PROBES[0], turns: int = 0) -> Image.Image:
    """Returns a picture without repeating content; pictures with different `turns` differ too."""
    ramp = Image.linear_gradient("L").resize(size)
    bands = (ramp, ramp.transpose(Image.Transpose.ROTATE_180), Image.radial_gradient("L").resize(size))
    return Image.merge("RGB", [bands[(index + turns) % 3] for index in range(3)])


def describe(model_dir: Path, *, trust_remote_code: bool) -> ModelSpec:
    """Describes a checkpoint. Raises CheckpointError, with the reason, if the generic adapter cannot run the model."""
    check_small_files(model_dir)
    with quiet_logging():
        return _describe(model_dir, trust_remote_code)


def _describe(model_dir: Path, trust_remote_code: bool) -> ModelSpec:
    config = load_config(model_dir, trust_remote_code=trust_remote_code)
    model = model_class(config, model_dir, trust_remote_code=trust_remote_code)
    text = config.get_text_config(decoder=True)
    try:
        _check_model(config, text, model)
        inputs, required = image_inputs(config, model)
        rope_index = find_rope_index(config, model) if inputs else None
        language = _language(text, config, multimodal=rope_index is not None)
    except PROCESSOR_ERRORS as error:  # fields that transformers computes
        raise cannot_run(model.__name__, describe_error(error)) from error
    vision = None
    if inputs:
        vision = _vision(config, model_dir, inputs, required, language.hidden_size, rope_index, trust_remote_code)
    raw = read_json(model_dir, "config.json")
    return ModelSpec(
        family=FAMILY,
        architecture=model.__name__,
        language=language,
        vision=vision,
        image_token_id=None if vision is None or vision.processor is None else vision.processor.image_token_id,
        bos_token_id=_first(text, config, "bos_token_id"),
        pad_token_id=_first(text, config, "pad_token_id"),
        eos_token_ids=_eos_token_ids(model_dir, text, config),
        dtype=stored_dtype(raw, raw.section_if_present("text_config") or raw),
        tokenizer_class=_tokenizer_class(model_dir, trust_remote_code),
        trust_remote_code=trust_remote_code,
        no_images_because=_no_images_because(config) if vision is None else "",
    )


def _no_images_because(config: Any) -> str:
    """Returns the reason why a model with a vision part takes no pictures here; empty for text-only models."""
    takes_pictures = type(config) in transformers.AutoModelForImageTextToText._model_mapping
    if not takes_pictures and not any("vision" in name for name in type(config).sub_configs):
        return ""
    return "its class has no get_image_features, by which the engine computes pictures through transformers"


def _check_model(config: Any, text: Any, model: Any) -> None:
    """Raises CheckpointError, with the reason, for features that the adapter would compute wrongly; the comparison at
    load finds others."""
    reason = None
    layer_types = set(getattr(text, "layer_types", None) or ()) - _LAYER_TYPES
    if getattr(config, "is_encoder_decoder", False):
        reason = "it is an encoder with a decoder"
    elif getattr(text, "use_bidirectional_attention", None) in (True, "all"):
        reason = "all tokens of a prompt see each other"
    elif getattr(model, "_is_stateful", False):
        reason = "its layers keep a state besides keys and values"
    elif layer_types:
        reason = f"it has layers of type {', '.join(sorted(layer_types))}"
    elif getattr(text, "kv_lora_rank", None):
        reason = "it keeps latent keys and values (MLA)"
    elif getattr(text, "num_kv_shared_layers", None):
        reason = "its layers share keys and values"
    elif getattr(text, "cross_attention_layers", None):
        reason = "its layers look at pictures by cross-attention"
    elif not getattr(model, "_supports_attention_backend", False):
        reason = "its attention cannot be replaced"
    elif differing := _differing_sizes(text):
        reason = f"its layers differ in {' and '.join(differing)}"
    elif _names_deepstack(config) or _names_deepstack(getattr(config, "vision_config", None)):
        reason = DEEPSTACK
    if reason is not None:
        raise cannot_run(model.__name__, reason)


def _names_deepstack(config: Any) -> bool:
    return config is not None and any(value for name, value in vars(config).items() if name.startswith("deepstack_"))


def _differing_sizes(text: Any) -> list[str]:
    layers = text.per_layer_config if getattr(text, "is_heterogeneous", False) else []
    return [name for name in _SIZES if len({getattr(layer, name, None) for layer in layers}) > 1]


def _language(text: Any, config: Any, *, multimodal: bool) -> LanguageSpec:
    """Returns a spec for sizes and costs only: transformers computes the layers, so its arithmetic fields have dummy
    values."""
    hidden, num_heads = _number(text, "hidden_size"), _number(text, "num_attention_heads")
    return LanguageSpec(
        num_layers=_number(text, "num_hidden_layers"),
        hidden_size=hidden,
        num_heads=num_heads,
        num_kv_heads=getattr(text, "num_key_value_heads", None) or num_heads,
        head_dim=getattr(text, "head_dim", None) or hidden // num_heads,
        intermediate_size=getattr(text, "intermediate_size", None) or 4 * hidden,
        vocab_size=_number(text, "vocab_size"),
        rms_eps=1e-6,
        rope_theta=10000.0,
        max_position=_max_position(text),
        tie_embeddings=bool(getattr(config, "tie_word_embeddings", False)),
        rope_sections=AXES if multimodal else None,
    )


def _max_position(text: Any) -> int:
    """Longest context in which a result depends only on a token's own position. Attention temperatures depend on the
    rows of a call, longrope's factors on the largest position of a call, and a call is a step of several requests."""
    bounds = [_number(text, "max_position_embeddings")]
    if getattr(text, "attn_temperature_tuning", None):
        bounds.append(_number(text, "floor_scale"))
    for rope in _ropes(getattr(text, "rope_parameters", None)):
        original = rope.get("original_max_position_embeddings")
        if rope.get("rope_type") == "longrope" and type(original) is int and original >= 1:
            bounds.append(original)
    return min(bounds)


def _ropes(parameters: Any) -> list[dict[str, Any]]:
    """Returns the rotary parameters of all layers, or of each type of layer."""
    if not isinstance(parameters, dict):
        return []
    return (
        [parameters] if "rope_type" in parameters else [rope for each in parameters.values() for rope in _ropes(each)]
    )


def _number(text: Any, name: str) -> int:
    value = getattr(text, name, None)
    if value is None:
        raise CheckpointError(f"config.json describes no decoder of text: {name} is missing")
    if type(value) is not int or value < 1:
        raise CheckpointError(f"{name} of the text config must be a whole number from 1, not {str(value)[:40]!r}")
    return value


def _first(text: Any, config: Any, name: str) -> int | None:
    values = (getattr(source, name, None) for source in (config, text))
    value = next((value for value in values if type(value) is int), -1)
    return None if value < 0 else value  # -1 stands for no token


def _eos_token_ids(model_dir: Path, text: Any, config: Any) -> tuple[int, ...]:
    """Returns the end-of-sequence ids; generation_config.json takes precedence if it exists."""
    try:
        generation: Any = transformers.GenerationConfig.from_pretrained(str(model_dir), local_files_only=True)
    except OSError:
        generation = None
    for source in (generation, config, text):
        value = getattr(source, "eos_token_id", None)
        if value is not None:
            return tuple(int(token) for token in (value if isinstance(value, list) else [value]) if token >= 0)
    return ()


def _tokenizer_class(model_dir: Path, trust_remote_code: bool) -> str:
    try:
        auto = transformers.AutoTokenizer
        tokenizer = auto.from_pretrained(str(model_dir), local_files_only=True, trust_remote_code=trust_remote_code)
    except PROCESSOR_ERRORS as error:
        raise CheckpointError(f"transformers cannot load the model's tokenizer: {describe_error(error)}") from error
    return type(tokenizer).__name__


def _vision(
    config: Any,
    model_dir: Path,
    inputs: tuple[str, ...],
    required: tuple[str, ...],
    feature_size: int,
    rope_index: RopeIndex | None,
    trust_remote_code: bool,
) -> GenericVisionSpec:
    token_ids = (getattr(config, name, None) for name in ("image_token_id", "image_token_index", "image_patch_id"))
    image_token_id = next((id for id in token_ids if id is not None), None)
    if type(image_token_id) is not int:
        raise CheckpointError("config.json names no image_token_id, by which features find their place in a prompt")
    processor = PictureProcessor(
        model_dir,
        config.model_type,
        image_token_id=image_token_id,
        inputs=inputs,
        rope_index=rope_index,
        trust_remote_code=trust_remote_code,
    )
    vision = getattr(config, "vision_config", None)
    patch = getattr(vision, "patch_size", None)
    patch_size = patch if type(patch) is int else 14
    expansions = _expansions(processor)
    if missing := [name for name in required if name not in expansions[0].arrays]:
        raise CheckpointError(f"the model's processor gives no {' and no '.join(missing)}, which the tower needs")
    if not processor.joins_pictures([probe_picture()]):
        raise CheckpointError(
            "the model's processor changes the text that follows a picture, and the engine processes the two separately"
        )
    whole = processor.image_attends_to_itself(probe_picture())
    if whole and any(num_runs(expansion.token_ids, image_token_id) > 1 for expansion in expansions):
        raise CheckpointError("pictures that are cut and see themselves are not supported: set do_pan_and_scan false")
    identity = f"transformers/{_digest(model_dir)}"
    return GenericVisionSpec(
        feature_size=feature_size,
        preprocess=PreprocessSpec("nearest", 1.0, (0.0, 0.0, 0.0), (1.0, 1.0, 1.0), identity),
        processor=ProcessorSpec(
            model_dir=str(model_dir),
            model_type=config.model_type,
            placeholder=processor.placeholder,
            placeholder_id=processor.placeholder_id,
            image_token_id=image_token_id,
            bidirectional=whole,
            inputs=inputs,
            patch_size=patch_size,
            trust_remote_code=trust_remote_code,
            loader=_LOADER,
            multimodal=rope_index is not None,
            joins=_joins(processor),
        ),
        max_tokens=max(expansion.num_tokens for expansion in expansions),
        max_patches=max(expansion.num_patches(patch_size) for expansion in expansions),
        tower_parameters=_tower_parameters(vision),
    )


def _expansions(processor: PictureProcessor) -> list[Expansion]:
    """Returns the expansions of probe pictures in all shapes that the processor takes. The first shape is mandatory."""
    processor.outputs((probe_picture(), ""))
    found = [processor.expand(probe_picture())]
    for size in _PROBES[1:]:
        try:
            found.append(processor.expand(probe_picture(size)))
        except InvalidImage:
            continue
    return found


def _joins(processor: PictureProcessor) -> bool:
    try:
        prompts = ([probe_picture(size, turns) for turns, size in enumerate(sizes)] for sizes in _TOGETHER)
        return all(processor.joins_pictures(pictures) for pictures in prompts)
    except InvalidImage:  # cannot be compared, so not supported
        return False


def _tower_parameters(vision: Any) -> int:
    """Estimates a tower's weights: four attention matrices and two MLP matrices per layer."""
    names = ("hidden_size", "num_hidden_layers", "intermediate_size")
    values = [getattr(vision, name, None) for name in names]
    hidden, layers, inner = (value if type(value) is int else 0 for value in values)
    return layers * (4 * hidden**2 + 2 * hidden * inner)


def _digest(model_dir: Path) -> str:
    """Returns a digest of the processor's settings and transformers' version."""
    digest = hashlib.blake2b(transformers.__version__.encode(), digest_size=16)
    for name in ("processor_config.json", "preprocessor_config.json", "config.json"):
        digest.update(read_file(model_dir, name) or b"")
    return digest.hexdigest()


def main() -> None:
    torch.set_num_threads(1)  # there is little to compute
    try:
        spec = describe(Path(sys.argv[1]), trust_remote_code="--trust-remote-code" in sys.argv[2:])
        answer = Answer.from_spec(spec)
    except HydraError as error:
        answer = Answer(error=error.info())
    sys.stdout.buffer.write(b"\n" + msgspec.json.encode(answer) + b"\n")
    sys.stdout.flush()
    os._exit(0)  # taking apart what was imported takes longer than all of the above


if __name__ == "__main__":
    main()
