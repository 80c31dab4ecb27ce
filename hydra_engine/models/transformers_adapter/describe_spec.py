"""What transformers' classes say of a checkpoint: its config with all defaults, its model class, its processor at work.

    python -m hydra_engine.models.transformers_adapter.describe_spec DIR [--trust-remote-code]

prints one line of JSON. Imported only where torch may be loaded; opens no weights. Code that comes with the model is
run only when the caller says so.
"""

from __future__ import annotations

import hashlib
import inspect
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import msgspec
import transformers
from PIL import Image
from transformers.dynamic_module_utils import get_class_from_dynamic_module

from hydra_engine.errors import CheckpointError, HydraError
from hydra_engine.models.specs.base import LanguageSpec, ModelSpec, PreprocessSpec, ProcessorSpec
from hydra_engine.models.specs.decoder import stored_dtype
from hydra_engine.models.specs.fields import Fields, read_json
from hydra_engine.models.transformers_adapter.processor_spec import (
    PROCESSOR_ERRORS,
    PictureProcessor,
    in_one_line,
    num_runs,
)
from hydra_engine.models.transformers_adapter.spec import FAMILY, Answer, GenericVisionSpec

_REMOTE_CLASSES = ("AutoModelForImageTextToText", "AutoModelForVision2Seq", "AutoModelForCausalLM", "AutoModel")
_LAYER_TYPES = {"full_attention", "sliding_attention", "chunked_attention"}
# Shapes of pictures that are tried: ordinary ones, small, large and long.
_PROBES = ((64, 64), (1024, 1024), (1280, 320), (320, 1280), (2048, 1536))
_PROBE_COLOUR = (90, 140, 200)


def probe_picture(size: tuple[int, int] = _PROBES[0]) -> Image.Image:
    return Image.new("RGB", size, _PROBE_COLOUR)


def describe(model_dir: Path, *, trust_remote_code: bool) -> ModelSpec:
    """Raises CheckpointError where the generic adapter cannot run the model, with the reason."""
    config = load_config(model_dir, trust_remote_code=trust_remote_code)
    model = model_class(config, model_dir, trust_remote_code=trust_remote_code)
    text = config.get_text_config(decoder=True)
    _check_model(config, text, model)
    inputs = image_inputs(model)
    try:
        language = _language(text, config)
    except PROCESSOR_ERRORS as error:  # fields that transformers computes, or that differ from layer to layer
        raise CheckpointError(f"{model.__name__} cannot run through transformers here: {in_one_line(error)}") from error
    vision = _vision(config, model_dir, inputs, language.hidden_size, trust_remote_code) if inputs else None
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
    )


def load_config(model_dir: Path, *, trust_remote_code: bool) -> Any:
    raw = read_json(model_dir, "config.json")
    if not trust_remote_code:
        _check_known(raw)
    try:
        return transformers.AutoConfig.from_pretrained(
            str(model_dir), local_files_only=True, trust_remote_code=trust_remote_code
        )
    except PROCESSOR_ERRORS as error:
        raise CheckpointError(f"transformers cannot read config.json: {in_one_line(error)}") from error


def model_class(config: Any, model_dir: Path, *, trust_remote_code: bool) -> Any:
    """The class with a language head; text-only models have one too."""
    remote = (getattr(config, "auto_map", None) or {}) if trust_remote_code else {}
    for name in _REMOTE_CLASSES:
        if name in remote:
            return get_class_from_dynamic_module(remote[name], str(model_dir), local_files_only=True)
    for auto in (transformers.AutoModelForImageTextToText, transformers.AutoModelForCausalLM):
        classes = auto._model_mapping.get(type(config), None)
        if classes is not None:
            return classes[0] if isinstance(classes, tuple) else classes
    raise CheckpointError(
        f"model type {config.model_type!r} is neither an image-text-to-text nor a causal language model of transformers"
    )


def image_inputs(model: Any) -> tuple[str, ...]:
    """The named arguments of get_image_features; none for models that take no pictures."""
    function = getattr(model, "get_image_features", None)
    if function is None:
        return ()
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return tuple(p.name for p in inspect.signature(function).parameters.values() if p.kind in kinds)[1:]


def _check_known(config: Fields) -> None:
    model_type = config.text("model_type", "")
    if model_type in transformers.CONFIG_MAPPING:
        return
    if "auto_map" in config:
        raise CheckpointError(
            f"model type {model_type[:60]!r} needs the Python code that comes with the model, which is never run "
            "unless you give --trust-remote-code; read it first"
        )
    raise CheckpointError(f"the installed transformers does not know model type {model_type[:60]!r}; a newer one may")


def _check_model(config: Any, text: Any, model: Any) -> None:
    """What would compute something else than the model does is refused by name; what is left, loading compares."""
    reason = None
    layer_types = set(getattr(text, "layer_types", None) or ()) - _LAYER_TYPES
    if getattr(config, "is_encoder_decoder", False):
        reason = "it is an encoder with a decoder"
    elif getattr(model, "_is_stateful", False):
        reason = "its layers keep a state besides keys and values"
    elif layer_types:
        reason = f"it has layers of type {', '.join(sorted(layer_types))}"
    elif _mentions(getattr(text, "rope_parameters", None), "mrope_section") or _has_rope_index(model):
        reason = "its positions have several axes (M-RoPE)"
    elif getattr(text, "kv_lora_rank", None):
        reason = "it keeps latent keys and values (MLA)"
    elif getattr(text, "num_kv_shared_layers", None):
        reason = "its layers share keys and values"
    elif getattr(text, "cross_attention_layers", None):
        reason = "its layers look at pictures by cross-attention"
    elif not getattr(model, "_supports_attention_backend", False):
        reason = "its attention cannot be replaced"
    if reason is not None:
        raise CheckpointError(f"{model.__name__} cannot run through transformers here: {reason}")


def _has_rope_index(model: Any) -> bool:
    """Whether a class beside this one places tokens on several axes; where settings do not say so, defaults do."""
    return any(hasattr(value, "get_rope_index") for value in vars(sys.modules[model.__module__]).values())


def _mentions(values: Any, name: str) -> bool:
    if not isinstance(values, dict):
        return False
    return values.get(name) is not None or any(_mentions(value, name) for value in values.values())


def _language(text: Any, config: Any) -> LanguageSpec:
    """For sizes and costs; what a layer computes is transformers' business, fields of its arithmetic are not read."""
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
    )


def _max_position(text: Any) -> int:
    """As far as given positions decide what is computed: attention with a temperature counts tokens by itself."""
    longest = _number(text, "max_position_embeddings")
    return min(longest, _number(text, "floor_scale")) if getattr(text, "attn_temperature_tuning", None) else longest


def _number(text: Any, name: str) -> int:
    value = getattr(text, name, None)
    if type(value) is not int or value < 1:
        raise CheckpointError(f"{name} of the text config must be a whole number from 1, not {str(value)[:40]!r}")
    return value


def _first(text: Any, config: Any, name: str) -> int | None:
    values = (getattr(source, name, None) for source in (config, text))
    return next((value for value in values if type(value) is int), None)


def _eos_token_ids(model_dir: Path, text: Any, config: Any) -> tuple[int, ...]:
    """generation_config.json decides where it is there."""
    try:
        generation: Any = transformers.GenerationConfig.from_pretrained(str(model_dir), local_files_only=True)
    except OSError:
        generation = None
    for source in (generation, config, text):
        value = getattr(source, "eos_token_id", None)
        if value is not None:
            return tuple(value) if isinstance(value, list) else (int(value),)
    return ()


def _tokenizer_class(model_dir: Path, trust_remote_code: bool) -> str:
    try:
        auto = transformers.AutoTokenizer
        tokenizer = auto.from_pretrained(str(model_dir), local_files_only=True, trust_remote_code=trust_remote_code)
    except PROCESSOR_ERRORS as error:
        raise CheckpointError(f"transformers cannot load the model's tokenizer: {in_one_line(error)}") from error
    return type(tokenizer).__name__


def _vision(
    config: Any, model_dir: Path, inputs: tuple[str, ...], feature_size: int, trust_remote_code: bool
) -> GenericVisionSpec:
    token_ids = (getattr(config, name, None) for name in ("image_token_id", "image_token_index"))
    image_token_id = next((id for id in token_ids if id is not None), None)
    if type(image_token_id) is not int:
        raise CheckpointError("config.json names no image_token_id, by which features find their place in a prompt")
    processor = PictureProcessor(
        model_dir,
        config.model_type,
        image_token_id=image_token_id,
        inputs=inputs,
        trust_remote_code=trust_remote_code,
    )
    vision = getattr(config, "vision_config", None)
    patch = getattr(vision, "patch_size", None)
    patch_size = patch if type(patch) is int else 14
    expansions = [processor.expand(probe_picture(size)) for size in _PROBES]
    whole = processor.sees_itself(probe_picture())
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
            whole=whole,
            inputs=inputs,
            patch_size=patch_size,
            trust_remote_code=trust_remote_code,
        ),
        max_tokens=max(expansion.num_tokens for expansion in expansions),
        max_patches=max(expansion.num_patches(patch_size) for expansion in expansions),
        tower_parameters=_tower_parameters(vision),
    )


def _tower_parameters(vision: Any) -> int:
    """The matrices of a tower of the usual kind: four of attention and two of the MLP per layer."""
    names = ("hidden_size", "num_hidden_layers", "intermediate_size")
    values = [getattr(vision, name, None) for name in names]
    hidden, layers, inner = (value if type(value) is int else 0 for value in values)
    return layers * (4 * hidden**2 + 2 * hidden * inner)


def _digest(model_dir: Path) -> str:
    """Names the processor's settings."""
    digest = hashlib.blake2b(transformers.__version__.encode(), digest_size=16)
    for name in ("processor_config.json", "preprocessor_config.json", "config.json"):
        path = model_dir / name
        digest.update(path.read_bytes() if path.is_file() else b"")
    return digest.hexdigest()


def main() -> None:
    try:
        spec = describe(Path(sys.argv[1]), trust_remote_code="--trust-remote-code" in sys.argv[2:])
        answer = Answer(spec=replace(spec, vision=None), vision=cast(GenericVisionSpec | None, spec.vision))
    except HydraError as error:
        answer = Answer(error=error.info())
    sys.stdout.buffer.write(b"\n" + msgspec.json.encode(answer) + b"\n")


if __name__ == "__main__":
    main()
