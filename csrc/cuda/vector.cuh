// Pieces of 16 bytes, or single elements, on their way through a kernel: loads through the read-only path, and the same
// conversions between storage types and float as on the host (to nearest even).
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace hydra::cuda {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;

// kCount elements in their storage type. 16 bytes move as one access.
template <class T, int kCount>
struct Piece {
  static_assert(kCount == 1 || kCount * sizeof(T) == 16);
  T values[kCount];

  // Loads memory that this kernel never writes.
  static __device__ Piece load(const T* source) {
    if constexpr (kCount == 1) return {*source};
    return of(__ldg(reinterpret_cast<const uint4*>(source)));
  }

  // Loads memory that this thread writes afterwards.
  static __device__ Piece load_own(const T* source) {
    if constexpr (kCount == 1) return {*source};
    const uint4 raw = *reinterpret_cast<const uint4*>(source);
    return of(raw);
  }

  static __device__ Piece of(uint4 raw) {
    Piece piece;
    memcpy(piece.values, &raw, sizeof(piece.values));
    return piece;
  }

  __device__ void store(T* target) const {
    if constexpr (kCount == 1) {
      *target = values[0];
    } else {
      uint4 raw;
      memcpy(&raw, values, sizeof(raw));
      *reinterpret_cast<uint4*>(target) = raw;
    }
  }
};

__device__ inline float to_float(float value) { return value; }
__device__ inline float to_float(__nv_bfloat16 value) { return __bfloat162float(value); }
__device__ inline float to_float(__half value) { return __half2float(value); }

template <class T>
__device__ T from_float(float value);
template <>
__device__ inline float from_float<float>(float value) {
  return value;
}
template <>
__device__ inline __nv_bfloat16 from_float<__nv_bfloat16>(float value) {
  return __float2bfloat16_rn(value);
}
template <>
__device__ inline __half from_float<__half>(float value) {
  return __float2half_rn(value);
}

// kCount floats as whole 16-byte loads where there are enough.
template <int kCount>
__device__ void load_floats(const float* source, float (&values)[kCount]) {
  if constexpr (kCount == 1) {
    values[0] = __ldg(source);
  } else {
#pragma unroll
    for (int i = 0; i < kCount; i += 4) {
      const float4 part = __ldg(reinterpret_cast<const float4*>(source + i));
      values[i] = part.x;
      values[i + 1] = part.y;
      values[i + 2] = part.z;
      values[i + 3] = part.w;
    }
  }
}

// Addresses of slots, see CacheView. Slots and blocks fit in 31 bits (csrc/api/cuda_cache.cpp), so divisions are short.
struct SlotMap {
  uint32_t num_slots;
  uint32_t block_size;
  int64_t block_bytes;
  int64_t row_bytes;

  __device__ bool has(int64_t slot) const { return static_cast<uint64_t>(slot) < num_slots; }
  __device__ int64_t offset(int64_t slot) const {
    const uint32_t block = static_cast<uint32_t>(slot) / block_size;
    return block * block_bytes + (static_cast<uint32_t>(slot) - block * block_size) * row_bytes;
  }
};

// A plain store: any thread's report will do, and 8 bytes arrive whole.
__device__ inline void report(uint64_t* word, uint64_t kind, uint64_t index) {
  *reinterpret_cast<volatile uint64_t*>(word) = kind << 56 | index;
}

}  // namespace hydra::cuda
