// A block times rows by sums in vectors. Include after defining a level, see cpu/simd.h, and after declaring, for a tile
// or a part of its columns,
//   constexpr int kMostRows, vectors_of(int rows)  rows that share unpacked weights; vectors of columns at once
//   constexpr int number_bytes(int num_bits)       of a number of x
//   dot<kBits>(vi (&sums)[rows][vectors], const int8_t* x, const uint8_t* weights, int64_t steps, const int32_t* from)
// which sets sums[r][v] to from[r] and the sum over all inputs of a part of numbers of row r times values as packed.
#pragma once

#include <algorithm>
#include <utility>

#include "cpu/quantized/block.h"

namespace hydra::HYDRA_LEVEL {

// The number of rows that have lower bytes in a part, or in a block.
inline int count_low(const uint8_t* flags, int rows) { return static_cast<int>(std::count(flags, flags + rows, 1)); }

// Sums of the lower bytes of one row.
template <int kBits, int kVectors>
__attribute__((noinline)) HYDRA_TARGET void dot_row(vi (&sums)[1][kVectors], const int8_t* x, const uint8_t* tile,
                                                    int64_t steps, const int32_t* from) {
  dot<kBits>(sums, x, tile, steps, from);
}

// Sets low[r] to the sums of the lower bytes of all rows: in one go if most have such, else row by row.
template <int kBits, int kRows, int kVectors>
HYDRA_INLINE void dot_low(vi (&low)[kRows][kVectors], const Block& block, const int8_t* x, const uint8_t* tile,
                          int64_t steps, int64_t at, int count) {
  constexpr int64_t kStride = block_stride(kBits, 1);
  if (2 * count >= kRows) return dot<kBits>(low, x, tile, steps, block.low_zeros + at);
  for (int r = 0; r < kRows; ++r) {
    vi sums[1][kVectors] = {};
    if (block.has_low[at + r]) dot_row<kBits>(sums, x + r * kStride, tile, steps, block.low_zeros + at + r);
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) low[r][v] = sums[0][v];
  }
}

// True if parts of so many steps are whole groups.
constexpr bool is_only(int num_bits, int steps) { return steps > 0 && steps < part_steps(num_bits); }

// Adds the sums of a group, times its scales, to the results of its rows, from column `column` on.
template <bool kOffsets, class Scale, int kRows, int kVectors>
HYDRA_INLINE void add_groups(const Block& block, const Scale* scales, int64_t group, int column,
                             const vf (&totals)[kRows][kVectors]) {
#pragma GCC unroll 4
  for (int v = 0; v < kVectors; ++v) {
    const int here = column + v * kLanes;
    const GroupFactors factors = factors_of<kOffsets>(block, scales, here);
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) add_group<kOffsets>(block, factors, group, r, here, totals[r][v]);
  }
}

// Adds the sums of `steps` steps of a tile, one part of a group, to the totals. `at`: index of the part in the block's
// arrays.
template <int kBits, int kSteps, bool kLow, int kRows, int kVectors>
HYDRA_INLINE void add_part(const Block& block, const int8_t* x, const uint8_t* tile, int64_t steps, int64_t at,
                           vf (&totals)[kRows][kVectors]) {
  vi dots[kRows][kVectors];
  dot<kBits>(dots, x, tile, steps, block.zeros + at);
  const int count = kLow ? count_low(block.has_low + at, kRows) : 0;
  if (count > 0) {
    vi low[kRows][kVectors];
    dot_low<kBits>(low, block, x + block.low, tile, steps, at, count);
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) {
        totals[r][v] = fused(joined(dots[r][v], low[r][v]), splat(block.x_steps[at + r]), totals[r][v]);
      }
    }
    return;
  }
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) {
      const vf sum = __builtin_convertvector(dots[r][v], vf), step = splat(block.x_steps[at + r]);
      totals[r][v] = is_only(kBits, kSteps) ? sum * step : fused(sum, step, totals[r][v]);
    }
  }
}

// `kSteps`: of all parts; 0: any number. `kLow`: whether rows have lower bytes.
template <int kBits, class Scale, int kSteps, bool kLow, int kRows>
HYDRA_TARGET void multiply_block(const Block& given) {
  Block block = given;  // a copy that no store of sums can change
  constexpr int64_t kPartSteps = part_steps(kBits), kNumbers = step_inputs(kBits) * number_bytes(kBits);
  if constexpr (is_only(kBits, kSteps)) {
    block.steps = kSteps;
    block.first = block.last = true;
  }
  constexpr int kVectors = vectors_of(kRows);
  const int8_t* x = block.x;
  const uint8_t* weights = block.weights;
  const uint8_t* scales_at = block.scales;
  const int64_t parts = ceil_div(block.steps, kPartSteps);
  for (int64_t group = 0; group < block.groups; ++group, weights += block.group_bytes) {
    const Scale* scales = reinterpret_cast<const Scale*>(scales_at);
    for (int column = 0; column < kPanel; column += kVectors * kLanes) {
      const uint8_t* tile = weights + column / kTile * block.steps * step_bytes(kBits) + column % kTile * 4;
      vf totals[kRows][kVectors] = {};
      float* partial = block.partial + column;
      if (!block.first) {
#pragma GCC unroll 16
        for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
          for (int v = 0; v < kVectors; ++v) totals[r][v] = load(partial + r * kPanel + v * kLanes);
        }
      }
      int64_t at = group * parts * block.all_rows;
      for (int64_t step = 0; step < block.steps; step += kPartSteps, at += block.all_rows) {
        const int64_t steps = kSteps > 0 ? kSteps : std::min(kPartSteps, block.steps - step);
        add_part<kBits, kSteps, kLow>(block, x + step * kNumbers, tile + step * step_bytes(kBits), steps, at, totals);
      }
      if (!block.last) {
#pragma GCC unroll 16
        for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
          for (int v = 0; v < kVectors; ++v) store(partial + r * kPanel + v * kLanes, totals[r][v]);
        }
        continue;
      }
      if (block.offsets_at) {
        add_groups<true>(block, scales, group, column, totals);
      } else {
        add_groups<false>(block, scales, group, column, totals);
      }
    }
    x += block.steps * kNumbers;
    scales_at += block.scales_bytes;
  }
}

using MultiplyBlock = void (*)(const Block&);

template <int kBits, class Scale, int kSteps, bool kLow, int... kRow>
MultiplyBlock block_product(int rows, std::integer_sequence<int, kRow...>) {
  constexpr MultiplyBlock kProducts[] = {multiply_block<kBits, Scale, kSteps, kLow, kRow + 1>...};
  return kProducts[rows - 1];
}

// Groups of whole parts, of 32 inputs in 4 bits and of 16 in 6, of which most files are, have products of their own.
template <int kBits, class Scale, bool kLow>
MultiplyBlock block_product(const Block& block, int rows) {
  constexpr auto kRows = std::make_integer_sequence<int, kMostRows>();
  constexpr int kPartSteps = part_steps(kBits), kFew = kBits == 4 ? 4 : 1;
  if (block.steps % kPartSteps == 0) return block_product<kBits, Scale, kPartSteps, kLow>(rows, kRows);
  if (kBits != 8 && block.steps == kFew && block.first && block.last) {
    return block_product<kBits, Scale, kBits == 8 ? 0 : kFew, kLow>(rows, kRows);
  }
  return block_product<kBits, Scale, 0, kLow>(rows, kRows);
}

// One block times `rows` rows from its own on.
template <int kBits, class Scale>
void multiply_rows(Block block, int64_t rows) {
  constexpr int64_t kStride = block_stride(kBits, number_bytes(kBits));
  for (int64_t done = 0; done < rows; done += kMostRows) {
    const int some = static_cast<int>(std::min<int64_t>(kMostRows, rows - done));
    constexpr bool kLow = number_bytes(kBits) == 1;
    const bool has_low = kLow && count_low(block.any_low, some) > 0;
    (has_low ? block_product<kBits, Scale, kLow>(block, some) : block_product<kBits, Scale, false>(block, some))(block);
    block.next_rows(some, kStride);
  }
}

}  // namespace hydra::HYDRA_LEVEL
