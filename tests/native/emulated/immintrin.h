// The instructions above AVX2 that csrc/cpu uses, or may, in C++ for any processor with AVX2: AVX-512 F, BW, VL, DQ, BF16
// and VNNI here, AMX in tiles.h. `python setup.py build_emulated` puts this folder in front of the compiler's headers.
//
// Each function hides the compiler's own of the same name from code in namespace hydra and does what Intel's manual
// says of the instruction. One that is missing here does not compile: the compiler's own needs another target. Wrong
// operands end the process, as they would there.
#pragma once

#include_next <immintrin.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#define EMULATED __attribute__((target("avx2,fma,f16c,bmi2"))) inline

// The compiler's macros would hide the functions.
#undef _mm512_setr_epi32
#undef _mm512_setr_ps
#undef _mm512_setr_epi64

namespace hydra {
namespace emulated {

typedef int8_t i8x64 __attribute__((vector_size(64)));
typedef uint8_t u8x64 __attribute__((vector_size(64)));
typedef int16_t i16x32 __attribute__((vector_size(64)));
typedef uint16_t u16x32 __attribute__((vector_size(64)));
typedef int32_t i32x16 __attribute__((vector_size(64)));
typedef uint32_t u32x16 __attribute__((vector_size(64)));
typedef int64_t i64x8 __attribute__((vector_size(64)));
typedef uint64_t u64x8 __attribute__((vector_size(64)));
typedef float f32x16 __attribute__((vector_size(64)));
typedef uint16_t u16x16 __attribute__((vector_size(32)));
typedef uint32_t u32x8 __attribute__((vector_size(32)));

[[noreturn]] inline void fault(const char* what) {
  std::fprintf(stderr, "emulated instruction: %s\n", what);
  std::abort();
}

inline void require(bool holds, const char* what) {
  if (!holds) fault(what);
}

inline void aligned(const void* address, uintptr_t bytes) {
  require(reinterpret_cast<uintptr_t>(address) % bytes == 0, "the address is not aligned as the instruction wants it");
}

template <class To, class From>
EMULATED To bits(const From& value) {
  static_assert(sizeof(To) == sizeof(From));
  To result;
  std::memcpy(&result, &value, sizeof(To));
  return result;
}

template <class Half, class Whole>
EMULATED Half half_of(const Whole& value, int index) {
  static_assert(sizeof(Whole) == 2 * sizeof(Half));
  Half result;
  std::memcpy(&result, reinterpret_cast<const char*>(&value) + index * sizeof(Half), sizeof(Half));
  return result;
}

template <class Whole, class Half>
EMULATED Whole joined(const Half& low, const Half& high) {
  static_assert(sizeof(Whole) == 2 * sizeof(Half));
  Whole result;
  std::memcpy(&result, &low, sizeof(Half));
  std::memcpy(reinterpret_cast<char*>(&result) + sizeof(Half), &high, sizeof(Half));
  return result;
}

// Lanes of `yes` where a bit of the mask is set, else those of `no`.
template <class Lane, class V>
EMULATED V chosen(uint64_t mask, const V& yes, const V& no) {
  Lane lanes[sizeof(V) / sizeof(Lane)], others[sizeof(V) / sizeof(Lane)];
  std::memcpy(lanes, &no, sizeof(V));
  std::memcpy(others, &yes, sizeof(V));
  for (unsigned i = 0; i < sizeof(V) / sizeof(Lane); ++i) lanes[i] = mask >> i & 1 ? others[i] : lanes[i];
  return bits<V>(lanes);
}

// Masked-off lanes of memory are not touched.
template <class Lane, class V>
EMULATED V load_chosen(uint64_t mask, const void* source, const V& others) {
  Lane lanes[sizeof(V) / sizeof(Lane)];
  std::memcpy(lanes, &others, sizeof(V));
  for (unsigned i = 0; i < sizeof(V) / sizeof(Lane); ++i) {
    if (mask >> i & 1) std::memcpy(&lanes[i], static_cast<const Lane*>(source) + i, sizeof(Lane));
  }
  return bits<V>(lanes);
}

template <class Lane, class V>
EMULATED void store_chosen(void* target, uint64_t mask, const V& value) {
  Lane lanes[sizeof(V) / sizeof(Lane)];
  std::memcpy(lanes, &value, sizeof(V));
  for (unsigned i = 0; i < sizeof(V) / sizeof(Lane); ++i) {
    if (mask >> i & 1) std::memcpy(static_cast<Lane*>(target) + i, &lanes[i], sizeof(Lane));
  }
}

// Bit i is set where lane i of a comparison is.
template <class V>
EMULATED uint64_t mask_of(const V& lanes) {
  uint64_t mask = 0;
  for (unsigned i = 0; i < sizeof(V) / sizeof(lanes[0]); ++i) mask |= static_cast<uint64_t>(lanes[i] != 0) << i;
  return mask;
}

template <class To, class From, class Wide, class Narrow>
EMULATED Narrow narrowed(const Wide& value, int64_t least, int64_t most) {
  From lanes[sizeof(Wide) / sizeof(From)];
  To result[sizeof(Wide) / sizeof(From)];
  std::memcpy(lanes, &value, sizeof(Wide));
  for (unsigned i = 0; i < sizeof(Wide) / sizeof(From); ++i) {
    const int64_t lane = lanes[i];
    result[i] = static_cast<To>(lane < least ? least : lane > most ? most : lane);
  }
  return bits<Narrow>(result);
}

}  // namespace emulated

// Lane by lane, or within 128 bits, as AVX2 does it twice.
#define EMULATED_ONE(name, type, half)                                                                   \
  EMULATED type _mm512_##name(type a) {                                                                  \
    return emulated::joined<type>(_mm256_##name(emulated::half_of<half>(a, 0)),                          \
                                  _mm256_##name(emulated::half_of<half>(a, 1)));                         \
  }
#define EMULATED_TWO_AS(name, name256, type, half)                                                                 \
  EMULATED type _mm512_##name(type a, type b) {                                                                    \
    return emulated::joined<type>(_mm256_##name256(emulated::half_of<half>(a, 0), emulated::half_of<half>(b, 0)),  \
                                  _mm256_##name256(emulated::half_of<half>(a, 1), emulated::half_of<half>(b, 1))); \
  }
#define EMULATED_TWO(name) EMULATED_TWO_AS(name, name, __m512i, __m256i)
#define EMULATED_TWO_PS(name) EMULATED_TWO_AS(name, name, __m512, __m256)
#define EMULATED_THREE_PS(name)                                                                           \
  EMULATED __m512 _mm512_##name(__m512 a, __m512 b, __m512 c) {                                           \
    using emulated::half_of;                                                                              \
    return emulated::joined<__m512>(                                                                      \
        _mm256_##name(half_of<__m256>(a, 0), half_of<__m256>(b, 0), half_of<__m256>(c, 0)),               \
        _mm256_##name(half_of<__m256>(a, 1), half_of<__m256>(b, 1), half_of<__m256>(c, 1)));              \
  }
#define EMULATED_SHIFT(name)                                                                              \
  EMULATED __m512i _mm512_##name(__m512i a, unsigned count) {                                             \
    const int most = static_cast<int>(count > 255 ? 255 : count);                                         \
    return emulated::joined<__m512i>(_mm256_##name(emulated::half_of<__m256i>(a, 0), most),               \
                                     _mm256_##name(emulated::half_of<__m256i>(a, 1), most));              \
  }

EMULATED_ONE(abs_epi8, __m512i, __m256i)
EMULATED_ONE(abs_epi16, __m512i, __m256i)
EMULATED_ONE(abs_epi32, __m512i, __m256i)
EMULATED_ONE(sqrt_ps, __m512, __m256)
EMULATED_TWO(add_epi8)
EMULATED_TWO(add_epi16)
EMULATED_TWO(add_epi32)
EMULATED_TWO(add_epi64)
EMULATED_TWO(adds_epi16)
EMULATED_TWO(sub_epi8)
EMULATED_TWO(sub_epi16)
EMULATED_TWO(sub_epi32)
EMULATED_TWO(subs_epi16)
EMULATED_TWO(mullo_epi16)
EMULATED_TWO(mullo_epi32)
EMULATED_TWO(mulhi_epi16)
EMULATED_TWO(mulhrs_epi16)
EMULATED_TWO(madd_epi16)
EMULATED_TWO(maddubs_epi16)
EMULATED_TWO(max_epi8)
EMULATED_TWO(max_epi16)
EMULATED_TWO(max_epi32)
EMULATED_TWO(max_epu8)
EMULATED_TWO(min_epi8)
EMULATED_TWO(min_epi16)
EMULATED_TWO(min_epi32)
EMULATED_TWO(min_epu8)
EMULATED_TWO(packs_epi16)
EMULATED_TWO(packs_epi32)
EMULATED_TWO(packus_epi16)
EMULATED_TWO(packus_epi32)
EMULATED_TWO(unpacklo_epi8)
EMULATED_TWO(unpackhi_epi8)
EMULATED_TWO(unpacklo_epi16)
EMULATED_TWO(unpackhi_epi16)
EMULATED_TWO(unpacklo_epi32)
EMULATED_TWO(unpackhi_epi32)
EMULATED_TWO(unpacklo_epi64)
EMULATED_TWO(unpackhi_epi64)
EMULATED_TWO(shuffle_epi8)
EMULATED_TWO(sllv_epi32)
EMULATED_TWO(srlv_epi32)
EMULATED_TWO(srav_epi32)
EMULATED_TWO_AS(and_si512, and_si256, __m512i, __m256i)
EMULATED_TWO_AS(or_si512, or_si256, __m512i, __m256i)
EMULATED_TWO_AS(xor_si512, xor_si256, __m512i, __m256i)
EMULATED_TWO_AS(andnot_si512, andnot_si256, __m512i, __m256i)
EMULATED_TWO_AS(and_epi32, and_si256, __m512i, __m256i)
EMULATED_TWO_AS(or_epi32, or_si256, __m512i, __m256i)
EMULATED_TWO_AS(xor_epi32, xor_si256, __m512i, __m256i)
EMULATED_TWO_AS(andnot_epi32, andnot_si256, __m512i, __m256i)
EMULATED_TWO_PS(add_ps)
EMULATED_TWO_PS(sub_ps)
EMULATED_TWO_PS(mul_ps)
EMULATED_TWO_PS(div_ps)
EMULATED_TWO_PS(max_ps)  // the second operand where one is NaN
EMULATED_TWO_PS(min_ps)
EMULATED_TWO_PS(and_ps)
EMULATED_TWO_PS(or_ps)
EMULATED_TWO_PS(xor_ps)
EMULATED_TWO_PS(andnot_ps)
EMULATED_TWO_PS(unpacklo_ps)
EMULATED_TWO_PS(unpackhi_ps)
EMULATED_THREE_PS(fmadd_ps)
EMULATED_THREE_PS(fmsub_ps)
EMULATED_THREE_PS(fnmadd_ps)
EMULATED_THREE_PS(fnmsub_ps)
EMULATED_SHIFT(slli_epi16)
EMULATED_SHIFT(slli_epi32)
EMULATED_SHIFT(slli_epi64)
EMULATED_SHIFT(srli_epi16)
EMULATED_SHIFT(srli_epi32)
EMULATED_SHIFT(srli_epi64)
EMULATED_SHIFT(srai_epi16)
EMULATED_SHIFT(srai_epi32)

// Constants and casts.

EMULATED __m512i _mm512_setzero_si512() { return __m512i{}; }
EMULATED __m512 _mm512_setzero_ps() { return __m512{}; }
EMULATED __m512i _mm512_set1_epi8(char value) { return (__m512i)(emulated::i8x64{} + static_cast<int8_t>(value)); }
EMULATED __m512i _mm512_set1_epi16(short value) { return (__m512i)(emulated::i16x32{} + value); }
EMULATED __m512i _mm512_set1_epi32(int value) { return (__m512i)(emulated::i32x16{} + value); }
EMULATED __m512i _mm512_set1_epi64(long long value) { return (__m512i)(emulated::i64x8{} + int64_t{value}); }
EMULATED __m512 _mm512_set1_ps(float value) { return (__m512)(value - emulated::f32x16{}); }
EMULATED __m512i _mm512_setr_epi32(int a, int b, int c, int d, int e, int f, int g, int h, int i, int j, int k, int l,
                                   int m, int n, int o, int p) {
  return (__m512i)emulated::i32x16{a, b, c, d, e, f, g, h, i, j, k, l, m, n, o, p};
}
EMULATED __m512 _mm512_setr_ps(float a, float b, float c, float d, float e, float f, float g, float h, float i, float j,
                               float k, float l, float m, float n, float o, float p) {
  return (__m512)emulated::f32x16{a, b, c, d, e, f, g, h, i, j, k, l, m, n, o, p};
}
EMULATED __m512i _mm512_setr_epi64(long long a, long long b, long long c, long long d, long long e, long long f,
                                   long long g, long long h) {
  return __m512i{a, b, c, d, e, f, g, h};
}
EMULATED __m512 _mm512_castsi512_ps(__m512i a) { return (__m512)a; }
EMULATED __m512i _mm512_castps_si512(__m512 a) { return (__m512i)a; }
EMULATED __m256i _mm512_castsi512_si256(__m512i a) { return emulated::half_of<__m256i>(a, 0); }
EMULATED __m256 _mm512_castps512_ps256(__m512 a) { return emulated::half_of<__m256>(a, 0); }
EMULATED __m512i _mm512_castsi256_si512(__m256i a) { return emulated::joined<__m512i>(a, __m256i{}); }
EMULATED __m128i _mm512_castsi512_si128(__m512i a) { return _mm256_castsi256_si128(_mm512_castsi512_si256(a)); }
EMULATED __m512i _mm512_castsi128_si512(__m128i a) {
  return emulated::joined<__m512i>(emulated::joined<__m256i>(a, __m128i{}), __m256i{});
}

// Memory.

EMULATED __m512i _mm512_loadu_si512(const void* source) { return emulated::bits<__m512i>(*static_cast<const char(*)[64]>(source)); }
EMULATED __m512 _mm512_loadu_ps(const void* source) { return (__m512)_mm512_loadu_si512(source); }
EMULATED __m512i _mm512_load_si512(const void* source) {
  emulated::aligned(source, 64);
  return _mm512_loadu_si512(source);
}
EMULATED __m512 _mm512_load_ps(const void* source) { return (__m512)_mm512_load_si512(source); }
EMULATED void _mm512_storeu_si512(void* target, __m512i value) { std::memcpy(target, &value, 64); }
EMULATED void _mm512_storeu_ps(void* target, __m512 value) { std::memcpy(target, &value, 64); }
EMULATED void _mm512_store_si512(void* target, __m512i value) {
  emulated::aligned(target, 64);
  std::memcpy(target, &value, 64);
}
EMULATED void _mm512_store_ps(void* target, __m512 value) { _mm512_store_si512(target, (__m512i)value); }
EMULATED void _mm512_stream_si512(void* target, __m512i value) { _mm512_store_si512(target, value); }
EMULATED __m512 _mm512_i32gather_ps(__m512i index, const void* base, int scale) {
  const emulated::i32x16 offsets = (emulated::i32x16)index;
  float lanes[16];
  for (int i = 0; i < 16; ++i) {
    std::memcpy(&lanes[i], static_cast<const char*>(base) + int64_t{offsets[i]} * scale, 4);
  }
  return emulated::bits<__m512>(lanes);
}

#define EMULATED_MASKED_MEMORY(prefix, suffix, type, lane, mask)                             \
  EMULATED type prefix##_maskz_loadu_##suffix(mask k, const void* source) {                  \
    return emulated::load_chosen<lane>(k, source, type{});                                   \
  }                                                                                          \
  EMULATED type prefix##_mask_loadu_##suffix(type others, mask k, const void* source) {      \
    return emulated::load_chosen<lane>(k, source, others);                                   \
  }                                                                                          \
  EMULATED void prefix##_mask_storeu_##suffix(void* target, mask k, type value) {            \
    emulated::store_chosen<lane>(target, k, value);                                          \
  }
EMULATED_MASKED_MEMORY(_mm512, epi8, __m512i, uint8_t, __mmask64)
EMULATED_MASKED_MEMORY(_mm512, epi16, __m512i, uint16_t, __mmask32)
EMULATED_MASKED_MEMORY(_mm512, epi32, __m512i, uint32_t, __mmask16)
EMULATED_MASKED_MEMORY(_mm512, ps, __m512, uint32_t, __mmask16)
EMULATED_MASKED_MEMORY(_mm256, epi8, __m256i, uint8_t, __mmask32)
EMULATED_MASKED_MEMORY(_mm256, epi16, __m256i, uint16_t, __mmask16)
EMULATED_MASKED_MEMORY(_mm256, epi32, __m256i, uint32_t, __mmask8)
EMULATED_MASKED_MEMORY(_mm256, ps, __m256, uint32_t, __mmask8)
EMULATED_MASKED_MEMORY(_mm, epi8, __m128i, uint8_t, __mmask16)
EMULATED_MASKED_MEMORY(_mm, epi16, __m128i, uint16_t, __mmask8)

// Masks.

EMULATED __mmask16 _mm512_movepi32_mask(__m512i a) { return emulated::mask_of((emulated::i32x16)a < 0); }
EMULATED __mmask32 _mm512_movepi16_mask(__m512i a) { return emulated::mask_of((emulated::i16x32)a < 0); }
EMULATED __mmask64 _mm512_movepi8_mask(__m512i a) { return emulated::mask_of((emulated::i8x64)a < 0); }
EMULATED __m512i _mm512_mask_blend_epi8(__mmask64 k, __m512i no, __m512i yes) { return emulated::chosen<uint8_t>(k, yes, no); }
EMULATED __m512i _mm512_mask_blend_epi16(__mmask32 k, __m512i no, __m512i yes) { return emulated::chosen<uint16_t>(k, yes, no); }
EMULATED __m512i _mm512_mask_blend_epi32(__mmask16 k, __m512i no, __m512i yes) { return emulated::chosen<uint32_t>(k, yes, no); }
EMULATED __m512 _mm512_mask_blend_ps(__mmask16 k, __m512 no, __m512 yes) { return emulated::chosen<uint32_t>(k, yes, no); }

#define EMULATED_COMPARISON(name, type, vector, mask, operation) \
  EMULATED mask _mm512_##name(type a, type b) { return emulated::mask_of((emulated::vector)a operation (emulated::vector)b); }
EMULATED_COMPARISON(cmpeq_epi32_mask, __m512i, i32x16, __mmask16, ==)
EMULATED_COMPARISON(cmpneq_epi32_mask, __m512i, i32x16, __mmask16, !=)
EMULATED_COMPARISON(cmplt_epi32_mask, __m512i, i32x16, __mmask16, <)
EMULATED_COMPARISON(cmpgt_epi32_mask, __m512i, i32x16, __mmask16, >)
EMULATED_COMPARISON(cmpeq_epi8_mask, __m512i, i8x64, __mmask64, ==)
EMULATED_COMPARISON(cmplt_epi8_mask, __m512i, i8x64, __mmask64, <)
EMULATED_COMPARISON(cmpgt_epi8_mask, __m512i, i8x64, __mmask64, >)
EMULATED_COMPARISON(cmpeq_ps_mask, __m512, f32x16, __mmask16, ==)
EMULATED_COMPARISON(cmplt_ps_mask, __m512, f32x16, __mmask16, <)
EMULATED_COMPARISON(cmple_ps_mask, __m512, f32x16, __mmask16, <=)

}  // namespace hydra

#include "arithmetic.h"
#include "moves.h"
#include "tiles.h"
