// Packed bf16 tiles, for levels with a bf16 dot product of pairs. Include after defining a level with 16 lanes.
//
// Packed keys: [kKeyTile / 16][pairs of dimensions][16 keys] of pairs. Packed values: [sums_width / 16][pairs of
// keys][16 columns] of pairs; interleaving two rows inside 128-bit lanes leaves the 32 dimensions of a chunk in the
// order 0-3, 8-11, 16-19, 24-27 and 4-7, 12-15, 20-23, 28-31, which store_result undoes.
#pragma once

#include "cpu/attention/float_math.h"

namespace hydra::HYDRA_LEVEL {

struct Bf16Tiles {
  using Stored = bf16_t;
  using Cached = bf16_t;
  static constexpr bool kScaled = false;
  using Element = bf16_t;
  using Keys = const bf16_t*;
  static constexpr bool kFine = false;
  static constexpr bool kByRows = false;
  static constexpr bool kInTurns = false;
  static constexpr int kChunk = 32;  // dimensions per vector

  static constexpr int64_t query_width(int64_t dim) { return (dim + kChunk - 1) / kChunk * kChunk; }
  static constexpr int64_t sums_width(int64_t dim) { return (dim + kChunk - 1) / kChunk * kChunk; }

  HYDRA_INLINE static __m512i load_at(const bf16_t* row, int64_t d, int64_t dim) {
    if (d + kChunk <= dim) return _mm512_loadu_si512(row + d);
    return _mm512_maskz_loadu_epi16(static_cast<__mmask32>((1u << (dim - d)) - 1), row + d);
  }

  HYDRA_INLINE static void pack_query(const bf16_t* row, int64_t dim, int64_t column, bf16_t* packed) {
    std::memcpy(packed + column * query_width(dim), row, static_cast<size_t>(dim) * 2);
  }

  HYDRA_TARGET static Keys pack_keys(const bf16_t* const* rows, int count, int64_t dim, bf16_t* memory) {
    bf16_t* packed = memory;
    for (int first = 0; first < count; first += kLanes) {
      for (int64_t d = 0; d < dim; d += kChunk, packed += kLanes * kChunk) {
        vf block[kLanes];  // bit patterns of pairs: only moved, never computed with
#pragma GCC unroll 16
        for (int j = 0; j < kLanes; ++j) block[j] = (vf)load_at(rows[first + j], d, dim);
        transpose(block);
#pragma GCC unroll 16
        for (int i = 0; i < kLanes; ++i) _mm512_storeu_ps(packed + i * kChunk, (__m512)block[i]);
      }
    }
    return memory;
  }

  HYDRA_TARGET static void pack_values(const bf16_t* const* rows, int count, int64_t dim, bf16_t* packed,
                                       Prefetcher& next) {
    constexpr int64_t kGroup = kKeyTile * kLanes;  // elements of 16 columns
    const int64_t lines = next.lines() * 3 / 4 / (kKeyTile / 2 * ((dim + kChunk - 1) / kChunk));
    for (int64_t d = 0; d < dim; d += kChunk, packed += 2 * kGroup) {
      for (int j = 0; j < count; j += 2) {
        next.lines(lines);
        const __m512i even = load_at(rows[j], d, dim), odd = load_at(rows[j + 1], d, dim);
        _mm512_storeu_si512(packed + j * kLanes, _mm512_unpacklo_epi16(even, odd));
        _mm512_storeu_si512(packed + kGroup + j * kLanes, _mm512_unpackhi_epi16(even, odd));
      }
    }
  }

  template <int kCount>
  HYDRA_INLINE static void store_weights(bf16_t* target, const vf* weights) {
#pragma GCC unroll 4
    for (int i = 0; i < kCount; i += 2) {
      const __m512i both = (__m512i)_mm512_cvtne2ps_pbh((__m512)weights[i + 1], (__m512)weights[i]);
      _mm512_storeu_si512(target + i * kLanes, both);
    }
  }

  HYDRA_INLINE static void store_result(const float* sums, float factor, int64_t dim, bf16_t* row) {
    const __m512i first = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
    const __m512i second = _mm512_setr_epi32(8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31);
    for (int64_t d = 0; d < dim; d += kChunk) {
      const __m512 low = _mm512_loadu_ps(sums + d), high = _mm512_loadu_ps(sums + d + kLanes);
      const vf lower = (vf)_mm512_permutex2var_ps(low, first, high) * factor;
      const vf upper = (vf)_mm512_permutex2var_ps(low, second, high) * factor;
      const __m512i both = (__m512i)_mm512_cvtne2ps_pbh((__m512)upper, (__m512)lower);
      const int64_t left = dim - d;
      const __mmask32 some = left >= kChunk ? ~__mmask32{0} : static_cast<__mmask32>((1u << left) - 1);
      _mm512_mask_storeu_epi16(row + d, some, both);
    }
  }
};

}  // namespace hydra::HYDRA_LEVEL
