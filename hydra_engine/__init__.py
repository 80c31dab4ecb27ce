"""hydra-engine: an inference engine for vision-language models on one node. Public names, resolved on first use."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = ["Engine", "EngineConfig", "Grammar", "SamplingParams", "__version__"]

if TYPE_CHECKING:
    from hydra_engine.config import EngineConfig
    from hydra_engine.core.grammar import Grammar
    from hydra_engine.core.sampling import SamplingParams
    from hydra_engine.engine import Engine

_HOMES = {
    "Engine": "hydra_engine.engine",
    "EngineConfig": "hydra_engine.config",
    "Grammar": "hydra_engine.core.grammar",
    "SamplingParams": "hydra_engine.core.sampling",
}


def __getattr__(name: str) -> Any:
    # Importing the package must stay cheap (`--help` in under a second) and touch no device.
    if name in _HOMES:
        from importlib import import_module

        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
