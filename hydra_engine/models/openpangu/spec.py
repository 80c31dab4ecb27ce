"""The spec of openPangu-VL-7B: a window tower like Qwen2.5-VL's, read at several layers, before a dense decoder.

The layout as published in FreedomIntelligence/openPangu-VL-7B: config.json, preprocessor_config.json, the template and
the code beside them (modeling_openpangu_vl.py, modeling_openpangu_embedded.py, imageprocessor_openpangu_vl.py,
videoprocessor_openpangu_vl.py, processor_openpangu_vl.py), of which github.com/mvp-ai-lab/mvp-engine has copies in
recipes/panguvl at commit 4ef3d8c3; vLLM reads the same in model_executor/models/openpangu_vl.py.

- Tower (`visual.`): patches of 14 pixels, two equal pictures deep, without a bias; rotary rows and columns; RMS norms;
  one attention projection `attn.qkv` (vLLM also reads `attn.q`, `attn.k`, `attn.v`) and `attn.proj`; `mlp.up_proj`,
  gelu, `mlp.down_proj`, with a gate where hidden_act is silu; all with biases. Layers attend within windows of 112
  pixels, but for `fullatt_block_indexes`.
- The outputs of layers -1 and -3 (`mm_unit_vision_select_layer`) each pass `final_layernorm` and a merger of their own,
  `merger.0` for the last layer; the sum of the mergers passes silu and `vision_projection.fc1` to the decoder's width.
- Decoder (`model.`, fields at the top level of config.json): a Llama whose four attention projections have biases if
  `bias`. M-RoPE with interleaved axes in an order of its own, `spread_axes`.
- Pictures: [unused18], one [unused19] per token, [unused20]; positions as in Qwen2-VL. One with a side of at most 28
  pixels is first enlarged until its shorter side has 56.
- Videos: every frame is encoded alone, as a picture of [unused32] between marks of its own, and takes positions like
  one. All frames share a budget of pixels. The published processor takes the frames that it is given; here they are
  chosen as for Qwen2.5-VL.

Later models have the same class name in config.json and other layers; a field of theirs is refused by name.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from hydra_engine.core.options import SpecOptions
from hydra_engine.core.prompting import AS_CONFIGURED, PixelBudget
from hydra_engine.errors import CheckpointError
from hydra_engine.models.qwen_vl.geometry_spec import (
    FrameSampling,
    PixelLimits,
    budgeted_size,
    frame_sampling,
    max_image_tokens,
    smart_resize,
)
from hydra_engine.models.qwen_vl.spec import (
    GridVisionSpec,
    QwenTower,
    build_grid_model,
    full_layers,
    grid_settings,
    rope_theta,
    window_tokens,
)
from hydra_engine.models.specs.assemble import ModelFiles
from hydra_engine.models.specs.base import ItemPlan, LanguageSpec, MediaPlan, ModelSpec, VideoInfo, VideoPlan, View
from hydra_engine.models.specs.decoder import activation, build_language
from hydra_engine.models.specs.fields import ELSEWHERE, MAX_LAYERS, Fields
from hydra_engine.models.specs.rope import Sections, rope_section

FAMILY = "openpangu_vl"
BETWEEN_FRAMES = "[unused20][unused18]"  # the end of one and the start of the next
SMALL, ENLARGED = 28, 56  # pixels of a shorter side
# The config classes' defaults.
_DECODER = {
    "vocab_size": 153376,
    "hidden_size": 4096,
    "intermediate_size": 12800,
    "num_hidden_layers": 34,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-5,
    "rope_theta": 64e6,
    "bos_token_id": 1,
    "eos_token_id": 45892,
}
# Fields of later models with the same class name.
_LATER_TOWER = (
    "use_gatedmerger",
    "use_gated_merger",
    "num_key_value_heads",
    "rope_sections",
    "position_embedding_type",
)
_LATER_DECODER = ("n_routed_experts", "num_experts", "kv_lora_rank", "param_sink_number", "sandwich_norm")


@dataclass(frozen=True, slots=True)
class FramePixels:
    """Pixel limits of one frame of a video, by the number of frames."""

    frame: PixelLimits
    video: PixelLimits | None  # of all frames together; None: `frame` whatever their number
    max_pixels: int | None  # the user's, of a frame

    def of_each(self, num_frames: int) -> PixelLimits:
        least, most = self.frame
        if self.video is not None:
            shares = (max(min(total // num_frames, most), least) for total in self.video)
            least, most = shares
        most = most if self.max_pixels is None else min(most, self.max_pixels)
        return PixelLimits(min(least, most), most)


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenPanguVisionSpec(GridVisionSpec):
    """The tower of openPangu-VL-7B. `read_layers` are read besides the last, from the last to the first: merger i + 1
    is that of read_layers[i]."""

    read_layers: tuple[int, ...]
    merger_size: int  # outputs of a merger
    sampling: FrameSampling
    pixels: FramePixels

    @property
    def max_tokens_per_item(self) -> int:
        return max(self.max_tokens_per_image, max_image_tokens(self.geometry.factor, self.pixels.of_each(1)))

    @property
    def max_patches_per_image(self) -> int:
        return self.max_tokens_per_item * self.geometry.patches_per_token

    @property
    def merger_weights(self) -> int:
        merger = self.merged_size * (self.merged_size + self.merger_size)
        return (1 + len(self.read_layers)) * merger + self.merger_size * self.feature_size

    def num_parameters(self) -> int:
        tower, num_mergers = self.tower, 1 + len(self.read_layers)
        embeddings = self.geometry.patch_values * tower.hidden_size
        biases = num_mergers * (self.merged_size + self.merger_size) + self.feature_size
        norms = (1 + num_mergers) * tower.norm_parameters
        return embeddings + tower.num_layers * tower.layer_parameters() + norms + self.merger_weights + biases

    def plan_image(self, width: int, height: int, budget: PixelBudget = AS_CONFIGURED) -> MediaPlan:
        before = enlarged(width, height)
        size = budgeted_size(*(before or (width, height)), self.geometry.factor, self.limits, budget)
        return MediaPlan((View.whole(*size)._replace(before=before),), (self.geometry.item(size),))

    def plan_video(self, video: VideoInfo) -> VideoPlan:
        """Plans one span per frame; the prompt has the marks before the first and after the last."""
        frames = self.sampling.choose_frames(video)
        size = smart_resize(video.width, video.height, self.geometry.factor, self.pixels.of_each(len(frames)))
        views = tuple(View.whole(*size, source=index) for index in range(len(frames)))
        parts: list[str | ItemPlan] = [self.geometry.item(size)]
        for _ in frames[1:]:
            parts += [BETWEEN_FRAMES, self.geometry.item(size)]
        return VideoPlan(frames, MediaPlan(views, tuple(parts)))


def enlarged(width: int, height: int) -> tuple[int, int] | None:
    """Size to which a small picture is resized first, with the processor's rounding; None for others."""
    if width < 1 or height < 1 or min(width, height) > SMALL:
        return None
    if width >= height:
        return int(ENLARGED * 1.0 / height * width), ENLARGED
    return ENLARGED, int(ENLARGED * 1.0 / width * height)


def build_openpangu(files: ModelFiles) -> ModelSpec:
    if (name := files.config.text("model_type", FAMILY)) != FAMILY:
        raise CheckpointError(
            f"config.json names {files.architecture} with model_type {name[:40]!r}, another model than "
            f"{FAMILY}; use the config.json that came with the weights"
        )
    config = files.config.section("vision_config")
    _refuse(config, _LATER_TOWER)
    text, language = _language(files.config)
    act = activation(config, "hidden_act", "gelu")
    num_layers = config.integer("depth", 26, at_most=MAX_LAYERS)
    tower = QwenTower(
        hidden_size=config.integer("hidden_size", 1536),
        num_layers=num_layers,
        num_heads=config.integer("num_heads", 16),
        intermediate_size=config.integer("intermediate_size", 4608),
        hidden_act=act,
        rope_theta=rope_theta(config),
        rms_norms=True,
        gated=act == "silu",
        window_tokens=window_tokens(config),
        full_layers=full_layers(config, [5, 12, 19, 25]),
    )
    geometry, limits, preprocess, videos = grid_settings(files, FAMILY, 14)
    vision = OpenPanguVisionSpec(
        tower=tower,
        geometry=geometry,
        limits=limits,
        read_layers=_read_layers(config, num_layers),
        merger_size=config.integer("out_hidden_size", 3584),
        sampling=frame_sampling(videos, 1, SpecOptions()),
        pixels=_frame_pixels(videos, files.options),
        feature_size=language.hidden_size,
        preprocess=preprocess,
    )
    return build_grid_model(files, FAMILY, text, language, vision, None, token_ids=(46005, 144208))


def _language(config: Fields) -> tuple[Fields, LanguageSpec]:
    """Returns the decoder's fields, as a Llama's, and its spec."""
    part = config.section_if_present("text_config") or config
    _refuse(part, _LATER_DECODER)
    rope = rope_section(part)
    if "mrope_section" not in rope:
        raise rope.missing_field("mrope_section")
    values = {**_DECODER, **part.values, "model_type": "llama", "attention_bias": part.flag("bias", False)}
    values["rope_scaling"] = {name: value for name, value in rope.values.items() if name != "mrope_interleaved"}
    text = Fields(values, part.where)
    language = build_language(text, tie_embeddings=config.flag("tie_word_embeddings", False), nested=False, mrope=True)
    if rope.flag("mrope_interleaved", False) and language.rope_sections is not None:
        language = replace(language, rope_axes=spread_axes(language.rope_sections))
    return text, language


def spread_axes(sections: Sections) -> tuple[int, ...]:
    """Returns the axis that turns each pair (0 time, 1 row, 2 column). Each pair gets the axis of which the smallest
    share is placed, the first of several, but not that of the pair before while another is left; the last pair is kept
    for time."""
    counts = (sections[0] - 1, *sections[1:])
    axes: list[int] = []
    for _ in range(sum(counts)):
        left = [axis for axis in range(3) if axes.count(axis) < counts[axis]]
        others = [axis for axis in left if axis not in axes[-1:]]
        axes.append(min(others or left, key=lambda axis: axes.count(axis) / counts[axis]))
    return (*axes, 0)


def _read_layers(config: Fields, num_layers: int) -> tuple[int, ...]:
    """Returns the layers that are read besides the last, from the last to the first."""
    name = "mm_unit_vision_select_layer"
    layers = config.get(name) or [-1, -3]
    if not isinstance(layers, list) or any(type(n) is not int or not -num_layers <= n < 0 for n in layers):
        raise config.wrong_value(name, f"a list of layers from -{num_layers} to -1")
    if -1 not in layers or len(set(layers)) < len(layers):
        raise config.wrong_value(name, "a list without repetition that has -1", ELSEWHERE)
    return tuple(num_layers + n for n in sorted(layers, reverse=True) if n != -1)


def _frame_pixels(videos: Fields, options: SpecOptions) -> FramePixels:
    """Reads the settings of the video processor; the defaults are those of its class."""

    def limits(part: str, least: int, most: int) -> PixelLimits:
        names = [f"any_res_{edge}_{part}_pixels" for edge in ("min", "max")]
        found = PixelLimits(videos.integer(names[0], least), videos.integer(names[1], most))
        if found.min_pixels > found.max_pixels:
            raise videos.wrong_value(names[0], f"at most {names[1]}, {found.max_pixels}")
        return found

    total = 448 * 448 * 32
    shared = videos.flag("any_res_dynamic_video_pixels", True)
    return FramePixels(
        frame=limits("frame", 56 * 56, 1280 * 28 * 28),
        video=limits("video_total", total, total) if shared else None,
        max_pixels=options.max_pixels,
    )


def _refuse(config: Fields, later: tuple[str, ...]) -> None:
    if (name := next((name for name in later if config.get(name)), None)) is not None:
        raise CheckpointError(
            f"{name} in {config.where} is of a later openPangu model than openPangu-VL-7B, which alone is supported"
            + ELSEWHERE
        )
