// The largest number of each row whose numbers are all finite, in one pass. Include after defining a level, see
// cpu/simd.h.
#pragma once

#include <limits>

#include "cpu/elementwise/elementwise.h"
#include "cpu/row_math.h"

namespace hydra::HYDRA_LEVEL {

template <int... kLane>
HYDRA_INLINE float largest_lane(vf value, std::integer_sequence<int, kLane...>) {
  float largest = value[0];
  ((largest = value[kLane] > largest ? value[kLane] : largest), ...);
  return largest;
}

HYDRA_TARGET int64_t best_of_row(const float* x, int64_t columns) {
  constexpr int kVectors = 4;
  constexpr int64_t kBlock = 16 * kVectors * kLanes;  // numbers; the block of the largest is searched again
  float best = -std::numeric_limits<float>::infinity();
  int64_t begin = 0;
  vf broken[kVectors] = {};  // 0, or NaN where a number is not finite
  for (int64_t block = 0; block < columns; block += kBlock) {
    const int64_t end = block + kBlock < columns ? block + kBlock : columns;
    vf largest[kVectors];
    for (int k = 0; k < kVectors; ++k) largest[k] = splat(best);
    int64_t i = block;
    for (; i + kVectors * kLanes <= end; i += kVectors * kLanes) {
      for (int k = 0; k < kVectors; ++k) {
        const vf value = load(x + i + k * kLanes);
        largest[k] = value > largest[k] ? value : largest[k];
        broken[k] += value * 0.0f;
      }
    }
    float found = best;
    for (int k = 0; k < kVectors; ++k) {
      const float lane = largest_lane(largest[k], Lanes());
      found = lane > found ? lane : found;
    }
    for (; i < end; ++i) {
      found = x[i] > found ? x[i] : found;
      broken[0][0] += x[i] * 0.0f;
    }
    if (found > best) {
      best = found;
      begin = block;
    }
  }
  if (sum((broken[0] + broken[1]) + (broken[2] + broken[3])) != 0.0f) return -1;
  while (x[begin] != best) ++begin;
  return begin;
}

HYDRA_TARGET void best_of_rows(const BestCall& call, int64_t begin, int64_t end) {
  for (int64_t row = begin; row < end; ++row) {
    call.best[row] = best_of_row(call.x + row * call.x_stride, call.columns);
  }
}

}  // namespace hydra::HYDRA_LEVEL
