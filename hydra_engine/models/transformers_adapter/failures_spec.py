"""Readable messages for exceptions from transformers' code."""

from __future__ import annotations

import re
import traceback
from pathlib import Path

# What it raises on pictures, settings and files that it cannot take; their classes say no more than that.
PROCESSOR_ERRORS = (
    OSError,
    ImportError,
    ValueError,
    TypeError,
    AttributeError,
    LookupError,
    ArithmeticError,
    AssertionError,
    RuntimeError,
    MemoryError,
)
# Errors whose message comes from Python itself.
_OF_PYTHON = (TypeError, AttributeError, LookupError, ArithmeticError, AssertionError, NotImplementedError)
_UNPACKING = re.compile(r"values to unpack|invalid literal for|could not convert string")
_MAX_CHARS = 300


def describe_error(error: BaseException) -> str:
    """Returns one line: the error's message if it was written for readers, else the place in the code that failed."""
    text = " ".join(str(error).split())
    if isinstance(error, _OF_PYTHON) or not text or _UNPACKING.search(text):
        frames = traceback.extract_tb(error.__traceback__)
        at = f"{Path(frames[-1].filename).name}, line {frames[-1].lineno}" if frames else "an unknown place"
        missing = _missing(error)
        what = f", in which there is no {missing[:60]}" if missing else ""
        return f"code of transformers or of the model does not work with these files{what} ({at})"
    if len(text) <= _MAX_CHARS:
        return text
    head = text[:_MAX_CHARS]
    sentence = head.rfind(". ")
    return head[: sentence + 1] if sentence > 0 else head[: head.rfind(" ")] + " ..."


def _missing(error: BaseException) -> str:
    """Name of a missing field of a config, a tokenizer or a processor; empty for other errors."""
    name = error.name if isinstance(error, AttributeError) and hasattr(error.obj, "save_pretrained") else None
    if isinstance(error, KeyError) and error.args:
        name = error.args[0]
    return name if isinstance(name, str) else ""
