"""Plans the memory of an instance at its start: blocks of each cache, slots of recurrent states, longest request.

Works from the spec's byte formulas and the free memory that is given. Host memory is shared with everything else on the
machine: caches get what requests are likely to need, bounded by a part of what is free. A GPU's memory is filled: what
weights, the measured working memory of steps and a margin leave of the instance's share goes to the caches. An error
for what does not fit says what, by how much, and which flags change it, as they are typed: weights come first, then
what steps take, then caches with the least that they need. Allocates nothing, asks no device.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

from hydra_engine.config import EngineConfig
from hydra_engine.core.instances import Role
from hydra_engine.core.units import GIB, size
from hydra_engine.errors import ConfigError, ResourceError
from hydra_engine.models.specs.base import ModelSpec, VisionSpec
from hydra_engine.models.specs.quantization import at_load
from hydra_engine.models.specs.registry import FAMILIES
from hydra_engine.worker.memory.working import NOT_COUNTED, WorkingMemory, estimate, estimate_on_host

_NAMES = {"kv": "KV cache", "image": "image cache"}
MEMORY_SHARE = 0.4  # of what is free beside the weights, for each cache; of a GPU's, at most, for the image cache
SNAPSHOTS_SHARE = 0.2  # of what weights and running requests' states leave: snapshots of states, at most
MARGIN_BYTES = 1 << 29  # of a GPU: what its allocators lose between pieces, and what no measured step has taken
TYPICAL_TOKENS = 2048  # of one request, for the default size of the KV cache
TYPICAL_IMAGES = 16
TYPICAL_SNAPSHOTS = 2  # of recurrent states, in host memory: of one request, beside its two state slots
MIN_TEXT_TOKENS = 8  # a request with one largest picture has room for this much text at least


def kv_token_bytes(spec: ModelSpec, config: EngineConfig, dtype_bytes: int) -> int:
    """Bytes of the keys and values of a token in all layers, with the scales of a quantized cache."""
    if config.cache.kv_cache_dtype == "int8":
        return spec.language.kv_bytes_per_token(1, scaled=True)
    return spec.language.kv_bytes_per_token(dtype_bytes)


@dataclass(frozen=True, slots=True)
class Needs:
    """Memory that an instance of this role needs by its configuration, in bytes and in blocks of caches."""

    spec: ModelSpec
    role: Role
    config: EngineConfig
    dtype_bytes: int
    weight_bytes: int | None = None  # of a weight; None: as of an activation

    @property
    def weights(self) -> tuple[int, int]:
        """(vision, language) bytes of the weights that the role loads."""
        vision = self.spec.vision.num_parameters() if self.spec.vision is not None and self.role.needs_vision else 0
        num_bytes = self.weight_bytes or self.dtype_bytes
        language = self.spec.language_bytes(num_bytes, self.dtype_bytes) if self.role.needs_language else 0
        return vision * num_bytes, language

    @property
    def state_bytes(self) -> int:
        """Bytes of recurrent states: two state slots for every request that may run (`cache_store.py`); 0 if the model
        keeps none or the role has no language steps."""
        slot_bytes = 2 * self.spec.language.state_bytes(self.dtype_bytes) if self.role.needs_language else 0
        return self.config.scheduler.max_running_requests * slot_bytes

    @property
    def num_state_blocks(self) -> int:
        """KV blocks that hold one request's recurrent state on its way to another instance."""
        return _ceil(self.spec.language.state_bytes(self.dtype_bytes), self.kv_block_bytes) if self.state_bytes else 0

    @property
    def handover_blocks(self) -> int:
        """KV blocks that every request needs for its state, because it is prefilled or decoded elsewhere."""
        return 0 if Role.P in self.role and Role.D in self.role else self.num_state_blocks

    @property
    def pictures(self) -> VisionSpec | None:
        """The vision spec if the role encodes images or receives features; else, or without vision, None."""
        return self.spec.vision if Role.E in self.role or Role.P in self.role else None

    @property
    def kv_block_bytes(self) -> int:
        """Bytes of a KV block in all layers."""
        return self.config.cache.block_size * kv_token_bytes(self.spec, self.config, self.dtype_bytes)

    def image_sizes(self, vision: VisionSpec) -> tuple[int, int]:
        """(blocks of the largest span of a picture or video, bytes of a block)."""
        block_size = self.config.cache.image_block_size
        block_bytes = block_size * vision.num_planes * vision.feature_size * self.dtype_bytes
        return _ceil(vision.max_tokens_per_item, block_size), block_bytes

    @property
    def wanted_images(self) -> int:
        """Number of largest spans for which the image cache is sized by default, if the memory allows."""
        return max(TYPICAL_IMAGES, self.config.media.max_images or 0)

    def flag(self, kind: str) -> str:
        """The flag that sets the size of a cache (`kind`: kv or image); empty if none does."""
        for name in (f"num_{kind}_blocks", f"{kind}_cache_gib"):
            if getattr(self.config.cache, name) is not None:
                return "--" + name.replace("_", "-")
        return ""

    def configured_blocks(self, kind: str, block_bytes: int, reasons: list[str] | None = None) -> int | None:
        """Blocks of a cache (`kind`: kv or image) as configured; None if the configuration leaves it open. Appends a
        note on the flag to `reasons`, unless that is None."""
        flag = self.flag(kind)
        if not flag:
            return None
        number: int | None = getattr(self.config.cache, f"num_{kind}_blocks")
        gib: float = getattr(self.config.cache, f"{kind}_cache_gib") or 0
        if reasons is not None:
            reasons.append(f"{flag} {gib if number is None else number:g} as configured")
        return int(gib * GIB) // block_bytes if number is None else number

    @property
    def caches_are_given(self) -> bool:
        """True if every cache of the role has a configured size, so that none takes the rest of the memory."""
        kv, images = bool(self.flag("kv")), bool(self.flag("image"))
        return (kv or not self.role.needs_language) and (images or self.pictures is None)

    @property
    def given_kv_bytes(self) -> int:
        """Bytes of the KV cache as configured; 0 if the configuration leaves it open or the role has no language
        steps."""
        given = self.configured_blocks("kv", self.kv_block_bytes) if self.role.needs_language else None
        return self.kv_block_bytes * (given or 0)

    @property
    def usual_cache_bytes(self) -> int:
        """Bytes of states and of caches with configured or default sizes. KV counts only if its size is configured."""
        total = self.state_bytes + self.given_kv_bytes
        if self.pictures is not None:
            per_image, block_bytes = self.image_sizes(self.pictures)
            given = self.configured_blocks("image", block_bytes)
            total += block_bytes * (self.wanted_images * per_image if given is None else given)
        return total


@dataclass(frozen=True, slots=True)
class Filling:
    """The part of one instance in a device whose memory is filled (`own_part`). `weights_bytes` is None before the
    weights are loaded; the spec's number is used then. `reasons`: notes for the user."""

    own_bytes: int
    working: WorkingMemory = NOT_COUNTED
    weights_bytes: int | None = None
    reasons: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class CachePlan:
    """Sizes of the caches. `max_model_len`: the longest request, as configured or else as the model has it, lowered to
    what the KV cache holds, if there is one. `reasons`: notes for the user. Bytes of weights are computed from the spec
    for the role's part, without padding."""

    num_kv_blocks: int
    num_image_blocks: int
    max_model_len: int
    kv_bytes: int
    image_bytes: int
    reasons: tuple[str, ...]
    num_state_slots: int = 0  # requests that have recurrent states at once; 0: the model keeps none
    state_bytes: int = 0  # those of snapshots among them
    vision_weights_bytes: int = 0
    language_weights_bytes: int = 0
    working: WorkingMemory = NOT_COUNTED
    num_snapshots: int = 0  # of recurrent states, behind cached prefixes
    num_state_blocks: int = 0  # KV blocks in which a state moves to another instance

    @property
    def weights_bytes(self) -> int:
        return self.vision_weights_bytes + self.language_weights_bytes

    @property
    def total_bytes(self) -> int:
        return self.weights_bytes + self.kv_bytes + self.image_bytes + self.state_bytes + self.working.total_bytes


def plan_memory(
    spec: ModelSpec,
    role: Role,
    config: EngineConfig,
    dtype_bytes: int,
    free_bytes: int,
    *,
    shares: int = 1,
    filling: Filling | None = None,
    weight_bytes: int | None = None,
    total_bytes: int = sys.maxsize,
) -> CachePlan:
    """Plans the caches of an instance.

    - dtype_bytes: of an activation. weight_bytes: of a weight, if fewer.
    - free_bytes: free before the weights are loaded, divided among `shares` instances on the device. `filling`, if
        given, has this instance's part instead.
    - total_bytes: upper limit, without `filling`, for weights, states and caches together. Configured sizes are those
        of each instance.

    If a filled device has no memory for all graphs, or only with shorter contexts, fewer are planned. Raises
    ResourceError, saying what to change, if weights, working memory, states or caches do not fit, or the caches are too
    small for the requests that must fit, and ConfigError if the configured longest request exceeds the model's.
    """
    needs = Needs(spec, role, config, dtype_bytes, weight_bytes)
    made = _plan_or_refusal(needs, free_bytes, shares, filling, total_bytes)
    reasons = () if filling is None else filling.reasons
    while filling is not None and (fewer := filling.working.with_fewer_graphs()) is not None:
        filling = replace(filling, working=fewer, reasons=(*reasons, _left_out(fewer.captured_tokens)))
        other = _plan_or_refusal(needs, free_bytes, shares, filling, total_bytes)
        if isinstance(made, CachePlan) and isinstance(other, CachePlan) and other.max_model_len <= made.max_model_len:
            break
        made = other
    if isinstance(made, ResourceError):
        fitting = partial(_fitting, needs, free_bytes, shares, filling, total_bytes)
        made = _plan_or_refusal(needs, free_bytes, shares, filling, total_bytes, fitting)
    if isinstance(made, ResourceError):
        raise made
    return made


def _plan_or_refusal(
    needs: Needs,
    free_bytes: int,
    shares: int,
    filling: Filling | None,
    total_bytes: int,
    fitting: Callable[[], Sequence[str]] = tuple,
) -> CachePlan | ResourceError:
    """The plan, or the error that there is no room for it."""
    try:
        return _plan(needs, free_bytes, shares, filling, total_bytes, fitting)
    except ResourceError as error:
        return error


def _fitting(needs: Needs, free_bytes: int, shares: int, filling: Filling | None, total_bytes: int) -> Sequence[str]:
    """Flags with which the instance has room; empty if there are none."""
    without_graphs = list[str]()
    if filling is not None and not needs.config.enforce_eager:
        eager = replace(filling, working=filling.working.without_graphs(needs.spec, needs.config))
        if isinstance(_plan_or_refusal(needs, free_bytes, shares, eager, total_bytes), CachePlan):
            without_graphs = [f"--enforce-eager (no graphs, {size(filling.working.graph_bytes)}; steps take longer)"]
    filling = None if filling is None else replace(filling, weights_bytes=None)  # not those that are loaded
    for smaller in _smaller(needs):
        plans = {n: _plan_or_refusal(other, free_bytes, shares, filling, total_bytes) for n, other in smaller.items()}
        if fitting := [name for name, plan in plans.items() if isinstance(plan, CachePlan)]:
            return [*without_graphs, *fitting]
    return without_graphs


def _smaller(needs: Needs) -> Iterator[dict[str, Needs]]:
    """Yields needs with fewer bits, by their flags: first for weights or for keys and values, then for both, at last
    with short requests too. Nothing for what the model or its checkpoint refuses."""
    spec, cache = needs.spec, needs.config.cache
    if spec.family not in FAMILIES or not needs.role.needs_language:
        return
    weights = dict[str, Needs]()
    for name in fewer_bits(spec, needs.role):
        other = replace(needs, spec=replace(spec, at_load=at_load(name)))
        weights[f"--quantization {name} (weights {size(sum(other.weights))})"] = other
    if cache.kv_cache_dtype == "int8" or needs.config.attention_backend == "flashinfer":
        yield weights
        return
    flag, config = "--kv-cache-dtype int8", replace(needs.config, cache=replace(cache, kv_cache_dtype="int8"))
    yield weights | {flag: replace(needs, config=config)}
    yield {f"{name} and {flag}": replace(other, config=config) for name, other in weights.items()}
    if (config.max_model_len or spec.max_model_len) > TYPICAL_TOKENS:
        flag, config = f"{flag} and --max-model-len {TYPICAL_TOKENS}", replace(config, max_model_len=TYPICAL_TOKENS)
        yield {f"{name} and {flag}": replace(other, config=config) for name, other in weights.items()}


def fewer_bits(spec: ModelSpec, role: Role) -> tuple[str, ...]:
    """Values of --quantization that make the role's weights smaller; none for what the model or its checkpoint
    refuses."""
    if spec.family not in FAMILIES or not role.needs_language:
        return ()
    stored = spec.at_load or spec.quantization
    if stored == at_load("int8"):
        return ("int4",)
    return () if stored is not None and stored.stays_quantized else ("int8", "int4")


def _left_out(captured_tokens: int) -> str:
    """The note that steps with prompts of more than `captured_tokens` tokens, 0: all of them, have no graphs."""
    steps = f"steps with prompts of more than {captured_tokens} tokens" if captured_tokens else "steps with prompts"
    return f"graphs: {steps} are launched op by op, theirs have no room beside weights and caches"


def _plan(
    needs: Needs,
    free_bytes: int,
    shares: int,
    filling: Filling | None,
    total_bytes: int,
    fitting: Callable[[], Sequence[str]],
) -> CachePlan:
    """Plans the caches with the graphs that `filling` has; parameters and errors as in `plan_memory`. `fitting`: for
    the error, flags with which there is room."""
    spec, role, config, dtype_bytes = needs.spec, needs.role, needs.config, needs.dtype_bytes
    reasons, weights_bytes = list[str](), sum(needs.weights)
    device = DevicePart(spec, role, dtype_bytes, shares, filling is not None, fitting)
    if filling is None:
        working = estimate_on_host(spec, role, config, dtype_bytes)
        part_bytes, beside_bytes = _divided(free_bytes, shares, reasons), 0
    else:
        reasons += filling.reasons
        weights_bytes = weights_bytes if filling.weights_bytes is None else filling.weights_bytes
        part_bytes, beside_bytes, working = filling.own_bytes, MARGIN_BYTES, filling.working
    terms = [("weights", weights_bytes), ("working memory", working.total_bytes), ("margin", beside_bytes)]
    left_bytes = part_bytes - sum(num_bytes for _, num_bytes in terms)
    if left_bytes <= 0 and (filling is not None or not needs.caches_are_given):
        raise no_room(device, terms, part_bytes)
    num_state_slots = _state_slots(needs, left_bytes, reasons)
    left_bytes -= needs.state_bytes
    num_snapshots, snapshot_bytes = _snapshots(needs, left_bytes, reasons, filled=filling is not None)
    left_bytes -= snapshot_bytes
    share_bytes = int(MEMORY_SHARE * max(left_bytes, 0))
    image_reasons: list[str] = []
    max_bytes = share_bytes if filling is None or role.needs_language else left_bytes
    image = _images(needs, max_bytes, left_bytes - needs.given_kv_bytes, image_reasons)
    room_bytes = share_bytes if filling is None else left_bytes - image.num_bytes
    kv, wanted_len = _kv(needs, room_bytes, reasons, filled=filling is not None)
    holds = max(kv.num_blocks - needs.handover_blocks, 0) * config.cache.block_size
    if kv.too_small or image.too_small:
        useful = holds >= (TYPICAL_TOKENS if config.max_model_len is None else 2) and not image.too_small
        raise caches_too_small(device, (kv, image), left_bytes, lower_to=holds if useful else None)
    # Configured sizes are checked against all of the host's memory: what is free now may change.
    states_bytes = needs.state_bytes + snapshot_bytes
    there_bytes = left_bytes if filling is not None else total_bytes - weights_bytes - states_bytes
    if kv.num_bytes + image.num_bytes > there_bytes:
        raise caches_too_large(device, (kv, image), there_bytes)
    max_model_len = min(wanted_len, holds) if role.needs_language else wanted_len
    if max_model_len < wanted_len:
        reasons.append(_lowered(wanted_len, max_model_len, kv, config.cache.block_size, filled=device.filled))
    return CachePlan(
        kv.num_blocks,
        image.num_blocks,
        max_model_len,
        kv.num_bytes,
        image.num_bytes,
        (*reasons, *image_reasons),
        num_state_slots,
        states_bytes,
        *needs.weights,
        working,
        num_snapshots,
        needs.num_state_blocks,
    )


def _divided(free_bytes: int, shares: int, reasons: list[str]) -> int:
    """The instance's part of the free bytes. Appends a note to `reasons` if it has neighbours."""
    if shares > 1:
        reasons.append(f"{shares} instances share the device: {size(free_bytes // shares)} of its free memory each")
    return free_bytes // shares


def _state_slots(needs: Needs, free_bytes: int, reasons: list[str]) -> int:
    """Number of requests with recurrent states: all that may run; 0 if the model keeps none or the role has no language
    steps. Appends a note to `reasons` unless 0. Raises ResourceError if the states do not fit `free_bytes`."""
    num_bytes, num_slots = needs.state_bytes, needs.config.scheduler.max_running_requests
    if not num_bytes:
        return 0
    if num_bytes > free_bytes:
        raise no_states(needs.role, num_slots, num_bytes, max(free_bytes, 0))
    reasons.append(f"recurrent states: {size(num_bytes)} for {num_slots} requests")
    return num_slots


def _snapshots(needs: Needs, left_bytes: int, reasons: list[str], *, filled: bool) -> tuple[int, int]:
    """(number, bytes) of snapshots of recurrent states; (0, 0) if the model keeps none or prefixes are not reused. What
    a configured cache or the request that must fit takes goes first. Appends a note to `reasons` if prefixes could be
    reused."""
    spec, config = needs.spec, needs.config
    if not needs.state_bytes or not config.cache.prefix_caching:
        return 0, 0
    slot_bytes = spec.language.state_bytes(needs.dtype_bytes)
    wanted_len = config.max_model_len or spec.max_model_len
    least = wanted_len if config.max_model_len else _min_request(spec, config, wanted_len, [])[0]
    first = max(needs.given_kv_bytes, _ceil(least, config.cache.block_size) * needs.kv_block_bytes)
    if needs.pictures is not None:
        per_image, block_bytes = needs.image_sizes(needs.pictures)
        given = needs.configured_blocks("image", block_bytes)
        first += block_bytes * (per_image if given is None else given)
    number = min(int(SNAPSHOTS_SHARE * max(left_bytes, 0)), max(left_bytes - first, 0)) // slot_bytes
    if not filled:
        number = min(number, TYPICAL_SNAPSHOTS * config.scheduler.max_running_requests)
    if not number:
        reasons.append(f"prefixes are not reused: no room for a snapshot of recurrent states of {size(slot_bytes)}")
        return 0, 0
    reasons.append(f"reused prefixes: {size(number * slot_bytes)} for {number} snapshots of recurrent states")
    return number, number * slot_bytes


def _kv(needs: Needs, room_bytes: int, reasons: list[str], *, filled: bool) -> tuple[CacheSize, int]:
    """Returns the KV cache's size, without blocks if the role has no language steps, and the longest request that is
    wanted. `filled`: the cache takes all of `room_bytes`, unless its size is configured. Appends notes to `reasons`.
    Raises ConfigError if the configured length exceeds the model's."""
    spec, config = needs.spec, needs.config
    wanted_len = config.max_model_len or spec.max_model_len
    if wanted_len > spec.max_model_len:
        raise ConfigError(
            f"max_model_len {wanted_len} exceeds the model's {spec.max_model_len}; lower it or leave it out",
            param="max_model_len",
        )
    if not needs.role.needs_language:
        return CacheSize("kv"), wanted_len
    if config.cache.kv_cache_dtype == "int8":
        reasons.append("KV cache: int8 with one scale for each token and head")
    block_bytes = needs.kv_block_bytes
    given = needs.configured_blocks("kv", block_bytes, reasons)
    if given is not None:
        num_blocks = given
    elif filled:
        num_blocks = max(room_bytes, 0) // block_bytes
        reasons.append(
            f"KV cache: {size(num_blocks * block_bytes)}, all that is left of the instance's part of the device"
        )
    else:
        num_blocks = _kv_blocks(config, wanted_len, block_bytes, room_bytes, reasons)
    least, min_is = _min_request(spec, config, wanted_len, reasons)
    min_blocks = _ceil(least, config.cache.block_size) + needs.handover_blocks
    return CacheSize("kv", num_blocks, block_bytes, min_blocks, min_is, needs.flag("kv")), wanted_len


def _kv_blocks(config: EngineConfig, max_model_len: int, block_bytes: int, share_bytes: int, reasons: list[str]) -> int:
    """Default number of KV blocks in host memory: TYPICAL_TOKENS for every request that may run, and at least one
    longest request; fewer if `share_bytes` hold no more. Appends a note to `reasons`."""
    max_num_seqs = config.scheduler.max_running_requests
    per_request = _ceil(min(max_model_len, TYPICAL_TOKENS), config.cache.block_size)
    wanted = max(max_num_seqs * per_request, _ceil(max_model_len, config.cache.block_size))
    affordable = share_bytes // block_bytes
    what = f"KV cache: room for {max_num_seqs} requests of {min(max_model_len, TYPICAL_TOKENS)} tokens"
    if wanted <= affordable:
        reasons.append(what)
        return wanted
    reasons.append(f"{what} does not fit; {size(share_bytes)} taken, {MEMORY_SHARE:.0%} of the free memory")
    return affordable


def _min_request(spec: ModelSpec, config: EngineConfig, wanted_len: int, reasons: list[str]) -> tuple[int, str]:
    """(tokens, reason) of the request that must fit: the longest if that is configured, else one with a largest picture
    and MIN_TEXT_TOKENS, or of 2 tokens without vision, `wanted_len` if that is less. Appends a note to `reasons` if the
    picture does not fit the longest request."""
    least = 2 if spec.vision is None else spec.vision.max_tokens_per_image + MIN_TEXT_TOKENS
    if least > wanted_len:  # what was asked for, or what the model is: such pictures are refused one by one
        reasons.append(f"pictures of more than {wanted_len - MIN_TEXT_TOKENS} tokens do not fit max_model_len")
        least = wanted_len
    if config.max_model_len is not None:
        return wanted_len, f"{wanted_len} tokens, --max-model-len"
    picture = "" if spec.vision is None else ", one largest picture with a line of text"
    return least, f"{least} tokens{picture}"


def _lowered(wanted_len: int, max_model_len: int, kv: CacheSize, block_size: int, *, filled: bool) -> str:
    """The note that the longest request was lowered to what the KV cache holds, and how large a cache would hold
    `wanted_len`."""
    needed_bytes = _ceil(wanted_len, block_size) * kv.block_bytes
    whole = f"--kv-cache-gib {typed_gib(needed_bytes)} holds"
    if filled and not kv.given:  # the cache has all that is left, asking for more would not help
        whole = f"a KV cache of {size(needed_bytes)} would hold"
    return f"max_model_len lowered from {wanted_len} to {max_model_len}, what the KV cache holds; {whole} it all"


def _images(needs: Needs, max_bytes: int, beside_bytes: int, reasons: list[str]) -> CacheSize:
    """Size of the image cache, 0 blocks if no feature ever comes. A default size is at most `max_bytes`, and at most
    the larger of one largest span and `beside_bytes`, which a KV cache of configured size leaves. Appends notes to
    `reasons`."""
    if needs.pictures is None:
        return CacheSize("image")
    per_image, block_bytes = needs.image_sizes(needs.pictures)
    num_blocks = needs.configured_blocks("image", block_bytes, reasons)
    if num_blocks is None:
        max_bytes = min(max_bytes, max(beside_bytes, per_image * block_bytes))
        num_blocks = min(needs.wanted_images * per_image, max_bytes // block_bytes)
        waiting = "" if Role.P in needs.role else ", until other instances have fetched them"
        reasons.append(f"image cache: room for {num_blocks // per_image} of the largest images{waiting}")
    return CacheSize("image", num_blocks, block_bytes, per_image, "one largest picture", needs.flag("image"))


# ---- an instance's part of a device


def own_part(
    spec: ModelSpec,
    role: Role,
    config: EngineConfig,
    dtype_bytes: int,
    *,
    total_bytes: int,
    free_bytes: int,
    neighbours: Sequence[Role] = (),
    neighbour_configs: Sequence[EngineConfig] = (),
) -> tuple[int, tuple[str, ...]]:
    """(bytes, notes): the part of a GPU that an instance may fill. `neighbours`: roles of all instances on the device,
    this one's among them; `neighbour_configs`: of each, () if all have this one's. Alone, it is
    `gpu_memory_utilization` of the device, or what is free if that is less. Otherwise every instance gets what its role
    needs, and those whose KV cache has no configured size divide the rest; if there is none of those, or needs exceed
    the device, all divide the difference. All instances compute the same parts, from the model's JSON files and the
    configurations alone: what is free depends on how much the others have loaded."""
    utilization = config.cache.gpu_memory_utilization
    budget = int(utilization * total_bytes)
    if len(neighbours) <= 1:
        if free_bytes >= budget:
            return budget, ()
        return free_bytes, (f"{size(budget - free_bytes)} of the {size(budget)} for the instance are in use already",)
    others = list(zip(neighbours, neighbour_configs or [config] * len(neighbours), strict=True))
    left = budget - sum(_claim(Needs(spec, *other, dtype_bytes)) for other in others)
    num_filling = sum(_fills(*other) for other in others)
    own = _claim(Needs(spec, role, config, dtype_bytes))
    if left < 0 or not num_filling:
        own += left // len(neighbours)
    elif _fills(role, config):
        own += left // num_filling
    return max(own, 0), (f"{len(neighbours)} instances share the device: {size(own)} of {size(budget)} for this one",)


def _fills(role: Role, config: EngineConfig) -> bool:
    """True if the instance has a KV cache without a configured size, which takes what is left of the device."""
    return role.needs_language and config.cache.kv_cache_gib is None and config.cache.num_kv_blocks is None


def _claim(needs: Needs) -> int:
    """Bytes that an instance claims of a device, without a KV cache that fills it. Working memory and margin count
    twice, since the former is an estimate."""
    working = estimate(needs.spec, needs.role, needs.config, needs.dtype_bytes)
    return sum(needs.weights) + needs.usual_cache_bytes + 2 * (working.total_bytes + MARGIN_BYTES)


def _ceil(amount: int, unit: int) -> int:
    return -(-amount // unit)


@dataclass(frozen=True, slots=True)
class CacheSize:
    """Blocks that a cache gets, and the fewest that it works with; `min_is`: what those hold, for the user. `given`:
    the flag that sets the cache's size; empty if none does."""

    kind: str  # kv or image
    num_blocks: int = 0
    block_bytes: int = 0
    min_blocks: int = 0
    min_is: str = ""
    given: str = ""

    @property
    def num_bytes(self) -> int:
        return self.num_blocks * self.block_bytes

    @property
    def min_bytes(self) -> int:
        return self.min_blocks * self.block_bytes

    @property
    def too_small(self) -> bool:
        return self.num_blocks < self.min_blocks

    @property
    def min_flag(self) -> str:
        """The flag with the smallest sufficient value, as on the command line."""
        if self.given == f"--num-{self.kind}-blocks":
            return f"{self.given} {self.min_blocks}"
        return f"--{self.kind}-cache-gib {typed_gib(self.min_bytes)}"


@dataclass(frozen=True, slots=True)
class DevicePart:
    """An instance's part of a device. `filled`: a GPU's, whose memory caches fill. `shares`: instances on the
    device. `fitting`: flags with which the instance has room."""

    spec: ModelSpec
    role: Role
    dtype_bytes: int
    shares: int
    filled: bool
    fitting: Callable[[], Sequence[str]]

    def more_room(self) -> str:
        """Advice on how to give caches more memory. Lower budgets make the largest steps smaller."""
        has_tower = self.spec.vision is not None and self.role.needs_vision
        ways = ["raise --gpu-memory-utilization"] if self.filled else ["free memory"]
        if self.filled:
            lower = ["--token-budget", "--max-num-seqs"] if self.role.needs_language else []
            lower += ["--image-budget", "--max-pixels"] if has_tower else []
            ways.append(f"lower {' or '.join(lower)}")
        if self.dtype_bytes > 2:
            ways.append("take a smaller --dtype")
        ways.append("put fewer instances on the device with --topology" if self.shares > 1 else "take a smaller model")
        fits = f"; it fits with {' or with '.join(fitting)}" if (fitting := self.fitting()) else ""
        return f"{', '.join(ways[:-1])} or {ways[-1]}{fits}"


def typed_gib(num_bytes: int) -> str:
    """`num_bytes` in GiB, rounded up to three significant digits."""
    digits = max(2 - math.floor(math.log10(max(num_bytes, 1) / GIB)), 0)
    return f"{math.ceil(num_bytes / GIB * 10**digits) / 10**digits:.{digits}f}"


def no_room(part: DevicePart, terms: Sequence[tuple[str, int]], own_bytes: int) -> ResourceError:
    """The error that `terms` (name, bytes) together exceed `own_bytes` or leave nothing for caches."""
    needed = " + ".join(f"{name} {size(num_bytes)}" for name, num_bytes in terms if num_bytes)
    shared = ""
    if part.shares > 1 and not part.filled:
        shared = f", its part of the {size(own_bytes * part.shares)} that {part.shares} instances share"
    return ResourceError(
        f"{needed} > {size(max(own_bytes, 0))} for instance role {part.role.letters}{shared}; {part.more_room()}",
        param="gpu_memory_utilization" if part.filled else "model",
    )


def no_states(role: Role, num_slots: int, num_bytes: int, left_bytes: int) -> ResourceError:
    """The error that recurrent states exceed what the weights leave."""
    return ResourceError(
        f"recurrent states {size(num_bytes)} of {num_slots} requests > {size(left_bytes)} that the weights leave to "
        f"instance role {role.letters}; lower --max-num-seqs or free memory",
        param="max_num_seqs",
    )


def caches_too_small(
    part: DevicePart, caches: Sequence[CacheSize], left_bytes: int, *, lower_to: int | None
) -> ResourceError:
    """The error that caches are below their minimum. `lower_to`: a --max-model-len for which the caches suffice; None:
    there is none."""
    short = [cache for cache in caches if cache.too_small]
    sizes = " and ".join(f"{_NAMES[c.kind]} {size(c.num_bytes)} < {size(c.min_bytes)} ({c.min_is})" for c in short)
    ways = [cache.min_flag for cache in short if cache.given]
    min_bytes = sum(max(c.min_bytes, c.num_bytes if c.given else 0) for c in caches)
    if not all(cache.given for cache in short):
        if not part.filled and min_bytes <= left_bytes:
            ways = [cache.min_flag for cache in short]
        else:
            ways = []
    change = f"give at least {' '.join(ways)}" if ways else part.more_room()
    if lower_to is not None:
        change += f", or lower --max-model-len to {lower_to}"
    left = f", {size(max(left_bytes, 0))} are left beside the weights" if not ways and not part.filled else ""
    return ResourceError(
        f"{sizes} for instance role {part.role.letters}{left}; {change}",
        param=f"{short[0].kind}_cache_gib",
    )


def caches_too_large(part: DevicePart, caches: Sequence[CacheSize], left_bytes: int) -> ResourceError:
    """The error that caches exceed what is left of the device, with the flags that set their sizes."""
    cache_bytes = sum(cache.num_bytes for cache in caches)
    flags = " or ".join(cache.given for cache in caches if cache.given)
    return ResourceError(
        f"caches {size(cache_bytes)} > {size(max(left_bytes, 0))} that are left of the device for instance role "
        f"{part.role.letters}; lower {flags}" + (", or raise --gpu-memory-utilization" if part.filled else ""),
        param="kv_cache_gib",
    )
