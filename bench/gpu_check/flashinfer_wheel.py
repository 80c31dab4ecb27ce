"""FlashInfer's wheel, cut to what the engine uses of it: about 10 MiB instead of 59. Standard library only.

Left out are the sources and headers of kernels, experiments, and kernels for mixtures of experts. What stays imports as
before. It compiles nothing at first use, so kernels that were compiled before are added (flashinfer_kernels.py); the
templates and sources that the package reads for one before it looks for the compiled one stay. Licences stay, and the
file CHANGES beside them says what was done. A release that is laid out in another way is refused.
"""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import re
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from email.parser import HeaderParser
from fnmatch import fnmatchcase
from pathlib import Path

VERSION = "0.7.2.post1"
LABEL = "attention"  # of the version that a cut wheel has: VERSION+LABEL
MAX_BYTES = 20 << 20
_CUT = (
    *("b12x/*", "build_backend.py", "build_utils.py"),
    *("flashinfer/data/*", "flashinfer/experimental/*", "flashinfer/moe_ep/*"),
)
# Of what is cut: what is read for a kernel that is compiled already, and what is imported at once.
_KEPT = (
    *("flashinfer/data/csrc/batch_decode*", "flashinfer/data/csrc/batch_prefill*"),
    *("flashinfer/experimental/__init__.py", "flashinfer/experimental/cake_nvfp4_per_token/*"),
)
# Distributions that its import needs. The others that it names are for kernels of other GPUs, or compile at first use.
IMPORTED = {"apache-tvm-ffi", "numpy", "nvidia-ml-py", "packaging", "requests", "torch", "tqdm"}
_PLATFORM = "linux_x86_64"


def cut(wheel: Path, folder: Path, built: Sequence[Path]) -> Path:
    """Writes the cut wheel into `folder`. `built`: modules of kernels, with FlashInfer's names. SystemExit says why a
    wheel is not one that this can cut."""
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if not name.endswith("/")]
        for pattern in (*_CUT, *_KEPT):
            if not any(fnmatchcase(name, pattern) for name in names):
                raise SystemExit(
                    f"{wheel.name} has no {pattern}: the release is laid out in another way than {VERSION}, for which "
                    "bench/gpu_check/flashinfer_wheel.py says what can be left out"
                )
        kept = [name for name in names if not _is_cut(name)]
        info = next(name.split("/")[0] for name in names if name.endswith(".dist-info/METADATA"))
        files = {name: archive.read(name) for name in kept}
    distribution, version = info.removesuffix(".dist-info").rsplit("-", 1)
    named = f"{distribution}-{version}+{LABEL}"
    about, wheel_file = f"{info}/METADATA", f"{info}/WHEEL"
    files[about] = _metadata(files[about].decode("utf-8"), version).encode("utf-8")
    tag = f"py3-none-{_PLATFORM if built else 'any'}"
    files[wheel_file] = _replaced(
        files[wheel_file].decode("utf-8"), {"Root-Is-Purelib": str(not built).lower(), "Tag": tag}
    ).encode("utf-8")
    files[f"{info}/top_level.txt"] = b"flashinfer\n"
    files[f"{info}/CHANGES"] = _changes(wheel.name, built).encode("utf-8")
    for module in built:
        files[f"flashinfer/data/aot/{module.stem}/{module.name}"] = module.read_bytes()
    renamed = {name.replace(f"{info}/", f"{named}.dist-info/", 1): content for name, content in files.items()}
    path = folder / f"{named}-{tag}.whl"
    _write(path, renamed, f"{named}.dist-info/RECORD")
    if path.stat().st_size > MAX_BYTES:
        size = path.stat().st_size / 2**20
        path.unlink()
        raise SystemExit(f"{wheel.name} cut and with {len(built)} kernels is {size:.0f} MiB: more than 20")
    return path


def modules_of(wheel: Path) -> list[str]:
    """The kernels that are in a cut wheel."""
    with zipfile.ZipFile(wheel) as archive:
        return sorted(Path(name).stem for name in archive.namelist() if fnmatchcase(name, "flashinfer/data/aot/*.so"))


def _is_cut(name: str) -> bool:
    if name.endswith(".dist-info/RECORD"):
        return True
    return any(fnmatchcase(name, cut) for cut in _CUT) and not any(fnmatchcase(name, kept) for kept in _KEPT)


def _metadata(text: str, version: str) -> str:
    """METADATA with the version of a cut wheel, without requirements that its import does not need."""
    fields = HeaderParser().parsestr(text)
    if fields["Version"] != version:
        raise SystemExit(f"FlashInfer's METADATA is of {fields['Version']}, the wheel of {version}")
    head, blank, description = text.partition("\n\n")
    kept = [line for line in head.split("\n") if not line.startswith("Requires-Dist:") or _is_imported(line)]
    return _replaced("\n".join(kept), {"Version": f"{version}+{LABEL}"}) + blank + description


def _is_imported(line: str) -> bool:
    name = re.match(r"Requires-Dist:\s*([\w.-]+)", line)
    return name is not None and name[1].lower() in IMPORTED and "extra ==" not in line


def _replaced(text: str, fields: Mapping[str, str]) -> str:
    for field, value in fields.items():
        text, count = re.subn(rf"(?m)^{field}: .*$", f"{field}: {value}", text, count=1)
        if not count:
            raise SystemExit(f"FlashInfer's wheel says no {field}")
    return text


def _changes(name: str, built: Sequence[Path]) -> str:
    lines = [f"Made from {name} by hydra-engine (bench/gpu_check/flashinfer_wheel.py).", "Left out:"]
    lines += [*_CUT, "but for:", *_KEPT, "METADATA names the requirements of the import alone.", "Compiled ahead:"]
    return "\n".join([*lines, *([module.stem for module in built] or ["nothing"]), ""])


def _write(path: Path, files: Mapping[str, bytes], record: str) -> None:
    """Writes the wheel, with the same bytes for the same files."""

    def rows() -> Iterator[tuple[str, str, int | str]]:
        for name, content in files.items():
            digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode("ascii")
            yield name, f"sha256={digest}", len(content)
        yield record, "", ""

    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows())
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
        for name, content in (*files.items(), (record, text.getvalue().encode("utf-8"))):
            archive.writestr(zipfile.ZipInfo(name), content, zipfile.ZIP_DEFLATED)
