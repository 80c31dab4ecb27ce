// The loops of a product: panel by panel, group by group, piece by piece. Include after defining a level, see cpu/simd.h,
// and after declaring
//   constexpr int number_bytes(int num_bits)             of a number of x
//   multiply_rows<kBits, Scale>(Block block, int64_t rows)  one block times rows from its own on
#pragma once

#include <algorithm>

#include "cpu/linear/epilogue.h"
#include "cpu/quantized/block.h"
#include "cpu/quantized/two_levels.h"

namespace hydra::HYDRA_LEVEL {

constexpr int kRowChunk = 64;  // rows whose sums stay in the first-level cache

// One panel times rows [row, row + rows) of the call.
template <int kBits, class Scale>
void multiply_panel(const QuantizedCall& call, int64_t row, int64_t rows, int64_t panel, float* sums,
                    float* partial) {
  constexpr int64_t kStride = block_stride(kBits, number_bytes(kBits)), kPieceBytes = 2 * step_bytes(kBits);
  const PackedQuantized& weight = call.weight;
  const int64_t steps = weight.steps(), per_block = groups_per_block(weight), parts = weight.parts();
  const int64_t values_bytes = weight.values_bytes(), group_bytes = weight.group_bytes();
  const int64_t block_scales_bytes = weight.two_levels ? weight.block_scales_bytes() : 0;
  WideScales wide;
  Block block{static_cast<const uint8_t*>(weight.data) + panel * weight.panel_bytes(),
              steps, per_block, group_bytes, true, true,
              reinterpret_cast<const uint8_t*>(wide.scales), weight.two_levels ? WideScales::kGroupBytes : group_bytes,
              weight.has_offsets ? weight.scales_bytes() : 0,
              call.rows.numbers + row * kStride, call.rows.low - call.rows.numbers,
              call.rows.steps + row, call.rows.zeros + row, call.rows.low_zeros + row, call.rows.has_low + row,
              call.rows.any_low + row, call.rows.row_sums + row, call.rows.rows, sums, partial};
  for (int64_t group = 0; group < weight.groups; group += per_block) {
    block.groups = std::min(per_block, weight.groups - group);
    if (weight.two_levels) {
      (weight.has_offsets ? widen<kBits, true> : widen<kBits, false>)(block.weights, per_block, wide);
      block.weights += block_scales_bytes;
    } else {
      block.scales = block.weights + values_bytes;
    }
    int64_t begin = 0;
    do {
      block.steps = std::min(piece_steps(kBits), steps - begin);
      block.first = begin == 0;
      block.last = begin + block.steps == steps;
      multiply_rows<kBits, Scale>(block, rows);
      block.x += call.rows.rows * kStride;
      block.any_low += call.rows.rows;
      block.next_parts(block.last ? parts * block.groups - begin / part_steps(kBits)
                                  : piece_steps(kBits) / part_steps(kBits));
      if (!block.last) block.weights += block.steps * kPieceBytes;
      begin += block.steps;
    } while (begin < steps);
    block.weights += block.groups * group_bytes - (begin - block.steps) * kPieceBytes;
    block.row_sums += block.groups * block.all_rows;
  }
}

template <int kBits, class Scale>
void multiply_panels(const QuantizedCall& call, const LinearPart& part) {
  alignas(64) float sums[kRowChunk * kPanel];
  alignas(64) float partial[kRowChunk * kPanel];
  for (int64_t row = part.row_begin; row < part.row_end; row += kRowChunk) {
    const int64_t rows = std::min<int64_t>(kRowChunk, part.row_end - row);
    for (int64_t panel = part.panel_begin; panel < part.panel_end; ++panel) {
      std::memset(sums, 0, static_cast<size_t>(rows) * kPanel * 4);
      multiply_panel<kBits, Scale>(call, row, rows, panel, sums, partial);
      finish_block(call.result, sums, kPanel, row, static_cast<int>(rows), panel);
    }
  }
}

void quantized_part(const QuantizedCall& call, const LinearPart& part) {
  if (call.weight.num_bits == 6) return multiply_panels<6, float>(call, part);
  dispatch(call.weight.scale_dtype, [&](auto scale) {
    using Scale = decltype(scale);
    call.weight.num_bits == 8 ? multiply_panels<8, Scale>(call, part) : multiply_panels<4, Scale>(call, part);
  });
}

}  // namespace hydra::HYDRA_LEVEL
