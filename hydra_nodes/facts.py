"""Facts that must be the same on all nodes of a deployment, compared when an instance joins."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from hydra_engine import __version__
from hydra_engine.core.messages import WIRE_VERSION
from hydra_engine.transfer.messages import TRANSFER_VERSION

_SUFFIXES = {".json", ".safetensors", ".gguf", ".model", ".txt", ".jinja", ".py"}
_SAMPLE_BYTES = 1 << 16  # of each end of a larger file


def deployment_facts(model: Path | None) -> dict[str, str]:
    """Returns facts by their names. `model`: a folder whose digest is one of them, None: no folder."""
    facts = {
        "engine version": __version__,
        "wire version": str(WIRE_VERSION),
        "transfer version": str(TRANSFER_VERSION),
    }
    return facts if model is None else facts | {"model digest": model_digest(model)}


def model_digest(folder: Path) -> str:
    """Returns a digest of the names and sizes of a model's files and of both ends of their contents, which takes
    milliseconds: it tells one model from another, and does not prove that each weight is the same. A sentence's part
    that says so if there is no folder."""
    digest = hashlib.sha256()
    try:
        for path in sorted(path for path in folder.iterdir() if path.suffix in _SUFFIXES):
            with path.open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                digest.update(f"{path.name}\0{size}\0".encode())
                digest.update(file.read(_SAMPLE_BYTES))
                file.seek(max(size - _SAMPLE_BYTES, 0))
                digest.update(file.read(_SAMPLE_BYTES))
    except OSError as error:
        return f"(no model can be read at {folder}: {error.strerror})"
    return digest.hexdigest()[:16]
