// Rows of a quantized cache: int8 with one scale per token and head. Include after defining a level, see cpu/simd.h.
//
// A scale belongs to one token: a block is filled token by token, in chunks that depend on how a prompt was cut, and a
// scale for all of a block would change what earlier tokens are.
#pragma once

#include <cmath>
#include <limits>

#include "cpu/cache/cache.h"
#include "cpu/row_math.h"

namespace hydra::HYDRA_LEVEL {

constexpr int64_t kMaxRotated = 1024;  // head dim of a quantized cache, checked by csrc/api/cache.cpp
typedef int8_t vq __attribute__((vector_size(HYDRA_LANES)));

// out = round(x / scale), to nearest even; returns the scale.
template <class T>
HYDRA_INLINE float quantize(const T* x, int64_t dim, int8_t* out) {
  vi largest = {};  // magnitudes as integers, whose order is theirs and ends with infinity and NaN
  for (int64_t d = 0; d < dim; d += kLanes) {
    const vi bits = (vi)load_some(x + d, static_cast<int>(dim - d < kLanes ? dim - d : kLanes)) & 0x7fffffff;
    largest = bits > largest ? bits : largest;
  }
  int32_t top = 0;
  for (int lane = 0; lane < kLanes; ++lane) top = largest[lane] > top ? largest[lane] : top;
  if (top >= 0x7f800000) {
    std::memset(out, 0, static_cast<size_t>(dim));
    return std::numeric_limits<float>::quiet_NaN();
  }
  const float magnitude = float_from_bits(static_cast<uint32_t>(top)) / 127.0f;
  const float scale = magnitude < 0x1p-126f ? 0x1p-126f : magnitude;
  const float magic = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer, kept in the low mantissa bits
  for (int64_t d = 0; d < dim; d += kLanes) {
    const int count = static_cast<int>(dim - d < kLanes ? dim - d : kLanes);
    const vi rounded = (vi)(load_some(x + d, count) / splat(scale) + splat(magic)) - 0x4b400000;
    const vq bytes = __builtin_convertvector(rounded, vq);
    std::memcpy(out + d, &bytes, static_cast<size_t>(count));
  }
  return scale;
}

// Quantizes all heads of one token.
template <class T>
HYDRA_INLINE void quantize_row(const CacheView& cache, char* plane, int64_t slot, const T* x) {
  int8_t* row = reinterpret_cast<int8_t*>(cache.row(plane, slot));
  float* scales = cache.scales(plane, slot);
  for (int64_t head = 0; head < cache.num_heads; ++head) {
    const int64_t first = head * cache.head_dim;
    scales[head * cache.block_size] = quantize(x + first, cache.head_dim, row + first);
  }
}

}  // namespace hydra::HYDRA_LEVEL
