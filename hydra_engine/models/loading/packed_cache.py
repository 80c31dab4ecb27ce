"""Packed weights of the processor's kernels in a file that the next start maps: nothing is read, checked, quantised or
packed again, no page is filled, and instances of one role share the memory.

The file is a safetensors file of bytes, whose metadata describe each layer's weights. It belongs to one state of the
model's files, the settings and the code (`cache_file`); another state has another file. The mapping cannot be
truncated: a file is written under another name, renamed, and never changed. Does not know layers. Needs the native
extension.
"""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import math
import mmap
import os
import struct
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hydra_engine.backend.cpu.experts import NativeExperts
from hydra_engine.backend.cpu.linear import NativeLinear, NativeQuantizedLinear
from hydra_engine.backend.devices import load_extension
from hydra_engine.errors import CheckpointError, ResourceError
from hydra_engine.models.loading.parameters import Holder, Kept
from hydra_engine.models.loading.safetensors_checkpoint import SafetensorsFile

logger = logging.getLogger(__name__)

_OF_THE_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO)
_LINE = 64  # bytes; alignment of the kernels' data
_CONTENTS = "hydra-engine"
_PACKAGE = Path(__file__).resolve().parents[2]
_READ = ("*.safetensors", "*.gguf", "*.json")  # files of a model's folder that determine weights and shapes


def cache_file(folder: Path, model_dir: Path, settings: str) -> Path:
    """Path of the cached weights, with a hash over model files, code and `settings`, which must cover everything else
    that determines the weights."""
    extension: Any = load_extension()[0]
    code = [*_PACKAGE.glob("models/**/*.py"), *_PACKAGE.glob("backend/**/*.py"), Path(extension.__file__)]
    files = sorted(path for pattern in _READ for path in model_dir.glob(pattern))
    stamps = [(path.name, *_stamp(path)) for path in (*sorted(code), *files)]
    key = hashlib.blake2b(repr((stamps, settings, extension.isa())).encode(), digest_size=12)
    return folder / f"{key.hexdigest()}.safetensors"


def restore(path: Path, holders: Sequence[Holder]) -> tuple[str, ...]:
    """Maps the file into the layers and returns the notes given to `write`. Raises CheckpointError if the file is
    damaged."""
    with closing(SafetensorsFile(path)) as file, open(path, "rb") as opened:
        # A private mapping that is never written to, so it shares the pages of the page cache.
        memory = torch.frombuffer(mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_COPY), dtype=torch.uint8)
        blobs = (memory[entry.begin : entry.end] for entry in file.entries.values())
        try:
            contents = json.loads(file.metadata[_CONTENTS])
            for holder, described in zip(holders, contents["holders"], strict=True):
                holder.packed = tuple(_restored(item, blobs) for item in described)
        except (KeyError, TypeError, ValueError, RuntimeError, StopIteration) as error:
            raise CheckpointError(f"the packed weights in {path} are damaged; delete that file") from error
    return tuple(contents["notes"])


def write(path: Path, holders: Sequence[Holder], notes: Sequence[str]) -> str | None:
    """Writes the packed weights. Returns the reason if the disk refuses them, for example because it is full; the next
    start then packs again. Raises ResourceError if the path is not a folder or not writable for this user."""
    described, blobs = [], []
    for holder in holders:
        items = [_described(kept) for kept in holder.packed]
        described.append([item for item, _ in items])
        blobs += [blob for _, parts in items for blob in parts]
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with open(partial, "wb") as file:
                file.write(_header(json.dumps({"holders": described, "notes": list(notes)}), blobs))
                for blob in blobs:
                    file.write(blob.numpy().data)
                    file.write(bytes(-len(blob) % _LINE))
            partial.rename(path)
        finally:
            partial.unlink(missing_ok=True)
    except OSError as error:
        reason = error.strerror or type(error).__name__
        if error.errno in _OF_THE_DISK:
            logger.warning("packed weights cannot be written to %s: %s", path.parent, reason)
            return reason
        raise ResourceError(
            f"packed weights cannot be written to {path.parent}: {reason}", param="packed_cache"
        ) from error
    return None


def _described(kept: Kept) -> tuple[dict[str, Any], list[Tensor]]:
    """Returns the metadata for `_restored`, and the bytes."""
    if isinstance(kept, Tensor):
        whole = kept.contiguous()
        described = {"dtype": str(kept.dtype).removeprefix("torch."), "shape": list(kept.shape)}
        return described, [whole.view(-1).view(torch.uint8)]
    if isinstance(kept, NativeExperts):
        return {"experts": kept.num_experts, "forms": kept.forms}, list(kept.data)
    assert isinstance(kept, NativeLinear | NativeQuantizedLinear)
    bias = [] if kept.bias is None else [kept.bias.view(torch.uint8)]
    return {"quantized": isinstance(kept, NativeQuantizedLinear), "form": kept.form, "bias": bool(bias)}, [
        kept.data,
        *bias,
    ]


def _restored(item: dict[str, Any], blobs: Iterator[Tensor]) -> Kept:
    data = next(blobs)
    if "dtype" in item:
        dtype: torch.dtype = getattr(torch, item["dtype"])
        return data[: math.prod(item["shape"]) * dtype.itemsize].view(dtype).view(item["shape"])
    if "experts" in item:
        forms = [tuple(form) for form in item["forms"]]
        return NativeExperts.from_packed(item["experts"], forms, [data, next(blobs)])
    kind = NativeQuantizedLinear if item["quantized"] else NativeLinear
    return kind.from_packed(tuple(item["form"]), data, next(blobs).view(torch.float32) if item["bias"] else None)


def _header(contents: str, blobs: Sequence[Tensor]) -> bytes:
    header: dict[str, Any] = {"__metadata__": {_CONTENTS: contents}}
    position = 0
    for index, blob in enumerate(blobs):
        size = len(blob) + -len(blob) % _LINE
        header[str(index)] = {"dtype": "U8", "shape": [size], "data_offsets": [position, position + size]}
        position += size
    text = json.dumps(header).encode()
    text += b" " * (-(8 + len(text)) % _LINE)
    return struct.pack("<Q", len(text)) + text


def _stamp(path: Path) -> tuple[int, ...]:
    """Size, times and inode of a file. Container images and archives give all files the same modification time, so two
    models of one shape may differ in nothing else; the change time cannot be set."""
    status = path.stat()
    return status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino
