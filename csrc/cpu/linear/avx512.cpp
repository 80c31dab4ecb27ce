// Products for processors with AVX-512 and its BF16 instructions: bf16 by vdpbf16ps over pairs of k, the rest by FMA.
#include "cpu/isa.h"

#if HYDRA_X86
#define HYDRA_LEVEL avx512
#define HYDRA_LANES 16
#define HYDRA_TARGET HYDRA_TARGET_AVX512BF16
#include "cpu/linear/fma.h"

namespace hydra::avx512 {
namespace {

// Pairs [0, num_pairs) of kRows rows times kPanels panels that lie panel_stride elements apart. `sums` is read and
// written: [kRows][kPanels][32].
template <int kRows, int kPanels>
HYDRA_TARGET void dot_pairs(const bf16_t* x, int64_t x_stride, const bf16_t* panel, int64_t panel_stride,
                            int64_t num_pairs, float* sums) {
  __m512 acc[kRows][kPanels * 2];
#pragma GCC unroll 12
  for (int row = 0; row < kRows; ++row) {
#pragma GCC unroll 8
    for (int v = 0; v < kPanels * 2; ++v) acc[row][v] = _mm512_load_ps(sums + (row * kPanels * 2 + v) * kTile);
  }
  for (int64_t begin = 0; begin < num_pairs; begin += kTile, panel += kPanel * kPanel) {
    const int64_t count = std::min<int64_t>(kTile, num_pairs - begin);
    for (int64_t pair = 0; pair < count; ++pair) {
      __m512i w[kPanels * 2];
#pragma GCC unroll 8
      for (int v = 0; v < kPanels * 2; ++v) {
        w[v] = _mm512_load_si512(panel + v / 2 * panel_stride + v % 2 * kTileElements + pair * kPanel);
      }
#pragma GCC unroll 12
      for (int row = 0; row < kRows; ++row) {
        int32_t bits;
        std::memcpy(&bits, x + row * x_stride + (begin + pair) * 2, 4);
        const __m512i value = _mm512_set1_epi32(bits);
#pragma GCC unroll 8
        for (int v = 0; v < kPanels * 2; ++v) {
          acc[row][v] = _mm512_dpbf16_ps(acc[row][v], (__m512bh)value, (__m512bh)w[v]);
        }
      }
    }
  }
#pragma GCC unroll 12
  for (int row = 0; row < kRows; ++row) {
#pragma GCC unroll 8
    for (int v = 0; v < kPanels * 2; ++v) _mm512_store_ps(sums + (row * kPanels * 2 + v) * kTile, acc[row][v]);
  }
}

using DotPairs = void (*)(const bf16_t*, int64_t, const bf16_t*, int64_t, int64_t, float*);

constexpr DotPairs kOnePanel[kMaxRows] = {dot_pairs<1, 1>, dot_pairs<2, 1>,  dot_pairs<3, 1>,  dot_pairs<4, 1>,
                                          dot_pairs<5, 1>, dot_pairs<6, 1>,  dot_pairs<7, 1>,  dot_pairs<8, 1>,
                                          dot_pairs<9, 1>, dot_pairs<10, 1>, dot_pairs<11, 1>, dot_pairs<12, 1>};
// Few rows: two panels at once hide the latency of the sums.
constexpr int kMaxWideRows = 4;
constexpr DotPairs kTwoPanels[kMaxWideRows] = {dot_pairs<1, 2>, dot_pairs<2, 2>, dot_pairs<3, 2>, dot_pairs<4, 2>};

// The last odd k of up to kMaxRows rows as pairs with zero.
HYDRA_TARGET void dot_odd(int rows, const bf16_t* x, int64_t x_stride, const bf16_t* panel, int64_t panel_stride,
                          int64_t num_in, int panels, float* sums) {
  bf16_t pairs[kMaxRows * 2];
  for (int row = 0; row < rows; ++row) {
    pairs[row * 2] = x[row * x_stride + num_in - 1];
    pairs[row * 2 + 1] = {0};
  }
  const int64_t pair = num_in / 2;
  const bf16_t* weights = panel + pair / kTile * kPanel * kPanel + pair % kTile * kPanel;
  (panels == 1 ? kOnePanel : kTwoPanels)[rows - 1](pairs, 2, weights, panel_stride, 1, sums);
}

HYDRA_TARGET void multiply_bf16(const LinearCall& call, const LinearPart& part) {
  alignas(64) float sums[kMaxRows * 2 * kPanel];
  const int64_t num_in = call.weight.num_in, stride = call.weight.panel_elements();
  const bool wide = part.row_end - part.row_begin <= kMaxWideRows;
  for (int64_t panel = part.panel_begin; panel < part.panel_end;) {
    const int panels = wide && panel + 2 <= part.panel_end ? 2 : 1;
    const bf16_t* weights = static_cast<const bf16_t*>(call.weight.data) + panel * stride;
    for (int64_t row = part.row_begin; row < part.row_end; row += kMaxRows) {
      const int rows = static_cast<int>(std::min<int64_t>(kMaxRows, part.row_end - row));
      const bf16_t* x = static_cast<const bf16_t*>(call.x) + row * call.x_stride;
      std::memset(sums, 0, static_cast<size_t>(rows) * panels * kPanel * 4);
      (panels == 1 ? kOnePanel : kTwoPanels)[rows - 1](x, call.x_stride, weights, stride, num_in / 2, sums);
      if (num_in % 2) dot_odd(rows, x, call.x_stride, weights, stride, num_in, panels, sums);
      for (int p = 0; p < panels; ++p) finish_block(call, sums + p * kPanel, panels * kPanel, row, rows, panel + p);
    }
    panel += panels;
  }
}

}  // namespace

HYDRA_TARGET void linear_part(const LinearCall& call, const LinearPart& part) {
  if (call.weight.dtype == DType::bf16) return multiply_bf16(call, part);
  if (call.weight.dtype == DType::f32) return multiply_part<float>(call, part);
  multiply_part<f16_t>(call, part);
}

}  // namespace hydra::avx512
#endif
