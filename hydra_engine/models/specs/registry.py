"""Builds the ModelSpec of a Hugging Face model directory: reads the JSON files and picks the family.

Reads no weights, imports no model code and never runs code from the directory.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from hydra_engine.core.options import MODEL_IMPLEMENTATIONS, NATIVE, SpecOptions
from hydra_engine.entry_points import load_entry_point
from hydra_engine.errors import CheckpointError, ConfigError
from hydra_engine.models.internvl.chat_spec import build_internvl_chat
from hydra_engine.models.internvl.spec import build_internvl
from hydra_engine.models.llava.spec import build_llava
from hydra_engine.models.llava_next.original_spec import ANYRES, build_llava_original
from hydra_engine.models.llava_next.spec import build_llava_next
from hydra_engine.models.minicpmv.resampler_spec import build_resampled
from hydra_engine.models.minicpmv.spec import build_minicpmv
from hydra_engine.models.openpangu.spec import build_openpangu
from hydra_engine.models.qwen_vl.spec import build_qwen2_5_vl, build_qwen2_vl, build_qwen3_5, build_qwen3_vl
from hydra_engine.models.specs.assemble import ModelFiles, model_spec, read_files
from hydra_engine.models.specs.base import ModelSpec
from hydra_engine.models.specs.decoder import build_language, decoder_type
from hydra_engine.models.specs.fields import Fields
from hydra_engine.models.specs.quantization import AT_LOAD, at_load, check_requested

SpecBuilder = Callable[[ModelFiles], ModelSpec]


def load_spec(model_dir: Path, options: SpecOptions | None = None) -> ModelSpec:
    """Loads the spec of a model directory. Raises `CheckpointError` with one sentence if the directory cannot be
    served."""
    if not model_dir.is_dir():
        raise CheckpointError(f"there is no model directory {str(model_dir)[:200]!r}")
    files = read_files(model_dir, options or SpecOptions())
    if (name := files.options.model_impl) not in NATIVE:
        build_spec: SpecBuilder = find_implementation(name).build_spec
        return replace(build_spec(files), family=name)
    family = _family(files.config)
    spec = family.build_spec(replace(files, architecture=family.architecture))
    wanted = files.options.quantization
    check_requested(wanted, spec.quantization)
    return replace(spec, at_load=at_load(wanted)) if wanted in AT_LOAD else spec


def modules_to_preload(name: str) -> tuple[str, ...]:
    """Returns the modules that processes of this model implementation share; none for the engine's own."""
    return () if name in NATIVE else tuple(getattr(find_implementation(name), "preload", ()))


def find_implementation(name: str) -> Any:
    """Finds the `ModelImplementation` of this name, in another package. Raises ConfigError if none is installed."""
    found = load_entry_point(MODEL_IMPLEMENTATIONS, name)
    if found is None:
        raise ConfigError(f"no installed package has the model implementation {name!r}", param="model_impl")
    return found


def build_text_only(files: ModelFiles) -> ModelSpec:
    config = files.config
    return model_spec(
        files,
        decoder_type(config),
        config,
        build_language(config, tie_embeddings=config.flag("tie_word_embeddings", False), nested=False),
    )


class Family(NamedTuple):
    """A model family. `vision` is the path of its vision class below `hydra_engine.models`, imported only where weights
    are, because it needs torch; empty for text-only families."""

    architecture: str
    build_spec: SpecBuilder
    vision: str = ""


# By model_type of config.json.
FAMILIES = {
    "llava": Family("LlavaForConditionalGeneration", build_llava, "llava.model.LlavaVision"),
    "llava_next": Family("LlavaNextForConditionalGeneration", build_llava_next, "llava_next.model.LlavaNextVision"),
    "llava_llama": Family("LlavaLlamaForCausalLM", build_llava_original, "llava.model.LlavaOriginalVision"),
    ANYRES: Family("LlavaLlamaForCausalLM", build_llava_original, "llava_next.model.LlavaNextOriginalVision"),
    "internvl": Family("InternVLForConditionalGeneration", build_internvl, "internvl.model.InternVlVision"),
    "internvl_chat": Family("InternVLChatModel", build_internvl_chat, "internvl.model.InternVlChatVision"),
    "minicpmv": Family("MiniCPMV", build_resampled, "minicpmv.resampler_model.ResampledVision"),
    "minicpmv4_6": Family("MiniCPMV4_6ForConditionalGeneration", build_minicpmv, "minicpmv.model.MiniCpmVision"),
    "openpangu_vl": Family("OpenPanguVLForConditionalGeneration", build_openpangu, "openpangu.model.OpenPanguVision"),
    "qwen2_vl": Family("Qwen2VLForConditionalGeneration", build_qwen2_vl, "qwen_vl.model.Qwen2Vision"),
    "qwen2_5_vl": Family("Qwen2_5_VLForConditionalGeneration", build_qwen2_5_vl, "qwen_vl.model.Qwen25Vision"),
    "qwen3_vl": Family("Qwen3VLForConditionalGeneration", build_qwen3_vl, "qwen_vl.model.Qwen3VlVision"),
    "qwen3_vl_moe": Family(
        "Qwen3VLMoeForConditionalGeneration",
        partial(build_qwen3_vl, family="qwen3_vl_moe"),
        "qwen_vl.model.Qwen3VlVision",
    ),
    "qwen3_5": Family("Qwen3_5ForConditionalGeneration", build_qwen3_5, "qwen_vl.model.Qwen3VlVision"),
    "qwen3_5_moe": Family(
        "Qwen3_5MoeForConditionalGeneration",
        partial(build_qwen3_5, family="qwen3_5_moe"),
        "qwen_vl.model.Qwen3VlVision",
    ),
    "llama": Family("LlamaForCausalLM", build_text_only),
    "mistral": Family("MistralForCausalLM", build_text_only),
    "qwen2": Family("Qwen2ForCausalLM", build_text_only),
    "qwen3": Family("Qwen3ForCausalLM", build_text_only),
    "qwen3_moe": Family("Qwen3MoeForCausalLM", build_text_only),
    "qwen3_5_text": Family("Qwen3_5ForCausalLM", build_text_only),
    "qwen3_5_moe_text": Family("Qwen3_5MoeForCausalLM", build_text_only),
}


def _family(config: Fields) -> Family:
    """Finds the family by architectures[0], or by model_type if there are no architectures."""
    architectures = config.get("architectures")
    if isinstance(architectures, list) and architectures and isinstance(architectures[0], str):
        name = architectures[0]
        family = next((family for family in FAMILIES.values() if family.architecture == name), None)
    elif architectures is None and "model_type" in config:
        name = config.text("model_type")
        family = FAMILIES.get(name)
    else:
        raise CheckpointError("config.json names no architecture")
    if family is None:
        own_code = ""
        if "auto_map" in config:
            own_code = ", and with --trust-remote-code the code that comes with the model, which is never run otherwise"
        known = ", ".join(name for name in FAMILIES if name != ANYRES)  # that is no model type
        raise CheckpointError(
            f"architecture {name[:60]!r} has no native implementation; model types with one are {known}; "
            f"--model-impl transformers runs what transformers can load{own_code}"
        )
    return family
