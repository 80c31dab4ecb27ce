"""Packed matrix products against float64 torch: every level, dtype, odd sizes, strides, bitwise batch invariance."""

import threading
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from hydra_engine import _C
from hydra_engine.backend.cpu.linear import DTYPE_CODES, NativeLinear, linear

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
ACTIVATIONS = {
    "none": lambda x: x,
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
}
SIZES = [(1, 1, 1), (1, 7, 5), (3, 33, 31), (17, 100, 65), (33, 129, 127), (70, 70, 333), (5, 64, 64), (32, 32, 32)]


def case(rows: int, num_out: int, num_in: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rows * 10007 + num_out * 101 + num_in)
    x = torch.randn(rows, num_in, generator=generator).to(dtype)
    weight = (torch.randn(num_out, num_in, generator=generator) / num_in**0.5).to(dtype)
    return x, weight, torch.randn(num_out, generator=generator).to(dtype)


def exact(x: Tensor, weight: Tensor, bias: Tensor | None, act: str = "none") -> Tensor:
    return ACTIVATIONS[act](F.linear(x.double(), weight.double(), None if bias is None else bias.double()))


def assert_as_good_as(result: Tensor, plain: Tensor, truth: Tensor) -> None:
    """Allows twice the error of a plain torch implementation in the same dtype, and a float32 rounding."""
    allowed = 2 * (plain.double() - truth).abs().max() + 1e-6 * (1 + truth.abs().max())
    error = (result.double() - truth).abs().max()
    assert error <= allowed, f"error {error:.3g}, allowed {allowed:.3g}"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_products_match_float64(isa: str, dtype: torch.dtype, size: tuple[int, int, int]) -> None:
    x, weight, bias = case(*size, dtype)
    packed = NativeLinear(weight, bias)
    truth = exact(x, weight, bias)
    result = linear(x, packed)
    assert result.dtype == dtype and result.is_contiguous()
    assert_as_good_as(result, F.linear(x, weight, bias), truth)
    assert_as_good_as(linear(x, NativeLinear(weight)), F.linear(x, weight), exact(x, weight, None))
    single = linear(x, packed, out_dtype=torch.float32)
    assert single.dtype == torch.float32
    assert_as_good_as(single, F.linear(x.float(), weight.float(), bias.float()), truth)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("act", ACTIVATIONS)
def test_bias_and_activation_apply_to_the_float32_sums(isa: str, dtype: torch.dtype, act: str) -> None:
    x, weight, bias = case(19, 45, 77, dtype)
    weight = (weight.float() * 3).to(dtype)  # arguments on both tails of the activations
    result = linear(x, NativeLinear(weight, bias), act=act)  # type: ignore[arg-type]
    assert_as_good_as(result, ACTIVATIONS[act](F.linear(x, weight, bias)), exact(x, weight, bias, act))


@pytest.mark.quick("float32", "bfloat16", "avx", "amx")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("act", ["none", "quick_gelu"])
def test_the_residual_is_added_to_the_float32_result(
    isa: str, dtype: torch.dtype, size: tuple[int, int, int], act: str
) -> None:
    x, weight, bias = case(*size, dtype)
    packed = NativeLinear(weight, bias)
    around = torch.full((size[0] + 2, size[1] + 7), float("nan"), dtype=dtype)
    residual = around[1:-1, 3 : 3 + size[1]]
    residual.copy_(torch.randn(size[:2], generator=torch.Generator().manual_seed(3)))
    plain = linear(x, packed, act=act, out_dtype=torch.float32)  # type: ignore[arg-type]
    before = residual.clone()
    result = linear(x, packed, act=act, residual=residual)  # type: ignore[arg-type]
    assert torch.equal(result, (plain + before.float()).to(dtype))
    assert torch.equal(residual, before)
    single = linear(x, packed, act=act, residual=before.float(), out_dtype=torch.float32)  # type: ignore[arg-type]
    assert torch.equal(single, plain + before.float())
    alone = [linear(x[i : i + 1], packed, act=act, residual=residual[i : i + 1]) for i in range(size[0])]  # type: ignore[arg-type]
    assert torch.equal(torch.cat(alone), result)


@pytest.mark.parametrize("num_in", [64, 1500])
def test_many_rows_are_cut_without_changing_them(isa: str, threads: int, num_in: int) -> None:
    x, weight, bias = case(1100, 530, num_in, torch.bfloat16)
    residual = torch.randn(1100, 530, generator=torch.Generator().manual_seed(4)).bfloat16()
    packed = NativeLinear(weight, bias)
    result = linear(x, packed, act="quick_gelu", residual=residual)
    for begin, end in ((0, 1), (511, 513), (540, 580), (1099, 1100)):
        part = linear(x[begin:end], packed, act="quick_gelu", residual=residual[begin:end])
        assert torch.equal(part, result[begin:end]), (begin, end)


@pytest.mark.parametrize("act", ACTIVATIONS)
def test_activations_hold_over_the_whole_range_and_keep_nan(isa: str, act: str) -> None:
    x = torch.cat([torch.linspace(-100, 100, 4001), torch.tensor([float("nan"), 1e30, -1e30, 0.0])])[:, None]
    result = linear(x, NativeLinear(torch.ones(1, 1)), act=act)  # type: ignore[arg-type]
    truth = ACTIVATIONS[act](x.double())
    assert result[-4].isnan().all()
    rest = torch.arange(len(x)) != len(x) - 4
    torch.testing.assert_close(result[rest].double(), truth[rest], rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("num_out", "num_in"), [(97, 131), (160, 256)])
def test_a_row_does_not_depend_on_the_batch(isa: str, dtype: torch.dtype, num_out: int, num_in: int) -> None:
    x, weight, bias = case(70, num_out, num_in, dtype)
    packed = NativeLinear(weight, bias)
    alone = torch.cat([linear(x[row : row + 1], packed, act="gelu") for row in range(70)])
    for rows in range(1, 71):
        assert torch.equal(linear(x[:rows], packed, act="gelu"), alone[:rows]), rows
    assert torch.equal(linear(x[13:58], packed, act="gelu"), alone[13:58])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_row_does_not_depend_on_the_thread_count(isa: str, dtype: torch.dtype) -> None:
    x, weight, bias = case(70, 1030, 517, dtype)
    packed = NativeLinear(weight, bias)
    expected = linear(x, packed)
    try:
        for threads in (2, 3, 5):
            _C.set_num_threads(threads)
            for rows in (1, 5, 16, 17, 70):
                assert torch.equal(linear(x[:rows], packed), expected[:rows]), (threads, rows)
    finally:
        _C.set_num_threads(1)


def test_long_rows_are_cut_without_changing_them(isa: str) -> None:
    x, weight, bias = case(150, 40, 5000, torch.bfloat16)
    packed = NativeLinear(weight, bias)
    result = linear(x, packed)
    assert_as_good_as(result, F.linear(x, weight, bias), exact(x, weight, bias))
    assert torch.equal(linear(x[149:], packed), result[149:])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", [1, 7, 20, 40])
def test_memory_around_inputs_and_outputs_is_left_alone(isa: str, threads: int, dtype: torch.dtype, rows: int) -> None:
    x, weight, bias = case(rows, 45, 75, dtype)
    expected = linear(x, NativeLinear(weight, bias))
    poisoned_x = torch.full((rows + 2, 90), float("nan"), dtype=dtype)
    poisoned_x[1:-1, 8:83] = x
    poisoned_weight = torch.full((47, 91), float("nan"), dtype=dtype)
    poisoned_weight[1:-1, 8:83] = weight
    linear(poisoned_x[:, :75], NativeLinear(poisoned_weight[:, :75]))  # leaves NaN in reused working memory
    packed = NativeLinear(poisoned_weight[1:-1, 8:83], bias)
    strided = poisoned_x[1:-1, 8:83]
    assert torch.equal(linear(strided, packed), expected)
    guarded = torch.full((rows + 2, 45), float("nan"), dtype=dtype)
    out = guarded[1:-1]
    _C.linear(packed.handle, strided.data_ptr(), strided.stride(0), rows, out.data_ptr(), 0, DTYPE_CODES[dtype])
    assert torch.equal(out, expected)
    assert guarded[0].isnan().all() and guarded[-1].isnan().all()


def test_infinities_and_nan_stay_in_their_row(isa: str) -> None:
    x, weight, _ = case(20, 40, 70, torch.bfloat16)
    packed = NativeLinear(weight)
    clean = linear(x, packed)
    x[3, 5], x[11, 69] = float("inf"), float("nan")
    dirty = linear(x, packed)
    others = [row for row in range(20) if row not in (3, 11)]
    assert torch.equal(dirty[others], clean[others])
    assert dirty[11].isnan().all() and not dirty[3].isfinite().any()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_empty_batch_gives_an_empty_result(isa: str, dtype: torch.dtype) -> None:
    _, weight, bias = case(1, 9, 4, dtype)
    empty, packed = torch.empty(0, 4, dtype=dtype), NativeLinear(weight, bias)
    assert linear(empty, packed).shape == (0, 9)
    assert linear(empty, packed, residual=torch.empty(0, 9, dtype=dtype)).shape == (0, 9)


def test_no_inputs_leave_the_bias(isa: str) -> None:
    bias = torch.arange(5.0)
    assert torch.equal(linear(torch.empty(3, 0), NativeLinear(torch.empty(5, 0), bias)), bias.expand(3, 5))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("size", [*SIZES, (300, 70, 77)], ids=str)
def test_narrow_weights_give_float32_rows_the_bits_of_wide_ones(
    isa: str, threads: int, dtype: torch.dtype, size: tuple[int, int, int]
) -> None:
    x, weight, bias = case(*size, torch.float32)
    weight = weight.to(dtype)
    narrow = NativeLinear(weight, bias, torch.float32)
    residual = torch.randn(size[:2], generator=torch.Generator().manual_seed(5))
    wide = linear(x, NativeLinear(weight.float(), bias), act="silu", residual=residual)
    assert torch.equal(linear(x, narrow, act="silu", residual=residual), wide)
    assert narrow.nbytes <= NativeLinear(weight, bias).nbytes
    with pytest.raises(ValueError, match=r"x: expected .*float32.*got"):
        linear(x.to(dtype), narrow)


def test_narrow_weights_of_any_value_are_widened_without_loss(isa: str) -> None:
    """Covers every finite bit pattern: the smallest numbers, both zeros, the largest ones."""
    for dtype in (torch.bfloat16, torch.float16):
        weight = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
        weight = weight[weight.isfinite()][:, None]
        result = linear(torch.ones(3, 1), NativeLinear(weight, rows=torch.float32))
        assert torch.equal(result, weight.float().T.expand(3, -1))


def test_small_weights_lie_behind_one_another() -> None:
    weights = [torch.randn(size, 96) for size in (1, 33, 64)]
    packed = [NativeLinear(weight) for weight in weights]
    places = sorted((part.data.data_ptr(), part.data.nbytes) for part in packed)
    assert all(begin % 64 == 0 for begin, _ in places)
    assert all(begin + size <= following for (begin, size), (following, _) in pairwise(places))
    x = torch.randn(2, 96)
    for weight, part in zip(weights, packed, strict=True):
        torch.testing.assert_close(linear(x, part), x @ weight.T)
    large = torch.randn(1100, 1024)  # over 4 MiB: memory of its own
    alone = NativeLinear(large).data.untyped_storage().nbytes()
    assert alone < 2 * large.nbytes < packed[0].data.untyped_storage().nbytes()


def test_packed_weight_needs_about_the_original_memory() -> None:
    weight = torch.zeros(1024, 512, dtype=torch.bfloat16)
    assert NativeLinear(weight).nbytes == weight.nbytes
    assert NativeLinear(weight, torch.zeros(1024)).nbytes == weight.nbytes + 4096


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "num_out, num_in", [(1, 1), (5, 3), (16, 16), (17, 33), (33, 31), (32, 64), (70, 50), (96, 129)]
)
def test_weights_are_packed_in_the_layout_of_the_kernels(
    threads: int, dtype: torch.dtype, num_out: int, num_in: int
) -> None:
    """Panels of 32 outputs, padded with zeros; bfloat16 in blocks of 32 k, tiles of 16 outputs and pairs of k."""
    around = torch.randn(num_out, num_in + 3).to(dtype)
    weight, code = around[:, :num_in], DTYPE_CODES[dtype]
    rows, depth = -(-num_out // 32) * 32, -(-num_in // 32) * 32 if dtype is torch.bfloat16 else num_in
    padded = torch.zeros(rows, depth, dtype=dtype)
    padded[:num_out, :num_in] = weight
    if dtype is torch.bfloat16:
        expected = padded.view(rows // 32, 2, 16, depth // 32, 16, 2).permute(0, 3, 1, 4, 2, 5)
    else:
        expected = padded.view(rows // 32, 32, depth).transpose(1, 2)
    guarded = torch.full((expected.numel() + 96,), float("nan"), dtype=dtype)
    begin = -guarded.data_ptr() % 64 // dtype.itemsize + 64 // dtype.itemsize
    assert _C.packed_bytes(num_out, num_in, code) == expected.numel() * dtype.itemsize
    address = guarded.data_ptr() + begin * dtype.itemsize
    _C.PackedWeight(address, 0, num_out, num_in, code, code).pack(weight.data_ptr(), weight.stride(0))
    packed = guarded[begin : begin + expected.numel()]
    assert torch.equal(packed, expected.reshape(-1))
    assert guarded[:begin].isnan().all() and guarded[begin + expected.numel() :].isnan().all()


def test_callers_on_two_threads_do_not_disturb_each_other() -> None:
    x, weight, bias = case(40, 700, 600, torch.bfloat16)
    packed = NativeLinear(weight, bias)
    expected = linear(x, packed)
    wrong: list[int] = []

    def work(threads: int) -> None:
        _C.set_num_threads(threads)
        wrong.extend(1 for _ in range(200) if not torch.equal(linear(x, packed), expected))

    workers = [threading.Thread(target=work, args=(threads,)) for threads in (2, 3, 4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(timeout=60)
    assert not wrong and not any(worker.is_alive() for worker in workers)
    assert _C.num_threads() == 1


def test_wrong_arguments_are_named_with_expected_and_actual() -> None:
    x, weight, bias = case(3, 8, 6, torch.bfloat16)
    packed = NativeLinear(weight, bias)
    with pytest.raises(ValueError, match=r"x: expected \[T, 6\].*got \[3, 5\]"):
        linear(x[:, :5], packed)
    with pytest.raises(ValueError, match=r"x: expected .*bfloat16.*got .*float32"):
        linear(x.float(), packed)
    with pytest.raises(ValueError, match=r"x: expected .*dense last dimension.*strides \[1, 3\]"):
        linear(x.T.contiguous().T, packed)
    with pytest.raises(ValueError, match=r"x: expected .*got \[6\]"):
        linear(x[0], packed)
    with pytest.raises(ValueError, match=r"out_dtype: expected torch.bfloat16 or torch.float32, got torch.float16"):
        linear(x, packed, out_dtype=torch.float16)
    with pytest.raises(ValueError, match=r"residual: expected \[3, 8\].*got \[2, 8\]"):
        linear(x, packed, residual=torch.zeros(2, 8, dtype=torch.bfloat16))
    with pytest.raises(ValueError, match=r"residual: expected \[3, 8\].*got \[3, 7\]"):
        linear(x, packed, residual=torch.zeros(3, 7, dtype=torch.bfloat16))
    with pytest.raises(ValueError, match=r"residual: expected .*float32.*got .*bfloat16"):
        linear(x, packed, residual=torch.zeros(3, 8, dtype=torch.bfloat16), out_dtype=torch.float32)
    with pytest.raises(ValueError, match=r"act: expected one of none, silu.*got 'relu'"):
        linear(x, packed, act="relu")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"bias: expected \[8\].*got \[7\]"):
        NativeLinear(weight, bias[:7])
    with pytest.raises(ValueError, match=r"weight: expected \[num_out, K\].*got \[8\]"):
        NativeLinear(weight[:, 0])
    with pytest.raises(ValueError, match=r"weight: .*int64"):
        NativeLinear(weight.long())


def test_native_checks_name_expected_and_actual() -> None:
    with pytest.raises(ValueError, match=r"dtype: expected 0 .*got 7"):
        _C.packed_bytes(1, 1, 7)
    with pytest.raises(ValueError, match=r"aligned to 64 bytes, got 100"):
        _C.PackedWeight(100, 0, 1, 1, 0, 0)
    with pytest.raises(ValueError, match=r"x_dtype: expected float32 or the weight's 1, got 2"):
        _C.PackedWeight(0, 0, 1, 1, 1, 2)
    with pytest.raises(ValueError, match=r"isa: expected scalar, .*got 'sse'"):
        _C.force_isa("sse")
    with pytest.raises(ValueError, match=r"n: expected 1 to 1024 threads, got 0"):
        _C.set_num_threads(0)
