"""Measures once which attention kernels are fastest on this device for this model, and keeps the result on disk, beside
the planner's step times. A measurement is valid until the GPU, its driver, a library, the engine's version, the dtype
or the model's shapes change.

Measures decodes over a cache larger than any L2, a chunk of a prompt, and pictures and windows of the tower, each
captured as a graph, so that the host's launch time does not count. Each use case has its own winner. Kernels that fail,
or whose results differ from ours, are left out. Does not know the model's weights, nor how steps are mixed.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import logging
import math
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from functools import partial
from math import prod
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
import torch
import triton
from torch import Tensor

from hydra_engine import __version__, profile_file
from hydra_engine.backend.base import AttentionPlan, PagedCache, Segments
from hydra_engine.backend.cuda import flashinfer_kernels
from hydra_engine.backend.cuda.attention import CudaAttention
from hydra_engine.backend.cuda.attention_choice import (
    CAPTURED_PICTURES,
    CAPTURED_WINDOWS,
    DECODES,
    FLASHINFER,
    FLASHINFER_FA2,
    FLASHINFER_FA3,
    PICTURES,
    PROMPTS,
    TRITON,
    TRITON_TMA,
    WINDOWS,
    ChosenAttention,
    Heads,
    Measured,
    Shapes,
    Tower,
    choose_by_time,
    flashinfer_missing,
    flashinfer_problem,
)
from hydra_engine.backend.cuda.flashinfer_attention import FlashInferAttention
from hydra_engine.backend.cuda.graphs import GraphPools
from hydra_engine.backend.cuda.tower_attention import Kernel, kernels
from hydra_engine.backend.device import Device
from hydra_engine.errors import BackendError
from hydra_kernels.tma_attention import can_read_cache

logger = logging.getLogger(__name__)

SCHEMA = 1
_LIBRARIES = ("triton", "flashinfer-python", "nvidia-cudnn-cu13")
_LONGEST_S = 60.0  # a longer measured call is refused as damaged


class Key(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Conditions of a measurement, which is valid only while all are equal.

    driver: the newest CUDA version that the GPU's driver supports. libraries: versions by package, "" if not installed,
    and FlashInfer's compiled kernels. engine: version of hydra-engine. schema: version of the file.
    """

    gpu: str
    capability: tuple[int, int]
    num_sms: int
    driver: int
    libraries: dict[str, str]
    dtype: str
    shapes: Shapes
    engine: str = __version__
    schema: int = SCHEMA


class _Kept(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A measurement with its key, as in the file on disk."""

    key: Key
    measured: Measured


def key_of(device: torch.device, num_sms: int, driver: int, dtype: torch.dtype, shapes: Shapes) -> Key:
    """The key of a measurement that is made now on `device`. driver: as in `Key`."""
    return Key(
        gpu=torch.cuda.get_device_name(device),
        capability=torch.cuda.get_device_capability(device),
        num_sms=num_sms,
        driver=driver,
        libraries={"torch": str(torch.__version__), "flashinfer's kernels": flashinfer_kernels.describe_installed()}
        | {name: _version(name) for name in _LIBRARIES},
        dtype=str(dtype).removeprefix("torch."),
        shapes=shapes,
    )


def file_of(folder: Path, key: Key) -> Path:
    """The file of a GPU, dtype and shapes. Keys that differ in versions alone share it: a new measurement replaces an
    outdated one."""
    lasting = msgspec.json.encode((key.gpu, key.num_sms, key.dtype, key.shapes))
    return folder / f"attention-{hashlib.blake2b(lasting, digest_size=8).hexdigest()}.json"


def load_measurement(folder: Path, key: Key) -> Measured | None:
    """The measurement of `key` in `folder`; None if there is no file or it cannot be used, which is logged with the
    reason."""
    try:
        kept = profile_file.read(file_of(folder, key), _Kept)
        if kept is None:
            return None
        _check_numbers(kept.measured)
        if kept.key != key:
            raise profile_file.Refused(f"it was measured with {_difference(kept.key, key)}")
    except profile_file.Refused as reason:
        logger.warning("the kept choice of attention kernels is not used: %s; they are measured again", reason)
        return None
    return kept.measured


def save_measurement(folder: Path, key: Key, measured: Measured) -> None:
    """Writes the measurement for `load_measurement`. If the file cannot be written, logs a warning and returns."""
    try:
        profile_file.write(file_of(folder, key), _Kept(key, measured))
    except OSError as error:
        logger.warning("the choice of attention kernels could not be kept: %s; the next start measures again", error)


def utc_date() -> str:
    """The present date in UTC, as 2026-01-31."""
    return datetime.now(UTC).strftime("%Y-%m-%d")


def _check_numbers(measured: Measured) -> None:
    """Raises Refused if a use case has no time of TRITON, or a time is not above 0 and at most _LONGEST_S."""
    for use, seconds in measured.seconds.items():
        if TRITON not in seconds:
            raise profile_file.Refused(f"it has no time of ours for {use[:20]}")
        for value in seconds.values():
            if not (math.isfinite(value) and 0 < value <= _LONGEST_S):
                raise profile_file.Refused(f"a number is out of range: {value:g} s")


def _difference(then: Key, now: Key) -> str:
    """The fields of `then` that differ from `now`, with the values of `then`, cut to 80 characters each."""
    names = [name for name in Key.__struct_fields__ if getattr(then, name) != getattr(now, name)]
    return ", ".join(f"{name} {str(getattr(then, name))[:80]}" for name in names)


def _version(name: str) -> str:
    """The version of an installed package; "" if it is not installed."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""


CACHE_BYTES = 256 << 20
NUM_ROWS = 32
MAX_CONTEXT = 4096
CHUNK, CHUNK_CONTEXT = 1024, 2048
TOWER_ROWS = 4096
NUM_EMPTY = 64  # empty segments after the real ones: a captured encode has spare room for more
LAUNCHES = 8  # calls per graph, like layers
REPLAYS = 5
RESOLUTION_S = 5e-7  # of CUDA's events
TOLERANCE = 0.05  # of the largest result; kernels of these types differ by about a hundredth
# Factor on queries: a few keys then dominate a result, and one key too many or too few is seen.
PEAKED = 4.0
_FAILURES = (
    *(BackendError, RuntimeError, OSError, ImportError, ValueError, TypeError, AttributeError, AssertionError),
    *(LookupError, ArithmeticError, triton.TritonError),
)

Launch = Callable[[], None]
Seconds = Callable[[Launch], float]  # device seconds of a launch
Attend = Callable[[], Tensor]
Attention = CudaAttention | FlashInferAttention


class Case(NamedTuple):
    """A use case of paged attention: `rows` rows of `num_q` queries, which are the last of the row's `num_context`
    tokens."""

    use: str
    rows: int
    num_q: int
    num_context: int


class Refusal(Exception):
    """Raised with the reason if a candidate cannot compute the case."""


class Candidate(NamedTuple):
    """A kernel to compare with Triton. make: prepares its call for a use case, outside of the time that is measured."""

    name: str
    make: Callable[[], Attend]  # may raise anything; Refusal if it cannot compute the case


class Site(NamedTuple):
    """The device that attention is measured on. send: `Device.send`."""

    device: torch.device
    num_sms: int
    send: Callable[..., tuple[Tensor, ...]]

    def triton(self, *, tma_prompts: bool = False) -> CudaAttention:
        """Returns attention by Triton, not deterministic. tma_prompts: as in `CudaAttention`."""
        return CudaAttention(self.device, self.num_sms, self.send, deterministic=False, tma_prompts=tma_prompts)

    def flashinfer(self, prompts: str = "auto") -> FlashInferAttention:
        """Returns attention by FlashInfer, which must be installed. prompts: as in `FlashInferAttention`."""
        return FlashInferAttention(self.device, self.num_sms, self.send, self.triton(), prompts=prompts)


def choose_attention(
    device: Device, num_sms: int, dtype: torch.dtype, shapes: Shapes, folder: Path | None, driver: int
) -> ChosenAttention:
    """Returns the fastest kernels for this device and model, measured unless `folder` has a valid measurement.

    Call it in inference mode, in a thread on the default stream. A new measurement is written to `folder`, unless that
    is None, and the memory that it took is freed. If Triton itself cannot be measured, as when memory runs out, selects
    it for all use cases and says so in the note. driver: as in `Key`.
    """
    on = device.torch_device
    key = key_of(on, num_sms, driver, dtype, shapes)
    measured = None if folder is None else load_measurement(folder, key)
    if measured is None:
        try:
            with torch.cuda.device(on):
                site = Site(on, num_sms, device.send)
                measured = measure(site, dtype, shapes, partial(captured_seconds, GraphPools(on)))
        except _FAILURES as error:
            return ChosenAttention(note=f"attention: triton; it could not be measured ({_first_line(error)})")
        finally:
            device.finish()
            device.trim()
        if folder is not None:
            save_measurement(folder, key, measured)
    return choose_by_time(measured)


def measure(site: Site, dtype: torch.dtype, shapes: Shapes, seconds: Seconds) -> Measured:
    """Times the candidates of all use cases of `shapes`, on random inputs. Allocates a cache of about CACHE_BYTES.
    seconds: measures a launch. An error of Triton itself is raised, one of another candidate is recorded."""
    result = Measured({}, {}, utc_date())
    if shapes.language is not None:
        cache = random_cache(shapes.language, dtype, site.device)
        for case in cases(cache):
            ours = prepared(site.triton(), case, cache, shapes.language)
            compare(case.use, ours, paged_candidates(site, case, cache, shapes.language), seconds, result)
    if shapes.tower is not None:
        by_triton = site.triton()
        for use, rows, segments in tower_cases(by_triton, shapes.tower, site.device):
            q, k, v = tower_rows(shapes.tower, rows, dtype, site.device)
            attend = partial(by_triton.attend_packed, q, k, v, segments, shapes.tower.head_dim**-0.5)
            candidates = packed_candidates(site, by_triton, shapes.tower, q, k, v, segments)
            compare(use, attend, candidates, seconds, result)
    return result


def compare(use: str, ours: Attend, candidates: Iterator[Candidate], seconds: Seconds, result: Measured) -> None:
    """Times Triton and each candidate that agrees with it, and writes seconds per call and reasons into `result`.

    ours: Triton's call; what it raises is raised. What a candidate raises becomes the reason why it is left out.
    """
    expected = ours()
    times = result.seconds[use] = {TRITON: seconds(_repeated(ours)) / LAUNCHES}
    left_out = result.left_out[use] = {}
    for candidate in candidates:
        try:
            attend = candidate.make()
            # Its output may reuse memory with our result in it: rows that it does not write must differ.
            poison = [torch.full_like(expected, float("nan")) for _ in range(4)]
            del poison
            if _agree(attend(), expected):
                times[candidate.name] = seconds(_repeated(attend)) / LAUNCHES
            else:
                left_out[candidate.name] = "other results"
        except Refusal as reason:
            left_out[candidate.name] = str(reason)
        except _FAILURES as error:
            # FlashInfer compiles its kernels at first use, which needs a compiler and a cache folder.
            left_out[candidate.name] = _first_line(error)


def cases(cache: PagedCache) -> tuple[Case, ...]:
    """The use cases of paged attention that are measured: NUM_ROWS decodes, and a chunk of one prompt. Contexts fit the
    cache."""
    context = min(MAX_CONTEXT, cache.num_blocks // NUM_ROWS * cache.block_size)
    chunk_context = min(CHUNK_CONTEXT, cache.num_blocks * cache.block_size)
    return (
        Case(DECODES, NUM_ROWS, 1, context),
        Case(PROMPTS, 1, min(CHUNK, chunk_context), chunk_context),
    )


def paged_candidates(site: Site, case: Case, cache: PagedCache, heads: Heads) -> Iterator[Candidate]:
    """Yields the kernels to compare with Triton: for decodes FlashInfer's; for prompts Triton's with TMA descriptors,
    and FlashInfer's FA2 and FA3."""

    def deferred(make: Callable[[], Attention]) -> Callable[[], Attend]:
        """Makes the attention only when the candidate is prepared."""
        return lambda: prepared(make(), case, cache, heads)

    def by_flashinfer(kernel: str) -> FlashInferAttention:
        """Makes FlashInfer's attention. Raises Refusal if it cannot compute the case, or has no such kernel."""
        dtype, head_dim = cache.data.dtype, heads.head_dim
        problem = flashinfer_problem(dtype, head_dim, heads.block_size) or flashinfer_missing()
        if problem := problem or flashinfer_kernels.installed().reason_missing(kernel, dtype, head_dim):
            raise Refusal(problem)
        return site.flashinfer("auto" if case.use == DECODES else kernel)

    def by_descriptors() -> CudaAttention:
        """Makes Triton's attention with TMA descriptors. Raises Refusal if these cannot read the cache."""
        if not can_read_cache(cache.data[:, 0, 0], cache.data[:, 0, 1]):
            raise Refusal("needs a Hopper GPU and a block_size of 64 or 128")
        return site.triton(tma_prompts=True)

    if case.use == DECODES:
        kernel = flashinfer_kernels.decode_kernel(heads.heads, heads.kv_heads, heads.head_dim)
        yield Candidate(FLASHINFER, deferred(partial(by_flashinfer, kernel)))
    else:
        yield Candidate(TRITON_TMA, deferred(by_descriptors))
        for name, kernel in ((FLASHINFER_FA2, "fa2"), (FLASHINFER_FA3, "fa3")):
            yield Candidate(name, deferred(partial(by_flashinfer, kernel)))


def tower_cases(by_triton: CudaAttention, tower: Tower, device: torch.device) -> Iterator[tuple[str, int, Segments]]:
    """Yields (use, rows, segments): pictures, and windows if the tower has them, each of about TOWER_ROWS rows in
    total.

    Captured use cases have the same segments planned on the device, with NUM_EMPTY empty ones after them as padding and
    only a bound on the length of a segment.
    """
    for length, use, captured in (
        (min(tower.rows, TOWER_ROWS), PICTURES, CAPTURED_PICTURES),
        (tower.window, WINDOWS, CAPTURED_WINDOWS),
    ):
        if length:
            count = max(1, TOWER_ROWS // length)
            bounds = [length * i for i in range(count + 1)]
            yield use, bounds[-1], bounds
            padded = torch.tensor(bounds + bounds[-1:] * NUM_EMPTY, dtype=torch.int32, device=device)
            longest = bounds[-1] if use == PICTURES else length
            yield captured, bounds[-1], by_triton.plan_packed(padded, longest)


def packed_candidates(
    site: Site, by_triton: CudaAttention, tower: Tower, q: Tensor, k: Tensor, v: Tensor, segments: Segments
) -> Iterator[Candidate]:
    """Yields the kernels to compare with Triton for packed attention of q, k and v; FlashInfer's only if it is
    installed."""
    by_flashinfer = None if flashinfer_missing() else site.flashinfer()

    def of_rows(kernel: Kernel) -> Attend:
        """Binds the kernel to q, k, v and the segments. Raises Refusal if it does not support them."""
        if not kernel.supports(q, k, v, segments):
            raise Refusal("does not take these shapes")
        return partial(kernel.attend, q, k, v, segments, tower.head_dim**-0.5)

    for name, kernel in kernels(by_triton, by_flashinfer).items():
        yield Candidate(name, partial(of_rows, kernel))


def random_cache(heads: Heads, dtype: torch.dtype, device: torch.device, num_bytes: int = CACHE_BYTES) -> PagedCache:
    """A cache of one layer of random values, with blocks for NUM_ROWS contexts of MAX_CONTEXT tokens, or as many as fit
    `num_bytes`, but at least NUM_ROWS blocks."""
    block = (1, 2, heads.block_size, heads.kv_heads, heads.head_dim)
    most = -(-MAX_CONTEXT // heads.block_size) * NUM_ROWS
    num_blocks = max(NUM_ROWS, min(most, num_bytes // (prod(block) * dtype.itemsize)))
    return PagedCache(torch.randn((num_blocks, *block), dtype=dtype, device=device))


def captured_seconds(pools: GraphPools, launch: Launch) -> float:
    """Captures `launch` and returns the device seconds of a replay: the minimum of REPLAYS, at least RESOLUTION_S.
    Waits for the replays."""
    graph = pools.capture(launch)
    graph.replay()
    times = []
    for _ in range(REPLAYS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3)
    return max(min(times), RESOLUTION_S)


def tower_rows(tower: Tower, rows: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Random q, k and v [rows, H, D], views of one projection; q is multiplied by PEAKED."""
    q, k, v = torch.randn((rows, 3, tower.heads, tower.head_dim), dtype=dtype, device=device).unbind(1)
    q.mul_(PEAKED)
    return q, k, v


def prepared(attention: Attention, case: Case, cache: PagedCache, heads: Heads) -> Attend:
    """Plans the case and returns a function that computes its attention, [rows * num_q, Hq, D], of the same random
    queries at each call."""
    data = cache.data
    shape = (case.rows * case.num_q, heads.heads, heads.head_dim)
    q = PEAKED * torch.randn(shape, generator=torch.Generator().manual_seed(1))
    q = q.to(device=data.device, dtype=data.dtype)
    plan = _planned(attention, case, cache)
    return lambda: attention.paged(q, cache, 0, plan, float(heads.head_dim**-0.5))


def _planned(attention: Attention, case: Case, cache: PagedCache) -> AttentionPlan:
    """A plan of the case over the cache's blocks in random order. Decodes are planned for capture, and refreshed if the
    plan requires that."""
    width = -(-case.num_context // cache.block_size)
    context = np.full(case.rows, case.num_context, dtype=np.int32)
    order = np.random.default_rng(1).permutation(cache.num_blocks).astype(np.int32)
    tables = order[: case.rows * width].reshape(case.rows, width)
    if case.num_q > 1:
        bounds = np.arange(case.rows + 1, dtype=np.int32) * np.int32(case.num_q)
        return attention.plan(*(torch.from_numpy(array) for array in (bounds, context, tables)))
    plan = attention.plan_decode(*(torch.from_numpy(array).to(cache.data.device) for array in (context, tables)))
    if plan.refresh is not None:
        plan.refresh(context, tables)
    return plan


def _repeated(attend: Attend) -> Launch:
    """Returns a function that calls `attend` LAUNCHES times."""

    def launch() -> None:
        for _ in range(LAUNCHES):
            attend()

    return launch


def _first_line(error: Exception) -> str:
    """First line of the error's message, cut to 80 characters; the class name if there is no message."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:80]


def _agree(given: Tensor, expected: Tensor) -> bool:
    """True if no element differs by more than TOLERANCE times the largest expected magnitude; False if one is NaN."""
    furthest = (given.float() - expected.float()).abs().max()
    return bool(furthest <= TOLERANCE * expected.float().abs().max())
