// Vectors over one row: whole ones and the part that is left, sums of squares, the rotation of pairs. Shared by the
// norms and by what is done to keys on their way into a cache. Include after defining a level, see cpu/simd.h.
#pragma once

#include <cmath>

#include "cpu/simd.h"

namespace hydra::HYDRA_LEVEL {

template <class T>
HYDRA_INLINE vf load_some(const T* source, int count) {
  return count == kLanes ? load(source) : load_part(source, count);
}

template <class T>
HYDRA_INLINE void store_some(T* target, vf value, int count) {
  if (count == kLanes) {
    store(target, value);
  } else {
    store_part(target, value, count);
  }
}

// Sum of (x - center)^2 over a row; four partial sums hide the latency of the additions.
template <class T>
HYDRA_TARGET float sum_of_squares(const T* x, int64_t columns, float center) {
  vf sums[4] = {};
  int64_t i = 0;
  for (; i + 4 * kLanes <= columns; i += 4 * kLanes) {
    for (int part = 0; part < 4; ++part) {
      const vf value = load(x + i + part * kLanes) - center;
      sums[part] += value * value;
    }
  }
  for (; i + kLanes <= columns; i += kLanes) {
    const vf value = load(x + i) - center;
    sums[0] += value * value;
  }
  if (i < columns) {
    const int left = static_cast<int>(columns - i);
    const vf value = clear_behind(load_part(x + i, left) - center, left, Lanes());
    sums[0] += value * value;
  }
  return sum((sums[0] + sums[1]) + (sums[2] + sums[3]));
}

// The factor that makes a row's mean square 1.
template <class T>
HYDRA_TARGET float rms_scale(const T* x, int64_t columns, float eps) {
  return 1.0f / std::sqrt(sum_of_squares(x, columns, 0.0f) / static_cast<float>(columns) + eps);
}

// round(x * scale) * weight of the first `count` lanes; with a float32 weight nothing is rounded before the product.
template <class T, class W>
HYDRA_INLINE vf load_normed(const T* x, const W* weight, float scale, int count) {
  const vf normed = load_some(x, count) * scale;
  if constexpr (std::is_same_v<T, W>) return rounded<T>(normed) * load_some(weight, count);
  return normed * load_some(weight, count);
}

// Pairs [0, count) of (x[i], x[i + half]).
template <bool kNorm, class T, class U>
HYDRA_INLINE void rotate_pairs(const T* x, U* out, int64_t half, const float* cos, const float* sin, const T* weight,
                               float scale, int count) {
  vf first, second;
  if constexpr (kNorm) {  // rounded as rms_norm would store it
    first = rounded<T>(load_normed(x, weight, scale, count));
    second = rounded<T>(load_normed(x + half, weight + half, scale, count));
  } else {
    first = load_some(x, count);
    second = load_some(x + half, count);
  }
  const vf c = load_some(cos, count), s = load_some(sin, count);
  // An explicit fused multiply-add, so that every rotation rounds alike: the compiler could fuse either product.
  store_some(out, fused_multiply_add(first, c, -(second * s)), count);
  store_some(out + half, fused_multiply_add(second, c, first * s), count);
}

// One head, pairs (i, i + half), turned by its angles: `out` = rotate(x), with kNorm rotate(rms_norm(x)).
template <bool kNorm, class T, class U>
HYDRA_INLINE void rotate_head(const T* x, U* out, int64_t half, const float* cos, const float* sin, const T* weight,
                              float eps) {
  const float scale = kNorm ? rms_scale(x, 2 * half, eps) : 1.0f;
  int64_t i = 0;
  for (; i + kLanes <= half; i += kLanes) {
    rotate_pairs<kNorm>(x + i, out + i, half, cos + i, sin + i, weight + i, scale, kLanes);
  }
  if (i == half) return;
  if (half < kLanes) {
    rotate_pairs<kNorm>(x, out, half, cos, sin, weight, scale, static_cast<int>(half));
  } else {  // a whole vector that overlaps pairs already done: faster than a part of one
    i = half - kLanes;
    rotate_pairs<kNorm>(x + i, out + i, half, cos + i, sin + i, weight + i, scale, kLanes);
  }
}

}  // namespace hydra::HYDRA_LEVEL
