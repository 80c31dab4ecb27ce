"""Random checkpoints of families that only the generic adapter runs, each with its own processor.

Processor files are written by hand: some classes insist on a video processor, which needs torchvision.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import transformers
from transformers.models.aria.image_processing_pil_aria import AriaImageProcessorPil
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.deepseek_ocr2.image_processing_pil_deepseek_ocr2 import DeepseekOcr2ImageProcessorPil
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil
from transformers.models.granite_docling.image_processing_pil_granite_docling import GraniteDoclingImageProcessorPil
from transformers.models.idefics2.image_processing_pil_idefics2 import Idefics2ImageProcessorPil
from transformers.models.llava_next.image_processing_pil_llava_next import LlavaNextImageProcessorPil
from transformers.models.ovis2.image_processing_pil_ovis2 import Ovis2ImageProcessorPil
from transformers.models.pixtral.image_processing_pil_pixtral import PixtralImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.video_llama_3.image_processing_pil_video_llama_3 import VideoLlama3ImageProcessorPil
from transformers.models.video_llava.image_processing_video_llava import VideoLlavaImageProcessor

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

Maker = Callable[[Any], Mapping[str, Any]]  # the processor's own fields from the config


def _family(
    model_type: str,
    *,
    decoder: Mapping[str, Any],
    tower: Mapping[str, Any],
    top: Mapping[str, Any],
    processor: str,
    fields: Maker,
    marks: tuple[str, ...] = (),
    names: Mapping[str, str] | None = None,
    template: str | None = None,
) -> TinyFamily:
    """`processor` is the class, `fields` its settings; `marks` are further tokens, `names` those that the tokenizer
    has attributes for."""

    def build_config(text: Mapping[str, Any], vision: Mapping[str, Any], overrides: Mapping[str, Any]) -> Any:
        words = {**TEXT, "vocab_size": TINY_VOCABULARY + len(marks), "max_position_embeddings": _CONTEXT}
        fixed = {"bos_token_id": BOS_ID, "eos_token_id": EOS_ID, "pad_token_id": PAD_ID, "tie_word_embeddings": False}
        return transformers.AutoConfig.for_model(
            model_type,
            text_config={**words, "tie_word_embeddings": False, **decoder, **text},
            vision_config={**tower, **vision},
            **{**fixed, **top, **overrides},
        )

    def save(directory: Path, config: Any, tokenizer: Any) -> None:
        tokenizer.save_pretrained(directory)
        file = directory / "tokenizer_config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | dict(names or {})))
        values = {"processor_class": processor, **fields(config)}
        values["image_processor"] = values["image_processor"].to_dict()
        (directory / "processor_config.json").write_text(json.dumps(values, default=str))

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
    fields=lambda _: {
        "image_processor": GotOcr2ImageProcessorPil(size=_TILE, max_patches=6),
        "patch_size": 7,
        "img_size": _SIDE,
        "downsample_factor": 2,
    },
    marks=_AYA,
)

_LIGHTON = ("<|image_pad|>", "<|vision_pad|>", "<|vision_end|>")
LIGHTON_OCR = _family(
    "lighton_ocr",
    decoder={"model_type": "qwen3"},
    tower=_PIXTRAL,
    top={"image_token_id": _id(_LIGHTON, "<|image_pad|>"), "spatial_merge_size": 2},
    processor="LightOnOcrProcessor",
    fields=lambda _: {
        "image_processor": PixtralImageProcessorPil(size={"longest_edge": 84}, patch_size={"height": 14, "width": 14}),
        "patch_size": 7,
        "spatial_merge_size": 2,
    },
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
    fields=lambda _: {"image_processor": Qwen2VLImageProcessorPil(size=_GRID_SIZE, patch_size=7)},
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
    fields=lambda _: {"image_processor": Qwen2VLImageProcessorPil(size=_GRID_SIZE, patch_size=7)},
    marks=_PADS,
    template=chat_template("<vision><|image_pad|></vision>"),
)

VIDEO_LLAMA_3 = _family(
    "video_llama_3",
    decoder={"model_type": "qwen2"},
    tower={**_VISION},
    top={"image_token_id": _id(_PADS, "<|image_pad|>"), "video_token_id": _id(_PADS, "<|video_pad|>")},
    processor="VideoLlama3Processor",
    fields=lambda _: {"image_processor": VideoLlama3ImageProcessorPil(size=_GRID_SIZE, patch_size=7, merge_size=2)},
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
    fields=lambda _: {"image_processor": GotOcr2ImageProcessorPil(size={"height": 1024, "width": 1024})},
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
    fields=lambda _: {"image_processor": Ovis2ImageProcessorPil(size=_TILE, max_patches=6), "image_seq_length": 4},
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
    fields=lambda _: {
        "image_processor": DeepseekOcr2ImageProcessorPil(size={"height": 1024, "width": 1024}, tile_size=768)
    },
)

_QIANFAN = ("<img>", "</img>", "<IMG_CONTEXT>")
QIANFAN_OCR = _family(
    "qianfan_ocr",
    decoder={"model_type": "qwen3"},
    tower=_VISION,
    top={"image_token_id": _id(_QIANFAN, "<IMG_CONTEXT>"), "image_seq_length": 4},
    processor="QianfanOCRProcessor",
    fields=lambda _: {"image_processor": GotOcr2ImageProcessorPil(size=_TILE, max_patches=6), "image_seq_length": 4},
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
    fields=lambda _: {
        "image_processor": CLIPImageProcessorPil(size={"shortest_edge": _SIDE}, crop_size=_TILE),
        **_ANY_SIZE,
    },
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
    fields=lambda _: {
        "image_processor": LlavaNextImageProcessorPil(
            size={"shortest_edge": _SIDE}, crop_size=_TILE, image_grid_pinpoints=_CANVASES
        ),
        **_ANY_SIZE,
    },
    marks=("<video>",),
)

VIDEO_LLAVA = _family(
    "video_llava",
    decoder={"model_type": "llama"},
    tower=_CLIP,
    top={"image_token_index": IMAGE_ID, "video_token_index": TINY_VOCABULARY},
    processor="VideoLlavaProcessor",
    fields=lambda _: {
        "image_processor": VideoLlavaImageProcessor(size={"shortest_edge": _SIDE}, crop_size=_TILE),
        **_ANY_SIZE,
    },
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
    fields=lambda _: {
        "image_processor": LlavaNextImageProcessorPil(
            size={"shortest_edge": 56},
            crop_size={"height": 56, "width": 56},
            image_grid_pinpoints=[[56, 112], [112, 56], [112, 112]],
        ),
        "patch_size": 7,
        "vision_feature_select_strategy": "full",
        "downsample_rate": "1/2",
    },
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
    fields=lambda _: {
        "image_processor": GraniteDoclingImageProcessorPil(size=_TILE, max_patches=6),
        "image_seq_len": 4,
    },
    marks=_DOCLING,
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
    fields=lambda _: {
        "image_processor": Idefics2ImageProcessorPil(
            size={"shortest_edge": 28, "longest_edge": 56}, do_image_splitting=False
        ),
        "image_seq_len": 8,
    },
    marks=_FAKE,
)

ARIA = _family(
    "aria",
    decoder={"moe_num_experts": 4, "moe_topk": 2, "moe_num_shared_experts": 1, "intermediate_size": 32},
    tower={"model_type": "idefics3_vision", **_VISION, "image_size": 980, "patch_size": 140},
    top={"image_token_index": IMAGE_ID, "projector_patch_to_query_dict": {"49": 8}},
    processor="AriaProcessor",
    fields=lambda _: {
        "image_processor": AriaImageProcessorPil(),
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
    "idefics2": IDEFICS2,
    "aria": ARIA,
}
