"""Imports what the processes of a model share. transformers imports the home of a class when it is named."""

from __future__ import annotations

from importlib import import_module

from hydra_transformers.deferred import leave_out

_NAMED = ("AutoModelForImageTextToText", "AutoProcessor", "AutoTokenizer", "GenerationMixin")

leave_out()
import_module("hydra_transformers.load")
import_module("torch.fx.experimental.symbolic_shapes")  # which many modules need before they have weights
for _name in _NAMED:
    getattr(import_module("transformers"), _name)
