// Products by fused multiply-adds on float32, for rows and weights of any dtype: the only way for all but bf16 rows, and
// the way for those where the processor has no bf16 instructions. Rows of x become float32 first, weights while they
// are loaded: widening is exact, so 16-bit weights give float32 rows the bits that the same weights in float32 give.
// Include after defining a level, see cpu/simd.h.
#pragma once

#include <algorithm>

#include "cpu/linear/epilogue.h"
#include "cpu/scratch.h"

namespace hydra::HYDRA_LEVEL {

// 12 rows x 2 vectors fill 24 of AVX-512's 32 registers, 6 x 2 fill 12 of the 16 of other levels.
constexpr int kMaxRows = kLanes == 16 ? 12 : 6;

// Address of the pair of `column`, and of kLanes columns' pairs, on the line of a bf16 block for one pair of k.
HYDRA_INLINE const bf16_t* pairs_at(const bf16_t* line, int column) {
  return line + column / kTile * kTileElements + column % kTile * 2;
}

HYDRA_INLINE vu load_pairs(const bf16_t* line, int column) {
  return *reinterpret_cast<const vu_memory*>(pairs_at(line, column));
}

// Adds one k to kRows rows.
template <int kRows, int kVectors>
HYDRA_INLINE void step(vf (&sums)[kRows][kVectors], const float* x, int64_t x_stride, const vf (&w)[kVectors]) {
#pragma GCC unroll 12
  for (int row = 0; row < kRows; ++row) {
    const vf value = splat(x[row * x_stride]);
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) sums[row][v] += value * w[v];
  }
}

// Adds k [0, count) of a block, the part of a panel with kPanel values of k, in the columns from `column` on.
template <int kRows, int kVectors, class Weight>
HYDRA_INLINE void add_block(vf (&sums)[kRows][kVectors], const float* x, int64_t x_stride, const Weight* block,
                            int64_t count, int column) {
  block += column;
#pragma GCC unroll 1
  for (int64_t k = 0; k < count; ++k) {
    vf w[kVectors];
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) w[v] = load(block + k * kPanel + v * kLanes);
    step(sums, x + k, x_stride, w);
  }
}

// The distance at which memory is prefetched: the hardware prefetchers stop at the end of a page. For a single row they
// are enough.
constexpr int64_t kPrefetchBytes = 4096;

template <int kRows, int kVectors>
HYDRA_INLINE void add_block(vf (&sums)[kRows][kVectors], const float* x, int64_t x_stride, const bf16_t* block,
                            int64_t count, int column) {
  const vu upper = vu{} + 0xffff0000u;
#pragma GCC unroll 1
  for (int64_t k = 0; k < count; k += 2) {
    const bf16_t* line = block + k * kTile;
    if (kRows > 1 && column % kTile == 0) {
      __builtin_prefetch(reinterpret_cast<const char*>(pairs_at(line, column)) + kPrefetchBytes);
    }
    vu pairs[kVectors];
    vf w[kVectors];
#pragma GCC unroll 2
    for (int v = 0; v < kVectors; ++v) {
      pairs[v] = load_pairs(line, column + v * kLanes);
      w[v] = (vf)(pairs[v] << 16);
    }
    step(sums, x + k, x_stride, w);
    if (k + 1 == count) break;
    if constexpr (kRows == kMaxRows) {
      __asm__("" : "+r"(line));  // loads them again: kept, they would not fit into the registers
#pragma GCC unroll 2
      for (int v = 0; v < kVectors; ++v) pairs[v] = load_pairs(line, column + v * kLanes);
    }
#pragma GCC unroll 2
    for (int v = 0; v < kVectors; ++v) w[v] = (vf)(pairs[v] & upper);
    step(sums, x + k + 1, x_stride, w);
  }
}

template <int kRows, int kVectors>
HYDRA_INLINE void load_sums(vf (&sums)[kRows][kVectors], const float* source) {
#pragma GCC unroll 12
  for (int row = 0; row < kRows; ++row) {
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) sums[row][v] = load(source + row * kPanel + v * kLanes);
  }
}

template <int kRows, int kVectors>
HYDRA_INLINE void store_sums(const vf (&sums)[kRows][kVectors], float* target) {
#pragma GCC unroll 12
  for (int row = 0; row < kRows; ++row) {
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) store(target + row * kPanel + v * kLanes, sums[row][v]);
  }
}

// Many rows are bound by multiplication: their sums stay in registers, and each value of x is loaded once for two
// vectors.
template <int kRows, class Weight>
HYDRA_TARGET void multiply_rows(const float* x, int64_t x_stride, const Weight* panel, int64_t num_in, float* result) {
  constexpr int kVectors = 2;
#pragma GCC unroll 4
  for (int column = 0; column < kPanel; column += kVectors * kLanes) {
    vf sums[kRows][kVectors] = {};
    for (int64_t k = 0; k < num_in; k += kPanel) {
      add_block(sums, x + k, x_stride, panel + k * kPanel, std::min<int64_t>(kPanel, num_in - k), column);
    }
    store_sums(sums, result + column);
  }
}

// Few rows are as fast as their weights are read, and memory is read fastest in the order of its addresses: tile after
// tile. Sums of both tiles stay in registers where there are enough. Adds to `sums`, [kRows][32].
template <int kRows, class Weight>
HYDRA_TARGET void add_rows(const float* x, int64_t x_stride, const Weight* panel, int64_t num_in, float* sums) {
  constexpr int kVectors = kLanes == 16 ? 1 : 2, kColumns = kVectors * kLanes, kParts = kPanel / kColumns;
  constexpr bool kHeld = kRows * kParts * kVectors <= kMaxRows * 2;
  vf held[kParts][kRows][kVectors];
#pragma GCC unroll 4
  for (int part = 0; part < kParts; ++part) {
    if (kHeld) load_sums(held[part], sums + part * kColumns);
  }
  for (int64_t k = 0; k < num_in; k += kPanel) {
    const int64_t count = std::min<int64_t>(kPanel, num_in - k);
#pragma GCC unroll 4
    for (int part = 0; part < kParts; ++part) {
      if (!kHeld) load_sums(held[part], sums + part * kColumns);
      add_block(held[part], x + k, x_stride, panel + k * kPanel, count, part * kColumns);
      if (!kHeld) store_sums(held[part], sums + part * kColumns);
    }
  }
#pragma GCC unroll 4
  for (int part = 0; part < kParts; ++part) {
    if (kHeld) store_sums(held[part], sums + part * kColumns);
  }
}

template <bool kFew, class Weight, int kRows = kMaxRows>
HYDRA_TARGET void multiply_block(int rows, const float* x, int64_t x_stride, const Weight* panel, int64_t num_in,
                                 float* sums) {
  if constexpr (kRows > 1) {
    if (rows < kRows) return multiply_block<kFew, Weight, kRows - 1>(rows, x, x_stride, panel, num_in, sums);
  }
  if constexpr (kFew) {
    add_rows<kRows, Weight>(x, x_stride, panel, num_in, sums);
  } else {
    multiply_rows<kRows, Weight>(x, x_stride, panel, num_in, sums);
  }
}

constexpr int kFewRows = 16;

// One pass over the panel's memory: groups of rows follow each other over a piece of it that stays in the first-level
// cache.
template <class Weight>
HYDRA_TARGET void multiply_few(int rows, const float* x, int64_t x_stride, const Weight* panel, int64_t num_in,
                               float* sums) {
  constexpr int64_t kPiece = 128;  // of k, 8 or 16 KiB
  std::memset(sums, 0, static_cast<size_t>(rows) * kPanel * 4);
  const int groups = static_cast<int>(ceil_div(rows, kMaxRows));
  const int64_t piece = groups == 1 ? num_in : kPiece;
  for (int64_t k = 0; k < num_in; k += piece) {
    const int64_t count = std::min(piece, num_in - k);
    for (int group = 0; group < groups; ++group) {
      const int begin = rows * group / groups, end = rows * (group + 1) / groups;
      multiply_block<true, Weight>(end - begin, x + begin * x_stride + k, x_stride, panel + k * kPanel, count,
                                   sums + begin * kPanel);
    }
  }
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
  alignas(64) float sums[std::max(kMaxRows, kFewRows) * kPanel];
  for (int64_t begin = part.row_begin; begin < part.row_end; begin += chunk) {
    const int64_t end = std::min(begin + chunk, part.row_end);
    int64_t stride;
    const float* x = float_rows<X>(call, begin, end, scratch, stride);
    for (int64_t panel = part.panel_begin; panel < part.panel_end; ++panel) {
      const Weight* weights = static_cast<const Weight*>(call.weight.data) + panel * call.weight.panel_elements();
      if (end - begin <= kFewRows) {
        multiply_few<Weight>(static_cast<int>(end - begin), x, stride, weights, call.weight.num_in, sums);
        finish_block(call, sums, kPanel, begin, static_cast<int>(end - begin), panel);
        continue;
      }
      for (int64_t row = begin; row < end; row += kMaxRows) {
        const int rows = static_cast<int>(std::min<int64_t>(kMaxRows, end - row));
        const float* x_row = x + (row - begin) * stride;
        multiply_block<false, Weight>(rows, x_row, stride, weights, call.weight.num_in, sums);
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
