"""The CLIP vision tower as LLaVA models use it: shape and cost, from the config of the model and of its tower.

Also reads what is the same in every CLIP-like image processor's settings. Does not know how a picture is cut into tower
pictures.
"""

from __future__ import annotations

from dataclasses import dataclass

from hydra_engine.errors import CheckpointError
from hydra_engine.specs.base import PreprocessSpec
from hydra_engine.specs.decoder import activation
from hydra_engine.specs.fields import Fields

CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
CLIP_STD = (0.26862954, 0.26130258, 0.27577711)
RESAMPLE = {0: "nearest", 1: "lanczos", 2: "bilinear", 3: "bicubic"}  # PIL's numbers


@dataclass(frozen=True, slots=True)
class ClipSpec:
    """`feature_layers` are the hidden states that are read, 0 being the embeddings: state n is the output of n layers,
    so layers beyond the largest are never computed. `keep_cls` is the select strategy "full".
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
    def num_patches(self) -> int:
        """Of one picture."""
        return self.grid_side**2

    @property
    def num_rows(self) -> int:
        """Features of one picture."""
        return self.num_patches + int(self.keep_cls)

    @property
    def feature_size(self) -> int:
        return len(self.feature_layers) * self.hidden_size

    def num_parameters(self) -> int:
        """Of what is held: the tower up to its last active layer."""
        c, f = self.hidden_size, self.intermediate_size
        layer = 4 * (c * c + c) + 2 * c * f + f + c + 4 * c
        embeddings = c * (3 * self.patch_size**2 + 1 + self.num_patches + 1) + 2 * c
        return embeddings + self.num_active_layers * layer

    def flops(self) -> int:
        """Of one picture."""
        c, rows = self.hidden_size, self.num_patches + 1
        layer = rows * (4 * c * c + 2 * c * self.intermediate_size) + 2 * rows * rows * c
        return 2 * (self.num_patches * 3 * self.patch_size**2 * c + self.num_active_layers * layer)


def clip_tower(config: Fields) -> ClipSpec:
    """From the config.json of a LLaVA model."""
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
    return ClipSpec(
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


def processor_settings(images: Fields | None) -> Fields:
    if images is None:
        raise CheckpointError("the model directory has neither processor_config.json nor preprocessor_config.json")
    if not images.flag("do_resize", True):
        raise CheckpointError(f"do_resize false in {images.where} is not supported")
    return images


def projector_parameters(num_in: int, num_out: int, *, bias: bool) -> int:
    """Of LLaVA's two linear layers."""
    return num_out * (num_in + num_out) + (2 * num_out if bias else 0)


def normalisation(
    images: Fields,
    identity: str,
    *,
    mean: tuple[float, float, float] = CLIP_MEAN,
    std: tuple[float, float, float] = CLIP_STD,
    resample: int = 3,
) -> PreprocessSpec:
    """resample, rescale, mean and std of an image processor's settings; the defaults are those of its class."""
    filter_name = RESAMPLE.get(images.integer("resample", resample, at_least=0))
    if filter_name is None:
        raise images.wrong("resample", "0, 1, 2 or 3")
    std = _colours(images, "image_std", std)
    if min(std) <= 0:
        raise images.wrong("image_std", "three numbers above 0")
    rescales, normalises = images.flag("do_rescale", True), images.flag("do_normalize", True)
    return PreprocessSpec(
        resample=filter_name,
        rescale=images.number("rescale_factor", 1 / 255) if rescales else 1.0,
        mean=_colours(images, "image_mean", mean) if normalises else (0.0, 0.0, 0.0),
        std=std if normalises else (1.0, 1.0, 1.0),
        identity=f"{identity}/{filter_name}",
    )


def _colours(images: Fields, name: str, default: tuple[float, float, float]) -> tuple[float, float, float]:
    red, green, blue = images.numbers(name, default)
    return red, green, blue


def picture_sizes(images: Fields, image_size: int) -> tuple[int, tuple[int, int]]:
    """What a processor does to a picture: (shortest edge or 0 to stretch, (height, width) of the result)."""
    crop = _size(images, "crop_size", image_size) if images.flag("do_center_crop", True) else None
    size = images.get("size")
    if isinstance(size, dict) and "shortest_edge" not in size:
        exact = _size(images, "size", image_size)
        if crop is not None and crop != exact:
            raise images.wrong("crop_size", "equal to size where size gives height and width")
        return 0, exact
    shortest = images.section("size") if isinstance(size, dict) else images
    edge = shortest.integer("shortest_edge" if isinstance(size, dict) else "size", image_size)
    if crop is None:
        raise CheckpointError(f"do_center_crop false needs a height and a width in size of {images.where}")
    return edge, crop


def _size(images: Fields, name: str, default: int) -> tuple[int, int]:
    if not isinstance(images.get(name), dict):
        side = images.integer(name, default)
        return side, side
    section = images.section(name)
    return section.integer("height"), section.integer("width")
