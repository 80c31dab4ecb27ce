"""Measurements of attention kernels on disk, beside the planner's step times.

A measurement is valid until the GPU, its driver, a library or the model's shapes change.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import logging
import math
from datetime import UTC, datetime
from pathlib import Path

import msgspec
import torch

from hydra_engine import __version__
from hydra_engine.backend.cuda import flashinfer_kernels
from hydra_engine.backend.cuda.attention_choice import TRITON, Measured, Shapes
from hydra_engine.core import profile_file

logger = logging.getLogger(__name__)

SCHEMA = 1
_LIBRARIES = ("triton", "flashinfer-python", "nvidia-cudnn-cu13")
_LONGEST_S = 60.0  # a longer measured call is refused as damaged


class Key(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The key of a measurement. driver: the newest CUDA version that it runs. libraries: versions and kernels, "" if
    missing."""

    gpu: str
    capability: tuple[int, int]
    num_sms: int
    driver: int
    libraries: dict[str, str]
    dtype: str
    shapes: Shapes
    engine: str = __version__
    schema: int = SCHEMA


class _Kept(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    key: Key
    measured: Measured


def key_of(device: torch.device, num_sms: int, driver: int, dtype: torch.dtype, shapes: Shapes) -> Key:
    return Key(
        gpu=torch.cuda.get_device_name(device),
        capability=torch.cuda.get_device_capability(device),
        num_sms=num_sms,
        driver=driver,
        libraries={"torch": str(torch.__version__), "flashinfer's kernels": flashinfer_kernels.describe_installed()}
        | {name: _version(name) for name in _LIBRARIES},
        dtype=str(dtype).removeprefix("torch."),
        shapes=shapes,
    )


def file_of(folder: Path, key: Key) -> Path:
    """The file of a GPU, dtype and shapes; an outdated measurement is overwritten."""
    lasting = msgspec.json.encode((key.gpu, key.num_sms, key.dtype, key.shapes))
    return folder / f"attention-{hashlib.blake2b(lasting, digest_size=8).hexdigest()}.json"


def load(folder: Path, key: Key) -> Measured | None:
    """The kept measurement of `key`, or None. Logs why a file cannot be used."""
    try:
        body = profile_file.read(file_of(folder, key))
        if body is None:
            return None
        kept = _decoded(body)
        if kept.key != key:
            raise profile_file.Refused(f"it was measured with {_difference(kept.key, key)}")
    except profile_file.Refused as reason:
        logger.warning("the kept choice of attention kernels is not used: %s; they are measured again", reason)
        return None
    return kept.measured


def save(folder: Path, key: Key, measured: Measured) -> None:
    try:
        profile_file.write(file_of(folder, key), msgspec.json.encode(_Kept(key, measured)))
    except OSError as error:
        logger.warning("the choice of attention kernels could not be kept: %s; the next start measures again", error)


def utc_date() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%d")


def _decoded(body: bytes) -> _Kept:
    try:
        kept = msgspec.json.decode(body, type=_Kept, strict=True)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise profile_file.Refused("it is damaged, or of another version of the engine") from error
    for use, seconds in kept.measured.seconds.items():
        if TRITON not in seconds:
            raise profile_file.Refused(f"it has no time of ours for {use[:20]}")
        for value in seconds.values():
            if not (math.isfinite(value) and 0 < value <= _LONGEST_S):
                raise profile_file.Refused(f"a number is out of range: {value:g} s")
    return kept


def _difference(then: Key, now: Key) -> str:
    names = [name for name in Key.__struct_fields__ if getattr(then, name) != getattr(now, name)]
    return ", ".join(f"{name} {str(getattr(then, name))[:80]}" for name in names)


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""
