// bf16 products for processors with AVX-512's BF16 instructions: vdpbf16ps over pairs of k.
#include "cpu/isa.h"

#if HYDRA_X86
#define HYDRA_LEVEL avx512bf16
#define HYDRA_LANES 16
#define HYDRA_TARGET HYDRA_TARGET_AVX512BF16
#define HYDRA_BF16
#include "cpu/linear/fma.h"

namespace hydra::avx512bf16 {
namespace {

constexpr int kBlock = kPanel * kPanel;  // elements of a panel's weights for 32 k
constexpr int64_t kPieceBlocks = 8;      // of a piece of 16 KiB, which stays in the first-level cache

// How a group of rows fetches its weights. Up to kOrderedRows rows are bound by memory, which is read fastest in the
// order of its addresses, by the hardware prefetchers; those of AMD's processors lose a pattern that alternates between
// two tiles. Larger groups take both tiles at once, which loads each value of x only once, and
// ask for the next piece as they go: a group by itself for `both` lines of a pair, two groups for half of it each.
enum class Fetch { ordered, half, both };
constexpr int kOrderedRows = 8;

// Adds the products of kRows rows, [32 k] each, with the tiles [kFirst, kLast) of a block.
template <int kRows, int kFirst, int kLast, Fetch kFetch>
HYDRA_INLINE void add_tiles(__m512 (&acc)[kRows][2], const bf16_t* x, const bf16_t* block, const char* ahead) {
// Not unrolled: GCC would test the count after each pair, which costs three rows a third of their speed.
#pragma GCC unroll 1
  for (int pair = 0; pair < kTile; ++pair) {
    if (kFetch != Fetch::ordered) __builtin_prefetch(ahead + pair * 64, 0, 2);
    if (kFetch == Fetch::both) __builtin_prefetch(ahead + (kTile + pair) * 64, 0, 2);
    __m512i w[2];
#pragma GCC unroll 2
    for (int tile = kFirst; tile < kLast; ++tile) {
      w[tile] = _mm512_load_si512(block + tile * kTileElements + pair * kPanel);
    }
#pragma GCC unroll 12
    for (int row = 0; row < kRows; ++row) {
      int32_t bits;
      std::memcpy(&bits, x + row * kPanel + pair * 2, 4);
      const __m512i value = _mm512_set1_epi32(bits);
#pragma GCC unroll 2
      for (int tile = kFirst; tile < kLast; ++tile) {
        acc[row][tile] = _mm512_dpbf16_ps(acc[row][tile], (__m512bh)value, (__m512bh)w[tile]);
      }
    }
  }
}

// x: [blocks][kRows][32 k]. Adds to `sums`, [kRows][32]. `ahead` is the first byte to fetch.
template <int kRows, Fetch kFetch>
HYDRA_TARGET void add_blocks(const bf16_t* x, const bf16_t* weights, int64_t blocks, float* sums, const char* ahead) {
  __m512 acc[kRows][2];
#pragma GCC unroll 12
  for (int row = 0; row < kRows; ++row) {
    acc[row][0] = _mm512_load_ps(sums + row * kPanel);
    acc[row][1] = _mm512_load_ps(sums + row * kPanel + kTile);
  }
  for (int64_t block = 0; block < blocks; ++block, x += kRows * kPanel, weights += kBlock) {
    if constexpr (kFetch == Fetch::ordered) {
      add_tiles<kRows, 0, 1, kFetch>(acc, x, weights, ahead);
      add_tiles<kRows, 1, 2, kFetch>(acc, x, weights, ahead);
    } else {
      add_tiles<kRows, 0, 2, kFetch>(acc, x, weights, ahead);
      ahead += kBlock * (kFetch == Fetch::both ? 2 : 1);
    }
  }
#pragma GCC unroll 12
  for (int row = 0; row < kRows; ++row) {
    _mm512_store_ps(sums + row * kPanel, acc[row][0]);
    _mm512_store_ps(sums + row * kPanel + kTile, acc[row][1]);
  }
}

using AddBlocks = void (*)(const bf16_t*, const bf16_t*, int64_t, float*, const char*);

template <Fetch kFetch>
constexpr AddBlocks kAddBlocks[kMaxRows] = {add_blocks<1, kFetch>,  add_blocks<2, kFetch>,  add_blocks<3, kFetch>,
                                            add_blocks<4, kFetch>,  add_blocks<5, kFetch>,  add_blocks<6, kFetch>,
                                            add_blocks<7, kFetch>,  add_blocks<8, kFetch>,  add_blocks<9, kFetch>,
                                            add_blocks<10, kFetch>, add_blocks<11, kFetch>, add_blocks<12, kFetch>};

// Rows of a product, copied in the order in which they are read: [pieces of k][groups of rows][blocks][rows][32 k], k
// padded with zeros. Where they were, rows at a stride of 4096 bytes would compete for one set of the first-level cache.
struct PackedRows {
  const bf16_t* data;
  int rows, groups;
  int64_t blocks;

  int begin(int group) const { return rows * group / groups; }
  int64_t piece_end(int64_t block) const { return std::min(block + kPieceBlocks, blocks); }
};

HYDRA_TARGET PackedRows pack_rows(const bf16_t* x, int64_t x_stride, int rows, int64_t num_in, Scratch& scratch) {
  const int64_t blocks = ceil_div(num_in, kPanel);
  bf16_t* to = static_cast<bf16_t*>(scratch.reserve(rows * blocks * kPanel * 2));
  const PackedRows packed{to, rows, static_cast<int>(ceil_div(rows, kMaxRows)), blocks};
  for (int64_t first = 0; first < blocks; first += kPieceBlocks) {
    for (int group = 0; group < packed.groups; ++group) {
      for (int64_t block = first; block < packed.piece_end(first); ++block) {
        const int64_t bytes = std::min<int64_t>(kPanel, num_in - block * kPanel) * 2;
        for (int row = packed.begin(group); row < packed.begin(group + 1); ++row, to += kPanel) {
          const bf16_t* from = x + row * x_stride + block * kPanel;
          if (bytes == kPanel * 2) {
            std::memcpy(to, from, kPanel * 2);
          } else {
            std::memset(to, 0, kPanel * 2);
            std::memcpy(to, from, static_cast<size_t>(bytes));
          }
        }
      }
    }
  }
  return packed;
}

// Products with a panel in one pass over its memory: the groups of rows follow each other over each piece of it.
HYDRA_TARGET void multiply_panel(const PackedRows& x, const bf16_t* panel, float* sums) {
  std::memset(sums, 0, static_cast<size_t>(x.rows) * kPanel * 4);
  if (x.rows <= kOrderedRows) return kAddBlocks<Fetch::ordered>[x.rows - 1](x.data, panel, x.blocks, sums, nullptr);
  const AddBlocks* add = x.groups == 1 ? kAddBlocks<Fetch::both> : kAddBlocks<Fetch::half>;
  for (int64_t first = 0; first < x.blocks; first += kPieceBlocks) {
    const int64_t count = x.piece_end(first) - first;
    const bf16_t* weights = panel + first * kBlock;
    for (int group = 0; group < x.groups; ++group) {
      const int begin = x.begin(group), rows = x.begin(group + 1) - begin;
      const bf16_t* half = weights + kPieceBlocks * kBlock + group % 2 * (kPieceBlocks * kBlock / 2);
      add[rows - 1](x.data + (first * x.rows + begin * count) * kPanel, weights, count, sums + begin * kPanel,
                    reinterpret_cast<const char*>(half));
    }
  }
}

}  // namespace

HYDRA_TARGET void linear_part_bf16(const LinearCall& call, const LinearPart& part) {
  static thread_local Scratch scratch, sums_scratch;
  // Enough rows to repay reading the weights again, and few enough that a copy of them takes at most 2 MiB.
  const int64_t wanted = (1 << 20) / std::max<int64_t>(call.weight.num_in, 1024);
  const int64_t most = std::max<int64_t>(wanted / kMaxRows, 4) * kMaxRows;
  for (int64_t begin = part.row_begin; begin < part.row_end; begin += most) {
    const int rows = static_cast<int>(std::min(most, part.row_end - begin));
    const bf16_t* x = static_cast<const bf16_t*>(call.x) + begin * call.x_stride;
    const PackedRows packed = pack_rows(x, call.x_stride, rows, call.weight.num_in, scratch);
    float* sums = static_cast<float*>(sums_scratch.reserve(int64_t{rows} * kPanel * 4));
    for (int64_t panel = part.panel_begin; panel < part.panel_end; ++panel) {
      const bf16_t* weights = static_cast<const bf16_t*>(call.weight.data) + panel * call.weight.panel_elements();
      multiply_panel(packed, weights, sums);
      finish_block(call, sums, kPanel, begin, rows, panel);
    }
  }
}

}  // namespace hydra::avx512bf16
#endif
