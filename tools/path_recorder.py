"""Records which functions of the package run in this process while a switch is on. Used by `count_path`.

The switch and the notes are shared memory: a child process may have no environment and no disk, and may be killed.
"""

from __future__ import annotations

import mmap
import os
import sys
import threading
from collections.abc import Collection
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

NOTES_BYTES = 1 << 20


def shared(path: Path, size: int) -> mmap.mmap:
    with path.open("w+b") as file:
        file.truncate(size)
        return mmap.mmap(file.fileno(), size)


def record(folder: Path, package: str, entries: Collection[str]) -> None:
    """Starts the recorder. It notes each function once per value of the switch, and once more if it runs below one of
    `entries` (qualified names)."""
    with (folder / "switch").open("rb") as file:
        switch = mmap.mmap(file.fileno(), 1, access=mmap.ACCESS_READ)
    notes = shared(folder / f"{os.getpid()}.notes", NOTES_BYTES)
    seen: set[tuple[int, bool, CodeType]] = set()
    lock = threading.Lock()

    def look(frame: FrameType, event: str, _argument: Any) -> None:
        # Generated code, like a dataclass's, has no file; the module that it runs for has.
        if event != "call" or not switch[0] or not frame.f_globals.get("__file__", "").startswith(package):
            return
        found = (switch[0], _is_below(frame, entries), frame.f_code)
        if found in seen:
            return
        seen.add(found)
        lines = [
            (frame.f_globals["__file__"], frame.f_code.co_firstlineno),
            *((path, 0) for path in struct_files(frame)),
        ]
        with lock:
            for path, line in lines:
                notes.write(f"{found[0]}\t{found[1]:d}\t{path}\t{line}\n".encode())

    threading.setprofile(look)
    sys.setprofile(look)


def _is_below(frame: FrameType | None, entries: Collection[str]) -> bool:
    while frame is not None:
        if frame.f_code.co_qualname in entries:
            return True
        frame = frame.f_back
    return False


def struct_files(frame: FrameType) -> list[str]:
    """Files of the message types that the function of `frame` names. Their constructors run in C and are not traced."""
    struct = getattr(sys.modules.get("msgspec"), "Struct", ())
    named = [frame.f_globals.get(name) for name in frame.f_code.co_names]
    modules = {value.__module__ for value in named if isinstance(value, type) and issubclass(value, struct)}
    return [sys.modules[name].__file__ or "" for name in modules if name in sys.modules]
