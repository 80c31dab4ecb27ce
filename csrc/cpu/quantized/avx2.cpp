// Products for processors with AVX2, FMA and F16C.
#include "cpu/isa.h"

#if HYDRA_X86
#define HYDRA_LEVEL avx2
#define HYDRA_LANES 8
#define HYDRA_TARGET HYDRA_TARGET_AVX2
#include <algorithm>

#include "cpu/quantized/block.h"

namespace hydra::avx2 {
namespace {

// More than four rows take half a tile at a time, which keeps their sums in registers; the other half comes from the
// first-level cache.
constexpr int kMostRows = 8;
constexpr int vectors_of(int rows) { return rows <= 4 ? 2 : 1; }
constexpr int number_bytes(int num_bits) { return num_bits == 8 ? 2 : 1; }
constexpr int64_t kStride = block_stride(8, 2), kStride6 = block_stride(6, 1);
static_assert(kStride == block_stride(4, 1));

HYDRA_INLINE __m256i load_bytes(const uint8_t* source) {
  return _mm256_load_si256(reinterpret_cast<const __m256i*>(source));
}

HYDRA_INLINE __m256i splat_word(const int8_t* source) {
  int32_t word;
  std::memcpy(&word, source, 4);
  return _mm256_set1_epi32(word);
}

// Stores bytes, or 16 bits in the order of `dot8`: of four inputs the first and third, then the second and fourth.
HYDRA_INLINE void store_numbers(int8_t* target, vi numbers, int bytes) {
  const __m256i words = _mm256_packs_epi32((__m256i)numbers, (__m256i)numbers);
  const __m128i low = _mm256_castsi256_si128(words), high = _mm256_extracti128_si256(words, 1);
  const __m128i all = _mm_unpacklo_epi64(low, high);
  if (bytes == 2) {
    const __m128i turned = _mm_shufflehi_epi16(_mm_shufflelo_epi16(all, 0xd8), 0xd8);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(target), turned);
  } else {
    _mm_storel_epi64(reinterpret_cast<__m128i*>(target), _mm_packs_epi16(all, all));
  }
}

// Multiplies 16-bit numbers, which include their lower bytes, and adds pairs of products in 32 bits: instructions on
// bytes would saturate.
template <int kRows, int kVectors>
HYDRA_INLINE void dot8(vi (&sums)[kRows][kVectors], const int8_t* x, const uint8_t* weights, int64_t steps,
                       const int32_t* from) {
  const __m256i low_bytes = _mm256_set1_epi16(255);
  __m256i acc[kRows][kVectors];
#pragma GCC unroll 12
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 2
    for (int v = 0; v < kVectors; ++v) acc[r][v] = _mm256_set1_epi32(from[r]);
  }
#pragma GCC unroll 1
  for (int64_t step = 0; step < steps; ++step, weights += kStepBytes, x += 8) {
    __m256i even[kVectors], odd[kVectors];
#pragma GCC unroll 2
    for (int v = 0; v < kVectors; ++v) {
      const __m256i bytes = load_bytes(weights + 32 * v);
      if (v == 0) prefetch_ahead(weights);
      even[v] = _mm256_and_si256(bytes, low_bytes);
      odd[v] = _mm256_srli_epi16(bytes, 8);
    }
#pragma GCC unroll 12
    for (int r = 0; r < kRows; ++r) {
      const __m256i first = splat_word(x + r * kStride), second = splat_word(x + r * kStride + 4);
#pragma GCC unroll 2
      for (int v = 0; v < kVectors; ++v) {
        acc[r][v] = _mm256_add_epi32(acc[r][v], _mm256_madd_epi16(even[v], first));
        acc[r][v] = _mm256_add_epi32(acc[r][v], _mm256_madd_epi16(odd[v], second));
      }
    }
  }
#pragma GCC unroll 12
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 2
    for (int v = 0; v < kVectors; ++v) sums[r][v] = (vi)acc[r][v];
  }
}

// One step of a tile: adds pairs of products of all rows, in 16 bits. The compiler must not gather products before it
// adds them, for which there are no registers.
template <int kRows, int kVectors>
HYDRA_INLINE void step4(__m256i (&acc)[kRows][kVectors], const int8_t* x, const uint8_t* weights) {
  const __m256i low_halves = _mm256_set1_epi8(15);
  __m256i low[kVectors], high[kVectors];
  prefetch_ahead(weights);
#pragma GCC unroll 2
  for (int v = 0; v < kVectors; ++v) {
    const __m256i bytes = load_bytes(weights + 32 * v);
    low[v] = _mm256_and_si256(bytes, low_halves);
    high[v] = _mm256_and_si256(_mm256_srli_epi16(bytes, 4), low_halves);
  }
#pragma GCC unroll 12
  for (int r = 0; r < kRows; ++r) {
    const __m256i first = splat_word(x + r * kStride), second = splat_word(x + r * kStride + 4);
#pragma GCC unroll 2
    for (int v = 0; v < kVectors; ++v) {
      acc[r][v] = _mm256_add_epi16(acc[r][v], _mm256_maddubs_epi16(low[v], first));
      __asm__("" : "+x"(acc[r][v]));
      acc[r][v] = _mm256_add_epi16(acc[r][v], _mm256_maddubs_epi16(high[v], second));
      __asm__("" : "+x"(acc[r][v]));
    }
  }
}

// Pairs of products sum to at most 2 * 15 * 128 = 3840: eight of them, of four steps, fit into 16 bits.
template <int kRows, int kVectors>
HYDRA_INLINE void dot4(vi (&sums)[kRows][kVectors], const int8_t* x, const uint8_t* weights, int64_t steps,
                       const int32_t* from) {
  const __m256i ones = _mm256_set1_epi16(1);
#pragma GCC unroll 12
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 2
    for (int v = 0; v < kVectors; ++v) sums[r][v] = vi{} + from[r];
  }
  while (steps > 0) {
    __m256i acc[kRows][kVectors] = {};
    if (steps >= 4) {
#pragma GCC unroll 4
      for (int step = 0; step < 4; ++step) step4(acc, x + 8 * step, weights + kStepBytes * step);
      steps -= 4;
      x += 4 * 8;
      weights += 4 * kStepBytes;
    } else {
      for (; steps > 0; --steps, x += 8, weights += kStepBytes) step4(acc, x, weights);
    }
#pragma GCC unroll 12
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 2
      for (int v = 0; v < kVectors; ++v) sums[r][v] += (vi)_mm256_madd_epi16(acc[r][v], ones);
    }
  }
}

// Four pairs of products sum to at most 2 * 2 * 63 * 128 = 32256, which fits into 16 bits; a step has two such sums.
template <int kRows, int kVectors>
HYDRA_INLINE void dot6(vi (&sums)[kRows][kVectors], const int8_t* x, const uint8_t* weights, int64_t steps,
                       const int32_t* from) {
  const __m256i low_halves = _mm256_set1_epi8(15), upper_bits = _mm256_set1_epi8(48), ones = _mm256_set1_epi16(1);
#pragma GCC unroll 12
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 2
    for (int v = 0; v < kVectors; ++v) sums[r][v] = vi{} + from[r];
  }
  for (int64_t step = 0; step < steps; ++step, weights += step_bytes(6), x += 16) {
    __m256i values[kVectors][4];
#pragma GCC unroll 3
    for (int i = 0; i < 3; ++i) prefetch_ahead(weights + i * kStepBytes);
#pragma GCC unroll 2
    for (int v = 0; v < kVectors; ++v) {
      const uint8_t* here = weights + 32 * v;
      const __m256i first = load_bytes(here), second = load_bytes(here + kStepBytes);
      const __m256i upper = load_bytes(here + 2 * kStepBytes);
      const __m256i lower[4] = {first, _mm256_srli_epi16(first, 4), second, _mm256_srli_epi16(second, 4)};
      const __m256i shifted[4] = {_mm256_slli_epi16(upper, 4), _mm256_slli_epi16(upper, 2), upper,
                                  _mm256_srli_epi16(upper, 2)};
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i) {
        const __m256i low = _mm256_and_si256(lower[i], low_halves);
        values[v][i] = _mm256_or_si256(low, _mm256_and_si256(shifted[i], upper_bits));
      }
    }
#pragma GCC unroll 12
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 2
      for (int half = 0; half < 4; half += 2) {
        const int8_t* numbers = x + r * kStride6 + 4 * half;
        const __m256i first = splat_word(numbers), second = splat_word(numbers + 4);
#pragma GCC unroll 2
        for (int v = 0; v < kVectors; ++v) {
          const __m256i pairs = _mm256_add_epi16(_mm256_maddubs_epi16(values[v][half], first),
                                                 _mm256_maddubs_epi16(values[v][half + 1], second));
          sums[r][v] += (vi)_mm256_madd_epi16(pairs, ones);
          __asm__("" : "+x"(sums[r][v]));
        }
      }
    }
  }
}

template <int kBits, int kRows, int kVectors>
HYDRA_INLINE void dot(vi (&sums)[kRows][kVectors], const int8_t* x, const uint8_t* weights, int64_t steps,
                      const int32_t* from) {
  if constexpr (kBits == 8) {
    dot8(sums, x, weights, steps, from);
  } else if constexpr (kBits == 6) {
    dot6(sums, x, weights, steps, from);
  } else {
    dot4(sums, x, weights, steps, from);
  }
}

}  // namespace
}  // namespace hydra::avx2

// Included after the functions that they call.
#include "cpu/quantized/vectors.h"

#include "cpu/quantized/products.h"
#include "cpu/quantized/rows.h"
#endif
