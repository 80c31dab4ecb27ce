"""The interfaces of a model for lanes and instances, and of a package that brings models of its own.

`--model-impl NAME` finds a `ModelImplementation` as the entry point NAME of the group
`hydra_engine.model_implementations`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from torch import Tensor

from hydra_engine.backend.base import Backend, PagedCache
from hydra_engine.core.instances import Role
from hydra_engine.models.layers.decoder import LanguageInput
from hydra_engine.models.layers.vision import VisionInput
from hydra_engine.models.loading.weights import Progress
from hydra_engine.models.specs.assemble import ModelFiles
from hydra_engine.models.specs.base import ModelSpec
from hydra_engine.models.vlm import Vision


class ServedModel(Protocol):
    """The model as lanes call it. `encode` and `forward` write only the slots in their input, and skip slot -1, so a
    call may be repeated."""

    @property
    def num_slices(self) -> int:
        """Number of pieces of an encode that pauses only between layers; 0 without a vision tower."""
        ...

    @property
    def can_be_captured(self) -> bool:
        """True if a forward without scored prompts only launches ops and reads shapes, as graph capture requires."""
        ...

    @property
    def tower(self) -> Vision | None:
        """The vision tower, if its encodes can be captured; else None."""
        ...

    def reserve_positions(self, end: int) -> None:
        """Prepares a model that can be captured for forwards with `position_end` of at most `end`."""
        ...

    def encode(self, inputs: VisionInput, image_cache: PagedCache, /) -> object:
        """Writes the features of the images to their slots. The return value is ignored."""
        ...

    def forward(self, inputs: LanguageInput, kv_cache: PagedCache, image_cache: PagedCache | None, /) -> Tensor:
        """Returns logits [B', V] float32 of the rows in `inputs.logit_rows`, valid until the next call. Logits of the
        rows in `inputs.scored` are passed to its callback in slices meanwhile."""
        ...


class LoadedModel(ServedModel, Protocol):
    """A model with its weights, as an instance starts it."""

    @property
    def deterministic(self) -> bool:
        """True if, with deterministic ops, a row's result does not depend on the other rows of a step."""
        ...

    @property
    def notes(self) -> tuple[str, ...]:
        """Sentences about it for the start-up summary."""
        ...

    @property
    def weights_bytes(self) -> int: ...


class ModelImplementation(Protocol):
    """Models that another package computes. It is imported in the frontend too, so the module of this object imports no
    torch.

    An attribute `preload` may name modules that several of its processes import: they are then forks of one that has,
    which has no other use and one thread. `build_spec` may fork it too (`core/processes/preloaded.py`)."""

    def build_spec(self, files: ModelFiles, /) -> ModelSpec:
        """Builds the spec of a checkpoint. Raises CheckpointError, with the reason, if it cannot be served, ConfigError
        for options of `files` that the implementation does not have."""
        ...

    def check_layers(self, model_dir: Path, spec: ModelSpec, /) -> None:
        """Raises CheckpointError if config.json has more layers than the weights. Reads no weights. Weights that cannot
        be opened are ignored here: loading them raises the error."""
        ...

    def load_model(
        self, model_dir: Path, spec: ModelSpec, backend: Backend, role: Role, progress: Progress | None, /
    ) -> LoadedModel:
        """Loads the parts of a model that `role` needs. Raises CheckpointError if the checkpoint cannot be served."""
        ...
