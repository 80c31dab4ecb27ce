"""Certificates of a test's own authority, made by the openssl command."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from hydra_nodes.tls import AUTHORITY, CERTIFICATE, KEY

NEW_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes")


def run(*arguments: str | Path) -> None:
    subprocess.run(["openssl", *map(str, arguments)], check=True, capture_output=True, timeout=60)


def make_authority(folder: Path) -> None:
    if shutil.which("openssl") is None:
        pytest.skip("there is no openssl command to make certificates with")
    folder.mkdir()
    subject = ("-subj", f"/CN=authority {folder.name}")
    run("req", "-x509", *NEW_KEY, "-keyout", folder / "ca.key", "-out", folder / AUTHORITY, "-days", "2", *subject)


def make_node(folder: Path, authority: Path) -> Path:
    """Makes the folder of a node, whose certificate the authority has signed."""
    folder.mkdir()
    request = folder / "request"
    run("req", "-new", *NEW_KEY, "-keyout", folder / KEY, "-out", request, "-subj", f"/CN={folder.name}")
    signer = ("-CA", authority / AUTHORITY, "-CAkey", authority / "ca.key", "-CAcreateserial", "-days", "2")
    run("x509", "-req", "-in", request, *signer, "-out", folder / CERTIFICATE)
    shutil.copy(authority / AUTHORITY, folder / AUTHORITY)
    return folder
