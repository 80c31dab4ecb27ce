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

// Up to this many rows a product is as fast as its weights are read, and memory is read fastest in the order of its
// addresses: the prefetchers of AMD's processors lose a pattern that alternates between two tiles. More rows take both
// tiles of a block at once, which loads each value of x only once.
constexpr int kMaxOrderedRows = 8;

// Adds pairs [begin, begin + count) of kRows rows times the tiles [kFirst, kLast) of a block.
template <int kRows, int kFirst, int kLast>
HYDRA_INLINE void dot_block(__m512 (&acc)[kRows][2], const bf16_t* x, int64_t x_stride, const bf16_t* block,
                            int64_t count) {
// Unrolled, GCC tests the count after each pair, which costs three rows a third of their speed.
#pragma GCC unroll 1
  for (int64_t pair = 0; pair < count; ++pair) {
    __m512i w[2];
#pragma GCC unroll 2
    for (int tile = kFirst; tile < kLast; ++tile) {
      w[tile] = _mm512_load_si512(block + tile * kTileElements + pair * kPanel);
    }
#pragma GCC unroll 12
    for (int row = 0; row < kRows; ++row) {
      int32_t bits;
      std::memcpy(&bits, x + row * x_stride + pair * 2, 4);
      const __m512i value = _mm512_set1_epi32(bits);
#pragma GCC unroll 2
      for (int tile = kFirst; tile < kLast; ++tile) {
        acc[row][tile] = _mm512_dpbf16_ps(acc[row][tile], (__m512bh)value, (__m512bh)w[tile]);
      }
    }
  }
}

// Pairs [0, num_pairs) of kRows rows times a panel. `sums` is read and written: [kRows][32].
template <int kRows>
HYDRA_TARGET void dot_pairs(const bf16_t* x, int64_t x_stride, const bf16_t* panel, int64_t num_pairs, float* sums) {
  __m512 acc[kRows][2];
#pragma GCC unroll 12
  for (int row = 0; row < kRows; ++row) {
    acc[row][0] = _mm512_load_ps(sums + row * kPanel);
    acc[row][1] = _mm512_load_ps(sums + row * kPanel + kTile);
  }
  for (; num_pairs > 0; num_pairs -= kTile, panel += kPanel * kPanel, x += kPanel) {
    const int64_t count = std::min<int64_t>(kTile, num_pairs);
    if constexpr (kRows <= kMaxOrderedRows) {
      dot_block<kRows, 0, 1>(acc, x, x_stride, panel, count);
      dot_block<kRows, 1, 2>(acc, x, x_stride, panel, count);
    } else {
      dot_block<kRows, 0, 2>(acc, x, x_stride, panel, count);
    }
  }
#pragma GCC unroll 12
  for (int row = 0; row < kRows; ++row) {
    _mm512_store_ps(sums + row * kPanel, acc[row][0]);
    _mm512_store_ps(sums + row * kPanel + kTile, acc[row][1]);
  }
}

using DotPairs = void (*)(const bf16_t*, int64_t, const bf16_t*, int64_t, float*);

constexpr DotPairs kDotPairs[kMaxRows] = {dot_pairs<1>, dot_pairs<2>, dot_pairs<3>,  dot_pairs<4>,
                                          dot_pairs<5>, dot_pairs<6>, dot_pairs<7>,  dot_pairs<8>,
                                          dot_pairs<9>, dot_pairs<10>, dot_pairs<11>, dot_pairs<12>};

// The last odd k of up to kMaxRows rows as pairs with zero.
HYDRA_TARGET void dot_odd(int rows, const bf16_t* x, int64_t x_stride, const bf16_t* panel, int64_t num_in,
                          float* sums) {
  bf16_t pairs[kMaxRows * 2];
  for (int row = 0; row < rows; ++row) {
    pairs[row * 2] = x[row * x_stride + num_in - 1];
    pairs[row * 2 + 1] = {0};
  }
  const int64_t pair = num_in / 2;
  kDotPairs[rows - 1](pairs, 2, panel + pair / kTile * kPanel * kPanel + pair % kTile * kPanel, 1, sums);
}

// Products of `rows` rows with a panel, in one pass over its memory: groups of rows follow each other over a piece of it
// that stays in the first-level cache.
HYDRA_TARGET void dot_few(int rows, const bf16_t* x, int64_t x_stride, const bf16_t* panel, int64_t num_in,
                               float* sums) {
  constexpr int64_t kPairs = 4 * kTile;  // of a piece of 8 KiB
  std::memset(sums, 0, static_cast<size_t>(rows) * kPanel * 4);
  for (int64_t pair = 0; pair < num_in / 2; pair += kPairs) {
    const int64_t count = std::min<int64_t>(kPairs, num_in / 2 - pair);
    for (int row = 0; row < rows; row += kMaxOrderedRows) {
      const int group = std::min(kMaxOrderedRows, rows - row);
      kDotPairs[group - 1](x + row * x_stride + pair * 2, x_stride, panel + pair * 2 * kPanel, count,
                           sums + row * kPanel);
    }
  }
  for (int row = 0; row < rows && num_in % 2; row += kMaxOrderedRows) {
    const int group = std::min(kMaxOrderedRows, rows - row);
    dot_odd(group, x + row * x_stride, x_stride, panel, num_in, sums + row * kPanel);
  }
}

}  // namespace

HYDRA_TARGET void linear_part_bf16(const LinearCall& call, const LinearPart& part) {
  alignas(64) float sums[kFewRows * kPanel];
  const int64_t num_in = call.weight.num_in;
  const bool few = part.row_end - part.row_begin <= kFewRows;
  for (int64_t panel = part.panel_begin; panel < part.panel_end; ++panel) {
    const bf16_t* weights = static_cast<const bf16_t*>(call.weight.data) + panel * call.weight.panel_elements();
    // Of many rows the first read the panel from memory, in order, and the others find it in the cache.
    int64_t most = few ? kFewRows : kMaxOrderedRows;
    for (int64_t row = part.row_begin; row < part.row_end; row += most, most = kMaxRows) {
      const int rows = static_cast<int>(std::min<int64_t>(most, part.row_end - row));
      const bf16_t* x = static_cast<const bf16_t*>(call.x) + row * call.x_stride;
      if (few) {
        dot_few(rows, x, call.x_stride, weights, num_in, sums);
      } else {
        std::memset(sums, 0, static_cast<size_t>(rows) * kPanel * 4);
        kDotPairs[rows - 1](x, call.x_stride, weights, num_in / 2, sums);
        if (num_in % 2) dot_odd(rows, x, call.x_stride, weights, num_in, sums);
      }
      finish_block(call, sums, kPanel, row, rows, panel);
    }
  }
}

}  // namespace hydra::avx512bf16
#endif
