"""Ahead-of-time builds of every kernel for sm_80 and sm_90, from what its wrapper launches: it fits, does not spill,
moves 16 bytes at a time, and uses the tensor cores of the target."""

from __future__ import annotations

import ast
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from bench.micro.probe_kernels import dependent_add
from hydra_engine.backend.quantized import FLOAT8
from hydra_kernels._common import decode_launch, packed_launch, prefill_launch
from hydra_kernels._occupancy import Limits, resident_programs
from hydra_kernels.norms import rms_norm
from hydra_kernels.quantized_linear import pack, small_quantized_linear
from tests.kernels.compiling import SHARED_LIMIT, compile_for, record
from tests.kernels.launch_cases import BF16, CASES, LARGE_CASES, compiled, launches_of, rows

pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") == "1", reason="this process interprets kernels; unset TRITON_INTERPRET"
)
KERNELS = Path(__file__).parents[2] / "kernels" / "hydra_kernels"
# Matrix products of bf16 in tiles of 64 rows or more.
WGMMA = [name for name in CASES if name.startswith(("prefill", "packed", "linear-tiled", "quantized"))]
# Kernels whose tiles go through shared memory, and those that read into registers.
_PIPELINED = ("decode", "prefill", "packed", "linear-few", "linear-gated-few", "linear-rope-few", "linear-tiled")
_PIPELINED += ("quantized", "experts")
PIPELINED = [name for name in CASES if name.startswith(_PIPELINED)]
DIRECT = [name for name in CASES if name not in PIPELINED]
# One number of a row or a few of them are all that a program stores, or stores of every token; or bytes, of which a
# thread has eight.
_REDUCING = ("greedy", "sample", "score", "linear-vector", "linear-gated-vector", "linear-rope-vector", "delta_rule")
_REDUCING += ("write_int8", "route")
REDUCING = [name for name in DIRECT if name.startswith(_REDUCING)]
# Reads what it was given a list of, in any order; reads the beginnings of short lists; looks up what bytes say; has a
# row of 128 in a warp.
GATHERING = ("_draw_kernel", "_score_kernel", "_pixel_rows_kernel", "_route_kernel")


# One case of each way to compute; the others are further kernels of a way, or further shapes of a kernel.
QUICK = {"rms_norm-4096", "greedy", "linear-vector-3584", "linear-few-3584"}
QUICK |= {"linear-tiled-4096", "quantized-few-4-128", "decode-gqa-128", "packed-80"}
QUANTIZED_CASES = [name for name in CASES if name.startswith("quantized")]
MIXTURES = [name for name in CASES if name.startswith("experts")]
# Whose code for sm_80 is quick: tensor cores in another way than Hopper's.
_ALSO_80 = {"linear-tiled-4096"}


def targets(names: list[str]) -> list[Any]:
    """Parameters: each name for both capabilities."""
    return [
        pytest.param(name, capability, marks=() if _is_quick(name, capability) else pytest.mark.slow)
        for name in names
        for capability in (80, 90)
    ]


def _is_quick(name: str, capability: int) -> bool:
    return name in (QUICK if capability == 90 else _ALSO_80)


def on_the_newest(names: list[str]) -> list[Any]:
    return [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in names]


@pytest.mark.drawn
@pytest.mark.parametrize(("name", "capability"), targets(list(CASES)))
def test_compiles_and_fits(name: str, capability: int) -> None:
    for kernel, result in compiled(name, capability).items():
        assert result.shared <= SHARED_LIMIT[capability], kernel
        assert result.registers * result.warps * 32 <= 65536, kernel
        # The largest tiles are chosen for sm_90; sm_80 may spill a few registers there.
        assert result.stack <= (0 if capability == 90 else 128), f"{kernel} keeps {result.stack} bytes on the stack"


@pytest.mark.parametrize(("name", "capability"), targets(WGMMA))
def test_tensor_cores(name: str, capability: int) -> None:
    result = next(iter(compiled(name, capability).values()))
    if capability == 90:
        assert result.count(r"wgmma\.mma_async") > 0 and result.count(r"mma\.sync") == 0
    else:
        assert result.count(r"mma\.sync") > 0


@pytest.mark.parametrize("capability", [80, 90])
def test_few_rows_use_tensor_cores_and_one_row_does_not(capability: int) -> None:
    assert compiled("linear-few-3584", capability)["_small_linear_kernel"].count(r"mma\.sync") > 0
    assert compiled("linear-vector-3584", capability)["_small_linear_kernel"].count("mma") == 0


@pytest.mark.drawn
@pytest.mark.quick("[linear-few-3584-89]")
@pytest.mark.parametrize("capability", [89, 100, 120])
@pytest.mark.parametrize("name", PIPELINED)
def test_fits_devices_without_tables_of_their_own(name: str, capability: int) -> None:
    """Devices of capability 8.6, 8.9 and 12.0 have 99 KB for a program, those of 10.0 as much as Hopper."""
    assert all(result.shared <= SHARED_LIMIT[capability] for result in compiled(name, capability).values())


@pytest.mark.quick("decode-gqa-256")
@pytest.mark.parametrize("name", LARGE_CASES)
def test_the_largest_fit_devices_with_little_shared_memory(name: str) -> None:
    for launch in launches_of(name, 89, LARGE_CASES):
        assert compile_for(launch, 89).shared <= SHARED_LIMIT[89]


@pytest.mark.parametrize("name", PIPELINED)
def test_the_newest_devices_with_little_shared_memory_launch_what_older_ones_do(name: str) -> None:
    def tiles(capability: int) -> list[tuple[str, tuple[int, ...], dict[str, Any]]]:
        found = []
        for launch in launches_of(name, capability):
            plain = {key: value for key, value in launch.arguments.items() if isinstance(value, int) and key != "PDL"}
            options = {key: value for key, value in launch.options.items() if key != "launch_pdl"}
            found.append((launch.name, launch.grid, plain | options))
        return found

    assert tiles(120) == tiles(89)


@pytest.mark.slow
def test_decodes_are_split_into_whole_waves() -> None:
    """Limits are those of the compiled kernels: shared memory, whatever registers the joint at the end takes."""
    limits = Limits(233472, 2048)
    for name, expected in (("decode-mha-128", 4), ("decode-gqa-128", 2)):
        (result,) = compiled(name, 90).values()
        assert resident_programs(result.shared, result.registers, result.warps, limits) == expected


@pytest.mark.parametrize("dtype", [torch.float32, BF16], ids=str)
@pytest.mark.parametrize("dim", [16, 64, 80, 128, 256])
def test_warps_of_large_tiles_share_no_rows(dim: int, dtype: torch.dtype) -> None:
    """A warp has 16 rows of a product of 64 and more. Where two groups of four warps had the same 64 rows, and 16
    columns, a kernel that Triton 3.6 compiles for Hopper read outside of its shared memory."""
    packed = (packed_launch(dim, length, dtype) for length in (64, 4096))
    decodes = (decode_launch(dim, group, dtype) for group in (1, 7, 16, 48, 64, 128))
    for launch in (prefill_launch(dim, dtype), *packed, *decodes):
        assert launch.rows < 64 or launch.rows >= 16 * launch.warps


def test_groups_of_a_decode_step_use_tensor_cores_and_single_heads_do_not() -> None:
    assert compiled("decode-gqa-128", 90)["_decode_gqa_kernel"].count(r"mma\.sync") > 0
    assert compiled("decode-mha-128", 90)["_decode_mha_kernel"].count("mma") == 0


@pytest.mark.parametrize("name", on_the_newest(DIRECT))
def test_rows_move_sixteen_bytes_at_a_time(name: str) -> None:
    for kernel, result in compiled(name, 90).items():
        assert kernel in GATHERING or result.count(r"ld\.global[.\w:]*\.v4") > 0
        assert name in REDUCING or result.count(r"st\.global[.\w:]*\.v4") > 0
        # What is left is one piece of a weight that all rows share, if anything, and steps of rounded rows.
        others = result.count(r"st\.global") - result.count(r"st\.global[.\w:]*\.v4")
        assert others <= name.startswith("round_rows") or name in REDUCING


@pytest.mark.parametrize(
    "name", on_the_newest([name for name in PIPELINED if name not in (*QUANTIZED_CASES, *MIXTURES)])
)
def test_keys_and_values_are_copied_asynchronously_sixteen_bytes_at_a_time(name: str) -> None:
    result = next(iter(compiled(name, 90).values()))
    assert result.count(r"cp\.async\.c[ag]\.shared\.global[^;]*0x10") >= 4


@pytest.mark.parametrize(("name", "capability"), targets(QUANTIZED_CASES))
def test_words_are_copied_sixteen_bytes_at_a_time(name: str, capability: int) -> None:
    """Counts copies: at least as many as tiles have 16 bytes per thread and stage; others are for tokens and
    offsets."""
    launch = launches_of(name, capability)[0]
    given = launch.arguments
    num_bytes = given["COLUMNS"] * given["DEPTH"] * given["BITS"] // 8
    copies = compiled(name, capability)[launch.name].count(r"cp\.async\.cg\.shared\.global[^;]*0x10")
    assert copies >= num_bytes // (16 * 32 * launch.options["num_warps"]) * given["STAGES"]


@pytest.mark.parametrize(("name", "capability"), targets(MIXTURES))
def test_products_of_experts_use_tensor_cores_and_copy_sixteen_bytes_at_a_time(name: str, capability: int) -> None:
    kernels = compiled(name, capability)
    (result,) = (kernels[kernel] for kernel in kernels if kernel.startswith("_grouped"))
    assert result.count(r"wgmma\.mma_async") + result.count(r"mma\.sync") > 0
    assert result.count(r"cp\.async\.c[ag]\.shared\.global[^;]*0x10") >= 4


@pytest.mark.parametrize(("name", "capability"), targets([name for name in CASES if name.startswith("linear")]))
def test_weights_are_read_sixteen_bytes_at_a_time_and_nothing_smaller_is_copied(name: str, capability: int) -> None:
    """The weights of a norm are the exception, one copy a stage."""
    result = next(iter(compiled(name, capability).values()))
    copies = result.count(r"cp\.async\.c[ag]\.shared\.global")
    given = launches_of(name, capability)[0].arguments
    norms = given["STAGES"] if copies and given.get("norm") is not None else 0
    assert copies == norms + result.count(r"cp\.async\.c[ag]\.shared\.global[^;]*0x10")
    assert copies > 0 or result.count(r"ld\.global[.\w:]*\.v4") >= 4


# Pieces of 16 bytes that a thread reads before it waits: weights, of one step of a product or of a norm.
AHEAD = {"rms_norm-4096": 2, "add_rms_norm-3584": 2, "decode-mha-128": 0, "decode-gqa-128": 0}
AHEAD |= {"linear-vector-4096": 6, "linear-few-3584": 16}
AHEAD |= {"linear-gated-vector-11008": 16, "linear-gated-few-11008": 8}
AHEAD |= {"linear-rope-vector-mha": 8, "linear-rope-few-gqa": 8}


@pytest.mark.quick("[rms_norm", "gated-vector", "decode-gqa")
@pytest.mark.parametrize("name", on_the_newest([*AHEAD]))
def test_nothing_but_weights_is_touched_before_the_kernel_ahead_has_ended(name: str) -> None:
    """The rule of `hydra_kernels._common`, in the order of the machine code. On sm_80 there is no such launch."""
    (launch,) = launches_of(name, 90)
    assert launch.options["launch_pdl"]
    ((kernel, result),) = compiled(name, 90).items()
    before, after = result.ptx.split("griddepcontrol.wait")
    assert before.count("griddepcontrol.launch_dependents") == 1, kernel
    assert re.findall(r"\b(?:st\.global|red\.|atom\.|cp\.async)", before) == [], kernel
    assert "griddepcontrol" not in after
    code = re.findall(r"\b(?:LDG|STG|RED|ATOM|LDGSTS|ACQBULK)\b", result.machine_code())
    assert code.index("ACQBULK") == AHEAD[name] and {*code[: AHEAD[name]]} <= {"LDG"}, kernel
    assert not any(launch.options["launch_pdl"] for launch in launches_of(name, 80))


@pytest.mark.quick("-4]")
@pytest.mark.parametrize(("name", "num_bits"), [("quantized-few-4-128", 4), ("quantized-few-8", 8)])
def test_numbers_become_fractions_of_floats(name: str, num_bits: int) -> None:
    """The few instructions of it are written by hand and no interpreter runs them: here all 16-bit words go through
    what was compiled, two at once, and are the numbers that `pack` has put there."""
    ptx = compiled(name, 90)["_quantized_linear_kernel"].ptx
    step = r"shr\.b32 t, %r\d+, (\d+); and\.b32 t, t, (\d+); or\.b32 %r\d+, t, (\d+);"
    steps = sorted({tuple(map(int, found)) for found in re.findall(step, ptx)})
    lower = torch.arange(1 << 16)
    pairs = lower | lower.flip(0) << 16

    def floats(shift: int, mask: int, base: int) -> Tensor:
        return (pairs >> shift & mask | base).to(torch.int32).view(BF16).view(-1, 2)

    places = range(0, 16, num_bits)
    if num_bits == 4:
        found = [floats(*given) - 136 for given in steps]
    else:
        found = [floats(*steps[i]) - floats(*steps[i + 1]) for i in range(0, len(steps), 2)]
    assert len(found) == len(places)
    for shift, numbers in zip(places, found, strict=True):
        words = torch.stack((lower, lower.flip(0)), dim=1) >> shift
        expected = (words & 15) - 8 if num_bits == 4 else (words & 255).to(torch.uint8).view(torch.int8)
        assert torch.equal(numbers.float(), expected.float()), shift


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [BF16, torch.float16], ids=str)
def test_octets_become_floats(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    """The same as the test above for E4M3 numbers: compiled code moves their bits, and a product gives them their
    size."""
    weight = pack(torch.zeros(512, 1024, dtype=FLOAT8), torch.zeros(512, 1), None, 8)
    launch = record(monkeypatch, lambda: small_quantized_linear(torch.zeros(8, 1024, dtype=dtype), weight))[0]
    ptx = compile_for(launch, 90).ptx
    move = r"(mov|shl|shr)\.b32 ([st]), %r\d+(?:, (\d+))?;"
    step = rf"{move} {move} and\.b32 t, t, (\d+); and\.b32 s, s, (\d+); or\.b32"
    steps = set(re.findall(step, ptx))
    lower = torch.arange(1 << 16)
    pairs = lower | lower.flip(0) << 16
    moved = {"mov": lambda _: pairs, "shl": lambda by: pairs << int(by), "shr": lambda by: pairs >> int(by)}
    found = []
    for way, first, by, sign_way, second, sign_by, magnitude, sign in steps:
        assert (first, second) == ("t", "s")
        bits = (moved[way](by) & int(magnitude)) | (moved[sign_way](sign_by) & int(sign))
        floats = (bits & 0xFFFFFFFF).to(torch.int64).view(-1, 1).view(torch.int16)[:, :2].contiguous().view(dtype)
        found.append((way, floats.float() * (2.0**120 if dtype is BF16 else 2.0**8)))
    words = torch.stack((lower, lower.flip(0)), dim=1)
    assert {way for way, _ in found} == {"shl", "shr"} and len(found) == 2
    for way, numbers in found:
        octets = (words >> (8 if way == "shr" else 0) & 255).to(torch.uint8)
        number = octets & 127 != 127
        assert torch.equal(numbers[number], octets.view(FLOAT8).float()[number])
    factor = "0x7B807B80" if dtype is BF16 else "0x5C005C00"
    assert re.search(r"mul\.(bf16|f16)x2", ptx) and str(int(factor, 16)) in ptx


@pytest.mark.slow
def test_every_kernel_is_compiled_here() -> None:
    """A kernel is a jitted function of no other: every `_..._kernel` of the package."""
    defined = {
        node.name
        for path in KERNELS.glob("*.py")
        for node in ast.parse(path.read_text(encoding="utf-8")).body
        if isinstance(node, ast.FunctionDef) and node.name.endswith("_kernel")
    }
    with_descriptors = {"packed_tma_kernel", "prefill_tma_kernel"}  # test_compiled_tma.py
    assert defined == {kernel for name in CASES for kernel in compiled(name, 90)} | with_descriptors


def test_a_launch_without_a_gpu_fails_loudly() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises((RuntimeError, ValueError), match=r"driver|cpu"):
        rms_norm(rows(64), rows(64)[0], 1e-5)


@pytest.mark.slow
def test_the_kernel_whose_launch_is_measured_begins_before_the_one_ahead_has_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (launch,) = record(monkeypatch, lambda: dependent_add(torch.zeros(1)))
    found = compile_for(launch, 90)
    assert found.count(r"griddepcontrol\.launch_dependents") == found.count(r"griddepcontrol\.wait") == 1
    assert found.stack == 0
