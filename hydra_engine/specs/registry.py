"""From a Hugging Face model directory to its ModelSpec: reads the JSON files and picks the family.

Opens no weights, imports no model code and never runs code from the directory.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from hydra_engine.core.options import SpecOptions
from hydra_engine.errors import CheckpointError
from hydra_engine.specs.assemble import model_spec
from hydra_engine.specs.base import ModelSpec
from hydra_engine.specs.decoder import build_language, decoder_type
from hydra_engine.specs.fields import Fields
from hydra_engine.specs.files import ModelFiles, read_files
from hydra_engine.specs.generic import build_generic
from hydra_engine.specs.internvl import build_internvl
from hydra_engine.specs.llava import build_llava
from hydra_engine.specs.llava_next import build_llava_next
from hydra_engine.specs.minicpmv import build_minicpmv
from hydra_engine.specs.qwen2_vl import build_qwen2_5_vl, build_qwen2_vl
from hydra_engine.specs.qwen3_vl import build_qwen3_vl

SpecBuilder = Callable[[ModelFiles], ModelSpec]


def load_spec(model_dir: Path, options: SpecOptions | None = None) -> ModelSpec:
    """Raises `CheckpointError` with one sentence when the directory cannot be served."""
    if not model_dir.is_dir():
        raise CheckpointError(f"there is no model directory {model_dir.name[:80]!r}")
    files = read_files(model_dir, options or SpecOptions())
    if files.options.model_impl == "transformers":
        return build_generic(files)
    architecture = _architecture(files.config)
    return ARCHITECTURES[architecture](replace(files, architecture=architecture))


def build_text_only(files: ModelFiles) -> ModelSpec:
    config = files.config
    return model_spec(
        files,
        decoder_type(config),
        config,
        build_language(config, tie_embeddings=config.flag("tie_word_embeddings", False), nested=False),
    )


ARCHITECTURES: dict[str, SpecBuilder] = {
    "LlavaForConditionalGeneration": build_llava,
    "LlavaNextForConditionalGeneration": build_llava_next,
    "InternVLForConditionalGeneration": build_internvl,
    "MiniCPMV4_6ForConditionalGeneration": build_minicpmv,
    "Qwen2VLForConditionalGeneration": build_qwen2_vl,
    "Qwen2_5_VLForConditionalGeneration": build_qwen2_5_vl,
    "Qwen3VLForConditionalGeneration": build_qwen3_vl,
    "LlamaForCausalLM": build_text_only,
    "MistralForCausalLM": build_text_only,
    "Qwen2ForCausalLM": build_text_only,
    "Qwen3ForCausalLM": build_text_only,
    "Qwen3_5ForCausalLM": build_text_only,
}
_BY_MODEL_TYPE = {
    "llava": "LlavaForConditionalGeneration",
    "llava_next": "LlavaNextForConditionalGeneration",
    "internvl": "InternVLForConditionalGeneration",
    "minicpmv4_6": "MiniCPMV4_6ForConditionalGeneration",
    "qwen2_vl": "Qwen2VLForConditionalGeneration",
    "qwen2_5_vl": "Qwen2_5_VLForConditionalGeneration",
    "qwen3_vl": "Qwen3VLForConditionalGeneration",
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_5_text": "Qwen3_5ForCausalLM",
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
        own_code = ""
        if "auto_map" in config:
            own_code = ", and with --trust-remote-code the code that comes with the model, which is never run otherwise"
        raise CheckpointError(
            f"architecture {wanted[:60]!r} has no native implementation; there is one of {', '.join(ARCHITECTURES)}; "
            f"--model-impl transformers runs what transformers can load{own_code}"
        )
    return architecture
