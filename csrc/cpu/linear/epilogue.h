// From float32 sums to the result: bias, activation, rounding. Element-wise, so it cannot depend on the batch.
// Include after defining a level, see cpu/simd.h.
#pragma once

#include "cpu/activation.h"
#include "cpu/linear/linear.h"

namespace hydra::HYDRA_LEVEL {

// sums: [rows][32] with `stride` floats between rows; all 32 columns exist, `columns` of them are wanted.
template <class Out, Activation kAct>
HYDRA_TARGET void finish_block(const float* sums, int64_t stride, int rows, int columns, const float* bias, Out* out,
                               int64_t out_stride) {
  for (int row = 0; row < rows; ++row) {
    for (int column = 0; column < columns; column += kLanes) {
      vf value = load(sums + row * stride + column);
      if (bias) value += load(bias + column);
      value = activate<kAct>(value);
      Out* target = out + row * out_stride + column;
      if (columns - column >= kLanes) {
        store(target, value);
      } else {
        store_part(target, value, columns - column);
      }
    }
  }
}

template <class Out>
HYDRA_TARGET void finish_block(const LinearCall& call, const float* sums, int64_t stride, int64_t row, int rows,
                               int64_t panel) {
  const int64_t column = panel * kPanel;
  const int64_t left = call.weight.num_out - column;
  const int columns = left < kPanel ? static_cast<int>(left) : kPanel;
  const float* bias = call.weight.bias ? call.weight.bias + column : nullptr;
  Out* out = static_cast<Out*>(call.out) + row * call.out_stride + column;
  switch (call.act) {
    case Activation::none:
      return finish_block<Out, Activation::none>(sums, stride, rows, columns, bias, out, call.out_stride);
    case Activation::silu:
      return finish_block<Out, Activation::silu>(sums, stride, rows, columns, bias, out, call.out_stride);
    case Activation::gelu:
      return finish_block<Out, Activation::gelu>(sums, stride, rows, columns, bias, out, call.out_stride);
    case Activation::gelu_tanh:
      return finish_block<Out, Activation::gelu_tanh>(sums, stride, rows, columns, bias, out, call.out_stride);
    case Activation::quick_gelu:
      return finish_block<Out, Activation::quick_gelu>(sums, stride, rows, columns, bias, out, call.out_stride);
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
