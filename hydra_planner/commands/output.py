"""`--output FILE` of the planner's commands, checked before anything is computed."""

from __future__ import annotations

import os
from pathlib import Path

from hydra_engine.errors import ConfigError


def check_output(path: Path) -> None:
    """Raises ConfigError if no file can be written there."""
    try:
        _check(path)
    except OSError as error:  # a name that is too long, a folder that nobody may look into
        raise ConfigError(f"--output: {path} cannot be written: {error.strerror}", param="output") from error


def _check(path: Path) -> None:
    if not path.parent.is_dir():
        raise ConfigError(f"--output {path}: there is no folder {path.parent}", param="output")
    if path.is_dir():
        raise ConfigError(f"--output {path}: that is a folder; name a file in it", param="output")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ConfigError(f"--output {path}: no permission to write there", param="output")
