// Emulated instructions that move lanes or change their width. Included by immintrin.h.
#pragma once

#undef _mm512_shuffle_epi32
#undef _mm512_shuffle_i32x4
#undef _mm512_inserti32x4
#undef _mm512_inserti64x4
#undef _mm512_extracti32x4_epi32
#undef _mm512_extracti64x4_epi64

namespace hydra {

EMULATED __m512i _mm512_permutexvar_epi32(__m512i index, __m512i a) {
  return (__m512i)__builtin_shuffle((emulated::i32x16)a, (emulated::i32x16)index);
}
EMULATED __m512 _mm512_permutexvar_ps(__m512i index, __m512 a) {
  return (__m512)_mm512_permutexvar_epi32(index, (__m512i)a);
}
EMULATED __m512i _mm512_permutexvar_epi16(__m512i index, __m512i a) {
  return (__m512i)__builtin_shuffle((emulated::i16x32)a, (emulated::i16x32)index);
}
EMULATED __m512i _mm512_permutexvar_epi64(__m512i index, __m512i a) {
  return (__m512i)__builtin_shuffle((emulated::i64x8)a, (emulated::i64x8)index);
}
EMULATED __m512i _mm512_permutex2var_epi32(__m512i a, __m512i index, __m512i b) {
  return (__m512i)__builtin_shuffle((emulated::i32x16)a, (emulated::i32x16)b, (emulated::i32x16)index);
}
EMULATED __m512 _mm512_permutex2var_ps(__m512 a, __m512i index, __m512 b) {
  return (__m512)_mm512_permutex2var_epi32((__m512i)a, index, (__m512i)b);
}
EMULATED __m512i _mm512_permutex2var_epi16(__m512i a, __m512i index, __m512i b) {
  return (__m512i)__builtin_shuffle((emulated::i16x32)a, (emulated::i16x32)b, (emulated::i16x32)index);
}
EMULATED __m512i _mm512_permutex2var_epi64(__m512i a, __m512i index, __m512i b) {
  return (__m512i)__builtin_shuffle((emulated::i64x8)a, (emulated::i64x8)b, (emulated::i64x8)index);
}
// Lanes of 32 bits within every 128.
EMULATED __m512i _mm512_shuffle_epi32(__m512i a, int order) {
  const emulated::i32x16 lanes = (emulated::i32x16)a;
  emulated::i32x16 result;
  for (int i = 0; i < 16; ++i) result[i] = lanes[i / 4 * 4 + (order >> i % 4 * 2 & 3)];
  return (__m512i)result;
}
// The type of `order` is the compiler's enumeration in the global namespace: without the brackets a call would find the
// compiler's function by it.
#define _mm512_shuffle_epi32 (_mm512_shuffle_epi32)
// Quarters: two of `a`, then two of `b`.
EMULATED __m512i _mm512_shuffle_i32x4(__m512i a, __m512i b, int order) {
  __m128i from[8], to[4];
  std::memcpy(from, &a, 64);
  std::memcpy(from + 4, &b, 64);
  for (int i = 0; i < 4; ++i) to[i] = from[i / 2 * 4 + (order >> 2 * i & 3)];
  return emulated::bits<__m512i>(to);
}
EMULATED __m512i _mm512_inserti32x4(__m512i a, __m128i b, int quarter) {
  std::memcpy(reinterpret_cast<char*>(&a) + (quarter & 3) * 16, &b, 16);
  return a;
}
EMULATED __m512i _mm512_inserti64x4(__m512i a, __m256i b, int half) {
  std::memcpy(reinterpret_cast<char*>(&a) + (half & 1) * 32, &b, 32);
  return a;
}
EMULATED __m128i _mm512_extracti32x4_epi32(__m512i a, int quarter) {
  __m128i result;
  std::memcpy(&result, reinterpret_cast<const char*>(&a) + (quarter & 3) * 16, 16);
  return result;
}
EMULATED __m256i _mm512_extracti64x4_epi64(__m512i a, int half) { return emulated::half_of<__m256i>(a, half & 1); }
EMULATED __m512i _mm512_broadcast_i64x4(__m256i a) { return emulated::joined<__m512i>(a, a); }
EMULATED __m512i _mm512_broadcast_i32x4(__m128i a) { return _mm512_broadcast_i64x4(emulated::joined<__m256i>(a, a)); }
EMULATED __m512i _mm512_maskz_broadcast_i32x4(__mmask16 k, __m128i a) {
  return emulated::chosen<uint32_t>(k, _mm512_broadcast_i32x4(a), __m512i{});
}
EMULATED __m512i _mm512_broadcastd_epi32(__m128i a) { return _mm512_set1_epi32(_mm_cvtsi128_si32(a)); }
EMULATED __m512 _mm512_broadcastss_ps(__m128 a) { return _mm512_set1_ps(a[0]); }

// Wider lanes, by AVX2's of half the size.
#define EMULATED_WIDENED(name, type, half, source, part)                                                    \
  EMULATED type _mm512_##name(source a) {                                                                   \
    return emulated::joined<type, half>(_mm256_##name(part(a, 0)), _mm256_##name(part(a, 1)));              \
  }
EMULATED __m128i low_or_high_bytes(__m128i a, int index) { return index ? _mm_unpackhi_epi64(a, a) : a; }
EMULATED_WIDENED(cvtepu8_epi32, __m512i, __m256i, __m128i, low_or_high_bytes)
EMULATED_WIDENED(cvtepi8_epi32, __m512i, __m256i, __m128i, low_or_high_bytes)
EMULATED_WIDENED(cvtepu16_epi32, __m512i, __m256i, __m256i, emulated::half_of<__m128i>)
EMULATED_WIDENED(cvtepi16_epi32, __m512i, __m256i, __m256i, emulated::half_of<__m128i>)
EMULATED_WIDENED(cvtepu8_epi16, __m512i, __m256i, __m256i, emulated::half_of<__m128i>)
EMULATED_WIDENED(cvtepi8_epi16, __m512i, __m256i, __m256i, emulated::half_of<__m128i>)
EMULATED_WIDENED(cvtph_ps, __m512, __m256, __m256i, emulated::half_of<__m128i>)
EMULATED_WIDENED(cvtepi32_ps, __m512, __m256, __m512i, emulated::half_of<__m256i>)
EMULATED_WIDENED(cvtps_epi32, __m512i, __m256i, __m512, emulated::half_of<__m256>)
EMULATED_WIDENED(cvttps_epi32, __m512i, __m256i, __m512, emulated::half_of<__m256>)
EMULATED __m512 _mm512_maskz_cvtepi32_ps(__mmask16 k, __m512i a) {
  return emulated::chosen<uint32_t>(k, _mm512_cvtepi32_ps(a), __m512{});
}
EMULATED __m512 _mm512_maskz_cvtph_ps(__mmask16 k, __m256i a) {
  return emulated::chosen<uint32_t>(k, _mm512_cvtph_ps(a), __m512{});
}

// Narrower lanes: cut off, or `s` and `us` at the limits of the result. `us` takes its operand as unsigned.
EMULATED __m128i _mm512_cvtepi32_epi8(__m512i a) {
  return emulated::narrowed<uint8_t, int32_t, __m512i, __m128i>(a, INT32_MIN, INT32_MAX);
}
EMULATED __m128i _mm512_cvtsepi32_epi8(__m512i a) {
  return emulated::narrowed<uint8_t, int32_t, __m512i, __m128i>(a, -128, 127);
}
EMULATED __m128i _mm512_cvtusepi32_epi8(__m512i a) {
  return emulated::narrowed<uint8_t, uint32_t, __m512i, __m128i>(a, 0, 255);
}
EMULATED __m256i _mm512_cvtepi32_epi16(__m512i a) {
  return emulated::narrowed<uint16_t, int32_t, __m512i, __m256i>(a, INT32_MIN, INT32_MAX);
}
EMULATED __m256i _mm512_cvtsepi32_epi16(__m512i a) {
  return emulated::narrowed<uint16_t, int32_t, __m512i, __m256i>(a, -32768, 32767);
}
EMULATED __m256i _mm512_cvtepi16_epi8(__m512i a) {
  return emulated::narrowed<uint8_t, int16_t, __m512i, __m256i>(a, INT16_MIN, INT16_MAX);
}
EMULATED __m256i _mm512_cvtsepi16_epi8(__m512i a) {
  return emulated::narrowed<uint8_t, int16_t, __m512i, __m256i>(a, -128, 127);
}
EMULATED __m128i _mm256_cvtepi16_epi8(__m256i a) {
  return emulated::narrowed<uint8_t, int16_t, __m256i, __m128i>(a, INT16_MIN, INT16_MAX);
}

}  // namespace hydra
