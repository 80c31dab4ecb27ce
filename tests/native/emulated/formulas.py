"""Definitions of every emulated instruction in numpy, after Intel's manual; and the C++ that calls it.

An operand is written as type.dtype: I, i, x are 64, 32 and 16 bytes of integers, P, p, q of floats, B and b of bf16
pairs, k a mask, s an integer, m an address; `=8` is a constant.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Any

import numpy as np
import torch
from numpy import ndarray

TYPES = {
    **{"I": ("__m512i", 64), "P": ("__m512", 64), "B": ("__m512bh", 64), "i": ("__m256i", 32), "p": ("__m256", 32)},
    **{"b": ("__m256bh", 32), "x": ("__m128i", 16), "q": ("__m128", 16), "s": ("int", 4), "f": ("float", 4)},
    **{"k8": ("__mmask8", 1), "k16": ("__mmask16", 2), "k32": ("__mmask32", 4), "k64": ("__mmask64", 8)},
    **{"h": ("short", 2), "c": ("char", 1), "l": ("long long", 8)},
}
TINY = np.float32(2.0**-126)
EDGES = {
    np.dtype("i1"): [-128, -127, -1, 0, 1, 127],
    np.dtype("u1"): [0, 1, 127, 128, 255],
    np.dtype("i2"): [-32768, -32767, -1, 0, 1, 127, 128, 255, 256, 32767],
    np.dtype("u2"): [0, 1, 0x8000, 0x7FFF, 0xFFFF],
    np.dtype("i4"): [-(2**31), -32769, -129, -1, 0, 1, 127, 128, 255, 256, 32767, 32768, 2**31 - 1],
    np.dtype("u4"): [0, 1, 255, 256, 2**31, 2**32 - 1],
    np.dtype("f4"): [0, -0.0, 1, -1, 0.5, -1.5, 2.5, 1e-40, -1e-40, 3e38, -3e38, np.inf, -np.inf, np.nan, 65504, 65520],
}


@dataclass(frozen=True, eq=False)
class Instruction:
    name: str
    body: str
    operands: list[tuple[np.dtype, int]]
    result_dtype: np.dtype
    result_bytes: int
    formula: Callable[..., Any]
    close: Callable[[ndarray, ndarray], bool] | None = None  # to the formula; bit by bit if not given
    close_to_processor: Callable[[ndarray, ndarray], bool] | None = None
    limits: dict[int, int] = field(default_factory=dict)  # operand -> its values are below that
    finite: bool = False
    label: str = ""

    def of(self, inner: str) -> Instruction:
        """The instruction of what `inner` makes of the first operand."""
        body = self.body.replace("in<", f"{inner}(in<", 1).replace("0)", "0))", 1)
        return replace(self, body=body, label=inner)

    def prepared(self, position: int, values: ndarray) -> ndarray:
        if self.finite and values.dtype == np.float32:
            values = np.where(np.isfinite(values), values, np.float32(0))
        if position in self.limits:
            values = values % self.limits[position]
        return np.ascontiguousarray(values)


def instruction(name: str, operands: str, result: str, formula: Callable[..., Any], **rest: Any) -> Instruction:
    arguments, described = [], []
    for operand in operands.split():
        if operand.startswith("="):
            arguments.append(operand[1:])
            continue
        kind, _, dtype = operand.partition(".")
        kind, _, size = kind.partition(":")
        number = len(described)
        cpp, num_bytes = ("", int(size)) if kind == "m" else TYPES[kind]
        arguments.append(f"from[{number}]" if kind == "m" else f"in<{cpp}>(from, {number})")
        described.append((np.dtype(dtype), num_bytes // np.dtype(dtype).itemsize))
    kind, _, dtype = result.partition(".")
    cpp, num_bytes = TYPES[kind]
    body = f"const {cpp} result = {name}({', '.join(arguments)}); std::memcpy(to, &result, sizeof(result)); (void)from;"
    label = name + "".join(f"-{argument}" for argument in arguments if argument.isdigit())
    return Instruction(name, body, described, np.dtype(dtype), num_bytes, formula, label=label, **rest)


def two(name: str, dtype: str, formula: Callable[..., Any], result: str = "") -> Instruction:
    kind = "P" if dtype == "f4" else "I"
    return instruction(f"_mm512_{name}", f"{kind}.{dtype} {kind}.{dtype}", f"{kind}.{result or dtype}", formula)


def clipped(values: ndarray, dtype: str) -> ndarray:
    limits = np.iinfo(dtype)
    return np.clip(values, limits.min, limits.max).astype(dtype)


def wide(values: ndarray) -> ndarray:
    return values.astype(np.int64)


def lanes(values: ndarray) -> ndarray:
    """[4 lanes of 128 bits, elements]."""
    return values.reshape(4, -1)


def packed(a: ndarray, b: ndarray, dtype: str) -> ndarray:
    return np.concatenate([clipped(lanes(a), dtype), clipped(lanes(b), dtype)], axis=1).ravel()


def unpacked(high: bool) -> Callable[[ndarray, ndarray], ndarray]:
    def formula(a: ndarray, b: ndarray) -> ndarray:
        half = lanes(a).shape[1] // 2
        part = slice(half, None) if high else slice(half)
        return np.stack([lanes(a)[:, part], lanes(b)[:, part]], axis=2).ravel()

    return formula


def bits_of(mask: ndarray, count: int) -> ndarray:
    return (int(mask[0]) >> np.arange(count, dtype=object) & 1).astype(bool)


def mask(bits: ndarray) -> ndarray:
    return np.array([sum(1 << i for i, bit in enumerate(bits.tolist()) if bit)], np.uint64)


def shuffled(a: ndarray, b: ndarray) -> ndarray:
    chosen = np.take_along_axis(lanes(a), lanes(b & 15).astype(np.int64), axis=1)
    return np.where(lanes(b) & 0x80, 0, chosen).ravel()


def maddubs(a: ndarray, b: ndarray) -> ndarray:
    return clipped((wide(a) * wide(b.view(np.int8))).reshape(-1, 2).sum(1), "i2")


def madd(a: ndarray, b: ndarray) -> ndarray:
    return (wide(a) * wide(b)).reshape(-1, 2).sum(1).astype(np.int32)


def byte_sums(total: ndarray, a: ndarray, b: ndarray) -> ndarray:
    return (wide(total) + (wide(a) * wide(b)).reshape(-1, 4).sum(1)).astype(np.int32)


def nearest(value: Fraction) -> np.float32:
    """Rounds to nearest, ties to even."""
    near = np.float32(float(value))
    around = [np.nextafter(near, np.float32(-np.inf)), near, np.nextafter(near, np.float32(np.inf))]
    finite = [each for each in around if np.isfinite(each)]
    return min(finite, key=lambda each: (abs(Fraction(float(each)) - value), int(each.view(np.uint32)) & 1))


def flushed(value: np.float32) -> np.float32:
    return np.copysign(np.float32(0), value) if abs(value) < TINY else value


def fma_flushed(a: np.float32, b: np.float32, c: np.float32) -> np.float32:
    a, b, c = flushed(a), flushed(b), flushed(c)
    with np.errstate(all="ignore"):
        plain = np.float32(np.float64(a) * np.float64(b) + np.float64(c))  # special values and the sign of zero
    if not np.isfinite(plain) or plain == 0:
        return plain
    return flushed(nearest(Fraction(float(a)) * Fraction(float(b)) + Fraction(float(c))))


def from_bf16(values: ndarray) -> ndarray:
    return (values.astype(np.uint32) << 16).view(np.float32)


def dot_bf16(total: ndarray, a: ndarray, b: ndarray) -> ndarray:
    x, w = from_bf16(a), from_bf16(b)
    odd = [fma_flushed(*each) for each in zip(x[1::2], w[1::2], total, strict=True)]
    return np.array([fma_flushed(*each) for each in zip(x[::2], w[::2], odd, strict=True)], np.float32)


def to_bf16(values: ndarray) -> ndarray:
    with np.errstate(all="ignore"):
        normal = np.where(np.abs(values) < TINY, np.copysign(np.float32(0), values), values)
    rounded = (
        torch.from_numpy(np.ascontiguousarray(normal)).to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)
    )
    return np.where(np.isnan(values), (values.view(np.uint32) >> 16 | 0x40).astype(np.uint16), rounded)


def within(bound: float) -> Callable[[ndarray, ndarray], bool]:
    def close(result: ndarray, expected: ndarray) -> bool:
        return bool(
            np.allclose(
                result.astype(np.float64), expected.astype(np.float64), rtol=bound, atol=2.0**-140, equal_nan=True
            )
        )

    return close


def close_dot(result: ndarray, expected: ndarray) -> bool:
    """True if sums agree where they are neither tiny nor huge: there processors may round between the products as
    they like."""
    usual = (np.abs(expected) > 1e-30) & (np.abs(expected) < 1e30)
    return bool(np.allclose(result[usual], expected[usual], rtol=1e-5, atol=0))


FUSED = {"fmadd_ps": (1, 1), "fmsub_ps": (1, -1), "fnmadd_ps": (-1, 1), "fnmsub_ps": (-1, -1)}


def fused(sign: int, last: int) -> Callable[..., ndarray]:
    def formula(a: ndarray, b: ndarray, c: ndarray) -> ndarray:
        with np.errstate(all="ignore"):
            plain = (sign * a.astype(np.float64) * b + last * c.astype(np.float64)).astype(np.float32)
        for i in np.flatnonzero(np.isfinite(plain) & (plain != 0)):
            plain[i] = nearest(sign * Fraction(float(a[i])) * Fraction(float(b[i])) + last * Fraction(float(c[i])))
        return plain

    return formula


def quiet(formula: Callable[..., ndarray]) -> Callable[..., ndarray]:
    def silent(*operands: ndarray) -> ndarray:
        with np.errstate(all="ignore"):
            return formula(*operands)

    return silent


def by_avx(chosen: Callable[[ndarray, ndarray], ndarray]) -> Callable[[ndarray, ndarray], ndarray]:
    """The second operand where one is NaN or both are zero."""
    return quiet(lambda a, b: np.where(chosen(a, b), a, b))


def to_int32(a: ndarray) -> ndarray:
    """Integers of the floats; what does not fit becomes the smallest integer."""
    return np.where((a >= -(2.0**31)) & (a < 2.0**31), a, -(2.0**31)).astype(np.int64).astype(np.int32)


def above_whole(a: ndarray) -> ndarray:
    """The part above the whole number below, rounded down: minus zero if nothing; 0 for infinities."""
    left = a - np.floor(a)
    left = np.where(left + np.floor(a) > a, np.nextafter(left, np.float32(0)), left)
    return np.where(np.isinf(a), np.float32(0), np.where(left == 0, np.float32(-0.0), left))


def on_bits(operation: Callable[[ndarray, ndarray], ndarray]) -> Callable[[ndarray, ndarray], ndarray]:
    return lambda a, b: operation(a.view(np.uint32), b.view(np.uint32)).view(np.float32)


def shift(name: str, dtype: str, formula: Callable[[ndarray, int], ndarray]) -> list[Instruction]:
    limit = 8 * np.dtype(dtype).itemsize
    return [
        instruction(f"_mm512_{name}", f"I.{dtype} ={count}", f"I.{dtype}", lambda a, count=count: formula(a, count))
        for count in (0, 1, 5, limit - 1, limit)
    ]


def left(a: ndarray, count: int) -> ndarray:
    return a << count if count < 8 * a.itemsize else a * 0


def right(a: ndarray, count: int) -> ndarray:
    return a >> count if count < 8 * a.itemsize else a * 0


def right_signed(a: ndarray, count: int) -> ndarray:
    return a >> min(count, 8 * a.itemsize - 1)


INTEGERS = [
    *(
        two(f"{op}_epi{8 * size}", f"i{size}", formula)
        for op, formula in (("add", np.add), ("sub", np.subtract))
        for size in (1, 2, 4)
    ),
    two("add_epi64", "i8", np.add),
    *(
        two(f"{op}_epi{8 * size}", f"i{size}", formula)
        for op, formula in (("max", np.maximum), ("min", np.minimum))
        for size in (1, 2, 4)
    ),
    two("max_epu8", "u1", np.maximum),
    two("min_epu8", "u1", np.minimum),
    two("adds_epi16", "i2", lambda a, b: clipped(wide(a) + wide(b), "i2")),
    two("subs_epi16", "i2", lambda a, b: clipped(wide(a) - wide(b), "i2")),
    two("mullo_epi16", "i2", np.multiply),
    two("mullo_epi32", "i4", np.multiply),
    two("mulhi_epi16", "i2", lambda a, b: wide(a) * wide(b) >> 16),
    two("mulhrs_epi16", "i2", lambda a, b: (wide(a) * wide(b) >> 14) + 1 >> 1),
    two("madd_epi16", "i2", madd, "i4"),
    two("maddubs_epi16", "u1", maddubs, "i2"),
    two("packs_epi16", "i2", lambda a, b: packed(a, b, "i1"), "i1"),
    two("packs_epi32", "i4", lambda a, b: packed(a, b, "i2"), "i2"),
    two("packus_epi16", "i2", lambda a, b: packed(a, b, "u1"), "u1"),
    two("packus_epi32", "i4", lambda a, b: packed(a, b, "u2"), "u2"),
    *(
        two(f"unpack{half}_epi{8 * size}", f"u{size}", unpacked(half == "hi"))
        for half in ("lo", "hi")
        for size in (1, 2, 4, 8)
    ),
    two("shuffle_epi8", "u1", shuffled),
    two("sllv_epi32", "u4", lambda a, b: np.where(b < 32, a << (b & 31), 0)),
    two("srlv_epi32", "u4", lambda a, b: np.where(b < 32, a >> (b & 31), 0)),
    two("srav_epi32", "i4", lambda a, b: a >> np.minimum(b.view(np.uint32), 31).astype(np.int32)),
    *(
        two(f"{op}_{kind}", "u4", formula)
        for kind in ("si512", "epi32")
        for op, formula in (
            ("and", np.bitwise_and),
            ("or", np.bitwise_or),
            ("xor", np.bitwise_xor),
            ("andnot", lambda a, b: ~a & b),
        )
    ),
    *(instruction(f"_mm512_abs_epi{8 * size}", f"I.i{size}", f"I.i{size}", np.abs) for size in (1, 2, 4)),
    *(each for size in (2, 4, 8) for each in shift(f"slli_epi{8 * size}", f"u{size}", left)),
    *(each for size in (2, 4, 8) for each in shift(f"srli_epi{8 * size}", f"u{size}", right)),
    *(each for size in (2, 4) for each in shift(f"srai_epi{8 * size}", f"i{size}", right_signed)),
    instruction("_mm512_reduce_add_epi32", "I.i4", "s.i4", lambda a: [a.sum(dtype=np.int32)]),
    instruction("_mm512_reduce_max_epi32", "I.i4", "s.i4", lambda a: [a.max()]),
    *(
        instruction("_mm512_ternarylogic_epi32", f"I.u4 I.u4 I.u4 ={table}", "I.u4", formula)
        for table, formula in ((0xCA, lambda a, b, c: (a & b) | (~a & c)), (0x96, lambda a, b, c: a ^ b ^ c))
    ),
    *(
        instruction(f"_mm{width}_dpbusd_{form}epi32", f"{kind}.i4 {kind}.u1 {kind}.i1", f"{kind}.i4", byte_sums)
        for width, form, kind in ((512, "", "I"), (256, "", "i"), (256, "avx_", "i"))
    ),
    *(
        instruction(
            f"_mm{width}_dpwssd_{form}epi32",
            f"{kind}.i4 {kind}.i2 {kind}.i2",
            f"{kind}.i4",
            lambda total, a, b: total + madd(a, b),
        )
        for width, form, kind in ((512, "", "I"), (256, "", "i"), (256, "avx_", "i"))
    ),
]

FLOATS = [
    *(
        two(f"{op}_ps", "f4", quiet(formula))
        for op, formula in (("add", np.add), ("sub", np.subtract), ("mul", np.multiply), ("div", np.divide))
    ),
    two("max_ps", "f4", by_avx(lambda a, b: a > b)),
    two("min_ps", "f4", by_avx(lambda a, b: a < b)),
    two("and_ps", "f4", on_bits(np.bitwise_and)),
    two("or_ps", "f4", on_bits(np.bitwise_or)),
    two("xor_ps", "f4", on_bits(np.bitwise_xor)),
    two("andnot_ps", "f4", on_bits(lambda a, b: ~a & b)),
    two("unpacklo_ps", "f4", unpacked(False)),
    two("unpackhi_ps", "f4", unpacked(True)),
    instruction("_mm512_sqrt_ps", "P.f4", "P.f4", quiet(np.sqrt)),
    *(instruction(f"_mm512_{name}", "P.f4 P.f4 P.f4", "P.f4", fused(*signs)) for name, signs in FUSED.items()),
    instruction(
        "_mm512_maskz_max_ps",
        "k16.u2 P.f4 P.f4",
        "P.f4",
        lambda k, a, b: np.where(bits_of(k, 16), by_avx(lambda a, b: a > b)(a, b), np.float32(0)),
    ),
    instruction("_mm512_dpbf16_ps", "P.f4 B.u2 B.u2", "P.f4", dot_bf16, finite=True, close_to_processor=close_dot),
    instruction("_mm512_cvtneps_pbh", "P.f4", "b.u2", to_bf16),
    instruction("_mm512_cvtne2ps_pbh", "P.f4 P.f4", "B.u2", lambda a, b: np.concatenate([to_bf16(b), to_bf16(a)])),
    instruction(
        "_mm512_cvtps_ph", "P.f4 =0", "i.u2", quiet(lambda a: a.astype(np.float16).view(np.uint16)), finite=True
    ),
    instruction(
        "_mm512_maskz_cvtps_ph",
        "k16.u2 P.f4 =0",
        "i.u2",
        finite=True,
        formula=quiet(lambda k, a: np.where(bits_of(k, 16), a.astype(np.float16).view(np.uint16), 0)),
    ),
    *(
        instruction(
            "_mm512_roundscale_ps",
            f"P.f4 ={scale << 4 | mode}",
            "P.f4",
            quiet(
                lambda a, round=round, scale=scale: (round(a.astype(np.float64) * 2**scale) / 2**scale).astype(
                    np.float32
                )
            ),
        )
        for scale in (0, 3)
        for mode, round in enumerate((np.rint, np.floor, np.ceil, np.trunc))
    ),
    *(
        instruction(f"_mm512_{form}reduce_ps", f"{first}P.f4 =1", "P.f4", formula)
        for form, first, formula in (
            ("", "", quiet(above_whole)),
            ("maskz_", "k16.u2 ", quiet(lambda k, a: np.where(bits_of(k, 16), above_whole(a), np.float32(0)))),
        )
    ),
    *(
        instruction(f"_mm512_{form}scalef_ps", f"{first}P.f4 P.f4", "P.f4", formula)
        for form, first, formula in (
            ("", "", quiet(lambda a, b: scaled(a, b))),
            ("maskz_", "k16.u2 ", quiet(lambda k, a, b: np.where(bits_of(k, 16), scaled(a, b), np.float32(0)))),
        )
    ),
    instruction(
        "_mm512_rcp14_ps",
        "P.f4",
        "P.f4",
        quiet(lambda a: np.float32(1) / a),
        close=within(2**-14),
        close_to_processor=within(2**-13),
    ),
    instruction(
        "_mm512_reduce_add_ps",
        "P.f4",
        "f.f4",
        lambda a: [a.sum(dtype=np.float64)],
        limits={0: 1000},
        finite=True,
        close=within(1e-6),
        close_to_processor=within(1e-6),
    ),
    instruction("_mm512_reduce_max_ps", "P.f4", "f.f4", lambda a: [a.max()], finite=True),
    instruction("_mm512_cvtepi32_ps", "I.i4", "P.f4", lambda a: a.astype(np.float32)),
    instruction(
        "_mm512_maskz_cvtepi32_ps",
        "k16.u2 I.i4",
        "P.f4",
        lambda k, a: np.where(bits_of(k, 16), a.astype(np.float32), np.float32(0)),
    ),
    instruction("_mm512_cvtps_epi32", "P.f4", "I.i4", quiet(lambda a: to_int32(np.rint(a.astype(np.float64))))),
    instruction("_mm512_cvttps_epi32", "P.f4", "I.i4", quiet(lambda a: to_int32(np.trunc(a.astype(np.float64))))),
    instruction("_mm512_cvtph_ps", "i.u2", "P.f4", quiet(lambda a: a.view(np.float16).astype(np.float32))),
    instruction(
        "_mm512_maskz_cvtph_ps",
        "k16.u2 i.u2",
        "P.f4",
        quiet(lambda k, a: np.where(bits_of(k, 16), a.view(np.float16).astype(np.float32), np.float32(0))),
    ),
]


def scaled(a: ndarray, b: ndarray) -> ndarray:
    power = np.floor(b.astype(np.float64))
    a = np.where(np.isnan(a) & np.isinf(b), np.float32(1), a)  # not even a NaN is left of that
    return (a.astype(np.float64) * np.exp2(np.where(np.isfinite(power), np.clip(power, -400, 400), power))).astype(
        np.float32
    )


def moves() -> list[Instruction]:
    def chosen(k: ndarray, yes: ndarray, no: ndarray) -> ndarray:
        return np.where(bits_of(k, yes.size), yes, no)

    return [
        instruction("_mm512_permutexvar_epi16", "I.u2 I.u2", "I.u2", lambda i, a: a[i % 32]),
        instruction("_mm512_permutexvar_epi32", "I.u4 I.u4", "I.u4", lambda i, a: a[i % 16]),
        instruction("_mm512_permutexvar_epi64", "I.u8 I.u8", "I.u8", lambda i, a: a[i % 8]),
        instruction("_mm512_permutexvar_ps", "I.u4 P.u4", "P.u4", lambda i, a: a[i % 16]),
        *(
            instruction(
                f"_mm512_permutex2var_{name}",
                f"{kind}.u{size} I.u{size} {kind}.u{size}",
                f"{kind}.u{size}",
                lambda a, i, b: np.concatenate([a, b])[i % (2 * a.size)],
            )
            for name, kind, size in (("epi16", "I", 2), ("epi32", "I", 4), ("epi64", "I", 8), ("ps", "P", 4))
        ),
        instruction("_mm512_shuffle_epi32", "I.u4 =_MM_PERM_CDAB", "I.u4", lambda a: lanes(a)[:, [1, 0, 3, 2]].ravel()),
        instruction(
            "_mm512_shuffle_i32x4",
            "I.u4 I.u4 =216",
            "I.u4",
            lambda a, b: np.concatenate([lanes(a)[[0, 2]], lanes(b)[[1, 3]]]).ravel(),
        ),
        instruction("_mm512_setzero_si512", "", "I.u4", lambda: np.zeros(16)),
        instruction("_mm512_setzero_ps", "", "P.u4", lambda: np.zeros(16)),
        instruction("_mm512_set1_epi8", "c.i1", "I.i1", lambda a: np.repeat(a, 64)),
        instruction("_mm512_set1_epi16", "h.i2", "I.i2", lambda a: np.repeat(a, 32)),
        instruction("_mm512_set1_epi32", "s.i4", "I.i4", lambda a: np.repeat(a, 16)),
        instruction("_mm512_set1_epi64", "l.i8", "I.i8", lambda a: np.repeat(a, 8)),
        instruction("_mm512_set1_ps", "f.f4", "P.f4", lambda a: np.repeat(a, 16)),
        instruction("_mm512_set1_ps", "=-0.0f", "P.u4", lambda: np.full(16, 2**31)),
        instruction("_mm512_setr_epi32", " ".join(f"={i}" for i in range(16)), "I.u4", lambda: np.arange(16)),
        instruction("_mm512_setr_epi64", " ".join(f"={i}" for i in range(8)), "I.u8", lambda: np.arange(8)),
        instruction("_mm512_setr_ps", " ".join(f"={i}" for i in range(16)), "P.f4", lambda: np.arange(16)),
        instruction("_mm512_castsi512_ps", "I.u4", "P.u4", lambda a: a),
        instruction("_mm512_castps_si512", "P.u4", "I.u4", lambda a: a),
        instruction("_mm512_castsi512_si256", "I.u4", "i.u4", lambda a: a[:8]),
        instruction("_mm512_castps512_ps256", "P.u4", "p.u4", lambda a: a[:8]),
        instruction("_mm512_castsi512_si128", "I.u4", "x.u4", lambda a: a[:4]),
        instruction("_mm512_castsi512_si256", "i.u4", "i.u4", lambda a: a).of("_mm512_castsi256_si512"),
        instruction("_mm512_castsi512_si128", "x.u4", "x.u4", lambda a: a).of("_mm512_castsi128_si512"),
        instruction("_mm512_broadcast_i64x4", "i.u4", "I.u4", lambda a: np.tile(a, 2)),
        instruction("_mm512_broadcast_i32x4", "x.u4", "I.u4", lambda a: np.tile(a, 4)),
        instruction("_mm512_maskz_broadcast_i32x4", "k16.u2 x.u4", "I.u4", lambda k, a: chosen(k, np.tile(a, 4), 0)),
        instruction("_mm512_broadcastd_epi32", "x.u4", "I.u4", lambda a: np.repeat(a[0], 16)),
        instruction("_mm512_broadcastss_ps", "q.u4", "P.u4", lambda a: np.repeat(a[0], 16)),
        *(
            instruction(
                "_mm512_inserti32x4",
                f"I.u4 x.u4 ={i}",
                "I.u4",
                lambda a, b, i=i: np.concatenate([a[: 4 * i], b, a[4 * i + 4 :]]),
            )
            for i in range(4)
        ),
        *(
            instruction(
                "_mm512_inserti64x4",
                f"I.u4 i.u4 ={i}",
                "I.u4",
                lambda a, b, i=i: np.concatenate([a[: 8 * i], b, a[8 * i + 8 :]]),
            )
            for i in range(2)
        ),
        *(instruction("_mm512_extracti32x4_epi32", f"I.u4 ={i}", "x.u4", lambda a, i=i: lanes(a)[i]) for i in range(4)),
        *(
            instruction("_mm512_extracti64x4_epi64", f"I.u8 ={i}", "i.u8", lambda a, i=i: a[4 * i : 4 * i + 4])
            for i in range(2)
        ),
        *(
            instruction(f"_mm512_cvtep{sign}{8 * size}_epi{8 * to}", f"{kind}.{sign}{size}", f"I.i{to}", wide)
            for sign, size, to, kind in (
                ("i", 1, 4, "x"),
                ("u", 1, 4, "x"),
                ("i", 2, 4, "i"),
                ("u", 2, 4, "i"),
                ("i", 1, 2, "i"),
                ("u", 1, 2, "i"),
            )
        ),
        instruction("_mm512_cvtepi32_epi8", "I.i4", "x.u1", lambda a: a.astype(np.uint8)),
        instruction("_mm512_cvtsepi32_epi8", "I.i4", "x.i1", lambda a: clipped(a, "i1")),
        instruction("_mm512_cvtusepi32_epi8", "I.u4", "x.u1", lambda a: clipped(a, "u1")),
        instruction("_mm512_cvtepi32_epi16", "I.i4", "i.u2", lambda a: a.astype(np.uint16)),
        instruction("_mm512_cvtsepi32_epi16", "I.i4", "i.i2", lambda a: clipped(a, "i2")),
        instruction("_mm512_cvtepi16_epi8", "I.i2", "i.u1", lambda a: a.astype(np.uint8)),
        instruction("_mm512_cvtsepi16_epi8", "I.i2", "i.i1", lambda a: clipped(a, "i1")),
        instruction("_mm256_cvtepi16_epi8", "i.i2", "x.u1", lambda a: a.astype(np.uint8)),
        *(
            instruction(
                f"_mm512_movepi{8 * size}_mask", f"I.i{size}", f"k{64 // size}.u{8 // size}", lambda a: mask(a < 0)
            )
            for size in (1, 2, 4)
        ),
        *(
            instruction(
                f"_mm512_mask_blend_{name}",
                f"k{64 // size}.u{8 // size} {kind}.u{size} {kind}.u{size}",
                f"{kind}.u{size}",
                lambda k, a, b: chosen(k, b, a),
            )
            for name, kind, size in (("epi8", "I", 1), ("epi16", "I", 2), ("epi32", "I", 4), ("ps", "P", 4))
        ),
        *(
            instruction(
                f"_mm512_cmp{name}_mask",
                f"{kind}.{dtype} {kind}.{dtype}",
                f"k{count}.u{count // 8}",
                quiet(lambda a, b, compare=compare: mask(compare(a, b))),
            )
            for kind, dtype, count, suffix, wanted in (
                ("I", "i4", 16, "epi32", ("eq", "neq", "lt", "gt")),
                ("I", "i1", 64, "epi8", ("eq", "lt", "gt")),
                ("P", "f4", 16, "ps", ("eq", "lt", "le")),
            )
            for short in wanted
            for name, compare in ((f"{short}_{suffix}", COMPARISONS[short]),)
        ),
    ]


COMPARISONS = {"eq": np.equal, "neq": np.not_equal, "lt": np.less, "gt": np.greater, "le": np.less_equal}


MEMORY = "alignas(64) char memory[64];"


def memory() -> list[Instruction]:
    line = np.dtype("u1"), 64
    found = []
    for name, kind in (("loadu_si512", "I"), ("loadu_ps", "P")):
        found.append(instruction(f"_mm512_{name}", "m:64.u1", f"{kind}.u1", lambda a: a))
    for name in ("load_si512", "load_ps"):
        body = (
            f"{MEMORY} std::memcpy(memory, from[0], 64); const auto a = _mm512_{name}(memory); std::memcpy(to, &a, 64);"
        )
        found.append(Instruction(f"_mm512_{name}", body, [line], line[0], 64, lambda a: a, label=name))
    for name, cpp in (
        ("storeu_si512", "__m512i"),
        ("storeu_ps", "__m512"),
        ("store_si512", "__m512i"),
        ("store_ps", "__m512"),
        ("stream_si512", "__m512i"),
    ):
        pointer = "(__m512i*)" if name.startswith("stream") else ""
        body = f"{MEMORY} _mm512_{name}({pointer}memory, in<{cpp}>(from, 0)); std::memcpy(to, memory, 64);"
        found.append(Instruction(f"_mm512_{name}", body, [line], line[0], 64, lambda a: a, label=name))
    for prefix, num_bytes in (("_mm512", 64), ("_mm256", 32), ("_mm", 16)):
        integers, floats = {64: "IP", 32: "ip", 16: "xq"}[num_bytes]
        for suffix, size in (("epi8", 1), ("epi16", 2), ("epi32", 4), ("ps", 4)):
            if num_bytes == 16 and size == 4:
                continue
            kind, bits = floats if suffix == "ps" else integers, num_bytes // size
            k = f"k{max(bits, 8)}.u{max(bits // 8, 1)}"
            source = f"m:{num_bytes}.u{size}"
            found.append(
                instruction(
                    f"{prefix}_maskz_loadu_{suffix}",
                    f"{k} {source}",
                    f"{kind}.u{size}",
                    lambda k, a: np.where(bits_of(k, a.size), a, 0),
                )
            )
            found.append(
                instruction(
                    f"{prefix}_mask_loadu_{suffix}",
                    f"{kind}.u{size} {k} {source}",
                    f"{kind}.u{size}",
                    lambda others, k, a: np.where(bits_of(k, a.size), a, others),
                )
            )
            body = (
                f"std::memcpy(to, from[0], {num_bytes}); {prefix}_mask_storeu_{suffix}(to, "
                f"in<{TYPES[k.partition('.')[0]][0]}>(from, 1), in<{TYPES[kind][0]}>(from, 2));"
            )
            dtype = np.dtype(f"u{size}")
            found.append(
                Instruction(
                    f"{prefix}_mask_storeu_{suffix}",
                    body,
                    [(dtype, bits), (np.dtype(k.partition(".")[2]), 1), (dtype, bits)],
                    dtype,
                    num_bytes,
                    lambda others, k, a: np.where(bits_of(k, a.size), a, others),
                    label=f"{prefix}_mask_storeu_{suffix}",
                )
            )
    found.append(instruction("_mm512_i32gather_ps", "I.i4 m:1024.u4 =4", "P.u4", lambda i, a: a[i], limits={0: 256}))
    return found


# Tiles 0 to 2: [rows, columns] += [rows, groups] x [groups, columns], of 4 bytes each.
ROWS, COLUMNS, GROUPS = 5, 7, 11
CONFIGURE = f"""
alignas(64) unsigned char config[64] = {{1}};
const int sizes[3][2] = {{{{{ROWS}, {COLUMNS}}}, {{{ROWS}, {GROUPS}}}, {{{GROUPS}, {COLUMNS}}}}};
for (int i = 0; i < 3; ++i) config[48 + i] = sizes[i][0], config[16 + 2 * i] = 4 * sizes[i][1];
_tile_loadconfig(config);
"""


def tile_product(name: str, total: str, a: str, b: str, formula: Callable[..., Any], **rest: Any) -> Instruction:
    body = (
        CONFIGURE
        + f"""
_tile_loadd(0, from[0], {4 * COLUMNS});
_tile_stream_loadd(1, from[1], {4 * GROUPS});
_tile_loadd(2, from[2], {4 * COLUMNS});
{name}(0, 1, 2);
_tile_stored(0, to, {4 * COLUMNS});
_tile_release();
"""
    )
    sizes = ((total, ROWS * COLUMNS), (a, ROWS * GROUPS), (b, GROUPS * COLUMNS))
    operands = [(np.dtype(dtype), count * 4 // np.dtype(dtype).itemsize) for dtype, count in sizes]
    return Instruction(name, body, operands, np.dtype(total), ROWS * COLUMNS * 4, formula, label=name, **rest)


def tile_bytes(total: ndarray, a: ndarray, b: ndarray) -> ndarray:
    products = np.einsum("rge,gce->rc", wide(a).reshape(ROWS, GROUPS, 4), wide(b).reshape(GROUPS, COLUMNS, 4))
    return (wide(total) + products.ravel()).astype(np.int32)


def tile_bf16(total: ndarray, a: ndarray, b: ndarray) -> ndarray:
    x, w = from_bf16(a).reshape(ROWS, GROUPS, 2), from_bf16(b).reshape(GROUPS, COLUMNS, 2)
    result = total.reshape(ROWS, COLUMNS).copy()
    for row in range(ROWS):
        for column in range(COLUMNS):
            sums = [np.float32(0), np.float32(0)]
            for group in range(GROUPS):
                sums = [fma_flushed(x[row, group, e], w[group, column, e], sums[e]) for e in range(2)]
            both = fma_flushed(sums[0], np.float32(1), sums[1])
            result[row, column] = fma_flushed(both, np.float32(1), result[row, column])
    return result.ravel()


TILES = [
    tile_product("_tile_dpbssd", "i4", "i1", "i1", tile_bytes),
    tile_product("_tile_dpbsud", "i4", "i1", "u1", tile_bytes),
    tile_product("_tile_dpbusd", "i4", "u1", "i1", tile_bytes),
    tile_product("_tile_dpbuud", "i4", "u1", "u1", tile_bytes),
    tile_product("_tile_dpbf16ps", "f4", "u2", "u2", tile_bf16, finite=True, close_to_processor=close_dot),
    Instruction(
        "_tile_zero",
        CONFIGURE + f"_tile_loadd(0, from[0], 64); _tile_zero(0); _tile_stored(0, to, {4 * COLUMNS}); _tile_release();",
        [(np.dtype("u1"), 1024)],
        np.dtype("u1"),
        ROWS * COLUMNS * 4,
        lambda a: np.zeros(ROWS * COLUMNS * 4),
        label="_tile_zero",
    ),
]

INSTRUCTIONS = [*INTEGERS, *FLOATS, *moves(), *memory(), *TILES]
