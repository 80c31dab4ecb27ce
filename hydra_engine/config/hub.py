"""Lookup of a model's files: `model` is a folder, or a hub id such as Qwen/Qwen2-VL-2B-Instruct in the Hugging Face
cache (HF_HOME and its other variables apply). Contacts the hub only with `download`.

Checks that the files of a model exist, not their contents. Imports huggingface_hub only to look up an id.
"""

from __future__ import annotations

import json
import os
import re
from dataclasses import replace
from pathlib import Path

from hydra_engine.config.engine import DEMO_MODEL, SHAPES, EngineConfig
from hydra_engine.core.model_folder import read_file
from hydra_engine.errors import CheckpointError, ConfigError

_HUB_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9][A-Za-z0-9._-]*")
_TAGGED = re.compile(rf"({_HUB_ID.pattern}):([A-Za-z0-9._-]*)")  # repository:quantisation, for GGUF files
_CONFIG = "config.json"
_WEIGHTS = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model")
_PROCESSORS = ("preprocessor_config.json", "processor_config.json")
_PICKLES = (".bin", ".pt", ".pth", ".ckpt")
# Files to download: no other formats, in which many repositories hold a second copy, and no subfolders.
_WANTED = ("*.json", "*.jinja", "*.model", "merges.txt", "vocab.txt")
_UNWANTED = ["*/*", "consolidated*.safetensors"]
_SHOWN = 4  # missing files that a message names


def find_model(config: EngineConfig) -> EngineConfig:
    """Returns the configuration with `model_folder` set if `model` is a hub id; unchanged for a folder, `demo` and
    SHAPES. Raises CheckpointError if there is neither such a folder nor a complete model of that name in the cache, or
    if the download fails; ConfigError if `revision` is given with a folder."""
    if config.model_folder is not None or config.model in (DEMO_MODEL, *SHAPES):
        return config
    if os.path.isdir(config.model):  # Path's own raises for names that no folder can have
        if config.revision is not None:
            raise ConfigError("revision is for models of the Hugging Face Hub; MODEL is a folder", param="revision")
        return config
    if tagged := _TAGGED.fullmatch(config.model):
        raise _gguf(config, tagged[1], tagged[2])
    if not _HUB_ID.fullmatch(config.model):
        raise _no_directory(config)
    folder, missing = _cached(config)
    if missing and "gguf" in config.model.lower():
        raise _gguf(config, config.model, "")
    if missing and config.download:
        folder = _download(config)
        if missing := _missing(folder, config):
            raise CheckpointError(f"{config.model!r} cannot be served: its repository has no {_listed(missing)}")
    if missing:
        command = f"hf download {config.model}" + (f" --revision {config.revision}" if config.revision else "")
        state = (
            f"there is no folder {config.model!r}, nor a model of that name in the Hugging Face cache"
            if folder is None
            else f"{config.model!r} is in the Hugging Face cache without {_listed(missing)}"
        )
        raise CheckpointError(f"{state}; `{command}` fetches it, and so does --download")
    return replace(config, model_folder=str(folder))


def _cached(config: EngineConfig) -> tuple[Path | None, list[str]]:
    """The folder of the cached snapshot, None if there is none, and the names of its missing files."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        # allow_patterns=[] downloads no file, so an incomplete snapshot is found too.
        snapshot = snapshot_download(config.model, revision=config.revision, local_files_only=True, allow_patterns=[])
    except LocalEntryNotFoundError:
        return None, [_CONFIG]
    except HFValidationError:  # two dots in a row and the like
        raise _no_directory(config) from None
    return Path(snapshot), _missing(Path(snapshot), config)


def _missing(folder: Path, config: EngineConfig) -> list[str]:
    """Required files that are missing, including broken links."""
    there = {path.name for path in folder.iterdir() if path.is_file()}
    missing = [] if _CONFIG in there else [_CONFIG]
    if there.isdisjoint(_TOKENIZERS):
        missing.append(_TOKENIZERS[0])
    sees = _CONFIG in there and b'"vision_config"' in (read_file(folder, _CONFIG) or b"")
    if sees and there.isdisjoint(_PROCESSORS):
        missing.append(_PROCESSORS[0])
    if config.load_format == "random" or _WEIGHTS in there:
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


def _download(config: EngineConfig) -> Path:
    """Downloads a hub id, with huggingface_hub's bars on a terminal. Raises CheckpointError."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError
    from huggingface_hub.utils import httpx  # type: ignore[attr-defined]  # the version that huggingface_hub uses

    name = config.model
    allow = [*_WANTED, *(["*.py"] if config.trust_remote_code else [])]
    if config.load_format != "random":
        allow.append("*.safetensors")
    try:
        return Path(snapshot_download(name, revision=config.revision, allow_patterns=allow, ignore_patterns=_UNWANTED))
    except GatedRepoError:
        why = f"accept its conditions at https://huggingface.co/{name}, then `hf auth login` or set HF_TOKEN"
    except RepositoryNotFoundError:
        why = "the Hugging Face Hub has no such model, or it is private: then `hf auth login` or set HF_TOKEN"
    except RevisionNotFoundError:
        why = f"it has no revision {config.revision!r}"
    except (OSError, RuntimeError, httpx.HTTPError) as error:  # RuntimeError: from hf_xet
        why = str(error).strip().split("\n", 1)[0][:200] or type(error).__name__
    raise CheckpointError(f"{name!r} cannot be downloaded: {why}")


def _no_directory(config: EngineConfig) -> CheckpointError:
    return CheckpointError(f"there is no model directory {config.model[:200]!r}")


def _gguf(config: EngineConfig, name: str, tag: str) -> CheckpointError:
    """The error for a repository of GGUF files: it has many, and the user must fetch one into a folder."""
    revision = f" --revision {config.revision}" if config.revision else ""
    wanted = f"'*{tag}*.gguf'" if tag else "FILE.gguf"
    return CheckpointError(
        f"{config.model!r} names GGUF files, which are served from a folder: `hf download {name}{revision} --include "
        f"{wanted} --include 'mmproj*.gguf' --local-dir DIR` fetches them, then DIR is the MODEL"
    )


def _listed(names: list[str]) -> str:
    more = len(names) - _SHOWN
    return ", ".join(names[:_SHOWN]) + (f" and {more} more" if more > 0 else "")
