// bf16 products on AMX tiles. A tile of x holds up to 16 rows x 32 k, a tile of weights 32 k x 16 columns, and the
// instruction adds their product to a 16 x 16 tile of sums; a row's sums do not depend on the other rows of its tile.
#include "cpu/isa.h"

#if HYDRA_X86
#define HYDRA_LEVEL amx
#define HYDRA_LANES 16
#define HYDRA_TARGET HYDRA_TARGET_AMX
#include "cpu/linear/epilogue.h"
#include "cpu/scratch.h"

#include <algorithm>

namespace hydra::amx {
namespace {

struct alignas(64) TileConfig {
  uint8_t palette = 1;
  uint8_t start_row = 0;
  uint8_t reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};
};

// Tiles 0-3 hold sums, 4 and 5 rows of x, 6 and 7 weights. With two row tiles (0, 1, 4) have 16 rows, (2, 3, 5) the
// rest; with one row tile all of 0-4 have `rows` rows.
HYDRA_TARGET void configure(int rows) {
  TileConfig config;
  const int upper = std::min(rows, kTile), lower = rows > kTile ? rows - kTile : upper;
  const int tile_rows[8] = {upper, upper, lower, lower, upper, lower, kTile, kTile};
  for (int tile = 0; tile < 8; ++tile) {
    config.row_bytes[tile] = 64;
    config.rows[tile] = static_cast<uint8_t>(tile_rows[tile]);
  }
  _tile_loadconfig(&config);
}

// Where the rows of one block are, per k block: in x itself, or for the last incomplete k block in a padded copy.
struct Rows {
  const bf16_t* x;
  int64_t stride;      // elements
  const bf16_t* tail;  // [rows][32]
};

HYDRA_INLINE void zero_sums() {
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
}

// Two row tiles x one panel.
HYDRA_INLINE void add_block_2x2(const bf16_t* x, int64_t stride_bytes, const bf16_t* lower, const bf16_t* w) {
  _tile_loadd(6, w, 64);
  _tile_loadd(4, x, stride_bytes);
  _tile_dpbf16ps(0, 4, 6);
  _tile_loadd(7, w + kTileElements, 64);
  _tile_dpbf16ps(1, 4, 7);
  _tile_loadd(5, lower, stride_bytes);
  _tile_dpbf16ps(2, 5, 6);
  _tile_dpbf16ps(3, 5, 7);
}

// One row tile x one panel.
HYDRA_INLINE void add_block_1x2(const bf16_t* x, int64_t stride_bytes, const bf16_t* w) {
  _tile_loadd(4, x, stride_bytes);
  _tile_loadd(6, w, 64);
  _tile_dpbf16ps(0, 4, 6);
  _tile_loadd(7, w + kTileElements, 64);
  _tile_dpbf16ps(1, 4, 7);
}

// One row tile x two panels.
HYDRA_INLINE void add_block_1x4(const bf16_t* x, int64_t stride_bytes, const bf16_t* w, const bf16_t* w2) {
  _tile_loadd(4, x, stride_bytes);
  _tile_loadd(6, w, 64);
  _tile_dpbf16ps(0, 4, 6);
  _tile_loadd(7, w + kTileElements, 64);
  _tile_dpbf16ps(1, 4, 7);
  _tile_loadd(6, w2, 64);
  _tile_dpbf16ps(2, 4, 6);
  _tile_loadd(7, w2 + kTileElements, 64);
  _tile_dpbf16ps(3, 4, 7);
}

constexpr int kBlock = kPanel * kPanel;  // elements of a k block of a panel

// All k of up to 32 rows and one panel into sums [32][32].
template <bool kTwoRowTiles>
HYDRA_TARGET void multiply_panel(const Rows& rows, const bf16_t* w, int64_t full_blocks, float* sums) {
  zero_sums();
  const bf16_t* x = rows.x;
  const bf16_t* lower = rows.x + kTile * rows.stride;
  for (int64_t block = 0; block < full_blocks; ++block) {
    if constexpr (kTwoRowTiles) {
      add_block_2x2(x, rows.stride * 2, lower, w);
    } else {
      add_block_1x2(x, rows.stride * 2, w);
    }
    x += kPanel;
    lower += kPanel;
    w += kBlock;
  }
  if (rows.tail) {
    if constexpr (kTwoRowTiles) {
      add_block_2x2(rows.tail, 64, rows.tail + kTile * kPanel, w);
    } else {
      add_block_1x2(rows.tail, 64, w);
    }
  }
  _tile_stored(0, sums, kPanel * 4);
  _tile_stored(1, sums + kTile, kPanel * 4);
  if constexpr (kTwoRowTiles) {
    _tile_stored(2, sums + kTile * kPanel, kPanel * 4);
    _tile_stored(3, sums + kTile * kPanel + kTile, kPanel * 4);
  }
}

// All k of up to 16 rows and two panels into sums [2][16][32].
HYDRA_TARGET void multiply_two_panels(const Rows& rows, const bf16_t* w, int64_t panel_stride, int64_t full_blocks,
                                      float* sums) {
  zero_sums();
  const bf16_t* x = rows.x;
  for (int64_t block = 0; block < full_blocks; ++block) {
    add_block_1x4(x, rows.stride * 2, w, w + panel_stride);
    x += kPanel;
    w += kBlock;
  }
  if (rows.tail) add_block_1x4(rows.tail, 64, w, w + panel_stride);
  _tile_stored(0, sums, kPanel * 4);
  _tile_stored(1, sums + kTile, kPanel * 4);
  _tile_stored(2, sums + kTile * kPanel, kPanel * 4);
  _tile_stored(3, sums + kTile * kPanel + kTile, kPanel * 4);
}

// The last k % 32 of every row, padded with zeros: what lies behind a row must not be read.
HYDRA_TARGET const bf16_t* copy_tails(const LinearCall& call, int64_t begin, int64_t end, Scratch& scratch) {
  const int64_t full = call.weight.num_in / kPanel * kPanel, left = call.weight.num_in - full;
  if (left == 0) return nullptr;
  bf16_t* tails = static_cast<bf16_t*>(scratch.reserve((end - begin) * kPanel * 2));
  const bf16_t* x = static_cast<const bf16_t*>(call.x) + begin * call.x_stride + full;
  for (int64_t row = 0; row < end - begin; ++row) {
    std::memset(tails + row * kPanel, 0, kPanel * 2);
    std::memcpy(tails + row * kPanel, x + row * call.x_stride, static_cast<size_t>(left) * 2);
  }
  __asm__ volatile("" ::: "memory");  // the tile loads below do not tell the compiler that they read memory
  return tails;
}

HYDRA_TARGET void multiply_few(const LinearCall& call, const LinearPart& part, const Rows& rows, float* sums) {
  const int count = static_cast<int>(part.row_end - part.row_begin);
  const int64_t stride = call.weight.panel_elements(), full_blocks = call.weight.num_in / kPanel;
  configure(count);
  int64_t panel = part.panel_begin;
  const bf16_t* w = static_cast<const bf16_t*>(call.weight.data) + panel * stride;
  for (; panel + 2 <= part.panel_end; panel += 2, w += 2 * stride) {
    multiply_two_panels(rows, w, stride, full_blocks, sums);
    finish_block(call, sums, kPanel, part.row_begin, count, panel);
    finish_block(call, sums + kTile * kPanel, kPanel, part.row_begin, count, panel + 1);
  }
  if (panel < part.panel_end) {
    multiply_panel<false>(rows, w, full_blocks, sums);
    finish_block(call, sums, kPanel, part.row_begin, count, panel);
  }
}

HYDRA_TARGET void multiply_many(const LinearCall& call, const LinearPart& part, const Rows& rows, float* sums) {
  const int64_t stride = call.weight.panel_elements(), full_blocks = call.weight.num_in / kPanel;
  int configured = 0;
  for (int64_t panel = part.panel_begin; panel < part.panel_end; ++panel) {
    const bf16_t* w = static_cast<const bf16_t*>(call.weight.data) + panel * stride;
    for (int64_t row = part.row_begin; row < part.row_end; row += 2 * kTile) {
      const int count = static_cast<int>(std::min<int64_t>(2 * kTile, part.row_end - row));
      if (count != configured) configure(configured = count);
      const int64_t offset = row - part.row_begin;
      const Rows block{rows.x + offset * rows.stride, rows.stride, rows.tail ? rows.tail + offset * kPanel : nullptr};
      if (count > kTile) {
        multiply_panel<true>(block, w, full_blocks, sums);
      } else {
        multiply_panel<false>(block, w, full_blocks, sums);
      }
      finish_block(call, sums, kPanel, row, count, panel);
    }
  }
}

}  // namespace

HYDRA_TARGET void linear_part_bf16(const LinearCall& call, const LinearPart& part) {
  static thread_local Scratch scratch;
  alignas(64) float sums[2 * kTile * kPanel];
  const Rows rows{static_cast<const bf16_t*>(call.x) + part.row_begin * call.x_stride, call.x_stride,
                  copy_tails(call, part.row_begin, part.row_end, scratch)};
  if (part.row_end - part.row_begin <= kTile) {
    multiply_few(call, part, rows, sums);
  } else {
    multiply_many(call, part, rows, sums);
  }
  _tile_release();
}

}  // namespace hydra::amx
#endif
