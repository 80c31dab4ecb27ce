// The rotation of one instruction-set level. Include after defining a level, see cpu/simd.h.
#pragma once

#include "cpu/cache/cache.h"
#include "cpu/simd.h"

namespace hydra::HYDRA_LEVEL {

// Lanes [0, count) of both halves.
template <class T>
HYDRA_INLINE void rotate_part(const T* x, T* out, int64_t half, const float* cos, const float* sin, int count) {
  const vf first = load_part(x, count), second = load_part(x + half, count);
  const vf c = load_part(cos, count), s = load_part(sin, count);
  store_part(out, first * c - second * s, count);
  store_part(out + half, second * c + first * s, count);
}

template <class T>
HYDRA_INLINE void rotate_heads(const T* x, T* out, int64_t heads, int64_t dim, const float* cos, const float* sin) {
  const int64_t half = dim / 2;
  for (int64_t head = 0; head < heads; ++head, x += dim, out += dim) {
    int64_t i = 0;
    for (; i + kLanes <= half; i += kLanes) {
      const vf first = load(x + i), second = load(x + half + i);
      const vf c = load(cos + i), s = load(sin + i);
      store(out + i, first * c - second * s);
      store(out + half + i, second * c + first * s);
    }
    if (i < half) rotate_part(x + i, out + i, half, cos + i, sin + i, static_cast<int>(half - i));
  }
}

template <class T>
HYDRA_TARGET void rope_typed(const RopeCall& call, int64_t begin, int64_t end) {
  const CacheView& cache = call.cache;
  char* const k_plane = cache.plane(call.layer, 0);
  char* const v_plane = cache.plane(call.layer, 1);
  const int64_t dim = cache.head_dim;
  for (int64_t t = begin; t < end; ++t) {
    const float* cos = call.cos + t * call.cos_stride;
    const float* sin = call.sin + t * call.sin_stride;
    rotate_heads(static_cast<const T*>(call.q) + t * call.q_stride,
                 static_cast<T*>(call.out) + t * call.num_q_heads * dim, call.num_q_heads, dim, cos, sin);
    const int64_t slot = call.slots[t];
    if (slot < 0) continue;
    rotate_heads(static_cast<const T*>(call.k) + t * call.k_stride, reinterpret_cast<T*>(cache.row(k_plane, slot)),
                 cache.num_heads, dim, cos, sin);
    std::memcpy(cache.row(v_plane, slot), static_cast<const T*>(call.v) + t * call.v_stride,
                static_cast<size_t>(cache.row_bytes()));
  }
}

void rope_tokens(const RopeCall& call, int64_t begin, int64_t end) {
  switch (call.cache.dtype) {
    case DType::f32:
      return rope_typed<float>(call, begin, end);
    case DType::bf16:
      return rope_typed<bf16_t>(call, begin, end);
    default:
      return rope_typed<f16_t>(call, begin, end);
  }
}

}  // namespace hydra::HYDRA_LEVEL
