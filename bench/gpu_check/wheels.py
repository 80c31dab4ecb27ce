"""Wheels for a machine without a network. `make gpu-wheels` downloads into .whl/ what an image for CUDA work usually
lacks, in the versions of constraints.txt, and FlashInfer, cut to what the engine uses of it, with kernels that are
compiled here where there is an nvcc; gpu-check installs from there what its machine lacks, into a folder of its own.
Standard library only.

`python -m bench.gpu_check.wheels [--python 3.12] [--kernels decode-128,fa2-128] [NAMES]`; names are distributions
besides those of `USUALLY_ABSENT`, for example mypy==1.18.1. What they need in turn is not followed: the last lines name
it.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterable, Sequence
from email.parser import HeaderParser
from pathlib import Path

from bench.common import ROOT
from bench.gpu_check import flashinfer_kernels, flashinfer_wheel
from bench.gpu_check.machine import PACKAGES, canonical

FOLDER = ROOT / ".whl"
MAX_BYTES = 64 << 20  # that can be carried along
USUALLY_ABSENT = ("msgspec", "simplejpeg", "llguidance", "setuptools", "pybind11")  # the last two: may be too old
BESIDE_FLASHINFER = (  # what its import needs and an image for CUDA work may lack
    *("apache-tvm-ffi==0.1.15.post2", "nvidia-ml-py==13.615.71"),
    *("requests", "urllib3", "certifi", "idna", "charset-normalizer"),
)
# pip only takes wheels of platforms that are named.
_PLATFORMS = [f"manylinux_2_{minor}_x86_64" for minor in (39, 35, 34, 31, 28, 27, 24, 17, 12, 5)]
_PLATFORMS += ["manylinux2014_x86_64", "manylinux2010_x86_64", "manylinux1_x86_64"]
_PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check")


def pinned(names: Iterable[str]) -> list[str]:
    """Adds versions from constraints.txt to names without one. Raises SystemExit where it has none either."""
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    versions = {canonical(name): version for name, _, version in (line.partition("==") for line in lines) if version}
    found = []
    for name in names:
        if "==" not in name and canonical(name) not in versions:
            raise SystemExit(f"constraints.txt has no version of {name}: say one, {name}==...")
        found.append(name if "==" in name else f"{name}=={versions[canonical(name)]}")
    return found


def download(folder: Path, names: Sequence[str], python: str) -> list[Path]:
    """The wheels of `names` for CPython `python` on x86-64 Linux; other versions of the same go."""
    folder.mkdir(parents=True, exist_ok=True)
    wanted = pinned(names)
    platforms = [word for platform in _PLATFORMS for word in ("--platform", platform)]
    command = [*_PIP, "download", "-q", "--no-deps", "--only-binary=:all:", "--implementation", "cp", *platforms]
    subprocess.run([*command, "--python-version", python, "-d", str(folder), *wanted], check=True)
    versions = {canonical(name): version for name, _, version in (line.partition("==") for line in wanted)}
    for path in [*folder.glob("*.whl")]:
        name, version = path.name.split("-")[:2]
        if versions.get(canonical(name), version) != version:
            path.unlink()
    return sorted(folder.glob("*.whl"))


def carry_flashinfer(folder: Path, kernels: Sequence[str]) -> Path:
    """Cuts its wheel and compiles `kernels`, in build/flashinfer, where what was made before is taken again."""
    version = flashinfer_wheel.VERSION
    scratch = ROOT / "build" / "flashinfer" / version
    scratch.mkdir(parents=True, exist_ok=True)
    whole = scratch / f"flashinfer_python-{version}-py3-none-any.whl"
    if not whole.exists():
        wanted = ("-d", str(scratch), f"flashinfer-python=={version}")
        subprocess.run([*_PIP, "download", "-q", "--no-deps", "--only-binary=:all:", *wanted], check=True)
    cuda = flashinfer_kernels.toolkit()
    if kernels and cuda is None:
        print("no nvcc with libcudart_static.a: FlashInfer is carried without compiled kernels, and cannot compute")
    built = [] if cuda is None else _compiled(whole, scratch, kernels, cuda)
    for old in folder.glob("flashinfer_python-*.whl"):
        old.unlink()
    return flashinfer_wheel.cut(whole, folder, built)


def _compiled(whole: Path, scratch: Path, kernels: Sequence[str], cuda: flashinfer_kernels.Toolkit) -> list[Path]:
    absent = [kernel for kernel in kernels if flashinfer_kernels.compiled(scratch, kernel, cuda) is None]
    if absent:
        with tempfile.TemporaryDirectory(prefix="flashinfer-") as name:
            package, site = Path(name, "package"), Path(name, "site")
            with zipfile.ZipFile(whole) as archive:
                archive.extractall(package)
            wanted = [*pinned(BESIDE_FLASHINFER), *flashinfer_kernels.headers(absent, cuda)]
            subprocess.run([*_PIP, "install", "-q", "--no-deps", "--target", str(site), *wanted], check=True)
            flashinfer_kernels.build(package, site, absent, cuda, scratch)
    found = (flashinfer_kernels.compiled(scratch, kernel, cuda) for kernel in kernels)
    return [module for module in found if module is not None]


def wheel_of(folder: Path, distribution: str) -> Path | None:
    """The newest by time, where there are several."""
    found = [path for path in folder.glob("*.whl") if canonical(path.name.split("-")[0]) == canonical(distribution)]
    return max(found, key=lambda path: path.stat().st_mtime, default=None)


def install(modules: Iterable[str], folder: Path, target: Path) -> str:
    """Installs the wheels of `folder` for these modules into `target`; a module without a wheel is skipped. Returns
    pip's last line if it failed, else ""."""
    wheels = [wheel for module in modules if (wheel := wheel_of(folder, PACKAGES[module][0])) is not None]
    if not wheels:
        return ""
    flags = ("--no-index", "--no-deps", "--no-compile", "--no-cache-dir", "--upgrade", "--target", str(target))
    command = [*_PIP, "install", "-q", *flags, *map(str, wheels)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return "" if done.returncode == 0 else (done.stderr.strip().splitlines() or ["pip failed"])[-1]


def needs(wheel: Path) -> list[str]:
    """The distributions that a wheel asks for whatever is wanted of it."""
    with zipfile.ZipFile(wheel) as archive:
        name = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        fields = HeaderParser().parsestr(archive.read(name).decode("utf-8"))
    asked = [line for line in fields.get_all("Requires-Dist", []) if "extra ==" not in line]
    return [match[0] for line in asked if (match := re.match(r"[\w.-]+", line))]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help=f"besides {', '.join(USUALLY_ABSENT)}")
    parser.add_argument("--python", default="3.12", help="CPython of the machine with the GPU")
    parser.add_argument("--dir", type=Path, default=FOLDER, help="where they go")
    default = ",".join(flashinfer_kernels.DEFAULT)
    kinds, dims = "|".join(flashinfer_kernels.KINDS), "|".join(map(str, flashinfer_kernels.HEAD_DIMS))
    parser.add_argument(
        "--kernels", default=default, help=f"FlashInfer's that are compiled, {kinds}-{dims} with commas ({default})"
    )
    parser.add_argument("--no-flashinfer", action="store_true", help="leaves FlashInfer out")
    options = parser.parse_args(argv)
    kernels = flashinfer_kernels.checked([*filter(None, options.kernels.split(","))])
    beside = () if options.no_flashinfer else BESIDE_FLASHINFER
    wheels = download(options.dir, (*USUALLY_ABSENT, *beside, *options.names), options.python)
    if not options.no_flashinfer:
        carry_flashinfer(options.dir, kernels)
        wheels = sorted(options.dir.glob("*.whl"))
    for wheel in wheels:
        asks = f"; needs {', '.join(needs(wheel))}" if needs(wheel) else ""
        print(f"{wheel.name}, {wheel.stat().st_size / 1e6:.1f} MB{asks}")
    total = sum(wheel.stat().st_size for wheel in wheels)
    print(f"{total / 1e6:.1f} MB in {options.dir}")
    if total > MAX_BYTES:
        print(f"that is more than the {MAX_BYTES >> 20} MiB that can be carried: delete some, or --no-flashinfer")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
