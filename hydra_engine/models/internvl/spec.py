"""InternVL in transformers' own format (the "-hf" checkpoints of InternVL 2.5, 3 and 3.5): a picture is cut into square
tiles in the arrangement with the closest aspect ratio, followed by the whole picture if there are several tiles.

Every tile is a span of its own. Knows config.json and the settings of the GOT-OCR2 image processor, which InternVL
uses. Takes no videos.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hydra_engine.core.prompting import AS_CONFIGURED, PixelBudget
from hydra_engine.errors import CheckpointError
from hydra_engine.models.specs.assemble import ModelFiles, model_spec, with_model_type
from hydra_engine.models.specs.base import ItemPlan, MediaPlan, ModelSpec, View
from hydra_engine.models.specs.decoder import activation, build_language
from hydra_engine.models.specs.fields import ELSEWHERE, Fields, read_json_if_present
from hydra_engine.models.specs.vision import (
    SquareTowerSpec,
    SquareVisionSpec,
    TowerSpec,
    check_patches,
    check_picture,
    normalisation,
    processor_settings,
    tower_config,
    tower_shape,
    within_budget,
)

MAX_TILES = 1024
Arrangement = tuple[int, int]  # columns, rows


INTERN_VIT_DEFAULTS = TowerSpec(  # InternVLVisionConfig's
    hidden_size=1024, num_layers=24, num_heads=16, intermediate_size=4096, hidden_act="gelu", norm_eps=1e-6
)


@dataclass(frozen=True, slots=True, kw_only=True)
class InternVlVisionSpec(SquareVisionSpec):
    """InternVL's tower and tiling. `merge` x `merge` patches make one token. `frame` is the text around the spans of a
    picture. `thumbnail`: the whole picture follows several tiles. `by_columns`: the order of a tile's tokens, else by
    rows."""

    arrangements: tuple[Arrangement, ...]
    frame: tuple[str, str]
    thumbnail: bool = True
    by_columns: bool = False

    @property
    def max_patches_per_image(self) -> int:
        return self._max_tiles * self.tower.num_patches

    @property
    def max_tokens_per_image(self) -> int:
        return self._max_tiles * self.num_tokens

    @property
    def max_tokens_per_item(self) -> int:
        return self.num_tokens

    @property
    def _max_tiles(self) -> int:
        most = max(columns * rows for columns, rows in self.arrangements)
        return most + (self.thumbnail and most > 1)

    def plan_image(self, width: int, height: int, budget: PixelBudget = AS_CONFIGURED) -> MediaPlan:
        check_picture(width, height)
        side, grid_side = self.tower.image_size, self.tower.grid_side
        columns, rows = best_arrangement(width, height, side, within_budget(self.arrangements, budget, side * side))
        canvas = (columns * side, rows * side)
        views = [View(canvas, canvas, (0, 0), (side, side))]
        if self.thumbnail and columns * rows > 1:
            views.append(View.whole(side, side))
        tile = ItemPlan(side, side, 1, self.tower.num_patches, self.num_tokens, (1, grid_side, grid_side))
        spans = [tile] * sum(view.num_tiles for view in views)
        return MediaPlan(tuple(views), (self.frame[0], *spans, self.frame[1]))

    def num_parameters(self) -> int:
        return SquareVisionSpec.num_parameters(self) + 2 * self.merged_size


def arrangements_of(min_tiles: int, max_tiles: int) -> tuple[Arrangement, ...]:
    """Returns all (columns, rows) with `min_tiles` to `max_tiles` tiles, by number of tiles, then by columns."""
    sides = range(1, max_tiles + 1)
    arrangements = [(c, r) for c in sides for r in sides if min_tiles <= c * r <= max_tiles]
    return tuple(sorted(arrangements, key=lambda arrangement: arrangement[0] * arrangement[1]))


def best_arrangement(width: int, height: int, side: int, arrangements: Sequence[Arrangement]) -> Arrangement:
    """Returns the arrangement with the aspect ratio closest to the picture's (InternVL 1.5, section 3.3). Of several
    with the same distance, the last whose tiles have less than twice the picture's pixels, else the first. Distances
    are compared in double precision as in transformers, where distances that are equal in theory may differ."""
    distances = [abs(width / height - columns / rows) for columns, rows in arrangements]
    shortest = min(distances)
    closest = [a for a, distance in zip(arrangements, distances, strict=True) if distance == shortest]
    filled = [a for a in closest[1:] if 2 * width * height > side * side * a[0] * a[1]]
    return filled[-1] if filled else closest[0]


def build_internvl(files: ModelFiles) -> ModelSpec:
    config = files.config
    text = with_model_type(config.section("text_config"), "qwen2")
    # Before transformers 5 the text part decided; configs of that time have no such field at the top.
    tie = config.flag("tie_word_embeddings", text.flag("tie_word_embeddings", False))
    language = build_language(text, tie_embeddings=tie, nested=True)
    return model_spec(
        files,
        "internvl",
        text,
        language,
        vision=_vision(files, language.hidden_size),
        image_token_id=config.integer("image_token_id", 151667, at_least=0),
    )


def _vision(files: ModelFiles, feature_size: int) -> InternVlVisionSpec:
    config = files.config
    tower = _tower(config)
    merge = merge_side(config, tower)
    settings = processor_settings(files.images)
    section = settings.section("size")
    height, width = section.integer("height"), section.integer("width")
    if (width, height) != (tower.image_size, tower.image_size):
        raise CheckpointError(
            f"{settings.where} makes tiles of {width} x {height} pixels, the tower takes "
            f"{tower.image_size} x {tower.image_size}"
        )
    min_tiles, max_tiles = settings.integer("min_patches", 1), settings.integer("max_patches", 12)
    if not min_tiles <= max_tiles <= MAX_TILES:
        raise settings.wrong_value("max_patches", f"from min_patches to {MAX_TILES}")
    return InternVlVisionSpec(
        tower=tower,
        merge=merge,
        projector_act=activation(config, "projector_hidden_act", "gelu"),
        feature_size=feature_size,
        # `crop_to_patches` of the settings is not read: InternVL's processor always cuts.
        arrangements=arrangements_of(min_tiles, max_tiles),
        frame=_frame(files),
        preprocess=normalisation(settings, f"internvl/{tower.image_size}"),
    )


def _tower(config: Fields) -> SquareTowerSpec:
    tower = tower_config(config, "internvl_vision")
    shape = tower_shape(tower, INTERN_VIT_DEFAULTS)
    image_size, patch_size = _square(tower, "image_size", 448), _square(tower, "patch_size", 14)
    check_patches(tower, image_size, patch_size)
    norm_type = tower.text("norm_type", "layer_norm")
    if norm_type not in ("layer_norm", "rms_norm"):
        raise tower.wrong_value("norm_type", '"layer_norm" or "rms_norm"')
    if not tower.flag("use_absolute_position_embeddings", True):
        raise CheckpointError(f"use_absolute_position_embeddings false in {tower.where} is not supported{ELSEWHERE}")
    if config.text("vision_feature_select_strategy", "default") != "default":
        raise config.wrong_value("vision_feature_select_strategy", '"default": class tokens have no place in a grid')
    layer = feature_layer(config, "vision_feature_layer", shape["num_layers"])
    return SquareTowerSpec(
        **shape,
        image_size=image_size,
        patch_size=patch_size,
        feature_layers=(layer % (shape["num_layers"] + 1),),
        rms_norms=norm_type == "rms_norm",
        qkv_bias=tower.flag("attention_bias", False),
        qk_norm=tower.flag("use_qk_norm", False),
        layer_scale=True,
        # -1 means the tower's result, any other number a layer's.
        final_norm=layer == -1 and not tower.flag("use_mean_pooling", True),
    )


def _square(tower: Fields, name: str, default: int) -> int:
    """Reads a number, or two equal ones."""
    value = tower.get(name)
    sides = value if isinstance(value, list) else [default if value is None else value] * 2
    if len(sides) != 2 or type(sides[0]) is not int or sides[0] != sides[1] or not 0 < sides[0] <= 1 << 16:
        raise tower.wrong_value(name, "a number or twice the same")
    return sides[0]


def feature_layer(config: Fields, name: str, num_layers: int) -> int:
    """Reads which of the tower's hidden states is the features; negative numbers count from the last one."""
    layer = config.get(name)
    layer = -1 if layer is None else layer
    if type(layer) is not int or not -num_layers - 1 <= layer <= num_layers:
        raise config.wrong_value(name, f"a layer of the tower's {num_layers}")
    return layer


def merge_side(config: Fields, tower: SquareTowerSpec) -> int:
    """Side, in patches, of the square that makes one token."""
    ratio = config.number("downsample_ratio", 0.5)
    merge = round(1 / ratio)
    if merge < 1 or merge * ratio != 1 or tower.grid_side % merge:
        raise config.wrong_value(
            "downsample_ratio", f"1 over a number that divides the tower's {tower.grid_side} patches in a row"
        )
    return merge


def _frame(files: ModelFiles) -> tuple[str, str]:
    """Returns the text before and after the spans of a picture, named in the tokenizer's config."""
    tokenizer = read_json_if_present(files.model_dir, "tokenizer_config.json") or Fields({}, "tokenizer_config.json")
    return (
        tokenizer.token_text("start_image_token", "<img>"),
        tokenizer.token_text("end_image_token", "</img>"),
    )
