// bf16 products on AMX tiles. A tile of x holds up to 16 rows x 32 k, a tile of weights 32 k x 16 columns, and the
// instruction adds their product to a 16 x 16 tile of sums; a row's sums do not depend on the other rows of its tile.
// Sums that leave the tiles between two blocks of k are stored and loaded as the float32 they are, so how k is cut
// changes no bit.
#include "cpu/isa.h"

#if HYDRA_X86
#define HYDRA_LEVEL amx
#define HYDRA_LANES 16
#define HYDRA_TARGET HYDRA_TARGET_AMX
#define HYDRA_BF16
#include <algorithm>

#include "cpu/linear/epilogue.h"
#include "cpu/scratch.h"

namespace hydra::amx {
namespace {

constexpr int kBlock = kPanel * kPanel;  // elements of one k block: of a panel's weights, or of 32 packed rows of x
constexpr int kRowBlock = 2 * kTile;

// Measured on Sapphire Rapids (48 KiB and 2 MiB of cache per core): k blocks of 32 rows that stay in the first-level
// cache while weights stream past, panels whose weights stay in the second-level cache, and how many k blocks of all
// rows do so too. Rows with more are cut into inner blocks outside the loop over the rows.
constexpr int64_t kInnerBlocks = 16;
constexpr int64_t kMostBlocks = 40;
constexpr int64_t kPanelsPerChunk = 8;
// Fewer columns do not repay a copy of x in tile order.
constexpr int64_t kMinPackedPanels = 16;

struct alignas(64) TileConfig {
  uint8_t palette = 1;
  uint8_t start_row = 0;
  uint8_t reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};
};

// Tiles 0-3 hold sums, 4 and 5 rows of x, 6 and 7 weights. With two row tiles (0, 1, 4) have 16 rows, (2, 3, 5) the
// rest; with one row tile all of 0-5 have `rows` rows.
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

HYDRA_INLINE void zero_sums() {
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
}

// sums: [2 row tiles][16][2 column tiles][16], that is [32][32] for two row tiles x one panel.
template <bool kTwoRowTiles>
HYDRA_INLINE void load_sums(const float* sums) {
  _tile_loadd(0, sums, kPanel * 4);
  _tile_loadd(1, sums + kTile, kPanel * 4);
  if constexpr (kTwoRowTiles) {
    _tile_loadd(2, sums + kTile * kPanel, kPanel * 4);
    _tile_loadd(3, sums + kTile * kPanel + kTile, kPanel * 4);
  }
}

template <bool kTwoRowTiles>
HYDRA_INLINE void store_sums(float* sums) {
  _tile_stored(0, sums, kPanel * 4);
  _tile_stored(1, sums + kTile, kPanel * 4);
  if constexpr (kTwoRowTiles) {
    _tile_stored(2, sums + kTile * kPanel, kPanel * 4);
    _tile_stored(3, sums + kTile * kPanel + kTile, kPanel * 4);
  }
}

// Addresses of up to 32 rows of x: element (row, k) of k block b at base + b * block_step + row * row_stride + k.
struct TileRows {
  const bf16_t* base;
  int64_t row_stride, block_step;  // elements
};

// Lines that are needed later, fetched into the second-level cache a few at a time.
struct Prefetch {
  const char* next = nullptr;
  int lines = 0;  // per k block

  HYDRA_INLINE void fetch() {
    for (int line = 0; line < lines; ++line) _mm_prefetch(next + line * 64, _MM_HINT_T1);
    next += lines * 64;
  }
};

// Rows [row, end) of a block whose sums wait for bias, activation and rounding. They are finished a few at a time
// between the tile instructions for the next panel, so that the vector units work while the tiles do.
struct Unfinished {
  const float* sums = nullptr;  // of `row`
  int64_t panel = 0, row = 0, end = 0;

  HYDRA_INLINE void finish(const LinearCall& call, int64_t most) {
    if (row == end) return;
    const int64_t count = std::min(most, end - row);
    finish_block(call, sums, kPanel, row, static_cast<int>(count), panel);
    sums += count * kPanel;
    row += count;
  }
};

// Work interleaved with the products of one panel, a little per k block.
struct Beside {
  Prefetch weights, rows;
  Unfinished before;
  int64_t finish_rows = 0;  // per k block
};

// Adds `blocks` blocks of k for one row block and one panel. The streaming loads keep the rows, which the next panel
// needs again, in the first-level cache, and let the weights pass.
template <bool kTwoRowTiles>
HYDRA_INLINE void add_blocks(const LinearCall& call, const TileRows& rows, const bf16_t* w, int64_t blocks,
                             Beside& beside) {
  const bf16_t* x = rows.base;
  const int64_t stride = rows.row_stride * 2, lower = rows.row_stride * kTile;
  for (int64_t block = 0; block < blocks; ++block) {
    _tile_stream_loadd(6, w, 64);
    _tile_loadd(4, x, stride);
    _tile_dpbf16ps(0, 4, 6);
    _tile_stream_loadd(7, w + kTileElements, 64);
    _tile_dpbf16ps(1, 4, 7);
    if constexpr (kTwoRowTiles) {
      _tile_loadd(5, x + lower, stride);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
    beside.weights.fetch();
    beside.rows.fetch();
    beside.before.finish(call, beside.finish_rows);
    x += rows.block_step;
    w += kBlock;
  }
}

// Adds `blocks` blocks of k for one row tile and two panels, panel_stride elements apart.
HYDRA_INLINE void add_blocks_of_two_panels(const bf16_t* x, int64_t stride_bytes, const bf16_t* w, int64_t panel_stride,
                                           int64_t blocks) {
  for (int64_t block = 0; block < blocks; ++block) {
    _tile_loadd(4, x, stride_bytes);
    _tile_loadd(6, w, 64);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(7, w + kTileElements, 64);
    _tile_dpbf16ps(1, 4, 7);
    _tile_loadd(6, w + panel_stride, 64);
    _tile_dpbf16ps(2, 4, 6);
    _tile_loadd(7, w + panel_stride + kTileElements, 64);
    _tile_dpbf16ps(3, 4, 7);
    x += kPanel;
    w += kBlock;
  }
}

// The last k % 32 of every row, zero-padded, since memory after a row must not be read. Null if there are none.
HYDRA_TARGET const bf16_t* copy_tails(const LinearCall& call, int64_t begin, int64_t end, Scratch& scratch) {
  const int64_t full = call.weight.num_in / kPanel * kPanel, left = call.weight.num_in - full;
  if (left == 0) return nullptr;
  bf16_t* tails = static_cast<bf16_t*>(scratch.reserve((end - begin) * kPanel * 2));
  const bf16_t* x = static_cast<const bf16_t*>(call.x) + begin * call.x_stride + full;
  for (int64_t row = 0; row < end - begin; ++row) {
    std::memset(tails + row * kPanel, 0, kPanel * 2);
    std::memcpy(tails + row * kPanel, x + row * call.x_stride, static_cast<size_t>(left) * 2);
  }
  __asm__ volatile("" ::: "memory");  // tile loads do not tell the compiler that they read memory
  return tails;
}

// Up to 16 rows: bound by the stream of weights. Rows are read where they are, two panels at once hide the latency.
HYDRA_TARGET void multiply_few(const LinearCall& call, const LinearPart& part) {
  static thread_local Scratch scratch;
  alignas(64) float sums[2 * kTile * kPanel];
  const bf16_t* tails = copy_tails(call, part.row_begin, part.row_end, scratch);
  const bf16_t* x = static_cast<const bf16_t*>(call.x) + part.row_begin * call.x_stride;
  const int count = static_cast<int>(part.row_end - part.row_begin);
  const int64_t stride = call.weight.panel_elements(), blocks = call.weight.num_in / kPanel;
  const bf16_t* w = static_cast<const bf16_t*>(call.weight.data) + part.panel_begin * stride;
  configure(count);
  int64_t panel = part.panel_begin;
  for (; panel + 2 <= part.panel_end; panel += 2, w += 2 * stride) {
    zero_sums();
    add_blocks_of_two_panels(x, call.x_stride * 2, w, stride, blocks);
    if (tails) add_blocks_of_two_panels(tails, kPanel * 2, w + blocks * kBlock, stride, 1);
    store_sums<true>(sums);
    finish_block(call, sums, kPanel, part.row_begin, count, panel);
    finish_block(call, sums + kTile * kPanel, kPanel, part.row_begin, count, panel + 1);
  }
  if (panel < part.panel_end) {
    zero_sums();
    Beside nothing;
    add_blocks<false>(call, {x, call.x_stride, kPanel}, w, blocks, nothing);
    if (tails) add_blocks<false>(call, {tails, kPanel, kBlock}, w + blocks * kBlock, 1, nothing);
    store_sums<false>(sums);
    finish_block(call, sums, kPanel, part.row_begin, count, panel);
  }
}

// The next chunk of weights is `distance` bytes after the current one; a row block fetches `lines` cache lines per
// k block, after the `skip` bytes per k block of the row blocks before it, so that all of them together fetch it once.
struct Ahead {
  int64_t distance, skip;
  int lines;
};

// One row block x panels [panel_begin, panel_end) x k blocks [begin, end). sums: one [32][32] per panel, which hold the
// sums of the blocks before `begin`.
template <bool kTwoRowTiles>
HYDRA_TARGET void multiply_row_block(const LinearCall& call, const TileRows& rows, int64_t row, int count,
                                     int64_t panel_begin, int64_t panel_end, int64_t begin, int64_t end, float* sums,
                                     const Ahead& ahead) {
  const int64_t stride = call.weight.panel_elements(), blocks = end - begin;
  const bool first = begin == 0, last = end == stride / kBlock;
  const TileRows x{rows.base + begin * rows.block_step, rows.row_stride, rows.block_step};
  const bf16_t* w = static_cast<const bf16_t*>(call.weight.data) + panel_begin * stride + begin * kBlock;
  Beside beside;
  beside.finish_rows = ceil_div(count, blocks);
  if (call.packed_x) {  // the next row block's piece; after the last one, useless prefetches are harmless
    beside.rows.next = reinterpret_cast<const char*>(x.base + stride);
    beside.rows.lines = static_cast<int>(ceil_div(kBlock * 2 / 64, panel_end - panel_begin));
  }
  for (int64_t panel = panel_begin; panel < panel_end; ++panel, w += stride) {
    // Sums that need not be kept alternate between two places, which stay in the first-level cache.
    const int64_t place = first && last ? panel % 2 : panel - panel_begin;
    float* panel_sums = sums + place * kBlock;
    if (first) {
      zero_sums();
    } else {
      load_sums<kTwoRowTiles>(panel_sums);
    }
    beside.weights = {reinterpret_cast<const char*>(w) + ahead.distance + ahead.skip * blocks, ahead.lines};
    add_blocks<kTwoRowTiles>(call, x, w, blocks, beside);
    store_sums<kTwoRowTiles>(panel_sums);
    if (last) beside.before = {panel_sums, panel, row, row + count};
  }
  beside.before.finish(call, count);
}

// `total` cut into equal pieces of at most `most`: the size of a piece.
int64_t even_piece(int64_t total, int64_t most) { return ceil_div(total, ceil_div(total, most)); }

// More than 16 rows: bound by the tiles if the caches are used well. Chunks of panels x outer blocks of k are the
// weights in the second-level cache, a row block x inner block of k the rows in the first-level cache.
HYDRA_TARGET void multiply_many(const LinearCall& call, const LinearPart& part) {
  static thread_local Scratch scratch;
  const int64_t blocks = call.weight.padded_in() / kPanel,
                row_blocks = ceil_div(part.row_end - part.row_begin, kRowBlock);
  const int64_t inner = even_piece(blocks, kInnerBlocks), outer = blocks > kMostBlocks ? inner : blocks;
  const int64_t sums_step = outer < blocks ? kPanelsPerChunk * kBlock : 0;  // kept per row block if k is cut outside
  const int64_t sums_size = (sums_step ? row_blocks : 1) * kPanelsPerChunk * kBlock;
  float* sums = static_cast<float*>(scratch.reserve(sums_size * 4));
  int configured = 0;
  for (int64_t panel = part.panel_begin; panel < part.panel_end; panel += kPanelsPerChunk) {
    const int64_t panel_end = std::min(panel + kPanelsPerChunk, part.panel_end);
    for (int64_t outer_begin = 0; outer_begin < blocks; outer_begin += outer) {
      const int64_t outer_end = std::min(outer_begin + outer, blocks);
      const bool more_k = outer_end < blocks, more = more_k || panel_end < part.panel_end;
      const int64_t distance = more_k ? outer * kBlock : kPanelsPerChunk * blocks * kBlock - outer_begin * kBlock;
      const int lines = more ? static_cast<int>(ceil_div(kBlock * 2 / 64, row_blocks)) : 0;
      for (int64_t index = 0; index < row_blocks; ++index) {
        const int64_t row = part.row_begin + index * kRowBlock;
        const int count = static_cast<int>(std::min<int64_t>(kRowBlock, part.row_end - row));
        if (count != configured) configure(configured = count);
        const TileRows rows =
            call.packed_x ? TileRows{static_cast<const bf16_t*>(call.packed_x) + row / kRowBlock * blocks * kBlock,
                                     kPanel, kBlock}
                          : TileRows{static_cast<const bf16_t*>(call.x) + row * call.x_stride, call.x_stride, kPanel};
        const auto multiply = count > kTile ? multiply_row_block<true> : multiply_row_block<false>;
        for (int64_t begin = outer_begin; begin < outer_end; begin += inner) {
          multiply(call, rows, row, count, panel, panel_end, begin, std::min(begin + inner, outer_end),
                   sums + index * sums_step, {distance * 2, index * lines * 64, lines});
        }
      }
    }
  }
}

}  // namespace

bool wants_packed_rows(const LinearCall& call) {
  if (call.rows <= kTile) return false;
  return call.weight.num_panels() >= kMinPackedPanels || call.weight.num_in % kPanel != 0;
}

int64_t packed_rows_bytes(const LinearCall& call) {
  return ceil_div(call.rows, kRowBlock) * kRowBlock * call.weight.padded_in() * 2;
}

HYDRA_TARGET void pack_rows(const LinearCall& call, int64_t begin, int64_t end, void* packed) {
  const int64_t blocks = call.weight.padded_in() / kPanel, full = call.weight.num_in / kPanel;
  const size_t left = static_cast<size_t>(call.weight.num_in % kPanel) * 2;
  for (int64_t row = begin; row < end; ++row) {
    const bf16_t* x = static_cast<const bf16_t*>(call.x) + row * call.x_stride;
    bf16_t* target = static_cast<bf16_t*>(packed) + row / kRowBlock * blocks * kBlock + row % kRowBlock * kPanel;
    for (int64_t block = 0; block < full; ++block) {
      _mm512_store_si512(target + block * kBlock, _mm512_loadu_si512(x + block * kPanel));
    }
    if (left) {
      _mm512_store_si512(target + full * kBlock, _mm512_setzero_si512());
      std::memcpy(target + full * kBlock, x + full * kPanel, left);
    }
  }
  __asm__ volatile("" ::: "memory");  // as in copy_tails
}

HYDRA_TARGET void linear_part_bf16(const LinearCall& call, const LinearPart& part) {
  if (part.row_end - part.row_begin <= kTile && !call.packed_x) {
    multiply_few(call, part);
  } else {
    multiply_many(call, part);
  }
  _tile_release();
}

}  // namespace hydra::amx
#endif
