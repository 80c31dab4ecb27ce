// What is multiplied at a time, and how the integer sums of a group are added to the result. Include after defining a
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

// A block of weights: whole groups, or one piece of a group; and what belongs to it of some rows, from the first on.
struct Block {
  const uint8_t* weights;
  int64_t steps;        // of a group or of the piece
  int64_t groups;       // 1 for a piece
  int64_t group_bytes;  // from one group to the next
  bool first, last;     // of the pieces of its group
  int64_t offsets_at;   // from a group's scales; 0: there are none
  const int8_t* x;
  const float* x_steps;  // of the first group, [rows][all groups], as the next two
  const int32_t* zeros;
  const float* row_sums;
  int64_t all_groups;
  float* sums;       // [rows][32]
  int32_t* partial;  // [rows][32], sums of the pieces before
};

// Adds the sums `total` of a group of the block for row r and columns `here` and on; its scales are at `scales`.
template <class Scale>
HYDRA_INLINE void add_group(const Block& block, const Scale* scales, int64_t group, int r, int here, vi total) {
  const int64_t at = r * block.all_groups + group;
  float* sums = block.sums + r * kPanel + here;
  const vf factors = load(scales + here) * block.x_steps[at];
  vf result = fused(__builtin_convertvector(total + block.zeros[at], vf), factors, load(sums));
  if (block.offsets_at) {
    const char* offsets = reinterpret_cast<const char*>(scales) + block.offsets_at;
    result = fused(splat(block.row_sums[at]), load(reinterpret_cast<const float*>(offsets) + here), result);
  }
  store(sums, result);
}

}  // namespace hydra::HYDRA_LEVEL
