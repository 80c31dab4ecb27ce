// The row loops of one instruction-set level. Include after defining a level, see cpu/simd.h.
#pragma once

#include <cmath>

#include "cpu/activation.h"
#include "cpu/elementwise/elementwise.h"

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
HYDRA_INLINE vf load_some(const T* source, int count) {
  return count == kLanes ? load(source) : load_part(source, count);
}

template <class T>
HYDRA_INLINE void store_some(T* target, vf value, int count) {
  if (count == kLanes) {
    store(target, value);
  } else {
    store_part(target, value, count);
  }
}

// Sum of (x - center)^2 over a row, and of x; four partial sums hide the latency of the additions.
template <class T>
HYDRA_TARGET float sum_of_squares(const T* x, int64_t columns, float center) {
  vf sums[4] = {};
  int64_t i = 0;
  for (; i + 4 * kLanes <= columns; i += 4 * kLanes) {
    for (int part = 0; part < 4; ++part) {
      const vf value = load(x + i + part * kLanes) - center;
      sums[part] += value * value;
    }
  }
  for (; i < columns; i += kLanes) {
    const int64_t left = columns - i;
    const vf value = load_some(x + i, left < kLanes ? static_cast<int>(left) : kLanes) - center;
    if (left >= kLanes) {
      sums[0] += value * value;
    } else {
      for (int lane = 0; lane < left; ++lane) sums[0][lane] += value[lane] * value[lane];
    }
  }
  return sum((sums[0] + sums[1]) + (sums[2] + sums[3]));
}

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

template <class T, bool kResidual>
HYDRA_TARGET void rms_norm_row(const RowsCall& call, int64_t row) {
  const T* x = static_cast<const T*>(call.x) + row * call.x_stride;
  const T* weight = static_cast<const T*>(call.weight);
  T* out = static_cast<T*>(call.out) + row * call.columns;
  if constexpr (kResidual) x = add_residual(call, x, row);
  const float mean = sum_of_squares(x, call.columns, 0.0f) / static_cast<float>(call.columns);
  const float scale = 1.0f / std::sqrt(mean + call.eps);
  HYDRA_FOR_VECTORS(call.columns, {
    const vf normed = rounded<T>(load_some(x + i, count) * scale);
    store_some(out + i, normed * load_some(weight + i, count), count);
  });
}

template <class T>
HYDRA_TARGET void layer_norm_row(const RowsCall& call, int64_t row) {
  const T* x = static_cast<const T*>(call.x) + row * call.x_stride;
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
HYDRA_TARGET void act_and_mul_row(const RowsCall& call, int64_t row) {
  const T* gate = static_cast<const T*>(call.x) + row * call.x_stride;
  const T* up = gate + call.columns;
  T* out = static_cast<T*>(call.out) + row * call.columns;
  HYDRA_FOR_VECTORS(call.columns, {
    const vf gated = rounded<T>(activate<kAct>(load_some(gate + i, count)));
    store_some(out + i, gated * load_some(up + i, count), count);
  });
}

template <class T>
HYDRA_TARGET void act_and_mul_row(const RowsCall& call, int64_t row) {
  switch (call.act) {
    case Activation::none:
      return act_and_mul_row<T, Activation::none>(call, row);
    case Activation::silu:
      return act_and_mul_row<T, Activation::silu>(call, row);
    case Activation::gelu:
      return act_and_mul_row<T, Activation::gelu>(call, row);
    case Activation::gelu_tanh:
      return act_and_mul_row<T, Activation::gelu_tanh>(call, row);
    case Activation::quick_gelu:
      return act_and_mul_row<T, Activation::quick_gelu>(call, row);
  }
}

template <class T>
HYDRA_TARGET void run_typed_rows(RowsOp op, const RowsCall& call, int64_t begin, int64_t end) {
  for (int64_t row = begin; row < end; ++row) {
    switch (op) {
      case RowsOp::rms_norm:
        rms_norm_row<T, false>(call, row);
        break;
      case RowsOp::add_rms_norm:
        rms_norm_row<T, true>(call, row);
        break;
      case RowsOp::layer_norm:
        layer_norm_row<T>(call, row);
        break;
      case RowsOp::act_and_mul:
        act_and_mul_row<T>(call, row);
        break;
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
