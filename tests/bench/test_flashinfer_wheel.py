"""FlashInfer's wheel is cut to what the engine uses, here a miniature of it, and its kernels are compiled ahead."""

from __future__ import annotations

import base64
import csv
import hashlib
import json
import os
import subprocess
import sys
import zipfile
from collections.abc import Mapping
from pathlib import Path

import pytest

from bench.gpu_check import flashinfer_kernels, flashinfer_wheel, wheels
from bench.gpu_check.flashinfer_kernels import Toolkit
from bench.gpu_check.machine import OPTIONAL, PACKAGES, canonical, min_versions

INFO = "flashinfer_python-0.7.2.post1.dist-info"
METADATA = """Metadata-Version: 2.4
Name: flashinfer-python
Version: 0.7.2.post1
License-File: LICENSE
Requires-Dist: apache-tvm-ffi<0.2,>=0.1.11
Requires-Dist: nvidia-cutlass-dsl>=4.6
Requires-Dist: torch
Requires-Dist: torch>=2.12.0; extra == "b12x"

Version: of the description
"""
FILES = {
    "flashinfer/__init__.py": "from .experimental.cake_nvfp4_per_token import support\n",
    "flashinfer/decode.py": "",
    "flashinfer/experimental/__init__.py": "",
    "flashinfer/experimental/cake_nvfp4_per_token/__init__.py": "",
    "flashinfer/experimental/cake_nvfp4_per_token/support.py": "",
    "flashinfer/experimental/b12x/kernel.py": "",
    "flashinfer/moe_ep/kernel.py": "",
    "flashinfer/data/csrc/batch_decode.cu": "decode",
    "flashinfer/data/csrc/batch_decode_kernel_inst.jinja": "decode",
    "flashinfer/data/csrc/batch_prefill_paged.cuh": "prefill",
    "flashinfer/data/csrc/trtllm/big.cu": "x" * 1000,
    "flashinfer/data/include/flashinfer/utils.cuh": "",
    "b12x/__init__.py": "",
    "build_backend.py": "",
    "build_utils.py": "",
    f"{INFO}/METADATA": METADATA,
    f"{INFO}/WHEEL": "Wheel-Version: 1.0\nGenerator: setuptools\nRoot-Is-Purelib: true\nTag: py3-none-any\n\n",
    f"{INFO}/top_level.txt": "b12x\nflashinfer\n",
    f"{INFO}/licenses/LICENSE": "Apache",
    f"{INFO}/RECORD": "",
}


def miniature(folder: Path, files: Mapping[str, str] = FILES) -> Path:
    path = folder / "flashinfer_python-0.7.2.post1-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return path


def contents(wheel: Path) -> dict[str, str]:
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name).decode() for name in archive.namelist()}


@pytest.fixture
def module(tmp_path: Path) -> Path:
    path = tmp_path / "batch_decode.so"
    path.write_bytes(b"machine code")
    return path


def test_what_is_used_stays_and_the_kernels_lie_where_the_package_looks(
    tmp_path: Path, module: dict[str, Path]
) -> None:
    cut = flashinfer_wheel.cut(miniature(tmp_path), tmp_path, [module])
    assert cut.name == "flashinfer_python-0.7.2.post1+attention-py3-none-linux_x86_64.whl"
    info, files = INFO.replace(".dist-info", "+attention.dist-info"), contents(cut)
    assert files.keys() == {
        "flashinfer/__init__.py",
        "flashinfer/decode.py",
        "flashinfer/experimental/__init__.py",
        "flashinfer/experimental/cake_nvfp4_per_token/__init__.py",
        "flashinfer/experimental/cake_nvfp4_per_token/support.py",
        "flashinfer/data/csrc/batch_decode.cu",
        "flashinfer/data/csrc/batch_decode_kernel_inst.jinja",
        "flashinfer/data/csrc/batch_prefill_paged.cuh",
        "flashinfer/data/aot/batch_decode/batch_decode.so",
        *(f"{info}/{name}" for name in ("METADATA", "WHEEL", "top_level.txt", "licenses/LICENSE", "CHANGES", "RECORD")),
    }
    assert flashinfer_wheel.modules_of(cut) == ["batch_decode"]
    about = files[f"{info}/METADATA"]
    assert "\nVersion: 0.7.2.post1+attention\n" in about and about.endswith("\n\nVersion: of the description\n")
    assert wheels.needs(cut) == ["apache-tvm-ffi", "torch"]
    assert files[f"{info}/WHEEL"].endswith("Root-Is-Purelib: false\nTag: py3-none-linux_x86_64\n\n")
    assert "flashinfer/data/*\n" in files[f"{info}/CHANGES"] and "\nbatch_decode\n" in files[f"{info}/CHANGES"]


def test_the_record_has_every_file_with_its_hash(tmp_path: Path, module: Path) -> None:
    files = contents(flashinfer_wheel.cut(miniature(tmp_path), tmp_path, [module]))
    (record,) = (name for name in files if name.endswith("/RECORD"))
    rows = {name: (digest, size) for name, digest, size in csv.reader(files[record].splitlines())}
    assert rows.keys() == files.keys() and rows.pop(record) == ("", "")
    for name, (digest, size) in rows.items():
        content = files[name].encode()
        expected = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).decode().rstrip("=")
        assert (digest, size) == (f"sha256={expected}", str(len(content)))


@pytest.mark.slow
def test_pip_takes_what_was_cut(tmp_path: Path, module: Path) -> None:
    cut = flashinfer_wheel.cut(miniature(tmp_path), tmp_path, [module])
    site, flags = tmp_path / "site", ("--no-index", "--no-deps", "--no-cache-dir")
    subprocess.run([sys.executable, "-m", "pip", "install", "-q", *flags, "--target", str(site), str(cut)], check=True)
    code = "import flashinfer, importlib.metadata as m; print(m.version('flashinfer-python'))"
    environment = {**os.environ, "PYTHONPATH": str(site)}
    assert (
        subprocess.check_output([sys.executable, "-c", code], env=environment, text=True) == "0.7.2.post1+attention\n"
    )


@pytest.mark.parametrize(
    ("gone", "said"),
    [
        (
            "flashinfer/moe_ep/kernel.py",
            r"has no flashinfer/moe_ep/\*: the release is laid out in another way than 0\.7",
        ),
        ("flashinfer/data/csrc/batch_prefill_paged.cuh", r"has no flashinfer/data/csrc/batch_prefill\*"),
        ("build_utils.py", "has no build_utils.py"),
    ],
)
def test_a_release_that_is_laid_out_otherwise_is_refused(tmp_path: Path, gone: str, said: str) -> None:
    wheel = miniature(tmp_path, {name: content for name, content in FILES.items() if name != gone})
    with pytest.raises(SystemExit, match=said):
        flashinfer_wheel.cut(wheel, tmp_path, [])


def test_what_is_larger_than_can_be_carried_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flashinfer_wheel, "MAX_BYTES", 1000)
    with pytest.raises(SystemExit, match="cut and with 0 kernels is 0 MiB: more than 20"):
        flashinfer_wheel.cut(miniature(tmp_path), tmp_path, [])
    assert [path.name for path in tmp_path.glob("*.whl")] == ["flashinfer_python-0.7.2.post1-py3-none-any.whl"]


def test_without_nvcc_it_is_carried_without_kernels_and_that_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The cut wheel of an earlier call goes."""
    monkeypatch.setattr(wheels, "ROOT", tmp_path)
    monkeypatch.setattr(flashinfer_kernels, "toolkit", lambda: None)
    kept = tmp_path / "build" / "flashinfer" / flashinfer_wheel.VERSION
    kept.mkdir(parents=True)
    miniature(kept)
    folder = tmp_path / ".whl"
    folder.mkdir()
    (folder / "flashinfer_python-0.7.1+attention-py3-none-any.whl").write_bytes(b"")
    cut = wheels.carry_flashinfer(folder, ["decode-128"])
    assert [*folder.iterdir()] == [cut] and cut.name.endswith("-py3-none-any.whl")
    assert "no nvcc with libcudart_static.a: FlashInfer is carried without compiled" in capsys.readouterr().out


# ---- kernels

PACKAGE = """
import os, pathlib
class Spec:
    def __init__(self, name):
        self.name, self.build_dir = name, pathlib.Path(os.environ["FLASHINFER_WORKSPACE_BASE"]) / name
    def get_compile_commands(self):
        part = self.build_dir / "part.o"
        return [{"command": f"%s {os.environ['FLASHINFER_CUDA_ARCH_LIST']} -o {part}"}]
def gen_batch_decode_module(*given):
    assert given == ("bf16",) * 3 + ("i32", 128, 128, 0, False, False)
    return Spec("batch_decode")
"""


def test_kernels_are_compiled_by_the_packages_commands_and_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Compilers that write down their arguments."""
    tool = tmp_path / "tool"
    tool.write_text('#!/bin/sh\nsaid="$*"\nwhile [ "$1" != -o ]; do shift; done\necho "$said" > "$2"\n')
    tool.chmod(0o755)
    folder = tmp_path / "package" / "flashinfer" / "jit" / "attention"
    folder.mkdir(parents=True)
    (folder / "modules.py").write_text(PACKAGE % tool)
    (tmp_path / "package" / "torch.py").write_text("bfloat16, int32 = 'bf16', 'i32'\n")
    monkeypatch.setenv("CXX", str(tool))
    monkeypatch.setenv(flashinfer_kernels.ARCHS, "8.0 9.0a")
    monkeypatch.setenv("FLASHINFER_DISABLE_JIT", "1")
    cuda = Toolkit(tmp_path, "13.0", tmp_path / "libcudart_static.a")
    assert flashinfer_kernels.compiled(tmp_path, "decode-128", cuda) is None
    flashinfer_kernels.build(tmp_path / "package", tmp_path, ["decode-128"], cuda, tmp_path)
    assert capsys.readouterr().out.startswith("compiling FlashInfer's decode-128, 1 files\n")
    module = flashinfer_kernels.compiled(tmp_path, "decode-128", cuda)
    assert module == tmp_path / "decode-128-sm8.0-9.0a-cuda13.0" / "batch_decode.so"
    linked = module.read_text()
    assert "-shared" in linked and "/batch_decode/part.o " in linked and f" {tmp_path}/libcudart_static.a " in linked
    for other in (cuda._replace(version="13.1"), cuda):
        monkeypatch.setenv(flashinfer_kernels.ARCHS, "8.0 9.0a" if other != cuda else "9.0a")
        assert flashinfer_kernels.compiled(tmp_path, "decode-128", other) is None, "those are others"


def test_fa3_needs_headers_that_a_toolkit_may_lack(tmp_path: Path) -> None:
    cuda = Toolkit(tmp_path, "13.0", tmp_path / "libcudart_static.a")
    asked = ["decode-128"], ["decode-128", "fa3-128"]
    assert [flashinfer_kernels.headers(kernels, cuda) for kernels in asked] == [[], ["nvidia-curand"]]
    (tmp_path / "include").mkdir()
    (tmp_path / "include" / "curand_kernel.h").touch()
    assert flashinfer_kernels.headers(["fa3-64"], cuda) == []


def test_kernels_that_there_are_not_are_refused_by_name() -> None:
    assert flashinfer_kernels.checked(["fa3-64", "fa3-64"]) == ["fa3-64"]
    with pytest.raises(SystemExit, match="no kernels 'fa4-128' for the engine; there are decode-64, decode-128"):
        flashinfer_kernels.checked(["fa4-128"])


# ---- what is carried


def test_what_flashinfer_imports_is_carried_and_asked_for_by_name() -> None:
    """The version that is cut is the one whose signatures are known, and one that the project allows."""
    carried = {canonical(word.partition("==")[0]) for word in wheels.pinned(wheels.BESIDE_FLASHINFER)}
    assert {canonical(PACKAGES[module][0]) for module in OPTIONAL} == carried | {"flashinfer-python"}
    facts = json.loads((Path(__file__).parents[1] / "ops" / "flashinfer_signatures.json").read_text())
    assert facts["version"] == flashinfer_wheel.VERSION
    assert flashinfer_wheel.VERSION.startswith(min_versions()["flashinfer-python"])
