// The row loops of one instruction-set level. Include after defining a level, see cpu/simd.h.
#pragma once

#include "cpu/activation.h"
#include "cpu/elementwise/elementwise.h"
#include "cpu/row_math.h"

namespace hydra::HYDRA_LEVEL {

// Calls BODY with `i` and `count` over a row in vectors; the last one may be part of a vector. A macro because a lambda
// would not be compiled for this level's instructions.
#define HYDRA_FOR_VECTORS(columns, BODY)                 \
  do {                                                   \
    int64_t i = 0;                                       \
    for (; i + kLanes <= (columns); i += kLanes) {       \
      constexpr int count = kLanes;                      \
      BODY                                               \
    }                                                    \
    if (i < (columns)) {                                 \
      const int count = static_cast<int>((columns) - i); \
      BODY                                               \
    }                                                    \
  } while (0)

template <class T>
HYDRA_TARGET float sum_of_row(const T* x, int64_t columns) {
  vf sums[4] = {};
  int64_t i = 0;
  for (; i + 4 * kLanes <= columns; i += 4 * kLanes) {
    for (int part = 0; part < 4; ++part) sums[part] += load(x + i + part * kLanes);
  }
  for (; i < columns; i += kLanes) {
    const int64_t left = columns - i;
    sums[0] += load_some(x + i, left < kLanes ? static_cast<int>(left) : kLanes);
  }
  return sum((sums[0] + sums[1]) + (sums[2] + sums[3]));
}

// The sum is rounded to the dtype before it is normed, as if the addition were an operation of its own.
template <class T>
HYDRA_TARGET const T* add_residual(const RowsCall& call, const T* x, int64_t row) {
  const T* residual = static_cast<const T*>(call.residual) + row * call.residual_stride;
  T* total = static_cast<T*>(call.sum) + row * call.columns;
  HYDRA_FOR_VECTORS(call.columns,
                    { store_some(total + i, load_some(x + i, count) + load_some(residual + i, count), count); });
  return total;
}

template <class T, class W, bool kResidual>
HYDRA_TARGET void rms_norm_row(const RowsCall& call, int64_t row, const T* x) {
  const W* weight = static_cast<const W*>(call.weight);
  T* out = static_cast<T*>(call.out) + row * call.columns;
  if constexpr (kResidual) x = add_residual(call, x, row);
  const float scale = rms_scale(x, call.columns, call.eps);
  HYDRA_FOR_VECTORS(call.columns, {
    store_some(out + i, load_normed(x + i, weight + i, scale, count), count);
  });
}

template <class T, bool kResidual>
HYDRA_TARGET void rms_norm_row(const RowsCall& call, int64_t row, const T* x) {
  if (call.wide_weight) return rms_norm_row<T, float, kResidual>(call, row, x);
  rms_norm_row<T, T, kResidual>(call, row, x);
}

// The norm is rounded to the dtype before the product, as if it were an operation of its own.
template <class T>
HYDRA_TARGET void gated_rms_norm_row(const RowsCall& call, int64_t row, const T* x, const T* gate) {
  const T* weight = static_cast<const T*>(call.weight);
  T* out = static_cast<T*>(call.out) + row * call.columns;
  const float scale = rms_scale(x, call.columns, call.eps);
  HYDRA_FOR_VECTORS(call.columns, {
    const vf normed = rounded<T>(load_normed(x + i, weight + i, scale, count));
    store_some(out + i, normed * activate<Activation::silu>(load_some(gate + i, count)), count);
  });
}

template <class T>
HYDRA_TARGET void sigmoid_mul_row(const RowsCall& call, int64_t row, const T* x, const T* gate) {
  T* out = static_cast<T*>(call.out) + row * call.columns;
  HYDRA_FOR_VECTORS(call.columns, {
    store_some(out + i, times_sigmoid(load_some(x + i, count), load_some(gate + i, count)), count);
  });
}

template <class T>
HYDRA_TARGET void layer_norm_row(const RowsCall& call, int64_t row, const T* x) {
  const T* weight = static_cast<const T*>(call.weight);
  const T* bias = static_cast<const T*>(call.bias);
  T* out = static_cast<T*>(call.out) + row * call.columns;
  const float count_inverse = 1.0f / static_cast<float>(call.columns);
  const float mean = sum_of_row(x, call.columns) * count_inverse;
  const float variance = sum_of_squares(x, call.columns, mean) * count_inverse;
  const float scale = 1.0f / std::sqrt(variance + call.eps);
  HYDRA_FOR_VECTORS(call.columns, {
    const vf normed = (load_some(x + i, count) - mean) * scale;
    store_some(out + i, normed * load_some(weight + i, count) + load_some(bias + i, count), count);
  });
}

// act(gate) is rounded to the dtype before the product, as if the activation were an operation of its own.
template <class T, Activation kAct>
HYDRA_TARGET void act_and_mul_row(const RowsCall& call, int64_t row, const T* gate) {
  const T* up = gate + call.columns;
  T* out = static_cast<T*>(call.out) + row * call.columns;
  HYDRA_FOR_VECTORS(call.columns, {
    const vf gated = rounded<T>(activate<kAct>(load_some(gate + i, count)));
    store_some(out + i, gated * load_some(up + i, count), count);
  });
}

template <class T>
HYDRA_TARGET void act_and_mul_row(const RowsCall& call, int64_t row, const T* gate) {
  switch (call.act) {
    case Activation::none:
      return act_and_mul_row<T, Activation::none>(call, row, gate);
    case Activation::silu:
      return act_and_mul_row<T, Activation::silu>(call, row, gate);
    case Activation::gelu:
      return act_and_mul_row<T, Activation::gelu>(call, row, gate);
    case Activation::gelu_tanh:
      return act_and_mul_row<T, Activation::gelu_tanh>(call, row, gate);
    case Activation::quick_gelu:
      return act_and_mul_row<T, Activation::quick_gelu>(call, row, gate);
  }
}

template <class T>
HYDRA_TARGET void rotate_row(const RowsCall& call, int64_t row, const T* x, int64_t token) {
  rotate_head<false>(x, static_cast<T*>(call.out) + row * call.columns, call.columns / 2,
                     call.cos + token * call.cos_stride, call.sin + token * call.sin_stride, x, 0.0f);
}

template <class T>
HYDRA_TARGET void run_typed_rows(RowsOp op, const RowsCall& call, int64_t begin, int64_t end) {
  int64_t token = begin / call.heads, head = begin % call.heads;
  for (int64_t row = begin; row < end; ++row) {
    const T* x = static_cast<const T*>(call.x) + token * call.x_stride + head * call.head_stride;
    const T* gate = static_cast<const T*>(call.gate) + token * call.gate_stride + head * call.gate_head_stride;
    switch (op) {
      case RowsOp::rms_norm:
        rms_norm_row<T, false>(call, row, x);
        break;
      case RowsOp::add_rms_norm:
        rms_norm_row<T, true>(call, row, x);
        break;
      case RowsOp::layer_norm:
        layer_norm_row(call, row, x);
        break;
      case RowsOp::act_and_mul:
        act_and_mul_row(call, row, x);
        break;
      case RowsOp::rotate:
        rotate_row(call, row, x, token);
        break;
      case RowsOp::gated_rms_norm:
        gated_rms_norm_row(call, row, x, gate);
        break;
      case RowsOp::sigmoid_mul:
        sigmoid_mul_row(call, row, x, gate);
        break;
    }
    if (++head == call.heads) {
      head = 0;
      ++token;
    }
  }
}

HYDRA_TARGET void run_rows(RowsOp op, const RowsCall& call, int64_t begin, int64_t end) {
  if (call.dtype == DType::f32) return run_typed_rows<float>(op, call, begin, end);
  if (call.dtype == DType::bf16) return run_typed_rows<bf16_t>(op, call, begin, end);
  run_typed_rows<f16_t>(op, call, begin, end);
}

#undef HYDRA_FOR_VECTORS

}  // namespace hydra::HYDRA_LEVEL
