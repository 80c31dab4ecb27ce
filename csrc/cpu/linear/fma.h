// Products by fused multiply-adds on float32, for rows and weights of any dtype: the only way for all but bf16 rows, and
// the way for those where the processor has no bf16 instructions. Rows of x become float32 first, weights while they
// are loaded: widening is exact, so 16-bit weights give float32 rows the bits that the same weights in float32 give.
// Include after defining a level, see cpu/simd.h.
#pragma once

#include <algorithm>

#include "cpu/linear/epilogue.h"
#include "cpu/scratch.h"

namespace hydra::HYDRA_LEVEL {

// 12 rows x 2 vectors fill 24 of 32 registers of AVX-512, 6 x 2 fill 12 of 16 of the others.
constexpr int kMaxRows = kLanes == 16 ? 12 : 6;

// Adds one step of k for kRows rows: two k of a pair for bf16, one otherwise. `weights` points at this step's columns.
template <int kRows, int kVectors>
HYDRA_INLINE void step(vf (&sums)[kRows][kVectors], const float* x, int64_t x_stride, const vf (&w)[kVectors]) {
#pragma GCC unroll 12
  for (int row = 0; row < kRows; ++row) {
    const vf value = splat(x[row * x_stride]);
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) sums[row][v] += value * w[v];
  }
}

template <int kRows, int kVectors, class Weight>
HYDRA_INLINE void accumulate(vf (&sums)[kRows][kVectors], const float* x, int64_t x_stride, const Weight* panel,
                             int64_t num_in, int column) {
  const Weight* weights = panel + column;
  for (int64_t k = 0; k < num_in; ++k, weights += kPanel) {
    vf w[kVectors];
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) w[v] = load(weights + v * kLanes);
    step(sums, x + k, x_stride, w);
  }
}

// The address of the first pair of `column` in a bf16 panel's first block.
HYDRA_INLINE const bf16_t* pair_address(const bf16_t* panel, int column) {
  return panel + column / kTile * kTileElements + column % kTile * 2;
}

template <int kRows, int kVectors>
HYDRA_INLINE void accumulate(vf (&sums)[kRows][kVectors], const float* x, int64_t x_stride, const bf16_t* panel,
                             int64_t num_in, int column) {
  for (int64_t k = 0; k < num_in; k += 2) {
    const bf16_t* block = panel + k / kPanel * kPanel * kPanel + k % kPanel * kTile;
    vf even[kVectors], odd[kVectors];
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) {
      const vu pairs = *reinterpret_cast<const vu_memory*>(pair_address(block, column + v * kLanes));
      even[v] = (vf)(pairs << 16);
      odd[v] = (vf)(pairs & 0xffff0000u);
    }
    step(sums, x + k, x_stride, even);
    if (k + 1 < num_in) step(sums, x + k + 1, x_stride, odd);
  }
}

template <int kRows, class Weight>
HYDRA_TARGET void multiply_rows(const float* x, int64_t x_stride, const Weight* panel, int64_t num_in, float* result) {
  constexpr int kWide = kPanel / kLanes;
  constexpr int kVectors = kRows <= 2 && kWide <= 4 ? kWide : 2;  // few rows: one pass over the panel's memory
  for (int column = 0; column < kPanel; column += kVectors * kLanes) {
    vf sums[kRows][kVectors] = {};
    accumulate(sums, x, x_stride, panel, num_in, column);
#pragma GCC unroll 12
    for (int row = 0; row < kRows; ++row) {
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) store(result + row * kPanel + column + v * kLanes, sums[row][v]);
    }
  }
}

template <class Weight, int kRows = kMaxRows>
HYDRA_TARGET void multiply_rows(int rows, const float* x, int64_t x_stride, const Weight* panel, int64_t num_in,
                                float* result) {
  if constexpr (kRows > 1) {
    if (rows < kRows) return multiply_rows<Weight, kRows - 1>(rows, x, x_stride, panel, num_in, result);
  }
  multiply_rows<kRows, Weight>(x, x_stride, panel, num_in, result);
}

template <class T>
HYDRA_TARGET void convert_row(const T* source, float* target, int64_t count) {
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) store(target + i, load(source + i));
  for (; i < count; ++i) target[i] = to_float(source[i]);
}

// Rows [begin, end) as float32 and their stride. They are copied unless they are few and float32 already, to a stride
// that spreads them over the sets of the first-level cache: at a stride of 4096 bytes all would compete for one set.
template <class T>
HYDRA_TARGET const float* float_rows(const LinearCall& call, int64_t begin, int64_t end, Scratch& scratch,
                                     int64_t& stride) {
  const T* x = static_cast<const T*>(call.x) + begin * call.x_stride;
  if constexpr (sizeof(T) == sizeof(float)) {
    if (end - begin <= kMaxRows) {
      stride = call.x_stride;
      return x;
    }
  }
  constexpr int64_t kLine = 16;
  stride = (ceil_div(call.weight.num_in, kLine) | 1) * kLine;
  float* rows = static_cast<float*>(scratch.reserve((end - begin) * stride * 4));
  for (int64_t row = 0; row < end - begin; ++row) {
    convert_row(x + row * call.x_stride, rows + row * stride, call.weight.num_in);
  }
  return rows;
}

template <class X, class Weight>
HYDRA_TARGET void multiply_part(const LinearCall& call, const LinearPart& part) {
  static thread_local Scratch scratch;
  // A panel stays in the second-level cache while the rows of a chunk pass by; 2 MiB of rows repay fetching it.
  const int64_t wanted = (1 << 21) / (4 * std::max<int64_t>(call.weight.num_in, 1));
  const int64_t chunk = std::max<int64_t>(wanted / kMaxRows, 4) * kMaxRows;
  alignas(64) float sums[kMaxRows * kPanel];
  for (int64_t begin = part.row_begin; begin < part.row_end; begin += chunk) {
    const int64_t end = std::min(begin + chunk, part.row_end);
    int64_t stride;
    const float* x = float_rows<X>(call, begin, end, scratch, stride);
    for (int64_t panel = part.panel_begin; panel < part.panel_end; ++panel) {
      const Weight* weights = static_cast<const Weight*>(call.weight.data) + panel * call.weight.panel_elements();
      for (int64_t row = begin; row < end; row += kMaxRows) {
        const int rows = static_cast<int>(std::min<int64_t>(kMaxRows, end - row));
        multiply_rows<Weight>(rows, x + (row - begin) * stride, stride, weights, call.weight.num_in, sums);
        finish_block(call, sums, kPanel, row, rows, panel);
      }
    }
  }
}

HYDRA_TARGET inline void multiply_part(const LinearCall& call, const LinearPart& part) {
  const bool wide = call.weight.x_dtype == DType::f32;
  switch (call.weight.dtype) {
    case DType::f32:
      return multiply_part<float, float>(call, part);
    case DType::bf16:
      return wide ? multiply_part<float, bf16_t>(call, part) : multiply_part<bf16_t, bf16_t>(call, part);
    case DType::f16:
      return wide ? multiply_part<float, f16_t>(call, part) : multiply_part<f16_t, f16_t>(call, part);
  }
}

}  // namespace hydra::HYDRA_LEVEL
