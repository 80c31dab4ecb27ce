"""LLaVA-1.5: a CLIP tower of one fixed picture size, a two-layer projector, a decoder of the Llama kind.

Knows config.json and the processor's configs in their old and new layouts. The number of placeholders follows from the
tower, because that is how many features there will be; `image_seq_length` of old files is not trusted.
"""

from __future__ import annotations

from dataclasses import dataclass

from hydra_engine.errors import CheckpointError, InvalidImage
from hydra_engine.specs.base import ImageGeometry, ModelSpec, PreprocessSpec
from hydra_engine.specs.decoder import activation, build_language, special_tokens, stored_dtype
from hydra_engine.specs.fields import Fields

CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
CLIP_STD = (0.26862954, 0.26130258, 0.27577711)
RESAMPLE = {0: "nearest", 1: "lanczos", 2: "bilinear", 3: "bicubic"}  # PIL's numbers


@dataclass(frozen=True, slots=True)
class LlavaVisionSpec:
    """A CLIP tower with the LLaVA projector on top.

    `feature_layers` are the hidden states that the projector reads, 0 being the embeddings: state n is the output of
    n layers, so layers beyond the largest are never computed. `keep_cls` is the select strategy "full".
    """

    hidden_size: int
    num_layers: int  # in the checkpoint
    feature_layers: tuple[int, ...]
    num_heads: int
    intermediate_size: int
    image_size: int
    patch_size: int
    hidden_act: str
    layer_norm_eps: float
    keep_cls: bool
    projector_act: str
    projector_bias: bool
    feature_size: int
    preprocess: PreprocessSpec
    num_planes: int = 1

    @property
    def num_active_layers(self) -> int:
        return max(self.feature_layers)

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads

    @property
    def grid_side(self) -> int:
        return self.image_size // self.patch_size

    @property
    def max_patches_per_image(self) -> int:
        return self.grid_side**2

    @property
    def max_tokens_per_image(self) -> int:
        return self.max_patches_per_image + int(self.keep_cls)

    def geometry(self, width: int, height: int) -> ImageGeometry:
        if width < 1 or height < 1:
            raise InvalidImage(f"a picture of {width} x {height} pixels is empty")
        side = self.grid_side
        return ImageGeometry(
            width=self.image_size,
            height=self.image_size,
            num_patches=self.max_patches_per_image,
            num_tokens=self.max_tokens_per_image,
            grid=(1, side, side),
        )

    def num_parameters(self) -> int:
        """Of what is held: the tower up to its last active layer, and the projector."""
        c, f = self.hidden_size, self.intermediate_size
        layer = 4 * (c * c + c) + 2 * c * f + f + c + 4 * c
        embeddings = c * (3 * self.patch_size**2 + 1 + self.max_patches_per_image + 1) + 2 * c
        out, bias = self.feature_size, self.feature_size if self.projector_bias else 0
        projector = len(self.feature_layers) * c * out + out * out + 2 * bias
        return embeddings + self.num_active_layers * layer + projector

    def flops(self, num_patches: int) -> int:
        """Of whole pictures with that many patches together."""
        c, rows, patches = self.hidden_size, self.max_patches_per_image + 1, self.max_patches_per_image
        layer = rows * (4 * c * c + 2 * c * self.intermediate_size) + 2 * rows * rows * c
        projector = self.feature_size * (len(self.feature_layers) * c + self.feature_size)
        per_image = 2 * (
            patches * 3 * self.patch_size**2 * c
            + self.num_active_layers * layer
            + self.max_tokens_per_image * projector
        )
        return per_image * num_patches // patches


def build_llava(architecture: str, config: Fields, generation: Fields | None, images: Fields | None) -> ModelSpec:
    text = config.section("text_config")
    tie = config.flag("tie_word_embeddings", False) or text.flag("tie_word_embeddings", False)
    language = build_language(text, tie_embeddings=tie, nested=True)
    tokens = special_tokens(generation, config, text)
    image_token = "image_token_index" if "image_token_index" in config else "image_token_id"
    return ModelSpec(
        family="llava",
        architecture=architecture,
        language=language,
        vision=_vision(config, images, language.hidden_size),
        image_token_id=config.integer(image_token, at_least=0),
        bos_token_id=tokens.bos_token_id,
        pad_token_id=tokens.pad_token_id,
        eos_token_ids=tokens.eos_token_ids,
        dtype=stored_dtype(config, text),
    )


def _vision(config: Fields, images: Fields | None, feature_size: int) -> LlavaVisionSpec:
    tower = config.section("vision_config")
    tower_type = tower.text("model_type", "clip_vision_model")
    if tower_type != "clip_vision_model":
        raise CheckpointError(f"vision model type {tower_type[:40]!r} is not supported; supported is clip_vision_model")
    # The defaults of CLIPVisionConfig: transformers leaves out what equals them.
    hidden = tower.integer("hidden_size", 768)
    num_heads = tower.integer("num_attention_heads", 12)
    num_layers = tower.integer("num_hidden_layers", 12)
    image_size, patch_size = tower.integer("image_size", 224), tower.integer("patch_size", 32)
    if hidden % num_heads:
        raise CheckpointError(f"the vision tower's hidden size {hidden} is not a multiple of its {num_heads} heads")
    if patch_size > image_size or tower.integer("num_channels", 3) != 3:
        raise CheckpointError("the vision tower must take RGB pictures of at least one patch")
    strategy = config.text("vision_feature_select_strategy", "default")
    if strategy not in ("default", "full"):
        raise config.wrong("vision_feature_select_strategy", '"default" or "full"')
    return LlavaVisionSpec(
        hidden_size=hidden,
        num_layers=num_layers,
        feature_layers=_feature_layers(config, num_layers),
        num_heads=num_heads,
        intermediate_size=tower.integer("intermediate_size", 3072),
        image_size=image_size,
        patch_size=patch_size,
        hidden_act=activation(tower, "hidden_act", "quick_gelu"),
        layer_norm_eps=tower.number("layer_norm_eps", 1e-5),
        keep_cls=strategy == "full",
        projector_act=activation(config, "projector_hidden_act", "gelu"),
        projector_bias=config.flag("multimodal_projector_bias", True),
        feature_size=feature_size,
        preprocess=_preprocess(images, image_size),
    )


def _feature_layers(config: Fields, num_layers: int) -> tuple[int, ...]:
    value = config.get("vision_feature_layer")
    layers = value if isinstance(value, list) else [-2 if value is None else value]
    found = []
    for layer in layers:
        index = layer + num_layers + 1 if isinstance(layer, int) and layer < 0 else layer
        if isinstance(layer, bool) or not isinstance(index, int) or not 0 <= index <= num_layers:
            raise config.wrong("vision_feature_layer", f"a layer of the tower's {num_layers} or a list of them")
        found.append(index)
    if not found:
        raise config.wrong("vision_feature_layer", "at least one layer")
    return tuple(found)


def _preprocess(images: Fields | None, image_size: int) -> PreprocessSpec:
    if images is None:
        raise CheckpointError("the model directory has neither processor_config.json nor preprocessor_config.json")
    if images.flag("do_pad", False):
        raise CheckpointError(f"do_pad in {images.where} is not supported")
    resize, shortest_edge, (height, width) = _sizes(images, image_size)
    if (height, width) != (image_size, image_size):
        raise CheckpointError(
            f"{images.where} makes pictures of {width} x {height} pixels, the tower takes {image_size} x {image_size}"
        )
    resample = RESAMPLE.get(images.integer("resample", 3, at_least=0))
    if resample is None:
        raise images.wrong("resample", "0, 1, 2 or 3")
    std = _colours(images, "image_std", CLIP_STD)
    if min(std) <= 0:
        raise images.wrong("image_std", "three numbers above 0")
    rescales, normalises = images.flag("do_rescale", True), images.flag("do_normalize", True)
    return PreprocessSpec(
        resize=resize,
        shortest_edge=shortest_edge,
        crop_width=width,
        crop_height=height,
        resample=resample,
        rescale=images.number("rescale_factor", 1 / 255) if rescales else 1.0,
        mean=_colours(images, "image_mean", CLIP_MEAN) if normalises else (0.0, 0.0, 0.0),
        std=std if normalises else (1.0, 1.0, 1.0),
        identity=f"clip/{resize}-{shortest_edge}/{width}x{height}/{resample}",
    )


def _sizes(images: Fields, image_size: int) -> tuple[str, int, tuple[int, int]]:
    """(resize rule, shortest edge, (height, width) of the result)."""
    crop = _size(images, "crop_size", image_size) if images.flag("do_center_crop", True) else None
    if not images.flag("do_resize", True):
        raise CheckpointError(f"do_resize false in {images.where} is not supported")
    size = images.get("size")
    if isinstance(size, dict) and "shortest_edge" not in size:
        exact = _size(images, "size", image_size)
        if crop is not None and crop != exact:
            raise images.wrong("crop_size", "equal to size where size gives height and width")
        return "exact", min(exact), exact
    shortest = images.section("size") if isinstance(size, dict) else images
    edge = shortest.integer("shortest_edge" if isinstance(size, dict) else "size", image_size)
    if crop is None:
        raise CheckpointError(f"do_center_crop false needs a height and a width in size of {images.where}")
    return "shortest_edge", edge, crop


def _size(images: Fields, name: str, default: int) -> tuple[int, int]:
    if not isinstance(images.get(name), dict):
        side = images.integer(name, default)
        return side, side
    section = images.section(name)
    return section.integer("height"), section.integer("width")


def _colours(images: Fields, name: str, default: tuple[float, float, float]) -> tuple[float, float, float]:
    red, green, blue = images.numbers(name, default)
    return red, green, blue
