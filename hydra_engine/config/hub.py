"""Lookup of a model's files: `model` is a folder, or a hub id in the Hugging Face cache, such as
Qwen/Qwen2-VL-2B-Instruct for safetensors or OWNER/REPO-GGUF:Q4_K_M for GGUF files. Contacts the hub only with
`download`.

Checks that the files of a model exist, not their contents. Imports huggingface_hub only to look up an id.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Collection
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import NamedTuple

from hydra_engine.config.engine import DEMO_MODEL, SHAPES, EngineConfig
from hydra_engine.config.gguf_files import (
    DEFAULT_TAG,
    choose_mmproj,
    choose_model,
    is_gguf,
    is_mmproj,
    missing_parts,
    nearest_tag,
    shown,
)
from hydra_engine.config.hub_cache import cached_snapshot
from hydra_engine.config.hub_download import HubFile, download_files, repository_files
from hydra_engine.config.unknown_model import check_folder, nearest_model, unknown_model
from hydra_engine.core.model_folder import read_file
from hydra_engine.core.options import NATIVE
from hydra_engine.errors import CheckpointError, ConfigError

_HUB_ID = re.compile(r"([A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9][A-Za-z0-9._-]*)(:[A-Za-z0-9._-]*)?")
_MAX_ID = 200  # characters; the hub's names have fewer than 100
_CONFIG = "config.json"
_WEIGHTS = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model")
_PROCESSORS = ("preprocessor_config.json", "processor_config.json")
_PICKLES = (".bin", ".pt", ".pth", ".ckpt")
# Files to download: no other formats, in which many repositories hold a second copy, and no subfolders.
_WANTED = ("*.json", "*.jinja", "*.model", "merges.txt", "vocab.txt")
_UNWANTED = ("*/*", "consolidated*.safetensors")


class ModelPaths(NamedTuple):
    """Files of a model. `gguf` are all parts of a text model, empty if the folder is the model."""

    folder: Path
    gguf: tuple[Path, ...] = ()
    mmproj: Path | None = None


def find_model(config: EngineConfig) -> EngineConfig:
    """Returns the configuration with `model_folder` set if `model` is a hub id of safetensors; unchanged for a folder,
    `demo` and SHAPES. Raises CheckpointError for GGUF files, and CheckpointError and ConfigError as
    `find_hub_model`."""
    found = find_hub_model(config)
    if found.gguf if found else os.path.isdir(config.model) and has_gguf_alone(os.listdir(config.model)):
        raise CheckpointError(
            f"{config.model!r} is a model of GGUF files, which are served as they are; give the folder or hub id of "
            "the model's safetensors"
        )
    return config if found is None else replace(config, model_folder=str(found.folder))


def find_hub_model(config: EngineConfig) -> ModelPaths | None:
    """Finds a hub id in the cache; None for a folder, `demo` and SHAPES. Raises CheckpointError if there is neither
    such a folder nor a complete model of that name, or if the download fails; ConfigError if `revision` is given for
    another model than a hub id; ResourceError if the disk has too little room for the download."""
    local = config.model in (DEMO_MODEL, *SHAPES) or os.path.isdir(config.model)  # Path's own raises for some names
    if config.model_folder is not None or local:
        check_revision(config)
        if local and config.model_folder is None:
            check_folder(config.model)
        return None
    named = hub_name(config.model)
    if named is None or (named[1] is None and is_gguf(config.model)):
        raise unknown_model(config.model)
    name, tag = named
    folder = _cached(config, name)
    needs_weights = config.load_format != "random"
    listing: list[HubFile] = []
    gguf = tag is not None or (folder is not None and has_gguf_alone(_names(folder)))
    if not gguf and (missing := missing_files(folder, weights=needs_weights)):
        if not config.download:
            raise _not_cached(config, name, folder, missing)
        listing = repository_files(name, config.revision)
        gguf = has_gguf_alone([file.path for file in listing])
        if not gguf:
            check_no_mmproj(config)
            download_files(name, config.revision, [file for file in listing if _is_wanted(file.path, config)])
            folder = _cached(config, name)
            if missing := missing_files(folder, weights=needs_weights):
                raise CheckpointError(f"{name!r} cannot be served: its repository has no {shown(missing)}")
    if gguf:
        return _find_gguf(config, name, tag or "", folder, listing)
    assert folder is not None  # else a file was missing
    return ModelPaths(folder)


def check_revision(config: EngineConfig) -> None:
    """Raises ConfigError if `revision` is given with a model that is no hub id."""
    if config.revision is not None and config.model_folder is None:
        kind = "a file" if os.path.isfile(config.model) else "a folder" if os.path.isdir(config.model) else config.model
        raise ConfigError(f"revision is for models of the Hugging Face Hub; MODEL is {kind}", param="revision")


def check_gguf_options(config: EngineConfig) -> None:
    """Raises ConfigError for options that do not fit a model of GGUF files."""
    if config.model_impl not in NATIVE:
        reason = f"GGUF files are for native models, not for model_impl {config.model_impl}"
        raise ConfigError(reason, param="model_impl")


def check_no_mmproj(config: EngineConfig) -> None:
    """Raises ConfigError if `mmproj` is given, for models of other files than GGUF."""
    if config.mmproj is not None:
        raise ConfigError("mmproj belongs to a MODEL of GGUF files", param="mmproj")


def hub_name(model: str) -> tuple[str, str | None] | None:
    """The repository of a hub id and the tag behind its colon, empty for the default one and None without colon; None
    for what is no hub id."""
    found = _HUB_ID.fullmatch(model)
    if found is None or len(model) > _MAX_ID:
        return None
    tag = None if found[2] is None else found[2][1:]
    return found[1], "" if tag == "latest" else tag  # Ollama's word for the default


def _cached(config: EngineConfig, name: str) -> Path | None:
    from huggingface_hub.errors import HFValidationError

    try:
        return cached_snapshot(name, config.revision)
    except HFValidationError:  # two dots in a row and the like
        raise unknown_model(config.model) from None


def _not_cached(config: EngineConfig, name: str, folder: Path | None, missing: list[str]) -> CheckpointError:
    if folder is None and "gguf" in name.lower():
        return _no_gguf(config, name, "", [])
    revision = _revision_flag(config)
    state = (
        f"there is no folder {config.model!r}, nor a model of that name in the Hugging Face cache"
        f"{nearest_model(config.model)}"
        if folder is None
        else f"{config.model!r} is in the Hugging Face cache without {shown(missing)}"
    )
    return CheckpointError(
        f"{state}; `hydra-engine pull {name}{revision}` or `hf download {name}{revision}` fetches it, and so does "
        "--download"
    )


def _revision_flag(config: EngineConfig) -> str:
    return f" --revision {config.revision}" if config.revision else ""


def _names(folder: Path) -> list[str]:
    """Names of the files of a folder, with subfolders; broken links are left out."""
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def missing_files(folder: Path | None, *, weights: bool = True) -> list[str]:
    """Names of the files that a snapshot needs and has not, including broken links; without a snapshot config.json.
    `weights`: the files of weights count too."""
    if folder is None:
        return [_CONFIG]
    there = {path.name for path in folder.iterdir() if path.is_file()}
    missing = [] if _CONFIG in there else [_CONFIG]
    if there.isdisjoint(_TOKENIZERS):
        missing.append(_TOKENIZERS[0])
    sees = _CONFIG in there and b'"vision_config"' in (read_file(folder, _CONFIG) or b"")
    if sees and there.isdisjoint(_PROCESSORS):
        missing.append(_PROCESSORS[0])
    if not weights or _WEIGHTS in there:
        return missing
    if _INDEX in there:
        return missing + sorted(_shards(folder) - there)
    if any(name.startswith("model-") and name.endswith(".safetensors") for name in there):
        missing.append(_INDEX)
    elif not any(name.endswith(_PICKLES) for name in there):  # the loader reports how to convert them
        missing.append(_WEIGHTS)
    return missing


def _shards(folder: Path) -> set[str]:
    """Names of the weight files in the index; empty for a damaged index, which the loader reports."""
    try:
        places = json.loads(read_file(folder, _INDEX) or b"")["weight_map"].values()
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return set()
    return {str(place) for place in places}


def _is_wanted(path: str, config: EngineConfig) -> bool:
    """True if a download of a model of safetensors takes the file."""
    patterns = [*_WANTED, *(["*.py"] if config.trust_remote_code else [])]
    if config.load_format != "random":
        patterns.append("*.safetensors")
    fits = any(fnmatchcase(path, pattern) for pattern in patterns)
    return fits and not any(fnmatchcase(path, pattern) for pattern in _UNWANTED)


# ---- GGUF


def has_gguf_alone(paths: Collection[str]) -> bool:
    """True if there are GGUF files and no other weights. Subfolders count for GGUF files only."""
    others = (".safetensors", *_PICKLES)
    return any(map(is_gguf, paths)) and not any(path.endswith(others) and "/" not in path for path in paths)


def _find_gguf(config: EngineConfig, name: str, tag: str, folder: Path | None, listing: list[HubFile]) -> ModelPaths:
    """Finds the GGUF files that `tag` names, and their mmproj unless `mmproj` is a file."""
    check_gguf_options(config)
    paths = [] if folder is None else _names(folder)
    model = choose_model(paths, tag)
    complete = not isinstance(model, str) and not missing_parts(model, paths)
    mmproj = _mmproj(config, paths, model) if complete else None
    if config.download and not (complete and (mmproj or _has_own_mmproj(config))):
        listing = listing or repository_files(name, config.revision)
        names = [file.path for file in listing]
        model = model if complete else choose_model(names, tag)
        if isinstance(model, str) or missing_parts(model, names):
            raise _no_gguf(config, name, tag, names)
        wanted = {*model, mmproj or _mmproj(config, names, model)}
        download_files(name, config.revision, [file for file in listing if file.path in wanted])
        folder = _cached(config, name)
        paths = [] if folder is None else _names(folder)
        mmproj = _mmproj(config, paths, model)
    if folder is None or isinstance(model, str) or missing_parts(model, paths):
        raise _no_gguf(config, name, tag, paths)
    if mmproj is None and config.mmproj is not None and not _has_own_mmproj(config):
        files = shown(filter(is_mmproj, paths)) or "none"
        raise CheckpointError(f"there is no file {config.mmproj[:200]!r}; mmproj files of {name} here: {files}")
    parts = tuple(folder / part for part in model)
    return ModelPaths(folder, parts, folder / mmproj if mmproj else None)


def _has_own_mmproj(config: EngineConfig) -> bool:
    return config.mmproj is not None and os.path.isfile(config.mmproj)


def _mmproj(config: EngineConfig, paths: Collection[str], model: list[str] | str) -> str | None:
    """The mmproj for a model among the files of its repository: the one that the setting names, else the best."""
    if _has_own_mmproj(config) or isinstance(model, str):
        return None
    if config.mmproj is None:
        return choose_mmproj(paths, model[0])
    return next((path for path in paths if is_mmproj(path) and config.mmproj in (path, path.split("/")[-1])), None)


def _no_gguf(config: EngineConfig, name: str, tag: str, paths: Collection[str]) -> CheckpointError:
    """The error for a model of GGUF files that is not in the cache, or with `download` not in the repository, which has
    the files `paths`."""
    where = "its repository" if config.download else "the Hugging Face cache"
    model, near = choose_model(paths, tag), nearest_tag(paths, tag)
    if not isinstance(model, str):
        problem = f"{where} has it without {shown(missing_parts(model, paths))}"
    elif near is None:
        problem = f"{where} has no GGUF model of it"
    else:
        problem = f"{where} has {model} of it; name one, such as {name}:{near}"
    if config.download:
        return CheckpointError(f"{config.model!r} cannot be served: {problem}")
    full = f"{name}:{tag}" if tag else name
    revision, pattern = _revision_flag(config), f"*{tag.removesuffix('.gguf') or DEFAULT_TAG}*.gguf"
    command = f"hf download {name}{revision} --include '{pattern}' --include '*mmproj*.gguf'"
    return CheckpointError(
        f"{config.model!r} is not here: {problem}; `hydra-engine pull {full}{revision}` or `{command}` fetches it, and "
        "so does --download"
    )
