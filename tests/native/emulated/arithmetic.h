// Emulated arithmetic that AVX2 has not: dot products, conversions to bf16 and float16, scaling and estimates. Included
// by immintrin.h.
#pragma once

#undef _mm512_cvtps_ph
#undef _mm512_maskz_cvtps_ph
#undef _mm512_maskz_reduce_ps
#undef _mm512_reduce_ps
#undef _mm512_roundscale_ps
#undef _mm512_ternarylogic_epi32
#undef _mm256_dpbusd_epi32
#undef _mm256_dpwssd_epi32

namespace hydra {
namespace emulated {

// The bf16 instructions take denormal numbers for zero and leave zero for them, whatever MXCSR says.
EMULATED f32x16 flushed(f32x16 value) {
  const u32x16 all = (u32x16)value;
  return (f32x16)((all & 0x7f800000u) == 0 ? all & 0x80000000u : all);
}

// a * b + c, rounded once to nearest even.
EMULATED f32x16 flushed_fma(f32x16 a, f32x16 b, f32x16 c) {
  return flushed((f32x16)_mm512_fmadd_ps((__m512)flushed(a), (__m512)flushed(b), (__m512)flushed(c)));
}

EMULATED f32x16 flushed_sum(f32x16 a, f32x16 b) {
  return flushed((f32x16)_mm512_add_ps((__m512)flushed(a), (__m512)flushed(b)));
}

EMULATED f32x16 even_bf16(__m512i pairs) { return (f32x16)((u32x16)pairs << 16); }
EMULATED f32x16 odd_bf16(__m512i pairs) { return (f32x16)((u32x16)pairs & 0xffff0000u); }

// Nearest even; zero for denormal numbers; a NaN keeps its upper bits and becomes quiet.
EMULATED u16x16 rounded_to_bf16(__m512 value) {
  const u32x16 all = (u32x16)flushed((f32x16)value), positive = all & 0x7fffffffu;
  const u32x16 rounded = (all + 0x7fffu + (all >> 16 & 1u)) >> 16;
  const u32x16 result = positive > 0x7f800000u ? (all >> 16 | 0x40u) : rounded;
  return __builtin_convertvector(result, u16x16);
}

// Sums of four products of bytes, of pairs of 16 bits: exact, cut off to 32 bits. `kA` and `kB`: signed.
template <bool kA, bool kB>
EMULATED __m256i byte_products(__m256i a, __m256i b) {
  const __m256i a_even = kA ? _mm256_srai_epi16(_mm256_slli_epi16(a, 8), 8) : _mm256_srli_epi16(_mm256_slli_epi16(a, 8), 8);
  const __m256i b_even = kB ? _mm256_srai_epi16(_mm256_slli_epi16(b, 8), 8) : _mm256_srli_epi16(_mm256_slli_epi16(b, 8), 8);
  const __m256i a_odd = kA ? _mm256_srai_epi16(a, 8) : _mm256_srli_epi16(a, 8);
  const __m256i b_odd = kB ? _mm256_srai_epi16(b, 8) : _mm256_srli_epi16(b, 8);
  return _mm256_add_epi32(_mm256_madd_epi16(a_even, b_even), _mm256_madd_epi16(a_odd, b_odd));
}

template <bool kA, bool kB>
EMULATED __m512i byte_products(__m512i a, __m512i b) {
  return joined<__m512i>(byte_products<kA, kB>(half_of<__m256i>(a, 0), half_of<__m256i>(b, 0)),
                         byte_products<kA, kB>(half_of<__m256i>(a, 1), half_of<__m256i>(b, 1)));
}

}  // namespace emulated

EMULATED __m512 _mm512_dpbf16_ps(__m512 total, __m512bh a, __m512bh b) {
  using namespace emulated;
  const f32x16 first = flushed_fma(odd_bf16((__m512i)a), odd_bf16((__m512i)b), (f32x16)total);
  return (__m512)flushed_fma(even_bf16((__m512i)a), even_bf16((__m512i)b), first);
}
EMULATED __m256bh _mm512_cvtneps_pbh(__m512 a) { return emulated::bits<__m256bh>(emulated::rounded_to_bf16(a)); }
EMULATED __m512bh _mm512_cvtne2ps_pbh(__m512 high, __m512 low) {
  return emulated::joined<__m512bh>(emulated::rounded_to_bf16(low), emulated::rounded_to_bf16(high));
}

EMULATED __m512i _mm512_dpbusd_epi32(__m512i total, __m512i a, __m512i b) {
  return _mm512_add_epi32(total, emulated::byte_products<false, true>(a, b));
}
EMULATED __m256i _mm256_dpbusd_epi32(__m256i total, __m256i a, __m256i b) {
  return _mm256_add_epi32(total, emulated::byte_products<false, true>(a, b));
}
EMULATED __m256i _mm256_dpbusd_avx_epi32(__m256i total, __m256i a, __m256i b) {
  return _mm256_dpbusd_epi32(total, a, b);
}
EMULATED __m512i _mm512_dpwssd_epi32(__m512i total, __m512i a, __m512i b) {
  return _mm512_add_epi32(total, _mm512_madd_epi16(a, b));
}
EMULATED __m256i _mm256_dpwssd_epi32(__m256i total, __m256i a, __m256i b) {
  return _mm256_add_epi32(total, _mm256_madd_epi16(a, b));
}
EMULATED __m256i _mm256_dpwssd_avx_epi32(__m256i total, __m256i a, __m256i b) {
  return _mm256_dpwssd_epi32(total, a, b);
}

EMULATED __m256i _mm512_cvtps_ph(__m512 a, int rounding) {
  emulated::require((rounding & 7) == 0, "conversions to float16 are emulated to nearest even only");
  return emulated::joined<__m256i>(_mm256_cvtps_ph(emulated::half_of<__m256>(a, 0), 0),
                                   _mm256_cvtps_ph(emulated::half_of<__m256>(a, 1), 0));
}
EMULATED __m256i _mm512_maskz_cvtps_ph(__mmask16 k, __m512 a, int rounding) {
  return emulated::chosen<uint16_t>(k, _mm512_cvtps_ph(a, rounding), __m256i{});
}
EMULATED __m512 _mm512_maskz_max_ps(__mmask16 k, __m512 a, __m512 b) {
  return emulated::chosen<uint32_t>(k, _mm512_max_ps(a, b), __m512{});
}

// To integers times 2^-(control / 16): to nearest even, down, up, or towards zero.
EMULATED __m512 _mm512_roundscale_ps(__m512 a, int control) {
  using emulated::half_of;
  emulated::require(!(control & 4), "rounding by MXCSR is not emulated");
  const float scale = static_cast<float>(1 << (control >> 4 & 15));
  const emulated::f32x16 scaled = (emulated::f32x16)a * scale;
  __m256 halves[2];
  for (int i = 0; i < 2; ++i) {
    const __m256 half = half_of<__m256>(scaled, i);
    switch (control & 3) {
      case 0: halves[i] = _mm256_round_ps(half, 8); break;
      case 1: halves[i] = _mm256_round_ps(half, 9); break;
      case 2: halves[i] = _mm256_round_ps(half, 10); break;
      default: halves[i] = _mm256_round_ps(half, 11);
    }
  }
  const emulated::f32x16 rounded = emulated::bits<emulated::f32x16>(halves) / scale;
  // An operand too large for the scaled one is an integer already.
  return (__m512)(scaled * 0.0f == 0.0f ? rounded : (emulated::f32x16)a);
}
// What roundscale towards minus infinity leaves, rounded down: minus zero if nothing; 0 for infinities.
EMULATED __m512 _mm512_reduce_ps(__m512 a, int control) {
  emulated::require((control & 3) == 1, "a remainder of another rounding than down is not emulated");
  const emulated::f32x16 value = (emulated::f32x16)a, whole = (emulated::f32x16)_mm512_roundscale_ps(a, control);
  emulated::f32x16 left = value - whole;
  left = (emulated::f32x16)((emulated::i32x16)left + (left + whole > value));  // -1 takes it to the number below
  left = left == 0.0f ? -emulated::f32x16{} : left;
  return (__m512)((value == INFINITY) | (value == -INFINITY) ? emulated::f32x16{} : left);
}
EMULATED __m512 _mm512_maskz_reduce_ps(__mmask16 k, __m512 a, int control) {
  return emulated::chosen<uint32_t>(k, _mm512_reduce_ps(a, control), __m512{});
}

// a * 2^floor(b), rounded once.
EMULATED __m512 _mm512_scalef_ps(__m512 a, __m512 b) {
  emulated::f32x16 value = (emulated::f32x16)a, power = (emulated::f32x16)b;
  for (int i = 0; i < 16; ++i) {
    if (value[i] != value[i] && std::isinf(power[i])) value[i] = 1;  // not even a NaN is left of that
    const double exponent = std::fmin(std::fmax(std::floor(power[i]), -400.0), 400.0);
    const double scaled = value[i] * std::ldexp(1.0, static_cast<int>(exponent));
    // The limits stand for infinities, which also take an infinity to zero or zero to an infinity: neither is a number.
    const bool invalid = (value[i] == 0.0f && power[i] == INFINITY) || (std::isinf(value[i]) && power[i] == -INFINITY);
    value[i] = power[i] != power[i] || invalid ? NAN : static_cast<float>(scaled);
  }
  return (__m512)value;
}
EMULATED __m512 _mm512_maskz_scalef_ps(__mmask16 k, __m512 a, __m512 b) {
  return emulated::chosen<uint32_t>(k, _mm512_scalef_ps(a, b), __m512{});
}

// An estimate with a relative error below 2^-14; processors differ within that.
EMULATED __m512 _mm512_rcp14_ps(__m512 a) {
  const emulated::f32x16 exact = 1.0f / (emulated::f32x16)a;
  return (__m512)((emulated::u32x16)exact & 0xffffff00u);
}

EMULATED float _mm512_reduce_add_ps(__m512 a) {
  const __m256 eight = _mm256_add_ps(emulated::half_of<__m256>(a, 1), emulated::half_of<__m256>(a, 0));
  const __m128 four = _mm_add_ps(_mm256_extractf128_ps(eight, 1), _mm256_castps256_ps128(eight));
  return (four[0] + four[2]) + (four[1] + four[3]);
}
EMULATED int _mm512_reduce_add_epi32(__m512i a) {
  const emulated::u32x16 lanes = (emulated::u32x16)a;
  uint32_t sum = 0;
  for (int i = 0; i < 16; ++i) sum += lanes[i];
  return static_cast<int>(sum);
}
EMULATED int _mm512_reduce_max_epi32(__m512i a) {
  const emulated::i32x16 lanes = (emulated::i32x16)a;
  int most = lanes[0];
  for (int i = 1; i < 16; ++i) most = lanes[i] > most ? lanes[i] : most;
  return most;
}
EMULATED float _mm512_reduce_max_ps(__m512 a) {
  const emulated::f32x16 lanes = (emulated::f32x16)a;
  float most = lanes[0];
  for (int i = 1; i < 16; ++i) most = lanes[i] > most ? lanes[i] : most;
  return most;
}

// Bit i of `table` is the result where the three operands' bits are the digits of i.
EMULATED __m512i _mm512_ternarylogic_epi32(__m512i a, __m512i b, __m512i c, int table) {
  __m512i result{};
  for (int i = 0; i < 8; ++i) {
    if (table >> i & 1) result |= (i & 4 ? a : ~a) & (i & 2 ? b : ~b) & (i & 1 ? c : ~c);
  }
  return result;
}

}  // namespace hydra
