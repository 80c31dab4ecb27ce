"""Small stand-ins for the worker's neighbours: a model that is a pure function of what the paged caches hold.

The fake decoder writes each token's id (or, at image rows, the image feature) into the KV cache and computes a row's
logits from the ids it reads back through the row's block table. A wrong slot, table or merge changes the tokens.
"""

from __future__ import annotations

import math
import threading
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from queue import SimpleQueue
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hydra_engine.backend.base import AttentionPlan, Backend, MixedRows, PagedCache, StateCache, StateRows
from hydra_engine.backend.cpu.device import CpuDevice
from hydra_engine.backend.reference.ops import ReferenceOps
from hydra_engine.backend.reference.sampling import adjust_logits, best_tokens, sample, score_tokens
from hydra_engine.clock import MonotonicClock
from hydra_engine.config import EngineConfig
from hydra_engine.core.ids import ImageDigest, RequestId, StepId
from hydra_engine.core.instances import EPD, Role
from hydra_engine.core.messages import PixelPayload
from hydra_engine.core.plans import ChunkRow, DecodeRows, EncodeItem, ImageSlice, LanguagePlan, VisionPlan
from hydra_engine.core.pools import PoolKind
from hydra_engine.core.request import ImageItem, Request
from hydra_engine.core.results import LanguageResult, ReadyResult, TokenLogprobs
from hydra_engine.core.sampling import NO_RULES, SamplingParams, TokenRules
from hydra_engine.errors import ErrorInfo
from hydra_engine.models.layers.decoder import LanguageInput
from hydra_engine.models.layers.vision import VisionInput
from hydra_engine.models.specs.base import (
    ItemPlan,
    LanguageSpec,
    MediaPlan,
    ModelSpec,
    PreprocessSpec,
    VideoInfo,
    VideoPlan,
    View,
    no_videos,
)
from hydra_engine.worker.ports import Gate
from hydra_engine.worker.transfer import Exchange
from hydra_engine.worker.vision.gate import LaneGate
from hydra_engine.worker.worker import Worker
from tests.faults.points import FaultPoints
from tests.faults.worker import FaultyExchange, FaultyWorker

VOCABULARY = 97
POISON_TOKEN = 90  # the fake decoder raises when it computes this token
NAN_TOKEN = 91  # and gives a NaN logit to rows whose context holds this one
BAD_PIXEL = 255  # the fake tower raises at a picture that starts with this value
NAN_PIXEL = 254  # and gives it a NaN feature
IMAGE_TOKENS = 5
BLOCK = 4
IMAGE_BLOCK = 3
PREPROCESS = PreprocessSpec("bicubic", 1.0, (0, 0, 0), (1, 1, 1), "fake")


class FakeOps:
    name = "fake"
    deterministic = True

    best_tokens = staticmethod(best_tokens)
    sample = staticmethod(sample)
    adjust_logits = staticmethod(adjust_logits)
    score_tokens = staticmethod(score_tokens)

    def plan_attention(self, cu_q: Tensor, num_context: Tensor, block_tables: Tensor) -> AttentionPlan:
        assert cu_q.dtype == num_context.dtype == block_tables.dtype == torch.int32
        widest = int((cu_q[1:] - cu_q[:-1]).max())
        return AttentionPlan(cu_q, num_context, block_tables, widest, int(num_context.max()))

    def plan_decode(self, num_context: Tensor, block_tables: Tensor) -> AttentionPlan:
        return ReferenceOps().plan_decode(num_context, block_tables)

    def plan_mixed(self, rows: MixedRows, num_tokens: int, max_prompts: int) -> AttentionPlan:
        raise ValueError("plan_mixed: the fake model reads contents")

    def plan_states(self, rows: StateRows) -> StateRows:
        return rows

    def write_cache(self, cache: PagedCache, layer: int, rows: Sequence[Tensor], slots: Tensor) -> None:
        for x, values in enumerate(rows):
            for t, slot in enumerate(slots.tolist()):
                if slot >= 0:
                    cache.data[slot // cache.block_size, layer, x, slot % cache.block_size] = values[t]

    def gather_cache(self, cache: PagedCache, layer: int, index: int, slots: Tensor) -> Tensor:
        return cache.data[slots // cache.block_size, layer, index, slots % cache.block_size]


class FakeLane:
    def __init__(self, name: str) -> None:
        self.name = name
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, job: Callable[[], None]) -> None:
        self._jobs.put(job)

    def close(self) -> None:
        self._jobs.put(None)
        self._thread.join(timeout=30)

    def _run(self) -> None:
        with torch.inference_mode():
            while (job := self._jobs.get()) is not None:
                job()


class FakeDevice(CpuDevice):
    def __init__(self) -> None:
        super().__init__(1)

    def lane(self, name: str) -> FakeLane:
        return FakeLane(name)

    def memory(self) -> tuple[int, int]:
        return 1 << 30, 1 << 30


@dataclass
class FakeModel:
    ops: Any = field(default_factory=FakeOps)
    encode_gate: threading.Event | None = None  # encodes wait for it
    vocabulary: int = VOCABULARY
    forward_threads: set[str] = field(default_factory=set)
    encode_threads: set[str] = field(default_factory=set)
    batch_sizes: list[int] = field(default_factory=list)
    row_counts: list[int] = field(default_factory=list)  # of forwards
    broken_forwards: set[int] = field(default_factory=set)  # numbers; with two rows or more they raise late
    num_slices: int = 1
    can_be_captured: bool = True
    tower: None = None

    def reserve_positions(self, end: int) -> None: ...

    def encode(self, inputs: VisionInput, image_cache: PagedCache, /) -> None:
        self.encode_threads.add(threading.current_thread().name)
        if self.encode_gate is not None:
            assert self.encode_gate.wait(30)
        pixels = inputs.pixels
        assert all(picture.dtype == torch.uint8 for picture in pixels) and len(pixels) == len(inputs.grids)
        self.batch_sizes.append(len(pixels))
        if any(int(picture[0, 0, 0, 0]) == BAD_PIXEL for picture in pixels):
            raise RuntimeError("secret: the tower does not like this picture")
        features = (
            torch.cat([picture_features(picture) for picture in pixels]).reshape(-1, 1, 1).to(image_cache.data.dtype)
        )
        self.ops.write_cache(image_cache, 0, [features], inputs.slots)

    def forward(self, inputs: LanguageInput, kv_cache: PagedCache, image_cache: PagedCache | None, /) -> Tensor:
        self.forward_threads.add(threading.current_thread().name)
        self.row_counts.append(len(inputs.attention.num_context))
        values = inputs.token_ids.to(torch.float32)
        if bool((inputs.token_ids == POISON_TOKEN).any()):
            raise RuntimeError("secret: the decoder does not like this token")
        if inputs.image_rows is not None:
            assert image_cache is not None and inputs.image_slots is not None
            values[inputs.image_rows] = self.ops.gather_cache(image_cache, 0, 0, inputs.image_slots).flatten().float()
        self.ops.write_cache(kv_cache, 0, [values.reshape(-1, 1, 1)], inputs.slots)
        if len(self.row_counts) - 1 in self.broken_forwards and self.row_counts[-1] > 1:
            raise RuntimeError("this step does not come back")
        ends = (inputs.attention.cu_q[1:] - 1).tolist()
        rows = [ends.index(row) for row in inputs.logit_rows.tolist()]
        logits = [fake_logits(self._context(inputs.attention, r, kv_cache), self.vocabulary) for r in rows]
        return torch.stack(logits) if logits else torch.empty(0, self.vocabulary)

    def _context(self, plan: AttentionPlan, row: int, cache: PagedCache) -> list[float]:
        positions = torch.arange(int(plan.num_context[row]))
        blocks = plan.block_tables[row][positions // cache.block_size].long()
        slots = blocks * cache.block_size + positions % cache.block_size
        context: list[float] = self.ops.gather_cache(cache, 0, 0, slots).flatten().tolist()
        return context


def picture_features(pixels: Tensor) -> Tensor:
    """Features [I, IMAGE_TOKENS] that the fake tower makes of uint8 pictures."""
    mean = pixels.to(torch.float32).mean(dim=(1, 2, 3))[:, None]
    features = 1000.0 + 8.0 * mean + torch.arange(IMAGE_TOKENS)
    features[pixels[:, 0, 0, 0] == NAN_PIXEL, -1] = float("nan")
    return features


def fake_logits(context: Sequence[float], vocabulary: int = VOCABULARY) -> Tensor:
    generator = torch.Generator().manual_seed(zlib.crc32(np.asarray(context, dtype=np.float64).tobytes()))
    logits = torch.randn(vocabulary, generator=generator) * 3
    logits[[t for t in (POISON_TOKEN, NAN_TOKEN) if t < vocabulary]] = -50.0
    if NAN_TOKEN in context:
        logits[7] = float("nan")
    return logits


@dataclass(frozen=True)
class FakeVision:
    feature_size: int = 1
    num_planes: int = 1
    max_tokens_per_image: int = IMAGE_TOKENS
    max_tokens_per_item: int = IMAGE_TOKENS
    max_patches_per_image: int = IMAGE_TOKENS
    parameters: int = 1000
    preprocess: PreprocessSpec = PREPROCESS
    processor: None = None

    def plan_image(self, width: int, height: int) -> MediaPlan:
        item = ItemPlan(8, 8, 1, IMAGE_TOKENS, IMAGE_TOKENS, (1, 1, IMAGE_TOKENS))
        return MediaPlan((View.whole(8, 8),), (item,))

    def plan_video(self, video: VideoInfo) -> VideoPlan:
        raise no_videos()

    def num_parameters(self) -> int:
        return self.parameters

    def flops(self, num_patches: int) -> int:
        return num_patches


FAKE_VISION = FakeVision()


def fake_spec(max_position: int = 256, vision: FakeVision | None = FAKE_VISION) -> ModelSpec:
    language = LanguageSpec(
        num_layers=1,
        hidden_size=1,
        num_heads=1,
        num_kv_heads=1,
        head_dim=1,
        intermediate_size=1,
        vocab_size=VOCABULARY,
        rms_eps=1e-5,
        rope_theta=1e4,
        max_position=max_position,
        tie_embeddings=True,
    )
    return ModelSpec("fake", "Fake", language, vision, 96, 1, 0, (2,), "float32")


@dataclass(frozen=True)
class Decode:
    """An entry of `DecodeRows`."""

    request_id: RequestId
    seq_slot: int
    token_id: int
    start: int
    num_generated: int
    block_ids: np.ndarray

    @property
    def token_ids(self) -> tuple[int, ...]:
        return (self.token_id,)


Row = ChunkRow | Decode


@dataclass(frozen=True)
class Outcome:
    """The outcome of a row in a `LanguageResult`."""

    request_id: RequestId
    token_id: int | None
    logprobs: TokenLogprobs | None
    error: ErrorInfo | None


def decode_rows(decodes: Sequence[Decode], block_size: int = BLOCK) -> DecodeRows:
    needed = [-(-(d.start + 1) // block_size) for d in decodes]
    tables = np.zeros((len(decodes), max(needed, default=0)), dtype=np.int32)
    for row, (decode, count) in enumerate(zip(decodes, needed, strict=True)):
        tables[row, :count] = decode.block_ids[:count]
    columns = [(d.request_id, d.seq_slot, d.token_id, d.start, d.num_generated) for d in decodes]
    return DecodeRows(*np.array(columns, dtype=np.int64).reshape(-1, 5).T.copy(), tables)


def in_plan_order(rows: Sequence[Row]) -> list[int]:
    """Decodes first."""
    return sorted(range(len(rows)), key=lambda i: not isinstance(rows[i], Decode))


def plan_of(step: StepId, rows: Sequence[Row], *, block_size: int = BLOCK, vision_s: float = math.inf) -> LanguagePlan:
    decodes = [row for row in rows if isinstance(row, Decode)]
    chunks = tuple(row for row in rows if isinstance(row, ChunkRow))
    return LanguagePlan(step, decode_rows(decodes, block_size), chunks, vision_s)


def outcomes_of(rows: Sequence[Row], result: LanguageResult) -> tuple[Outcome, ...]:
    """Outcomes in the order of `rows`, from which the plan was made."""
    assert result.token_ids.dtype == np.int64 and result.token_ids.shape == (len(rows),)
    logprobs, failures = dict(result.logprobs), dict(result.failures)
    assert len(logprobs) == len(result.logprobs) and len(failures) == len(result.failures)
    found: dict[int, Outcome] = {}
    for row, index in enumerate(in_plan_order(rows)):
        token = int(result.token_ids[row])
        assert token == -1 or row not in failures, "a token of a row that failed"
        sampled = None if token == -1 else token
        found[index] = Outcome(rows[index].request_id, sampled, logprobs.get(row), failures.get(row))
    return tuple(found[index] for index in range(len(rows)))


def poisoned(*tensors: Tensor) -> None:
    """Fills them with NaN, so that a read of what was never written shows."""
    for tensor in tensors:
        tensor.fill_(float("nan"))


class Rig:
    """A worker, over fakes unless told otherwise, with helpers that play the scheduler: block ids, plans, waiting."""

    def __init__(
        self,
        model: Any = None,
        *,
        backend: Backend | None = None,
        spec: ModelSpec | None = None,
        caches: tuple[PagedCache | None, PagedCache | None] | None = None,
        states: StateCache | None = None,
        faults: FaultPoints | None = None,
        gate: Gate | None = None,
        role: Role = EPD,
        shared: bool = False,
        asynchronous: bool = False,
        config: EngineConfig | None = None,
    ) -> None:
        config = config or EngineConfig()
        self.model = model or FakeModel()
        self.spec = spec or fake_spec()
        self.backend = backend or Backend(FakeDevice(), self.model.ops, torch.float32, 1)
        self.kv_cache, self.image_cache = caches or (
            PagedCache(torch.full((64, 1, 2, BLOCK, 1, 1), float("nan"))),
            PagedCache(torch.full((64, 1, 1, IMAGE_BLOCK, 1, 1), float("nan"))),
        )
        self.woken = threading.Event()
        options: dict[str, Any] = {} if faults is None else {"faults": faults}
        self.worker: Any = (Worker if faults is None else FaultyWorker)(
            model=self.model,
            backend=self.backend,
            spec=self.spec,
            kv_cache=self.kv_cache,
            image_cache=self.image_cache,
            config=config,
            clock=MonotonicClock(),
            wake=self.woken.set,
            states=states,
            gate=gate or LaneGate(MonotonicClock()),
            role=role,
            asynchronous=asynchronous,
            **options,
        )
        if shared:
            pools = {PoolKind.FEATURES: self.image_cache, PoolKind.KV: self.kv_cache}
            results = self.worker.deliver, self.worker.run_job
            make = Exchange if faults is None else partial(FaultyExchange, faults=faults)
            self.exchange = make(self.backend, pools, MonotonicClock(), *results)
            self.worker.on_close(self.exchange.close)
        self._free = _shuffled(self.kv_cache)
        self._free_image = _shuffled(self.image_cache)
        self._steps = 0
        num_seq_slots = config.scheduler.max_running_requests
        self._free_seq_slots: list[int] = np.random.default_rng(6).permutation(num_seq_slots).tolist()
        self._results: dict[StepId, Any] = {}
        self.seq_slots: dict[int, int] = {}
        self.tables: dict[int, np.ndarray] = {}
        self.features: dict[tuple[int, int], np.ndarray] = {}

    def blocks(self, count: int) -> np.ndarray:
        return _take(self._free, count)

    def image_blocks(self, count: int) -> np.ndarray:
        return _take(self._free_image, count)

    def add(self, request: Request, pixels: Sequence[PixelPayload] = ()) -> None:
        self.worker.add_request(request, pixels)
        self.seq_slots[request.id] = self._free_seq_slots.pop()
        total = request.num_prompt + request.max_new_tokens
        self.tables[request.id] = self.blocks(-(-total // self.kv_cache.block_size))

    def leave(self, request: Request) -> None:
        """The next request that is added gets its slot, the one after it its blocks."""
        self.worker.remove_request(request.id)
        self._free_seq_slots.append(self.seq_slots.pop(request.id))
        self._free = [*self.tables.pop(request.id).tolist(), *self._free]

    def move(self, request: Request) -> None:
        """Moves a request to another slot and other blocks, as after a preemption."""
        self._free_seq_slots.insert(0, self.seq_slots[request.id])
        self.seq_slots[request.id] = self._free_seq_slots.pop()
        self.tables[request.id] = self.blocks(len(self.tables[request.id]))

    def row(
        self, request: Request, start: int, tokens: Sequence[int], generated: int, *, decode: bool | None = None
    ) -> Row:
        """A decode where the prompt has been computed before, a chunk elsewhere."""
        seq_slot, table, end = self.seq_slots[request.id], self.tables[request.id], start + len(tokens)
        if start >= request.num_prompt if decode is None else decode:
            return Decode(request.id, seq_slot, *tokens, start, generated, table)
        images = self._slices(request, start, end)
        sample = end >= request.num_prompt + generated
        return ChunkRow(request.id, seq_slot, tuple(tokens), start, table, len(table), sample, generated, images)

    def _slices(self, request: Request, start: int, end: int) -> tuple[ImageSlice, ...]:
        pieces = []
        for index, image in enumerate(request.images):
            first, last = max(start, image.start), min(end, image.end)
            if first < last:
                blocks = self.features[request.id, index]
                pieces.append(ImageSlice(first - start, last - first, first - image.start, blocks))
        return tuple(pieces)

    def item(self, request: Request, index: int) -> EncodeItem:
        image = request.images[index]
        blocks = self.image_blocks(-(-image.num_tokens // self.image_cache.block_size))
        self.features[request.id, index] = blocks
        return EncodeItem(request.id, index, image.digest, image.num_patches, image.num_tokens, blocks)

    def next_step(self) -> StepId:
        self._steps += 1
        return StepId(self._steps)

    def submit(self, *rows: Row, vision_s: float = math.inf, partition: int = 1) -> StepId:
        step = self.next_step()
        plan = plan_of(step, rows, block_size=self.kv_cache.block_size, vision_s=vision_s)
        self.worker.submit_language(replace(plan, partition=partition))
        return step

    def language(self, *rows: Row) -> tuple[Outcome, ...]:
        """Runs one step and returns what became of its rows."""
        return outcomes_of(rows, self.wait(self.submit(*rows)))

    def vision(self, *items: EncodeItem) -> tuple[ErrorInfo | None, ...]:
        step = self.next_step()
        self.worker.submit_vision(VisionPlan(step, items))
        return self.wait(step).errors

    def wait(self, step: StepId) -> Any:
        deadline = time.monotonic() + 20
        while step not in self._results:
            assert time.monotonic() < deadline, "no result in time"
            self.woken.wait(0.5)
            self.woken.clear()
            for result in self.worker.poll():
                if isinstance(result, ReadyResult):
                    continue
                assert result.ended_s >= result.started_s
                self._results[result.step_id] = result
        return self._results.pop(step)

    def generate(self, *requests: Request, chunk: int = 1000, steps: int = 8) -> list[list[int]]:
        """Prefills in chunks, then decodes, all requests together; a request that fails stops."""
        tokens: dict[int, list[int]] = {r.id: list(r.prompt_token_ids) for r in requests}
        done: dict[int, int] = dict.fromkeys(tokens, 0)
        failed: set[int] = set()
        while True:
            rows = []
            for r in requests:
                have = tokens[r.id]
                generated = len(have) - r.num_prompt
                if r.id not in failed and generated < steps:
                    part = have[done[r.id] : done[r.id] + chunk]
                    rows.append(self.row(r, done[r.id], part, generated))
            if not rows:
                return [tokens[r.id][r.num_prompt :] for r in requests]
            for row, outcome in zip(rows, self.language(*rows), strict=True):
                assert outcome.request_id == row.request_id
                if outcome.error is not None:
                    failed.add(row.request_id)
                    continue
                done[row.request_id] += len(row.token_ids)
                if outcome.token_id is not None:
                    tokens[row.request_id].append(outcome.token_id)

    def generate_ahead(self, *requests: Request, chunk: int = 1000, steps: int = 8) -> list[list[int]]:
        """Generates like `generate`, but submits every step before the first has ended, with tokens that are not read
        yet."""
        submitted: list[tuple[list[Row], StepId]] = []
        done: dict[int, int] = {r.id: 0 for r in requests}
        planned: dict[int, int] = {r.id: 0 for r in requests}
        while any(count < steps for count in planned.values()):
            rows = []
            for r in requests:
                if planned[r.id] < steps:
                    start = done[r.id]
                    row = self.row(r, start, r.prompt_token_ids[start : start + chunk] or [-1], planned[r.id])
                    done[r.id] += len(row.token_ids)
                    planned[r.id] += done[r.id] >= r.num_prompt
                    rows.append(row)
            submitted.append((rows, self.submit(*rows)))
        tokens: dict[int, list[int]] = {r.id: [] for r in requests}
        failed: set[int] = set()
        for rows, step in submitted:
            for outcome in outcomes_of(rows, self.wait(step)):
                assert outcome.error is not None or outcome.request_id not in failed, "it failed before"
                if outcome.error is not None:
                    failed.add(outcome.request_id)
                elif outcome.token_id is not None:
                    tokens[outcome.request_id].append(outcome.token_id)
        return [tokens[r.id] for r in requests]


def _shuffled(cache: PagedCache | None) -> list[int]:
    return [] if cache is None else np.random.default_rng(5).permutation(cache.num_blocks).tolist()


def _take(free: list[int], count: int) -> np.ndarray:
    assert len(free) >= count, "the rig is out of blocks"
    taken = [free.pop() for _ in range(count)]
    return np.asarray(taken, dtype=np.int32)


def make_request(
    request_id: int,
    prompt: Sequence[int],
    *,
    seed: int = 0,
    images: tuple[ImageItem, ...] = (),
    rules: TokenRules = NO_RULES,
    **sampling: Any,
) -> Request:
    sampling.setdefault("temperature", 0.0)
    return Request(
        RequestId(request_id),
        tuple(prompt),
        SamplingParams(**sampling),
        max_new_tokens=16,
        seed=seed,
        arrival_s=0.0,
        images=images,
        eos_token_ids=(2,),
        rules=rules,
    )


def make_picture(name: str, fill: int, start: int, *, width: int = 8) -> tuple[ImageItem, PixelPayload]:
    digest = ImageDigest(name.encode().ljust(32, b"."))
    item = ImageItem(digest, width, 8, IMAGE_TOKENS, IMAGE_TOKENS, start, (1, 1, IMAGE_TOKENS))
    return item, PixelPayload(digest, width, 8, bytes([fill]) * (width * 8 * 3))
