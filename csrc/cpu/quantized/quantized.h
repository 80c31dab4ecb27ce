// Matrix products with weights of 8 or 4 bits: act(x W^T + bias) + residual by the formulas of
// hydra_engine/backend/quantized.py. Rows of x become bytes once per call; sums over a part of a group of inputs are
// integers, and parts and groups add to float32 results by one fused multiply-add each, in order. So the bits of a row
// are the same at every instruction-set level, in every batch and with any number of threads.
//
// One layout for all levels, read in the order of its addresses. A step of a tile has for each of its 16 columns
// (outputs) four bytes in one or, in 6 bits, three vectors of 64 bytes:
//   8 bits: value + 128 of inputs k..k+3
//   4 bits: the lower halves have the values of inputs k..k+3, the upper halves the values of k+4..k+7
//   6 bits: twice the same with the lower four bits of value + 32; the upper two bits of k+i, k+4+i, k+8+i and k+12+i,
//           from the lowest up, in byte i
// A piece is up to 64 steps (6 bits: 16) of two tiles, which stay in the L1 cache while rows are processed. Columns
// are padded to 32, the inputs of an only group to 64:
//   [N/32 panels][groups]{pieces{[2 tiles][steps][16 columns][4 bytes]}, scales [32], offsets float32 [32] if any}
// Two-level scales precede the groups of every 256 inputs, padded to 64 bytes:
//   block scales f16 [1, with offsets 2][32], then for each group scales int8 [32] and, if any, offsets int8 [32]
#pragma once

#include <algorithm>
#include <cstdint>

#include "cpu/linear/linear.h"
#include "cpu/scratch.h"
#include "cpu/thread_pool.h"

namespace hydra {

constexpr int kStepBytes = 64;         // of a vector of a step
constexpr int64_t kBlockInputs = 256;  // that share a block scale
constexpr int64_t kPartInputs = 128;    // of a group, that share a step in a row of x; the last part may have fewer

constexpr int64_t step_inputs(int num_bits) { return num_bits == 8 ? 4 : num_bits == 4 ? 8 : 16; }
constexpr int64_t step_bytes(int num_bits) { return num_bits == 6 ? 3 * kStepBytes : kStepBytes; }
constexpr int64_t piece_steps(int num_bits) { return num_bits == 6 ? 16 : 64; }
constexpr int64_t part_steps(int num_bits) { return kPartInputs / step_inputs(num_bits); }
constexpr int packed_zero(int num_bits) { return 1 << (num_bits - 1); }

struct PackedQuantized {
  const void* data = nullptr;   // 64-byte aligned, owned by Python
  const float* bias = nullptr;  // num_panels * 32 values, or null
  int64_t num_out = 0;
  int64_t num_in = 0;
  int64_t groups = 1;  // of equal size; several: of a multiple of 16 inputs
  int num_bits = 8;    // or 4; 6 with scales in two levels
  DType scale_dtype = DType::f32;  // of the kernels' sums where scales have two levels: f32
  bool has_offsets = false;
  bool two_levels = false;  // in 4 and 6 bits, with groups that divide 256 inputs

  int64_t num_panels() const { return ceil_div(num_out, kPanel); }
  int64_t group_inputs() const { return groups == 1 ? ceil_div(num_in, 64) * 64 : num_in / groups; }
  int64_t steps() const { return group_inputs() / step_inputs(num_bits); }
  int64_t parts() const { return ceil_div(group_inputs(), kPartInputs); }  // of a group
  int64_t pieces() const { return ceil_div(steps(), piece_steps(num_bits)); }
  int64_t scales_bytes() const { return kPanel * element_size(scale_dtype); }
  int64_t offsets_bytes() const { return has_offsets ? kPanel * 4 : 0; }
  int64_t values_bytes() const { return 2 * steps() * step_bytes(num_bits); }  // of a group
  int64_t group_bytes() const { return values_bytes() + (two_levels ? 0 : scales_bytes() + offsets_bytes()); }
  int64_t block_groups() const { return kBlockInputs / group_inputs(); }
  int64_t block_scales_bytes() const {
    return ceil_div((2 + block_groups()) * (has_offsets ? 2 : 1) * kPanel, kStepBytes) * kStepBytes;
  }
  int64_t panel_bytes() const {
    return groups * group_bytes() + (two_levels ? num_in / kBlockInputs * block_scales_bytes() : 0);
  }
  int64_t num_bytes() const { return num_panels() * panel_bytes(); }
};

// The tensors of a QuantizedWeight, contiguous.
struct QuantizedTensors {
  const uint8_t* values;      // [num_out, num_in], or 4 bits: [num_out, num_in / 2]
  const void* scales;         // [num_out, groups], in two levels int8
  const void* offsets;        // [num_out, groups] float32, in two levels int8; or null
  const f16_t* block_scales;  // in two levels: [num_out, num_in / 256, 1 or, with offsets, 2]; else null
};

// Rows of x as bytes, and what every part of them adds: working memory that the threads of a call share. A block is a
// piece of a group, or as many whole groups as have the steps of a piece or share a block scale; at a distance that is
// known to the compiler, the rows of a block need no registers for their addresses.
struct QuantizedRows {
  int8_t* numbers = nullptr;  // [blocks][rows][block_stride], zero after num_in
  int8_t* low = nullptr;      // the same of the lower bytes of numbers with 16 bits; zeros where they have 8
  int number_bytes = 1;       // 2 where a level wants numbers of 16 bits, in an order of its own; there is no `low` then
  int64_t rows = 0;
  float* steps = nullptr;        // [parts][rows], the formulas' s; / 256 where number_bytes is 2
  int32_t* zeros = nullptr;      // [parts][rows], minus the sum of the numbers times the packed form of a zero
  int32_t* low_zeros = nullptr;  // the same of `low`
  uint8_t* has_low = nullptr;    // [parts][rows]
  uint8_t* any_low = nullptr;    // [blocks][rows], of the parts of a block
  float* row_sums = nullptr;     // [groups][rows], what x itself sums to
};

// Bytes between rows of a block: the cache line more spreads them over the sets of the first-level cache.
constexpr int64_t block_stride(int num_bits, int number_bytes) {
  return piece_steps(num_bits) * step_inputs(num_bits) * number_bytes + 64;
}

// Prefetches the line 8 KiB ahead: with several rows the hardware prefetcher is too late. No effect past the end of the
// weights. Weights are read once a step and evict less from the caches this way: reading other data from them after a
// step costs a fifth less. Always inline: the compiler may remove calls of a function that only prefetches.
__attribute__((always_inline)) inline void prefetch_ahead(const uint8_t* line) {
  __builtin_prefetch(line + 8192, 0, 0);
}

inline int64_t groups_per_block(const PackedQuantized& weight) {
  if (weight.two_levels) return weight.block_groups();
  return weight.steps() == 0 ? weight.groups : std::max<int64_t>(1, piece_steps(weight.num_bits) / weight.steps());
}
inline int64_t num_blocks(const PackedQuantized& weight) {
  return ceil_div(weight.groups, groups_per_block(weight)) * std::max<int64_t>(1, weight.pieces());
}

struct QuantizedCall {
  PackedQuantized weight;
  LinearCall result;  // of its weight only the sizes, the bias, and dtype, which is that of x
  QuantizedRows rows;
};

// Copies a weight into packed.data's memory.
void pack_quantized(const PackedQuantized& packed, const QuantizedTensors& weight);

void linear_quantized(const QuantizedCall& call);

// ---- the steps of `linear_quantized`, at the current level

// Lets call.rows have memory for call.result.rows rows.
void reserve_rows(QuantizedCall& call, Scratch& numbers, Scratch& groups);
// Fills call.rows for rows [begin, end), on the calling thread.
void quantize_rows(const QuantizedCall& call, int64_t begin, int64_t end);
// Calls quantize(begin, end) for ranges that cover the call's rows, each on one thread.
template <class Quantize>
void for_quantized_rows(const QuantizedCall& call, Quantize&& quantize) {
  constexpr int64_t kElementsPerThread = 1 << 15;
  parallel_for(call.result.rows, ceil_div(kElementsPerThread, std::max<int64_t>(1, call.weight.num_in)), quantize);
}
// The rows from `row` on.
QuantizedRows rows_from(const QuantizedRows& rows, const PackedQuantized& weight, int64_t row);
// One rectangle, on the calling thread. Its rows are counted from the first of call.rows.
void quantized_part(const QuantizedCall& call, const LinearPart& part);

// Every level has these: quantize_rows fills call.rows for rows [begin, end); quantized_part computes one rectangle.
namespace scalar {
void quantize_rows(const QuantizedCall& call, int64_t begin, int64_t end);
void quantized_part(const QuantizedCall& call, const LinearPart& part);
}  // namespace scalar
namespace avx2 {
void quantize_rows(const QuantizedCall& call, int64_t begin, int64_t end);
void quantized_part(const QuantizedCall& call, const LinearPart& part);
}  // namespace avx2
namespace avx512vnni {
void quantize_rows(const QuantizedCall& call, int64_t begin, int64_t end);
void quantized_part(const QuantizedCall& call, const LinearPart& part);
}  // namespace avx512vnni
namespace amx {
void quantized_part(const QuantizedCall& call, const LinearPart& part);
}

}  // namespace hydra
