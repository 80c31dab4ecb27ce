"""A checkpoint's classes in transformers: its config, its model, the arguments of its tower.

Imported only where torch may be loaded; opens no weights. Code that comes with the model is run only when the caller
says so.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import transformers
from transformers.dynamic_module_utils import get_class_from_dynamic_module

from hydra_engine.errors import CheckpointError
from hydra_engine.models.specs.fields import Fields, read_json
from hydra_transformers.spec import PROCESSOR_ERRORS, describe_error

_REMOTE_CLASSES = ("AutoModelForImageTextToText", "AutoModelForVision2Seq", "AutoModelForCausalLM", "AutoModel")
MAX_COUNTED = 4096
_COUNTED = ("layer", "layers", "depth", "blocks", "experts", "stages", "labels", "levels")  # ends of names
_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


@contextmanager
def quiet_logging() -> Iterator[None]:
    """Hides transformers' progress bars and warnings; errors are still shown."""
    log = transformers.utils.logging
    verbosity, bars = log.get_verbosity(), log.is_progress_bar_enabled()
    log.set_verbosity_error()
    log.disable_progress_bar()
    try:
        yield
    finally:
        log.set_verbosity(verbosity)
        if bars:
            log.enable_progress_bar()


def cannot_run(architecture: str, reason: str) -> CheckpointError:
    return CheckpointError(f"{architecture} cannot run through transformers here: {reason}")


def load_config(model_dir: Path, *, trust_remote_code: bool) -> Any:
    raw = read_json(model_dir, "config.json")
    _check_counts(raw)
    if not trust_remote_code:
        _check_known(raw)
    try:
        return transformers.AutoConfig.from_pretrained(
            str(model_dir), local_files_only=True, trust_remote_code=trust_remote_code
        )
    except PROCESSOR_ERRORS as error:
        raise CheckpointError(f"transformers cannot read config.json: {describe_error(error)}") from error


def _check_counts(section: Fields) -> None:
    """Raises CheckpointError for huge counts, before transformers builds lists or modules by them."""
    for name, value in section.values.items():
        if isinstance(value, dict):
            _check_counts(Fields(value, f"{name[:40]} of {section.where}"))
        elif type(value) is int and value > MAX_COUNTED and name.endswith(_COUNTED):
            raise section.wrong_value(name, f"at most {MAX_COUNTED}")


def model_class(config: Any, model_dir: Path, *, trust_remote_code: bool) -> Any:
    """Returns the class with a language head, also for text-only models."""
    remote = (getattr(config, "auto_map", None) or {}) if trust_remote_code else {}
    for name in _REMOTE_CLASSES:
        if name in remote:
            return get_class_from_dynamic_module(remote[name], str(model_dir), local_files_only=True)
    for auto in (transformers.AutoModelForImageTextToText, transformers.AutoModelForCausalLM):
        classes = auto._model_mapping.get(type(config), None)
        if classes is not None:
            return classes[0] if isinstance(classes, tuple) else classes
    raise CheckpointError(
        f"model type {config.model_type!r} is neither an image-text-to-text nor a causal language model of transformers"
    )


def classes_of(config: Any, model: Any) -> tuple[Any, ...]:
    """Returns the class with the head, and the one that it wraps, if transformers knows it."""
    inner: Any = transformers.AutoModel._model_mapping.get(type(config), None)
    inner = inner[0] if isinstance(inner, tuple) else inner
    return (model,) if inner is None else (model, inner)


def image_inputs(config: Any, model: Any) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Returns the named arguments of get_image_features, and those that are required; both empty for models without
    pictures. The class with the head may leave arguments, or the whole function, to the class that it wraps."""
    arguments: dict[str, inspect.Parameter] = {}
    for kind in classes_of(config, model):
        function = getattr(kind, "get_image_features", None)
        if function is not None:
            own = list(inspect.signature(function).parameters.values())[1:]
            arguments = {argument.name: argument for argument in own if argument.kind in _NAMED} | arguments
            if all(argument.kind is not inspect.Parameter.VAR_KEYWORD for argument in own):
                break
    required = (name for name, argument in arguments.items() if argument.default is inspect.Parameter.empty)
    return tuple(arguments), tuple(required)


def _check_known(config: Fields) -> None:
    model_type = config.text("model_type", "")
    if model_type in transformers.CONFIG_MAPPING:
        return
    if "auto_map" in config:
        raise CheckpointError(
            f"model type {model_type[:60]!r} needs the Python code that comes with the model, which is never run "
            "unless you give --trust-remote-code; read it first"
        )
    raise CheckpointError(f"the installed transformers does not know model type {model_type[:60]!r}; a newer one may")
