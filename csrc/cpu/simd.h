// Vectors of one instruction-set level: loads, stores and conversions. A source file defines HYDRA_LEVEL (a namespace),
// HYDRA_LANES and HYDRA_TARGET, then includes this; all code of a level lives in namespace hydra::HYDRA_LEVEL.
// Arithmetic on `vf` is the compiler's own (+, *, comparisons, ?:). Lambdas do not inherit the target: use functions.
#pragma once

#if !defined(HYDRA_LEVEL) || !defined(HYDRA_LANES) || !defined(HYDRA_TARGET)
#error "define HYDRA_LEVEL, HYDRA_LANES and HYDRA_TARGET before including cpu/simd.h"
#endif

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "cpu/isa.h"
#include "dtype.h"

#if HYDRA_X86
#include <immintrin.h>
#endif

#define HYDRA_INLINE HYDRA_TARGET __attribute__((always_inline)) inline

namespace hydra::HYDRA_LEVEL {

constexpr int kLanes = HYDRA_LANES;

typedef float vf __attribute__((vector_size(HYDRA_LANES * 4)));
typedef int32_t vi __attribute__((vector_size(HYDRA_LANES * 4)));
typedef uint32_t vu __attribute__((vector_size(HYDRA_LANES * 4)));
typedef uint16_t vh __attribute__((vector_size(HYDRA_LANES * 2)));
// The same for memory of any alignment and declared type.
typedef float vf_memory __attribute__((vector_size(HYDRA_LANES * 4), aligned(1), may_alias));
typedef uint32_t vu_memory __attribute__((vector_size(HYDRA_LANES * 4), aligned(1), may_alias));
typedef uint16_t vh_memory __attribute__((vector_size(HYDRA_LANES * 2), aligned(1), may_alias));

// Subtracts zero because that changes no value and is folded away; adding zero would turn -0 into 0.
HYDRA_INLINE vf splat(float value) { return value - vf{}; }

HYDRA_INLINE vf load(const float* source) { return *reinterpret_cast<const vf_memory*>(source); }

HYDRA_INLINE vf load(const bf16_t* source) {
#if HYDRA_LANES == 16  // what the compiler makes of a conversion takes five instructions
  return (vf)((vu)_mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(source))) << 16);
#else
  return (vf)(__builtin_convertvector(*reinterpret_cast<const vh_memory*>(source), vu) << 16);
#endif
}

HYDRA_INLINE vf load(const f16_t* source) {
#if HYDRA_LANES == 16
  return (vf)_mm512_maskz_cvtph_ps(0xffff, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(source)));
#elif HYDRA_LANES == 8
  return (vf)_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(source)));
#else
  vf result{};
  for (int i = 0; i < kLanes; ++i) result[i] = to_float(source[i]);
  return result;
#endif
}

HYDRA_INLINE void store(float* target, vf value) { *reinterpret_cast<vf_memory*>(target) = value; }

HYDRA_INLINE void store(bf16_t* target, vf value) {
#if HYDRA_LANES == 16  // one instruction; the only difference is that it makes results below 2^-126 zero
  const __m256bh half = _mm512_cvtneps_pbh((__m512)value);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(target), (__m256i)half);
#else
  const vu bits = (vu)value;
  const vu rounded = (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16;
  const vu result = value != value ? (bits >> 16 | 0x40u) : rounded;
  *reinterpret_cast<vh_memory*>(target) = __builtin_convertvector(result, vh);
#endif
}

HYDRA_INLINE void store(f16_t* target, vf value) {
#if HYDRA_LANES == 16
  const __m256i half = _mm512_maskz_cvtps_ph(0xffff, (__m512)value, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(target), half);
#elif HYDRA_LANES == 8
  const __m128i half = _mm256_cvtps_ph((__m256)value, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(target), half);
#else
  for (int i = 0; i < kLanes; ++i) target[i] = from_float<f16_t>(value[i]);
#endif
}

// Two vectors to neighbouring places.
template <class T>
HYDRA_INLINE void store_pair(T* target, vf first, vf second) {
#if HYDRA_LANES == 16
  if constexpr (std::is_same_v<T, bf16_t>) {  // a whole cache line at once; rounds as `store` does
    _mm512_storeu_si512(target, (__m512i)_mm512_cvtne2ps_pbh((__m512)second, (__m512)first));
    return;
  }
#endif
  store(target, first);
  store(target + kLanes, second);
}

// The first `count` lanes only; memory behind them is neither read nor written.
template <class T>
HYDRA_INLINE vf load_part(const T* source, int count) {
  T buffer[kLanes] = {};
  std::memcpy(buffer, source, count * sizeof(T));
  return load(buffer);
}

template <class T>
HYDRA_INLINE void store_part(T* target, vf value, int count) {
  T buffer[kLanes];
  store(buffer, value);
  std::memcpy(target, buffer, count * sizeof(T));
}

// Rounds to the storage type and back.
template <class T>
HYDRA_INLINE vf rounded(vf value) {
  T buffer[kLanes];
  store(buffer, value);
  return load(buffer);
}

template <>
HYDRA_INLINE vf rounded<float>(vf value) {
  return value;
}

// Sum of the lanes, in a fixed order.
HYDRA_INLINE float sum(vf value) {
  float lanes[kLanes];
  store(lanes, value);
  for (int width = kLanes / 2; width > 0; width /= 2) {
    for (int i = 0; i < width; ++i) lanes[i] += lanes[i + width];
  }
  return lanes[0];
}

}  // namespace hydra::HYDRA_LEVEL
