"""Loads a model through transformers and checks that it computes in the engine's stages what it computes by itself.

transformers builds no more layers for a checkpoint, nor other modules, than its tensors can be of: a decoder and a
tower are counted before anything is built; all else that a config multiplies is counted while transformers builds.

No list names the models that the generic adapter can run: each answers a prompt when it is loaded, by its own forward,
in the engine's stages, and there beside another request, and is refused if the logits differ. Reads only safetensors.
"""

from __future__ import annotations

import itertools
import re
import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_module_registration_hook

from hydra_engine.backend.base import Backend, PagedCache
from hydra_engine.core.instances import Role
from hydra_engine.errors import CheckpointError
from hydra_engine.models.layers.decoder import LanguageInput
from hydra_engine.models.layers.vision import VisionInput
from hydra_engine.models.loading.checkpoint import list_names
from hydra_engine.models.loading.parameters import too_many_layers
from hydra_engine.models.loading.safetensors_checkpoint import SafetensorsCheckpoint
from hydra_engine.models.loading.weights import Progress, all_finite
from hydra_engine.models.specs.base import SPAN_TOKEN_IDS, ModelSpec
from hydra_transformers.classes import cannot_run, load_config, model_class, quiet_logging
from hydra_transformers.describe import probe_picture
from hydra_transformers.model import GenericModel
from hydra_transformers.processor import PictureProcessor, TokenTypes
from hydra_transformers.rope import Grid, positions_on
from hydra_transformers.spec import PROCESSOR_ERRORS, describe_error
from hydra_transformers.surgery import accepts, set_attention

_NUMBERED = re.compile(r"(.+?)\.(0|[1-9][0-9]{0,8})\.")
_TOWERS = re.compile(r"vis(ion|ual)|image|audio")  # in names of lists that are no decoder's
_FIELDS = ("num_hidden_layers", "depth")
# Modules for each tensor, and in any case: those without tensors, and models whose files keep many modules' in one.
_PER_TENSOR, _FREE = 8, 10_000


def check_counts(config: Any, names: Collection[str]) -> None:
    """Raises CheckpointError if the decoder or a tower has more layers than any module list in the weights."""
    lists: dict[str, set[int]] = {}
    for found in filter(None, map(_NUMBERED.match, names)):
        lists.setdefault(found[1], set()).add(int(found[2]))
    most = max(map(len, lists.values()), default=0)
    towers = [name for name in lists if _TOWERS.search(name)]
    parts = [(config.get_text_config(decoder=True), [name for name in lists if not _TOWERS.search(name)])]
    parts += [(getattr(config, name, None), towers) for name in type(config).sub_configs if "vision" in name]
    for part, own in parts:
        for name in _FIELDS:
            count = getattr(part, name, None)
            if type(count) is int and count > most:
                named = max(own or lists, default="layers", key=lambda name: len(lists[name]))
                raise too_many_layers(count, name, named[:120], lists.get(named, ()))


@contextmanager
def bounded_modules(num_tensors: int) -> Iterator[None]:
    """Limits, on this thread, the number of modules built to what `num_tensors` tensors may belong to. Raises
    CheckpointError beyond that."""
    most, built, thread = _FREE + _PER_TENSOR * num_tensors, 0, threading.get_ident()

    def count(_module: nn.Module, _name: str, _part: nn.Module | None) -> None:
        nonlocal built
        if threading.get_ident() == thread:
            built += 1
            if built > most:
                raise CheckpointError(
                    f"config.json describes more than {most} modules, and the weights hold {num_tensors} tensors; use "
                    "the config.json that came with the weights"
                )

    handle = register_module_module_registration_hook(count)
    try:
        yield
    finally:
        handle.remove()


_SIZES = ((64, 64), (96, 64))  # of its pictures
_TEXTS = ("What is in this picture", " and in this one?")  # after the pictures
_NUM_TOKENS = 24  # of text-only models
_NUM_BESIDE = 7  # tokens of the other request in a step
_BLOCK = 16
# Outputs of processors for training: with them models return a loss.
_NO_INPUTS = ("labels",)
# Outputs that have a number for each token and are known by other means: positions, and pictures that see themselves.
_KNOWN = ("input_ids", "attention_mask", "mm_token_type_ids", "token_type_ids")


@dataclass(frozen=True, slots=True)
class Probe:
    """A prompt of pictures, each followed by a text, or of text alone."""

    inputs: Mapping[str, Tensor]  # for the model's own forward
    spans: Sequence[tuple[int, int]]  # of each picture, [first row, end)
    arrays: Sequence[Mapping[str, Tensor]]  # of each picture, as payloads have them
    grids: Sequence[Grid] = ()  # of each picture
    token_types: Mapping[str, TokenTypes] = field(default_factory=dict)  # by the argument of the model's forward

    @classmethod
    def from_spec(cls, module: Any, spec: ModelSpec) -> Probe:
        if spec.processor is None:
            count = min(_NUM_TOKENS, spec.language.max_position - 1)  # as many as a prompt may have
            ids = torch.arange(count)[None] * 7 % spec.language.vocab_size
            return cls({"input_ids": ids, "attention_mask": torch.ones_like(ids)}, (), ())
        processor = PictureProcessor.from_spec(spec.processor)
        sizes = _SIZES if spec.processor.joins else _SIZES[:1]
        pictures = [probe_picture(size, turns) for turns, size in enumerate(sizes)]
        outputs = processor.outputs(*zip(pictures, _TEXTS, strict=False))
        ids = outputs["input_ids"][0]
        is_image = ids == spec.processor.image_token_id
        spans, arrays, grids, end = [], [], [], 0
        for picture in pictures:
            found = processor.expand(picture)
            begin = end + int(is_image[end:].nonzero()[0, 0])
            end = begin + found.num_tokens
            spans.append((begin, end))
            grids.append(found.grid)
            values = {name: torch.from_numpy(array) for name, array in found.arrays.items()}
            arrays.append({SPAN_TOKEN_IDS: ids[begin:end], **values})
        inputs = {
            name: value for name, value in outputs.items() if name not in _NO_INPUTS and accepts(module.forward, name)
        }
        names = [name for name, value in inputs.items() if name not in _KNOWN and value.shape == ids[None].shape]
        types = processor.token_types(names, _marks(module.config, spec), pictures[0]) if names else {}
        return cls(inputs, spans, arrays, grids, types)

    @property
    def token_ids(self) -> Tensor:
        return self.inputs["input_ids"][0]

    @property
    def rows(self) -> Tensor:
        """Rows whose logits are compared: the first of each picture, which depends on the picture only if its rows
        attend to each other, and the last of the prompt."""
        return torch.tensor([*(begin for begin, _ in self.spans), len(self.token_ids) - 1])

    def expected_logits(self, module: Any, dtype: torch.dtype) -> Tensor:
        """Returns [rows, V] float32 from the model's own forward, with eager attention, which omits no feature of a
        model. Leaves the module set to eager attention."""
        set_attention(module, "eager")
        device = next(module.parameters()).device
        inputs = {
            name: (value.to(dtype) if value.is_floating_point() else value).to(device)
            for name, value in self.inputs.items()
        }
        rows = self.rows.to(device)
        keeps = {"logits_to_keep": rows} if accepts(module.forward, "logits_to_keep") else {}
        logits: Tensor = module(**inputs, use_cache=False, **keeps).logits[0]
        return (logits if keeps else logits.index_select(0, rows)).float()


def _marks(config: Any, spec: ModelSpec) -> list[int]:
    """Returns the ids of the tokens that config.json names, those that stand for pictures and videos left out."""
    media = (spec.image_token_id, spec.placeholder_id, getattr(config, "video_token_id", None))
    named = (value for name, value in vars(config).items() if name.endswith("_token_id") and type(value) is int)
    return [id for id in named if id >= 0 and id not in media]


class PagedProbe:
    """Runs the probe in the engine's stages, with its own caches. Sets `num_slices` of the model."""

    def __init__(self, probe: Probe, model: GenericModel, spec: ModelSpec, backend: Backend) -> None:
        self._probe, self._model, self._spec, self._backend = probe, model, spec, backend
        self._device = backend.device.torch_device
        language, counts = spec.language, [end - begin for begin, end in probe.spans]
        self._images = self._cache(sum(counts), (1, 1), (1, language.hidden_size))
        shape = (language.num_layers, 2), (language.num_kv_heads, language.head_dim)
        self._keys = self._cache(len(probe.token_ids) + _BLOCK, *shape)
        ends = [end for _, end in probe.spans] or [len(probe.token_ids) // 2]
        self._pieces = [piece for piece in itertools.pairwise((0, *ends, len(probe.token_ids))) if piece[0] < piece[1]]
        self.layers: list[int] = []  # that write keys and values
        if not counts:
            return
        arrays = tuple({name: value.to(self._device) for name, value in each.items()} for each in probe.arrays)
        checkpoints: list[None] = []
        for index, one in enumerate(arrays):
            slots = torch.arange(sum(counts[:index]), sum(counts[: index + 1]), device=self._device)
            batch = VisionInput((), ((1, 1),), ((1, 1, 1),), slots, (one,), lambda: checkpoints.append(None))
            checkpoints.clear()
            model.encode(batch, self._images)
        model.num_slices = len(checkpoints) + 1

    def logits(self) -> Tensor:
        """Returns [rows, V] float32. Runs several steps, each ending after a picture, so that earlier tokens are known
        only through caches and positions."""
        steps = [self._model.step(self._step(*piece), self._keys, self._images) for piece in self._pieces]
        self.layers = steps[-1][1]
        return torch.cat([logits for logits, _ in steps])

    def logits_beside(self) -> Tensor:
        """Returns the last row's logits, [1, V] float32, from the last step run again after the rows of another
        request, which are at the end of the longest context."""
        beside = min(_NUM_BESIDE, self._spec.language.max_position)
        batch = self._step(*self._pieces[-1], beside)
        return self._model.step(batch, self._keys, self._images)[0][-1:]

    def _step(self, begin: int, end: int, beside: int = 0) -> LanguageInput:
        """Builds a step of tokens [begin, end) with the logits of the compared rows among them, after `beside` rows of
        another request, whose keys are in the last block."""
        device, count, last = self._device, end - begin, self._spec.language.max_position
        own, other, num_blocks = torch.arange(begin, end), torch.arange(beside), self._keys.num_blocks
        places = torch.cat((other + last - beside, own))
        if self._spec.language.rope_sections is not None:
            probe = self._probe
            on_axes = positions_on(probe.spans, probe.grids, len(probe.token_ids))[0]
            places = torch.cat((places[:beside].expand(len(on_axes), -1), on_axes[:, begin:end]), dim=1)
        blocks = torch.arange(num_blocks, dtype=torch.int32).expand(2, -1).clone()
        blocks[0, 0] = num_blocks - 1
        first = 0 if beside else 1
        context = torch.tensor([beside, end], dtype=torch.int32)[first:]
        bounds = torch.tensor([0, beside, beside + count], dtype=torch.int32)[first:]
        rows = self._probe.rows
        is_image = torch.zeros(len(self._probe.token_ids), dtype=torch.bool)
        for span in self._probe.spans:
            is_image[slice(*span)] = True
        slots = is_image.cumsum(0) - 1
        image_rows = is_image[begin:end].nonzero()[:, 0]
        return LanguageInput(
            token_ids=torch.cat((other, self._probe.token_ids[begin:end])).to(device),
            positions=places.to(device),
            slots=torch.cat((other + (num_blocks - 1) * _BLOCK, own)).to(device),
            attention=self._backend.ops.plan_attention(bounds, context, blocks[first:]),
            logit_rows=(rows[(rows >= begin) & (rows < end)] - begin + beside).to(device),
            position_end=max(end, last if beside else 0),
            image_rows=(image_rows + beside).to(device) if len(image_rows) else None,
            image_slots=slots[begin:end][image_rows].to(device) if len(image_rows) else None,
        )

    def _cache(self, num_slots: int, layers: tuple[int, int], heads: tuple[int, int]) -> PagedCache:
        shape = (-(-max(num_slots, 1) // _BLOCK), *layers, _BLOCK, *heads)
        return PagedCache(torch.zeros(shape, dtype=self._backend.dtype, device=self._device))


# Largest difference of the logits, relative to their spread: rounding, and nothing else.
_TOLERANCES = {torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.05}


def load_generic(
    model_dir: Path,
    spec: ModelSpec,
    backend: Backend,
    role: Role,
    progress: Progress | None = None,
) -> GenericModel:
    """Reads the whole checkpoint and keeps the parts that `role` needs. Raises CheckpointError if it cannot be served,
    and torch.OutOfMemoryError if the device's memory runs out."""
    with SafetensorsCheckpoint(model_dir) as checkpoint:  # complete and not pickled, before anything is read
        entries = checkpoint.entries
    total = sum(entry.nbytes for entry in entries.values())
    report = progress or (lambda _done, _total: None)
    report(0, total)
    with quiet_logging(), torch.inference_mode(False), torch.no_grad():
        module = _load_module(model_dir, spec, backend, entries)
        _check_finite(module)
    with quiet_logging(), torch.inference_mode():
        try:
            model = _checked(module, spec, backend)
        except torch.OutOfMemoryError:
            raise
        except PROCESSOR_ERRORS as error:
            raise cannot_run(spec.architecture, spec.no_images_because or describe_error(error)) from error
    model.drop_unused(role)
    backend.device.trim()
    report(total, total)
    return model


def check_generic_layers(model_dir: Path, spec: ModelSpec) -> None:
    """Raises CheckpointError if config.json has more layers than the weights. Weights that cannot be opened are ignored
    here: loading them raises the error."""
    try:
        checkpoint = SafetensorsCheckpoint(model_dir)
    except CheckpointError:
        return
    with checkpoint:
        check_counts(load_config(model_dir, trust_remote_code=spec.trust_remote_code), checkpoint.entries)


def _load_module(model_dir: Path, spec: ModelSpec, backend: Backend, held: Collection[str]) -> Any:
    """Loads the module with transformers. `held`: names of the checkpoint's tensors."""
    trusted = spec.trust_remote_code
    config = load_config(model_dir, trust_remote_code=trusted)
    check_counts(config, held)
    kind = model_class(config, model_dir, trust_remote_code=trusted)
    try:
        with bounded_modules(len(held)):
            module, info = kind.from_pretrained(
                str(model_dir),
                config=config,
                dtype=backend.dtype,
                local_files_only=True,
                use_safetensors=True,
                output_loading_info=True,
            )
    except PROCESSOR_ERRORS as error:
        raise CheckpointError(f"transformers cannot load the weights: {describe_error(error)}") from error
    missing = sorted(map(str, info["missing_keys"]))
    if missing or info["mismatched_keys"]:
        wrong = list_names(missing) if missing else list_names(str(key) for key, *_ in info["mismatched_keys"])
        raise CheckpointError(f"the weights do not fit config.json; missing or of the wrong shape: {wrong}")
    return module.eval().to(backend.device.torch_device)


def _check_finite(module: torch.nn.Module) -> None:
    for name, tensor in module.named_parameters():
        if tensor.is_floating_point() and tensor.numel() and not all_finite(tensor):
            raise CheckpointError(f"tensor {name} holds values that are not finite (NaN or infinity)")


def _checked(module: Any, spec: ModelSpec, backend: Backend) -> GenericModel:
    """Wraps the module for the engine's stages. Raises CheckpointError if its logits differ from its own forward's,
    alone or beside a request of another length."""
    probe = Probe.from_spec(module, spec)
    expected = probe.expected_logits(module, backend.dtype)
    model = GenericModel(module, spec, backend, probe.token_types)
    paged = PagedProbe(probe, model, spec, backend)
    alone = paged.logits()
    num_layers, most = spec.language.num_layers, _TOLERANCES[backend.dtype]
    problem = ""
    if sorted(paged.layers) != list(range(num_layers)):
        problem = f"attention of {len(set(paged.layers))} of its {num_layers} layers is where ours can stand"
    elif expected.shape[1] != spec.language.vocab_size:
        problem = f"it has {expected.shape[1]} logits where config.json says {spec.language.vocab_size}"
    elif not (difference := _difference(alone, expected)) <= most:
        problem = (
            f"its logits differ by {difference:.2g} of their spread from those of its own forward; something in it "
            "does not fit our stages"
        )
    else:
        beside = paged.logits_beside()
        if not (difference := _difference(beside, expected[-1:])) <= most:
            problem = (
                f"its logits differ by {difference:.2g} of their spread beside a request of {spec.max_model_len} "
                "tokens; what it computes for one request depends on how long others are"
            )
        model.deterministic = model.deterministic and torch.equal(beside, alone[-1:])
    if problem:
        raise cannot_run(spec.architecture, problem)
    return model


def _difference(actual: Tensor, expected: Tensor) -> float:
    """Largest difference relative to the spread of `expected`."""
    return float((actual - expected).abs().max() / (expected - expected.mean(1, keepdim=True)).abs().max())
