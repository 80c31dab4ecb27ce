// Stands in for CUDA's header of this name: the words of device code for a C++ compiler. A launch is translated by
// ../build.py; __grid_constant__ parameters are references there, which nothing may be written through.
#pragma once

#include <cstring>

#include <cmath>
#include <cstdint>

#include "cuda_runtime_api.h"
#include "executor.h"

#define __global__
#define __device__

using std::memcpy;

struct uint3 {
  unsigned x, y, z;
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
struct alignas(16) float4 {
  float x, y, z, w;
};

inline constexpr int warpSize = 32;

#define threadIdx (::host_cuda::thread_index())
#define blockIdx (::host_cuda::block_index())
#define blockDim (::host_cuda::block_size())
#define gridDim (::host_cuda::grid_size())

// The read-only path: once the launch is over, what was read here must still be there.
template <class T>
T __ldg(const T* source) {
  const T value = *source;
  ::host_cuda::note_read_only(source, &value, sizeof(T));
  return value;
}

template <class T>
T __shfl_xor_sync(unsigned mask, T value, int lane_mask) {
  static_assert(sizeof(T) == 4);
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  bits = ::host_cuda::shuffle_xor(mask, bits, lane_mask);
  std::memcpy(&value, &bits, sizeof(bits));
  return value;
}

inline void __syncthreads() { ::host_cuda::barrier(); }

inline float __fmul_rn(float a, float b) { return a * b; }  // compiled without contraction
