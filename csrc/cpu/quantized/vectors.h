// A block times rows by sums in vectors. Include after defining a level, see cpu/simd.h, and after declaring, for a tile
// or a part of its columns,
//   constexpr int kMostRows, vectors_of(int rows)  rows that share unpacked weights; vectors of columns at once
//   constexpr int number_bytes(int num_bits)       of a number of x
//   dot<kBits>(vi (&sums)[rows][vectors], const int8_t* x, const uint8_t* weights, int64_t steps)
// which sets sums[r][v] to the sum over all inputs of the steps of numbers of row r times values as they are packed.
#pragma once

#include <algorithm>
#include <utility>

#include "cpu/quantized/block.h"

namespace hydra::HYDRA_LEVEL {

template <int kBits, class Scale, int kRows>
HYDRA_TARGET void multiply_block(const Block& given) {
  const Block block = given;  // a copy that no store of sums can change
  constexpr int kVectors = vectors_of(kRows);
  const int8_t* x = block.x;
  const uint8_t* weights = block.weights;
  for (int64_t group = 0; group < block.groups; ++group, weights += block.group_bytes) {
    const Scale* scales = reinterpret_cast<const Scale*>(weights + 2 * block.steps * kStepBytes);
    for (int column = 0; column < kPanel; column += kVectors * kLanes) {
      const uint8_t* tile = weights + column / kTile * block.steps * kStepBytes + column % kTile * 4;
      vi dots[kRows][kVectors];
      dot<kBits>(dots, x, tile, block.steps);
#pragma GCC unroll 16
      for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; ++v) {
          const int here = column + v * kLanes;
          vi total = dots[r][v];
          vi* partial = reinterpret_cast<vi*>(block.partial + r * kPanel + here);
          if (!block.first) total += *partial;
          if (block.last) {
            add_group(block, scales, group, r, here, total);
          } else {
            *partial = total;
          }
        }
      }
    }
    x += block.steps * (32 / kBits) * number_bytes(kBits);
  }
}

using MultiplyBlock = void (*)(const Block&);

template <int kBits, class Scale, int... kRow>
MultiplyBlock block_product(int rows, std::integer_sequence<int, kRow...>) {
  constexpr MultiplyBlock kProducts[] = {multiply_block<kBits, Scale, kRow + 1>...};
  return kProducts[rows - 1];
}

// One block times `rows` rows from its own on.
template <int kBits, class Scale>
void multiply_rows(Block block, int64_t rows) {
  constexpr int64_t kStride = block_stride(kBits, number_bytes(kBits));
  for (int64_t done = 0; done < rows; done += kMostRows) {
    const int some = static_cast<int>(std::min<int64_t>(kMostRows, rows - done));
    block_product<kBits, Scale>(some, std::make_integer_sequence<int, kMostRows>())(block);
    block.x += some * kStride;
    block.x_steps += some * block.all_groups;
    block.zeros += some * block.all_groups;
    block.row_sums += some * block.all_groups;
    block.sums += some * kPanel;
    block.partial += some * kPanel;
  }
}

}  // namespace hydra::HYDRA_LEVEL
