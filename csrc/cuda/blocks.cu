// Whole blocks between two pools of one shape, or into and out of a dense tensor that is laid out as one: all pairs of a
// request in one launch. The pairs travel as kernel arguments, so no device memory is needed for them and the host's may
// go at once. Also reads a peer's pool that is mapped here.
#include <cuda_runtime.h>

#include <algorithm>

#include "cuda/launch.h"
#include "cuda/vector.cuh"

namespace hydra::cuda {
namespace {

constexpr int kInFlight = 4;
constexpr int kStride = kThreads * kInFlight;  // accesses of one thread block per round
constexpr int kRoundsPerSm = 8;                // thread blocks per multiprocessor that a large copy is spread over
constexpr int kFewPairs = 500;
constexpr int kManyPairs = 4000;

struct Pair {
  int32_t from, to;
};

template <int kPairs>
struct BlockMove {
  const char* from;
  char* to;
  int64_t block_bytes;
  Pair pairs[kPairs];
};
static_assert(sizeof(BlockMove<kFewPairs>) <= 4096 && sizeof(BlockMove<kManyPairs>) <= 32764);

template <class Vec, int kPairs>
__global__ void __launch_bounds__(kThreads) copy_pairs(const __grid_constant__ BlockMove<kPairs> move) {
  const Pair pair = move.pairs[blockIdx.y];
  const Vec* source = reinterpret_cast<const Vec*>(move.from + pair.from * move.block_bytes);
  Vec* target = reinterpret_cast<Vec*>(move.to + pair.to * move.block_bytes);
  const int64_t count = move.block_bytes / static_cast<int64_t>(sizeof(Vec));
  for (int64_t begin = int64_t{blockIdx.x} * kStride + threadIdx.x; begin < count;
       begin += int64_t{gridDim.x} * kStride) {
    Vec held[kInFlight];
#pragma unroll
    for (int u = 0; u < kInFlight; ++u) {
      if (begin + u * kThreads < count) held[u] = __ldg(source + begin + u * kThreads);
    }
#pragma unroll
    for (int u = 0; u < kInFlight; ++u) {
      if (begin + u * kThreads < count) target[begin + u * kThreads] = held[u];
    }
  }
}

template <class Vec, int kPairs>
void launch_copy(const Target& target, const BlockMove<kPairs>& move, int count) {
  int num_sms = 0;
  HYDRA_CUDA(cudaDeviceGetAttribute(&num_sms, cudaDevAttrMultiProcessorCount, target.device));
  const int64_t accesses = move.block_bytes / static_cast<int64_t>(sizeof(Vec));
  const int64_t rounds = (accesses + kStride - 1) / kStride;
  const int64_t share = std::max(1, kRoundsPerSm * num_sms / count);
  const dim3 grid(static_cast<uint32_t>(std::min(rounds, share)), static_cast<uint32_t>(count));
  copy_pairs<Vec, kPairs><<<grid, kThreads, 0, stream_of(target)>>>(move);
  HYDRA_LAUNCHED(target, "copy_pairs");
}

template <int kPairs>
void copy_some(const Target& target, const CacheView& from, const CacheView& to, const int64_t* pairs, int count) {
  BlockMove<kPairs> move;
  move.from = from.data;
  move.to = to.data;
  move.block_bytes = from.block_bytes();
  for (int i = 0; i < count; ++i) {
    move.pairs[i] = {static_cast<int32_t>(pairs[2 * i]), static_cast<int32_t>(pairs[2 * i + 1])};
  }
  const uint64_t bits = reinterpret_cast<uint64_t>(move.from) | reinterpret_cast<uint64_t>(move.to) |
                        static_cast<uint64_t>(move.block_bytes);
  if (bits % 16 == 0) return launch_copy<uint4>(target, move, count);
  if (bits % 4 == 0) return launch_copy<uint32_t>(target, move, count);
  launch_copy<uint16_t>(target, move, count);
}

}  // namespace

void copy_blocks(const Target& target, const CacheView& from, const CacheView& to, const int64_t* pairs,
                 int64_t count) {
  const DeviceGuard guard(target.device);
  for (int64_t done = 0; done < count; done += kManyPairs) {
    const int part = static_cast<int>(std::min<int64_t>(count - done, kManyPairs));
    if (part <= kFewPairs) {
      copy_some<kFewPairs>(target, from, to, pairs + 2 * done, part);
    } else {
      copy_some<kManyPairs>(target, from, to, pairs + 2 * done, part);
    }
  }
}

}  // namespace hydra::cuda
