"""Files and classes that comments and docstrings name in backticks exist."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache

from tests.architecture.sources import PACKAGES, ROOT, files_in, text_of

LOOKED_AT = (
    *(f"{package}/" for package in PACKAGES),
    "kernels/",
    "bench/",
    "tests/campaigns/",
)  # others name classes of the standard library
FOLDERS = (*LOOKED_AT, "tools", "tests")

_FILE = re.compile(r"`([\w/]+\.py)\b")
_CLASS = re.compile(r"`([a-z_]+(?:\.[a-z_]+)*)\.([A-Z]\w+)")


@cache
def sources() -> dict[str, str]:
    """Texts by paths below the root."""
    return {str(path.relative_to(ROOT)): text_of(path) for path in files_in(*FOLDERS)}


def ending_in(name: str, files: dict[str, str]) -> list[str]:
    """Files of that name; a name may leave out the folders in front."""
    return [file for file in files if f"/{file}".endswith(f"/{name}")]


def stale(text: str, files: dict[str, str]) -> Iterator[str]:
    for name in _FILE.findall(text):
        if not ending_in(name, files):
            yield name
    for module, name in _CLASS.findall(text):
        path = module.replace(".", "/")
        candidates = ending_in(f"{path}.py", files) + ending_in(f"{path}/__init__.py", files)
        if not any(re.search(rf"^(class )?{name}\b", files[file], re.MULTILINE) for file in candidates):
            yield f"{module}.{name}"


def test_files_and_classes_that_are_named_exist() -> None:
    files = sources()
    looked_at = {path: text for path, text in files.items() if path.startswith(LOOKED_AT)}
    named = [f"{path}: {name}" for path, text in looked_at.items() for name in stale(text, files)]
    assert not named, "\n".join(named)


def test_a_stale_name_is_found() -> None:
    files = sources()
    assert list(
        stale("see `gone.py`, `core/plans.py` and `gone.plans.VisionPlan`, `core.plans.VisionPlan`", files)
    ) == [
        "gone.py",
        "gone.plans.VisionPlan",
    ]
