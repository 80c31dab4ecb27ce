"""Files of measurements that a later start reads instead of measuring again: JSON with a digest, written atomically,
readable by the owner only. Does not know what was measured.
"""

from __future__ import annotations

import hashlib
import os
import secrets
from pathlib import Path
from typing import TypeVar

import msgspec

MAX_BYTES = 4 << 20

T = TypeVar("T")


class _File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The content of a file. `digest`: BLAKE2b-256 of the bytes of `profile`, in hex."""

    digest: str
    profile: msgspec.Raw


class Refused(Exception):
    """Raised if a file exists and cannot be used; the message is the reason, with "it" for the file."""


def write(path: Path, profile: object) -> None:
    """Writes `profile` as JSON with its digest, atomically and with mode 0600, synced to the disk. Makes missing
    folders. Raises OSError; an earlier file is then unchanged."""
    body = msgspec.json.encode(profile)
    content = msgspec.json.encode(_File(_digest(body), msgspec.Raw(body)))
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


def read(path: Path, kind: type[T]) -> T | None:
    """The profile that `write` wrote; None if there is no file. Raises Refused if the file cannot be read, has more
    than MAX_BYTES, is damaged, or does not hold a `kind`."""
    try:
        with path.open("rb") as file:
            content = file.read(MAX_BYTES + 1)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise Refused(f"it cannot be read: {error.strerror}") from error
    if len(content) > MAX_BYTES:
        raise Refused(f"it has more than {MAX_BYTES >> 20} MiB")
    try:
        outer = msgspec.json.decode(content, type=_File, strict=True)
        if _digest(bytes(outer.profile)) != outer.digest:
            raise Refused("it is damaged")
        return msgspec.json.decode(outer.profile, type=kind, strict=True)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise Refused("it is damaged, or of another version of the engine") from error


def _digest(body: bytes) -> str:
    """BLAKE2b-256 in hex."""
    return hashlib.blake2b(body, digest_size=32).hexdigest()
