"""From a Hugging Face model directory to its ModelSpec: reads the JSON files and picks the family.

Opens no weights, imports no model code and never runs code from the directory: `auto_map` is not looked at.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from hydra_engine.errors import CheckpointError
from hydra_engine.specs.base import ModelSpec
from hydra_engine.specs.decoder import build_language, decoder_type, special_tokens, stored_dtype
from hydra_engine.specs.fields import Fields, read_json, read_json_if_present
from hydra_engine.specs.llava import build_llava

# (architecture, config.json, generation_config.json, the image processor's settings) -> spec
SpecBuilder = Callable[[str, Fields, Fields | None, Fields | None], ModelSpec]


def load_spec(model_dir: Path) -> ModelSpec:
    """Raises `CheckpointError` with one sentence when the directory cannot be served."""
    if not model_dir.is_dir():
        raise CheckpointError(f"there is no model directory {model_dir.name[:80]!r}")
    config = read_json(model_dir, "config.json")
    architecture = _architecture(config)
    generation = read_json_if_present(model_dir, "generation_config.json")
    return ARCHITECTURES[architecture](architecture, config, generation, _image_processor(model_dir))


def build_text_only(architecture: str, config: Fields, generation: Fields | None, _images: Fields | None) -> ModelSpec:
    tokens = special_tokens(generation, config, config)
    return ModelSpec(
        family=decoder_type(config),
        architecture=architecture,
        language=build_language(config, tie_embeddings=config.flag("tie_word_embeddings", False), nested=False),
        vision=None,
        image_token_id=None,
        bos_token_id=tokens.bos_token_id,
        pad_token_id=tokens.pad_token_id,
        eos_token_ids=tokens.eos_token_ids,
        dtype=stored_dtype(config, config),
    )


ARCHITECTURES: dict[str, SpecBuilder] = {
    "LlavaForConditionalGeneration": build_llava,
    "LlamaForCausalLM": build_text_only,
    "MistralForCausalLM": build_text_only,
    "Qwen2ForCausalLM": build_text_only,
}
_BY_MODEL_TYPE = {
    "llava": "LlavaForConditionalGeneration",
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
}


def _architecture(config: Fields) -> str:
    """architectures[0]; files without it say the same in model_type."""
    named = config.get("architectures")
    if isinstance(named, list) and named and isinstance(named[0], str):
        wanted = named[0]
    elif named is None and "model_type" in config:
        wanted = config.text("model_type")
    else:
        raise CheckpointError("config.json names no architecture")
    architecture = _BY_MODEL_TYPE.get(wanted, wanted) if named is None else wanted
    if architecture not in ARCHITECTURES:
        own_code = "; the code that comes with the model is never run" if "auto_map" in config else ""
        raise CheckpointError(
            f"architecture {wanted[:60]!r} is not supported; supported are {', '.join(ARCHITECTURES)}{own_code}"
        )
    return architecture


def _image_processor(model_dir: Path) -> Fields | None:
    """Newer files nest the image processor in processor_config.json, older ones give it a file of its own."""
    processor = read_json_if_present(model_dir, "processor_config.json")
    nested = processor.section_if_present("image_processor") if processor is not None else None
    return nested or read_json_if_present(model_dir, "preprocessor_config.json")
