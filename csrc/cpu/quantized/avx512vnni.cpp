// Products for processors with AVX-512 and its products of bytes (VNNI).
#include "cpu/isa.h"

#if HYDRA_X86
#define HYDRA_LEVEL avx512vnni
#define HYDRA_LANES 16
#define HYDRA_TARGET HYDRA_TARGET_AVX512VNNI
#include <algorithm>

#include "cpu/quantized/block.h"

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

// Few rows have two sums each: one would wait for itself.
template <int kBits, int kRows, int kVectors>
HYDRA_INLINE void dot(vi (&sums)[kRows][kVectors], const int8_t* x, const uint8_t* weights, int64_t steps,
                      const int32_t* from) {
  constexpr int64_t kStride = block_stride(kBits, 1), kSteps = kBits == 8 ? 2 : 1;
  constexpr int kSums = kRows <= 4 ? 2 : 1, kWords = kSteps * step_inputs(kBits) / 4;
  // With few products per cache line the hardware prefetcher is in time, and ours would only cost.
  const bool ahead = kRows > (kBits == 8 ? 4 : steps <= 4 ? 1 : 3);
  __m512i acc[kRows][kSums] = {};
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) acc[r][0] = _mm512_set1_epi32(from[r]);
#pragma GCC unroll 1
  for (int64_t step = 0; step < steps; step += kSteps, weights += kSteps * step_bytes(kBits), x += 4 * kWords) {
    __m512i values[kWords];
#pragma GCC unroll 2
    for (int i = 0; i < kSteps; ++i) unpack<kBits>(weights + i * step_bytes(kBits), values + i);
    for (int at = 0; ahead && at < kSteps * step_bytes(kBits); at += kStepBytes) prefetch_ahead(weights + at);
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
      for (int i = 0; i < kWords; ++i) {
        __m512i& sum = acc[r][i % kSums];
        sum = _mm512_dpbusd_epi32(sum, values[i], splat_word(x + r * kStride + 4 * i));
      }
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) sums[r][0] = kSums == 2 ? (vi)acc[r][0] + (vi)acc[r][1] : (vi)acc[r][0];
}

}  // namespace
}  // namespace hydra::avx512vnni

// Included after the functions that they call.
#include "cpu/quantized/vectors.h"

#include "cpu/quantized/products.h"
#include "cpu/quantized/rows.h"
#endif
