"""Errors for a MODEL that is none: what it is instead, and the nearest right name."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Iterable
from pathlib import Path

from hydra_engine.config.engine import DEMO_MODEL, SHAPES
from hydra_engine.config.gguf_files import gguf_models, gguf_tag, is_gguf
from hydra_engine.config.hub_cache import cached_names, repository_name
from hydra_engine.errors import CheckpointError, ConfigError, HydraError

_KINDS = "MODEL is a folder, a GGUF file, ORG/NAME of the Hugging Face Hub with --download, or demo"
_URL = re.compile(r"(?:https?://)?(?:www\.)?(?:huggingface\.co|hf\.co)/([^/?#:]+/[^/?#:]+)(:[^/?#]+)?(?:/([^?#]*))?.*")
_OLLAMA = re.compile(r"[A-Za-z0-9._-]+:[A-Za-z0-9._-]*")
_NUM_LISTED = 3  # nearest names
_MAX_LISTED = 1000  # entries of a folder that are looked at


def unknown_model(model: str) -> HydraError:
    """The error for a MODEL that is no folder, no GGUF file and no hub id."""
    shown = repr(model[:200])
    if not model.strip():
        return ConfigError(f"MODEL is empty; {_KINDS}", param="model")
    if found := _URL.fullmatch(model):
        written = _plain(_from_address(found[1], found[2], found[3] or ""))
        return CheckpointError(f"{shown} is an address; write {written}")
    if "://" in model:
        return CheckpointError(f"{shown} is an address; {_KINDS}")
    if os.path.isfile(model):
        return _wrong_file(Path(model))
    if model.startswith("~") and "\0" not in model:
        home = os.path.expanduser(model)
        meant = f"write {_plain(home)}" if os.path.exists(home) else f"and there is no {_plain(home)}"
        return CheckpointError(f"there is no model directory {shown}: the shell has not replaced ~; {meant}")
    if _OLLAMA.fullmatch(model):
        near = nearest_model(model.partition(":")[0])
        return CheckpointError(
            f"{shown} is a name of Ollama's library, which is not read; GGUF files of the Hugging Face Hub are "
            f"OWNER/REPO:Q4_K_M, with --download{near}"
        )
    if is_gguf(model):
        return CheckpointError(f"there is no file {shown}")
    stripped = model.rstrip("/")
    if stripped != model and re.fullmatch(r"[\w.-]+/[\w.-]+", stripped):
        return CheckpointError(f"there is no model directory {shown}; a hub id ends without a slash: {stripped[:200]}")
    return CheckpointError(f"there is no model directory {shown}{nearest_model(model) or f'; {_KINDS}'}")


def check_folder(folder: str) -> None:
    """Raises CheckpointError for a folder that has models in it and is none, or that is a repository of a cache; does
    not judge other folders."""
    path = Path(folder)
    if is_model_folder(path):
        return
    if name := repository_name(path.resolve().name):
        raise CheckpointError(f"{folder[:200]!r} is a repository of the Hugging Face cache; write {name}")
    if inner := _models_in(path):
        raise CheckpointError(
            f"{folder[:200]!r} is no model, but there {'are models' if len(inner) > 1 else 'is one'} in it: "
            f"{_listed(inner)}"
        )


def is_model_folder(folder: Path) -> bool:
    try:
        names = os.listdir(folder)
    except OSError:
        return False
    return "config.json" in names or any(map(is_gguf, names))


def _from_address(name: str, tag: str | None, rest: str) -> str:
    """The MODEL and flags for an address of the hub."""
    kind, _, place = rest.partition("/")
    revision, _, file = place.partition("/") if kind in ("tree", "blob", "resolve") else ("", "", "")
    if is_gguf(file):
        tag = f":{gguf_tag(gguf_models([file])[0][0])}" if gguf_models([file]) else None
    flag = f" --revision {revision}" if revision not in ("", "main") else ""
    return f"{name}{tag or ''} --download{flag}"


def _wrong_file(path: Path) -> CheckpointError:
    folder = path.parent
    shown = repr(str(path)[:200])
    if path.suffix in (".bin", ".pt", ".pth", ".ckpt"):
        kind = "is a file of PyTorch's, which can run code when opened and is not read"
    elif path.suffix == ".safetensors" and not is_model_folder(folder):
        kind = f"has weights alone; beside it config.json and the tokenizer are missing in {_plain(str(folder))}"
    else:
        kind = "is a file of a model" if is_model_folder(folder) else "is a file, and no GGUF file"
    if is_model_folder(folder):
        return CheckpointError(f"{shown} {kind}; MODEL is its folder, {_plain(str(folder))}")
    return CheckpointError(f"{shown} {kind}; {_KINDS}")


def nearest_model(model: str) -> str:
    """A clause with the nearest names of models: folders beside, cached ones, those that ship; empty if none is like
    it."""
    path = Path(model)
    word = path.name.lower()
    beside = _models_in(path.parent) if len(model) < 4096 and "\0" not in model else []
    near = [name for name in beside if _is_like(word, Path(name).name)]
    near += _similar(model, cached_names())
    near += [name for name in (DEMO_MODEL,) if _is_like(word, name)]
    shapes = [f"{name} with --load-format random" for name in SHAPES if _is_like(word, name)]
    if not near and not shapes:
        return ""
    return f"; the nearest {'is' if len(near) + len(shapes) == 1 else 'are'} {_listed([*near, *shapes])}"


def _similar(name: str, names: Iterable[str]) -> list[str]:
    """The ids that are like this one, or have a repository's name like its own; the most similar first."""
    given = [each for each in names if _is_like(name.lower(), each) or _is_like(name.split("/")[-1].lower(), each)]
    return sorted(given, key=lambda each: -difflib.SequenceMatcher(None, name.lower(), each.lower()).ratio())


def _is_like(word: str, name: str) -> bool:
    """True if one of the names has the other in it, separators aside, or they differ in few characters."""
    short, long = _letters(word), _letters(name)
    last = _letters(name.split("/")[-1])
    if len(short) > 200 or not short:
        return False
    inside = len(short) > 2 and (short in long or (len(last) > 2 and last in short))
    return inside or difflib.SequenceMatcher(None, short, last).ratio() >= 0.75


def _letters(text: str) -> str:
    return re.sub(r"[^a-z0-9]", "", text.lower())


def _models_in(folder: Path) -> list[str]:
    """Folders in this one that are models, and those one level further down, as in ORG/NAME; looks at no more than
    about _MAX_LISTED."""
    found: list[str] = []
    budget = _MAX_LISTED
    for first in _folders(folder):
        budget -= 1
        if is_model_folder(first):
            found.append(str(first))
            continue
        inner = _folders(first)[: max(budget, 0)]
        budget -= len(inner)
        found += [str(second) for second in inner if is_model_folder(second)]
        if budget <= 0:
            break
    return found


def _folders(folder: Path) -> list[Path]:
    try:
        with os.scandir(folder) as entries:
            return sorted(folder / entry.name for entry in entries if entry.is_dir() and not entry.name.startswith("."))
    except OSError:
        return []


def _listed(names: list[str]) -> str:
    more = len(names) - _NUM_LISTED
    return ", ".join(map(_plain, names[:_NUM_LISTED])) + (f" and {more} more" if more > 0 else "")


def _plain(name: str) -> str:
    """The name for a message of one line."""
    return name[:200] if name.isprintable() else repr(name[:200])
