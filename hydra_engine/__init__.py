"""hydra-engine: an inference engine for vision-language models on one node. Public names, resolved on first use."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = [
    "BackendError",
    "BatchOptions",
    "CallOptions",
    "CheckpointError",
    "ConfigError",
    "ContextLengthExceeded",
    "Engine",
    "EngineClosed",
    "EngineConfig",
    "Grammar",
    "Handle",
    "HydraError",
    "InvalidImage",
    "InvalidRequest",
    "MediaFetchFailed",
    "MediaForbidden",
    "Piece",
    "PixelBudget",
    "RequestAborted",
    "RequestError",
    "RequestFailed",
    "RequestTooLarge",
    "ResourceError",
    "Result",
    "SamplingParams",
    "Slo",
    "TemplateOptions",
    "Unavailable",
    "__version__",
    "draw",
]

if TYPE_CHECKING:
    from hydra_engine.config import EngineConfig
    from hydra_engine.core.grammar import Grammar
    from hydra_engine.core.outputs import Piece, Result
    from hydra_engine.core.prompting import PixelBudget, TemplateOptions
    from hydra_engine.core.request import Slo
    from hydra_engine.core.sampling import SamplingParams
    from hydra_engine.engine import Engine
    from hydra_engine.errors import (
        BackendError,
        CheckpointError,
        ConfigError,
        ContextLengthExceeded,
        EngineClosed,
        HydraError,
        InvalidImage,
        InvalidRequest,
        MediaFetchFailed,
        MediaForbidden,
        RequestAborted,
        RequestError,
        RequestFailed,
        RequestTooLarge,
        ResourceError,
        Unavailable,
    )
    from hydra_engine.frontend.call import BatchOptions, CallOptions
    from hydra_engine.frontend.handle import Handle
    from hydra_engine.telemetry.timeline import draw

_HOMES = {
    "BatchOptions": "frontend.call",
    "CallOptions": "frontend.call",
    "Engine": "engine",
    "EngineConfig": "config",
    "Grammar": "core.grammar",
    "Handle": "frontend.handle",
    "Piece": "core.outputs",
    "PixelBudget": "core.prompting",
    "Result": "core.outputs",
    "SamplingParams": "core.sampling",
    "Slo": "core.request",
    "TemplateOptions": "core.prompting",
    "draw": "telemetry.timeline",
}


def __getattr__(name: str) -> Any:
    # Importing the package must stay cheap (`--help` in under a second) and touch no device.
    if name in __all__:
        from importlib import import_module

        return getattr(import_module(f"hydra_engine.{_HOMES.get(name, 'errors')}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__} - {"TYPE_CHECKING", "Any", "annotations"})
