// The passes with AVX2: a weight is a signed upper part and its lower 8 bits, and one instruction adds two taps.
#include <cstring>

#include "cpu/image/passes.h"
#include "cpu/isa.h"

#if HYDRA_X86
#include <immintrin.h>

#define HYDRA_INLINE HYDRA_TARGET_AVX2 __attribute__((always_inline)) inline

namespace hydra {
namespace {

struct Sums {
  __m256i high, low;
};

// Upper parts of taps 0 and 2, lower ones, then the same of taps 1 and 3: 16 bits each.
void encode(const int32_t* weights, uint32_t* words) {
  for (int odd = 0; odd < 2; ++odd) {
    const uint32_t first = static_cast<uint32_t>(weights[odd]), second = static_cast<uint32_t>(weights[odd + 2]);
    words[2 * odd] = (first >> 8 & 0xffff) | (second >> 8 << 16);
    words[2 * odd + 1] = (first & 0xff) | (second & 0xff) << 16;
  }
}

HYDRA_INLINE Sums no_sums() { return {_mm256_setzero_si256(), _mm256_set1_epi32(kHalf)}; }

// `taps`: four bytes for each sum; `weights`: four vectors, see `encode`.
HYDRA_INLINE void add(Sums& sums, __m256i taps, const __m256i* weights) {
  const __m256i even = _mm256_and_si256(taps, _mm256_set1_epi32(0x00ff00ff));
  const __m256i odd = _mm256_srli_epi16(taps, 8);
  sums.high = _mm256_add_epi32(sums.high, _mm256_madd_epi16(even, weights[0]));
  sums.low = _mm256_add_epi32(sums.low, _mm256_madd_epi16(even, weights[1]));
  sums.high = _mm256_add_epi32(sums.high, _mm256_madd_epi16(odd, weights[2]));
  sums.low = _mm256_add_epi32(sums.low, _mm256_madd_epi16(odd, weights[3]));
}

HYDRA_INLINE __m256i finish(const Sums& sums) {
  return _mm256_srai_epi32(_mm256_add_epi32(_mm256_slli_epi32(sums.high, 8), sums.low), kWeightBits);
}

HYDRA_INLINE __m128i load_lane(const uint8_t* source) {
  return _mm_loadu_si128(reinterpret_cast<const __m128i*>(source));
}

HYDRA_TARGET_AVX2 void across(const AcrossCall& call) {
  // In each lane: four reds, four greens, four blues, nothing.
  const __m256i by_channel =
      _mm256_broadcastsi128_si256(_mm_setr_epi8(0, 3, 6, 9, 1, 4, 7, 10, 2, 5, 8, 11, -1, -1, -1, -1));
  const __m128i joined = _mm_setr_epi8(0, 1, 2, 4, 5, 6, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1);
  const uint32_t* words = call.words;
  for (int64_t group = 0; group < call.groups; ++group) {
    const int32_t* at = call.first + 2 * group;
    Sums sums[kRowsAtOnce];
    for (Sums& row : sums) row = no_sums();
    for (int64_t quad = 0; quad < call.quads; ++quad, words += 32) {
      __m256i weights[4];
      std::memcpy(weights, words, sizeof(weights));
      for (int row = 0; row < kRowsAtOnce; ++row) {
        const uint8_t* source = call.sources[row] + 12 * quad;
        const __m256i pixels = _mm256_inserti128_si256(_mm256_castsi128_si256(load_lane(source + at[0])),
                                                       load_lane(source + at[1]), 1);
        add(sums[row], _mm256_shuffle_epi8(pixels, by_channel), weights);
      }
    }
    for (int row = 0; row < kRowsAtOnce; ++row) {
      const __m256i values = finish(sums[row]);
      const __m128i words16 = _mm_packs_epi32(_mm256_castsi256_si128(values), _mm256_extracti128_si256(values, 1));
      const __m128i bytes = _mm_shuffle_epi8(_mm_packus_epi16(words16, words16), joined);
      _mm_storel_epi64(reinterpret_cast<__m128i*>(call.targets[row] + 6 * group), bytes);
    }
  }
}

HYDRA_TARGET_AVX2 void down(const DownCall& call) {
  for (int64_t begin = 0; begin < call.bytes; begin += 32) {
    Sums sums[4];
    for (Sums& part : sums) part = no_sums();
    for (int64_t quad = 0; quad < call.quads; ++quad) {
      __m256i rows[4], weights[4];
      for (int t = 0; t < 4; ++t) {
        rows[t] = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(call.rows[4 * quad + t] + begin));
        weights[t] = _mm256_set1_epi32(static_cast<int>(call.words[4 * quad + t]));
      }
      const __m256i ab0 = _mm256_unpacklo_epi8(rows[0], rows[1]), ab1 = _mm256_unpackhi_epi8(rows[0], rows[1]);
      const __m256i cd0 = _mm256_unpacklo_epi8(rows[2], rows[3]), cd1 = _mm256_unpackhi_epi8(rows[2], rows[3]);
      add(sums[0], _mm256_unpacklo_epi16(ab0, cd0), weights);
      add(sums[1], _mm256_unpackhi_epi16(ab0, cd0), weights);
      add(sums[2], _mm256_unpacklo_epi16(ab1, cd1), weights);
      add(sums[3], _mm256_unpackhi_epi16(ab1, cd1), weights);
    }
    // Packing saturates and undoes the order of unpacking.
    const __m256i front = _mm256_packs_epi32(finish(sums[0]), finish(sums[1]));
    const __m256i back = _mm256_packs_epi32(finish(sums[2]), finish(sums[3]));
    const __m256i bytes = _mm256_packus_epi16(front, back);
    if (call.bytes - begin >= 32) {
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(call.out + begin), bytes);
    } else {
      std::memcpy(call.out + begin, &bytes, call.bytes - begin);
    }
  }
}

constexpr Level kLevel = {2, 4, encode, across, down};

}  // namespace

const Level& avx2_passes() { return kLevel; }

}  // namespace hydra
#endif
