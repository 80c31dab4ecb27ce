// The loops of a product: panel by panel, group by group, piece by piece. Include after defining a level, see cpu/simd.h,
// and after declaring
//   constexpr int number_bytes(int num_bits)             of a number of x
//   multiply_rows<kBits, Scale>(Block block, int64_t rows)  one block times rows from its own on
#pragma once

#include <algorithm>

#include "cpu/linear/epilogue.h"
#include "cpu/quantized/block.h"

namespace hydra::HYDRA_LEVEL {

constexpr int kRowChunk = 64;  // rows whose sums stay in the first-level cache

// One panel times rows [row, row + rows) of the call.
template <int kBits, class Scale>
void multiply_panel(const QuantizedCall& call, int64_t row, int64_t rows, int64_t panel, float* sums,
                    int32_t* partial) {
  constexpr int64_t kStride = block_stride(kBits, number_bytes(kBits));
  const PackedQuantized& weight = call.weight;
  const int64_t steps = weight.steps(), per_block = groups_per_block(weight);
  Block block{static_cast<const uint8_t*>(weight.data) + panel * weight.panel_bytes(),
              steps, per_block, weight.group_bytes(), true, true,
              weight.offsets_bytes() ? weight.scales_bytes() : 0,
              call.rows.numbers + row * kStride,
              call.rows.steps + row, call.rows.zeros + row, call.rows.row_sums + row, call.rows.rows, sums, partial};
  for (int64_t group = 0; group < weight.groups; group += per_block) {
    block.groups = std::min(per_block, weight.groups - group);
    int64_t begin = 0;
    do {
      block.steps = std::min(kPieceSteps, steps - begin);
      block.first = begin == 0;
      block.last = begin + block.steps == steps;
      multiply_rows<kBits, Scale>(block, rows);
      block.x += call.rows.rows * kStride;
      if (!block.last) block.weights += 2 * block.steps * kStepBytes;
      begin += block.steps;
    } while (begin < steps);
    block.weights += block.groups * weight.group_bytes() - 2 * (begin - block.steps) * kStepBytes;
    const int64_t passed = block.groups * block.all_rows;
    block.x_steps += passed;
    block.zeros += passed;
    block.row_sums += passed;
  }
}

template <int kBits, class Scale>
void multiply_panels(const QuantizedCall& call, const LinearPart& part) {
  alignas(64) float sums[kRowChunk * kPanel];
  alignas(64) int32_t partial[kRowChunk * kPanel];
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
  dispatch(call.weight.scale_dtype, [&](auto scale) {
    using Scale = decltype(scale);
    call.weight.num_bits == 8 ? multiply_panels<8, Scale>(call, part) : multiply_panels<4, Scale>(call, part);
  });
}

}  // namespace hydra::HYDRA_LEVEL
