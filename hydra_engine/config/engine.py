"""The configuration of the engine: `EngineConfig` with its parts `SchedulerConfig`, `CacheConfig`, `ClusterConfig` and
`MediaConfig`."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path

from hydra_engine.config.environment import user_folder
from hydra_engine.config.fields import LOG_FORMATS, not_negative, opt, positive
from hydra_engine.config.instance_limits import chosen_limits, parse_instance_limits
from hydra_engine.config.values import (
    MAX_ENCODE_SIZE,
    MAX_GRAPH_SIZE,
    check_graph_sizes,
    check_values,
    parse_sm_split,
)
from hydra_engine.core.instances import Role, Topology
from hydra_engine.core.options import LAUNCHERS, MODEL_IMPLEMENTATIONS, NATIVE, SpecOptions
from hydra_engine.entry_points import find_entry_points
from hydra_engine.errors import ConfigError

DEMO_MODEL = "demo"
SHAPES = (
    "llava-1.5-7b",
    "qwen2-vl-7b",
    "qwen2.5-vl-3b",
    "qwen2.5-vl-7b",
    "qwen3-vl-2b",
    "qwen3.5-0.8b",
    "qwen3-vl-30b-a3b",
    "qwen3.5-35b-a3b",
)  # models that ship without weights, for load_format random
DEFAULT_TOKENS, DEFAULT_REQUESTS = 512, 64  # limits of a language step on a CPU
DEFAULT_IMAGES = 500  # of one request, as OpenAI takes: an agent's history has one or two for each of its turns
_LARGEST_IMAGES = 16  # of the largest allowed, whose pixels one request may have
MAX_PRIORITY = (1 << 31) - 1  # of a request; the lowest is -MAX_PRIORITY - 1

_DTYPES = {"half": "float16", "fp16": "float16", "bf16": "bfloat16", "float": "float32", "fp32": "float32"}


class _Choices(tuple[str, ...]):
    """Choices that are these, and the entry points of other packages in `group`, which are read for no listed name."""

    group: str

    @classmethod
    def in_group(cls, group: str, *listed: str) -> _Choices:
        choices = cls(listed)
        choices.group = group
        return choices

    def __contains__(self, name: object) -> bool:
        return super().__contains__(name) or (isinstance(name, str) and name in find_entry_points(self.group))


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterConfig:
    """Several instances together: on which machines they run, where requests go, how blocks move, when an instance is
    lost. Durations are in seconds."""

    launcher: str | None = opt(
        None,
        "ray: the topology names nodes of a Ray cluster, as in E@node1+PD@node2:cuda:0, and instances run there",
        unset="all on this machine",
        choices=_Choices.in_group(LAUNCHERS, "ray"),
        flag="cluster",
    )
    ray_address: str | None = opt(
        None,
        "with --cluster ray: HOST:PORT of the Ray cluster to join",
        unset="RAY_ADDRESS, else the one that runs here, else a new one of this machine",
    )
    cluster_tls: str | None = opt(
        None,
        "with --cluster: folder with tls.crt, tls.key, ca.crt, on every node: what nodes send each other is encrypted",
        unset="it is authenticated, and can be read on its way",
        kind="folder",
    )
    transfer_backend: str = opt(
        "tcp",
        "with --cluster: how blocks move between nodes. tcp: over the engine's own connections; nixl: over NIXL, by "
        "RDMA where a node has it; auto: over NIXL on nodes that have it and RDMA",
        choices=("tcp", "nixl", "auto"),
    )
    router: str = opt(
        "least-loaded",
        "least-loaded: least late, then done soonest; affinity: the same, and what an instance has seen takes no time "
        "there; round-robin",
        choices=("least-loaded", "affinity", "round-robin"),
    )
    lease_s: float = opt(10.0, "blocks offered to another instance are withdrawn if it is silent for this long")
    suspect_s: float = opt(2.0, "an instance that is silent for this long gets no work; its requests move to others")
    fence_s: float = opt(10.0, "an instance that is silent for this long is killed and restarted")
    recovery_s: float = opt(
        5.0, "how long after a fault a request waits for an instance that can continue it before it fails"
    )
    max_attempts: int = opt(3, "most attempts of a request whose instance dies")
    steal_decodes: bool = opt(
        True, "instances that encode and decode only take over decodes of busy ones while they have nothing to encode"
    )
    prefetch_features: bool = opt(
        True, "an instance that prefills fetches features of pictures while their requests still wait for their turn"
    )
    early_kv: bool = opt(
        True, "KV leaves for the instance that decodes behind each chunk of a prefill, and not when all is computed"
    )
    transport: str = opt(
        "auto",
        "how blocks move between instances. auto: they are read where they are, or through pinned host memory where "
        "devices cannot map each other's memory; host: always through host memory",
        choices=("auto", "host"),
    )
    check_transfers: bool = opt(False, "compare checksums of all blocks that move between instances (slow)")

    def __post_init__(self) -> None:
        check_values(self)
        positive(self, "lease_s", "suspect_s", "fence_s", "recovery_s", "max_attempts")


@dataclass(frozen=True, slots=True, kw_only=True)
class MediaConfig:
    """Limits of pictures and videos, checked before bytes are read or pixels decoded."""

    max_images: int | None = opt(
        None, "most images of one request; if given, the image cache has room for as many", unset=str(DEFAULT_IMAGES)
    )
    max_image_bytes: int = opt(20 << 20, "most bytes of one encoded image")
    max_image_pixels: int = opt(40_000_000, "most pixels of one image, known from its header")
    max_aspect_ratio: float = opt(200.0, "longest side over shortest side of an image")
    max_videos: int = opt(1, "most videos of one request; 0: none")
    max_video_bytes: int = opt(64 << 20, "most bytes of one encoded video")
    max_video_frames: int = opt(7200, "most frames of one video, counted in its file")
    max_video_pixels: int = opt(4_000_000_000, "most pixels of all frames of one video together")
    fetch_timeout_s: float = opt(10.0, "total time to fetch one image by URL")
    max_fetched_bytes: int = opt(
        1 << 30,
        "most bytes of fetched images and videos that are not decoded yet, half of them for one client; above it 503",
    )
    allow_private_media: bool = opt(False, "also fetch images from private network addresses")
    allowed_media_domains: tuple[str, ...] = opt((), "fetch images from these hosts only", unset="from all")
    allowed_media_path: str | None = opt(
        None,
        "folder below which file:// images may be read by the server",
        unset="none",
        aliases=("allowed-local-media-path",),
        kind="folder",
    )
    local_files: bool = opt(False, "open plain paths and file:// anywhere (the embedded engine; never the server)")
    decode_workers: int = opt(2, "threads that decode and resize images")
    pixel_cache_mib: int = opt(256, "memory for processed pixels, so that a repeated image is decoded once; 0: off")
    min_pixels: int | None = opt(
        None, "enlarge smaller images to this many pixels (models with dynamic resolution)", unset="what the model says"
    )
    max_pixels: int | None = opt(
        None, "shrink larger images to this many pixels (models with dynamic resolution)", unset="what the model says"
    )

    @property
    def images_of_request(self) -> int:
        """Returns the most images of one request: `max_images`, or the default."""
        return DEFAULT_IMAGES if self.max_images is None else self.max_images

    @property
    def pixels_of_request(self) -> int:
        """Returns the most pixels of all encoded images of one request, by their headers: a bound of decoding time."""
        return _LARGEST_IMAGES * self.max_image_pixels

    def __post_init__(self) -> None:
        check_values(self)
        positive(self, "max_images", "max_image_bytes", "max_image_pixels", "decode_workers")
        not_negative(self, "max_videos", "pixel_cache_mib")
        positive(self, "max_aspect_ratio", "max_video_bytes", "max_video_frames", "max_video_pixels", "fetch_timeout_s")
        if self.max_fetched_bytes < 2 * max(self.max_image_bytes, self.max_video_bytes):
            raise ConfigError(
                "max_fetched_bytes must be at least twice max_image_bytes and max_video_bytes, for a client gets half",
                param="max_fetched_bytes",
            )
        if self.allowed_media_path is not None and not self.allowed_media_path.strip():
            raise ConfigError("allowed_media_path must name a folder", param="allowed_media_path")
        low, high = self.min_pixels, self.max_pixels
        if (low is not None and low < 1) or (high is not None and high < (low or 1)):
            raise ConfigError("min_pixels and max_pixels must be at least 1 and in order", param="max_pixels")


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """Limits of the scheduler; latency limits are in seconds. With a TPOT limit the budgets of a step follow from
    measured step times, and the values given here are upper bounds; without one they are used as given, but prefill
    beside decodes is cut (see `Budgets`)."""

    tpot_slo: float | None = opt(
        None,
        "limit for the time between two tokens, for example 40ms; budgets are derived from it",
        unset="no limit",
        kind="seconds",
    )
    ttft_slo: float | None = opt(
        None, "limit for the time to the first token, for example 1s", unset="no limit", kind="seconds"
    )
    token_budget: int | None = opt(
        None,
        "most tokens of one language step (decodes and prefill chunks together)",
        unset=f"{DEFAULT_TOKENS}, on a GPU 2048 or 4096, or less where its memory is small",
        aliases=("max-num-batched-tokens",),
    )
    image_budget: int = opt(0, "most patches of one vision step; 0: two images of the largest size, at most 16384")
    handover_tokens: int | None = opt(
        None,
        "a prompt whose KV goes to another instance is computed half by half of what is left, in parts of at least so "
        "many tokens, so that one part is copied while the next is computed; 0: as many as fit a step",
        unset="as many as take as long to copy as the shortest step takes to compute, both as measured while serving",
    )
    max_num_seqs: int | None = opt(
        None,
        "most requests that hold KV blocks at once",
        unset=f"{DEFAULT_REQUESTS}, on a GPU 256, or less where its memory is small",
    )
    max_queue: int = opt(512, "most requests accepted and not finished; above it 503")
    scheduling_policy: str = opt(
        "priority",
        "which waiting request starts first. priority: by priority, then by when its first token is due, then by "
        "arrival; fcfs: by arrival; sjf: by priority, then the one with the fewest tokens to prefill. With any of them "
        "one that max_bypass others have overtaken is next",
        choices=("priority", "fcfs", "sjf"),
    )
    encode_policy: str = opt(
        "priority",
        "whose images are encoded first. priority and fcfs: as with scheduling_policy; srpt: of the request with the "
        "fewest patches left. An image that has waited for 2 seconds is next",
        choices=("priority", "fcfs", "srpt"),
    )
    encode_patience_s: float = 2.0  # an image that has waited this long is encoded next
    max_bypass: int = opt(16, "how many later requests may overtake a waiting one before blocks are reserved for it")
    look_ahead: bool | None = opt(
        None,
        "plan the next language step while one runs",
        unset="on a GPU only, because on a CPU it costs goodput under mixed load",
    )

    @property
    def max_step_tokens(self) -> int:
        """`token_budget` as given or found (`worker/memory/limits.py`); else 512, the default of a CPU."""
        return DEFAULT_TOKENS if self.token_budget is None else self.token_budget

    @property
    def max_running_requests(self) -> int:
        """`max_num_seqs` as given or found (`worker/memory/limits.py`); else 64, the default of a CPU."""
        return DEFAULT_REQUESTS if self.max_num_seqs is None else self.max_num_seqs

    @property
    def slices_layers(self) -> bool:
        """True if encodes can pause inside layers and not only between them, which costs some speed."""
        return self.tpot_slo is not None

    def __post_init__(self) -> None:
        check_values(self)
        positive(self, "token_budget", "max_num_seqs", "max_queue", "max_bypass")
        not_negative(self, "handover_tokens", "image_budget")


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheConfig:
    """Sizes of caches, each of them per instance that has such a cache."""

    kv_cache_gib: float | None = opt(
        None,
        "memory of each instance's KV cache in GiB",
        unset="enough for max-num-seqs, bounded; on a GPU the rest",
    )
    image_cache_gib: float | None = opt(
        None, "memory of each instance's image cache in GiB", unset="enough for 16 large images"
    )
    block_size: int = opt(16, "tokens per KV block")
    image_block_size: int = 64  # feature rows
    gpu_memory_utilization: float = opt(
        0.9, "share of a GPU's memory that the instances on it take together: weights, working memory and caches"
    )
    kv_cache_dtype: str = opt(
        "auto",
        "type of keys and values: auto is that of activations, int8 holds nearly twice as many tokens",
        choices=("auto", "float32", "bfloat16", "float16", "int8"),
        other_choices=_DTYPES,
        refused_choices=dict.fromkeys(
            ("fp8", "fp8_e4m3", "fp8_e5m2"),
            "take int8, which has the same size and is more precise with a scale for each token and head",
        ),
    )
    num_kv_blocks: int | None = opt(
        None,
        "number of KV blocks, instead of kv_cache_gib (tests)",
        unset="what kv-cache-gib holds",
        aliases=("num-gpu-blocks-override",),
    )
    num_image_blocks: int | None = opt(
        None, "number of image blocks, instead of image_cache_gib (tests)", unset="what image-cache-gib holds"
    )
    prefix_caching: bool = opt(
        True,
        "reuse KV of equal prompt prefixes, and features of equal pictures",
        aliases=("enable-prefix-caching",),
    )

    def __post_init__(self) -> None:
        check_values(self)
        positive(self, "block_size", "kv_cache_gib", "image_cache_gib")
        not_negative(self, "num_kv_blocks", "num_image_blocks")
        if not 0 < self.gpu_memory_utilization <= 1:
            raise ConfigError("gpu_memory_utilization must be above 0 and at most 1", param="gpu_memory_utilization")


# Fields of EngineConfig that are groups of options.
PARTS: dict[str, type] = {
    "scheduler": SchedulerConfig,
    "cache": CacheConfig,
    "media": MediaConfig,
    "cluster": ClusterConfig,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """The settings of an engine. `model` is a Hugging Face directory, a GGUF file or a folder of one, a hub id such as
    org/name, the word `demo` or one of SHAPES. `model_folder` is the folder with the files of a hub id, or with those
    converted from GGUF; `find_model_files` sets it. Raises ConfigError for a value or combination that is wrong.

        EngineConfig(model="demo", topology="EP+D", scheduler=SchedulerConfig(tpot_slo="40ms"))
    """

    model: str = opt(
        DEMO_MODEL,
        "Hugging Face model directory, GGUF file or folder of one, hub id such as Qwen/Qwen2-VL-2B-Instruct or, for "
        "GGUF files, OWNER/REPO:Q4_K_M, or `demo` for the model that ships with the engine; with --load-format random "
        f"also {', '.join(SHAPES)}, which ship without weights",
    )
    model_folder: str | None = None
    mmproj: str | None = opt(
        None,
        "GGUF file with the vision tower and projector of a model of GGUF files",
        unset="the only mmproj*.gguf of a model that is a folder, the one of a hub id that fits best",
        kind="file",
    )
    revision: str | None = opt(None, "branch, tag or commit of a hub id", unset="main")
    download: bool = opt(False, "download a hub id that is not in the Hugging Face cache")
    device: str = opt("auto", "auto, cpu or cuda:N; auto: cuda:0 if there is a usable GPU, else cpu")
    dtype: str = opt(
        "auto", "weights and activations", choices=("auto", "float32", "bfloat16", "float16"), other_choices=_DTYPES
    )
    topology: str = opt(
        "EPD",
        "instances and the stages that each serves: EPD is one for all; EP+D keeps decodes apart; 1E3P4D is one that "
        "encodes, three that prefill and four that decode; E@cuda:0+PD@cuda:1 says on which device",
    )
    instance_limits: str | None = opt(
        None,
        "limits that some instances have instead of those of all, by role or by name: "
        "'D:max_num_seqs=128;P:token_budget=8192,max_num_seqs=16;e0:image_budget=4096'. Of token_budget, max_num_seqs, "
        "image_budget, kv_cache_gib, image_cache_gib, num_kv_blocks and num_image_blocks",
    )
    max_model_len: int | None = opt(None, "longest prompt plus output", unset="what the model allows")
    threads: int | None = opt(None, "CPU threads per lane", unset="all cores that this process may use")
    lane_priority: str = opt(
        "auto",
        "the lane with priority if both compete for cores: throughput lets encodes finish and decodes batch up, "
        "latency prefers tokens to encodes, balanced shares evenly; auto: balanced with a TPOT limit, else throughput. "
        "On a GPU tokens go first but with throughput; from compute capability 9.0 on both lanes are equal whatever is "
        "set, and a TPOT limit alone holds up encodes",
        choices=("auto", "throughput", "balanced", "latency"),
    )
    sm_split: str = opt(
        "off",
        "multiprocessors of a GPU that are reserved for tokens while pictures are encoded: off; a number such as 32; "
        "several such as 32,64, among which each step chooses with a TPOT limit, and of which else the first is used; "
        "auto: a quarter, a half and three quarters. Rounded up to the device's granularity",
    )
    attention_backend: str = opt(
        "auto",
        "attention kernels on a GPU: triton; flashinfer, which needs the package of that name; auto: for decodes, "
        "prompts, pictures and windows those that a measurement finds to be the fastest, which is kept in profile_dir",
        choices=("auto", "triton", "flashinfer"),
    )
    deterministic: bool | None = opt(
        None,
        "batch-invariant ops: a request's tokens do not depend on its batch",
        unset="on for a CPU, where it costs nothing, off for a GPU",
    )
    model_impl: str = opt(
        "auto",
        "auto or native: the engine's own models; transformers: modules of transformers inside the engine's stages "
        "(slower, any image-text-to-text model)",
        choices=_Choices.in_group(MODEL_IMPLEMENTATIONS, *NATIVE, "transformers"),
    )
    load_format: str = opt(
        "auto",
        "auto: the directory's safetensors files; random, or dummy as in vLLM: weights drawn from a seed, for "
        "measurements without weights",
        choices=("auto", "random"),
        other_choices={"dummy": "random", "safetensors": "auto"},
    )
    packed_cache: str | None = opt(
        None,
        "folder where a processor's packed weights are kept: the next start maps them instead of reading and packing; "
        "as large as the weights for each model and setting",
        unset="they are packed at every start",
        kind="folder",
    )
    quantization: str = opt(
        "auto",
        "auto: weights as they are stored; int8 or int4: the decoder's matrices are quantised while they are loaded; "
        "any other: the method that the checkpoint must be quantised by",
        choices=("auto", "int8", "int4", "compressed-tensors", "gptq", "awq", "fp8", "gguf"),
    )
    trust_remote_code: bool = opt(
        False, "with --model-impl transformers: run the Python code that comes with the model"
    )
    backend: str = opt("auto", "CPU implementation of the ops", choices=("auto", "native", "reference"))
    enforce_eager: bool = opt(
        False,
        "launch every op of every step; off: on a GPU, encodes, steps of decodes and steps of up to 2048 tokens with "
        "prompts replay captured graphs",
    )
    cuda_graph_sizes: tuple[int, ...] = opt(
        (),
        "numbers of requests for which a decode step is captured; smaller steps are padded",
        unset="1, 2, 4, 8, 16, 24 and so on up to max-num-seqs, from 128 on an eighth of that apart",
        aliases=("cudagraph-capture-sizes",),
    )
    encoder_cuda_graph_sizes: tuple[int, ...] = opt(
        (),
        "numbers of patches for which an encode is captured, rounded up to picture sizes of the model; smaller encodes "
        "are padded",
        unset="64, 128, 256, 512, 768 and so on up to 4096 or the largest encode",
    )
    seed: int = opt(0, "seed for requests without a seed of their own")
    chat_template: str | None = opt(
        None, "file with a chat template that replaces the model's", unset="the model's", kind="file"
    )
    generation_config: str = opt(
        "auto",
        "default sampling of requests. auto: the model's generation_config.json (temperature, "
        "top_p, top_k, min_p, repetition_penalty, max_new_tokens, do_sample, suppress_tokens and others); none: "
        "OpenAI's defaults",
        choices=("auto", "none"),
        other_choices={"vllm": "none"},
    )
    override_generation_config: str | None = opt(
        None, 'a JSON object that overrides that file, such as \'{"temperature": 0.7, "top_p": 0.9}\'', kind="json"
    )
    profile_dir: str | None = opt(
        None,
        "folder of measured step times",
        unset="hydra-engine/profiles in the user's cache folder",
        kind="folder",
    )
    log_level: str = opt("warning", "lowest level of lines to log", choices=("debug", "info", "warning", "error"))
    log_format: str = opt("text", "text: readable lines; json: one object a line, also at start", choices=LOG_FORMATS)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    media: MediaConfig = field(default_factory=MediaConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)

    def __post_init__(self) -> None:
        check_values(self)
        for name, part in PARTS.items():
            if not isinstance(given := getattr(self, name), part):
                raise ConfigError(f"{name} must be a {part.__name__}, not {type(given).__name__}", param=name)
        Topology.parse(self.topology, nodes=self.cluster.launcher is not None)
        if self.cluster.cluster_tls is not None and self.cluster.transfer_backend == "nixl":
            raise ConfigError(
                "cluster_tls does not encrypt what moves over NIXL; give transfer_backend tcp, or no cluster_tls",
                param="transfer_backend",
            )
        if self.instance_limits is not None:
            parse_instance_limits(self.instance_limits, self.topology)
        for name, most in (("cuda_graph_sizes", MAX_GRAPH_SIZE), ("encoder_cuda_graph_sizes", MAX_ENCODE_SIZE)):
            object.__setattr__(self, name, check_graph_sizes(getattr(self, name), name, most))
        if self.trust_remote_code and self.model_impl in NATIVE:
            raise ConfigError(
                "trust_remote_code needs model_impl transformers; native models run no code of a checkpoint",
                param="trust_remote_code",
            )
        parse_sm_split(self.sm_split)
        if self.threads is not None and not 1 <= self.threads <= 1024:
            raise ConfigError("threads must be between 1 and 1024", param="threads")
        if self.max_model_len is not None and self.max_model_len < 2:
            raise ConfigError("max_model_len must be at least 2", param="max_model_len")

    @property
    def parsed_topology(self) -> Topology:
        return Topology.parse(self.topology, nodes=self.cluster.launcher is not None)

    def for_instance(self, name: str, role: Role) -> EngineConfig:
        """Returns the configuration of one instance: a copy with its own limits (`instance_limits`), or self if it has
        none."""
        if self.instance_limits is None:
            return self
        own = chosen_limits(parse_instance_limits(self.instance_limits, self.topology), name, role)
        if not own:
            return self
        parts = {part: replace(getattr(self, part), **limits) for part, limits in own.items()}
        return replace(self, **parts)

    @property
    def model_path(self) -> Path:
        if self.model_folder is not None:
            return Path(self.model_folder)
        if self.model == DEMO_MODEL:
            return Path(__file__).parents[1] / "demo" / "model"
        if self.model in SHAPES:
            return Path(__file__).parents[1] / "models" / "shapes" / self.model
        return Path(self.model)

    @property
    def spec_options(self) -> SpecOptions:
        return SpecOptions(
            model_impl=self.model_impl,
            trust_remote_code=self.trust_remote_code,
            min_pixels=self.media.min_pixels,
            max_pixels=self.media.max_pixels,
            quantization=self.quantization,
        )

    @property
    def profile_folder(self) -> Path:
        """The folder of measured step times. Raises ConfigError if there is neither an option nor a home directory."""
        if self.profile_dir is not None:
            return Path(self.profile_dir)
        folder = user_folder("XDG_CACHE_HOME", "~/.cache")
        if folder is None:
            raise ConfigError("this user has no home directory; set profile_dir", param="profile_dir")
        return folder / "profiles"

    @property
    def lane_order(self) -> str:
        """`lane_priority` with "auto" resolved: balanced with a TPOT limit, else throughput."""
        if self.lane_priority != "auto":
            return self.lane_priority
        return "balanced" if self.scheduler.tpot_slo is not None else "throughput"

    @property
    def sm_counts(self) -> tuple[int, ...]:
        """The numbers of SMs in `sm_split`; empty if it is off, or auto before the device is known."""
        return parse_sm_split(self.sm_split)

    @property
    def model_name(self) -> str:
        """The model's name in the API without --served-model-name."""
        return self.model if self.model == DEMO_MODEL else self.model.rstrip("/")
