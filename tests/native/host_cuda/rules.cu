// Kernels that keep or break the rules of executor.h. For build.py alone: it is no file for a CUDA compiler.
#include "rules.h"

#include <cuda_runtime.h>

#include <map>

namespace host_cuda {
namespace {

struct Words {
  uint32_t* data;
};

__global__ void __launch_bounds__(512) nothing(const __grid_constant__ Words words) {
  if (words.data != nullptr) words.data[0] = 1;
}

// Every lane gets the sum of its group of `lanes`, which is words[0]; groups end at different times.
__global__ void __launch_bounds__(1024) sum_groups(const __grid_constant__ Words words) {
  const uint32_t lanes = words.data[0], group = threadIdx.x % 32 / lanes;
  const uint32_t mask = (lanes == 32 ? ~0u : (1u << lanes) - 1) << group * lanes;
  uint32_t sum = threadIdx.x;
  for (uint32_t round = 0; round <= group; ++round) {
    sum = threadIdx.x;
    for (uint32_t step = lanes / 2; step > 0; step /= 2) sum += __shfl_xor_sync(mask, sum, step);
  }
  words.data[1 + threadIdx.x] = sum;
}

__global__ void __launch_bounds__(1024) one_lane_leaves(const __grid_constant__ Words words) {
  if (threadIdx.x == words.data[0]) return;
  words.data[1] = __shfl_xor_sync(~0u, 1u, 1);
}

__global__ void __launch_bounds__(1024) mask_without_itself(const __grid_constant__ Words words) {
  words.data[1] = __shfl_xor_sync(words.data[0], 1u, 1);
}

__global__ void __launch_bounds__(1024) masks_differ(const __grid_constant__ Words words) {
  words.data[1] = __shfl_xor_sync(threadIdx.x < 16 ? ~0u : 0xffff0000u, 1u, 1);
}

__global__ void __launch_bounds__(1024) partner_outside(const __grid_constant__ Words words) {
  words.data[1] = __shfl_xor_sync(threadIdx.x % 2 == 0 ? 0x55555555u : 0xaaaaaaaau, 1u, words.data[0]);
}

// A thread reads what its neighbour wrote before the barrier.
__global__ void __launch_bounds__(1024) all_meet(const __grid_constant__ Words words) {
  words.data[threadIdx.x] = 7 * threadIdx.x;
  __syncthreads();
  const uint32_t next = words.data[(threadIdx.x + 1) % blockDim.x];
  __syncthreads();
  words.data[threadIdx.x] = next;
}

__global__ void __launch_bounds__(1024) some_meet(const __grid_constant__ Words words) {
  if (threadIdx.x < words.data[0]) __syncthreads();
}

__global__ void __launch_bounds__(1024) half_meets(const __grid_constant__ Words words) {
  if (threadIdx.x % 32 < 16) return __syncthreads();
  words.data[1] = __shfl_xor_sync(~0u, 1u, 1);
}

__global__ void __launch_bounds__(1024) reads_what_it_writes(const __grid_constant__ Words words) {
  const uint32_t before = __ldg(words.data + 1);
  words.data[threadIdx.x / 2] = before + 1;
}

__global__ void __launch_bounds__(1024) misaligned_store(const __grid_constant__ Words words) {
  reinterpret_cast<uint4*>(words.data + 1)[threadIdx.x] = {1, 2, 3, 4};
}

__global__ void __launch_bounds__(1024) misaligned_load(const __grid_constant__ Words words) {
  words.data[0] = __ldg(reinterpret_cast<const uint4*>(words.data + 1)).x;
}

__global__ void __launch_bounds__(1024) beyond_the_end(const __grid_constant__ Words words) {
  words.data[words.data[0] + threadIdx.x] = 1;
}

}  // namespace

int try_launch(const std::array<unsigned, 3>& grid, const std::array<unsigned, 3>& block, size_t shared_bytes,
               uintptr_t stream) {
  const dim3 blocks(grid[0], grid[1], grid[2]), threads(block[0], block[1], block[2]);
  nothing<<<blocks, threads, shared_bytes, reinterpret_cast<cudaStream_t>(stream)>>>(Words{nullptr});
  return cudaGetLastError();
}

std::vector<uint32_t> run_rule(const std::string& name, unsigned threads, std::vector<uint32_t> data) {
  using Kernel = void (*)(const Words&);
  static const std::map<std::string, Kernel> kernels = {
      {"sum_groups", &sum_groups}, {"one_lane_leaves", &one_lane_leaves},
      {"mask_without_itself", &mask_without_itself}, {"masks_differ", &masks_differ},
      {"partner_outside", &partner_outside}, {"all_meet", &all_meet}, {"some_meet", &some_meet},
      {"half_meets", &half_meets}, {"reads_what_it_writes", &reads_what_it_writes},
      {"misaligned_store", &misaligned_store}, {"misaligned_load", &misaligned_load},
      {"beyond_the_end", &beyond_the_end},
  };
  // At an address that divides 16, and with an end that is guarded.
  std::vector<uint32_t> held(data);
  launch({name.c_str(), 1024, 1, threads, 0, nullptr}, kernels.at(name), Words{held.data()});
  return held;
}

}  // namespace host_cuda
