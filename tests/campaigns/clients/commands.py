"""Runs clients that are commands, and has what they need on disk: a folder for their files, the model's tokenizer."""

from __future__ import annotations

import os
import subprocess
import tempfile
from pathlib import Path

from tests.campaigns.clients.checks import Skip, Target

LIMIT_S = 300
DEMO_MODEL = Path(__file__).parents[3] / "hydra_engine" / "demo" / "model"


def tokenizer_of(target: Target) -> str:
    """A folder. These clients count tokens by themselves; for other models than the demo say where."""
    if target.model == "demo":
        return str(DEMO_MODEL)
    try:
        return os.environ["CLIENTS_TOKENIZER"]
    except KeyError:
        raise Skip("set CLIENTS_TOKENIZER to the model's folder") from None


def new_folder() -> Path:
    return Path(tempfile.mkdtemp(prefix="hydra-clients-"))


def finish(command: list[str], target: Target, folder: Path, *, offline: bool = False) -> str:
    """Runs a command to its end; returns its output. Raises RuntimeError if its exit code is not 0. `offline`: it looks
    for no model on the Hugging Face hub."""
    environment = dict(os.environ, OPENAI_API_KEY=target.api_key, HF_HUB_OFFLINE=str(int(offline)))
    done = subprocess.run(
        command, cwd=folder, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        timeout=LIMIT_S, check=False,
    )  # fmt: skip
    if done.returncode != 0:
        raise RuntimeError(f"exit code {done.returncode}: {done.stdout.strip()[-400:]}")
    return done.stdout
