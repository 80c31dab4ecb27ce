// Computation of one instruction-set level on rows into caches (rotation, norm) and out of them (sums).
// Include after defining a level, see cpu/simd.h.
#pragma once

#include "cpu/cache/cache.h"
#include "cpu/cache/quantize.h"
#include "cpu/row_math.h"

namespace hydra::HYDRA_LEVEL {

template <class T, class U>
HYDRA_INLINE void rotate_one(const T* x, U* out, int64_t dim, const float* cos, const float* sin, const T* weight,
                             float eps) {
  if (weight) {
    rotate_head<true>(x, out, dim / 2, cos, sin, weight, eps);
  } else {
    rotate_head<false>(x, out, dim / 2, cos, sin, weight, eps);
  }
}

template <class T>
HYDRA_INLINE void rotate_heads(const T* x, T* out, int64_t heads, int64_t dim, const float* cos, const float* sin,
                               const void* norm, float eps) {
  const T* weight = static_cast<const T*>(norm);
  for (int64_t head = 0; head < heads; ++head) {
    rotate_one(x + head * dim, out + head * dim, dim, cos, sin, weight, eps);
  }
}

// Keys and values of one token into a quantized cache: keys are rotated in float32 and rounded to integers alone.
template <class T>
HYDRA_TARGET void rope_quantized(const RopeCall& call, int64_t t, const float* cos, const float* sin) {
  const CacheView& cache = call.cache;
  const int64_t dim = cache.head_dim, slot = call.slots[t];
  const T* k = static_cast<const T*>(call.k) + t * call.k_stride;
  const T* weight = static_cast<const T*>(call.k_norm);
  char* const plane = cache.plane(call.layer, 0);
  int8_t* row = reinterpret_cast<int8_t*>(cache.row(plane, slot));
  float* scales = cache.scales(plane, slot);
  float rotated[kMaxRotated];
  for (int64_t head = 0; head < cache.num_heads; ++head) {
    rotate_one(k + head * dim, rotated, dim, cos, sin, weight, call.eps);
    scales[head * cache.block_size] = quantize(rotated, dim, row + head * dim);
  }
  quantize_row(cache, cache.plane(call.layer, 1), slot, static_cast<const T*>(call.v) + t * call.v_stride);
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
                 static_cast<T*>(call.out) + t * call.num_q_heads * dim, call.num_q_heads, dim, cos, sin, call.q_norm,
                 call.eps);
    const int64_t slot = call.slots[t];
    if (slot < 0) continue;
    if (cache.quantized) {
      rope_quantized<T>(call, t, cos, sin);
      continue;
    }
    rotate_heads(static_cast<const T*>(call.k) + t * call.k_stride, reinterpret_cast<T*>(cache.row(k_plane, slot)),
                 cache.num_heads, dim, cos, sin, call.k_norm, call.eps);
    std::memcpy(cache.row(v_plane, slot), static_cast<const T*>(call.v) + t * call.v_stride,
                static_cast<size_t>(cache.row_bytes()));
  }
}

template <class T>
HYDRA_TARGET void add_typed(const MergeCall& call, int64_t begin, int64_t end) {
  char* const plane = call.cache.plane(call.layer, 0);
  const int64_t columns = call.cache.num_heads * call.cache.head_dim;
  for (int64_t m = begin; m < end; ++m) {
    if (call.slots[m] < 0) continue;
    T* row = static_cast<T*>(call.hidden) + call.targets[m] * columns;
    const T* feature = reinterpret_cast<const T*>(call.cache.row(plane, call.slots[m]));
    for (int64_t i = 0; i < columns; i += kLanes) {
      const int count = static_cast<int>(columns - i < kLanes ? columns - i : kLanes);
      store_some(row + i, load_some(row + i, count) + load_some(feature + i, count), count);
    }
  }
}

template <class T>
HYDRA_TARGET void write_typed(const WriteCall& call, int64_t begin, int64_t end) {
  const CacheView& cache = call.cache;
  for (int64_t t = begin; t < end; ++t) {
    if (call.slots[t] < 0) continue;
    for (int64_t x = 0; x < cache.num_tensors; ++x) {
      const char* row = call.sources[x].data + t * call.sources[x].stride;
      quantize_row(cache, cache.plane(call.layer, x), call.slots[t], reinterpret_cast<const T*>(row));
    }
  }
}

void write_quantized(const WriteCall& call, int64_t begin, int64_t end) {
  switch (call.cache.dtype) {
    case DType::f32:
      return write_typed<float>(call, begin, end);
    case DType::bf16:
      return write_typed<bf16_t>(call, begin, end);
    default:
      return write_typed<f16_t>(call, begin, end);
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

void add_merged(const MergeCall& call, int64_t begin, int64_t end) {
  switch (call.cache.dtype) {
    case DType::f32:
      return add_typed<float>(call, begin, end);
    case DType::bf16:
      return add_typed<bf16_t>(call, begin, end);
    default:
      return add_typed<f16_t>(call, begin, end);
  }
}

}  // namespace hydra::HYDRA_LEVEL
