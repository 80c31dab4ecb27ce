"""Products with weights of 8 and 4 bits: the formulas of backend/quantized.py, the same bits on every level, in every
batch and for every number of threads."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from torch import Tensor

from hydra_engine import _C
from hydra_engine.backend.cpu.linear import DTYPE_CODES, NativeQuantizedLinear, linear, pack_linear
from hydra_engine.backend.cpu.ops import NativeOps
from hydra_engine.backend.quantized import PART, SCALE_DTYPES, QuantizedWeight, quantized
from hydra_engine.backend.reference.ops import ReferenceOps
from tests.ops.conftest import AVAILABLE

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# num_out, K, group size
SIZES = [
    (1, 1, 1),
    (5, 7, 7),
    (33, 130, 130),
    (31, 1100, 1100),
    (40, 64, 16),
    (70, 96, 32),
    (97, 336, 48),
    (64, 512, 128),
    (32, 1280, 640),
]
ODD = [size for size in SIZES if size[1] % 2]
# The same with scales in two levels, and bits; a last block that is not as long as a piece, groups that are blocks.
TWO_LEVELS = [
    (5, 256, 16, 6),
    (33, 768, 16, 6),
    (97, 1280, 32, 6),
    (31, 768, 32, 4),
    (70, 512, 64, 4),
    (40, 512, 256, 4),
]


def weight_of(
    size: tuple[int, int, int], num_bits: int, scale_dtype: torch.dtype = torch.float32, *, offsets: bool = False
) -> QuantizedWeight:
    """A weight that has every value of its bits, -128 too."""
    num_out, num_in, group = size
    generator = torch.Generator().manual_seed(num_out * 101 + num_in)
    form = {"generator": generator}
    if num_bits == 8:
        values = torch.randint(-128, 128, (num_out, num_in), dtype=torch.int8, **form)
    else:
        values = torch.randint(0, 256, (num_out, num_in // 2), dtype=torch.uint8, **form)
    shape = (num_out, num_in // group)
    scales = ((torch.rand(shape, **form) + 0.5) / num_in**0.5 / 2**num_bits).to(scale_dtype)
    return QuantizedWeight(values, scales, torch.randn(shape, **form) / num_in if offsets else None, num_bits)


def in_two_levels(size: tuple[int, int, int, int], *, offsets: bool) -> QuantizedWeight:
    """Scales and offsets of every sign, zeros too; blocks without a scale."""
    num_out, num_in, group, num_bits = size
    generator = torch.Generator().manual_seed(num_out * 101 + num_in)
    if num_bits == 6:
        values = torch.randint(-32, 32, (num_out, num_in), dtype=torch.int8, generator=generator)
    else:
        values = torch.randint(0, 256, (num_out, num_in // 2), dtype=torch.uint8, generator=generator)
    bytes_ = torch.randint(-128, 128, (2, num_out, num_in // group), dtype=torch.int8, generator=generator)
    block_scales = torch.randn(num_out, num_in // 256, 2 if offsets else 1, generator=generator) / 4096
    block_scales[0, 0] = 0
    return QuantizedWeight(values, bytes_[0], bytes_[1] if offsets else None, num_bits, block_scales.half())


def rows_of(count: int, num_in: int, dtype: torch.dtype) -> Tensor:
    """Rows with outlier channels, for which parts of rows have 16 bits: the first part in three rows of ten, so
    neighbours differ, the others in seven."""
    x = torch.randn(count, num_in, generator=torch.Generator().manual_seed(count * 7 + num_in))
    places = torch.arange(count) % 10 * 7 % 10
    x[places < 3, 5:PART:61] *= 2.0**8
    x[places < 7, PART + 9 :: 61] *= 2.0**8
    return x.to(dtype)


def assert_near(result: Tensor, expected: Tensor) -> None:
    """Equal but for the last bit of float32, which the reference rounds twice, or of the result's own dtype."""
    rtol = {torch.float32: 2e-6, torch.bfloat16: 2**-8, torch.float16: 2**-11}[result.dtype]
    torch.testing.assert_close(result, expected, rtol=rtol, atol=2e-6 * float(expected.abs().max()), equal_nan=True)
    assert (result == expected).float().mean() > 0.9


@pytest.mark.parametrize(
    ("size", "num_bits"), [case for case in product(SIZES, (8, 4)) if case[1] == 8 or case[0] not in ODD]
)
@pytest.mark.parametrize("offsets", [False, True])
def test_products_are_those_of_the_reference(
    isa: str, size: tuple[int, int, int], num_bits: int, *, offsets: bool
) -> None:
    ops = ReferenceOps()
    for scale_dtype, dtype, rows in zip(SCALE_DTYPES, DTYPES, (1, 5, 70), strict=True):
        weight, x = weight_of(size, num_bits, scale_dtype, offsets=offsets), rows_of(rows, size[1], dtype)
        bias = torch.randn(size[0], generator=torch.Generator().manual_seed(1)).to(dtype)
        expected = ops.linear(x, ops.pack_linear(weight, bias), out_dtype=torch.float32)
        assert_near(linear(x, pack_linear(weight, bias), out_dtype=torch.float32), expected)
        rounded = linear(x, pack_linear(weight))
        assert rounded.dtype is dtype and rounded.is_contiguous()
        assert_near(rounded, ops.linear(x, ops.pack_linear(weight)))


@pytest.mark.parametrize("offsets", [False, True])
@pytest.mark.parametrize("size", TWO_LEVELS, ids=str)
def test_scales_in_two_levels_give_the_bits_of_those_that_they_stand_for(
    isa: str, threads: int, size: tuple[int, int, int, int], *, offsets: bool
) -> None:
    weight, ops = in_two_levels(size, offsets=offsets), ReferenceOps()
    bias = torch.randn(size[0], generator=torch.Generator().manual_seed(1))
    packed, plain = pack_linear(weight, bias), pack_linear(weight.flatten_scales(), bias)
    for dtype, rows in zip(DTYPES * 3, (1, 2, 3, 5, 8, 12, 17, 40, 70), strict=True):
        x = rows_of(rows, size[1], dtype)
        result = linear(x, packed, out_dtype=torch.float32)
        assert torch.equal(result, linear(x, plain, out_dtype=torch.float32)), rows
        assert torch.equal(linear(x[-1:], packed, out_dtype=torch.float32), result[-1:]), rows
    assert_near(result, ops.linear(x, ops.pack_linear(weight, bias), out_dtype=torch.float32))


def test_scales_in_two_levels_of_poisoned_neighbours_are_not_read(isa: str) -> None:
    """Poison around the tensors and around the packed weight changes nothing and is not changed."""
    weight = in_two_levels((33, 768, 16, 6), offsets=True)
    x = rows_of(9, 768, torch.bfloat16)
    expected = linear(x, pack_linear(weight))
    parts = [weight.values, weight.scales, weight.offsets, weight.block_scales]
    poisoned = []
    for part in parts:
        assert part is not None
        poison = float("nan") if part.is_floating_point() else 77
        around = torch.full((part.shape[0] + 2, *part.shape[1:]), poison, dtype=part.dtype)
        around[1:-1] = part
        poisoned.append(around[1:-1])
    packed = NativeQuantizedLinear(QuantizedWeight(*poisoned[:3], 6, poisoned[3]))
    assert torch.equal(linear(x, packed), expected)
    memory = torch.full((packed.nbytes + 8192,), 0xFF, dtype=torch.uint8)
    begin = 4096 - memory.data_ptr() % 64
    handle = _C.PackedQuantized(memory.data_ptr() + begin, 0, 33, 768, 48, 6, 0, True, True)
    handle.pack(*(part.data_ptr() for part in poisoned))
    assert memory[:begin].eq(0xFF).all() and memory[begin + packed.nbytes :].eq(0xFF).all()
    guarded = torch.full((11, 33), float("nan"), dtype=torch.bfloat16)
    code = DTYPE_CODES[torch.bfloat16]
    _C.linear_quantized(handle, x.data_ptr(), x.stride(0), 9, guarded[1:-1].data_ptr(), 0, code, code)
    assert torch.equal(guarded[1:-1], expected) and guarded[[0, -1]].isnan().all()


def test_every_level_gives_the_same_bits_from_scales_in_two_levels() -> None:
    cases = [
        (size, offsets, rows) for size in TWO_LEVELS for offsets in (False, True) for rows in (1, 3, 8, 17, 40, 65)
    ]
    results: dict[str, list[Tensor]] = {}
    best = _C.isa()
    try:
        for level in AVAILABLE:
            _C.force_isa(level)
            results[level] = [
                linear(rows_of(rows, size[1], torch.float32), pack_linear(in_two_levels(size, offsets=offsets)))
                for size, offsets, rows in cases
            ]
    finally:
        _C.force_isa(best)
    for level, got in results.items():
        assert all(map(torch.equal, got, results["scalar"])), level


@pytest.mark.parametrize("num_bits", [8, 4])
def test_every_level_up_to_amx_gives_the_same_bits(num_bits: int) -> None:
    cases = [(size, *rest) for size, *rest in product(SIZES, SCALE_DTYPES, (False, True)) if size not in ODD]
    results: dict[str, list[Tensor]] = {}
    best = _C.isa()
    try:
        for level in AVAILABLE:
            _C.force_isa(level)
            results[level] = [
                linear(
                    rows_of(rows, size[1], dtype),
                    pack_linear(weight_of(size, num_bits, scale_dtype, offsets=offsets)),
                    out_dtype=torch.float32,
                )
                for (size, scale_dtype, offsets), dtype, rows in zip(
                    cases, DTYPES * len(cases), [1, 2, 3, 8, 12, 17, 40, 65] * len(cases), strict=False
                )
            ]
    finally:
        _C.force_isa(best)
    for level, got in results.items():
        assert len(got) == len(cases)
        assert all(map(torch.equal, got, results["scalar"])), level


@pytest.mark.parametrize("num_bits", [8, 4])
@pytest.mark.parametrize("size", [(97, 336, 48), (160, 1030, 1030)], ids=str)
def test_a_row_does_not_depend_on_the_batch_or_the_threads(isa: str, num_bits: int, size: tuple[int, int, int]) -> None:
    packed = pack_linear(weight_of(size, num_bits, torch.bfloat16, offsets=True))
    x = rows_of(135, size[1], torch.bfloat16)
    alone = torch.cat([linear(x[row : row + 1], packed, act="gelu") for row in range(135)])
    try:
        for threads in (1, 2, 3):
            _C.set_num_threads(threads)
            for rows in (*range(1, 20), 31, 64, 65, 135):
                assert torch.equal(linear(x[:rows], packed, act="gelu"), alone[:rows]), (threads, rows)
            assert torch.equal(linear(x[13:58], packed, act="gelu"), alone[13:58])
    finally:
        _C.set_num_threads(1)


@pytest.mark.parametrize("num_bits", [8, 4])
def test_many_rows_are_cut_without_changing_them(isa: str, threads: int, num_bits: int) -> None:
    size = (330, 64, 32)
    packed = pack_linear(weight_of(size, num_bits, torch.float16))
    x, residual = rows_of(1100, 64, torch.bfloat16), rows_of(1100, 330, torch.bfloat16)
    result = linear(x, packed, act="quick_gelu", residual=residual)
    for begin, end in ((0, 1), (511, 513), (1020, 1030), (1099, 1100)):
        part = linear(x[begin:end], packed, act="quick_gelu", residual=residual[begin:end])
        assert torch.equal(part, result[begin:end]), (begin, end)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("act", ["none", "silu", "gelu", "gelu_tanh", "quick_gelu"])
def test_bias_activation_and_residual_apply_to_the_float32_sums(isa: str, dtype: torch.dtype, act: str) -> None:
    weight, x = weight_of((45, 96, 32), 4, torch.float16), rows_of(19, 96, dtype)
    bias, residual = rows_of(1, 45, dtype)[0], rows_of(19, 45, dtype)
    ops = ReferenceOps()
    expected = ops.linear(x, ops.pack_linear(weight, bias), act=act, residual=residual)  # type: ignore[arg-type]
    packed = pack_linear(weight, bias)
    result = linear(x, packed, act=act, residual=residual)  # type: ignore[arg-type]
    rtol = {torch.float32: 4e-6, torch.bfloat16: 2**-8, torch.float16: 2**-11}[dtype]
    torch.testing.assert_close(result, expected, rtol=rtol, atol=rtol)
    plain = linear(x, packed, act=act, out_dtype=torch.float32)  # type: ignore[arg-type]
    assert torch.equal(result, (plain + residual.float()).to(dtype))


@pytest.mark.parametrize("num_bits", [8, 4])
@pytest.mark.parametrize("rows", [1, 7, 20, 40])
def test_memory_around_inputs_and_outputs_is_left_alone(isa: str, threads: int, num_bits: int, rows: int) -> None:
    weight, x = weight_of((45, 74, 74), num_bits), rows_of(rows, 74, torch.bfloat16)
    expected = linear(x, pack_linear(weight))
    around = torch.full((rows + 2, 90), float("nan"), dtype=torch.bfloat16)
    around[1:-1, 8:82] = x
    linear(around[:, :74], pack_linear(weight))  # leaves NaN in reused working memory
    values = torch.full((47, weight.values.shape[1] + 9), 77).to(weight.values.dtype)
    values[1:-1, 3 : 3 + weight.values.shape[1]] = weight.values
    strided = QuantizedWeight(values[1:-1, 3 : 3 + weight.values.shape[1]], weight.scales, None, num_bits)
    packed = NativeQuantizedLinear(strided)
    assert torch.equal(linear(around[1:-1, 8:82], packed), expected)
    guarded = torch.full((rows + 2, 45), float("nan"), dtype=torch.bfloat16)
    code = DTYPE_CODES[torch.bfloat16]
    _C.linear_quantized(packed.handle, x.data_ptr(), x.stride(0), rows, guarded[1:-1].data_ptr(), 0, code, code)
    assert torch.equal(guarded[1:-1], expected)
    assert guarded[0].isnan().all() and guarded[-1].isnan().all()


@pytest.mark.parametrize("num_bits", [8, 4])
@pytest.mark.parametrize("group", [32, 130])
def test_rows_that_are_not_finite_give_nan_alone(isa: str, num_bits: int, group: int) -> None:
    num_in = 160 if group == 32 else 130
    weight, x = weight_of((40, num_in, group), num_bits), rows_of(20, num_in, torch.float32)
    packed = pack_linear(weight)
    clean = linear(x, packed)
    x[3, 5], x[11, num_in - 1], x[12, 40] = float("inf"), float("nan"), float("-inf")
    dirty = linear(x, packed)
    others = [row for row in range(20) if row not in (3, 11, 12)]
    assert torch.equal(dirty[others], clean[others])
    assert dirty[[3, 11, 12]].isnan().all()


def test_tiny_groups_count_as_zeros_and_large_ones_are_exact(isa: str) -> None:
    """127 / 2^-130 would be infinite; 127 * -128 over 262144 inputs needs more than 32 bits."""
    weight = weight_of((3, 64, 32), 8)
    assert linear(torch.full((1, 64), 2.0**-130), pack_linear(weight)).eq(0).all()
    large = QuantizedWeight(torch.full((1, 262144), -128, dtype=torch.int8), torch.ones(1, 1))
    assert linear(torch.full((1, 262144), 127.0), pack_linear(large)).item() == -127 * 128 * 262144


FORMS = [(8, 1024), (8, 128), (8, 32), (4, 1024), (4, 128), (4, 32), (6, 16), (5, 32)]  # 6, 5: two levels; 5: 4 bits


@pytest.mark.parametrize(("num_bits", "group"), FORMS)
@pytest.mark.parametrize("channels", [[7], [7, 300, 301, 900]], ids=str)
def test_outlier_channels_leave_the_others_their_digits(
    isa: str, num_bits: int, group: int, channels: list[int]
) -> None:
    """Outliers are 2^3 to 2^10 times as large as the others, and the weights that read them so much smaller: the error
    against the dequantised weight is at most four times that without."""
    generator = torch.Generator().manual_seed(0)
    x, wide = (torch.randn(rows, 1024, generator=generator) for rows in (19, 48))
    worst, plain = 0.0, 0.0
    for power in (0, 3, 5, 6, 8, 10):
        inputs, weights = x.clone(), wide.clone()
        inputs[:, channels] *= 2.0**power
        weights[:, channels] /= 2.0**power
        if num_bits in (8, 4):
            weight = quantized(weights, num_bits, group, torch.float32)
        else:
            weight = in_two_levels((48, 1024, group, 6 if num_bits == 6 else 4), offsets=num_bits == 5)
            weight.values[:, [k // (1 if num_bits == 6 else 2) for k in channels]] = 0 if num_bits == 6 else 0x88
        exact = inputs.double() @ weight.dequantized(torch.float32).double().T
        rest = inputs.clone()
        rest[:, channels] = 0
        size = (rest.double() @ weight.dequantized(torch.float32).double().T).norm()
        error = float((linear(inputs, pack_linear(weight)).double() - exact).norm() / size)
        worst, plain = max(worst, error), plain or error
    assert plain < 0.01
    assert worst < 4 * plain


def test_an_empty_batch_and_an_empty_weight_give_empty_results(isa: str) -> None:
    packed = pack_linear(weight_of((9, 64, 16), 4))
    assert linear(torch.empty(0, 64), packed, residual=torch.empty(0, 9)).shape == (0, 9)
    none = QuantizedWeight(torch.empty(0, 64, dtype=torch.int8), torch.empty(0, 4))
    assert linear(torch.ones(2, 64), pack_linear(none)).shape == (2, 0)


@pytest.mark.parametrize(("num_bits", "group", "most"), [(8, 512, 1.01), (4, 128, 1.01), (4, 32, 1.01)])
def test_a_packed_weight_needs_the_memory_of_its_tensors(num_bits: int, group: int, most: float) -> None:
    weight = weight_of((1024, 512, group), num_bits, torch.float16, offsets=True)
    assert weight.nbytes <= pack_linear(weight).nbytes <= most * weight.nbytes


@pytest.mark.parametrize(("size", "bytes_of_32"), [((64, 1024, 32, 4), 18.5), ((64, 1024, 32, 6), 26.5)])
def test_scales_in_two_levels_take_two_bytes_a_group(size: tuple[int, int, int, int], bytes_of_32: float) -> None:
    assert pack_linear(in_two_levels(size, offsets=True)).nbytes == 64 * 1024 // 32 * bytes_of_32
    assert pack_linear(in_two_levels((64, 1024, 16, 6), offsets=False)).nbytes == 64 * 1024 // 32 * 26.25


def test_the_choice_names_the_products_of_bytes(isa: str) -> None:
    reason = next(choice.reason for choice in NativeOps().choices() if choice.op == "linear")
    has_vnni = isa in ("avx512", "avx512bf16", "amx") and "avx512_vnni" in _C.cpu_features()
    expected = "avx512_vnni" if has_vnni else "scalar" if isa == "scalar" else "avx2"
    assert f"weights of 8 and 4 bits: {expected}" in reason


def test_wrong_arguments_are_named_with_expected_and_actual() -> None:
    weight = weight_of((8, 64, 16), 8)
    with pytest.raises(ValueError, match=r"x: expected \[T, 64\].*got \[3, 60\]"):
        linear(torch.ones(3, 60), pack_linear(weight))
    with pytest.raises(ValueError, match=r"x: expected .*float32, bfloat16 or float16.*got .*float64"):
        linear(torch.ones(3, 64, dtype=torch.float64), pack_linear(weight))
    with pytest.raises(ValueError, match=r"bias: expected \[8\].*got \[7\]"):
        pack_linear(weight, torch.ones(7))
    with pytest.raises(ValueError, match=r"groups: expected 1, .*got 3"):
        _C.quantized_bytes(8, 64, 3, 8, 0, False)
    with pytest.raises(ValueError, match=r"num_bits: expected 8 or 4, got 5"):
        _C.quantized_bytes(8, 64, 1, 5, 0, False)
    with pytest.raises(ValueError, match=r"num_bits: expected 6 or 4, got 8"):
        _C.quantized_bytes(8, 256, 16, 8, 0, False, True)
    for num_in, groups in ((384, 12), (768, 2), (0, 1)):
        with pytest.raises(ValueError, match=r"groups: expected a multiple of the blocks of 256"):
            _C.quantized_bytes(8, num_in, groups, 6, 0, False, True)
