"""Specs of the papers' models, without weights: those that ship as shapes, and others from the figures of their
published config.json. Nothing is read from the network, and nothing but formulas is made of them.

MiniCPM-V 2.6 has its tower's and decoder's sizes and its slicing here, and a merging of patches where its family in the
engine has a resampler. InternVL2's decoder has the shape of a Llama. EPD-Serve's token counts for openPangu-7B-VL are
those of Qwen2.5-VL, which stands for it.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from hydra_engine.config import SHAPES, EngineConfig
from hydra_engine.models.internvl.spec import build_internvl
from hydra_engine.models.llava.spec import build_llava
from hydra_engine.models.llava_next.spec import build_llava_next
from hydra_engine.models.minicpmv.slicing_spec import Marks, Slicing
from hydra_engine.models.minicpmv.spec import MiniCpmVisionSpec
from hydra_engine.models.specs.assemble import ModelFiles
from hydra_engine.models.specs.base import ModelSpec
from hydra_engine.models.specs.fields import Fields
from hydra_engine.models.specs.registry import build_text_only, load_spec
from hydra_engine.models.specs.vision import HALF, TowerSpec, normalisation

_HERE = Path(__file__).parent  # a folder without files of a checkpoint
_CLIP = {
    "model_type": "clip_vision_model",
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_attention_heads": 16,
    "num_hidden_layers": 24,
    "image_size": 336,
    "patch_size": 14,
}
_CLIP_PICTURES = {"size": {"shortest_edge": 336}, "crop_size": {"height": 336, "width": 336}}
_VICUNA = {"model_type": "llama", "vocab_size": 32064, "max_position_embeddings": 4096}
_QWEN2_7B = {
    "model_type": "qwen2",
    "hidden_size": 3584,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "intermediate_size": 18944,
    "vocab_size": 151666,
    "max_position_embeddings": 32768,
}


def _decoder(hidden: int, layers: int, heads: int, kv_heads: int, inner: int, **others: Any) -> dict[str, Any]:
    return {
        "model_type": "llama",
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": inner,
        **others,
    }


# Decoders behind a CLIP tower of 576 features, as HeteroServe's Table 3 has them.
_LLAVA = {
    "llava-13b": _decoder(5120, 40, 40, 40, 13824, vocab_size=32064, max_position_embeddings=4096),
    "llava-34b": _decoder(7168, 60, 56, 8, 20480, vocab_size=64064, max_position_embeddings=4096),
    "qwen-vl-72b": _decoder(8192, 80, 64, 8, 29568, vocab_size=152064, max_position_embeddings=32768),
}
_INTERN_6B = {
    "hidden_size": 3200,
    "num_hidden_layers": 45,
    "num_attention_heads": 25,
    "intermediate_size": 12800,
    "norm_type": "rms_norm",
    "use_qk_norm": True,
}
_INTERNVL: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "internvl2-8b": ({}, _decoder(4096, 32, 32, 8, 14336, vocab_size=92553, max_position_embeddings=32768)),
    "internvl2-26b": (_INTERN_6B, _decoder(6144, 48, 48, 8, 16384, vocab_size=92553, max_position_embeddings=32768)),
    "internvl3-78b": (_INTERN_6B, _decoder(8192, 80, 64, 8, 29568, vocab_size=151674, max_position_embeddings=32768)),
}
MODELS = (*SHAPES, *_LLAVA, "llava-next-7b", *_INTERNVL, "minicpm-v-2.6")


@cache
def spec_of(name: str) -> ModelSpec:
    """Builds the spec of a name in MODELS."""
    if name in SHAPES:
        config = EngineConfig(model=name, load_format="random")
        return load_spec(config.model_path, config.spec_options)
    if name in _LLAVA:
        return build_llava(_files("llava", _LLAVA[name], _CLIP, _CLIP_PICTURES))
    if name in _INTERNVL:
        tower, decoder = _INTERNVL[name]
        vision = {"model_type": "internvl_vision", "image_size": 448, "patch_size": 14, **tower}
        return build_internvl(_files("internvl", decoder, vision, {"size": {"height": 448, "width": 448}}))
    if name == "llava-next-7b":
        return build_llava_next(_files("llava_next", _VICUNA, _CLIP, _CLIP_PICTURES))
    assert name == "minicpm-v-2.6", "one of MODELS"
    return _minicpm()


def _files(family: str, text: dict[str, Any], vision: dict[str, Any], pictures: dict[str, Any]) -> ModelFiles:
    config = {
        "model_type": family,
        "text_config": text,
        "vision_config": vision,
        "vision_feature_layer": -1 if family == "internvl" else -2,
        "image_token_index": 1,
        "torch_dtype": "float16",
    }
    return ModelFiles(
        model_dir=_HERE,
        architecture=family,
        config=Fields(config, "config.json"),
        generation=None,
        processor=None,
        images=Fields(pictures, "preprocessor_config.json"),
        videos=None,
    )


def _minicpm() -> ModelSpec:
    """64 tokens for each picture of 1024 patches, as its resampler makes: 16 patches for one, twice 2 x 2."""
    text = ModelFiles(
        _HERE, "minicpm", Fields({**_QWEN2_7B, "torch_dtype": "float16"}, "config.json"), None, None, None, None
    )
    spec = build_text_only(text)
    slicing = Slicing(448, 14 * 4, 9)
    vision = MiniCpmVisionSpec(
        tower=TowerSpec(
            hidden_size=1152,
            num_layers=27,
            num_heads=16,
            intermediate_size=4304,
            hidden_act="gelu_pytorch_tanh",
            norm_eps=1e-6,
        ),
        patch_size=14,
        num_positions=70,
        insert_layer=None,
        num_rounds=2,
        feature_size=spec.language.hidden_size,
        marks=Marks(("<image>", "</image>"), ("<slice>", "</slice>"), None),
        images=slicing,
        videos=None,
        max_frames=0,
        preprocess=normalisation(Fields({}, "preprocessor_config.json"), "minicpmv", mean=HALF, std=HALF),
        max_slice_tokens=slicing.max_cells(),
    )
    return replace(spec, vision=vision, image_token_id=1)
