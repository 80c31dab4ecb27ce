// Reads memory with as many bytes in flight on each multiprocessor as its shared memory holds, for measurements of how
// fast so many multiprocessors can read. Compute capability 9.0 and newer: pieces come by bulk copies, which a barrier
// in shared memory counts. Each warp has a ring of buffers of its own, so that no warp waits for another one.
#include <cuda_runtime.h>

#include "ring_order.h"

namespace {

constexpr int kWarps = 4, kThreads = 32 * kWarps;
constexpr int kMostStages = 8;              // of a warp
constexpr uint64_t kPatience = 500'000'000;  // nanoseconds
constexpr size_t kWhole = (114 << 10) + 1;  // of shared memory, so that a multiprocessor has one block

__device__ __forceinline__ uint32_t shared_address(const void* place) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(place));
}

__device__ __forceinline__ void make_barrier(uint32_t barrier) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(barrier) : "memory");
}

// The one arrival of this phase, which also expects so many bytes.
__device__ __forceinline__ void expect(uint32_t barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

__device__ __forceinline__ void copy(uint32_t to, const void* from, uint32_t bytes, uint32_t barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
               "l"(from), "r"(bytes), "r"(barrier)
               : "memory");
}

__device__ __forceinline__ uint64_t nanoseconds() {
  uint64_t now;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
  return now;
}

__device__ __forceinline__ bool has_completed(uint32_t barrier, uint32_t parity) {
  uint32_t done;
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
      "selp.u32 %0, 1, 0, p;\n"
      "}\n"
      : "=r"(done)
      : "r"(barrier), "r"(parity)
      : "memory");
  return done != 0;
}

// False where a piece does not come: then the sum is wrong, and nobody waits for ever.
__device__ __forceinline__ bool has_come(uint32_t barrier, uint32_t parity) {
  if (has_completed(barrier, parity)) return true;
  const uint64_t began = nanoseconds();
  while (!has_completed(barrier, parity)) {
    if (nanoseconds() - began > kPatience) return false;
  }
  return true;
}

// `sums`[warp of the grid]: the sum of the 32-bit words that this warp read, which whoever asks can check.
__global__ void __launch_bounds__(kThreads) read_all(const char* data, uint64_t bytes, int stages, uint32_t piece_bytes,
                                                     uint32_t* sums) {
  extern __shared__ __align__(128) char buffers[];
  __shared__ __align__(8) uint64_t barriers[kWarps * kMostStages];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  if (threadIdx.x == 0) {
    for (uint64_t& barrier : barriers) make_barrier(shared_address(&barrier));
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();
  char* const ring = buffers + static_cast<size_t>(warp) * stages * piece_bytes;
  const uint32_t ring_at = shared_address(ring), barrier_at = shared_address(barriers + warp * kMostStages);
  uint32_t sum = 0;
  bool lost = false;
  const uint64_t pieces = (bytes + piece_bytes - 1) / piece_bytes;
  const uint64_t first = static_cast<uint64_t>(blockIdx.x) * kWarps + warp;
  const uint64_t step = static_cast<uint64_t>(gridDim.x) * kWarps;
  walk(
      pieces, first, step, stages,
      [&](uint64_t piece, int stage) {
        if (lane != 0 || lost) return;
        const uint32_t size = bytes_of(piece, bytes, piece_bytes), barrier = barrier_at + 8 * stage;
        expect(barrier, size);
        copy(ring_at + stage * piece_bytes, data + piece * piece_bytes, size, barrier);
      },
      [&](uint64_t piece, int stage, uint32_t parity) {
        lost = lost || !has_come(barrier_at + 8 * stage, parity);
        if (__any_sync(0xffffffff, lost)) {
          lost = true;
          return;
        }
        const uint4* words = reinterpret_cast<const uint4*>(ring + static_cast<size_t>(stage) * piece_bytes);
        const uint32_t count = bytes_of(piece, bytes, piece_bytes) / sizeof(uint4);
#pragma unroll 8
        for (uint32_t i = lane; i < count; i += 32) {
          const uint4 four = words[i];
          sum += four.x + four.y + four.z + four.w;
        }
        __syncwarp();  // all lanes have read the buffer before lane 0 asks for it again
      });
  for (int distance = 16; distance > 0; distance /= 2) sum += __shfl_xor_sync(0xffffffff, sum, distance);
  if (lane == 0) sums[blockIdx.x * kWarps + warp] = sum;
}

}  // namespace

// One launch of `blocks` blocks, each with `stages` pieces of `piece_bytes` in flight for each of its 4 warps. `bytes`
// and `piece_bytes` are multiples of 16. Null, or why it was not launched.
extern "C" const char* ring_read(int device, const void* data, uint64_t bytes, int blocks, int stages,
                                 uint32_t piece_bytes, uint32_t* sums, void* stream) {
  if (stages < 1 || stages > kMostStages) return "a ring has 1 to 8 buffers";
  const bool whole_pieces = bytes != 0 && bytes % 16 == 0 && piece_bytes != 0 && piece_bytes % 16 == 0;
  if (!whole_pieces) return "pieces are multiples of 16 bytes";
  size_t shared = static_cast<size_t>(kWarps) * stages * piece_bytes;
  int most = 0;
  cudaError_t error = cudaSetDevice(device);
  if (error == cudaSuccess) error = cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
  if (error != cudaSuccess) return cudaGetErrorString(error);
  // Where two blocks would fit, a grid no larger than the device could leave multiprocessors without one.
  const size_t whole = kWhole < static_cast<size_t>(most) ? kWhole : static_cast<size_t>(most) / 2 + 1;
  if (shared < whole) shared = whole;
  error = cudaFuncSetAttribute(read_all, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared));
  if (error != cudaSuccess) return cudaGetErrorString(error);
  read_all<<<blocks, kThreads, shared, static_cast<cudaStream_t>(stream)>>>(static_cast<const char*>(data), bytes,
                                                                            stages, piece_bytes, sums);
  error = cudaGetLastError();
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}
