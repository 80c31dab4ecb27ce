"""The spec of a model, without torch: shapes, image geometry, positions, byte and FLOP formulas.

A spec is parsed from config.json (and the processor's config) alone. Preprocessing, admission, budgets and the planner
work from it; `models/` builds modules that agree with it. Does not know tensors, weights or files other than JSON.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

from hydra_engine.core.prompting import AS_CONFIGURED, PixelBudget
from hydra_engine.errors import InvalidRequest
from hydra_engine.models.specs.quantization import Quantization

if TYPE_CHECKING:
    import numpy.typing as npt
    from PIL import Image

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}

LayerKind = Literal["attention", "delta"]


class View(NamedTuple):
    """The cut of one source picture into pictures for the tower, as integers.

    The source is resized to `resize`, after `before` (bicubically) if that is set, and placed with its corner at (left,
    top) on a black canvas (negative: cropped); the canvas is cut into tiles of one size, row by row. Sizes are (width,
    height) in pixels."""

    resize: tuple[int, int]
    canvas: tuple[int, int]
    corner: tuple[int, int]  # (left, top)
    tile: tuple[int, int]
    source: int = 0  # which of several source pictures: the frames of a video
    before: tuple[int, int] | None = None
    padding: tuple[int, int, int] | None = None  # colour; the source becomes a square first, itself in the middle

    @classmethod
    def whole(cls, width: int, height: int, source: int = 0) -> View:
        """Stretches the source to one picture."""
        return cls((width, height), (width, height), (0, 0), (width, height), source)

    @property
    def num_tiles(self) -> int:
        return (self.canvas[0] // self.tile[0]) * (self.canvas[1] // self.tile[1])


class ItemPlan(NamedTuple):
    """A planned span of features: the next `num_pictures` pictures of the views, of size width x height."""

    width: int
    height: int
    num_pictures: int
    num_patches: int  # rows of the vision tower, CLS tokens not counted
    num_tokens: int  # placeholders in the prompt, rows in the image cache
    grid: tuple[int, int, int]  # (time, rows, columns) in patches
    rows: int = 0  # of tokens, for multimodal rotary positions; rows * columns == num_tokens there
    columns: int = 0
    time: int = 0  # temporal position, relative to the first span of its video
    continues: bool = False  # continues the video of the previous span: same origin of positions
    bidirectional: bool = False  # its rows attend to each other: no prefill chunk ends inside it


class MediaPlan(NamedTuple):
    """The plan of one picture or video. `parts` replace the placeholder in the prompt, in order: text (tokenised,
    with special tokens) and spans. `number` is the text around the picture's number in its prompt, which precedes
    the parts."""

    views: tuple[View, ...]
    parts: tuple[str | ItemPlan, ...]
    number: tuple[str, str] | None = None

    @property
    def items(self) -> tuple[ItemPlan, ...]:
        return tuple(part for part in self.parts if isinstance(part, ItemPlan))

    def numbered_parts(self, number: int) -> tuple[str | ItemPlan, ...]:
        """Returns `parts`, with the number if the plan has one. `number` counts the earlier pictures (videos) of the
        prompt."""
        if self.number is None:
            return self.parts
        opening, closing = self.number
        return (f"{opening}{number}{closing}", *self.parts)

    @property
    def num_tokens(self) -> int:
        """Number of feature rows; text tokens between them are not counted."""
        return sum(item.num_tokens for item in self.items)

    @property
    def num_patches(self) -> int:
        return sum(item.num_patches for item in self.items)


class VideoInfo(NamedTuple):
    """Size, length and frame rate of a video, as stated by its file or its list of frames."""

    width: int
    height: int
    num_frames: int
    fps: float  # of the source


class VideoPlan(NamedTuple):
    """The source frames to decode (`View.source` is an index into `frames`) and the plan of their spans."""

    frames: tuple[int, ...]
    media: MediaPlan


@dataclass(frozen=True, slots=True)
class PreprocessSpec:
    """Pixel processing besides the views' resizing: filter `resample`, then (x * rescale - mean) / std.

    `identity` goes into every digest: it names the family and all settings that change pixels."""

    resample: str  # "bicubic", "bilinear", "lanczos", "nearest"
    rescale: float
    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    identity: str


class DeltaShape(NamedTuple):
    """Shape of a gated delta-net layer, which keeps one state per request instead of keys and values."""

    num_key_heads: int
    num_value_heads: int
    key_dim: int  # of a head
    value_dim: int
    num_taps: int  # of the convolution

    @property
    def key_width(self) -> int:
        return self.num_key_heads * self.key_dim

    @property
    def value_width(self) -> int:
        return self.num_value_heads * self.value_dim

    @property
    def num_channels(self) -> int:
        """Channels of the convolution: queries, keys and values of all heads."""
        return 2 * self.key_width + self.value_width

    @property
    def num_outputs(self) -> int:
        """Outputs of the input projections: channels, gates, decays and strengths."""
        return self.num_channels + self.value_width + 2 * self.num_value_heads

    def state_bytes(self, dtype_bytes: int) -> int:
        """Bytes of one request's state in one layer: the convolution's last inputs, and the recurrent state in
        float32."""
        recurrent = self.num_value_heads * self.key_dim * self.value_dim * 4
        return recurrent + (self.num_taps - 1) * self.num_channels * dtype_bytes


class Mixture(NamedTuple):
    """Shape of a mixture of experts, which is the MLP of some layers: a router chooses experts for each token, whose
    outputs are added with the router's weights. A shared expert, of the same width, serves every token."""

    num_experts: int  # without the shared one
    num_chosen: int  # experts of a token, without the shared one
    num_inner: int  # inner width of an expert
    renormalise: bool  # the weights of the chosen experts are divided by their sum
    shared: bool  # there is a shared expert, whose weight is a gate of its own

    @property
    def num_held(self) -> int:
        return self.num_experts + self.shared

    @property
    def num_active(self) -> int:
        """Experts that compute a token."""
        return self.num_chosen + self.shared

    def num_read(self, num_rows: int) -> float:
        """Expected number of distinct experts that `num_rows` tokens choose, if each expert is as likely as others."""
        missed = (1 - self.num_chosen / self.num_experts) ** num_rows
        return self.num_experts * (1 - missed) + self.shared


@dataclass(frozen=True, slots=True)
class LanguageSpec:
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int  # of an MLP that is no mixture; 0 if all are mixtures
    vocab_size: int
    rms_eps: float
    rope_theta: float
    max_position: int
    tie_embeddings: bool
    attention_bias: bool = False  # of queries, keys and values
    output_bias: bool = False  # of attention's output projection
    grouped_qkv: bool = False  # stored as one matrix: of each key-value head its query heads, its key and its value
    qk_norm: bool = False  # RMS norm of every query and key head before the rotation (qwen3)
    hidden_act: str = "silu"
    rope_parameters: dict[str, object] = field(default_factory=dict)
    rope_sections: tuple[int, int, int] | None = None  # pairs per axis (time, row, column) of the rotated ones
    rope_axes: tuple[int, ...] = ()  # axis that turns each rotated pair, if there are sections
    rotary_dim: int | None = None  # number of rotated values of a head, its first ones; None: all
    output_gate: bool = False  # the output of attention is multiplied by a gate, projected with the queries
    centred_norms: bool = False  # norms multiply by 1 + weight, but for the one inside a delta net
    delta: DeltaShape | None = None  # None: every layer is attention
    layer_kinds: tuple[LayerKind, ...] = ()  # of every layer, where there are delta nets
    mixture: Mixture | None = None
    mixture_layers: frozenset[int] = frozenset()  # layers whose MLP is a mixture

    @property
    def has_states(self) -> bool:
        return self.num_state_layers > 0

    @property
    def num_kv_layers(self) -> int:
        return self.num_layers - self.num_state_layers

    @property
    def num_state_layers(self) -> int:
        return self.layer_kinds.count("delta")

    def kv_bytes_per_token(self, dtype_bytes: int, *, scaled: bool = False) -> int:
        """Bytes of keys and values of one token in all layers. `scaled`: with a float32 scale per head for keys and for
        values."""
        return self.num_kv_layers * 2 * self.num_kv_heads * (self.head_dim * dtype_bytes + 4 * scaled)

    def state_bytes(self, dtype_bytes: int) -> int:
        """Bytes of one request's delta-net states, independent of its length; 0 without delta nets."""
        return 0 if self.delta is None else self.num_state_layers * self.delta.state_bytes(dtype_bytes)

    @property
    def num_active_inner(self) -> int:
        """Inner width of the widest MLP that a token passes: all active experts of a mixture together."""
        chosen = 0 if self.mixture is None else self.mixture.num_active * self.mixture.num_inner
        return max(self.intermediate_size, chosen)

    def num_expert_parameters(self) -> int:
        """Number of weights of one expert."""
        return 0 if self.mixture is None else 3 * self.hidden_size * self.mixture.num_inner

    def num_unread_parameters(self, num_rows: int) -> int:
        """Expected number of weights of experts that a step with this many tokens does not read."""
        if self.mixture is None:
            return 0
        unread = len(self.mixture_layers) * (self.mixture.num_held - self.mixture.num_read(num_rows))
        return round(unread * self.num_expert_parameters())

    def num_matrix_parameters(self) -> int:
        """Number of weights that can be quantised: matrices but for routers, embeddings and head."""
        c = self.hidden_size
        matrices = self.num_kv_layers * c * (self._attention_width + self.num_heads * self.head_dim)
        if self.delta is not None:
            matrices += self.num_state_layers * c * (self.delta.num_outputs + self.delta.value_width)
        return matrices + self._mlp_parameters(0 if self.mixture is None else self.mixture.num_held)

    def _mlp_parameters(self, num_experts: int) -> int:
        """Weights of all layers' MLPs with this many experts in a mixture, without routers."""
        dense = (self.num_layers - len(self.mixture_layers)) * 3 * self.hidden_size * self.intermediate_size
        return dense + len(self.mixture_layers) * num_experts * self.num_expert_parameters()

    @property
    def _router_parameters(self) -> int:
        """Weights of all layers' routers, with the gates of shared experts."""
        return 0 if self.mixture is None else len(self.mixture_layers) * self.mixture.num_held * self.hidden_size

    def num_parameters(self) -> int:
        """Number of weights of the decoder, embeddings and head included."""
        c, d = self.hidden_size, self.head_dim
        biases = self._attention_width * self.attention_bias + c * self.output_bias
        vectors = self.num_kv_layers * (biases + 2 * d * self.qk_norm)
        if self.delta is not None:
            shape = self.delta
            own = shape.num_channels * shape.num_taps + 2 * shape.num_value_heads + shape.value_dim
            vectors += self.num_state_layers * own
        layers = self.num_matrix_parameters() + self._router_parameters + vectors + self.num_layers * 2 * c
        return layers + self.vocab_size * c * (1 if self.tie_embeddings else 2) + c

    @property
    def _attention_width(self) -> int:
        """Outputs of the projection to queries, gates, keys and values."""
        return (self.num_heads * (1 + self.output_gate) + 2 * self.num_kv_heads) * self.head_dim

    def flops_per_token(self, num_context: int) -> int:
        """FLOPs (two per multiply-add) of one token with this much context through all layers, without the head."""
        c, d = self.hidden_size, self.head_dim
        linear = c * ((2 + self.output_gate) * self.num_heads + 2 * self.num_kv_heads) * d
        work = self.num_kv_layers * (linear + 2 * num_context * self.num_heads * d)
        if self.delta is not None:
            shape = self.delta
            state = shape.num_value_heads * shape.key_dim * shape.value_dim
            own = shape.num_channels * shape.num_taps + 3 * state
            work += self.num_state_layers * (c * (shape.num_outputs + shape.value_width) + own)
        experts = 0 if self.mixture is None else self.mixture.num_active
        return 2 * (work + self._mlp_parameters(experts) + self._router_parameters)


# An array of every payload of a model's own processor: the token ids of the span, [num_tokens] int64.
SPAN_TOKEN_IDS = "span_token_ids"


class Expansion(Protocol):
    """The expansion of one picture in a prompt: text, then `token_ids` from the first image token to the last, then
    text. `arrays` are the tower's inputs by name, for this picture alone."""

    @property
    def prefix(self) -> str: ...

    @property
    def token_ids(self) -> list[int]: ...

    @property
    def suffix(self) -> str: ...

    @property
    def arrays(self) -> dict[str, npt.NDArray[Any]]: ...

    @property
    def grid(self) -> tuple[int, int]:
        """(rows, columns) of the tokens, for multimodal rotary positions; (0, 0) without."""
        ...

    def num_patches(self, patch_size: int) -> int:
        """Number of patches of the tower, 1 or more."""
        ...


class PictureProcessor(Protocol):
    """A model's own image processor in the process that runs it."""

    def expand(self, image: Image.Image, /) -> Expansion:
        """Expands one upright RGB picture. Raises InvalidImage if the processor cannot take it."""
        ...


@dataclass(frozen=True, slots=True)
class ProcessorSpec:
    """A model's own image processor: how it is loaded, and its tokens in prompts. `loader` is the "module:function"
    that makes a `PictureProcessor` from this spec; only the process that runs the processor imports it."""

    model_dir: str
    model_type: str
    placeholder: str  # stands for one picture in a rendered prompt
    placeholder_id: int
    image_token_id: int  # stands for one feature
    bidirectional: bool  # the features of a picture attend to each other
    inputs: tuple[str, ...]  # the arguments that the model's get_image_features knows
    patch_size: int
    trust_remote_code: bool
    loader: str
    multimodal: bool = False  # positions have three axes, on which a picture's tokens are a grid
    joins: bool = True  # several pictures of a prompt expand as each does alone; else a prompt may have one


class TowerAttention(NamedTuple):
    """Attention shape of a tower's layers. `window` is the number of rows of a window, 0 without windows."""

    num_heads: int
    head_dim: int
    picture: int  # rows of a whole one, at most
    window: int = 0


def no_videos() -> InvalidRequest:
    return InvalidRequest("this model takes no videos; send pictures instead", code="video_not_supported")


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionSpec(ABC):
    """Geometry and cost of a family's vision tower. Concrete dataclasses are in the family's package."""

    feature_size: int  # C of the image cache
    preprocess: PreprocessSpec
    processor: ProcessorSpec | None = None  # if set, only it can plan pictures, `plan_image` cannot

    @property
    def num_planes(self) -> int:
        """Feature planes per image: 1 except for DeepStack models."""
        return 1

    @property
    def attention(self) -> TowerAttention | None:
        """Attention shape of the tower; None if the engine's attention does not compute it."""
        return None

    @property
    @abstractmethod
    def max_tokens_per_image(self) -> int:
        """Maximum number of feature rows of a picture, all its spans together, without the text between them."""

    @property
    def max_tokens_per_item(self) -> int:
        return self.max_tokens_per_image

    @property
    @abstractmethod
    def max_patches_per_image(self) -> int: ...

    @abstractmethod
    def plan_image(self, width: int, height: int, budget: PixelBudget = AS_CONFIGURED) -> MediaPlan:
        """Plans a decoded picture (orientation applied). No plan exceeds the maxima above, whatever the budget. Raises
        InvalidImage if the family cannot take the shape."""

    def plan_video(self, video: VideoInfo) -> VideoPlan:
        """Plans a video. Raises InvalidRequest if the family takes no videos, InvalidImage if it cannot take the
        shape."""
        raise no_videos()

    @abstractmethod
    def num_parameters(self) -> int:
        """Number of weights of tower and projector in memory; layers that are not read are not loaded and not
        counted."""

    @abstractmethod
    def flops(self, num_patches: int) -> int:
        """FLOPs of whole pictures (tiles) with `num_patches` patches in total."""


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """The shape of one checkpoint. `vision` is None for text-only checkpoints."""

    family: str  # "llava", ..; of a model implementation from another package, that one's name
    architecture: str  # architectures[0] of config.json
    language: LanguageSpec
    vision: VisionSpec | None
    image_token_id: int | None  # the placeholder of one picture in a rendered prompt, and of each of its features
    bos_token_id: int | None
    pad_token_id: int | None
    eos_token_ids: tuple[int, ...]
    dtype: str  # of the stored weights: "bfloat16", ...
    video_token_id: int | None = None  # None: the family takes no videos
    tokenizer_class: str | None = None  # chosen by AutoTokenizer, for models through transformers
    trust_remote_code: bool = False  # code that comes with the model may be run
    pictures_in_place: bool = False  # among the texts of a message if the chat template reads text only; else first
    no_images_because: str = ""  # of a model that has a vision part and is run without
    quantization: Quantization | None = None  # of the stored weights
    tower: str = ""  # hub id of a vision tower that may be stored elsewhere
    at_load: Quantization | None = None  # of the decoder's matrices, quantised at load

    @property
    def num_parameters(self) -> int:
        return self.language.num_parameters() + (0 if self.vision is None else self.vision.num_parameters())

    @property
    def quantized_as(self) -> str:
        """Short description of the quantisation; empty if there is none."""
        kept = self.at_load or self.quantization
        if kept is None:
            return ""
        return f"{kept.method}, {' and '.join(map(str, kept.num_bits))} bits"

    def held_on(self, device: str) -> ModelSpec:
        """Returns the spec for weights on "cpu" or "cuda:N": a GPU keeps 8-bit floats, unless they are quantised
        further at load."""
        if device == "cpu" or self.quantization is None or self.at_load is not None:
            return self
        return replace(self, quantization=replace(self.quantization, keeps_floats=True))

    def language_bytes(self, dtype_bytes: int, compute_bytes: int) -> int:
        """Estimates the bytes of the decoder's weights. `dtype_bytes`: size of a weight that is not quantised;
        `compute_bytes`: size of a quantised weight that is converted to the compute dtype. In quantised checkpoints all
        layer matrices count as quantised, and the head as not."""
        language, kept = self.language, self.at_load or self.quantization
        total = language.num_parameters() * dtype_bytes
        if kept is not None:
            total += int(language.num_matrix_parameters() * (kept.held_bytes(compute_bytes) - dtype_bytes))
        if self.at_load is not None:
            head = language.vocab_size * language.hidden_size
            total += head if language.tie_embeddings else head * (1 - dtype_bytes)
        return total

    @property
    def max_model_len(self) -> int:
        return self.language.max_position

    @property
    def processor(self) -> ProcessorSpec | None:
        return None if self.vision is None else self.vision.processor

    @property
    def one_picture_because(self) -> str:
        """Reason why a request may have one picture only, whatever is configured; empty if it may have several."""
        if self.processor is None or self.processor.joins:
            return ""
        return "the model's processor makes something else of several pictures in a prompt than of each alone"

    @property
    def placeholder_id(self) -> int | None:
        """Token id of one picture in a rendered prompt."""
        return self.image_token_id if self.processor is None else self.processor.placeholder_id
