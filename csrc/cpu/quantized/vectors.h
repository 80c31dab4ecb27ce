// A block times rows by sums in vectors. Include after defining a level, see cpu/simd.h, and after declaring, for a tile
// or a part of its columns,
//   constexpr int kMostRows, vectors_of(int rows)  rows that share unpacked weights; vectors of columns at once
//   constexpr int number_bytes(int num_bits)       of a number of x
//   dot<kBits>(vi (&sums)[rows][vectors], const int8_t* x, const uint8_t* weights, const Block& block)
// which sets sums[r][v] to the sum over all inputs of a group or piece of numbers of row r times values as packed.
#pragma once

#include <algorithm>
#include <utility>

#include "cpu/quantized/block.h"

namespace hydra::HYDRA_LEVEL {

// Adds what a group, or the last piece of one, makes of rows and columns `column` and on to their sums.
template <bool kOffsets, class Scale, int kRows, int kVectors>
HYDRA_INLINE void add_groups(const Block& block, const Scale* scales, int64_t group, int column,
                             const vi (&dots)[kRows][kVectors]) {
#pragma GCC unroll 4
  for (int v = 0; v < kVectors; ++v) {
    const int here = column + v * kLanes;
    const GroupFactors factors = factors_of<kOffsets>(block, scales, here);
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) add_group<kOffsets>(block, factors, group, r, here, dots[r][v]);
  }
}

// `kSteps`: of whole groups; 0: any number, also of pieces.
template <int kBits, class Scale, int kSteps, int kRows>
HYDRA_TARGET void multiply_block(const Block& given) {
  Block block = given;  // a copy that no store of sums can change
  if constexpr (kSteps > 0) {
    block.steps = kSteps;
    block.first = block.last = true;
  }
  constexpr int kVectors = vectors_of(kRows);
  const int8_t* x = block.x;
  const uint8_t* weights = block.weights;
  const uint8_t* scales_at = block.scales;
  for (int64_t group = 0; group < block.groups; ++group, weights += block.group_bytes) {
    const Scale* scales = reinterpret_cast<const Scale*>(scales_at);
    for (int column = 0; column < kPanel; column += kVectors * kLanes) {
      const uint8_t* tile = weights + column / kTile * block.steps * step_bytes(kBits) + column % kTile * 4;
      vi dots[kRows][kVectors];
      dot<kBits>(dots, x, tile, block);
      if (!block.first || !block.last) {
#pragma GCC unroll 16
        for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
          for (int v = 0; v < kVectors; ++v) {
            vi* partial = reinterpret_cast<vi*>(block.partial + r * kPanel + column + v * kLanes);
            if (!block.first) dots[r][v] += *partial;
            if (!block.last) *partial = dots[r][v];
          }
        }
        if (!block.last) continue;
      }
      if (block.offsets_at) {
        add_groups<true>(block, scales, group, column, dots);
      } else {
        add_groups<false>(block, scales, group, column, dots);
      }
    }
    x += block.steps * step_inputs(kBits) * number_bytes(kBits);
    scales_at += block.scales_bytes;
  }
}

using MultiplyBlock = void (*)(const Block&);

template <int kBits, class Scale, int kSteps, int... kRow>
MultiplyBlock block_product(int rows, std::integer_sequence<int, kRow...>) {
  constexpr MultiplyBlock kProducts[] = {multiply_block<kBits, Scale, kSteps, kRow + 1>...};
  return kProducts[rows - 1];
}

// Groups of 32 inputs in 4 bits and of 16 in 6, of which most files are, have products of their own.
template <int kBits, class Scale>
MultiplyBlock block_product(const Block& block, int rows) {
  constexpr auto kRows = std::make_integer_sequence<int, kMostRows>();
  if constexpr (kBits != 8) {
    constexpr int kSteps = kBits == 4 ? 4 : 1;
    if (block.steps == kSteps && block.first && block.last) return block_product<kBits, Scale, kSteps>(rows, kRows);
  }
  return block_product<kBits, Scale, 0>(rows, kRows);
}

// One block times `rows` rows from its own on.
template <int kBits, class Scale>
void multiply_rows(Block block, int64_t rows) {
  constexpr int64_t kStride = block_stride(kBits, number_bytes(kBits));
  for (int64_t done = 0; done < rows; done += kMostRows) {
    const int some = static_cast<int>(std::min<int64_t>(kMostRows, rows - done));
    block_product<kBits, Scale>(block, some)(block);
    block.x += some * kStride;
    block.x_steps += some;
    block.zeros += some;
    block.row_sums += some;
    block.sums += some * kPanel;
    block.partial += some * kPanel;
  }
}

}  // namespace hydra::HYDRA_LEVEL
