"""Models that transformers' own modules compute in the engine's stages (`--model-impl transformers`).

A package beside the engine, in the same wheel: the engine finds `TRANSFORMERS` by the entry point in pyproject.toml.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hydra_engine.backend.base import Backend
    from hydra_engine.core.instances import Role
    from hydra_engine.models.implementation import ModelImplementation
    from hydra_engine.models.loading.weights import Progress
    from hydra_engine.models.specs.assemble import ModelFiles
    from hydra_engine.models.specs.base import ModelSpec
    from hydra_transformers.model import GenericModel


class _Transformers:
    """Imports each part where it is needed: only the last two need torch."""

    preload = ("hydra_transformers.preload",)

    def build_spec(self, files: ModelFiles) -> ModelSpec:
        from hydra_transformers.build_spec import build_generic

        return build_generic(files)

    def check_layers(self, model_dir: Path, spec: ModelSpec) -> None:
        from hydra_transformers.load import check_generic_layers

        check_generic_layers(model_dir, spec)

    def load_model(
        self, model_dir: Path, spec: ModelSpec, backend: Backend, role: Role, progress: Progress | None
    ) -> GenericModel:
        from hydra_transformers.load import load_generic

        return load_generic(model_dir, spec, backend, role, progress)


TRANSFORMERS: ModelImplementation = _Transformers()
