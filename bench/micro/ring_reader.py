"""Reading memory through a ring of bulk copies, with 48, 96 or 192 KB in flight on each multiprocessor.

`ring_read.cu` is compiled at the first use by the machine's own nvcc, for its own device, and kept in build/bench. Does
not know what is measured with it.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib.util
import os
import subprocess
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bench.common import ROOT, nvcc_here

FOLDER = Path(__file__).parent
SOURCES = ("ring_read.cu", "ring_order.h")
WARPS = 4  # of a block, as in the source
KIB = 1024


class Ring(NamedTuple):
    """The buffers of each warp, and the bytes of each buffer."""

    stages: int
    piece_bytes: int

    @property
    def held_bytes(self) -> int:
        """Bytes in flight on a multiprocessor, which runs one block."""
        return WARPS * self.stages * self.piece_bytes


RINGS = {ring.held_bytes // KIB: ring for ring in (Ring(3, 4 * KIB), Ring(6, 4 * KIB), Ring(6, 8 * KIB))}
_CHECKED_WORDS = (1 << 20) + 4  # the last piece is short
_MODULUS = 1 << 32  # of sums of 32-bit words


class NoReader(Exception):
    """Raised where this machine cannot read memory in a ring; says why in a sentence."""


def compile_for(arch: str, nvcc: str, folder: Path) -> tuple[Path, str]:
    """The library in `folder` for an architecture as "sm_90a", and what the compiler said, which is nothing where it is
    there already. Raises NoReader."""
    version = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=False).stdout
    digest = hashlib.sha256(version.encode())
    for name in SOURCES:
        digest.update((FOLDER / name).read_bytes())
    path = folder / f"ring_read-{arch}-{digest.hexdigest()[:12]}.so"
    if path.exists():
        return path, ""
    folder.mkdir(parents=True, exist_ok=True)
    fresh = path.with_suffix(f".{os.getpid()}")
    command = [nvcc, "-O3", "-std=c++17", f"-gencode=arch={arch.replace('sm', 'compute')},code={arch}", "-Xptxas=-v"]
    command += [f"-L{folder}" for folder in runtimes()]
    command += ["-Xcompiler=-fPIC", "-shared", "-cudart=static", "-o", str(fresh), str(FOLDER / SOURCES[0])]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise NoReader(f"nvcc does not compile {SOURCES[0]} for {arch}: {' '.join(done.stderr.split())[:200]}")
    os.replace(fresh, path)
    return path, done.stdout + done.stderr


def runtimes() -> list[Path]:
    """The folders of the CUDA runtimes that torch brings along: not every nvcc has its own beside it."""
    spec = importlib.util.find_spec("nvidia")
    places = () if spec is None else spec.submodule_search_locations or ()
    return [path.parent for place in places for path in sorted(Path(place).glob("cu*/lib/libcudart_static.a"))]


@cache
def library(device: torch.device) -> Any:
    """Raises NoReader where the device or the machine has none."""
    major, minor = torch.cuda.get_device_capability(device)
    if major < 9:
        raise NoReader(f"bulk copies need a GPU of compute capability 9.0, this one has {major}.{minor}")
    nvcc = nvcc_here()
    if nvcc is None:
        raise NoReader("there is no nvcc to compile the reader with")
    path, _ = compile_for(f"sm_{major}{minor}a", nvcc, ROOT / "build" / "bench")
    return loaded(path)


def loaded(path: Path) -> Any:
    try:
        found = ctypes.CDLL(str(path))
    except OSError as error:
        raise NoReader(f"the reader cannot be loaded: {error}") from error
    found.ring_read.restype = ctypes.c_char_p
    found.ring_read.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_uint64, ctypes.c_int, ctypes.c_int]
    found.ring_read.argtypes += [ctypes.c_uint32, ctypes.c_void_p, ctypes.c_void_p]
    return found


def ring_read(words: Tensor, num_sms: int, held_kib: int) -> Tensor:
    """[warps] int32 whose sum is that of `words`, int32, contiguous and of whole 16 bytes, modulo 2^32: read once, by a
    block on each of `num_sms` multiprocessors. Launched on the current stream. Raises NoReader."""
    if words.dtype != torch.int32 or not words.is_contiguous() or words.numel() % 4 or not words.numel():
        raise ValueError("words: expected contiguous int32, a multiple of 4 of them")
    device, ring = words.device, RINGS[held_kib]
    sums = torch.empty(num_sms * WARPS, dtype=torch.int32, device=device)
    stream = torch.cuda.current_stream(device).cuda_stream
    given = words.data_ptr(), words.numel() * 4, num_sms, *ring, sums.data_ptr(), stream
    problem = library(device).ring_read(device.index or 0, *given)
    if problem is not None:
        raise NoReader(f"{held_kib} KB in flight on {num_sms} multiprocessors: {problem.decode()}")
    return sums


def usable(words: Tensor, num_sms: int) -> tuple[list[int], str]:
    """KB in flight with which `ring_read` reads here, ascending, and why the others cannot be, empty if none. Each is
    held against the sum of some words on one multiprocessor, whose ring goes round many times, and on all, which have a
    piece or two each."""
    try:
        library(words.device)
    except NoReader as reason:
        return [], str(reason)
    few, found, reasons = words[:_CHECKED_WORDS], [], []
    expected = int(few.sum(dtype=torch.int64)) % _MODULUS
    for held in RINGS:
        try:
            sums = [int(ring_read(few, count, held).sum(dtype=torch.int64)) for count in (1, num_sms)]
        except NoReader as reason:
            reasons.append(str(reason))
            continue
        if all(total % _MODULUS == expected for total in sums):
            found.append(held)
        else:
            reasons.append(f"wrong result of the read with {held} KB in flight")
    return found, "; ".join(dict.fromkeys(reasons))
