// Rows between paged caches and dense tensors: the fused write of K and V, the image write, gathers, image merges. One
// launch each. Copies are bytes, so a dtype matters only to the merge that adds.
#include <cuda_runtime.h>

#include "cuda/launch.h"
#include "cuda/vector.cuh"

namespace hydra::cuda {
namespace {

constexpr int kInFlight = 4;  // accesses that a lane issues before it waits for the first

struct RowMove {
  char* dense[2];  // row 0 of each tensor's dense side
  int64_t dense_stride[2];
  char* plane[2];  // row 0 of block 0 of each tensor
  SlotMap map;
  const int64_t* slots;
  const int64_t* targets;  // the dense row of an entry; null: entry m is row m
  int64_t dense_rows;      // bounds the targets
  uint32_t rows, tensors, chunks;
  uint64_t* fault;
};

struct Place {
  uint32_t row, tensor, chunk;
  int64_t slot, target;
};

// The piece of work of this warp: a chunk of one row of one tensor. False where there is none or its slot says so.
__device__ bool find_place(const RowMove& move, Place& place) {
  uint32_t item = blockIdx.x * kWarps + threadIdx.x / 32;
  if (item >= move.rows * move.tensors * move.chunks) return false;
  place.chunk = item % move.chunks;
  item /= move.chunks;
  place.tensor = item % move.tensors;
  place.row = item / move.tensors;
  place.slot = __ldg(move.slots + place.row);
  if (place.slot == -1) return false;
  place.target = move.targets == nullptr ? place.row : __ldg(move.targets + place.row);
  const bool bad_target = static_cast<uint64_t>(place.target) >= static_cast<uint64_t>(move.dense_rows);
  if (bad_target || !move.map.has(place.slot)) {
    const FaultKind kind = bad_target ? FaultKind::rows : FaultKind::slots;
    report(move.fault, static_cast<uint64_t>(kind), place.row);
    return false;
  }
  return true;
}

template <class Vec, bool kToCache>
__global__ void __launch_bounds__(kThreads) move_rows(const __grid_constant__ RowMove move) {
  Place place;
  if (!find_place(move, place)) return;
  char* dense = move.dense[place.tensor] + place.target * move.dense_stride[place.tensor];
  char* paged = move.plane[place.tensor] + move.map.offset(place.slot);
  const Vec* source = reinterpret_cast<const Vec*>(kToCache ? dense : paged);
  Vec* target = reinterpret_cast<Vec*>(kToCache ? paged : dense);
  const uint32_t count = static_cast<uint32_t>(move.map.row_bytes / sizeof(Vec));
  const uint32_t begin = place.chunk * (32 * kInFlight) + threadIdx.x % 32;
  Vec held[kInFlight];
#pragma unroll
  for (int u = 0; u < kInFlight; ++u) {
    if (begin + 32 * u < count) held[u] = __ldg(source + begin + 32 * u);
  }
#pragma unroll
  for (int u = 0; u < kInFlight; ++u) {
    if (begin + 32 * u < count) target[begin + 32 * u] = held[u];
  }
}

// dense += paged, in float, rounded once.
template <class T, int kCount>
__global__ void __launch_bounds__(kThreads) add_rows(const __grid_constant__ RowMove move) {
  using Vector = Piece<T, kCount>;
  Place place;
  if (!find_place(move, place)) return;
  T* dense = reinterpret_cast<T*>(move.dense[0] + place.target * move.dense_stride[0]);
  const T* paged = reinterpret_cast<const T*>(move.plane[0] + move.map.offset(place.slot));
  const uint32_t count = static_cast<uint32_t>(move.map.row_bytes / sizeof(T));
  const uint32_t begin = (place.chunk * (32 * kInFlight) + threadIdx.x % 32) * kCount;
  Vector sums[kInFlight], features[kInFlight];
#pragma unroll
  for (int u = 0; u < kInFlight; ++u) {
    const uint32_t i = begin + 32 * kCount * u;
    if (i >= count) break;
    features[u] = Vector::load(paged + i);
    sums[u] = Vector::load_own(dense + i);
  }
#pragma unroll
  for (int u = 0; u < kInFlight; ++u) {
    const uint32_t i = begin + 32 * kCount * u;
    if (i >= count) break;
#pragma unroll
    for (int e = 0; e < kCount; ++e) {
      sums[u].values[e] = from_float<T>(to_float(sums[u].values[e]) + to_float(features[u].values[e]));
    }
    sums[u].store(dense + i);
  }
}

// All addresses, strides and sizes, or'ed: accesses of 2^n bytes are aligned if the lower n bits are 0.
uint64_t odd_bits(const RowMove& move) {
  uint64_t bits = static_cast<uint64_t>(move.map.row_bytes | move.map.block_bytes);
  for (uint32_t x = 0; x < move.tensors; ++x) {
    bits |= reinterpret_cast<uint64_t>(move.dense[x]) | reinterpret_cast<uint64_t>(move.plane[x]);
    bits |= static_cast<uint64_t>(move.dense_stride[x]);
  }
  return bits;
}

// Cuts rows of `accesses` accesses into chunks; returns how many thread blocks that takes.
uint32_t set_chunks(RowMove& move, int64_t accesses) {
  const int64_t chunks = (accesses + 32 * kInFlight - 1) / (32 * kInFlight);
  const int64_t items = chunks * move.tensors * move.rows;
  HYDRA_CHECK(items < int64_t{1} << 31, "rows: too many for one launch: ", move.rows);
  move.chunks = static_cast<uint32_t>(chunks);
  return static_cast<uint32_t>((items + kWarps - 1) / kWarps);
}

template <class Vec>
void launch_move(const Target& target, RowMove& move, bool to_cache) {
  const uint32_t blocks = set_chunks(move, move.map.row_bytes / static_cast<int64_t>(sizeof(Vec)));
  if (to_cache) {
    move_rows<Vec, true><<<blocks, kThreads, 0, stream_of(target)>>>(move);
  } else {
    move_rows<Vec, false><<<blocks, kThreads, 0, stream_of(target)>>>(move);
  }
  HYDRA_LAUNCHED(target, "move_rows");
}

void launch_widest(const Target& target, RowMove& move, bool to_cache) {
  const uint64_t bits = odd_bits(move);
  if (bits % 16 == 0) return launch_move<uint4>(target, move, to_cache);
  if (bits % 4 == 0) return launch_move<uint32_t>(target, move, to_cache);
  launch_move<uint16_t>(target, move, to_cache);
}

template <class T>
void launch_add(const Target& target, RowMove& move) {
  constexpr int kWide = 16 / sizeof(T);
  const bool wide = odd_bits(move) % 16 == 0;
  const uint32_t blocks = set_chunks(move, move.map.row_bytes / (wide ? 16 : static_cast<int64_t>(sizeof(T))));
  if (wide) {
    add_rows<T, kWide><<<blocks, kThreads, 0, stream_of(target)>>>(move);
  } else {
    add_rows<T, 1><<<blocks, kThreads, 0, stream_of(target)>>>(move);
  }
  HYDRA_LAUNCHED(target, "add_rows");
}

RowMove make_move(const Target& target, const CacheView& cache, const int64_t* slots, int64_t rows) {
  HYDRA_CHECK(rows < int64_t{1} << 31, "rows: too many for one launch: ", rows);
  RowMove move = {};
  move.map = {static_cast<uint32_t>(cache.num_slots()), static_cast<uint32_t>(cache.block_size), cache.block_bytes(),
              cache.row_bytes()};
  move.slots = slots;
  move.rows = static_cast<uint32_t>(rows);
  move.dense_rows = rows;
  move.tensors = 1;
  move.fault = fault_word(target.device);
  return move;
}

}  // namespace

void write_rows(const Target& target, const CacheView& cache, int64_t layer, const RowSource* sources,
                const int64_t* slots, int64_t rows) {
  if (rows == 0) return;
  const DeviceGuard guard(target.device);
  RowMove move = make_move(target, cache, slots, rows);
  move.tensors = static_cast<uint32_t>(cache.num_tensors);
  for (uint32_t x = 0; x < move.tensors; ++x) {
    move.dense[x] = const_cast<char*>(sources[x].data);
    move.dense_stride[x] = sources[x].stride;
    move.plane[x] = cache.plane(layer, x);
  }
  launch_widest(target, move, true);
}

void gather_rows(const Target& target, const CacheView& cache, int64_t layer, int64_t tensor, const int64_t* slots,
                 int64_t rows, char* out) {
  if (rows == 0) return;
  const DeviceGuard guard(target.device);
  RowMove move = make_move(target, cache, slots, rows);
  move.dense[0] = out;
  move.dense_stride[0] = cache.row_bytes();
  move.plane[0] = cache.plane(layer, tensor);
  launch_widest(target, move, false);
}

void merge_rows(const Target& target, const MergeCall& call, int64_t hidden_rows) {
  if (call.rows == 0) return;
  const DeviceGuard guard(target.device);
  RowMove move = make_move(target, call.cache, call.slots, call.rows);
  move.dense[0] = static_cast<char*>(call.hidden);
  move.dense_stride[0] = call.cache.row_bytes();
  move.dense_rows = hidden_rows;
  move.targets = call.targets;
  move.plane[0] = call.cache.plane(call.layer, 0);
  if (!call.accumulate) return launch_widest(target, move, false);
  switch (call.cache.dtype) {
    case DType::f32:
      return launch_add<float>(target, move);
    case DType::bf16:
      return launch_add<__nv_bfloat16>(target, move);
    default:
      return launch_add<__half>(target, move);
  }
}

}  // namespace hydra::cuda
