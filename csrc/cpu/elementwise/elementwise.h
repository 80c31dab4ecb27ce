// Norms, gated activations, rotations and largest numbers, row by row in float32. Row t of a result depends on row t of
// the input alone.
#pragma once

#include <cstdint>

#include "cpu/activation_kind.h"
#include "dtype.h"

namespace hydra {

// One call of any of these operations; members that an operation does not use stay empty. Strides count elements
// between rows; `out` and `sum` are contiguous. `sum` may be the memory of `residual`. Row t of x is head t % heads of
// token t / heads.
struct RowsCall {
  const void* x = nullptr;         // [rows, columns]; act_and_mul: [rows, 2 * columns]
  const void* residual = nullptr;  // [rows, columns]
  const void* gate = nullptr;      // [rows, columns]
  const void* weight = nullptr;    // [columns], float32 where `wide_weight` says so
  const void* bias = nullptr;      // [columns]
  const float* cos = nullptr;      // [tokens, columns / 2]
  const float* sin = nullptr;
  void* out = nullptr;             // [rows, columns]
  void* sum = nullptr;             // [rows, columns]: x + residual
  int64_t rows = 0;
  int64_t columns = 0;
  int64_t heads = 1;
  int64_t x_stride = 0;  // between tokens
  int64_t head_stride = 0;
  int64_t residual_stride = 0;
  int64_t gate_stride = 0, gate_head_stride = 0;
  bool wide_weight = false;
  int64_t cos_stride = 0, sin_stride = 0;
  float eps = 0;
  Activation act = Activation::none;
  DType dtype = DType::f32;
};

enum class RowsOp { rms_norm, add_rms_norm, layer_norm, act_and_mul, rotate, gated_rms_norm, sigmoid_mul };

void run_rows(RowsOp op, const RowsCall& call);

struct BestCall {
  const float* x = nullptr;  // [rows, columns], columns > 0
  int64_t x_stride = 0;
  int64_t rows = 0;
  int64_t columns = 0;
  int64_t* best = nullptr;  // [rows]: where the first of the row's largest numbers is, -1 if any is not finite
};

void best_of_rows(const BestCall& call);

// Rows [begin, end) on the calling thread.
namespace scalar {
void run_rows(RowsOp op, const RowsCall& call, int64_t begin, int64_t end);
void best_of_rows(const BestCall& call, int64_t begin, int64_t end);
}
namespace avx2 {
void run_rows(RowsOp op, const RowsCall& call, int64_t begin, int64_t end);
void best_of_rows(const BestCall& call, int64_t begin, int64_t end);
}
namespace avx512bf16 {
void run_rows(RowsOp op, const RowsCall& call, int64_t begin, int64_t end);
void best_of_rows(const BestCall& call, int64_t begin, int64_t end);
}

}  // namespace hydra
