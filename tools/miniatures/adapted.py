"""Random checkpoints of families that only the generic adapter runs, each with its own processor.

Processor files are written by hand: some classes insist on a video processor, which needs torchvision.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import transformers

from tools.miniatures.base import (
    BOS_ID,
    EOS_ID,
    IMAGE_ID,
    IMAGE_TOKEN,
    PAD_ID,
    TEXT,
    TINY_VOCABULARY,
    TinyFamily,
    chat_template,
    write_processor,
)

_CONTEXT = 2048  # tokens: a large picture in tiles
_SIDE = 28  # of a tile, pixels
_VISION: dict[str, Any] = {
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "image_size": _SIDE,
    "patch_size": 7,
}
_SIGLIP = {"model_type": "siglip_vision_model", **_VISION, "vision_use_head": False}
_CLIP = {"model_type": "clip_vision_model", **_VISION, "projection_dim": 64}
_PIXTRAL = {"model_type": "pixtral", **_VISION, "image_size": 84, "head_dim": 12}
_SAM = {**_VISION, "image_size": 1024, "patch_size": 16, "mlp_dim": 80, "global_attn_indexes": [2]}
_GRID_SIZE = {"shortest_edge": 784, "longest_edge": 12544}  # pixels
_CANVASES = [[rows * _SIDE, columns * _SIDE] for rows, columns in ((1, 2), (2, 1), (2, 2), (3, 1), (1, 3))]
_TILE = {"height": _SIDE, "width": _SIDE}


def _family(
    model_type: str,
    *,
    decoder: Mapping[str, Any],
    tower: Mapping[str, Any],
    top: Mapping[str, Any],
    processor: str,
    images: tuple[str, Mapping[str, Any]],
    settings: Mapping[str, Any] | None = None,
    marks: tuple[str, ...] = (),
    names: Mapping[str, str] | None = None,
    template: str | None = None,
) -> TinyFamily:
    """Describes a family. `processor` is a class, with its `settings`; `images` its image processor's class and
    settings; `marks` are further tokens, `names` those that the tokenizer has attributes for."""

    def build_config(text: Mapping[str, Any], vision: Mapping[str, Any], overrides: Mapping[str, Any]) -> Any:
        words = {**TEXT, "vocab_size": TINY_VOCABULARY + len(marks), "max_position_embeddings": _CONTEXT}
        fixed = {"bos_token_id": BOS_ID, "eos_token_id": EOS_ID, "pad_token_id": PAD_ID, "tie_word_embeddings": False}
        return transformers.AutoConfig.for_model(
            model_type,
            text_config={**words, "tie_word_embeddings": False, **decoder, **text},
            vision_config={**tower, **vision},
            **{**fixed, **top, **overrides},
        )

    def save(directory: Path, _config: Any, tokenizer: Any) -> None:
        name, values = images
        write_processor(
            directory, tokenizer, processor, getattr(transformers, name)(**values), settings, **dict(names or {})
        )

    return TinyFamily(build_config, save, marks, template or chat_template())


def _id(marks: tuple[str, ...], token: str) -> int:
    return TINY_VOCABULARY + marks.index(token)


_AYA = ("<|START_OF_IMG|>", "<|END_OF_IMG|>", "<|IMG_PATCH|>")
AYA_VISION = _family(
    "aya_vision",
    decoder={"model_type": "cohere2", "num_hidden_layers": 4, "sliding_window": 24},
    tower=_SIGLIP,
    top={"image_token_index": _id(_AYA, "<|IMG_PATCH|>"), "downsample_factor": 2},
    processor="AyaVisionProcessor",
    images=("GotOcr2ImageProcessorPil", {"size": _TILE, "max_patches": 6}),
    settings={"patch_size": 7, "img_size": _SIDE, "downsample_factor": 2},
    marks=_AYA,
)

_LIGHTON = ("<|image_pad|>", "<|vision_pad|>", "<|vision_end|>")
LIGHTON_OCR = _family(
    "lighton_ocr",
    decoder={"model_type": "qwen3"},
    tower=_PIXTRAL,
    top={"image_token_id": _id(_LIGHTON, "<|image_pad|>"), "spatial_merge_size": 2},
    processor="LightOnOcrProcessor",
    images=("PixtralImageProcessorPil", {"size": {"longest_edge": 84}, "patch_size": {"height": 14, "width": 14}}),
    settings={"patch_size": 7, "spatial_merge_size": 2},
    marks=_LIGHTON,
    names=dict(zip(("image_token", "image_break_token", "image_end_token"), _LIGHTON, strict=True)),
    template=chat_template("<|image_pad|>"),
)

_PADS = ("<|image_pad|>", "<|video_pad|>", "<vision>", "</vision>")
EXAONE4_5 = _family(
    "exaone4_5",
    decoder={"model_type": "exaone4", "num_hidden_layers": 4, "sliding_window": 24, "sliding_window_pattern": 2},
    tower={
        "depth": 3,
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_heads": 4,
        "num_key_value_heads": 2,
        "patch_size": 7,
        "window_size": 28,
        "out_hidden_size": 64,
        "fullatt_block_indexes": [2],
    },
    top={"image_token_id": _id(_PADS, "<|image_pad|>"), "video_token_id": _id(_PADS, "<|video_pad|>")},
    processor="Exaone4_5_Processor",
    images=("Qwen2VLImageProcessorPil", {"size": _GRID_SIZE, "patch_size": 7}),
    marks=_PADS,
    template=chat_template("<vision><|image_pad|></vision>"),
)

HYPERCLOVAX = _family(
    "hyperclovax_vision_v2",
    decoder={"model_type": "hyperclovax", "attention_multiplier": 0.25, "residual_multiplier": 0.8},
    tower={
        "model_type": "qwen2_5_vl_vision",
        "depth": 3,
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_heads": 4,
        "patch_size": 7,
        "window_size": 28,
        "out_hidden_size": 64,
        "fullatt_block_indexes": [2],
    },
    top={"image_token_id": _id(_PADS, "<|image_pad|>"), "video_token_id": _id(_PADS, "<|video_pad|>")},
    processor="HyperCLOVAXVisionV2Processor",
    images=("Qwen2VLImageProcessorPil", {"size": _GRID_SIZE, "patch_size": 7}),
    marks=_PADS,
    template=chat_template("<vision><|image_pad|></vision>"),
)

VIDEO_LLAMA_3 = _family(
    "video_llama_3",
    decoder={"model_type": "qwen2"},
    tower={**_VISION},
    top={"image_token_id": _id(_PADS, "<|image_pad|>"), "video_token_id": _id(_PADS, "<|video_pad|>")},
    processor="VideoLlama3Processor",
    images=("VideoLlama3ImageProcessorPil", {"size": _GRID_SIZE, "patch_size": 7, "merge_size": 2}),
    marks=_PADS,
    template=chat_template("<|image_pad|>"),
)

_GOT = ("<img>", "</img>", "<imgpad>")
GOT_OCR2 = _family(
    "got_ocr2",
    decoder={"model_type": "qwen2"},
    tower={**_SAM, "output_channels": 32},
    top={"image_token_index": _id(_GOT, "<imgpad>")},
    processor="GotOcr2Processor",
    images=("GotOcr2ImageProcessorPil", {"size": {"height": 1024, "width": 1024}}),
    marks=_GOT,
    template=chat_template("<img><imgpad></img>"),
)

_OVIS = ("<IMG_ATOM>", "<IMG_START>", "<IMG_GRID>", "<IMG_COL>", "<IMG_ROW>", "<IMG_END>")
OVIS2 = _family(
    "ovis2",
    decoder={"model_type": "qwen2"},
    tower={**_VISION, "vocab_size": 64, "hidden_stride": 2},
    top={
        "image_token_id": _id(_OVIS, "<IMG_ATOM>"),
        "visual_indicator_token_ids": [_id(_OVIS, mark) for mark in _OVIS[1:]],
        "vocab_size": TINY_VOCABULARY + len(_OVIS),
        "hidden_size": TEXT["hidden_size"],
    },
    processor="Ovis2Processor",
    images=("Ovis2ImageProcessorPil", {"size": _TILE, "max_patches": 6}),
    settings={"image_seq_length": 4},
    marks=_OVIS,
)

DEEPSEEK_OCR2 = _family(
    "deepseek_ocr2",
    decoder={
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "mlp_layer_types": ["dense", "sparse", "sparse"],
    },
    tower={
        "sam_config": {**_SAM, "output_channels": 32, "downsample_channels": [40, 48], "mlp_dim": None},
        "encoder_config": {
            "hidden_size": 48,
            "intermediate_size": 80,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
        },
    },
    top={"image_token_id": IMAGE_ID},
    processor="DeepseekOcr2Processor",
    images=("DeepseekOcr2ImageProcessorPil", {"size": {"height": 1024, "width": 1024}, "tile_size": 768}),
)

_QIANFAN = ("<img>", "</img>", "<IMG_CONTEXT>")
QIANFAN_OCR = _family(
    "qianfan_ocr",
    decoder={"model_type": "qwen3"},
    tower=_VISION,
    top={"image_token_id": _id(_QIANFAN, "<IMG_CONTEXT>"), "image_seq_length": 4},
    processor="QianfanOCRProcessor",
    images=("GotOcr2ImageProcessorPil", {"size": _TILE, "max_patches": 6}),
    settings={"image_seq_length": 4},
    marks=_QIANFAN,
    names=dict(zip(("start_image_token", "end_image_token", "context_image_token"), _QIANFAN, strict=True)),
)

_ANY_SIZE = {"patch_size": 7, "num_additional_image_tokens": 1, "vision_feature_select_strategy": "default"}
VIPLLAVA = _family(
    "vipllava",
    decoder={"model_type": "llama"},
    tower=_CLIP,
    top={"image_token_index": IMAGE_ID, "vision_feature_layer": [-2, -3, 1]},
    processor="LlavaProcessor",
    images=("CLIPImageProcessorPil", {"size": {"shortest_edge": _SIDE}, "crop_size": _TILE}),
    settings=_ANY_SIZE,
)

LLAVA_NEXT_VIDEO = _family(
    "llava_next_video",
    decoder={"model_type": "llama"},
    tower=_CLIP,
    top={
        "image_token_index": IMAGE_ID,
        "video_token_index": TINY_VOCABULARY,
        "image_grid_pinpoints": _CANVASES,
        "vision_feature_layer": -2,
    },
    processor="LlavaNextVideoProcessor",
    images=(
        "LlavaNextImageProcessorPil",
        {"size": {"shortest_edge": _SIDE}, "crop_size": _TILE, "image_grid_pinpoints": _CANVASES},
    ),
    settings=_ANY_SIZE,
    marks=("<video>",),
)

VIDEO_LLAVA = _family(
    "video_llava",
    decoder={"model_type": "llama"},
    tower=_CLIP,
    top={"image_token_index": IMAGE_ID, "video_token_index": TINY_VOCABULARY},
    processor="VideoLlavaProcessor",
    images=("VideoLlavaImageProcessor", {"size": {"shortest_edge": _SIDE}, "crop_size": _TILE}),
    settings=_ANY_SIZE,
    marks=("<video>",),
)

GRANITE4_VISION = _family(
    "granite4_vision",
    decoder={"num_hidden_layers": 4},
    tower={**_SIGLIP, "hidden_size": 64, "image_size": 56},  # its resampler has heads of 64
    top={
        "image_token_index": IMAGE_ID,
        "image_grid_pinpoints": [[56, 112], [112, 56], [112, 112]],
        "vision_feature_select_strategy": "full",
        "downsample_rate": "1/2",
        "deepstack_layer_map": [[1, 0], [2, 1]],
        "spatial_vision_layer": -1,
        "spatial_target_layers": [2, 2, 3, 3],
        "qformer_config": {
            "model_type": "blip_2_qformer",
            "intermediate_size": 80,
            "num_hidden_layers": 1,
            "cross_attention_frequency": 1,
            "use_qformer_text_input": False,
        },
    },
    processor="Granite4VisionProcessor",
    images=(
        "LlavaNextImageProcessorPil",
        {
            "size": {"shortest_edge": 56},
            "crop_size": {"height": 56, "width": 56},
            "image_grid_pinpoints": [[56, 112], [112, 56], [112, 112]],
        },
    ),
    settings={"patch_size": 7, "vision_feature_select_strategy": "full", "downsample_rate": "1/2"},
)

_DOCLING = (
    "<fake_token_around_image>",
    "<global-img>",
    *(f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)),
)
GRANITE_DOCLING = _family(
    "granite_docling",
    decoder={"num_hidden_layers": 4},
    tower={**_VISION, "out_hidden_size": 64, "scale_factor": 2, "deepstack_visual_indexes": [0, 1]},
    top={"image_token_id": IMAGE_ID},
    processor="GraniteDoclingProcessor",
    images=("GraniteDoclingImageProcessorPil", {"size": _TILE, "max_patches": 6}),
    settings={"image_seq_len": 4},
    marks=_DOCLING,
)

_HUNYUAN = ("<img>", "</img>", "<newline>")
HUNYUAN_VL = _family(
    "hunyuan_vl",
    decoder={"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 2, 2, 2]}},
    tower={**_VISION, "out_hidden_size": 64, "text_hidden_size": 64, "max_image_size": 56, "img_max_token_num": 16},
    top={
        "image_token_id": IMAGE_ID,
        **{
            f"im_{name}_id": _id(_HUNYUAN, mark)
            for name, mark in zip(("start", "end", "newline"), _HUNYUAN, strict=True)
        },
    },
    processor="HunYuanVLProcessor",
    images=("HunYuanVLImageProcessorPil", {"size": _GRID_SIZE, "patch_size": 7}),
    marks=_HUNYUAN,
    names={"image_token": IMAGE_TOKEN, "image_start_token": "<img>", "image_end_token": "</img>"},
    template=chat_template(f"<img>{IMAGE_TOKEN}</img>"),
)

_FAKE = ("<fake_token_around_image>", "<end_of_utterance>")
IDEFICS2 = _family(
    "idefics2",
    decoder={"model_type": "mistral", "sliding_window": None},
    tower={**_VISION, "image_size": 56},
    top={
        "image_token_id": IMAGE_ID,
        "perceiver_config": {
            "hidden_size": TEXT["hidden_size"],
            "resampler_n_latents": 8,
            "resampler_depth": 2,
            "resampler_n_heads": 4,
            "resampler_head_dim": 16,
            "num_key_value_heads": 2,
        },
    },
    processor="Idefics2Processor",
    images=(
        "Idefics2ImageProcessorPil",
        {"size": {"shortest_edge": 28, "longest_edge": 56}, "do_image_splitting": False},
    ),
    settings={"image_seq_len": 8},
    marks=_FAKE,
)

ARIA = _family(
    "aria",
    decoder={"moe_num_experts": 4, "moe_topk": 2, "moe_num_shared_experts": 1, "intermediate_size": 32},
    tower={"model_type": "idefics3_vision", **_VISION, "image_size": 980, "patch_size": 140},
    top={"image_token_index": IMAGE_ID, "projector_patch_to_query_dict": {"49": 8}},
    processor="AriaProcessor",
    images=("AriaImageProcessorPil", {}),
    settings={
        "size_conversion": {"980": 8},
    },
    names={"image_token": IMAGE_TOKEN},
)

ADAPTED = {
    "aya_vision": AYA_VISION,
    "lighton_ocr": LIGHTON_OCR,
    "exaone4_5": EXAONE4_5,
    "hyperclovax_vision_v2": HYPERCLOVAX,
    "video_llama_3": VIDEO_LLAMA_3,
    "got_ocr2": GOT_OCR2,
    "ovis2": OVIS2,
    "deepseek_ocr2": DEEPSEEK_OCR2,
    "qianfan_ocr": QIANFAN_OCR,
    "vipllava": VIPLLAVA,
    "video_llava": VIDEO_LLAVA,
    "granite4_vision": GRANITE4_VISION,
    "granite_docling": GRANITE_DOCLING,
    "llava_next_video": LLAVA_NEXT_VIDEO,
    "hunyuan_vl": HUNYUAN_VL,
    "idefics2": IDEFICS2,
    "aria": ARIA,
}
