"""The models in the Hugging Face cache, read from its folders (HF_HOME and its other variables apply). Never contacts
the hub."""

from __future__ import annotations

import os
from pathlib import Path

_MODELS = "models--"


def hub_cache() -> Path:
    """The cache's folder, which may not exist."""
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE)


def repository_folder(name: str) -> Path:
    return hub_cache() / f"{_MODELS}{name.replace('/', '--')}"


def cached_names() -> list[str]:
    """Ids of the cached repositories, sorted; empty if the cache cannot be listed."""
    try:
        folders = os.listdir(hub_cache())
    except OSError:
        return []
    return sorted(name for folder in folders if (name := repository_name(folder)))


def repository_name(folder: str) -> str | None:
    """The id of a repository by its folder in a cache, None for other folders."""
    return folder.removeprefix(_MODELS).replace("--", "/") if folder.startswith(_MODELS) else None


def cached_revisions(name: str) -> dict[str, Path]:
    """Folders of the cached snapshots of a repository by revision: branches and tags, and commits that have neither."""
    repository = repository_folder(name)
    refs = repository / "refs"
    found: dict[str, Path] = {}
    try:
        commits = {folder.name: folder for folder in sorted((repository / "snapshots").iterdir()) if folder.is_dir()}
        for ref in sorted(path for path in refs.rglob("*") if path.is_file()):
            commit = ref.read_text(encoding="utf-8", errors="replace").strip()
            if commit in commits:
                found[ref.relative_to(refs).as_posix()] = commits[commit]
        named = set(found.values())
        found |= {commit: folder for commit, folder in commits.items() if folder not in named}
    except OSError:  # what could be read so far
        return found
    return found


def cached_snapshot(name: str, revision: str | None) -> Path | None:
    """The folder of a cached snapshot, which may be incomplete; None if there is none. Raises HFValidationError for an
    impossible name."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        # allow_patterns=[] downloads no file, so an incomplete snapshot is found too.
        return Path(snapshot_download(name, revision=revision, local_files_only=True, allow_patterns=[]))
    except LocalEntryNotFoundError:
        return None
