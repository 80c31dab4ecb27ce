// The loops of a product: panel by panel, group by group, tile by tile. Include after defining a level, see cpu/simd.h,
// and after declaring, for one tile or a part of its columns,
//   constexpr int kMostRows, vectors_of(int rows)  rows that share unpacked weights; vectors of columns at once
//   constexpr int number_bytes(int num_bits)       of a number of x
//   dot<kBits>(vi (&sums)[rows][vectors], const int8_t* x, const uint8_t* weights, int64_t steps)
// which sets sums[r][v] to the sum over all inputs of the steps of numbers of row r times values as they are packed.
#pragma once

#include <algorithm>

#include "cpu/linear/epilogue.h"
#include "cpu/quantized/quantized.h"

namespace hydra::HYDRA_LEVEL {

constexpr int kRowChunk = 64;  // rows whose sums stay in the first-level cache

// Exactly rounded at every level: the only float32 arithmetic whose order and contraction matter.
HYDRA_INLINE vf fused(vf a, vf b, vf c) {
#if HYDRA_LANES == 16
  return (vf)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif HYDRA_LANES == 8
  return (vf)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
  for (int lane = 0; lane < kLanes; ++lane) c[lane] = __builtin_fmaf(a[lane], b[lane], c[lane]);
  return c;
#endif
}

// A block of weights: whole groups, or one piece of a group; and what belongs to it of some rows, from the first on.
struct Block {
  const uint8_t* weights;
  int64_t steps;        // of a group or of the piece
  int64_t groups;       // 1 for a piece
  int64_t group_bytes;  // from one group to the next
  bool first, last;     // of the pieces of its group
  int64_t offsets_at;   // from a group's scales; 0: there are none
  const int8_t* x;
  const float* x_steps;  // of the first group, [rows][all groups], as the next two
  const int32_t* zeros;
  const float* row_sums;
  int64_t all_groups;
  float* sums;       // [rows][32]
  int32_t* partial;  // [rows][32], sums of the pieces before
};

template <int kBits, class Scale, int kRows>
HYDRA_TARGET void multiply_block(const Block& block) {
  constexpr int kVectors = vectors_of(kRows);
  const int8_t* x = block.x;
  const uint8_t* weights = block.weights;
  for (int64_t group = 0; group < block.groups; ++group, weights += block.group_bytes) {
    const uint8_t* behind = weights + 2 * block.steps * kStepBytes;
    const Scale* scales = reinterpret_cast<const Scale*>(behind);
    for (int column = 0; column < kPanel; column += kVectors * kLanes) {
      const uint8_t* tile = weights + column / kTile * block.steps * kStepBytes + column % kTile * 4;
      vi dots[kRows][kVectors];
      dot<kBits>(dots, x, tile, block.steps);
#pragma GCC unroll 16
      for (int r = 0; r < kRows; ++r) {
        const int64_t at = r * block.all_groups + group;
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; ++v) {
          const int here = column + v * kLanes;
          vi total = dots[r][v];
          vi* partial = reinterpret_cast<vi*>(block.partial + r * kPanel + here);
          if (!block.first) total += *partial;
          if (!block.last) {
            *partial = total;
            continue;
          }
          float* sums = block.sums + r * kPanel + here;
          const vf factors = load(scales + here) * block.x_steps[at];
          vf result = fused(__builtin_convertvector(total + block.zeros[at], vf), factors, load(sums));
          if (block.offsets_at) {
            const float* offsets = reinterpret_cast<const float*>(behind + block.offsets_at);
            result = fused(splat(block.row_sums[at]), load(offsets + here), result);
          }
          store(sums, result);
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

// One panel times rows [row, row + rows) of the call.
template <int kBits, class Scale>
void multiply_panel(const QuantizedCall& call, int64_t row, int64_t rows, int64_t panel, float* sums,
                    int32_t* partial) {
  constexpr int64_t kStride = block_stride(kBits, number_bytes(kBits));
  const PackedQuantized& weight = call.weight;
  const int64_t steps = weight.steps(), per_block = groups_per_block(weight), at = row * weight.groups;
  Block block{static_cast<const uint8_t*>(weight.data) + panel * weight.panel_bytes(),
              steps, per_block, weight.group_bytes(), true, true,
              weight.has_offsets ? weight.scales_bytes() : 0,
              call.rows.numbers + row * kStride,
              call.rows.steps + at, call.rows.zeros + at, call.rows.row_sums + at, weight.groups, sums, partial};
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
    block.x_steps += block.groups;
    block.zeros += block.groups;
    block.row_sums += block.groups;
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
