"""The machine of a measurement, and clocks and watts of a GPU meanwhile. Does not know what is measured."""

from __future__ import annotations

import subprocess
import threading
import time
from importlib import metadata
from statistics import median
from typing import Any

import torch


def on_gpu(device: torch.device) -> bool:
    return device.type != "cpu"


class Power:
    """Samples of the SM clock and the power draw while something runs; nothing without a GPU or nvidia-smi."""

    _QUERY = "clocks.sm,power.draw,temperature.gpu"

    def __init__(self, device: torch.device, every_ms: int = 50) -> None:
        self._samples: list[tuple[float, float, float, float]] = []  # when, MHz, watts, degrees
        self._child: subprocess.Popen[str] | None = None
        if not on_gpu(device):
            return
        gpu = str(torch.cuda.get_device_properties(device).uuid)
        query = [f"--query-gpu={self._QUERY}", "--format=csv,noheader,nounits", f"--loop-ms={every_ms}"]
        command = ["nvidia-smi", f"--id=GPU-{gpu.removeprefix('GPU-')}", *query]
        try:
            self._child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        except OSError:
            return
        threading.Thread(target=self._read, name="power", daemon=True).start()

    def between(self, started: float, ended: float) -> dict[str, float]:
        """Medians over samples of [started, ended] of time.perf_counter, empty where there are none."""
        samples = [values for at, *values in list(self._samples) if started <= at <= ended]
        if not samples:
            return {}
        mhz, watts, degrees = (median(column) for column in zip(*samples, strict=True))
        return {"sm_mhz": mhz, "watts": watts, "degrees": degrees}

    def close(self) -> None:
        if self._child is not None:
            self._child.terminate()
            self._child.wait()

    def _read(self) -> None:
        assert self._child is not None and self._child.stdout is not None
        for line in self._child.stdout:
            try:
                mhz, watts, degrees = (float(word) for word in line.split(","))
            except ValueError:  # "[N/A]" on boards that do not say
                continue
            self._samples.append((time.perf_counter(), mhz, watts, degrees))


def device_card(device: torch.device) -> dict[str, Any]:
    """Device and versions of a measurement, besides `bench.common.card`."""
    found: dict[str, Any] = {
        "device": str(device),
        "triton": _version("triton"),
        "transformers": _version("transformers"),
    }
    if not on_gpu(device):
        return found | {"threads": torch.get_num_threads()}
    properties = torch.cuda.get_device_properties(device)
    return found | {
        "gpu": properties.name,
        "sms": properties.multi_processor_count,
        "l2_bytes": properties.L2_cache_size,
        "memory_bytes": properties.total_memory,
        "capability": f"{properties.major}.{properties.minor}",
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "nvidia_smi": _nvidia_smi(),
    }


def _nvidia_smi() -> dict[str, str] | None:
    names = ("driver_version", "power.limit", "clocks.max.sm", "clocks.max.mem", "mig.mode.current")
    command = ["nvidia-smi", f"--query-gpu={','.join(names)}", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    first = done.stdout.strip().split("\n")[0]
    return dict(zip(names, (word.strip() for word in first.split(",")), strict=False))


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
