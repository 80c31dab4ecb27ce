"""The CLIP vision tower as LLaVA models use it: shape and cost, from the config of the model and of its tower.

Does not know how a picture is cut into tower pictures.
"""

from __future__ import annotations

from dataclasses import dataclass

from hydra_engine.errors import CheckpointError
from hydra_engine.models.specs.base import VisionSpec
from hydra_engine.models.specs.decoder import activation
from hydra_engine.models.specs.fields import Fields
from hydra_engine.models.specs.vision import SquareTowerSpec, check_tower, tower_config


@dataclass(frozen=True, slots=True, kw_only=True)
class ClipSpec(SquareTowerSpec):
    """`feature_layers` are the hidden states that are read. `keep_cls` is the select strategy "full"."""

    feature_layers: tuple[int, ...]
    keep_cls: bool

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


@dataclass(frozen=True, slots=True, kw_only=True)
class ClipVisionSpec(VisionSpec):
    """A CLIP tower with the LLaVA projector on top."""

    tower: ClipSpec
    projector_act: str
    projector_bias: bool

    def num_parameters(self) -> int:
        projector = projector_parameters(self.tower.feature_size, self.feature_size, bias=self.projector_bias)
        return self.tower.num_parameters() + projector

    def flops(self, num_patches: int) -> int:
        projector = 2 * self.tower.num_rows * self.feature_size * (self.tower.feature_size + self.feature_size)
        return (self.tower.flops() + projector) * num_patches // self.tower.num_patches


def clip_tower(config: Fields) -> ClipSpec:
    """From the config.json of a LLaVA model."""
    tower = tower_config(config, "clip_vision_model")
    # The defaults of CLIPVisionConfig: transformers leaves out what equals them.
    hidden = tower.integer("hidden_size", 768)
    num_heads = tower.integer("num_attention_heads", 12)
    num_layers = tower.integer("num_hidden_layers", 12)
    image_size, patch_size = tower.integer("image_size", 224), tower.integer("patch_size", 32)
    check_tower(tower, hidden, num_heads, image_size, patch_size)
    strategy = config.text("vision_feature_select_strategy", "default")
    if strategy not in ("default", "full"):
        raise config.wrong("vision_feature_select_strategy", '"default" or "full"')
    feature_layers = _feature_layers(config, num_layers)
    return ClipSpec(
        hidden_size=hidden,
        num_layers=num_layers,
        num_active_layers=max(feature_layers),
        feature_layers=feature_layers,
        num_heads=num_heads,
        intermediate_size=tower.integer("intermediate_size", 3072),
        image_size=image_size,
        patch_size=patch_size,
        hidden_act=activation(tower, "hidden_act", "quick_gelu"),
        norm_eps=tower.number("layer_norm_eps", 1e-5),
        keep_cls=strategy == "full",
    )


def _feature_layers(config: Fields, num_layers: int) -> tuple[int, ...]:
    value = config.get("vision_feature_layer")
    layers = value if isinstance(value, list) else [-2 if value is None else value]
    indices = []
    for layer in layers:
        index = layer + num_layers + 1 if isinstance(layer, int) and layer < 0 else layer
        if isinstance(layer, bool) or not isinstance(index, int) or not 0 <= index <= num_layers:
            raise config.wrong("vision_feature_layer", f"a layer of the tower's {num_layers} or a list of them")
        indices.append(index)
    if not indices:
        raise config.wrong("vision_feature_layer", "at least one layer")
    return tuple(indices)


def projector_parameters(num_in: int, num_out: int, *, bias: bool) -> int:
    """Of LLaVA's two linear layers."""
    return num_out * (num_in + num_out) + (2 * num_out if bias else 0)


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
