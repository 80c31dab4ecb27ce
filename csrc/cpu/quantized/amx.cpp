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

// words: [2 tiles][count][16 columns][4 inputs]; partial as in Block.
template <bool kTwoRowTiles>
HYDRA_INLINE void multiply_words(const int8_t* x, int64_t x_stride, const uint8_t* words, int64_t count, int depth,
                                 int32_t* partial, bool first) {
  int32_t* lower = partial + kTile * kPanel;
  if (first) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
  } else {
    _tile_loadd(0, partial, kPanel * 4);
    _tile_loadd(1, partial + kTile, kPanel * 4);
    if constexpr (kTwoRowTiles) {
      _tile_loadd(2, lower, kPanel * 4);
      _tile_loadd(3, lower + kTile, kPanel * 4);
    }
  }
  for (int64_t word = 0; word < count; word += depth) {
    _tile_loadd(4, x + word * 4, x_stride);
    _tile_loadd(6, words + word * kStepBytes, kStepBytes);
    _tile_dpbsud(0, 4, 6);
    _tile_loadd(7, words + (count + word) * kStepBytes, kStepBytes);
    _tile_dpbsud(1, 4, 7);
    if constexpr (kTwoRowTiles) {
      _tile_loadd(5, x + kTile * x_stride + word * 4, x_stride);
      _tile_dpbsud(2, 5, 6);
      _tile_dpbsud(3, 5, 7);
    }
  }
  _tile_stored(0, partial, kPanel * 4);
  _tile_stored(1, partial + kTile, kPanel * 4);
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

// Adds the sums of rows [row, row + some).
template <bool kOffsets, class Scale>
HYDRA_INLINE void add_rows(const Block& all, const Scale* scales, int64_t group, int64_t row, int some, int here) {
  const GroupFactors factors = factors_of<kOffsets>(all, scales, here);
  for (int64_t r = row; r < row + some; ++r) {
    const vi total = *reinterpret_cast<const vi*>(all.partial + r * kPanel + here);
    add_group<kOffsets>(all, factors, group, static_cast<int>(r), here, total);
  }
}

template <int kBits, class Scale>
HYDRA_TARGET void multiply_rows(const Block all, int64_t rows) {
  constexpr int64_t kStride = block_stride(kBits, 1);
  constexpr int64_t kWords = step_inputs(kBits) / 4;
  alignas(64) uint8_t unpacked[kBits == 8 ? 64 : 2 * kWords * piece_steps(kBits) * kStepBytes];
  const int64_t count = all.steps * kWords;
  const int depth = count % 16 == 0 ? 16 : count % 8 == 0 ? 8 : 4;
  const uint8_t* weights = all.weights;
  for (int64_t group = 0; group < all.groups; ++group, weights += all.group_bytes) {
    const Scale* scales = reinterpret_cast<const Scale*>(all.scales + group * all.scales_bytes);
    if constexpr (kBits != 8) unpack_steps<kBits>(weights, 2 * all.steps, unpacked);
    const uint8_t* words = kBits == 8 ? weights : unpacked;
    __asm__ volatile("" ::: "memory");  // tile loads do not tell the compiler that they read memory
    for (int64_t row = 0; row < rows; row += kRowBlock) {
      const int some = static_cast<int>(std::min<int64_t>(kRowBlock, rows - row));
      const int8_t* x = all.x + row * kStride + group * count * 4;
      int32_t* partial = all.partial + row * kPanel;
      if (group == 0 || rows % kRowBlock) configure(some, depth);
      const auto multiply = some > kTile ? multiply_words<true> : multiply_words<false>;
      multiply(x, kStride, words, count, depth, partial, all.first);
      __asm__ volatile("" ::: "memory");  // nor that they write it
      if (!all.last) continue;
      for (int here = 0; here < kPanel; here += kLanes) {
        if (all.offsets_at) {
          add_rows<true>(all, scales, group, row, some, here);
        } else {
          add_rows<false>(all, scales, group, row, some, here);
        }
      }
    }
  }
  _tile_release();
}

}  // namespace
}  // namespace hydra::amx

// Behind what it calls.
#include "cpu/quantized/products.h"
#endif
