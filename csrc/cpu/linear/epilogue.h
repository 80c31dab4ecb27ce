// From float32 sums to the result: bias, activation, residual, rounding. Element-wise, so it cannot depend on the batch.
// Include after defining a level, see cpu/simd.h.
#pragma once

#include "cpu/activation.h"
#include "cpu/linear/linear.h"

namespace hydra::HYDRA_LEVEL {

// Addresses of one panel of the result and of what is added to it: the first row, and elements between rows.
template <class Out>
struct PanelRows {
  const float* bias;    // of this panel, or null
  const Out* residual;  // or null
  int64_t residual_stride;
  Out* out;
  int64_t out_stride;
  int columns;  // of the panel's 32 that exist
};

template <class Out, Activation kAct>
HYDRA_INLINE vf finished(const PanelRows<Out>& panel, const float* sums, int64_t row, int column, int count) {
  vf value = load(sums + column);
  if (panel.bias) value += load(panel.bias + column);
  value = activate<kAct>(value);
  if (panel.residual) {
    const Out* residual = panel.residual + row * panel.residual_stride + column;
    value += count == kLanes ? load(residual) : load_part(residual, count);
  }
  return value;
}

// sums: [rows][32] with `stride` floats between rows; all 32 columns exist.
template <class Out, Activation kAct>
HYDRA_TARGET void finish_rows(const PanelRows<Out>& panel, const float* sums, int64_t stride, int rows) {
  for (int row = 0; row < rows; ++row, sums += stride) {
    Out* out = panel.out + row * panel.out_stride;
    int column = 0;
    for (; column + 2 * kLanes <= panel.columns; column += 2 * kLanes) {
      const vf first = finished<Out, kAct>(panel, sums, row, column, kLanes);
      store_pair(out + column, first, finished<Out, kAct>(panel, sums, row, column + kLanes, kLanes));
    }
    for (; column < panel.columns; column += kLanes) {
      const int left = panel.columns - column, count = left < kLanes ? left : kLanes;
      const vf value = finished<Out, kAct>(panel, sums, row, column, count);
      if (count == kLanes) {
        store(out + column, value);
      } else {
        store_part(out + column, value, count);
      }
    }
  }
}

template <class Out>
HYDRA_TARGET void finish_block(const LinearCall& call, const float* sums, int64_t stride, int64_t row, int rows,
                               int64_t index) {
  const int64_t column = index * kPanel;
  const int64_t left = call.weight.num_out - column;
  PanelRows<Out> panel{call.weight.bias ? call.weight.bias + column : nullptr, nullptr, call.residual_stride,
                       static_cast<Out*>(call.out) + row * call.out_stride + column, call.out_stride,
                       left < kPanel ? static_cast<int>(left) : kPanel};
  if (call.residual) {
    panel.residual = static_cast<const Out*>(call.residual) + row * call.residual_stride + column;
  }
  switch (call.act) {
    case Activation::none:
      return finish_rows<Out, Activation::none>(panel, sums, stride, rows);
    case Activation::silu:
      return finish_rows<Out, Activation::silu>(panel, sums, stride, rows);
    case Activation::gelu:
      return finish_rows<Out, Activation::gelu>(panel, sums, stride, rows);
    case Activation::gelu_tanh:
      return finish_rows<Out, Activation::gelu_tanh>(panel, sums, stride, rows);
    case Activation::quick_gelu:
      return finish_rows<Out, Activation::quick_gelu>(panel, sums, stride, rows);
  }
}

// Finishes rows [row, row + rows) of one panel of the result.
HYDRA_TARGET inline void finish_block(const LinearCall& call, const float* sums, int64_t stride, int64_t row, int rows,
                                      int64_t panel) {
  switch (call.out_dtype) {
    case DType::f32:
      return finish_block<float>(call, sums, stride, row, rows, panel);
    case DType::bf16:
      return finish_block<bf16_t>(call, sums, stride, row, rows, panel);
    case DType::f16:
      return finish_block<f16_t>(call, sums, stride, row, rows, panel);
  }
}

}  // namespace hydra::HYDRA_LEVEL
