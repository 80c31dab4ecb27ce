"""Reads the files of a model folder, which are untrusted: each is opened once, as a regular file of bounded size.

Small files may be links into the folder itself, the Hugging Face cache or a folder converted from GGUF, so that no
other file of the machine becomes part of a model; weights may be links to any regular file. Every error is a
CheckpointError that names the file. Does not know what the files contain.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import BinaryIO, NoReturn

from hydra_engine.errors import CheckpointError

MAX_CONFIG_BYTES = 8 << 20
MAX_INDEX_BYTES = 16 << 20
MAX_TEMPLATE_BYTES = 1 << 20
MAX_TOKENIZER_BYTES = 64 << 20

_TOKENIZERS = frozenset({"tokenizer.json", "vocab.json", "merges.txt", "vocab.txt", "tekken.json"})
_SMALL = (".json", ".jinja", ".txt", ".model", ".tiktoken")  # suffixes of files that are read whole
_TEMPLATES = "additional_chat_templates"
_KINDS = (
    (stat.S_ISDIR, "Is a directory"),
    (stat.S_ISFIFO, "Is a named pipe"),
    (stat.S_ISSOCK, "Is a socket"),
    (stat.S_ISCHR, "Is a device"),
    (stat.S_ISBLK, "Is a device"),
)


def read_file(folder: Path, name: str) -> bytes | None:
    """The content of a small file; None if there is none. `name` may begin with a subfolder. Raises CheckpointError if
    it cannot be read, is no regular file, lies outside the allowed folders, or is larger than its kind may be."""
    max_bytes = _max_bytes(name)
    file = _open_small(folder, name, max_bytes)
    if file is None:
        return None
    try:
        with file:
            data = file.read(max_bytes + 1)
    except OSError as error:
        _cannot_be_read(name, error)
    if len(data) > max_bytes:
        raise _too_large(name, max_bytes)
    return data


def read_text(folder: Path, name: str) -> str | None:
    """The content of a small file as UTF-8 text; None if there is none. Raises CheckpointError as `read_file`, and if
    it is not UTF-8."""
    data = read_file(folder, name)
    try:
        return None if data is None else data.decode()
    except UnicodeDecodeError:
        raise CheckpointError(f"{name} is not UTF-8 text") from None


def check_small_files(folder: Path) -> None:
    """Raises CheckpointError if a small file or an additional template of the folder cannot be opened, is no regular
    file, lies outside the allowed folders or is too large; OSError if the folder cannot be listed. For use before a
    library opens them by itself."""
    names = [entry.name for entry in os.scandir(folder) if entry.name.endswith(_SMALL)]
    for name in (*sorted(names), *template_names(folder)):
        if (file := _open_small(folder, name, _max_bytes(name))) is not None:
            file.close()


def template_names(folder: Path) -> list[str]:
    """Names of the additional chat templates, each with its subfolder, sorted; empty without that folder. Raises
    CheckpointError if it cannot be listed."""
    try:
        names = sorted(os.listdir(folder / _TEMPLATES))
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        _cannot_be_read(_TEMPLATES, error)
    return [f"{_TEMPLATES}/{name}" for name in names if name.endswith(".jinja")]


def open_weights(path: Path) -> BinaryIO:
    """Opens a regular file of any size for reading, following links anywhere, unbuffered. Raises CheckpointError if it
    is missing, no regular file, or cannot be opened."""
    try:
        file = _open_regular(path, path.name)
    except FileNotFoundError:
        raise CheckpointError(f"the weights file {path.name} is missing") from None
    except (OSError, ValueError) as error:
        _cannot_be_read(path.name, error)
    return file


def _max_bytes(name: str) -> int:
    """The largest size that a small file of this name may have."""
    if name.endswith(".jinja") or name == "chat_template.json":
        return MAX_TEMPLATE_BYTES
    if name.endswith(".index.json"):
        return MAX_INDEX_BYTES
    return MAX_TOKENIZER_BYTES if name in _TOKENIZERS or not name.endswith(".json") else MAX_CONFIG_BYTES


def _open_small(folder: Path, name: str, limit: int) -> BinaryIO | None:
    """Opens a file for reading, unbuffered, after checking its kind, real path and size (at most `limit` bytes); None
    if there is none. Raises CheckpointError."""
    try:
        file = _open_regular(folder / name, name)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError) as error:
        _cannot_be_read(name, error)
    try:
        _check_place(folder, name, Path(os.readlink(f"/proc/self/fd/{file.fileno()}")))
        if os.fstat(file.fileno()).st_size > limit:
            raise _too_large(name, limit)
    except BaseException:
        file.close()
        raise
    return file


def _open_regular(path: Path, name: str) -> BinaryIO:
    """Opens a file for reading, unbuffered, following links. Checks its kind first, since opening a device may have
    effects and opening a pipe blocks. Raises CheckpointError if it is no regular file, else the errors of `open`."""
    handle = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        mode = os.fstat(handle).st_mode
        if not stat.S_ISREG(mode):
            kind = next((kind for is_kind, kind in _KINDS if is_kind(mode)), "Is no file")
            raise CheckpointError(f"{name} cannot be read: {kind}, and a model's files are regular ones")
        return open(f"/proc/self/fd/{handle}", "rb", buffering=0)
    finally:
        os.close(handle)


def _check_place(folder: Path, name: str, place: Path) -> None:
    """Raises CheckpointError unless `place`, the real path of a file, is in the model folder, in a model's blobs of a
    Hugging Face cache, or in a folder converted from GGUF."""
    own = Path(os.path.realpath(folder))
    cached = place.parent.name == "blobs" and place.parts[-3].startswith("models--")
    made = place.parts[-4:-2] == ("hydra-engine", "gguf")
    if not (place.is_relative_to(own) or cached or made):
        raise CheckpointError(
            f"{name} is a link to {str(place)[:200]}, which is neither in the model folder nor in the Hugging Face "
            "cache; put a copy of the file in its place"
        )


def _too_large(name: str, limit: int) -> CheckpointError:
    """The error for a file of more than `limit` bytes, for the caller to raise."""
    return CheckpointError(f"{name} has more than {limit >> 20} MiB, which no file of its kind has")


def _cannot_be_read(name: str, error: OSError | ValueError) -> NoReturn:
    """Raises CheckpointError with the reason that `error` gives."""
    reason = getattr(error, "strerror", None) or type(error).__name__
    raise CheckpointError(f"{name} cannot be read: {reason}") from None
