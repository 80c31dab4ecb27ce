// `rope_and_write` in one launch: q is normed if it has a weight, rotated and stored densely; k likewise, into its
// slot; v is copied into its slot. A few lanes share a head, so short heads do not idle most of a warp.
#include <cuda_runtime.h>

#include <algorithm>

#include "cuda/launch.h"
#include "cuda/vector.cuh"

namespace hydra::cuda {
namespace {

template <class T>
struct RopeParams {
  const T *q, *k, *v;
  int64_t q_stride, k_stride, v_stride;  // between tokens, in elements
  const float *cos, *sin;
  int64_t cos_stride, sin_stride;
  const T *q_norm, *k_norm;
  float eps;
  T* out;
  char *k_plane, *v_plane;
  SlotMap map;
  const int64_t* slots;
  uint64_t* fault;
  uint32_t items;  // tokens * (num_q_heads + 2 * num_kv_heads)
  uint32_t num_q_heads, num_kv_heads;
  uint32_t half;   // D / 2
  uint32_t lanes, lanes_log2;  // per head, up to 32
};

// Source and target of one head; null norm: not normed.
template <class T>
struct Head {
  const T* source;
  T* target;
  const T* norm;
  bool rotated;
};

// False where the head's slot says that nothing is to be stored.
template <class T>
__device__ bool find_head(const RopeParams<T>& p, uint32_t token, uint32_t index, Head<T>& head) {
  const uint32_t dim = 2 * p.half;
  if (index < p.num_q_heads) {
    head = {p.q + token * p.q_stride + index * dim, p.out + (int64_t{token} * p.num_q_heads + index) * dim, p.q_norm,
            true};
    return true;
  }
  const int64_t slot = __ldg(p.slots + token);
  if (slot == -1) return false;
  if (!p.map.has(slot)) {
    report(p.fault, static_cast<uint64_t>(FaultKind::slots), token);
    return false;
  }
  index -= p.num_q_heads;
  const bool is_key = index < p.num_kv_heads;
  if (!is_key) index -= p.num_kv_heads;
  const T* source = is_key ? p.k + token * p.k_stride : p.v + token * p.v_stride;
  char* row = (is_key ? p.k_plane : p.v_plane) + p.map.offset(slot);
  head = {source + index * dim, reinterpret_cast<T*>(row) + index * dim, is_key ? p.k_norm : nullptr, is_key};
  return true;
}

template <int kCount, class T>
__device__ float sum_of_squares(const Piece<T, kCount>& piece) {
  float sum = 0;
#pragma unroll
  for (int e = 0; e < kCount; ++e) {
    const float value = to_float(piece.values[e]);
    sum = fmaf(value, value, sum);
  }
  return sum;
}

// The factor that makes the head's mean square 1, returned to all lanes of the head.
template <int kCount, class T>
__device__ float rms_scale(const RopeParams<T>& p, const T* source, uint32_t lane) {
  float sum = 0;
  for (uint32_t i = lane * kCount; i < p.half; i += p.lanes * kCount) {
    sum += sum_of_squares(Piece<T, kCount>::load(source + i)) +
           sum_of_squares(Piece<T, kCount>::load(source + p.half + i));
  }
  // Synchronises only this head's lanes: the warp's other heads may have taken another branch or returned.
  const uint32_t first = threadIdx.x % 32 - lane;
  const uint32_t members = (p.lanes == 32 ? ~0u : (1u << p.lanes) - 1) << first;
  for (uint32_t step = p.lanes / 2; step > 0; step /= 2) sum += __shfl_xor_sync(members, sum, step);
  return 1.0f / sqrtf(sum / static_cast<float>(2 * p.half) + p.eps);
}

// Each product rounded to T, as rms_norm would store it.
template <int kCount, class T>
__device__ void apply_norm(Piece<T, kCount>& piece, const T* weight, float scale) {
  const auto weights = Piece<T, kCount>::load(weight);
#pragma unroll
  for (int e = 0; e < kCount; ++e) {
    const float normed = to_float(from_float<T>(to_float(piece.values[e]) * scale));
    piece.values[e] = from_float<T>(normed * to_float(weights.values[e]));
  }
}

template <int kCount, class T>
__device__ void rotate_pieces(Piece<T, kCount>& first, Piece<T, kCount>& second, const float* cos, const float* sin) {
  float c[kCount], s[kCount];
  load_floats(cos, c);
  load_floats(sin, s);
#pragma unroll
  for (int e = 0; e < kCount; ++e) {
    const float a = to_float(first.values[e]), b = to_float(second.values[e]);
    // Explicit roundings: the same bits as the CPU kernels.
    first.values[e] = from_float<T>(fmaf(a, c[e], -__fmul_rn(b, s[e])));
    second.values[e] = from_float<T>(fmaf(b, c[e], __fmul_rn(a, s[e])));
  }
}

template <class T, int kCount>
__global__ void __launch_bounds__(kThreads) rope_heads(const __grid_constant__ RopeParams<T> p) {
  const uint32_t lane = threadIdx.x & (p.lanes - 1);
  const uint32_t item = blockIdx.x * (kThreads >> p.lanes_log2) + (threadIdx.x >> p.lanes_log2);
  if (item >= p.items) return;
  const uint32_t heads = p.num_q_heads + 2 * p.num_kv_heads;
  const uint32_t token = item / heads;
  Head<T> head;
  if (!find_head(p, token, item % heads, head)) return;
  const float scale = head.norm == nullptr ? 1.0f : rms_scale<kCount>(p, head.source, lane);
  for (uint32_t i = lane * kCount; i < p.half; i += p.lanes * kCount) {
    auto first = Piece<T, kCount>::load(head.source + i);
    auto second = Piece<T, kCount>::load(head.source + p.half + i);
    if (head.norm != nullptr) {
      apply_norm(first, head.norm + i, scale);
      apply_norm(second, head.norm + p.half + i, scale);
    }
    if (head.rotated) {
      rotate_pieces(first, second, p.cos + token * p.cos_stride + i, p.sin + token * p.sin_stride + i);
    }
    first.store(head.target + i);
    second.store(head.target + p.half + i);
  }
}

template <class T>
RopeParams<T> make_params(const Target& target, const RopeCall& call, int64_t items) {
  const CacheView& cache = call.cache;
  RopeParams<T> p = {};
  p.q = static_cast<const T*>(call.q);
  p.k = static_cast<const T*>(call.k);
  p.v = static_cast<const T*>(call.v);
  p.q_stride = call.q_stride;
  p.k_stride = call.k_stride;
  p.v_stride = call.v_stride;
  p.cos = call.cos;
  p.sin = call.sin;
  p.cos_stride = call.cos_stride;
  p.sin_stride = call.sin_stride;
  p.q_norm = static_cast<const T*>(call.q_norm);
  p.k_norm = static_cast<const T*>(call.k_norm);
  p.eps = call.eps;
  p.out = static_cast<T*>(call.out);
  p.k_plane = cache.plane(call.layer, 0);
  p.v_plane = cache.plane(call.layer, 1);
  p.map = {static_cast<uint32_t>(cache.num_slots()), static_cast<uint32_t>(cache.block_size), cache.block_bytes(),
           cache.row_bytes()};
  p.slots = call.slots;
  p.fault = fault_word(target.device);
  p.items = static_cast<uint32_t>(items);
  p.num_q_heads = static_cast<uint32_t>(call.num_q_heads);
  p.num_kv_heads = static_cast<uint32_t>(cache.num_heads);
  p.half = static_cast<uint32_t>(cache.head_dim / 2);
  return p;
}

template <class T>
bool is_wide(const RopeParams<T>& p) {
  const void* const addresses[] = {p.q,      p.k,      p.v,   p.cos,     p.sin,
                                   p.q_norm, p.k_norm, p.out, p.k_plane, p.v_plane};
  const int64_t strides[] = {p.q_stride, p.k_stride, p.v_stride};  // in elements of T
  const int64_t angle_strides[] = {p.cos_stride, p.sin_stride};    // in floats
  uint64_t bits = p.half * sizeof(T);
  for (const void* address : addresses) bits |= reinterpret_cast<uint64_t>(address);
  for (const int64_t stride : strides) bits |= static_cast<uint64_t>(stride) * sizeof(T);
  for (const int64_t stride : angle_strides) bits |= static_cast<uint64_t>(stride) * sizeof(float);
  return bits % 16 == 0;
}

template <class T, int kCount>
void launch_rope(const Target& target, RopeParams<T>& p) {
  const uint32_t pieces = (p.half + kCount - 1) / kCount;
  while (p.lanes_log2 < 5 && 1u << p.lanes_log2 < pieces) ++p.lanes_log2;
  p.lanes = 1u << p.lanes_log2;
  const uint32_t items_per_block = kThreads / p.lanes;
  const uint32_t blocks = (p.items + items_per_block - 1) / items_per_block;
  rope_heads<T, kCount><<<blocks, kThreads, 0, stream_of(target)>>>(p);
  HYDRA_LAUNCHED(target, "rope_heads");
}

template <class T>
void rope_typed(const Target& target, const RopeCall& call, int64_t items) {
  RopeParams<T> p = make_params<T>(target, call, items);
  if (is_wide(p)) return launch_rope<T, 16 / sizeof(T)>(target, p);
  launch_rope<T, 1>(target, p);
}

}  // namespace

void rope_and_write(const Target& target, const RopeCall& call) {
  const int64_t items = call.tokens * (call.num_q_heads + 2 * call.cache.num_heads);
  if (items == 0) return;
  HYDRA_CHECK(items < int64_t{1} << 31, "tokens: too many for one launch: ", call.tokens);
  const DeviceGuard guard(target.device);
  switch (call.cache.dtype) {
    case DType::f32:
      return rope_typed<float>(target, call, items);
    case DType::bf16:
      return rope_typed<__nv_bfloat16>(target, call, items);
    default:
      return rope_typed<__half>(target, call, items);
  }
}

}  // namespace hydra::cuda
