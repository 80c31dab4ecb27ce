"""Finds a model's files: a folder, a hub id or GGUF files, for which it makes a Hugging Face directory first.

That directory has the JSON files that a spec and a tokenizer are read from, made from the GGUF settings, and links to
the files, whose weights are not copied. It is in the user's cache folder; there is a new one for a changed file.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import struct
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from hydra_engine.config import EngineConfig
from hydra_engine.config.environment import user_folder
from hydra_engine.config.gguf_files import gguf_parts, is_gguf
from hydra_engine.config.hub import (
    ModelPaths,
    check_gguf_options,
    check_no_mmproj,
    check_revision,
    find_hub_model,
)
from hydra_engine.core.model_folder import open_weights
from hydra_engine.errors import CheckpointError, ConfigError
from hydra_engine.models.specs.gguf_config import describe
from hydra_engine.models.specs.gguf_file import GgufHeader, read_gguf
from hydra_engine.preprocess.text.gguf_tokenizer import tokenizer_files

_FORM = 4  # version of the directories; a new version has new ones
_ROPE = "rope_freqs.weight"
_MODEL, _MMPROJ = "model-{:05}.gguf", "mmproj.gguf"  # names in the directories


def find_model_files(config: EngineConfig) -> EngineConfig:
    """Returns the configuration with `model_folder` set if `model` is a hub id or GGUF. Raises CheckpointError if there
    is no such model, and ConfigError for options that do not fit it."""
    if config.model_folder is not None:
        return config
    found = _find_paths(config)
    if found is None or not found.gguf:
        check_no_mmproj(config)
        return config if found is None else replace(config, model_folder=str(found.folder))
    check_gguf_options(config)
    if found.mmproj is not None and not found.mmproj.is_file():
        raise CheckpointError(f"there is no file {str(found.mmproj)[:200]!r}")
    return replace(config, model_folder=str(gguf_folder(found.gguf, found.mmproj)))


def is_gguf_model(config: EngineConfig) -> bool:
    """True if `find_model_files` found GGUF files."""
    return (config.model_path / _MODEL.format(1)).exists()


def _find_paths(config: EngineConfig) -> ModelPaths | None:
    """Returns the files of a GGUF file, a folder of GGUF files or a hub id; None for other folders and models that
    ship. Raises as `find_model_files`."""
    own = None if config.mmproj is None else Path(config.mmproj)
    path = Path(config.model)
    if os.path.isfile(config.model) and (is_gguf(config.model) or _begins_as_gguf(path)):
        check_revision(config)
        return ModelPaths(path.parent, tuple(_parts(path)), own)
    if _holds_gguf(config.model):
        check_revision(config)
        model, found = _in_folder(path)
        return ModelPaths(path, tuple(model), own or _only_mmproj(found))
    hub = find_hub_model(config)
    return hub and hub._replace(mmproj=hub.mmproj or own)


def _begins_as_gguf(path: Path) -> bool:
    """True for a GGUF file of another name, such as a blob of Ollama's store."""
    with contextlib.suppress(OSError), open_weights(path) as file:
        return file.read(4) == b"GGUF"
    return False


def check_tower(config: EngineConfig) -> None:
    """Raises ConfigError if `find_model_files` found a GGUF text model without a vision tower. Call it before pictures
    are used."""
    if is_gguf_model(config) and not (config.model_path / _MMPROJ).exists():
        raise ConfigError("this GGUF file is a text model; for pictures give its vision tower with --mmproj")


def gguf_folder(model: Sequence[Path], mmproj: Path | None) -> Path:
    """Returns the directory for these files, made if needed; `model` are all parts of a text model. Raises
    CheckpointError, and ConfigError if the directory cannot be written."""
    cache = user_folder("XDG_CACHE_HOME", "~/.cache")
    if cache is None:
        raise ConfigError("this user has no home directory; set XDG_CACHE_HOME")
    folder = cache / "gguf" / f"{model[0].stem[:60]}-{_digest([*model, *([mmproj] if mmproj else [])])}"
    if folder.is_dir():
        return folder
    headers = [read_gguf(path) for path in model]
    text = headers[0]._replace(tensors={name: each for header in headers for name, each in header.tensors.items()})
    tower = None if mmproj is None else read_gguf(mmproj)
    files = {
        **describe(text, tower, _rope_factors(headers)),
        **tokenizer_files(text.settings, pictures=tower is not None),
    }
    links = {_MODEL.format(number): path for number, path in enumerate(model, 1)}
    if mmproj is not None:
        links[_MMPROJ] = mmproj
    try:
        folder.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        unfinished = Path(tempfile.mkdtemp(dir=folder.parent, prefix="."))
        try:
            for name, content in files.items():
                written = content if isinstance(content, str) else json.dumps(content)
                (unfinished / name).write_text(written, encoding="utf-8")
            for name, target in links.items():
                (unfinished / name).symlink_to(target.resolve())
            os.rename(unfinished, folder)
        except BaseException:
            shutil.rmtree(unfinished)
            raise
    except OSError as error:
        if not folder.is_dir():  # else another process has made it
            reason = error.strerror or type(error).__name__
            raise ConfigError(
                f"cannot write {folder.parent}: {reason}; set XDG_CACHE_HOME to another folder"
            ) from error
    return folder


def _digest(paths: Sequence[Path]) -> str:
    digest = hashlib.blake2b(f"{_FORM}".encode(), digest_size=8)
    for path in paths:
        facts = path.stat()
        digest.update(f"\n{path.resolve()} {facts.st_size} {facts.st_mtime_ns}".encode())
    return digest.hexdigest()


def _rope_factors(headers: Sequence[GgufHeader]) -> tuple[float, ...]:
    """Divisors of the rotary frequencies; empty if the file has none."""
    header = next((header for header in headers if _ROPE in header.tensors), None)
    if header is None:
        return ()
    tensor = header.tensors[_ROPE]
    if tensor.type.name != "F32":
        raise CheckpointError(f"{_ROPE} in {header.path.name} must be F32, not {tensor.type.name}")
    with open(header.path, "rb") as file:
        file.seek(tensor.begin)
        return struct.unpack(f"<{tensor.nbytes // 4}f", file.read(tensor.nbytes))


def _parts(path: Path) -> list[Path]:
    """The files of a model that may be split. Raises CheckpointError if one is missing."""
    parts = [path.with_name(name) for name in gguf_parts(path.name)]
    missing = [part.name for part in parts if not part.is_file()]
    if missing:
        raise CheckpointError(f"{path.name} is one of {len(parts)} files, of which {', '.join(missing[:4])} is missing")
    return parts


def _holds_gguf(model: str) -> bool:
    if not os.path.isdir(model):  # Path.is_dir raises for impossible names
        return False
    names = os.listdir(model)
    return "config.json" not in names and any(name.endswith(".gguf") for name in names)


def _in_folder(folder: Path) -> tuple[list[Path], list[Path]]:
    """Returns the files of the folder's only text model, and all its mmproj files. Raises CheckpointError unless there
    is exactly one model."""
    files = sorted(folder.glob("*.gguf"))
    towers = [path for path in files if "mmproj" in path.name.lower()]
    models = {tuple(_parts(path)) for path in files if path not in towers}
    if len(models) != 1:
        names = ", ".join(sorted(model[0].name for model in models)[:4]) or "none beside mmproj"
        raise CheckpointError(f"{folder} has {len(models)} GGUF models ({names}); name one of the files")
    return list(models.pop()), towers


def _only_mmproj(files: Sequence[Path]) -> Path | None:
    if len(files) > 1:
        names = ", ".join(path.name for path in files[:4])
        raise CheckpointError(f"the folder has {len(files)} mmproj files ({names}); choose one with --mmproj")
    return files[0] if files else None
