"""The reader that keeps a ring of bulk copies in flight: its order, run on the host as it is compiled for a device, and
its machine code."""

from __future__ import annotations

import ctypes
import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.common import nvcc_here
from bench.micro import ring_reader
from bench.micro.ring import counts_of
from bench.micro.ring_reader import FOLDER, RINGS, NoReader, compile_for, library, loaded, ring_read
from bootstrap import has_driver

# What a device does with barriers and copies, on the host: a buffer holds a piece from when it was asked for to when it
# has been taken, and a wait for a parity passes once the barrier has completed a phase of that parity.
HOST = """
#include "ring_order.h"
#include <cstring>
// Marks every byte that is read. 0, or which rule was broken.
extern "C" int read_on_host(uint64_t bytes, int warps, int stages, uint32_t piece_bytes, uint8_t* seen, int* deepest) {
  const uint64_t pieces = (bytes + piece_bytes - 1) / piece_bytes;
  int broken = 0;
  *deepest = 0;
  for (int warp = 0; warp < warps; ++warp) {
    int64_t holds[8];
    uint32_t completed[8];
    for (int s = 0; s < 8; ++s) holds[s] = -1, completed[s] = 0;
    int in_flight = 0;
    walk(
        pieces, warp, warps, stages,
        [&](uint64_t piece, int stage) {
          if (stage < 0 || stage >= stages) broken = 1;
          else if (holds[stage] >= 0) broken = 2;  // it has not been taken
          else holds[stage] = piece, ++completed[stage], ++in_flight;
          if (in_flight > *deepest) *deepest = in_flight;
        },
        [&](uint64_t piece, int stage, uint32_t parity) {
          // Phase k of a barrier has parity k - 1 modulo 2.
          if (holds[stage] != static_cast<int64_t>(piece)) broken = 3;
          else if (((completed[stage] - 1) & 1) != parity) broken = 4;
          const uint32_t size = bytes_of(piece, bytes, piece_bytes);
          if (piece * piece_bytes + size > bytes) broken = 5;
          else for (uint32_t i = 0; i < size; ++i) ++seen[piece * piece_bytes + i];
          holds[stage] = -1;
          --in_flight;
        });
    for (int s = 0; s < stages; ++s) if (holds[s] >= 0) broken = 6;
  }
  return broken;
}
"""


@pytest.fixture(scope="module")
def on_host(tmp_path_factory: pytest.TempPathFactory) -> Any:
    name = os.environ.get("CXX") or next(filter(shutil.which, ("g++", "clang++", "c++")), None)
    if name is None:
        pytest.skip("no C++ compiler")
    folder = tmp_path_factory.mktemp("ring")
    (folder / "host.cpp").write_text(HOST)
    command = [*shlex.split(name), "-std=c++17", "-O1", "-shared", "-fPIC", "-Wall", "-Werror", f"-I{FOLDER}"]
    subprocess.run([*command, "-o", str(folder / "host.so"), str(folder / "host.cpp")], check=True)
    return ctypes.CDLL(str(folder / "host.so")).read_on_host


def sizes() -> Iterator[tuple[int, int, int, int]]:
    """Bytes, warps, buffers, bytes of a piece: divided or not, fewer pieces than buffers, than warps, one."""
    for stages in (1, 2, 3, 6, 8):
        for warps in (1, 3, 8):
            for num_bytes in (16, 64, 80, 64 * stages, 64 * stages * warps, 64 * stages * warps + 16, 6400, 6416):
                yield num_bytes, warps, stages, 64


def test_every_piece_is_read_once_into_a_buffer_that_is_free(on_host: Any) -> None:
    for num_bytes, warps, stages, piece_bytes in sizes():
        seen, deepest = (ctypes.c_uint8 * num_bytes)(), ctypes.c_int()
        broken = on_host(ctypes.c_uint64(num_bytes), warps, stages, piece_bytes, seen, ctypes.byref(deepest))
        assert broken == 0 and set(seen) == {1}, (num_bytes, warps, stages)
        pieces = -(-num_bytes // piece_bytes)
        assert deepest.value == min(stages, -(-pieces // warps)), "the ring is full"


def test_as_much_is_in_flight_as_the_rows_say() -> None:
    assert {held: ring.held_bytes for held, ring in RINGS.items()} == {48: 48 << 10, 96: 96 << 10, 192: 192 << 10}
    source = (FOLDER / "ring_read.cu").read_text()
    assert f"kWarps = {ring_reader.WARPS}," in source
    most = re.search(r"kMostStages = (\d+)", source)
    assert most is not None and all(ring.stages <= int(most[1]) for ring in RINGS.values())
    assert counts_of(132)[-3:] == [96, 112, 132] and counts_of(48)[-2:] == [40, 48]


def disassembled(path: Path, what: str) -> str:
    triton = pytest.importorskip("triton")
    return subprocess.check_output([triton.knobs.nvidia.cuobjdump.path, what, str(path)], text=True)


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a", "sm_120a"])
def test_pieces_come_by_bulk_copies_and_nothing_spills(arch: str, tmp_path: Path) -> None:
    nvcc = nvcc_here()
    if nvcc is None:
        pytest.skip("no nvcc")
    path, said = compile_for(arch, nvcc, tmp_path)
    assert "0 bytes spill stores, 0 bytes spill loads" in said
    code = disassembled(path, "-sass")
    assert len(re.findall(r"\bUBLKCP\b", code)) >= 2, "to begin with, and where a buffer is free again"
    assert "SYNCS.PHASECHK" in code and "LDS.128" in code and not re.findall(r"\b(LDG|LDL|STL)\b", code)
    registers = re.search(r"REG:(\d+)", disassembled(path, "-res-usage"))
    assert registers is not None and int(registers[1]) <= 64
    assert compile_for(arch, nvcc, tmp_path) == (path, ""), "it is kept"
    read = loaded(path).ring_read
    assert read(0, None, 64, 1, 9, 4096, None, None) == b"a ring has 1 to 8 buffers"
    assert read(0, None, 24, 1, 3, 4096, None, None) == b"pieces are multiples of 16 bytes"
    if not has_driver():
        assert b"CUDA driver" in read(0, None, 64, 1, 3, 4096, None, None), "it loads without a driver, and says so"


def test_a_device_or_a_machine_that_cannot_read_so_says_why(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    library.cache_clear()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 6))
    with pytest.raises(NoReader, match=r"compute capability 9\.0, this one has 8\.6"):
        library(torch.device("cuda", 0))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(ring_reader, "nvcc_here", lambda: None)
    with pytest.raises(NoReader, match="no nvcc"):
        library(torch.device("cuda", 0))
    broken = tmp_path / "nvcc"
    broken.write_text("#!/bin/sh\necho 'unknown architecture' >&2\nexit 1\n")
    broken.chmod(0o755)
    with pytest.raises(NoReader, match=r"does not compile ring_read\.cu for sm_90a: unknown architecture"):
        compile_for("sm_90a", str(broken), tmp_path)


@pytest.mark.parametrize(
    "words", [torch.zeros(4), torch.zeros(6, dtype=torch.int32), torch.zeros(0, dtype=torch.int32)]
)
def test_what_bulk_copies_cannot_read_is_refused(words: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="a multiple of 4"):
        ring_read(words, 1, 48)


def test_a_ring_that_reads_something_else_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """A small ring on one multiprocessor reuses buffers; a read of so few words by all of them would not show the
    error."""
    words, asked = torch.arange(1 << 12, dtype=torch.int32), []

    def read(words: torch.Tensor, num_sms: int, held_kib: int) -> torch.Tensor:
        asked.append((num_sms, held_kib))
        return words[: -4 if (num_sms, held_kib) == (1, 96) else None]

    monkeypatch.setattr(ring_reader, "library", lambda device: None)
    monkeypatch.setattr(ring_reader, "ring_read", read)
    found, why = ring_reader.usable(words, 132)
    assert found == [48, 192] and why == "wrong result of the read with 96 KB in flight"
    assert asked == [(count, held) for held in (48, 96, 192) for count in (1, 132)]
