"""Packed weights that the next start maps: the same bytes, of the same files, settings and code only."""

from __future__ import annotations

import errno
import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from hydra_engine import Engine
from hydra_engine.backend.base import Backend
from hydra_engine.backend.cpu.experts import NativeExperts
from hydra_engine.backend.select import create_backend
from hydra_engine.config import EngineConfig
from hydra_engine.core.instances import EPD, Role
from hydra_engine.core.options import SpecOptions
from hydra_engine.errors import CheckpointError, ConfigError, ResourceError
from hydra_engine.models import build
from hydra_engine.models.loading import packed_cache
from hydra_engine.models.specs.registry import load_spec
from hydra_engine.models.vlm import VisionLanguageModel
from hydra_engine.preprocess.model_files import find_model_files
from tests.models.conftest import CheckpointFactory
from tests.models.quantized.written import METHODS, write_checkpoint
from tools.miniatures import llava as tiny


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def native(request: pytest.FixtureRequest) -> Backend:
    return create_backend("cpu", request.param, threads=1)


@pytest.fixture
def plain(checkpoint: CheckpointFactory, tmp_path: Path) -> Path:
    return Path(shutil.copytree(checkpoint("plain"), tmp_path / "plain"))


def load(
    directory: Path, backend: Backend, cache: Path | None, role: Role = EPD, quantization: str = "auto"
) -> VisionLanguageModel:
    spec = load_spec(directory, SpecOptions(quantization=quantization))
    with torch.inference_mode():
        model = build.load_model(directory, spec, backend, role, packed_cache=cache)
    assert isinstance(model, VisionLanguageModel)
    return model


def kept(model: VisionLanguageModel) -> list[tuple[object, Tensor, Tensor | None]]:
    """The form, the bytes and the bias of each weight."""
    items = [item for holder in model.holders for item in holder.packed]
    found: list[tuple[object, Tensor, Tensor | None]] = []
    for item in items:
        if isinstance(item, Tensor):
            found.append(((item.dtype, item.shape), item.contiguous().view(-1).view(torch.uint8), None))
        elif isinstance(item, NativeExperts):
            found += [((item.num_experts, form), data, None) for form, data in zip(item.forms, item.data, strict=True)]
        else:
            found.append(((type(item), item.form), item.data, item.bias))
    return found


def assert_same(one: VisionLanguageModel, other: VisionLanguageModel) -> None:
    assert one.weights_bytes == other.weights_bytes
    for (form, data, bias), (other_form, other_data, other_bias) in zip(kept(one), kept(other), strict=True):
        assert form == other_form and torch.equal(data, other_data)
        assert (bias is None) == (other_bias is None) and (bias is None or torch.equal(bias, other_bias))


def unread(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("the checkpoint is read")

    monkeypatch.setattr(build, "open_checkpoint", refuse)


@pytest.mark.parametrize(
    ("family", "quantization"),
    [
        ("llava", "auto"),
        ("qwen2_5_vl", "int4"),
        ("internvl", "int8"),
        ("minicpmv", "int8"),
        ("minicpmv4_6", "auto"),
        ("qwen3_moe", "int4"),
    ],
)
def test_what_is_mapped_is_what_was_packed(
    checkpoint: CheckpointFactory,
    tmp_path: Path,
    native: Backend,
    family: str,
    quantization: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    directory = checkpoint(f"cached-{family}", family, dtype="bfloat16")
    expected = load(directory, native, None, quantization=quantization)
    first = load(directory, native, tmp_path / "new" / "cache", quantization=quantization)
    (file,) = (tmp_path / "new" / "cache").iterdir()
    unread(monkeypatch)
    again = load(directory, native, tmp_path / "new" / "cache", quantization=quantization)
    assert_same(first, expected)
    assert_same(again, expected)
    assert str(file) in first.notes[-1] and str(file) in again.notes[-1]


@pytest.mark.parametrize("name", ["w4-32", "gptq-4-zeros", "fp8"])
def test_quantised_checkpoints_are_kept_with_their_notes(
    checkpoint: CheckpointFactory, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 1, "head_dim": 32}
    plain = checkpoint("plain-llama-cached", "llama", text=sizes)
    write_checkpoint(plain, tmp_path / name, METHODS[name])
    backend = create_backend("cpu", torch.float32, threads=1)
    first = load(tmp_path / name, backend, tmp_path / "cache")
    unread(monkeypatch)
    again = load(tmp_path / name, backend, tmp_path / "cache")
    assert_same(first, again)
    assert again.notes[:-1] == first.notes[:-1] and (name == "fp8") == bool(first.notes[:-1])


def test_a_gguf_files_weights_are_kept_in_their_own_form(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("gguf", reason="writes the file")
    small = {
        **tiny._BENCH_TEXT,
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 2,
        "vocab_size": 400,
    }
    monkeypatch.setitem(tiny._BENCH_SIZES, "50m", (small, tiny.VISION))
    tiny.make_bench_checkpoint(tmp_path / "model", size="50m", form=tiny.Q4_K)
    directory = find_model_files(EngineConfig(model=str(tmp_path / "model"))).model_path
    backend = create_backend("cpu", torch.float32, threads=1)
    first = load(directory, backend, tmp_path / "cache")
    unread(monkeypatch)
    assert_same(first, load(directory, backend, tmp_path / "cache"))


def test_another_state_is_another_file(plain: Path, tmp_path: Path) -> None:
    cache, backend = tmp_path / "cache", create_backend("cpu", torch.float32, threads=1)

    def num_files() -> int:
        return len(list(cache.iterdir()))

    load(plain, backend, cache)
    load(plain, backend, cache)
    assert num_files() == 1
    load(plain, replace(backend, dtype=torch.bfloat16), cache)
    load(plain, backend, cache, Role.parse("E"))
    load(plain, backend, cache, quantization="int8")
    assert num_files() == 4
    status = (plain / "model.safetensors").stat()
    os.utime(plain / "model.safetensors", ns=(status.st_atime_ns, status.st_mtime_ns + 1))
    load(plain, backend, cache)
    assert num_files() == 5 and not any(path.name.startswith(".") for path in cache.iterdir())


def test_other_weights_of_the_same_size_and_time_of_writing_are_another_file(plain: Path, tmp_path: Path) -> None:
    backend, weights = create_backend("cpu", torch.float32, threads=1), plain / "model.safetensors"
    first = load(plain, backend, tmp_path / "cache")
    status, content = weights.stat(), bytearray(weights.read_bytes())
    content[-4000:] = bytes(4000)
    weights.write_bytes(content)
    os.utime(weights, ns=(status.st_atime_ns, status.st_mtime_ns))
    second = load(plain, backend, tmp_path / "cache")
    assert_same(second, load(plain, backend, None))
    assert any(not torch.equal(one[1], other[1]) for one, other in zip(kept(first), kept(second), strict=True))


def test_a_damaged_file_is_named(plain: Path, tmp_path: Path) -> None:
    cache, backend = tmp_path / "cache", create_backend("cpu", torch.float32, threads=1)
    load(plain, backend, cache)
    (file,) = cache.iterdir()
    whole = file.read_bytes()
    for wrong in (
        whole[:-1],
        whole[:100],
        whole.replace(b"hydra-engine", b"hydra-motors"),
        whole.replace(b"form", b"farm"),
    ):
        file.write_bytes(wrong)
        with pytest.raises(CheckpointError, match=file.name):
            load(plain, backend, cache)


def test_a_folder_that_cannot_be_written_is_an_error(plain: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ResourceError, match=r"packed weights cannot be written to .*/file/cache: Not a directory"):
        load(plain, create_backend("cpu", torch.float32, threads=1), tmp_path / "file" / "cache")


@pytest.mark.quick("ENOSPC")
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EROFS], ids=errno.errorcode.get)
def test_a_disk_that_takes_nothing_costs_the_next_start_only(
    plain: Path,
    tmp_path: Path,
    native: Backend,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    number: int,
) -> None:
    def full(*_: object) -> bytes:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(packed_cache, "_header", full)  # at the first byte
    model = load(plain, native, tmp_path / "cache")
    assert f"packed, and not written to {tmp_path / 'cache'}: {os.strerror(number)}" in model.notes[-1]
    assert "packed weights cannot be written" in caplog.text and not list((tmp_path / "cache").iterdir())
    monkeypatch.undo()
    assert_same(load(plain, native, tmp_path / "cache"), model)


def test_weights_that_are_not_packed_are_refused(plain: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="on a processor with the native extension"):
        load(plain, create_backend("cpu", torch.float32, backend="reference", threads=1), tmp_path / "cache")


@pytest.mark.slow
def test_an_engine_with_drawn_weights_has_no_packed_cache(plain: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="for a checkpoint's weights"):
        Engine(plain, load_format="random", packed_cache=str(tmp_path / "cache"))


def test_the_engine_answers_the_same(plain: Path, tmp_path: Path) -> None:
    texts = []
    for _ in range(2):
        with Engine(plain, packed_cache=str(tmp_path / "cache"), dtype="float32") as engine:
            assert str(tmp_path / "cache") in " ".join(engine.summary.notes)
            texts.append(engine.generate("two words", max_tokens=8, temperature=0, ignore_eos=True).token_ids)
    assert texts[0] == texts[1] and len(list((tmp_path / "cache").iterdir())) == 1
