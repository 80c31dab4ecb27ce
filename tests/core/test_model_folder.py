"""Files that are opened in a model folder: regular files of bounded size, and links that stay where models are."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from hydra_engine.core.model_folder import MAX_CONFIG_BYTES, check_small_files, open_weights, read_file, read_text
from hydra_engine.errors import CheckpointError


def _socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))


NO_FILES: dict[str, Callable[[Path], object]] = {
    "named pipe": os.mkfifo,
    "directory": Path.mkdir,
    "socket": _socket,
    "device": lambda path: path.symlink_to("/dev/zero"),
}


@pytest.mark.parametrize("kind", NO_FILES)
def test_what_is_no_regular_file_is_named_and_not_waited_for(tmp_path: Path, kind: str) -> None:
    NO_FILES[kind](tmp_path / "config.json")
    for reader in (lambda: read_file(tmp_path, "config.json"), lambda: open_weights(tmp_path / "config.json")):
        with pytest.raises(CheckpointError, match=f"config.json cannot be read: Is a {kind}"):
            reader()
    with pytest.raises(CheckpointError, match=kind):
        check_small_files(tmp_path)


def test_small_files_are_small(tmp_path: Path) -> None:
    for name, most in (("config.json", 8), ("x.index.json", 16), ("chat_template.jinja", 1), ("tokenizer.json", 64)):
        os.truncate(os.open(tmp_path / name, os.O_CREAT | os.O_WRONLY), (most << 20) + 1)
        with pytest.raises(CheckpointError, match=f"{name} has more than {most} MiB"):
            read_file(tmp_path, name)
    (tmp_path / "config.json").write_bytes(b" " * MAX_CONFIG_BYTES)
    assert read_file(tmp_path, "config.json") == b" " * MAX_CONFIG_BYTES


def test_links_of_small_files_stay_where_models_are(tmp_path: Path) -> None:
    cache = tmp_path / "models--a--b"
    folder = cache / "snapshots" / "main"
    made = tmp_path / "hydra-engine" / "gguf" / "x"
    for path in (folder / "inner", cache / "blobs", made):
        path.mkdir(parents=True)
    for place in (folder / "inner" / "file", cache / "blobs" / "12ab", made / "file"):
        place.write_text("text", encoding="utf-8")
        (folder / "config.json").symlink_to(os.path.relpath(place, folder))
        assert read_text(folder, "config.json") == "text"
        (folder / "config.json").unlink()
    secret = tmp_path / "secret"
    secret.write_text("root", encoding="utf-8")
    (folder / "additional_chat_templates").symlink_to(tmp_path)
    (folder / "config.json").symlink_to(secret)
    for name in ("config.json", "additional_chat_templates/secret"):
        with pytest.raises(CheckpointError, match=f"{name} is a link to .*secret.*; put a copy"):
            read_file(folder, name)
    with open_weights(folder / "config.json") as file:  # weights may be anywhere
        assert file.read() == b"root"


def test_what_is_missing_is_none_and_text_is_utf8(tmp_path: Path) -> None:
    (tmp_path / "broken").symlink_to("nowhere")
    assert read_file(tmp_path, "config.json") is read_file(tmp_path, "broken") is None
    with pytest.raises(CheckpointError, match="the weights file broken is missing"):
        open_weights(tmp_path / "broken")
    (tmp_path / "x.jinja").write_bytes(b"\xff")
    with pytest.raises(CheckpointError, match="jinja is not UTF-8 text"):
        read_text(tmp_path, "x.jinja")
