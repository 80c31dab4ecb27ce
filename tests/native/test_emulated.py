"""The emulated instructions of tests/native/emulated against formulas in numpy and, where the processor has them,
against the instructions themselves."""

from __future__ import annotations

import ctypes
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from hydra_engine import _C
from tests.native.emulated.formulas import EDGES, INSTRUCTIONS, Instruction

pytestmark = pytest.mark.slow  # compiles a function for every instruction

ROOT = Path(__file__).parents[2]
EMULATOR = ROOT / "tests" / "native" / "emulated"
EMULATED = ["-DHYDRA_EMULATED", f"-I{EMULATOR}", "-Wno-psabi"]
FEATURES = {
    "avx512f": ["-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq"],
    "avx512_bf16": ["-mavx512bf16"],
    "avx512_vnni": ["-mavx512vnni"],
    "avx_vnni": ["-mavxvnni"],
    "amx_int8": ["-mamx-tile", "-mamx-int8"],
    "amx_bf16": ["-mamx-bf16"],
}
HEAD = """
#include <cstring>
#include "cpu/isa.h"
#include <immintrin.h>
#ifndef HYDRA_EMULATED
#undef HYDRA_TARGET_AVX2
#define HYDRA_TARGET_AVX2
#endif
namespace hydra {
template <class T> HYDRA_TARGET_AVX2 inline T in(const void* const* from, int i) {
  T value;
  std::memcpy(&value, from[i], sizeof(T));
  return value;
}
"""


def needed(name: str) -> str:
    """The feature of the processor that an instruction belongs to."""
    if name.startswith("_tile"):
        return "amx_bf16" if "bf16" in name else "amx_int8"
    if "_avx_" in name:
        return "avx_vnni"
    if "bf16" in name or "pbh" in name:
        return "avx512_bf16"
    return "avx512_vnni" if "dpbusd" in name or "dpwssd" in name else "avx512f"


def compiled(folder: Path, instructions: list[Instruction], flags: list[str]) -> ctypes.CDLL:
    functions = [
        f'extern "C" HYDRA_TARGET_AVX2 void run_{i}(const void* const* from, void* to) {{ {instruction.body} }}'
        for i, instruction in enumerate(instructions)
    ]
    source, library = folder / "probe.cpp", folder / "probe.so"
    source.write_text("\n".join([HEAD, *functions, "}"]))
    command = [*os.environ.get("CXX", "g++").split(), "-std=c++17", "-O2", "-shared", "-fPIC", f"-I{ROOT / 'csrc'}"]
    done = subprocess.run([*command, *flags, str(source), "-o", str(library)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[:4000]
    return ctypes.CDLL(str(library))


Run = Callable[[Instruction, list[np.ndarray]], np.ndarray]


def runner(folder: Path, instructions: list[Instruction], flags: list[str]) -> Run:
    library = compiled(folder, instructions, flags)

    def run(instruction: Instruction, operands: list[np.ndarray]) -> np.ndarray:
        result = np.full(instruction.result_bytes, 0xAA, np.uint8)
        addresses = (ctypes.c_void_p * len(operands))(*(operand.ctypes.data for operand in operands))
        library[f"run_{instructions.index(instruction)}"](addresses, ctypes.c_void_p(result.ctypes.data))
        return result.view(instruction.result_dtype)

    return run


@pytest.fixture(scope="module")
def emulated(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return runner(tmp_path_factory.mktemp("emulated"), INSTRUCTIONS, EMULATED)


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Runs the instructions that this processor has."""
    own = set(_C.cpu_features())
    flags = ["-mavx2", "-mfma", "-mf16c", *(flag for name in FEATURES if name in own for flag in FEATURES[name])]
    chosen = [instruction for instruction in INSTRUCTIONS if needed(instruction.name) in own]
    return runner(tmp_path_factory.mktemp("real"), chosen, flags)


def same(result: np.ndarray, expected: np.ndarray) -> bool:
    """Bit by bit; any NaN for a NaN."""
    if result.dtype == np.float32:
        number = ~(np.isnan(result) & np.isnan(expected))
        return np.array_equal(result.view(np.uint32)[number], expected.view(np.uint32)[number])
    return np.array_equal(result, expected)


def operands_of(instruction: Instruction, seed: int) -> list[np.ndarray]:
    """Seed 0: the limits of the type in all combinations that fit; others: random."""
    generator = np.random.default_rng(seed)
    operands = []
    for position, (dtype, count) in enumerate(instruction.operands):
        if dtype == np.float32:
            values = (generator.standard_normal(count) * 2.0 ** generator.integers(-30, 30, count)).astype(np.float32)
        else:
            values = generator.integers(0, 256, count * dtype.itemsize, np.uint8).view(dtype)
        if seed == 0 and dtype in EDGES:
            edges = np.array(EDGES[dtype], dtype)
            values = edges[np.arange(count) // len(edges) ** position % len(edges)]
        operands.append(instruction.prepared(position, values))
    return operands


CASES = pytest.mark.parametrize("instruction", INSTRUCTIONS, ids=lambda each: each.label)


@CASES
def test_an_emulated_instruction_is_what_its_formula_says(instruction: Instruction, emulated: Run) -> None:
    for seed in range(8):
        operands = operands_of(instruction, seed)
        expected = np.asarray(instruction.formula(*operands)).astype(instruction.result_dtype)
        result = emulated(instruction, operands)
        alike = instruction.close or same
        assert alike(result, expected), (operands, result, expected)


@CASES
def test_an_emulated_instruction_is_the_processors(instruction: Instruction, emulated: Run, real: Run) -> None:
    if needed(instruction.name) not in _C.cpu_features():
        pytest.skip(f"this processor has no {needed(instruction.name)}")
    for seed in range(8):
        operands = operands_of(instruction, seed)
        mine, its = emulated(instruction, operands), real(instruction, operands)
        alike = instruction.close_to_processor or same
        assert alike(its, mine), (operands, mine, its)


def test_every_emulated_instruction_has_a_formula() -> None:
    text = "\n".join(path.read_text() for path in sorted(EMULATOR.glob("*.h")))
    text = re.sub(r"(?m)^#define.*?[^\\]$", "", text, flags=re.DOTALL)
    names = set(re.findall(r"EMULATED [\w ]+?(_(?:mm|tile)\w*)\(", text))
    names |= {f"_mm512_{name}" for name in re.findall(r"EMULATED_(?!MASKED)\w+\((\w+)", text)}
    for prefix, suffix in re.findall(r"EMULATED_MASKED_MEMORY\((\w+), (\w+)", text):
        names |= {f"{prefix}_{kind}_{suffix}" for kind in ("maskz_loadu", "mask_loadu", "mask_storeu")}
    used = {name for instruction in INSTRUCTIONS for name in re.findall(r"_(?:mm|tile)\w+", instruction.body)}
    assert len(names) > 150 and names - used == set()


WRONG = {
    "a tile is used without a configuration": "_tile_zero(0);",
    "a tile is used that the configuration leaves out": "_tile_loadconfig(from[0]); _tile_zero(3);",
    "a product takes one tile twice": "_tile_loadconfig(from[0]); _tile_dpbf16ps(0, 1, 1);",
    "a product takes tiles whose sizes do not fit": "_tile_loadconfig(from[0]); _tile_dpbf16ps(0, 1, 2);",
    "the address is not aligned": "_mm512_load_si512((const char*)from[0] + 1);",
}


@pytest.mark.parametrize("message", WRONG)
def test_what_a_processor_refuses_ends_the_process(message: str, tmp_path: Path) -> None:
    body = WRONG[message] + " (void)from; (void)to;"
    compiled(tmp_path, [Instruction("wrong", body, [], np.dtype("u1"), 1, lambda: 0)], EMULATED)
    code = f"""
import ctypes, numpy as np
config = np.zeros(128, np.uint8)
config = config[-config.ctypes.data % 64 :][:64]
config[0], config[16:22:2], config[48:51] = 1, 64, (16, 8, 16)
ctypes.CDLL({str(tmp_path / "probe.so")!r}).run_0((ctypes.c_void_p * 1)(config.ctypes.data), None)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode < 0 and f"emulated instruction: {message}" in done.stderr, done.stderr
