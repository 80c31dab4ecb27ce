"""MiniCPM-V 4.6: a tower for pictures of any shape, merging 2 x 2 neighbours twice, and pictures cut into slices.

Knows config.json, the settings of the picture and video processors, and the marks around pictures, which are named in
the tokenizer's config. A picture is encoded whole, resized to about `scale` squared pixels, and if it has more, also as
a grid of slices of about that size: as many as its pixels fill, in the grid nearest to its shape (LLaVA-UHD, section
3.1). Rounding is that of transformers' processor, floats between integers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import NamedTuple

from hydra_engine.core.prompting import AS_CONFIGURED, PixelBudget
from hydra_engine.errors import CheckpointError, InvalidImage
from hydra_engine.models.specs.assemble import ModelFiles, model_spec, with_model_type
from hydra_engine.models.specs.base import (
    ItemPlan,
    MediaPlan,
    ModelSpec,
    PreprocessSpec,
    TowerAttention,
    VideoInfo,
    VideoPlan,
    View,
    VisionSpec,
    no_videos,
)
from hydra_engine.models.specs.decoder import build_language
from hydra_engine.models.specs.fields import Fields, read_json
from hydra_engine.models.specs.vision import (
    HALF,
    TowerSpec,
    check_frames,
    check_patches,
    check_picture,
    normalisation,
    processor_settings,
    tower_config,
    tower_shape,
)

MAX_ASPECT = 200  # beyond, one picture could become thousands of tokens: its shorter side is never below one cell


@dataclass(frozen=True, slots=True)
class Slicing:
    """Settings of the cut. `scale` squared is the target number of pixels of a picture or slice, `cell` the side of one
    token in pixels. Sizes are (width, height), grids (rows, columns). `max_slices` 1: no slices. A small picture counts
    as one that fills `min_slices`."""

    scale: int
    cell: int
    max_slices: int
    min_slices: int = 1

    def with_budget(self, budget: PixelBudget) -> Slicing:
        """Returns a slicing with fewer slices, down to none, or with more for small pictures. The picture of the whole
        is not counted and keeps its size."""
        if budget == AS_CONFIGURED:
            return self
        most, least = self.max_slices, self.min_slices
        if budget.max_pixels is not None:
            most = max(1, min(most, budget.max_pixels // self.scale**2))
        if budget.min_pixels is not None:
            least = max(1, budget.min_pixels // self.scale**2)
        return replace(self, max_slices=most, min_slices=min(least, most))

    def fit_size(self, width: int, height: int) -> tuple[int, int]:
        """Returns the size in whole cells with about `scale` squared pixels and about this shape."""
        if max(width, height) > MAX_ASPECT * min(width, height):
            raise InvalidImage(
                f"a picture of {width} x {height} pixels is too long for this model; it takes up to {MAX_ASPECT} to 1",
                code="image_aspect_ratio",
            )
        aspect = width / height
        rows = int(self.scale / math.sqrt(aspect))
        return _nearest(int(rows * aspect), self.cell), _nearest(rows, self.cell)

    def grid(self, width: int, height: int) -> tuple[int, int] | None:
        """Returns the grid of slices; None for a picture that is not cut."""
        target = min(max(-(-width * height // self.scale**2), self.min_slices), self.max_slices)
        if target <= 1:
            return None
        shape = math.log(width / height)
        best, least = (1, 1), math.inf
        for count in (target - 1, target, target + 1):
            if not 1 < count <= self.max_slices:
                continue
            for rows in (n for n in range(1, count + 1) if count % n == 0):
                error = abs(shape - math.log(count // rows / rows))
                if error < least or (error == least and rows > best[0]):
                    best, least = (rows, count // rows), error
        return best

    def slice_size(self, width: int, height: int, grid: tuple[int, int]) -> tuple[int, int]:
        rows, columns = grid
        return self.fit_size(_nearest(width, columns) // columns, _nearest(height, rows) // rows)

    def max_cells(self) -> int:
        """Maximum number of cells of a picture or slice of any accepted shape. Of all pictures with a number of rows
        the lowest has the most columns, so only the heights at which rounding adds a row are tried."""
        longest = math.sqrt(MAX_ASPECT)
        least, most = max(int(self.scale / longest), 1), int(self.scale * longest)
        turns = (half * self.cell // 2 + more for half in range(1, 2 * most // self.cell + 2, 2) for more in (0, 1))
        heights = [least, *(height for height in turns if least < height <= most)]
        return max(_nearest(self.scale**2 // h, self.cell) * _nearest(h, self.cell) for h in heights) // self.cell**2


def one_frame_a_second(num_frames: int, fps: float, most: int) -> tuple[int, ...]:
    """Returns the source frames at every whole second; for a video of more than `most` seconds `most` frames, evenly
    spread over every tenth of a second. Raises InvalidImage for a video without frames or with an impossible frame
    rate."""
    check_frames(num_frames, fps)
    duration_s = num_frames / fps
    if duration_s <= most:
        times_s: list[float] = list(range(math.ceil(duration_s)))
    else:
        times_s = [round(tenth * 0.1, 1) for tenth in _spread(int(duration_s / 0.1), most)]
    return tuple(min(int(time_s * fps), num_frames - 1) for time_s in times_s)


def _spread(count: int, most: int) -> list[int]:
    """Selects at most `most` of the numbers 0 to `count` - 1, the first and, unless `most` is 1, the last included."""
    if count <= most:
        return list(range(count))
    step = (count - 1) / max(most - 1, 1)
    return [int(index * step) for index in range(most - 1)] + [count - 1 if most > 1 else 0]


def _nearest(length: int, unit: int) -> int:
    """Returns the multiple of `unit` nearest to `length`, halves to even, at least one."""
    return max(round(length / unit), 1) * unit


HYBRID = "qwen3_5_text"  # the released checkpoints' decoder, and transformers' default
MAX_ROUNDS, MAX_SLICES, MAX_SCALE = 8, 1024, 1 << 14  # beyond any processor's limits
MODES = {"4x": 1, "16x": 2}  # rounds of merging 2 x 2 neighbours, counted with the one inside the tower
TOWER_DEFAULTS = TowerSpec(  # MiniCPMV4_6VisionConfig's
    hidden_size=768, num_layers=12, num_heads=12, intermediate_size=3072, hidden_act="gelu_pytorch_tanh", norm_eps=1e-6
)

Pair = tuple[str, str]


@dataclass(frozen=True, slots=True)
class Marks:
    """Pairs of tokens around the features of a picture, of a slice, and around a picture's number."""

    picture: Pair
    slice: Pair
    number: Pair | None  # None: pictures are not numbered


class SlicedPicture(NamedTuple):
    """A picture as tower input: the whole, then slices row by row, `columns` in a row."""

    views: tuple[View, ...]
    whole: ItemPlan
    slices: tuple[ItemPlan, ...] = ()
    columns: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class MiniCpmVisionSpec(VisionSpec):
    """MiniCPM-V's tower and slicing. The tower merges 2 x 2 patches after layer `insert_layer` (None: nowhere), then
    `num_rounds` more times after its last layer; the results are the tokens. `max_frames` limits a video."""

    tower: TowerSpec
    patch_size: int
    num_positions: int  # along each side of the table of learned positions
    insert_layer: int | None
    num_rounds: int
    marks: Marks
    images: Slicing
    videos: Slicing | None
    max_frames: int
    max_slice_tokens: int  # of a picture of the whole too

    @property
    def all_rounds(self) -> int:
        """Number of mergers: 4 ** all_rounds patches make one token."""
        return self.num_rounds + (self.insert_layer is not None)

    @property
    def attention(self) -> TowerAttention:
        rows = self.max_slice_tokens * 4**self.all_rounds
        return TowerAttention(self.tower.num_heads, self.tower.head_dim, rows)

    @property
    def max_tokens_per_item(self) -> int:
        return self.max_slice_tokens

    @property
    def max_tokens_per_image(self) -> int:
        return (1 + self.images.max_slices) * self.max_slice_tokens

    @property
    def max_patches_per_image(self) -> int:
        return self.max_tokens_per_image * 4**self.all_rounds

    def plan_image(self, width: int, height: int, budget: PixelBudget = AS_CONFIGURED) -> MediaPlan:
        check_picture(width, height)
        cut = self._cut(self.images.with_budget(budget), width, height)
        return MediaPlan(cut.views, self._marked(cut, 1), number=self.marks.number)

    def plan_video(self, video: VideoInfo) -> VideoPlan:
        """Plans every frame as a picture, cut and marked; the video has one number."""
        if self.videos is None:
            raise no_videos()
        check_picture(video.width, video.height)
        frames = one_frame_a_second(video.num_frames, video.fps, self.max_frames)
        cut = self._cut(self.videos, video.width, video.height)
        views = tuple(view._replace(source=index) for index in range(len(frames)) for view in cut.views)
        return VideoPlan(frames, MediaPlan(views, self._marked(cut, len(frames)), number=self.marks.number))

    def num_parameters(self) -> int:
        c, f = self.tower.hidden_size, self.tower.intermediate_size
        embeddings = c * (3 * self.patch_size**2 + 1 + self.num_positions**2)
        inner = 4 * (c * c + c) + 2 * c + 8 * c + 16 * c * f + 4 * f + 4 * f * c + c
        rounds = self.num_rounds * (8 * c + 16 * c * c + 4 * c)
        last = 4 * c * self.feature_size + self.feature_size
        between = (self.num_rounds - 1) * (4 * c * c + c)
        tower = (
            embeddings
            + self.tower.num_layers * self.tower.layer_parameters()
            + 2 * c
            + (inner if self.insert_layer is not None else 0)
        )
        return tower + rounds + between + last

    def flops(self, num_patches: int) -> int:
        """FLOPs of slices of the usual size with `num_patches` patches in total."""
        c, f, num_layers = self.tower.hidden_size, self.tower.intermediate_size, self.tower.num_layers
        segment = (self.images.scale // self.patch_size) ** 2
        full = num_layers if self.insert_layer is None else self.insert_layer + 1
        work = num_patches * 3 * self.patch_size**2 * c + full * self.tower.layer_work(num_patches, segment)
        rows = num_patches
        if self.insert_layer is not None:
            rows //= 4
            work += num_patches * (4 * c * c + 2 * 4 * c) + rows * (16 * c * f + 4 * f * c)
            work += (num_layers - full) * self.tower.layer_work(rows, segment // 4)
        for index in range(self.num_rounds):
            rows //= 4
            width = self.feature_size if index == self.num_rounds - 1 else c
            work += rows * (16 * c * c + 4 * c * width)
        return 2 * work

    def _cut(self, slicing: Slicing, width: int, height: int) -> SlicedPicture:
        whole = slicing.fit_size(width, height)
        grid = slicing.grid(width, height)
        if grid is None:
            return SlicedPicture((View.whole(*whole),), self._item(whole))
        rows, columns = grid
        tile = slicing.slice_size(width, height, grid)
        canvas = (tile[0] * columns, tile[1] * rows)
        views = (View.whole(*whole), View(canvas, canvas, (0, 0), tile))
        return SlicedPicture(views, self._item(whole), (self._item(tile),) * (rows * columns), columns)

    def _item(self, size: tuple[int, int]) -> ItemPlan:
        width, height = size
        rows, columns = height // self.patch_size, width // self.patch_size
        return ItemPlan(width, height, 1, rows * columns, rows * columns // 4**self.all_rounds, (1, rows, columns))

    def _marked(self, cut: SlicedPicture, times: int) -> tuple[str | ItemPlan, ...]:
        """Returns marks around every item, with line breaks between rows of slices, repeated for each of `times`
        frames."""
        (opening, closing), (slice_opening, slice_closing) = self.marks.picture, self.marks.slice
        parts: list[str | ItemPlan] = []
        text = ""
        for _ in range(times):
            parts += [text + opening, cut.whole]
            text = closing
            for index, tile in enumerate(cut.slices):
                line_break = "\n" if index and index % cut.columns == 0 else ""
                parts += [text + line_break + slice_opening, tile]
                text = slice_closing
        return (*parts, text)


def build_minicpmv(files: ModelFiles) -> ModelSpec:
    config = files.config
    text = with_model_type(config.section_if_present("text_config") or Fields({}, "text_config of config.json"), HYBRID)
    language = build_language(text, tie_embeddings=config.flag("tie_word_embeddings", False), nested=True)
    has_videos = "video_token_id" in config
    return model_spec(
        files,
        "minicpmv4_6",
        text,
        language,
        vision=_vision(files, language.hidden_size, has_videos=has_videos),
        image_token_id=config.integer("image_token_id", at_least=0),
        video_token_id=config.integer("video_token_id", at_least=0) if has_videos else None,
    )


def _vision(files: ModelFiles, feature_size: int, *, has_videos: bool) -> MiniCpmVisionSpec:
    config, settings = files.config, processor_settings(files.images)
    tower = tower_config(config, "minicpmv4_6_vision")
    layers = TowerSpec(**tower_shape(tower, TOWER_DEFAULTS))
    image_size, patch_size = tower.integer("image_size", 224), tower.integer("patch_size", 16)
    check_patches(tower, image_size, patch_size)
    insert_layer, num_rounds = _merging(config, tower, layers.num_layers)
    rounds = num_rounds + (insert_layer is not None)
    images = _slicing(settings, patch_size, rounds)
    preprocess = normalisation(settings, "minicpmv4_6", mean=HALF, std=HALF)
    videos, max_frames = None, 0
    if has_videos:
        frames = files.videos or settings  # older directories have one file for both
        videos, max_frames = _slicing(frames, patch_size, rounds), _frames(frames, preprocess)
    return MiniCpmVisionSpec(
        tower=layers,
        patch_size=patch_size,
        num_positions=image_size // patch_size,
        insert_layer=insert_layer,
        num_rounds=num_rounds,
        feature_size=feature_size,
        marks=_marks(files, settings),
        images=images,
        videos=videos,
        max_frames=max_frames,
        preprocess=preprocess,
        max_slice_tokens=max(cuts.max_cells() for cuts in (images, videos) if cuts is not None),
    )


def _merging(config: Fields, tower: Fields, num_layers: int) -> tuple[int | None, int]:
    """Returns (layer after which the tower merges, rounds of merging after the tower)."""
    for section, name in ((tower, "window_kernel_size"), (config, "merge_kernel_size")):
        if section.numbers(name, (2, 2)) != (2, 2):
            raise section.wrong_value(name, "[2, 2]")
    num_rounds = config.integer("merger_times", 1, at_most=MAX_ROUNDS)
    if config.text("downsample_mode", "16x") not in MODES:
        raise config.wrong_value("downsample_mode", " or ".join(MODES))
    if config.text("downsample_mode", "16x") == "4x":
        return None, num_rounds
    layer = config.integer("insert_layer_id", 6, at_least=0)
    if layer >= num_layers:
        raise config.wrong_value("insert_layer_id", f"below the tower's number of layers, {num_layers}")
    return layer, num_rounds


def _slicing(settings: Fields, patch_size: int, rounds: int) -> Slicing:
    """Reads the settings of a picture or video processor. Raises CheckpointError if they do not fit the model's
    mergers."""
    if settings.integer("patch_size", 14) != patch_size:
        raise settings.wrong_value("patch_size", f"the vision tower's, {patch_size}")
    mode = settings.text("downsample_mode", "16x")
    if MODES.get(mode) != rounds:
        raise settings.wrong_value(
            "downsample_mode", f"the one whose tokens have {4**rounds} patches, as config.json says"
        )
    max_slices = settings.integer("max_slice_nums", 9, at_most=MAX_SLICES) if settings.flag("slice_mode", True) else 1
    return Slicing(settings.integer("scale_resolution", 448, at_most=MAX_SCALE), patch_size * 2**rounds, max_slices)


def _frames(settings: Fields, pictures: PreprocessSpec) -> int:
    """Reads the maximum number of frames of a video."""
    processor_settings(settings)
    if settings.integer("stack_frames", 1) != 1:
        raise settings.wrong_value("stack_frames", "1: pictures composed of several frames are not supported")
    if not settings.flag("do_sample_frames", True):
        raise settings.wrong_value("do_sample_frames", "true: one frame a second is taken")
    if normalisation(settings, "minicpmv4_6", mean=HALF, std=HALF) != pictures:
        raise CheckpointError(f"{settings.where} must resample and normalise frames as the picture processor does")
    return settings.integer("max_num_frames", 128)


def _marks(files: ModelFiles, images: Fields) -> Marks:
    tokenizer = read_json(files.model_dir, "tokenizer_config.json")
    values = dict(tokenizer.values)
    for name in ("model_specific_special_tokens", "extra_special_tokens"):
        section = tokenizer.get(name)
        values |= section if isinstance(section, dict) else {}
    tokens = Fields(values, tokenizer.where)
    numbered = images.flag("use_image_id", True)
    if files.processor is not None:
        numbered = files.processor.flag("use_image_id", numbered)
    return Marks(
        picture=_marks_around(tokens, "image"),
        slice=_marks_around(tokens, "slice"),
        number=_marks_around(tokens, "image_id") if numbered else None,
    )


def _marks_around(tokens: Fields, name: str) -> Pair:
    return tokens.token_text(f"{name}_start_token"), tokens.token_text(f"{name}_end_token")
