"""The result of a check: an archive of all that its parts wrote, and the summary beside it. Standard library only.

Both are replaced whole, so a reader finds the last or the one before, whenever the writer is killed or the disk is
full. Two files and no more, each below 16 MB: what carries results from machine to machine often has limits.
"""

from __future__ import annotations

import io
import os
import tarfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

ARCHIVE, SUMMARY = "gpu-check.tar.gz", "summary.md"
MAX_BYTES = 15 << 20
_MAX_OF_A_FILE = 4 << 20
_WHOLE = (".json", ".md", ".png")  # a document without its middle is none


class Archive:
    """`folder` gets what `scratch` has. Its own files only: what else is in `folder` stays."""

    def __init__(self, folder: Path, scratch: Path) -> None:
        self._folder, self._scratch = folder, scratch

    def refresh(self, made: Mapping[str, bytes]) -> None:
        """`made`: files by name, beside those of `scratch`. Raises OSError where nothing can be written; the last
        archive is still there then."""
        self._folder.mkdir(parents=True, exist_ok=True)
        if SUMMARY in made:
            self._replace(SUMMARY, made[SUMMARY])
        most = _MAX_OF_A_FILE
        while len(data := self._packed(made, most)) > MAX_BYTES and most > 1 << 12:
            most //= 4
        self._replace(ARCHIVE, data)

    def _packed(self, made: Mapping[str, bytes], most: int) -> bytes:
        packed = io.BytesIO()
        with tarfile.open(fileobj=packed, mode="w:gz", compresslevel=6) as archive:
            for name, data in made.items():
                entry = tarfile.TarInfo(f"gpu-check/{name}")
                entry.size, entry.mtime = len(data), int(time.time())
                archive.addfile(entry, io.BytesIO(data))
            for path in self._files():
                name = f"{path.relative_to(self._scratch)}"
                if name in made:
                    continue
                try:
                    data, changed = path.read_bytes(), path.stat().st_mtime
                except FileNotFoundError:  # somebody's unfinished document, whole by now under its own name
                    continue
                if path.suffix not in _WHOLE:
                    data = without_middle(data, most)
                entry = tarfile.TarInfo(f"gpu-check/{name}")
                entry.size, entry.mtime = len(data), int(changed)
                archive.addfile(entry, io.BytesIO(data))
        return packed.getvalue()

    def _files(self) -> Iterator[Path]:
        for folder, names, files in os.walk(self._scratch):
            names[:] = sorted(name for name in names if name != SITE)
            yield from (Path(folder, name) for name in sorted(files) if not name.startswith("."))

    def _replace(self, name: str, data: bytes) -> None:
        fresh = self._folder / f".{name}.fresh"
        try:
            fresh.write_bytes(data)
            os.replace(fresh, self._folder / name)
        except OSError:
            fresh.unlink(missing_ok=True)  # what there is room for of it
            raise


SITE = "site"  # of the scratch folder: installed packages, which nobody wants back


def without_middle(data: bytes, most: int) -> bytes:
    """Shortens to about `most` bytes: the beginning, the number of bytes left out, and the end."""
    if len(data) <= most:
        return data
    half = most // 2
    return data[:half] + f"\n... {len(data) - 2 * half} bytes are left out ...\n".encode() + data[-half:]
