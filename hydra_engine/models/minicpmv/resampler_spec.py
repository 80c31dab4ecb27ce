"""MiniCPM-V 2.6: a SigLIP tower for pictures of any shape, and a resampler that makes every picture and every slice the
same number of tokens.

Knows the published config.json, which has the Qwen2 decoder's fields at its top, the published picture processor's
settings, and where tokenizer.json has the placeholder.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from hydra_engine.errors import CheckpointError
from hydra_engine.models.minicpmv.slicing_spec import MAX_SCALE, MAX_SLICES, Marks, Pair, SlicedVisionSpec, Slicing
from hydra_engine.models.minicpmv.spec import TOWER_DEFAULTS
from hydra_engine.models.specs.assemble import ModelFiles, model_spec
from hydra_engine.models.specs.base import ModelSpec, PreprocessSpec, TowerAttention
from hydra_engine.models.specs.decoder import build_language
from hydra_engine.models.specs.fields import ELSEWHERE, Fields, read_json
from hydra_engine.models.specs.vision import HALF, TowerSpec, check_patches, processor_settings, tower_shape

VERSION = "2.6"
HEAD_DIM = 128  # of the resampler's attention
MAX_QUERIES = 4096  # beyond any checkpoint's
TERMINATORS = ("<|im_end|>", "<|endoftext|>")  # which the published code ends answers at, whatever the files say
TOWER_TYPES = ("siglip_vision_model", "siglip")


@dataclass(frozen=True, slots=True, kw_only=True)
class ResampledVisionSpec(SlicedVisionSpec):
    """A tower without merging, and a resampler: `num_queries` learned queries attend to the patches of each picture and
    each slice, and are its tokens."""

    num_queries: int
    max_slice_patches: int  # of a picture of the whole too

    @property
    def num_heads(self) -> int:
        """Heads of the resampler."""
        return self.feature_size // HEAD_DIM

    @property
    def projects(self) -> bool:
        """True if the tower's features are projected to the decoder's width before they are attended to."""
        return self.tower.hidden_size != self.feature_size

    @property
    def attention(self) -> TowerAttention:
        return TowerAttention(self.tower.num_heads, self.tower.head_dim, self.max_slice_patches)

    @property
    def max_tokens_per_item(self) -> int:
        return self.num_queries

    @property
    def max_tokens_per_image(self) -> int:
        return (1 + self.images.max_slices) * self.num_queries

    @property
    def max_patches_per_image(self) -> int:
        return (1 + self.images.max_slices) * self.max_slice_patches

    def num_tokens(self, num_patches: int) -> int:
        return self.num_queries

    def num_parameters(self) -> int:
        c, width = self.tower.hidden_size, self.feature_size
        embeddings = c * (3 * self.patch_size**2 + 1 + self.num_positions**2)
        tower = embeddings + self.tower.num_layers * self.tower.layer_parameters() + 2 * c
        resampler = self.num_queries * width + 5 * width * width + 4 * width + 6 * width
        return tower + resampler + c * width * self.projects

    def flops(self, num_patches: int) -> int:
        """FLOPs of slices of the usual size with `num_patches` patches in total."""
        c, width = self.tower.hidden_size, self.feature_size
        segment = (self.images.scale // self.patch_size) ** 2
        work = num_patches * 3 * self.patch_size**2 * c + self.tower.num_layers * self.tower.layer_work(
            num_patches, segment
        )
        work += num_patches * (c * width * self.projects + 2 * width * width)
        work += num_patches * self.num_queries // segment * (3 * width * width + 2 * segment * width)
        return 2 * work


def build_resampled(files: ModelFiles) -> ModelSpec:
    config = files.config
    _check_version(config)
    settings = processor_settings(files.images)
    text = Fields({**config.values, "model_type": "qwen2"}, config.where)
    language = build_language(text, tie_embeddings=config.flag("tie_word_embeddings", False), nested=False)
    if language.hidden_size % HEAD_DIM:
        raise config.wrong_value("hidden_size", f"a multiple of {HEAD_DIM}, the width of a head of the resampler")
    vision = _vision(config, settings, language.hidden_size)
    tokens = _added_tokens(files.model_dir)
    if (placeholder := settings.text("unk", "<unk>")) not in tokens:
        raise CheckpointError(
            f"tokenizer.json has no added token {placeholder[:40]!r}, which stands for pictures in prompts"
        )
    spec = model_spec(files, "minicpmv", text, language, vision=vision, image_token_id=tokens[placeholder])
    ends = (tokens[content] for content in TERMINATORS if content in tokens)
    return replace(spec, eos_token_ids=tuple(dict.fromkeys((*spec.eos_token_ids, *ends))), pictures_in_place=True)


def _check_version(config: Fields) -> None:
    """Raises CheckpointError for the other models of this architecture's name, which have other decoders, resamplers
    or marks."""
    version = config.get("version")
    if str(version) != VERSION:
        found = "no version, as MiniCPM-V 2.0 and 2.5 have" if version is None else f"version {str(version)[:20]!r}"
        raise CheckpointError(
            f"config.json has {found}, which is another architecture; supported are MiniCPM-V {VERSION}, and "
            f"MiniCPM-V 4.6 as model type minicpmv4_6{ELSEWHERE}"
        )


def _vision(config: Fields, settings: Fields, feature_size: int) -> ResampledVisionSpec:
    tower = config.section("vision_config")
    if (name := tower.text("model_type", TOWER_TYPES[0])) not in TOWER_TYPES:
        raise CheckpointError(f"vision model type {name[:40]!r} is not supported; supported is {TOWER_TYPES[0]}")
    image_size, patch_size = tower.integer("image_size", 224), tower.integer("patch_size", 16)
    check_patches(tower, image_size, patch_size)
    num_queries = config.integer("query_num", 64, at_most=MAX_QUERIES)
    if settings.integer("image_feature_size", 64) != num_queries:
        raise settings.wrong_value("image_feature_size", f"query_num of config.json, {num_queries}")
    images = _slicing(settings, patch_size)
    return ResampledVisionSpec(
        tower=_layers(config, tower),
        patch_size=patch_size,
        num_positions=image_size // patch_size,
        feature_size=feature_size,
        marks=_marks(settings),
        images=images,
        preprocess=_normalisation(settings),
        num_queries=num_queries,
        max_slice_patches=images.max_cells(),
    )


def _layers(config: Fields, tower: Fields) -> TowerSpec:
    layers = TowerSpec(**tower_shape(tower, TOWER_DEFAULTS))
    if not config.flag("drop_vision_last_layer", True):
        return layers
    if layers.num_layers == 1:
        raise tower.wrong_value("num_hidden_layers", "at least 2, because drop_vision_last_layer is true")
    return replace(layers, num_layers=layers.num_layers - 1)


def _slicing(settings: Fields, patch_size: int) -> Slicing:
    if settings.integer("patch_size", 14) != patch_size:
        raise settings.wrong_value("patch_size", f"the vision tower's, {patch_size}")
    if not settings.flag("slice_mode", True):
        raise settings.wrong_value("slice_mode", "true: pictures of their own size are not supported")
    scale = settings.integer("scale_resolution", 448, at_most=MAX_SCALE)
    return Slicing(scale, patch_size, settings.integer("max_slice_nums", 9, at_most=MAX_SLICES))


def _normalisation(settings: Fields) -> PreprocessSpec:
    red, green, blue = settings.numbers("norm_std", HALF)
    if min(red, green, blue) <= 0:
        raise settings.wrong_value("norm_std", "three numbers above 0")
    mean = settings.numbers("norm_mean", HALF)
    return PreprocessSpec(
        resample="bicubic",
        rescale=1 / 255,
        mean=(mean[0], mean[1], mean[2]),
        std=(red, green, blue),
        identity="minicpmv/bicubic",
    )


def _marks(settings: Fields) -> Marks:
    def pair(names: Pair, defaults: Pair) -> Pair:
        return settings.text(names[0], defaults[0]), settings.text(names[1], defaults[1])

    number = pair(("im_id_start", "im_id_end"), ("<image_id>", "</image_id>"))
    return Marks(
        picture=pair(("im_start", "im_end"), ("<image>", "</image>")),
        slice=pair(("slice_start", "slice_end"), ("<slice>", "</slice>")),
        number=number if settings.flag("use_image_id", False) else None,
    )


def _added_tokens(model_dir: Path) -> dict[str, int]:
    """Returns the ids of the added tokens, which config.json does not name, by content."""
    tokenizer = read_json(model_dir, "tokenizer.json")
    tokens = tokenizer.get("added_tokens")
    if not isinstance(tokens, list) or not all(isinstance(token, dict) for token in tokens):
        raise tokenizer.wrong_value("added_tokens", "a list of objects")
    fields = [Fields(token, f"added_tokens of {tokenizer.where}") for token in tokens]
    return {token.text("content"): token.integer("id", at_least=0) for token in fields}
