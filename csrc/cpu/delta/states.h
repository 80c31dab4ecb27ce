// The loops of one instruction-set level. Include after defining a level, see cpu/simd.h.
#pragma once

#include <algorithm>
#include <cmath>

#include "cpu/activation.h"
#include "cpu/delta/delta.h"
#include "cpu/row_math.h"

namespace hydra::HYDRA_LEVEL {

constexpr float kLengthEps = 1e-6f;

int lanes() { return kLanes; }

HYDRA_INLINE int part(int64_t size, int64_t begin) {
  return static_cast<int>(size - begin < kLanes ? size - begin : kLanes);
}

// ---- the convolution

// One vector of channels through one row.
template <class T>
HYDRA_TARGET void conv_row(const ConvCall& call, int64_t row, int64_t channel, const vf* taps) {
  const StateRows& rows = call.rows;
  const int64_t begin = rows.cu_q[row], count = rows.cu_q[row + 1] - begin, before = call.taps - 1;
  const int64_t size = before * call.channels;
  const int some = part(call.channels, channel);
  const T* old = rows.starts[row] ? static_cast<T*>(call.state) + rows.offset(rows.reads[row], size) + channel : nullptr;
  const T* x = static_cast<const T*>(call.x) + begin * call.x_stride + channel;
  T* out = static_cast<T*>(call.out) + begin * call.channels + channel;
  T* fresh = static_cast<T*>(call.state) + rows.offset(rows.writes[row], size) + channel;
  for (int64_t t = 0; t < count; ++t) {
    vf total{};
    for (int64_t tap = 0; tap < call.taps; ++tap) {
      const int64_t at = t - before + tap;
      vf value{};
      if (at >= 0) {
        value = load_some(x + at * call.x_stride, some);
      } else if (old != nullptr) {
        value = load_some(old + (at + before) * call.channels, some);
      }
      total = fused_multiply_add(value, taps[tap], total);
    }
    store_some(out + t * call.channels, activate<Activation::silu>(total), some);
  }
  for (int64_t i = 0; i < before; ++i) {  // in this order also where both places are one
    const int64_t at = count - before + i;
    vf value{};
    if (at >= 0) {
      value = load_some(x + at * call.x_stride, some);
    } else if (old != nullptr) {
      value = load_some(old + (at + before) * call.channels, some);
    }
    store_some(fresh + i * call.channels, value, some);
  }
}

template <class T>
HYDRA_TARGET void conv_typed(const ConvCall& call, int64_t begin, int64_t end) {
  const T* weight = static_cast<const T*>(call.weight);
  vf taps[kMostTaps];
  for (int64_t vector = begin; vector < end; ++vector) {
    const int64_t channel = vector * kLanes;
    const int some = part(call.channels, channel);
    for (int64_t tap = 0; tap < call.taps; ++tap) {
      taps[tap] = vf{};
      for (int lane = 0; lane < some; ++lane) taps[tap][lane] = to_float(weight[(channel + lane) * call.taps + tap]);
    }
    for (int64_t row = 0; row < call.rows.rows; ++row) conv_row<T>(call, row, channel, taps);
  }
}

HYDRA_TARGET void conv_vectors(const ConvCall& call, int64_t begin, int64_t end) {
  if (call.dtype == DType::f32) return conv_typed<float>(call, begin, end);
  if (call.dtype == DType::bf16) return conv_typed<bf16_t>(call, begin, end);
  conv_typed<f16_t>(call, begin, end);
}

// ---- the rule

// Writes x / |x| * factor in float32.
template <class T>
HYDRA_TARGET void write_unit(const T* x, float* out, int64_t size, float factor) {
  const float scale = factor / std::sqrt(sum_of_squares(x, size, 0.0f) + kLengthEps);
  for (int64_t i = 0; i < size; i += kLanes) store_some(out + i, load_some(x + i, part(size, i)) * scale, part(size, i));
}

template <class T>
HYDRA_TARGET void prepare_typed(const RuleCall& call, int64_t begin, int64_t end) {
  const float factor = 1.0f / std::sqrt(static_cast<float>(call.key_dim));
  for (int64_t t = begin; t < end; ++t) {
    for (int64_t head = 0; head < call.key_heads; ++head) {
      const int64_t from = head * call.key_dim, to = (t * call.key_heads + head) * call.key_dim;
      write_unit(static_cast<const T*>(call.q) + t * call.q_stride + from, call.queries + to, call.key_dim, factor);
      write_unit(static_cast<const T*>(call.k) + t * call.k_stride + from, call.keys + to, call.key_dim, 1.0f);
    }
    const T* a = static_cast<const T*>(call.a) + t * call.a_stride;
    const T* b = static_cast<const T*>(call.b) + t * call.b_stride;
    for (int64_t head = 0; head < call.heads; ++head) {
      const float x = to_float(a[head]) + call.shift[head];
      const float step = x > 20.0f ? x : std::log1p(std::exp(x));
      call.decays[t * call.heads + head] = std::exp(-std::exp(call.rates[head]) * step);
      const float strength = 1.0f / (1.0f + std::exp(-to_float(b[head])));
      call.strengths[t * call.heads + head] = to_float(from_float<T>(strength));
    }
  }
}

HYDRA_TARGET void prepare_tokens(const RuleCall& call, int64_t begin, int64_t end) {
  if (call.dtype == DType::f32) return prepare_typed<float>(call, begin, end);
  if (call.dtype == DType::bf16) return prepare_typed<bf16_t>(call, begin, end);
  prepare_typed<f16_t>(call, begin, end);
}

// One token: state [size][kLanes] moves on, the result are its columns read by the query. Four sums hide the latency of
// the additions; whatever the caller has, their order is the same.
HYDRA_INLINE vf rule_token(float* state, const float* key, const float* query, vf value, float decay, float strength,
                           int64_t size) {
  vf sums[4] = {};
  int64_t i = 0;
  for (; i + 4 <= size; i += 4) {
    for (int j = 0; j < 4; ++j) sums[j] = fused_multiply_add(load(state + (i + j) * kLanes), splat(key[i + j]), sums[j]);
  }
  for (; i < size; ++i) sums[0] = fused_multiply_add(load(state + i * kLanes), splat(key[i]), sums[0]);
  const vf known = ((sums[0] + sums[1]) + (sums[2] + sums[3])) * decay;
  const vf change = (value - known) * strength;
  for (int j = 0; j < 4; ++j) sums[j] = vf{};
  for (i = 0; i + 4 <= size; i += 4) {
    for (int j = 0; j < 4; ++j) {
      const vf moved = fused_multiply_add(splat(key[i + j]), change, load(state + (i + j) * kLanes) * decay);
      store(state + (i + j) * kLanes, moved);
      sums[j] = fused_multiply_add(moved, splat(query[i + j]), sums[j]);
    }
  }
  for (; i < size; ++i) {
    const vf moved = fused_multiply_add(splat(key[i]), change, load(state + i * kLanes) * decay);
    store(state + i * kLanes, moved);
    sums[0] = fused_multiply_add(moved, splat(query[i]), sums[0]);
  }
  return (sums[0] + sums[1]) + (sums[2] + sums[3]);
}

// One vector of value columns of one head through one row; the block of its state stays in the nearest cache.
template <class T>
HYDRA_TARGET void rule_task(const RuleCall& call, int64_t row, int64_t head, int64_t column, float* block) {
  const StateRows& rows = call.rows;
  const int64_t size = call.key_dim, width = call.value_dim, key_head = head / (call.heads / call.key_heads);
  const int some = part(width, column);
  const int64_t inner = head * size * width + column, whole = call.heads * size * width;
  if (rows.starts[row]) {
    const float* old = call.state + rows.offset(rows.reads[row], whole) + inner;
    for (int64_t i = 0; i < size; ++i) store(block + i * kLanes, load_some(old + i * width, some));
  } else {
    std::fill(block, block + size * kLanes, 0.0f);
  }
  for (int64_t t = rows.cu_q[row]; t < rows.cu_q[row + 1]; ++t) {
    const int64_t key = (t * call.key_heads + key_head) * size, gate = t * call.heads + head;
    const vf value = load_some(static_cast<const T*>(call.v) + t * call.v_stride + head * width + column, some);
    const vf mixed = rule_token(block, call.keys + key, call.queries + key, value, call.decays[gate],
                                call.strengths[gate], size);
    store_some(static_cast<T*>(call.out) + gate * width + column, mixed, some);
  }
  float* fresh = call.state + rows.offset(rows.writes[row], whole) + inner;
  for (int64_t i = 0; i < size; ++i) store_some(fresh + i * width, load(block + i * kLanes), some);
}

HYDRA_TARGET void rule_tasks(const RuleCall& call, int64_t begin, int64_t end) {
  alignas(64) float block[kMostKeyDim * kLanes];
  const int64_t vectors = (call.value_dim + kLanes - 1) / kLanes;
  for (int64_t task = begin; task < end; ++task) {
    const int64_t row = task / (call.heads * vectors), head = task / vectors % call.heads;
    const int64_t column = task % vectors * kLanes;
    if (call.dtype == DType::f32) {
      rule_task<float>(call, row, head, column, block);
    } else if (call.dtype == DType::bf16) {
      rule_task<bf16_t>(call, row, head, column, block);
    } else {
      rule_task<f16_t>(call, row, head, column, block);
    }
  }
}

}  // namespace hydra::HYDRA_LEVEL
