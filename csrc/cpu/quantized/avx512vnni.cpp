// Products for processors with AVX-512 and its products of bytes (VNNI).
#include "cpu/isa.h"

#if HYDRA_X86
#define HYDRA_LEVEL avx512vnni
#define HYDRA_LANES 16
#define HYDRA_TARGET HYDRA_TARGET_AVX512VNNI
#include <algorithm>

#include "cpu/quantized/quantized.h"
#include "cpu/simd.h"

namespace hydra::avx512vnni {
namespace {

constexpr int kMostRows = 8;
constexpr int vectors_of(int) { return 1; }
constexpr int number_bytes(int) { return 1; }

HYDRA_INLINE void store_numbers(int8_t* target, vi numbers, int) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(target), _mm512_cvtepi32_epi8((__m512i)numbers));
}

HYDRA_INLINE __m512i splat_word(const int8_t* source) {
  int32_t word;
  std::memcpy(&word, source, 4);
  return _mm512_set1_epi32(word);
}

// Two steps of 8 bits, or one of 4. Few rows have two sums each: one would wait for itself.
template <int kBits, int kRows, int kVectors>
HYDRA_INLINE void dot(vi (&sums)[kRows][kVectors], const int8_t* x, const uint8_t* weights, int64_t steps) {
  constexpr int64_t kStride = block_stride(kBits, 1), kSteps = kBits == 8 ? 2 : 1;
  constexpr int kSums = kRows <= 4 ? 2 : 1;
  __m512i acc[kRows][kSums] = {};
#pragma GCC unroll 1
  for (int64_t step = 0; step < steps; step += kSteps, weights += kSteps * kStepBytes, x += 8) {
    __m512i first = _mm512_load_si512(weights), second;
    prefetch_piece(weights);
    if constexpr (kBits == 8) {
      prefetch_piece(weights + kStepBytes);
      second = _mm512_load_si512(weights + kStepBytes);
    } else {
      second = (__m512i)((vu)first >> 4 & 0x0f0f0f0fu);
      first = (__m512i)((vu)first & 0x0f0f0f0fu);
    }
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      acc[r][0] = _mm512_dpbusd_epi32(acc[r][0], first, splat_word(x + r * kStride));
      acc[r][kSums - 1] = _mm512_dpbusd_epi32(acc[r][kSums - 1], second, splat_word(x + r * kStride + 4));
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) sums[r][0] = kSums == 2 ? (vi)acc[r][0] + (vi)acc[r][1] : (vi)acc[r][0];
}

}  // namespace
}  // namespace hydra::avx512vnni

// Behind what they call.
#include "cpu/quantized/vectors.h"

#include "cpu/quantized/products.h"
#include "cpu/quantized/rows.h"
#endif
