"""Headers of GGUF files: what is read, and that a damaged or hostile file costs a sentence and little memory."""

from __future__ import annotations

import random
import resource
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from hydra_engine.errors import CheckpointError
from hydra_engine.models.specs import gguf_file
from hydra_engine.models.specs.gguf_file import GgufHeader, read_gguf

F32, Q8_0, Q2_K = 0, 8, 10
UINT32, INT32, FLOAT32, BOOL, STRING, ARRAY, UINT64 = 4, 5, 6, 7, 8, 9, 10
Setting = tuple[str, int, Any]
Tensor = tuple[str, Sequence[int], int, int]  # name, dimensions with the row's length first, type, place


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def value_bytes(kind: int, value: Any) -> bytes:
    if kind == STRING:
        return text(value)
    if kind == ARRAY:
        inner, values = value
        return struct.pack("<IQ", inner, len(values)) + b"".join(value_bytes(inner, one) for one in values)
    return struct.pack("<" + {UINT32: "I", INT32: "i", FLOAT32: "f", BOOL: "?", UINT64: "Q"}[kind], value)


def gguf_bytes(settings: Sequence[Setting] = (), tensors: Sequence[Tensor] = (), data: bytes = b"") -> bytes:
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(settings))
    for name, kind, value in settings:
        head += text(name) + struct.pack("<I", kind) + value_bytes(kind, value)
    for name, dims, kind, place in tensors:
        head += text(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, place)
    return head + b"\0" * (-len(head) % 32) + data


def read(tmp_path: Path, content: bytes) -> GgufHeader:
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    return read_gguf(path)


SETTINGS: list[Setting] = [
    ("general.architecture", STRING, "llama"),
    ("llama.block_count", UINT32, 3),
    ("llama.attention.layer_norm_rms_epsilon", FLOAT32, 1e-5),
    ("flag", BOOL, True),
    ("tokenizer.ggml.tokens", ARRAY, (STRING, ["a", "", "日本", "▁x"])),
    ("tokenizer.ggml.token_type", ARRAY, (INT32, [1, -1, 3])),
    ("tokenizer.ggml.scores", ARRAY, (FLOAT32, [0.5, -1.0])),
]
TENSORS: list[Tensor] = [("a.weight", (64, 3), Q8_0, 0), ("b", (5,), F32, 224)]
WHOLE = gguf_bytes(SETTINGS, TENSORS, b"\1" * 244)


def test_settings_and_places_are_read(tmp_path: Path) -> None:
    header = read(tmp_path, WHOLE)
    assert header.settings.values["tokenizer.ggml.tokens"] == ["a", "", "日本", "▁x"]
    assert header.settings.values["tokenizer.ggml.token_type"] == [1, -1, 3]
    assert header.settings.integer("llama.block_count") == 3
    assert header.settings.number("llama.attention.layer_norm_rms_epsilon") == 1e-5  # and not 9.99999974e-06
    assert header.settings.flag("flag", False) is True
    a, b = header.tensors.values()
    assert (a.name, a.type.name, a.shape, a.nbytes) == ("a.weight", "Q8_0", (3, 64), 204)
    assert (b.name, b.type.name, b.shape, b.nbytes) == ("b", "F32", (5,), 20)
    assert b.begin - a.begin == 224 and b.end == len(WHOLE)


def test_headers_longer_than_what_is_read_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = read(tmp_path, WHOLE)
    for size in (1, 7, 64):
        monkeypatch.setattr(gguf_file, "_CHUNK", size)
        header = read(tmp_path, WHOLE)
        assert header.settings.values == whole.settings.values and header.tensors == whole.tensors
    monkeypatch.setattr(gguf_file, "MAX_HEADER_BYTES", 100)
    with pytest.raises(CheckpointError, match="header of more than"):
        read(tmp_path, WHOLE)


@pytest.mark.parametrize("dims", [(2**40, 2**40), (0, 3), (33, 3), (1,) * 5, ()])
def test_shapes_that_cannot_be_are_refused(tmp_path: Path, dims: tuple[int, ...]) -> None:
    with pytest.raises(CheckpointError, match=r"tensor a in model.gguf|model.gguf is truncated"):
        read(tmp_path, gguf_bytes([], [("a", dims, Q8_0, 0)], b"\0" * 64))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "ends within its header"),
        (b"GGML" + WHOLE[4:], "does not begin with GGUF"),
        (b"GGUF" + struct.pack(">I", 3) + WHOLE[8:], "big-endian"),
        (b"GGUF" + struct.pack("<I", 1) + WHOLE[8:], "GGUF of version 1; supported are 2 and 3"),
        (WHOLE[:-1], "model.gguf is truncated: tensor b misses 1 bytes"),
        (b"GGUF" + struct.pack("<IQQ", 3, 2**60, 0), "ends within its header"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 2**60), "ends within its header"),
        (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 2**62), "ends within its header"),
        (gguf_bytes([("x", ARRAY, (STRING, []))])[:-8].replace(struct.pack("<IQ", 8, 0), struct.pack("<IQ", 8, 2**59)),
         "ends within its header"),
        (gguf_bytes([("x", ARRAY, (UINT32, []))]).replace(struct.pack("<IQ", 4, 0), struct.pack("<IQ", 4, 2**61)),
         "ends within its header"),
        (gguf_bytes([("x", ARRAY, (ARRAY, []))]), "unknown type 9"),
        (gguf_bytes([("x", UINT32, 1), ("x", UINT32, 2)]), "the setting x twice"),
        (gguf_bytes([], [("a", (4,), F32, 0), ("a", (4,), F32, 32)], b"\0" * 64), "tensors of the same name"),
        (gguf_bytes([], [("a", (32,), F32, 0), ("b", (4,), F32, 32)], b"\0" * 128), "tensor b in model.gguf overlaps"),
        (gguf_bytes([], [("a", (4,), F32, 2**62)], b"\0" * 64), "is truncated: tensor a misses"),
        (gguf_bytes([], [("a", (256,), Q2_K, 0)], b"\0" * 84), "stored as Q2_K; supported are F32, F16"),
        (gguf_bytes([], [("a", (4,), 77, 0)], b"\0" * 64), "stored as type 77"),
        (gguf_bytes([("general.alignment", UINT32, 0)]), "general.alignment in model.gguf must be"),
        (gguf_bytes([("general.alignment", STRING, "x")]), "general.alignment in model.gguf must be"),
        (gguf_bytes([("\udcff".encode("utf-8", "surrogatepass").decode("latin1"), UINT32, 1)]).replace(
            b"\xc3\xad", b"\xff\xfe"), "not UTF-8"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_said(tmp_path: Path, content: bytes, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        read(tmp_path, content)


def test_every_cut_and_every_changed_byte_is_read_or_refused(tmp_path: Path) -> None:
    """A refusal is one sentence, and no memory is asked for that the file does not have."""
    rng = random.Random(1)
    end = len(WHOLE) - 244
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    damaged = [WHOLE[:size] for size in range(0, len(WHOLE), 7)]
    for position in range(0, end, 2):
        changed = bytearray(WHOLE)
        changed[position] = rng.choice((0, 1, 0x7F, 0x80, 0xFF, rng.randrange(256)))
        damaged.append(bytes(changed))
    refused = 0
    for content in damaged:
        try:
            read(tmp_path, content)
        except CheckpointError as error:
            refused += 1
            assert error.message.count("\n") == 0 and len(error.message) < 400
    assert refused > len(damaged) // 2
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 << 10  # KiB


def test_a_folder_is_no_file(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="cannot be read: Is a directory"):
        read_gguf(tmp_path)
