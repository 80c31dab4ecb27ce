// Matrix products with packed weights: act(x W^T + bias) + residual with float32 sums. This header knows the packed layouts and
// who computes what; the products themselves are in one file per instruction-set level.
//
// Every row of the result is computed by the same sequence of operations over k = 0, 1, ... whatever the number of
// rows, their place among them and the number of threads, so results are bitwise independent of the batch.
//
// Layouts, chosen by dtype alone so that every level can read them (columns = outputs, padded with zeros to 32):
//   bf16       [N/32 panels][K/32 blocks][2 tiles of 16 columns][16 pairs of k][16 columns][2], K padded to 32
//   f32, f16   [N/32 panels][K][32 columns]
#pragma once

#include <cstdint>

#include "cpu/activation_kind.h"
#include "dtype.h"

namespace hydra {

constexpr int kPanel = 32;  // columns of a panel, and k of a bf16 block
constexpr int kTile = 16;   // columns of a bf16 tile
constexpr int kTileElements = kTile * kPanel;

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

struct PackedWeight {
  const void* data = nullptr;   // 64-byte aligned, owned by Python
  const float* bias = nullptr;  // num_panels * 32 values, or null
  int64_t num_out = 0;
  int64_t num_in = 0;
  DType dtype = DType::f32;
  DType x_dtype = DType::f32;  // of the rows that it multiplies: f32 or `dtype`

  bool is_bf16() const { return dtype == DType::bf16 && x_dtype == DType::bf16; }
  int64_t num_panels() const { return ceil_div(num_out, kPanel); }
  int64_t padded_in() const { return dtype == DType::bf16 ? ceil_div(num_in, kPanel) * kPanel : num_in; }
  int64_t panel_elements() const { return padded_in() * kPanel; }
  int64_t num_bytes() const { return num_panels() * panel_elements() * element_size(dtype); }
};

struct LinearCall {
  PackedWeight weight;
  const void* x = nullptr;  // [rows, num_in] of weight.x_dtype
  int64_t x_stride = 0;     // elements between rows
  void* out = nullptr;      // [rows, num_out] of out_dtype
  int64_t out_stride = 0;
  const void* residual = nullptr;  // [rows, num_out] of out_dtype, not the memory of `out`; or null
  int64_t residual_stride = 0;
  int64_t rows = 0;
  const void* packed_x = nullptr;  // the rows in tile order, or null; see amx::pack_rows
  Activation act = Activation::none;
  DType out_dtype = DType::f32;
};

// A rectangle of the result: rows [row_begin, row_end) x panels [panel_begin, panel_end).
struct LinearPart {
  int64_t row_begin, row_end, panel_begin, panel_end;
};

// Copies weight [num_out, num_in] (row stride in elements) into packed.data's memory.
void pack_weight(const PackedWeight& packed, const void* weight, int64_t weight_stride);

void linear(const LinearCall& call);

// One rectangle on the calling thread, at the current level.
void linear_part(const LinearCall& call, const LinearPart& part);

// The same at one level.
namespace scalar {
void linear_part(const LinearCall& call, const LinearPart& part);
}
namespace avx2 {
void linear_part(const LinearCall& call, const LinearPart& part);
}
namespace avx512 {
void linear_part(const LinearCall& call, const LinearPart& part);
}
namespace avx512bf16 {
void linear_part_bf16(const LinearCall& call, const LinearPart& part);
}
namespace amx {
void linear_part_bf16(const LinearCall& call, const LinearPart& part);

// Many rows times many columns are faster from a copy of x in the order in which tiles load it:
// [row blocks of 32][k blocks of 32][32 rows][32 k], k padded with zeros. Threads share one copy.
bool wants_packed_rows(const LinearCall& call);
int64_t packed_rows_bytes(const LinearCall& call);
void pack_rows(const LinearCall& call, int64_t begin, int64_t end, void* packed);
}  // namespace amx

}  // namespace hydra
