"""The machine of a check: its GPU, its compiler, its packages. Standard library only.

Which packages are needed, and since which version, is what pyproject.toml says. Does not know what is run.
"""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tomllib
from dataclasses import dataclass
from functools import cache
from importlib import metadata

from bench.common import ROOT, nvcc_here

# Modules -> the distribution that has them, and what goes without them.
PACKAGES = {
    "torch": ("torch", "everything"),
    "numpy": ("numpy", "everything"),
    "pybind11": ("pybind11", "the build"),
    "setuptools": ("setuptools", "the build"),
    "pytest": ("pytest", "the tests"),
    "hypothesis": ("hypothesis", "the tests"),
    "pytest_timeout": ("pytest-timeout", "the tests' limit of time"),
    "xdist": ("pytest-xdist", "tests that outlive a crash"),
    "triton": ("triton", "the kernels of kernels/"),
    "transformers": ("transformers", "models, and what they are compared with"),
    "safetensors": ("safetensors", "models"),
    "tokenizers": ("tokenizers", "models"),
    "PIL": ("pillow", "pictures"),
    "msgspec": ("msgspec", "models, the scheduler, the engine"),
    "simplejpeg": ("simplejpeg", "pictures, the engine"),
    "aiohttp": ("aiohttp", "the engine"),
    "prometheus_client": ("prometheus-client", "the engine"),
    "tqdm": ("tqdm", "the engine"),
    "jinja2": ("jinja2", "the engine"),
    "yaml": ("pyyaml", "the command line"),
    "llguidance": ("llguidance", "grammars"),
    "matplotlib": ("matplotlib", "summary.png"),
    "flashinfer": ("flashinfer-python", "FlashInfer's attention"),
    "tvm_ffi": ("apache-tvm-ffi", "FlashInfer's attention"),
    "pynvml": ("nvidia-ml-py", "FlashInfer's attention"),
    "requests": ("requests", "FlashInfer's attention"),
    "urllib3": ("urllib3", "FlashInfer's attention"),
    "certifi": ("certifi", "FlashInfer's attention"),
    "idna": ("idna", "FlashInfer's attention"),
    "charset_normalizer": ("charset-normalizer", "FlashInfer's attention"),
}
# Taken where they are here or have a wheel; no part needs them.
OPTIONAL = ("flashinfer", "tvm_ffi", "pynvml", "requests", "urllib3", "certifi", "idna", "charset_normalizer")


# What the figures and predictions of bench/NOTES.md are of. Another one may do as well, but nobody has tried.
KNOWN_CARDS = ("NVIDIA H200",)
KNOWN_DRIVER, KNOWN_NVCC, KNOWN_PYTHON = "580", "13.0", "3.12"
KNOWN_PACKAGES = {"torch": "2.11", "triton": "3.6", "transformers": "5.17"}
NEVER_RUN = ("flashinfer-python",)


@dataclass(frozen=True)
class Machine:
    """`problem`: why no kernel can run here, empty where one can. `capability` as nvcc wants it: "90". `driver` and
    `toolkit` are versions of the driver and of nvcc, empty where nothing says them."""

    problem: str
    gpu: str
    capability: str
    nvcc: str | None
    driver: str = ""
    toolkit: str = ""

    @property
    def usable(self) -> bool:
        return not self.problem


_LOOK = """
import json, torch
found = torch.cuda.is_available()
card = torch.cuda.get_device_properties(0) if found else None
if found:
    assert (torch.ones(8, device="cuda") + 1).sum().item() == 16
print(json.dumps({"gpu": card.name if card else "", "capability": f"{card.major}{card.minor}" if card else "",
                  "cuda": torch.version.cuda}))
"""


def look() -> Machine:
    """Asks torch in a process of its own: one that hangs over a broken driver ends."""
    nvcc = nvcc_here()
    try:
        done = subprocess.run([sys.executable, "-c", _LOOK], capture_output=True, text=True, timeout=90, check=False)
    except subprocess.TimeoutExpired:
        return Machine("torch does not answer: looking for a GPU took over 90 s", "", "", nvcc)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        return Machine(f"torch fails: {last[:200]}", "", "", nvcc)
    facts = json.loads(done.stdout.splitlines()[-1])
    problem = "" if facts["gpu"] else f"torch finds no GPU (built for CUDA {facts['cuda']})"
    driver = _said("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader").split("\n")[0].strip()
    toolkit = re.search(r"release ([\d.]+)", _said(nvcc, "--version")) if nvcc else None
    return Machine(problem, facts["gpu"], facts["capability"], nvcc, driver, toolkit[1] if toolkit else "")


def _said(*command: str) -> str:
    """Output of the command, empty if there is no such program or it fails."""
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return ""


def known() -> str:
    packages = ", ".join(f"{name} {version}" for name, version in KNOWN_PACKAGES.items())
    return f"{', '.join(KNOWN_CARDS)}; driver {KNOWN_DRIVER}, nvcc {KNOWN_NVCC}, Python {KNOWN_PYTHON}, {packages}"


def unknown(machine: Machine) -> list[str]:
    """Card, driver, compiler and Python that no check has run on: a sentence for each, with what is known."""
    found = []
    if machine.gpu not in KNOWN_CARDS:
        cards = ", ".join(KNOWN_CARDS)
        found.append(f"card {machine.gpu or 'without a name'}: known is {cards}, whose figures the predictions are")
    found += _other("driver", machine.driver, KNOWN_DRIVER) + _other("nvcc", machine.toolkit, KNOWN_NVCC)
    return found + _other("Python", platform.python_version(), KNOWN_PYTHON)


def unknown_packages() -> list[str]:
    """Packages that no check has run with: a sentence for each. Call it once those that were missing are installed."""
    found = [text for name, known in KNOWN_PACKAGES.items() for text in _other(name, _version(name), known)]
    never = [f"{name} {version}: no check has run with it" for name in NEVER_RUN if (version := _version(name))]
    return found + never


def _other(name: str, version: str, known: str) -> list[str]:
    """A sentence if the version does not begin with the known one."""
    if not version:
        return [f"{name}: nothing says its version; known is {known}"]
    return [] if f"{version}.".startswith(f"{known}.") else [f"{name} {version}: known is {known}"]


def sanitizer(machine: Machine) -> str | None:
    """compute-sanitizer, on the path or beside nvcc."""
    beside = () if machine.nvcc is None else (os.path.join(os.path.dirname(machine.nvcc), "compute-sanitizer"),)
    candidates = ("compute-sanitizer", *beside, "/usr/local/cuda/bin/compute-sanitizer")
    return next((path for name in candidates if (path := shutil.which(name))), None)


# ---- packages


def canonical(name: str) -> str:
    """The name of a distribution as package indexes compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


@cache
def min_versions() -> dict[str, str]:
    """Distribution -> the lowest version that pyproject.toml allows, where it says one."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    asked = [*project["project"]["dependencies"], *project["build-system"]["requires"]]
    asked += [line for lines in project["project"]["optional-dependencies"].values() for line in lines]
    asked += [line for line in project["dependency-groups"]["dev"] if isinstance(line, str)]  # a dict: another group
    found = (re.match(r"([\w.-]+).*?>=\s*([\d.]+)", line) for line in asked)
    return {canonical(match[1]): match[2] for match in found if match}


def too_old(module: str) -> str:
    """Empty, or "setuptools 65.5 is older than 77"."""
    name, least = PACKAGES[module][0], min_versions().get(canonical(PACKAGES[module][0]))
    version = _version(name)
    if not version or least is None or _numbers(version) >= _numbers(least):
        return ""
    return f"{name} {version} is older than {least}"


def _numbers(version: str) -> tuple[int, ...]:
    """ "2.11.0+cu130" -> (2, 11, 0)."""
    leading = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(word) for word in leading[0].split(".")) if leading else ()


def versions() -> str:
    names = ("torch", "triton", "transformers", "numpy", "setuptools", "pybind11", "pytest", "flashinfer-python")
    found = [f"{name} {version}" for name in names if (version := _version(name))]
    return f"Python {platform.python_version()}, {', '.join(found)}; {os.cpu_count()} cores"


def _version(name: str) -> str:
    """The version of a distribution, empty where it is not installed."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""
