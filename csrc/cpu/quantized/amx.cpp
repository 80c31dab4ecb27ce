// Products of bytes on AMX tiles. A tile of x holds up to 16 rows x 64 inputs, a tile of weights 64 inputs x 16 columns;
// groups that 64 inputs do not divide take tiles of 32 or 16. Weights of 4 and 6 bits become bytes once for all rows.
#include "cpu/isa.h"

#if HYDRA_X86
#define HYDRA_LEVEL amx
#define HYDRA_LANES 16
#define HYDRA_TARGET HYDRA_TARGET_AMX
#define HYDRA_BF16
#include <algorithm>

#include "cpu/quantized/block.h"

namespace hydra::amx {
namespace {

constexpr int kRowBlock = 2 * kTile;

constexpr int number_bytes(int) { return 1; }

struct alignas(64) TileConfig {
  uint8_t palette = 1;
  uint8_t start_row = 0;
  uint8_t reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};
};

// Tiles 0-3 hold sums, 4 and 5 rows of x, 6 and 7 weights of `depth` words of inputs: as in linear/amx.cpp.
HYDRA_TARGET void configure(int rows, int depth) {
  TileConfig config;
  const int upper = std::min(rows, kTile), lower = rows > kTile ? rows - kTile : upper;
  const int tile_rows[8] = {upper, upper, lower, lower, upper, lower, depth, depth};
  for (int tile = 0; tile < 8; ++tile) {
    config.row_bytes[tile] = static_cast<uint16_t>(tile == 4 || tile == 5 ? depth * 4 : 64);
    config.rows[tile] = static_cast<uint8_t>(tile_rows[tile]);
  }
  _tile_loadconfig(&config);
}

// words: [2 tiles][all words][16 columns][4 inputs], from the first of `count` on. sums: [rows][32].
template <bool kTwoRowTiles>
HYDRA_INLINE void multiply_words(const int8_t* x, int64_t x_stride, const uint8_t* words, int64_t all_words,
                                 int64_t count, int depth, int32_t* sums) {
  int32_t* lower = sums + kTile * kPanel;
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (int64_t word = 0; word < count; word += depth) {
    _tile_loadd(4, x + word * 4, x_stride);
    _tile_loadd(6, words + word * kStepBytes, kStepBytes);
    _tile_dpbsud(0, 4, 6);
    _tile_loadd(7, words + (all_words + word) * kStepBytes, kStepBytes);
    _tile_dpbsud(1, 4, 7);
    if constexpr (kTwoRowTiles) {
      _tile_loadd(5, x + kTile * x_stride + word * 4, x_stride);
      _tile_dpbsud(2, 5, 6);
      _tile_dpbsud(3, 5, 7);
    }
  }
  _tile_stored(0, sums, kPanel * 4);
  _tile_stored(1, sums + kTile, kPanel * 4);
  if constexpr (kTwoRowTiles) {
    _tile_stored(2, lower, kPanel * 4);
    _tile_stored(3, lower + kTile, kPanel * 4);
  }
}

// Steps as words of bytes.
template <int kBits>
HYDRA_INLINE void unpack_steps(const uint8_t* steps, int64_t count, uint8_t* words) {
  constexpr int kWords = step_inputs(kBits) / 4;
  for (int64_t step = 0; step < count; ++step, steps += step_bytes(kBits), words += kWords * kStepBytes) {
    __m512i values[kWords];
    unpack<kBits>(steps, values);
    for (int i = 0; i < kWords; ++i) _mm512_store_si512(words + i * kStepBytes, values[i]);
  }
}

// Adds the sums of a part of rows [0, some) of the block to their totals, or sets these. low: of the lower bytes, or null.
HYDRA_INLINE void add_part(const Block& block, int64_t at, int some, const int32_t* sums, const int32_t* low,
                           bool is_first) {
  for (int r = 0; r < some; ++r) {
    const vf step = splat(block.x_steps[at + r]);
    for (int here = 0; here < kPanel; here += kLanes) {
      const int64_t place = r * kPanel + here;
      const vi upper = *reinterpret_cast<const vi*>(sums + place) + block.zeros[at + r];
      const vf wide = low ? joined(upper, *reinterpret_cast<const vi*>(low + place) + block.low_zeros[at + r])
                          : __builtin_convertvector(upper, vf);
      store(block.partial + place, fused(wide, step, is_first ? vf{} : load(block.partial + place)));
    }
  }
}

template <bool kOffsets, class Scale>
HYDRA_INLINE void add_totals(const Block& block, const Scale* scales, int64_t group, int some) {
  for (int here = 0; here < kPanel; here += kLanes) {
    const GroupFactors factors = factors_of<kOffsets>(block, scales, here);
    for (int r = 0; r < some; ++r) {
      add_group<kOffsets>(block, factors, group, r, here, load(block.partial + r * kPanel + here));
    }
  }
}

// Words [0, count) of a group, which are its inputs in this block, times up to 32 rows from the block's own on.
template <class Scale>
HYDRA_INLINE void multiply_group(const Block& block, int some, const int8_t* x, int64_t stride, const uint8_t* words,
                                 int64_t count, int depth, const Scale* scales, int64_t group, int64_t at) {
  alignas(64) int32_t sums[kRowBlock * kPanel], low_sums[kRowBlock * kPanel];
  constexpr int64_t kPartWords = kPartInputs / 4;
  const auto multiply = some > kTile ? multiply_words<true> : multiply_words<false>;
  for (int64_t word = 0; word < count; word += kPartWords, at += block.all_rows) {
    const int64_t part = std::min(kPartWords, count - word);
    const bool has_low = std::any_of(block.has_low + at, block.has_low + at + some, [](uint8_t has) { return has; });
    __asm__ volatile("" ::: "memory");  // tile loads do not tell the compiler that they read memory
    multiply(x + word * 4, stride, words + word * kStepBytes, count, part, depth, sums);
    if (has_low) multiply(x + block.low + word * 4, stride, words + word * kStepBytes, count, part, depth, low_sums);
    __asm__ volatile("" ::: "memory");  // nor that they write memory
    add_part(block, at, some, sums, has_low ? low_sums : nullptr, block.first && word == 0);
  }
  if (!block.last) return;
  if (block.offsets_at) {
    add_totals<true>(block, scales, group, some);
  } else {
    add_totals<false>(block, scales, group, some);
  }
}

template <int kBits, class Scale>
HYDRA_TARGET void multiply_rows(const Block all, int64_t rows) {
  constexpr int64_t kStride = block_stride(kBits, 1);
  constexpr int64_t kWords = step_inputs(kBits) / 4;
  alignas(64) uint8_t unpacked[kBits == 8 ? 64 : 2 * kWords * piece_steps(kBits) * kStepBytes];
  const int64_t count = all.steps * kWords, parts = ceil_div(all.steps, part_steps(kBits));
  const int depth = count % 16 == 0 ? 16 : count % 8 == 0 ? 8 : 4;
  const uint8_t* weights = all.weights;
  for (int64_t group = 0; group < all.groups; ++group, weights += all.group_bytes) {
    const Scale* scales = reinterpret_cast<const Scale*>(all.scales + group * all.scales_bytes);
    if constexpr (kBits != 8) unpack_steps<kBits>(weights, 2 * all.steps, unpacked);
    const uint8_t* words = kBits == 8 ? weights : unpacked;
    Block block = all;
    for (int64_t row = 0; row < rows; row += kRowBlock) {
      const int some = static_cast<int>(std::min<int64_t>(kRowBlock, rows - row));
      if (group == 0 || rows % kRowBlock) configure(some, depth);
      multiply_group(block, some, block.x + group * count * 4, kStride, words, count, depth, scales, group,
                     group * parts * all.all_rows);
      block.next_rows(some, kStride);
    }
  }
  _tile_release();
}

}  // namespace
}  // namespace hydra::amx

// Included after the functions that it calls.
#include "cpu/quantized/products.h"
#endif
