// Vectors of one instruction-set level: loads, stores and conversions. A source file defines HYDRA_LEVEL (a namespace),
// HYDRA_LANES and HYDRA_TARGET, also HYDRA_BF16 where the target has conversions to bf16, then includes this; all code
// of a level lives in namespace hydra::HYDRA_LEVEL.
// Arithmetic on `vf` is the compiler's own (+, *, comparisons, ?:). Lambdas do not inherit the target: use functions.
#pragma once

#if !defined(HYDRA_LEVEL) || !defined(HYDRA_LANES) || !defined(HYDRA_TARGET)
#error "define HYDRA_LEVEL, HYDRA_LANES and HYDRA_TARGET before including cpu/simd.h"
#endif

#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

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
#ifdef HYDRA_BF16  // one instruction; the only difference is that it makes results below 2^-126 zero
  const __m256bh half = _mm512_cvtneps_pbh((__m512)value);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(target), (__m256i)half);
#else
  const vu bits = (vu)value;
  const vu rounded = (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16;
  const vu result = value != value ? (bits >> 16 | 0x40u) : rounded;
#if HYDRA_LANES == 16
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(target), _mm512_cvtepi32_epi16((__m512i)result));
#else
  *reinterpret_cast<vh_memory*>(target) = __builtin_convertvector(result, vh);
#endif
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
#ifdef HYDRA_BF16
  if constexpr (std::is_same_v<T, bf16_t>) {  // a whole cache line at once; rounds as `store` does
    _mm512_storeu_si512(target, (__m512i)_mm512_cvtne2ps_pbh((__m512)second, (__m512)first));
    return;
  }
#endif
  store(target, first);
  store(target + kLanes, second);
}

// Only the first `count` lanes: memory after them is neither read nor written. Other lanes load as zero.
#if HYDRA_LANES == 16
HYDRA_INLINE __mmask16 first_lanes(int count) { return static_cast<__mmask16>((1u << count) - 1); }

HYDRA_INLINE vf load_part(const float* source, int count) {
  return (vf)_mm512_maskz_loadu_ps(first_lanes(count), source);
}

HYDRA_INLINE vf load_part(const bf16_t* source, int count) {
  return (vf)((vu)_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(first_lanes(count), source)) << 16);
}

HYDRA_INLINE vf load_part(const f16_t* source, int count) {
  return (vf)_mm512_maskz_cvtph_ps(0xffff, _mm256_maskz_loadu_epi16(first_lanes(count), source));
}

HYDRA_INLINE void store_part(float* target, vf value, int count) {
  _mm512_mask_storeu_ps(target, first_lanes(count), (__m512)value);
}

template <class T>
HYDRA_INLINE void store_part(T* target, vf value, int count) {
  T buffer[kLanes];
  store(buffer, value);
  const __m256i half = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(buffer));
  _mm256_mask_storeu_epi16(target, first_lanes(count), half);
}
#else
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
#endif

HYDRA_INLINE vf fused_multiply_add(vf a, vf b, vf c) {
#if HYDRA_LANES == 16
  return (vf)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif HYDRA_LANES == 8
  return (vf)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
  return a * b + c;
#endif
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

using Lanes = std::make_integer_sequence<int, kLanes>;

// Lanes from `count` on become zero.
template <int... kLane>
HYDRA_INLINE vf clear_behind(vf value, int count, std::integer_sequence<int, kLane...>) {
  const vi number = {kLane...};
  return number < (vi{} + count) ? value : vf{};
}

// In every lane the sum of itself and its partner, `kDistance` away.
template <int kDistance, int... kLane>
HYDRA_INLINE vf sum_of_pairs(vf value, std::integer_sequence<int, kLane...>) {
  const vi partner = {(kLane ^ kDistance)...};
  return value + __builtin_shuffle(value, partner);
}

// Sum of the lanes, in a fixed order.
HYDRA_INLINE float sum(vf value) {
  if constexpr (kLanes > 8) value = sum_of_pairs<8>(value, Lanes());
  if constexpr (kLanes > 4) value = sum_of_pairs<4>(value, Lanes());
  value = sum_of_pairs<2>(value, Lanes());
  return sum_of_pairs<1>(value, Lanes())[0];
}

}  // namespace hydra::HYDRA_LEVEL
