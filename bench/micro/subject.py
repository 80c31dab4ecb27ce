"""A loaded model with what its stages need, on any device: batches of pictures, prompts and decodes, ready to run.

Inputs are planned from the shapes alone, as `worker/language/batches.py` does from requests: every request has blocks
of its own, shuffled over the cache, and the cache holds random numbers. Does not know time or floors.
"""

from __future__ import annotations

import argparse
import gc
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar
from unittest.mock import patch

import torch
from torch import Tensor

from bench.micro.ceilings import measure, show
from bench.micro.floors import Ceilings, Matrices
from bench.micro.harness import Report
from bench.micro.machine import on_gpu
from bench.micro.steps import BLOCK, Row, Step
from hydra_engine.backend import select
from hydra_engine.backend.base import Backend, PagedCache
from hydra_engine.backend.device import Lane
from hydra_engine.backend.select import create_backend, resolve_dtype, weights_dtype
from hydra_engine.config import DEMO_MODEL, EngineConfig
from hydra_engine.core.instances import EPD
from hydra_engine.core.options import SpecOptions
from hydra_engine.errors import BackendError, HydraError
from hydra_engine.models.build import load_model
from hydra_engine.models.layers.vision import VisionInput
from hydra_engine.models.specs.base import ModelSpec
from hydra_engine.models.specs.registry import load_spec
from hydra_engine.models.vlm import VisionLanguageModel
from hydra_engine.worker.vision.graphs import EncodeGraphs

IMAGE_BLOCK = 64
_PIECE = 1 << 28  # numbers drawn at once

T = TypeVar("T")


def directory_of(name: str) -> Path:
    """Path of a model directory, of "demo" or of a shape that ships without weights. Raises SystemExit if there is
    none."""
    directory = EngineConfig(model=name).model_path
    if not directory.is_dir():
        raise SystemExit(f"--model: there is no model {name!r}; give a directory, {DEMO_MODEL!r} or a shape's name")
    return directory


def default_models(device: torch.device) -> str:
    return "llava-1.5-7b,qwen2-vl-7b,qwen2.5-vl-7b" if on_gpu(device) else DEMO_MODEL


def in_lane(lane: Lane, job: Callable[[], T]) -> Future[T]:
    """The job's result, computed in the lane under inference mode."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            with torch.inference_mode():
                result = job()
        except BaseException as error:  # noqa: BLE001 - handed to whoever waits
            future.set_exception(error)
        else:
            future.set_result(result)

    lane.submit(run)
    return future


def noise(num_layers: int) -> float:
    """Distance of two right results of so many random layers in 16 bits, as `agree` counts it. Measured against
    transformers, it grows by one or two hundredths a layer. Two unrelated results are 1.4 apart."""
    return min(0.5, 0.05 + 0.02 * num_layers)


class Subject:
    """A model on a device. Weights are read where the directory has some and drawn where it has none."""

    def __init__(self, name: str, directory: Path, backend: Backend, quantization: str = "auto") -> None:
        self.name, self.directory, self.backend = name, directory, backend
        self.spec: ModelSpec = load_spec(directory, SpecOptions(quantization=quantization)).held_on(backend.device.name)
        self.random = not any(directory.glob("*.safetensors"))
        assert not self.spec.language.has_states, "models with recurrent states are not measured here"
        model = load_model(directory, self.spec, backend, EPD, random_weights=self.random)
        assert isinstance(model, VisionLanguageModel)
        self.model = model
        self.device = backend.device.torch_device
        self.width = backend.dtype.itemsize
        self._generator = torch.Generator(self.device).manual_seed(0)

    @property
    def matrices(self) -> Matrices:
        """Bytes of a weight of the decoder's layers, and of its head, as they are kept."""
        kept = self.spec.at_load or self.spec.quantization
        width = weights_dtype(self.backend.dtype, self.spec.dtype, device=self.backend.device.name).itemsize
        layers = kept.bytes_per_weight if kept is not None and kept.stays_quantized else width
        return layers, 1 if self.spec.at_load else width

    @property
    def on_gpu(self) -> bool:
        return on_gpu(self.device)

    @property
    def served_context(self) -> int:
        """Tokens that an engine's block tables have room for, unless its configuration says otherwise or its caches
        hold fewer."""
        return self.spec.language.max_position

    @property
    def free_bytes(self) -> int:
        return self.backend.device.memory()[0]

    def random_like(self, shape: Sequence[int], dtype: torch.dtype | None = None) -> Tensor:
        """Normal numbers, drawn in pieces: some devices draw in float32 first."""
        data = torch.empty(tuple(shape), dtype=dtype or self.backend.dtype, device=self.device)
        for piece in data.view(-1).split(_PIECE):
            piece.normal_(generator=self._generator)
        return data

    # ---- caches

    def kv_bytes(self, rows: Iterable[Row]) -> int:
        return sum(row.num_blocks for row in rows) * BLOCK * self.spec.language.kv_bytes_per_token(self.width)

    def kv_cache(self, rows: int, tokens: int) -> PagedCache:
        """A cache for `rows` requests of up to `tokens` tokens."""
        return self.kv_cache_of([Row(0, tokens)] * rows)

    def kv_cache_of(self, rows: Iterable[Row]) -> PagedCache:
        language, blocks = self.spec.language, sum(row.num_blocks for row in rows)
        return PagedCache(
            self.random_like((blocks, language.num_kv_layers, 2, BLOCK, language.num_kv_heads, language.head_dim))
        )

    def image_cache(self, tokens: int) -> PagedCache:
        vision = self.spec.vision
        assert vision is not None
        shape = (-(-tokens // IMAGE_BLOCK), vision.num_planes, 1, IMAGE_BLOCK, 1, vision.feature_size)
        return PagedCache(self.random_like(shape))

    # ---- the tower

    def encode(self, count: int, picture: tuple[int, int], cache: PagedCache) -> Encode:
        return Encode(self, count, picture, cache)

    # ---- the decoder

    def language(self, rows: Sequence[Row], cache: PagedCache) -> Step:
        return Step(self, rows, cache)


class Encode:
    """`count` pictures of one size, different in content, to the first slots of an image cache."""

    def __init__(self, subject: Subject, count: int, picture: tuple[int, int], cache: PagedCache) -> None:
        vision = subject.spec.vision
        assert vision is not None
        self._subject, self._model, self.cache = subject, subject.model, cache
        self.items = [item for _ in range(count) for item in vision.plan_image(*picture).items]
        shapes = [(item.num_pictures, item.height, item.width, 3) for item in self.items]
        generator = torch.Generator().manual_seed(1)
        self.pixels = tuple(
            torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator).to(subject.device) for shape in shapes
        )
        self.num_tokens = sum(item.num_tokens for item in self.items)
        self.slots = torch.arange(self.num_tokens, device=subject.device)
        grids = tuple(item.grid for item in self.items)
        self.inputs = VisionInput(
            self.pixels, (picture,) * len(self.items), grids, self.slots, send=subject.backend.device.send
        )

    def __call__(self) -> None:
        self._model.encode(self.inputs, self.cache)

    def graph(self) -> Callable[[], None] | str:
        """The engine's replay of it on any partition, with all that it does beside the graph; captured by the calling
        lane. Or why there is none."""
        subject, tower = self._subject, self._model.tower
        if not subject.on_gpu:
            return "this device has no graphs"
        assert tower is not None, "models without a tower encode nothing"
        num_patches = sum(item.num_patches for item in self.items)
        graphs = EncodeGraphs(tower, subject.backend, self.cache, (num_patches,))
        try:
            graphs.prepare()
            for partition, size in graphs.capture_order:
                graphs.capture(partition, size)
        except BackendError as error:
            return str(error)[:200]
        slots = self.slots.cpu().numpy()
        if not graphs.replay(self.inputs, slots, num_patches):
            return "no graph of the engine takes this encode"

        def replay() -> None:
            graphs.replay(self.inputs, slots, num_patches)

        return replay

    def features(self) -> Tensor:
        """[tokens, C] of the first plane, as they are in the cache now."""
        data = self.cache.data
        return data[:, 0, 0, :, 0].reshape(-1, data.shape[-1])[: self.num_tokens]


def create(name: str, arguments: argparse.Namespace, sharing: Sharing | None = None) -> Subject:
    """The model called `name` on the device of the arguments. Raises HydraError where that cannot be divided so."""
    directory = directory_of(name)
    dtype = dtype_of(directory, arguments.device)
    return Subject(Path(name).name, directory, backend_of(arguments, dtype, sharing), arguments.quantization)


def backend_of(arguments: argparse.Namespace, dtype: torch.dtype, sharing: Sharing | None = None) -> Backend:
    """Batch-invariant on a processor, where that costs nothing, and elsewhere if asked for."""
    priority, split = sharing or Sharing()
    with patch.object(select, "priorities", lambda *_: PRIORITIES[priority]) if priority else nullcontext():
        return create_backend(
            arguments.device,
            dtype,
            deterministic=arguments.device == "cpu" or arguments.deterministic,
            threads=arguments.threads,
            sm_split=split,
        )


def dtype_of(directory: Path, device: str) -> torch.dtype:
    """The dtype in which the engine would compute."""
    return torch.bfloat16 if device.startswith("cuda") else resolve_dtype("auto", load_spec(directory).dtype)[0]


def run_ops(bench: str, arguments: argparse.Namespace, job: Callable[[Report, Backend], None]) -> None:
    """Measures the ceilings, then runs `job` in a language lane of the device, without a model; the document is the
    last line of the output. The dtype is that of the demo model there."""
    dtype = dtype_of(directory_of(DEMO_MODEL), arguments.device)
    backend, ceilings = _begin(arguments, dtype)
    with Report(bench, arguments, ceilings) as report:
        _in_own_lane(backend, partial(job, report, backend))


def run_bench(bench: str, arguments: argparse.Namespace, job: Callable[[Report, Subject], None]) -> None:
    """Runs `job` like `run_ops`, for every model of the arguments, one at a time and in a lane of its own."""

    def in_lane_of_its_own(report: Report, subject: Subject, _: Sharing) -> None:
        _in_own_lane(subject.backend, partial(job, report, subject))

    run_models(bench, arguments, in_lane_of_its_own)


def run_together(
    benches: Mapping[str, tuple[argparse.Namespace, Callable[[argparse.Namespace, Report, Any], None]]],
    model: str | None,
) -> list[str]:
    """Several benchmarks by name, each with its arguments and its job, over one subject, whose weights are drawn once,
    or without a model over one backend. Their ceilings are measured once. One that fails takes nothing from the next,
    unless the device has failed. A sentence for each that did not come to a good end."""
    first, _ = next(iter(benches.values()))
    backend, ceilings = _begin(first, dtype_of(directory_of(model or DEMO_MODEL), first.device))
    subject = None if model is None else create(model, first)
    problems: list[str] = []

    def all_of_them() -> None:
        for bench, (arguments, job) in benches.items():
            try:
                with Report(bench, arguments, ceilings) as report:
                    report.note("models", [] if model is None else [model])
                    job(arguments, report, subject or backend)
            except (Exception, SystemExit) as error:  # noqa: BLE001 - the report has written what it was
                problems.append(f"{bench}: {error}")
                if first.device.startswith("cuda"):
                    torch.cuda.synchronize(first.device)  # raises where the device has failed
            release(torch.device(first.device))

    _in_own_lane(backend if subject is None else subject.backend, all_of_them)
    return problems


class Sharing(NamedTuple):
    """Division of a GPU between two lanes: the priorities of their streams, and the language lane's multiprocessors in
    each partition."""

    priority: str = ""  # a key of PRIORITIES; "": as the engine has them
    split: tuple[int, ...] = ()


PRIORITIES: dict[str, dict[str, int]] = {
    "equal": {},
    "language": {"language": -1},
}  # of lanes' streams, 0 where one is not named


def run_models(
    bench: str,
    arguments: argparse.Namespace,
    job: Callable[[Report, Subject, Sharing], None],
    sharings: Sequence[Sharing] = (Sharing(),),
) -> None:
    """Does what `run_bench` does, for a job that makes its lanes itself, once for each of `sharings`, of which the job
    gets what the device can do. Graphs keep the priority of the stream that they are captured on, so each has a model
    of its own."""
    device = torch.device(arguments.device)
    names = (arguments.model or default_models(device)).split(",")
    _, ceilings = _begin(arguments, dtype_of(directory_of(names[0]), arguments.device))
    with Report(bench, arguments, ceilings) as report:
        report.note("models", names)
        for name in names:
            for wanted in sharings:
                subject, sharing = _sharing(report, name, arguments, wanted)
                job(report, subject, sharing)
                del subject
                release(device)


def _sharing(report: Report, name: str, arguments: argparse.Namespace, wanted: Sharing) -> tuple[Subject, Sharing]:
    """The subject, without a split where the device cannot be divided so, and the sharing that it has."""
    if wanted.split:
        try:
            return create(name, arguments, wanted), wanted
        except HydraError as error:
            report.skip(f"{name} on parts of the device", error.message)
    whole = wanted._replace(split=())
    return create(name, arguments, whole), whole


def _begin(arguments: argparse.Namespace, dtype: torch.dtype) -> tuple[Backend, Ceilings]:
    """A backend sets this thread's number of threads, under which the ceilings are measured."""
    torch.manual_seed(arguments.seed)
    if arguments.device.startswith("cuda"):
        torch.cuda.set_device(arguments.device)
    backend = backend_of(arguments, dtype)
    with torch.inference_mode():
        ceilings = measure(torch.device(arguments.device), dtype, quick=arguments.quick, known=arguments.ceilings)
    print(show(ceilings), flush=True)
    # What is loaded by now stays: `release` passes over it, which it does once a case.
    gc.collect()
    gc.freeze()
    return backend, ceilings


def _in_own_lane(backend: Backend, job: Callable[[], None]) -> None:
    lane = backend.device.lane("language")
    try:
        in_lane(lane, job).result()
    finally:
        lane.close()


def release(device: torch.device) -> None:
    """Returns unreferenced memory to the device."""
    gc.collect()
    if on_gpu(device):
        torch.cuda.empty_cache()
