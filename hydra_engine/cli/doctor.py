"""`hydra-engine doctor`: hardware, libraries, and the implementation of each operation with the reason.

Runs nothing on a GPU and allocates no memory there. For bug reports: the output contains no paths of the user's files.
"""

from __future__ import annotations

import argparse
import platform
import shutil
import sys
from collections.abc import Iterable
from importlib import import_module, metadata
from pathlib import Path
from typing import Any

from hydra_engine import __version__
from hydra_engine.config import DEMO_MODEL, ClusterConfig, EngineConfig
from hydra_engine.core.units import size
from hydra_engine.errors import HydraError
from hydra_engine.profiler.start import processor_name

_PACKAGES = (
    *("torch", "transformers", "tokenizers", "numpy", "pillow", "simplejpeg", "av", "aiohttp", "msgspec"),
    *("safetensors", "pyyaml", "triton", "flashinfer-python"),
)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--backend", default="auto", help="auto, native or reference")
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda:N")
    parser.add_argument("--cluster", metavar="ray", help="also the nodes of the Ray cluster that runs here")
    parser.add_argument("--ray-address", metavar="HOST:PORT", help="with --cluster ray: of another Ray cluster")


def run(arguments: argparse.Namespace) -> int:
    cluster = ClusterConfig(launcher=arguments.cluster, ray_address=arguments.ray_address)
    select: Any = import_module("hydra_engine.backend.select")
    cpu = select.describe_cpu()
    cuda = import_module("hydra_engine.backend.devices").cuda_support()
    try:
        chosen = select.resolve_device(arguments.device, arguments.backend)
        taken, dtype_reason = chosen.name, select.resolve_dtype("auto", "bfloat16", arguments.backend, chosen.name)[1]
        reason: str = chosen.reason
        ops: Iterable[tuple[str, str, str]] = select.op_choices(chosen.name, backend=arguments.backend)
    except HydraError as error:
        taken, reason, dtype_reason = "none", error.message, "none"
        ops = [("all", "none", error.message)]
    sections: list[tuple[str, list[tuple[str, str]]]] = [
        ("versions", [("hydra-engine", __version__), ("python", platform.python_version()), *_versions()]),
        ("machine", [("system", f"{platform.system()} {platform.machine()}"), *_machine(cpu)]),
        ("build", _build(cpu)),
        ("cuda", _cuda(cuda)),
        ("device", [("taken", f"{taken}: {reason}")]),
        ("model", [("demo", _demo_model()), ("dtype", dtype_reason)]),
    ]
    for title, rows in sections:
        sys.stdout.write(f"{title}\n")
        for name, value in rows:
            sys.stdout.write(f"  {name:20} {value}\n")
    sys.stdout.write("operations\n")
    for op, implementation, reason in ops:
        sys.stdout.write(f"  {op:20} {implementation:18} {reason}\n")
    has_cluster = cluster.launcher is None or _write_cluster(cluster.launcher, cluster)
    return 0 if cpu["extension"] and has_cluster else 1


def _write_cluster(name: str, cluster: ClusterConfig) -> bool:
    """Writes the section about a cluster. Returns False for one that could not be used."""
    launcher: Any = import_module("hydra_engine.cluster.launcher")
    sys.stdout.write("cluster\n")
    try:
        rows = launcher.load_launcher(name, EngineConfig(cluster=cluster)).describe()
    except HydraError as error:
        sys.stdout.write(f"  {name:20} {error.message}\n")
        return False
    for node, value in rows:
        sys.stdout.write(f"  {node:20} {value}\n")
    return True


def _versions() -> list[tuple[str, str]]:
    rows = []
    for name in _PACKAGES:
        try:
            rows.append((name, metadata.version(name)))
        except metadata.PackageNotFoundError:
            rows.append((name, "not installed"))
    return rows


def _machine(cpu: dict[str, Any]) -> list[tuple[str, str]]:
    host_memory: Any = import_module("hydra_engine.backend.cpu.device").host_memory
    return [
        ("processor", processor_name() or platform.processor() or "unknown"),
        ("usable cores", str(cpu["cores"])),
        ("memory", "{1}, {0} available".format(*map(size, host_memory()))),
        ("for downloads", f"{size(_download_bytes())} free in the Hugging Face cache"),
        ("instructions", ", ".join(cpu["features"]) or "unknown: the extension is missing"),
        ("level taken", cpu["isa"] or "none"),
    ]


def _download_bytes() -> int:
    """Free bytes of the file system where `--download` puts models."""
    from huggingface_hub.constants import HF_HUB_CACHE

    folder = Path(HF_HUB_CACHE)
    return shutil.disk_usage(next(path for path in (folder, *folder.parents) if path.exists())).free


def _build(cpu: dict[str, Any]) -> list[tuple[str, str]]:
    if cpu["extension"]:
        extension = f"built ({Path(cpu['extension']).name})"
    else:
        extension = f"missing: {cpu['extension_problem']}; run `make build`"
    compiler = Path(cpu["compiler"]).name if cpu["compiler"] else "none found: install g++ to build the extension"
    return [("native extension", extension), ("C++ compiler", compiler)]


def _cuda(cuda: Any) -> list[tuple[str, str]]:
    """Rows about the driver, the extension, torch, Triton and FlashInfer; `cuda` is a result of backend/devices.py."""
    rows = [("nvcc", "found" if shutil.which("nvcc") else "none"), ("flashinfer", _flashinfer())]
    probe = cuda.probe
    if probe.status == "no_extension":
        return [*rows, ("extension", probe.problem)]
    codes = " ".join(probe.codes)
    rows.append(("extension", f"CUDA {_version(probe.runtime_version)}, code for {codes}" if codes else "without CUDA"))
    rows.append(("driver", f"runs CUDA up to {_version(probe.driver_version)}" if probe.driver_version else "none"))
    for device in probe.devices:
        major, minor = device.capability
        what = f"{device.name}, capability {major}.{minor}, {device.num_sms} SMs, {device.memory_bytes / 2**30:.1f} GiB"
        rows.append((f"cuda:{device.index}", what if device.usable else f"{what}; no code for it in the extension"))
    if probe.status != "ok":
        return [*rows, ("problem", probe.problem)]
    rows.append(("torch", cuda.torch_problem or "can use CUDA"))
    return [*rows, ("triton", cuda.triton_problem or "can be imported")]


def _flashinfer() -> str:
    """The reason why FlashInfer cannot be used, or its available kernels. Imports it."""
    missing = import_module("hydra_engine.backend.cuda.attention_choice").flashinfer_missing()
    if missing:
        return f"{missing}; `pip install -U flashinfer-python` adds it, Triton's kernels do without"
    kernels = import_module("hydra_engine.backend.cuda.flashinfer_kernels").installed()
    return f"{kernels.describe()} are compiled; {kernels.problem}" if kernels.problem else "compiles at first use"


def _version(number: int) -> str:
    return f"{number // 1000}.{number % 1000 // 10}"


def _demo_model() -> str:
    weights = EngineConfig(model=DEMO_MODEL).model_path / "model.safetensors"
    return f"weights in a file of {weights.stat().st_size / 2**20:.1f} MiB" if weights.exists() else "missing"
