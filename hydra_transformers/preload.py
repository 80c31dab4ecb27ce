"""Imports what the processes of a model share. transformers imports the home of a class when it is named."""

from __future__ import annotations

import transformers

import hydra_transformers.load  # noqa: F401

for _name in ("AutoModelForImageTextToText", "AutoProcessor", "AutoTokenizer", "GenerationMixin"):
    getattr(transformers, _name)
