"""`hydra-engine list [FOLDER..]`: the models of the Hugging Face cache and of folders, with what `serve` would say of
each. Reads headers and JSON, loads nothing and never contacts the hub."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from hydra_engine.config import DEMO_MODEL, EngineConfig
from hydra_engine.config.gguf_files import choose_mmproj, gguf_models, gguf_tag, model_tags
from hydra_engine.config.hub import has_gguf_alone, missing_files
from hydra_engine.config.hub_cache import cached_names, cached_revisions, repository_folder
from hydra_engine.core.units import size
from hydra_engine.errors import CheckpointError, ConfigError
from hydra_engine.models.specs.gguf_config import describe
from hydra_engine.models.specs.gguf_file import read_gguf
from hydra_engine.models.specs.registry import load_spec

_HEADINGS = ("NAME", "FAMILY", "WEIGHTS", "SIZE", "MODIFIED", "")
_MAX_REASON = 160  # characters


class Row(NamedTuple):
    """A model. `name` is what `serve` takes; `problem`: why it cannot be served, empty if nothing speaks against it."""

    name: str
    family: str
    weights: str
    num_bytes: int
    modified: float
    problem: str = ""


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.usage = "%(prog)s [FOLDER ...]"
    parser.add_argument("folders", nargs="*", metavar="FOLDER", help="folders of models, which are listed too")
    parser.epilog = (
        "The last column says why a model cannot be served; `-` is not known. `hydra-engine pull` fetches a model or "
        "what is missing of one, `hf cache` removes one."
    )


def run(arguments: argparse.Namespace) -> int:
    for folder in arguments.folders:
        if not os.path.isdir(folder):
            raise ConfigError(f"there is no folder {folder[:200]!r} to list")
    rows = [_folder_row(DEMO_MODEL, EngineConfig().model_path), *_cached()]
    for folder in arguments.folders:
        rows += _models_below(Path(folder))
    sys.stdout.write("\n".join(_table(rows)) + "\n")
    return 0


def _table(rows: list[Row]) -> Iterator[str]:
    cells = [_HEADINGS, *(_cells(row) for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for line in cells:
        yield "  ".join(f"{cell:{width}}" for cell, width in zip(line, widths, strict=True)).rstrip()


def _cells(row: Row) -> tuple[str, ...]:
    modified = time.strftime("%Y-%m-%d %H:%M", time.localtime(row.modified)) if row.modified else "-"
    reason = row.problem if len(row.problem) <= _MAX_REASON else row.problem[: _MAX_REASON - 2] + ".."
    cells = (row.name, row.family or "-", row.weights or "-", size(row.num_bytes), modified, reason)
    return tuple("".join(char if char.isprintable() else "?" for char in cell) for cell in cells)


def _cached() -> Iterator[Row]:
    """Rows of the Hugging Face cache; a snapshot that is not `main` has its revision."""
    for name in cached_names():
        revisions = cached_revisions(name)
        if not revisions:
            yield _row(name, sorted(repository_folder(name).glob("blobs/*")), problem=f"incomplete: {_pull(name)}")
        for revision, folder in revisions.items():
            flag = "" if revision == "main" else f" --revision {revision}"
            yield from _snapshot_rows(name, flag, folder)


def _pull(name: str) -> str:
    return f"`hydra-engine pull {name}` fetches the rest"


def _snapshot_rows(name: str, flag: str, folder: Path) -> Iterator[Row]:
    files = _files(folder)
    paths = [path.relative_to(folder).as_posix() for path in files]
    models = gguf_models(paths)
    for model, tag in zip(models, model_tags(paths), strict=True):
        full = f"{name}:{tag}{flag}"
        yield _gguf_row(full, folder, model, choose_mmproj(paths, model[0]), _pull(full))
    if not has_gguf_alone(paths):
        yield _folder_row(name + flag, folder, _pull(name + flag))
    elif not models:  # an mmproj alone
        yield _row(name + flag, files, problem=f"incomplete, without a text model: {_pull(name + flag)}")


def _models_below(folder: Path) -> Iterator[Row]:
    """Rows of a folder that is a model, else of the models in it and in its folders, as ORG/NAME."""
    for place in (folder, *_folders(folder), *(inner for outer in _folders(folder) for inner in _folders(outer))):
        names = sorted(os.listdir(place)) if os.access(place, os.R_OK) else []
        for model in gguf_models(names):
            first = next(part for part in model if part in names)
            yield _gguf_row(str(place / first), place, model, choose_mmproj(names, model[0]))
        if "config.json" in names and not has_gguf_alone(names):
            yield _folder_row(str(place), place)


def _folders(folder: Path) -> list[Path]:
    try:
        with os.scandir(folder) as entries:
            return sorted(folder / entry.name for entry in entries if entry.is_dir() and entry.name[0] != ".")
    except OSError:
        return []


def _files(folder: Path) -> list[Path]:
    """Files of a folder and its subfolders, without broken links and what may not be read."""
    return sorted(path for path in folder.rglob("*") if os.path.isfile(path))


def _folder_row(name: str, folder: Path, advice: str = "") -> Row:
    """The row of a model folder of safetensors; `advice` follows what is missing."""
    files = _files(folder)
    problem = ""
    try:
        missing = [each for each in missing_files(folder) if each != "config.json"]
        problem = _incomplete(missing[0], advice) if missing else ""
        spec = load_spec(folder)
    except (CheckpointError, ConfigError) as error:
        reason = error.message.split(";")[0]
        return _row(name, files, problem=problem if problem and advice else reason)
    if not problem and not any(path.suffix == ".safetensors" for path in files):
        problem = "its weights are PyTorch's pickles, which are not read"
    return _row(name, files, spec.family, spec.quantized_as or spec.dtype, problem)


def _incomplete(missing: str, advice: str) -> str:
    return f"incomplete, without {missing}" + (f": {advice}" if advice else "")


def _gguf_row(name: str, folder: Path, model: list[str], mmproj: str | None, advice: str = "") -> Row:
    """The row of a model of GGUF files; `advice` follows what is missing."""
    there = [folder / part for part in [*model, *filter(None, [mmproj])] if (folder / part).is_file()]
    weights = gguf_tag(model[0])
    if missing := [part for part in model if not (folder / part).is_file()]:
        return _row(name, there, "", weights, _incomplete(missing[0], advice))
    try:
        header = read_gguf(folder / model[0])
        tower = None if mmproj is None else read_gguf(folder / mmproj)
        family = str(describe(header, tower)["config.json"]["model_type"])
    except CheckpointError as error:
        return _row(name, there, "", weights, error.message.split(";")[0])
    return _row(name, there, family, weights)


def _row(name: str, files: list[Path], family: str = "", weights: str = "", problem: str = "") -> Row:
    facts = [path.stat() for path in files]
    return Row(
        name,
        family,
        weights,
        sum(fact.st_size for fact in facts),
        max((fact.st_mtime for fact in facts), default=0.0),
        problem,
    )
