"""Where the files of `model` are: a folder, or for a hub id such as Qwen/Qwen2-VL-2B-Instruct the Hugging Face cache
(HF_HOME and its other variables apply). Contacts the hub only with `download`.

Checks that the files of a model are there, not their contents. Imports huggingface_hub only to look up an id.
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
_TAGGED = re.compile(rf"({_HUB_ID.pattern}):([A-Za-z0-9._-]*)")  # a quantisation of a repository of GGUF files
_CONFIG = "config.json"
_WEIGHTS = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model")
_PROCESSORS = ("preprocessor_config.json", "processor_config.json")
_PICKLES = (".bin", ".pt", ".pth", ".ckpt")
# What is downloaded: nothing of other formats, of which many repositories have a second copy, and nothing in folders.
_WANTED = ("*.json", "*.jinja", "*.model", "merges.txt", "vocab.txt")
_UNWANTED = ["*/*", "consolidated*.safetensors"]
_SHOWN = 4  # missing files that a message names


def find_model(config: EngineConfig) -> EngineConfig:
    """The configuration with `model_folder` set where `model` is a hub id. Raises CheckpointError with one sentence
    where there is no such folder and nothing complete of that name in the cache, or it cannot be downloaded."""
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
    """The folder of the snapshot and what it lacks; None where there is none."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        # Of no file, which finds incomplete ones too.
        snapshot = snapshot_download(config.model, revision=config.revision, local_files_only=True, allow_patterns=[])
    except LocalEntryNotFoundError:
        return None, [_CONFIG]
    except HFValidationError:  # two dots in a row and the like
        raise _no_directory(config) from None
    return Path(snapshot), _missing(Path(snapshot), config)


def _missing(folder: Path, config: EngineConfig) -> list[str]:
    """Required files that are missing, broken links included."""
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
    """The names of the weight files; empty for a damaged index, which the loader reports."""
    try:
        places = json.loads(read_file(folder, _INDEX) or b"")["weight_map"].values()
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return set()
    return {str(place) for place in places}


def _download(config: EngineConfig) -> Path:
    """With huggingface_hub's bars on a terminal."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError
    from huggingface_hub.utils import httpx  # type: ignore[attr-defined]  # the one that it uses

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
    except (OSError, RuntimeError, httpx.HTTPError) as error:  # RuntimeError: of hf_xet
        why = str(error).strip().split("\n", 1)[0][:200] or type(error).__name__
    raise CheckpointError(f"{name!r} cannot be downloaded: {why}")


def _no_directory(config: EngineConfig) -> CheckpointError:
    return CheckpointError(f"there is no model directory {config.model[:200]!r}")


def _gguf(config: EngineConfig, name: str, tag: str) -> CheckpointError:
    """Files of which one repository has many, and of which a start has to be told one."""
    revision = f" --revision {config.revision}" if config.revision else ""
    wanted = f"'*{tag}*.gguf'" if tag else "FILE.gguf"
    return CheckpointError(
        f"{config.model!r} names GGUF files, which are served from a folder: `hf download {name}{revision} --include "
        f"{wanted} --include 'mmproj*.gguf' --local-dir DIR` fetches them, then DIR is the MODEL"
    )


def _listed(names: list[str]) -> str:
    more = len(names) - _SHOWN
    return ", ".join(names[:_SHOWN]) + (f" and {more} more" if more > 0 else "")
