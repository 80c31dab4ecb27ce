// The unit of a product, and how the integer sums of a group are added to the result. Include after defining a
// level, see cpu/simd.h.
#pragma once

#include "cpu/quantized/quantized.h"
#include "cpu/simd.h"

namespace hydra::HYDRA_LEVEL {

// Exactly rounded at every level: the only float32 arithmetic whose order and contraction matter.
HYDRA_INLINE vf fused(vf a, vf b, vf c) {
#if HYDRA_LANES == 16
  return (vf)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif HYDRA_LANES == 8
  return (vf)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
  for (int lane = 0; lane < kLanes; ++lane) c[lane] = __builtin_fmaf(a[lane], b[lane], c[lane]);
  return c;
#endif
}

#if HYDRA_LANES == 16
// A step of a tile as vectors of bytes, of four inputs each.
template <int kBits>
HYDRA_INLINE void unpack(const uint8_t* step, __m512i* values) {
  const vu first = (vu)_mm512_load_si512(step);
  if constexpr (kBits == 8) {
    values[0] = (__m512i)first;
    return;
  }
  values[0] = (__m512i)(first & 0x0f0f0f0fu);
  values[1] = (__m512i)(first >> 4 & 0x0f0f0f0fu);
  if constexpr (kBits == 6) {
    const vu second = (vu)_mm512_load_si512(step + kStepBytes), upper = (vu)_mm512_load_si512(step + 2 * kStepBytes);
    values[0] = (__m512i)((vu)values[0] | (upper << 4 & 0x30303030u));
    values[1] = (__m512i)((vu)values[1] | (upper << 2 & 0x30303030u));
    values[2] = (__m512i)((second & 0x0f0f0f0fu) | (upper & 0x30303030u));
    values[3] = (__m512i)((second >> 4 & 0x0f0f0f0fu) | (upper >> 2 & 0x30303030u));
  }
}
#endif

// A block of weights: whole groups, or one piece of a group; and what belongs to it of some rows, from the first on.
struct Block {
  const uint8_t* weights;
  int64_t steps;        // of a group or of the piece
  int64_t groups;       // 1 for a piece
  int64_t group_bytes;  // from one group to the next
  bool first, last;     // of the pieces of its group
  const uint8_t* scales;
  int64_t scales_bytes;  // between the scales of consecutive groups
  int64_t offsets_at;    // from a group's scales; 0: there are none
  const int8_t* x;
  int64_t low;           // from the numbers of x to their lower bytes
  const float* x_steps;  // [parts][all rows] from the first part and row on, as the next three
  const int32_t* zeros;
  const int32_t* low_zeros;
  const uint8_t* has_low;
  const uint8_t* any_low;  // [rows]
  const float* row_sums;   // [groups][all rows]
  int64_t all_rows;
  float* sums;     // [rows][32]
  float* partial;  // [rows][32], of the parts of a group before

  void next_rows(int64_t some, int64_t stride) {
    x += some * stride;
    x_steps += some;
    zeros += some;
    low_zeros += some;
    has_low += some;
    any_low += some;
    row_sums += some;
    sums += some * kPanel;
    partial += some * kPanel;
  }
  void next_parts(int64_t some) {
    x_steps += some * all_rows;
    zeros += some * all_rows;
    low_zeros += some * all_rows;
    has_low += some * all_rows;
  }
};

struct GroupFactors {
  vf scales, offsets;
};

// Factors of the columns from `here` on, of a group whose scales are at `scales`.
template <bool kOffsets, class Scale>
HYDRA_INLINE GroupFactors factors_of(const Block& block, const Scale* scales, int here) {
  GroupFactors factors{load(scales + here), vf{}};
  if constexpr (kOffsets) {
    const char* offsets = reinterpret_cast<const char*>(scales) + block.offsets_at;
    factors.offsets = load(reinterpret_cast<const float*>(offsets) + here);
  }
  return factors;
}

// Numbers of 16 bits from sums of their upper and lower bytes, in units of the upper ones.
HYDRA_INLINE vf joined(vi upper, vi low) {
  return __builtin_convertvector((vi)(((vu)upper << 8) + (vu)low), vf) * splat(0x1p-8f);
}

// Adds the sums `total` of a group of the block for row r and columns `here` and on.
template <bool kOffsets>
HYDRA_INLINE void add_group(const Block& block, const GroupFactors& factors, int64_t group, int64_t r, int here,
                            vf total) {
  float* sums = block.sums + r * kPanel + here;
  vf result = fused(total, factors.scales, load(sums));
  if constexpr (kOffsets) result = fused(splat(block.row_sums[group * block.all_rows + r]), factors.offsets, result);
  store(sums, result);
}

}  // namespace hydra::HYDRA_LEVEL
