// The passes with AVX-512 and VNNI: a weight is three signed bytes, and one instruction adds four taps to 16 sums each.
#include "cpu/image/passes.h"
#include "cpu/isa.h"

#if HYDRA_X86
#include <immintrin.h>

#define HYDRA_TARGET HYDRA_TARGET_AVX512VNNI
#define HYDRA_INLINE HYDRA_TARGET __attribute__((always_inline)) inline

namespace hydra {
namespace {

struct Sums {
  __m512i high, middle, low;
};

// Digits to base 256 from -128 to 127, highest first; a weight below 1.99 * 2^22 has three.
void encode(const int32_t* weights, uint32_t* words) {
  words[0] = words[1] = words[2] = 0;
  for (int t = 0; t < 4; ++t) {
    int32_t rest = weights[t];
    for (int digit = 2; digit >= 0; --digit) {
      const int8_t lowest = static_cast<int8_t>(rest);
      words[digit] |= static_cast<uint32_t>(static_cast<uint8_t>(lowest)) << (8 * t);
      rest = (rest - lowest) >> 8;
    }
  }
}

HYDRA_INLINE Sums no_sums() { return {_mm512_setzero_si512(), _mm512_setzero_si512(), _mm512_set1_epi32(kHalf)}; }

HYDRA_INLINE void add(Sums& sums, __m512i taps, __m512i high, __m512i middle, __m512i low) {
  sums.high = _mm512_dpbusd_epi32(sums.high, taps, high);
  sums.middle = _mm512_dpbusd_epi32(sums.middle, taps, middle);
  sums.low = _mm512_dpbusd_epi32(sums.low, taps, low);
}

HYDRA_INLINE __m512i finish(const Sums& sums) {
  const __m512i upper = _mm512_add_epi32(_mm512_slli_epi32(sums.high, 8), sums.middle);
  return _mm512_srai_epi32(_mm512_add_epi32(_mm512_slli_epi32(upper, 8), sums.low), kWeightBits);
}

HYDRA_INLINE __m128i load_lane(const uint8_t* source) {
  return _mm_loadu_si128(reinterpret_cast<const __m128i*>(source));
}

// Four pixels at four places, 16 bytes each.
HYDRA_INLINE __m512i load_lanes(const uint8_t* row, const int32_t* at) {
  __m512i lanes = _mm512_castsi128_si512(load_lane(row + at[0]));
  lanes = _mm512_inserti32x4(lanes, load_lane(row + at[1]), 1);
  lanes = _mm512_inserti32x4(lanes, load_lane(row + at[2]), 2);
  return _mm512_inserti32x4(lanes, load_lane(row + at[3]), 3);
}

HYDRA_TARGET void across(const AcrossCall& call) {
  // In each lane: four reds, four greens, four blues, nothing.
  const __m512i by_channel = _mm512_maskz_broadcast_i32x4(
      0xffff, _mm_setr_epi8(0, 3, 6, 9, 1, 4, 7, 10, 2, 5, 8, 11, -1, -1, -1, -1));
  const __m128i joined = _mm_setr_epi8(0, 1, 2, 4, 5, 6, 8, 9, 10, 12, 13, 14, -1, -1, -1, -1);
  const uint32_t* words = call.words;
  for (int64_t group = 0; group < call.groups; ++group) {
    const int32_t* at = call.first + 4 * group;
    Sums sums[kRowsAtOnce];
    for (Sums& row : sums) row = no_sums();
    for (int64_t quad = 0; quad < call.quads; ++quad, words += 48) {
      const __m512i high = _mm512_loadu_si512(words);
      const __m512i middle = _mm512_loadu_si512(words + 16);
      const __m512i low = _mm512_loadu_si512(words + 32);
      for (int row = 0; row < kRowsAtOnce; ++row) {
        const __m512i pixels = load_lanes(call.sources[row] + 12 * quad, at);
        add(sums[row], _mm512_shuffle_epi8(pixels, by_channel), high, middle, low);
      }
    }
    for (int row = 0; row < kRowsAtOnce; ++row) {
      const __m512i values = _mm512_max_epi32(finish(sums[row]), _mm512_setzero_si512());
      const __m128i bytes = _mm_shuffle_epi8(_mm512_cvtusepi32_epi8(values), joined);
      _mm_storeu_si128(reinterpret_cast<__m128i*>(call.targets[row] + 12 * group), bytes);
    }
  }
}

HYDRA_TARGET void down(const DownCall& call) {
  for (int64_t begin = 0; begin < call.bytes; begin += 64) {
    Sums sums[4];
    for (Sums& part : sums) part = no_sums();
    for (int64_t quad = 0; quad < call.quads; ++quad) {
      const uint8_t* const* rows = call.rows + 4 * quad;
      const __m512i a = _mm512_loadu_si512(rows[0] + begin), b = _mm512_loadu_si512(rows[1] + begin);
      const __m512i c = _mm512_loadu_si512(rows[2] + begin), d = _mm512_loadu_si512(rows[3] + begin);
      const __m512i ab0 = _mm512_unpacklo_epi8(a, b), ab1 = _mm512_unpackhi_epi8(a, b);
      const __m512i cd0 = _mm512_unpacklo_epi8(c, d), cd1 = _mm512_unpackhi_epi8(c, d);
      const __m512i high = _mm512_set1_epi32(static_cast<int>(call.words[3 * quad]));
      const __m512i middle = _mm512_set1_epi32(static_cast<int>(call.words[3 * quad + 1]));
      const __m512i low = _mm512_set1_epi32(static_cast<int>(call.words[3 * quad + 2]));
      add(sums[0], _mm512_unpacklo_epi16(ab0, cd0), high, middle, low);
      add(sums[1], _mm512_unpackhi_epi16(ab0, cd0), high, middle, low);
      add(sums[2], _mm512_unpacklo_epi16(ab1, cd1), high, middle, low);
      add(sums[3], _mm512_unpackhi_epi16(ab1, cd1), high, middle, low);
    }
    // Packing saturates and undoes the order of unpacking.
    const __m512i front = _mm512_packs_epi32(finish(sums[0]), finish(sums[1]));
    const __m512i back = _mm512_packs_epi32(finish(sums[2]), finish(sums[3]));
    const int64_t left = call.bytes - begin;
    const __mmask64 wanted = left >= 64 ? ~0ull : (1ull << left) - 1;
    _mm512_mask_storeu_epi8(call.out + begin, wanted, _mm512_packus_epi16(front, back));
  }
}

constexpr Level kLevel = {4, 3, encode, across, down};

}  // namespace

const Level& avx512_passes() { return kLevel; }

}  // namespace hydra
#endif
