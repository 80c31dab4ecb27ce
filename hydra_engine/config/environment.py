"""Environment variables, which only this module reads: HYDRA_* (HYDRA_API_KEY and HYDRA_ADMIN_KEY for every
engine, the others for the command line only), XDG_CACHE_HOME and XDG_STATE_HOME."""

from __future__ import annotations

import os
from pathlib import Path

SECRET_VARIABLES = frozenset({"HYDRA_API_KEY", "HYDRA_ADMIN_KEY"})  # only the frontend process needs them


def environment_settings() -> dict[str, str]:
    """The HYDRA_* variables that have a value, by their full names."""
    return {name: value for name, value in os.environ.items() if name.startswith("HYDRA_") and value}


def state_folder() -> Path | None:
    """The folder of the command line's history; None if the user has no home directory."""
    return user_folder("XDG_STATE_HOME", "~/.local/state")


def user_folder(variable: str, default: str) -> Path | None:
    folder = Path(os.environ.get(variable, ""))
    if not folder.is_absolute():
        folder = Path(os.path.expanduser(default))
    return folder / "hydra-engine" if folder.is_absolute() else None


def environment_api_keys() -> tuple[str, ...]:
    return tuple(key for key in os.environ.get("HYDRA_API_KEY", "").split(",") if key)


def environment_api_key_file() -> str | None:
    return os.environ.get("HYDRA_API_KEY_FILE") or None


def environment_admin_key() -> str | None:
    return os.environ.get("HYDRA_ADMIN_KEY") or None
